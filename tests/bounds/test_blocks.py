"""Bounds of block diffusion: sums over blocks of each block's bound given the text before it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.bounds.estimator import estimate_bounds
from cedd.bounds.exact import learned_distribution
from cedd.bounds.importance import ImportanceEstimate
from cedd.dynamics.causal import shift_right, start_symbol
from tests import reference
from tests.networks import BlockNetwork, as_score, every_process, matching_chain, random_data
from tests.reference.blocks import over_blocks
from tests.reference.reveals import time_conditioned_law, time_free_law

V, L, BLOCK = 3, 4, 2
FLOAT64 = torch.float64
PROCESSES = every_process(V)
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=L)))
BEGINNINGS = ((0, 1), (2, 2))
"""The first blocks of the data; only two, to save time."""


@pytest.mark.parametrize("kind", [pytest.param("absorb", marks=pytest.mark.slow), "roulette", "hybrid"])
def test_exact_bound_matches_oracle_sum_over_blocks(kind: str) -> None:
    process = PROCESSES[kind]
    model, p0 = BlockNetwork(process, L, BLOCK, seed=1), torch.zeros((V,) * L, dtype=FLOAT64)
    for first in BEGINNINGS:
        p0[first] = random_data(V, L, seed=2)[first]
    p0 = p0 / p0.sum()
    breaks, nodes = (0.6, 1 - 1e-4), 64  # where hybrid's time begins to run at half the speed
    times = [t for t, _ in reference.time_nodes(nodes, breaks)]
    chain = matching_chain(process, BLOCK, times)

    def tight(past: tuple[int, ...], law: np.ndarray) -> float:
        score = as_score("bayes", process, model.after(past), BLOCK, times)
        path = reference.conditional_loss_integral(chain, law, score, reference.bregman, nodes, breaks)
        return path + reference.conditional_terminal_kl(chain, law)

    expected = over_blocks(p0.numpy().ravel(), V, L, BLOCK, tight) / L
    how: dict[str, Any] = {"method": "bayes", "block": BLOCK, "sigma_dtype": FLOAT64}
    found = cedd.exact_bound(model, process, p0, **how)
    assert found == pytest.approx(expected, abs=1e-6)
    assert cedd.exact_cross_entropy(model, process, p0, **how) < found


FAST = {("cedd", "absorb"), ("sedd", "roulette"), ("bayes", "hybrid")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow)
        for pair in itertools.product(("cedd", "bayes", "sedd"), PROCESSES)
    ],
)
def test_estimate_matches_exact_bound_within_error(name: str, kind: str) -> None:
    """Within 4 standard errors: a false alarm in 16,000 for each of two bounds."""
    process = PROCESSES[kind]
    model = BlockNetwork(process, L, BLOCK, seed=3)
    data = torch.tensor([[*first, *second] for first in BEGINNINGS for second in ((0, 0), (1, 2), (2, 1))]).repeat(4, 1)
    p0 = torch.zeros((V,) * L, dtype=FLOAT64)
    for text in data.tolist():
        p0[tuple(text)] += 1 / len(data)
    how: dict[str, Any] = {"method": cedd.METHODS[name].in_blocks(BLOCK), "time_floor": 1e-3}
    generator = torch.Generator().manual_seed(5)
    found = estimate_bounds(model, process, data, ("tight", "j2"), draws=64, fixed_set=True, generator=generator, **how)
    for bound, estimate in found.items():
        exact = cedd.exact_bound(model, process, p0, bound=bound, **how)
        assert abs(estimate.nats_per_token - exact) < 4 * estimate.stderr + 1e-6, bound
        assert estimate.stderr < 0.05 * exact
        assert (estimate.length, estimate.draws, len(estimate.per_sequence)) == (L, 64, len(data))
    assert found["tight"].evaluations < 2 * 64 * len(data)  # passes over whole texts, not over blocks


@pytest.mark.parametrize("kind", [pytest.param("absorb", marks=pytest.mark.slow), "uniform"])
def test_independent_and_stratified_draws_agree(kind: str) -> None:
    process = PROCESSES[kind]
    model = BlockNetwork(process, L, BLOCK, seed=3)
    one, other = (
        cedd.estimate_bound(
            model,
            process,
            TEXTS[::9],
            method="bayes",
            block=BLOCK,
            draws=200,
            sampling=sampling,
            time_floor=1e-3,
            fixed_set=True,
            generator=torch.Generator().manual_seed(6),
        )
        for sampling in ("stratified", "independent")
    )
    error = math.hypot(one.monte_carlo_stderr, other.monte_carlo_stderr)
    assert abs(one.nats_per_token - other.nats_per_token) < 4 * error


def conditional_logits(model: BlockNetwork, past: tuple[int, ...]) -> Any:
    """The network for one block, with the signature that the reference implementation expects."""

    def logits(states: list[tuple[int, ...]], sigma: float) -> np.ndarray:
        x = torch.tensor(states)
        return model.after(past)(x, torch.full((len(x),), sigma, dtype=FLOAT64)).numpy()

    return logits


@pytest.mark.parametrize("time_free", [True, False])
def test_exact_likelihood_is_product_over_blocks(time_free: bool) -> None:
    """Compared with every order of every block. It is the distribution of a sampler: over all texts it sums to one."""
    process = cedd.absorb(V)
    model = BlockNetwork(process, L, BLOCK, seed=7, time_free=time_free)
    nats = cedd.exact_likelihood(model, process, TEXTS, range(L), method="cedd", block=BLOCK)
    assert float(nats.neg().exp().sum()) == pytest.approx(1.0, abs=1e-6)
    most = float(process.noise(1.0).a)
    for number in (0, 17, 50, 80):
        text = tuple(TEXTS[number].tolist())
        expected = 0.0
        for start in (0, BLOCK):
            logits, block = conditional_logits(model, text[:start]), text[start : start + BLOCK]
            law = time_free_law(logits, block, V) if time_free else time_conditioned_law(logits, block, V, most)
            expected -= math.log(law)
        assert float(nats[number]) == pytest.approx(expected, abs=1e-9 if time_free else 2e-6)
    found = cedd.estimate_bound(model, process, TEXTS, method="cedd", block=BLOCK, bound="exact")
    torch.testing.assert_close(found.per_sequence * L, nats)
    assert (found.bound, found.monte_carlo_stderr) == ("exact", 0.0)


def test_likelihood_of_positions_given_rest_of_block() -> None:
    """The prompt ends inside a block; the likelihood covers the rest of that block and the next one."""
    process = cedd.absorb(V)
    model, text = BlockNetwork(process, L, BLOCK, seed=7, time_free=True), TEXTS[50:51]
    found = cedd.exact_likelihood(model, process, text, (1, 2, 3), method="cedd", block=BLOCK)
    outputs = model.after(())(torch.tensor([[int(text[0, 0]), V]]), torch.zeros(1))
    first = torch.log_softmax(outputs, -1)[0, 1, text[0, 1]]
    second = cedd.exact_likelihood(model, process, text, (2, 3), method="cedd", block=BLOCK)
    torch.testing.assert_close(found, second - first)


def test_importance_bounds_converge_to_exact_likelihood() -> None:
    """From above and below, closer with more orders; within 4 standard errors (one false alarm in 16,000 each)."""
    process, length, block = cedd.absorb(V), 6, 3
    model = BlockNetwork(process, length, block, seed=8, time_free=True)
    generator = torch.Generator().manual_seed(9)
    data = torch.randint(V, (400, length), generator=generator)
    exact = cedd.exact_likelihood(model, process, data, range(length), method="cedd", block=block) / length
    found = cedd.estimate_bound(
        model, process, data, method="cedd", block=block, bound="importance", orders=32, generator=generator
    )
    assert isinstance(found, ImportanceEstimate)
    assert (found.length, found.orders, found.evaluations) == (length, 32, len(data) * 32 * block)
    gaps = []
    for orders in found.by_orders:
        paired = found.of_orders(orders).per_sequence - exact
        gaps.append(float(paired.mean()))
        assert gaps[-1] > -4 * float(paired.std()) / math.sqrt(len(data))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.1 * gaps[0]
    below = found.two_sided().per_sequence - exact
    assert float(below.mean()) < 4 * float(below.std()) / math.sqrt(len(data))
    mean = (found.log_weights.exp().mean(-1)).log().sum(1).neg() / length
    torch.testing.assert_close(mean, found.per_sequence)


def prefix_network(V: int, L: int, seed: int) -> Any:
    """A function that maps the preceding text to the logits of the next token, [V]."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(sum(V**known for known in range(L)), V, generator=generator, dtype=FLOAT64)

    def logits(prefix: Tensor) -> Tensor:
        """[B, P] -> [B, V]."""
        known = prefix.shape[1]
        index = (prefix * V ** torch.arange(known - 1, -1, -1)).sum(1)
        return table[sum(V**shorter for shorter in range(known)) + index]

    return logits


