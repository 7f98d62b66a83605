"""JSON schemas: texts of the language are valid JSON according to an independent validator."""

import json
import math
import random
import time
from decimal import Decimal
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cedd.constraints import json_schema
from cedd.constraints.byte_automaton import START, ByteAutomaton, compile_expression
from cedd.constraints.schema_parser import FORMATS, Bound, decimals, integers
from tests.reference.json_validation import is_valid

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": "string", "format": "email"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "anything": True,
    "person": PERSON,
    "tree": TREE,
    "optional": {"type": "object", "properties": {name: {"type": "boolean"} for name in "abcd"}},
    "middle": {"type": "object", "properties": {name: {"type": "null"} for name in "abcd"}, "required": ["c"]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
    "array": {"type": "array", "items": {"enum": ["a", 1, None, [1, {"x": "é"}]]}, "minItems": 1, "maxItems": 3},
    "list": {"type": "array", "items": {"type": "number"}},
    "tuple": {"prefixItems": [{"type": "string", "maxLength": 2}, {"const": 3}], "minItems": 1, "items": False},
    "choice": {"anyOf": [{"type": "string", "pattern": '^[a-c"\\\\\\n]{1,3}$'}, {"type": "null"}]},
    "tagged": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "integer"}}, "required": ["k", "x"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            {"type": "string", "maxLength": 1},
        ]
    },
    "types": {"type": ["integer", "null", "string"], "maxLength": 2, "minimum": -3},
    "bounds": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "all of one": {
        "allOf": [{"$ref": "#/$defs/small"}],
        "$defs": {"small": {"type": "integer", "maximum": 9, "minimum": 7}},
    },
    "typed enum": {"type": "string", "enum": ["a", 1, "b"]},
    "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2, "maxItems": 2},
    "times": {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 1},
    "implied": {"properties": {"a": {"minLength": 1, "maxLength": 2}}, "required": ["a"], "title": "T"},
    "strings": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
}


class Walker:
    """Random texts of a language: random bytes, then the shortest way to an end."""

    def __init__(self, automaton: ByteAutomaton) -> None:
        self.accepting = automaton.accepting.tolist()
        self.following = [[(byte, int(row[byte])) for byte in np.flatnonzero(row).tolist()] for row in automaton.table]
        self.distance = [0 if accepts else 1 << 30 for accepts in self.accepting]
        changed = True
        while changed:
            changed = False
            for state, following in enumerate(self.following):
                near = min((self.distance[target] + 1 for _, target in following), default=1 << 30)
                if near < self.distance[state]:
                    self.distance[state], changed = near, True

    def text(self, rng: random.Random, enough: int = 30) -> str:
        state, text = START, bytearray()
        while not (self.accepting[state] and (len(text) >= enough or rng.random() < 0.3 or not self.following[state])):
            following = self.following[state]
            if len(text) >= enough:
                nearest = min(self.distance[target] for _, target in following)
                following = [move for move in following if self.distance[move[1]] == nearest]
            byte, state = rng.choice(following)
            text.append(byte)
        return text.decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_generated_texts_are_valid(name):
    schema, rng = SCHEMAS[name], random.Random(0)
    walker = Walker(json_schema(schema).automaton)
    texts = {walker.text(rng) for _ in range(150)}
    assert len(texts) >= 3 or name in ("typed enum", "all of one")
    for text in texts:
        assert is_valid(json.loads(text), schema), text


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        (
            "person",
            [{"name": "Ann", "age": 7}, {"name": 'é"\\\n', "age": 0, "mail": "a.b@c.de"}],
            [{"name": "", "age": 1}],
        ),
        ("tree", [{"value": 1, "next": {"value": 2, "next": {"value": -3}}}], [{"next": {"value": 1}}]),
        (
            "optional",
            [{}, {"a": True}, {"b": False, "d": True}, {"a": True, "b": True, "c": True, "d": True}],
            [{"e": 1}],
        ),
        (
            "middle",
            [{"c": None}, {"a": None, "c": None}, {"b": None, "c": None, "d": None}],
            [{}, {"a": None, "b": None}],
        ),
        ("map", [{"x": 1}, {"": 1, "é": -2, "z": 3}], [{}, {"x": "1"}, {"a": 1, "b": 2, "c": 3, "d": 4}]),
        ("list", [[], [1], [0.5, -3, 1e20]], [["1"], [None]]),
        ("tuple", [["a"], ["", 3]], [[], [3], ["a", 4], ["a", 3, 1]]),
        ("anything", [None, {"a": [1, "c"]}, "x", [[1], []], -0.25], []),
        ("bounds", [-1.5, 2, 2.2499, 0, -0.001], [-1.6, 2.25, 3]),
        ("typed enum", ["a", "b"], [1]),
        ("tagged", [{"k": "a", "x": 5}, {"k": "b"}, "s"], [{"k": "a"}, {"k": "c"}]),
        ("strings", [['\u0000\u001f"', "\\\t\u007f"], ["/"]], [["abcd"]]),
    ],
)
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_json_dumps_output_is_accepted_if_valid(name, inside, outside, separators):
    language = json_schema(SCHEMAS[name])
    written = [json.dumps(value, ensure_ascii=False, separators=separators) for value in inside]
    assert [text for text in written if not language.matches(text)] == []
    assert [value for value in outside if language.matches(json.dumps(value, ensure_ascii=False))] == []
    assert not any(language.matches(" " + text) or language.matches(text + "\n") for text in written)


