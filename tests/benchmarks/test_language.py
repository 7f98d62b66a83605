"""benchmarks/language.py on a tiny corpus: its cells, its results file, its judges, its tables and its page."""

import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cedd
from cedd.bounds.order_weights import WeightFile
from cedd.data.packing import evenly_spaced
from cedd.data.tokenizers import ByteTokenizer
from cedd.storage import json_sha256
from cedd.training.config import from_json
from tests.benchmarks.scripts import BENCHMARKS, definitions, run

BENCHMARK = BENCHMARKS / "language.py"
PAGE = BENCHMARK.parents[1] / "docs" / "results" / "language.md"
FILES = ("wikitext2.test.raw.txt", "wikitext103.test.txt", "ptb.test.txt", "lm1b.heldout-00000-of-00050.txt")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "run")


@pytest.fixture(scope="module")
def benchmark():
    return definitions(
        "cells", "language_cells", "language_text", "language_measure", "language_tables", "language_seeds", "language"
    )


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
    "speed_batches": (1, 2),
    "device": "cpu",
}


@pytest.fixture(scope="module")
def arguments(benchmark, tmp_path_factory):
    work = tmp_path_factory.mktemp("language")
    places = {"data": write_data(work / "data"), "cache": work / "cache", "out": work / "runs"}
    return benchmark.Arguments(**places, results=work / "results" / "language.json", **TINY)


CELLS = ("ar", "cedd-star/absorb", "dfm/kappa-t2", "cedd-star/absorb/4")


@pytest.fixture(scope="module")
def done(benchmark, arguments):
    """The results of four cells, each trained in this process as by a worker."""
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


@pytest.mark.slow
def test_cell_is_trained_measured_and_recorded(benchmark, arguments, done):
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
    assert str(arguments.data) not in json.dumps(record)  # rows measured on another machine count as done
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
    texts = benchmark.Texts(arguments)
    _, protocol = benchmark.choose_sequences(texts.held_out(16)["books"], 4, texts.tokenizer)
    covered = {"data": protocol["protocol_sha256"], "sequences": 3, "bound": "importance", "orders": 2}
    assert weighted["protocol_sha256"] == json_sha256(covered)
    exact = saved["cells"]["ar"]["final"]["rows"][""]["texts"]["books"]["importance"]
    assert exact["less_tight"] == pytest.approx(0.0, abs=1e-6)
    ways = saved["cells"]["dfm/kappa-t2"]["final"]["rows"]
    assert ways.keys() == {"", "corrector"}
    assert ways[""]["texts"]["ptb"]["tight"] != ways["corrector"]["texts"]["ptb"]["tight"]
    assert saved["cells"]["ar"]["final"]["rows"][""]["samples"].keys() == {"16"}  # one token at a time


@pytest.mark.slow
def test_block_cell_has_exact_likelihood_and_speed(benchmark, arguments, done):
    record = done.content["cells"]["cedd-star/absorb/4"]
    config, final = from_json(benchmark.TrainConfig, record["config"]), record["final"]
    assert (config.block, config.model.time_input, config.batch.complementary) == (4, "none", True)
    (row,) = final["rows"].values()
    assert row["samples"].keys() == {"16"}
    with np.load(arguments.extras("cedd-star/absorb/4")) as arrays:
        model = cedd.load(arguments.out / "cedd-star-absorb-4")
        blocks, _ = benchmark.choose_sequences(benchmark.Texts(arguments).test_sets(16)["ptb"], 4, model.tokenizer)
        exact = cedd.exact_likelihood(model.model, model.process, blocks, range(16), method=model.method)
        nats = row["texts"]["ptb"]["exact"]["nats_per_token"]
        assert nats == pytest.approx(float(exact.mean()) / 16, rel=1e-5)
        assert arrays["exact/ptb"] == pytest.approx((exact / 16).numpy(), rel=1e-5)
    assert final["speed"].keys() == {"1", "2"}
    assert final["speed"]["2"]["tokens_per_second"] > 0
    made = benchmark.tables(done.content, arguments)
    assert "| cedd-star/absorb/4, exact |" in made["blocks-bounds"]
    assert "\n| cedd-star/absorb/4 | " in made["blocks-samples"]
    assert "\n| cedd-star/absorb/4 | " in made["blocks-speed"]
    assert "not yet" not in made["blocks-speed"]


