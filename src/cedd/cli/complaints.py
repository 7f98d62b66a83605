"""The parser's complaints, which it frames and explains over many lines, as one line in plain words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cedd.names import suggestion

KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
    "[STR FLOAT [STR FLOAT ...]]": "pairs of a name and a number",
}
"""What an option takes, by how its help writes that."""


Part = list[str]
"""The lines between two rules of the parser's box."""


def _named(part: Part) -> list[str]:
    """The arguments that it explains, each as `--name, --other VALUE`: the lines that stand in by one step."""
    return [line.strip() for line in part if re.match(r" {4}\S", line)]


def plain(message: str, words: Sequence[str]) -> str:
    """What is wrong with the words of a command line, and what was perhaps meant, from the parser's message."""
    complaint, *others = _parts(message)
    text = " ".join(line.strip() for line in complaint).rstrip(".")
    if text.startswith("Unrecognized options: "):
        return _unknown(text.removeprefix("Unrecognized options: "), words, others)
    if text.startswith("Missing from "):
        missing = [name.split()[0].strip("{}").replace(",", " or ") for name in _named(complaint)]
        return f"{' and '.join(missing)} must be given"
    if value := re.match(r"Missing value for argument '(.*?)'", text):
        return f"{value[1]} needs a value"
    if choice := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\)", text):
        name, argument, known = choice.groups()
        names = [word for word in re.findall(r"'([^']*)'", known) if word != "None"]
        return f"{argument} has no choice {name!r}{suggestion(name, names)}"
    if value := re.match(r"Error parsing (\S+): ", text):
        return _wrong_value(value[1], text, others) or text
    return text


def _parts(message: str) -> list[Part]:
    """The box's parts. Its first line is a title; what is written begins in the third column; where the terminal has
    no lines to draw with, there are spaces and dashes."""
    parts: list[Part] = [[]]
    for line in message.splitlines()[1:]:
        text = line[2:].rstrip("│╯ ")
        if text.strip("─-"):
            parts[-1].append(text)
        elif text:  # a rule ends a part
            parts.append([])
    return [part for part in parts if part]


def _unknown(listed: str, words: Sequence[str], others: Sequence[Part]) -> str:
    """The first of the words that were left over; what comes after an unknown option is left over with it."""
    name = next((word for word in words if listed == word or listed.startswith(f"{word}, ")), listed)
    if not name.startswith("-"):
        return f"there is no place for {name!r}"
    hints = [_named(part) for part in others if part[0] in ("Perhaps you meant:", f"Arguments similar to {name}:")]
    if hints and hints[0]:
        return f"there is no option {name}; did you mean {hints[0][0].split()[0].rstrip(',')}?"
    if re.fullmatch(r"--?[a-z][a-z0-9.-]*(=.*)?", name):
        return f"there is no option {name}"
    return f"there is no option {name!r}; a text that begins with a dash comes after --"


def _wrong_value(argument: str, text: str, others: Sequence[Part]) -> str | None:
    """What an option takes, and what it got; None for a kind that is not in the table."""
    helps = [part[1].strip() for part in others if part[0] == "Argument helptext:"]
    _, _, metavar = helps[0].rpartition(argument.rpartition("/")[2]) if helps else ("", "", "")
    kind = KINDS.get(metavar.strip().removeprefix("{None}|"))
    got = re.search(r"(?:from|arguments|base 10|to float):? \[?('[^]]*')\]?", text)
    return f"{argument} takes {kind}" + (f"; got {got[1]}" if got else "") if kind else None
