"""Block diffusion attention with FlexAttention, which skips fully masked tiles, against a plain mask."""

import pytest
import torch
from torch import Tensor

import cedd.models.transformer as transformer_module
from cedd.block_layout import BlockLayout, InBlocks
from cedd.models.kernels.attention import tiles_of
from cedd.models.transformer import Transformer, config_from_preset

V = 50


def network(preset: str, length: int, **changes) -> Transformer:
    """A network without zero-initialized weights, which would hide the attention."""
    torch.manual_seed(0)
    config = config_from_preset(preset, vocab_size=V, has_mask=True, dropout=0.0, length=length, **changes)
    model = Transformer(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def texts(layout: BlockLayout, batch: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = batch * layout.views
    x_t = torch.randint(V + 1, (rows, layout.length), generator=generator)
    sigma = torch.rand(rows, layout.blocks, generator=generator)
    clean = torch.randint(V, (batch, layout.length), generator=generator)
    return x_t.to(device), sigma.to(device), clean.to(device)


@pytest.mark.parametrize("views", [1, 2])
def test_mask_rule_gives_tiles_of_pattern(views: int) -> None:
    """FlexAttention's tiles are those in which some query attends to some key."""
    layout = BlockLayout(160, 16, views)
    pattern = layout.pattern("cpu")
    assert pattern.rule is not None
    tiles = tiles_of(pattern.rule, layout.total, torch.device("cpu"))
    assert tiles is tiles_of(pattern.rule, layout.total, torch.device("cpu"))
    size, count = 128, -(-layout.total // 128)
    padded = torch.nn.functional.pad(pattern.visible, (0, count * size - layout.total) * 2)
    expected = padded.unflatten(0, (count, size)).unflatten(2, (count, size)).any(3).any(1)
    assert torch.equal(tiles.to_dense()[0, 0].bool(), expected)
    assert not expected.all()


@pytest.mark.slow
def test_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, which FlexAttention supports only on GPUs."""
    torch.compiler.reset()
    monkeypatch.setattr(transformer_module, "takes_tiles", lambda device, width: True)
    calls = []
    monkeypatch.setattr(transformer_module, "tiles_of", lambda *given: calls.append(given) or tiles_of(*given))
    layout = BlockLayout(32, 4, 2)
    model = network("tiny", 32, time_conditioning=False).requires_grad_(False)
    x_t, sigma, clean = texts(layout, 2)
    wanted = InBlocks(model, 4).features(x_t, sigma, clean=clean)
    assert not calls
    model.compile(backend="eager")
    found = InBlocks(model, 4).features(x_t, sigma, clean=clean)
    assert len(calls) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("conditioned", [True, False])
@pytest.mark.parametrize(("length", "block", "views"), [(128, 16, 2), (128, 4, 1), (96, 32, 2), (256, 1, 1)])
def test_compiled_gpu_attention_matches_masked_cpu_attention(
    length: int, block: int, views: int, conditioned: bool
) -> None:
    """Features and gradients: in float32 to 1e-3, in bfloat16 to 3%, also for the mask without a compiler."""
    layout = BlockLayout(length, block, views)
    found: dict[str, list[Tensor]] = {}
    for name, device, compiled, autocast in (
        ("cpu", "cpu", False, False),
        ("mask", "cuda", False, False),
        ("tiles", "cuda", True, False),
        ("bf16 mask", "cuda", False, True),
        ("bf16 tiles", "cuda", True, True),
    ):
        torch.compiler.reset()
        model = network("char", length, time_conditioning=conditioned).to(device)
        if compiled:
            model.compile()
        x_t, sigma, clean = texts(layout, 3, device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            features = InBlocks(model, block).features(x_t, sigma, clean=clean)
        weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(2)).to(device)
        gradients = torch.autograd.grad((features.float() * weights).sum(), list(model.backbone.parameters()))
        found[name] = [tensor.float().cpu() for tensor in (features.detach(), *gradients)]
    for name, tolerance in (("mask", 1e-3), ("tiles", 1e-3), ("bf16 mask", 0.03), ("bf16 tiles", 0.03)):
        for ours, plain in zip(found[name], found["cpu"], strict=True):
            assert (ours - plain).norm() <= tolerance * plain.norm() + 1e-6, name
