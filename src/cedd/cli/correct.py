"""`cedd correct`: put a text's mistakes right."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text

from cedd.cli import UserError
from cedd.cli.given import ModelAndText, model_and_text
from cedd.tasks import Corrected, CorrectionOptions, LanguageModel, load
from cedd.tasks.correct import Readings, correction_options
from cedd.tasks.opinion import Watch

A_FEW_LINES = 1000
"""Characters."""


@dataclass(frozen=True)
class Arguments:
    """example: cedd correct "It was a drak and stormy nihgt"

    Put a text's mistakes right: letters that are others, and neighbours that changed places, nobody says where. The
    model is the one that comes with cedd, english-char, or a RUN of yours on a process that shuffles (uniform,
    roulette): cedd correct runs/first "teh cat". TEXT - reads standard input, and so does no text at all; what is not
    changed comes out byte for byte. Options that are not given are the model's own.
    """

    words: ModelAndText = ()
    file: Path | None = None
    """Read the text from a file."""
    rate: float | None = None
    """The share of wrong letters that is expected (0.05, unless the model says otherwise)."""
    t: float | None = None
    """The time that the network is told (the one at which its process has this rate)."""
    threshold: float | None = None
    """A token the model gives at least this probability is never touched (0.5 or more: all is left to the argmax)."""
    change: Literal["letters", "all"] | None = None
    """letters (the default): letters become letters of their case, nothing else changes. all: anything may."""
    passes: int | None = None
    """How often the text is read at most; later passes see what earlier ones have mended."""
    reach: int | None = None
    """Of changes within so many tokens a pass makes only the surest (3); 0 makes all at once."""
    strange: float | None = None
    """Changes are taken back where the text around them surprises the model more than this, in nats a letter."""
    swaps: float | None = None
    """The share of neighbouring letters that is expected to have changed places (0.002); 0 looks for none."""
    steps: int | None = None
    """1: the likeliest token everywhere. More: sample the reverse process."""
    temperature: float | None = None
    """Of several steps: 0 writes the likeliest token wherever it writes."""
    seed: int | None = None
    device: str = "auto"
    json: bool = False


def run(arguments: Arguments) -> int:
    """Print the corrected text; in colours on a terminal, with positions and confidences as JSON."""
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
    with watching(model, options, visible=len(text) > A_FEW_LINES and not arguments.json) as watch:
        corrected = model.correct(text, **options, seed=arguments.seed, watch=watch)
    if arguments.json:
        changes = [asdict(change) for change in corrected.changes]
        print(json.dumps({"text": corrected.text, "original": text, "changes": changes}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(coloured(corrected), end="\n" if typed else "")
    else:
        write_output(corrected.text + "\n" * typed)
    return 0


@contextmanager
def watching(model: LanguageModel, options: Mapping[str, Any], *, visible: bool) -> Generator[Watch | None]:
    """A bar on a terminal's standard error, gone when done, that a correction moves on."""
    if not visible:
        yield None
        return
    from cedd.cli.evaluate import progress_bar  # a few lines are corrected sooner than this is imported

    with progress_bar("correcting", visible) as progress:
        yield Readings([correction_options(model.setting, options)], progress).read


def read_input(file: Path | None, *, asked: bool) -> str:
    """The text of a file or of standard input, with its line ends as they are; bytes that are no UTF-8 come through
    as lone surrogates, which correction leaves alone."""
    if file is None and not asked and sys.stdin.isatty():
        raise UserError('there is no text: cedd correct "teh cat", or - to type it, or --file FILE')
    content = sys.stdin.buffer.read() if file is None else read_file(file.expanduser())
    return content.decode("utf-8", "surrogateescape")


def read_file(file: Path) -> bytes:
    """A file's bytes; of a folder one line says what it has instead."""
    if file.is_dir():
        texts = sorted(file.glob("*.txt"))
        raise UserError(f"{file} is a folder; --file reads one file{f', such as {texts[0]}' if texts else ''}")
    return file.read_bytes()


def write_output(text: str) -> None:
    """The counterpart of `read_input`, on standard output, or on what stands in for it and takes only text."""
    sys.stdout.flush()
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    else:
        sys.stdout.write(text)


def coloured(corrected: Corrected) -> Text:
    """The text with what was taken out struck through in red and what was put in its place in green."""
    original = corrected.original.encode("utf-8", "replace").decode()  # no terminal shows lone surrogates
    text, end = Text(), 0
    for change in corrected.changes:
        text.append(original[end : change.position])
        text.append(change.before, style="red strike")
        text.append(change.after, style="bold green")
        end = change.position + len(change.before)
    text.append(original[end:])
    return text
