"""`cedd report` of one run and of several, and the parts of the page."""

import errno
import html
import itertools
import json
import math
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import cedd
from cedd.apps.report.charts import Curve, Level, line_chart, ticks
from cedd.apps.report.measure import count_letters, draw_noise
from cedd.apps.report.pages import command_block, correction_spans, smoothed, spans, token_spans, whole_page
from cedd.apps.report.records import CorrectedText
from cedd.apps.report.runs import open_run, prose_lines
from cedd.cli import main
from cedd.data.tokenizers import END_OF_TEXT, BPETokenizer, CharTokenizer, load_tokenizer
from cedd.evaluation.baselines import compressed_bits
from cedd.process import absorb, uniform
from cedd.training.run_log import read_log

SENTENCES = ("the cat sat on the mat", "a dog ran to the river", "when it rains the fox sleeps", "nobody saw the moon")


def train(folder: Path, name: str, *changes: str) -> Path:
    text = folder / "words.txt"
    if not text.is_file():
        generator = np.random.default_rng(0)
        text.write_text("\n".join(SENTENCES[i] for i in generator.integers(0, 4, 400)) + "\n")
    out = folder / name
    words = f"train tiny --data {text} --out {out} --length 16 --steps 6"
    if not any("--evaluation.every" in change for change in changes):
        words += " --evaluation.every 3 --evaluation.samples 0"
    words += f" --text.cache {folder / 'cache'} --model.width 16 --model.depth 1 --model.heads 1 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cedd.training.loop.plot_log", lambda folder: None)  # no report shows the picture of a run
        assert main([*words.split(), *" ".join(changes).split()]) == 0
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    masks = train(folder, "absorb", "--process absorb --method cedd")
    return [train(folder, "roulette"), masks, train(folder, "ar", "--method ar"), train(folder, "short", "--length 8")]


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    several = len(list(itertools.takewhile(lambda word: not word.startswith("--"), words))) > 1
    few = ["--sequences", "20", *([] if several else ["--samples", "1"])]
    assert main(["report", *words, *few, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_report_of_masking_run_has_no_correction_section(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    record = report(capsys, str(runs[1]))
    page = (runs[1] / "report.html").read_text("utf-8")
    assert record["correction"] is None
    assert "only masks (absorb)" in record["notes"]["correction"]
    assert 'id="infilling"' in page
    assert 'id="correction"' not in page
    assert "only masks (absorb)" not in page
    assert "correct" not in record["commands"]
    assert f"{record['bound']['bits_per_character']:.3f}" in page
    assert "http" not in page


def test_tokens_are_coloured_by_cost(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, page = tmp_path / "tokens.jsonl", tmp_path / "page.html"
    words = ["--bound", "importance", "--orders", "2", "--max-sequences", "2", "--device", "cpu"]
    text = runs[1].parent / "words.txt"
    assert main(["evaluate", str(runs[1]), "--data", str(text), *words, "--tokens", str(file)]) == 0
    report(capsys, str(runs[1]), "--tokens", str(file), "--out", str(page))
    shown = page.read_text("utf-8")
    assert 'id="tokens"' in shown
    lines = [json.loads(line)["tokens"] for line in file.read_text("utf-8").splitlines()]
    coloured = re.findall(r'<span class="token" style="--cost:[\d.]+" title="[\d.]+ nats">', shown)
    assert len(coloured) == sum(map(len, lines))
    assert token_spans([("<", 5.0), ("b", 40.0)]) == (
        '<span class="token" style="--cost:0.50" title="5.00 nats">&lt;</span>'
        '<span class="token" style="--cost:1.00" title="40.00 nats">b</span>'
    )
    assert main(["report", str(runs[1]), str(runs[0]), "--tokens", str(file)]) != 0
    assert "--tokens needs a single MODEL" in capsys.readouterr().err


def test_page_shows_number_of_trained_steps(tmp_path: Path):
    """Only every tenth step is logged, apart from the last."""
    out = train(tmp_path, "run", "--steps 13 --log-every 10 --evaluation.every 0")
    assert read_log(out / "log.jsonl")[-1]["step"] == 13
    assert open_run(out, "cpu").facts()["steps"] == "13"
    (out / "log.jsonl").write_text("")  # an interrupted run has a checkpoint of its last step
    assert open_run(out, "cpu").facts()["steps"] == "13"


def test_end_token_is_not_text_and_bound_can_be_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Documents are separated by an end token, which costs bits but counts as no character of the text."""
    generator = np.random.default_rng(0)
    texts = ["\n".join(SENTENCES[i] for i in generator.integers(0, 4, 4)) + "\n" for _ in range(15)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    split = "--text.tokenizer bpe:300 --text.holdout 0.2 --text.holdout-by documents"
    run = train(tmp_path, "pieces", f"--data {tmp_path / 'words.jsonl'} --method cedd-star --process absorb {split}")
    record = report(capsys, str(run))
    bound, held_out = record["bound"], (run / "held-out.txt").read_text()
    assert END_OF_TEXT not in held_out
    assert bound["characters"] == len(held_out)
    assert bound["sequences"] < 20  # all sequences, in order
    tokens = bound["sequences"] * 16
    assert bound["bits_per_character"] == pytest.approx(bound["nats_per_token"] * tokens / len(held_out) / math.log(2))
    compressed = next(baseline for baseline in record["baselines"] if baseline["name"] == "gzip")
    assert compressed["bits_per_character"] == compressed_bits("gzip", held_out) / len(held_out)
    documents = [json.loads(line)["text"] for line in (run / "held-out.jsonl").read_text().splitlines()]
    assert "".join(documents) == held_out
    assert set(documents[:-1]) < set(texts)
    words = shlex.split(record["commands"]["evaluate"])[1:]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    assert f"{bound['nats_per_token']:.9f}"[:9] in capsys.readouterr().out
    assert "only masks (absorb)" in record["notes"]["correction"]
    filling, tokenizer = record["infilling"], load_tokenizer(run)
    places = zip(filling["template"].split(" "), filling["original"].split(" "), strict=True)
    blanks = {word: int(blank[5:-1]) for blank, word in places if blank.startswith("____")}
    assert blanks  # whole words, including their space
    for word, width in blanks.items():
        assert width == len(tokenizer.encode(f" {word}")) < len(tokenizer.encode(word))


def test_report_of_autoregressive_run_has_exact_figure(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    record = report(capsys, str(runs[2]))
    page = (runs[2] / "report.html").read_text("utf-8")
    assert record["bound"]["exact"]
    assert "bits per character, exactly" in page
    assert "tight" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    assert record["process"] == "a causal network"


def test_runs_on_same_text_are_paired(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "both.html"
    record = report(capsys, *map(str, runs), "--out", str(path))
    first, second, third, short = record["runs"]
    assert first["difference"] is None
    for other in (second, third):
        difference, low, high = other["difference"]
        gap = other["bound"]["bits_per_character"] - first["bound"]["bits_per_character"]
        assert difference == pytest.approx(gap, abs=1e-9)
        assert low < difference < high
    assert short["difference"] is None  # its sequences are different
    page = path.read_text("utf-8")
    assert page.count("different sequences") == 1
    assert f"{second['difference'][0]:+.4f}" in page
    for run in runs:
        assert str(run) in page
    assert "http" not in page


def test_run_has_zero_difference_from_itself(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = report(capsys, str(runs[0]), str(runs[0]), "--out", str(tmp_path / "x.html"))
    assert record["runs"][1]["difference"] == [0.0, 0.0, 0.0]


def test_baselines_are_drawn_only_if_all_runs_have_same_text(runs, tmp_path, capsys):
    """A run without evaluations during training is named, since it has no curve."""
    quiet = train(runs[0].parent, "quiet", "--evaluation.every 0")
    path = tmp_path / "page.html"
    same = report(capsys, str(runs[0]), str(quiet), "--out", str(path))
    page = path.read_text("utf-8")
    assert {"unigram", "gzip"} < {baseline["name"] for baseline in same["baselines"]}
    assert ">unigram<" in page
    assert "No bound was measured during the training of quiet." in page
    other = report(capsys, str(runs[0]), str(runs[3]), "--out", str(path))
    page = path.read_text("utf-8")
    assert other["baselines"] == []
    assert ">unigram<" not in page
    assert "the runs have different held-out sequences" in page
    assert "No bound was measured" not in page


@pytest.mark.slow
def test_json_is_written_only_next_to_report_html(runs, tmp_path, capsys):
    """A .json file of another name may be anything, such as the configuration of a run."""
    before = (runs[0] / "train.json").read_bytes()
    record = report(capsys, str(runs[0]), "--out", str(runs[0] / "train.html"))
    assert (runs[0] / "train.json").read_bytes() == before
    assert (runs[0] / "train.html").is_file()
    assert report(capsys, str(runs[0]), "--out", str(tmp_path / "report.html")) == record
    assert json.loads((tmp_path / "report.json").read_text()) == record
    for name in ("x.json", "page", "train.json"):
        assert main(["report", str(runs[0]), "--out", str(runs[0] / name), "--device", "cpu"]) == 2
        assert capsys.readouterr().err == f"cedd: error: {name} must end in .html or .htm\n"
    assert (runs[0] / "train.json").read_bytes() == before


@pytest.fixture(scope="module")
def model(runs: list[Path]) -> Path:
    """A saved model that is not a run."""
    folder = runs[0].parent / "given-away"
    cedd.load(runs[0], device="cpu").save_pretrained(folder)
    return folder


def test_saved_model_is_measured_on_given_text(model: Path, capsys: pytest.CaptureFixture[str]):
    text = model.parent / "words.txt"
    assert main(["report", str(model), "--device", "cpu"]) == 2
    assert capsys.readouterr().err == (
        f"cedd: error: {model} is not a run folder (it has no train.json); to measure it on a text, use "
        f"cedd report {model} --data FILE\n"
    )
    record = report(capsys, str(model), "--data", str(text))
    assert (record["text"], record["held_out"]) == ("words.txt", False)
    assert (record["losses"], record["bounds"]) == ([], [])
    page = (model / "report.html").read_text("utf-8")
    assert "There is no learning curve" in page
    assert "characters of words.txt, which may have been part of the training data" in page
    assert "chosen on another part of the text" in page
    assert "held-out" not in page
    assert json.loads((model / "report.json").read_text()) == record
    assert "train" not in record["commands"]
    assert f"--data {text}" in record["commands"]["this page"]
    assert record["correction"]["wrong"] > 0
    assert [one["name"] for one in record["baselines"]][-4:] == ["gzip", "bz2", "xz", "primed xz"]
    # The command of the page measures the same figure.
    words = shlex.split(record["commands"]["evaluate"])[1:]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    (measured,) = json.loads(capsys.readouterr().out)["runs"]
    for name in ("nats_per_token", "bits_per_character"):
        assert record["bound"][name] == pytest.approx(measured["bounds"]["tight"][name], rel=1e-12)


def test_models_are_compared_on_one_text(model: Path, runs: list[Path], tmp_path: Path, capsys):
    path = tmp_path / "models.html"
    record = report(capsys, str(model), str(runs[1]), "--data", str(model.parent / "words.txt"), "--out", str(path))
    first, second = record["runs"]
    gap = second["bound"]["bits_per_character"] - first["bound"]["bits_per_character"]
    assert second["difference"][0] == pytest.approx(gap, abs=1e-9)
    assert first["step"] is None
    page = path.read_text("utf-8")
    assert "2 models" in page
    assert "not a run of cedd train. Baselines on the same text, in bits per character: unigram" in page
    assert f"cedd report {model} {runs[1]}" in html.unescape(re.sub("<[^>]+>", "", page))
    assert "held-out" not in page


@pytest.mark.slow
def test_wrap_option_applies_to_given_text(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = str(runs[0].parent / "words.txt")
    assert main(["report", str(runs[0]), "--wrap", "bos-eos", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "cedd: error: --wrap has no effect without --data\n"
    run = train(runs[0].parent, "pieces", "--text.tokenizer bpe:300")
    record = report(capsys, str(run), "--data", text, "--wrap", "bos-eos", "--out", str(tmp_path / "x.html"))
    assert record["facts"]["sequence length"] == "16 tokens, between the tokens that begin and end a document"
    assert record["commands"]["this page"].count("--wrap bos-eos") == 1
    words = shlex.split(record["commands"]["evaluate"])[1:]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    (measured,) = json.loads(capsys.readouterr().out)["runs"]
    bits = measured["bounds"]["tight"]["bits_per_character"]
    assert record["bound"]["bits_per_character"] == pytest.approx(bits, rel=1e-12)
    assert END_OF_TEXT not in (tmp_path / "x.html").read_text("utf-8")


def test_page_is_not_written_into_package(capsys: pytest.CaptureFixture[str]):
    assert main(["report", "english-char", "--data", "python-manual", "--device", "cpu"]) == 2
    said = "english-char is not a folder; choose where to write the page with --out english-char.html"
    assert capsys.readouterr().err == f"cedd: error: {said}\n"


def test_report_without_samples_has_no_sample_command(runs, tmp_path, capsys):
    words = ["report", str(runs[0]), "--out", str(tmp_path / "x.html"), "--sequences", "4", "--samples", "0", "--json"]
    assert main([*words, "--device", "cpu"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["samples"] == []
    assert record["notes"]["samples"] == "no samples were requested (--samples 0)"
    assert "sample" not in record["commands"]
    assert "--samples 0" in record["commands"]["this page"]
    assert "cedd sample" not in (tmp_path / "x.html").read_text("utf-8")


def test_unknown_run_gives_one_line_error(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["report", str(runs[0].with_name("roulete")), "--device", "cpu"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == f"cedd: error: no run or model at {runs[0].with_name('roulete')}; did you mean {runs[0]}?"


def test_run_with_changed_data_is_rejected_without_given_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The end of the changed text may have been part of the training data."""
    run, text = train(tmp_path, "run"), tmp_path / "words.txt"
    text.write_text(text.read_text() * 2)
    capsys.readouterr()
    assert main(["report", str(run), "--device", "cpu"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"cedd: error: the data ({text}) has changed since {run} was trained")
    assert line.endswith(f"cedd report {run} --data FILE")
    assert not report(capsys, str(run), "--data", str(text))["held_out"]


@pytest.mark.slow
def test_page_of_read_only_run_can_be_written_elsewhere(runs, tmp_path, capsys, monkeypatch):
    """It has no evaluate command, since the held-out text cannot be written into the run."""

    def refused(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("cedd.apps.report.commands.atomic_write", refused)
    record = report(capsys, str(runs[0]), "--out", str(tmp_path / "x.html"))
    assert (tmp_path / "x.html").is_file()
    assert "evaluate" not in record["commands"]


def test_noise_rows_mark_masked_and_shuffled_tokens():
    tokenizer, ids = CharTokenizer("abc "), np.array([0, 1, 2, 3] * 8)
    masks = draw_noise(absorb(4), "absorb", tokenizer, ids, (0.1, 0.5, 1.0), 0)
    gone = [{i for i, (_, kind) in enumerate(row) if kind == "masked"} for _, row in masks.rows]
    assert gone[0] < gone[1] < gone[2]  # one path: what is masked stays masked
    assert all(piece == "▒" for _, row in masks.rows for piece, kind in row if kind == "masked")
    for _, row in draw_noise(uniform(4), "uniform", tokenizer, ids, (0.5, 1.0), 0).rows:
        for (piece, kind), was in zip(row, tokenizer.decode(ids), strict=True):
            assert kind == ("kept" if piece == was else "shuffled")


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_short_text_changes_per_row_and_masks_keep_width(seed: int):
    tokenizer = BPETokenizer.train(["one two three four five six seven eight nine ten eleven twelve"] * 4, 300)
    ids = tokenizer.encode("one two three four five six seven eight nine ten eleven twelve")
    times = tuple(k / 10 for k in range(1, 11))
    assert 10 <= len(ids) <= 20
    for process in (absorb(tokenizer.vocab_size), uniform(tokenizer.vocab_size)):
        rows = [row for _, row in draw_noise(process, "", tokenizer, ids, times, seed).rows]
        assert all(one != other for one, other in itertools.pairwise(rows))
        assert process.can_shuffle or len({len("".join(piece for piece, _ in row)) for row in rows}) == 1


def test_corrections_are_counted_and_marked():
    #          fixed   missed  changed  broken
    original, given, now = "abcd ef", "xbyz ef", "abyq ex"
    assert count_letters(CorrectedText(original, given, now)) == (3, 1, 1, 4, 1)
    marked = correction_spans(CorrectedText(original, given, now))
    assert marked == (
        '<span class="fixed">a</span>b<span class="missed">y</span><span class="changed">q</span> e'
        '<span class="broken">x</span>'
    )


def test_text_is_escaped():
    assert spans([("<b>", "kept"), ("&", "")]) == '<span class="kept">&lt;b&gt;</span>&amp;'


def test_charts_omit_non_finite_values_and_keep_names_apart():
    chart = line_chart(
        [Curve("loss", [(0, 1.0), (1, math.inf), (2, 2.0)])], "step", "x", [Level("a", 1.5), Level("b", 1.5)]
    )
    assert "inf" not in chart
    assert "nan" not in chart
    heights = [float(y) for y in re.findall(r'<text class="name" x="635" y="([\d.]+)"', chart)]
    assert len(heights) == 2
    assert abs(heights[0] - heights[1]) >= 13
    assert "nothing to draw" in line_chart([Curve("x", [(0, math.nan)])], "step", "x")


@pytest.mark.parametrize("length", [3, 19, 30, 80])
def test_names_of_curves_are_not_clipped(length: int):
    name = "runs/" + "x" * (length - 5) if length > 5 else "abc"
    chart = line_chart([Curve(name, [(0, 1.0), (1, 2.0)])], "step", "bits")
    [(x, shown, whole)] = re.findall(r'<text class="label[^>]* x="(\d+)"[^>]*>([^<]+)<title>([^<]+)</title>', chart)
    assert int(x) + 9 * len(shown) <= 760
    assert whole == name
    assert shown == name or (len(name) > 30 and name.endswith(shown[1:]))


def test_commands_are_not_wrapped_inside_options():
    block = command_block("cedd evaluate a-run --max-sequences 3 -n 2 'well-read <b>'")
    assert re.findall(r'<span class="option">([^<]+)</span>', block) == ["--max-sequences", "-n"]
    assert html.unescape(re.sub("<[^>]+>", "", block)) == "cedd evaluate a-run --max-sequences 3 -n 2 'well-read <b>'"
    assert ".option { white-space: nowrap; }" in whole_page("", "")


def test_noisy_text_stays_on_one_line():
    tokenizer = CharTokenizer("a\n\t\x1b")
    rows = draw_noise(uniform(4), "uniform", tokenizer, np.array([0, 1, 2, 3] * 8), (0.9,), 0).rows
    shown = "".join(piece for piece, _ in rows[0][1])
    assert set(shown) == set("a↵⇥\\x1b")
    assert ".noise .text { white-space: pre; }" in whole_page("", "")


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.31, 2.39), (0, 1200), (-3e-4, 5e-4)])
def test_ticks_are_round_and_few(low: float, high: float):
    found = ticks(low, high)
    assert 3 <= len(found) <= 8
    assert all(low <= value <= high for value in found)
    assert all(len(f"{value:.12g}".lstrip("-0.").rstrip("0").replace(".", "").split("e")[0]) <= 3 for value in found)


def test_running_mean_starts_without_bias():
    assert [value for _, value in smoothed([(i, 2.0) for i in range(50)])] == pytest.approx([2.0] * 50)


def test_prose_lines_are_found():
    text = ">>> x[3] = 5\n" * 5 + "Return the number of items that were found in it\n" + "{'a': 1, 'b': 2, 'c': 333}\n"
    assert prose_lines(text, 1, 72) == ["Return the number of items that were found in it"]
    assert prose_lines("", 1, 72) == [""]
