"""What the two protocols of correction take. No torch is imported here, so that a --help appears at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PaperOptions:
    """How the paper tests correction."""

    t: float = 0.05
    """Paper's: the time of the noise."""
    batch: int = 32
    """Paper's: blocks shown to the network at once."""


@dataclass(frozen=True)
class UserOptions:
    """Which mistakes are made, and in which ways they are corrected."""

    mistakes: Literal["letters", "swaps"] = "letters"
    """User's: letters replaced by other letters, or neighbouring letters of a word exchanged."""
    rate: float = 0.05
    """User's: the share of letters that are replaced, or of pairs of neighbours that are exchanged."""
    thresholds: tuple[float, ...] = (0.5, 0.2, 0.05)
    """User's: a letter is replaced if it weighs less than this, as in cedd correct; 0.5 leaves all to the argmax."""
    passes: tuple[int, ...] = (1, 3)
    """User's: how often the text is read, each a curve over the thresholds."""
    steps: tuple[int, ...] = ()
    """User's: also by so many steps of the reverse process, sampled for each threshold (8 take as long as 9 passes)."""
    times: tuple[float, ...] = ()
    """User's: diffusion times t at which the network reads the text; by default the time of its error rate."""
    change: Literal["letters", "all"] | None = None
    """User's: what may be changed, as in cedd correct."""
    swaps: float | None = None
    """User's: the share of exchanged neighbours that correction expects, as in cedd correct; 0 looks for none."""
