"""The code on pages that `docs/refresh.py` does not run, with small random models; commands are slow tests."""

import re
import shlex
import string
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cedd
from cedd.cli import main
from cedd.cli.arguments import ARGUMENTS
from cedd.cli.parser import options_of
from cedd.data.tokenizers import CharTokenizer
from cedd.models.locate import pretrained_names
from docs.refresh import ROOT, blocks
from tests.docs.test_commands import shown, words_of
from tests.tasks.models import save_random

DOCS = sorted((ROOT / "docs").rglob("*.md"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files and models that the guides name; all models are small and random."""
    folder = tmp_path_factory.mktemp("guides")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        tokenizer = CharTokenizer(string.printable)
        for name, process in (("first", "uniform"), ("second", "uniform"), ("absorb", "absorb")):
            save_random(folder / "runs" / name, process, tokenizer=tokenizer)
        save_random(folder / "runs" / "ar", "absorb", "ar", tokenizer=tokenizer)
        text = "It was a dark and stormy night, and the rain fell in torrents. " * 60
        for name in ("book.txt", "letter.txt", "notes.md", "test.txt", "another-book.txt"):
            (folder / name).write_text(text)
        (folder / "page.txt").write_text("The ____{5} sat on the ____.")
        (folder / "names.txt").write_text("Holmes\n")
        (folder / "schema.json").write_text('{"enum": [1, 2]}')
        (folder / "corpus.jsonl").write_text('{"text": "A dark night."}\n' * 60)
        yield folder


def given_names() -> dict[str, Any]:
    """The names that programs use without defining them: a network, a process, data, an imported model."""
    embedding = nn.Embedding(51, 50)

    def network(x_t: torch.Tensor, sigma: torch.Tensor, **_: Any) -> torch.Tensor:
        return embedding(x_t)

    data = torch.randint(50, (8, 16))
    inputs = {"x_t": data, "x0": data, "ids": data, "sigma": torch.full((8,), 0.5), "L": 16}
    labels = {"labels": torch.zeros(8, dtype=torch.long)}
    modules = {"torch": torch, "cedd": cedd}
    return {**inputs, **labels, **modules, "network": network, "process": cedd.absorb(50), "data": data}


def programs(page: Path) -> list[str]:
    """The Python blocks of a page, without those marked `not run`, with an output below, or copied from an example."""
    text = page.read_text("utf-8")
    lines = text.splitlines()
    found = (
        lines[one.start : one.stop]
        for one, after in pairwise([*blocks(text), None])
        if one is not None and one.language == "python" and not {"not run", "code"} & set(one.notes)
        if after is None or after.language != "text"
    )
    return ["\n".join(code) for code in found]


QUICK_PROGRAMS = ("evaluate", "extend")
"""Pages whose programs take less than a second; those of the others are slow tests."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=() if page.stem in QUICK_PROGRAMS else pytest.mark.slow)
        for page in DOCS
        if programs(page)
    ],
)
def test_programs_on_page_run(page: Path, world: Path, monkeypatch: pytest.MonkeyPatch):
    if "english" not in pretrained_names():
        pytest.skip("no model comes with this copy of the package")
    wandb = types.SimpleNamespace(init=lambda **_: None, log=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = given_names()
    for code in programs(page):
        exec(compile(code, str(page), "exec"), names)


# ----------------------------------------------------------------------------------------------------------------
# Commands

NOT_RUNNABLE = re.compile(
    r" (?!runs/|docs/)[\w-]+/|FOLDER|gguf|hf:|corpus$|medium|mdlm|duo|sedd|smollm|adapt|llada|--frontier|--help|--label"
    r"|exact|correct --json|--chat|--lsp|--order|--results|--samples|FILE|infill -|runs/blocks|docs src|report runs"
)
"""Commands that need the hub, files of other projects, a GPU, or a judge."""
SUBSTITUTES = {"wikitext2": "book.txt", "ptb": "book.txt", "lm1b": "book.txt"}
"""Evaluation sets, which are not available here, and their substitutes."""
QUICK = {
    "train": "--data book.txt --steps 1 --batch.size 2 --evaluation.every 0",
    "evaluate": "--draws 1 --max-sequences 2",
    "sample": "--steps 1 --length 32",
    "infill": "--steps 1",
    "correct": "",
    "spelling": "--blocks 1 --passes 1 --thresholds 0.5",
    "export": "--force",
}


def made_quick(line: str) -> list[str] | None:
    """A command of a page with small models and files, or None if it cannot run here."""
    if not line.startswith("cedd ") or NOT_RUNNABLE.search(line) or len(words_of(line)) < 3:
        return None
    name, *words = [SUBSTITUTES.get(word, word) for word in words_of(line)[1:]]
    if name not in QUICK:
        return None
    quick = shlex.split(QUICK.get(name, ""))
    if {"importance", "exact"} & set(words):
        quick = ["--max-sequences", "2"]
    return [name, *words, *quick, "--device", "cpu"]


@pytest.mark.slow
def test_commands_in_guides_run(world: Path, capsys: pytest.CaptureFixture[str]):
    """In the order of the pages, so that a command finds the output of earlier ones."""
    failed, ran = dict[str, str](), 0
    for page in (page for page in DOCS if page.parent.name == "guides"):
        for line in dict.fromkeys(" ".join(line.split()) for line in shown(page.read_text("utf-8"))):
            words = made_quick(line)
            if words is not None:
                ran += 1
                code = main(words)
                if code and not ("--check" in words and code == 1):
                    failed[line] = capsys.readouterr().err.strip().splitlines()[-1]
    assert ran >= 20
    assert not failed, "\n".join(f"{line}: {said}" for line, said in failed.items())


def options_on(page: Path) -> set[str]:
    """The options that a page names between backquotes, without those of scripts and other programs."""
    found = re.findall(r"`(--[a-z][a-z0-9.-]*[a-z0-9])(?=[ `=,])", page.read_text("utf-8"))
    return set(found) - {"--nnodes", "--node-rank", "--rdzv-endpoint", "--part", "--every", "--help"}


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_options_on_page_exist(page: Path):
    options = {one.name for kind in ARGUMENTS.values() for one in options_of(kind)}
    known = options | {f"--no-{name[2:]}" for name in options}
    prefixes = ("--process.", "--architecture.")
    assert {name for name in options_on(page) - known if not name.startswith(prefixes)} == set()


def test_unknown_option_is_detected(tmp_path: Path):
    (tmp_path / "page.md").write_text("Use `--readers` or `--readers 4`, not `--part`.")
    assert options_on(tmp_path / "page.md") == {"--readers"}


# ----------------------------------------------------------------------------------------------------------------
# Sizes and openings


def test_pages_are_short():
    """Guides and the tutorial have at most 8 kB; only the reference and tables of results may exceed 12 kB."""
    for page in DOCS:
        folder = page.parent.name
        if folder not in ("results", "reference"):
            assert len(page.read_bytes()) <= (8 if folder in ("guides", "start") else 12) * 1024, page.name
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 3000


@pytest.mark.parametrize("page", [page for page in DOCS if page.parent.name == "results"], ids=lambda page: page.stem)
def test_result_pages_open_with_findings(page: Path):
    title, opening, *_ = page.read_text("utf-8").split("\n\n")
    assert title.startswith("# ")
    assert opening.startswith("**What was found.** ")
    assert len(re.findall(r"[.](?=\s|$)", opening.removeprefix("**What was found.**"))) <= 3
    prints = "benchmarks/serving.py" if page.stem == "speed" else f"benchmarks/result_tables.py --print {page.stem}"
    assert f"python {prints}" in " ".join(page.read_text("utf-8").split())


def test_every_paper_has_link():
    rows = [line for line in (ROOT / "docs/reference/bibliography.md").read_text("utf-8").splitlines() if "|" in line]
    assert len(rows) > 20
    assert all("](https://" in row for row in rows[2:])
