"""The benchmark of constraints: its independent check of samples, and its totals."""

import json
import math
import sys
from pathlib import Path

import pytest

from cedd.constraints import json_schema, regex
from cedd.data.tokenizers import ByteTokenizer
from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

benchmark = definitions("constraints")


def test_benchmark_has_20_regexes_and_10_schemas():
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
def test_json_check_of_schemas(number: int, inside: list[str], outside: list[str]):
    schema = benchmark.SCHEMAS[number]
    assert all(benchmark.is_valid(text, schema) for text in inside)
    assert not any(benchmark.is_valid(text, schema) for text in outside)


@pytest.mark.slow
def test_costs_and_samples_are_measured_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = save_random(tmp_path / "run", "absorb", "cedd", tokenizer=ByteTokenizer(), time_input="none", length=32)
    options = ["-n", "2", "--temperatures", "0.3", "1.5", "--texts", "1", "--large-texts", "1", "--pairs", "2"]
    options += ["--steps", "2", "--check-steps", "2", "--length", "20", "--layers", "1", "--width", "64"]
    out = tmp_path / "out.json"
    for languages, seconds, done in ((2, "100", 2), (3, "0", 2), (3, "100", 3)):
        more = ["--languages", str(languages), "--seconds", seconds, "--device", "cpu", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["constraints.py", str(run), *options, *more])
        assert benchmark.command("constraints", benchmark.Arguments, benchmark.run) == 0
        record, shown = json.loads(out.read_text()), capsys.readouterr().out
        assert [len(record[part]["languages"]) for part in ("cost", "large_cost", "validity")] == [done, 1, done]
        assert f"[{2 * done} of {2 * done} valid] samples of {done} languages" in shown
        assert ("2 of 3 languages are done; run again to continue" in shown) == (languages > done)
        low, high = record["cost"]["interval"]
        assert 0 < low <= record["cost"]["cost"] <= high


def test_interval_of_geometric_mean():
    found = benchmark.geometric_mean([math.log(1.0), math.log(1.1), math.log(1.21)])
    assert found["cost"] == pytest.approx(1.1)
    assert found["interval"][1] == pytest.approx(1.1 * math.exp(4.3027 * math.log(1.1) / math.sqrt(3)), rel=1e-4)
