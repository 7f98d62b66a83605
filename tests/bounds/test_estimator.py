"""Bound estimates against exact values, and the calibration of their errors."""

import itertools
import math
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import cedd
from cedd import network
from cedd.bounds.drawing import SequenceValues, StratifiedDraws
from cedd.bounds.estimator import BoundEstimate, estimate_bound, estimate_bounds
from cedd.bounds.stop import STOPS, choose_stop
from cedd.dynamics import BOUNDS, Bound, Corrector
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.process import TokenProcess
from tests.combinations import covering
from tests.networks import Model, every_process, random_data, random_network

OTHER_DEVICE = torch.device("cpu", 0)  # the CPU, standing for a device without float64
V, L = 3, 2
OTHER_SCHEDULES = {
    "absorb, polynomial": cedd.absorb(V, cedd.Polynomial(2.0)),
    "uniform, geometric": cedd.uniform(V, cedd.Geometric(0.05, 6.0)),
    "roulette, geometric": cedd.roulette(V, 0.7, cedd.Geometric(0.02, 5.0)),
}
PROCESSES = every_process(V) | OTHER_SCHEDULES
SAMPLINGS: tuple[Literal["stratified", "independent"], ...] = ("stratified", "independent")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequences(p0: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Sequences [count, L] drawn from p0 of shape [V] * L."""
    index = torch.multinomial(p0.reshape(-1), count, replacement=True, generator=source)
    return torch.stack(torch.unravel_index(index, p0.shape), 1)


def empirical(data: Tensor, vocab_size: int) -> Tensor:
    """The distribution of which data is the whole population."""
    p0 = torch.zeros((vocab_size,) * data.shape[1], dtype=torch.float64)
    p0.index_put_(tuple(data.T), torch.ones(len(data), dtype=torch.float64), accumulate=True)
    return p0 / len(data)


# ---- agreement with exact values ----------------------------------------------------------------------------


@cache
def enumerated(name: str, method: str) -> tuple[Model, Tensor, dict[Bound, float]]:
    """A network, data, and their exact bounds."""
    process = PROCESSES[name]
    model = random_network(process, L, seed=5, size=0.5)
    data = sequences(random_data(V, L, seed=6), 120, generator(7))
    p0 = empirical(data, V)
    return model, data, {bound: cedd.exact_bound(model, process, p0, method=method, bound=bound) for bound in BOUNDS}


OPTIONS: dict[str, Any] = {"draws": 12, "fixed_set": True, "batch": 4096}


@cache
def estimated(name: str, method: str, bound: Bound, sampling: Literal["stratified", "independent"]) -> BoundEstimate:
    """One bound of the network and the data above, estimated separately."""
    model, data, _ = enumerated(name, method)
    how = {"method": method, "bound": bound, "sampling": sampling, "generator": generator(8), **OPTIONS}
    return estimate_bound(model, PROCESSES[name], data, **how)


@pytest.mark.parametrize(("name", "method"), covering(itertools.product(PROCESSES, ("sedds", "bayes"))))
def test_bounds_from_shared_draws_match_enumeration(name: str, method: str) -> None:
    """Within 4 standard errors: at 7 x 2 x 3 comparisons, a chance of 0.3% that one of them fails on other seeds."""
    process = PROCESSES[name]
    model, data, exact = enumerated(name, method)
    found = estimate_bounds(model, process, data, BOUNDS, method=method, generator=generator(8), **OPTIONS)
    assert tuple(found) == BOUNDS
    for bound, estimate in found.items():
        assert estimate.bound == bound
        if math.isinf(exact[bound]):
            assert math.isinf(estimate.nats_per_token)
        else:
            assert abs(estimate.nats_per_token - exact[bound]) <= 4 * estimate.monte_carlo_stderr
    alone = estimated(name, method, "tight", "stratified")
    assert found["tight"].nats_per_token == alone.nats_per_token
    assert found["tight"].evaluations == alone.evaluations
    if math.isfinite(alone.nats_per_token):
        assert found["j2"].evaluations <= alone.evaluations
    # j1 and j2 differ by a constant, sequence by sequence
    differences = found["j1"].per_sequence - found["j2"].per_sequence
    torch.testing.assert_close(differences, differences[:1].expand(len(data)), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("process", "method"),
    covering(itertools.product((cedd.roulette(V, 0.05), cedd.hybrid(V, 0.99)), ("sedd", "sedds"))),
)
def test_score_estimates_under_many_shuffles_match_enumeration(process: TokenProcess, method: str) -> None:
    """Within 4 standard errors, each below 3% of the bound; with rare draws of large weight they would be up to 16%."""
    everything = torch.cartesian_prod(torch.arange(V), torch.arange(V)).repeat(200, 1)
    model = random_network(process, L, seed=0)
    exact = cedd.exact_bound(model, process, empirical(everything, V), method=method)
    how: dict[str, Any] = {"draws": 8, "fixed_set": True, "batch": 8192, "generator": generator(1)}
    found = estimate_bound(model, process, everything, method=method, **how)
    assert abs(found.nats_per_token - exact) <= 4 * found.stderr
    assert found.stderr < 0.03 * exact


def test_bounds_with_different_stops_use_separate_draws() -> None:
    """j1 equals its separate estimate with the same seed, even if `tight` stops late."""
    process, method = PROCESSES["uniform"], cedd.get_method("sedds").with_stop(0.1)
    model = random_network(process, L, seed=5, size=0.5)
    data = sequences(random_data(V, L, seed=6), 40, generator(7))
    options = {"method": method, "draws": 8, "batch": 4096}
    found = estimate_bounds(model, process, data, ("tight", "j1"), generator=generator(8), **options)
    lows: dict[Bound, float] = {"tight": 0.1, "j1": 1e-4}
    for bound, low in lows.items():
        alone = estimate_bound(model, process, data, bound=bound, generator=generator(8), **options)
        assert (found[bound].nats_per_token, found[bound].earliest_time) == (alone.nats_per_token, low)


def test_independent_draws_are_separate_for_each_bound() -> None:
    """With torch's default generator, each bound equals its separate estimate and counts its own evaluations."""
    process, data = PROCESSES["absorb"], sequences(random_data(V, L, seed=6), 12, generator(7))
    model = random_network(process, L, seed=5, size=0.5)
    options: dict = {"method": "cedd", "draws": 8, "sampling": "independent"}
    torch.manual_seed(3)
    found = estimate_bounds(model, process, data, BOUNDS, **options)
    for bound in BOUNDS:
        torch.manual_seed(3)
        alone = estimate_bound(model, process, data, bound=bound, **options)
        assert (found[bound].nats_per_token, found[bound].evaluations) == (alone.nats_per_token, 12 * 8)


def test_one_bound_may_be_infinite_and_another_finite() -> None:
    """Ratios like 1/sigma at clean tokens, and ratios that give a token probability zero."""
    process, data = PROCESSES["uniform"], torch.tensor([[0, 1], [2, 2], [1, 0]])

    def growing(x: Tensor, sigma: Tensor) -> Tensor:
        return -sigma.log()[:, None, None].expand(*x.shape, V)

    options = {"method": "sedd", "draws": 8, "batch": 4096}
    found = estimate_bounds(growing, process, data, BOUNDS, generator=generator(8), **options)
    alone = estimate_bound(growing, process, data, bound="j1", generator=generator(8), **options)
    assert math.isinf(found["tight"].nats_per_token)
    assert found["tight"].why_infinite == "the cost of clean tokens grows like 1/t"
    assert found["j1"].nats_per_token == alone.nats_per_token
    assert found["j1"].why_infinite is None

    def refusing(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.where(torch.arange(V) == 2, -math.inf, 0.0).expand(*x.shape, V)

    # One bound is infinite only before the cut, so the other is measured with new draws.
    def refusing_early(x: Tensor, sigma: Tensor) -> Tensor:
        early = (sigma < 9e-5)[:, None, None] & (torch.arange(V) == 1)
        return torch.where(early, -math.inf, 0.0).expand(*x.shape, V)

    many = data.repeat(40, 1)
    options = {"method": "cedd", "draws": 64, "batch": 4096}
    found = estimate_bounds(refusing_early, PROCESSES["absorb"], many, BOUNDS, generator=generator(5), **options)
    alone = estimate_bound(refusing_early, PROCESSES["absorb"], many, bound="j1", generator=generator(5), **options)
    assert math.isinf(found["tight"].nats_per_token)
    assert (found["j1"].nats_per_token, found["j1"].evaluations) == (alone.nats_per_token, alone.evaluations)
    options = {"method": "sedd", "draws": 8, "batch": 4096}

    found = estimate_bounds(refusing, process, data, BOUNDS, generator=generator(8), **options)
    assert all(math.isinf(estimate.nats_per_token) for estimate in found.values())
    reasons = [found[bound].why_infinite for bound in BOUNDS]
    assert reasons == ["the cost of clean tokens is infinite", *["a draw of sequence 0 costs infinitely much"] * 2]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_infinite_last_step_is_reported_and_avoided_by_time_floor(sampling) -> None:
    """At sigma(0) > 0, the scaled scores of a bad network may give a token a posterior probability of zero."""
    process = PROCESSES["uniform, geometric"]
    model, data = random_network(process, L, seed=5), sequences(random_data(V, L, seed=6), 40, generator(7))
    options = {"method": "sedds", "sampling": sampling, "draws": 8}
    found = estimate_bound(model, process, data, generator=generator(8), **options)
    assert found.nats_per_token == math.inf
    assert "the path's last step to sequence" in str(found.why_infinite)
    stopped = estimate_bound(model, process, data, time_floor=1e-3, generator=generator(8), **options)
    assert stopped.nats_per_token < math.inf
    assert stopped.why_infinite is None


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *covering(itertools.product(every_process(V), ("sedd", "cedd"))),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in itertools.product(PROCESSES, ("sedds", "bayes"))),
    ],
)
def test_every_bound_matches_enumeration(name: str, method: str) -> None:
    """Within 4 standard errors: at 26 x 4 comparisons, a chance of 1% that one of them fails on other seeds.

    Independent times are drawn for one of the bounds; the test with a time floor draws them for all."""
    process, exact = PROCESSES[name], enumerated(name, method)[2]
    for bound, sampling in [*itertools.product(BOUNDS, SAMPLINGS[:1]), ("tight", SAMPLINGS[1])]:
        found = estimated(name, method, bound, sampling)
        if math.isinf(exact[bound]):  # a score's posterior at sigma(0) > 0 may give the data probability zero
            assert (method, process.jumps_at_zero, bound) == ("sedds", True, "tight")
            assert found.nats_per_token == math.inf
            continue
        assert abs(found.nats_per_token - exact[bound]) < 4 * found.stderr, (bound, sampling)
        assert found.stderr < 0.6 * max(1.0, exact[bound]), (bound, sampling)  # otherwise the comparison is too weak


