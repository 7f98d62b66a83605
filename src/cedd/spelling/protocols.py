"""Options of the two protocols of correction. This module does not import torch, so that --help appears at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PaperOptions:
    """Options of the paper's protocol."""

    t: float = 0.05
    """Paper's: time of the noise."""
    batch: int = 32
    """Paper's: blocks per batch."""


@dataclass(frozen=True)
class UserOptions:
    """Options of the user's protocol: which mistakes are made, and how they are corrected."""

    mistakes: Literal["letters", "swaps"] = "letters"
    """User's: letters replaced by other letters, or neighbouring letters of a word swapped."""
    rate: float = 0.05
    """User's: share of letters replaced, or of neighbouring pairs swapped."""
    thresholds: tuple[float, ...] = (0.5, 0.2, 0.05)
    """User's: thresholds, as in cedd correct; 0.5 is the argmax."""
    passes: tuple[int, ...] = (1, 3)
    """User's: numbers of passes over the text, each a curve over the thresholds."""
    steps: tuple[int, ...] = ()
    """User's: also sample the reverse process with these numbers of steps, for each threshold (8 take as long as 9
    passes)."""
    times: tuple[float, ...] = ()
    """User's: diffusion times t at which the network reads the text; by default the time of its error rate."""
    change: Literal["letters", "all"] | None = None
    """User's: what may be changed, as in cedd correct."""
    swaps: float | None = None
    """User's: expected share of swapped neighbours, as in cedd correct; 0 looks for none."""
