"""Languages compiled for a tokenizer, cached in memory and, if compilation was slow, on disk.

A compiled language is a file of the cache folder, `constraints/KEY.safetensors`, whose name is the hash of the
language, the texts of the tokens, and the format. It contains arrays only. A damaged file is replaced.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from cedd.constraints import Language, TokenAutomaton, TokenLanguage, compile_tokens
from cedd.constraints.token_automaton import Transitions
from cedd.data.folders import cache_root
from cedd.data.tokenizers import Tokenizer
from cedd.samplers.languages import LanguageConstraint, Span
from cedd.storage import atomic_file, json_sha256

FORMAT = "cedd-token-language-1"
SLOW = 0.3
"""Seconds of compilation from which a language is cached on disk."""
MOST_FILES = 256
"""Largest number of files on disk; the oldest are removed."""


def token_language(
    language: Language, tokenizer: Tokenizer, *, may_end: bool, before: str = "", cache: str | Path | None = None
) -> TokenLanguage:
    """The language of the sequences of tokens that write a text of a language.

    Args:
        language: the language of the texts.
        tokenizer: what the tokens write.
        may_end: whether a text may end before the tokens do, by a token that ends texts.
        before: what the tokens write before each text.
        cache: folder of files (default: CEDD_CACHE or ~/.cache/cedd).
    """
    return _compiled(language, tokenizer, may_end, before, cache)


@lru_cache(maxsize=64)
def _compiled(
    language: Language, tokenizer: Tokenizer, may_end: bool, before: str, cache: str | Path | None
) -> TokenLanguage:
    parts = [FORMAT, repr(language.expression), tokenizer.texts.fingerprint, may_end, before]
    file = cache_root(cache) / "constraints" / f"{json_sha256(parts)}.safetensors"
    if (kept := _read(file)) is not None:
        return TokenLanguage(kept)
    start = time.perf_counter()
    made = compile_tokens(language.automaton.after(before.encode()), tokenizer.texts, may_end=may_end)
    if time.perf_counter() - start > SLOW:
        _write(file, made)
    return TokenLanguage(made)


def _read(file: Path) -> TokenAutomaton | None:
    """The automaton in a file; None if the file is missing or damaged."""
    try:
        arrays: dict[str, NDArray[np.int32]] = load_file(file)
        transitions = Transitions(arrays["source"], arrays["label"], arrays["target"])
        made = TokenAutomaton(arrays["classes"], transitions, arrays["accepting"].astype(bool))
    except (OSError, SafetensorError, KeyError):
        return None
    limits = (made.num_states, made.num_classes, made.num_states)
    sized = len({len(part) for part in made.transitions}) == 1
    inside = all(bool(((part >= 0) & (part < most)).all()) for part, most in zip(transitions, limits, strict=True))
    return made if sized and inside and bool((made.classes >= 0).all()) else None


def _write(file: Path, automaton: TokenAutomaton) -> None:
    """Write an automaton to a file; errors are ignored."""
    arrays = dict(automaton.transitions._asdict(), classes=automaton.classes, accepting=automaton.accepting)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as temporary:
            save_file({name: np.ascontiguousarray(each.astype(np.int32)) for name, each in arrays.items()}, temporary)
        oldest = sorted(file.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]
        for each in oldest:
            each.unlink(missing_ok=True)
    except OSError:
        return


def language_constraint(language: Language, tokenizer: Tokenizer, length: int) -> LanguageConstraint:
    """A constraint for `cedd.sample`: each sequence of L tokens writes a text of the language, which may end before the
    tokens do.

    Args:
        language: the language.
        tokenizer: what the tokens write.
        length: L.
    """
    compiled = token_language(language, tokenizer, may_end=True)
    return LanguageConstraint.of(length, [Span(0, length, compiled, tokenizer.ends, language.name)])