@pytest.mark.parametrize("method", ["cedd-star", "ceddt", "bayes-star", "cedd*"])
def test_methods_with_same_parameterization_have_same_bound(method: str) -> None:
    process = PROCESSES["roulette"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 10, generator(3))
    plain = "bayes" if "bayes" in method else "cedd"
    values = [
        estimate_bound(model, process, data, method=m, draws=4, generator=generator(4)).nats_per_token
        for m in (method, plain)
    ]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("name", "method"),
    [*itertools.product(("absorb", "uniform", "roulette"), ("cedd", "bayes")), ("absorb", "dfm"), ("absorb", "ar")],
)
def test_constant_offset_of_outputs_does_not_change_bound(name: str, method: str) -> None:
    """In float32; the offset and the logits are exact there, so only the sum in the normalizer is rounded."""
    process, data = PROCESSES[name], sequences(random_data(V, L, seed=2), 10, generator(3))
    table = torch.randn(process.num_states, L, V, generator=generator(5)).mul(8).round() / 4

    def bound(offset: float) -> float:
        def model(x: Tensor, sigma: Tensor) -> Tensor:
            return table[x.sum(1) % process.num_states] + offset

        return estimate_bound(model, process, data, method=method, draws=4, generator=generator(4)).nats_per_token

    assert bound(0.0) > 0.1
    assert bound(2.0**21) == pytest.approx(bound(0.0), rel=1e-6)


