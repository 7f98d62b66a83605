"""Command lines from dataclasses: each field is an option, and the string below it is its help.

A field whose type is a dataclass is a group of options, with its name as prefix (`--process.name`), or without one if
its metadata are `INLINE`. A field with metadata `argument(...)` is positional; one with "hidden" in its metadata is not
an option. argparse reads the options, and positional arguments are the words that it leaves, so that they may appear
between options. Errors are a ValueError of one line.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from cedd.names import nearest, suggestion
from cedd.storage import expanded

SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("lr", "learning-rate"), "rate"),
    **dict.fromkeys(("warmup-steps", "warmup-iters"), "warmup"),
    **dict.fromkeys(("batch-size", "bs", "batch"), "size"),
    **dict.fromkeys(("layers", "num-layers", "n-layers", "n-layer"), "depth"),
    **dict.fromkeys(("hidden-size", "n-embd"), "width"),
    **dict.fromkeys(("eval-every", "eval-interval", "eval-steps"), "every"),
    **dict.fromkeys(("grad-clip", "max-grad-norm", "gradient-clipping"), "clip"),
    **dict.fromkeys(("max-steps", "num-steps", "max-iters", "epochs", "num-epochs"), "steps"),
    **dict.fromkeys(("block-size", "context-length", "seq-len"), "length"),
    **dict.fromkeys(("output", "output-dir"), "out"),
    **dict.fromkeys(("save-every", "save-steps"), "checkpoint-every"),
    "wd": "weight-decay",
    "ema-decay": "ema",
    "gradient-accumulation-steps": "accumulate",
    "num-samples": "n",
    "temp": "temperature",
    "dataset": "data",
}
"""Names of options in other programs, with the last part of the name here."""

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("architecture", "grid", "method", "process", "revision", "sampler", "samplers", "split"), "NAME"),
    **dict.fromkeys(("data", "validation"), "DATA"),
    **dict.fromkeys(("correction", "sampling"), "NAME=VALUE"),
    **dict.fromkeys(("host", "allow-host"), "HOST"),
    **dict.fromkeys(("judge", "words"), "MODEL"),
    "command": "COMMAND",
    "device": "DEVICE",
    "field": "FIELD",
    "label": "LABEL",
    "labels": "FIELD",
    "methods": "METHOD/PROCESS",
    "regex": "PATTERN",
    "shapes": "NxL",
    "tokenizer": "TOKENIZER",
    "tolerance": "SHARE",
}
"""What an option of text takes, by the last part of its name; TEXT otherwise."""

NUMBERS = {int: "an integer", float: "a number"}
Arguments = TypeVar("Arguments")
INLINE: Mapping[str, object] = {"prefix": ""}
"""Metadata of a field whose own fields are options without a prefix."""
REPEATED: Mapping[str, object] = {"repeated": True}
"""Metadata of a tuple of which an option gives one value, and may be given again."""


def argument(metavar: str) -> Mapping[str, object]:
    """Metadata of a positional argument, named MODEL, or [MODEL] if it is optional. A tuple field takes several
    words."""
    return {"metavar": metavar, "positional": True}


@dataclass(frozen=True)
class CommandOption:
    """An option or a positional argument."""

    path: tuple[str, ...]
    """The fields that lead to it from the dataclass of the command."""
    name: str
    """The name on the command line: --process.name, or MODEL for a positional argument."""
    hint: Any
    default: object
    help: str
    title: str
    """The heading of its group in the help."""
    metavar: str | None = None
    positional: bool = False
    repeated: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it may be None."""
        return type(None) in get_args(self.hint)

    @property
    def kind(self) -> Any:
        """The type of one value, without None."""
        inner = [part for part in get_args(self.hint) if part is not type(None)]
        hint = inner[0] if get_origin(self.hint) in (Union, types.UnionType) else self.hint
        return get_args(hint)[0] if get_origin(hint) is tuple else hint

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values, if they are listed."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def takes_several(self) -> bool:
        """Whether it is a tuple or a dictionary."""
        hints = [self.hint, *get_args(self.hint)]
        return any(get_origin(hint) in (tuple, dict) for hint in hints)

    @property
    def shown_value(self) -> str:
        """Its value in the help, such as PATH."""
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        if get_origin(self.hint) is dict:
            return "NAME VALUE"
        text = METAVARS.get(self.name.removeprefix("--").rsplit(".", 1)[-1], "TEXT")
        return self.metavar or {int: "INT", float: "FLOAT", Path: "PATH"}.get(self.kind, text)

    @property
    def is_required(self) -> bool:
        """Whether it has no default."""
        return self.default is dataclasses.MISSING or str(self.default).startswith("(give ")

    def value(self, word: str) -> object:
        """Convert one word."""
        if self.is_optional and word == "None":
            return None
        if self.choices and word not in self.choices:
            raise ValueError(f"{self.name}: invalid choice: {word!r}{suggestion(word, self.choices)}")
        if self.kind not in NUMBERS:
            return expanded(Path(word)) if self.kind is Path else word
        try:
            return self.kind(word)
        except ValueError:
            raise ValueError(f"{self.name} must be {NUMBERS[self.kind]} (got {word!r})") from None

    def pairs(self, words: Sequence[str]) -> dict[str, object]:
        """Convert the words NAME VALUE NAME VALUE ... to a dictionary."""
        if len(words) % 2:
            raise ValueError(f"{self.name} expects pairs of a name and a value (got {' '.join(words)!r})")
        _, kind = get_args(self.hint)
        one = replace(self, hint=kind)
        return {name: one.value(word) for name, word in zip(words[::2], words[1::2], strict=True)}

    def read(self, given: Any) -> object:
        """Convert what argparse found."""
        if given == [] and not self.takes_several:  # what argparse makes of --seed=--
            raise ValueError(f"{self.name}: expected one argument")
        if not self.takes_several:
            return self.value(given) if isinstance(given, str) else given
        if get_origin(self.hint) is dict:
            return self.pairs(given)
        return tuple(map(self.value, given))


