"""The script that trains the packaged model `english-char`: it truncates its corpus and trains."""

import json
import lzma
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cedd.methods import method_from_config
from tests.benchmarks.scripts import run

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "english_char.py"
SHIPPED = SCRIPT.parents[1] / "src" / "cedd" / "pretrained" / "english-char"
PARAGRAPHS = "".join(f"Paragraph {i} says that the rain in Spain stays mainly in the plain.\n\n" for i in range(20_000))


def test_missing_corpus_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CEDD_DATA", raising=False)
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "name the folder of the corpus, or set CEDD_DATA to a folder with corpus/ in it" in done.stderr


def test_corpus_is_truncated_and_model_trained(tmp_path: Path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "books.txt.xz").write_bytes(lzma.compress(PARAGRAPHS.encode(), preset=0))
    (corpus / "short.txt").write_text("All of it.\n" * 100)
    small = ["--steps", "2", "--batch.size", "2", "--length", "16", "--model.width", "32", "--model.depth", "1"]
    small += ["--model.heads", "2", "--evaluation.every", "0", "--device", "cpu", "--text.workers", "1"]
    places = ["--corpus", str(corpus), "--megabytes", "1", "--out", str(tmp_path / "run")]
    places += ["--text.cache", str(tmp_path / "cache"), "--export", str(tmp_path / "model")]
    code, said = run(SCRIPT, *places, *small)
    assert code == 0, said
    text = (tmp_path / "run-text" / "books.txt").read_text()
    assert 999_000 < len(text) <= 1_000_000
    assert PARAGRAPHS.startswith(text)
    assert text.endswith(".\n")  # a whole paragraph
    assert (tmp_path / "run-text" / "short.txt").read_text() == "All of it.\n" * 100
    assert (tmp_path / "run" / "model.safetensors").is_file()
    made, shipped = (
        json.loads((folder / "config.json").read_text("utf-8")) for folder in (tmp_path / "model", SHIPPED)
    )
    for said in ("title", "correction", "chosen", "weights", "words"):
        assert made[said] == shipped[said], said
    assert method_from_config(made["method"]) == method_from_config(shipped["method"])
    size = {"vocab_size": shipped["process"]["vocab_size"]}  # this corpus has fewer characters
    assert made["process"] | size == shipped["process"]
    assert made["training"]["data"] == shipped["training"]["data"]
    words = ["python", "benchmarks/english_char.py", "--corpus", "corpus"]
    assert shlex.split(made["training"]["command"]) == [*words, "--megabytes", "1", "--text.cache", "cache", *small]
    assert shlex.split(shipped["training"]["command"])[:4] == words
    assert not [file for file in (tmp_path / "model").iterdir() if str(tmp_path) in file.read_text(errors="ignore")]
