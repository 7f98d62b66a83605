"""A run that is reported on: its model, its log, and the text that it has and has not seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cedd.data.training_data import TrainingData
from cedd.storage import expanded
from cedd.tasks import LanguageModel, load
from cedd.tasks.card import constant_shares
from cedd.training.config import TrainConfig, read_config
from cedd.training.loop import data_of_run
from cedd.training.records import LOG_FILE, read_log


@dataclass(frozen=True)
class OpenedRun:
    """A run with the text it was trained on and the text it was not."""

    path: Path
    model: LanguageModel
    config: TrainConfig
    data: TrainingData

    @property
    def process(self) -> str:
        spec = self.model.process.spec or {}
        named = f"{spec.get('name', 'a process')}{constant_shares(spec)}"
        return "a causal network" if not self.model.method.dynamics.noisy else named

    @property
    def parameters(self) -> int:
        return self.model.model.num_parameters()

    @property
    def log(self) -> list[dict[str, Any]]:
        """What was recorded while it trained."""
        return read_log(self.path / LOG_FILE)

    @property
    def step(self) -> int:
        """The last that was recorded."""
        return max((record["step"] for record in self.log), default=0)

    def facts(self) -> dict[str, str]:
        """What was trained, in words."""
        config, tokenizer = self.config, self.model.tokenizer
        return {
            "data": config.data,
            "tokens": f"{tokenizer.name}, {tokenizer.vocab_size:,} of them",
            "sequences": f"{config.length} tokens, {config.batch.size} a step",
            "steps": f"{self.step:,}",
            "parameters": f"{self.parameters:,}",
        }

    def losses(self, most: int = 800) -> list[tuple[int, float]]:
        """(step, loss) of the log; neighbours are averaged where there are too many to draw."""
        points = [(r["step"], r["loss"]) for r in self.log if r["kind"] == "train" and r["loss"] is not None]
        size = math.ceil(len(points) / most) or 1
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]

    def held_out(self, most: int) -> np.ndarray:
        """At most so many held-out blocks [N, L], evenly spaced."""
        return self.data.validation.evenly_spaced(most)

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [L]; the token that ends a document stands for none."""
        tokenizer = self.model.tokenizer
        return tokenizer.decode(ids if tokenizer.eos_id is None else ids[ids != tokenizer.eos_id])

    def text(self, blocks: np.ndarray) -> str:
        return "".join(map(self.decode, blocks))

    def documents(self, blocks: np.ndarray) -> list[str]:
        """The texts of blocks in a row, cut where an end token says so; the last may lack its end."""
        tokens = blocks.ravel()
        ends = np.flatnonzero(tokens == self.model.tokenizer.eos_id) + 1
        return [self.decode(part) for part in np.split(tokens, ends) if len(part)]


def open_run(path: Path, device: str) -> OpenedRun:
    """The run in a folder, with its data as it was split."""
    model = load(path, device)
    file = path / "train.json"
    if not file.is_file():
        raise ValueError(f"{path} has no train.json: a report needs a run of cedd train, which says what was held out")
    config = read_config(file)
    source = expanded(config.data)
    if not source.is_absolute() and source.suffix and not source.exists():  # no name of a data set
        raise ValueError(
            f"{path} was trained on {config.data}, which is not here: go to the folder it was trained from"
        )
    return OpenedRun(path, model, config, data_of_run(config, model.tokenizer))


def prose_lines(text: str, count: int, longest: int) -> list[str]:
    """The lines that read most like prose: long enough, mostly letters and spaces, without a blank of infilling."""
    lines = {line.strip(): None for line in text.splitlines()}  # a set that keeps its order
    lines = [line[:longest].rstrip() for line in lines if "___" not in line]

    def score(line: str) -> float:
        letters = sum(character.isalpha() or character == " " for character in line) / max(1, len(line))
        return letters * min(1.0, len(line) / min(60, longest)) - (line != line.lstrip("abcdefghijklmnopqrstuvwxyz"))

    chosen = sorted(lines, key=score, reverse=True)[:count]
    return chosen or [text[:longest]]
