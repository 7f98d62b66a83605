"""benchmarks/language.py on a tiny corpus: its cells, its results file, its judges, its tables and its page."""

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cedd.bounds.stop import STOPS
from cedd.data.packing import evenly_spaced
from cedd.data.tokenizers import BPETokenizer
from cedd.models.folder import load_folder
from cedd.training.config import from_json, to_json
from cedd.training.step import TrainStep
from tests.benchmarks.scripts import BENCHMARKS, definitions

BENCHMARK = BENCHMARKS / "language.py"
PAGE = BENCHMARK.parents[1] / "docs" / "results" / "language.md"
FILES = ("wikitext2.test.raw.txt", "wikitext103.test.txt", "ptb.test.txt", "lm1b.heldout-00000-of-00050.txt")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "run")


@pytest.fixture(scope="module")
def benchmark():
    return definitions("cells", "language_cells", "language_text", "language_measure", "language_tables", "language")


def write_data(root):
    """A corpus of two files, forty documents each, and the five test sets, a few sentences each."""
    generator = np.random.default_rng(0)

    def text():
        return " ".join(generator.choice(WORDS, 20)) + ".\n"

    for folder in ("corpus", "eval"):
        (root / folder).mkdir(parents=True)
    (root / "corpus" / "books.txt").write_text("\n\n\n".join(text() for _ in range(40)))
    (root / "corpus" / "wikipedia.txt").write_text("\n\n".join(text() for _ in range(40)))
    for name in FILES:
        (root / "eval" / name).write_text(text() * 3)
    rows = "".join(json.dumps({"text": text()}) + "\n" for _ in range(3))
    (root / "eval" / "lambada.test.jsonl").write_text(rows)
    return root


TINY = {
    "tokenizer": "byte",
    "holdout": 0.1,
    "size": "tiny",
    "length": 16,
    "tokens": 64,
    "steps": 4,
    "points": 2,
    "point_blocks": 2,
    "blocks": 4,
    "draws": 2,
    "orders": 2,
    "order_blocks": 3,
    "order_texts": ("books",),
    "sampled_tokens": 32,
    "sampler_steps": (2, 3),
    "device": "cpu",
}


@pytest.fixture(scope="module")
def arguments(benchmark, tmp_path_factory):
    work = tmp_path_factory.mktemp("language")
    places = {"data": write_data(work / "data"), "cache": work / "cache", "out": work / "runs"}
    return benchmark.Arguments(**places, results=work / "results" / "language.json", **TINY)


CELLS = ("ar", "cedd-star/absorb", "dfm/kappa-t2")


@pytest.fixture(scope="module")
def done(benchmark, arguments):
    """The results of three cells, each trained as a worker does it, in this process."""
    finish, held = benchmark.LanguageHooks.finish, []

    def finish_in_turn(self, trainer, model):
        held.append(self.turn.is_mine)
        return finish(self, trainer, model)

    whole = benchmark.Language(replace(arguments, only=CELLS))
    whole.arguments.check()
    results = benchmark.Results(arguments.results, whole)
    whole.prepare(CELLS)
    whole.arguments.out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for cell in CELLS:

            def take(event, cell=cell, **values):
                results.take(cell, json.loads(json.dumps({"event": event, **values}, allow_nan=False)))

            patch.setitem(benchmark.CellHooks.on_end.__globals__, "tell", take)
            patch.setitem(benchmark.CellHooks.before_step.__globals__, "WARM_UP", 1)
            patch.setattr(benchmark.LanguageHooks, "finish", finish_in_turn)
            benchmark.work(benchmark.Language(replace(arguments, only=(cell,))))
    assert held == [True] * len(CELLS)  # the next cell is not trained while this one is measured
    return results


