"""The subject of a report: a model with a text to measure it on, held out by its run or named by the user."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cedd.data.evaluation_sets import EvaluationData
from cedd.data.training_data import TrainingData
from cedd.evaluation.perplexity import choose_sequences, data_for
from cedd.models.locate import TRAIN_FILE, locate
from cedd.storage import JSONObject, expanded
from cedd.tasks import LanguageModel, load
from cedd.tasks.card import constant_shares
from cedd.training.config import TrainConfig, read_config
from cedd.training.loop import data_of_run
from cedd.training.run_folder import changed_data
from cedd.training.run_log import LOG_FILE, read_log

_PRACTICE, _COUNTED = 48, 128  # blocks


@dataclass(frozen=True)
class Opened(ABC):
    """A model, and blocks of text [N, L] to measure it on."""

    path: Path
    model: LanguageModel

    @property
    @abstractmethod
    def text_name(self) -> str:
        """The name of the text."""

    @property
    @abstractmethod
    def is_run(self) -> bool:
        """Whether this is a run, which is measured on held-out text."""

    @abstractmethod
    def held_out(self, most: int) -> np.ndarray:
        """At most `most` held-out blocks [N, L], evenly spaced."""

    @abstractmethod
    def first(self, most: int) -> np.ndarray:
        """At most `most` blocks from the beginning."""

    @abstractmethod
    def learning(self, most: int) -> np.ndarray | None:
        """At most `most` blocks to train the baselines on; None if there is no text other than the measured one."""

    @abstractmethod
    def practice(self) -> tuple[np.ndarray, np.ndarray]:
        """A few blocks to choose a threshold on, and others to count corrections on."""

    @abstractmethod
    def characters(self, blocks: np.ndarray) -> float:
        """The number of characters of blocks."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """A description of the model or run."""

    @property
    def asked(self) -> dict[str, str]:
        """The options of a command line that name the text."""
        return {}

    @property
    def log(self) -> list[JSONObject]:
        """The records of its training log."""
        return []

    @property
    def step(self) -> int | None:
        """The number of training steps; None if it is not known."""
        return None

    @property
    def bound_sequences(self) -> int:
        """The number of blocks of the bound during training."""
        return 0

    @property
    def process(self) -> str:
        spec = self.model.process.spec or {}
        named = f"{spec.get('name', 'a process')}{constant_shares(spec)}"
        return "a causal network" if not self.model.method.dynamics.noisy else named

    @property
    def parameters(self) -> int:
        return self.model.model.num_parameters()

    def losses(self, most: int = 800) -> list[tuple[int, float]]:
        """(step, loss) of the log; neighbouring steps are averaged if there are too many to draw."""
        points = [(r["step"], r["loss"]) for r in self.log if r["kind"] == "train" and r["loss"] is not None]
        size = math.ceil(len(points) / most) or 1
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        return [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]

    def decode(self, ids: np.ndarray) -> str:
        """The text of ids [L]; the token that ends a document has no text."""
        tokenizer = self.model.tokenizer
        ends = [token for token in {tokenizer.bos_id, tokenizer.eos_id} if token is not None]
        return tokenizer.decode(ids[~np.isin(ids, ends)] if ends else ids)

    def text(self, blocks: np.ndarray) -> str:
        """The text of blocks one after another."""
        return self.decode(blocks.ravel())


# ----------------------------------------------------------------------------------------------------------------
# A run, on what it held out


@dataclass(frozen=True)
class OpenedRun(Opened):
    """A run with its training text and its held-out text."""

    config: TrainConfig
    data: TrainingData

    @property
    def text_name(self) -> str:
        return "the held-out text"

    @property
    def is_run(self) -> bool:
        return True

    def held_out(self, most: int) -> np.ndarray:
        return self.data.validation.evenly_spaced(most)

    def first(self, most: int) -> np.ndarray:
        return self.data.validation[:most]

    def learning(self, most: int) -> np.ndarray:
        return self.data.train[-most:]

    def practice(self) -> tuple[np.ndarray, np.ndarray]:
        return self.data.train[:_PRACTICE], self.data.validation[:_COUNTED]

    def characters(self, blocks: np.ndarray) -> float:
        return len(self.text(blocks))

    @property
    def log(self) -> list[JSONObject]:
        return read_log(self.path / LOG_FILE)

    @property
    def step(self) -> int:
        saved = (int(path.name.removeprefix("step-")) for path in (self.path / "checkpoints").glob("step-[0-9]*"))
        return max([0, *(record["step"] for record in self.log), *saved])

    @property
    def bound_sequences(self) -> int:
        return min(self.config.evaluation.sequences, len(self.data.validation))

    def facts(self) -> dict[str, str]:
        config, tokenizer = self.config, self.model.tokenizer
        return {
            "data": config.data,
            "tokenizer": f"{tokenizer.name}, vocabulary {tokenizer.vocab_size:,}",
            "sequence length": f"{config.length} tokens",
            "batch size": f"{config.batch.size} sequences",
            "steps": f"{self.step:,}",
            "parameters": f"{self.parameters:,}",
        }

    def documents(self, blocks: np.ndarray) -> list[str]:
        """The texts of consecutive blocks, split at end tokens; the last may lack its end."""
        tokens = blocks.ravel()
        ends = np.flatnonzero(tokens == self.model.tokenizer.eos_id) + 1
        return [self.decode(part) for part in np.split(tokens, ends) if len(part)]


def open_run(path: Path, device: str) -> OpenedRun:
    """The run in a folder, with its split data."""
    model, folder = load(path, device), locate(path)
    file = folder / TRAIN_FILE
    if not file.is_file():
        raise ValueError(
            f"{path} is not a run folder (it has no {TRAIN_FILE}); to measure it on a text, use "
            f"cedd report {path} --data FILE"
        )
    config = read_config(file)
    source = expanded(config.data)
    if not source.is_absolute() and source.suffix and not source.exists():  # not the name of a data set
        raise ValueError(
            f"{path} was trained on {config.data}, which was not found here; run this in the folder of the training"
        )
    data = data_of_run(config, model.tokenizer)
    if changed_data(folder, data):
        raise ValueError(
            f"the data ({config.data}) has changed since {path} was trained, so held-out text may have been trained "
            f"on; restore it, or to measure it on a text, use cedd report {path} --data FILE"
        )
    return OpenedRun(path, model, config, data)


# ----------------------------------------------------------------------------------------------------------------
# A model, on a text that the user names


@dataclass(frozen=True)
class OpenedModel(Opened):
    """A model with a text, which may have been part of its training data."""

    data: EvaluationData
    spec: str
    wrap: str

    @property
    def asked(self) -> dict[str, str]:
        return {"data": self.spec} | ({} if self.wrap == "none" else {"wrap": self.wrap})

    @property
    def text_name(self) -> str:
        name = self.data.protocol["set"]
        return Path(name).name if expanded(name).exists() else name

    @property
    def is_run(self) -> bool:
        return False

    def held_out(self, most: int) -> np.ndarray:
        return choose_sequences(self.data, most, self.model.tokenizer)[0].numpy()

    def first(self, most: int) -> np.ndarray:
        return self.data.blocks(np.arange(min(most, len(self.data.packed))))

    def learning(self, most: int) -> None:
        del most

    def practice(self) -> tuple[np.ndarray, np.ndarray]:
        """The two halves of the text."""
        middle = min(_PRACTICE, len(self.data.packed) // 2)
        if not middle:
            raise ValueError(f"{self.text_name} is a single sequence: no text is left to choose a threshold on")
        both = self.first(middle + _COUNTED)
        return both[:middle], both[middle:]

    def characters(self, blocks: np.ndarray) -> float:
        """As counted by `cedd evaluate`: the characters of the text, including those that the tokenizer drops."""
        return self.data.text_counts(self.model.tokenizer, blocks)["characters"]

    def facts(self) -> dict[str, str]:
        tokenizer, origin = self.model.tokenizer, self.model.folder.config.get("imported")
        wrapped = ", between the tokens that begin and end a document" if self.data.packed.ends else ""
        return {
            **({} if origin is None else {"network": f"{origin['family']}, imported from {origin['source']}"}),
            "measured on": self.text_name,
            "tokenizer": f"{tokenizer.name}, vocabulary {tokenizer.vocab_size:,}",
            "sequence length": f"{self.model.length} tokens{wrapped}",
            "parameters": f"{self.parameters:,}",
        }


def open_model(path: Path, device: str, data: str, wrap: str = "none") -> OpenedModel:
    """A model with the text that `data` and `wrap` name, as `cedd evaluate` takes them."""
    model = load(path, device)
    return OpenedModel(path, model, data_for(model.folder, data, wrap=wrap), data, wrap)


def prose_lines(text: str, count: int, longest: int) -> list[str]:
    """Lines that are most likely prose: long enough, mostly letters and spaces, without a blank of infilling."""
    lines = {line.strip(): None for line in text.splitlines()}  # a set that keeps its order
    lines = [line[:longest].rstrip() for line in lines if "___" not in line]

    def score(line: str) -> float:
        letters = sum(character.isalpha() or character == " " for character in line) / max(1, len(line))
        return letters * min(1.0, len(line) / min(60, longest)) - (line != line.lstrip("abcdefghijklmnopqrstuvwxyz"))

    chosen = sorted(lines, key=score, reverse=True)[:count]
    return chosen or [text[:longest]]
