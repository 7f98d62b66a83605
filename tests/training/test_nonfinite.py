"""A non-finite loss never reaches the weights: the run stops and reports where, or skips the step."""

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from cedd.losses import NoisyBatch
from cedd.training.config import TrainConfig
from cedd.training.distributed import LossModule
from cedd.training.loop import NonFiniteLoss, Trainer
from tests.training.runs import ALONE, Watching, assert_same_run, checkpoint_steps, final_log, final_state, run

Make = Callable[..., TrainConfig]


class InfiniteGradient(torch.autograd.Function):
    """The identity with an infinite gradient, which the loss alone does not reveal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, float("inf"))


SPOIL: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda loss: loss * float("nan"),
    "infinity": lambda loss: loss * float("inf"),
    "gradient": lambda loss: InfiniteGradient.apply(loss),  # pyright: ignore[reportReturnType, reportAssignmentType]
}


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """spoil(k, how): the k-th forward pass from now, counted from 0, becomes non-finite."""
    healthy = LossModule.forward

    def install(number: int, how: str) -> None:
        calls = iter(range(10**6))

        def forward(module: LossModule, batch: NoisyBatch) -> Tensor:
            loss = healthy(module, batch)
            return SPOIL[how](loss) if next(calls) == number else loss

        monkeypatch.setattr(LossModule, "forward", forward)

    return install


@pytest.mark.parametrize("how", SPOIL)
def test_run_stops_and_reports_step_batch_and_checkpoint(config: Make, spoil: Callable[..., None], how: str):
    spoil(6, how)
    with pytest.raises(NonFiniteLoss) as caught:
        run(config())
    message = str(caught.value)
    assert message.startswith("step 7 (batch 6)")
    assert f"the last good checkpoint is {config().out / 'checkpoints' / 'step-00000004'}" in message
    assert checkpoint_steps(config().out) == [4]
    (record,) = [record for record in final_log(config().out) if record["kind"] == "nonfinite"]
    assert (record["step"], record["batch"]) == (7, 6)


def test_error_before_first_checkpoint_reports_that_none_exists(config: Make, spoil: Callable[..., None]):
    spoil(1, "nan")
    with pytest.raises(NonFiniteLoss, match="there is no checkpoint yet"):
        run(config())


def test_no_checkpoint_is_saved_at_nonfinite_step(config: Make, spoil: Callable[..., None]):
    spoil(7, "nan")
    with pytest.raises(NonFiniteLoss, match="step 8 "):
        run(config())
    assert checkpoint_steps(config().out) == [4]


def test_no_checkpoint_is_saved_at_nonfinite_last_step(config: Make, spoil: Callable[..., None]):
    spoil(11, "nan")
    with pytest.raises(NonFiniteLoss, match="step 12 "):
        run(config())
    assert checkpoint_steps(config().out) == [4, 8]


def test_run_resumes_from_last_good_checkpoint(config: Make, spoil: Callable[..., None]):
    run(config("whole"))
    spoil(6, "nan")
    with pytest.raises(NonFiniteLoss):
        run(config("spoiled"))
    spoil(-1, "nan")
    run(config("spoiled"))
    assert_same_run(config("whole").out, config("spoiled").out)


SKIPPING = {"on_nonfinite": "skip", "compile": "off"}


def assert_skips(trainer: Trainer) -> None:
    """The run whose loss is spoiled in step 7 leaves weights and moments as they are in that step."""
    held: dict[int, dict[str, Tensor]] = {}

    def remember(step: int) -> None:
        held[step] = {name: tensor.clone() for name, tensor in trainer.state.tensors().items()}

    trainer.hooks = Watching(remember)
    assert trainer.run().finished
    kept = [name for name in held[6] if not name.startswith("average/")]
    assert all(torch.equal(held[6][name], held[7][name]) for name in kept)
    assert not all(torch.equal(held[7][name], held[8][name]) for name in kept)


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.slow if how == "nan" else ()) for how in SPOIL])
def test_skipped_step_leaves_weights_and_moments_unchanged(config: Make, spoil: Callable[..., None], how: str):
    said = StringIO()
    spoil(6, how)
    assert_skips(Trainer(config("run", SKIPPING), ALONE, Console(file=said)))
    assert "step 7 (batch 6)" in said.getvalue()
    assert "skipped" in said.getvalue()


def test_run_with_skipped_step_has_finite_state_and_valid_json_log(config: Make, spoil: Callable[..., None]):
    spoil(6, "nan")
    run(config("run", {"on_nonfinite": "skip"}))
    folder = config().out / "checkpoints" / "step-00000012"
    state = json.loads((folder / "state.json").read_text())
    assert (state["step"], state["values"]["updates"]) == (12, 11)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (config().out / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    trained = [record["step"] for record in final_log(config().out) if record["kind"] == "train"]
    assert trained == [step for step in range(1, 13) if step != 7]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in final_state(config().out).values())


def test_skipped_step_count_survives_resume(config: Make, spoil: Callable[..., None]):
    """The next update needs the moments' own update count, which is one less than the step count."""
    settings = {"on_nonfinite": "skip", "checkpoint_every": 2}
    spoil(3, "nan")
    run(config("whole", settings))
    spoil(3, "nan")
    run(config("parts", {**settings, "steps": 6}))
    spoil(-1, "nan")
    run(config("parts", settings))
    assert_same_run(config("whole").out, config("parts").out)