def test_a_cell_is_trained_measured_and_recorded(benchmark, arguments, done):
    assert all(done.is_done(cell, benchmark.Language(arguments)) for cell in CELLS)
    saved = benchmark.read_results(arguments.results, benchmark.Language(arguments))
    record = saved["cells"]["cedd-star/absorb"]
    final = record["final"]
    assert [point["step"] for point in record["curve"]] == [2, 4]
    assert (final["tokens"], record["seed"], record["step"]) == (4 * 64, 0, 4)
    assert final["versions"].keys() >= {"cedd", "torch", "python"}
    assert "cpu" in record["machine"]
    assert record["code"] == benchmark.code() == record["parts"][0]["code"]
    config = from_json(benchmark.TrainConfig, record["config"])
    assert str(arguments.data) not in json.dumps(record)  # rows of another machine count as done here
    fast = benchmark.PRESETS["small-fast"][1]
    assert replace(config.batch, size=fast.batch.size) == fast.batch
    assert config.optimizer.matrix_rate == fast.optimizer.matrix_rate

    (row,) = final["rows"].values()
    assert row["texts"].keys() == {"books", "wikipedia", *benchmark.SETS}
    weighted = row["texts"]["books"].pop("importance")
    assert all(bounds.keys() == {"tight", "j1", "j2"} for bounds in row["texts"].values())
    with np.load(arguments.extras("cedd-star/absorb")) as arrays:
        bounds, samples = arrays["bounds/books"], arrays["samples/3"]
        assert (bounds.dtype, samples.dtype) == (np.float32, np.uint16)
        assert samples.shape == (2, 16)
        nats = row["texts"]["books"]["tight"]["nats_per_token"]
        assert float(bounds.mean()) == pytest.approx(nats, rel=1e-6)
        values, same = arrays["importance/books"], bounds[evenly_spaced(len(bounds), 3)]
        assert weighted["nats_per_token"] == pytest.approx(float(values.mean()), rel=1e-6)
        assert weighted["less_tight"] == pytest.approx(float((values - same).mean()), rel=1e-3)
    assert (weighted["blocks"], weighted["orders"], list(weighted["by_orders"])) == (3, 2, ["1", "2"])
    exact = saved["cells"]["ar"]["final"]["rows"][""]["texts"]["books"]["importance"]
    assert exact["less_tight"] == pytest.approx(0.0, abs=1e-6)
    ways = saved["cells"]["dfm/kappa-t2"]["final"]["rows"]
    assert ways.keys() == {"", "corrector"}
    assert ways[""]["texts"]["ptb"]["tight"] != ways["corrector"]["texts"]["ptb"]["tight"]
    assert saved["cells"]["ar"]["final"]["rows"][""]["samples"].keys() == {"16"}  # a token at a time


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_a_record_says_of_which_code_it_is(benchmark, monkeypatch, tmp_path):
    """The commit, where the package is of a checkout; not that of a checkout in which the package is only installed."""

    def git(*words):
        said = subprocess.run(["git", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return said.stdout.strip()

    package, script = tmp_path / "src" / "cedd" / "__init__.py", tmp_path / "benchmarks" / "cells.py"
    results = tmp_path / "benchmarks" / "results.json"
    for file in (package, script, results):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("# one\n")
    version = {"version": "1.2.3"}
    here = SimpleNamespace(__file__=str(package), __version__="1.2.3")
    monkeypatch.setitem(benchmark.code.__globals__, "cedd", here)
    monkeypatch.setitem(benchmark.code.__globals__, "__file__", str(script))
    assert benchmark.code() == version
    git("init", "-q")
    (tmp_path / "README.md").write_text("a project that uses the package")
    git("add", "README.md")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(*who, "commit", "-qm", "without it")
    assert benchmark.code() == version
    git("add", "src", "benchmarks")
    git(*who, "commit", "-qm", "with it")
    commit = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))
    results.write_text("{}")  # no code
    assert benchmark.code() == {**version, "commit": commit, "changed": False}
    for file in (script, package):
        file.write_text("# two\n")
        assert benchmark.code() == {**version, "commit": commit, "changed": True}
        file.write_text("# one\n")
    monkeypatch.setenv("PATH", "")  # no git
    assert benchmark.code() == version


