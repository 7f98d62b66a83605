r"""JSON schemas as expressions of `syntax`: every text of the language is JSON that is valid under the schema.

Not all valid texts are in it. JSON may be written in many ways; here it is written in one, but for white space after
colons and commas: properties in the order of the schema, only those that it lists, no exponents of integers and at
most two digits in those of other numbers, and in strings each character by itself or, where JSON requires it, by its
shortest escape.

    any schema       type (one or several), enum, const, anyOf, oneOf of exclusive schemas, allOf of one, $ref
    object           properties, required, additionalProperties, minProperties and maxProperties of maps
    array            items, prefixItems, minItems, maxItems
    string           pattern (from beginning to end), minLength, maxLength, format (see `FORMATS`)
    integer, number  minimum, maximum, exclusiveMinimum, exclusiveMaximum (then numbers have no exponents)

A reference to itself is followed `depth` times; where no text is left the schema is refused. Keywords that only
describe (title, description, default, ...) are skipped, and all others are refused by name: a constraint that is
silently dropped would be none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, ClassVar

from cedd.constraints.regex_parser import MOST_COUNT, parse_regex
from cedd.constraints.syntax import (
    ANY,
    NOTHING,
    Alternatives,
    Both,
    Characters,
    Expression,
    Repeat,
    Sequence,
    alternatives,
    characters,
    excluding,
    literal,
    one_of,
    optional,
    separated,
    sequence,
)
from cedd.storage import JSONMapping

Schema = JSONMapping
WHITESPACE = " ?"
"""What may stand after a colon or a comma."""
DESCRIBING = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
}
"""Keywords that constrain nothing."""
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
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}T{_TIME}{_ZONE}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
"""Formats of strings, as regular expressions: real dates of the years 1 to 9999, times without fractions."""


def parse_schema(schema: Schema | bool | str, whitespace: str = WHITESPACE, depth: int = 2) -> Expression:
    """The expression of a schema, or of its JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"a JSON schema is an object, or true (got {schema!r})")
    space = parse_regex(whitespace)
    return _SchemaReader(schema, space, depth).value(schema, _Place(depth))


@dataclass(frozen=True)
class _Place:
    """Where in the schema something is, and how often references may still lead back to where they were."""

    depth: int
    path: str = "#"
    followed: tuple[str, ...] = ()

    def __truediv__(self, name: str | int) -> _Place:
        return replace(self, path=f"{self.path}/{name}")

    @property
    def deeper(self) -> _Place:
        return replace(self, depth=self.depth - 1)

    def error(self, what: str) -> ValueError:
        return ValueError(f"JSON schema at {self.path}: {what}")


