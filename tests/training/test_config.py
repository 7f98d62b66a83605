"""A run's configuration: a row of a table is all that a process or a schedule needs to be trained."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import cedd
from cedd.cli.arguments import parse
from cedd.process import PROCESSES
from cedd.report.commands import train_command
from cedd.schedules import SCHEDULES, check_time, double
from cedd.training.config import ProcessConfig, ScheduleConfig, TrainConfig, from_json, same_run, to_json
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


def test_every_row_can_be_built_from_its_name():
    for name in PROCESSES:
        assert ProcessConfig(name).build(7).config()["name"] == name
    for name in SCHEDULES:
        assert ScheduleConfig(name).build().config()["name"] == name


def test_each_process_takes_the_settings_that_are_its_own():
    config = ProcessConfig("roulette", p_m=0.5, p_u=0.2, share_stop=0.8, schedule=ScheduleConfig("cosine", 0.1))
    expected = {
        "absorb": cedd.absorb(5, cedd.Cosine(0.1)),
        "uniform": cedd.uniform(5, cedd.Cosine(0.1)),
        "roulette": cedd.roulette(5, 0.5, cedd.Cosine(0.1)),
        "eroulette": cedd.eroulette(5, schedule=cedd.Cosine(0.1), mask_share=cedd.PowerShare(0.0, 0.8, 1.0)),
        "hybrid": cedd.hybrid(5, 0.2),
    }
    for name, process in expected.items():
        made = replace(config, name=name).build(5)
        assert made == process
        assert made.config() == process.config()


@pytest.mark.usefixtures("registered")
def test_a_row_of_yours_trains_and_is_loaded_again(config: Make):
    words = "tiny --out x --process.name shuffle-first --process.settings until 0.3 --process.p-m 0.9"
    schedule = ["--process.schedule.name", "quadratic", "--process.schedule.settings", "total", "6"]
    chosen = config("run", {"process": parse("train", [*words.split(), *schedule]).config.process})
    run(chosen)
    expected = {"name": "shuffle-first", "until": 0.3, "p_m": 0.9, "schedule": {"name": "quadratic", "total": 6.0}}
    saved = cedd.load(chosen.out, device="cpu").process.config()
    assert {**saved, "vocab_size": None} == {**expected, "vocab_size": None}
    assert from_json(TrainConfig, to_json(chosen)) == chosen


@pytest.mark.usefixtures("registered")
def test_its_command_can_be_typed_again():
    words = ["tiny", "--out", "x", "--process.name", "shuffle-first", "--process.settings", "until", "0.3"]
    asked = parse("train", words)
    command = shlex.split(train_command(asked.config))
    assert command[:3] == ["cedd", "train", "tiny"]
    assert parse("train", command[2:]) == asked


@pytest.mark.usefixtures("registered")
def test_settings_that_a_row_has_not_are_refused():
    with pytest.raises(ValueError, match="shuffle-first has no setting 'untl' of its own; it has until"):
        ProcessConfig("shuffle-first", settings={"untl": 0.3}).build(5)
    with pytest.raises(ValueError, match="roulette has no setting 'vocab_size' of its own; it has none"):
        ProcessConfig("roulette", settings={"vocab_size": 3}).build(5)
    with pytest.raises(ValueError, match="quadratic has no setting 'eps' of its own; it has total"):
        ScheduleConfig("quadratic", settings={"eps": 0.1}).build()
    with pytest.raises(ValueError, match="there is no 'absorbing'; did you mean 'absorb'"):
        ProcessConfig("absorbing").build(5)


def test_a_run_of_before_goes_on(config: Make):
    """Its file has no settings of a row's own, and names what differs if there are any now."""
    now = config("run")
    before = to_json(now)
    del before["process"]["settings"], before["process"]["schedule"]["settings"]
    assert from_json(TrainConfig, before) == now
    other = replace(now, process=replace(now.process, settings={"until": 0.3}))
    assert same_run(from_json(TrainConfig, before), other) == ["process.settings"]
    assert same_run(other, now) == ["process.settings"]
