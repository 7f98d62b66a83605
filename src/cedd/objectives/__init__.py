"""Training objectives: the loss of a row of outputs."""

from cedd.objectives.cross_entropy import WEIGHTS, CrossEntropy
from cedd.objectives.objective import OBJECTIVES, Objective, Rows
from cedd.objectives.score_entropy import ScoreEntropy

OBJECTIVES.update({"cross-entropy": CrossEntropy, "score-entropy": ScoreEntropy})

__all__ = ["OBJECTIVES", "WEIGHTS", "CrossEntropy", "Objective", "Rows", "ScoreEntropy"]