def test_judges_fill_their_columns_when_they_are_there(benchmark, arguments, done, capsys, tmp_path):
    content = json.loads(json.dumps(done.content))
    nowhere = replace(arguments, out=tmp_path)
    assert list(benchmark.judge_rows(nowhere, content)) == []
    assert capsys.readouterr().err == f"the judge ar is missing for 3 cells: train it in {tmp_path}\n"
    with pytest.raises(ValueError, match=r"judge not found: .*none\.gguf"):
        list(benchmark.judge_rows(replace(nowhere, judge={"smollm2": str(tmp_path / "none.gguf")}), content))
    assert content == done.content

    readings = list(benchmark.judge_rows(arguments, content))  # after each of which the results are saved
    assert set(readings) == set(CELLS)
    assert readings.count("dfm/kappa-t2") == 4  # two ways, two numbers of steps
    sampled = content["cells"]["dfm/kappa-t2"]["final"]["rows"]["corrector"]["samples"]["3"]
    found = sampled["judges"]["ar"]
    assert found["mean"]["low"] <= found["mean"]["value"] <= found["mean"]["high"]
    weights = (arguments.out / "ar" / "model.safetensors").read_bytes()
    assert found["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert list(benchmark.judge_rows(arguments, content)) == []  # they have read all
    texts = ["books", "wikipedia"]
    assert list(benchmark.judge_texts(nowhere, content)) == []
    assert list(benchmark.judge_texts(arguments, content)) == texts
    assert list(benchmark.judge_texts(arguments, content)) == []
    real = content["held_out"]["16"]["books"]
    assert real["judges"]["ar"]["weights_sha256"] == found["weights_sha256"]
    assert (real["samples"], 0 < real["token_entropy"] < np.log(16)) == (2, True)  # as many tokens as were sampled
    shown = benchmark.tables(content, arguments)["generative"]
    assert f"{found['mean']['value']:.1f} [" in shown
    assert f"| held-out books | | {real['token_entropy']:.2f} | {real['judges']['ar']['mean']['value']:.1f} [" in shown
    other = replace(arguments, tokenizer="char")
    content["cells"]["ar"]["final"]["rows"][""]["samples"]["16"]["judges"] = {}
    with pytest.raises(ValueError, match="made from a text"):
        list(benchmark.judge_rows(other, content))


def test_judges_alone_read_what_was_sampled(benchmark, arguments, done, monkeypatch, tmp_path):
    """--only without a cell has no protocol to compare; in other tokens, samples would be other texts."""
    BPETokenizer.train(["the cat sat on a mat"], 260).save(tmp_path)
    judge = benchmark.OwnJudge(arguments.out / "ar", "cpu", 2)
    monkeypatch.setitem(benchmark.judges.__globals__, "HubJudge", lambda *_: judge)
    alone = replace(arguments, only=(), judge={"mine": "a judge"})
    for change, name in (({"tokenizer": str(tmp_path)}, "tokenizer"), ({"length": 32}, "length")):
        content = json.loads(json.dumps(done.content))
        for read in (benchmark.judge_rows, benchmark.judge_texts):
            with pytest.raises(ValueError, match=rf"another protocol \({name} differ\)"):
                list(read(replace(alone, out=arguments.data, **change), content))
        assert content == done.content
    assert set(benchmark.judge_rows(alone, content)) == set(CELLS)


def test_the_own_judge_is_the_exact_likelihood(benchmark, arguments, done):
    """Of texts of any length: the sum of -log p of all tokens but the first."""
    judge = benchmark.OwnJudge(arguments.out / "ar", "cpu", 2)
    texts = ["the cat", "a", "the cat sat on a mat and more than it reads"]
    alone = [judge.judge([text])[0] for text in texts]
    together = judge.judge(texts)
    assert [one.tokens for one in together] == [6, 0, 15]
    assert [one.nats for one in together] == pytest.approx([one.nats for one in alone], rel=1e-5)
    assert together[0].nats / 6 == pytest.approx(np.log(256), rel=0.1)  # hardly trained


def test_a_row_is_of_the_process_that_its_folder_describes(benchmark, arguments, done):
    """A path that has to stop short of t = 0 does so where training text has chosen; the row says where."""
    folder = load_folder(arguments.out / "dfm-kappa-t2")
    final = done.content["cells"]["dfm/kappa-t2"]["final"]
    assert final["method"] == folder.method.config()
    assert final["method"]["dynamics"]["stop"] in STOPS
    texts = benchmark.Texts(arguments)
    blocks, _ = benchmark.choose_sequences(texts.held_out(16)["books"], arguments.blocks, texts.tokenizer)
    again = benchmark.measure(folder, blocks, {}, device="cpu", batch=64, fixed_set=True, draws=2).bounds["tight"]
    found = final["rows"][""]["texts"]["books"]["tight"]["nats_per_token"]
    assert found == pytest.approx(again.nats_per_token, rel=1e-6)
    rows = benchmark.tables(done.content, arguments)["rows"]
    assert f"| dfm/kappa-t2 | lowest_time 0.001, highest_time 1.0, t₀ {folder.method.dynamics.stop} |" in rows


def test_tables_page_and_plot(benchmark, arguments, done, capsys, monkeypatch, tmp_path):
    """Rows are paired block by block. A row that is worse by 0.5 in every block counts as worse; by 0.04 it does too,
    but on 1BW and PTB, where chance does as much."""
    content = json.loads(json.dumps(done.content))
    folder = tmp_path / "copy"
    shutil.copytree(arguments.extras("ar").parent, folder)
    here = replace(arguments, results=tmp_path / "copy.json")
    with np.load(folder / "cedd-star-absorb.npz") as arrays:
        known = dict(arrays)
    for cell, more in (("cedd/absorb", 0.5), ("sedds/absorb", 0.54)):
        content["cells"][cell] = content["cells"]["cedd-star/absorb"]
        worse = {name: array + more if name.startswith("bounds") else array for name, array in known.items()}
        np.savez(here.extras(cell), **worse)
    (tmp_path / "copy.json").write_text(json.dumps(content))
    page, plot = tmp_path / "language.md", tmp_path / "curves.png"
    shutil.copy(PAGE, page)
    shown = benchmark.Language(replace(here, page=page, plot=plot))
    benchmark.show(shown, benchmark.read_results(here.results, shown))
    printed = capsys.readouterr().out
    text = page.read_text()
    image = plot.read_bytes()
    assert image.startswith(b"\x89PNG")
    assert int.from_bytes(image[16:20]) < 1.2 * int.from_bytes(image[20:24])  # one panel: there is no other to draw
    assert all(line in text for line in printed.splitlines())
    assert "## The share of masking" in text
    assert "| cedd-star/absorb less cedd/absorb | -0.5000 ± 0.0000 |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| cedd-star/absorb less"))
    assert line.endswith("| 7 of 7 | 5 of 5 |")
    (close,) = (line for line in text.splitlines() if line.startswith("| cedd/absorb less sedds/absorb | -0.0400"))
    assert close.endswith("| 5 of 7 | 5 of 5 |")
    assert "| sedds less sedd, absorb | not yet |" in text
    assert "| bayes-star less cedd-star, absorb | not yet |" in text
    assert "| cedd-star less ceddt, absorb@1024 | not yet |" in text
    assert "| D3PM@1024 (as the paper quotes it) | 93.5 |" in text
    assert "| dfm/kappa-t2, corrector |" in text
    made = [line.split(" | ") for line in benchmark.tables(content, here)["rows"].splitlines()]
    passes = {row[0]: row[3] for row in made[2:]}
    twice = 2 * float(passes["| cedd-star/absorb"])  # of which every block is in its batch twice
    assert float(passes["| ar"]) == pytest.approx(twice, abs=0.02)
    assert "| ar | complementary False |" in text
    with pytest.raises(ValueError, match="has no place for a table"):
        benchmark.write_page(here.results, {"bounds": ""})
    # --table alone reads the arrays beside the file that it names, not those of the default --results
    monkeypatch.setattr(sys, "argv", ["language.py", "--table", str(here.results)])
    assert benchmark.main(benchmark.Language) == 0
    assert line in capsys.readouterr().out


def test_the_papers_figure_is_that_of_the_same_use(benchmark, arguments, done):
    """Whatever the recipe: with a corrector it is another one."""
    content = {**done.content, "cells": {"dfm/kappa-t+paper": done.content["cells"]["dfm/kappa-t2"]}}
    lines = benchmark.tables(content, arguments)["paper-bounds"].splitlines()
    for title, paper in (("dfm/kappa-t+paper", "71.9"), ("dfm/kappa-t+paper, corrector", "114.4")):
        (line,) = (line for line in lines if line.startswith(f"| {title} |"))
        assert f"| {paper} |" in line