def test_overflowing_ratios_have_infinite_cost() -> None:
    """Their sum overflows float32; infinity minus infinity must not give nan."""
    process, data = PROCESSES["roulette"], sequences(random_data(V, L, seed=2), 4, generator(3))
    found = estimate_bound(lambda x, sigma: torch.full((*x.shape, V), 3e38), process, data, method="sedd", draws=2)
    assert found.nats_per_token == math.inf


@pytest.mark.parametrize("name", ["absorb", "uniform", "roulette", "eroulette"])
def test_bounds_differ_by_model_independent_constants(name: str) -> None:
    process = PROCESSES[name]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 20, generator(3))

    def value(bound: Literal["tight", "j1", "j2"]) -> float:
        return estimate_bound(
            model,
            process,
            data,
            method="cedd",
            bound=bound,
            time_floor=0.0,
            draws=4,
            generator=generator(4),
        ).nats_per_token

    end = process.terminal()
    assert value("tight") - value("j1") == pytest.approx(end.kl, abs=1e-10)
    assert value("j1") - value("j2") == pytest.approx(end.conditional_entropy - end.paper_prior_entropy, abs=1e-10)


def test_bound_differences_match_paper_constants() -> None:
    """J1 - J2 of the paper, with its vocabulary and schedules: 0.0079 (absorb), 0.0118 (roulette), -0.0030 (uniform);
    and the difference when both are cut at t = 1e-4."""
    size, method = 50257, cedd.METHODS["cedd"]
    for process, constant, cut in (
        (cedd.absorb(size), 0.0079, 0.0069),
        (cedd.roulette(size, 0.95), 0.0118, 0.0107),
        (cedd.uniform(size), -0.0030, -0.0046),
    ):
        end = process.terminal()
        assert end.conditional_entropy - end.paper_prior_entropy == pytest.approx(constant, abs=5e-5)
        j1, j2 = (
            method.dynamics.target(method.parameterization, process, bound, with_entropy=True, low=1e-4).terminal
            for bound in ("j1", "j2")
        )
        assert j1 - j2 == pytest.approx(cut, abs=5e-5)


