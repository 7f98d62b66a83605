"""The benchmark of constraints: its independent check of samples, and its totals."""

import json
import sys
from pathlib import Path

import pytest

from cedd.constraints import json_schema, regex
from cedd.data.tokenizers import ByteTokenizer
from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

benchmark = definitions("constraints")


def test_there_are_as_many_languages_as_are_asked_for():
    languages = [regex(one) for one in benchmark.REGEXES] + [json_schema(one) for one in benchmark.SCHEMAS]
    assert len(benchmark.REGEXES) == 20
    assert len(benchmark.SCHEMAS) == 10
    assert all(not one.automaton.is_empty for one in languages)


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [
        (0, ["true"], ["1", "null", "tru"]),
        (1, ["-12", "345"], ["346", "-13", "1.5"]),
        (2, ['"red"', "3", '["a"]'], ['"blue"', "4"]),
        (3, ['"ab"'], ['"a"', '"abcdefghi"']),
        (4, ['"2024-02-29"'], ['"2023-02-29"', '"x"']),
        (5, ["[1, 2]"], ["[]", "[100]", "[1, 2, 3, 4]"]),
        (6, ['{"name": "x"}'], ["{}", '{"name": "x", "a": 1}', '{"name": 1}']),
        (8, ["{}", '{"a": null, "c": 9}'], ['{"c": 10}', '{"d": 1}']),
        (9, ['{"k": "x", "v": true}', "[]", '["p", "q"]'], ['{"k": "y", "v": true}', '["r"]', "1"]),
    ],
)
def test_the_check_of_json(number: int, inside: list[str], outside: list[str]):
    schema = benchmark.SCHEMAS[number]
    assert all(benchmark.is_valid(text, schema) for text in inside)
    assert not any(benchmark.is_valid(text, schema) for text in outside)


@pytest.mark.parametrize("network", [[], ["--layers", "1", "--width", "64"]])
def test_samples_are_counted(
    network: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = save_random(tmp_path / "run", "absorb", "cedd", tokenizer=ByteTokenizer(), time_input="none", length=32)
    options = ["-n", "2", "--temperatures", "0.3", "1.5", "--languages", "2", "--steps", "2", "--length", "20"]
    out = tmp_path / "out.json"
    words = ["constraints.py", str(run), *options, "--device", "cpu", "--out", str(out), *network]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark.command("constraints", benchmark.Arguments, benchmark.run) == 0
    record = json.loads(out.read_text())
    for part in [record, *([record["large"]] if network else [])]:
        assert (part["samples"], part["valid"], len(part["languages"])) == (4, 4, 2)
    assert "4 of 4 samples of 2 languages are valid" in capsys.readouterr().out
