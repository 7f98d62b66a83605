"""Two processes (gloo) give the results of one: gradients, weights, and interchangeable checkpoints."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from cedd.training.config import TrainConfig
from cedd.training.distributed import Ranks
from cedd.training.loop import Trainer, run_training
from tests.training.ranks import (
    assert_near,
    double_precision,
    free_port,
    gradients,
    together,
    train_and_die,
    train_in_time,
    train_together,
    train_until_signal,
    train_where_first_rank_fails,
    train_with_bad_last_rank,
    train_with_bounds,
)
from tests.training.runs import ALONE, checkpoint_steps, tiny_config

Make = Callable[..., TrainConfig]
pytestmark = pytest.mark.usefixtures("server")
# No dropout, whose random numbers differ between ranks. Odd sizes make unequal shards.
SETTINGS: dict[str, Any] = {"model.dropout": 0.0, "model.width": 20, "model.depth": 2}
SETTINGS |= {"steps": 6, "checkpoint_every": 3}


def alone(scenario: Callable[..., None], config: TrainConfig, *arguments: Any) -> None:
    with double_precision():
        scenario(ALONE, config, *arguments)


@pytest.fixture(scope="module")
def single(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state after six steps of one process."""
    folder = tmp_path_factory.mktemp("single")
    alone(train_together, tiny_config(corpus, cache, folder / "run", SETTINGS), folder / "held")
    return folder / "held"


@pytest.mark.parametrize(
    ("strategy", "method", "process", "accumulate"),
    [
        ("fsdp", "sedd", "absorb", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ddp", "bayes-star", "roulette", 1),
                ("fsdp", "bayes-star", "roulette", 1),
                ("ddp", "sedd", "absorb", 2),
                ("ddp", "ar", "absorb", 2),
                ("fsdp", "ar", "absorb", 2),
            )
        ),
    ],
)
def test_distributed_gradients_match_single_process(
    config: Make, tmp_path: Path, strategy: str, method: str, process: str, accumulate: int
):
    settings = {**SETTINGS, "method": method, "process.name": process}
    alone(gradients, config("one", settings), "single", tmp_path / "one.safetensors")
    together_settings = config("two", {**settings, "batch.accumulate": accumulate})
    assert together(gradients, together_settings, strategy, tmp_path / "two.safetensors") == [0, 0]
    assert_near(tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    gradient_sizes = [float(gradient.abs().max()) for gradient in load_file(tmp_path / "one.safetensors").values()]
    assert min(gradient_sizes) > 1e-6  # so all of them were compared


def test_accumulated_gradients_match_full_batch(config: Make, tmp_path: Path):
    for accumulate in (1, 2, 8):
        settings = config("run", {**SETTINGS, "batch.accumulate": accumulate})
        alone(gradients, settings, "single", tmp_path / f"{accumulate}")
        assert_near(tmp_path / "1", tmp_path / f"{accumulate}")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])  # fsdp with muon below
