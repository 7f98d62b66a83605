"""A run as `cedd report` and `cedd quickstart` look at it: its model, and the text that it has and has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cedd.data import TrainingData
from cedd.tasks import LanguageModel, load
from cedd.tasks.card import share_of_masks
from cedd.training.config import TrainConfig, read_config
from cedd.training.loop import data_of_run


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
        named = f"{spec.get('name', 'a process')}{share_of_masks(spec)}"
        return "a causal network" if self.model.method.causal else named

    @property
    def parameters(self) -> int:
        return self.model.folder.model.num_parameters()

    def held_out(self, most: int) -> np.ndarray:
        """At most so many held-out blocks [N, L], evenly spaced."""
        count = len(self.data.validation)
        return self.data.validation[np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))]

    def text(self, blocks: np.ndarray) -> str:
        return "".join(self.model.tokenizer.decode(block) for block in blocks)


def open_run(path: Path, device: str) -> OpenedRun:
    """The run in a folder, with its data as it was split."""
    model = load(path, device)
    file = path / "train.json"
    if not file.is_file():
        raise ValueError(f"{path} has no train.json: a report needs a run of cedd train, which says what was held out")
    config = read_config(file)
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