def test_orders_are_weighed_where_an_interrupted_run_stopped(benchmark, tmp_path, monkeypatch):
    calls, most = [0], [12]

    def network(x, sigma):
        calls[0] += 1
        if calls[0] > most[0]:
            raise KeyboardInterrupt
        return torch.nn.functional.one_hot(x, 257).double().cumsum(1)[..., :256] + sigma[:, None, None]

    monkeypatch.setattr("cedd.evaluation.perplexity.WeightFile", partial(WeightFile, every=0.0))
    monkeypatch.setattr("cedd.bounds.importance.tokens_at_once", lambda device: 20)
    tokenizer = ByteTokenizer()
    model = cedd.LanguageModel.from_network(network, cedd.absorb(tokenizer.vocab_size), "cedd", tokenizer, 5)
    texts = {"books": (torch.randint(97, 99, (4, 5)), {})}
    hooks = benchmark.LanguageHooks(None, arguments=benchmark.Arguments(orders=8, order_blocks=2), texts=texts)
    precision = SimpleNamespace(autocast=nullcontext)

    def weighted(out):
        trainer = SimpleNamespace(
            config=SimpleNamespace(out=out, length=5), train_step=SimpleNamespace(precision=precision)
        )
        return hooks.weighted(trainer, model.model, "books", SimpleNamespace(per_sequence=torch.zeros(4)))

    monkeypatch.setattr(benchmark.LanguageHooks, "folder", lambda self, trainer, model_: model.folder)
    with pytest.raises(KeyboardInterrupt):
        weighted(tmp_path)
    calls[0] = 0
    record, values = weighted(tmp_path)
    assert calls[0] == 10  # two of four batches of five steps were saved
    (tmp_path / "whole").mkdir()
    most[0] = 40
    again, whole = weighted(tmp_path / "whole")
    assert values.tolist() == whole.tolist()
    assert record["by_orders"] == again["by_orders"]


