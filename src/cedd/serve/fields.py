"""The fields of a request's JSON object: each is taken by its kind and range, and what is left over is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from cedd.names import suggestion
from cedd.serve.limits import Refused

Default = TypeVar("Default")
_MISSING: Any = object()


def unprocessable(sentence: str) -> NoReturn:
    """422: it was understood, and cannot be done."""
    raise Refused(422, sentence)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class Fields:
    """The fields of a JSON object.

    Args:
        body: its bytes.
        usual: what stands for fields that it does not name; None: nothing.
    """

    def __init__(self, body: bytes, usual: Mapping[str, Any] = MappingProxyType({})) -> None:
        try:
            record = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise Refused(400, 'the body must be a JSON object in UTF-8, such as {"text": "I hav a cat"}') from None
        if not isinstance(record, dict):
            raise Refused(400, "the body must be a JSON object, with a name for each value")
        self._left: dict[str, Any] = {name: value for name, value in record.items() if value is not None}
        self._usual = {name: value for name, value in usual.items() if value is not None}
        self._known: list[str] = []

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        value = self._left.pop(name, self._usual.get(name, default))
        if value is _MISSING:
            unprocessable(f"{name} must be given")
        return value

    def text(self, name: str, most: int, default: str = _MISSING) -> str:
        """A text of at most so many characters."""
        value = self._take(name, default)
        if not isinstance(value, str):
            unprocessable(f"{name} must be a text")
        if len(value) > most:
            raise Refused(413, f"{name} has {len(value):,} characters; at most {most:,} are taken")
        return value

    def texts(
        self, name: str, most: int, longest: int, default: list[str] = _MISSING, *, listed: bool = False
    ) -> list[str]:
        """A text, or a list of at most so many; if `listed`, only a list."""
        value = self._take(name, default)
        found = [value] if isinstance(value, str) and not listed else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            unprocessable(f"{name} must be {'' if listed else 'a text or '}a list of texts")
        if len(found) > most:
            unprocessable(f"{name} has {len(found)} texts; at most {most} are taken")
        if longest < (length := max(map(len, found), default=0)):
            raise Refused(413, f"{name} has {length:,} characters; at most {longest:,} are taken")
        return found

    def whole(self, name: str, low: int, high: int, default: Default = _MISSING, why: str = "") -> int | Default:
        """A whole number in a range, and why it is this range."""
        value = self._take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            unprocessable(f"{name} must be a whole number from {low:,} to {high:,}{why}")
        return value

    def number(self, name: str, low: float, high: float, default: Default = _MISSING) -> float | Default:
        """A number in a range."""
        value = self._take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            unprocessable(f"{name} must be a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false where it is not given."""
        value = self._take(name, False)
        if not isinstance(value, bool):
            unprocessable(f"{name} must be true or false")
        return value

    def choice(self, name: str, choices: Collection[str], default: Default = _MISSING) -> str | Default:
        """One of several words."""
        value = self._take(name, default)
        if value is default:
            return value
        if not isinstance(value, str):
            unprocessable(f"{name} must be one of {', '.join(choices)}")
        if value not in choices:
            unprocessable(f"{name} has no choice {value[:80]!r}{suggestion(value[:80], choices)}")
        return value

    def without(self, **without_effect: Any) -> None:
        """Refuse fields that would have an effect elsewhere, and have none here, unless sent with these values."""
        for name, value in without_effect.items():
            self._known.append(name)
            if self._left.pop(name, value) != value:
                unprocessable(f"{name} is not offered; leave it out")

    def forget(self, *names: str) -> None:
        """Fields that change nothing."""
        for name in names:
            self._known.append(name)
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            unprocessable(f"there is no field {name[:80]!r}{suggestion(name[:80], self._known)}")
