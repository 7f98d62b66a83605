"""The parts of the estimator: times, proposal, control variates, costs, intervals."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import cedd
from cedd.bounds.control import HalfDraws, coefficients, expectations, legendre, often_seen, variates
from cedd.bounds.drawing import Evaluation, _stratum_variance, parts_of
from cedd.bounds.estimate import BoundEstimate, _untransformed, mean_interval, running_mean, student_quantile
from cedd.bounds.proposal import directed_draw, number_of_uniforms, plain_draw
from cedd.bounds.times import CLEAN_COSTS, CLEAN_IS_FREE, JUMPS_COST, NOISE_COSTS, PathTimes, Shares, stratified_levels
from cedd.dynamics import Reversal
from cedd.dynamics.path import Cases, case_probabilities
from cedd.dynamics.reverse import ScorePath, affine_score_entropy
from cedd.network import Network
from cedd.objectives.objective import Rows
from cedd.objectives.score_entropy import score_entropy
from cedd.parameterization import Affine, Bayes, Denoiser, Parameterization, ScaledScore, Score
from cedd.quadrature import bisect
from tests.combinations import covering
from tests.known_terms import known_terms, mean_known_terms
from tests.networks import every_process, random_data, random_network

V, L = 3, 2
PROCESSES = every_process(V) | {
    "uniform, geometric": cedd.uniform(V, cedd.Geometric(0.05, 6.0)),
    "absorb, cosine": cedd.absorb(V, cedd.Cosine()),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- times --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("low", [0.0, 0.01])
@pytest.mark.parametrize("shares", [CLEAN_IS_FREE, NOISE_COSTS, CLEAN_COSTS, JUMPS_COST])
def test_times_integrate_known_terms(name: str, low: float, shares: Shares) -> None:
    """The out-rate's mean has a known integral: midpoints of 5,000 levels must give it."""
    process = PROCESSES[name]
    u = (torch.arange(5_000, dtype=torch.float64) + 0.5) / 5_000
    drawn = PathTimes(process, 64, low, shares).at(u)
    assert bool((drawn.noise.t > low).all())
    assert bool((drawn.noise.t.diff() >= 0).all())
    assert float(drawn.dt.mean()) == pytest.approx(1 - low, rel=1e-4)
    assert float(drawn.dv.mean()) == pytest.approx(1.0, rel=1e-5)
    if low == 0.0:
        out_rate = mean_known_terms(drawn.noise).out_rate
        assert float((out_rate * drawn.dt).mean()) == pytest.approx(process.integrated_out_rate(), rel=1e-4)


def test_times_cover_clean_token_costs_like_1_over_t() -> None:
    """From t = 0.0015 on, where the paper limits its ratios: half of that integral lies below t = 0.04."""
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    free, costs = (PathTimes(PROCESSES["uniform"], 2, shares=s).at(u).noise.t for s in (CLEAN_IS_FREE, CLEAN_COSTS))
    met = [float(((t > 0.0015) & (t < 0.04)).double().mean()) for t in (free, costs)]
    assert met[1] > 0.1
    assert met[1] > 1.4 * met[0]


@pytest.mark.parametrize("schedule", [cedd.LogLinear(), cedd.Cosine()], ids=str)
@pytest.mark.parametrize("low", [1e-3, 1e-4])
def test_times_cover_costs_like_1_over_sigma_down_to_path_end(schedule: cedd.Schedule, low: float) -> None:
    """The cost sigma'/sigma, of ratios that grow at clean tokens: no draw counts ten times the mean."""
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    drawn = PathTimes(cedd.uniform(V, schedule), 64, low, JUMPS_COST).at(u)
    cost = drawn.noise.beta_rate / drawn.noise.beta * drawn.dt
    assert float(cost.max() / cost.mean()) < 10


def test_weights_of_clean_sequences_are_limited() -> None:
    """Where most tokens are masked, a clean sequence is still drawn at least a sixth as often as it occurs."""
    noise = cedd.roulette(V, 0.95).noise(torch.linspace(1e-4, 0.9, 50, dtype=torch.float64))
    share, p = ScorePath(Bayes()).share(noise), case_probabilities(noise)
    assert float((share.same / p.same).min()) > 1 / 6
    noise = cedd.absorb(V).noise(torch.tensor([0.3], dtype=torch.float64))
    assert float(ScorePath(Bayes()).magnitude(noise).same) == 0  # where it costs nothing


