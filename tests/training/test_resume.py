"""An interrupted run, however it ended, resumes to bit-identical weights."""

import json
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from cedd.methods import get_method
from cedd.models.folder import load_folder
from cedd.storage import sealed
from cedd.training import loop
from cedd.training.config import TrainConfig, differing_settings, read_config
from cedd.training.loop import Trainer
from cedd.training.optimizer import learning_rate
from cedd.training.run_folder import folder_lock
from cedd.training.validation import Validation
from tests.limits import limited_memory
from tests.training.runs import (
    ALONE,
    Crash,
    assert_resumes,
    assert_same_run,
    changed,
    checkpoint_steps,
    crash_at,
    final_log,
    final_state,
    listen,
    run,
    tiny_config,
    write_corpus,
)

Make = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def whole(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, the reference for runs with the same settings."""
    settings = tiny_config(corpus, cache, tmp_path_factory.mktemp("whole") / "whole")
    run(settings)
    return settings.out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"method": "sedd", "process.name": "absorb", "optimizer.schedule": "cosine", "optimizer.ema_warmup": True},
            marks=pytest.mark.slow,
        ),
        {"method": "ar", "process.name": "absorb", "batch.accumulate": 2, "optimizer.weight_decay": 0.1},
        pytest.param({"optimizer.matrices": "muon"}, marks=pytest.mark.slow),  # in blocks by default
        # the checkpoint lies between two moves of the average
        pytest.param({"optimizer.ema_every": 3}, marks=pytest.mark.slow),
    ],
    ids=["cedd-star", "sedd", "ar", "muon", "average"],
)
def test_crashed_run_resumes_bit_exactly(config: Make, changes: dict[str, Any]):
    assert assert_resumes(config, changes).finished


def test_ema_interval_affects_only_averages_and_may_change(config: Make):
    run(config("third", {"optimizer.ema_every": 3, "steps": 8}))
    run(config("every", {"steps": 8}))
    third, every = final_state(config("third").out), final_state(config("every").out)
    different = {name for name in every if not torch.equal(third[name], every[name])}
    assert different
    assert all(name.startswith(("average/", "file/")) for name in different)
    assert run(config("third", {"optimizer.ema_every": 1})).finished


def test_repeated_crashes_do_not_change_result(config: Make, whole: Path):
    for step in (2, 4, 5, 9, 11):
        with pytest.raises(Crash):
            run(config("crashed"), crash_at(step))
    run(config("crashed"))
    assert_same_run(whole, config("crashed").out)


@pytest.mark.slow
def test_checkpoint_interval_does_not_change_result(config: Make, whole: Path):
    with pytest.raises(Crash):
        run(config("crashed", {"checkpoint_every": 3}), crash_at(8))
    run(config("crashed", {"checkpoint_every": 5, "keep": 1}))
    assert_same_run(whole, config("crashed").out)


def test_different_seed_gives_different_run(config: Make, whole: Path):
    """Shows that the comparison can fail."""
    run(config("other", {"seed": 1}))
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same_run(whole, config("other").out)


def test_more_steps_continue_a_finished_run(config: Make):
    run(config("whole", {"steps": 16}))
    run(config("extended"))
    assert run(config("extended", {"steps": 16})).step == 16
    assert_same_run(config("whole").out, config("extended").out)


def test_finished_run_is_left_unchanged(config: Make):
    run(config())
    files = {path: path.stat().st_mtime_ns for path in (config().out / "checkpoints").rglob("*")}
    result = run(config())
    assert (result.step, result.finished, result.loss) == (12, True, None)
    assert files == {path: path.stat().st_mtime_ns for path in (config().out / "checkpoints").rglob("*")}


def test_missing_weights_file_is_written_by_next_run(config: Make):
    run(config())
    before = final_state(config().out)
    (config().out / "model.safetensors").unlink()
    run(config())
    assert all(torch.equal(tensor, before[name]) for name, tensor in final_state(config().out).items())


@pytest.fixture
def signals() -> Iterator[None]:
    before = listen()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_signal_saves_and_stops(config: Make, whole: Path, number: signal.Signals):
    said = StringIO()

    def stop(step: int) -> None:
        if step == 5:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    result = run(config("stopped"), stop, Console(file=said))
    assert signal.getsignal(number) is before
    assert (result.reason, result.finished, result.exit_code) == ("stopped", False, 128 + number)
    assert result.step == 6  # the current step is finished, but no further one
    assert checkpoint_steps(config("stopped").out)[-1] == result.step
    assert f"step {result.step}: stopped; model in {config('stopped').out}" in said.getvalue()
    run(config("stopped"), console=Console(file=said))
    assert f"resuming {config('stopped').out} at step {result.step}" in said.getvalue()
    assert_same_run(whole, config("stopped").out)


@pytest.mark.usefixtures("signals")
def test_second_interrupt_stops_immediately(config: Make):
    def stop(step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(config(), stop)
    assert checkpoint_steps(config().out) == []


def test_run_finishes_despite_signal_at_last_step(config: Make):
    def stop(step: int) -> None:
        if step == 11:
            signal.raise_signal(signal.SIGTERM)

    result = run(config(), stop)
    assert (result.step, result.reason, result.finished, result.exit_code) == (12, "finished", True, 0)


def test_ignored_signal_stays_ignored(config: Make):
    """As under nohup: the run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(config("run", {"steps": 4}), lambda step: signal.raise_signal(signal.SIGHUP)).finished
    finally:
        signal.signal(signal.SIGHUP, before)


def test_damaged_checkpoint_falls_back_to_previous_one(config: Make, whole: Path):
    run(config("damaged", {"steps": 11}))
    (newest,) = (config().out.parent / "damaged" / "checkpoints" / "step-00000011").glob("*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-100])
    said = StringIO()
    run(config("damaged"), console=Console(file=said))
    assert "step-00000011 is damaged" in said.getvalue()
    assert newest.name in said.getvalue()
    assert "at step 8" in said.getvalue()
    assert_same_run(whole, config("damaged").out)


def test_run_restarts_with_message_if_all_checkpoints_are_damaged(config: Make, whole: Path):
    run(config("damaged"))
    for file in config("damaged").out.rglob("checkpoints/*/state.json"):
        file.unlink()
    said = StringIO()
    with pytest.raises(ValueError, match="no complete checkpoint to resume from"):
        run(config("damaged", {"resume": "must"}), console=Console(file=said))
    run(config("damaged"), console=Console(file=said))
    assert "starting from the first step" in said.getvalue()
    assert_same_run(whole, config("damaged").out)


def test_truncated_log_is_repaired(config: Make, whole: Path):
    with pytest.raises(Crash):
        run(config("crashed"), crash_at(7))
    log = config("crashed").out / "log.jsonl"
    log.write_text(log.read_text() + '{"step": 7, "kind": "tr')
    run(config("crashed"))
    assert_same_run(whole, config("crashed").out)
    assert [record["step"] for record in final_log(whole)] == list(range(1, 13))


def test_leftovers_of_killed_run_are_removed(config: Make):
    out = config().out
    run(config("run", {"steps": 4}))
    for name in ("model.safetensors", "config.json", "log.jsonl"):
        (out / f".{name}.{uuid.uuid4().hex}.tmp").mkdir()
    (out / "checkpoints" / ".step-00000008.tmp").mkdir()
    (out / ".editor.tmp").write_text("somebody else's")
    run(config("run", {"steps": 4}))  # even if nothing is left to do
    assert [path.name for path in out.rglob("*") if path.name.startswith(".")] == [".editor.tmp"]


# Invalid input


def test_checkpoint_of_another_run_is_rejected_naming_the_setting(config: Make):
    run(config("run", {"steps": 4}))
    run(config("other", {"steps": 8, "seed": 1}))
    shutil.copytree(
        config("other").out / "checkpoints" / "step-00000008", config().out / "checkpoints" / "step-00000008"
    )
    before = final_state(config("other").out)
    with pytest.raises(ValueError, match=r"checkpoint of another run \(its seed is 1, not 0\)"):
        run(config("run", {"steps": 12}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in final_state(config("other").out).items())


def test_checkpoint_of_different_data_is_rejected(config: Make, tmp_path: Path):
    changes = {"data": str(write_corpus(tmp_path / "words.txt", words=200)), "steps": 4}
    run(config("run", changes))
    write_corpus(tmp_path / "words.txt", words=200, seed=1)
    run(config("other", changes))
    shutil.rmtree(config("other").out / "checkpoints")
    shutil.copytree(config().out / "checkpoints", config("other").out / "checkpoints")
    with pytest.raises(ValueError, match=r"another run \(its data_sha256 is"):
        run(config("other", changes))


def test_folder_of_another_run_is_rejected_naming_the_setting(config: Make):
    run(config("run", {"steps": 4}))
    for setting, value in {"optimizer.rate": 0.5, "seed": 9, "length": 24, "process.p_m": 0.5}.items():
        before = config().seed if setting == "seed" else ""
        with pytest.raises(ValueError, match=rf"holds another run \({setting} is {value}, not {before}") as error:
            run(config("run", {setting: value}))
        assert f"--from {config().out} --out NEW" in str(error.value)


def test_run_completed_meanwhile_in_same_folder_is_preserved(config: Make, tmp_path: Path):
    """Another process found the folder empty and was still preparing its data."""
    corpus = write_corpus(tmp_path / "words.txt", words=200)
    late = Trainer(config("run", {"data": str(corpus), "seed": 1}), ALONE, Console(quiet=True))
    write_corpus(corpus, words=200, seed=1)
    later = Trainer(config("run", {"data": str(corpus), "steps": 4}), ALONE, Console(quiet=True))
    write_corpus(corpus, words=200, seed=2)
    run(config("run", {"data": str(corpus), "steps": 4}))
    files = {path: path.read_bytes() for path in config().out.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds another run \(seed is 1, not 0\)"):
        late.run()
    with pytest.raises(ValueError, match=r"the data .* has changed"):
        later.run()
    assert {path: path.read_bytes() for path in config().out.rglob("*") if path.is_file()} == files


def test_some_settings_may_change_on_resume(config: Make, tmp_path: Path):
    free: dict[str, Any] = {"steps": 99, "keep": 1, "log_every": 7, "evaluation.every": 3, "evaluation.draws": 9}
    free |= {"text.workers": 2, "text.cache": tmp_path / "elsewhere", "model.checkpoint_blocks": True}
    assert differing_settings(config(), changed(config(), free)) == []
    assert differing_settings(config(), changed(config(), {"text.tokenizer": "byte", **free})) == ["text.tokenizer"]


def test_resume_never_and_must(config: Make):
    with pytest.raises(ValueError, match="no run to resume"):
        run(config("run", {"resume": "must", "steps": 4}))
    assert not config().out.exists()
    run(config("run", {"resume": "never", "steps": 4}))
    with pytest.raises(ValueError, match="already holds a run"):
        run(config("run", {"resume": "never"}))
    assert run(config("run", {"resume": "must"})).finished


def test_existing_file_or_model_as_output_is_rejected(config: Make, tmp_path: Path):
    (tmp_path / "file").write_text("not a run")
    with pytest.raises(ValueError, match="is a file; choose another"):
        run(config("file"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(ValueError, match="choose another"):
        run(config("model"))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"somebody's"


@pytest.mark.parametrize("name", ["README.md", "config.json", "log.jsonl", ".git"])
def test_unrelated_folder_is_rejected_and_left_unchanged(config: Make, name: str):
    out = config().out
    out.mkdir()
    (out / name).write_text("somebody's")
    with pytest.raises(ValueError, match=f"is not a run's folder: it contains {name}; choose another --out"):
        run(config())
    assert [path.name for path in out.iterdir()] == [name]
    assert (out / name).read_text() == "somebody's"


def test_run_killed_after_first_file_resumes(config: Make):
    run(config("whole", {"steps": 4}))
    out = config().out
    (out / f".train.json.{uuid.uuid4().hex}.tmp").mkdir(parents=True)
    assert run(config("run", {"steps": 4})).finished
    for path in sorted(out.rglob("*"), reverse=True):
        if path.name != "train.json":
            path.unlink() if path.is_file() else path.rmdir()
    assert run(config("run", {"steps": 4})).finished
    assert_same_run(config("whole").out, out)


def test_changed_data_is_rejected_on_resume(config: Make, tmp_path: Path):
    text = write_corpus(tmp_path / "own.txt", 500)
    run(config("run", {"data": str(text), "steps": 4}))
    write_corpus(text, 500, seed=1)
    with pytest.raises(ValueError, match="has changed since the run"):
        run(config("run", {"data": str(text)}))


def test_allow_changes_updates_rate_and_schedule_on_resume(config: Make):
    new = {"optimizer.rate": 2e-3, "optimizer.schedule": "cosine", "steps": 12}
    for name in ("changed", "crashed"):
        run(config(name, {"steps": 6}))
    with pytest.raises(ValueError, match=r"optimizer.rate is 0.002, not 0.01; .*; add --allow-changes"):
        run(config("changed", new))
    allowed = {**new, "allow_changes": True}
    screen = StringIO()
    run(config("changed", allowed), console=Console(file=screen, width=200))
    assert "optimizer.rate is 0.002 from step 6 on (it was 0.01)\n" in screen.getvalue()
    log = final_log(config("changed").out)
    rates = {record["step"]: record["rate"] for record in log if record["kind"] == "train"}
    schedule = config("changed", new)
    expected = {step + 1: learning_rate(schedule.optimizer, step, 12) for step in range(6, 12)}
    assert {step: rates[step] for step in range(7, 13)} == expected
    assert rates[6] == 0.01
    changes = {"optimizer.rate": [0.01, 2e-3], "optimizer.schedule": ["constant", "cosine"]}
    assert [record for record in log if record["kind"] == "change"] == [{"step": 6, "kind": "change", **changes}]
    with pytest.raises(Crash):
        run(config("crashed", allowed), crash_at(7))
    with pytest.raises(ValueError, match=r"checkpoint of another run \(its optimizer.rate is 0.01, not 0.002"):
        run(config("crashed", new))
    run(config("crashed", allowed))
    assert_same_run(config("changed").out, config("crashed").out)
    assert run(config("changed", {**new, "steps": 14})).step == 14  # the new settings are the run's
    with pytest.raises(ValueError, match=r"\(optimizer.matrices is muon, not adamw\); choose another --out"):
        run(config("changed", {**allowed, "optimizer.matrices": "muon"}))
    with pytest.raises(ValueError, match=r"\(length is 24, not 12\); choose another --out"):
        run(config("changed", {**allowed, "length": 24}))


def test_renamed_data_files_count_as_same_data(config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "own.txt", 500)
    write_corpus(tmp_path / "held.txt", 200, seed=2)
    run(config("run", {"data": "own.txt", "text.validation": "held.txt", "steps": 4}))
    (tmp_path / "held.txt").rename(tmp_path / "moved.txt")
    renamed = {"data": "./own.txt", "text.validation": str(tmp_path / "moved.txt")}
    assert run(config("run", {**renamed, "steps": 6})).step == 6
    assert read_config(config().out / "train.json").data == "./own.txt"
    assert run(config("run", {**renamed, "steps": 8, "text.tokenizer": "./run"})).step == 8
    write_corpus(tmp_path / "moved.txt", 200, seed=3)
    with pytest.raises(ValueError, match=r"the validation data \(.*moved.txt\) has changed since the run in .* began"):
        run(config("run", renamed))
    (tmp_path / "other.txt").write_text((tmp_path / "own.txt").read_text()[::-1])  # of the same length
    with pytest.raises(ValueError, match=r"the data \(other.txt\) has changed since the run in .* began"):
        run(config("run", {**renamed, "data": "other.txt"}))
    with pytest.raises(ValueError, match=r"another run \(data is hf:owner/name, not ./own.txt\)"):  # before a download
        run(config("run", {**renamed, "data": "hf:owner/name"}))


def test_damaged_log_does_not_prevent_resume(config: Make, whole: Path):
    with pytest.raises(Crash):
        run(config("crashed"), crash_at(6))
    log = config("crashed").out / "log.jsonl"
    content = log.read_bytes().splitlines(keepends=True)
    content[1] = b"\xff\x00" + content[1][2:]
    log.write_bytes(b"".join(content))
    screen = StringIO()
    run(config("crashed"), console=Console(file=screen, width=300))
    assert f"{log} is damaged: 1 line cannot be read and will be dropped" in screen.getvalue()
    expected, found = final_state(whole), final_state(config("crashed").out)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert [record["step"] for record in final_log(config("crashed").out)] == [1, *range(3, 13)]


@pytest.mark.parametrize(
    "change",
    [{"averaged": "x"}, {"updates": -1}, {"updates": 10**30}, {"best": "low"}, {"stale": None}, {"more": 1}, None],
)
def test_forged_counters_give_one_line_error(config: Make, whole: Path, change: dict[str, Any] | None):
    shutil.copytree(whole, config("forged").out)
    file = config("forged").out / "checkpoints" / "step-00000012" / "state.json"
    state = json.loads(file.read_text())
    del state["sha256"]
    state["values"] = {} if change is None else {**state["values"], **change}
    file.write_text(json.dumps(sealed(state)))
    with pytest.raises(ValueError, match=rf"{file}: values\b") as error:
        run(config("forged", {"steps": 14}))
    assert "\n" not in str(error.value)


# Weights and their description


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values in a JSON object, by the names that lead to them."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    else:
        yield path, value


def other_values(value: Any) -> list[Any]:
    """Values of the same kind that a file could plausibly have instead."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2 or 2, value / 2 if isinstance(value, float) else value + 1, 10**9, 10**30]
    return [8.0] if value is None else ["bayes", "uniform", "linear", value + "2"]


def test_every_edit_of_run_config_is_rejected(config: Make, whole: Path):
    """Change each value that describes the weights; every change gives a one-line error that names the folder."""
    folder = config("edited").out
    shutil.copytree(whole, folder)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    parts = ("format", "method", "process", "network", "length", "tokenizer")
    edits = 0
    for path, value in [*leaves({name: content[name] for name in parts}), (("wrap",), None)]:
        for other in ["bos-eos"] if path == ("wrap",) else other_values(value):
            edited = json.loads(file.read_text())
            place = edited
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = other
            file.write_text(json.dumps(edited))
            with limited_memory(1 << 30), pytest.raises(ValueError, match=re.escape(str(folder))) as error:
                load_folder(folder)
            assert "\n" not in str(error.value), (path, other)
            file.write_text(json.dumps(content))
            edits += 1
    assert edits > 60
    assert load_folder(folder).length == 12


def test_run_folder_is_loadable_after_every_write(config: Make, monkeypatch: pytest.MonkeyPatch):
    """config.json changes at the end, where a method that stops before t = 0 chooses its stop time, and on resume.
    After every write, the weights match the description."""
    changes = {"method": "dfm", "process.name": "absorb", "model.checkpoint_blocks": True}
    out = config().out
    loads: list[float] = []

    def checked(module: Any, name: str) -> None:
        write = getattr(module, name)

        def writing(*arguments: Any, **options: Any) -> Any:
            made = write(*arguments, **options)
            if (out / "model.safetensors").is_file():
                loads.append(load_folder(out).method.dynamics.stop)
            return made

        monkeypatch.setattr(module, name, writing)

    checked(loop, "save_weights")
    checked(loop, "save_description")
    run(config("run", {**changes, "steps": 4}))
    run(config("run", {**changes, "steps": 6, "model.checkpoint_blocks": False}))
    usual = get_method("dfm").dynamics.stop
    stops = [stop == usual for stop in loads]
    # Weights at the end, weights that may be read by both descriptions, the final config.json; the same once resumed.
    assert stops == [True, True, False, True, True, True, False]


def test_run_locked_by_another_process_is_rejected(config: Make):
    run(config("run", {"steps": 4}))
    with folder_lock(config().out), pytest.raises(ValueError, match="another process is training"):
        run(config())
    assert run(config()).finished


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"optimizer.rate": 0.0}, "rate must be positive"),
        ({"optimizer.ema": 1.0}, "ema must be in"),
        ({"batch.lowest_time": 1.0}, "lowest_time must be in"),
        ({"batch.lowest_time": 0.3, "batch.highest_time": 0.2}, "below batch.highest_time"),
        ({"batch.lowest_time": 0.3, "batch.last_highest_time": 0.2}, "below batch.last_highest_time"),
        ({"evaluation.patience": 3}, "set evaluation.every too"),
        ({"model.width": 15}, "multiple of 4"),
        ({"device": "cuda:77"}, "no CUDA device found, only cpu"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_settings_are_rejected_before_training(config: Make, changes: dict[str, Any], message: str):
    from cedd.training.loop import run_training

    if "device" in changes and torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(ValueError, match=message):
        run_training(config("run", changes), Console(quiet=True))


# What a run leaves behind


@pytest.mark.usefixtures("pictures")
def test_run_writes_no_pickle_files(config: Make):
    run(config())
    kinds = {".json", ".jsonl", ".safetensors", ".png"}
    files = [path for path in config().out.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == kinds
    for path in files:
        content = path.read_bytes()
        assert not content.startswith((b"\x80", b"PK")), path  # how pickles and torch's zip files begin
        if path.suffix == ".json":
            json.loads(content)
        if path.suffix == ".safetensors":
            size = int.from_bytes(content[:8], "little")
            assert set(content[8 : 8 + size].strip()[:1]) == set(b"{")


def test_run_folder_is_a_loadable_model(config: Make):
    run(config())
    folder = load_folder(config().out)
    averages = {name: t for name, t in final_state(config().out).items() if name.startswith("average/")}
    assert len(averages) == len(folder.model.state_dict())
    for name, tensor in folder.model.state_dict().items():
        assert torch.equal(tensor, averages[f"average/{name}"]), name
    assert (folder.method.name, folder.length, folder.process.has_mask) == ("cedd-star", 12, True)
    assert folder.tokenizer.decode(folder.tokenizer.encode("one tree")) == "one tree"
    assert not folder.model.training


def test_saved_configuration_matches_run(config: Make):
    chosen = config("run", {"optimizer.schedule": "cosine", "process.schedule.eps": 1e-2, "steps": 4})
    run(chosen)
    assert read_config(chosen.out / "train.json") == chosen


def test_last_k_checkpoints_are_kept(config: Make):
    run(config("run", {"keep": 2, "checkpoint_every": 3, "steps": 11}))
    assert checkpoint_steps(config().out) == [9, 11]


def test_logged_rates_follow_schedule(config: Make):
    run(config("run", {"optimizer.schedule": "cosine", "optimizer.final_share": 0.1}))
    rates = [record["rate"] for record in final_log(config().out)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates[5] == pytest.approx(0.01)
    assert rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)
    assert 0.001 < rates[-1] < 0.0016


def test_ema_warmup_keeps_average_close_to_weights(config: Make):
    """With the warm-up, the first averages follow the weights far more closely."""
    distance: dict[bool, float] = {}
    for warm in (False, True):
        name = f"warm-{warm}"
        run(config(name, {"steps": 8, "optimizer.ema": 0.9999, "optimizer.ema_warmup": warm}))
        state = final_state(config(name).out)
        names = [key.removeprefix("model/") for key in state if key.startswith("model/")]
        distance[warm] = sum(float((state[f"model/{n}"] - state[f"average/{n}"]).square().sum()) for n in names)
    assert distance[True] < 0.5 * distance[False]


# Evaluations and the early stop


@pytest.fixture
def scripted_bounds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Bounds by step, in place of measured ones."""
    bounds: dict[int, float] = {}

    def measure(_: Any, model: Any, step: int, records: Any) -> float:
        records.write(step, "bound", {"nats_per_token": bounds[step], "stderr": 0.0})
        return bounds[step]

    monkeypatch.setattr(Validation, "measure", measure)
    return bounds


def test_patience_stops_run_that_no_longer_improves(config: Make, scripted_bounds: dict[int, float]):
    scripted_bounds.update({2: 3.0, 4: 2.0, 6: 2.5, 8: 2.1, 10: 1.0, 12: 0.9})
    changes = {"evaluation.every": 2, "evaluation.patience": 2}
    result = run(config("run", changes))
    assert (result.step, result.finished, result.bound) == (8, False, 2.1)
    assert result.reason == "stopped early: the bound no longer improves"
    assert checkpoint_steps(config().out)[-1] == 8
    # Restarted, it stays stopped unless it gets more patience.
    assert run(config("run", changes)).step == 8
    assert run(config("run", {**changes, "evaluation.patience": 3})).finished


def test_patience_survives_crash(config: Make, scripted_bounds: dict[int, float]):
    scripted_bounds.update({2: 2.0, 4: 2.5, 6: 2.6, 8: 2.7, 10: 1.0, 12: 0.9})
    changes = {"evaluation.every": 2, "evaluation.patience": 3}
    assert assert_resumes(config, changes, crash=7).step == 8
    assert [r["step"] for r in final_log(config("crashed").out) if r["kind"] == "bound"] == [2, 4, 6, 8]


def test_run_without_patience_does_not_stop_early(config: Make, scripted_bounds: dict[int, float]):
    scripted_bounds.update(dict.fromkeys(range(2, 13, 2), 2.0))
    assert run(config("run", {"evaluation.every": 2})).finished


def test_recut_text_matches_only_in_first_epoch(config: Make, tmp_path: Path):
    """A text of 3 to 4 steps, read three times; a crash in the second epoch resumes with the same cuts."""
    changes = {"data": str(write_corpus(tmp_path / "short.txt", words=100))}
    losses: list[list[float]] = []
    for cut in ("once", "anew"):
        run(config(cut, {**changes, "batch.cut": cut}))
        losses.append([record["loss"] for record in final_log(config(cut).out) if record["kind"] == "train"])
    alike = [once == anew for once, anew in zip(*losses, strict=True)]
    assert 3 <= alike.index(False) <= 5
    with pytest.raises(Crash):
        run(config("crashed", {**changes, "batch.cut": "anew"}), crash_at(6))
    run(config("crashed", {**changes, "batch.cut": "anew"}))
    assert_same_run(config("anew").out, config("crashed").out)
