"""`cedd export`: a run becomes a shareable folder, which can be evaluated and exported again with its results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cedd.cli import main
from cedd.models.loaded_model import LoadedModel
from cedd.spelling import calibrate as calibration
from cedd.spelling.calibrate import calibrate, level_options
from cedd.storage import locked
from cedd.tasks import load
from cedd.training.config import PRESETS, to_json
from tests.limits import limited_file_size
from tests.tasks.models import fixer, save_random


@pytest.fixture
def run(tmp_path):
    folder = save_random(tmp_path / "run")
    config = to_json(PRESETS["char"][1]) | {"data": "/home/somebody/books.txt", "out": "/home/somebody/run"}
    (folder / "train.json").write_text(json.dumps(config))
    return folder


def test_run_is_exported_and_exported_again_with_results(run, tmp_path, capsys):
    out, figures = tmp_path / "english-char", tmp_path / "pride.json"
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and so did the dog. " * 8)
    words = ["export", str(run), "--out", str(out), "--weights", "int8", "--about", "Old books."]
    assert main([*words, "--calibrate", str(tmp_path / "book.txt"), "--device", "cpu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["weights"] == "int8"
    assert said["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert set(said["correction"]) == {"rate", "t", "threshold", "max_surprise"}
    card = (out / "README.md").read_text()
    assert "# english-char" in card
    assert "Old books." in card
    assert "cedd train char --data books.txt --out runs/english-char" in card
    assert "| batch | 16 sequences |" in card
    assert "| schedule | log-linear (eps 0.001) |" in card
    assert "Chosen on the first 352 characters of book.txt, with 5% of the letters replaced" in card
    assert not [file for file in out.iterdir() if "somebody" in file.read_text(errors="ignore")]

    share = {"share": 0.8125, "low": 0.79, "high": 0.83, "total": 1000}
    ways = [{"way": "its own", "options": {"t": 0.1}, "fixed": share}, {"way": "1 pass", "options": {}, "fixed": share}]
    book = {"run": "/home/somebody/run", "data": {"name": "/home/somebody/pride.txt", "characters": 2048, "length": 32}}
    figures.write_text(json.dumps(book | {"seed": 3, "user": {"rate": 0.05, "corrections": ways}}))
    assert main(["export", str(out), "--out", str(out), "--results", str(figures), "--device", "cpu"]) == 0
    assert "weights in int8" in capsys.readouterr().out
    again = (out / "README.md").read_text()
    assert "| fixed | 81.2% (79 to 83) of 1,000 |" in again
    assert "| book | pride.txt |\n| blocks | 64 of 32 characters |" in again
    assert "| seed | 3 |" in again
    assert "are shares of the mistakes" in again
    assert again.count("81.2%") == 1
    assert not [file for file in out.iterdir() if "somebody" in file.read_text(errors="ignore")]
    assert "Old books." in again
    assert load(out, device="cpu").folder.config["correction"] == said["correction"]


def test_control_characters_in_folder_name_are_escaped(run, tmp_path, capsys):
    out = tmp_path / "red\x1b[31m\u202e"
    assert main(["export", str(run), "--out", str(out), "--device", "cpu"]) == 0
    assert f"{tmp_path}/red\\x1b[31m\\u202e: " in capsys.readouterr().out
    assert (out / "config.json").is_file()


def test_export_sets_sampling_defaults(run, tmp_path, capsys):
    out = tmp_path / "model"
    words = ["export", str(run), "--out", str(out), "--device", "cpu", "--sampling"]
    assert main([*words, "steps=48", "top_p=0.95"]) == 0
    assert load(out, device="cpu").folder.config["sampling"] == {"steps": 48, "top_p": 0.95}
    assert "| defaults of sampling | steps 48, top_p 0.95 |" in (out / "README.md").read_text()
    for wrong in ("steps=many", "steps=0", "top_p=2", "top_k=40", "temperature"):
        assert main([*words, wrong]) == 2
        assert f"or top_p=NUMBER (up to 1) (got {wrong!r}" in capsys.readouterr().err


@pytest.mark.slow
def test_new_correction_defaults_keep_others_and_drop_stale_results(tmp_path, capsys):
    """Other options stay, correction results for the old defaults are dropped, perplexity results stay."""
    before = {
        "correction": {"swaps": 0.01, "threshold": 0.4, "max_surprise": 1.0},
        "results": {"pride": {"fixed": {"share": 0.8}}, "wikitext2": {"bits": 2.0}},
        "chosen": "By hand.",
    }
    folder, out = save_random(tmp_path / "model", extra=before), tmp_path / "out"
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and so did the dog. " * 8)
    words = ["export", str(folder), "--out", str(out), "--device", "cpu"]

    def config(*more):
        assert main([*words, *more]) == 0
        return json.loads((out / "config.json").read_text())

    same = config("--correction", "threshold=0.4")
    assert {name: same[name] for name in before} == before
    assert "left out" not in capsys.readouterr().out
    other = config("--correction", "threshold=0.3", "passes=2", "--command", "python make.py")
    assert other["correction"] == {"swaps": 0.01, "threshold": 0.3, "max_surprise": 1.0, "passes": 2}
    assert other["results"] == {"wikitext2": {"bits": 2.0}}
    assert other["chosen"] == ""
    assert other["training"]["command"] == "python make.py"
    assert "measured with other defaults: pride; measure them again" in capsys.readouterr().out
    card = (out / "README.md").read_text()
    assert "$ python make.py" in card
    assert "By hand" not in card
    assert "80%" not in card
    found = config("--calibrate", str(tmp_path / "book.txt"), "--correction", "reach=2", "--chosen", "On a cat.")
    assert found["correction"]["swaps"] == 0.01
    assert found["correction"]["reach"] == 2
    assert {"rate", "t", "threshold", "max_surprise"} < found["correction"].keys()
    assert found["chosen"] == "On a cat."
    assert list(found["results"]) == ["wikitext2"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--correction", "threshold"], "must be NAME=NUMBER, such as threshold=0.3 (got 'threshold'"),
        (["--correction", "passes=1.5"], "must be NAME=NUMBER"),
        (["--correction", "treshold=0.3"], "unexpected argument 'treshold' in"),
        (["--correction", "threshold=3"], "--correction: threshold must be in"),
        (["--calibrate", "BOOK", "--broken", "-1"], "must be in [0, 1] (got -1"),
        (["--calibrate", "BOOK", "--broken", "1.5"], "must be in [0, 1] (got 1.5"),
        (["--calibrate", "BOOK", "--broken", "nan"], "must be in [0, 1] (got nan"),
        (["--calibrate", "LATIN"], "latin.txt: 'utf-8' codec can't decode"),
    ],
)
def test_invalid_options_give_one_line_error(run, tmp_path, capsys, more, message):
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and so did the dog. " * 8)
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    named = {"BOOK": str(tmp_path / "book.txt"), "LATIN": str(tmp_path / "latin.txt")}
    given = [named.get(word, str(word)) for word in more]
    assert main(["export", str(run), "--out", str(tmp_path / "x"), "--device", "cpu", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_run_is_not_overwritten_and_results_must_be_json(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(run), "--device", "cpu"]) == 2
    assert "export it to another folder" in capsys.readouterr().err
    (tmp_path / "figures.json").write_text("fixed: 80%")
    words = ["export", str(run), "--out", str(tmp_path / "x"), "--results", str(tmp_path / "figures.json")]
    assert main([*words, "--device", "cpu"]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("there", ["another run", "another model", "files that are not a model"])
def test_unrelated_output_folder_is_overwritten_only_with_force(run, tmp_path, capsys, there):
    out = tmp_path / "there"
    if there == "files that are not a model":
        out.mkdir()
        for name in ("README.md", "log.jsonl", ".editor.tmp"):
            (out / name).write_text("{}")
    else:
        save_random(out, "absorb", "cedd")
    if there == "another run":
        (out / "train.json").write_bytes((run / "train.json").read_bytes())
        (out / "log.jsonl").write_text("{}")
    before = contents(out)
    words = ["export", str(run), "--out", str(out), "--device", "cpu"]
    assert main(words) == 2
    line = f"{out} holds {there}; choose another folder, or write over it with --force (force=True)"
    assert capsys.readouterr().err == f"cedd: error: {line}\n"
    assert contents(out) == before
    assert main([*words, "--force"]) == 0
    assert load(out, device="cpu").process.has_mask
    kept = {"log.jsonl", ".editor.tmp"} & before.keys()
    assert {name: content for name, content in contents(out).items() if name in kept} == {n: before[n] for n in kept}
    assert not (out / "train.json").exists()  # otherwise the run there would resume from foreign weights


def test_run_may_be_exported_to_same_folder_again(run, tmp_path, capsys):
    out, other = tmp_path / "out", save_random(tmp_path / "other", "absorb", "cedd")
    for source, code in ((run, 0), (run, 0), (out, 0), (run, 0), (other, 2)):
        assert main(["export", str(source), "--out", str(out), "--device", "cpu"]) == code
    assert "holds another model" in capsys.readouterr().err
    assert str(tmp_path) not in (out / "config.json").read_text()


def test_output_may_be_empty_folder_but_not_a_file(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["export", str(run), "--out", str(tmp_path / "empty"), "--device", "cpu"]) == 0
    (tmp_path / "file").touch()
    assert main(["export", str(run), "--out", str(tmp_path / "file"), "--device", "cpu", "--force"]) == 2
    assert "is a file; choose another name" in capsys.readouterr().err


def test_folder_in_use_by_training_is_rejected(run, tmp_path, capsys):
    other = save_random(tmp_path / "other")
    with locked(other):
        assert main(["export", str(run), "--out", str(other), "--device", "cpu", "--force"]) == 2
    assert "another process is training in" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["over itself", "over another", "new"])
def test_full_disk_leaves_old_model_unchanged(run, tmp_path, capsys, out):
    """Old files are removed only after their replacements are complete; a new folder leaves nothing behind."""
    model, target = tmp_path / "model", tmp_path / out
    assert main(["export", str(run), "--out", str(model), "--device", "cpu"]) == 0
    if out == "over itself":
        target = model
    elif out == "over another":
        save_random(target, "absorb", "cedd")
    before = contents(tmp_path)
    size = (model / "model.safetensors").stat().st_size
    capsys.readouterr()
    words = ["export", str(model), "--out", str(target), "--device", "cpu", "--title", "Other"]
    with limited_file_size(size - 1):
        assert main([*words, *(["--force"] if out == "over another" else [])]) == 1
    line = capsys.readouterr().err
    assert line.startswith("cedd: error: ")
    assert line.endswith("model.safetensors: File too large\n")
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_tilde_is_expanded_where_shell_does_not(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "--out=~/model", "--device", "cpu"]) == 0
    assert load("~/model", device="cpu").length
    (tmp_path / "home" / "figures.json").write_text("{}")
    assert main(["export", "~/model", "--out=~/model", "--results", "~/figures.json", "--device", "cpu"]) == 0
    assert main(["sample", "~/model", "--html=~/page.html", "--steps", "2", "--device", "cpu"]) == 0
    load("~/model", device="cpu").save_pretrained("~/again")
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"model", "again", "figures.json", "page.html"}
    assert not (tmp_path / "~").exists()
    capsys.readouterr()
    assert main(["export", str(run), "--out=~nosuchuser/model", "--device", "cpu"]) == 2
    assert "~nosuchuser/model names the home folder of an unknown user" in capsys.readouterr().err


def test_calibration_is_as_aggressive_as_broken_limit_allows():
    """q stands for a (own probability 0), z for y (0.39): correct z's in the text must be kept."""
    setting, text = fixer(length=64), "a cat and a mat " * 40 + "z" * 40
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