@pytest.mark.parametrize(("bound", "method"), itertools.product(BOUNDS, ("sedds", "bayes")))
def test_bounds_with_time_floor_match_enumeration(bound: Bound, method: str) -> None:
    """With a floor other than the default, they agree within 4 standard errors for both ways of drawing."""
    process = PROCESSES["uniform"]
    model, data = random_network(process, L, seed=1, size=0.5), sequences(random_data(V, L, seed=2), 200, generator(3))
    exact = cedd.exact_bound(model, process, empirical(data, V), method=method, bound=bound, time_floor=1e-2)
    for sampling in SAMPLINGS:
        found = estimate_bound(
            model,
            process,
            data,
            method=method,
            bound=bound,
            sampling=sampling,
            time_floor=1e-2,
            draws=32,
            fixed_set=True,
            generator=generator(4),
            batch=4096,
        )
        assert found.earliest_time == 1e-2
        assert abs(found.nats_per_token - exact) < 4 * found.stderr, sampling


def test_scaled_scores_have_infinite_bound_without_time_floor() -> None:
    process = PROCESSES["uniform"]
    model, data = random_network(process, L, seed=1, size=0.5), sequences(random_data(V, L, seed=2), 20, generator(3))
    assert estimate_bound(model, process, data, method="sedds", time_floor=0.0).nats_per_token == math.inf
    default = estimate_bound(model, process, data, method="sedds", generator=generator(4))
    assert default.earliest_time == cedd.METHODS["sedds"].dynamics.stop
    assert math.isfinite(default.nats_per_token)


def test_unrescaled_denoiser_stops_early_and_has_valid_bound() -> None:
    """Without the paper's rescaling its ratios at clean tokens grow like 1/t, as those of scaled scores do."""
    raw = cedd.Method("raw", cedd.Denoiser(rescale=False), cedd.METHODS["cedd"].objective)
    for name in ("uniform", "roulette"):
        process = PROCESSES[name]
        model, p0 = random_network(process, L, seed=1, size=0.5), random_data(V, L, seed=2)
        assert cedd.exact_bound(model, process, p0, method=raw, time_floor=0.0) == math.inf
        exact = cedd.exact_bound(model, process, p0, method=raw)
        assert cedd.exact_cross_entropy(model, process, p0, method=raw) < exact < math.inf
        data = sequences(p0, 400, generator(3))
        found = estimate_bound(model, process, data, method=raw, fixed_set=True, generator=generator(4), batch=4096)
        exact = cedd.exact_bound(model, process, empirical(data, V), method=raw)
        assert found.earliest_time == raw.dynamics.stop
        assert abs(found.nats_per_token - exact) < 4 * found.stderr
    floorless = cedd.METHODS["cedd"].with_sigma_floor(0.0)
    assert [floorless.stops_short(PROCESSES[name]) for name in ("absorb", "uniform", "roulette")] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("method", [pytest.param("cedd", marks=pytest.mark.slow), "bayes"])
