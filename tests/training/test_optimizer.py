"""Learning rate schedules, AdamW with preallocated moments, clipping, and skipping of non-finite gradients."""

import itertools
import math

import pytest
import torch
from torch import nn

from cedd.models.backbone import ModuleBackbone
from cedd.models.transformer import Transformer, config_from_preset
from cedd.training.config import PRESETS, OptimizerConfig
from cedd.training.optimizer import learning_rate
from cedd.training.update import gradient_norm, make_optimizers


def test_constant_schedule_with_linear_warmup():
    config = OptimizerConfig(rate=0.5, warmup=10)
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10:] == [0.5] * 90


def test_cosine_schedule_decays_to_final_share():
    config = OptimizerConfig(rate=2.0, warmup=20, schedule="cosine", final_share=0.1)
    rates = [learning_rate(config, step, 120) for step in range(121)]
    assert rates[0] == pytest.approx(2.0 / 20)
    assert max(rates) == rates[19] == rates[20] == pytest.approx(2.0)
    assert rates[70] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[45] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert rates[120] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[20:]))
    assert learning_rate(config, 500, 120) == pytest.approx(0.2)


def test_linear_schedule_decays_to_final_share_in_last_steps():
    config = OptimizerConfig(rate=2.0, warmup=10, schedule="linear", decay_share=0.5, final_share=0.1)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[4] == pytest.approx(1.0)
    assert rates[9:51] == pytest.approx([2.0] * 42)
    assert rates[75] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[100] == learning_rate(config, 500, 100) == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[50:]))


def test_first_step_without_warmup_has_full_rate():
    assert learning_rate(OptimizerConfig(rate=0.5, warmup=0), 0, 10) == 0.5


@pytest.mark.parametrize(
    ("ema", "steps", "every"),
    [
        (0.9999, 25_000, 8),
        (0.999, 25_000, 8),
        (0.9975, 25_000, 4),
        (0.995, 25_000, 2),
        (0.98, 25_000, 1),
        (0.0, 25_000, 1),
        (0.9999, 300, 3),
    ],
)
def test_default_ema_interval_follows_decay(ema: float, steps: int, every: int):
    assert OptimizerConfig(ema=ema).steps_of_average(steps) == every
    assert OptimizerConfig(ema=ema, ema_every=5).steps_of_average(steps) == 5


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def wrapped(network: nn.Module) -> ModuleBackbone:
    return ModuleBackbone(network, vocab_size=1, has_mask=False)


def backward(network: nn.Module, step: int) -> None:
    network.zero_grad()
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    inputs = inputs.to(next(network.parameters()).device)
    network(inputs).square().mean().backward()


def test_preallocated_moments_match_torch_adamw():
    config = OptimizerConfig(rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1)
    ours, theirs = small_network(), small_network()
    (optimizer,) = make_optimizers(wrapped(ours), config)
    textbook = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        optimizer.step(1e-2, torch.tensor(1.0), 0.0, torch.tensor(True))
        textbook.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_step_uses_given_rate():
    network = small_network()
    before = [p.detach().clone() for p in network.parameters()]
    (optimizer,) = make_optimizers(wrapped(network), OptimizerConfig(rate=1.0))
    backward(network, 0)
    optimizer.step(1e-3, torch.tensor(1.0), 0.0, torch.tensor(True))
    # Adam's first step has the length of the rate in every coordinate that has a gradient.
    moved = torch.cat([(p.detach() - b).abs().flatten() for p, b in zip(network.parameters(), before, strict=True)])
    assert float(moved.max()) == pytest.approx(1e-3, rel=1e-3)


def test_embedding_and_head_may_have_separate_rates():
    network = Transformer(config_from_preset("tiny", vocab_size=5, has_mask=True, dropout=0.0))
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    config = OptimizerConfig(rate=1e-3, embedding_rate=4e-3, head_rate=2e-3)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in make_optimizers(network, config):
        optimizer.step(1e-4, torch.tensor(1.0), 0.0, torch.tensor(True))  # a tenth of the highest rates
    # Adam's first step has the length of the rate in every coordinate.
    moved = {name: float((before[name] - p).detach().mean()) for name, p in network.named_parameters()}
    own = {"backbone.embedding.weight": 4e-4, "head.weight": 2e-4, "head.bias": 2e-4}
    assert moved == pytest.approx({name: own.get(name, 1e-4) for name in moved}, rel=1e-3)


def test_nonfinite_gradient_changes_nothing():
    network = small_network()
    (optimizer,) = make_optimizers(wrapped(network), OptimizerConfig())
    backward(network, 0)
    optimizer.step(1e-2, torch.tensor(1.0), 0.0, torch.tensor(True))
    held = [p.detach().clone() for p in network.parameters()]
    held += [tensor.clone() for tensor in (*optimizer.tensors().values(), *optimizer.counts)]
    backward(network, 1)
    next(network.parameters()).grad.fill_(math.nan)  # pyright: ignore[reportOptionalMemberAccess]
    optimizer.step(1e-2, torch.tensor(1.0), 0.0, torch.tensor(False))
    now = [p.detach() for p in network.parameters()]
    now += [*optimizer.tensors().values(), *optimizer.counts]
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def test_gradient_norm_covers_all_parameters():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert gradient_norm([a, b]) == pytest.approx(5.0)


def check_clipping(length: int, clip: float, device: str = "cpu") -> None:
    """Steps by the mean loss of `length` positions, with rescaled clip and eps, equal the textbook's by the sum."""
    eps = 1e-3  # large enough to matter
    mean, total = small_network().to(device), small_network().to(device)
    config = OptimizerConfig(loss="sum", clip=clip, eps=eps).of_mean(length)
    (optimizer,) = make_optimizers(wrapped(mean), config)
    textbook = torch.optim.AdamW(total.parameters(), lr=1e-2, eps=eps, weight_decay=0.0)
    for step in range(3):
        for network, scale in ((mean, 1.0), (total, float(length))):
            network.zero_grad()
            backward(network, step)
            for parameter in network.parameters():
                assert parameter.grad is not None
                parameter.grad *= scale
        optimizer.step(1e-2, gradient_norm(mean.parameters()), config.clip, torch.tensor(True, device=device))
        if clip:
            torch.nn.utils.clip_grad_norm_(total.parameters(), clip)
        textbook.step()
    for a, b in zip(mean.parameters(), total.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if length > 1 else 1e-6)


@pytest.mark.parametrize(("length", "clip"), [(1, 1e-3), (1, 0.5), (1, 0.0), (128, 0.0), (128, 1e-2), (128, 1e4)])
def test_clipping_matches_clip_grad_norm(length: int, clip: float):
    check_clipping(length, clip)


def test_paper_presets_clip_per_sequence_gradient():
    for name in ("small", "medium"):
        config = PRESETS[name][1]
        assert config.optimizer.of_mean(config.length).clip == 1 / config.length
