"""The evaluation protocol on human misspellings, which are inserted into sentences and compared word by word.

A list has lines "written TAB meant". By a fixed hash of the intended word, each pair belongs to one part: train (for
the noise model and the weights of decisions), dev (for choices) or test. Joined and split words are made from the
sentences themselves. Case and punctuation at the edges of words do not count.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import torch

from cedd.apps.correct.words import like
from cedd.spelling.shares import Share
from cedd.storage import JSONObject

LISTS = ("birkbeck", "holbrook", "norvig", "wikipedia")
PARTS = {"train": 60, "dev": 20, "test": 20}
"""Percentages of the intended words."""
KINDS = ("replaced", "swapped", "extra", "missing", "several", "real word", "joined", "split")
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*\Z")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_SPACES = re.compile(r"\s+")


class Pair(NamedTuple):
    """A misspelling and the intended word; either may be two words separated by a space."""

    written: str
    meant: str


def number(*words: object) -> int:
    """A pseudo-random number that depends on these values only."""
    return int.from_bytes(hashlib.blake2b("\t".join(map(str, words)).encode(), digest_size=8).digest(), "little")


def part_of(meant: str) -> str:
    """The part to which all pairs with this intended word belong."""
    draw = number("part", meant.lower()) % 100
    for part, share in PARTS.items():
        draw -= share
        if draw < 0:
            return part
    raise AssertionError("the shares of the parts add up to a hundred")


def read_pairs(path: Path, part: str | None = None) -> list[Pair]:
    """The pairs of a list in plain letters and apostrophes, lower case, of one part or of all."""
    lines = path.read_text(encoding="utf-8").lower().replace("_", " ").splitlines()[1:]
    pairs = dict.fromkeys(Pair(*line.split("\t")[:2]) for line in lines if "\t" in line)
    return [
        pair
        for pair in pairs
        if pair.written != pair.meant
        and all(_WORD.match(word) for text in pair for word in text.split(" "))
        and part in (None, part_of(pair.meant))
    ]


def kind_of(pair: Pair, known: Collection[str]) -> str:
    """One of `KINDS`; `known` words are words of the language."""
    a, b = pair
    if " " in b or " " in a:
        return "joined" if b.count(" ") > a.count(" ") else "split"
    if a in known:
        return "real word"
    if len(a) == len(b):
        places = [i for i in range(len(a)) if a[i] != b[i]]
        if len(places) == 1:
            return "replaced"
        if (
            len(places) == 2
            and places[1] == places[0] + 1
            and a[places[0]] == b[places[1]]
            and a[places[1]] == b[places[0]]
        ):
            return "swapped"
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    if len(longer) == len(shorter) + 1 and any(longer[:i] + longer[i + 1 :] == shorter for i in range(len(longer))):
        return "extra" if longer is a else "missing"
    return "several"


# ----------------------------------------------------------------------------------------------------------------
# Sentences with mistakes


@dataclass(frozen=True)
class Misspelt:
    """A sentence as intended and as written, with at most one error."""

    meant: str
    written: str
    pair: Pair | None = None
    source: str = "clean"


def sentences(text: str) -> list[str]:
    """The sentences of a text that have 40 to 250 characters, without line breaks."""
    found = (_SPACES.sub(" ", s).strip() for p in text.split("\n\n") for s in _SENTENCE_END.split(p))
    return [s for s in found if 40 <= len(s) <= 250 and s[0].isupper() and s[-1] in ".!?"]


def placed(pairs: Mapping[str, Sequence[Pair]], texts: Sequence[str], count: int, seed: int = 0) -> Iterator[Misspelt]:
    """Up to `count` pairs of each list, each in a sentence of its own that contains the intended word."""
    where: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        for word in set(re.findall(r"[a-z]+(?:'[a-z]+)*", text.lower())):
            where[word].append(place)
    used = set[int]()
    for source, of_list in pairs.items():
        left = count
        for pair in sorted(of_list, key=lambda pair: number(seed, *pair)):
            first = pair.meant.split(" ")[0]
            find = re.compile(rf"(?<![\w'’-]){re.escape(pair.meant)}(?![\w'’-])", re.IGNORECASE)
            for place in sorted(where.get(first, ()), key=lambda place: number(seed, place, *pair))[:50]:
                if place not in used and (match := find.search(texts[place])):
                    text = texts[place]
                    written = text[: match.start()] + like(match[0], pair.written) + text[match.end() :]
                    used.add(place)
                    left -= 1
                    yield Misspelt(text, written, Pair(like(match[0], pair.written), match[0]), source)
                    break
            if not left:
                break


def joined_and_split(texts: Iterable[str], count: int, seed: int = 0) -> Iterator[Misspelt]:
    """`count` sentences with two words joined, and `count` with one word split."""
    made = {"joined": 0, "split": 0}
    for text in sorted(texts, key=lambda text: number("spaces", seed, text)):
        kind = "joined" if made["joined"] <= made["split"] else "split"
        find = (
            r"(?<![\w'’-])([a-z]+) ([a-z]+)(?![\w'’-])" if kind == "joined" else r"(?<![\w'’-])([a-z]{4,})(?![\w'’-])"
        )
        matches = list(re.finditer(find, text))
        if not matches:
            continue
        match = matches[number("which", text) % len(matches)]
        at = 1 + number("where", text) % (len(match[0]) - 1)
        written = match[0].replace(" ", "") if kind == "joined" else match[0][:at] + " " + match[0][at:]
        made[kind] += 1
        yield Misspelt(text, text[: match.start()] + written + text[match.end() :], Pair(written, match[0]), kind)
        if made["split"] == count:
            return


def shortened(sentence: Misspelt, size: int) -> Misspelt | None:
    """`size` words of a sentence, with its error; None if it is shorter or the error is not one word."""
    meant, written = sentence.meant.split(), sentence.written.split()
    wrong = [i for i, words in enumerate(zip(meant, written, strict=False)) if len(set(words)) > 1]
    if len(meant) != len(written) or len(meant) < size or len(wrong) > 1:
        return None
    draw = number("shortened", size, sentence.meant)
    place = wrong[0] if wrong else draw % len(meant)
    first = min(max(0, place - draw % size), len(meant) - size)
    return replace(
        sentence,
        meant=" ".join(meant[first : first + size]).strip(".,;:!?\"'"),
        written=" ".join(written[first : first + size]).strip(".,;:!?\"'"),
    )


# ----------------------------------------------------------------------------------------------------------------
# What became of them


def bare_words(text: str) -> list[str]:
    """The words of a text in lower case, without leading and trailing punctuation."""
    stripped = (re.sub(r"^\W+|\W+$", "", word.replace("’", "'").lower()) for word in text.split())
    return [word for word in stripped if word]


def unmatched(wanted: Sequence[str], found: Sequence[str]) -> list[int]:
    """The indices of the words that have no counterpart in the other text."""
    left = set(range(len(wanted)))
    for a, _, size in SequenceMatcher(None, wanted, found, autojunk=False).get_matching_blocks():
        left -= set(range(a, a + size))
    return sorted(left)


class Outcome(NamedTuple):
    """The outcome for one sentence, in numbers of words and errors."""

    mistakes: int
    fixed: int
    altered: int
    right: int
    broken: int


def outcome(sentence: Misspelt, corrected: str) -> Outcome:
    """The error is fixed if the corrected sentence has all intended words, and altered if it has neither these nor the
    written ones. Words that were correct and have no counterpart in the corrected sentence are broken."""
    meant, written, now = map(bare_words, (sentence.meant, sentence.written, corrected))
    mistaken, lost = set(unmatched(meant, written)), set(unmatched(meant, now))
    wrong = bool(mistaken)
    fixed = wrong and not mistaken & lost
    altered = wrong and not fixed and bool(set(unmatched(written, meant)) & set(unmatched(written, now)))
    return Outcome(int(wrong), int(fixed), int(altered), len(meant) - len(mistaken), len(lost - mistaken))


@dataclass(frozen=True)
class WordOutcomes:
    """Shares, with intervals by sentence."""

    fixed: Share
    altered: Share
    broken: Share

    @staticmethod
    def of(outcomes: Sequence[Outcome]) -> WordOutcomes:
        columns = torch.tensor(outcomes, dtype=torch.int64).view(-1, len(Outcome._fields)).T
        mistakes, fixed, altered, right, broken = columns
        return WordOutcomes(Share(fixed, mistakes), Share(altered, mistakes), Share(broken, right))

    def record(self) -> JSONObject:
        return {"fixed": self.fixed.record(), "altered": self.altered.record(), "broken": self.broken.record()}


class Difference(NamedTuple):
    """The difference of two shares of the same errors, with a 95% interval; `gained` errors count only in the first
    share, `lost` errors only in the second."""

    value: float
    low: float
    high: float
    gained: int
    lost: int


def paired_difference(first: Share, second: Share) -> Difference:
    """The first share minus the second, of errors that both count at most once each.

    The interval is that of Agresti and Min (2005): normal, with half an observation added to each of the four outcomes.
    """
    gained, lost = (int((one.hits > other.hits).sum()) for one, other in ((first, second), (second, first)))
    total, difference = first.total + 2, gained - lost
    half = NormalDist().inv_cdf(0.975) * math.sqrt(gained + lost + 1 - difference**2 / total) / total
    return Difference(first.value - second.value, difference / total - half, difference / total + half, gained, lost)


def measure(
    correct: Callable[[str], str], sentences: Sequence[Misspelt], known: Collection[str]
) -> dict[str, WordOutcomes]:
    """A corrector's outcomes: for all real errors, by list, by kind of error, and for error-free sentences."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for sentence in sentences:
        result = outcome(sentence, correct(sentence.written))
        kind = None if sentence.pair is None else kind_of(Pair(*(text.lower() for text in sentence.pair)), known)
        made = sentence.source in KINDS
        names = [
            sentence.source,
            *[kind] * (kind is not None and not made),
            *["real"] * (kind is not None and not made),
        ]
        for name in (*names, "all"):
            groups[name].append(result)
    return {name: WordOutcomes.of(results) for name, results in groups.items()}