def test_what_cannot_be_written_is_said_before_tables_are_printed(benchmark, done, capsys, monkeypatch, tmp_path):
    table = ["language.py", "--table", str(done.path)]
    for words, said in (
        (["--page", str(tmp_path)], f"{tmp_path} is a folder; name a file in it"),
        (["--page", str(tmp_path / "none.md")], "none.md"),
        (["--plot", str(tmp_path / "none" / "x.png")], f"folder not found: {tmp_path / 'none'} (to write x.png)"),
    ):
        monkeypatch.setattr(sys, "argv", [*table, *words])
        assert benchmark.main(benchmark.Language) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert not printed.out
    assert not (tmp_path / "none").exists()


def test_the_page_has_what_the_results_say(benchmark):
    """docs/results/language.md is what the command writes into it from the committed results."""
    results = BENCHMARK.parent / "results" / "language.json"
    content = json.loads(results.read_text()) if results.is_file() else {"format": 1, "cells": {}}
    made = benchmark.tables(content, benchmark.Arguments(results=results))
    text = PAGE.read_text()
    for name, table in made.items():
        assert f"<!-- {name} -->\n\n{table}\n\n<!-- end of {name} -->" in text, name


def test_another_protocol_is_refused(benchmark, arguments, done):
    before = arguments.results.read_bytes()
    changes = {"recipe, steps": {"steps": 400}, "draws": {"draws": 4}, "corpus, holdout": {"holdout": 0.2}}
    for name, change in changes.items():
        other = benchmark.Language(replace(arguments, **change))
        with pytest.raises(ValueError, match=rf"another protocol \({name} differ\); name another file by --results"):
            benchmark.Results(arguments.results, other)
    other = benchmark.Language(replace(arguments, seed=1))
    with pytest.raises(ValueError, match=r"has results of --seed 0; name another file for --seed 1 by --results"):
        benchmark.Results(arguments.results, other)
    benchmark.Results(arguments.results, benchmark.Language(replace(arguments, seed=1, only=())))  # judges have no seed
    assert arguments.results.read_bytes() == before


def test_a_setting_that_was_added_since_is_no_difference(benchmark, arguments, done, tmp_path):
    """Stored rows without a setting have its default; a recipe with another value is another protocol."""
    here = replace(arguments, results=tmp_path / "language.json")
    for name, same in (("optimizer.eps", True), ("optimizer.loss", False)):
        content = json.loads(json.dumps(done.content))
        del content["protocol"]["recipe"][name]
        here.results.write_text(json.dumps(content))
        with nullcontext() if same else pytest.raises(ValueError, match=r"another protocol \(recipe differ\)"):
            benchmark.Results(here.results, benchmark.Language(here))
        part, _, leaf = name.partition(".")
        del content["cells"]["cedd-star/absorb"]["config"][part][leaf]
        assert "| cedd-star/absorb | none |" in benchmark.tables(content, here)["rows"]


def test_seeds_are_compared_within_one_protocol(benchmark, arguments, done):
    first, second = (json.loads(json.dumps(done.content)) for _ in range(2))
    for record in second["cells"].values():
        record["seed"] = record["config"]["seed"] = 1
    table = benchmark.over_seeds([first, second])
    assert table.startswith("| held-out bound, nats per token | seed 0 | seed 1 | mean |")
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| {cell}" for cell in CELLS]
    second["protocol"] |= {"steps": 400, "draws": 16}
    with pytest.raises(ValueError, match=r"different protocols \(steps, draws differ\)"):
        benchmark.over_seeds([first, second])
    with pytest.raises(ValueError, match="--page has the tables of one results file"):
        replace(arguments, only=CELLS, table=(PAGE, PAGE), page=PAGE).check()


def test_a_file_without_a_part_is_no_results_file(benchmark, arguments, done, capsys, monkeypatch, tmp_path):
    """Whatever is missing of what tables are made of; before anything is trained."""
    path = tmp_path / "language.json"
    final = ("cells", "cedd-star/absorb", "final")
    for part in (
        ("protocol", "recipe"),
        ("protocol", "recipe", "optimizer.ema"),
        ("cells", "ar", "config"),
        ("cells", "ar", "finished"),
        ("cells", "ar", "seconds"),
        (*final, "rows"),
        (*final, "rows", "", "texts"),
        (*final, "rows", "", "texts", "ptb"),
        (*final, "rows", "", "texts", "ptb", "tight", "low"),
    ):
        content = json.loads(json.dumps(done.content))
        within = content
        for name in part[:-1]:
            within = within[name]
        del within[part[-1]]
        path.write_text(json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["language.py", "--table", str(path)])
        assert benchmark.main(benchmark.Language) == 2, part
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"language: error: {path} is no results file of this benchmark, or a damaged one"
        with pytest.raises(ValueError, match="or a damaged one"):
            benchmark.Results(path, benchmark.Language(replace(arguments, results=path)))


def test_a_row_without_its_measurements_is_not_done(benchmark, arguments, done, tmp_path):
    content = json.loads(json.dumps(done.content))
    del content["cells"]["ar"]["final"]
    here = benchmark.Language(replace(arguments, results=tmp_path / "language.json"))
    here.arguments.results.write_text(json.dumps(content))
    results = benchmark.Results(here.arguments.results, here)
    assert [results.is_done(cell, here) for cell in CELLS] == [False, True, True]


