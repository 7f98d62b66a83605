"""The words of a command line as a dataclass, and what is wrong with them as one line."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import tyro
from tyro import _errors as events  # private, and so pyproject.toml names the versions; the public form is a drawn box

from cedd.names import nearest, suggestion
from cedd.storage import expanded

KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "BOOL": "True or False",
    "{True,False}": "True or False",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
    "[STR FLOAT [STR FLOAT ...]]": "pairs of a name and a number",
    "[STR STR [STR STR ...]]": "pairs of a name and a text",
}
"""What an option takes, by how its help writes that."""


def parse_arguments(kind: Any, words: Sequence[str], *, prog: str, description: str, **options: Any) -> Any:
    """Tyro's parser for a dataclass. Its help begins with the description, and so with an example; words that stand
    after options belong to those that stand before them."""

    def refuse(line: str) -> NoReturn:
        raise ValueError(f"{line} ({prog} --help tells more)")

    def complain(event: events.ParseErrorEvent) -> None:
        if isinstance(event, events.MissingArgs | events.BadValue) and (strange := unknown_options(words, kind)):
            refuse(no_place(strange, kind))
        if (line := complaint(event, words)) is not None:
            refuse(line)

    if {"-h", "--help"} & set(words):
        print(f"{inspect.cleandoc(description)}\n")
    with events.on_parse_error(complain):
        parsed, left = tyro.cli(kind, prog=prog, description="", args=words, return_unknown_args=True, **options)
    if left:
        several = next((name for name, hint, marks in _fields(kind) if _takes_all(hint, marks)), None)
        if several is None or any(word.startswith("-") for word in left):
            refuse(no_place(left, kind))
        kind_of_word = get_args(get_type_hints(kind)[several])[0]
        parsed = replace(parsed, **{several: (*getattr(parsed, several), *map(kind_of_word, left))})
    return _at_home(parsed)


def _at_home(value: Any) -> Any:
    """Arguments with ~ as the user's folder in every path."""
    if isinstance(value, Path):
        return expanded(value)
    if isinstance(value, tuple):
        return tuple(map(_at_home, value))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: _at_home(getattr(value, field.name)) for field in fields(value)})


def _fields(kind: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """The fields of a dataclass: name, type, and what tyro is told of it."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        yield name, get_args(hint)[0] if marks else hint, marks


def _takes_all(hint: Any, marks: tuple[Any, ...]) -> bool:
    """Whether a field takes all words of a command line that belong to no option."""
    return get_origin(hint) is tuple and tyro.conf.Positional in marks


def option_names(kind: Any, prefix: str = "") -> Iterator[str]:
    """The options of a dataclass, as they are written."""
    for field, hint, marks in _fields(kind):
        given = (mark.name for mark in marks if getattr(mark, "name", None) is not None)
        name = prefix + next(given, field).replace("_", "-")
        if is_dataclass(hint):
            yield from option_names(hint, name and f"{name}.")
        elif tyro.conf.Positional not in marks:
            yield f"--{name}"


def unknown_options(words: Sequence[str], kind: Any) -> list[str]:
    """The words that can only be options, and are none of this dataclass."""
    known = {"--help", *(flag.replace("--", start, 1) for flag in option_names(kind) for start in ("--", "--no-"))}
    written = itertools.takewhile(lambda word: word != "--", words)
    return [word for word in written if re.match("--[a-z]", word) and word.split("=")[0].replace("_", "-") not in known]


def complaint(event: events.ParseErrorEvent, words: Sequence[str]) -> str | None:
    """What the parser found wrong with these words; None for what this table does not know."""
    match event:
        case events.MissingArgs(missing_arguments=missing):
            return f"{' and '.join(_named(one.arg) for one in missing)} must be given"
        case events.BadValue(argument=argument, reason="too_few_values"):
            return f"{_named(argument)} {'must be given' if argument.is_positional() else 'needs a value'}"
        case events.InvalidChoice(argument=argument, value=value, choices=choices):
            known = [choice for choice in choices if choice != "None"]
            return f"{argument.display_name()} has no choice {value!r}{suggestion(value, known)}"
        case events.InstantiationFailure(argument=argument, message=message) if argument is not None:
            kind = KINDS.get(str(argument.lowered.metavar).removeprefix("{None}|"))
            takes = f"{argument.display_name()} takes {kind}; got {_given(argument, words)}"
            return takes if kind else f"{argument.display_name()}: {' '.join(message.split())}"
        case _:
            return None


def no_place(words: Sequence[str], kind: Any) -> str:
    """The first of the words for which there is no place, and the option that was perhaps meant."""
    name = next((word for word in words if word.startswith("-")), words[0])
    if not name.startswith("-"):
        return f"there is no place for {name!r}"
    near = nearest(name.split("=")[0], option_names(kind), cutoff=0.75)
    if near is not None:
        return f"there is no option {name}; did you mean {near}?"
    if re.fullmatch(r"--?[a-z][a-z0-9.-]*(=.*)?", name):
        return f"there is no option {name}"
    return f"there is no option {name!r}; a text that begins with a dash comes after --"


def _named(argument: Any) -> str:
    """What stands for an argument in a help: its choices, its place, or its option."""
    if not argument.is_positional():
        return argument.lowered.name_or_flags[-1]
    choices = argument.lowered.choices
    return " or ".join(choices) if choices else str(argument.lowered.metavar).split()[0]


def _given(argument: Any, words: Sequence[str]) -> str:
    """The words that stand after an option: as many as it takes, or all up to the next option."""
    place = max((i for i, word in enumerate(words) if word.split("=")[0] in argument.lowered.name_or_flags), default=-1)
    _, equals, value = words[place].partition("=")
    following = itertools.takewhile(lambda word: not re.match("--?[a-z]", word), words[place + 1 :])
    given = [value] if equals else itertools.islice(following, 1 if argument.lowered.nargs == 1 else None)
    return ", ".join(map(repr, given))