@pytest.mark.slow
def test_calibration_ignores_earlier_surprise_limit():
    """A limit of 0 reverts all changes, so every level would seem harmless."""
    setting, text = fixer(length=64), "a cat and a mat " * 40 + "z" * 40
    strict = LoadedModel(replace(setting.folder, config={"correction": {"max_surprise": 0.0}}))
    assert calibrate(strict, text, broken=0.01) == calibrate(setting, text, broken=0.01)


def test_calibration_uses_minimal_number_of_passes(monkeypatch):
    """One pass per time, one full revision per level until one is harmless, and one pass for the limit."""
    setting, readings, revisions = fixer(length=64), [], []
    score, revise = calibration.score_tokens, calibration.revise
    monkeypatch.setattr(calibration, "score_tokens", lambda *a, **k: readings.append(a) or score(*a, **k))
    monkeypatch.setattr(calibration, "revise", lambda *a, **k: revisions.append(a) or revise(*a, **k))
    calibrate(setting, "a cat and a mat " * 40, broken=1.0, rates=(0.05, 0.1))
    assert (len(readings), len(revisions)) == (2 + 1, 1)


@given(level=st.floats(0.0, 0.99), own=st.floats(0.01, 0.99), rate=st.floats(0.01, 0.5))
def test_level_is_converted_to_equivalent_options(level, own, rate):
    """Above one half, the threshold stays there and the odds of the rate compensate."""
    assume(abs(own - level) > 1e-3)
    options = level_options(0.1, rate, level)
    gain = options["rate"] / (1 - options["rate"]) * (1 - rate) / rate
    shifted = own / (own + (1 - own) * gain)
    assert (own < level) == (shifted < options["threshold"])