def test_whitespace_option():
    language = json_schema(PERSON, whitespace="")
    assert language.matches('{"name":"a","age":1}')
    assert not language.matches('{"name": "a", "age": 1}')
    assert json_schema(PERSON, whitespace=r"[ \n]*").matches('{"name":\n  "a",   "age":1}')


def test_recursion_depth_option():
    nested = {"value": 1, "next": {"value": 1, "next": {"value": 1, "next": {"value": 1}}}}
    assert not json_schema(TREE, depth=2).matches(json.dumps(nested))
    assert json_schema(TREE, depth=3).matches(json.dumps(nested))
    assert json_schema(True, depth=0).matches("[1]") is False
    endless = {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]}
    with pytest.raises(ValueError, match="no text satisfies the constraint json_schema"):
        _ = json_schema(endless).automaton


@given(st.integers(-300, 300) | st.none(), st.integers(-300, 300) | st.none())
@settings(max_examples=60, deadline=None)
def test_integer_bounds(low, high):
    automaton = compile_expression(integers(low, high))
    for number in range(-1200, 1200):
        expected = (low is None or number >= low) and (high is None or number <= high)
        assert automaton.matches(str(number).encode()) == expected, number
    for text in (b"", b"-", b"-0", b"007", b"+1", b"1.0"):
        assert not automaton.matches(text)


DECIMALS = [
    sign + whole + point
    for sign, whole in product(("", "-"), ("0", "1", "2", "3", "9", "10", "11", "100"))
    for point in ("", ".", *("." + "".join(digits) for count in (1, 2, 3) for digits in product("0159", repeat=count)))
]
BOUNDS = st.none() | st.builds(
    Bound,
    st.sampled_from(["0", "0.5", "1", "-1", "-0.05", "2.15", "-10.1", "9.99", "-3", "11"]).map(Decimal),
    st.booleans(),
)


@given(BOUNDS, BOUNDS)
@settings(max_examples=60, deadline=None)
def test_decimal_bounds(low, high):
    automaton = compile_expression(decimals(low, high))
    for text in DECIMALS:
        if text.endswith("."):
            assert not automaton.matches(text.encode())
            continue
        value = Decimal(text)
        above = low is None or (value > low.value if low.strict else value >= low.value)
        below = high is None or (value < high.value if high.strict else value <= high.value)
        if value == 0 and text[0] == "-":  # need not be written
            assert (above and below) or not automaton.matches(text.encode())
        else:
            assert automaton.matches(text.encode()) == (above and below), text


