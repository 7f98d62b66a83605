"""Bounds and samples during training: computed with averaged weights, for every method, with no effect on training."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cedd.bounds.estimator import estimate_bound
from cedd.bounds.stop import STOPS, choose_stop
from cedd.data.training_data import prepare_training_data
from cedd.models.folder import load_folder
from cedd.training.config import PRESETS, TrainConfig, unused_settings
from cedd.training.loop import TrainResult
from cedd.training.state import EVALUATION, derived_seed
from tests.training.runs import assert_resumes, final_log, final_state, run

Make = Callable[..., TrainConfig]
SMALL: dict[str, Any] = {"evaluation.every": 6, "evaluation.sequences": 16, "evaluation.draws": 4}
SMALL |= {"evaluation.samples": 2, "evaluation.sample_steps": 4, "log_every": 4}


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in final_log(out) if record["kind"] == kind]


@pytest.mark.parametrize(("method", "process"), [("cedd-star", "roulette"), ("dfm", "absorb"), ("ar", "absorb")])
def test_every_method_type_is_evaluated(config: Make, method: str, process: str):
    assert_evaluated(run(config("run", {**SMALL, "method": method, "process.name": process})), config().out)


def assert_evaluated(result: TrainResult, out: Path) -> None:
    bounds, samples = records(out, "bound"), records(out, "sample")
    assert [record["step"] for record in bounds] == [6, 12]
    assert [record["step"] for record in samples] == [6, 6, 12, 12]
    assert all(len(record["text"]) == 12 for record in samples)
    assert result.bound is not None
    assert result.bound == bounds[-1]["nats_per_token"]
    assert 0.5 < result.bound < 20


def test_stop_time_is_chosen_on_training_text_and_saved(config: Make):
    """The last logged bound is for the process that the run's folder describes."""
    settings = config("run", {**SMALL, "method": "sedds", "process.name": "uniform"})
    result = run(settings)
    assert_evaluated(result, settings.out)
    folder, data = load_folder(settings.out), prepare_training_data(settings.data, 12, settings.text)
    assert bound_of_folder(settings)[0] == result.bound
    assert folder.method.dynamics.stop in STOPS
    assert json.loads((settings.out / "config.json").read_text())["method"] == folder.method.config()
    blocks = torch.from_numpy(data.train.evenly_spaced(32))
    assert choose_stop(folder.model, folder.process, blocks, method="sedds") == folder.method


def bound_of_folder(config: TrainConfig) -> tuple[float, float]:
    """The estimate and standard error that anyone finds who loads the run's folder."""
    folder = load_folder(config.out)
    blocks = torch.from_numpy(prepare_training_data(config.data, 12, config.text).validation.evenly_spaced(16))
    generator = torch.Generator().manual_seed(derived_seed(config.seed, EVALUATION))
    found = estimate_bound(folder.model, folder.process, blocks, method=folder.method, draws=4, generator=generator)
    return found.nats_per_token, found.stderr


def test_logged_bound_uses_averaged_weights(config: Make):
    settings = config("run", {**SMALL, "optimizer.ema": 0.95})
    result = run(settings)
    (record,) = [r for r in records(settings.out, "bound") if r["step"] == 12]
    assert bound_of_folder(settings) == (record["nats_per_token"], record["stderr"])
    assert record["nats_per_token"] == result.bound
    assert record["perplexity"] == pytest.approx(math.exp(record["nats_per_token"]))


def test_evaluations_do_not_affect_training(config: Make):
    run(config("evaluated", {**SMALL, "evaluation.every": 2}))
    run(config("plain", {"log_every": 4}))
    evaluated, plain = final_state(config("evaluated").out), final_state(config("plain").out)
    assert all(torch.equal(evaluated[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_resumed_run_logs_same_bounds_and_samples(config: Make):
    assert_resumes(config, SMALL, crash=7)
    assert len(records(config("crashed").out, "bound")) == 2


def test_samples_can_be_disabled(config: Make):
    run(config("run", {**SMALL, "evaluation.samples": 0}))
    assert len(records(config().out, "bound")) == 2
    assert not records(config().out, "sample")


def test_text_smaller_than_batch_gives_warning(config: Make, tmp_path: Path):
    """Its blocks repeat within a batch; with complementary masks a batch has half as many blocks."""
    small = tmp_path / "small.txt"
    small.write_text("the cat sat on the mat. " * 10)
    for pairs, blocks in ((False, 64), (True, 32)):
        said = StringIO()
        changes = {"data": str(small), "steps": 1, "batch.size": 64, "batch.complementary": pairs}
        settings = config(f"small-{pairs}", changes)
        run(settings, console=Console(file=said, width=200))
        many = load_folder(settings.out).config["data"]["train"]["blocks"]
        assert (
            f"the text has only {many} blocks of {settings.length} tokens, so a batch of {blocks} repeats them"
            in said.getvalue()
        )
    said = StringIO()
    run(config("enough", {"steps": 1}), console=Console(file=said, width=200))
    assert "repeats" not in said.getvalue()


@pytest.mark.parametrize(
    ("method", "lowest", "highest", "warned"),
    [("sedd", 0.2, 0.8, True), ("sedds", 1e-3, 0.8, True), ("sedd", 1e-3, 1.0, False), ("cedd", 0.2, 0.8, False)],
)
def test_score_entropy_on_limited_times_gives_warning(
    config: Make, method: str, lowest: float, highest: float, warned: bool
):
    """A preset may restrict the times to a range tuned for cross entropy."""
    said = StringIO()
    changes = {"method": method, "batch.lowest_time": lowest, "batch.highest_time": highest, "steps": 1}
    run(config("run", changes), console=Console(file=said, width=200))
    line = (
        f"{method} is trained at times [{lowest}, {highest}] only, but score entropy needs all times: add "
        "--batch.lowest-time 0.001 --batch.highest-time 1.0\n"
    )
    assert (line in said.getvalue()) == ("score entropy" in said.getvalue()) == warned


@pytest.mark.parametrize(("method", "complementary"), [("ar", True), ("ar", False), ("cedd", True)])
def test_complementary_batches_without_masks_give_warning(config: Make, method: str, complementary: bool):
    """A preset may enable complementary masks, which need a method with noise."""
    said = StringIO()
    changes = {"method": method, "batch.complementary": complementary, "steps": 1}
    run(config("run", changes), console=Console(file=said, width=200))
    line = "ar has no masks: complementary batches repeat each sequence; add --no-batch.complementary\n"
    assert (line in said.getvalue()) == (method == "ar" and complementary)


def test_flag_named_in_warning_is_accepted():
    _, preset = PRESETS["small-fast"]
    changed = replace(preset, method="ar", batch=replace(preset.batch, complementary=False))
    assert "batch.complementary" not in unused_settings(changed)
