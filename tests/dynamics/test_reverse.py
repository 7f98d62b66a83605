"""The integrand of the bounds against explicit sums; its known part against enumeration."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cedd
from cedd import Denoiser, PowerShare
from cedd.objectives.score_entropy import score_entropy, true_ratios
from cedd.parameterization import can_jump
from cedd.quadrature import integrate
from tests import reference
from tests.known_terms import known_terms, mean_known_terms
from tests.networks import matching_chain

PROCESSES = {
    "absorb": cedd.absorb,
    "uniform": cedd.uniform,
    "roulette": lambda V: cedd.roulette(V, 0.6),
    "eroulette": lambda V: cedd.eroulette(V, mask_share=PowerShare(0.1, 0.9)),
    "hybrid": lambda V: cedd.hybrid(V, 0.3),
}
NAME, VOCAB, TIME = st.sampled_from(list(PROCESSES)), st.integers(2, 5), st.floats(1e-4, 1.0)
SEED = st.integers(0, 10_000)


def all_pairs(process: cedd.TokenProcess, t: float) -> tuple[torch.Tensor, torch.Tensor, cedd.Noise]:
    """Every (x_t, x0) that can happen at t, with the noise of that shape."""
    matrix = process.transition_matrix(t)[:, : process.vocab_size]
    x_t, x0 = (matrix > 0).nonzero().T
    return x_t, x0, process.noise(torch.full((len(x_t),), t, dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(NAME, VOCAB, TIME, SEED)
def test_integrand_parts_match_reference_sums(name: str, V: int, t: float, seed: int) -> None:
    process = PROCESSES[name](V)
    x_t, x0, noise = all_pairs(process, t)
    log_s = torch.randn(len(x_t), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    loss, known = score_entropy(log_s, x0, x_t, noise), known_terms(x_t, x0, noise)
    chain = matching_chain(process, 1)
    for k in range(len(x_t)):
        parts = reference.integrand(chain, (int(x0[k]),), (int(x_t[k]),), t, log_s[k : k + 1].exp().numpy())
        scale = 1e-9 * (1 + abs(parts.constant[0]))
        assert float(loss[k]) == pytest.approx(parts.score_entropy[0], rel=1e-8, abs=scale)
        assert float(known.entropy[k]) == pytest.approx(parts.constant[0], rel=1e-8, abs=scale)
        assert float(known.out_rate[k]) == pytest.approx(parts.out_rate[0], rel=1e-9, abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(NAME, VOCAB, TIME)
def test_mean_known_terms_match_enumeration(name: str, V: int, t: float) -> None:
    process = PROCESSES[name](V)
    mean = mean_known_terms(process.noise(t))
    matrix = reference.transition(matching_chain(process, 1), t)
    for x0 in range(V):
        possible = [x for x in range(process.num_states) if matrix[x, x0] > 0]
        x_t = torch.tensor(possible)
        terms = known_terms(
            x_t, torch.full_like(x_t, x0), process.noise(torch.full((len(x_t),), t, dtype=torch.float64))
        )
        weights = torch.from_numpy(matrix[possible, x0].copy())
        for part in ("entropy", "out_rate"):
            expected = float(weights @ getattr(terms, part))
            assert float(getattr(mean, part)) == pytest.approx(expected, rel=1e-8, abs=1e-9)


@settings(max_examples=12, deadline=None)
@given(NAME, VOCAB)
def test_known_part_integrates_to_conditional_entropy(name: str, V: int) -> None:
    """int E[K + out-rate] dt = H(p_{1|0}): why J1 and J2 are one bound."""
    process = PROCESSES[name](V)

    def density(u: torch.Tensor) -> torch.Tensor:
        mean = mean_known_terms(process.noise(u**4))
        return (mean.entropy + mean.out_rate) * 4 * u**3

    assert integrate(density, 1e-9, 1.0, 1e-11) == pytest.approx(process.terminal().conditional_entropy, abs=1e-9)


# ---- the generalised KL -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(NAME, VOCAB, TIME, st.floats(0.0, 3.0), SEED)
def test_score_entropy_plus_known_terms_is_a_divergence(name: str, V: int, t: float, size: float, seed: int) -> None:
    """l = lbar + K is at least 0, and 0 where the learned rates are the true ones."""
    process = PROCESSES[name](V)
    x_t, x0, noise = all_pairs(process, t)
    ratios = true_ratios(x_t, x0, noise)
    true = ratios.common[:, None] + ratios.extra[:, None] * (torch.arange(V) == x0[:, None])
    log_true = true.clamp_min(1e-300).log()
    error = size * torch.randn(len(x_t), V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    entropy = known_terms(x_t, x0, noise).entropy
    # Positions that cannot change contribute nothing, whatever their ratios.
    possible = can_jump(x_t, noise)
    scale = 1 + entropy.abs()
    divergence = (score_entropy(log_true + error, x0, x_t, noise) + entropy)[possible] / scale[possible]
    assert float(divergence.min()) >= -1e-12
    at_truth = (score_entropy(log_true, x0, x_t, noise) + entropy)[possible] / scale[possible]
    assert float(at_truth.abs().max()) < 1e-11
    # With every ratio off by a factor e, each position with a possible jump contributes.
    off = (score_entropy(log_true + 1, x0, x_t, noise) + entropy)[possible]
    rates = (ratios.rate * (true * (torch.arange(V) != x_t[:, None])).sum(-1))[possible]
    torch.testing.assert_close(off, rates * (math.e - 2), rtol=1e-6, atol=1e-9 * float(scale.max()))


def test_reference_divergence_is_nonnegative_and_consistent() -> None:
    generator = np.random.default_rng(0)
    a, b = generator.random(5), generator.random(5)
    assert reference.generalised_kl(a, b) > 0
    assert reference.generalised_kl(a, a) == 0
    assert sum(reference.bregman(float(x), float(y)) for x, y in zip(a, b, strict=True)) == pytest.approx(
        reference.generalised_kl(a, b)
    )


@settings(max_examples=30, deadline=None)
@given(VOCAB, st.floats(1e-9, 1.0), SEED)
def test_j1_on_absorb_reduces_to_cross_entropy(V: int, t: float, seed: int) -> None:
    """-sigma'/(e^sigma - 1) log f[x0] at every mask, so that J2 only adds noise to it."""
    process = cedd.absorb(V)
    noise = process.noise(torch.full((V,), t, dtype=torch.float64))
    x_t, x0 = torch.full((V,), V), torch.arange(V)
    outputs = torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).expand(V, V)
    log_s = Denoiser().log_ratios(outputs, x_t, noise)
    whole = score_entropy(log_s, x0, x_t, noise) + known_terms(x_t, x0, noise).entropy
    weight = float(process.alpha_rate(t)) / math.expm1(float(process.alpha(t)))
    torch.testing.assert_close(whole, -weight * torch.log_softmax(outputs[0], -1), rtol=1e-9, atol=1e-9 * weight)


# ---- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("t", [0.0, 1e-12, 1e-6, 1.0])
def test_known_terms_are_finite_for_large_vocabulary(name: str, t: float) -> None:
    V = 50257
    process = PROCESSES[name](V)
    x_t = torch.tensor([5, 5, V if process.has_mask else 5])
    x0 = torch.tensor([5, 6, 6])
    terms = known_terms(x_t, x0, process.noise(torch.full((3,), t, dtype=torch.float64)))
    mean = mean_known_terms(process.noise(t))
    if t > 0:
        assert bool(torch.isfinite(terms.entropy).all())
        assert bool(torch.isfinite(mean.entropy))
    assert not bool(terms.entropy.isnan().any())
    assert bool(torch.isfinite(terms.out_rate).all())


def test_entropy_terms_vanish_where_no_jump_is_possible() -> None:
    process = cedd.absorb(4)
    noise = process.noise(torch.tensor([0.5]))
    x = torch.tensor([2])
    assert float(score_entropy(torch.randn(1, 4).double(), x, x, noise)) == 0.0
    assert float(known_terms(x, x, noise).entropy) == 0.0
    assert float(known_terms(x, x, noise).out_rate) == pytest.approx(float(process.alpha_rate(0.5)))
