"""`cedd export`: a run becomes a folder that can be given away, measured, and exported again with its figures."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cedd.cli import main
from cedd.tasks import load
from cedd.tasks.calibrate import calibrate, level_options
from cedd.training.config import PRESETS, to_json
from tests.tasks.models import mending, save_random


@pytest.fixture
def run(tmp_path):
    folder = save_random(tmp_path / "run")
    config = to_json(PRESETS["char"][1]) | {"data": "/home/somebody/books.txt", "out": "/home/somebody/run"}
    (folder / "train.json").write_text(json.dumps(config))
    return folder


def test_a_run_is_exported_measured_and_exported_again(run, tmp_path, capsys):
    out, figures = tmp_path / "english-char", tmp_path / "pride.json"
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and so did the dog. " * 20)
    words = ["export", str(run), "--out", str(out), "--weights", "int8", "--about", "Old books."]
    assert main([*words, "--calibrate", str(tmp_path / "book.txt"), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["weights"] == "int8"
    assert said["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert set(said["correction"]) == {"rate", "t", "threshold", "strange"}
    card = (out / "README.md").read_text()
    assert "# english-char" in card
    assert "Old books." in card
    assert "cedd train char --data books.txt --out runs/english-char" in card
    assert not [file for file in out.iterdir() if "somebody" in file.read_text(errors="ignore")]

    share = {"share": 0.8125, "low": 0.79, "high": 0.83, "total": 1000}
    ways = [{"way": "its own", "options": {"t": 0.1}, "fixed": share}, {"way": "1 pass", "options": {}, "fixed": share}]
    book = {"run": "/home/somebody/run", "data": {"name": "/home/somebody/pride.txt"}}
    figures.write_text(json.dumps(book | {"user": {"rate": 0.05, "corrections": ways}}))
    assert main(["export", str(out), "--out", str(out), "--results", str(figures), "--device", "cpu"]) == 0
    assert "weights in int8" in capsys.readouterr().out
    again = (out / "README.md").read_text()
    assert "| fixed | 81.2% (79 to 83) of 1,000 |" in again
    assert "| book | pride.txt |" in again
    assert again.count("81.2%") == 1
    assert not [file for file in out.iterdir() if "somebody" in file.read_text(errors="ignore")]
    assert "Old books." in again
    assert load(out, device="cpu").folder.config["correction"] == said["correction"]


def test_a_run_is_not_overwritten_and_figures_must_be_json(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(run), "--device", "cpu"]) == 2
    assert "export it to another folder" in capsys.readouterr().err
    (tmp_path / "figures.json").write_text("fixed: 80%")
    words = ["export", str(run), "--out", str(tmp_path / "x"), "--results", str(tmp_path / "figures.json")]
    assert main([*words, "--device", "cpu"]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_calibration_is_as_bold_as_it_may_be():
    """q is meant as a (own probability 0), z as y (0.39): a text with right z's must keep them."""
    setting, text = mending(length=64), "a cat and a mat " * 40 + "z" * 40
    careful = calibrate(setting, text, broken=0.0, rates=(0.05,))
    bold = calibrate(setting, text, broken=1.0, rates=(0.05,))
    assert careful.broken == 0.0
    assert 0.0 < careful.options["threshold"] <= 0.4
    assert careful.options["rate"] == 0.05
    assert bold.options["threshold"] == 0.5
    assert bold.options["rate"] > 0.5
    assert bold.broken > 0.05
    assert bold.fixed >= careful.fixed > 0
    with pytest.raises(ValueError, match="too few letters"):
        calibrate(setting, "12 34")


@given(level=st.floats(0.0, 0.99), own=st.floats(0.01, 0.99), rate=st.floats(0.01, 0.5))
def test_a_level_as_options(level, own, rate):
    """Beyond a half the odds of the rate make up for the threshold that stays there."""
    assume(abs(own - level) > 1e-3)
    options = level_options(0.1, rate, level)
    gain = options["rate"] / (1 - options["rate"]) * (1 - rate) / rate
    shifted = own / (own + (1 - own) * gain)
    assert (own < level) == (shifted < options["threshold"])