def test_a_damaged_file_of_arrays_leaves_out_its_row(benchmark, arguments, done, capsys, tmp_path):
    """It is said once; the other rows are judged, compared and shown."""
    here = replace(arguments, results=tmp_path / "copy.json")
    shutil.copytree(arguments.extras("ar").parent, tmp_path / "copy")
    content = json.loads(json.dumps(done.content))
    for cell in ("cedd/absorb", "sedds/absorb", "sedd/absorb"):
        content["cells"][cell] = content["cells"]["cedd-star/absorb"]
        shutil.copy(here.extras("cedd-star/absorb"), here.extras(cell))
    whole = here.extras("ar").read_bytes()
    with np.load(here.extras("sedds/absorb")) as arrays:
        short = {name: array[:-1] for name, array in arrays.items()}
    here.extras("ar").write_bytes(whole[:700])
    here.extras("cedd/absorb").unlink()
    np.savez(here.extras("sedds/absorb"), **short)
    lines = benchmark.tables(content, here)["order"].splitlines()
    assert [line.count("| – |") > 0 for line in lines[2:5]] == [True, True, True]
    assert capsys.readouterr().err.splitlines() == [
        f"left out: there is no file {here.extras('cedd/absorb')}",
        f"left out: {here.extras('sedds/absorb')} is damaged, or that of another row",
    ]
    judged = set(benchmark.judge_rows(here, content))
    assert judged >= {"cedd-star/absorb", "dfm/kappa-t2"}
    assert "ar" not in judged
    assert capsys.readouterr().err == f"left out: {here.extras('ar')} is damaged, or that of another row\n"
    generative = benchmark.tables(content, here)["generative"]
    assert "| ar | 16 |" in generative
    for damage in (b"", b"no zip", whole[:-40]):
        here.extras("ar").write_bytes(damage)
        assert benchmark.stored(here.extras("ar"), "bounds/ptb", 4) is None, damage


def test_two_processes_keep_each_others_rows(benchmark, arguments, done, tmp_path):
    """Each writes the cells that have changed in it, and takes the others from the file: no row is lost."""
    path = tmp_path / "language.json"
    shutil.copy(arguments.results, path)
    whole = benchmark.Language(replace(arguments, results=path))
    first, second = benchmark.Results(path, whole), benchmark.Results(path, whole)
    judgement = {name: {"value": 9.0, "low": None, "high": None} for name in ("mean", "corpus")}
    row = first.content["cells"]["cedd-star/absorb"]
    first.take("cedd/absorb", {"event": "begin", "config": row["config"], "step": 0, "machine": "here"})
    first.take("cedd/absorb", {"event": "final", **row["final"]})
    second.content["cells"]["ar"]["final"]["rows"][""]["samples"]["16"]["judges"]["mine"] = judgement
    for results, judge in ((first, "ar"), (second, "mine")):
        text = {"samples": 2, "token_entropy": 1.0, "judges": {judge: judgement}}
        results.content["held_out"] = {"16": {"books": text}}
    second.save()
    first.save()
    for results in (first, second, benchmark.Results(path, whole)):
        cells = results.content["cells"]
        assert cells.keys() == {*CELLS, "cedd/absorb"}
        assert cells["cedd/absorb"]["final"] == row["final"]
        assert "mine" in cells["ar"]["final"]["rows"][""]["samples"]["16"]["judges"]
    assert results.content["held_out"]["16"]["books"]["judges"].keys() == {"ar", "mine"}


def test_a_bad_command_line_is_one_line(benchmark, capsys, monkeypatch):
    for words, said in (
        (["--judge", "smollm2"], "--judge expects pairs of a name and a value (got 'smollm2')"),
        (["--onyl", "ar"], "unexpected argument '--onyl'; did you mean --only?"),
    ):
        monkeypatch.setattr(sys, "argv", ["language.py", *words])
        assert benchmark.main(benchmark.Language) == 2
        assert capsys.readouterr().err == f"language: error: {said} (see language.py --help)\n"


def test_bad_input_is_one_line(benchmark, arguments, tmp_path, monkeypatch):
    def prepare(**changes):
        given = benchmark.Language(replace(arguments, **{"only": ("ar", "cedd/absorb"), **changes}))
        given.arguments.check()
        given.prepare(given.arguments.only)

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            prepare(**changes)

    for cell in ("cedd", "cedd/kappa-t", "dfm/absorb", "ar/absorb", "cedd/absorb@x", "cedd/absorb@0", "cedd/absorb+"):
        refused("a cell is METHOD/PROCESS of", only=(cell,))
    refused("fewer than a batch of", tokens=16 * 4096)
    refused(r"a multiple of 16 \(ar\), twice it at least \(got 100", tokens=100)
    refused(r"a multiple of 64 \(ar@64\), twice it at least \(got 64", only=("ar@64",))
    refused("the judge ar is the cell of that name", judge={"ar": "a-judge.gguf"})
    refused("there is no file .* to train on", corpus=(tmp_path / "none.txt",))
    refused("unknown tokenizer", tokenizer="gpt3")
    refused("made from a text, and none is given: use byte, gpt2, gpt2-char or the folder", tokenizer="char")
    refused("--draws must be at least 1", draws=0)
    refused("--length must be at least 1", length=0)
    for share in (0.0, 1.0, float("nan")):
        refused("--holdout is a share of the documents between 0 and 1", holdout=share)
    refused("give either --minutes, .* or --budget", minutes=1.0, budget=60.0)
    refused(r"judge not found: .*none\.gguf", judge={"smollm2": str(tmp_path / "none.gguf")})
    one = tmp_path / "one.txt"
    one.write_text("just one document, of which nothing can be held out. " * 20)
    refused(r"of .*one\.txt, which has 1 document, a share of 0.1 holds out none", corpus=(one,))
    shutil.copytree(arguments.data, tmp_path / "data")
    (tmp_path / "data" / "eval" / "ptb.test.txt").unlink()
    refused(r"ptb \(test\) is not under .*: there is no eval/ptb\.test\.txt in it$", data=tmp_path / "data")
    monkeypatch.delenv("CEDD_DATA", raising=False)
    refused("name the folder of corpus/, eval/ and gpt2-bpe/", data=None)