def test_small_levels_keep_precision() -> None:
    times = PathTimes(PROCESSES["uniform"], 1024, shares=CLEAN_COSTS)
    t = times.time(torch.tensor([1e-8, 1e-6], dtype=torch.float64))
    assert times.v(t).tolist() == pytest.approx([1e-8, 1e-6], rel=1e-4)


def jumping(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t < 0.37, 0.2, 0.9).double()


STEEP = {"hybrid, steep": cedd.hybrid(V, rise=0.2, fall=0.9), "jump": cedd.eroulette(V, mask_share=jumping)}


@pytest.mark.parametrize(
    ("name", "shares"), covering(itertools.product(PROCESSES | STEEP, (CLEAN_IS_FREE, CLEAN_COSTS, JUMPS_COST)))
)
def test_secant_times_match_bisection(name: str, shares: Shares) -> None:
    """Exactly, except for rounding in the power of a share, which is evaluated in two ways."""
    v = torch.cat([torch.rand(500, generator=generator(1), dtype=torch.float64), torch.tensor([0.0, 1e-9, 1e-5, 1.0])])
    for low in (0.0, 0.01):
        times = PathTimes((PROCESSES | STEEP)[name], 64, low, shares)
        share = bisect(lambda share, times=times: times.v(times.after(share)), v.clamp_min(1e-9), 0.0, 1.0, halvings=48)
        assert float((times.time(v) - times.after(share)).abs().max()) <= 16 * 2.0**-48 + 1e-15


def test_times_of_smooth_clock_need_few_calls() -> None:
    asked = []

    class Counted(PathTimes):
        def v(self, t: torch.Tensor) -> torch.Tensor:
            asked.append(t.numel())
            return super().v(t)

    Counted(PROCESSES["absorb"], 64).time(torch.rand(1000, generator=generator(1), dtype=torch.float64))
    assert len(asked) <= 8
    assert sum(asked) < 20 * 1000  # bisection evaluates all of them 48 times


@given(st.integers(1, 20), st.integers(1, 9))
def test_levels_are_stratified_within_and_across_sequences(count: int, draws: int) -> None:
    u = stratified_levels(count, draws, generator(count))
    assert u.shape == (count, draws)
    assert (u * draws).floor().long().tolist() == [list(range(draws))] * count
    assert sorted((u * draws * count).floor().long().flatten().tolist()) == list(range(draws * count))


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("equal", [True, False])
def test_error_for_few_sequences_matches_spread_of_repetitions(count: int, equal: bool) -> None:
    """The mean of smooth costs with noise at the levels of 600 designs, with 4 strata per half.

    The ratio of both standard deviations has an error of 3.2%, so that the limits are four standard errors.
    """
    source, strata, repetitions = generator(1), 4, 600
    scale = torch.ones(count) if equal else torch.arange(1.0, count + 1)
    means, variances = list[float](), list[float]()
    for _ in range(repetitions):
        halves = list[torch.Tensor]()
        for _ in range(2):
            u = stratified_levels(count, strata, source)
            halves.append(scale[:, None] * (u**2 + 0.05 * torch.randn(u.shape, generator=source)))
        d = (halves[0] - halves[1]).sum(0)
        means.append(float(torch.stack(halves).mean()))
        variances.append(_stratum_variance(d, d, count * strata)[0])
    ratio = math.sqrt(float(np.mean(variances))) / float(np.std(means, ddof=1))
    assert ratio == pytest.approx(1, abs=0.13)