def test_blocks_of_one_token_match_autoregressive_model() -> None:
    """With equal conditionals, the exact likelihood is that of `ar`; the losses differ by the share of tokens that are
    not masked at t = 1; and the bound adds the cost of these tokens."""
    process = cedd.absorb(V)
    logits = prefix_network(V, L, seed=10)

    def causal(inputs: Tensor, _: Tensor) -> Tensor:
        text = torch.cat([inputs[:, 1:], inputs[:, :1]], 1)  # the tokens that it predicts, except for the last
        return torch.stack([logits(text[:, :i]) for i in range(L)], 1)

    def in_blocks(x_t: Tensor, sigma: Tensor, *, clean: Tensor) -> Tensor:
        return torch.stack([logits(clean[:, :i]) for i in range(x_t.shape[1])], 1)

    in_blocks.capabilities = cedd.network.Capabilities(time_conditioned=False)  # type: ignore[attr-defined]
    assert torch.equal(shift_right(TEXTS, start_symbol(process))[:, 1:], TEXTS[:, :-1])
    ar = cedd.estimate_bound(causal, process, TEXTS, method="ar").per_sequence
    exact = cedd.exact_likelihood(in_blocks, process, TEXTS, range(L), method="cedd", block=1) / L
    torch.testing.assert_close(exact, ar, rtol=1e-12, atol=1e-12)

    left = float(process.noise(1.0).alive)
    generator = torch.Generator().manual_seed(11)
    tight = cedd.estimate_bound(
        in_blocks, process, TEXTS, method="cedd", block=1, draws=64, fixed_set=True, generator=generator
    )
    expected = (1 - left) * float(ar.mean()) + left * math.log(V)
    assert abs(tight.nats_per_token - expected) < 4 * tight.stderr + 1e-9
    assert tight.stderr < 5e-3

    loss_of_ar = cedd.loss(causal, process, TEXTS, method="ar")
    torch.testing.assert_close(loss_of_ar, ar.mean())
    many = TEXTS.repeat(20, 1)
    losses = [
        float(cedd.loss(in_blocks, process, many, method="ceddt", block=1, generator=generator)) for _ in range(40)
    ]
    error = float(np.std(losses)) / math.sqrt(len(losses))
    assert abs(float(np.mean(losses)) - (1 - left) * float(loss_of_ar)) < 4 * error
    assert error < 0.01


