"""Validation of the fields of a request: each is read with its type and range, and unknown fields are refused."""

from __future__ import annotations

import json
from collections.abc import Collection
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from cedd.apps.serve.limits import RequestError
from cedd.names import suggestion
from cedd.storage import JSONMapping, JSONObject

Default = TypeVar("Default")
REQUIRED: Any = object()
"""The default of a required field."""


def reject(message: str) -> NoReturn:
    """Raise 422, for a request that is well-formed but invalid."""
    raise RequestError(422, message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _is_message(value: object) -> bool:
    """Whether a JSON value is an object whose role and content are text."""
    return isinstance(value, dict) and all(isinstance(value.get(part), str) for part in ("role", "content"))


class RequestFields:
    """The fields of a JSON object.

    Args:
        body: the JSON text.
        defaults: values of fields that it does not have; a default of None is ignored.
    """

    def __init__(self, body: bytes, defaults: JSONMapping = MappingProxyType({})) -> None:
        try:
            record = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            example = '{"text": "I hav a cat"}'
            raise RequestError(400, f"the body must be a JSON object in UTF-8, such as {example}") from None
        if not isinstance(record, dict):
            raise RequestError(400, "the body must be a JSON object, with named fields")
        self._left: JSONObject = {name: value for name, value in record.items() if value is not None}
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        self._known: list[str] = []

    def _take(self, name: str, default: Any) -> Any:
        self._known.append(name)
        value = self._left.pop(name, self._defaults.get(name, default))
        if value is REQUIRED:
            reject(f"{name} is required")
        return value

    def text(self, name: str, most: int, default: str = REQUIRED) -> str:
        """A string of at most `most` characters."""
        value = self._take(name, default)
        if not isinstance(value, str):
            reject(f"{name} must be a string")
        if len(value) > most:
            raise RequestError(413, f"{name} has {len(value):,} characters; the maximum is {most:,}")
        return value

    def texts(
        self, name: str, most: int, longest: int, default: list[str] = REQUIRED, *, listed: bool = False
    ) -> list[str]:
        """A list of at most `most` strings of at most `longest` characters; unless `listed`, a string is a list of
        one."""
        value = self._take(name, default)
        found = [value] if isinstance(value, str) and not listed else value
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            reject(f"{name} must be {'' if listed else 'a string or '}a list of strings")
        if len(found) > most:
            reject(f"{name} has {len(found)} texts; the maximum is {most}")
        if longest < (length := max(map(len, found), default=0)):
            raise RequestError(413, f"{name} has {length:,} characters; the maximum is {longest:,}")
        return found

    def messages(self, name: str, most: int, longest: int) -> list[dict[str, str]]:
        """A list of at most `most` messages, {"role": ..., "content": ...} each, of at most `longest` characters."""
        value = self._take(name, REQUIRED)
        if not isinstance(value, list) or not value or not all(map(_is_message, value)):
            reject(f'{name} must be a list of messages, {{"role": "user", "content": "Hello"}} each')
        if len(value) > most:
            reject(f"{name} has {len(value)} messages; the maximum is {most}")
        if longest < (length := sum(len(one["content"]) for one in value)):
            raise RequestError(413, f"{name} has {length:,} characters; the maximum is {longest:,}")
        return value

    def record(self, name: str, *, or_text: bool = False) -> Any:
        """A JSON object, or with `or_text` its text; None if it is not given."""
        value = self._take(name, None)
        if not (value is None or isinstance(value, dict) or (or_text and isinstance(value, str))):
            reject(f"{name} must be a JSON object{' or its text' if or_text else ''}")
        return value

    def integer(self, name: str, low: int, high: int, default: Default = REQUIRED, why: str = "") -> int | Default:
        """An integer in a range. `why` ends the error message."""
        value = self._take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            reject(f"{name} must be an integer from {low:,} to {high:,}{why}")
        return value

    def number(self, name: str, low: float, high: float, default: Default = REQUIRED) -> float | Default:
        """A number in a range."""
        value = self._take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            reject(f"{name} must be a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str) -> bool:
        """True or false, by default false."""
        value = self._take(name, False)
        if not isinstance(value, bool):
            reject(f"{name} must be true or false")
        return value

    def choice(self, name: str, choices: Collection[str], default: Default = REQUIRED) -> str | Default:
        """One of several strings."""
        value = self._take(name, default)
        if value is default:
            return value
        if not isinstance(value, str):
            reject(f"{name} must be one of {', '.join(choices)}")
        if value not in choices:
            reject(f"{name}: invalid choice: {value[:80]!r}{suggestion(value[:80], choices)}")
        return value

    def refuse_unsupported(self, **without_effect: object) -> None:
        """Refuse fields that are not supported, unless they have these values, with which they have no effect."""
        for name, value in without_effect.items():
            self._known.append(name)
            given = self._left.pop(name, value)
            if given != value or isinstance(given, bool) != isinstance(value, bool):  # 0 == False
                reject(f"{name} is not supported; leave it out")

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect."""
        for name in names:
            self._known.append(name)
            self._left.pop(name, None)

    def end(self) -> None:
        """Refuse fields that were not read."""
        for name in self._left:
            reject(f"unknown field {name[:80]!r}{suggestion(name[:80], self._known)}")