def test_costs_like_inverse_root_of_time_have_finite_bound(method: str) -> None:
    """On hybrid(0.99) clean tokens cost as much as 100/sqrt(t): more than a thousandth of 1/t even at t = 1e-10,
    and yet integrable. Ratios that grow like 1/t are not integrable there either."""
    process = cedd.hybrid(V, 0.99)
    model, data = random_network(process, L, seed=1, size=0.5), sequences(random_data(V, L, seed=2), 200, generator(3))
    exact = cedd.exact_bound(model, process, empirical(data, V), method=method)
    found = estimate_bound(model, process, data, method=method, draws=32, fixed_set=True, generator=generator(4))
    assert found.earliest_time == 0.0
    assert abs(found.nats_per_token - exact) < 4 * found.stderr
    assert estimate_bound(model, process, data, method="sedds", time_floor=0.0).nats_per_token == math.inf


@pytest.mark.parametrize(("p_m", "method"), covering(itertools.product((0.05, 0.1), ("sedd", "sedds", "bayes"))))
def test_estimate_when_data_are_lost_long_before_the_end(p_m: float, method: str) -> None:
    """The cost of the network's ratios there is not proportional to keep, which is e^-138 at the end."""
    process = cedd.roulette(V, p_m)
    model, p0 = random_network(process, L, seed=1), random_data(V, L, seed=2)
    exact = cedd.exact_bound(model, process, p0, method=method)
    for seed in range(2):
        data = sequences(p0, 300, generator(seed))
        found = estimate_bound(model, process, data, method=method, draws=8, generator=generator(seed + 10), batch=4096)
        assert abs(found.nats_per_token - exact) < 5 * found.stderr
        assert found.stderr < 0.5 * exact


def test_choose_stop_finds_best_stop() -> None:
    """The grid point with the lowest exact bound (or its neighbour, if the two differ by less than the noise)."""
    process = PROCESSES["roulette"]
    model, p0 = random_network(process, L, seed=1, size=0.5), random_data(V, L, seed=2)
    data = sequences(p0, 60, generator(3))
    exact = [cedd.exact_bound(model, process, empirical(data, V), method="sedds", time_floor=stop) for stop in STOPS]
    chosen = choose_stop(model, process, data, method="sedds", draws=16)
    assert exact[STOPS.index(chosen.dynamics.stop)] < min(exact) + 0.05
    assert choose_stop(model, process, data, method="cedd") is cedd.METHODS["cedd"]
    assert cedd.methods.method_from_config(chosen.config()) == chosen
    with pytest.raises(ValueError, match="between 0 and 1"):
        chosen.with_stop(0.0)


