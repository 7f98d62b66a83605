"""The two clocks: closed forms against quadrature, and which shares are rejected, at which time."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor

import cedd
from cedd import Cosine, Geometric, LogLinear, Polynomial, PowerShare, Schedule, eroulette
from cedd.clocks import Clocks, EvolvingShare, Hybrid, Proportional, RunningShare, first_negative, value_and_slope
from cedd.quadrature import adaptive_panels, bisect, integrate
from cedd.schedules import check_time

SCHEDULES = (LogLinear(), LogLinear(0.3), Polynomial(2.0, 0.01), Cosine(0.05))
SCHEDULE = st.sampled_from(SCHEDULES)
SCALE = st.integers(0, 200).map(lambda percent: percent / 100)
SHARE = st.builds(PowerShare, st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.5, 3.0))


def over_time(f, low: float = 0.0, high: float = 1.0) -> float:
    """The integral of f(t) by Gauss quadrature in u = log(t/(1-t)), where both ends are well behaved."""
    start, stop = (math.log(max(t, 1e-17) / max(1 - t, 1e-17)) for t in (low, high))
    nodes, weights = np.polynomial.legendre.leggauss(24)
    edges = np.linspace(start, stop, 121)
    half = np.diff(edges)[:, None] / 2
    u = torch.from_numpy((edges[:-1, None] + half * (1 + nodes)).ravel())
    t = torch.sigmoid(u)
    inside = (t > low) & (t < high)
    values = torch.where(inside, f(t) * t * torch.sigmoid(-u), 0.0)
    return float(values @ torch.from_numpy((half * weights).ravel()))


@given(st.one_of(SCHEDULE, st.just(Geometric(0.05, 6.0))), SCALE, SCALE, st.floats(0.0, 1.0))
def test_both_matches_separate_clocks_and_rates(schedule: Schedule, masking: float, shuffling: float, t: float) -> None:
    clocks = Proportional(schedule, masking, shuffling)
    assert clocks.both(t) == (clocks.alpha(t), clocks.beta(t), clocks.alpha_rate(t), clocks.beta_rate(t))


@settings(max_examples=15, deadline=None)
@given(SCHEDULE, SHARE, st.floats(0.05, 1.0))
def test_running_share_clocks_are_integrals_of_their_rates(schedule: Schedule, share: PowerShare, t: float) -> None:
    clocks = RunningShare(schedule, share)
    assert float(clocks.alpha(t)) == pytest.approx(over_time(clocks.alpha_rate, 0.0, t), abs=1e-9)
    assert float(clocks.beta(t)) == pytest.approx(over_time(clocks.beta_rate, 0.0, t), abs=1e-9)
    total = schedule.sigma(t)
    assert float(clocks.alpha(t) + clocks.beta(t)) == pytest.approx(float(total), rel=1e-12)


@settings(max_examples=6, deadline=None)
@given(SCHEDULE, SHARE)
def test_running_share_integrals_match_quadrature(schedule: Schedule, share: PowerShare) -> None:
    clocks = RunningShare(schedule, share)
    alive = over_time(lambda t: torch.exp(-clocks.alpha(t)) * clocks.beta_rate(t))
    kept = over_time(lambda t: torch.exp(-clocks.alpha(t) - clocks.beta(t)) * clocks.alpha_rate(t))
    assert clocks.shuffling_while_alive() == pytest.approx(alive, abs=1e-10)
    assert clocks.masking_while_kept() == pytest.approx(kept, abs=1e-10)


@given(SCHEDULE, SCALE, SCALE)
@settings(max_examples=15, deadline=None)
def test_proportional_closed_form_integrals_match_quadrature(schedule: Schedule, mask: float, shuffle: float) -> None:
    clocks = Proportional(schedule, mask, shuffle)
    alive = over_time(lambda t: torch.exp(-clocks.alpha(t)) * clocks.beta_rate(t))
    kept = over_time(lambda t: torch.exp(-clocks.alpha(t) - clocks.beta(t)) * clocks.alpha_rate(t))
    assert clocks.shuffling_while_alive() == pytest.approx(alive, abs=1e-10)
    assert clocks.masking_while_kept() == pytest.approx(kept, abs=1e-10)


def test_constant_running_share_matches_proportional_clocks() -> None:
    running, fixed = RunningShare(LogLinear(), lambda t: 0.7), Proportional(LogLinear(), 0.7, 0.3)
    t = torch.tensor([0.0, 1e-9, 0.3, 1.0], dtype=torch.float64)
    for name in ("alpha", "beta", "alpha_rate", "beta_rate"):
        torch.testing.assert_close(getattr(running, name)(t), getattr(fixed, name)(t), rtol=1e-12, atol=1e-15)
    assert running.shuffling_while_alive() == pytest.approx(fixed.shuffling_while_alive(), abs=1e-11)
    assert running.masking_while_kept() == pytest.approx(fixed.masking_while_kept(), abs=1e-11)


@given(st.floats(0.001, 0.999))
@settings(max_examples=12, deadline=None)
@example(1 / 3)  # near the middle of a panel
@example(float(LogLinear().inverse(LogLinear().end / 8 * 1.002)))  # just beyond an edge
def test_discontinuous_share_is_integrated(jump: float) -> None:
    clocks = RunningShare(LogLinear(), lambda t: (t > jump).double())
    before, end = float(LogLinear().sigma(jump)), LogLinear().end
    assert float(clocks.beta(1.0)) == pytest.approx(before, abs=1e-10)
    assert float(clocks.alpha(1.0)) == pytest.approx(end - before, abs=1e-10)


@settings(max_examples=20, deadline=None)
@given(SCHEDULE, st.floats(0.2, 0.5), st.floats(0.5, 0.7), st.floats(0.01, 0.99))
def test_evolving_share_rates_match_finite_differences(schedule: Schedule, a: float, b: float, t: float) -> None:
    try:
        clocks = EvolvingShare(schedule, PowerShare(a, b))
    except ValueError:
        return
    h = 1e-5 * t * (1 - t)
    for clock, rate in ((clocks.alpha, clocks.alpha_rate), (clocks.beta, clocks.beta_rate)):
        assert float((clock(t + h) - clock(t - h)) / (2 * h)) == pytest.approx(float(rate(t)), rel=1e-5, abs=1e-6)


# ---- invalid shares ---------------------------------------------------------------------------------------------


def reported_time(error: BaseException) -> float:
    """The time given in an error message."""
    found = re.search(r"t = ([-+.e\d]+\d)", str(error))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(
    ("share", "slope"),
    [
        (lambda t: t, lambda t: 1.0),
        (lambda t: t**2, lambda t: 2 * t),
        (lambda t: t ** (1 / t), lambda t: t ** (1 / t) * (1 - math.log(t)) / t**2),
        (lambda t: 0.3 + 0.7 * t**3, lambda t: 2.1 * t**2),
    ],
)
def test_first_invalid_time_of_shuffle_clock_is_reported(share, slope) -> None:
    def shuffle_rate(t: float) -> float:
        sigma, rate = float(LogLinear().sigma(t)), float(LogLinear().rate(t))
        return (1 - share(t)) * rate - slope(t) * sigma

    root = brentq(shuffle_rate, 0.2, 0.999, xtol=1e-13)
    with pytest.raises(ValueError, match="the shuffle clock runs backwards: its rate turns negative at t = ") as error:
        eroulette(5, p_m=share)
    assert reported_time(error.value) == pytest.approx(root, abs=1e-6)


def test_first_invalid_time_of_mask_clock_is_reported() -> None:
    # p_m sigma = 0.9 t (1 - t) turns back at one half.
    with pytest.raises(ValueError, match="the mask clock runs backwards") as error:
        eroulette(5, p_m=lambda t: 0.9 * t * (1 - t) / LogLinear().sigma(t).clamp_min(1e-300))
    assert reported_time(error.value) == pytest.approx(0.5, abs=1e-6)


def test_cumulative_share_from_zero_to_one_is_rejected() -> None:
    """(1 - p_m) sigma is 0 at both ends, so it must decrease somewhere, whatever the schedule."""
    for schedule in SCHEDULES:
        for power in (0.2, 1.0, 7.0):
            with pytest.raises(ValueError, match="shuffle clock runs backwards"):
                eroulette(4, p_m=PowerShare(0.0, 1.0, power), schedule=schedule)


@given(st.floats(0.02, 60.0))
@settings(max_examples=12, deadline=None)
def test_share_suggested_by_paper_is_rejected(a: float) -> None:
    with pytest.raises(ValueError, match="shuffle clock runs backwards"):
        eroulette(4, p_m=lambda t: t ** (1 / (a * t)))


@pytest.mark.parametrize(("share", "name"), [(lambda t: 2 * t, "shuffle"), (lambda t: t - 0.5, "mask")])
def test_mask_share_outside_unit_interval_is_rejected_with_its_time(share, name: str) -> None:
    with pytest.raises(ValueError, match=f"the {name} clock runs backwards") as error:
        eroulette(5, mask_share=share)
    assert reported_time(error.value) == pytest.approx(0.5 if name == "shuffle" else 0.0, abs=1e-6)


def test_mask_share_within_unit_interval_is_accepted() -> None:
    for share in (PowerShare(), PowerShare(1.0, 0.0), lambda t: torch.sin(20 * t) ** 2, 0.0, 1.0):
        process = eroulette(5, mask_share=share)
        t = torch.linspace(0, 1, 101, dtype=torch.float64)
        assert bool((process.alpha_rate(t) >= 0).all())
        assert bool((process.beta_rate(t) >= 0).all())


def test_nan_share_is_rejected() -> None:
    with pytest.raises(ValueError, match="runs backwards"):
        eroulette(5, mask_share=lambda t: t * math.nan)


def test_eroulette_requires_schedule_starting_at_zero() -> None:
    for form in ("p_m", "mask_share"):
        with pytest.raises(ValueError, match=r"sigma\(0\) = 0"):
            eroulette(5, schedule=Geometric(0.1, 5.0), **{form: 0.5})


def test_slope_of_function_without_torch_operations_is_rejected() -> None:
    with pytest.raises(ValueError, match="written with torch operations"):
        value_and_slope(lambda t: torch.tensor(t.detach().numpy() ** 2), torch.linspace(0.1, 0.9, 5).double())


def test_first_negative_finds_sign_change_or_none() -> None:
    assert first_negative(lambda t: t) is None
    assert first_negative(lambda t: 0.123456789 - t) == pytest.approx(0.123456789, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-0.1, 1.0), "start"), ((0.0, 1.1), "stop"), ((0.0, 1.0, 0.0), "power"), ((0.0, 1.0, math.nan), "power")],
)
def test_power_share_rejects_invalid_arguments(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerShare(*arguments)


def test_power_share_values() -> None:
    t = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert PowerShare(0.2, 0.8, 0.5)(t).tolist() == pytest.approx([0.2, 0.5, 0.8])


# ---- quadrature -------------------------------------------------------------------------------------------------


@given(st.floats(0.05, 5.0), st.floats(-1.0, 3.0), st.floats(0.1, 4.0))
@settings(max_examples=20, deadline=None)
def test_integrate_smooth_functions(rate: float, low: float, width: float) -> None:
    exact = (math.exp(-rate * low) - math.exp(-rate * (low + width))) / rate
    assert integrate(lambda x: torch.exp(-rate * x), low, low + width) == pytest.approx(exact, rel=1e-11)


def test_integrate_rough_functions_and_reject_nan() -> None:
    assert integrate(lambda x: (x > 0.3).double(), 0.0, 1.0) == pytest.approx(0.7, abs=1e-12)
    assert integrate(lambda x: x.log(), 0.0, 1.0, 1e-10) == pytest.approx(-1.0, abs=1e-9)
    assert integrate(lambda x: x, 1.0, 1.0) == 0.0
    with pytest.raises(ValueError, match="not finite"):
        integrate(lambda x: x * math.nan, 0.0, 1.0)


def test_adaptive_panels_give_partial_integrals() -> None:
    panels = adaptive_panels(torch.cos, 0.0, 3.0)
    x = torch.linspace(0, 3, 50, dtype=torch.float64)
    torch.testing.assert_close(panels.up_to(torch.cos, x), torch.sin(x), rtol=0, atol=1e-13)


@pytest.mark.parametrize("count", [0, 1, 100, 3000])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_bisect_finds_smallest_argument_that_reaches_goal(count: int, low: float) -> None:
    """Whether or not several bisections are done in one call; 30 of them leave an error of about 1e-9."""
    goal = 2.5 * torch.rand(count, dtype=torch.float64) + low**3 - 0.2
    found = bisect(lambda x: x**3, goal, low, 1.2)
    before = torch.nextafter(found, torch.zeros(()).double())
    inside = (goal > low**3) & (goal <= 1.2**3)
    assert bool((found[inside] ** 3 >= goal[inside]).all())
    assert bool((before[inside] ** 3 < goal[inside]).all())
    torch.testing.assert_close(found[goal > 1.2**3], torch.full_like(goal[goal > 1.2**3], 1.2), rtol=0, atol=0)
    torch.testing.assert_close(
        found[goal <= low**3], torch.full_like(goal[goal <= low**3], low), rtol=1e-15, atol=1e-30
    )
    torch.testing.assert_close(bisect(lambda x: x**3, goal, low, 1.2, 30), found, rtol=0, atol=2e-9)


def test_clocks_are_abstract() -> None:
    with pytest.raises(TypeError):
        Clocks()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("p_m", "first_bad"),
    [
        (lambda t: torch.where(t < 0.5, 0.2 + 0 * t, 0.8 + 0 * t), 0.5),  # a jump, which no slope shows
        (lambda t: 0.01 / t, 0.0),  # above 1 from the start
        (lambda t: 1.5 + 0 * t, 0.0),
    ],
)
def test_cumulative_share_with_jump_or_above_one_is_rejected(p_m, first_bad: float) -> None:
    with pytest.raises(ValueError, match="runs backwards") as error:
        cedd.eroulette(5, p_m)
    assert reported_time(error.value) == pytest.approx(first_bad, abs=1e-6)


def test_clock_that_fails_first_is_reported() -> None:
    """The share rises at 0.3, where the shuffle clock runs backwards, and falls at 0.7, where the mask clock does."""

    def p_m(t: torch.Tensor) -> torch.Tensor:
        return 0.3 + 0.65 * torch.sigmoid((t - 0.3) / 0.01) - 0.9 * torch.sigmoid((t - 0.7) / 0.01)

    with pytest.raises(ValueError, match=r"the shuffle clock runs backwards: its rate turns negative at t = 0\.2"):
        cedd.eroulette(5, p_m, cedd.LogLinear(0.1))


def test_eroulette_rejects_non_torch_share_and_share_above_one() -> None:
    with pytest.raises(ValueError, match="torch operations"):
        cedd.eroulette(5, lambda t: t.numpy() ** 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"stays within \[0, 1\]"):
        cedd.eroulette(5, mask_share=lambda t: 1.2 * t)


# ---- clocks without a schedule ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CustomClocks(Clocks):
    """Masking and shuffling by two formulas: keep = (1-s)/(1+c), masked = s/(1+c), c = sqrt(s(1-s)) and s = 0.999 t."""

    def _parts(self, t: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        s = 0.999 * check_time(t)
        c = (s * (1 - s)).sqrt()
        return s, c, 0.999 * (1 - 2 * s) / (2 * c.clamp_min(1e-300))

    def alpha(self, t: Tensor | float) -> Tensor:
        s, c, _ = self._parts(t)
        return torch.log1p(c) - torch.log1p(c - s)

    def beta(self, t: Tensor | float) -> Tensor:
        s, c, _ = self._parts(t)
        return torch.log1p(c / (1 - s))

    def alpha_rate(self, t: Tensor | float) -> Tensor:
        s, c, slope = self._parts(t)
        return slope / (1 + c) - (slope - 0.999) / (1 - s + c)

    def beta_rate(self, t: Tensor | float) -> Tensor:
        s, c, slope = self._parts(t)
        return (slope * (1 - s) + 0.999 * c) / ((1 - s) * (1 - s + c))


CUSTOM = cedd.TokenProcess(4, True, CustomClocks())


def test_custom_clocks_define_process() -> None:
    """Marginals follow the formulas; the bound's integrals and the inverse of the total noise need no further code."""
    t = torch.linspace(0.01, 1.0, 50, dtype=torch.float64)
    s, kernel = 0.999 * t, CUSTOM.kernel(t)
    c = (s * (1 - s)).sqrt()
    torch.testing.assert_close(kernel.keep, (1 - s) / (1 + c), rtol=1e-12, atol=0)
    torch.testing.assert_close(kernel.a, s / (1 + c), rtol=1e-12, atol=0)
    torch.testing.assert_close(CUSTOM.axis.inverse(CUSTOM.sigma(t)), t, rtol=1e-9, atol=0)
    fine = torch.linspace(0, 1, 400_001, dtype=torch.float64)[1:] ** 2  # the rates grow like 1/sqrt(t)
    alive, beta = torch.exp(-CUSTOM.alpha(fine)), CUSTOM.beta(fine)
    summed = float(((alive[1:] + alive[:-1]) / 2 * beta.diff()).sum() + beta[0])
    assert CUSTOM.clocks.shuffling_while_alive() == pytest.approx(summed, rel=1e-6)
    assert CUSTOM.schedule is None
    assert not CUSTOM.jumps_at_zero
    with pytest.raises(ValueError, match="cannot be saved"):
        CUSTOM.config()


