"""The benchmark of windows that are filled at once: they do not depend on each other, and the texts are the same."""

import sys
from pathlib import Path

import pytest
import torch

from cedd.samplers import SamplingOptions
from cedd.tasks import load
from cedd.tasks.windows import infilling_windows
from tests.benchmarks.scripts import definitions
from tests.tasks.models import save_random

batches = definitions("window_batches")
TEXT = "the cat sat on the mat, and the dog ran on and on. " * 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("run") / "run", "absorb", "cedd")


def test_windows_of_a_page_have_no_blank_in_common_and_are_filled_as_one_by_one(run: Path):
    loaded = load(run, "cpu")
    page = batches.page(TEXT, loaded.tokenizer, loaded.length, 5, 3)
    cuts = infilling_windows(page.blanks, page.width, loaded.length)
    assert [range(cut.first, cut.last) for cut in cuts] == page.blanks
    assert len(page.blanks) == 5
    for cut in cuts:
        assert int((~page.given[cut.start : cut.stop]).sum()) == 3
    options = SamplingOptions(steps=4, seed=1)
    assert torch.equal(batches.draw_together(loaded, page, options), page.draw(loaded, 1, options))
    with pytest.raises(ValueError, match=r"the text has 2,040 characters; 90 blanks take 5,824"):
        batches.page(TEXT, loaded.tokenizer, loaded.length, 90, 3)


def test_both_ways_are_timed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["window_batches.py", str(run), "--data", str(tmp_path / "text.txt"), "--steps", "2", "--blanks", "3"]
    monkeypatch.setattr(sys, "argv", words)
    assert batches.main() == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == ["3 windows", "3 samples"]
    assert all(line.endswith("| yes |") for line in table[2:])
    monkeypatch.setattr(sys, "argv", [*words, "--rounds", "0"])
    assert batches.main() == 2
    assert "--rounds must be at least 1" in capsys.readouterr().err
