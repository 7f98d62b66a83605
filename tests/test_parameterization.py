"""Parameterizations against explicit sums over the clean token, with true outputs, and at floating-point extremes."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cedd
from cedd import Bayes, Denoiser, Parameterization, PowerShare, ScaledScore, Score, TokenProcess
from cedd.parameterization import Affine, can_jump, step_law
from tests import reference
from tests.combinations import covering
from tests.networks import matching_chain

PROCESSES = {
    "absorb": cedd.absorb,
    "uniform": cedd.uniform,
    "roulette": lambda V: cedd.roulette(V, 0.6),
    "eroulette": lambda V: cedd.eroulette(V, mask_share=PowerShare(0.1, 0.9)),
    "hybrid": lambda V: cedd.hybrid(V, 0.3),
}
PARAMETERIZATIONS: dict[str, Parameterization] = {
    "score": Score(),
    "scaled": ScaledScore(),
    "denoiser": Denoiser(),
    "plain denoiser": Denoiser(rescale=False),
    "bayes": Bayes(),
}
quick = settings(max_examples=25, deadline=None)
NAME, VOCAB, SEED = st.sampled_from(list(PROCESSES)), st.integers(2, 5), st.integers(0, 10_000)
TIME = st.floats(1e-4, 1.0)


def random_outputs(process: TokenProcess, t: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, cedd.Noise]:
    """Random outputs [n, V] at every state x = 0..n-1, at time t."""
    n, V = process.num_states, process.vocab_size
    outputs = torch.randn(n, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return outputs, torch.arange(n), process.noise(torch.full((n,), t, dtype=torch.float64))


def expected_ratios(kind: str, matrix: np.ndarray, outputs: np.ndarray, x: int) -> np.ndarray:
    """s_y by explicit sums over h."""
    probabilities = np.exp(outputs) / np.exp(outputs).sum()
    if kind == "score":
        return np.exp(outputs)
    if kind == "scaled":
        return np.exp(outputs + reference.scaled_shift(matrix, len(outputs), x))
    if kind == "bayes":
        return reference.bayes_scores(matrix, probabilities, x)
    return reference.denoiser_scores(matrix, probabilities, x)


@quick
@given(st.sampled_from(list(PARAMETERIZATIONS)), VOCAB, TIME, SEED)
def test_outputs_at_masks_of_absorb_are_logits(kind: str, V: int, t: float, seed: int) -> None:
    """This holds for every parameterization; `cedd.apps.correct.numpy_network` relies on it."""
    outputs, x, noise = random_outputs(cedd.absorb(V), t, seed)
    posterior = PARAMETERIZATIONS[kind].log_posterior(outputs, x, noise)[V]
    torch.testing.assert_close(posterior, outputs[V].log_softmax(-1))


EXACT = ("score", "scaled", "plain denoiser", "bayes")


@quick
@given(st.sampled_from(EXACT), NAME, VOCAB, TIME, SEED)
def test_ratios_and_rates_match_sums_over_clean_token(kind: str, name: str, V: int, t: float, seed: int) -> None:
    process = PROCESSES[name](V)
    outputs, x_t, noise = random_outputs(process, t, seed)
    scores = PARAMETERIZATIONS[kind].log_scores(outputs, x_t, noise)
    rates = PARAMETERIZATIONS[kind].jump_rates(outputs, x_t, noise)
    chain = matching_chain(process, 1)
    matrix, forward = reference.transition(chain, t), reference.rate_matrix(chain, t)
    for x in range(process.num_states):
        if x < V:
            assert scores[x, x] == 0
            assert rates[x, x] == 0
        others = [y for y in range(V) if y != x]
        if not process.can_shuffle and x < V:
            assert bool((scores[x, others] == -math.inf).all())
            assert bool((rates[x] == 0).all())
            continue
        expected = expected_ratios(kind, matrix, outputs[x].numpy(), x)[others]
        np.testing.assert_allclose(scores[x, others].exp().numpy(), expected, rtol=1e-8)
        np.testing.assert_allclose(rates[x, others].numpy(), forward[x, others] * expected, rtol=1e-8, atol=1e-12)


@quick
@given(NAME, VOCAB, TIME, TIME, SEED)
def test_reverse_steps_and_posteriors_match_bayes_rule(name: str, V: int, s: float, t: float, seed: int) -> None:
    s, t = sorted((s, t))
    process = PROCESSES[name](V)
    outputs, x_t, noise = random_outputs(process, t, seed)
    earlier = process.noise(torch.full_like(noise.t, s))
    chain = matching_chain(process, 1)
    matrix = reference.transition(chain, t)
    for x in range(process.num_states):
        belief = torch.softmax(outputs[x], -1).numpy()
        by_bayes = Bayes().reverse_step(outputs, x_t, noise, earlier)[x].numpy()
        expected = reference.token_reverse_from_belief(chain, belief, x, t, s)
        np.testing.assert_allclose(by_bayes, expected, atol=1e-8)
        by_posterior = Denoiser(rescale=False).reverse_step(outputs, x_t, noise, earlier)[x].numpy()
        if process.can_shuffle or x == V:
            expected = reference.token_reverse_from_posterior(chain, belief, x, t, s)
            np.testing.assert_allclose(by_posterior, expected, atol=1e-8)
        else:
            np.testing.assert_allclose(by_posterior, np.eye(process.num_states)[x], atol=1e-12)
        posterior = Bayes().log_posterior(outputs, x_t, noise)[x].exp().numpy()
        np.testing.assert_allclose(posterior, reference.bayes_posterior(matrix, belief, x), atol=1e-8)
        certain = belief if process.can_shuffle or x == V else np.eye(V)[x]
        np.testing.assert_allclose(Denoiser().log_posterior(outputs, x_t, noise)[x].exp().numpy(), certain, atol=1e-12)


# ---- true outputs -----------------------------------------------------------------------------------------------


def truth(process: TokenProcess, seed: int, t: float, L: int = 2):
    """Random data with their marginal ratios, posteriors and leave-one-out beliefs at every noisy sequence."""
    chain = matching_chain(process, L)
    p0 = reference.random_data(chain, np.random.default_rng(seed))
    marginal = reference.marginal(chain, p0, t)
    x = [x for x in chain.states if marginal[chain.states.index(x)] > 0]
    tables = [
        torch.from_numpy(np.stack([f(state) for state in x]))
        for f in (
            lambda state: reference.ratios(chain, marginal, state),
            lambda state: reference.posterior(chain, p0, state, t),
            lambda state: reference.leave_one_out(chain, p0, state, t),
        )
    ]
    x_t = torch.tensor(x)
    noise = process.noise(torch.full((len(x),), t, dtype=torch.float64)).like(x_t)
    return chain, p0, x_t, noise, *tables


@settings(max_examples=12, deadline=None)
@given(NAME, st.integers(2, 3), st.floats(0.01, 1.0), st.floats(0.0, 0.99), SEED)
def test_true_outputs_give_true_ratios_and_steps(name: str, V: int, t: float, fraction: float, seed: int) -> None:
    """With their true outputs, all four parameterizations yield the true ratios and Bayes' reverse step."""
    process, s = PROCESSES[name](V), fraction * t
    chain, p0, x_t, noise, ratios, posterior, belief = truth(process, seed, t)
    log_ratios = ratios.clamp_min(1e-300).log()
    outputs = {
        "score": log_ratios,
        "scaled": log_ratios - ScaledScore().shift(x_t, noise)[..., None],
        "plain denoiser": posterior.clamp_min(1e-300).log(),
        "bayes": belief.clamp_min(1e-300).log(),
    }
    earlier = process.noise(torch.full((len(x_t),), s, dtype=torch.float64)).like(x_t)
    reverse = reference.reverse_transition(chain, p0, t, s)
    places = [chain.states.index(tuple(row)) for row in x_t.tolist()]
    by_state = reverse[:, places].T.reshape(len(x_t), *(process.num_states,) * 2)
    expected = torch.from_numpy(np.stack([by_state.sum(2), by_state.sum(1)], 1))  # the distribution of each position
    possible = can_jump(x_t, noise)[..., None].expand(ratios.shape)
    for kind, given_outputs in outputs.items():
        parameterization = PARAMETERIZATIONS[kind]
        scores = parameterization.log_scores(given_outputs, x_t, noise).exp()
        torch.testing.assert_close(scores[possible], ratios[possible], rtol=1e-8, atol=1e-9)
        step = parameterization.reverse_step(given_outputs, x_t, noise, earlier)
        torch.testing.assert_close(step, expected, rtol=0, atol=1e-7)
        read = parameterization.log_posterior(given_outputs, x_t, noise).exp()
        torch.testing.assert_close(read, posterior, rtol=0, atol=1e-7)


