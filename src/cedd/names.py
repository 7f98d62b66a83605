"""Published names of a method on a process, suggestions for unknown names, and checks of options."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Options = TypeVar("Options", bound=Any)

CUTOFF = 0.6
"""Smallest similarity for a suggestion: twice the number of shared letters over the number of all letters."""
_CONTROL_CHARACTERS = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Combination(NamedTuple):
    """A method on a process, by their names."""

    method: str
    process: str


ALIASES: Mapping[str, Combination] = {
    "mdlm": Combination("ceddt", "absorb"),
    "udlm": Combination("bayes-elbo", "uniform"),
    "gidd": Combination("bayes-elbo", "hybrid"),
}
"""Authors' names of published models. GIDD's own chain has the marginals of `hybrid` but other paths."""


def printable(text: str) -> str:
    """The text with control characters (\\x1b) and characters that change the direction of text (\\u202e) escaped. Tabs
    and line ends stay."""
    return _CONTROL_CHARACTERS.sub(lambda found: repr(found[0])[1:-1], text)


def nearest(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """The known name closest to `name`, ignoring case; None if none is close."""
    plain = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known name, or a list of all."""
    names = list(known)
    near = nearest(name, names)
    return f"; use one of {', '.join(names)}" if near is None else f"; did you mean {near!r}?"


def hub_failure(error: Exception) -> str:
    """The reason why a download from the Hugging Face hub failed, as the end of a message.

    The libraries raise a different exception for each cause; those with a response come from a hub that was reached.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 404):
        return "the hub does not have it"
    if status is not None:
        return f"the hub answered with status {status}"
    if isinstance(error, ValueError) and not isinstance(error, OSError):  # not a valid name
        return str(error).strip().partition("\n")[0]
    return "could not reach the hub; check the connection and HF_HUB_OFFLINE"


def nearest_path(path: Path) -> Path | None:
    """The path in the same folder with the closest name, ignoring the suffix."""
    siblings = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
    stem = nearest(path.stem, [other.stem for other in siblings])
    name = nearest(path.name, [other.name for other in siblings if other.stem == stem], cutoff=0.0)
    return None if name is None else path.with_name(name)


def changed(options: Options, given: Mapping[str, Any], source: str) -> Options:
    """The options with those `given` that are not None; raises an error for an unknown name."""
    chosen = {name: value for name, value in given.items() if value is not None}
    known = [field.name for field in fields(options)]
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"unexpected argument {unknown[0]!r} in {source}{suggestion(unknown[0], known)}")
    return replace(options, **chosen)


def check_positive(name: str, value: object) -> None:
    """Raise a ValueError for a value that is neither None nor a positive, finite number."""
    if value is not None and not (isinstance(value, Real) and 0 < float(value) < math.inf):
        raise ValueError(f"{name} must be a positive number (got {value!r})")


def check_at_least_one(name: str, value: object) -> None:
    """Raise a ValueError for a value that is neither None nor an integer of at least 1."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer (got {value!r})")
    if int(value) < 1:
        raise ValueError(f"{name} must be at least 1 (got {value!r})")
