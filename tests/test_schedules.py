"""Schedules: inverse, rate, precision near zero, and errors."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cedd import Cosine, Geometric, LogLinear, Polynomial, Schedule
from cedd.schedules import SCHEDULES, check_time, check_times, double, schedule_from_config

EPS = st.floats(1e-6, 0.5)
SCHEDULE = st.one_of(
    st.builds(LogLinear, EPS),
    st.builds(Polynomial, st.floats(0.3, 4.0), EPS),
    st.builds(Cosine, EPS),
    st.builds(Geometric, st.floats(1e-5, 0.5), st.floats(1.0, 20.0)),
)
TIME = st.floats(0.0, 1.0)


@given(SCHEDULE, st.floats(1e-6, 1.0))
def test_inverse_recovers_sigma(schedule: Schedule, t: float) -> None:
    sigma = schedule.sigma(t)
    # Compared in sigma, because t is not determined where sigma is constant.
    assert float(schedule.sigma(schedule.inverse(sigma))) == pytest.approx(float(sigma), rel=1e-9)


@given(SCHEDULE, st.floats(1e-3, 0.999))
def test_rate_is_derivative_of_sigma(schedule: Schedule, t: float) -> None:
    point = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.sigma(point), point)
    assert float(schedule.rate(t)) == pytest.approx(float(slope), rel=1e-10)


@given(SCHEDULE, TIME, TIME)
def test_sigma_is_nondecreasing(schedule: Schedule, s: float, t: float) -> None:
    low, high = sorted((s, t))
    assert schedule.sigma(low) <= schedule.sigma(high) * (1 + 1e-15)
    assert schedule.rate(t) >= 0


@given(SCHEDULE)
def test_start_and_end_values(schedule: Schedule) -> None:
    assert schedule.start == float(schedule.sigma(0.0))
    assert schedule.end == float(schedule.sigma(1.0))
    if isinstance(schedule, Geometric):
        assert (schedule.start, schedule.end) == pytest.approx((schedule.sigma_min, schedule.sigma_max))
    elif not isinstance(schedule, Polynomial):
        assert schedule.start == 0.0
        assert math.exp(-schedule.end) == pytest.approx(schedule.eps, rel=1e-9)  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", [LogLinear(), Polynomial(2.0), Cosine(), Geometric(1e-3, 10.0)])
def test_results_are_float64_for_any_input_type(schedule: Schedule) -> None:
    for t in (0.3, 1, torch.tensor(0.3), torch.tensor([0.1, 0.9], dtype=torch.float16)):
        assert schedule.sigma(t).dtype == torch.float64
        assert schedule.rate(t).dtype == torch.float64
        assert schedule.inverse(schedule.sigma(t)).dtype == torch.float64
    assert schedule.sigma(torch.zeros(2, 3)).shape == (2, 3)


def test_python_float_keeps_precision() -> None:
    assert float(double(0.1)) == 0.1
    assert float(double(1e-300)) == 1e-300
    assert float(LogLinear(0.5).sigma(1e-12)) == pytest.approx(0.5e-12, rel=1e-12)
    assert float(Cosine(1e-3).sigma(1e-9)) == pytest.approx(0.999 * math.pi**2 / 8 * 1e-18, rel=1e-9)


@given(SCHEDULE)
def test_schedule_config_round_trips_through_json(schedule: Schedule) -> None:
    assert schedule_from_config(json.loads(json.dumps(schedule.config()))) == schedule


def test_registry_has_every_schedule() -> None:
    assert set(SCHEDULES.values()) == {LogLinear, Polynomial, Cosine, Geometric}


@pytest.mark.parametrize("eps", [0.0, 1e-13, 1.0, -0.1, 2.0, math.nan])
@pytest.mark.parametrize("kind", [LogLinear, Cosine, lambda eps: Polynomial(2.0, eps)])
def test_eps_out_of_range_is_rejected(kind, eps: float) -> None:
    with pytest.raises(ValueError, match="eps must be at least 1e-12 and below 1"):
        kind(eps)


@pytest.mark.parametrize("power", [0.0, -1.0, math.inf, math.nan])
def test_power_must_be_positive(power: float) -> None:
    with pytest.raises(ValueError, match="power must be positive and at most"):
        Polynomial(power)


@pytest.mark.parametrize(
    "ends", [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (0.1, math.inf), (0.1, 701.0), (math.nan, 1.0)]
)
def test_geometric_rejects_invalid_ends(ends: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="0 < sigma_min < sigma_max"):
        Geometric(*ends)


@pytest.mark.parametrize("t", [-1e-9, 1.0 + 1e-9, math.nan, torch.tensor([0.5, 1.5])])
def test_times_outside_unit_interval_are_rejected(t) -> None:
    with pytest.raises(ValueError, match=r"time t must be in \[0, 1\]"):
        check_time(t)


def test_unknown_schedule_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'linear'; did you mean 'log-linear'"):
        schedule_from_config({"name": "linear"})


def test_unregistered_schedule_cannot_be_saved():
    class Mine(LogLinear):
        pass

    with pytest.raises(ValueError, match="Mine cannot be saved"):
        Mine().config()


def test_times_must_match_sequences_or_positions() -> None:
    """One for all, one per sequence, or one per position."""
    x = torch.zeros(2, 3)
    for shape in ((), (2,), (2, 3)):
        assert check_times(torch.ones(shape), x, "x").shape == shape
    for shape in ((3,), (1,), (2, 1), (2, 3, 1)):
        with pytest.raises(
            ValueError, match=rf"one per position: x is \[2, 3\], t is \[{', '.join(map(str, shape))}\]"
        ):
            check_times(torch.ones(shape), x, "x")