# ---- the fast path ----------------------------------------------------------------------------------------------


@quick
@given(st.sampled_from(["denoiser", "plain denoiser", "bayes"]), NAME, VOCAB, TIME, st.floats(0.0, 1.0), SEED)
def test_affine_path_matches_dense_path(kind: str, name: str, V: int, t: float, fraction: float, seed: int) -> None:
    process, parameterization = PROCESSES[name](V), PARAMETERIZATIONS[kind]
    assert isinstance(parameterization, Affine)
    outputs, x_t, noise = random_outputs(process, t, seed)
    earlier = process.noise(torch.full_like(noise.t, fraction * t))
    fast = parameterization.reverse_step(outputs, x_t, noise, earlier)
    dense = Parameterization.reverse_step(parameterization, outputs, x_t, noise, earlier)
    torch.testing.assert_close(fast, dense, rtol=0, atol=1e-8)
    score = parameterization.score(torch.log_softmax(outputs, -1), x_t, noise)
    others = parameterization.log_scores(outputs, x_t, noise).exp().sum(-1) - (x_t < V).double()
    possible = can_jump(x_t, noise)
    torch.testing.assert_close(score.others()[possible], others[possible], rtol=1e-9, atol=1e-9)


def test_rescaling_changes_only_unmasked_ratios() -> None:
    process = cedd.roulette(5, 0.6)
    outputs, x_t, noise = random_outputs(process, 0.01, 0)
    scaled, plain = (Denoiser(rescale).log_scores(outputs, x_t, noise) for rescale in (True, False))
    assert torch.equal(scaled[5], plain[5])
    assert float((scaled[:5] - plain[:5]).abs().max()) > 0.5
    beta = float(Denoiser().ratio_beta(noise)[0])
    assert beta == pytest.approx(0.4 * math.log(1.1 * float(noise.sigma[0]) + 1.1))
    matrix = reference.transition_at_clocks(5, True, 0.0, beta)
    f = torch.softmax(outputs[2], -1).numpy()
    np.testing.assert_allclose(scaled[2].exp().numpy(), reference.denoiser_scores(matrix, f, 2) ** (np.arange(5) != 2))


