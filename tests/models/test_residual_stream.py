"""The residual stream: a block follows its equation; which of its parts are fused or skipped."""

import pytest
import torch
import torch.nn.functional as F

from cedd.models import residual_stream as stream_module
from cedd.models.residual_stream import AdaptiveNorm, Modulation, ResidualStream, checkpointed, prepare_branches
from cedd.models.transformer import Block, Transformer, config_from_preset

WIDTH = 64


def modulation(seed):
    parts = torch.randn(3, 3, 1, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Modulation(*parts)


def block_and_inputs(conditioned=True, **changes):
    torch.manual_seed(0)
    changes = {"dropout": 0.0, "time_conditioning": conditioned, **changes}
    config = config_from_preset("tiny", vocab_size=5, has_mask=True, **changes)
    backbone = Transformer(config).double().backbone
    block = backbone.blocks[0]
    assert isinstance(block, Block)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.2)
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    modulations = (modulation(1), modulation(2)) if conditioned else (Modulation(), Modulation())
    return block, x, modulations, (backbone.cosine[:7], backbone.sine[:7])


def written_out(block, x, modulations, rotation):
    """x + gate * branch(norm(x) * (1 + scale) + shift), twice; plain pre-norm branches without a modulation."""
    branches = ((block.attention_norm, lambda h: block.attention(h, rotation)), (block.mlp_norm, block.mlp))
    for (norm, branch), (shift, scale, gate, *_) in zip(branches, modulations, strict=True):
        normed = F.layer_norm(x, (WIDTH,), norm.weight)
        x = x + branch(normed) if gate is None else x + gate * branch(normed * (1 + scale) + shift)
    return x


def closed(stream):
    """The stream's sum."""
    return stream.x + (stream.branch if stream.gate is None else stream.gate * stream.branch)


@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize("run", [lambda block, *inputs: block(*inputs), checkpointed])
def test_block_follows_its_equation(run, conditioned):
    block, x, modulations, rotation = block_and_inputs(conditioned)
    inputs = [x, *block.parameters()]
    wanted = written_out(block, x, modulations, rotation)
    got = closed(run(block, ResidualStream(x), *modulations, rotation))
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(y.cos().sum(), inputs) for y in (got, wanted)]
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


def test_two_consecutive_blocks_compose():
    block, x, modulations, rotation = block_and_inputs()
    once = written_out(block, x, modulations, rotation)
    stream = block(block(ResidualStream(x), *modulations, rotation), *modulations, rotation)
    torch.testing.assert_close(closed(stream), written_out(block, once, modulations, rotation))


def test_branch_at_selected_positions_is_zero_elsewhere():
    block, x, (first, second), rotation = block_and_inputs()
    where = torch.tensor([7, 0, 20])
    everywhere = block(ResidualStream(x), first, second, rotation).branch
    somewhere = block(ResidualStream(x), first, second._replace(where=where), rotation).branch
    expected = torch.zeros_like(everywhere).flatten(0, 1).index_copy(0, where, everywhere.flatten(0, 1)[where])
    torch.testing.assert_close(somewhere.flatten(0, 1), expected)


def test_norm_is_required_between_branches():
    stream = ResidualStream(torch.zeros(1, 2, 4)) + Modulation().gated(torch.ones(1, 2, 4))
    with pytest.raises(AssertionError, match="between two branches"):
        _ = stream + Modulation().gated(torch.ones(1, 2, 4))
    norm = AdaptiveNorm(4, dropout=0.0, has_weight=True)
    torch.testing.assert_close(norm(stream, Modulation()), torch.zeros(1, 2, 4))
    assert stream.branch is None
    assert torch.equal(stream.x, torch.ones(1, 2, 4))


def test_seeds_are_drawn_only_for_kernel_dropout(monkeypatch):
    modulations = [Modulation()] * 5
    where, cuda = torch.tensor([1]), torch.device("cuda")
    for device, dropout in (("cpu", True), ("cuda", False)):
        prepared = prepare_branches(modulations, where, torch.device(device), dropout)
        assert [part.seed for part in prepared] == [None] * 5
        assert [part.where for part in prepared] == [None, None, None, where, None]
    monkeypatch.setattr(torch, "randint", lambda high, shape, dtype, device: torch.arange(*shape, dtype=dtype))
    assert [part.seed for part in prepare_branches(modulations, None, cuda, True)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("conditioned", "checkpointed_blocks"), [(True, False), (True, True), (False, False)])
def test_every_gated_branch_uses_fused_operation(monkeypatch, conditioned, checkpointed_blocks):
    calls, fused = [], stream_module.add_and_norm

    def recording(x, branch, gate, shift, scale, dropped, seed):
        calls.append(dropped)
        return fused(x, branch, gate, shift, scale, dropped, seed)

    monkeypatch.setattr(stream_module, "add_and_norm", recording)
    changes = {"time_conditioning": conditioned, "checkpoint_blocks": checkpointed_blocks}
    model = Transformer(config_from_preset("tiny", vocab_size=5, has_mask=True, **changes))
    features = model.features(torch.zeros(2, 8, dtype=torch.int64), torch.rand(2))
    assert calls == ([26] * 4 if conditioned else [])
    features.sum().backward()
    assert len(calls) == (7 if checkpointed_blocks else 4 if conditioned else 0), "the last norm is in no block"
    calls.clear()
    model.eval().features(torch.zeros(2, 8, dtype=torch.int64), torch.rand(2))
    assert calls == ([0] * 4 if conditioned else [])