def test_an_interrupt_is_one_line(benchmark, arguments, capsys, monkeypatch):
    """Workers have saved by then."""

    def interrupted(benchmark):
        raise KeyboardInterrupt

    monkeypatch.setitem(benchmark.main.__globals__, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["language.py", "--only", "ar"])
    assert benchmark.main(benchmark.Language) == 130
    assert capsys.readouterr().err.splitlines() == ["language: stopped; the same command goes on"]


def test_sigterm_lets_workers_save(benchmark, capsys, monkeypatch):
    """As Ctrl-C does; `timeout` sends it to a process and then to its group, and the second one ends nothing."""
    taken = []

    def terminated(benchmark):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            taken.append("saved")

    monkeypatch.setitem(benchmark.main.__globals__, "run", terminated)
    monkeypatch.setattr(sys, "argv", ["language.py", "--only", "ar"])
    before = signal.signal(signal.SIGTERM, lambda *_: taken.append("ignored"))
    try:
        assert benchmark.main(benchmark.Language) == 143
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert taken == ["saved", "ignored"]  # which is the handler from before
    assert capsys.readouterr().err == "language: stopped; the same command goes on\n"


def test_results_that_cannot_be_written_are_refused_before_training(benchmark, arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark.Workers, "start", lambda self, cell: pytest.fail("begun"))
    (tmp_path / "language").write_text("no folder")
    for name, folder in (("language/x.json", "language"), ("language.json", "language"), (".", ".")):
        given = replace(arguments, only=("cedd/absorb",), results=tmp_path / name, out=tmp_path / "runs")
        with pytest.raises(ValueError, match=rf"no folder .*{folder} to write|is a folder; name a file"):
            benchmark.run(benchmark.Language(given))


def test_a_disk_that_is_full_for_a_while_loses_nothing(benchmark, arguments, done, capsys, monkeypatch, tmp_path):
    """What could not be saved is after the next event, and in the end; where that fails, it is an error."""
    path, cell = tmp_path / "language.json", "cedd-star/absorb"
    language = benchmark.Language(replace(arguments, only=(cell,), results=path, out=tmp_path / "runs"))
    record = done.content["cells"][cell]
    begin = {"event": "begin", "config": record["config"], "step": 0, "machine": "here"}
    events = [begin, *({"event": "point", **point} for point in record["curve"])]
    write, fails = benchmark.write_json, []

    def write_or_fail(path, content):
        if fails and fails.pop(0):
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    def start(self, cell):
        lines = "".join(json.dumps(event) + "\n" for event in events)
        self.follow(cell, SimpleNamespace(stdout=io.StringIO(lines)))
        self.told[cell, "end"] = 0.0
        self.running[cell] = None

    monkeypatch.setitem(benchmark.Results.save.__globals__, "write_json", write_or_fail)
    monkeypatch.setattr(benchmark.Workers, "start", start)
    monkeypatch.setattr(
        benchmark.Workers, "ended", lambda self: dict([(self.running.popitem()[0], 0)] if self.running else [])
    )
    for fails[:], lines in (([0, 1, 0], 1), ([0, 0, 1], 1), ([1, 1, 1], 3)):
        path.unlink(missing_ok=True)
        assert benchmark.run(language) == 0
        assert json.loads(path.read_text())["cells"][cell]["curve"] == record["curve"]
        assert capsys.readouterr().err.count("not saved yet: [Errno 28] No space left on device") == lines
    path.unlink()
    fails[:] = [1] * 5
    with pytest.raises(OSError, match="No space left"):
        benchmark.run(language)

    def interrupted(self):
        raise KeyboardInterrupt

    # Ctrl-C, too, leaves nothing unsaved, or says so, and remains what the command ends in
    monkeypatch.setattr(benchmark.Workers, "ended", interrupted)
    monkeypatch.setattr(benchmark.Workers, "stop", lambda self: None)
    for fails[:], kept in (([0, 0, 1], record["curve"]), ([0, 0, 1, 1], record["curve"][:1])):
        capsys.readouterr()
        path.unlink(missing_ok=True)
        with pytest.raises(KeyboardInterrupt):
            benchmark.run(language)
        assert json.loads(path.read_text())["cells"][cell]["curve"] == kept
        assert ("\nnot saved: [Errno 28]" in capsys.readouterr().err) == (kept != record["curve"])


def test_judgements_that_could_not_be_saved_are_in_the_end(benchmark, arguments, done, monkeypatch, tmp_path):
    """Also those of held-out text, which are of no cell."""
    path = tmp_path / "language.json"
    shutil.copy(arguments.results, path)
    language = benchmark.Language(replace(arguments, only=CELLS, results=path))
    text = {"samples": 2, "token_entropy": 1.0, "judges": {}}

    def judged_once(results):
        results.content["held_out"] = {"16": {"books": text}}  # and a disk that was full

    monkeypatch.setattr(language, "complete", judged_once)
    assert benchmark.run(language) == 0
    assert json.loads(path.read_text())["held_out"] == {"16": {"books": text}}


