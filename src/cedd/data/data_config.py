"""Options of training data. This module imports neither torch nor NumPy, so that --help appears at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The data, and how it is split into sequences of tokens."""

    tokenizer: str = "char"
    """char, char:SIZE, byte, gpt2, gpt2-char, bpe:SIZE, a folder with a saved tokenizer, or a kind that you added to
    TOKENIZER_KINDS."""
    gpt2_files: Path | None = None
    """A folder with GPT-2's vocab.json and merges.txt, instead of downloading them."""
    validation: str | None = None
    """A separate corpus for validation; by default, the share `holdout` of the data."""
    holdout: float = 0.05
    """Share of the data that is held out for validation."""
    holdout_by: Literal["tail", "documents"] = "tail"
    """Which part is held out: the last sequences (tail), or evenly spaced documents."""
    field: str = "text"
    """The text field of a .jsonl or a hub data set."""
    wrap: Literal["none", "bos-eos"] = "none"
    """bos-eos puts each sequence between the tokens that begin and end a document, like MDLM and DUO. A run that starts
    --from such a network keeps it."""
    workers: int = 1
    """Processes for tokenization."""
    cache: Path | None = None
    """Folder for tokenized data (default: CEDD_CACHE, or ~/.cache/cedd)."""