@pytest.mark.slow
def test_available_judges_fill_their_columns(benchmark, arguments, done, capsys, tmp_path):
    content = json.loads(json.dumps(done.content))
    nowhere = replace(arguments, out=tmp_path)
    assert list(benchmark.judge_rows(nowhere, content)) == []
    assert capsys.readouterr().err == f"the judge ar is missing for 4 cells: train it in {tmp_path}\n"
    with pytest.raises(ValueError, match=r"judge not found: .*none\.gguf"):
        list(benchmark.judge_rows(replace(nowhere, judge={"smollm2": str(tmp_path / "none.gguf")}), content))
    assert content == done.content

    readings = list(benchmark.judge_rows(arguments, content))  # the results are saved after each of them
    assert set(readings) == set(CELLS)
    assert readings.count("dfm/kappa-t2") == 4  # two ways, two numbers of steps
    sampled = content["cells"]["dfm/kappa-t2"]["final"]["rows"]["corrector"]["samples"]["3"]
    found = sampled["judges"]["ar"]
    assert found["mean"]["low"] <= found["mean"]["value"] <= found["mean"]["high"]
    weights = (arguments.out / "ar" / "model.safetensors").read_bytes()
    assert found["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert list(benchmark.judge_rows(arguments, content)) == []  # they have scored everything
    texts = ["books", "wikipedia"]
    assert list(benchmark.judge_texts(nowhere, content)) == []
    assert list(benchmark.judge_texts(arguments, content)) == texts
    assert list(benchmark.judge_texts(arguments, content)) == []
    real = content["held_out"]["16"]["books"]
    assert real["judges"]["ar"]["weights_sha256"] == found["weights_sha256"]
    assert (real["samples"], 0 < real["token_entropy"] < np.log(16)) == (2, True)  # as many tokens as were sampled
    shown = benchmark.tables(content, arguments)["generative"]
    assert f"{found['mean']['value']:.1f} [" in shown
    assert f"| held-out books | {real['token_entropy']:.2f} | {real['judges']['ar']['mean']['value']:.1f} [" in shown
    other = replace(arguments, tokenizer="char")
    content["cells"]["ar"]["final"]["rows"][""]["samples"]["16"]["judges"] = {}
    with pytest.raises(ValueError, match="made from a text"):
        list(benchmark.judge_rows(other, content))


@pytest.mark.slow
def test_own_judge_gives_exact_likelihood(benchmark, arguments, done):
    """For texts of any length: the sum of -log p of all tokens but the first."""
    judge = benchmark.OwnJudge(arguments.out / "ar", "cpu", 2)
    texts = ["the cat", "a", "the cat sat on a mat and more than it reads"]
    alone = [judge.judge([text])[0] for text in texts]
    together = judge.judge(texts)
    assert [one.tokens for one in together] == [6, 0, 15]
    assert [one.nats for one in together] == pytest.approx([one.nats for one in alone], rel=1e-5)
    assert together[0].nats / 6 == pytest.approx(np.log(256), rel=0.1)  # hardly trained


@pytest.mark.slow
def test_tables_page_and_plot_are_written(benchmark, arguments, done, capsys, monkeypatch, tmp_path):
    """Rows are paired block by block. A row that is worse by 0.5 in every block counts as worse; a row that is worse by
    0.04 too, except on 1BW and PTB, where chance explains as much."""
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
    assert int.from_bytes(image[16:20]) < 1.2 * int.from_bytes(image[20:24])  # a single panel
    assert all(table in text for table in printed.split("\n\n")[:3])
    (line,) = (line for line in text.splitlines() if line.startswith("| cedd-star − cedd "))
    assert line == "| cedd-star − cedd | -0.5000 ± 0.0000, 7 of 7 | not yet | not yet |"
    (close,) = (line for line in text.splitlines() if line.startswith("| cedd − sedds "))
    assert close == "| cedd − sedds | -0.0400 ± 0.0000, 5 of 7 | not yet | not yet |"
    (line,) = (line for line in printed.splitlines() if line.startswith("| cedd-star/absorb −"))
    assert line.endswith("| 7 of 7 | 5 of 5 |")
    assert "| sedds − sedd, absorb | not yet |" in printed
    assert "| bayes-star − cedd-star, absorb | not yet |" in printed
    assert "| cedd-star − ceddt, absorb@1024 | not yet |" in printed
    assert "| dfm/kappa-t2, corrector |" in printed
    assert "| D3PM@1024 (as the paper quotes it) | 93.5 |" in printed
    with pytest.raises(ValueError, match="has no place for a table"):
        benchmark.write_page(here.results, {"bounds": ""})
    # --table alone reads the arrays next to the file that it names, not those of the default --results
    monkeypatch.setattr(sys, "argv", ["language.py", "--table", str(here.results)])
    assert benchmark.main(benchmark.Language) == 0
    assert line in capsys.readouterr().out


@pytest.mark.slow
def test_paper_figure_is_that_of_same_sampler(benchmark, arguments, done):
    """The recipe does not matter, but with a corrector it is a different figure."""
    content = {**done.content, "cells": {"dfm/kappa-t+paper": done.content["cells"]["dfm/kappa-t2"]}}
    lines = benchmark.tables(content, arguments)["paper-bounds"].splitlines()
    for title, paper in (("dfm/kappa-t+paper", "71.9"), ("dfm/kappa-t+paper, corrector", "114.4")):
        (line,) = (line for line in lines if line.startswith(f"| {title} |"))
        assert f"| {paper} |" in line


def test_page_tables_match_results(benchmark):
    """docs/results/language.md is what the command writes into it from the committed results."""
    results = BENCHMARK.parent / "results" / "language.json"
    content = json.loads(results.read_text()) if results.is_file() else {"format": 1, "cells": {}}
    made = benchmark.tables(content, benchmark.Arguments(results=results))
    text = PAGE.read_text()
    for name in ("methods", "others", "differences"):
        assert f"<!-- {name} -->\n\n{made[name]}\n\n<!-- end of {name} -->" in text, name


@pytest.mark.parametrize(
    "cells",
    [
        ("cedd-star/absorb/4",),
        ("cedd-star/absorb/16", "cedd-star/absorb/16@1024"),
        ("cedd-star/absorb/1", "cedd-star/absorb/128", "bayes-star/roulette/16"),
    ],
)
def test_block_page_shows_available_rows(benchmark, cells, tmp_path):
    """The command adds any available rows, with the rows without blocks of the same lengths."""
    content = json.loads((BENCHMARK.parent / "results" / "language.json").read_text())
    full = content["cells"]["cedd-star/absorb"]["final"]["rows"][""]["samples"]
    full["128"]["token_entropy"] = 9.0  # one network call per token, as in blocks
    for cell in cells:
        record = json.loads(json.dumps(content["cells"]["ar@1024" if "@" in cell else "ar"]))
        (row,) = record["final"]["rows"].values()
        if benchmark.read_cell(cell).block <= 8:
            for bounds in row["texts"].values():
                bounds["exact"] = bounds["tight"] | {"nats_per_token": 0.0, "stderr_of_blocks": None}
        record["final"]["speed"] = {"1": {"tokens_per_second": 123.4, "gibibytes": 5.67}}
        record["final"]["training_gibibytes"] = 8.9
        content["cells"][cell] = record
    results, page = tmp_path / "language.json", tmp_path / "blocks.md"
    results.write_text(json.dumps(content))
    places = ("blocks-bounds", "blocks-samples", "blocks-speed")
    page.write_text("\n\n".join(f"<!-- {name} -->\n\n<!-- end of {name} -->" for name in places))
    assert run(BENCHMARK, "--table", str(results), "--page", str(page))[0] == 0
    text = page.read_text()
    assert text.count("123.4 | 5.67 |") == len(cells)
    for cell in cells:
        assert text.count(f"\n| {cell} | ") == 3
        assert (f"| {cell}, exact | 1.00 | " in text) == cell.endswith(("/1", "/4"))
    long = any("@" in cell for cell in cells)
    assert ("| ar@1024 |" in text, "| held-out wikipedia@1024 |" in text) == (long, long)
    assert ("| cedd-star/absorb | 9.00 |" in text) == any("@" not in cell for cell in cells)
    assert "not yet" not in text


def test_rows_can_be_added_to_committed_results(benchmark):
    """The recipe in their protocol equals the current one, with its current names."""
    results = BENCHMARK.parent / "results" / "language.json"
    benchmark_now = benchmark.Language(benchmark.Arguments(results=results))
    protocol = benchmark_now.as_now(json.loads(results.read_text())["protocol"])
    assert protocol["recipe"] == json.loads(json.dumps(benchmark.common_settings(benchmark_now.arguments)))


def row_of(tight, importance=None, orders=4):
    """A row of one text, by the bounds of its blocks; `importance` is of evenly spaced ones."""
    found = {"tight": {"nats_per_token": float(np.mean(tight)), "stderr_of_blocks": 0.1, "blocks": len(tight)}}
    if importance is not None:
        of_blocks = float(np.mean(tight[evenly_spaced(len(tight), len(importance))]))
        less = float(np.mean(importance)) - of_blocks
        found["importance"] = {"nats_per_token": float(np.mean(importance)), "blocks": len(importance)}
        found["importance"] |= {"orders": orders, "tight_of_blocks": of_blocks, "less_tight": less}
        found["importance"] |= {"less_tight_stderr": 0.01, "stderr_of_blocks": 0.1}
        found["importance"]["by_orders"] = {"1": float(np.mean(importance)) + 0.05, str(orders): np.mean(importance)}
    return {"final": {"rows": {"": {"texts": {"books": found}}}}}


def results_of(benchmark, path, seed, cells, orders=4):
    """The rows of a results file, from the bounds of the blocks of each cell."""
    arguments = benchmark.Arguments(results=path, seed=seed)
    content = {"cells": {}, "protocol": {"test_sets": [], "corpus": {"books": None}, "recipe": {}}}
    path.with_suffix("").mkdir()
    for cell, (tight, *weighted) in cells.items():
        config = benchmark.to_json(benchmark.configuration(arguments, cell))
        content["cells"][cell] = row_of(tight, *weighted, orders=orders) | {"config": config, "seed": seed}
        arrays = dict(zip(("bounds/books", "importance/books"), (tight, *weighted), strict=False))
        np.savez(arguments.extras(cell), **arrays)
    return benchmark.Rows(content, arguments)


def test_both_bounds_are_shown_with_orders_and_blocks(benchmark):
    cell = row_of(np.array([4.6, 4.5]), np.array([4.0]))
    content = {"cells": {"cedd/absorb": cell}, "protocol": {"test_sets": [], "corpus": {"books": None}}}
    shown = benchmark.weighted_bounds(benchmark.Rows(content, None), ["cedd/absorb"]).splitlines()
    assert shown[2] == "| cedd/absorb | 4 | 1 | 4.6000, 4.0000 (-0.6000 ± 0.0100) |"


def test_ranking_over_seeds_includes_training_variance(benchmark, tmp_path):
    """Only the second seed has the importance-weighted bound, and only the first one has ar."""
    flat = np.zeros(4)
    first = {"cedd-star/absorb": (flat + 4.0,), "cedd/absorb": (flat + 4.1,), "ar": (flat + 3.5,)}
    second = {"cedd-star/absorb": (flat + 4.1, flat[:2] + 3.9), "cedd/absorb": (flat + 4.18, flat[:2] + 3.99)}
    files = [results_of(benchmark, tmp_path / f"{n}.json", n, cells) for n, cells in enumerate((first, second))]
    contents = [{"cells": rows.cells, "protocol": dict(rows.protocol)} for rows in files]
    language, paths = benchmark.Language(files[0].arguments), [rows.arguments.results for rows in files]
    by_seed, order, verdicts, distance = language.over_seeds(contents, paths).split("\n\n")
    assert "| cedd-star/absorb | tight | books | 4.0000 | 4.1000 | 4.0500 | 0.0707 |" in by_seed
    assert "| cedd-star/absorb | importance | books | – | 3.9000 | 3.9000 | – |" in by_seed
    # The residuals are ±0.005: the standard deviation is 0.01, and t = 12.706 with one degree of freedom.
    assert "| cedd-star − cedd, absorb | tight | books | 2 | -0.0900 [-0.2171, +0.0371] | undecided |" in order
    assert "| cedd-star − cedd, absorb | importance | books | 1 | -0.0900 [-0.2697, +0.0897] | undecided |" in order
    assert "- cedd-star < cedd on absorb, books, by tight: undecided (cedd-star − cedd)" in verdicts
    # On the same blocks: 0.6 above ar, of which 64 orders remove 0.2.
    parts = "0.6000 ± 0.0000 | 0.2000 ± 0.0000 (33%) | 0.4000 ± 0.0000 (67%) | 0.0500"
    assert f"| cedd-star/absorb | books | 4 | 1 | {parts} |" in distance


@pytest.mark.parametrize(("tight", "verdict"), [((4.0, 4.1, 4.2), "holds"), ((4.2, 4.1, 4.0), "contradicted")])
def test_ranking_with_equal_differences_over_seeds_is_decided(benchmark, tmp_path, tight, verdict):
    names = ("cedd-star/absorb", "cedd/absorb", "sedds/absorb")
    files = [
        results_of(
            benchmark,
            tmp_path / f"{seed}.json",
            seed,
            {name: (np.arange(4) + level + 0.5 * seed,) for name, level in zip(names, tight, strict=True)},
        )
        for seed in range(2)
    ]
    assert f"- cedd-star < cedd < sedds on absorb, books, by tight: {verdict}" in benchmark.over_seeds(files)


def test_rows_with_different_orders_are_not_compared(benchmark, tmp_path):
    cells = {"cedd/absorb": (np.ones(4), np.ones(2) / 2)}
    files = [results_of(benchmark, tmp_path / f"{n}.json", n, cells, orders=n + 4) for n in range(2)]
    with pytest.raises(ValueError, match="4 orders of 2 blocks for cedd/absorb, but of 5 orders of 2 blocks"):
        benchmark.over_seeds(files)
    (rows, _), asked = files, {"orders": 4, "order_blocks": 2, "order_texts": ("books",)}
    for change in ({}, {"order_blocks": 3}, {"orders": 8}, {"order_texts": ("wikipedia",)}):
        language = benchmark.Language(replace(rows.arguments, **(asked | change)))
        if change:
            with pytest.raises(ValueError, match=rf"another protocol \({next(iter(change))} of cedd/absorb differ\)"):
                language.check_rows({"cells": rows.cells})
        else:
            language.check_rows({"cells": rows.cells})
    benchmark.Language(rows.arguments).check_rows({"cells": rows.cells})  # without --orders


@pytest.mark.slow
def test_different_protocol_is_rejected(benchmark, arguments, done):
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


def test_perplexity_interval_includes_choice_of_sequences(benchmark):
    """Also where the value for these very sequences is exact."""
    nats = math.log(100)
    record = {"nats_per_token": nats, "low": nats, "high": nats, "stderr_of_blocks": 0.01, "blocks": 10_000}
    assert benchmark._perplexity(record) == "100.0 ± 1.96"


def test_huge_perplexity_is_shown_by_its_exponent(benchmark):
    """The score entropy of a nearly untrained network is thousands of nats per token, but finite."""
    estimate = {"nats_per_token": 2500.0, "low": 2400.0, "high": 2600.0, "stderr_of_blocks": 50.0, "blocks": 1000}
    assert benchmark._perplexity(estimate) == "e^2,500"
    assert benchmark._perplexity({**estimate, "stderr_of_blocks": 400.0, "nats_per_token": 1.0}) == "2.72"
    assert benchmark._perplexity({**estimate, "nats_per_token": None}) == "∞"
    assert benchmark._j1({"j1": estimate, "tight": {**estimate, "nats_per_token": 0.0}}) == "e^2,500"
    assert benchmark._j1({"tight": {**estimate, "nats_per_token": 0.0}}) == "1.00"


def test_every_cell_of_tables_can_be_configured(benchmark):
    arguments = benchmark.Arguments()
    arguments.check()
    cells = {*benchmark.MAIN, *benchmark.SHARES, *benchmark.LONG_CELLS, *benchmark.BLOCK_CELLS}
    assert set(arguments.only) == cells
    assert set(benchmark.PAPER) <= {*arguments.only, "dfm/kappa-t, corrector"}
    configs = {cell: benchmark.configuration(arguments, cell) for cell in arguments.only}
    tokens = {config.steps * config.batch.size * config.length for config in configs.values()}
    assert tokens == {5000 * 32_768}
    assert configs["cedd-star/roulette-0.35"].process.arguments == {"p_m": 0.35}
    assert configs["sedd/absorb"].batch.highest_time == 1.0
    assert not configs["ar"].batch.complementary
    blocks = {cell: configs[cell].block for cell in benchmark.BLOCK_CELLS}
    assert list(blocks.values()) == [1, 4, 16, 128, 16, 16]
    assert configs["cedd-star/absorb/4"].model.time_input == "none"
    assert configs["bayes-star/roulette/16"].model.time_input == "sigma"
    for wrong in ("cedd-star/absorb/0", "cedd-star/absorb/x", "ar//4", "cedd-star/absorb/4/4"):
        with pytest.raises(ValueError, match=r"a cell is METHOD/PROCESS"):
            benchmark.read_cell(wrong)
    with pytest.raises(ValueError, match="blocks of 3 do not divide a length of 128"):
        replace(arguments, only=("cedd-star/absorb/3",)).check()
    paper = benchmark.configuration(arguments, "sedd/absorb+paper")
    assert (paper.optimizer.matrices, paper.optimizer.rate, paper.model.dropout) == ("adamw", 3e-4, 0.1)
    assert benchmark.file_name("cedd*/absorb@1024+paper") == "cedd-star-absorb@1024+paper"


@pytest.mark.slow
def test_byte_corpus_needs_no_data_folder(benchmark, arguments, done, monkeypatch):
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
def test_benchmark_resumes_after_kill(tmp_path):
    """As a user runs it: killed during the second cell and restarted; the first cell is not trained twice."""
    write_data(tmp_path / "data")
    results = tmp_path / "language.json"
    sizes = {**TINY, "steps": 40, "sampler_steps": "2 3", "speed_batches": "1"}
    options = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", *str(value).split())]
    places = ["--data", "data", "--cache", "cache", "--out", "runs", "--results", str(results)]
    command = [sys.executable, str(BENCHMARK), *options, *places, "--only", "ar", "cedd-star/absorb/4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        for line in process.stdout or ():
            if line.startswith("cedd-star/absorb/4: step"):
                process.send_signal(signal.SIGKILL)
                break
    time.sleep(1)
    saved = json.loads(results.read_text())["cells"]
    assert saved["ar"]["finished"]
    assert not saved["cedd-star/absorb/4"]["finished"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "ar: done before" in done.stdout
    saved = json.loads(results.read_text())["cells"]
    assert saved["cedd-star/absorb/4"]["final"]["rows"][""]["samples"]["16"]["judges"].keys() == {"ar"}
