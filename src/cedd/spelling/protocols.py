"""Options of the two protocols of correction. This module does not import torch, so that --help appears at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PaperOptions:
    """Options of the paper's protocol."""

    t: float = 0.05
    """Time t of the noise."""
    batch: int = 32
    """Sequences per batch."""


@dataclass(frozen=True)
class UserOptions:
    """Options of the user's protocol: which errors are inserted, and how they are corrected."""

    mistakes: Literal["letters", "swaps"] = "letters"
    """Letters replaced by other letters, or neighbouring letters of a word swapped."""
    rate: float = 0.05
    """Share of letters replaced, or of neighbouring pairs swapped."""
    thresholds: tuple[float, ...] = (0.5, 0.2, 0.05)
    """Thresholds, as in cedd correct; 0.5 is the argmax."""
    passes: tuple[int, ...] = (1, 3)
    """Numbers of passes over the text; each gives a curve over the thresholds."""
    steps: tuple[int, ...] = ()
    """Also sample the reverse process with these numbers of steps, for each threshold (8 take as long as 9
    passes)."""
    times: tuple[float, ...] = ()
    """Diffusion times t at which the network reads the text; by default the time of its error rate."""
    change: Literal["letters", "all"] | None = None
    """What may be changed, as in cedd correct."""
    swaps: float | None = None
    """Expected share of swapped neighbours, as in cedd correct; 0 turns the search off."""
