r"""JSON schemas as expressions of `syntax`: every text of the language is JSON that is valid under the schema.

Not every valid text is in the language, because each value is written in one way only. Properties come in the order of
the schema, and only listed properties are written. Integers have no exponents; other numbers have exponents of at most
two digits. In strings, a character is escaped only if JSON requires it, by the shortest escape. White space may follow
colons and commas.

    any schema       type (one or several), enum, const, anyOf, oneOf of exclusive schemas, allOf of one, $ref
    object           properties, required, additionalProperties, minProperties and maxProperties of maps
    array            items, prefixItems, minItems, maxItems
    string           pattern (from beginning to end), minLength, maxLength, format (see `FORMATS`)
    integer, number  minimum, maximum, exclusiveMinimum, exclusiveMaximum (then numbers have no exponents)

A recursive reference is followed `depth` times. Annotations (title, description, default, ...) are ignored. All other
keywords raise an error, because ignoring them would silently drop a constraint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache, reduce
from typing import Any, ClassVar

from cedd.constraints.regex_parser import MOST_COUNT, MOST_NESTED, parse_regex
from cedd.constraints.syntax import (
    ANY,
    NOTHING,
    Alternatives,
    Both,
    Characters,
    Expression,
    Repeat,
    Separated,
    Sequence,
    alternatives,
    characters,
    excluding,
    least_bytes,
    literal,
    one_of,
    one_text_of,
    optional,
    sequence,
)
from cedd.storage import JSONMapping

Schema = JSONMapping
WHITESPACE = " ?"
"""The white space after a colon or a comma, as a regular expression."""
DESCRIBING = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
}
"""Keywords that do not constrain values."""
MOST_SCHEMAS = 1000
"""Schemas within a schema, with references followed."""
MOST_SHOWN = 60
"""Characters of a value in messages."""
TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_ESCAPED_CODES = sorted({*range(0x20), *map(ord, _ESCAPES)})
_PLAIN = excluding(ANY, characters((code, code) for code in _ESCAPED_CODES))
_NATURAL = parse_regex("0|[1-9][0-9]*")
_NUMBER = parse_regex(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?")

_MONTH_DAYS = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-{_MONTH_DAYS}|{_LEAP}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](-?[a-zA-Z0-9]){0,31}"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
}
"""Formats of strings, as regular expressions: real dates of the years 1 to 9999, times and durations without fractions,
host names of at most three labels of at most 63 characters, and IPv6 addresses with all of their groups."""
LARGEST = 1e100
"""Largest absolute value of a bound."""
_ANY_TEXT = Repeat(ANY, 0, None)


def parse_schema(schema: Schema | bool | str, whitespace: str = WHITESPACE, depth: int = 2) -> Expression:
    """The expression of a schema, or of its JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("the JSON schema has too many nested levels") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"a JSON schema is an object, or true (got {_shown(schema)})")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the depth of a JSON schema must be an integer, at least 0 (got {depth!r})")
    space = parse_regex(whitespace)
    if not _is_within(space, one_of(" \t\n\r")):
        raise ValueError(f"white space in JSON is spaces, tabs and line breaks (got the pattern {whitespace!r})")
    return _SchemaReader(schema, space, depth).value(schema, _Place(depth))


def _shown(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 1] + "…"


def _is_within(expression: Expression, chosen: Characters) -> bool:
    """Whether all characters of an expression are among some."""
    match expression:
        case Characters(ranges):
            return _meeting(ranges, chosen.ranges) == ranges
        case Sequence(parts) | Alternatives(parts):
            return all(_is_within(part, chosen) for part in parts)
        case Repeat(part, _, _):
            return _is_within(part, chosen)
        case _:
            return False


@dataclass(frozen=True)
class _Place:
    """A place in the schema."""

    depth: int
    """How many further levels values of any kind may have."""
    path: str = ""
    followed: tuple[str, ...] = ()
    """The references that lead here."""
    level: int = 0

    def __truediv__(self, name: str | int) -> _Place:
        """The place of a keyword, a property or an entry of a list."""
        return replace(self, path=_joined_path(self.path, name), level=self.level + 1)

    @property
    def deeper(self) -> _Place:
        return replace(self, depth=self.depth - 1)

    def error(self, what: str) -> ValueError:
        """An error that names this place."""
        return ValueError(f"JSON schema{' at ' * bool(self.path)}{self.path}: {what}")


