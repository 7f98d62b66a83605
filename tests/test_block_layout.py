"""Block diffusion in one pass: the attention pattern, and equality with evaluating one block after another."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.block_layout import BlockLayout, BlockSequences, InBlocks
from cedd.losses import NoiseDraws, batch_loss, noisy_batch
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import AttentionPattern, Capabilities
from tests.networks import BlockNetwork, every_process, matching_chain, random_data
from tests.reference import rate_matrix, transition
from tests.reference.blocks import given_past

V, L, B = 11, 16, 2


def network(seed: int = 0, **changes: Any) -> Transformer:
    """A tiny network in float64 whose parameters are all random."""
    torch.manual_seed(seed)
    model = Transformer(config_from_preset("tiny", vocab_size=V, has_mask=True, **changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def noisy_texts(block: int, views: int = 1, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x_t [vB, L], sigma [vB, K] and clean [B, L]."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(V, (B, L), generator=generator)
    sigma = 3 * torch.rand(views * B, L // block, dtype=torch.float64, generator=generator)
    masked = torch.rand(views * B, L, generator=generator) < 0.5
    return torch.where(masked, V, clean.repeat_interleave(views, 0)), sigma, clean


@pytest.mark.parametrize(("block", "views"), itertools.product((1, 2, 4, 8), (1, 2, 3)))
def test_attention_pattern_of_noisy_views_and_clean_text(block: int, views: int) -> None:
    length = 8
    pattern = BlockLayout(length, block, views).pattern("cpu")
    for query, key in itertools.product(range((views + 1) * length), repeat=2):
        own, other = query % length // block, key % length // block
        view, other_view = query // length, key // length
        if view < views and other_view < views:
            expected = view == other_view and own == other
        elif view < views:
            expected = own > other
        else:
            expected = other_view == views and own >= other
        assert bool(pattern.visible[query, key]) == expected, (query, key)
    assert pattern.positions is not None
    assert pattern.positions.tolist() == [*range(length)] * (views + 1)


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_single_pass_matches_blockwise_evaluation(block: int, conditioned: bool) -> None:
    """The reference evaluates each noisy block after the clean text before it, with block-causal attention."""
    model = network(time_conditioning=conditioned)
    x_t, sigma, clean = noisy_texts(block)
    together = InBlocks(model, block)(x_t, sigma, clean=clean)
    number = torch.arange(L) // block
    for k in range(L // block):
        here, end = slice(k * block, (k + 1) * block), (k + 1) * block
        text = torch.cat([clean[:, : k * block], x_t[:, here]], 1)
        levels = torch.cat([torch.zeros(B, k).double(), sigma[:, k : k + 1]], 1)
        pattern = AttentionPattern(number[:end, None] >= number[:end])
        alone = model.head(model.features(text, levels, attention=pattern))[:, -block:]
        torch.testing.assert_close(together[:, here], alone, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("block", [1, 4])
def test_cached_finished_blocks_give_same_outputs(block: int) -> None:
    model = network()
    x_t, sigma, clean = noisy_texts(block)
    together = InBlocks(model, block)(x_t, sigma, clean=clean)
    cache = model.new_cache(B, L)
    for k, (noisy, finished) in enumerate(zip(x_t.split(block, 1), clean.split(block, 1), strict=True)):
        outputs = model.head(model.features(noisy, sigma[:, k], cache=cache))
        torch.testing.assert_close(outputs, together[:, k * block : (k + 1) * block], rtol=1e-9, atol=1e-9)
        cache.length = k * block
        model.features(finished, torch.zeros(B).double(), cache=cache)


@pytest.mark.parametrize("block", [1, 4])
def test_changed_tokens_affect_only_blocks_that_attend_to_them(block: int) -> None:
    model = network()
    x_t, sigma, clean = noisy_texts(block)
    before = InBlocks(model, block)(x_t, sigma, clean=clean)
    place = 9
    first, after = place // block * block, (place // block + 1) * block
    changed = clean.clone()
    changed[:, place] = (clean[:, place] + 1) % V
    found = InBlocks(model, block)(x_t, sigma, clean=changed)
    assert torch.equal(found[:, :after], before[:, :after])  # its own block does not attend to its clean tokens
    assert ((found - before)[:, after:].abs().amax(-1) > 1e-9).all()
    noisier = x_t.clone()
    noisier[:, place] = (x_t[:, place] + 1) % V
    found = InBlocks(model, block)(noisier, sigma, clean=clean)
    others = torch.ones(L, dtype=torch.bool)
    others[first:after] = False
    assert torch.equal(found[:, others], before[:, others])
    assert ((found - before)[:, first:after].abs().amax(-1) > 1e-9).all()


@pytest.mark.parametrize("views", [2, 3])
def test_multiple_views_match_separate_passes(views: int) -> None:
    model, block = network(), 4
    x_t, sigma, clean = noisy_texts(block, views)
    together = InBlocks(model, block)(x_t, sigma, clean=clean)
    for view in range(views):
        apart = InBlocks(model, block)(x_t[view::views], sigma[view::views], clean=clean)
        torch.testing.assert_close(together[view::views], apart, rtol=1e-9, atol=1e-9)


def test_last_mlp_skips_clean_text() -> None:
    """Its output there is unused; all gradients equal those of a layer that computes it."""
    found, rows = [], []
    for capabilities in (None, Capabilities(features=True, attention=True, token_times=True)):
        model = network()
        if capabilities is not None:
            model.__class__ = type("Whole", (Transformer,), {"capabilities": capabilities})
        mlp = model.get_submodule(f"backbone.blocks.{len(model.backbone.blocks) - 1}.mlp")
        mlp.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1]))
        x_t, sigma, clean = noisy_texts(4, views=2)
        features = InBlocks(model, 4).features(x_t, sigma, clean=clean)
        features.square().sum().backward()
        found.append([features.detach(), *(p.grad for p in model.backbone.parameters())])
    assert rows == [(2 * B * L,), (B, 3 * L)]
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-9)


def test_block_sequences_match_blocks_of_whole_texts() -> None:
    model, block, blocks = network(), 4, L // 4
    x_t, sigma, clean = noisy_texts(block)
    together = InBlocks(model, block)(x_t, sigma, clean=clean)
    apart = BlockSequences(model, block, blocks)
    found = apart(x_t.view(-1, block), sigma.flatten(), clean=clean.view(-1, block))
    assert found.shape == (B * blocks, block, V)
    assert torch.equal(found.view(B, L, V), together)
    places = torch.tensor([1, 7, 20, 31])
    features = apart.features(x_t.view(-1, block), sigma.flatten(), clean=clean.view(-1, block), where=places)
    torch.testing.assert_close(apart.head(apart.rows(features, places)), together.flatten(0, 1)[places])


@pytest.mark.parametrize("name", ["cedd-star", "bayes", "sedd"])
def test_single_block_loss_is_bitwise_equal_to_plain_loss(name: str) -> None:
    model, clean = network(), torch.randint(V, (6, L))
    for process in every_process(V).values():
        found = [
            cedd.loss(model, process, clean, method=name, block=block, generator=torch.Generator().manual_seed(5))
            for block in (None, L)
        ]
        assert torch.equal(*found)


def test_loss_is_mean_over_blocks_at_their_own_times() -> None:
    """Compared with the mean over blocks, each evaluated by itself given the clean text before it."""
    block, process, method = 4, cedd.roulette(V, 0.7), cedd.METHODS["bayes-star"]
    model, clean = network(), torch.randint(V, (B, L))
    t = torch.linspace(0.05, 0.95, B * 4).double().reshape(B, 4)
    draws = NoiseDraws.make((B, L), V, clean.device, torch.Generator().manual_seed(2))
    together = batch_loss(
        method.in_blocks(block), model, noisy_batch(method.in_blocks(block), process, clean, t, draws)
    )
    number, total = torch.arange(L) // block, 0.0
    for k in range(4):
        end = (k + 1) * block
        pattern = AttentionPattern(number[:end, None] >= number[:end])

        def one_block(x_t: Tensor, sigma: Tensor, k: int = k, pattern: AttentionPattern = pattern) -> Tensor:
            text = torch.cat([clean[:, : k * block], x_t], 1)
            levels = torch.cat([torch.zeros(B, k), sigma[:, None]], 1).double()
            return model.head(model.features(text, levels, attention=pattern))[:, -block:]

        here = slice(k * block, end)
        part = NoiseDraws(draws.u[:, here], draws.redraw[:, here])
        total += batch_loss(method, one_block, noisy_batch(method, process, clean[:, here], t[:, k], part)) / 4
    torch.testing.assert_close(together, total, rtol=1e-6, atol=1e-9)  # sigma is float32


def token_loss(method: str, outputs: Tensor, x: int, x0: int, matrix: Tensor, rates: Tensor) -> float:
    """The loss of one position from its definition: cross entropy of a denoiser, or score entropy of ratios."""
    count = len(outputs)
    if method == "sedd":
        moves = [y for y in range(count) if y != x and rates[x, y] > 0]
        known = {y: float(matrix[y, x0] / matrix[x, x0]) for y in moves}
        return sum(float(rates[x, y]) * (float(outputs[y].exp()) - known[y] * float(outputs[y])) for y in moves)
    counts = x == count or bool((rates[x, :count] > 0).any())
    return float(outputs.logsumexp(0) - outputs[x0]) if counts else 0.0


QUICK = {("absorb", "cedd"), ("roulette", "sedd"), ("eroulette", "cedd")}


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(every_process(3), ("cedd", "sedd"))
    ],
)
def test_expected_loss_matches_enumeration(kind: str, method: str) -> None:
    """Enumerates texts and noise at V = 3, L = 4, b = 2; within 4 standard errors (one false alarm in 16,000)."""
    vocabulary, length, block, t = 3, 4, 2, torch.tensor([0.3, 0.8]).double()
    process = every_process(vocabulary)[kind]
    model = BlockNetwork(process, length, block, seed=1)
    law = random_data(vocabulary, length, seed=2)
    for second in range(1, vocabulary):  # to save time, all texts begin with one of three blocks
        law[:, second] = 0
    law = law / law.sum()

    def expected(start: int, past: tuple[int, ...], of_block: np.ndarray) -> float:
        chain = matching_chain(process, block)
        matrix, rates = (torch.tensor(f(chain, float(t[start // block]))) for f in (transition, rate_matrix))
        states = torch.tensor(chain.states)
        outputs = model.after(past)(states, process.sigma(t[start // block]).float().expand(len(states)))
        total = 0.0
        for chance, x0 in zip(of_block, chain.clean, strict=True):
            for x, made in zip(chain.states, outputs, strict=True):
                reached = chance * math.prod(float(matrix[x[i], x0[i]]) for i in range(block))
                if reached > 0:
                    costs = [token_loss(method, made[i], x[i], x0[i], matrix, rates) for i in range(block)]
                    total += reached * sum(costs)
        return total

    flat = law.numpy().ravel()
    parts = given_past(flat, vocabulary, length, block)
    exact = sum(chance * expected(len(past), past, of_block) for chance, past, of_block in parts) / length
    generator = torch.Generator().manual_seed(3)
    texts = torch.tensor(list(itertools.product(range(vocabulary), repeat=length)))
    losses = []
    for _ in range(40):
        x0 = texts[torch.multinomial(law.flatten(), 1000, replacement=True, generator=generator)]
        losses.append(
            cedd.loss(model, process, x0, method=method, block=block, t=t.expand(1000, 2), generator=generator)
        )
    found = torch.stack(losses)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - exact) < 4 * error
    assert error < 0.02 * abs(exact)


@pytest.mark.parametrize("capacity", [None, 40])
def test_two_views_match_loss_and_gradient_of_repeated_texts(capacity: int | None) -> None:
    block, process = 4, cedd.absorb(V)
    method = cedd.METHODS["cedd-star"].in_blocks(block)
    clean = torch.randint(V, (B, L)).repeat_interleave(2, 0)
    t = torch.linspace(0.1, 0.7, 2 * B * 4).double().reshape(2 * B, 4)
    draws = NoiseDraws.make((2 * B, L), V, clean.device, torch.Generator().manual_seed(2))
    found = []
    for views in (1, 2):
        model = network()
        batch = noisy_batch(method, process, clean, t, draws, capacity, views=views)
        assert batch.clean is not None
        assert len(batch.clean) == 2 * B // views
        loss = batch_loss(method, model, batch)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-9)


def test_plain_function_receives_clean_text_and_token_times() -> None:
    """A function without declared capabilities implements the pattern itself and takes one noise level per token."""
    seen: dict[str, Tensor] = {}

    def model(x_t: Tensor, sigma: Tensor, *, clean: Tensor) -> Tensor:
        seen.update(x_t=x_t, sigma=sigma, clean=clean)
        return torch.zeros(*x_t.shape, V, dtype=torch.float64)

    clean, t = torch.randint(V, (B, L)), torch.rand(B, 4).double()
    process = cedd.uniform(V)
    loss = cedd.loss(model, process, clean, method="cedd", block=4, t=t)
    assert float(loss) == pytest.approx(math.log(V))
    assert torch.equal(seen["clean"], clean)
    torch.testing.assert_close(seen["sigma"], process.sigma(t).float().repeat_interleave(4, 1))


def test_invalid_block_settings_are_rejected() -> None:
    model, clean = network(), torch.zeros(B, L, dtype=torch.int64)
    absorb = cedd.absorb(V)
    with pytest.raises(ValueError, match=r"blocks of 5 do not divide a length of 16: use a block that divides it"):
        cedd.loss(model, absorb, clean, method="cedd", block=5)
    for wrong in (0, -4, 2.0, True):
        with pytest.raises(ValueError, match=r"at least 1 token \(got"):
            cedd.METHODS["cedd"].in_blocks(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ar is autoregressive and has no blocks \(got block=4\)"):
        cedd.loss(model, absorb, clean, method="ar", block=4)
    with pytest.raises(ValueError, match=r"the model is for blocks of 4 tokens \(got block=8\)"):
        cedd.loss(model, absorb, clean, method=cedd.METHODS["cedd"].in_blocks(4), block=8)
    with pytest.raises(ValueError, match=r"does not declare Capabilities\(attention=True\)"):
        cedd.loss(network(causal=True, time_conditioning=False), absorb, clean, method="cedd", block=4)

    class OneTime(torch.nn.Module):
        capabilities = Capabilities(features=True, attention=True)

    with pytest.raises(ValueError, match="one noise level per sequence"):
        cedd.loss(OneTime(), absorb, clean, method="cedd", block=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the blocks of x0 is \[2, 4\], t is \[2, 16\]"):
        cedd.loss(model, absorb, clean, method="cedd", block=4, t=torch.full((B, L), 0.5))


def test_method_config_round_trips_block_size() -> None:
    method = cedd.METHODS["bayes-star"].in_blocks(16)
    record = method.config()
    assert record["block"] == 16
    assert cedd.methods.method_from_config(record) == method
    assert "block" not in cedd.METHODS["bayes-star"].config()
    assert method.in_blocks(16) is method.in_blocks(None) is method
