"""The sampling commands: their output, and one-line errors for invalid input."""

import contextlib
import json
import math
import sys
from pathlib import Path

import pytest

from cedd.cli import main
from cedd.cli.genppl import samples_of
from cedd.evaluation.generative import JudgedText
from cedd.tasks import trajectory


def test_sample_prints_texts(run, capsys):
    words = ["sample", run, "-n", "2", "--prompt", "The cat", "--steps", "6", "--seed", "1", "--device", "cpu"]
    assert main(words) == 0
    first, second = capsys.readouterr().out.rstrip("\n").split(f"\n{'=' * 72}\n")
    assert first.startswith("The cat")
    assert second.startswith("The cat")
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == [first, second]


def test_sample_can_be_watched(absorb, capsys, tmp_path):
    page, picture = tmp_path / "x.html", tmp_path / "x.gif"
    words = ["sample", absorb, "--watch", "--sampler", "first-hitting", "--seed", "1", "--length", "12"]
    assert main([*words, "--html", str(page), "--gif", str(picture), "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.strip("\n")) >= 12
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("more", "seen"),
    [
        (["sample", "RUN", "-n", "3", "--batch", "2", "--steps", "4"], True),
        (["sample", "RUN", "-n", "3", "--batch", "2", "--steps", "4", "--html", "PAGE"], True),
        (["sample", "ABSORB", "--sampler", "first-hitting"], True),
        (["infill", "RUN", "a ____ cat"], True),
        pytest.param(
            ["infill", "RUN", "a ____ cat sat on a ____{40} mat" * 2, "-n", "3", "--batch", "2", "--steps", "4"],
            True,
            marks=pytest.mark.slow,
        ),
        (["sample", "RUN", "--steps", "4", "--json"], False),
        (["sample", "RUN", "--steps", "4", "--watch"], False),
    ],
)
def test_progress_bar_advances_while_sampling(more, seen, run, absorb, tmp_path, monkeypatch, capsys):
    """On a terminal; here the bar is replaced by one that records its updates."""
    told = []

    @contextlib.contextmanager
    def bar(name, visible):
        yield lambda done, planned: told.append((done, planned))

    places = {"RUN": run, "ABSORB": absorb, "PAGE": str(tmp_path / "x.html")}
    words = [*(places.get(word, word) for word in more), "--seed", "1", "--device", "cpu"]
    monkeypatch.setattr("cedd.cli.sampling.progress_bar", bar)
    assert main(words) == 0
    assert not told  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any output as a terminal
    assert main(words) == 0
    assert bool(told) == seen
    if seen:
        done = [100 * share / planned for share, planned in told]
        assert done == sorted(done)
        assert done[0] == 0
        assert 95 < done[-1] <= 100  # first-hitting ends when the last token is there, shortly before 0
        assert len(set(done)) > 3
    assert "PAGE" not in more or (tmp_path / "x.html").is_file()


def test_html_page_shows_given_characters_unchanged(run, capfdbinary, tmp_path):
    page = tmp_path / "x.html"
    for words in (["infill", run, "é{ ____☃\udcff"], ["sample", run, "--prompt", "é{ ☃", "--steps", "8"]):
        assert main([*words, "--html", str(page), "--gif", str(tmp_path / "x.gif"), "--device", "cpu"]) == 0
        text = page.read_text("utf-8")
        data = json.loads(text.split('id="data">')[1].split("</script>")[0])
        first = [data["words"][word] for word in data["first"]]
        assert "".join(first).startswith("é{ ")
        assert first[7 if words[0] == "infill" else 3] == "☃"


def test_infill_keeps_given_text(run, capsys):
    words = ["infill", run, "a ____{3} cat ____.", "--n", "2", "--steps", "5", "--json", "--device", "cpu"]
    assert main(words) == 0
    for text in json.loads(capsys.readouterr().out)["texts"]:
        assert text[:2] + text[5:10] + text[14:] == "a  cat ."


def test_long_text_is_filled_and_replayed_completely(run, capsys, tmp_path):
    page, text = tmp_path / "x.html", "a ____ cat sat on the mat. " * 3 + "____{40}"
    words = ["infill", run, text, "--n", "2", "--steps", "5", "--seed", "1", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert all(one[2:6] != "____" and one[6:29] == " cat sat on the mat. a " and len(one) == 121 for one in texts)
    assert main([*words, "--html", str(page)]) == 0
    assert capsys.readouterr().out == "\n".join(texts) + "\n"
    data = json.loads(page.read_text("utf-8").split('id="data">')[1].split("</script>")[0])
    shown = list(data["first"])
    for step in data["steps"]:
        for place, word in step:
            shown[place] = word
    assert "".join(data["words"][word] for word in shown) == texts[0]


@pytest.mark.parametrize(("lines", "status"), [(1002, 2), (100, 0)])
def test_gif_with_too_many_lines_is_rejected_up_front(run, capsys, tmp_path, monkeypatch, lines, status):
    """Judged by the lines of the given text; nothing is printed or written."""
    if not status:  # a picture of 1,000 lines takes seconds
        monkeypatch.setattr(trajectory, "MOST_LINES", lines)
    text, picture = "\n" * (lines - 1) + "____{3}", tmp_path / "x.gif"
    words = ["infill", run, text, "--steps", "2", "--temperature", "0", "--gif", str(picture), "--device", "cpu"]
    assert main(words) == status
    said = capsys.readouterr()
    if status:
        assert (said.out, picture.exists()) == ("", False)
        assert said.err.endswith("the text has 1,002 lines; a picture shows at most 1,000\n")
        assert said.err.count("\n") == 1
    else:
        assert said.out.startswith("\n" * (lines - 1))
        assert picture.read_bytes().startswith(b"GIF89a")


def test_given_characters_are_preserved(run, capfdbinary):
    """Including unknown ones and invalid UTF-8, which arrives on the command line as lone surrogates."""
    for words in (
        ["infill", run, "Ünï {☃} \udcff____."],
        ["sample", run, "--prompt", "Ünï {☃} \udcff", "--steps", "8"],
    ):
        assert main([*words, "--device", "cpu"]) == 0
        assert capfdbinary.readouterr().out.startswith("Ünï {☃} ".encode() + b"\xff")


def test_correct_reports_its_changes(run, capsys):
    assert main(["correct", run, "teh cat ü", "--t", "0.6", "--json", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    text = list(result["original"])
    for change in result["changes"]:
        assert text[change["position"]] == change["before"]
        text[change["position"]] = change["after"]
        assert 0 <= change["confidence"] <= 1
    assert "".join(text) == result["text"]
    assert result["text"].endswith("ü")
    assert main(["correct", run, "teh cat", "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.rstrip("\n")) == 7


def test_samples_of_packaged_model_are_not_saved_in_package(run):
    assert samples_of(run) == Path(run) / "samples.jsonl"
    assert samples_of("english") == Path("english-samples.jsonl")
    with pytest.raises(ValueError, match="no run or model at englisch"):
        samples_of("englisch")


def test_genppl_saves_samples_and_judges_them_again(run, capsys, tmp_path, monkeypatch):
    class Judge:
        precision = "float32"

        def __init__(self, name, device, batch, gguf_file):
            self.name = name

        def judge(self, texts):
            return [JudgedText(2.0 * len(text), len(text)) for text in texts]

    monkeypatch.setattr("cedd.evaluation.generative.HubJudge", Judge)
    out = tmp_path / "s.jsonl"
    words = ["--judge", "j", "--json", "--device", "cpu"]
    assert main(["genppl", run, "--n", "3", "--steps", "4", "--out", str(out), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["samples"] == 3
    assert report["corpus_perplexity"]["value"] == pytest.approx(7.389, abs=1e-3)
    assert report["made_by"]["steps"] == 4
    assert main(["genppl", "--samples", str(out), *words]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main(["genppl", "--samples", str(out), "--judge", "j", "--device", "cpu"]) == 0
    assert "the paper's" in capsys.readouterr().out
    monkeypatch.setattr(Judge, "judge", lambda self, texts: [JudgedText(math.inf, len(text)) for text in texts])
    assert main(["genppl", "--samples", str(out), *words]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out, parse_constant=pytest.fail)["corpus_perplexity"] == dict.fromkeys(
        ("value", "low", "high")
    )
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "RUN", "--prompt", "a" * 50], "the prompt has 50 tokens"),
        (["sample", "RUN", "--steps", "0"], "steps must be at least 1"),
        (["sample", "RUN", "-n", "300000000"], "cannot draw more than 16,777,216 texts in one call (got 300,000,000"),
        (["sample", "RUN", "--steps", "few"], "few"),
        (["sample", "RUN", "--sampler", "first-hitting"], "use --sampler analytic"),
        (["sample", "RUN", "--architecture", "Mine"], "--architecture must be package:Class of your own network (got"),
        (["sample", "RUN", "--corrector", "1"], "corrector belongs to flow matching"),
        (["sample", "RUN", "--html", "/nowhere/x.html"], "folder not found: /nowhere"),
        (["sample", "RUN", "--gif", "x.txt"], "x.txt must end in .gif"),
        (["infill", "RUN", "a ____", "--html", "x.gif"], "x.gif must end in .html or .htm"),
        (["sample", "/no/such/run"], "no run or model at"),
        (["sample", "RUN", "--device", "tpu"], "invalid device: 'tpu'"),
        (["genppl", "--samples", "/no/samples.jsonl"], "file not found:"),
        (["infill", "RUN", "a cat"], "no blank"),
        (["infill", "RUN", "a ____{1000001}"], "the text has 1,000,001 tokens in blanks; at most 1,000,000 are filled"),
        (["infill", "RUN", "a ____{" + "9" * 5000 + "}"], "a blank is too wide: at most 1,000,000 tokens are filled"),
        (["infill", "RUN", "a ____{9999}", "--watch"], "show at most 4,096 tokens; the text has 10,001"),
        (["correct", "ABSORB", "teh"], "only masks (absorb)"),
        (["correct", "RUN", "teh", "--threshold", "3"], "threshold"),
        (["genppl"], "give either one MODEL"),
        (["genppl", "RUN"], "pip install 'cedd[hub]'"),
    ],
)
def test_invalid_input_gives_one_line_error(words, message, run, absorb, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    named = [{"RUN": run, "ABSORB": absorb}.get(word, word) for word in words]
    assert main(named if "--device" in words else [*named, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
