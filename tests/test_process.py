"""The token process against the dense oracle: kernels, rates, ends, samples, and errors."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

import cedd
from cedd import Cosine, Geometric, LogLinear, Polynomial, PowerShare, TokenProcess, process_from_config
from cedd.clocks import CLOCKS, SHARES, Clocks
from cedd.schedules import double
from tests import reference
from tests.networks import matching_chain

VOCAB = st.integers(2, 6)
SCHEDULE = st.sampled_from([LogLinear(), LogLinear(0.2), Polynomial(2.0, 0.01), Cosine(0.01), Geometric(0.05, 6.0)])
FROM_ZERO = st.sampled_from([LogLinear(), LogLinear(0.2), Polynomial(2.0, 0.01), Cosine(0.01)])
P_M = st.floats(0.05, 1.0)
TIME = st.floats(0.0, 1.0)
POWER = st.sampled_from([0.5, 0.25, 1.0])
SHARE = st.integers(0, 100).map(lambda percent: percent / 100)
PROCESS = st.one_of(
    st.builds(cedd.absorb, VOCAB, SCHEDULE),
    st.builds(cedd.uniform, VOCAB, SCHEDULE),
    st.builds(cedd.roulette, VOCAB, P_M, SCHEDULE),
    st.builds(
        lambda V, a, b, s: cedd.eroulette(V, mask_share=PowerShare(a, b), schedule=s), VOCAB, SHARE, SHARE, FROM_ZERO
    ),
    st.builds(lambda V, p, s: cedd.eroulette(V, p_m=p, schedule=s), VOCAB, P_M, FROM_ZERO),
    st.builds(lambda V, p, a, b: cedd.hybrid(V, p, rise=a, fall=b), VOCAB, st.floats(0.0, 0.9), POWER, POWER),
)
NODES = [t for t, _ in reference.time_nodes(384)]
"""With 256 nodes an integral is off by 1e-8 if shuffling is 20 times as fast as masking; with 384, by 2e-13."""
quick = settings(max_examples=30, deadline=None)


def dense(process: TokenProcess, t: float, s: float = 0.0) -> np.ndarray:
    return process.transition_matrix(t, s).numpy()


# ---- kernels ----------------------------------------------------------------------------------------------------


@quick
@given(PROCESS, TIME, TIME)
def test_transition_matrices_match_oracle(process: TokenProcess, s: float, t: float) -> None:
    s, t = sorted((s, t))
    matrix = dense(process, t, s)
    assert np.abs(matrix.sum(0) - 1).max() < 1e-12
    assert matrix.min() >= 0
    expected = reference.transition(matching_chain(process, 1), t, s)
    assert np.abs(matrix - expected).max() < 1e-9


@quick
@given(PROCESS, st.lists(TIME, min_size=3, max_size=3))
def test_kernel_semigroup_and_inverse(process: TokenProcess, times: list[float]) -> None:
    r, s, t = sorted(times)
    assert np.abs(dense(process, t, s) @ dense(process, s, r) - dense(process, t, r)).max() < 1e-12
    kernel = process.kernel(t, s)
    identity = torch.eye(process.num_states, dtype=torch.float64)
    size = float(kernel.inverse().dense().abs().max())
    torch.testing.assert_close(kernel.inverse().dense() @ kernel.dense(), identity, rtol=0, atol=1e-13 * (1 + size))


@quick
@given(PROCESS, st.floats(0.01, 0.99))
def test_rate_matrix_is_derivative_of_transition_matrix(process: TokenProcess, t: float) -> None:
    rates = process.rate_matrix(t).numpy()
    assert np.abs(rates.sum(0)).max() < 1e-12 * (1 + np.abs(rates).max())
    assert np.abs(rates - reference.rate_matrix(matching_chain(process, 1), t)).max() < 1e-9 * (1 + np.abs(rates).max())
    h = 1e-5 * (1 - t) * t
    slope = (dense(process, t + h) - dense(process, t - h)) / (2 * h)
    assert np.abs(slope - rates @ dense(process, t)).max() < 1e-5 * (1 + np.abs(rates).max())


@quick
@given(PROCESS, TIME, TIME, st.integers(0, 99))
def test_columns_entries_and_products_match_dense_matrix(process: TokenProcess, s: float, t: float, seed: int) -> None:
    s, t = sorted((s, t))
    kernel, n = process.kernel(t, s), process.num_states
    for k in (kernel, kernel.inverse()):
        matrix, x = k.dense(), torch.arange(n)
        wide = k.map(lambda v: v.expand(n))
        torch.testing.assert_close(wide.column(x), matrix.T)
        torch.testing.assert_close(wide.probability(x.roll(1), x), matrix[x.roll(1), x])
        v = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        torch.testing.assert_close(k.apply(v), matrix @ v, rtol=1e-9, atol=1e-9)


@quick
@given(PROCESS, st.floats(1e-9, 1.0))
def test_kernel_parts_are_consistent(process: TokenProcess, t: float) -> None:
    k, V = process.kernel(t), process.vocab_size
    assert float(k.keep + k.shuffled + k.a) == pytest.approx(1.0, abs=1e-14)
    assert float(k.c - k.b) == pytest.approx(float(k.keep), rel=1e-9, abs=1e-15)
    if float(k.b) > 0:
        assert float(k.c / k.b - 1) == pytest.approx(float(V / k.expm1_beta), rel=1e-9, abs=1e-9)
    if float(k.a) > 0:
        assert float(k.keep / k.a) == pytest.approx(float(torch.exp(-k.beta) / k.expm1_alpha), rel=1e-9)


@quick
@given(PROCESS, st.floats(0.01, 0.98), st.floats(0.01, 0.99), st.integers(0, 99))
def test_bayes_consistency(process: TokenProcess, s: float, gap: float, seed: int) -> None:
    """p(x_s | x_t) p(x_t) = P(x_t | x_s) p(x_s), summed over x_t, gives p(x_s) back."""
    t = s + (1 - s) * gap
    weights = torch.rand(process.vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p0 = torch.cat([weights / weights.sum(), torch.zeros(process.num_states - process.vocab_size).double()])
    early, late = process.kernel(s).apply(p0), process.kernel(t).apply(p0)
    joint = process.kernel(t, s).dense() * early  # [x_t, x_s]
    torch.testing.assert_close(joint.sum(1), late)
    reverse = torch.where(late[:, None] > 0, joint / late[:, None], 0.0)
    torch.testing.assert_close(late @ reverse, early)


def test_kernel_keeps_precision_near_zero_with_large_vocabulary() -> None:
    """The naive formula 1 - V/(expm1(sigma)+V) gives 0 in float32 there."""
    k = cedd.uniform(50257).kernel(1e-9)
    assert float(k.expm1_beta) == pytest.approx(0.999e-9, rel=1e-8)
    assert float(k.b * 50257) == pytest.approx(0.999e-9, rel=1e-8)


# ---- limits -----------------------------------------------------------------------------------------------------


@quick
@given(VOCAB, TIME)
def test_roulette_approaches_absorb(V: int, t: float) -> None:
    assert np.abs(dense(cedd.roulette(V, 1.0), t) - dense(cedd.absorb(V), t)).max() < 1e-14
    gap = np.abs(dense(cedd.roulette(V, 1 - 1e-7), t) - dense(cedd.absorb(V), t)).max()
    assert gap < 1e-6


@quick
@given(VOCAB, st.floats(0.0, 1.0))
def test_roulette_approaches_uniform_at_matched_rates(V: int, t: float) -> None:
    """roulette(p_m) runs at sigma/p_m: a schedule p_m times as fast leaves the shuffle clock of uniform."""
    p_m, power = 1e-8, 1.0
    slow = Polynomial(power=p_m * power, eps=0.01)
    roulette, uniform = cedd.roulette(V, p_m, slow), cedd.uniform(V, Polynomial(power, eps=0.01))
    assert np.abs(dense(roulette, t)[:V, :V] - dense(uniform, t)).max() < 1e-6
    assert dense(roulette, t)[V, :V].max() < 1e-6


def test_eroulette_with_constant_share_matches_roulette() -> None:
    t = 0.7
    by_p_m, by_share = cedd.eroulette(4, p_m=0.6), cedd.eroulette(4, mask_share=0.6)
    expected = cedd.roulette(4, 0.6, Polynomial(0.6, 1e-3))
    for process in (by_p_m, by_share):
        assert np.abs(dense(process, t) - dense(expected, t)).max() < 1e-12


def test_process_capabilities() -> None:
    names = ("has_mask", "can_shuffle", "mask_id", "num_states")
    assert [getattr(cedd.absorb(4), name) for name in names] == [True, False, 4, 5]
    assert [getattr(cedd.uniform(4), name) for name in names] == [False, True, None, 4]
    assert [getattr(cedd.roulette(4), name) for name in names] == [True, True, 4, 5]
    assert not cedd.roulette(4, 1.0).can_shuffle
    assert not cedd.eroulette(4, mask_share=1.0).can_shuffle


# ---- the end, and the integrals ---------------------------------------------------------------------------------


@quick
@given(PROCESS)
def test_terminal_terms_match_brute_force(process: TokenProcess) -> None:
    chain = matching_chain(process, 1)
    terminal, prior = process.terminal(), reference.prior(chain)
    assert np.abs(process.prior().numpy() - prior).max() < 1e-12
    for x0 in range(process.vocab_size):
        final = reference.conditional(chain, (x0,), 1.0)
        assert terminal.cross_entropy == pytest.approx(reference.cross_entropy(final, prior), abs=1e-9)
        assert terminal.conditional_entropy == pytest.approx(reference.entropy(final), abs=1e-9)
        assert terminal.kl == pytest.approx(reference.kl(final, prior), abs=1e-9)
    assert terminal.paper_prior_entropy == (0.0 if process.has_mask else math.log(process.vocab_size))
    assert terminal.cross_entropy == pytest.approx(terminal.kl + terminal.conditional_entropy, abs=1e-12)


@settings(max_examples=12, deadline=None)
@given(PROCESS)
@example(cedd.roulette(2, 0.05, Cosine(0.01)))
def test_integrated_out_rate_matches_quadrature(process: TokenProcess) -> None:
    assume(process.schedule is not None and process.axis.start == 0.0)  # hybrid's: test_clocks
    chain = matching_chain(process, 1, NODES)
    p0 = np.full(process.vocab_size, 1 / process.vocab_size)
    assert process.integrated_out_rate() == pytest.approx(reference.out_rate_integral(chain, p0, len(NODES)), abs=1e-10)


def test_integrated_out_rate_of_geometric_schedule() -> None:
    process = cedd.roulette(3, 0.6, Geometric(0.1, 5.0))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    t = torch.from_numpy((nodes + 1) / 2)
    rate = torch.exp(-process.alpha(t)) * (process.alpha_rate(t) + process.beta_rate(t) * 2 / 3)
    assert process.integrated_out_rate() == pytest.approx(float(rate @ torch.from_numpy(weights / 2)), abs=1e-10)


@settings(max_examples=12, deadline=None)
@given(PROCESS)
@example(cedd.roulette(2, 0.05, Cosine(0.01)))
def test_corrected_probability_matches_quadrature(process: TokenProcess) -> None:
    assume(process.schedule is not None and process.axis.start == 0.0)
    chain = matching_chain(process, 1, NODES)

    def density(t: float) -> float:
        return chain.alpha_rate(t) * float(reference.transition(chain, t)[1 : process.vocab_size, 0].sum())

    assert process.corrected_probability() == pytest.approx(reference.integrate(density, len(NODES)), abs=1e-9)


@quick
@given(VOCAB, P_M)
def test_corrected_probability_matches_paper_formula(V: int, p_m: float) -> None:
    process = cedd.roulette(V, p_m)
    end = process.axis.end / p_m
    printed = (V - 1) / V * (math.exp(-end) * p_m - math.exp(-end * p_m) + 1 - p_m)
    assert process.corrected_probability() == pytest.approx(printed, abs=1e-12)


def test_bound_constants_match_paper_tables() -> None:
    """J1 - J2 per token, which does not depend on the network, at V = 50257 and eps = 1e-3."""
    for process, expected in (
        (cedd.absorb(50257), 0.0079),
        (cedd.roulette(50257), 0.0118),
        (cedd.uniform(50257), -0.0030),
    ):
        terminal = process.terminal()
        assert terminal.conditional_entropy - terminal.paper_prior_entropy == pytest.approx(expected, abs=5e-5)


# ---- samples ----------------------------------------------------------------------------------------------------


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of the chi-square test; impossible states must not have been drawn."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = counts.sum() * probabilities[possible]
    value = ((counts[possible] - expected) ** 2 / expected).sum()
    return float(chi2.sf(value, possible.sum() - 1))


# Seven tests at 1e-4 each: with other seeds, one run in 1,400 would fail by chance.
@pytest.mark.parametrize("process", [cedd.absorb(4), cedd.uniform(4), cedd.roulette(4, 0.6), cedd.roulette(4, 0.2)])
def test_samples_follow_kernel(process: TokenProcess) -> None:
    generator = torch.Generator().manual_seed(20)
    x0 = torch.full((2, 60_000), 1)
    x_t = process.sample(x0, torch.tensor([0.3, 0.8]), generator)
    for row, t in zip(x_t, (0.3, 0.8), strict=True):
        counts = np.bincount(row.numpy(), minlength=process.num_states)
        # t is float32 here, as a user would give it.
        assert p_value(counts, dense(process, float(torch.tensor(t)))[:, 1]) > 1e-4


def test_kernel_between_times_keeps_masks() -> None:
    process = cedd.roulette(4, 0.6)
    x = torch.full((1, 50_000), 4)
    assert bool((process.kernel(0.9, 0.2).sample(x) == 4).all())


def test_same_seed_gives_same_samples() -> None:
    process, x0 = cedd.roulette(4), torch.zeros(3, 50, dtype=torch.int64)
    first, second = (process.sample(x0, 0.5, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(process.sample(x0, 0.0), x0)


def test_geometric_schedule_jumps_at_zero() -> None:
    process = cedd.uniform(4, Geometric(0.5, 5.0))
    assert float(process.beta(0.0)) == 0.0
    assert float(process.beta(1e-300)) == pytest.approx(0.5)
    assert torch.equal(process.transition_matrix(0.0), torch.eye(4, dtype=torch.float64))


# ---- shapes -----------------------------------------------------------------------------------------------------


def test_stacked_noise_round_trips() -> None:
    noise = cedd.roulette(5).noise(torch.linspace(0.1, 0.9, 4, dtype=torch.float64))
    values = noise.stacked()
    assert values.shape == (4, 5)
    one = type(noise).of_stacked(5, True, values[2])
    names = ("alpha", "beta", "t", "alpha_rate", "beta_rate")
    assert all(torch.equal(getattr(one, name), getattr(noise, name)[2]) for name in names)
    assert (one.vocab_size, one.has_mask) == (5, True)


def test_noise_fields_broadcast_and_rows_are_selected() -> None:
    noise = cedd.roulette(4).noise(torch.tensor([0.1, 0.7]))
    x = torch.zeros(2, 3, dtype=torch.int64)
    wide = noise.like(x)
    assert wide.alpha.shape == (2, 3)
    assert torch.equal(wide.alpha[:, 2], noise.alpha)
    picked = wide.rows(torch.tensor([False, True, False, False, False, True]))
    assert torch.equal(picked.t, noise.t)
    assert torch.equal(wide.rows(torch.tensor([1, 5])).beta, picked.beta)
    assert wide.to("cpu").vocab_size == 4


# ---- records ----------------------------------------------------------------------------------------------------


@quick
@given(PROCESS, TIME)
def test_process_config_round_trips_through_json(process: TokenProcess, t: float) -> None:
    again = process_from_config(json.loads(json.dumps(process.config())))
    assert again.config() == process.config()
    assert torch.equal(again.transition_matrix(t), process.transition_matrix(t))


def test_unregistered_share_cannot_be_saved() -> None:
    with pytest.raises(
        ValueError, match=r"the share of masking <lambda> cannot be saved: add it to cedd.clocks.SHARES"
    ):
        cedd.eroulette(4, mask_share=lambda t: t).config()


@dataclass(frozen=True)
class QuadraticMasking(Clocks):
    """A custom mask clock, without shuffling."""

    speed: float = 2.0
    p_m: float = 1.0  # a plain number, unlike fields of that name elsewhere

    def alpha(self, t: torch.Tensor | float) -> torch.Tensor:
        return self.speed * double(t) ** 2

    def alpha_rate(self, t: torch.Tensor | float) -> torch.Tensor:
        return 2 * self.speed * double(t)

    def beta(self, t: torch.Tensor | float) -> torch.Tensor:
        return 0 * double(t)

    beta_rate = beta


def squared(t: torch.Tensor) -> torch.Tensor:
    return t**2


def test_custom_process_is_saved_once_its_clocks_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    own = TokenProcess(4, True, QuadraticMasking(3.0))
    with pytest.raises(ValueError, match=r"QuadraticMasking cannot be saved: add it to cedd\.clocks\.CLOCKS"):
        own.config()
    monkeypatch.setitem(CLOCKS, "slowly", QuadraticMasking)
    assert own.config()["clocks"] == {"name": "slowly", "speed": 3.0, "p_m": 1.0}
    monkeypatch.setitem(SHARES, "squared", squared)
    for process in (own, cedd.eroulette(4, mask_share=squared, schedule=Cosine(0.01))):
        assert process_from_config(json.loads(json.dumps(process.config()))) == process


# ---- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cedd.absorb(1), "at least 2 tokens \\(got V = 1"),
        (lambda: cedd.roulette(4, 1.5), r"p_m must be in \[1e-20, 1\] \(got 1.5"),
        (lambda: cedd.roulette(4, -0.1), r"p_m must be in"),
        (lambda: cedd.roulette(4, math.nan), r"p_m must be in"),
        (lambda: cedd.roulette(4, 0.0), "use the process uniform"),
        (lambda: cedd.eroulette(4), "either p_m=... or mask_share=..."),
        (lambda: cedd.eroulette(4, p_m=0.5, mask_share=0.5), "either p_m=... or mask_share=..."),
        (lambda: cedd.eroulette(4, p_m=1.5), r"must be in \[0, 1\]"),
        (lambda: cedd.eroulette(4, mask_share=-0.5), r"must be in \[0, 1\]"),
        (lambda: cedd.absorb(4).noise(1.5), r"time t must be in \[0, 1\].*got 1.5"),
        (lambda: cedd.absorb(4).kernel(0.2, 0.5), "a kernel runs forward in time"),
        (lambda: cedd.absorb(4).sample(torch.tensor([[0, 4]]), 0.5), r"must be in 0..3 \(got 0..4"),
        (lambda: cedd.absorb(4).sample(torch.tensor([[-1, 3]]), 0.5), r"must be in 0..3 \(got -1..3"),
        (lambda: cedd.absorb(4).sample(torch.tensor([[0.5]]), 0.5), "token ids must be int32 or int64"),
        (
            lambda: cedd.absorb(256).sample(torch.zeros(2, 3, dtype=torch.uint8), 0.5),
            r"int32 or int64, as from .long\(\)",
        ),
        (lambda: cedd.absorb(4).sample(torch.zeros(2, 3, dtype=torch.uint16), 0.5), "int32 or int64.*got torch.uint16"),
        (
            lambda: cedd.absorb(4).sample(torch.zeros(2, 3).long(), torch.rand(5)),
            r"one per sequence or one per position: x0 is \[2, 3\], t is \[5\]",
        ),
        (lambda: process_from_config({"name": "nothing"}), "unknown process 'nothing'; use one of absorb"),
    ],
)
def test_invalid_arguments_are_rejected(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_rate_matrices_are_stacked_over_times() -> None:
    times = torch.tensor([0.1, 0.5, 0.9])
    for process in (cedd.uniform(3), cedd.roulette(4, 0.6)):
        stacked = process.rate_matrix(times)
        for matrix, t in zip(stacked, times, strict=True):
            torch.testing.assert_close(matrix, process.rate_matrix(t), rtol=0, atol=0)


def test_corrected_probability_includes_initial_noise_of_geometric_schedule() -> None:
    low, high, p_m, V = 0.3, 5.0, 0.7, 4
    process = cedd.roulette(V, p_m, cedd.Geometric(low, high))
    sigma = high / p_m
    expected = (1 - 1 / V) * (1 - p_m - np.exp(-p_m * sigma) + p_m * np.exp(-sigma))
    assert process.corrected_probability() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cedd.absorb(2.5), "must be an integer"),  # pyright: ignore[reportArgumentType]
        (lambda: cedd.absorb(5, 0.3), "schedule"),  # pyright: ignore[reportArgumentType]
        (lambda: cedd.eroulette(5, mask_share=1.1), "mask_share"),
        (lambda: cedd.process_from_config({"name": "absorb"}), "invalid arguments of the process absorb"),
        (lambda: cedd.absorb(5).sigma(1.0000001), "1.0000001"),
        (lambda: cedd.uniform(5).check_states(torch.tensor([[5]])), "no mask"),
    ],
)
def test_invalid_process_arguments_are_rejected(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_scalars_are_saved_as_plain_numbers() -> None:
    process = cedd.roulette(np.int64(5), np.float32(0.5))  # pyright: ignore[reportArgumentType]
    assert cedd.process_from_config(json.loads(json.dumps(process.config()))) == process


def test_process_subclass_may_not_override_methods() -> None:
    """Losses and bounds would not call the methods that a subclass overrides."""
    message = "Own overrides kernel, sample of TokenProcess, which .* do not call: a process is two clocks"
    with pytest.raises(TypeError, match=message):
        type("Own", (TokenProcess,), {"sample": lambda self, x0, t: x0, "kernel": None})
    named = type("Named", (TokenProcess,), {"label": "a method of its own"})
    process = named(4, True, cedd.absorb(4).clocks)
    loss = cedd.loss(lambda x, s: torch.zeros(*x.shape, 4), process, torch.zeros(2, 3).long(), method="bayes")
    assert float(loss) > 0
    with pytest.raises(TypeError, match=r"a process is a TokenProcess: absorb\(\).* \(got object"):
        cedd.get_method("bayes").check(object())  # type: ignore[arg-type]
