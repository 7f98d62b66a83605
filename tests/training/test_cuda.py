"""GPU tests: clipping and skipping inside the optimizer kernel, compiled runs, checkpoints moved between devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from cedd.losses import NoiseDraws, NoisyBatch, batch_loss, noisy_batch
from cedd.methods import get_method
from cedd.models.transformer import Transformer, config_from_preset
from cedd.process import absorb
from cedd.training.captured_gradient import CapturedGradient
from cedd.training.config import TrainConfig
from cedd.training.distributed import Ranks
from cedd.training.loop import Trainer
from tests.training.runs import Crash, Watching, changed, checkpoint_steps, crash_at, final_log, final_state, run
from tests.training.test_nonfinite import SKIPPING, assert_skips, spoil  # noqa: F401
from tests.training.test_optimizer import check_clipping

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Make = Callable[..., TrainConfig]
ON_CUDA = Ranks(0, 1, torch.device("cuda", 0))
# An eps large enough that AdamW does not amplify rounding errors in near-zero gradients.
STEADY: dict[str, Any] = {"model.dropout": 0.0, "precision": "float32", "optimizer.eps": 1e-3}


def train_on_cuda(config: TrainConfig, before_step: Callable[[int], None] | None = None) -> Trainer:
    hooks = None if before_step is None else Watching(before_step)
    trainer = Trainer(changed(config, {"device": "cuda"}), ON_CUDA, Console(quiet=True), hooks)
    trainer.run()
    return trainer


@pytest.mark.parametrize("clip", [1e-3, 0.5, 0.0, 1e3])
def test_clipping_inside_kernel_matches_clip_grad_norm(clip: float):
    check_clipping(1, clip, "cuda")


def test_skipped_step_leaves_weights_and_moments_unchanged(config: Make, spoil: Callable[..., None]):  # noqa: F811
    spoil(6, "nan")
    trainer = Trainer(config("run", {**SKIPPING, "device": "cuda"}), ON_CUDA, Console(quiet=True))
    assert_skips(trainer)
    assert trainer.state.optimizers[0].updates == 11


@pytest.mark.parametrize("mode", ["off", "graphs"])
def test_run_with_evaluations_resumes_after_crash(config: Make, mode: str):
    changes = {**STEADY, "compile": mode, "evaluation.every": 6}
    changes |= {"evaluation.sequences": 16, "evaluation.sample_steps": 4}
    train_on_cuda(config("whole", changes))
    with pytest.raises(Crash):
        train_on_cuda(config("crashed", changes), crash_at(6))
    train_on_cuda(config("crashed", changes))
    whole, crashed = final_state(config("whole").out), final_state(config("crashed").out)
    for name in whole:
        torch.testing.assert_close(whole[name], crashed[name], rtol=0, atol=1e-4, msg=name)
    kinds = [record["kind"] for record in final_log(config("whole").out)]
    assert kinds.count("bound") == 2


def test_checkpoint_moves_between_cpu_and_cuda(config: Make, tmp_path: Path):
    changes = {**STEADY, "compile": "off"}
    run(config("cpu", changes))
    run(config("mixed", {**changes, "steps": 4}))
    train_on_cuda(config("mixed", {**changes, "steps": 8}))
    run(config("mixed", changes))
    assert checkpoint_steps(config("mixed").out) == [4, 8, 12]
    alone, mixed = final_state(config("cpu").out), final_state(config("mixed").out)
    for name in alone:
        torch.testing.assert_close(alone[name], mixed[name], rtol=0, atol=1e-3, msg=name)


IN_BLOCKS: dict[str, Any] = {"block": 4, "batch.complementary": True, "model.width": 64}  # heads of 32, for tiles


@pytest.mark.parametrize(
    ("method", "process", "others"),
    [
        ("cedd-star", "absorb", {}),
        ("bayes", "roulette", {}),
        ("sedd", "uniform", {}),
        ("cedd-star", "absorb", IN_BLOCKS),
        ("bayes", "roulette", {**IN_BLOCKS, "batch.complementary": False, "model.time_conditioning": False}),
    ],
)
def test_cuda_graph_steps_match_eager_steps(config: Make, method: str, process: str, others: dict[str, Any]):
    """A run compiled and recorded as a CUDA graph gives the same result up to rounding."""
    changes = {**STEADY, "method": method, "process.name": process, "evaluation.every": 0, **others}
    plain, recorded = (
        train_on_cuda(config(f"run-{mode}", {**changes, "compile": mode})).state.tensors() for mode in ("off", "graphs")
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(
            recorded[name], tensor, rtol=2e-3, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("mode", ["record", "graphs"])
def test_cuda_graph_steps_match_eager_steps_with_rounded_weights(config: Make, mode: str):
    """The same in bfloat16, where the update rounds the weights."""
    changes = {**STEADY, "precision": "bf16", "evaluation.every": 0}
    plain, recorded = (train_on_cuda(config(f"run-{kind}", {**changes, "compile": kind})) for kind in ("off", mode))
    assert recorded.train_step.update.swept
    assert any(copy is not None for copy in recorded.train_step.update.copies.values())
    for name, tensor in plain.state.tensors().items():
        found = recorded.state.tensors()[name]
        torch.testing.assert_close(found, tensor, rtol=2e-2, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_captured_gradient_matches_eager_for_any_row_count():
    torch.manual_seed(0)
    method, process = get_method("cedd-star"), absorb(7)
    model = Transformer(config_from_preset("tiny", vocab_size=7, has_mask=True, dropout=0.0)).cuda()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)

    def gradient(batch: NoisyBatch) -> Tensor:
        loss = batch_loss(method, model, batch)
        loss.backward()
        return loss.detach()

    def batch(seed: int, capacity: int | None) -> NoisyBatch:
        generator = torch.Generator().manual_seed(seed)
        x0 = torch.randint(7, (4, 16), generator=generator)
        draws = NoiseDraws.make((4, 16), 7, x0.device, generator)
        return noisy_batch(method, process, x0, torch.full((4,), 0.5).double(), draws, capacity).to("cuda")

    captured = CapturedGradient(gradient, list(model.parameters()))
    for seed, capacity in enumerate([None, 56, 56, 56, 56, None, 56, 56]):
        given = batch(seed, capacity)
        loss = captured(given).clone()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        torch.testing.assert_close(loss, gradient(given))
        for a, b in zip(found, [p.grad for p in model.parameters()], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.grad = value
    assert captured._graph is not None