class _SchemaReader:
    def __init__(self, root: Schema | bool, space: Expression, depth: int) -> None:
        if depth < 0:
            raise ValueError(f"the depth of a JSON schema must not be negative (got {depth})")
        self._root, self._depth = root, depth
        self._comma, self._colon = sequence(literal(","), space), sequence(literal(":"), space)

    def value(self, schema: Any, place: _Place) -> Expression:
        """The texts of values that are valid under a schema."""
        if schema is True or schema == {}:
            return self._anything(place)
        if schema is False:
            return NOTHING
        if not isinstance(schema, Mapping):
            raise place.error(f"a schema is an object or a boolean (got {schema!r})")
        for keyword, read in self._combinations.items():
            if keyword in schema:
                self._check(schema, place, {keyword, "type"} if keyword in ("enum", "const") else {keyword})
                return read(schema, place)
        types = schema["type"] if "type" in schema else self._implied(schema, place)
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or any(one not in TYPES for one in types):
            raise place.error(f"the type must be one of {', '.join(TYPES)} (got {types!r})")
        allowed = {"type"}.union(*(self._types[name][1] for name in types))
        self._check(schema, place, allowed)
        return alternatives(*(self._types[name][0](self, schema, place) for name in types))

    def _check(self, schema: Schema, place: _Place, allowed: set[str]) -> None:
        if unknown := [keyword for keyword in schema if keyword not in allowed | DESCRIBING]:
            beside = next((keyword for keyword in allowed if keyword in schema), None)
            raise place.error(f"{unknown[0]!r} is not supported here" + (f" (next to {beside!r})" if beside else ""))

    def _implied(self, schema: Schema, place: _Place) -> list[str]:
        """The one type whose keywords a schema has; all if it has none."""
        fitting = [name for name, (_, keywords) in self._types.items() if keywords & set(schema)]
        self._check(schema, place, set[str]().union(*(keywords for _, keywords in self._types.values())))
        if len(fitting) > 1:
            raise place.error(f"it has keywords of {' and '.join(fitting)}; give its type")
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
            raise place.error(f"enum must be a list of values (got {values!r})")
        if "type" in schema:
            types = [schema["type"]] if isinstance(schema["type"], str) else list(schema["type"])
            values = [value for value in values if _is_of(value, types)]
        return alternatives(*(literal(_json(value, place)) for value in values))

    def _any_of(self, schema: Schema, place: _Place) -> Expression:
        return alternatives(*(self.value(each, at) for each, at in _listed(schema, "anyOf", place)))

    def _one_of(self, schema: Schema, place: _Place) -> Expression:
        options = [self._resolved(each, at) for each, at in _listed(schema, "oneOf", place)]
        for i, one in enumerate(options):
            if not all(_exclusive(one, other) for other in options[:i]):
                raise place.error("the schemas of oneOf may overlap; use anyOf, or give them different types or consts")
        return alternatives(*(self.value(each, at) for each, at in _listed(schema, "oneOf", place)))

    def _all_of(self, schema: Schema, place: _Place) -> Expression:
        options = _listed(schema, "allOf", place)
        if len(options) != 1:
            raise place.error("allOf of several schemas is not supported; merge them")
        return self.value(*options[0])

    def _resolved(self, schema: Any, place: _Place) -> Any:
        """What a schema refers to, if it does."""
        return self._target(schema["$ref"], place) if isinstance(schema, Mapping) and "$ref" in schema else schema

    def _target(self, reference: Any, place: _Place) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise place.error(f"only references within the schema are followed (#/...) (got {reference!r})")
        target: Any = self._root
        for name in [part for part in reference[1:].split("/") if part]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise place.error(f"{reference!r} refers to nothing")
        return target

    def _reference(self, schema: Schema, place: _Place) -> Expression:
        reference = schema["$ref"]
        target = self._target(reference, place)
        if place.followed.count(reference) > self._depth:
            return NOTHING
        return self.value(target, replace(place, path=reference, followed=(*place.followed, reference)))

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
            raise place.error(f"properties must be an object (got {properties!r})")
        if missing := [name for name in required if name not in properties]:
            raise place.error(f"the required property {missing[0]!r} is not one of its properties")
        if not properties and schema.get("additionalProperties") is not False:
            return self._map(schema, place)
        if bad := [keyword for keyword in ("minProperties", "maxProperties") if keyword in schema]:
            raise place.error(f"{bad[0]!r} is supported for objects without properties of their own only")
        parts = [
            (
                self._member(literal(json.dumps(name, ensure_ascii=False)), self.value(each, place / name)),
                name not in required,
            )
            for name, each in properties.items()
        ]
        # What a recursive schema leaves nothing for is not written.
        parts = [(part, may_miss) for part, may_miss in parts if not (may_miss and is_empty(part))]
        inside = separated(parts, self._comma) if parts else Sequence(())
        return sequence(literal("{"), inside, literal("}"))

    def _member(self, name: Expression, value: Expression) -> Expression:
        return sequence(name, self._colon, value)

    def _map(self, schema: Schema, place: _Place) -> Expression:
        value = self.value(schema.get("additionalProperties", True), (place / "additionalProperties").deeper)
        member = self._member(string_of(Repeat(ANY, 0, None)), value)
        return self._list("{", member, _counts(schema, place, "minProperties", "maxProperties", distinct=True), "}")

    def _array(self, schema: Schema, place: _Place) -> Expression:
        first = schema.get("prefixItems", [])
        least, most = _counts(schema, place, "minItems", "maxItems")
        if not first:
            return self._list("[", self._items(schema, place), (least, most), "]")
        most = len(first) if most is None else min(most, len(first))  # none are written after the first
        if least > most:
            raise place.error(f"minItems must be at most the {len(first)} prefixItems (got {least})")
        items = [self.value(each, at) for each, at in _listed(schema, "prefixItems", place)]
        ways = [self._joined(items[:count]) for count in range(least, most + 1)]
        return sequence(literal("["), alternatives(*ways), literal("]"))

    def _items(self, schema: Schema, place: _Place) -> Expression:
        place = place / "items"
        return self.value(schema["items"], place) if "items" in schema else self._anything(place.deeper)

    def _joined(self, items: Items[Expression]) -> Expression:
        return separated([(item, False) for item in items], self._comma)

    def _list(self, begin: str, item: Expression, counts: tuple[int, int | None], end: str) -> Expression:
        least, most = counts
        if is_empty(item) and least == 0:
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
            if schema["format"] not in FORMATS:
                raise place.error(f"the format must be one of {', '.join(FORMATS)} (got {schema['format']!r})")
            content = _both(parse_regex(FORMATS[schema["format"]]), content)
        if "pattern" in schema:
            try:
                content = _both(parse_regex(schema["pattern"]), content)
            except ValueError as error:
                raise place.error(str(error)) from None
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
    return one if other == Repeat(ANY, 0, None) else Both(one, other)


def _listed(schema: Schema, keyword: str, place: _Place) -> list[tuple[Any, _Place]]:
    options = schema[keyword]
    if not isinstance(options, list) or not options:
        raise place.error(f"{keyword} must be a list of schemas (got {options!r})")
    return [(each, place / keyword / number) for number, each in enumerate(options)]


