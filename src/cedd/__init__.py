"""cedd: discrete diffusion language models. Train them, bound their perplexity, sample, infill and correct.

Shapes: B batch, L positions, V vocabulary. Time t runs from data, 0, to noise, 1.

Arguments that mean the same everywhere:

- `model`: any callable `(x_t [B, L] int64, sigma [B] float32) -> [B, L, V]`, with no output for the mask.
- `method`: what its outputs mean and how it was trained, a name in `METHODS` (or "cedd*") or a `Method`.
- `process`: a `TokenProcess`, made by `absorb`, `uniform`, `roulette`, `eroulette` or `hybrid`.
- `vocab_size`: V; tokens are 0 to V-1, and the mask, if the process has one, is V.
- `schedule`: the noise schedule; `LogLinear()` by default.
- `x0`: clean tokens [B, L], int64.
- `x_t`: noisy tokens [B, L] at time `t`.
- `t`: times in [0, 1], one per sequence, [B], or a single number.
- `outputs`: what the model returned for `x_t`, [B, L, V].
- `generator`: the random number generator; torch's default one unless given.
- `device`: the device to compute on; by default that of the model.
- `name`: the name of a part in its table and in messages.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedd import constraints as constraints
    from cedd.apps.correct.word_corrector import WordCorrector
    from cedd.bounds.estimate import BoundEstimate
    from cedd.bounds.estimator import estimate_bound
    from cedd.bounds.exact import exact_bound, exact_cross_entropy
    from cedd.bounds.exact_likelihood import exact_likelihood
    from cedd.clocks import PowerShare
    from cedd.evaluation.evaluate import EvaluationResult, evaluate
    from cedd.losses import loss
    from cedd.methods import METHODS, Method, get_method, log_scores
    from cedd.models.architectures import ARCHITECTURES
    from cedd.models.backbone import Backbone
    from cedd.network import Capabilities
    from cedd.parameterization import Bayes, Denoiser, Parameterization, ScaledScore, Score
    from cedd.process import (
        Kernel,
        Noise,
        TokenProcess,
        absorb,
        eroulette,
        hybrid,
        process_from_config,
        roulette,
        uniform,
    )
    from cedd.samplers import Corrector, Fixed, sample
    from cedd.schedules import Cosine, Geometric, LogLinear, Polynomial, Schedule
    from cedd.tasks import LanguageModel, import_model, load
    from cedd.tasks.train import train
    from cedd.training.config import TrainConfig
    from cedd.training.loop import Hooks

    PRETRAINED: tuple[str, ...]

__version__ = "0.1.0"

__all__ = [
    "ARCHITECTURES",
    "METHODS",
    "PRETRAINED",
    "Backbone",
    "Bayes",
    "BoundEstimate",
    "Capabilities",
    "Corrector",
    "Cosine",
    "Denoiser",
    "EvaluationResult",
    "Fixed",
    "Geometric",
    "Hooks",
    "Kernel",
    "LanguageModel",
    "LogLinear",
    "Method",
    "Noise",
    "Parameterization",
    "Polynomial",
    "PowerShare",
    "ScaledScore",
    "Schedule",
    "Score",
    "TokenProcess",
    "TrainConfig",
    "WordCorrector",
    "absorb",
    "eroulette",
    "estimate_bound",
    "evaluate",
    "exact_bound",
    "exact_cross_entropy",
    "exact_likelihood",
    "get_method",
    "hybrid",
    "import_model",
    "load",
    "log_scores",
    "loss",
    "process_from_config",
    "roulette",
    "sample",
    "train",
    "uniform",
]


_HOMES = {
    "bounds.estimate": ("BoundEstimate",),
    "bounds.estimator": ("estimate_bound",),
    "bounds.exact": ("exact_bound", "exact_cross_entropy"),
    "bounds.exact_likelihood": ("exact_likelihood",),
    "clocks": ("PowerShare",),
    "evaluation.evaluate": ("EvaluationResult", "evaluate"),
    "losses": ("loss",),
    "methods": ("METHODS", "Method", "get_method", "log_scores"),
    "models.architectures": ("ARCHITECTURES",),
    "models.backbone": ("Backbone",),
    "network": ("Capabilities",),
    "parameterization": ("Bayes", "Denoiser", "Parameterization", "ScaledScore", "Score"),
    "process": (
        *("Kernel", "Noise", "TokenProcess", "absorb", "eroulette", "hybrid", "process_from_config", "roulette"),
        "uniform",
    ),
    "samplers": ("Corrector", "Fixed", "sample"),
    "schedules": ("Cosine", "Geometric", "LogLinear", "Polynomial", "Schedule"),
    "apps.correct.word_corrector": ("WordCorrector",),
    "tasks": ("LanguageModel", "import_model", "load"),
    "tasks.train": ("train",),
    "training.config": ("TrainConfig",),
    "training.loop": ("Hooks",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Names are imported when first asked for: torch takes seconds, and `cedd --help` has no use for it.

    PRETRAINED: the names of the models that come with the package, for `load`.
    """
    if name == "PRETRAINED":
        return importlib.import_module("cedd.models.locate").pretrained_names()
    if name not in _HOME_OF and not name.startswith("_") and importlib.util.find_spec(f"cedd.{name}"):
        return importlib.import_module(f"cedd.{name}")  # cedd.samplers
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cedd' has no attribute {name!r}")
    if _HOME_OF[name].startswith("tasks"):
        importlib.import_module("cedd.apps.correct")  # registers the engine `words` of LanguageModel.correct
    value = getattr(importlib.import_module(f"cedd.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