def _joined_path(path: str, name: str | int) -> str:
    if isinstance(name, int):
        return f"{path}[{name}]"
    shown = name if re.fullmatch(r"[\w$-]+", name) else json.dumps(name, ensure_ascii=False)
    return f"{path}.{shown}" if path else shown


class _SchemaReader:
    def __init__(self, root: Schema | bool, space: Expression, depth: int) -> None:
        self._root, self._depth, self._read = root, depth, 0
        self._comma, self._colon = sequence(literal(","), space), sequence(literal(":"), space)

    def value(self, schema: Any, place: _Place) -> Expression:
        """The texts of values that are valid under a schema."""
        self._read += 1
        if self._read > MOST_SCHEMAS:
            raise place.error(f"with references followed, the schema has more than {MOST_SCHEMAS:,} parts")
        if place.level > MOST_NESTED:
            raise _Place(0, place.path[:MOST_SHOWN] + "…").error(f"there are more than {MOST_NESTED} nested levels")
        if schema is True or schema == {}:
            return self._anything(place)
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise place.error(f"a schema is an object or a boolean (got {_shown(schema)})")
        for keyword, read in self._combinations.items():
            if keyword in schema:
                self._check(schema, place, {keyword, "type"} if keyword in ("enum", "const") else {keyword})
                return read(schema, place)
        types = _types_at(schema, place) if "type" in schema else self._implied(schema, place)
        allowed = {"type"}.union(*(self._types[name][1] for name in types))
        self._check(schema, place, allowed)
        return alternatives(*(self._types[name][0](self, schema, place) for name in types))

    def _check(self, schema: Schema, place: _Place, allowed: set[str]) -> None:
        if unknown := [keyword for keyword in schema if keyword not in allowed | DESCRIBING]:
            other = next((keyword for keyword in schema if keyword in allowed), None)
            if other == "type":
                other = f"type {schema['type']}" if isinstance(schema["type"], str) else "these types"
            raise (place / unknown[0]).error("not supported" + (f" with {other}" if other else ""))

    def _implied(self, schema: Schema, place: _Place) -> list[str]:
        """The type whose keywords a schema has; all types if it has none."""
        fitting = [name for name, (_, keywords) in self._types.items() if keywords & set(schema)]
        self._check(schema, place, set[str]().union(*(keywords for _, keywords in self._types.values())))
        if len(fitting) > 1:
            raise place.error(f"the keywords are those of {' and '.join(fitting)}; add the type")
        return fitting or [name for name in TYPES if name != "integer"]

    # Combinations

    @property
    def _combinations(self) -> dict[str, Callable[[Schema, _Place], Expression]]:
        return {
            "$ref": self._reference,
            "enum": self._enum,
            "const": self._enum,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "allOf": self._all_of,
        }

    def _enum(self, schema: Schema, place: _Place) -> Expression:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if not isinstance(values, list):
            raise (place / "enum").error(f"must be a list of values (got {_shown(values)})")
        if "type" in schema:
            types = _types_at(schema, place)
            values = [value for value in values if _is_of(value, types)]
        at = place / ("const" if "const" in schema else "enum")
        texts = [_json(value, at) for value in values]
        try:
            return one_text_of(texts)
        except ValueError as error:
            raise at.error(str(error)) from None

    def _any_of(self, schema: Schema, place: _Place) -> Expression:
        return alternatives(*(self.value(each, at) for each, at in _listed(schema, "anyOf", place)))

    def _one_of(self, schema: Schema, place: _Place) -> Expression:
        options = [self._resolved(each, at) for each, at in _listed(schema, "oneOf", place)]
        for i, one in enumerate(options):
            if not all(_exclusive(one, other) for other in options[:i]):
                raise (place / "oneOf").error("schemas may overlap; use anyOf, or give them different types or consts")
        return alternatives(*(self.value(each, at) for each, at in _listed(schema, "oneOf", place)))

    def _all_of(self, schema: Schema, place: _Place) -> Expression:
        options = _listed(schema, "allOf", place)
        if len(options) != 1:
            raise (place / "allOf").error("several schemas are not supported; merge them")
        return self.value(*options[0])

    def _resolved(self, schema: Any, place: _Place) -> Any:
        """The schema that a reference leads to; other schemas themselves."""
        return self._target(schema["$ref"], place) if isinstance(schema, Mapping) and "$ref" in schema else schema

    def _target(self, reference: Any, place: _Place) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise (place / "$ref").error(f"must be a reference within the schema, #/... (got {_shown(reference)})")
        target: Any = self._root
        for name in [part for part in reference[1:].split("/") if part]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise (place / "$ref").error(f"{_shown(reference)} does not exist")
        return target

    def _reference(self, schema: Schema, place: _Place) -> Expression:
        reference = schema["$ref"]
        target = self._target(reference, place)
        if place.followed.count(reference) > self._depth:
            return NOTHING
        followed = (*place.followed, reference)
        names = [part for part in reference[1:].split("/") if part]
        start = replace(place, path="", followed=followed, level=place.level + 1 - len(names))
        return self.value(target, reduce(_Place.__truediv__, names, start))

    def _anything(self, place: _Place) -> Expression:
        if place.depth <= 0:
            kinds = ("string", "number", "boolean", "null")
        else:
            kinds = ("object", "array", "string", "number", "boolean", "null")
        return alternatives(*(self._types[kind][0](self, {}, place) for kind in kinds))

    # Types

    def _object(self, schema: Schema, place: _Place) -> Expression:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise (place / "properties").error(f"must be an object (got {_shown(properties)})")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise (place / "required").error(f"must be a list of names (got {_shown(required)})")
        if missing := [name for name in required if name not in properties]:
            raise (place / "required").error(f"{missing[0]!r} is not in properties")
        if not properties and schema.get("additionalProperties") is not False:
            return self._map(schema, place)
        if bad := [keyword for keyword in ("minProperties", "maxProperties") if keyword in schema]:
            raise (place / bad[0]).error("not supported with properties")
        parts = [
            (
                self._member(
                    literal(json.dumps(name, ensure_ascii=False)), self.value(each, place / "properties" / name)
                ),
                name not in required,
            )
            for name, each in properties.items()
        ]
        # Recursion may leave no text for a property; it is then left out.
        parts = [(part, may_miss) for part, may_miss in parts if not may_miss or least_bytes(part) < math.inf]
        return sequence(literal("{"), Separated(tuple(parts), self._comma), literal("}"))

    def _member(self, name: Expression, value: Expression) -> Expression:
        return sequence(name, self._colon, value)

    def _map(self, schema: Schema, place: _Place) -> Expression:
        value = self.value(schema.get("additionalProperties", True), (place / "additionalProperties").deeper)
        member = self._member(string_of(_ANY_TEXT), value)
        return self._list("{", member, _counts(schema, place, "minProperties", "maxProperties", distinct=True), "}")

    def _array(self, schema: Schema, place: _Place) -> Expression:
        first = schema.get("prefixItems", [])
        least, most = _counts(schema, place, "minItems", "maxItems")
        if not first:
            return self._list("[", self._items(schema, place), (least, most), "]")
        most = len(first) if most is None else min(most, len(first))  # none are written after the first
        if least > most:
            raise (place / "minItems").error(f"must be at most the number of prefixItems, {len(first)} (got {least})")
        items = [self.value(each, at) for each, at in _listed(schema, "prefixItems", place)]
        ways = [self._joined(items[:count]) for count in range(least, most + 1)]
        return sequence(literal("["), alternatives(*ways), literal("]"))

    def _items(self, schema: Schema, place: _Place) -> Expression:
        place = place / "items"
        return self.value(schema["items"], place) if "items" in schema else self._anything(place.deeper)

    def _joined(self, items: Items[Expression]) -> Expression:
        return Separated(tuple((item, False) for item in items), self._comma)

    def _list(self, begin: str, item: Expression, counts: tuple[int, int | None], end: str) -> Expression:
        least, most = counts
        if least_bytes(item) == math.inf and least == 0:
            most = 0
        if most == 0:
            return literal(begin + end)
        rest = Repeat(sequence(self._comma, item), max(0, least - 1), None if most is None else most - 1)
        inside = sequence(item, rest)
        return sequence(literal(begin), inside if least else optional(inside), literal(end))

    def _string(self, schema: Schema, place: _Place) -> Expression:
        least, most = _counts(schema, place, "minLength", "maxLength")
        content: Expression = Repeat(ANY, least, most)
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                known = ", ".join(FORMATS)
                raise (place / "format").error(f"must be one of {known} (got {_shown(schema['format'])})")
            content = _both(parse_regex(FORMATS[schema["format"]]), content)
        if "pattern" in schema:
            try:
                content = _both(parse_regex(schema["pattern"]), content)
            except ValueError as error:
                raise (place / "pattern").error(str(error)) from None
        return string_of(content)

    def _integer(self, schema: Schema, place: _Place) -> Expression:
        low, high = _bounds(schema, place)
        least = None if low is None else math.floor(low.value) + 1 if low.strict else math.ceil(low.value)
        most = None if high is None else math.ceil(high.value) - 1 if high.strict else math.floor(high.value)
        return integers(least, most)

    def _number(self, schema: Schema, place: _Place) -> Expression:
        low, high = _bounds(schema, place)
        return _NUMBER if low is None and high is None else decimals(low, high)

    def _boolean(self, schema: Schema, place: _Place) -> Expression:
        return alternatives(literal("true"), literal("false"))

    def _null(self, schema: Schema, place: _Place) -> Expression:
        return literal("null")

    _types: ClassVar[dict[str, tuple[Callable[[_SchemaReader, Schema, _Place], Expression], set[str]]]] = {
        "object": (_object, {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
        "array": (_array, {"items", "prefixItems", "minItems", "maxItems"}),
        "string": (_string, {"pattern", "minLength", "maxLength", "format"}),
        "integer": (_integer, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
        "number": (_number, {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
        "boolean": (_boolean, set()),
        "null": (_null, set()),
    }


def _both(one: Expression, other: Expression) -> Expression:
    return one if other == _ANY_TEXT else Both(one, other)


def _listed(schema: Schema, keyword: str, place: _Place) -> list[tuple[Any, _Place]]:
    options = schema[keyword]
    if not isinstance(options, list) or not options:
        raise (place / keyword).error(f"must be a list of schemas (got {_shown(options)})")
    return [(each, place / keyword / number) for number, each in enumerate(options)]


def _json(value: Any, place: _Place) -> str:
    """A value as JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise place.error(f"not a JSON value: {_shown(value)}") from None


def _counts(
    schema: Schema, place: _Place, least_name: str, most_name: str, distinct: bool = False
) -> tuple[int, int | None]:
    least, most = schema.get(least_name, 0), schema.get(most_name)
    for name, count in ((least_name, least), (most_name, 0 if most is None else most)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise (place / name).error(f"must be an integer, at least 0 (got {_shown(count)})")
        if count > MOST_COUNT:
            raise (place / name).error(f"must be at most {MOST_COUNT:,} (got {count:,})")
    if most is not None and least > most:
        raise (place / least_name).error(f"must be at most {most_name}, {most} (got {least})")
    if distinct and least > 1:
        raise (place / least_name).error(f"must be 0 or 1, because names may repeat (got {least})")
    return least, most


@dataclass(frozen=True)
class Bound:
    """An end of a range of numbers; strict if it is not in the range."""

    value: Decimal
    strict: bool = False

    @property
    def digits(self) -> tuple[int, str]:
        """The integer part of the absolute value, and the digits after the point."""
        whole, _, fraction = f"{abs(self.value):f}".partition(".")
        return int(whole), fraction.rstrip("0")


def _bounds(schema: Schema, place: _Place) -> tuple[Bound | None, Bound | None]:
    """The tighter of the given bounds at each end."""
    found: dict[str, Bound] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise (place / keyword).error(f"must be a number (got {_shown(value)})")
        if not abs(value) <= LARGEST:
            raise (place / keyword).error(f"must be from -{LARGEST:g} to {LARGEST:g} (got {_shown(value)})")
        bound, end = Bound(Decimal(repr(value)), keyword.startswith("exclusive")), keyword[-7:].lower()
        other = found.get(end, bound)
        sign = 1 if end == "minimum" else -1
        found[end] = max(bound, other, key=lambda one: (sign * one.value, one.strict))
    low, high = found.get("minimum"), found.get("maximum")
    if low is not None and high is not None and low.value > high.value:
        keyword = "minimum" if "minimum" in schema else "exclusiveMinimum"
        raise (place / keyword).error(f"must be at most the maximum, {high.value} (got {low.value})")
    return low, high


@lru_cache(maxsize=256)
def string_of(content: Expression) -> Expression:
    """JSON strings of contents."""
    return sequence(literal('"'), escaped(content), literal('"'))


def escaped(content: Expression) -> Expression:
    """Contents as they are written in a JSON string: each character in one way."""
    match content:
        case Characters(ranges):
            there = [code for code in _ESCAPED_CODES if any(first <= code <= last for first, last in ranges)]
            plain = Characters(_meeting(ranges, _PLAIN.ranges))
            return alternatives(plain, *(literal(_ESCAPES.get(chr(code), f"\\u{code:04x}")) for code in there))
        case Sequence(parts):
            return Sequence(tuple(map(escaped, parts)))
        case Alternatives(options):
            return Alternatives(tuple(map(escaped, options)))
        case Repeat(part, least, most):
            return Repeat(escaped(part), least, most)
        case Both(one, other):
            return Both(escaped(one), escaped(other))
        case Separated(parts, separator):
            return Separated(tuple((escaped(part), may_miss) for part, may_miss in parts), escaped(separator))


def _meeting(ranges: Items[tuple[int, int]], others: Items[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return tuple((low, high) for low, high in pairs if low <= high)


def _types_at(schema: Schema, place: _Place) -> list[str]:
    """The types that a schema names."""
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not isinstance(types, list) or not types or any(one not in TYPES for one in types):
        raise (place / "type").error(f"must be one of {', '.join(TYPES)} (got {_shown(schema['type'])})")
    return types


def _is_of(value: Any, types: Items[str]) -> bool:
    kinds = {
        "object": isinstance(value, Mapping),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0,
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    return any(kinds.get(name, False) for name in types)


def _exclusive(one: Any, other: Any) -> bool:
    """Whether two schemas certainly have no valid value in common."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return False
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return not {json.dumps(v, sort_keys=True) for v in values} & {json.dumps(v, sort_keys=True) for v in others}
    types, other_types = _types_of(one), _types_of(other)
    if types and other_types and not types & other_types:
        return True
    if types != {"object"} or other_types != {"object"}:
        return False
    common = [name for name in _listed_names(one) if name in _listed_names(other)]
    properties, other_properties = one.get("properties", {}), other.get("properties", {})
    if not isinstance(properties, Mapping) or not isinstance(other_properties, Mapping):
        return False
    return any(
        name in properties
        and name in other_properties
        and any(_values(each[name]) is not None for each in (properties, other_properties))
        and _exclusive(properties[name], other_properties[name])
        for name in common
    )


def _listed_names(schema: Schema) -> list[Any]:
    names = schema.get("required", [])
    return names if isinstance(names, list) else []


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _types_of(schema: Schema) -> set[str]:
    """The types that a schema names, with integers as numbers; none if it names none."""
    named = schema.get("type", [])
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return {"number" if name == "integer" else name for name in types if isinstance(name, str)}


# ----------------------------------------------------------------------------------------------------------------
# Numbers


def integers(low: int | None, high: int | None) -> Expression:
    """Integers from low to high, as JSON writes them, without -0."""
    if low is not None and high is not None and low > high:
        return NOTHING
    options: list[Expression] = []
    if low is None or low < 0:
        size_from = 1 if high is None or high >= 0 else -high
        negative = naturals(size_from, None if low is None else -low)
        options.append(sequence(literal("-"), negative))
    if high is None or high >= 0:
        options.append(naturals(max(low or 0, 0), high))
    return alternatives(*options)


def naturals(low: int, high: int | None) -> Expression:
    """Integers from low >= 0 to high, without leading zeros."""
    options: list[Expression] = []
    digits = len(str(low))
    while high is None or 10 ** (digits - 1) <= max(high, 1):
        first, last = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
        if high is None and first >= low:
            # All numbers of at least this number of digits.
            leading = one_of("123456789")
            rest = Repeat(one_of("0123456789"), digits - 1, None)
            options += [sequence(leading, rest), *([literal("0")] if low == 0 else [])]
            break
        bounds = max(low, first), last if high is None else min(high, last)
        if bounds[0] <= bounds[1]:
            options.append(_same_digits(str(bounds[0]), str(bounds[1])))
        digits += 1
    return alternatives(*options)


def _same_digits(low: str, high: str) -> Expression:
    """Numbers from low to high, which have the same number of digits."""
    if not low:
        return Sequence(())
    rest = len(low) - 1
    if low[0] == high[0]:
        return sequence(literal(low[0]), _same_digits(low[1:], high[1:]))
    options: list[Expression] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        options.append(sequence(literal(low[0]), _same_digits(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        options.append(sequence(literal(high[0]), _same_digits("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        middle = one_of("0123456789"[first : last + 1])
        options.append(sequence(middle, Repeat(one_of("0123456789"), rest, rest)))
    return alternatives(*options)


_DIGIT = one_of("0123456789")
_DIGITS = Repeat(_DIGIT, 0, None)
_ZEROS = Repeat(one_of("0"), 0, None)
_SOME_DIGIT = sequence(_ZEROS, one_of("123456789"), _DIGITS)
_FRACTION = optional(sequence(literal("."), _DIGIT, _DIGITS))


def decimals(low: Bound | None, high: Bound | None) -> Expression:
    """Decimal numbers without exponents between two bounds."""
    if low is not None and high is not None and (low.value, low.strict) > (high.value, -high.strict):
        return NOTHING
    options: list[Expression] = []
    if low is None or low.value < 0:
        nearest = Bound(Decimal(0)) if high is None or high.value > 0 else high
        options.append(sequence(literal("-"), _positive(nearest, low)))
    if high is None or high.value >= 0:
        options.append(_positive(low if low is not None and low.value >= 0 else Bound(Decimal(0)), high))
    return alternatives(*options)


def _positive(near: Bound, far: Bound | None) -> Expression:
    """Numbers without a sign, from the bound nearer to zero to the other one."""
    first, first_digits = near.digits
    above = _fraction_from(first_digits, near.strict)
    if far is None:
        return alternatives(sequence(naturals(first, first), above), sequence(naturals(first + 1, None), _FRACTION))
    last, last_digits = far.digits
    below = _fraction_to(last_digits, far.strict)
    if first == last:
        return sequence(naturals(first, first), Both(above, below))
    options = [sequence(naturals(first, first), above), sequence(naturals(last, last), below)]
    if last - first > 1:
        options.append(sequence(naturals(first + 1, last - 1), _FRACTION))
    return alternatives(*options)


def _fraction_from(digits: str, strict: bool) -> Expression:
    """The rest of a number after its integer part, with a fraction of at least 0.digits (above it, if strict)."""

    def rest(digits: str) -> Expression:
        if not digits:
            return _SOME_DIGIT if strict else _DIGITS
        more = one_of("0123456789"[int(digits[0]) + 1 :])
        return alternatives(sequence(more, _DIGITS), sequence(literal(digits[0]), rest(digits[1:])))

    if digits or strict:
        return sequence(literal("."), rest(digits))
    return _FRACTION


def _fraction_to(digits: str, strict: bool) -> Expression:
    """The rest of a number after its integer part, with a fraction of at most 0.digits (below it, if strict)."""

    def rest(digits: str, begun: bool) -> Expression:
        if not digits:
            zeros = _ZEROS if begun else sequence(one_of("0"), _ZEROS)
            return NOTHING if strict else zeros
        less = one_of("0123456789"[: int(digits[0])])
        ways = [sequence(less, _DIGITS), sequence(literal(digits[0]), rest(digits[1:], begun=True))]
        return alternatives(*ways, *([Sequence(())] if begun else []))

    after = sequence(literal("."), rest(digits, begun=False))
    return optional(after) if digits or not strict else NOTHING