def _json(value: Any, place: _Place) -> str:
    """A value as JSON text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise place.error(f"enum and const must be JSON values (got {value!r})") from None


def _counts(
    schema: Schema, place: _Place, least_name: str, most_name: str, distinct: bool = False
) -> tuple[int, int | None]:
    least, most = schema.get(least_name, 0), schema.get(most_name)
    for name, count in ((least_name, least), (most_name, 0 if most is None else most)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise place.error(f"{name} must be a whole number from 0 up (got {count!r})")
        if count > MOST_COUNT:
            raise place.error(f"{name} must be at most {MOST_COUNT:,} (got {count:,})")
    if most is not None and least > most:
        raise place.error(f"{least_name} must be at most {most_name} (got {least} and {most})")
    if distinct and least > 1:
        raise place.error(f"{least_name} above 1 is not supported: nothing keeps names from being equal")
    return least, most


@dataclass(frozen=True)
class Bound:
    """An end of a range of numbers; strict if it is not in the range."""

    value: Decimal
    strict: bool = False

    @property
    def digits(self) -> tuple[int, str]:
        """The whole part of the absolute value, and the digits after the point."""
        whole, _, fraction = f"{abs(self.value):f}".partition(".")
        return int(whole), fraction.rstrip("0")


def _bounds(schema: Schema, place: _Place) -> tuple[Bound | None, Bound | None]:
    """The tighter of what is given at each end."""
    found: dict[str, Bound] = {}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if keyword not in schema:
            continue
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise place.error(f"{keyword} must be a number (got {value!r})")
        bound, end = Bound(Decimal(repr(value)), keyword.startswith("exclusive")), keyword[-7:].lower()
        other = found.get(end, bound)
        sign = 1 if end == "minimum" else -1
        found[end] = max(bound, other, key=lambda one: (sign * one.value, one.strict))
    return found.get("minimum"), found.get("maximum")


def is_empty(expression: Expression) -> bool:
    """Whether no text matches (of intersections nothing is said)."""
    match expression:
        case Characters(ranges):
            return not ranges
        case Sequence(parts):
            return any(map(is_empty, parts))
        case Alternatives(options):
            return all(map(is_empty, options))
        case Repeat(part, least, _):
            return least > 0 and is_empty(part)
        case Both(one, other):
            return is_empty(one) or is_empty(other)


def string_of(content: Expression) -> Expression:
    """JSON strings of contents."""
    return sequence(literal('"'), escaped(content), literal('"'))


def escaped(content: Expression) -> Expression:
    """Contents as they are written within a JSON string: each character has one way to be."""
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


def _meeting(ranges: Items[tuple[int, int]], others: Items[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    pairs = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return tuple((low, high) for low, high in pairs if low <= high)


def _is_of(value: Any, types: Items[str]) -> bool:
    kinds = {
        "object": isinstance(value, Mapping),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    return any(kinds.get(name, False) for name in types)


def _exclusive(one: Any, other: Any) -> bool:
    """Whether it is plain that no value is valid under both schemas."""
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
    common = set(one.get("required", [])) & set(other.get("required", []))
    properties, other_properties = one.get("properties", {}), other.get("properties", {})
    return any(
        name in properties
        and name in other_properties
        and any(_values(each[name]) is not None for each in (properties, other_properties))
        and _exclusive(properties[name], other_properties[name])
        for name in common
    )


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types_of(schema: Schema) -> set[str]:
    """The types of values, integers as numbers; none where that is not plain."""
    named = schema.get("type", [])
    types = {named} if isinstance(named, str) else set(named)
    return {"number" if name == "integer" else name for name in types}


# ----------------------------------------------------------------------------------------------------------------
# Numbers


def integers(low: int | None, high: int | None) -> Expression:
    """Whole numbers from low to high, as JSON writes them; -0 is not written."""
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
    """Whole numbers from low >= 0 to high, without leading zeros."""
    options: list[Expression] = []
    digits = len(str(low))
    while high is None or 10 ** (digits - 1) <= max(high, 1):
        first, last = 10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1
        if high is None and first >= low:
            # All numbers with at least this number of digits.
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
    """Numbers from low to high, which have equally many digits."""
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
    """Numbers without a sign, from the bound that is nearer to zero to the other one."""
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
    """What may follow a whole part so that the fraction is at least 0.digits, or more."""

    def rest(digits: str) -> Expression:
        if not digits:
            return _SOME_DIGIT if strict else _DIGITS
        more = one_of("0123456789"[int(digits[0]) + 1 :])
        return alternatives(sequence(more, _DIGITS), sequence(literal(digits[0]), rest(digits[1:])))

    if digits or strict:
        return sequence(literal("."), rest(digits))
    return _FRACTION


def _fraction_to(digits: str, strict: bool) -> Expression:
    """What may follow a whole part so that the fraction is at most 0.digits, or less."""

    def rest(digits: str, begun: bool) -> Expression:
        if not digits:
            zeros = _ZEROS if begun else sequence(one_of("0"), _ZEROS)
            return NOTHING if strict else zeros
        less = one_of("0123456789"[: int(digits[0])])
        ways = [sequence(less, _DIGITS), sequence(literal(digits[0]), rest(digits[1:], begun=True))]
        return alternatives(*ways, *([Sequence(())] if begun else []))

    after = sequence(literal("."), rest(digits, begun=False))
    return optional(after) if digits or not strict else NOTHING