def test_rescaled_shuffle_clock() -> None:
    process, denoiser = cedd.roulette(4, 0.5), Denoiser()
    noise = process.noise(torch.tensor([0.0, 0.01, 0.9]))
    beta = denoiser.ratio_beta(noise)
    torch.testing.assert_close(beta[1:], (0.5 * denoiser.rescaled_sigma(noise.sigma, has_mask=True))[1:])
    assert float(beta[0]) == 0.0
    assert float(denoiser.ratio_beta(cedd.uniform(4).noise(1e-5))) == pytest.approx(0.0015)
    assert float(Denoiser(sigma_floor=0.003).ratio_beta(cedd.uniform(4).noise(1e-5))) == pytest.approx(0.003)
    assert float(denoiser.ratio_beta(cedd.absorb(4).noise(1e-5))) == 0.0
    with pytest.raises(ValueError, match="sigma_floor"):
        Denoiser(sigma_floor=-1.0)


@given(st.floats(0.0, 5.0))
def test_rescaled_sigma(sigma: float) -> None:
    value = torch.tensor(sigma, dtype=torch.float64)
    assert float(Denoiser().rescaled_sigma(value, has_mask=False)) == max(sigma, 0.0015)
    expected = math.log(1.1 * sigma + 1.1) if sigma < 0.5 else sigma
    lifted = Denoiser().rescaled_sigma(value, has_mask=True)
    assert float(lifted) == pytest.approx(expected, rel=1e-12)
    assert lifted >= value or sigma >= 0.5
    assert float(Denoiser(rescale=False).rescaled_sigma(value, has_mask=True)) == sigma


