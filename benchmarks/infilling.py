"""How well a model fills in a masked word, given its sentence alone or also its paragraph.

    python benchmarks/infilling.py english --data crime_and_punishment.txt --words 200

A word of four or more letters is removed from a sentence in the middle of a block of the model's length. It is filled
in several ways, at a temperature so low that the most probable token is drawn, and counts if it is the removed word:

    paragraph    the whole block is given
    page         the block with eight more on either side, which `cedd infill` reads in a window
    passage      the sentence alone, as `cedd infill` encodes it: padded with masks if the network has no time input
    alone        the sentence alone, without padding
    share        the same, starting at the time at which the share of noise is that of the blank, instead of t = 1

The blank has the number of tokens of the word, which helps all ways equally. Shares have Wilson 95% intervals,
differences those of Student's t over words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from command_line import command

from cedd.bounds.estimate import mean_and_stderr, student_quantile
from cedd.cli.parser import argument
from cedd.data.corpora import open_corpus
from cedd.data.text import never_written
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded_model import LoadedModel
from cedd.network import AnyModel
from cedd.process import TokenProcess
from cedd.quadrature import bisect
from cedd.samplers import SamplingOptions, sample
from cedd.samplers.grids import LAST_TIME
from cedd.spelling.shares import Share
from cedd.storage import write_json
from cedd.tasks import load
from cedd.tasks.template import Template

SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.!?\n]{40,160}[.!?](?= )")
WORD = re.compile(r" [a-z]{4,12}(?= [a-z])")
TEMPERATURE = 0.01
PAGE = 8
"""Blocks on either side of a page's middle one."""


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/infilling.py english --data crime_and_punishment.txt --words 20

    How well a model fills in a word of a sentence alone, and in its paragraph.
    """

    model: str = field(metadata=argument("MODEL"))
    """A run's folder, or a model by its name."""
    data: Path
    """A text that the model has not seen."""
    words: int = 200
    """Number of words to fill in; each is filled in once per way."""
    ways: tuple[str, ...] = ("paragraph", "passage", "alone")
    """What is given: the block around the word (paragraph), eight more on either side (page), its sentence as cedd
    infill puts it (passage), or that and nothing else (alone; share: from a later time). The first is compared with."""
    steps: int = 8
    """Sampling steps."""
    seed: int = 0
    """Seed of the choice of words and of sampling."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:1."""
    json: Path | None = None
    """Write the figures here too."""


@dataclass(frozen=True)
class Question:
    """A word with its space, what stands around it in its sentence, around that in its block, and around the block."""

    word: str
    before: str
    after: str
    far_before: str
    far_after: str
    page_before: str
    page_after: str