# ---- the proposal -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absorb", "uniform", "roulette"])
@pytest.mark.parametrize("t", [0.01, 0.6])
@pytest.mark.parametrize("meaning", [Bayes(), Score(), ScaledScore()])
def test_weighted_draws_follow_distribution_of_process(name: str, t: float, meaning: Parameterization) -> None:
    """Every noisy sequence's weighted frequency in 60,000 draws, within 4.5 standard errors (32 cells at most)."""
    process, count = PROCESSES[name], 60_000
    x0 = torch.tensor([[0, 2]]).expand(count, 2)
    noise = process.noise(torch.full((count,), t, dtype=torch.float64))
    share = ScorePath(meaning).share(noise)
    uniforms = torch.rand(count, number_of_uniforms(2), generator=generator(1), dtype=torch.float64)
    draw = directed_draw(x0, noise, share, uniforms)
    column = process.transition_matrix(t)
    for state in itertools.product(range(process.num_states), repeat=2):
        if name == "absorb" and state == (0, 2) and meaning.vanishes_in_noise:
            continue  # nothing is masked: never drawn, and costs nothing
        hit = (draw.x_t == torch.tensor(state)).all(1).double() / draw.odds
        expected = float(column[state[0], 0] * column[state[1], 2])
        error = float(hit.std()) / math.sqrt(count)
        assert abs(float(hit.mean()) - expected) <= 4.5 * error + 1e-12
        assert expected == 0 or error > 0


@pytest.mark.parametrize("process", [cedd.roulette(V, 0.05), cedd.roulette(V, 0.95), cedd.hybrid(V, 0.99)])
@pytest.mark.parametrize("meaning", [Score(), ScaledScore()])
def test_no_draw_weighs_much_more_than_mean_for_equal_ratios(process: cedd.TokenProcess, meaning: Score) -> None:
    """All cases of three positions, at 50 times; by the guess alone, three that have moved would weigh a million."""
    noise = process.noise(torch.linspace(1e-4, 0.999, 50, dtype=torch.float64))
    share, p = ScorePath(meaning).share(noise).stack(), case_probabilities(noise).stack()
    rate = Cases(noise.beta_rate, noise.beta_rate, noise.alpha_rate).stack()
    torch.testing.assert_close(share.sum(-1), torch.ones_like(noise.t))
    for cases in itertools.combinations_with_replacement(range(3), 3):
        odds, cost = (share / p)[:, cases].mean(-1), rate[:, cases].mean(-1)
        assert bool((cost / odds <= 2.67 * (rate * p).sum(-1)).all())