def test_learned_distribution_of_blocks_is_normalized() -> None:
    process = cedd.roulette(2, 0.7)
    model = BlockNetwork(process, L, BLOCK, seed=12)
    method = cedd.METHODS["bayes"].in_blocks(BLOCK)
    law = learned_distribution(model, process, L, method=method, sigma_dtype=FLOAT64)
    assert law.shape == (2,) * L
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-6)
    first = learned_distribution(model.after(()), process, BLOCK, method="bayes", sigma_dtype=FLOAT64)
    torch.testing.assert_close(law.sum((2, 3)), first, rtol=0, atol=1e-6)
    p0 = random_data(2, L, seed=13)
    found = cedd.exact_cross_entropy(model, process, p0, method=method, sigma_dtype=FLOAT64)
    assert found == pytest.approx(float(-(p0 * law.log()).sum()) / L, abs=1e-6)


def test_condition_applies_to_its_own_text() -> None:
    process = cedd.absorb(V)
    model = BlockNetwork(process, L, BLOCK, seed=3)

    def labelled(x_t: Tensor, sigma: Tensor, *, clean: Tensor, label: Tensor) -> Tensor:
        return model(x_t, sigma, clean=clean) * label[:, None, None]

    labels = torch.tensor([1.0, 0.0]).double().repeat(20)
    data = TEXTS[:40]
    how: dict[str, Any] = {"method": "cedd", "block": BLOCK, "draws": 32, "label": labels}
    found = cedd.estimate_bound(labelled, process, data, generator=torch.Generator().manual_seed(1), **how)
    left = float(process.noise(1.0).alive)
    torch.testing.assert_close(found.per_sequence[1::2].mean(), torch.tensor(math.log(V)).double(), rtol=0.02, atol=0)
    plain = cedd.estimate_bound(
        model, process, data[::2], method="cedd", block=BLOCK, draws=32, generator=torch.Generator().manual_seed(2)
    )
    assert abs(float(found.per_sequence[::2].mean()) - plain.nats_per_token) < 0.05
    assert left < 0.01


def test_invalid_block_bounds_are_rejected() -> None:
    absorb, model = cedd.absorb(V), BlockNetwork(cedd.absorb(V), L, BLOCK, seed=3)
    with pytest.raises(ValueError, match="blocks of 3 do not divide a length of 4"):
        cedd.estimate_bound(model, absorb, TEXTS, method="cedd", block=3)
    with pytest.raises(ValueError, match=r"the model is for blocks of 2 tokens \(got block=4\)"):
        cedd.estimate_bound(model, absorb, TEXTS, method=cedd.METHODS["cedd"].in_blocks(2), block=4)
    with pytest.raises(ValueError, match="ar is autoregressive and has no blocks"):
        cedd.estimate_bound(model, absorb, TEXTS, method="ar", block=2)
    with pytest.raises(ValueError, match="need a process on which a revealed token never changes"):
        cedd.estimate_bound(model, cedd.uniform(V), TEXTS, method="bayes", block=2, bound="exact")
    with pytest.raises(ValueError, match="takes no orders"):
        cedd.estimate_bound(model, absorb, TEXTS, method="cedd", block=2, bound="exact", orders=4)
    long = torch.zeros(2, 26, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"number of positions in a block must be 1 to 12 \(got 13\)"):
        cedd.estimate_bound(model, absorb, long, method="cedd", block=13, bound="exact")
