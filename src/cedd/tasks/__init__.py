"""The verbs a user calls: generate, infill, correct, and the language model that has them as methods."""

from cedd.spelling.correct import Change, Corrected
from cedd.spelling.options import CorrectionOptions
from cedd.spelling.scores import time_of_rate
from cedd.tasks.correct import correct
from cedd.tasks.generate import generate
from cedd.tasks.infill import infill, parse_template
from cedd.tasks.language_model import LanguageModel, Perplexity, import_model, load
from cedd.tasks.template import Template
from cedd.tasks.trajectory import Trajectory

__all__ = [
    "Change",
    "Corrected",
    "CorrectionOptions",
    "LanguageModel",
    "Perplexity",
    "Template",
    "Trajectory",
    "correct",
    "generate",
    "import_model",
    "infill",
    "load",
    "parse_template",
    "time_of_rate",
]