def test_candidate_stops_share_draws_of_path() -> None:
    """Only the last step is evaluated for each time: 60 * 12 * 2 evaluations besides the 60 * 16 of the path."""
    process, evaluated = PROCESSES["roulette"], 0
    network, p0 = random_network(process, L, seed=1, size=0.5), random_data(V, L, seed=2)

    def counted(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        nonlocal evaluated
        evaluated += len(x_t)
        return network(x_t, sigma)

    choose_stop(counted, process, sequences(p0, 60, generator(3)), method="sedds", draws=16)
    assert evaluated <= 60 * (16 + 2 * len(STOPS))


# ---- calibrated errors --------------------------------------------------------------------------------------


def coverage(process: TokenProcess, method: str, repetitions: int, seed: int) -> tuple[float, float, float]:
    """The share of 95% intervals that contain the exact value, with new data in every repetition; the bias in standard
    errors of the mean over repetitions; and the ratio of the reported error to the true one."""
    model, p0 = random_network(process, L, seed=11, size=0.5), random_data(V, L, seed=12)
    exact = cedd.exact_bound(model, process, p0, method=method)
    source = generator(seed)
    inside, values, errors = 0, [], []
    for _ in range(repetitions):
        data = sequences(p0, 80, source)
        found = estimate_bound(model, process, data, method=method, draws=8, generator=source, batch=4096)
        inside += found.ci95[0] <= exact <= found.ci95[1]
        values.append(found.nats_per_token)
        errors.append(found.stderr**2)
    spread = torch.tensor(values).std().item()
    bias = (sum(values) / repetitions - exact) / (spread / math.sqrt(repetitions))
    return inside / repetitions, bias, math.sqrt(sum(errors) / repetitions) / spread


@pytest.mark.parametrize(
    ("name", "method"), [("absorb", "cedd"), pytest.param("roulette", "bayes", marks=pytest.mark.slow)]
)
def test_interval_coverage_is_roughly_nominal(name: str, method: str) -> None:
    """40 repetitions: correct 95% intervals hold fewer than 33 times once in 1,400, a bias reaches 4 once in 16,000,
    and the spread has an error of 11% (the slow tests have 1,000 repetitions, of every cell)."""
    share, bias, ratio = coverage(PROCESSES[name], method, 40, seed=1)
    assert share >= 0.825
    assert abs(bias) < 4
    assert 0.7 < ratio < 1.4


@pytest.mark.slow
def test_monte_carlo_error_matches_spread_of_repetitions() -> None:
    """On fixed data: the reported error against the spread of 50 repetitions, which has an error of 10%."""
    process = PROCESSES["roulette"]
    model = random_network(process, L, seed=1, size=0.5)
    data = sequences(random_data(V, L, seed=2), 60, generator(3))
    source = generator(4)
    found = [
        estimate_bound(model, process, data, method="cedd", draws=8, fixed_set=True, generator=source, batch=4096)
        for _ in range(50)
    ]
    observed = torch.tensor([x.nats_per_token for x in found]).std().item()
    reported = math.sqrt(sum(x.stderr**2 for x in found) / len(found))
    assert 0.7 < reported / observed < 1.4


def test_independent_draws_have_no_interval() -> None:
    process = PROCESSES["uniform"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 60, generator(3))
    found = estimate_bound(model, process, data, method="cedd", bound="j1", sampling="independent", draws=4)
    assert found.heavy_tailed
    assert found.stderr > 0
    assert all(
        math.isnan(end) for end in (*found.ci95, *found.sequence_ci95, *found.monte_carlo_ci95, *found.perplexity_ci95)
    )
    with pytest.raises(ValueError, match="a tolerance needs an interval"):
        estimate_bound(model, process, data, method="cedd", sampling="independent", tolerance=0.1)


def test_single_sequence_has_only_monte_carlo_error() -> None:
    process = PROCESSES["absorb"]
    model, data = random_network(process, L, seed=1), torch.tensor([[0, 2]])
    found = estimate_bound(model, process, data, method="cedd", draws=64, generator=generator(1))
    assert found.fixed_set
    assert math.isnan(found.sequence_stderr)
    assert 0 < found.stderr < 0.5
    assert found.ci95[0] < found.nats_per_token < found.ci95[1]


def bigram_text(count: int, length: int, vocab_size: int) -> tuple[Tensor, Model]:
    """Sequences of a Markov chain, and a denoiser with the chain's conditionals given the left neighbour."""
    source = generator(0)
    logits = 2.5 * torch.randn(vocab_size, vocab_size, generator=source, dtype=torch.float64)
    rows = torch.softmax(logits, -1)
    stationary = torch.linalg.matrix_power(rows, 200)[0]
    x = torch.multinomial(stationary, count, replacement=True, generator=source)[:, None]
    for _ in range(length - 1):
        x = torch.cat([x, torch.multinomial(rows[x[:, -1]], 1, generator=source)], 1)
    table = torch.log(torch.cat([rows, stationary[None]]))

    def model(x_t: Tensor, sigma: Tensor) -> Tensor:
        left = torch.cat([torch.full_like(x_t[:, :1], vocab_size), x_t[:, :-1]], 1)
        return table[left]

    return x, model


def test_stratified_draws_have_less_than_a_quarter_of_the_variance() -> None:
    """A regression test on a toy; benchmarks/bound_variance.py measures it on trained networks."""
    size = 12
    data, model = bigram_text(100, 64, size)
    process = cedd.absorb(size)

    def error(sampling: Literal["stratified", "independent"]) -> float:
        found = estimate_bound(
            model, process, data, method="cedd", sampling=sampling, draws=16, fixed_set=True, generator=generator(1)
        )
        assert found.evaluations == 1600
        return found.stderr

    assert (error("independent") / error("stratified")) ** 2 > 4


# ---- behaviour ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(16, 1, 2, 8, vocab_size=11, has_mask=True, length=12))
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


@pytest.mark.parametrize(
    "method", ["sedd", "dfm", "ar", *(pytest.param(one, marks=pytest.mark.slow) for one in ("cedd", "bayes"))]
)
def test_chunked_rows_match_dense_outputs(
    transformer: Transformer, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = cedd.absorb(11) if method in ("dfm", "ar") else cedd.roulette(11, 0.6)
    data = torch.randint(11, (5, 12), generator=generator(1))

    def value(model: Model, batch: int = 32, device: torch.device | None = None) -> float:
        return estimate_bound(
            model, process, data, method=method, draws=6, generator=generator(2), batch=batch, device=device
        ).nats_per_token

    transformer.eval()
    whole = value(lambda x, sigma: transformer(x, sigma))
    monkeypatch.setitem(network._ENTRIES_AT_ONCE, "cpu", 11 * 7)
    assert value(transformer) == pytest.approx(whole, rel=1e-6)
    assert value(transformer, batch=3) == pytest.approx(whole, rel=1e-6)
    # and via another device, which the CPU stands for here
    monkeypatch.setattr(network, "has_float64", lambda device: torch.device(device) != OTHER_DEVICE)
    assert value(transformer, device=OTHER_DEVICE) == pytest.approx(whole, rel=1e-6)


def test_sums_are_computed_on_cpu_for_device_without_float64(transformer: Transformer) -> None:
    for model in (transformer, lambda x, sigma: torch.zeros(*x.shape, 11)):
        for place in ("mps", "cuda"):
            run = network.Network.of(model, 11, place)
            assert run.home == torch.device(place)
            assert run.device == torch.device("cpu" if place == "mps" else place)


def test_network_in_training_mode_is_evaluated_without_dropout(transformer: Transformer) -> None:
    process, data = cedd.roulette(11, 0.6), torch.randint(11, (4, 12), generator=generator(1))
    transformer.train()
    values = {
        estimate_bound(transformer, process, data, method="cedd", draws=4, generator=generator(2)).nats_per_token
        for _ in range(2)
    }
    assert len(values) == 1
    assert transformer.training


def test_estimate_fields() -> None:
    process = PROCESSES["roulette"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 30, generator(3))
    found = estimate_bound(model, process, data, method="bayes", draws=5, generator=generator(4))
    assert found.per_sequence.shape == (30,)
    assert found.per_sequence.dtype == torch.float64
    assert found.nats_per_token == pytest.approx(found.per_sequence.mean().item())
    assert found.perplexity == pytest.approx(math.exp(found.nats_per_token))
    assert found.bits_per_token == pytest.approx(found.nats_per_token / math.log(2))
    assert found.perplexity_ci95[0] < found.perplexity < found.perplexity_ci95[1]
    assert found.terminal == pytest.approx(process.terminal().kl)
    assert found.evaluations == 30 * 6 + 30  # draws are made even; each sequence is searched for a divergence
    assert found.monte_carlo_stderr < found.sequence_stderr == found.stderr
    mean, half = found.running()
    assert mean.shape == half.shape == (29,)
    assert mean[-1].item() == pytest.approx(found.nats_per_token)
    assert half[-1].item() == pytest.approx((found.ci95[1] - found.ci95[0]) / 2, rel=0.1)


def test_estimate_does_not_depend_on_batch_size() -> None:
    process = PROCESSES["roulette"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 9, generator(3))
    values = [
        estimate_bound(model, process, data, method="cedd", draws=4, generator=generator(4), batch=b).per_sequence
        for b in (2, 7, 100)
    ]
    assert torch.allclose(values[0], values[1], rtol=1e-12)
    assert torch.allclose(values[0], values[2], rtol=1e-12)


def test_tolerance_is_met_or_reported_as_not_reached() -> None:
    process = PROCESSES["absorb"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 40, generator(3))

    def within(tolerance: float, fixed_set: bool) -> cedd.BoundEstimate:
        return estimate_bound(
            model,
            process,
            data,
            method="cedd",
            tolerance=tolerance,
            fixed_set=fixed_set,
            generator=generator(4),
            batch=4096,
        )

    rough, fine = within(0.2, True), within(0.01, True)
    for found, tolerance in ((rough, 0.2), (fine, 0.01)):
        assert found.reached
        assert (found.ci95[1] - found.ci95[0]) / 2 <= math.log1p(tolerance)
    assert fine.evaluations > rough.evaluations
    never = within(1e-3, False)  # more draws do not make up for having only 40 sequences
    assert not never.reached
    assert never.draws < 4096


def test_many_rounds_are_settled_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an unreachable tolerance, drawing continues to the last draw, in time linear in the number of draws."""
    settled: list[int] = []
    settle = StratifiedDraws.settle

    def counting(drawn: StratifiedDraws, target: int) -> SequenceValues:
        settled.append(len(drawn.values[0]))
        return settle(drawn, target)

    monkeypatch.setattr(StratifiedDraws, "settle", counting)
    process = PROCESSES["absorb"]
    options = {"method": "cedd", "tolerance": 1e-9, "fixed_set": True, "draws": 2, "max_draws": 61, "batch": 4096}
    found = estimate_bound(random_network(process, L, seed=1), process, torch.tensor([[0, 1]]), **options)
    assert found.draws == 60
    assert settled[:8] == list(range(1, 9))
    assert settled[-1] == 30
    assert len(settled) <= 18


@pytest.mark.slow
def test_many_small_rounds_have_nonzero_error() -> None:
    """Rounds with one or two draws per half lack four neighbours in time: their differences must not count as 0."""
    process = PROCESSES["absorb"]
    model, text = random_network(process, L, seed=1), torch.tensor([[0, 1]])
    exact = cedd.exact_bound(model, process, empirical(text, V), method="cedd")
    options = {"method": "cedd", "tolerance": 1e-9, "fixed_set": True, "draws": 2, "max_draws": 34, "batch": 4096}
    for seed in range(2):
        found = estimate_bound(model, process, text, generator=generator(seed), **options)
        assert found.draws == 34
        assert found.stderr > 0.01
        assert abs(found.nats_per_token - exact) < 5 * found.stderr


def test_progress_counts_every_evaluation() -> None:
    process = PROCESSES["absorb"]
    model, data = random_network(process, L, seed=1), sequences(random_data(V, L, seed=2), 10, generator(3))
    calls: list[tuple[int, int]] = []
    found = estimate_bound(
        model,
        process,
        data,
        method="cedd",
        draws=4,
        batch=8,
        generator=generator(4),
        progress=lambda done, planned: calls.append((done, planned)),
    )
    assert calls[-1][0] == found.evaluations
    assert all(done <= planned for done, planned in calls)


# ---- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("cedd", {"bound": "j3"}, "unknown bound"),
        ("ar", {"bound": "j1"}, "exact likelihood"),
        ("dfm", {"bound": "j2"}, "its own bound"),
        ("cedd", {"draws": 0}, "draws must be at least 1"),
        ("cedd", {"batch": -1}, "batch must be at least 1 \\(got -1"),
        ("cedd", {"tolerance": 0.0}, "positive fraction"),
        ("cedd", {"tolerance": math.inf}, "positive fraction"),
        ("cedd", {"tolerance": math.nan}, "positive fraction"),
        ("cedd", {"max_draws": -1}, "max_draws must be at least 1 \\(got -1"),
        ("cedd", {"time_floor": 1.0}, "earliest time"),
        ("cedd", {"sampling": "importance"}, "stratified or independent"),
        ("cedd", {"corrector": Corrector()}, "belongs to flow matching"),
        ("nonsense", {}, "unknown method"),
    ],
)
def test_invalid_options_are_rejected(method: str, options: dict, message: str) -> None:
    process = PROCESSES["absorb"]
    with pytest.raises(ValueError, match=message):
        estimate_bound(random_network(process, L, 1), process, torch.zeros(3, L).long(), method=method, **options)


def test_exact_bound_rejects_time_floor_of_one() -> None:
    process = PROCESSES["uniform"]
    with pytest.raises(ValueError, match="earliest time must be in"):
        cedd.exact_bound(random_network(process, L, 1), process, random_data(V, L, 2), method="cedd", time_floor=1.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(0, 4).long(), "at least one"),
        (torch.zeros(4).long(), "sequences"),
        (torch.full((2, 2), V), "token ids"),
        (torch.zeros(2, 2), "int32 or int64"),
    ],
)
def test_invalid_data_are_rejected(data: Tensor, message: str) -> None:
    process = PROCESSES["absorb"]
    with pytest.raises(ValueError, match=message):
        estimate_bound(random_network(process, L, 1), process, data, method="cedd")


def test_outputs_of_wrong_shape_are_rejected() -> None:
    process = PROCESSES["absorb"]
    with pytest.raises(ValueError, match="without a mask column"):
        estimate_bound(lambda x, s: torch.zeros(*x.shape, V + 1), process, torch.zeros(2, L).long(), method="cedd")