def test_times_for_score_networks_cover_shuffling() -> None:
    """On roulette(0.05), most jumps happen for t from 0.2 to 0.9, where almost no token is kept."""
    data, met = torch.zeros(1, 2, dtype=torch.int64), dict[str, float]()
    for name, meaning in {"ratios": Score(), "probabilities": Bayes()}.items():
        process = cedd.roulette(V, 0.05)
        network = Network.of(random_network(process, 2, seed=0), V)
        target = Reversal().target(meaning, process, "tight", with_entropy=True, low=0.0)
        times = Evaluation(network, process, data, (target,), 8, lambda _: None).times
        drawn = times.at((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
        met[name] = float(((drawn.noise.t > 0.2) & (drawn.noise.t < 0.9)).double().mean())
    assert met["ratios"] > 0.25 > met["probabilities"]


def test_plain_draws_follow_distribution_of_process() -> None:
    process, count = PROCESSES["roulette"], 40_000
    noise = process.noise(torch.full((count,), 0.5, dtype=torch.float64))
    uniforms = torch.rand(count, number_of_uniforms(1), generator=generator(1), dtype=torch.float64)
    x_t = plain_draw(torch.ones(count, 1).long(), noise, uniforms)
    expected = process.transition_matrix(0.5)[:, 1]
    seen = torch.bincount(x_t.flatten(), minlength=V + 1) / count
    assert bool(((seen - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt()).all())


# ---- control variates ---------------------------------------------------------------------------------------


def half_of(name: str, seed: int, count: int = 300, draws: int = 20, method_name: str = "bayes") -> HalfDraws:
    process = PROCESSES[name]
    method = cedd.get_method(method_name)
    model = random_network(process, L, seed=3, size=0.5)
    index = torch.multinomial(random_data(V, L, seed=4).flatten(), count, replacement=True, generator=generator(5))
    data = torch.stack(torch.unravel_index(index, (V,) * L), 1)
    target = Reversal().target(method.parameterization, process, "tight", with_entropy=True, low=0.0)
    evaluation = Evaluation(Network.of(model, V), process, data, (target,), 8192, lambda _: None)
    return evaluation.half(draws, torch.arange(count), generator(seed))


@pytest.mark.parametrize(
    ("name", "method_name"),
    covering(itertools.product(("absorb", "uniform", "roulette", "eroulette"), ("bayes", "sedd"))),
)
def test_control_variates_have_mean_zero_and_reduce_variance(name: str, method_name: str) -> None:
    """6,000 draws, 15 variates, 4 processes: within 4.5 standard errors all pass but once in 2,500 times."""
    first, second = half_of(name, 1), half_of(name, 2)
    columns = variates(first, expectations(second)).flatten(0, 1)
    varies = columns.std(0) > 0
    assert int(varies.sum()) >= 8
    error = columns.std(0)[varies] / math.sqrt(len(columns))
    assert bool((columns.mean(0)[varies].abs() < 4.5 * error).all())
    others = variates(second, expectations(first)).flatten(0, 1)
    learnt = coefficients(second.values.flatten(), others, often_seen(second.sightings))
    residual = first.values.flatten() - columns @ learnt
    assert float(residual.var()) < 0.7 * float(first.values.var())


def test_single_unmasked_token_is_drawn_often_for_scores() -> None:
    """A score can be large in that context alone, at late times: sigma from 2 to 4, where both positions are masked in
    nine of ten plain draws. With too few draws of it, the other draws would not reveal this tail."""

    def share(method_name: str) -> float:
        half = half_of("absorb", 1, method_name=method_name)
        keep = half.probability[..., 0]
        late = (keep < math.exp(-2)) & (keep > math.exp(-4))
        return float((late & ((half.case == 2).sum(-1) == 1)).double().mean())

    assert share("sedd") > 0.05
    assert share("sedd") > 5 * share("bayes")  # whose cost there has a factor of keep


def test_coefficients_match_least_squares() -> None:
    z = torch.randn(400, 3, generator=generator(1), dtype=torch.float64)
    z = torch.cat([z, torch.zeros(400, 1, dtype=torch.float64)], 1)
    y = 2 + z @ torch.tensor([1.0, -2.0, 0.5, 7.0], dtype=torch.float64)
    every = torch.ones(4, dtype=torch.bool)
    assert coefficients(y, z, every).tolist() == pytest.approx([1, -2, 0.5, 0], abs=1e-4)
    assert coefficients(y[:20], z[:20], every).tolist()[1:] == [0, 0, 0]  # too few values for more than one column
    assert coefficients(y[:1], z[:1], every).tolist() == [0, 0, 0, 0]  # a single value has no deviation
    assert coefficients(y / 0, z, every).tolist() == [0, 0, 0, 0]


def test_rarely_seen_case_is_not_fitted() -> None:
    """Its variates would be fitted to its mean alone; the first such draw in the other half could be far off."""
    columns = variates(half_of("roulette", 1, count=10, draws=2), torch.ones(10, L, 3, dtype=torch.float64))
    assert columns.shape[-1] == len(often_seen(torch.zeros(3)))
    assert int(often_seen(torch.tensor([50, 3, 50])).sum()) == columns.shape[-1] - 3
    assert bool(often_seen(torch.tensor([50, 50, 50])).all())


def test_legendre_polynomials() -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    assert torch.allclose(legendre(x, 3)[:, 2], (3 * x**2 - 1) / 2)
    assert torch.allclose(legendre(x, 3)[:, 3], (5 * x**3 - 3 * x) / 2)


# ---- costs --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PROCESSES)),
    st.sampled_from([Denoiser(), Denoiser(rescale=False), Bayes()]),
    st.floats(1e-6, 1.0),
    st.integers(0, 10_000),
)
def test_affine_closed_form_matches_score_entropy(name: str, meaning: Affine, t: float, seed: int) -> None:
    process = PROCESSES[name]
    source = generator(seed)
    x0 = torch.randint(V, (40,), generator=source)
    noise = process.noise(torch.full((40,), t, dtype=torch.float64))
    x_t = torch.randint(process.num_states, (40,), generator=source)
    outputs = 2 * torch.randn(40, V, generator=source, dtype=torch.float64)
    expected = score_entropy(meaning.log_ratios(outputs, x_t, noise), x0, x_t, noise)
    found = affine_score_entropy(meaning, outputs, Rows(x0, x_t, noise))
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_absorb_cost_is_weighted_cross_entropy() -> None:
    """-sigma'/(exp(sigma) - 1) log f at masks, nothing elsewhere."""
    process = PROCESSES["absorb"]
    noise = process.noise(torch.tensor([1e-9, 0.3, 0.999, 0.3], dtype=torch.float64))
    x0, x_t = torch.tensor([0, 1, 2, 1]), torch.tensor([V, V, V, 1])
    outputs = torch.randn(4, V, generator=generator(1), dtype=torch.float64)
    cost = ScorePath(Denoiser()).rows(outputs, Rows(x0, x_t, noise))
    log_f = torch.log_softmax(outputs, -1).gather(1, x0[:, None]).squeeze(1)
    expected = torch.where(x_t == V, -noise.alpha_rate / torch.expm1(noise.sigma) * log_f, 0.0)
    assert cost.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_known_terms_average_to_their_mean() -> None:
    """K + out-rate, averaged over the cases of a position, is the known mean."""
    process, t = PROCESSES["roulette"], 0.4
    noise = process.noise(torch.full((3,), t, dtype=torch.float64))
    x0, x_t = torch.zeros(3).long(), torch.tensor([0, 1, V])  # same, moved, masked
    known, mean = known_terms(x_t, x0, noise), mean_known_terms(noise)
    value = known.entropy + known.out_rate
    p = case_probabilities(noise).stack()[0]
    centre = float((mean.entropy + mean.out_rate)[0])
    assert float((p * value).sum()) == pytest.approx(centre, rel=1e-10)


def test_pick_selects_value_of_each_case() -> None:
    noise = PROCESSES["roulette"].noise(torch.zeros(3, dtype=torch.float64) + 0.2)
    numbers = Cases(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0))
    assert numbers.pick(torch.tensor([1, 2, V]), torch.tensor([1, 1, 1]), noise).tolist() == [1, 2, 3]


# ---- the rest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 199, 200, 201, 5000])
def test_student_quantiles(freedom: int) -> None:
    assert student_quantile(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=1e-7)


def test_running_mean_and_interval() -> None:
    values = 3 + torch.randn(40, generator=generator(1), dtype=torch.float64)
    mean, half = running_mean(values)
    for n in (2, 17, 40):
        low, high = stats.t.interval(0.95, n - 1, values[:n].mean(), values[:n].std() / math.sqrt(n))
        assert float(mean[n - 2] - half[n - 2]) == pytest.approx(low, rel=1e-7)
        assert float(mean[n - 2] + half[n - 2]) == pytest.approx(high, rel=1e-7)


def test_parts_of_splits_into_batches() -> None:
    assert [part.tolist() for part in parts_of(5, 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("skewness", [-0.3, 0.0, 0.02, 0.5])
def test_hall_transformation_is_inverted(skewness: float) -> None:
    for value in (-3.0, -1.0, 0.0, 2.0):
        t = _untransformed(value, skewness)
        assert t + skewness / 3 * t**2 + skewness**2 / 27 * t**3 + skewness / 6 == pytest.approx(value, abs=1e-9)


def test_code_length_intervals_are_nonnegative() -> None:
    values = torch.tensor([0.1, 30.0, 0.2, 50.0], dtype=torch.float64)
    for bound in ("tight", "j1"):
        found = BoundEstimate(bound, float(values.mean()), values, 25.0, 25.0, 3, False, 0.0, 8, 2, 2)
        for low, high in (found.sequence_ci95, found.monte_carlo_ci95):
            assert (low == 0.0) if bound == "tight" else (low < 0.0)
            assert high > 50


def test_interval_of_skewed_values_covers_more_than_student() -> None:
    """The mean of 40 lognormal values, 4,000 times (a binomial error of 0.5%): Student's interval covers 88% and misses
    below, Hall's comes nearer to 95%."""
    values = torch.exp(torch.randn(4000, 40, generator=generator(1), dtype=torch.float64))
    truth = math.exp(0.5)
    found = [mean_interval(row) for row in values]
    half = student_quantile(39) * values.std(1) / math.sqrt(40)
    student = ((values.mean(1) - truth).abs() <= half).double().mean().item()
    hall = sum(low <= truth <= high for low, high in found) / len(found)
    assert student < 0.9
    assert hall > student + 0.02
    symmetric = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    assert mean_interval(symmetric) == pytest.approx((-student_quantile(2) / 3**0.5, student_quantile(2) / 3**0.5))
