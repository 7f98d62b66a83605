"""Constraints on the command line: the output satisfies them, and invalid input gives a one-line error."""

import json
import re
from pathlib import Path

import pytest

from cedd.cli import main

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["--regex", "[ab]{3,8}c?", "--length", "9"], "[ab]{8}c"),
        (["--choices", "cat", "the dog"], "the dog"),  # without an end-of-text token, as many tokens as the longest
        (["--regex", "[ab]+", "--particles", "3", "--length", "9"], "[ab]{9}"),
    ],
)
def test_samples_satisfy_their_constraint(options: list[str], pattern: str, absorb: str, capsys):
    words = ["sample", absorb, "-n", "3", "--steps", "4", "--seed", "1", "--device", "cpu", "--json"]
    assert main([*words, *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert all(re.fullmatch(pattern, text) for text in record["samples"])
    assert record["sampler"] == ("particles" if "--particles" in options else "analytic")


def test_one_regex_per_blank(absorb: str, capsys):
    words = ["infill", absorb, "____{3}-____{4}", "--steps", "4", "--device", "cpu"]
    for patterns, expected in ((["[ab]+", "[cd]+"], "[ab]{3}-[cd]{4}"), (["[ef]+"], "[ef]{3}-[ef]{4}")):
        assert main([*words, *(word for pattern in patterns for word in ("--regex", pattern))]) == 0
        assert re.fullmatch(expected, capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "ABSORB", "--choices"], "--choices needs at least one text"),
        (
            ["sample", "ABSORB", "--regex", "a", "--choices", "b"],
            "--choices and --regex cannot be combined; use one of them",
        ),
        (["sample", "ABSORB", "--regex", "a(?=b)"], "look-ahead (?=...) is not supported"),
        (["sample", "ABSORB", "--regex", "(a"], "invalid regular expression '(a': missing ), unterminated subpattern"),
        (["sample", "ABSORB", "--regex", "[^\\x00-\\U0010ffff]"], "no text satisfies the constraint regex("),
        (["sample", "ABSORB", "--regex", "a{2000}"], "tokens satisfies regex('a{2000}'); the shortest takes at least "),
        (["sample", "ABSORB", "--regex", "((a{0,100}){0,100}){0,100}"], "can match a text in too many ways"),
        (["sample", "ABSORB", "--json-schema", "SCHEMA"], "JSON schema at patternProperties: not supported"),
        (["sample", "ABSORB", "--json-schema", "/nowhere.json"], "file not found: /nowhere.json"),
        (["sample", "ABSORB", "--json-schema", "BINARY"], "binary.json is not UTF-8 text: convert it to UTF-8 first"),
        (["sample", "RUN", "--regex", "a+", "--length", "5"], "needs a model that only masks (process absorb)"),
        (["sample", "ABSORB", "--regex", "a+", "--sampler", "gibbs"], "the sampler gibbs cannot write texts under a"),
        (["infill", "ABSORB", "a ____{3} b", "--regex", "a{9}"], "no text of 3 tokens satisfies regex('a{9}')"),
        (
            ["sample", "ABSORB", "--particles", "3"],
            "--particles needs a constraint: --regex, --json-schema or --choices",
        ),
        (["sample", "ABSORB", "--label", "x"], "this model was not trained with labels"),
        (
            ["sample", "ABSORB", "--regex", "a", "--regex", "b"],
            "--regex can only be repeated for infill, once per blank",
        ),
        (["sample", "ABSORB", "--regex", "a+", "--length", "999"], "--length must be at most "),
        (
            ["infill", "ABSORB", "a ____", "--regex", "a", "--regex", "b"],
            "one constraint per blank (constraints: 2, blanks: 1)",
        ),
    ],
)
def test_invalid_constraints_give_one_line_errors(
    words: list[str], message: str, run: str, absorb: str, tmp_path: Path, capsys
):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "object", "patternProperties": {}}))
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe")
    named = {"RUN": run, "ABSORB": absorb, "SCHEMA": str(schema), "BINARY": str(binary)}
    assert main([named.get(word, word) for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cedd: error: ")
    assert message in line
