"""The load test of the server, with a few clients."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS, definitions

for package in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'cedd[serve]' httpx")


def test_requests_are_unique():
    for kind in definitions("serving").KINDS.values():
        assert len({json.dumps(kind.request(i)) for i in range(1000)}) == 1000


def test_figures_are_written_to_page(tmp_path: Path):
    script, page = definitions("serving"), tmp_path / "serving.md"
    shutil.copy(BENCHMARKS.parent / "docs" / "results" / "speed.md", page)
    row = {"answered": 1000, "refused": 3, "mixed_up": 0, "wrong": 1, "checked": 25}
    row |= {"alone_per_second": 31.5, "together_per_second": 63.0, "gain": 2.0}
    row |= {"alone_computed_ms": 38.6, "together_computed_ms": 31.2}
    found = {"machine": "aarch64", "cores": 2, "load_average": 0.26, "start_seconds": 2.8, "corrections": row}
    memory = {"requests": 5000, "least_mib": 700.2, "most_mib": 705.9}
    script.write_page(page, {"load": script.table({**found, "memory": memory})})
    made = page.read_text().split("<!-- load -->")[1].split("<!-- end of load -->")[0]
    line = "| 31.50/s | 63.00/s | 2.0 times | 39, 31 ms |"
    assert made.count("times") == 1
    assert line in made
    assert "700 to 706 MiB" in " ".join(made.split())
    assert "1,000 requests were answered (3 refused at first), and 1 answers were wrong" in " ".join(made.split())
    assert "load average 0.3" in made


@pytest.mark.slow
def test_every_request_gets_its_own_answer(
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
