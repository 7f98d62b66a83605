"""`cedd quickstart --fast` from end to end: its output, its page, and the commands that reproduce its results."""

import contextlib
import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from cedd.apps.bench.train import our_step, timed
from cedd.cli import main
from cedd.cli.arguments import Quickstart, parse
from cedd.cli.quickstart import (
    BOXED_CORRECTION,
    EVERY,
    LEAST_STEPS,
    OTHER_SECONDS,
    OTHER_STEPS,
    activation,
    configuration,
    first_choice,
    seconds_per_step,
    summary,
    vocabulary,
    with_steps,
    within,
)
from cedd.storage import write_json
from cedd.training.config import read_config, to_json
from cedd.training.run_folder import TRAIN_FILE
from cedd.training.time_limit import TimeLimit
from tests.cli.helps import help_text

Record = dict
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def out(fast_run: Path) -> Path:
    return fast_run


@pytest.fixture
def record(out: Path) -> Record:
    """The figures of the run."""
    return json.loads((out / "report.json").read_text())


def page(out: Path) -> str:
    return (out / "report.html").read_text("utf-8")


def shown(html: str, section: str) -> str:
    """The text of a section without its tags."""
    found = re.search(rf'<section id="{section}">(.*?)</section>', html, re.DOTALL)
    assert found, section
    return re.sub(r"<[^>]*>", "", found[1])


def test_page_is_complete_and_self_contained(out: Path, record: Record):
    text = page(out)
    for name in ("curves", "bound", "baselines", "noise", "samples", "infilling", "correction", "again"):
        assert len(shown(text, name)) > 40, name
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert text.count('<svg class="chart"') == 3
    for process in ("absorb", "uniform", "roulette"):
        assert f"<h3>{process}" in text
    assert text.count("t = 0.1</th>") == 3
    assert "srcdoc=" in text


def test_page_figures_match_record(out: Path, record: Record):
    text, bound = page(out), record["bound"]
    assert f'<b id="bits">{bound["bits_per_character"]:.3f}</b>' in text
    low, high = bound["ci95"]
    assert low < bound["bits_per_character"] < high
    assert f"[{low:.3f}, {high:.3f}]" in shown(text, "bound")
    _, last, half = record["bounds"][-1]
    curve = shown(text, "curves")  # the curve's last point and the headline, each with its interval
    assert f"{last:.3f} [{last - half:.3f}, {last + half:.3f}]" in curve
    assert f"{bound['bits_per_character']:.3f} [{low:.3f}, {high:.3f}]" in curve
    assert last - half < high
    assert low < last + half
    table = shown(text, "baselines")
    assert {"unigram", "gzip", "xz"} < {baseline["name"] for baseline in record["baselines"]}
    assert any(re.fullmatch(r"\d-gram", baseline["name"]) for baseline in record["baselines"])
    for baseline in record["baselines"]:
        assert f"{baseline['name']}{baseline['bits_per_character']:.3f}" in table
    correction = record["correction"]
    assert f"It restores {correction['fixed']:,} of {correction['wrong']:,} wrong letters" in shown(text, "correction")
    assert record["losses"][-1][0] == 60
    assert record["bounds"][-1][0] == 60


def test_fast_run_learns(record: Record):
    """Far from good after 60 steps, but the loss and the bound have decreased."""
    losses = [loss for _, loss in record["losses"]]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:5])
    assert record["bounds"][-1][1] < record["bounds"][0][1] - 0.5