def questions(text: str, tokenizer: Tokenizer, length: int, count: int) -> Iterator[Question]:
    """One of each of `count` sentences, evenly spread over the text, whose blocks are complete."""
    found = [sentence for sentence in SENTENCE.finditer(text) if WORD.search(sentence[0])]
    characters = length * len(text[:100_000]) // max(1, len(tokenizer.encode(text[:100_000])))
    middle = [
        sentence
        for sentence in found
        if characters < sentence.start() < len(text) - 2 * characters and len(tokenizer.encode(sentence[0])) < length
    ]
    if len(middle) < count:
        raise ValueError(f"the text has {len(middle)} sentences to ask about; {count} are wanted")
    for place in np.linspace(0, len(middle) - 1, count).astype(int):
        sentence = middle[place]
        words = list(WORD.finditer(sentence[0]))
        word = words[len(words) // 2]
        room = max(0, characters - len(sentence[0])) * 8 // 10  # blocks of text differ in tokens
        start, end = sentence.start() - room // 2, sentence.end() + room - room // 2
        yield Question(
            word=word[0],
            before=sentence[0][: word.start()],
            after=sentence[0][word.end() :],
            far_before=text[start : sentence.start()],
            far_after=text[sentence.end() : end],
            page_before=text[max(0, start - PAGE * characters) : start],
            page_after=text[end : end + PAGE * characters],
        )


@dataclass(frozen=True)
class Way:
    """How a model receives a question."""

    with_paragraph: bool = False
    with_page: bool = False
    network: Callable[[LoadedModel, int], AnyModel] = LoadedModel.reader
    from_share: bool = False

    def template(self, asked: Question, loaded: LoadedModel) -> Template:
        """The text around the blank; of a paragraph as much as the model reads."""
        width = len(loaded.tokenizer.encode(asked.word))
        if self.with_page:
            before, after = asked.page_before + asked.far_before, asked.far_after + asked.page_after
            return Template.of([before + asked.before, width, asked.after + after], loaded.tokenizer)
        before, after = (asked.far_before, asked.far_after) if self.with_paragraph else ("", "")
        while True:
            template = Template.of([before + asked.before, width, asked.after + after], loaded.tokenizer)
            if template.width <= loaded.length or not before + after:
                return template
            before, after = before[len(before) // 8 + 1 :], after[: len(after) - len(after) // 8 - 1]


WAYS: Mapping[str, Way] = {
    "paragraph": Way(with_paragraph=True),
    "page": Way(with_page=True),
    "passage": Way(),
    "alone": Way(network=lambda loaded, width: loaded.model),
    "share": Way(network=lambda loaded, width: loaded.model, from_share=True),
}


def share_time(template: Template, process: TokenProcess) -> float:
    """The time at which as many tokens are noise as are blank."""
    blank = 1 - template.given.double().mean()
    time = bisect(lambda t: 1 - torch.exp(-process.alpha(t) - process.beta(t)), blank, 0.0, 1.0, halvings=40)
    return max(float(time), 2 * LAST_TIME)


def is_right(loaded: LoadedModel, way: Way, asked: Question, arguments: Arguments) -> bool:
    """Whether the blank is filled by the very word."""
    template = way.template(asked, loaded)
    if way.with_page:
        options = SamplingOptions(steps=arguments.steps, temperature=TEMPERATURE, top_p=1.0, seed=arguments.seed)
        (row,) = template.draw(loaded, 1, options)
        return loaded.tokenizer.decode(row.numpy()[~template.given.numpy()]) == asked.word
    (row,) = sample(
        way.network(loaded, template.width),
        loaded.process,
        (1, template.width),
        method=loaded.method,
        steps=arguments.steps,
        constraint=template.constraint,
        generator=torch.Generator().manual_seed(arguments.seed),
        temperature=TEMPERATURE,
        exclude=never_written(loaded.tokenizer),
        t_start=share_time(template, loaded.process) if way.from_share else 1.0,
        device=loaded.device,
    )
    return loaded.tokenizer.decode(row.cpu().numpy()[~template.given.numpy()]) == asked.word


def run(arguments: Arguments) -> None:
    """Ask, count, print."""
    if unknown := [name for name in arguments.ways if name not in WAYS] or not arguments.ways:
        raise ValueError(f"--ways are some of {', '.join(WAYS)} (got {unknown or 'none'})")
    if arguments.words < 2:
        raise ValueError(f"--words must be at least 2, of which an interval can be made (got {arguments.words})")
    loaded = load(arguments.model, arguments.device)
    text = re.sub(r"\s+", " ", "".join(open_corpus(arguments.data).documents()))
    asked = list(questions(text, loaded.tokenizer, loaded.length, arguments.words))
    right = {
        name: torch.tensor([is_right(loaded, WAYS[name], one, arguments) for one in asked], dtype=torch.float64)
        for name in arguments.ways
    }
    print(f"| {arguments.model}, {len(asked)} words | right, % | less than {arguments.ways[0]} |\n|---|--:|--:|")
    record: dict[str, object] = {"model": arguments.model, "words": len(asked), "steps": arguments.steps}
    for name, found in right.items():
        share = Share(found.long(), torch.ones(len(found), dtype=torch.int64))
        mean, error = mean_and_stderr(right[arguments.ways[0]] - found)
        half = student_quantile(len(found) - 1) * error
        low, high = (100 * end for end in share.ci95)
        print(f"| {name} | {100 * share.value:.1f} ({low:.1f} to {high:.1f}) | {100 * mean:+.1f} ± {100 * half:.1f} |")
        record[name] = [int(value) for value in found]
    if arguments.json is not None:
        write_json(arguments.json, record)


def main() -> int:
    """Run the command line."""
    return command(__file__, Arguments, run)


if __name__ == "__main__":
    sys.exit(main())
