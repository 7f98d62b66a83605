"""Checkpoints: the complete state of a step. A kill at any moment leaves the last complete checkpoint intact.

    RUN/checkpoints/step-00001000/   *.safetensors (torch.distributed.checkpoint's safetensors storage: one shard per
    rank)
                                     state.json    (step, run, the SHA-256 of every other file, and of itself)

A checkpoint is written under a temporary name, flushed, given its state.json last, and renamed. It holds tensors by
name (parameters, averages, moments) and JSON, nothing else, and loads on any number of ranks. Random number generators
are not saved: order of data, times, noise and dropout depend on (seed, step) only.

A damaged checkpoint is renamed to damaged-step-..., so that it is checked once and not counted among those to keep. A
complete checkpoint of another step or another run than its folder indicates is refused, since somebody must have put it
there.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from cedd.storage import (
    JSONMapping,
    JSONObject,
    file_sha256,
    flush_folder,
    json_sha256,
    read_sealed,
    remove_folder,
    sealed,
    write_durably,
)
from cedd.training.distributed import Ranks

STATE_FILE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class RunIdentity:
    """The settings and the data of a run, by name, as JSON values, including the seed.

    Args:
        settings: the settings.
        changeable: names of settings that may differ in a checkpoint.
    """

    settings: JSONMapping
    changeable: Collection[str] = ()

    def record(self) -> JSONObject:
        """The entry about the run in a checkpoint."""
        seed = self.settings.get("seed")
        return {"seed": seed, "config_sha256": json_sha256(self.settings), "settings": dict(self.settings)}

    def difference(self, record: JSONMapping) -> str | None:
        """A description of the settings in which a checkpoint's run differs; None if it is the same run."""
        if record["config_sha256"] == json_sha256(self.settings):
            return None
        there, here = record["settings"], self.settings
        names = [name for name in {**here, **there} if name not in self.changeable]
        different = [name for name in names if there.get(name) != here.get(name)]
        return "; ".join(f"its {name} is {there.get(name)}, not {here.get(name)}" for name in different[:3]) or None


class Checkpoints:
    """The checkpoints of one run; the last `keep` are kept."""

    def __init__(
        self, folder: Path, keep: int, ranks: Ranks, run: RunIdentity, say: Callable[[str], None] = warnings.warn
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
        """Write a checkpoint (called by all ranks) and remove the oldest beyond `keep`."""
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
        """Write this rank's shards."""
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        try:
            with self._quietly():
                save_sharded(dict(tensors), storage_writer=writer, no_dist=self.ranks.world_size == 1)
        except CheckpointException as failed:  # which wraps what happened on each rank, and is no Exception
            raise next(error for error, _ in failed.failures.values()) from failed

    def _publish(self, temporary: Path, target: Path, state: JSONMapping) -> None:
        """Add state.json with the checksums of all files, rename the folder, and remove the oldest checkpoints."""
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
        """Load the newest complete checkpoint into `tensors`; (step, values), or None without one.

        A damaged checkpoint is reported, and the one before it is used; one of another step or run is refused. The
        first rank decides for all.
        """
        step = int(self.ranks.from_first(self._newest_complete))
        if step < 0:
            return None
        path = self.path(step)
        values = read_sealed(path / STATE_FILE)["values"]
        reader = HuggingFaceStorageReader(str(path))
        try:
            with self._quietly():
                load_sharded(dict(tensors), storage_reader=reader, no_dist=self.ranks.world_size == 1)
        except CheckpointException as failed:
            error, _ = next(iter(failed.failures.values()))
            raise ValueError(f"{path} does not hold the tensors of this run: {' '.join(str(error).split())}") from error
        return step, values

    def _newest_complete(self) -> int:
        """The step of the newest complete checkpoint, -1 without one; damaged ones are renamed."""
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

    def _check_place(self, path: Path, step: int, state: JSONMapping) -> None:
        """Refuse a checkpoint of another step than its folder's name, or of another run."""
        if state["step"] != step:
            right = self.path(state["step"]).name
            raise ValueError(f"{path} holds the checkpoint of step {state['step']}; rename it to {right}, or remove it")
        if difference := self.run.difference(state["run"]):
            raise ValueError(f"{path} is a checkpoint of another run ({difference}); put this run's back, or remove it")

    @staticmethod
    @contextmanager
    def _quietly() -> Iterator[None]:
        """Suppress torch's warning about saving in a single process."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load) in a single process")
            yield

    def sweep(self) -> None:
        """Remove what a killed process left behind."""
        if self.folder.is_dir():
            for left in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(left, ignore_errors=True)


def read_checkpoint(path: Path) -> JSONObject:
    """The contents of state.json of a complete checkpoint; a ValueError explains what is wrong with an incomplete
    one."""
    state = read_sealed(path / STATE_FILE)
    if state.get("format") != FORMAT:
        raise ValueError(f"{STATE_FILE} has format {state.get('format')!r}, not {FORMAT}")
    for name, kind in {"step": int, "values": dict, "run": dict, "files": dict}.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"{STATE_FILE} has no valid {name!r}")
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{name} is missing")
        if file_sha256(file) != expected:
            raise ValueError(f"{name} does not match its checksum")
    return state