@pytest.mark.slow
def test_repeated_command_gives_same_figures(out: Path, record: Record, capsys: pytest.CaptureFixture[str]):
    assert main(["quickstart", "--fast", "--out", str(out), "--device", "cpu", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again.pop("page") == str(out / "report.html")
    assert again == record


def test_printed_commands_reproduce_results(out: Path, record: Record, capsys: pytest.CaptureFixture[str]):
    def called(name: str) -> str:
        words = shlex.split(record["commands"][name])
        assert words[0] == "cedd"
        assert main([*words[1:], "--device", "cpu", *(["--json"] if name in ("sample", "infill") else [])]) == 0
        return capsys.readouterr().out

    assert json.loads(called("sample"))["samples"] == record["samples"]
    assert json.loads(called("infill"))["texts"] == record["infilling"]["fills"]
    assert called("correct").rstrip("\n") == record["correction"]["examples"][0]["corrected"].rstrip("\n")
    training = shlex.split(record["commands"]["train"])
    assert training[:2] == ["cedd", "train"]
    assert parse("train", training[2:]).config == read_config(out / "train.json")


def test_evaluate_command_reproduces_bound(out: Path, record: Record, capsys: pytest.CaptureFixture[str]):
    words = shlex.split(record["commands"]["evaluate"])
    assert main([*words[1:], "--device", "cpu", "--json"]) == 0
    assert f"{record['bound']['nats_per_token']:.9f}"[:9] in capsys.readouterr().out


def test_next_steps_start_with_activation_if_cedd_is_not_on_path(tmp_path, monkeypatch):
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("activate", "cedd", "python"):
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert activation() == [f"source '{folder / 'activate'}'"]
    monkeypatch.chdir(tmp_path)
    assert activation() == ["source 'my env/bin/activate'"]
    monkeypatch.setenv("PATH", str(folder))
    assert activation() == []
    monkeypatch.setenv("PATH", str(tmp_path))
    (folder / "activate").unlink()  # no virtual environment
    assert activation() == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start/tutorial.md"])
def test_pages_show_activation_before_first_cedd_command(page):
    text = (ROOT / page).read_text("utf-8")
    uses = re.search(r"^(\$ |    )cedd ", text, re.MULTILINE)
    assert text.index("source .venv/bin/activate") < (uses.start() if uses else len(text))


def test_different_configuration_in_same_folder_is_rejected(
    out: Path, record: Record, capsys: pytest.CaptureFixture[str]
):
    assert main(["quickstart", "--out", str(out), "--device", "cpu"]) == 2
    assert "holds another run" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_configuration_fits_device_and_is_not_compiled(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Compiling takes longer than the run; a GPU's steps cost the same at a larger batch."""
    monkeypatch.setattr("cedd.cli.quickstart.pick_device", lambda _: torch.device(kind))
    config = configuration(Quickstart())
    config.check()
    assert config.model.build(config.process.build(96), config.length, causal=False)
    assert config.compile == {"cpu": "off", "cuda": "record"}[kind]
    assert config.batch.size == {"cpu": 16, "cuda": 128}[kind]
    assert kind == "cpu" or f"after {config.steps} steps" in help_text("quickstart")


@pytest.mark.parametrize("milliseconds", [5, 29, 92, 2000])
def test_run_uses_the_given_minutes(milliseconds: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Training and everything else fit into --minutes at the initially measured speed; a GPU needs no more."""
    monkeypatch.setattr("cedd.cli.quickstart.timed", lambda step, steps, warmup, device: [milliseconds] * max(1, steps))
    said = io.StringIO()
    config = configuration(Quickstart(out=tmp_path / "run", device="cpu"))
    for minutes in (4, 20):
        chosen, hooks = within(config, 60 * minutes, Console(file=said, width=200))
        found = re.findall(rf"{milliseconds} ms on this machine: (\d+) steps for {minutes} minutes", said.getvalue())
        steps = int(found[-1])
        seconds = OTHER_SECONDS + (steps + OTHER_STEPS) * milliseconds / 1000
        assert steps == LEAST_STEPS or 0.97 * 60 * minutes < seconds <= 60 * minutes
        assert ("may take longer" in said.getvalue().splitlines()[-1]) == (seconds > 60 * minutes)
        assert chosen.optimizer.warmup + EVERY == LEAST_STEPS  # the steps of a run with no time left
        assert isinstance(hooks, TimeLimit)
        assert hooks.planned == steps  # which is reported at the end if it has changed
        assert 60 * minutes - OTHER_SECONDS - 5 < hooks.seconds <= 60 * minutes - OTHER_SECONDS
        falls = (1 - chosen.optimizer.decay_share) * chosen.steps
        assert chosen.steps == max(steps, first_choice(chosen.optimizer))
        assert falls >= chosen.optimizer.warmup + 2 * EVERY  # the number is chosen at least once more
        assert (chosen.evaluation.every, chosen.checkpoint_every) == (chosen.steps // 10,) * 2
        chosen.check()
    monkeypatch.setattr("cedd.cli.quickstart.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("cedd.cli.quickstart.our_step", lambda config, vocabulary: contextlib.nullcontext())
    faster, _ = within(configuration(Quickstart(out=tmp_path / "run")), 240, Console(quiet=True))
    assert faster.steps <= 1500
    assert (faster.steps == 1500) == (OTHER_SECONDS + (1500 + OTHER_STEPS) * milliseconds / 1000 < 240)


def test_one_thread_is_used_if_faster_than_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config, before = configuration(Quickstart(out=tmp_path / "run", device="cpu")), torch.get_num_threads()
    try:
        for slow, kept in ((1000, 1), (200, 2)):
            torch.set_num_threads(2)
            speeds = {1: 300, 2: slow}
            monkeypatch.setattr("cedd.cli.quickstart.timed", lambda *_, of=speeds: [of[torch.get_num_threads()]] * 4)
            assert seconds_per_step(config, torch.device("cpu")) == pytest.approx(min(speeds.values()) / 1000)
            assert torch.get_num_threads() == kept
    finally:
        torch.set_num_threads(before)


def test_steps_are_really_timed(tmp_path: Path):
    config = configuration(Quickstart(fast=True, out=tmp_path / "run", device="cpu"))
    with our_step(config, 97) as step:
        assert all(0 < each < 60_000 for each in timed(step, 2, 1, torch.device("cpu")))
    assert not (tmp_path / "run").exists()


def test_resumed_run_keeps_its_steps(out: Path):
    config = configuration(Quickstart(fast=True, out=out, device="cpu"))
    said = io.StringIO()
    again, hooks = within(config, 6000, Console(file=said, width=200))
    assert again.steps == config.steps == 60
    assert "was started with 60 steps, which --minutes does not change" in said.getvalue()
    assert not isinstance(hooks, TimeLimit)


def test_run_stopped_before_choosing_steps_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = configuration(Quickstart(out=tmp_path / "run", device="cpu"))
    monkeypatch.setattr("cedd.cli.quickstart.seconds_per_step", lambda *_: 1000.0)
    for begun in (False, True):
        first, hooks = within(config, 60, Console(quiet=True))
        assert first.steps == first_choice(config.optimizer) > LEAST_STEPS
        assert isinstance(hooks, TimeLimit), begun
        assert hooks.planned == LEAST_STEPS
        write_json(config.out / TRAIN_FILE, to_json(first))


def test_resumed_run_keeps_its_rate_decay(tmp_path: Path):
    """It was chosen with the last number of steps, from the speed of the machine at that time."""
    config = configuration(Quickstart(out=tmp_path / "run", device="cpu"))
    begun = replace(config, steps=690, optimizer=replace(config.optimizer, decay_share=0.19))
    write_json(config.out / TRAIN_FILE, to_json(begun))
    again, _ = within(config, 240, Console(quiet=True))
    assert again == replace(with_steps(config, 690), optimizer=begun.optimizer)


def test_steps_are_timed_with_final_vocabulary_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With a few thousand tokens, the vocabulary head takes a large part of a step."""
    timed_with: list[int] = []

    def step(config, size):
        timed_with.append(size)
        return contextlib.nullcontext()

    monkeypatch.setattr("cedd.cli.quickstart.our_step", step)
    monkeypatch.setattr("cedd.cli.quickstart.timed", lambda step, steps, warmup, device: [50.0])
    config = configuration(Quickstart(out=tmp_path / "run", device="cpu"))
    within(config, 240, Console(quiet=True))
    assert config.text.tokenizer == f"bpe:{timed_with[0]}"
    assert vocabulary(replace(config, text=replace(config.text, tokenizer="char"))) == 97


@pytest.mark.slow
def test_run_beats_gzip_after_a_fraction_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As on cores with a third of the speed of those in dev/lab-notes.md."""
    assert main(["quickstart", "--steps", "500", "--out", str(tmp_path / "run"), "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    gzip = next(baseline for baseline in record["baselines"] if baseline["name"] == "gzip")
    assert record["bound"]["bits_per_character"] < gzip["bits_per_character"]
    assert record["bound"]["characters"] == len((tmp_path / "run" / "held-out.txt").read_text())


def test_summary_reports_model_worse_than_gzip(record: Record, out: Path):
    """60 steps of a tiny network are above gzip; figures below it get no such line."""
    report: Any = SimpleNamespace(
        bound=SimpleNamespace(bits_per_character=4.0, ci95=(3.9, 4.1)),
        baselines=[SimpleNamespace(name="gzip", bits_per_character=2.6)],
        correction=None,
        commands={},
    )
    above = summary(report, 60, out / "report.html", 30.0)
    assert "above gzip: 60 steps are too few; train longer with cedd quickstart --minutes 20" in above
    report.bound.bits_per_character = 2.5
    below = summary(report, 60, out / "report.html", 30.0)
    assert "above gzip" not in below
    assert below.splitlines()[-1] == f"  {BOXED_CORRECTION}"  # by the packaged model, if the run's own cannot correct
    words = shlex.split(BOXED_CORRECTION, comments=True)
    assert parse("correct", words[2:])


def test_torchrun_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The first rank reports it in one line; no rank does anything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, code, said in (
        ("0", 2, "cedd: error: quickstart runs in one process, but WORLD_SIZE is 2; run it without torchrun\n"),
        ("1", 0, ""),
    ):
        monkeypatch.setenv("RANK", rank)
        assert main(["quickstart", "--fast", "--out", str(tmp_path / "run")]) == code
        assert capsys.readouterr() == ("", said)
    assert not (tmp_path / "run").exists()
