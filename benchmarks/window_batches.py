"""What it saves to fill independent windows of a long text in one batch, and to draw its samples in one batch.

    OMP_NUM_THREADS=1 python benchmarks/window_batches.py english --data crime_and_punishment.txt

Shapes: L tokens of the page, N tokens that the model reads.

The blanks of the page are so far apart that none is in the window of another, so the windows could be rows of one
batch; `cedd infill` fills them one after another. The samples (-n) of a page are rows of one batch already. Both ways
are alternated with the same seeds. The output has the CPU seconds of every round, their ratio, and whether the
texts are the same.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from command_line import command
from torch import Tensor

from cedd.cli.parser import argument
from cedd.data.corpora import open_corpus
from cedd.data.tokenizers import Tokenizer
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import Fixed, SamplingOptions, text_seeds
from cedd.tasks import load
from cedd.tasks.template import Template
from cedd.tasks.windows import infilling_windows


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/window_batches.py english --data crime_and_punishment.txt

    Time windows and samples of a long text one after another and at once.
    """

    model: str = field(metadata=argument("MODEL"))
    """A run's folder, or a model by its name."""
    data: Path
    """A text."""
    blanks: int = 8
    """Of the page, each a window, and samples of its first one."""
    width: int = 4
    """Tokens of a blank."""
    rounds: int = 4
    """In each of which both ways are timed."""
    steps: int | None = None
    """Of the sampler; by default the model's."""
    seed: int = 0
    """Of sampling."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:1."""


def page(text: str, tokenizer: Tokenizer, length: int, blanks: int, width: int) -> Template:
    """The beginning of a text with blanks, each with more than `length` tokens of text on either side."""
    characters = 2 * length * len(text[:100_000]) // max(1, len(tokenizer.encode(text[:100_000])))
    parts: list[str | int] = [text[:characters]]
    for i in range(1, blanks + 1):
        parts += [width, text[i * characters : (i + 1) * characters]]
    if len(text) < (blanks + 1) * characters:
        raise ValueError(f"the text has {len(text):,} characters; {blanks} blanks take {(blanks + 1) * characters:,}")
    return Template.of(parts, tokenizer)


def draw_together(loaded: LoadedModel, template: Template, options: SamplingOptions) -> Tensor:
    """One way to fill it, [1, L]: its windows, none of which has a blank of another, as the rows of one batch."""
    cuts = infilling_windows(template.blanks, template.width, loaded.length)
    known, tokens = (
        torch.stack([part[cut.start : cut.stop] for cut in cuts]) for part in (template.given, template.ids)
    )
    (own,) = options.seeds_of(1)
    each = replace(options, seed=None, seeds=text_seeds(own, len(cuts)))
    drawn, filled = loaded.draw((len(cuts), loaded.length), each, Fixed(tokens, known)), template.ids.clone()
    for row, cut in zip(drawn, cuts, strict=True):
        filled[cut.first : cut.last] = row[cut.first - cut.start : cut.last - cut.start]
    return filled[None]


def timed(draw: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """CPU seconds, and what is drawn."""
    begun = time.process_time()
    drawn = draw()
    return time.process_time() - begun, drawn


def run(arguments: Arguments) -> None:
    """Draw in turn, compare, print."""
    if min(arguments.blanks, arguments.width, arguments.rounds) < 1:
        raise ValueError("--blanks, --width and --rounds must be at least 1")
    loaded = load(arguments.model, arguments.device)
    text = re.sub(r"\s+", " ", "".join(open_corpus(arguments.data).documents()))
    pages = [page(text, loaded.tokenizer, loaded.length, count, arguments.width) for count in (arguments.blanks, 1)]
    options, n = SamplingOptions(steps=arguments.steps, seed=arguments.seed), arguments.blanks
    ways = {
        f"{n} windows": (partial(pages[0].draw, loaded, 1, options), partial(draw_together, loaded, pages[0], options)),
        f"{n} samples": (
            partial(pages[1].draw, loaded, n, replace(options, batch=1)),
            partial(pages[1].draw, loaded, n, options),
        ),
    }
    pages[1].draw(loaded, 1, options)  # what is made once is made before
    name = f"{arguments.model}, blanks of {arguments.width} tokens, {torch.get_num_threads()} threads"
    print(f"| {name} | one after another, CPU s | at once, CPU s | ratio | the same texts |\n|---|--:|--:|--:|---|")
    for what, (alone, together) in ways.items():
        rounds = [(timed(alone), timed(together)) for _ in range(arguments.rounds)]
        before, after = ([found[i][0] for found in rounds] for i in range(2))
        ratios = [second / first for first, second in zip(before, after, strict=True)]
        same = all(torch.equal(first, second) for (_, first), (_, second) in rounds)
        shown = " | ".join(
            f"{statistics.mean(part):.2f} ({min(part):.2f} to {max(part):.2f})" for part in (before, after)
        )
        ratio = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {what} | {shown} | {ratio} | {'yes' if same else 'no'} |", flush=True)


def main() -> int:
    """What the command line asks for."""
    return command(__file__, Arguments, run)


if __name__ == "__main__":
    sys.exit(main())
