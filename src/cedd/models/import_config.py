"""The config.json of a network that others have published, read setting by setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cedd.storage import JSONMapping


@dataclass(frozen=True)
class Description:
    """The content of config.json; a Hydra configuration has its sizes under `model`."""

    values: JSONMapping
    source: str
    rows: int
    """R, by the weights."""
    inside: str = ""
    """The prefix of its settings' names, for a section of a configuration."""

    def find(self, *names: str) -> tuple[str, Any]:
        """The first of these settings that it has, whatever family calls it so, with its name; else all names."""
        inner = self.values.get("model")
        for part in (inner if isinstance(inner, Mapping) else {}, self.values):
            for name in names:
                if part.get(name) is not None:
                    return self.inside + name, part[name]
        return self.inside + " or ".join(names), None

    def get(self, *names: str, default: Any = None) -> Any:
        """Its value, or the default where it is not there."""
        value = self.find(*names)[1]
        return default if value is None else value

    def part(self, name: str) -> Description:
        """The section of this name."""
        if not isinstance(self.values.get(name), Mapping):
            raise ValueError(f"{self.source}: {name} is {self.values.get(name)!r}, but must hold settings")
        return Description(self.values[name], self.source, self.rows, f"{name}.")

    def whole(self, *names: str, least: int = 1, most: int | None = None, default: int | None = None) -> int:
        """A setting that is a whole number."""
        name, value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.source}: {name} must be an integer (got {value!r})")
        if value < least or (most is not None and value > most):
            raise ValueError(f"{self.source}: {name} must be {_range(least, most)} (got {value})")
        return value

    def share(self, *names: str, zero: bool = True, below: float = 1.0, default: float | None = None) -> float:
        """A setting that is a number from 0, or above it, to below another."""
        name, value = self.find(*names)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.source}: {name} must be a number (got {value!r})")
        if not 0 <= value < below or (value == 0 and not zero):
            least = "at least 0" if zero else "above 0"
            raise ValueError(f"{self.source}: {name} must be {least} and below {below:g} (got {value})")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false."""
        name, value = self.find(name)
        if value not in (None, True, False):
            raise ValueError(f"{self.source}: {name} must be true or false (got {value!r})")
        return default if value is None else bool(value)

    def token_ids(self, name: str) -> list[int]:
        """A setting that is a token id or a list of token ids."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise ValueError(f"{self.source}: {name} must be a token id or a list of token ids (got {value!r})")
        return ids

    @property
    def kind(self) -> str:
        """Its model_type, in small letters; empty where it has none."""
        return str(self.values.get("model_type", "")).lower()

    def refuse(self, name: str, wanted: Any, why: str) -> None:
        """Refuse a setting of another value, if it is there."""
        value = self.get(name, default=wanted)
        if value != wanted:
            raise ValueError(f"{self.source}: {name} is {value!r}; {why}")


def _range(least: int, most: int | None) -> str:
    return f"at least {least}" if most is None else f"from {least} to {most}"
