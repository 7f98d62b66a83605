"""The models that a server offers, by name, and what each can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.models.locate import packaged, pretrained_names
from cedd.samplers import SAMPLERS
from cedd.samplers.loop import check_sampler
from cedd.samplers.memory import Memory
from cedd.serve.readers import Readers
from cedd.spelling.correct import lexicon_file, reader_beside, words_folder
from cedd.storage import expanded
from cedd.tasks import LanguageModel, load
from cedd.tasks.correct import by_words, judge_of_words

TASKS = {
    "write": "any",
    "fill": "one of a diffusion method",
    "correct": "one of a process that shuffles, such as roulette, or with a lexicon",
}
"""What can be asked of a model, and of which."""


class Shelf(Mapping[str, LanguageModel]):
    """Models by name.

    Args:
        models: as they are offered. The first that can do a task is its default, of correctors the first with words.
        readers: processes that find doubtful words with the models' lexicons.
    """

    def __init__(self, models: Mapping[str, LanguageModel], readers: int = 0) -> None:
        self._models = dict(models)
        self.about = {name: _about(model) for name, model in models.items()}
        """What is known of each, as JSON."""
        self.memory = Memory()
        lexicons: list[Path] = []
        for name, model in models.items():
            if "correct" in self.about[name]["tasks"] and (file := lexicon_file(model)) is not None:
                reader_beside(model)  # it is kept; and one that is damaged is refused here, not at each request
                lexicons.append(file)
        self.readers = Readers(readers, lexicons)
        self._able = {task: self._best_first(task) for task in TASKS}
        self._judges = {name: self._judge(models[name]) for name in self._able["correct"]}

    @classmethod
    def load(cls, runs: Sequence[str], device: str, readers: int = 0) -> Shelf:
        """Runs by their folders or names; without any, the models that come with the package."""
        models: dict[str, LanguageModel] = {}
        for source in runs or [packaged(name) for name in pretrained_names()]:
            plain = expanded(source).resolve().name or "model"
            same = sum(name.split("#")[0] == plain for name in models)
            models[f"{plain}#{same + 1}" if same else plain] = load(source, device)
        if not models:
            raise ValueError("no model comes with this copy of the package; name a RUN to serve")
        return cls(models, readers)

    def __getitem__(self, name: str) -> LanguageModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def able(self, task: str) -> list[str]:
        """The models that can do a task, the best suited first."""
        return self._able[task]

    def corrector(self, name: str, options: Mapping[str, Any]) -> LoadedModel:
        """Who corrects a text so for this model: itself, or the one that its folder names for words."""
        return self._judges[name] if by_words(self[name], options) else self[name]

    def _judge(self, model: LanguageModel) -> LoadedModel:
        """The model whose lexicon corrects words for this one: of those offered, so that all ask one network."""
        folder = words_folder(model.folder.path, model.folder.config)
        same = (other for other in self._models.values() if other.folder.path == folder)
        return next(same, None) or judge_of_words(model)

    def _best_first(self, task: str) -> list[str]:
        """As they are offered; those with words beside them correct better than others."""
        found = [name for name in self if task in self.about[name]["tasks"]]
        return sorted(found, key=lambda name: task == "correct" and lexicon_file(self[name]) is None)


def _about(model: LanguageModel) -> dict[str, Any]:
    return {
        "method": model.method.name,
        "process": (model.process.spec or {}).get("name"),
        "tokenizer": model.tokenizer.name,
        "unit": "character" if model.tokenizer.characters is not None else "token",
        "vocabulary": model.process.vocab_size,
        "length": model.length,
        "parameters": model.model.num_parameters(),
        "steps": model.settled(SamplingOptions(), model.length).steps,
        "samplers": [sampler for sampler in SAMPLERS if _samples(model, sampler)],
        "tasks": list(_tasks(model)),
    }


def _tasks(model: LanguageModel) -> Iterator[str]:
    yield "write"
    if model.method.dynamics.noisy:
        yield "fill"
        if model.process.can_shuffle or lexicon_file(model) is not None:
            yield "correct"


def _samples(model: LanguageModel, sampler: str) -> bool:
    """Whether a model can be sampled so; of an autoregressive one the name says nothing, and one is enough."""
    if not model.method.dynamics.noisy:
        return sampler == "analytic"
    try:
        check_sampler(sampler, model.method, model.process)
    except ValueError:
        return False
    return True
