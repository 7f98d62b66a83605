"""Bounds with extreme parameters: processes with 1e20 shuffles, probabilities of e^-70, values near zero."""

import math

import pytest
import torch
from torch import Tensor

import cedd
from cedd.bounds.drawing import Evaluation, StratifiedDraws
from cedd.bounds.estimate import exact_estimate
from cedd.bounds.times import CLEAN_COSTS, PathTimes
from cedd.dynamics import Reversal
from cedd.dynamics.path import Target

V = 5
P0 = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)
OUTPUTS = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64)
TRUTH = float(-(P0 * torch.log_softmax(OUTPUTS, 0)).sum())
"""The bound of a network with constant outputs, on a process that keeps nothing of the data at t = 1."""

EXTREME = {
    **{f"roulette {p_m:g}": cedd.roulette(V, p_m) for p_m in (1e-3, 1e-6, 1e-8, 1e-9, 1e-20, 1 - 1e-16)},
    **{f"hybrid 1 - {rest:g}": cedd.hybrid(V, 1 - rest) for rest in (1e-5, 1e-7, 1e-10, 2e-16)},
    "hybrid with a late end": cedd.hybrid(V, 0.5, eps=1e-9),
    "eroulette": cedd.eroulette(V, 1e-20, cedd.LogLinear(1e-12)),
    "uniform, steep": cedd.uniform(V, cedd.Polynomial(1e20)),
    "absorb, steep": cedd.absorb(V, cedd.Polynomial(1e20)),
    "absorb, late": cedd.absorb(V, cedd.Cosine(1e-12)),
    "uniform, from nothing": cedd.uniform(V, cedd.Geometric(1e-300, 700.0)),
}


def believes(outputs: Tensor):
    return lambda x, sigma: outputs.expand(*x.shape, len(outputs))


@pytest.mark.parametrize("name", EXTREME)
def test_exact_bound_on_extreme_processes(name: str) -> None:
    """An eps of 1e-3 leaves 1e-6 nats of the data at the end of roulette, where p_m is 1."""
    found = cedd.exact_bound(believes(OUTPUTS), EXTREME[name], P0, method="bayes")
    assert found == pytest.approx(TRUTH, abs=3e-4 if name == "roulette 1" else 1e-6)


@pytest.mark.parametrize("name", [*EXTREME, "hybrid with a steep rise"])
def test_estimate_on_extreme_processes(name: str) -> None:
    """Within four standard errors of the truth (another seed fails once in 16,000 times), and these are small."""
    process = EXTREME.get(name, cedd.hybrid(V, 1 - 2e-16, rise=0.2))  # its exact value takes too long to compute
    data = torch.arange(V).repeat_interleave((P0 * 100).round().long())[:, None]
    found = cedd.estimate_bound(
        believes(OUTPUTS), process, data, method="bayes", generator=torch.Generator().manual_seed(5), batch=4096
    )
    assert abs(found.nats_per_token - TRUTH) < 4 * found.monte_carlo_stderr + 3e-4
    assert found.monte_carlo_stderr < 0.05


def test_denoiser_bound_is_stable_under_many_shuffles() -> None:
    """cedd's ratios are differences of numbers near one; their rounding must not be multiplied by 1e20 shuffles."""
    rare, usual = (cedd.exact_bound(believes(OUTPUTS), cedd.roulette(V, p), P0, method="cedd") for p in (1e-20, 1e-4))
    assert rare == pytest.approx(usual, rel=1e-4)


