"""Detokenizers: restore the text of old benchmarks from its tokenized form, as is customary.

Perplexities on WikiText, Penn Treebank, One Billion Words and LAMBADA are comparable only if the text was restored to
the same form. The rules here give, row by row, the text of GPT-2's and SEDD's evaluations. A detokenizer is a table of
rules, applied from top to bottom; its hash is part of every result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from cedd.storage import json_sha256

Rule = tuple[str, str]  # a regular expression and what takes its place


def _literal(before: str, after: str) -> Rule:
    return re.escape(before), after.replace("\\", r"\\")


def _no_space_before(marks: str) -> tuple[Rule, ...]:
    """' , ' -> ', ' for each mark, one after the other; the order determines the result for ' , . '."""
    return tuple(_literal(f" {mark} ", f"{mark} ") for mark in marks)


def _tight_pair(opening: str, closing: str) -> Rule:
    """'( text )' -> '(text)': only white space at the ends is removed."""
    return rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}", rf"{opening}\1{closing}"


def _tight_pair_one_space(opening: str, closing: str) -> Rule:
    """'( text )' -> '(text)' with exactly one space inside each end and no nested pair."""
    inner = "".join(re.escape(mark) for mark in dict.fromkeys(opening + closing))
    return rf"{re.escape(opening)} ([^{inner}]+) {re.escape(closing)}", rf"{opening}\1{closing}"


@dataclass(frozen=True)
class Detokenizer:
    """strip, then the rules, then a prefix."""

    name: str
    rules: tuple[Rule, ...] = ()
    strip: bool = False
    prefix: str = ""

    @cached_property
    def _compiled(self) -> tuple[tuple[re.Pattern[str], str], ...]:
        return tuple((re.compile(pattern), replacement) for pattern, replacement in self.rules)

    def __call__(self, text: str) -> str:
        text = text.strip() if self.strip else text
        for pattern, replacement in self._compiled:
            text = pattern.sub(replacement, text)
        return self.prefix + text

    @property
    def sha256(self) -> str:
        return json_sha256([self.rules, self.strip, self.prefix])


PLAIN = Detokenizer("plain")

WIKITEXT = Detokenizer(
    "wikitext",
    (
        _literal("s '", "s'"),
        *(_literal(f" @{mark}@ ", mark) for mark in "-,."),
        *_no_space_before(":;.!?,"),
        *(_tight_pair(*pair) for pair in ("()", "[]", "{}", '""', "''")),
        *(_literal(" ".join("=" * depth), "=" * depth) for depth in (4, 3, 2)),
        _literal(" ° ", "°"),
        _literal(" \n", "\n"),
        _literal("\n ", "\n"),
        _literal(" N ", " 1 "),
        _literal(" 's", "'s"),
    ),
)

PTB = Detokenizer(
    "ptb",
    (
        _literal(" 's", "'s"),
        _literal("s ' ", "s' "),
        _literal(" n't", "n't"),
        _literal(" \n ", "\n"),
        _literal("\\/", "/"),
        (r"(?<= )N(?= )", "1"),  # every number is N in this corpus, also several in a row
        _literal("$ 1", "$1"),
        _literal("# 1", "#1"),
        _literal("<unk>", "?"),
    ),
)

LM1B = Detokenizer(
    "lm1b",
    (
        (r"(https?) : / / ", r"\1://"),
        (r" '(\w+)", r"'\1"),
        (r" (\w+) \. ", r" \1. "),
        (r" (\w+) \.$", r" \1."),
        *(rule for mark in "?!" for rule in (_literal(f" {mark} ", f"{mark} "), (rf" \{mark}$", mark))),
        *_no_space_before(",:;"),
        _literal(" / ", "/"),
        *(_tight_pair_one_space(*pair) for pair in ('""', "''", "()", "[]")),
        (r"([$£]) ", r"\1"),
    ),
)

LAMBADA = Detokenizer("lambada", ((r"[“”]", '"'),), strip=True, prefix="\n")

DETOKENIZERS = {d.name: d for d in (PLAIN, WIKITEXT, PTB, LM1B, LAMBADA)}
