"""The models of a server, by name, and their capabilities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cedd.apps.correct.engine import judge_of_words, lexicon_file, reader_for
from cedd.apps.correct.word_by_word import words_folder
from cedd.apps.serve.reader_pool import ReaderPool
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import packaged, pretrained_names
from cedd.samplers import SAMPLERS, SamplingOptions, get_sampler
from cedd.samplers.feature_cache import FeatureCache
from cedd.spelling.engines import default_engine
from cedd.storage import JSONObject, expanded
from cedd.tasks import LanguageModel, load

TASKS = {
    "write": "any model",
    "chat": "a model whose tokenizer has a chat template",
    "fill": "a diffusion model",
    "correct": "a model with a lexicon, or one on uniform, roulette, eroulette or hybrid",
}
"""The tasks, and which models support them."""


class ModelRegistry(Mapping[str, LanguageModel]):
    """Models by name.

    Args:
        models: in order of preference. The first that supports a task is its default; for correction, the first with a
            lexicon.
        lookup_processes: processes that look up suspicious words in the models' lexicons.
    """

    def __init__(self, models: Mapping[str, LanguageModel], lookup_processes: int = 0) -> None:
        self._models = dict(models)
        self.info = {name: _model_info(model) for name, model in models.items()}
        """A description of each model, as JSON."""
        self.memory = FeatureCache()
        lexicons: list[Path] = []
        for name, model in models.items():
            if "correct" in self.info[name]["tasks"] and (file := lexicon_file(model)) is not None:
                reader_for(model)  # cached; a damaged lexicon is an error now, not at each request
                lexicons.append(file)
        self.reader_pool = ReaderPool(lookup_processes, lexicons)
        self._supporting = {task: self._best_first(task) for task in TASKS}
        self._judges = {name: self._judge(models[name]) for name in self._supporting["correct"]}

    @classmethod
    def load(cls, runs: Sequence[str], device: str, lookup_processes: int = 0) -> ModelRegistry:
        """Models by folder or name; without any, those that come with the package."""
        models: dict[str, LanguageModel] = {}
        for source in runs or [packaged(name) for name in pretrained_names()]:
            plain = expanded(source).resolve().name or "model"
            same = sum(name.split("#")[0] == plain for name in models)
            models[f"{plain}#{same + 1}" if same else plain] = load(source, device)
        if not models:
            raise ValueError("this installation has no pretrained models; name a MODEL to serve")
        return cls(models, lookup_processes)

    def __getitem__(self, name: str) -> LanguageModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def supporting(self, task: str) -> list[str]:
        """The models that support a task, in order of preference."""
        return self._supporting[task]

    def engine(self, name: str) -> str:
        """The model's default engine of correction."""
        return default_engine(self[name].folder.path, self[name].folder.config)

    def corrector(self, name: str, engine: str) -> LoadedModel:
        """The model that corrects for this one: itself, or for words the model that its folder names."""
        return self._judges[name] if engine == "words" else self[name]

    def _judge(self, model: LanguageModel) -> LoadedModel:
        """The model whose lexicon corrects words for this one; a served one if possible, so that batches are shared."""
        folder = words_folder(model.folder.path, model.folder.config)
        same = (other for other in self._models.values() if other.folder.path == folder)
        return next(same, None) or judge_of_words(model)

    def _best_first(self, task: str) -> list[str]:
        """Correction models with a lexicon first, because they correct better; otherwise in the order given."""
        found = [name for name in self if task in self.info[name]["tasks"]]
        return sorted(found, key=lambda name: task == "correct" and lexicon_file(self[name]) is None)


def _model_info(model: LanguageModel) -> JSONObject:
    defaults = model.with_defaults(SamplingOptions(), model.length)
    return {
        "method": model.method.name,
        "process": (model.process.spec or {}).get("name"),
        "tokenizer": model.tokenizer.name,
        "unit": "character" if model.tokenizer.characters is not None else "token",
        "vocabulary": model.process.vocab_size,
        "length": model.length,
        "parameters": model.model.num_parameters(),
        "steps": defaults.steps,
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "samplers": [sampler for sampler in SAMPLERS if _samples(model, sampler)],
        "labels": list(model.labels),
        "tasks": list(_tasks(model)),
    }


def _tasks(model: LanguageModel) -> Iterator[str]:
    yield "write"
    if getattr(model.tokenizer, "chat_template", None) is not None:
        yield "chat"
    if model.method.dynamics.noisy:
        yield "fill"
        if model.process.can_shuffle or lexicon_file(model) is not None:
            yield "correct"


def _samples(model: LanguageModel, sampler: str) -> bool:
    """Whether a model can be sampled by this sampler, and not by another in its place."""
    found = get_sampler(sampler, model.method)
    try:
        found.check(model.method, model.process)
    except ValueError:
        return False
    return found.name == sampler