def test_dates_must_exist():
    automaton = json_schema({"type": "string", "format": "date"}).automaton
    for year, leap in ((2023, False), (2024, True), (1900, False), (2000, True), (1, False), (4, True)):
        assert automaton.matches(f'"{year:04}-02-29"'.encode()) == leap
        assert automaton.matches(f'"{year:04}-12-31"'.encode())
        assert not automaton.matches(f'"{year:04}-04-31"'.encode())
        assert not automaton.matches(f'"{year:04}-13-01"'.encode())
    assert not automaton.matches(b'"0000-01-01"')


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("ipv4", ["0.0.0.0", "255.249.99.1"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
        ("time", ["23:59:59Z", "00:00:00+01:00"], ["24:00:00Z", "12:00:00"]),
        ("ipv6", ["0:1:2:3:4:5:6:7", "2001:db8:0:0:0:0:0:1"], ["0:1:2:3:4:5:6", "::1", "12345:1:2:3:4:5:6:7"]),
        ("duration", ["P3Y6M4DT12H30M5S", "PT20M", "P1W", "P1M"], ["P", "PT", "P1YT", "P1Y2D", "P1W2D", "1D"]),
        ("hostname", ["a", "www.a-b.de", "0" * 32], ["a--b", "-a", "a-", "a..b", ".a", "0" * 64]),
        ("email", ["a@b.de", "a.b+c@d-e.org"], ["a@b", "@b.de", ".a@b.de"]),
    ],
)
def test_string_formats(name, inside, outside):
    assert name in FORMATS
    language = json_schema({"type": "string", "format": name})
    assert [text for text in inside if not language.matches(f'"{text}"')] == []
    assert [text for text in outside if language.matches(f'"{text}"')] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "is not JSON"),
        ('{"items":' * 100_000, "too many nested levels"),
        (3, "an object, or true"),
        ({"type": "strnig"}, "at type: must be one of"),
        ({"type": [{}]}, "at type: must be one of"),
        ({"type": 5, "enum": [1]}, "at type: must be one of"),
        ({"type": "string", "minimum": 3}, "at minimum: not supported with type string"),
        ({"not": {"type": "null"}}, "at not: not supported"),
        ({"type": "integer", "multipleOf": 2}, "at multipleOf: not supported with type integer"),
        ({"type": "array", "uniqueItems": True}, "at uniqueItems: not supported"),
        ({"type": "object", "patternProperties": {}}, "at patternProperties: not supported"),
        ({"anyOf": [{"type": "null"}], "minLength": 1}, "at minLength: not supported with anyOf"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf: schemas may overlap; use anyOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "at oneOf: schemas may overlap"),
        ({"oneOf": [{"type": [{}]}, {"type": [{}]}]}, "at oneOf: schemas may overlap"),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "at allOf: several schemas"),
        ({"$ref": "other.json"}, r"at \$ref: must be a reference within the schema"),
        ({"$ref": "#/$defs/missing"}, "'#/\\$defs/missing' does not exist"),
        ({"type": "object", "properties": {"a": True}, "required": ["b"]}, "at required: 'b' is not in properties"),
        ({"type": "object", "properties": {}, "required": 5}, r"at required: must be a list of names \(got 5\)"),
        ({"type": "object", "properties": {"a": True}, "required": "a"}, "at required: must be a list of names"),
        ({"type": "object", "properties": [1]}, "at properties: must be an object"),
        ({"type": "string", "format": "uri"}, "at format: must be one of"),
        ({"type": "string", "format": []}, "at format: must be one of"),
        ({"type": "string", "pattern": "(?=a)"}, r"at pattern: regular expression '\(\?=a\)': look-ahead"),
        ({"type": "string", "pattern": 5}, "at pattern: a regular expression must be a string"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "at minItems: must be at most maxItems"),
        ({"type": "array", "minItems": -1}, "at minItems: must be an integer, at least 0"),
        ({"type": "string", "maxLength": 10**9}, r"maxLength: must be at most 10,000 \(got 1,000,000,000\)"),
        ({"enum": [1, math.nan]}, r"^JSON schema at enum: not a JSON value: nan"),
        ({"const": {1, 2}}, "at const: not a JSON value"),
        ({"prefixItems": [True], "minItems": 2}, "at minItems: must be at most the number of prefixItems, 1"),
        ({"type": "object", "minProperties": 2}, "at minProperties: must be 0 or 1"),
        ({"type": "object", "properties": {"a": True}, "maxProperties": 2}, "at maxProperties: not supported with"),
        ({"type": "integer", "minimum": "3"}, "at minimum: must be a number"),
        ({"type": "integer", "maximum": 10**3000}, "at maximum: must be from -1e.100 to 1e.100"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"at minimum: must be at most the maximum, 3 \(got 5\)"),
        ({"enum": "abc"}, "at enum: must be a list"),
        ({"anyOf": []}, "at anyOf: must be a list of schemas"),
        ({"minLength": 1, "minItems": 2}, "keywords are those of array and string; add the type"),
        ({"minimum": 1}, "keywords are those of integer and number; add the type"),
        ({"type": "object", "properties": {"a": {"items": 3}}}, r"at properties\.a\.items: a schema is an object"),
        ({"properties": {"age": {"type": "integer", "minimum": "x"}}}, r"at properties\.age\.minimum: must be a"),
        ({"anyOf": [{}, {"properties": {"a b": {"minItems": -1}}}]}, r'at anyOf\[1\]\.properties\."a b"\.minItems'),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "x"}}}, r"at \$defs\.n\.type: must be one of"),
    ],
)
def test_unsupported_keywords_are_rejected_by_name(schema, message):
    with pytest.raises(ValueError, match=message) as caught:
        json_schema(schema)
    assert "\n" not in str(caught.value)