# ---- floating-point extremes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    covering(itertools.product(PROCESSES, PARAMETERIZATIONS, (torch.float32, torch.bfloat16))),
)
def test_results_are_finite_with_large_vocabulary(name: str, kind: str, dtype: torch.dtype) -> None:
    V = 50257
    process, parameterization = PROCESSES[name](V), PARAMETERIZATIONS[kind]
    times = [1e-9, 1e-6, 1e-3, 1.0]
    if dtype == torch.bfloat16:
        times = times[::3]  # everything computed from outputs is float32
    outputs = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    outputs[1, 7] = 60.0  # confident and right
    outputs[2, 11] = 60.0  # confident and wrong
    outputs = outputs.to(dtype)
    x_t = torch.tensor([7, 7, 7, V if process.has_mask else 3])
    for t in times:
        noise = process.noise(torch.full((4,), t))
        earlier = process.noise(torch.full((4,), t / 2))
        ratios = parameterization.log_ratios(outputs, x_t, noise)
        assert ratios.dtype == torch.float32
        possible = can_jump(x_t, noise)
        assert bool(torch.isfinite(ratios[possible]).all()), t
        scores = parameterization.log_scores(outputs, x_t, noise)
        assert not bool(scores.isnan().any())
        assert not bool((scores == math.inf).any())
        rates = parameterization.jump_rates(outputs, x_t, noise)
        assert bool(torch.isfinite(rates).all())
        assert bool((rates >= 0).all())
        law = parameterization.reverse_step(outputs, x_t, noise, earlier)
        assert bool((law >= 0).all())
        torch.testing.assert_close(law.double().sum(-1), torch.ones(4).double(), rtol=0, atol=2e-4)
        posterior = parameterization.log_posterior(outputs, x_t, noise)
        assert not bool(posterior.isnan().any())
        torch.testing.assert_close(posterior.double().exp().sum(-1), torch.ones(4).double(), rtol=0, atol=2e-4)


@pytest.mark.parametrize("margin", [5.0, 15.0, 27.0, 40.0])
@pytest.mark.parametrize("V", [27, 50257])
def test_confident_denoiser_keeps_precision_in_float32(V: int, margin: float) -> None:
    """Near f_x = 1, 1 - f_x has no correct digit in float32, and the ratios are of its size; compare with float64."""
    outputs, t = torch.zeros(1, 1, V), 0.01
    outputs[0, 0, 5], outputs[0, 0, 7] = margin, -margin
    others = (V - 2 + math.exp(-margin)) * math.exp(-margin)  # relative to f_x
    e = math.expm1(float(cedd.uniform(V).beta(t)))
    base = (others + e / (e + V)) / (1 + others)
    right = [math.log(base + V / e * math.exp(o - margin) / (1 + others)) for o in (0.0, -margin)]
    for dtype, error in ((torch.float32, 2e-6), (torch.float64, 1e-9)):
        found = cedd.log_scores(outputs.to(dtype), cedd.uniform(V), torch.tensor([[5]]), t, method="cedd")[0, 0]
        assert found[[0, 7]].tolist() == pytest.approx(right, abs=error * max(1.0, abs(right[1])))


@pytest.mark.parametrize("kind", PARAMETERIZATIONS)
def test_no_nan_at_time_zero(kind: str) -> None:
    for make in PROCESSES.values():
        process = make(4)
        outputs, x_t, noise = random_outputs(process, 0.0, 1)
        tokens = slice(0, 4)  # a mask has probability 0 at t = 0
        scores = PARAMETERIZATIONS[kind].log_scores(outputs, x_t, noise)
        assert not bool(scores.isnan().any())
        posterior = PARAMETERIZATIONS[kind].log_posterior(outputs, x_t, noise)[tokens]
        assert not bool(posterior.isnan().any())


