"""`cedd correct`: put a text's mistakes right."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich.style import Style

from cedd.cli import UserError
from cedd.cli.arguments import Correct
from cedd.cli.console import PlainConsole
from cedd.cli.given import model_and_text
from cedd.cli.progress import progress_bar
from cedd.names import printable
from cedd.spelling.correct import CorrectionProgress
from cedd.spelling.options import correction_options
from cedd.tasks import Corrected, CorrectionOptions, load

A_FEW_LINES = 1000
"""Characters."""


def run(arguments: Correct) -> int:
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
    write_output((for_terminal(corrected.text) if style is None else coloured(corrected, style)) + "\n" * typed)
    return 0


def read_input(file: Path | None, *, asked: bool) -> str:
    """The text of a file or of standard input, with its line ends as they are; bytes that are no UTF-8 come through
    as lone surrogates, which correction leaves alone."""
    if file is None and not asked and sys.stdin.isatty():
        raise UserError('there is no text: cedd correct "It was a drak and stormy nihgt", - to type it, or --file FILE')
    if file is None:
        content = sys.stdin.buffer.read()
    elif file.is_dir():
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


def for_terminal(text: str) -> str:
    """The text, with what a terminal would obey written out where standard output is one."""
    return printable(text) if sys.stdout.isatty() else text


def terminal_style() -> Style | None:
    """How new letters are shown; None where standard output is no terminal, or one that shows no styles."""
    console = PlainConsole()
    if not sys.stdout.isatty() or console.color_system is None or console.legacy_windows:
        return None
    return Style(bold=True, color=None if console.no_color else "green")


def coloured(corrected: Corrected, style: Style) -> str:
    """The corrected text as a terminal shows it, with what was put in in this style."""
    shown: list[str] = []
    end = shift = 0
    for change in corrected.changes:
        start = max(end, change.position + shift)  # of a character's bytes several may change
        shown.append(printable(corrected.text[end:start]))
        end, shift = start + len(change.after), shift + len(change.after) - len(change.before)
        shown.append(style.render(printable(corrected.text[start:end])))
    return "".join([*shown, printable(corrected.text[end:])])
