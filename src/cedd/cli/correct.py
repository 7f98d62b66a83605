"""`cedd correct`: put a text's mistakes right."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.style import Style

from cedd.cli import UserError
from cedd.cli.given import CommonArguments, ModelAndText, model_and_text
from cedd.cli.progress import progress_bar
from cedd.spelling.correct import CorrectionProgress
from cedd.spelling.options import correction_options
from cedd.tasks import Corrected, CorrectionOptions, load

A_FEW_LINES = 1000
"""Characters."""


@dataclass(frozen=True)
class Arguments(CommonArguments):
    """example: cedd correct "It was a drak and stormy nihgt"

    Correct the spelling of a text: replaced letters and transpositions, at unknown places. The model is the one that
    comes with cedd, english-char, or a RUN of yours on a process that shuffles (uniform, roulette):
    cedd correct runs/first "teh cat sat on teh mat". TEXT - reads standard input, and so does no text at all; what is
    not changed comes out byte for byte. Options that are not given are the model's own.
    """

    words: ModelAndText = ()
    file: Path | None = None
    """Read the text from a file."""
    rate: float | None = None
    """The share of wrong letters that is expected (0.05, unless the model has its own)."""
    t: float | None = None
    """The time that the network is told (the one at which its process has this rate)."""
    threshold: float | None = None
    """A letter is replaced if own / (own + best) is below this: own is its probability, best that of the likeliest
    other (0.5 or more: the argmax)."""
    change: Literal["letters", "all"] | None = None
    """letters (the default): plain letters become others of their case, except in addresses, names with digits and the
    like; accents, spaces, digits and punctuation stay. all: anything may change."""
    passes: int | None = None
    """How often the text is read at most; later passes see the changes of earlier ones."""
    reach: int | None = None
    """Of changes within so many tokens a pass makes only the strongest (3); 0 makes all at once."""
    max_surprise: float | None = None
    """Undo changes where the text around them surprises the model more than this, in nats a letter."""
    swaps: float | None = None
    """The share of neighbouring letters that is expected to be transposed (0.002); 0 looks for none. Only one step
    looks for them."""
    steps: int | None = None
    """1: the likeliest token everywhere. More: sample the reverse process, without transpositions."""
    temperature: float | None = None
    """Of several steps: 0 writes the likeliest token wherever it writes."""
    seed: int | None = None
    """Of several steps."""


def run(arguments: Arguments) -> int:
    """Print the corrected text; on a terminal with new letters in colour, as JSON with positions and confidences."""
    name, given = model_and_text(arguments.words)
    typed = given is not None and given != "-"
    if typed and arguments.file is not None:
        raise UserError("give the text or a file of it, not both")
    text = given if typed else read_input(arguments.file, asked=given == "-")
    assert text is not None
    if len(text) <= A_FEW_LINES:  # read in hundredths of a second: on a busy machine threads would wait for each other
        torch.set_num_threads(1)
    model = load(name, arguments.device)
    options = {field.name: getattr(arguments, field.name) for field in fields(CorrectionOptions)}
    visible = len(text) > A_FEW_LINES and not arguments.json
    with progress_bar("correcting", visible) as progress:
        watch = CorrectionProgress([correction_options(model, options)], progress).read if visible else None
        corrected = model.correct(text, **options, seed=arguments.seed, watch=watch)
    if arguments.json:
        changes = [asdict(change) for change in corrected.changes]
        print(json.dumps({"text": corrected.text, "original": text, "changes": changes}))
        return 0
    style = terminal_style()
    write_output((corrected.text if style is None else coloured(corrected, style)) + "\n" * typed)
    return 0


def read_input(file: Path | None, *, asked: bool) -> str:
    """The text of a file or of standard input, with its line ends as they are; bytes that are no UTF-8 come through
    as lone surrogates, which correction leaves alone."""
    if file is None and not asked and sys.stdin.isatty():
        raise UserError('there is no text: cedd correct "It was a drak and stormy nihgt", - to type it, or --file FILE')
    if file is None:
        content = sys.stdin.buffer.read()
    elif (file := file.expanduser()).is_dir():
        texts = sorted(file.glob("*.txt"))
        raise UserError(f"{file} is a folder; --file reads one file{f', such as {texts[0]}' if texts else ''}")
    else:
        content = file.read_bytes()
    return content.decode("utf-8", "surrogateescape")


def write_output(text: str) -> None:
    """The counterpart of `read_input`, on standard output, or on what stands in for it and takes only text."""
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    else:
        sys.stdout.write(text)


def terminal_style() -> Style | None:
    """How new letters are shown; None where standard output is no terminal, or one that shows no styles."""
    console = Console()
    if not sys.stdout.isatty() or console.color_system is None or console.legacy_windows:
        return None
    return Style(bold=True, color=None if console.no_color else "green")


def coloured(corrected: Corrected, style: Style) -> str:
    """The corrected text, character for character, with what was put in in this style."""
    shown: list[str] = []
    end = shift = 0
    for change in corrected.changes:
        start = max(end, change.position + shift)  # of a character's bytes several may change
        shown.append(corrected.text[end:start])
        end, shift = start + len(change.after), shift + len(change.after) - len(change.before)
        shown.append(style.render(corrected.text[start:end]))
    return "".join([*shown, corrected.text[end:]])
