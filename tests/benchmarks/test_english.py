"""The script that trains the model `english`: its data, training and export."""

import json
import lzma
import sys
from pathlib import Path

import pytest

import cedd
from tests.benchmarks.scripts import definitions

english = definitions("english")


def corpus(folder: Path) -> Path:
    """Forty books of broken lines, and forty articles."""
    folder.mkdir()
    book = "It was a dark and\nstormy night, said number {}.\n\nThe rain fell in\ntorrents.\n" * 20
    article = "Town {}\n\nTown {} is a town.\nIt has a river, and a bridge over it.\n" * 20
    books = "\n\n\n\n".join(book.replace("{}", str(i)) for i in range(40))
    (folder / "books.txt.xz").write_bytes(lzma.compress(books.encode(), preset=0))
    (folder / "wikipedia.txt").write_text("\n\n\n".join(article.replace("{}", str(i)) for i in range(40)))
    return folder


def test_book_lines_are_joined_and_held_out_documents_excluded(tmp_path: Path):
    files = english.Text(english.Arguments(corpus=corpus(tmp_path / "corpus"))).files
    learnt, held_out = ("".join(english.Passages(files, 0.1, held_out=part).texts()) for part in (False, True))
    assert "dark and stormy night, said number 3.\n\nThe rain fell in torrents." in learnt
    assert "is a town.\nIt has a river" in learnt
    assert ("number 9." in held_out, "number 9." in learnt) == (True, False)
    assert ("Town 19 " in held_out, "Town 19 " in learnt) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("block", [None, 4])
def test_model_is_trained_and_exported(block: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """The whole script on the CPU, with an automatic number of steps; the exported weights are nearly as good. The
    model in blocks starts from a packaged one."""
    small = "--tokens 300 --thinning 2 --holdout 0.1 --blocks 4 --length 16 --width 32 --depth 1 --heads 1 --batch 4"
    places = {"corpus": corpus(tmp_path / "corpus"), "out": tmp_path / "run", "cache": tmp_path / "cache"}
    words = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    words += [*small.split(), "--seconds", "3", "--device", "cpu"]
    words += ["--warmup", "20"] if block is None else ["--warmup", "999", "--block", str(block), "--from", "english"]
    monkeypatch.setattr(sys, "argv", ["english.py", *words, "--prepare"])
    assert english.main() == 0
    assert json.loads(capsys.readouterr().out)["train"]["documents"] == 72
    out = ["--export", str(tmp_path / "english"), "--results", str(tmp_path / "bounds.json")]
    monkeypatch.setattr(sys, "argv", ["english.py", *words, *out])
    assert english.main() == 0
    assert (tmp_path / "run" / "train.json").is_file()
    assert json.loads((tmp_path / "run" / "train.json").read_text())["steps"] != 10_000
    found = json.loads((tmp_path / "bounds.json").read_text())
    assert found.keys() == {"books", "wikipedia"}
    assert abs(found["books"]["exported less trained"]["nats_per_token"]) < (0.01 if block is None else 0.05)
    model = cedd.load(tmp_path / "english", device="cpu")
    assert model.reads_passages
    assert model.tokenizer.vocab_size == (300 if block is None else 8192)
    assert "benchmarks/english.py --corpus corpus --tokens 300" in (tmp_path / "english" / "README.md").read_text()
    if block is not None:
        assert model.method.block == block
        assert model.generate(prompt="It was a ", length=40)[0].startswith("It was a ")
        return
    text = model.infill("It was a ____{1} and stormy night", seed=0)
    assert text.startswith("It was a ")
    assert text.endswith(" and stormy night")
