"""Names: published ones of a method on a process, and suggestions for those that are not known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Options = TypeVar("Options", bound=Any)

CUTOFF = 0.6
"""How alike two names are that one may be a slip of the other: twice the letters they share, of all their letters."""
_OBEYED = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Combination(NamedTuple):
    """A method on a process, by their names."""

    method: str
    process: str


ALIASES: Mapping[str, Combination] = {
    "mdlm": Combination("ceddt", "absorb"),
    "udlm": Combination("bayes-elbo", "uniform"),
    "gidd": Combination("bayes-elbo", "hybrid"),
}
"""What published models are called by their authors. GIDD's own chain has the marginals of `hybrid` and other paths."""


def printable(text: str) -> str:
    """The text with characters that a terminal would obey written out: control characters (\\x1b) and those that
    reverse the order of what follows (\\u202e). Tabs and line ends stay."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def nearest(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The known name that `name` was perhaps meant to be, in whatever case; None if none is near."""
    plain = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: the one that was perhaps meant, or all there are."""
    names = list(known)
    near = nearest(name, names)
    return f"; use one of {', '.join(names)}" if near is None else f"; did you mean {near!r}?"


def hub_failure(error: Exception) -> str:
    """Why the Hugging Face hub did not give something: the end of a sentence about it.

    The libraries raise another exception for each cause; one with a response comes from a hub that was reached.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 404):
        return "the hub does not have it"
    if status is not None:
        return f"the hub answered with status {status}"
    if isinstance(error, ValueError) and not isinstance(error, OSError):  # not a valid name
        return str(error).strip().partition("\n")[0]
    return f"could not reach the hub ({type(error).__name__})"


def nearest_path(path: Path) -> Path | None:
    """What lies beside a path that is not there and has nearly its name, not counting an ending that all texts have."""
    beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    stem = nearest(path.stem, [other.stem for other in beside])
    name = nearest(path.name, [other.name for other in beside if other.stem == stem], cutoff=0.0)
    return None if name is None else path.with_name(name)


def changed(options: Options, given: Mapping[str, Any], source: str) -> Options:
    """A dataclass of options with those given (not None) in their place; an unknown name is refused."""
    asked = {name: value for name, value in given.items() if value is not None}
    known = [field.name for field in fields(options)]
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(f"{source} do not include {unknown[0]!r}; they are {', '.join(known)}")
    return replace(options, **asked)