def test_gradients_are_finite_near_time_zero() -> None:
    for kind, parameterization in PARAMETERIZATIONS.items():
        for make in PROCESSES.values():
            process = make(50)
            outputs = torch.randn(51, 50, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
            x_t = torch.arange(51) % process.num_states
            noise = process.noise(torch.full((51,), 1e-9))
            ratios = parameterization.log_ratios(outputs, x_t, noise)
            (gradient,) = torch.autograd.grad(ratios[can_jump(x_t, noise)].sum(), outputs)
            assert bool(torch.isfinite(gradient).all()), kind


def test_step_law_clips_negative_jumps_and_keeps_total() -> None:
    noise, x_t = cedd.absorb(3).noise(0.5), torch.tensor([3, 3, 1])
    stay, remask = torch.tensor([0.6, 1.0, 0.5]), torch.tensor([0.0, 0.0, 0.1])
    jumps = torch.tensor([[0.3, -0.2, 0.1], [0.0, 0.0, 0.0], [0.4, 9.0, 0.4]])
    expected = torch.tensor([[0.3, 0.0, 0.1, 0.6], [0.0, 0.0, 0.0, 1.0], [0.2, 0.5, 0.2, 0.1]])
    torch.testing.assert_close(step_law(stay, remask, jumps, x_t, noise), expected)
    nowhere = step_law(torch.tensor([0.2]), torch.tensor([0.1]), torch.zeros(1, 3), torch.tensor([0]), noise)
    torch.testing.assert_close(nowhere, torch.tensor([[0.9, 0.0, 0.0, 0.1]]))


@quick
@given(NAME, VOCAB, TIME, st.floats(0.0, 1.0), SEED)
def test_reverse_step_of_any_score_is_distribution(name: str, V: int, t: float, fraction: float, seed: int) -> None:
    process = PROCESSES[name](V)
    outputs, x_t, noise = random_outputs(process, t, seed)
    for size in (1, 30):
        law = Score().reverse_step(size * outputs, x_t, noise, process.noise(torch.full_like(noise.t, fraction * t)))
        assert bool((law >= 0).all())
        torch.testing.assert_close(law.sum(-1), torch.ones(process.num_states).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Denoiser(rescale=False), Bayes()])
@pytest.mark.parametrize(("p_m", "s"), [(0.3, 0.0), (0.15, 0.75), (0.05, 63 / 64), (0.05, 0.0), (0.005, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_long_strongly_shuffled_steps_keep_precision(kind: Affine, p_m: float, s: float, dtype: torch.dtype) -> None:
    """exp(dbeta) reaches 1e86 here: formulas with differences would lose all digits, the one for beliefs loses none."""
    process, p0 = cedd.roulette(4, p_m), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    clean = torch.cat([p0, torch.zeros(1, dtype=torch.float64)])
    likelihood, between = process.transition_matrix(1.0), process.transition_matrix(1.0, s)
    now, before = likelihood @ clean, process.transition_matrix(s) @ clean
    x = torch.arange(5)[None]
    posterior = likelihood[:, :4] * p0
    beliefs = p0.expand(5, 4) if isinstance(kind, Bayes) else posterior / posterior.sum(-1, keepdim=True)
    noise, earlier = process.noise(torch.ones(1)).like(x), process.noise(torch.tensor([s])).like(x)
    law = kind.reverse_step(beliefs.log()[None].to(dtype), x, noise, earlier)[0]
    expected = between * before / now[:, None]
    torch.testing.assert_close(law.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("p_m", [0.95, 0.3, 0.05, 0.005])
@pytest.mark.parametrize("kind", [Score(), ScaledScore()])
def test_uninformative_scores_give_nearly_uniform_posterior(kind: Score, p_m: float) -> None:
    """Ratios of one, up to rounding, at a noise level that keeps no information: the posterior is nearly uniform."""
    process, x = cedd.roulette(6, p_m), torch.arange(7)[None]
    noise = process.noise(torch.ones(1)).like(x)
    outputs = 1e-7 * torch.randn(1, 7, 6, generator=torch.Generator().manual_seed(0))
    if isinstance(kind, ScaledScore):
        outputs = outputs - kind.shift(x, noise)[..., None].float()
    posterior = kind.log_posterior(outputs, x, noise).exp()
    torch.testing.assert_close(posterior.sum(-1), torch.ones(1, 7))
    step = kind.reverse_step(outputs, x, noise, process.noise(torch.tensor([0.999])).like(x))
    assert bool(step.isfinite().all())
    torch.testing.assert_close(step.sum(-1), torch.ones(1, 7))
    if p_m < 0.1:
        torch.testing.assert_close(posterior[0, -1], torch.full((6,), 1 / 6), rtol=0, atol=0.05)


def test_low_scores_near_time_zero_give_uniform_posterior() -> None:
    process, x = cedd.absorb(5), torch.tensor([[5]])
    noise = process.noise(torch.tensor([1e-9])).like(x)
    posterior = Score().log_posterior(torch.full((1, 1, 5), -20.0), x, noise)
    torch.testing.assert_close(posterior, torch.full((1, 1, 5), -math.log(5)))
