"""Only complete checkpoints are used: torn and damaged ones are detected, reported and skipped."""

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cedd.storage import sealed
from cedd.training.checkpoints import STATE_FILE, Checkpoints, RunIdentity, read_checkpoint
from tests.training.runs import ALONE

RUN = RunIdentity({"seed": 0, "optimizer.rate": 0.1})


def tensors(value: float) -> dict[str, Tensor]:
    return {"model/weight": torch.full((4, 3), value), "average/weight": torch.full((4, 3), -value)}


class MessageLog(list[str]):
    def __call__(self, message: str) -> None:
        self.append(message)


@pytest.fixture
def messages() -> MessageLog:
    return MessageLog()


@pytest.fixture
def checkpoints(tmp_path: Path, messages: MessageLog) -> Checkpoints:
    """Steps 1, 2 and 3, with the step's number as every weight."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3, ALONE, RUN, messages)
    for step in (1, 2, 3):
        checkpoints.save(step, tensors(step), {"updates": step, "best": 0.1 * step})
    return checkpoints


def shard(checkpoints: Checkpoints, step: int) -> Path:
    (file,) = checkpoints.path(step).glob("*.safetensors")
    return file


def test_newest_checkpoint_is_loaded_in_place(checkpoints: Checkpoints, messages: MessageLog):
    into = tensors(0)
    assert checkpoints.load_latest(into) == (3, {"updates": 3, "best": 0.1 * 3})
    assert torch.equal(into["model/weight"], tensors(3)["model/weight"])
    assert torch.equal(into["average/weight"], tensors(3)["average/weight"])
    assert not messages


def test_load_latest_returns_none_without_checkpoints(tmp_path: Path):
    assert Checkpoints(tmp_path / "none", 3, ALONE, RUN).load_latest(tensors(0)) is None


def truncate(checkpoints: Checkpoints) -> str:
    file = shard(checkpoints, 3)
    file.write_bytes(file.read_bytes()[:-5])
    return file.name


def flip(checkpoints: Checkpoints) -> str:
    file = shard(checkpoints, 3)
    content = bytearray(file.read_bytes())
    content[-7] ^= 1  # inside a weight: the file still parses
    file.write_bytes(content)
    return file.name


def lose_a_shard(checkpoints: Checkpoints) -> str:
    file = shard(checkpoints, 3)
    file.unlink()
    return f"{file.name} is missing"


def lose_state(checkpoints: Checkpoints) -> str:
    (checkpoints.path(3) / STATE_FILE).unlink()
    return f"{STATE_FILE} is missing or truncated"


def tear_state(checkpoints: Checkpoints) -> str:
    file = checkpoints.path(3) / STATE_FILE
    file.write_bytes(file.read_bytes()[:40])
    return f"{STATE_FILE} is missing or truncated"


def forge_state(checkpoints: Checkpoints) -> str:
    file = checkpoints.path(3) / STATE_FILE
    state = json.loads(file.read_text())
    state["values"]["updates"] += 1
    file.write_text(json.dumps(state))
    return f"{STATE_FILE} does not match its checksum"


def empty_state(checkpoints: Checkpoints) -> str:
    (checkpoints.path(3) / STATE_FILE).write_text("[]")
    return f"{STATE_FILE} has no checksum"


@pytest.mark.parametrize("damage", [truncate, flip, lose_a_shard, lose_state, tear_state, forge_state, empty_state])
def test_damaged_checkpoint_is_reported_and_previous_one_used(checkpoints: Checkpoints, messages: MessageLog, damage):
    problem = damage(checkpoints)
    into = tensors(0)
    found = checkpoints.load_latest(into)
    assert found is not None
    assert found[0] == 2
    assert torch.equal(into["model/weight"], tensors(2)["model/weight"])
    assert len(messages) == 1
    assert "step-00000003" in messages[0]
    assert problem in messages[0]


def test_two_damaged_checkpoints_are_skipped(checkpoints: Checkpoints, messages: MessageLog):
    flip(checkpoints)
    (checkpoints.path(2) / STATE_FILE).unlink()
    found = checkpoints.load_latest(tensors(0))
    assert found is not None
    assert found[0] == 1
    assert len(messages) == 2


def test_load_latest_returns_none_if_all_are_damaged(checkpoints: Checkpoints, messages: MessageLog):
    for step in (1, 2, 3):
        shard(checkpoints, step).unlink()
    assert checkpoints.load_latest(tensors(0)) is None
    assert len(messages) == 3


def test_any_flipped_bit_is_detected(checkpoints: Checkpoints):
    """Also in state.json, unless it still parses to the same value."""
    chance = random.Random(0)
    for file in (shard(checkpoints, 3), checkpoints.path(3) / STATE_FILE):
        content = file.read_bytes()
        for _ in range(60):
            place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
            changed = bytearray(content)
            changed[place] ^= bit
            file.write_bytes(changed)
            same = file.name == STATE_FILE and parse_to_same_value(bytes(changed), content)
            with nullcontext() if same else pytest.raises(ValueError, match=r"missing|checksum"):
                read_checkpoint(checkpoints.path(3))
        file.write_bytes(content)
    assert read_checkpoint(checkpoints.path(3))["step"] == 3


def parse_to_same_value(first: bytes, second: bytes) -> bool:
    try:
        return json.loads(first) == json.loads(second)
    except ValueError:
        return False


def test_damaged_checkpoint_never_displaces_intact_one(tmp_path: Path, messages: MessageLog):
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, ALONE, RUN, messages)
    checkpoints.save(10, tensors(10), {})
    checkpoints.keep = 2
    checkpoints.save(20, tensors(20), {})
    shard(checkpoints, 20).unlink()
    checkpoints.keep = 1
    assert checkpoints.load_latest(tensors(0)) == (10, {})
    checkpoints.save(15, tensors(15), {})  # another interval: before the damaged step
    assert checkpoints.load_latest(tensors(0)) == (15, {})


def test_last_checkpoints_are_kept(checkpoints: Checkpoints):
    checkpoints.save(40, tensors(4), {})
    assert checkpoints.steps() == [2, 3, 40]
    checkpoints.keep = 1
    checkpoints.save(41, tensors(4), {})
    assert checkpoints.steps() == [41]
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["step-00000041"]


def test_leftovers_of_killed_writer_are_removed(checkpoints: Checkpoints):
    for name in (".step-00000004.tmp", ".step-00000001.0123456789abcdef.tmp"):
        (checkpoints.folder / name).mkdir()
        (checkpoints.folder / name / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"torn")
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(4, tensors(4), {})
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]


def test_checkpoint_contains_only_safetensors_and_json(checkpoints: Checkpoints):
    for file in checkpoints.path(3).iterdir():
        assert file.suffix in (".safetensors", ".json")


def test_checkpoint_can_be_overwritten(checkpoints: Checkpoints):
    checkpoints.save(3, tensors(7), {})
    into = tensors(0)
    assert checkpoints.load_latest(into) == (3, {})
    assert torch.equal(into["model/weight"], tensors(7)["model/weight"])


# Complete checkpoints in the wrong place


def swap(checkpoints: Checkpoints) -> str:
    aside = checkpoints.folder / "aside"
    checkpoints.path(3).rename(aside)
    checkpoints.path(2).rename(checkpoints.path(3))
    aside.rename(checkpoints.path(2))
    return "step-00000003 holds the checkpoint of step 2; rename it to step-00000002, or remove it"


def rename(checkpoints: Checkpoints) -> str:
    checkpoints.path(3).rename(checkpoints.path(99))
    return "step-00000099 holds the checkpoint of step 3; rename it to step-00000003, or remove it"


def put_other_run(settings: dict[str, float]) -> Callable[[Checkpoints], str]:
    def replace(checkpoints: Checkpoints) -> str:
        other = RunIdentity({**RUN.settings, **settings})
        Checkpoints(checkpoints.folder, 4, ALONE, other).save(4, tensors(9), {})
        ((name, value),) = settings.items()
        return f"step-00000004 is a checkpoint of another run (its {name} is {value}, not {RUN.settings[name]})"

    return replace


@pytest.mark.parametrize("exchange", [swap, rename, put_other_run({"seed": 7}), put_other_run({"optimizer.rate": 0.5})])
def test_misplaced_checkpoint_is_rejected(checkpoints: Checkpoints, messages: MessageLog, exchange):
    why = exchange(checkpoints)
    before = sorted(checkpoints.folder.rglob("*"))
    into = tensors(0)
    with pytest.raises(ValueError, match=re.escape(why)) as caught:
        checkpoints.load_latest(into)
    assert "\n" not in str(caught.value)
    assert torch.equal(into["model/weight"], tensors(0)["model/weight"])
    assert sorted(checkpoints.folder.rglob("*")) == before
    assert not messages


def reseal(file: Path, **changes: Any) -> None:
    """Change a state.json and give it a matching checksum."""
    state = {**json.loads(file.read_text()), **changes}
    del state["sha256"]
    file.write_text(json.dumps(sealed({name: value for name, value in state.items() if value is not None})))


@pytest.mark.parametrize(
    "changes", [{"values": None}, {"values": [3]}, {"run": None}, {"files": 7}, {"step": "3"}, {"format": None}]
)
def test_forged_state_counts_as_damage(checkpoints: Checkpoints, messages: MessageLog, changes: dict[str, Any]):
    reseal(checkpoints.path(3) / STATE_FILE, **changes)
    found = checkpoints.load_latest(tensors(0))
    assert found is not None
    assert found[0] == 2
    assert f"{STATE_FILE} has " in messages[0]


def test_named_pipe_does_not_block(checkpoints: Checkpoints, messages: MessageLog):
    file = checkpoints.path(3) / STATE_FILE
    file.unlink()
    os.mkfifo(file)
    with within_seconds(5):
        found = checkpoints.load_latest(tensors(0))
    assert found is not None
    assert found[0] == 2
    assert f"{STATE_FILE} is not a regular file" in messages[0]


def test_tensors_of_different_network_give_one_line_error(checkpoints: Checkpoints):
    with pytest.raises(ValueError, match="step-00000003 does not hold the tensors of this run") as error:
        checkpoints.load_latest({**tensors(0), "model/other": torch.zeros(2)})
    assert "\n" not in str(error.value)


@contextmanager
def within_seconds(seconds: int) -> Iterator[None]:
    """Fail, instead of hanging."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_setting_missing_from_one_run_is_a_difference(checkpoints: Checkpoints):
    other = RunIdentity({**RUN.settings, "optimizer.new": 1.0})
    with pytest.raises(ValueError, match=r"another run \(its optimizer.new is None, not 1.0\)"):
        Checkpoints(checkpoints.folder, 3, ALONE, other).load_latest(tensors(0))


def test_changeable_settings_may_differ(checkpoints: Checkpoints, messages: MessageLog):
    other = RunIdentity({**RUN.settings, "optimizer.rate": 0.2}, changeable=["optimizer.rate"])
    assert Checkpoints(checkpoints.folder, 3, ALONE, other, messages).load_latest(tensors(0)) is not None
    assert not messages