# ----------------------------------------------------------------------------------------------------------------
# What a dataclass takes


def options_of(kind: Any, default: Any = None, path: tuple[str, ...] = (), prefix: str = "") -> Iterator[CommandOption]:
    """The options of a dataclass, with the defaults of an instance or of the class."""
    hints, helps = get_type_hints(kind), field_docs(kind)
    for one in dataclasses.fields(kind):
        hint, about = hints[one.name], one.metadata
        if about.get("hidden"):
            continue
        name = prefix + about.get("option", one.name).replace("_", "-")
        value = _default(one) if default is None else getattr(default, one.name)
        if is_dataclass(hint):
            inner = about.get("prefix", f"{name}.")
            yield from options_of(hint, None if value is dataclasses.MISSING else value, (*path, one.name), inner)
            continue
        positional = about.get("positional", False)
        shown = about["metavar"] if positional else f"--{name}"
        title = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].rstrip(".") if path else "options"
        said = helps.get(one.name, "")
        if _default(one) is None and value is not None:  # the command sets a default of its own
            said = re.sub(r"By default [^.()]*(?:\([^()]*\)[^.()]*)?\. ?", "", said)
        kinds = positional, about.get("repeated", False)
        yield CommandOption((*path, one.name), shown, hint, value, said, title, about.get("metavar"), *kinds)


def _default(one: dataclasses.Field[Any]) -> Any:
    return one.default if one.default_factory is dataclasses.MISSING else one.default_factory()


@cache
def field_docs(kind: type) -> Mapping[str, str]:
    """The strings below the fields of a dataclass and its bases, in one line each."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not is_dataclass(one):
            continue
        body = next((node.body for node in _classes(inspect.getsourcefile(one) or "") if node.name == one.__name__), [])
        for node, after in itertools.pairwise(body):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
                case _:
                    pass
    return found


@cache
def _classes(file: str) -> list[ast.ClassDef]:
    """The classes defined in a source file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


# ----------------------------------------------------------------------------------------------------------------
# From words to a dataclass


