"""How well a model fills in a word of a sentence alone, and of the same sentence in its paragraph.

    python benchmarks/infilling.py english-char --data crime_and_punishment.txt --words 200

A word of four letters or more is taken out of a sentence in the middle of a block of as many tokens as the model reads.
It is filled in four ways, with the same seed and a low temperature, and counts if it is the very word:

    paragraph      the whole block is given
    noise          the sentence alone, begun at t = 1, as if nothing were given
    share          the sentence alone, begun at the time at which as many tokens are noise as are blank
    surroundings   the same, amid blanks up to the length of a block, which are filled too and thrown away

`share` is what `cedd infill` does. Accuracies have 95% intervals by Wilson, differences by Student's t over words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from cedd.bounds.estimate import mean_and_stderr, student_quantile
from cedd.data.corpora import open_corpus
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded import LoadedModel, SamplingOptions
from cedd.spelling.shares import Share
from cedd.storage import write_json
from cedd.tasks import load
from cedd.tasks.infill import start_time
from cedd.tasks.template import Blank, Template

SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.!?\n]{40,160}[.!?](?= )")
WORD = re.compile(r" [a-z]{4,12}(?= [a-z])")


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/infilling.py english-char --data crime_and_punishment.txt --words 20

    How well a model fills in a word of a sentence alone, and in its paragraph.
    """

    model: tyro.conf.Positional[str]
    data: Path
    """A text that the model has not seen."""
    words: int = 200
    ways: tuple[str, ...] = ("paragraph", "noise", "share", "surroundings")
    """Which of them, the first to compare the others with."""
    steps: int = 8
    """Of the sampler; eight times as many where surroundings are filled too."""
    temperature: float = 0.1
    seed: int = 0
    device: str = "cpu"
    json: Path | None = None
    """Write the figures here too."""


@dataclass(frozen=True)
class Question:
    """A word with its space, what stands around it in its sentence, and around that in its block."""

    word: str
    before: str
    after: str
    far_before: str
    far_after: str


def questions(text: str, tokenizer: Tokenizer, length: int, count: int) -> Iterator[Question]:
    """One of each of `count` sentences, evenly spread over the text, whose blocks are complete."""
    found = [sentence for sentence in SENTENCE.finditer(text) if WORD.search(sentence[0])]
    characters = length * len(text[:100_000]) // max(1, len(tokenizer.encode(text[:100_000])))
    middle = [sentence for sentence in found if characters < sentence.start() < len(text) - 2 * characters]
    if len(middle) < count:
        raise ValueError(f"the text has {len(middle)} sentences to ask about; {count} are wanted")
    for place in np.linspace(0, len(middle) - 1, count).astype(int):
        sentence = middle[place]
        words = list(WORD.finditer(sentence[0]))
        word = words[len(words) // 2]
        room = max(0, characters - len(sentence[0])) * 9 // 10  # blocks of text differ in tokens
        start, end = sentence.start() - room // 2, sentence.end() + room - room // 2
        yield Question(
            word=word[0],
            before=sentence[0][: word.start()],
            after=sentence[0][word.end() :],
            far_before=text[start : sentence.start()],
            far_after=text[sentence.end() : end],
        )


def sentence(asked: Question, tokenizer: Tokenizer) -> Template:
    """The sentence with its blank."""
    return Template.of([asked.before, len(tokenizer.encode(asked.word)), asked.after], tokenizer)


def paragraph(asked: Question, tokenizer: Tokenizer) -> Template:
    """The same with the text around it."""
    around = Question(asked.word, asked.far_before + asked.before, asked.after + asked.far_after, "", "")
    return sentence(around, tokenizer)


@dataclass(frozen=True)
class Way:
    """How a question is put to a model: given a template, and the time from which it is filled."""

    template: Callable[[Question, Tokenizer], Template]
    from_noise: bool = False
    surrounded: bool = False


WAYS: Mapping[str, Way] = {
    "paragraph": Way(paragraph),
    "noise": Way(sentence, from_noise=True),
    "share": Way(sentence),
    "surroundings": Way(sentence, surrounded=True),
}


def is_right(loaded: LoadedModel, way: Way, asked: Question, arguments: Arguments) -> bool:
    """Whether the blank is filled by the very word."""
    template = way.template(asked, loaded.tokenizer)
    steps, first = arguments.steps, 1
    if way.surrounded:
        room = loaded.length - template.width
        parts = [Blank(room // 2), *template.parts, Blank(room - room // 2)]
        template, steps, first = Template(parts, loaded.tokenizer), 8 * steps, 2
    options = SamplingOptions(steps=steps, temperature=arguments.temperature, seed=arguments.seed)
    t_start = 1.0 if way.from_noise else start_time(template, loaded.process)
    (row,) = loaded.draw((1, template.width), options, template.constraint, t_start=t_start)
    placed = list(template.placed)[first]
    return loaded.tokenizer.decode(row.numpy()[placed[1]]) == asked.word


def main() -> int:
    """Ask, count, print."""
    arguments = tyro.cli(Arguments, description=Arguments.__doc__)
    try:
        if unknown := [name for name in arguments.ways if name not in WAYS] or not arguments.ways:
            raise ValueError(f"--ways are some of {', '.join(WAYS)}; got {unknown}")
        loaded = load(arguments.model, arguments.device)
        text = re.sub(r"\s+", " ", "".join(open_corpus(arguments.data).documents()))
        asked = list(questions(text, loaded.tokenizer, loaded.length, arguments.words))
    except (ValueError, OSError) as error:
        print(f"infilling: {error}", file=sys.stderr)
        return 2
    right = {
        name: torch.tensor([is_right(loaded, way, one, arguments) for one in asked], dtype=torch.float64)
        for name, way in ((name, WAYS[name]) for name in arguments.ways)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