def test_distributed_weights_match_single_process(config: Make, single: Path, tmp_path: Path, strategy: str):
    settings = config("two", {**SETTINGS, "strategy": strategy})
    assert together(train_together, settings, tmp_path / "held") == [0, 0]
    assert_near(single, tmp_path / "held")
    files = sorted(path.name for path in settings.out.iterdir())
    assert not [name for name in files if name.startswith(".")], "ranks share one folder and leave nothing else in it"
    suffixes = {path.suffix for path in settings.out.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jsonl", ".safetensors"}


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_distributed_muon_matches_single_process(config: Make, tmp_path: Path, strategy: str):
    """With the features of the preset small-fast; weight decay shows whether each rank updates its own rows."""
    settings = {**SETTINGS, "optimizer.matrices": "muon", "optimizer.weight_decay": 0.1, "model.largest_score": 12.0}
    settings |= {"optimizer.embedding_rate": 4e-3, "optimizer.head_rate": 1e-3, "batch.complementary": True}
    alone(train_together, config("one", settings), tmp_path / "one.held")
    assert together(train_together, config("two", {**settings, "strategy": strategy}), tmp_path / "two.held") == [0, 0]
    assert_near(tmp_path / "one.held", tmp_path / "two.held")


def test_missing_local_rank_is_rejected(config: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but LOCAL_RANK is not set: start the ranks by torchrun"):
        run_training(config("run"))


def test_indivisible_batch_error_names_given_batch_size(config: Make):
    """The size as given, not the number of blocks, which complementary masks halve."""
    ranks = Ranks(1, 2, torch.device("cpu"))
    config("run", {"batch.size": 8, "batch.accumulate": 4}).check_shares(2)
    for changes, said in (
        ({"batch.size": 7}, "batch.size 7 cannot be shared by 2 ranks: use a multiple of 2"),
        (
            {"batch.size": 6, "batch.complementary": True},
            "batch.size 6 cannot be shared by 2 ranks, in pairs of complementary masks: use a multiple of 4",
        ),
        (
            {"batch.size": 12, "batch.complementary": True, "batch.accumulate": 4},
            "2 ranks, in pairs of complementary masks, in 4 micro-batches each: use a multiple of 8",
        ),
    ):
        settings = config("run", changes)
        settings.check_shares(1)
        with pytest.raises(ValueError, match=said):
            Trainer(settings, ranks, Console(quiet=True))


def loaded_alone(config: TrainConfig) -> dict[str, torch.Tensor]:
    """The newest checkpoint's tensors, loaded by one process."""
    with double_precision():
        trainer = Trainer(config, ALONE, Console(quiet=True))
        assert trainer.checkpoints.load_latest(trainer.state.tensors()) is not None
        return {name: tensor.clone() for name, tensor in trainer.state.tensors().items()}


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_one_rank_resumes_checkpoint_of_two_ranks(config: Make, single: Path, tmp_path: Path, strategy: str):
    settings = {**SETTINGS, "strategy": strategy}
    assert together(train_together, config("run", {**settings, "steps": 3}), tmp_path / "half") == [0, 0]
    held, loaded = load_file(tmp_path / "half"), loaded_alone(config("run", settings))
    assert all(torch.equal(held[name], loaded[name]) for name in held)
    shards = list((config().out / "checkpoints" / "step-00000003").glob("*.safetensors"))
    assert len(shards) == 2
    alone(train_together, config("run", settings), tmp_path / "held")
    assert checkpoint_steps(config().out) == [3, 6]
    assert_near(single, tmp_path / "held")


@pytest.mark.slow
def test_two_ranks_resume_checkpoint_of_one_rank(config: Make, single: Path, tmp_path: Path):
    alone(train_together, config("run", {**SETTINGS, "steps": 3}))
    settings = config("run", {**SETTINGS, "strategy": "fsdp"})
    assert together(train_together, settings, tmp_path / "held") == [0, 0]
    assert checkpoint_steps(settings.out) == [3, 6]
    assert_near(single, tmp_path / "held")


@pytest.mark.parametrize("checkpoint_every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_signal_to_one_rank_stops_all_at_same_step(config: Make, tmp_path: Path, checkpoint_every: int):
    settings = config("run", {**SETTINGS, "steps": 12, "checkpoint_every": checkpoint_every})
    assert together(train_until_signal, settings, tmp_path) == [0, 0]
    endings = {(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)}
    assert len(endings) == 1
    reason, step = endings.pop().split()
    assert reason == "stopped"
    assert checkpoint_steps(settings.out)[-1] == int(step) < 8


@pytest.mark.parametrize(
    ("reaction", "ending"),
    [("stop", "step 3 (batch 2): the loss is nan"), pytest.param("skip", "6", marks=pytest.mark.slow)],
)
def test_nonfinite_loss_on_one_rank_affects_all_ranks(config: Make, tmp_path: Path, reaction: str, ending: str):
    settings = config("run", {**SETTINGS, "on_nonfinite": reaction})
    assert together(train_with_bad_last_rank, settings, tmp_path) == [0, 0]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text().startswith(ending)


@pytest.mark.slow
def test_all_ranks_stop_early_on_first_rank_bound(config: Make, tmp_path: Path):
    changes = {**SETTINGS, "strategy": "fsdp", "steps": 12, "evaluation.every": 2, "evaluation.patience": 2}
    assert together(train_with_bounds, config("run", changes), tmp_path) == [0, 0]
    for rank in (0, 1):
        ending = (tmp_path / f"rank{rank}").read_text()
        assert ending == "stopped early: the bound no longer improves 8 2.5"


def test_all_ranks_follow_time_limit_of_first_rank(config: Make, tmp_path: Path):
    """Otherwise a rank would wait for one that has already finished."""
    assert together(train_in_time, config("run", {**SETTINGS, "steps": 30}), tmp_path) == [0, 0]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["15", "15"]


@pytest.mark.parametrize(
    "place",
    [
        "cedd.training.loop.folder_lock",  # while a run begins
        "cedd.training.checkpoints.write_durably",  # in a checkpoint
        pytest.param("cedd.training.loop.save_weights", marks=pytest.mark.slow),
        pytest.param("cedd.training.loop.save_description", marks=pytest.mark.slow),
    ],
)
def test_failure_on_first_rank_ends_all_ranks(config: Make, tmp_path: Path, place: str):
    """Otherwise the others would hang, or fail with a communication error."""
    assert together(train_where_first_rank_fails, config("run", SETTINGS), place, tmp_path) == [0, 0]
    assert "No space left on device" in (tmp_path / "rank0").read_text()
    assert (tmp_path / "rank1").read_text() == "FirstRankFailed: the first rank has failed; see its message"


def test_misplaced_checkpoint_is_rejected_by_all_ranks(config: Make, tmp_path: Path):
    settings = config("run", SETTINGS)
    alone(train_together, settings)
    checkpoints = settings.out / "checkpoints"
    (checkpoints / "step-00000006").rename(checkpoints / "step-00000099")
    assert together(train_where_first_rank_fails, settings, "", tmp_path) == [0, 0]
    assert "step-00000099 holds the checkpoint of step 6" in (tmp_path / "rank0").read_text()
    assert (tmp_path / "rank1").read_text().startswith("FirstRankFailed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["within the shards", "after the shards", "within state.json", "after it is published"]
)
def test_run_resumes_exactly_after_rank_killed_during_save(config: Make, tmp_path: Path, point: str):
    settings = {**SETTINGS, "strategy": "fsdp", "model.dropout": 0.1}
    assert together(train_together, config("whole", settings), tmp_path / "whole.tensors") == [0, 0]
    codes = together(train_and_die, config("killed", settings), point)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert together(train_together, config("killed", settings), tmp_path / "killed.tensors") == [0, 0]
    whole, killed = load_file(tmp_path / "whole.tensors"), load_file(tmp_path / "killed.tensors")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun(tmp_path: Path, corpus: Path, cache: Path, strategy: str):
    """The command line: one line of JSON in total; an invalid setting gives a clear one-line error."""
    out = tmp_path / "run"
    words = ["train", "tiny", "--data", str(corpus), "--text.cache", str(cache), "--out", str(out)]
    words += ["--steps", "4", "--evaluation.every", "0", "--strategy", strategy, "--device", "cpu"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*torchrun, "-m", "cedd", *words, *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)

    done = call("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 4
    assert checkpoint_steps(out) == [4]
    refused = call("--resume", "never")
    assert refused.returncode != 0
    assert f"cedd: error: {out} already holds a run" in refused.stderr
    (out / "checkpoints" / "step-00000004").rename(out / "checkpoints" / "step-00000099")
    refused = call()
    assert refused.stderr.count("cedd: error: ") == 1
    assert "holds the checkpoint of step 4" in refused.stderr
    assert "[rank1]: Traceback" not in refused.stderr
