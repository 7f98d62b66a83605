"""Parts that save themselves: a part is a frozen dataclass with a name in a table; its JSON record is name and fields.

    CLOCKS["mine"] = MyClocks          # a class: {"name": "mine", "speed": 3.0}
    WEIGHTS["late"] = late             # a function: "late"

Schedules, clocks, parameterizations, objectives and dynamics are parts, and so are those of your own once they have an
entry in the table of their kind. A part is rebuilt from its record by the table's entry, which must exist by then.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Self

from cedd.names import suggestion


@dataclass(frozen=True)
class Table:
    """Classes and functions by name.

    Args:
        kind: the kind of its entries, for messages.
        place: the name of the table, for messages.
        entries: the classes and functions.
    """

    kind: str
    place: str
    entries: Mapping[str, Any]

    def record(self, part: object) -> Any:
        """The JSON record of a part: name and fields, or the name alone of a function."""
        for name, entry in self.entries.items():
            if entry is part:
                return name
            if entry is type(part):
                return {"name": name, **_fields_of(part)}
        called = getattr(part, "__name__", type(part).__name__)
        raise ValueError(f"the {self.kind} {called} cannot be saved: add it to {self.place} under a name of its own")

    def build(self, record: object) -> Any:
        """The part whose `record` this was."""
        arguments = dict(record) if isinstance(record, Mapping) else {"name": record}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        name: Any = arguments.pop("name", None)
        if not isinstance(name, str) or name not in self.entries:
            raise ValueError(f"unknown {self.kind} {name!r}{suggestion(str(name), self.entries)}")
        entry = self.entries[name]
        if not isinstance(entry, type):
            return entry
        tables = entry.parts if issubclass(entry, Part) else {}
        built = {
            key: tables[key].build(value) if key in tables and isinstance(value, str | Mapping) else value
            for key, value in arguments.items()
        }
        try:
            return entry(**built)
        except TypeError as error:
            raise ValueError(f"invalid {self.kind} {name!r}: {error}") from error


class Part:
    """A frozen dataclass of JSON values and of other parts."""

    table: ClassVar[Table]
    """The table of its kind."""
    parts: ClassVar[Mapping[str, Table]] = {}
    """The tables of the fields that are parts themselves."""

    def config(self) -> Any:
        """A JSON record from which the table of its kind makes this part again."""
        return self.table.record(self)

    @classmethod
    def from_config(cls, record: object) -> Self:
        """The part whose `config()` was this record."""
        return cls.table.build(record)


def _fields_of(part: object) -> dict[str, Any]:
    """The fields of a part as JSON values."""
    kind = type(part)
    has_own_init = "__init__" in vars(kind) and "__dataclass_fields__" not in vars(kind)
    if not is_dataclass(part) or isinstance(part, type) or has_own_init:
        raise ValueError(f"{kind.__name__} cannot be saved: make it a frozen dataclass")
    tables = kind.parts if issubclass(kind, Part) else {}
    return {f.name: _saved(kind, f.name, getattr(part, f.name), tables) for f in fields(part)}


def _saved(kind: type, name: str, value: object, tables: Mapping[str, Table]) -> Any:
    """A field as a JSON value."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if name not in tables:
        raise ValueError(f"{kind.__name__} cannot be saved: its {name} is of type {type(value).__name__}, not a number")
    return tables[name].record(value)


def import_named(name: str, what: str, fits: Callable[[Any], bool]) -> Any:
    """The object package:NAME, imported: the user's own code, for a name that the user gives.

    Args:
        name: package:NAME.
        what: the kind of object, for messages.
        fits: whether an object is one.
    """
    package, separator, path = name.partition(":")
    if not (separator and package and path):
        raise ValueError(f"invalid {what} {name!r}: write package:NAME for your own")
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"could not import {package} for the {what} {name}: {error}; it must be installed, or be in the current "
            "folder or on PYTHONPATH"
        ) from None
    found = {key: value for key, value in vars(module).items() if fits(value)}
    if path not in found:
        raise ValueError(f"{name} is not a {what}{suggestion(path, found) if found else ''}")
    return found[path]
