"""The Llama network: attention patterns, the cache, the shift, low-rank updates, and training."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import cedd
from cedd.models.gpt2 import GPT2
from cedd.models.head import VocabularyHead
from cedd.models.llama import Llama, rotate, rotation_of
from cedd.models.llama_config import LlamaConfig
from cedd.network import AttentionPattern, FullPrecisionHead
from tests.interpreted import run_interpreted
from tests.models.plain_llama import visible_of

V, L = 19, 12
BASE = LlamaConfig(
    vocab_size=V, has_mask=True, width=24, depth=2, heads=4, key_heads=2, head_width=6, mlp_width=20, length=16
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "norms": {"qk_norm": True, "head_width": 8},
    "biases": {"qkv_bias": True},
    "partial": {"rotary_width": 4},
    "row": {"mask_row": 3},
    "shift": {"shift": True},
    "start": {"shift": True, "start_row": 2},
    "lora": {"lora_rank": 3},
}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"attention": "full"},
    "causal": {"attention": "causal"},
    "block": {"attention": "block-causal", "block": 4},
}


def made(kind: type[Llama] = Llama, seed: int = 0, **changes: Any) -> Llama:
    """A network whose every parameter is random."""
    torch.manual_seed(seed)
    model = kind(replace(BASE, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.4)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def tokens(batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(V + 1, (batch, L), generator=torch.Generator().manual_seed(seed))


def differs(first: Tensor, second: Tensor) -> Tensor:
    """[L]: at which positions outputs differ."""
    return (first - second).abs().amax((0, 2)) > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_depend_exactly_on_visible_tokens(kind: str, variant: str) -> None:
    model, x = made(**KINDS[kind], **VARIANTS[variant]), tokens()
    before = model(x)
    shifted, starts = model.options.shift, model.options.start_row is not None
    visible = visible_of(kind, L)
    for place in (0, 5, L - 1):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % V
        seen = visible[:, place].clone()
        if shifted:  # the output at i is that of i - 1, or of the start token, which sees what the pattern allows
            first = kind == "full" if starts else bool(seen[0])
            seen = torch.cat([torch.tensor([first]), seen[:-1]])
        assert torch.equal(differs(model(changed), before), seen)


@pytest.mark.parametrize(
    ("network", "variant"), [*product([Llama, GPT2], ["plain", "shift", "start"]), (Llama, "norms")]
)
@pytest.mark.parametrize("kind", ["causal", "block"])
def test_cached_outputs_match_full_pass(network: type[Llama], kind: str, variant: str) -> None:
    model, x = made(network, **KINDS[kind], **VARIANTS[variant]), tokens()
    expected = model.features(x)
    cache, parts = model.new_cache(len(x), L), []
    step = 4 if kind == "block" else 3
    for start in range(0, L, step):
        parts.append(model.features(x[:, start : start + step], cache=cache))
        assert cache.length == start + step
    assert torch.allclose(torch.cat(parts, 1), expected, atol=2e-6)
    cache.length = 8  # forgets the last four
    other = (x[:, 8:] + 1) % V
    again = model.features(other, cache=cache)
    assert torch.allclose(again, model.features(torch.cat([x[:, :8], other], 1))[:, 8:], atol=2e-6)


def test_token_by_token_cache_matches_full_pass() -> None:
    model, x = made(attention="causal"), tokens()
    cache = model.new_cache(len(x))
    parts = [model.features(x[:, i : i + 1], cache=cache) for i in range(L)]
    assert torch.allclose(torch.cat(parts, 1), model.features(x), atol=2e-6)


@pytest.mark.parametrize(
    ("network", "variant"),
    [*product([Llama], VARIANTS), *product([GPT2], ["plain", "tied", "row", "shift", "start", "lora"])],
)
def test_selected_rows_match_full_outputs(network: type[Llama], variant: str) -> None:
    model, x = made(network, **VARIANTS[variant]), tokens()
    where = torch.tensor([0, 1, 5, 11, 13, 23])
    found = model.rows(model.features(x, where=where), where)
    assert torch.allclose(found, model.rows(model.features(x), where), atol=1e-6)


@pytest.mark.parametrize("kind", ["full", "causal", "block"])
@pytest.mark.parametrize("variant", ["plain", "shift"])
def test_attention_pattern_matches_named_option(kind: str, variant: str) -> None:
    model, x = made(**KINDS[kind], **VARIANTS[variant]), tokens()
    other = made(**VARIANTS[variant])
    other.load_state_dict(model.state_dict())
    pattern = AttentionPattern(visible_of(kind, L))
    assert torch.allclose(other.features(x, attention=pattern), model.features(x), atol=1e-6)
    each = AttentionPattern(visible_of(kind, L).expand(len(x), L, L), torch.arange(L))
    assert torch.allclose(other.features(x, attention=each), model.features(x), atol=1e-6)


def pair_pattern(block: int) -> AttentionPattern:
    """[x_t, x_0] in one pass: noisy positions see their block and clean earlier ones, clean ones see clean blocks."""
    number = torch.arange(L).repeat(2) // block
    noisy = torch.arange(2 * L) < L
    own = noisy[:, None] & noisy & (number[:, None] == number)
    past = noisy[:, None] & ~noisy & (number[:, None] > number)
    clean = ~noisy[:, None] & ~noisy & (number[:, None] >= number)
    return AttentionPattern(own | past | clean, torch.arange(L).repeat(2))


def test_shift_with_block_size_one_matches_autoregressive_network() -> None:
    parent, x0 = made(attention="causal"), tokens() % V
    adapted = made(shift=True, start_row=2)
    adapted.load_state_dict(parent.state_dict())
    x_t = torch.full_like(x0, V)
    found = adapted(torch.cat([x_t, x0], 1), attention=pair_pattern(1))[:, :L]
    shown = torch.cat([torch.full_like(x0[:, :1], 2), x0[:, :-1]], 1)
    assert torch.allclose(found, parent(shown), atol=2e-6)


def test_shifted_block_depends_on_its_noisy_past() -> None:
    """Its first position depends on the clean token before it."""
    model, x0 = made(shift=True, start_row=2), tokens() % V
    x_t = x0.masked_fill(torch.rand(x0.shape, generator=torch.Generator().manual_seed(3)) < 0.5, V)
    pattern = pair_pattern(4)
    before = model(torch.cat([x_t, x0], 1), attention=pattern)[:, :L]
    noisy, clean = x_t.clone(), x0.clone()
    noisy[:, 5] = (noisy[:, 5] + 1) % V
    assert differs(model(torch.cat([noisy, x0], 1), attention=pattern)[:, :L], before).nonzero()[:, 0].tolist() == [
        5,
        6,
        7,
    ]
    clean[:, 6] = (clean[:, 6] + 1) % V
    seen = differs(model(torch.cat([x_t, clean], 1), attention=pattern)[:, :L], before)
    assert seen.nonzero()[:, 0].tolist() == [8, 9, 10, 11]


def test_rotation_matches_complex_multiplication() -> None:
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = rotate(
        x, rotation_of(torch.tensor([0, 1, 5]), replace(BASE, rotary_base=100.0, head_width=4), torch.float64)
    )
    assert torch.equal(found[..., 4:], x[..., 4:])
    assert torch.allclose(found[:, 0], x[:, 0])
    pairs = torch.complex(x[..., :2], x[..., 2:4])
    angles = torch.tensor([0.0, 1.0, 5.0])[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(found[..., :4], torch.cat([turned.real, turned.imag], -1), atol=1e-7)


def test_only_low_rank_updates_are_trained_and_can_be_merged() -> None:
    model, x = made(lora_rank=3), tokens()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or name == "backbone.mask" for name in trained)
    merged = model.merged()
    assert merged.options.lora_rank == 0
    assert torch.allclose(merged(x), model(x), atol=1e-5)
    fresh = Llama(replace(BASE, lora_rank=3)).eval()
    fresh.load_state_dict(fresh.weights_from(merged), strict=False)
    assert torch.allclose(fresh(x), model(x), atol=1e-5)  # new updates are 0


def test_mask_embedding_is_copied_from_parent_row() -> None:
    parent = made(attention="causal", mask_row=4, tied=True)
    child = made(seed=1, tied=True)
    child.load_state_dict(child.weights_from(parent), strict=False)
    x = tokens()
    rows = x.masked_fill(x == V, 4)
    pattern = AttentionPattern(visible_of("causal", L))
    assert child.backbone.mask is not None
    assert torch.equal(child.backbone.mask, parent.backbone.embedding.weight[4])
    assert torch.allclose(child(x, attention=pattern), parent(rows), atol=1e-6)


def test_bfloat16_head_gives_float32_outputs() -> None:
    torch.manual_seed(0)
    head = VocabularyHead(8, 10_000, bias=False, dtype=torch.bfloat16)
    torch.nn.init.normal_(head.weight)
    rows = torch.randn(3, 8)
    for found in (head(rows), FullPrecisionHead(head)(rows)):
        assert found.dtype == torch.float32
        assert torch.allclose(found, rows @ head.weight.float().T, atol=1e-5)


def test_checkpointing_does_not_change_gradients() -> None:
    plain, x = made(), tokens()
    other = made(checkpoint_blocks=True)
    other.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, other):
        model.train()
        model(x).square().mean().backward()
        grads.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    assert torch.allclose(*grads, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_heads": 3}, "heads must be a multiple of key_heads"),
        ({"rotary_width": 5}, "rotary_width must be even"),
        ({"rotary_low": 5.0}, r"rotary_high must be above rotary_low \(got 4.0 and 5.0\)"),
        ({"rotary_context": 0}, "rotary_context must be at least 1"),
        ({"rotary_yarn": 1.1}, "rotary_yarn needs rotary_context and a rotary_base above 1"),
        ({"mask_row": V}, f"mask_row must be a row of the embedding, 0 to {V - 1}"),
        ({"start_row": 1}, "start_row needs shift"),
        ({"depth": 0}, r"depth must be at least 1 \(got 0\)"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
        ({"length": 2**21}, "length must be at most"),
    ],
)
def test_invalid_sizes_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


def test_text_longer_than_network_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="20 positions do not fit a network of length 16"):
        made()(torch.zeros(1, 20, dtype=torch.int64))


def test_row_loss_gradients_match_dense() -> None:
    """The gradients of the head's chunked losses are those of dense outputs."""
    x0 = tokens() % V
    for variant in ("plain", "tied", "start"):
        model = made(**VARIANTS[variant]).train()

        def dense(x_t: Tensor, sigma: Tensor, model: Llama = model) -> Tensor:
            return model(x_t, sigma)

        found = []
        for network in (model, dense):
            model.zero_grad()
            generator = torch.Generator().manual_seed(5)
            cedd.loss(network, cedd.absorb(V), x0, method="ceddt", generator=generator).backward()
            found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
        assert torch.allclose(*found, atol=1e-5)


def test_short_attention_kernel_interpreted() -> None:
    run_interpreted("from tests.models.test_llama import check_short_attention; check_short_attention()")


def check_short_attention() -> None:
    """With norms and groups: the kernel's outputs and gradients are those of plain torch."""
    from cedd.models import llama

    config = replace(BASE, width=48, head_width=32, qk_norm=True)
    attention = llama.GroupedQueryAttention(config, 0, torch.float32)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    rotation = rotation_of(torch.arange(12), config, torch.float32)
    for causal in (False, True):
        found = []
        for short in (False, True):
            llama.is_short = lambda *_, short=short: short  # type: ignore[assignment]
            output = attention(x, rotation, llama.Visible(None, causal))
            found.append((output, *torch.autograd.grad(output.square().mean(), [x, attention.qkv.weight])))
        for plain, fused in zip(*found, strict=True):
            assert torch.allclose(plain, fused, atol=1e-5)
