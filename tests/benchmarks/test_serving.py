"""The load test of the server, with a few clients."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import definitions

for package in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'cedd[serve]' httpx")


def test_no_two_requests_are_the_same():
    for kind in definitions("serving").KINDS.values():
        assert len({json.dumps(kind.request(i)) for i in range(1000)}) == 1000


@pytest.mark.slow
def test_every_request_is_answered_by_its_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = "--clients 12 --each 2 --one-by-one 3 --checked 6 --memory 60 --kinds completions --out"
    monkeypatch.setattr(sys, "argv", ["serving.py", *words.split(), str(tmp_path / "serving.json")])
    definitions("serving").main()
    found = json.loads((tmp_path / "serving.json").read_text())
    row = found["completions"]
    assert (row["answered"], row["mixed_up"], row["wrong"], row["checked"]) == (24, 0, 0, 6)
    assert found["memory"]["spread"] < 0.1
    assert "24 answered" in capsys.readouterr().out