# ---- validation of custom clocks --------------------------------------------------------------------------------


class Formula(Clocks):
    """A mask clock given by a formula, with a given rate or the formula's derivative; tokens are never shuffled."""

    def __init__(self, alpha: Callable[[Tensor], Tensor], rate: Callable[[Tensor], Tensor] | None = None) -> None:
        self._alpha, self._rate = alpha, rate

    def alpha(self, t: Tensor | float) -> Tensor:
        return self._alpha(check_time(t))

    def alpha_rate(self, t: Tensor | float) -> Tensor:
        time = check_time(t)
        return self._rate(time) if self._rate is not None else value_and_slope(self._alpha, time)[1]

    def beta(self, t: Tensor | float) -> Tensor:
        return torch.zeros_like(check_time(t))

    beta_rate = beta


@pytest.mark.parametrize(
    ("clocks", "message"),
    [
        (Formula(lambda t: 4 * t * (1.2 - t)), r"alpha\(t\) falls at t = 0\.6"),
        (
            Formula(lambda t: 2 * t, lambda t: 3 + 0 * t),
            "alpha_rate must be the derivative of alpha: between t = 0.001",
        ),
        (Formula(lambda t: t + (t > 0.5)), "alpha_rate must be the derivative of alpha: between t = 0.5"),
        (Formula(lambda t: 1 + t), r"alpha\(0\) must be 0"),
        (Formula(lambda t: t.clamp_max(0.3) + (t - 0.6).clamp_min(0.0)), "both clocks are constant at t = 0.3"),
        (
            Formula(lambda t: t[..., None] * torch.arange(4)),
            r"got shape \[2, 3, 4\]\): a process is two clocks that are functions of time alone, the same for every",
        ),
        (Formula(cast(Any, lambda t: 2.0), lambda t: t), r"alpha\(t\) must be a tensor of t's shape, .*got float"),
    ],
)
def test_invalid_clocks_are_rejected(clocks: Clocks, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cedd.TokenProcess(4, True, clocks)


class InconsistentClocks(Proportional):
    """A subclass of valid clocks whose mask clock does not match its rate."""

    def alpha(self, t: Tensor | float) -> Tensor:
        return self.schedule.sigma(t) * (1.2 - check_time(t))


def test_subclasses_of_valid_clocks_are_checked() -> None:
    with pytest.raises(ValueError, match="alpha_rate must be the derivative of alpha"):
        cedd.TokenProcess(4, True, InconsistentClocks(LogLinear(), 1.0, 0.0))


def test_clocks_with_kinks_and_slow_starts_are_accepted() -> None:
    for alpha in (lambda t: t**8, lambda t: t.clamp_max(0.3) + 9 * (t - 0.3).clamp_min(0.0)):
        process = cedd.TokenProcess(4, True, Formula(alpha))
        assert float(process.alpha(1.0)) == pytest.approx(float(alpha(torch.tensor(1.0, dtype=torch.float64))))


# ---- hybrid -----------------------------------------------------------------------------------------------------

EVERY_HYBRID = [(p_u, a, b) for p_u in (0.0, 0.1, 0.6) for a, b in ((0.5, 0.5), (0.3, 0.9), (1.0, 1.0))]


@pytest.mark.parametrize(("p_u", "rise", "fall"), EVERY_HYBRID)
def test_hybrid_matches_its_formulas(p_u: float, rise: float, fall: float) -> None:
    """keep = (1-t)/(1+c), masked = t/(1+c); the rates are derivatives, and the time is the inverse of sigma."""
    process = cedd.hybrid(4, p_u, rise=rise, fall=fall)
    t = torch.cat([torch.logspace(-9, -2, 30), torch.linspace(0.02, 0.9999, 200)]).double().clamp_max(1 - 1e-4)
    kernel, c = process.kernel(t), 2 ** (rise + fall) * p_u / (1 - p_u) * t**rise * (1 - t) ** fall
    torch.testing.assert_close(kernel.keep, (1 - t) / (1 + c), rtol=1e-14, atol=0)
    torch.testing.assert_close(kernel.a, t / (1 + c), rtol=1e-14, atol=0)
    for clock, rate in ((process.alpha, process.alpha_rate), (process.beta, process.beta_rate)):
        _, slope = value_and_slope(clock, t)
        torch.testing.assert_close(rate(t), slope, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(process.axis.inverse(process.sigma(t)), t, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("p_u", "rise", "fall"), [EVERY_HYBRID[3], pytest.param(*EVERY_HYBRID[4], marks=pytest.mark.slow)]
)
def test_hybrid_integrals_match_quadrature(p_u: float, rise: float, fall: float) -> None:
    """In the variable logit t, where roots at both ends are well behaved, split where the clocks slow down."""
    clocks = Hybrid(p_u, rise, fall)
    cut = math.log((1 - clocks.eps) / clocks.eps)

    def by_logit(f) -> float:
        def inner(w: Tensor) -> Tensor:
            return f(torch.sigmoid(w)) * torch.sigmoid(w) * torch.sigmoid(-w)

        return integrate(inner, -100.0, cut) + integrate(inner, cut, 34.0)

    shuffling = by_logit(lambda t: torch.exp(-clocks.alpha(t)) * clocks.beta_rate(t))
    masking = by_logit(lambda t: torch.exp(-clocks.alpha(t) - clocks.beta(t)) * clocks.alpha_rate(t))
    assert clocks.shuffling_while_alive() == pytest.approx(shuffling, abs=1e-10)
    assert clocks.masking_while_kept() == pytest.approx(masking, abs=1e-10)


def test_closed_form_hybrid_time_matches_bisection() -> None:
    for p_u in (0.0, 0.1, 0.6):
        clocks = Hybrid(p_u)
        sigma = torch.cat([torch.logspace(-9, -2, 30), torch.linspace(0.02, 9.2, 50)]).double()
        torch.testing.assert_close(clocks.time(sigma), Clocks.time(clocks, sigma), rtol=1e-9, atol=0)
        assert clocks.time(torch.zeros(1, dtype=torch.float64)).tolist() == [0.0]


def test_hybrid_shuffles_p_u_at_midpoint_and_nothing_at_ends() -> None:
    process = cedd.hybrid(4, 0.2)
    assert float(process.kernel(0.5).shuffled) == pytest.approx(0.2, rel=1e-14)
    assert float(process.kernel(0.0).keep) == 1.0
    end = 1 - 5e-5  # the last 1e-4 of the time at half the speed
    assert float(process.kernel(1.0).a) == pytest.approx(end / (1 + 0.5 * (end * (1 - end)) ** 0.5), rel=1e-14)
    assert float(process.axis.inverse(process.sigma(0.99997))) == pytest.approx(0.99997, rel=1e-12)
    for rate, clock in ((process.alpha_rate, process.alpha), (process.beta_rate, process.beta)):
        slope = (clock(0.99998) - clock(0.99996)) / 2e-5
        assert float(rate(0.99997)) == pytest.approx(float(slope), rel=1e-2)
    assert all(math.isfinite(float(rate(0.0))) for rate in (process.alpha_rate, process.beta_rate))


def test_hybrid_without_shuffling_matches_absorb() -> None:
    process, t = cedd.hybrid(4, 0.0), torch.linspace(0, 0.99, 30, dtype=torch.float64)
    torch.testing.assert_close(process.alpha(t), -torch.log1p(-t), rtol=1e-14, atol=0)
    assert not process.can_shuffle
    assert cedd.hybrid(4).can_shuffle


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p_u": 1.0}, "p_u must be in \\[0, 1\\) \\(got 1.0"),
        ({"p_u": math.nan}, "p_u"),
        ({"rise": 0.0}, r"rise must be in \[0.2, 1\] \(default 0.5\) \(got 0.0"),
        ({"fall": 1.5}, "fall"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_invalid_hybrid_settings_are_rejected(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cedd.hybrid(4, **settings)


def test_hybrid_bound_and_samples_of_perfect_network_match_data() -> None:
    """The network predicts the data distribution: its bound is the entropy, and its samples follow the data."""
    p0, process = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), cedd.hybrid(4, 0.3)

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        return p0.log().expand(*x_t.shape, 4)

    entropy = float(-(p0 * p0.log()).sum())
    exact = cedd.exact_bound(model, process, p0, method="bayes", sigma_dtype=torch.float64)
    assert entropy <= exact < entropy + 1e-5  # a thousandth of the tokens is unmasked at t = 1
    generator = torch.Generator().manual_seed(0)
    x0 = torch.multinomial(p0, 500, replacement=True, generator=generator).reshape(-1, 1)
    found = cedd.estimate_bound(model, process, x0, method="bayes", generator=generator)
    assert abs(found.nats_per_token - entropy) < 5 * found.stderr  # fails once in two million
    drawn = cedd.sample(model, process, (2000, 1), method="bayes", steps=32, generator=generator)
    share = torch.bincount(drawn.flatten(), minlength=4) / 2000
    assert bool(((share - p0).abs() < 5 * (p0 * (1 - p0) / 2000).sqrt()).all())
