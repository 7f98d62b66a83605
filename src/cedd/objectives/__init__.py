"""Training objectives: what a row of outputs costs."""

from cedd.objectives.cross_entropy import CrossEntropy
from cedd.objectives.objective import Objective, Rows
from cedd.objectives.score_entropy import ScoreEntropy

__all__ = ["CrossEntropy", "Objective", "Rows", "ScoreEntropy"]
