"""Run configuration: a registry entry is all that a process or a schedule needs to be trained."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import cedd
from cedd.apps.report.commands import train_command
from cedd.cli.arguments import parse
from cedd.process import PROCESSES
from cedd.schedules import SCHEDULES, check_time, double
from cedd.training.config import PRESETS, ProcessConfig, TrainConfig, differing_settings, dotted, from_json, to_json
from tests.training.runs import run

Make = Callable[..., TrainConfig]


@dataclass(frozen=True)
class Quadratic(cedd.Schedule):
    total: float = 8.0

    def sigma(self, t: Tensor | float) -> Tensor:
        return self.total * check_time(t) ** 2

    def rate(self, t: Tensor | float) -> Tensor:
        return 2 * self.total * check_time(t)

    def inverse(self, sigma: Tensor | float) -> Tensor:
        return (double(sigma) / self.total).sqrt()


def shuffle_first(
    vocab_size: int, until: float = 0.5, p_m: float = 1.0, schedule: cedd.Schedule | None = None
) -> cedd.TokenProcess:
    made = cedd.eroulette(vocab_size, schedule=schedule, mask_share=lambda t: p_m * torch.sigmoid(20 * (t - until)))
    return replace(made, spec={"name": "shuffle-first", "vocab_size": vocab_size, "until": until, "p_m": p_m})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROCESSES, "shuffle-first", shuffle_first)
    monkeypatch.setitem(SCHEDULES, "quadratic", Quadratic)


def test_every_registered_process_and_schedule_is_built_by_name():
    for name in PROCESSES:
        assert ProcessConfig(name).build(7).config()["name"] == name
    for name in SCHEDULES:
        assert ProcessConfig("absorb", {"schedule": {"name": name}}).build(7).config()["schedule"]["name"] == name


COSINE = {"schedule": {"name": "cosine", "eps": 0.1}}


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("absorb", COSINE, cedd.absorb(5, cedd.Cosine(0.1))),
        ("uniform", {"schedule": {"eps": 0.1}}, cedd.uniform(5, cedd.LogLinear(0.1))),
        ("roulette", {"p_m": 0.5, **COSINE}, cedd.roulette(5, 0.5, cedd.Cosine(0.1))),
        ("eroulette", {"mask_share": {"stop": 0.8}}, cedd.eroulette(5, mask_share=cedd.PowerShare(0.0, 0.8, 1.0))),
        ("eroulette", {"mask_share": 0.5}, cedd.eroulette(5, mask_share=0.5)),
        ("eroulette", {"p_m": 0.5}, cedd.eroulette(5, 0.5)),
        ("hybrid", {"p_u": 0.2, "rise": 0.4}, cedd.hybrid(5, 0.2, rise=0.4)),
    ],
)
def test_process_is_built_from_name_and_arguments(
    name: str, arguments: dict[str, object], expected: cedd.TokenProcess
) -> None:
    made = ProcessConfig(name, arguments).build(5)
    assert made == expected
    assert made.config() == expected.config()
    words = [word for key, value in dotted(arguments).items() for word in (f"--process.{key}", str(value))]
    asked = parse("train", ["tiny", "--out", "x", *words, "--process", name]).config.process
    assert asked.build(5).config() == expected.config()


def test_process_name_resets_arguments_but_single_argument_keeps_others():
    preset = PRESETS["english-char"][1].process
    assert preset.arguments == {"p_m": 0.5, "schedule": {"name": "polynomial", "power": 0.5}}

    def asked(*words: str) -> dict[str, object]:
        return parse("train", ["english-char", "--out", "x", *words]).config.process.arguments

    assert asked() == preset.arguments
    assert asked("--process.p-m", "0.9") == {**preset.arguments, "p_m": 0.9}
    assert asked("--process.schedule.eps=1e-4")["schedule"] == {"name": "polynomial", "power": 0.5, "eps": 1e-4}
    assert asked("--process.schedule", "cosine") == {"p_m": 0.5, "schedule": {"name": "cosine"}}
    assert asked("--process.p-m", "0.9", "--process", "roulette") == {"p_m": 0.9}


def test_equal_processes_count_as_same_run(config: Make):
    """Whether written with default arguments or with the same values given explicitly."""
    usual = config("run", {"process.name": "roulette"})
    same = config("run", {"process.name": "roulette", "process.p_m": 0.95, "process.schedule": {"eps": 1e-3}})
    assert usual != same
    assert differing_settings(usual, same) == []
    assert differing_settings(usual, config("run", {"process.p_m": 0.9})) == ["process.p_m"]
    assert differing_settings(usual, config("run", {"process.name": "uniform"})) == ["process.name", "process.p_m"]


@pytest.mark.usefixtures("registered")
def test_custom_process_and_schedule_train_and_load(config: Make):
    words = "tiny --out x --process shuffle-first --process.until 0.3 --process.p-m 0.9"
    schedule = ["--process.schedule", "quadratic", "--process.schedule.total", "6"]
    process = parse("train", [*words.split(), *schedule]).config.process
    chosen = replace(config("run"), process=process)
    run(chosen)
    expected = {"name": "shuffle-first", "until": 0.3, "p_m": 0.9, "schedule": {"name": "quadratic", "total": 6.0}}
    saved = cedd.load(chosen.out, device="cpu").process.config()
    assert {**saved, "vocab_size": None} == {**expected, "vocab_size": None}
    assert from_json(TrainConfig, to_json(chosen)) == chosen


@pytest.mark.usefixtures("registered")
def test_train_command_parses_back_to_same_config():
    words = ["tiny", "--out", "x", "--process", "shuffle-first", "--process.until", "0.3"]
    words += ["--process.schedule", "quadratic", "--process.schedule.total", "6"]
    asked = parse("train", words)
    command = shlex.split(train_command(asked.config))
    assert command[:3] == ["cedd", "train", "tiny"]
    assert parse("train", command[2:]) == asked


@pytest.mark.parametrize(("words", "wanted"), [("--tensorboard", True), ("", False)])
def test_flag_needs_no_value(words: str, wanted: bool):
    assert parse("train", ["tiny", *words.split(), "--out", "x"]).config.tensorboard is wanted


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("shuffle-first", {"untl": 0.3}, "--process.untl: shuffle-first takes until, p_m, schedule"),
        ("roulette", {"vocab_size": 3}, "--process.vocab-size: roulette takes p_m, schedule"),
        (
            "absorb",
            {"schedule": {"name": "quadratic", "eps": 0.1}},
            "quadratic takes total (eps is an argument of log-linear",
        ),
        (
            "absorb",
            {"p_m": 0.5},
            "--process.p-m: absorb takes schedule (p_m is an argument of roulette and eroulette and",
        ),
        ("absorbing", {}, "--process: invalid choice: 'absorbing'; did you mean 'absorb'?"),
    ],
)
def test_unexpected_process_arguments_are_rejected(name: str, arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ProcessConfig(name, arguments).build(5)
    assert "\n" not in str(error.value)
