"""The command-line reference, generated from the parsers: `python docs/commands.py` prints it.

As a hook of MkDocs it replaces `<!-- commands -->` in reference/commands.md when the site is built, so that the page is
always the same as `cedd COMMAND --help`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cedd.cli import COMMANDS
from cedd.cli.arguments import ARGUMENTS
from cedd.cli.parser import CommandOption, options_of
from cedd.training.config import PRESETS, TrainConfig

PLACE = "<!-- commands -->"
TRAIN, ADAPT = "train", "adapt"


@dataclass(frozen=True)
class Description:
    """The docstring of a command: its example and the paragraphs after it."""

    example: str
    text: str


def description(kind: type) -> Description:
    """The text above the options in `--help`."""
    first, _, rest = inspect.cleandoc(kind.__doc__ or "").partition("\n")
    return Description(first.removeprefix("example: "), rest.strip())


def escaped(text: str) -> str:
    """Text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|])", r"\\\1", text)


def spelled(option: CommandOption) -> str:
    """The option with its value, as `--help` shows it."""
    if option.positional:
        return option.name
    if option.kind is bool:
        return f"{option.name}, --no-{option.name[2:]}" if option.default else option.name
    return f"{option.name} {option.shown_value}{' ...' if option.takes_several else ''}"


def default(option: CommandOption) -> str:
    """The default as it would be written, or nothing if there is none."""
    value = option.default
    if option.is_required:
        return "required"
    if value is None or value is False or value in ("", (), {}):
        return ""
    if value is True:
        return "on"
    return f"`{' '.join(map(str, value)) if isinstance(value, tuple) else value}`"


def row(option: CommandOption) -> str:
    """A line of a table."""
    return f"| `{spelled(option)}` | {default(option)} | {escaped(option.help)} |"


def tables(options: list[CommandOption]) -> Iterator[str]:
    """A table for each group of options, positional arguments first."""
    groups: dict[str, list[CommandOption]] = {}
    for one in sorted(options, key=lambda one: not one.positional):
        groups.setdefault("arguments" if one.positional else one.title, []).append(one)
    for title, group in groups.items():
        yield f"**{escaped(title[0].upper() + title[1:])}**"
        yield "\n".join(["| option | default | meaning |", "|---|---|---|", *map(row, group)])


def section(name: str) -> Iterator[str]:
    """The part of the page about one command."""
    yield f"## cedd {name}"
    yield f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    if name == TRAIN:
        yield "    cedd train char --data python-manual --out runs/first"
        yield "The first argument is a preset. The defaults below are those of the preset `char`."
        yield "\n".join(
            ["| preset | |", "|---|---|", *(f"| `{one}` | {about} |" for one, (about, _) in PRESETS.items())]
        )
        yield from tables(list(options_of(TrainConfig, PRESETS["char"][1])))
        return
    if name == ADAPT:
        yield "    cedd adapt smollm2 --data corpus --out runs/first"
        yield "The same as `cedd train adapt --from MODEL`; the options are those of [cedd train](#cedd-train)."
        return
    said, options = description(ARGUMENTS[name]), list(options_of(ARGUMENTS[name]))
    yield f"    {said.example}"
    for paragraph in said.text.split("\n\n"):
        is_code = paragraph.startswith("  ")  # more examples
        yield textwrap.indent(paragraph, "  ") if is_code else escaped(" ".join(paragraph.split()))
    yield from tables(options)


def reference() -> str:
    """All commands, in the order of `cedd --help`."""
    return "\n\n".join(part for name in COMMANDS for part in section(name)) + "\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this with each page."""
    return markdown.replace(PLACE, reference()) if PLACE in markdown else markdown


if __name__ == "__main__":
    sys.stdout.write(reference())