class _OptionParser(argparse.ArgumentParser):
    """A parser that raises a ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def parse(
    kind: type[Arguments],
    words: Sequence[str],
    *,
    prog: str,
    description: str = "",
    default: Arguments | None = None,
    is_listed: Callable[[CommandOption], bool] = lambda one: True,
) -> Arguments:
    """The dataclass that a command line describes. `--help` prints the help and ends the process.

    Args:
        kind: the dataclass.
        words: the command line after the name of the program.
        prog: the name of the program.
        description: the beginning of the help; by default the docstring of the dataclass.
        default: an instance with other defaults.
        is_listed: whether the help lists an option.
    """
    options = list(options_of(kind, default))
    end = words.index("--") if "--" in words else len(words)
    try:
        if {"-h", "--help"} & set(words[:end]):
            about = inspect.cleandoc(description or kind.__doc__ or "")
            _parser(prog, list(filter(is_listed, options)), about, helping=True).print_help()
            raise SystemExit(0)
        _refuse_unknown(words[:end], options)
        named, rest = _parser(prog, options).parse_known_args(list(words[:end]))
        given = {one.path: one.read(getattr(named, _key(one))) for one in options if hasattr(named, _key(one))}
        given |= _positionals([one for one in options if one.positional], [*rest, *words[end + 1 :]])
        missing = [one.name for one in options if one.path not in given and one.default is dataclasses.MISSING]
        if missing:
            raise ValueError(f"the following arguments are required: {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(f"{error} (see {prog} --help)") from None
    return _made(kind, {one.path: one.default for one in options} | given, default)


def _parser(
    prog: str, options: Sequence[CommandOption], description: str = "", *, helping: bool = False
) -> _OptionParser:
    """A parser of the options. For the help (`helping`), positional arguments are included."""
    positional = "".join(f"{one.name} " for one in options if one.positional)
    parser = _OptionParser(
        prog=prog,
        usage=f"{prog} {positional}[OPTIONS]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    groups: dict[str, Any] = {}
    for one in sorted(options, key=lambda one: not one.positional):
        title = "arguments" if one.positional else one.title
        if one.positional and not helping:
            continue
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(*_names(one), **_settings(one))
    if "options" not in groups:
        groups["options"] = parser.add_argument_group("options")
    groups["options"].add_argument("-h", "--help", action="store_true", help="Show this help.")
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def _key(one: CommandOption) -> str:
    return ".".join(one.path)


def _names(one: CommandOption) -> tuple[str, ...]:
    """Names on the command line; an option of one letter also has a short form."""
    if one.positional:
        return (_key(one),)
    return (one.name[1:], one.name) if len(one.name) == 3 else (one.name,)


def _settings(one: CommandOption) -> dict[str, Any]:
    """The arguments of `add_argument`."""
    said = f"{one.help}{_shown_default(one)}".replace("%", "%%")
    if one.positional:
        return {"metavar": one.name, "help": said, "nargs": "?"}
    if one.kind is bool:
        action = argparse.BooleanOptionalAction if one.default else "store_true"
        return {"dest": _key(one), "action": action, "default": argparse.SUPPRESS, "help": said}
    return {
        "dest": _key(one),
        "metavar": one.shown_value,
        "action": "append" if one.repeated else "store",
        "nargs": "*" if one.takes_several and not one.repeated else None,
        "default": argparse.SUPPRESS,
        "help": said,
    }


def _shown_default(one: CommandOption) -> str:
    value = one.default
    if one.is_required:
        return "" if one.positional else " (required)"
    if value is None or value is False or value in ("", (), {}):
        return ""
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else "on" if value is True else value
    return f" (default: {shown})"


def _refuse_unknown(words: Sequence[str], options: Sequence[CommandOption]) -> None:
    """Refuse unknown options before anything else."""
    names = [one.name for one in options if not one.positional]
    known = {
        *(name for one in options for name in _names(one)),
        *(f"--no-{one.name[2:]}" for one in options if one.kind is bool and one.default),
    }
    for word in words:
        name = word.split("=")[0]
        if not name.startswith("--"):
            name = name[:2]  # -n3
        if name.startswith("-") and len(name) > 1 and " " not in word and not _is_number(word) and name not in known:
            raise ValueError(f"unexpected argument {name!r}{_meant(name, names)}")


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+|-\d*\.\d+", word) is not None  # as argparse has it


def _meant(name: str, names: Sequence[str]) -> str:
    """A suggestion for an unknown option, as the end of an error message."""
    bare = name.lstrip("-").replace("_", "-").lower()
    last = SYNONYMS.get(bare.split(".")[-1], bare)
    same = [one for one in names if one.lstrip("-") == last or one.split(".")[-1] == last]
    near = same[0] if same else nearest(f"--{bare}", names, cutoff=0.75)
    if near is not None:
        return f"; did you mean {near}?"
    return "" if re.fullmatch(r"--?[a-z][a-z0-9.-]*", name) else "; put text that begins with a dash after --"


def _positionals(places: Sequence[CommandOption], words: Sequence[str]) -> dict[tuple[str, ...], object]:
    """The values of positional arguments from the words that belong to no option; the last one may take several."""
    found: dict[tuple[str, ...], object] = {}
    left = list(words)
    for one in places:
        if one.takes_several and left:
            found[one.path], left = one.read(left), []
        elif left:
            found[one.path] = one.read(left.pop(0))
    if left:
        raise ValueError(f"unexpected argument {left[0]!r}")
    return found


def _made(kind: Any, values: Mapping[tuple[str, ...], object], default: Any) -> Any:
    """A dataclass, and those nested in it, from values by path; hidden fields come from the default."""
    given = {path[0]: value for path, value in values.items() if len(path) == 1}
    hints = get_type_hints(kind)
    for name in {path[0] for path in values if len(path) > 1}:
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        given[name] = _made(hints[name], inner, None if default is None else getattr(default, name))
    return kind(**given) if default is None else replace(default, **given)
