"""Training objectives, and the table of methods that they make up with the parameterizations."""

from cedd.objectives.loss import Draws, Model, NoisyBatch, batch_loss, loss, noisy_batch
from cedd.objectives.methods import METHODS, Method, get_method, log_scores
from cedd.objectives.times import draw_times

__all__ = [
    "METHODS",
    "Draws",
    "Method",
    "Model",
    "NoisyBatch",
    "batch_loss",
    "draw_times",
    "get_method",
    "log_scores",
    "loss",
    "noisy_batch",
]
