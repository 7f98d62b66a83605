"""Checkpoints: the complete state of a step, written so that a kill at any moment leaves the last complete one.

    RUN/checkpoints/step-00001000/   *.safetensors (torch.distributed.checkpoint's safetensors storage: a shard a rank)
                                     state.json    (step, run, the SHA-256 of every other file, and that of itself)

A checkpoint is written under a temporary name, flushed, given its state.json last, and renamed. It holds tensors by
name (parameters, averages, moments) and JSON, nothing else; it loads on any number of ranks. The state of the random
number generators is not saved: the data's order, times, noise and dropout follow from (seed, step).

A damaged checkpoint is renamed to damaged-step-..., so that it is checked once and never counts as one to keep. A
complete one of another step or another run than its place says is refused: somebody put it there.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from cedd.storage import file_sha256, flush_folder, json_sha256, read_sealed, remove_folder, sealed, write_durably
from cedd.training.distributed import Ranks

STATE_FILE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunIdentity:
    """What makes a run this one and no other: settings and data by name, as JSON values; the seed is one of them."""

    settings: Mapping[str, Any]

    def record(self) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        seed = self.settings.get("seed")
        return {"seed": seed, "config_sha256": json_sha256(self.settings), "settings": dict(self.settings)}

    def difference(self, record: Mapping[str, Any]) -> str | None:
        """Where the run of a record is another one, in words; None if it is this one.

        A setting that only one of the two has is no difference: versions of the package add settings.
        """
        if record["config_sha256"] == json_sha256(self.settings):
            return None
        there, here = record["settings"], self.settings
        different = [name for name in here if name in there and there[name] != here[name]]
        return "; ".join(f"its {name} is {there[name]}, not {here[name]}" for name in different[:3]) or None


class Checkpoints:
    """The checkpoints of one run, of which the last `keep` stay."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: Ranks,
        run: RunIdentity,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        self.folder, self.keep, self.ranks, self.run, self.say = folder, keep, ranks, run, say

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, complete or not, in order."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Path:
        """Write a checkpoint (all ranks call this) and drop the oldest beyond `keep`."""
        target, temporary = self.path(step), self.folder / f".step-{step:08d}.tmp"
        try:
            self.ranks.from_first(lambda: self._begin(temporary))
            self._write(temporary, tensors)
            self.ranks.barrier()
            self.ranks.from_first(lambda: self._publish(temporary, target, {"step": step, "values": dict(values)}))
        except OSError as error:  # a full disk, most of all
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(error.errno, error.strerror or str(error), str(target)) from error
        return target

    def _begin(self, temporary: Path) -> None:
        self.sweep()
        temporary.mkdir(parents=True)

    def _write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """This rank's shards."""
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            with self._quietly():
                save_sharded(dict(tensors), storage_writer=writer, no_dist=self.ranks.world_size == 1)
        except CheckpointException as failed:  # which wraps what happened on each rank, and is no Exception
            raise next(error for error, _ in failed.failures.values()) from failed

    def _publish(self, temporary: Path, target: Path, state: Mapping[str, Any]) -> None:
        """Add the record, with the checksums of all files, give the folder its name, and drop the oldest."""
        files = {file.name: file_sha256(file) for file in sorted(temporary.iterdir())}
        state = sealed({"format": FORMAT, "run": self.run.record(), "files": files, **state})
        write_durably(temporary / STATE_FILE, json.dumps(state, indent=1).encode())
        flush_folder(temporary)
        if target.exists():
            remove_folder(target)
        temporary.rename(target)
        flush_folder(self.folder)
        for old in self.steps()[: -self.keep]:
            remove_folder(self.path(old))

    def load_latest(self, tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Any]] | None:
        """Fill `tensors` from the newest complete checkpoint; (step, values), or None where there is none.

        A damaged checkpoint is reported and the one before it is used; one of another step or run is refused. The first
        rank decides for all.
        """
        step = int(self.ranks.from_first(self._newest_complete))
        if step < 0:
            return None
        path = self.path(step)
        values = read_sealed(path / STATE_FILE)["values"]
        reader = HuggingFaceStorageReader(str(path))
        with self._quietly():
            load_sharded(dict(tensors), storage_reader=reader, no_dist=self.ranks.world_size == 1)
        return step, values

    def _newest_complete(self) -> int:
        """The step of the newest complete checkpoint, -1 where there is none; damaged ones are renamed."""
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                state = read_checkpoint(path)
            except ValueError as problem:
                aside = path.with_name(f"damaged-{path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                self.say(f"checkpoint {path} is damaged: {problem}; it is now {aside.name}, and the one before is used")
                continue
            self._check_place(path, step, state)
            return step
        return -1

    def _check_place(self, path: Path, step: int, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another step than its folder's name, or of another run than this one."""
        if state["step"] != step:
            right = self.path(state["step"]).name
            raise ValueError(f"{path} holds the checkpoint of step {state['step']}; rename it to {right}, or remove it")
        if "run" not in state:
            self.say(f"checkpoint {path} is of an earlier version: that it belongs to this run cannot be checked")
        elif difference := self.run.difference(state["run"]):
            raise ValueError(f"{path} is a checkpoint of another run ({difference}); put this run's back, or remove it")

    @staticmethod
    @contextmanager
    def _quietly() -> Iterator[None]:
        """Without torch's warning that it saves in a single process."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
            yield

    def sweep(self) -> None:
        """Remove what a killed process left behind."""
        if self.folder.is_dir():
            for left in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What state.json of a complete checkpoint says; a ValueError says what is wrong with one that is not."""
    state = read_sealed(path / STATE_FILE)
    if state["format"] != FORMAT:
        raise ValueError(f"it has format {state['format']!r}, not {FORMAT}")
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file_sha256(file) != expected:
            raise ValueError(f"{name} does not match its checksum")
    return state