def test_a_cell_that_fails_says_why(benchmark, arguments, capsys, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit('first\\nthe reason')")
    monkeypatch.setattr(benchmark.Language, "script", script)
    given = replace(arguments, only=("cedd/absorb",), results=tmp_path / "fresh.json", out=tmp_path / "runs")
    assert benchmark.run(benchmark.Language(given)) == 1
    console = tmp_path / "runs" / "cedd-absorb.console.txt"
    assert f"cedd/absorb: failed; {console} ends in: the reason\n" in capsys.readouterr().out
    assert console.read_text() == "first\nthe reason\n"


def test_a_cell_that_is_killed_says_by_which_signal(benchmark, arguments, capsys, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        f"import os\nprint('step 1', file=open(2, 'w'), flush=True)\nos.kill(os.getpid(), {signal.SIGKILL})"
    )
    monkeypatch.setattr(benchmark.Language, "script", script)
    monkeypatch.setattr(benchmark.Workers, "have_had_their_turn", True)
    cells = ("cedd/absorb", "sedd/absorb")
    given = replace(arguments, only=cells, results=tmp_path / "fresh.json", out=tmp_path / "runs")
    assert benchmark.run(benchmark.Language(given)) == 1  # and not their number: 2 is bad input
    said = capsys.readouterr().out
    for cell in cells:
        console = tmp_path / "runs" / f"{benchmark.file_name(cell)}.console.txt"
        assert f"{cell}: ended by SIGKILL; {console} ends in: step 1\n" in said


def test_what_was_trained_and_not_measured_is_measured(benchmark, arguments, monkeypatch, tmp_path):
    """A kill while a row is measured costs the measuring, not the training."""
    cell, finish = "cedd/absorb", benchmark.LanguageHooks.finish
    given = replace(arguments, only=(cell,), results=tmp_path / "fresh.json", out=tmp_path / "runs")
    language = benchmark.Language(given)
    results, folder = benchmark.Results(given.results, language), language.configuration(cell).out

    def killed(self, trainer, model):
        self.turn.give_back()  # as the end of a process does
        raise KeyboardInterrupt

    def trained(self, batch, stop=False):
        pytest.fail("trained again")

    def take(event, **values):
        results.take(cell, json.loads(json.dumps({"event": event, **values}, allow_nan=False)))

    monkeypatch.setitem(benchmark.CellHooks.on_end.__globals__, "tell", take)
    monkeypatch.setitem(benchmark.CellHooks.before_step.__globals__, "WARM_UP", 1)
    monkeypatch.setattr(benchmark.LanguageHooks, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        benchmark.work(language)
    before, raw = benchmark.file_sha256(folder / "model.safetensors"), results.content["cells"][cell]["raw"]
    assert not results.is_done(cell, language)
    monkeypatch.setattr(benchmark.LanguageHooks, "finish", finish)
    monkeypatch.setattr(TrainStep, "step", trained)
    benchmark.work(language)
    record = results.content["cells"][cell]
    assert results.is_done(cell, language)
    assert benchmark.file_sha256(folder / "model.safetensors") == before
    assert [point["step"] for point in record["curve"]] == [2, 4]
    assert record["raw"] == raw
    assert record["loss"] > 0
    assert record["seconds_per_step"] > 0
    assert not any((folder / "checkpoints").iterdir())  # gigabytes that nobody needs any more


def test_nothing_is_begun_that_would_not_be_done_in_time(benchmark, arguments, capsys, monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(benchmark.Workers, "start", lambda self, cell: begun.append(cell))
    cells = ("cedd/absorb", "cedd/uniform")
    fresh = replace(arguments, only=cells, results=tmp_path / "fresh.json", out=tmp_path)

    def run(budget, timed=None):
        given = benchmark.Language(replace(fresh, budget=budget))
        if timed is not None:
            config = to_json(given.configuration("cedd-star/absorb"))
            record = {"finished": True, "seconds": timed, "curve": [], "step": 4, "config": config, "seed": 0}
            content = {"format": 1, "cells": {"cedd-star/absorb": record}, "protocol": given.protocol}
            fresh.results.write_text(json.dumps(content))
        benchmark.run(given)
        took, begun[:] = tuple(begun), []
        return took, capsys.readouterr().out

    took, said = run(budget=400)  # of the 420 s that a first cell is expected to take
    assert took == ()
    assert "no time for cedd/absorb, cedd/uniform: the same command goes on" in said
    assert run(budget=440)[0] == cells  # the stand-in for a worker is done at once, each time
    assert run(budget=440, timed=400)[0] == ()  # 400 s, and 90 to start
    assert run(budget=500, timed=400)[0] == cells


def test_a_cell_that_has_its_turn_is_expected_from_then_on(benchmark, arguments, monkeypatch, tmp_path):
    """The next one is compiled meanwhile, so it must be known early whether there is time for it."""
    whole = benchmark.Language(replace(arguments, only=(), results=tmp_path / "fresh.json", start_seconds=90.0))
    workers = benchmark.Workers(whole, benchmark.Results(whole.arguments.results, whole), None)
    now = [1000.0]
    monkeypatch.setattr(benchmark.time, "time", lambda: now[0])
    assert workers.expected_end("cedd/absorb") == 1420
    workers.running["ar"] = None
    assert workers.expected_end("cedd/absorb") == 1840
    now[0] = 1050.0
    workers.told["ar", "turn"] = 1050.0  # compiled: 330 s are left
    assert workers.expected_end("cedd/absorb") == 1050 + 330 + 420
    now[0] = 1250.0
    assert workers.expected_end("cedd/absorb") == 1380 + 420
    now[0] = 1500.0  # longer than expected: any moment
    assert workers.expected_end("cedd/absorb") == 1920
    timed = [{"finished": True, "seconds": seconds} for seconds in (400.0, 410.0, 900.0)]
    workers.results.content["cells"] = dict(enumerate(timed))
    workers.told["ar", "turn"] = 1500.0  # 410 s, as most have
    assert workers.expected_end("cedd/absorb") == 1500 + 410 + 500


def test_samples_are_judged_as_soon_as_a_cell_has_ended(benchmark, arguments, capsys, monkeypatch, tmp_path):
    """An interrupted command loses no scores, and a judge that fails stops no cell."""
    fresh = replace(arguments, only=("ar", "cedd/absorb"), results=tmp_path / "fresh.json", out=tmp_path)
    language, calls = benchmark.Language(fresh), []

    def start(self, cell):
        self.running[cell] = None
        self.told[cell, "turn"] = self.told[cell, "end"] = 0.0

    def ended(self):
        return dict([(self.running.popitem()[0], 0)] if self.running else [])

    def complete(results):
        calls.append(results)
        if len(calls) < 3:
            raise RuntimeError("no memory")

    monkeypatch.setattr(benchmark.Workers, "start", start)
    monkeypatch.setattr(benchmark.Workers, "ended", ended)
    monkeypatch.setattr(language, "complete", complete)
    assert benchmark.run(language) == 0
    assert len(calls) == 3  # after each cell, and in the end
    assert capsys.readouterr().err.count("put off until the cells are done: no memory") == 2


def test_a_perplexity_beyond_what_a_float_can_hold_is_shown_by_its_exponent(benchmark):
    """The score entropy of a nearly untrained network is thousands of nats per token, but finite."""
    estimate = {"nats_per_token": 2500.0, "low": 2400.0, "high": 2600.0}
    assert benchmark._perplexity(estimate) == "e^2,500"
    assert benchmark._perplexity({**estimate, "low": 1.0, "nats_per_token": 1.0}) == "2.72"
    assert benchmark._perplexity({**estimate, "nats_per_token": None}) == "∞"
    assert benchmark._both({"j1": estimate, "j2": {**estimate, "nats_per_token": 0.0}}) == "e^2,500 / 1.00"


def test_every_cell_of_the_tables_can_be_configured(benchmark):
    arguments = benchmark.Arguments()
    arguments.check()
    assert set(arguments.only) == {*benchmark.MAIN, *benchmark.SHARES, *benchmark.LONG_CELLS}
    assert set(benchmark.PAPER) <= {*arguments.only, "dfm/kappa-t, corrector"}
    configs = {cell: benchmark.configuration(arguments, cell) for cell in arguments.only}
    tokens = {config.steps * config.batch.size * config.length for config in configs.values()}
    assert tokens == {5000 * 32_768}
    assert configs["cedd-star/roulette-0.35"].process.arguments == {"p_m": 0.35}
    assert configs["sedd/absorb"].batch.highest_time == 1.0
    assert not configs["ar"].batch.complementary
    paper = benchmark.configuration(arguments, "sedd/absorb+paper")
    assert (paper.optimizer.matrices, paper.optimizer.rate, paper.model.dropout) == ("adamw", 3e-4, 0.1)
    assert benchmark.file_name("cedd*/absorb@1024+paper") == "cedd-star-absorb@1024+paper"


def test_a_corpus_in_bytes_needs_no_data_folder(benchmark, arguments, done, monkeypatch):
    """Without test sets, the held-out documents are measured; the tables have no columns for the others."""
    monkeypatch.delenv("CEDD_DATA", raising=False)
    corpus = tuple(sorted((arguments.data / "corpus").iterdir()))
    alone = benchmark.Language(replace(arguments, data=None, corpus=corpus))
    alone.prepare(CELLS)
    assert alone.protocol["test_sets"] == {}
    assert alone.texts.held_out(16).keys() == {"books", "wikipedia"}
    assert alone.texts.test_sets(16) == {}
    content = {**done.content, "protocol": alone.protocol}
    shown = "\n".join(benchmark.tables(content, arguments).values())
    assert "held-out books" in shown
    assert "LAMBADA" not in shown
    with pytest.raises(ValueError, match="by --data, or set CEDD_DATA"):
        benchmark.Texts(replace(alone.arguments, tokenizer="gpt2")).tokenizer  # noqa: B018


@pytest.mark.slow
def test_the_benchmark_resumes_after_a_kill(tmp_path):
    """As a user runs it: killed within the second cell, started again, done; the first is not trained twice."""
    write_data(tmp_path / "data")
    results = tmp_path / "language.json"
    sizes = {**TINY, "steps": 40, "sampler_steps": "2 3"}
    options = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]
    places = ["--data", "data", "--cache", "cache", "--out", "runs", "--results", str(results)]
    command = [sys.executable, str(BENCHMARK), *options, *places, "--only", "ar", "sedds/absorb"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for line in process.stdout or ():
            if line.startswith("sedds/absorb: step"):
                process.send_signal(signal.SIGKILL)
                break
    time.sleep(1)
    saved = json.loads(results.read_text())["cells"]
    assert saved["ar"]["finished"]
    assert not saved["sedds/absorb"]["finished"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "ar: done before" in done.stdout
    saved = json.loads(results.read_text())["cells"]
    assert saved["sedds/absorb"]["final"]["rows"][""]["samples"]["2"]["judges"].keys() == {"ar"}