def test_learned_distribution_is_correct_or_rejected() -> None:
    for p_m in (1e-6, 1e-8):
        found = cedd.exact_cross_entropy(believes(OUTPUTS), cedd.roulette(V, p_m), P0, method="bayes")
        assert found == pytest.approx(TRUTH, rel=1e-6)
    with pytest.raises(
        ValueError, match=r"did not converge: .* the process jumps too often \(sigma\(1\) = 6.91e\+12\)"
    ):
        cedd.exact_cross_entropy(believes(OUTPUTS), cedd.roulette(V, 1e-12), P0, method="bayes")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cedd.roulette(V, 1e-21), r"p_m must be in \[1e-20, 1\] \(got 1e-21"),
        (lambda: cedd.eroulette(V, mask_share=1e-30), r"mask_share must be in \[1e-20, 1\] \(got 1e-30"),
        (lambda: cedd.hybrid(V, rise=0.1), r"rise must be in \[0.2, 1\] \(default 0.5\) \(got 0.1"),
        (lambda: cedd.hybrid(V, eps=1e-13), "eps must be at least 1e-12 and below 1/2"),
        (lambda: cedd.LogLinear(1e-13), "eps must be at least 1e-12 and below 1"),
        (lambda: cedd.Polynomial(1e21), r"power must be positive and at most 1e\+20"),
        (lambda: cedd.roulette(V, 1e-15, cedd.Polynomial(1e16)), r"sigma\(1\) = .* must be at most 1e\+30"),
    ],
)
def test_parameters_beyond_float64_precision_are_rejected(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- costs at clean tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nats", [15.0, 40.0, 70.0])
def test_tiny_probability_has_finite_bound(nats: float) -> None:
    """-log softmax(-nats, 0, 0)[0]. Four standard errors, as above."""
    outputs = torch.tensor([-nats, 0.0, 0.0], dtype=torch.float64)
    truth = float(-torch.log_softmax(outputs, 0)[0])
    process = cedd.uniform(3)
    exact = cedd.exact_bound(believes(outputs), process, torch.tensor([1.0, 0.0, 0.0]), method="bayes")
    assert exact == pytest.approx(truth, rel=1e-6)
    found = cedd.estimate_bound(
        believes(outputs),
        process,
        torch.zeros(64, 2, dtype=torch.int64),
        method="bayes",
        generator=torch.Generator().manual_seed(2),
        batch=4096,
    )
    assert found.why_infinite is None
    assert abs(found.nats_per_token - truth) < 4 * found.monte_carlo_stderr < 0.4 * truth


def test_zero_probability_has_infinite_bound() -> None:
    outputs = torch.tensor([-1e4, 0.0, 0.0], dtype=torch.float64)
    for process in (cedd.uniform(3), cedd.hybrid(3, 0.3)):
        p0 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        assert cedd.exact_bound(believes(outputs), process, p0, method="bayes") == math.inf
        data = torch.zeros(4, 2, dtype=torch.int64)
        found = cedd.estimate_bound(believes(outputs), process, data, method="bayes")
        assert found.nats_per_token == math.inf
        assert found.why_infinite == "the cost of clean tokens grows like 1/t"


@pytest.mark.parametrize("place", [9, 150])
def test_infinite_cost_of_any_sequence_is_found(place: int) -> None:
    """One of 200 has no finite bound."""
    outputs = torch.tensor([-1e4, 0.0, 0.0], dtype=torch.float64)
    data = torch.ones(200, 2, dtype=torch.int64)
    data[place] = 0
    found = cedd.estimate_bound(believes(outputs), cedd.uniform(3), data, method="bayes")
    assert found.why_infinite == "the cost of clean tokens grows like 1/t"


@pytest.mark.parametrize("schedule", [cedd.LogLinear(), cedd.Cosine(), cedd.Polynomial(3.0)])
def test_times_cover_high_costs_of_overconfident_networks(schedule: cedd.Schedule) -> None:
    """Clean tokens that cost 1/(sigma + e^-15): the second moment of a draw is at most 20 times the square of the mean
    (with draws even in log sigma down to 1e-4 only, it would be more than 10,000)."""
    drawn = PathTimes(cedd.uniform(7, schedule), 5, shares=CLEAN_COSTS).at((torch.arange(200_000).double() + 0.5) / 2e5)
    value = drawn.noise.beta_rate / (drawn.noise.sigma + math.exp(-15)) * drawn.dt
    assert float(value.mean()) == pytest.approx(math.log1p(schedule.end * math.exp(15)), rel=1e-3)
    assert float(value.square().mean() / value.mean().square()) < 20


# ---- negative values --------------------------------------------------------------------------------------------


class Generous(Reversal):
    """Incorrect dynamics, which subtract five nats from the terminal term."""

    def target(self, *parts, **options) -> Target:
        target = super().target(*parts, **options)
        return Target(target.path, target.low, target.scale, target.reconstruction, target.terminal - 5)


def test_negative_bound_is_rejected() -> None:
    bayes = cedd.get_method("bayes")
    wrong = cedd.Method("generous", bayes.parameterization, bayes.objective, Generous())
    message = "but a code length is never negative"
    with pytest.raises(ValueError, match=message):
        cedd.exact_bound(believes(OUTPUTS), cedd.uniform(V), P0, method=wrong)
    with pytest.raises(ValueError, match=message):
        cedd.estimate_bound(believes(OUTPUTS), cedd.uniform(V), torch.zeros(4, 2, dtype=torch.int64), method=wrong)
    with pytest.raises(ValueError, match=message):
        exact_estimate("tight", torch.tensor([0.1, -0.3], dtype=torch.float64), 1, 4, fixed_set=True)
    assert (
        cedd.estimate_bound(
            believes(OUTPUTS), cedd.uniform(V), torch.zeros(4, 2, dtype=torch.int64), method=wrong, bound="j2"
        ).nats_per_token
        < 0
    )


def test_control_variates_do_not_make_mean_negative() -> None:
    """Costs of a network that is nearly perfect, and a control variate that happens to be far off in every draw."""
    data = torch.zeros(30, 2, dtype=torch.int64)
    drawn = StratifiedDraws(Evaluation(None, cedd.uniform(3), data, (None,), 1, print))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for half in range(2):
        cost = torch.rand(1, 30, 4, generator=generator, dtype=torch.float64)
        drawn.values[half].append(cost)
        drawn.variates[half].append(torch.cat([cost[0][..., None] + 9, torch.zeros(30, 4, 14)], -1))
        drawn.reconstructions[half].append(torch.zeros(1, 30, dtype=torch.float64))
        drawn.levels[half].append(torch.rand(30, 4, generator=generator, dtype=torch.float64))
    drawn.sightings += 1000
    settled = drawn.settle(0)
    plain = torch.stack([drawn.values[half][0][0].mean(1) for half in range(2)]).mean(0)
    torch.testing.assert_close(settled.per_sequence, plain)
    assert settled.variance > 0
