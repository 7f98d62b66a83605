"""Checkpoints: the complete state of a step, written so that a kill at any moment leaves the last complete one.

    RUN/checkpoints/step-00001000/   *.safetensors (torch.distributed.checkpoint's safetensors storage: a shard a rank)
                                     state.json    (step, the SHA-256 of every other file, and that of itself)

A checkpoint is written under a temporary name, flushed, given its state.json last, and renamed. It holds tensors by
name (parameters, averages, moments) and JSON, nothing else; it loads on any number of ranks. The state of the random
number generators is not saved: the data's order, times, noise and dropout follow from (seed, step).

A damaged checkpoint is renamed to damaged-step-..., so that it is checked once and never counts as one to keep.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from cedd.storage import file_sha256, flush_folder, json_sha256, write_durably
from cedd.training.distributed import Ranks

STATE_FILE = "state.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of one run, of which the last `keep` stay."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks, say: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self.keep, self.ranks, self.say = folder, keep, ranks, say

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
        if self.ranks.is_first:
            self.sweep()
            temporary.mkdir(parents=True)
        self.ranks.barrier()
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        with self._quietly():
            save_sharded(dict(tensors), storage_writer=writer, no_dist=self.ranks.world_size == 1)
        self.ranks.barrier()
        if self.ranks.is_first:
            files = {file.name: file_sha256(file) for file in sorted(temporary.iterdir())}
            state = {"format": FORMAT, "step": step, "files": files, "values": dict(values)}
            content = json.dumps({**state, "sha256": json_sha256(state)}, indent=1)
            write_durably(temporary / STATE_FILE, content.encode())
            flush_folder(temporary)
            if target.exists():
                self._drop(target)
            temporary.rename(target)
            flush_folder(self.folder)
            for old in self.steps()[: -self.keep]:
                self._drop(self.path(old))
        self.ranks.barrier()
        return target

    def load_latest(self, tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Any]] | None:
        """Fill `tensors` from the newest complete checkpoint; (step, values), or None where there is none.

        A damaged checkpoint is reported and the one before it is used. The first rank decides for all.
        """
        step = int(self.ranks.from_first(self._newest_complete() if self.ranks.is_first else 0))
        if step < 0:
            return None
        path = self.path(step)
        values = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["values"]
        reader = HuggingFaceStorageReader(str(path))
        with self._quietly():
            load_sharded(dict(tensors), storage_reader=reader, no_dist=self.ranks.world_size == 1)
        return step, values

    def _newest_complete(self) -> int:
        """The step of the newest complete checkpoint, -1 where there is none; damaged ones are renamed."""
        for step in reversed(self.steps()):
            path = self.path(step)
            problem = inspect_checkpoint(path)
            if problem is None:
                return step
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            self.say(f"checkpoint {path} is damaged: {problem}; it is now {aside.name}, and the one before is used")
        return -1

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
            for left in self.folder.glob(".*.tmp"):
                shutil.rmtree(left, ignore_errors=True)

    @staticmethod
    def _drop(path: Path) -> None:
        """Delete under another name, so that a half-deleted folder is never taken for a checkpoint."""
        doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def inspect_checkpoint(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is complete."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        expected = state.pop("sha256")
    except (OSError, ValueError, AttributeError, KeyError):
        return f"{STATE_FILE} is missing or truncated"
    if json_sha256(state) != expected:
        return f"{STATE_FILE} does not match its checksum"
    if state["format"] != FORMAT:
        return f"it has format {state['format']!r}, not {FORMAT}"
    for name, expected in state["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file_sha256(file) != expected:
            return f"{name} does not match its checksum"
    return None
