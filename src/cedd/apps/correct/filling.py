"""How likely a model that fills masks finds texts that differ in one place, also if they differ in length.

To a model that only masks, a token that it sees is certainly right, but it fills blanks: what stands in the place is
masked, and its tokens a b c, given the text on both sides, have

    log p(a | _ _ _) + log p(b | a _ _) + log p(c | a b _).

The text around the place is read once, with one mask there. Where several tokens stand there, these and one neighbour
on each side are then read amid the rest, which has not seen them: sums move by 0.3 on average, where versions differ by
several, and all takes less than half as long. Versions that begin alike and have as many tokens share readings.

No torch: a few lines are judged sooner than that is imported.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cedd.apps.correct.lexicon import Floats
from cedd.apps.correct.numpy_network import NumpyNetwork, Passage, PassageReader, States
from cedd.data.text import encode_verbatim
from cedd.data.tokenizers import Tokenizer
from cedd.models.description import own_tokenizer, read_description, stored_form
from cedd.models.locate import WEIGHTS_FILE
from cedd.models.numpy_weights import CHECKSUM, FORMS, read_arrays
from cedd.models.transformer_config import TransformerConfig
from cedd.spelling.changes import Watch
from cedd.storage import from_json

AROUND, BEFORE = 31, 19
"""Tokens around a place that are read; of these before it, at most."""
NEAR = 1
"""Tokens on each side of the place that are read again with what stands there."""
MOST_TOKENS, LONGEST_TOKEN = 16, 8
"""Tokens of what stands in a place that are read; characters that a token has at most, as a rule."""
BATCH, QUESTIONS = 16, 48
"""Places that are read at once, and questions about them: each takes a megabyte, for its view of the text around."""
_LINE_END = re.compile(r"(?<!\n)\r?\n(?!\r?\n)")
Tokens = tuple[int, ...]
Replacement = tuple[int, int, str]
"""text[start:stop] becomes another text."""


class Blank(NamedTuple):
    """A place in a text: the tokens before it and after it."""

    before: Tokens
    after: Tokens

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.before), len(self.after)


class Question(NamedTuple):
    """What comes next in a place of so many tokens, the first of which are there."""

    blank: Blank
    filled: Tokens
    size: int


class LeftToRight:
    """Scores versions of a text by filling the tokens of a replacement one after another, amid the text on both sides.

    Args:
        network: reads.
        tokenizer: of the text.
        length: how many tokens the network reads at once.
        mask: what is not there yet.
        watch: called with how much of what was asked has been read.
        known: scores that were found before.
    """

    def __init__(
        self,
        network: PassageReader,
        tokenizer: Tokenizer,
        length: int,
        mask: int,
        watch: Watch | None = None,
        known: MutableMapping[Hashable, float] | None = None,
    ) -> None:
        self.network, self.tokenizer, self.mask, self.watch, self.known = network, tokenizer, mask, watch, known
        self.most = min(MOST_TOKENS, length // 2)
        self.around = min(AROUND, length - self.most)

    def __call__(self, text: str, replacements: Sequence[Replacement]) -> Floats:
        """Of the text with text[start:stop] replaced, for each (start, stop, replacement) the score, and of how many
        tokens it is the sum, [N, 2]."""
        versions = list(self.placed(text, replacements))
        known = {} if self.known is None else self.known
        found = {version: known[version] for version in versions if version in known}
        asked = defaultdict[Blank, dict[Tokens, None]](dict)
        for blank, middle in versions:
            if (blank, middle) not in found:
                asked[blank][middle] = None
        questions = {
            blank: dict.fromkeys(q for middle in middles for q, _ in steps(blank, middle))
            for blank, middles in asked.items()
        }
        for blanks in batches(questions):
            said = self.answers(blanks, [q for blank in blanks for q in questions[blank]])
            for blank in blanks:
                for middle in asked[blank]:
                    score = float(sum(said[q][token] for q, token in steps(blank, middle)))
                    found[blank, middle] = known[blank, middle] = score
            if self.watch is not None:
                self.watch(len(blanks) / len(asked))
        return np.array([(found[version], len(version[1])) for version in versions])

    def placed(self, text: str, replacements: Sequence[Replacement]) -> Iterator[tuple[Blank, Tokens]]:
        """The place and the tokens of each replacement."""
        blanks: dict[tuple[int, int], tuple[Blank, str]] = {}
        for start, stop, replacement in replacements:
            if (start, stop) not in blanks:
                blanks[start, stop] = self.blank(text, start, stop)
            blank, space = blanks[start, stop]
            yield blank, self.tokens(space + replacement)[: self.most]

    def blank(self, text: str, start: int, stop: int) -> tuple[Blank, str]:
        """The tokens around a place, and the space that belongs to the token in it. A line ends as any word does."""
        reach = LONGEST_TOKEN * (self.around + 1)
        before, after = (
            _LINE_END.sub(" ", part) for part in (text[max(0, start - reach) : start], text[stop : stop + reach])
        )
        space = " " if before.endswith(" ") else ""
        left = self.tokens(before.removesuffix(space))[-(self.around * BEFORE // AROUND) :]
        return Blank(left, self.tokens(after)[: self.around - len(left)]), space

    def tokens(self, text: str) -> Tokens:
        return tuple(encode_verbatim(self.tokenizer, text).tolist())

    def answers(self, blanks: Sequence[Blank], questions: Iterable[Question]) -> dict[Question, NDArray[np.float32]]:
        """log p of all tokens, [V] each."""
        alike = defaultdict[tuple[int, int], list[Blank]](list)
        for blank in blanks:
            alike[blank.shape].append(blank)
        read = self.network.read([self.whole(group) for group in alike.values()])
        said = {
            Question(blank, (), 1): row
            for group, (rows, _) in zip(alike.values(), read, strict=True)
            for blank, row in zip(group, rows, strict=True)
        }
        states = dict(zip(alike, (states for _, states in read), strict=True))
        later = defaultdict[tuple[tuple[int, int], int], list[Question]](list)
        for question in questions:
            if question not in said:
                later[question.blank.shape, question.size].append(question)
        passages = [self.amid(group, states[shape], alike[shape]) for (shape, _), group in later.items()]
        for group, (rows, _) in zip(later.values(), self.network.read(passages) if passages else (), strict=True):
            said |= zip(group, rows, strict=True)
        return said

    def whole(self, blanks: Sequence[Blank]) -> Passage:
        """The text around places, with a mask in each."""
        ids = np.array([(*blank.before, self.mask, *blank.after) for blank in blanks])
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        return Passage(ids, places, np.full(len(ids), len(blanks[0].before)))

    def amid(self, questions: Sequence[Question], states: States, blanks: Sequence[Blank]) -> Passage:
        """What stands in places of one size, and the tokens near it, amid the text around, which was read."""
        size, (before, after) = questions[0].size, blanks[0].shape
        left, right = min(NEAR, before), min(NEAR, after)
        ids = [
            (*q.blank.before[before - left :], *q.filled, *[self.mask] * (size - len(q.filled)), *q.blank.after[:right])
            for q in questions
        ]
        places = np.tile(np.arange(before + size + after), (len(ids), 1))
        inside = np.s_[before - left : before + size + right]
        kept = [*range(before - left), *range(before + 1 + right, before + 1 + after)]
        around = states.of([blanks.index(q.blank) for q in questions], kept, np.delete(places, inside, 1))
        return Passage(np.array(ids), places[:, inside], np.array([left + len(q.filled) for q in questions]), around)


def steps(blank: Blank, middle: Tokens) -> Iterator[tuple[Question, int]]:
    """The questions to which the tokens of a replacement are the answers, and these."""
    for done, token in enumerate(middle):
        yield Question(blank, middle[:done], len(middle)), token


def batches(questions: Mapping[Blank, Collection[Question]]) -> Iterator[list[Blank]]:
    """Places that are read at once; one with many questions by itself."""
    group, size = list[Blank](), 0
    for blank, about in questions.items():
        if group and (len(group) == BATCH or size + len(about) > QUESTIONS):
            yield group
            group, size = [], 0
        group.append(blank)
        size += len(about)
    if group:
        yield group


def reads_without_torch(config: Mapping[str, Any]) -> bool:
    """Whether `filler_in` can read the model that a config.json describes: a transformer on a process that only masks,
    not conditioned on time."""
    network, process = config["network"], config["process"]
    if (config["architecture"], process["name"]) != ("transformer", "absorb") or config.get("weights") not in FORMS:
        return False
    conditioned = network.get("time_conditioning", True) and network.get("time_input") != "none"
    return not (conditioned or network["causal"])


def filler_in(folder: Path, watch: Watch | None = None) -> LeftToRight:
    """What fills masks by the model of a folder that `reads_without_torch`."""
    config = read_description(folder)
    tokenizer, network = own_tokenizer(folder, config), from_json(TransformerConfig, config["network"], "network")
    form, checksum = stored_form(folder, config), config.get(CHECKSUM)
    arrays = NumpyNetwork(network, read_arrays(folder / WEIGHTS_FILE, form=form, checksum=checksum))
    return LeftToRight(arrays, tokenizer, config["length"], network.vocab_size, watch)