def test_schema_as_text_and_invalid_options():
    assert json_schema(json.dumps(PERSON)).automaton.fingerprint == json_schema(PERSON).automaton.fingerprint
    for depth in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="depth of a JSON schema must be an integer, at least 0"):
            json_schema(True, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="white space in JSON is spaces, tabs and line breaks"):
        json_schema(True, whitespace="[ x]?")


def chain(levels):
    """A reference to a reference to ..."""
    defined = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(levels)}
    return {"$ref": "#/$defs/n0", "$defs": {**defined, f"n{levels}": {"type": "null"}}}


def tree(levels):
    """A schema that refers to the next one twice."""
    both = {
        f"n{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/n{i + 1}"}] * 2, "minItems": 2}
        for i in range(levels)
    }
    return {"$ref": "#/$defs/n0", "$defs": {**both, f"n{levels}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "maxItems": 100_000}, "at maxItems: must be at most 10,000"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 10_000}, "more than 20,000 states"),
        (chain(2000), "more than 50 nested levels"),
        (tree(12), "with references followed, the schema has more than 1,000 parts"),
        (tree(60), "more than 50 nested levels"),
        ({"enum": [f"value {i}" for i in range(20_000)]}, "at most 100,000 characters in total"),
        ({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}, "more than 1,000 parts"),
    ],
)
def test_oversized_schemas_are_rejected_quickly(schema, message):
    """Within seconds of CPU time, although they expand to 1e4 to 1e18 parts."""
    start = time.process_time()
    with pytest.raises(ValueError, match=message) as caught:
        _ = json_schema(schema).automaton
    assert time.process_time() - start < 10
    assert len(str(caught.value)) < 200


def test_many_optional_properties():
    names = [f"p{i}" for i in range(60)]
    language = json_schema({"type": "object", "properties": {name: {"type": "null"} for name in names}})
    for chosen in ([], names[:1], names[-1:], names[::7], names):
        assert language.matches(json.dumps(dict.fromkeys(chosen)))
    assert not language.matches('{"p1": null, "p0": null}')
    assert not language.matches('{"p1": null,}')
    assert not language.matches('{, "p1": null}')
