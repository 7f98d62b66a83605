"""cedd: discrete diffusion language models. Train them, bound their perplexity, sample, infill and correct."""

from cedd.bounds.estimate import BoundEstimate
from cedd.bounds.estimator import estimate_bound
from cedd.bounds.exact import exact_bound, exact_cross_entropy
from cedd.clocks import PowerShare
from cedd.objectives import METHODS, Method, get_method, log_scores, loss
from cedd.parameterization import Bayes, Denoiser, Parameterization, ScaledScore, Score
from cedd.process import (
    Kernel,
    Noise,
    TokenProcess,
    absorb,
    eroulette,
    process_from_config,
    roulette,
    uniform,
)
from cedd.schedules import Cosine, Geometric, LogLinear, Polynomial, Schedule

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Bayes",
    "BoundEstimate",
    "Cosine",
    "Denoiser",
    "Geometric",
    "Kernel",
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
    "absorb",
    "eroulette",
    "estimate_bound",
    "exact_bound",
    "exact_cross_entropy",
    "get_method",
    "log_scores",
    "loss",
    "process_from_config",
    "roulette",
    "uniform",
]
