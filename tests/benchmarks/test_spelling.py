"""benchmarks/spelling.py: its cells, its results file and its tables."""

import json
import re
import statistics
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from cedd.training.config import differing_settings, to_json
from tests.benchmarks.scripts import BENCHMARKS, definitions, run

BENCHMARK = BENCHMARKS / "spelling.py"


@pytest.fixture(scope="module")
def benchmark():
    return definitions("cells", "spelling_recipes", "spelling_books", "spelling_tables", "spelling")


def test_books_are_encoded_per_character_in_gpt2_tokens(benchmark):
    """A character of two tokens becomes two placeholder characters, the same in every book."""

    class TwoTokens:
        def encode(self, text):
            return {"“": [447, 250], "”": [447, 251], "\r": [201]}[text]

    known = {"a": 64, " ": 220, "\r": 201, "\n": 198}
    texts = [benchmark.spelt(text, TwoTokens(), known) for text in ("“a a”", "”a\r\n")]
    assert [[known[c] for c in text] for text in texts] == [[447, 250, 64, 220, 64, 447, 251], [447, 251, 64, 201, 198]]
    assert "\r" not in texts[1]  # it would be read as a line end


def books(value):
    share = {"share": value, "low": value - 0.01, "high": value + 0.01}
    return {name: {"all": share, "masked": share, "shuffled": share} for name in ("pap", "cap", "wap")}


def test_characters_are_renumbered_for_smaller_vocabulary(benchmark):
    characters = {"a": 64, "b": 65, "A": 32, "\u00e4": 64}
    assert benchmark.renumbered(characters, 3) == {"a": 1, "b": 2, "A": 0, "\u00e4": 1}
    with pytest.raises(ValueError, match="--vocabulary must be at least 3"):
        benchmark.renumbered(characters, 2)
    small, plain = (benchmark.configuration(benchmark.Arguments(vocabulary=v), "cedd/uniform") for v in (512, None))
    assert set(differing_settings(small, plain)) == {"text.tokenizer"}  # so that they are not confused


@pytest.mark.slow
def test_results_survive_interruption_and_include_paper_figures(benchmark, tmp_path):
    arguments = benchmark.Arguments(out=tmp_path / "runs", results=tmp_path / "results.json")
    cell = "cedd-star/roulette"
    config = benchmark.configuration(arguments, cell)
    results = benchmark.Results(arguments.results, benchmark.Spelling(arguments))

    def take(event, **values):
        results.take(cell, {"event": event, **values})

    begin = {"config": to_json(config), "machine": "here", "time": 0.0}
    take("begin", step=0, **begin)
    for step in (5000, 10_000):
        take("point", step=step, books=books(0.8), seconds=1.0)
    take("end", step=7000, finished=False, loss=1.0, seconds=60.0, seconds_per_step=0.009)
    assert not results.is_done(cell, benchmark.Spelling(arguments))

    results = benchmark.Results(
        arguments.results, benchmark.Spelling(arguments)
    )  # another process resumes at step 7000
    take("begin", step=7000, **begin)
    assert [point["step"] for point in results.content["cells"][cell]["curve"]] == [5000]
    take("point", step=25_000, books=books(0.9123), seconds=1.0)
    take("raw", step=25_000, books=books(0.5))
    take("end", step=25_000, finished=True, loss=1.0, seconds=60.0, seconds_per_step=0.009)
    assert results.is_done(cell, benchmark.Spelling(arguments))
    assert str(tmp_path) not in arguments.results.read_text()  # so that runs in another folder also count:
    assert results.is_done(cell, benchmark.Spelling(replace(arguments, out=tmp_path / "elsewhere")))
    for other in ({"seed": 1}, {"blocks": 8}, {"steps": 30_000}, {"steps": 20_000}, {"schedule": "cosine"}):
        assert not results.is_done(cell, benchmark.Spelling(replace(arguments, **other))), other
    results.content["cells"][cell]["curve"].append({"step": 20_000})  # which 25,000 steps at a constant rate pass
    assert results.is_done(cell, benchmark.Spelling(replace(arguments, steps=20_000)))
    saved = benchmark.read_results(arguments.results, benchmark.Spelling(arguments))
    assert [part["step"] for part in saved["cells"][cell]["parts"]] == [7000, 25_000]
    made = benchmark.tables(saved)
    line = "| cedd-star | roulette | 25,000 | 91.2 ± 1.0 | 89.7 | 91.2 ± 1.0 | 90.3 | 91.2, 91.2 | 91.2 | 9.0 |"
    assert line in made["measured"]

    other = benchmark.configuration(replace(arguments, dropout=0.2, matrices="muon"), cell)
    saved["cells"][cell]["config"] = to_json(other)
    assert "| cedd-star | roulette; dropout 0.2; matrices muon | 25,000 |" in benchmark.tables(saved)["measured"]

    two = replace(arguments, form="crlf", vocabulary=512, seed=1)
    saved["cells"][cell]["config"] = to_json(benchmark.configuration(two, cell))
    assert "| cedd-star | roulette; vocabulary 512; form crlf; seed 1 | 25,000 |" in benchmark.tables(saved)["measured"]

    def row(name, finished=True, **given):
        config = to_json(benchmark.configuration(replace(arguments, **given), name))
        record = {**saved["cells"][cell], "config": config, "finished": finished}
        return benchmark.tables({"cells": {name: record}})["measured"]

    short = {**saved["cells"][cell], "curve": [{"step": 10_000, "books": books(0.8)}]}
    both = benchmark.tables({"cells": {cell: saved["cells"][cell], f"{cell}+half": short}})["measured"]
    assert "10,000" not in both  # shorter than the paper's runs
    assert "| 10,000 |" in benchmark.tables({"cells": {cell: short}})["measured"]

    half = f"{cell}+half"  # next to the same figures of the paper
    assert "| cedd-star | roulette; rate 0.00015 | 25,000 | 91.2 ± 1.0 | 89.7 |" in row(half)
    part = "| cedd-star | roulette; rate 0.00015 | 25,000 of 50,000 | 91.2 ± 1.0 | 89.7 |"
    assert part in row(half, finished=False, steps=50_000)
    longer = {"step": 50_000, "books": saved["cells"][cell]["curve"][-1]["books"]}
    saved["cells"][cell]["curve"].append(longer)
    assert "| cedd-star | roulette | 50,000 | 91.2 ± 1.0 | 90.8 |" in row(f"{cell}+50000")
    saved["cells"][cell]["curve"].remove(longer)
    falling = row(cell, finished=False, schedule="cosine", steps=50_000)  # not as far as the paper's run
    assert "| cedd-star | roulette; schedule cosine | 25,000 of 50,000 | 91.2 ± 1.0 |  |" in falling

    ours = benchmark.configuration(arguments, benchmark.OURS)
    saved["cells"] = {benchmark.OURS: {**saved["cells"][cell], "config": to_json(ours)}}
    table = benchmark.tables(saved)["measured"]
    assert re.search(r"^\| bayes-star \| roulette, t ≤ 0.45; .*matrices muon", table, re.MULTILINE)

    benchmark.show(benchmark.Spelling(replace(arguments, plot=tmp_path / "curves.png")), saved)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for damaged in ("[]", '{"format": 1, "cells": []}', '{"format": 1, "cells": {"a": {"curve": [{}]}}}', '{"cells'):
        arguments.results.write_text(damaged)
        with pytest.raises(ValueError, match=r"results\.json is no results file of this benchmark, or a damaged one"):
            benchmark.read_results(arguments.results, benchmark.Spelling(arguments))
    with pytest.raises(ValueError, match=r"--plot makes a \.png"):
        replace(arguments, plot=tmp_path / "curves.gif").check()


def test_results_of_several_seeds_are_compared(benchmark, capsys, monkeypatch, tmp_path):
    """Three runs of two cells: means, and Student's interval of the difference, t = 4.3027 for two degrees."""
    paths = [tmp_path / f"{seed}.json" for seed in range(3)]

    def write(seed, shares, other=None, **given):
        cells = {}
        for cell, share in zip(("cedd/roulette", "cedd-star/roulette"), shares, strict=True):
            given["seed"] = seed if other is None or cell == "cedd/roulette" else other
            config = to_json(benchmark.configuration(benchmark.Arguments(**given), cell))
            curve = [{"step": 5000, "books": books(0.5)}, {"step": 9000, "books": books(share)}]
            cells[cell] = {"config": config, "curve": curve, "seed": given["seed"], "finished": False, "step": 9000}
        cells[f"sedd/uniform+{'half' if seed else 'twice'}"] = cells["cedd/roulette"]  # not in all files
        paths[seed].write_text(json.dumps({"format": 1, "cells": cells}))

    def table(*names):
        monkeypatch.setattr(sys, "argv", ["spelling.py", "--table", *map(str, names)])
        code = benchmark.main(benchmark.Spelling)
        return code, capsys.readouterr()

    for seed, shares in enumerate([(0.80, 0.81), (0.82, 0.85), (0.84, 0.86)]):
        write(seed, shares)
    code, said = table(*paths)
    assert code == 0, said.err
    wanted = 4.30265 * statistics.stdev([1, 3, 2]) / 3**0.5
    between = f"2.00 ({2 - wanted:.2f} to {2 + wanted:.2f})"
    assert said.out.splitlines() == [
        "| PAP / CAP, % after 9,000 steps | seed 0 | seed 1 | seed 2 | mean |",
        "|---|--:|--:|--:|--:|",
        "| cedd/roulette | 80.00 / 80.00 | 82.00 / 82.00 | 84.00 / 84.00 | 82.00 / 82.00 |",
        "| cedd-star/roulette | 81.00 / 81.00 | 85.00 / 85.00 | 86.00 / 86.00 | 84.00 / 84.00 |",
        f"| cedd-star/roulette − cedd/roulette | 1.00 / 1.00 | 3.00 / 3.00 | 2.00 / 2.00 | {between} / {between} |",
    ]

    def refused(*names):
        code, said = table(*names)
        assert code == 2
        return said.err.removeprefix("spelling: error: ").removesuffix("\n")

    own = "each file must have a seed of its own, in all of its cells;"
    assert refused(paths[0], paths[0]) == f"{own} sedd/uniform+twice has [0, 0]"
    write(1, (0.82, 0.85), other=7)
    assert refused(*paths) == f"{own} cedd-star/roulette has [0, 7, 2]"
    write(1, (0.82, 0.85), rate=9e-4)
    assert refused(*paths) == "cedd/roulette was trained with other settings in one of these files than in another"
    paths[0].write_text('{"format": 1, "cells": {}}')
    assert refused(*paths) == "these results files share no cell that was tested at the same step"
    assert refused() == "--table needs a results file"
    # before anything is trained, or read
    for page, why in ((tmp_path / "none.md", "file not found"), (paths[1], "has no place for a table")):
        monkeypatch.setattr(sys, "argv", ["spelling.py", "--results", str(tmp_path / "new.json"), "--page", str(page)])
        assert benchmark.main(benchmark.Spelling) == 2
        assert why in capsys.readouterr().err
    with pytest.raises(ValueError, match="--minutes and --budget must not be negative"):
        benchmark.Arguments(minutes=-1.0).check()
    with pytest.raises(ValueError, match="--plot draws the curves of one results file"):
        benchmark.Arguments(table=tuple(paths), plot=tmp_path / "curves.png").check()


def test_page_summary_matches_results(benchmark):
    """docs/results/spelling.md is what the command writes into it from the committed results."""
    content = json.loads((BENCHMARK.parent / "results" / "spelling.json").read_text())
    text = (BENCHMARK.parents[1] / "docs" / "results" / "spelling.md").read_text()
    made = benchmark.tables(content)
    assert set(made) == {"summary", "measured"}
    assert f"<!-- summary -->\n\n{made['summary']}\n\n<!-- end of summary -->" in text


def test_published_cells_count_as_done(benchmark):
    """All cells of the command without --only count as done by the published records."""
    path = BENCHMARK.parent / "results" / "spelling.json"
    arguments = benchmark.Arguments(results=path)
    published = benchmark.Spelling(arguments)
    results = benchmark.Results(path, published)
    missing = [cell for cell in arguments.only if not results.is_done(cell, published)]
    assert missing == []
    assert not results.is_done("sedd/roulette+quarter", published)


def test_shipped_books_must_have_crlf_line_ends(benchmark, tmp_path):
    book = tmp_path / "book.txt"
    for content, message in ((b"one\ntwo\n", "has no line ends of two"), (b"\xff\r\n", r"book\.txt is not UTF-8")):
        book.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            benchmark.as_shipped(book)
    book.write_bytes("\ufeffone\r\ntwo\r\n".encode())
    assert benchmark.as_shipped(book) == "one\r\ntwo\r\n"


def test_recipe_overrides_command_line(benchmark):
    given = benchmark.Arguments(rate=1e-5, batch=8)
    plain, ours = (benchmark.configuration(given, f"cedd/uniform{plus}") for plus in ("", "+muon"))
    assert (plain.optimizer.matrices, plain.optimizer.rate) == ("adamw", 1e-5)
    assert (ours.optimizer.matrices, ours.optimizer.rate, ours.batch.size) == ("muon", 1e-3, 8)
    assert plain.out != ours.out
    for recipe in benchmark.RECIPES:
        benchmark.configuration(given, f"cedd/uniform+{recipe}").check()
    fast, faster = (benchmark.configuration(given, f"cedd/uniform/0.45+{name}") for name in ("fast", "faster"))
    assert (fast.batch.highest_time, fast.batch.last_highest_time, fast.model.dropout) == (0.45, 0.1, 0.0)
    assert set(differing_settings(fast, faster)) == {"optimizer.rate"}
    long = benchmark.configuration(given, "cedd/uniform/0.45+long")
    assert set(differing_settings(fast, long)) == {"model.dropout"}
    assert (fast.steps, long.steps) == (25_000, 50_000)
    assert fast.steps < long.checkpoint_every < long.steps  # only the long one has a checkpoint before its end
    longer = benchmark.configuration(given, "cedd/uniform+50000")  # the paper's settings and longest training
    assert (differing_settings(plain, longer), longer.steps, plain.out != longer.out) == ([], 50_000, True)
    crlf = benchmark.configuration(given, "cedd/uniform+crlf")
    assert set(differing_settings(plain, crlf)) == {"data", "text.tokenizer", "text.validation"}


def test_paper_settings_are_defaults(benchmark):
    config = benchmark.configuration(benchmark.Arguments(), "cedd/uniform")
    assert (config.model.width, config.model.depth, config.model.dropout) == (768, 12, 0.1)
    assert (config.batch.size, config.length, config.steps) == (32, 128, 25_000)
    assert (config.optimizer.rate, config.optimizer.warmup, config.optimizer.ema) == (3e-4, 2500, 0.9999)
    optimizer = config.optimizer.of_mean(config.length)
    assert (optimizer.clip, optimizer.eps) == (1 / 128, 1e-8 / 128)
    assert (config.process.name, config.sigma_floor) == ("uniform", 0.003)
    assert config.checkpoint_every > config.steps
    config.check()
    assert benchmark.configuration(benchmark.Arguments(), "bayes*/roulette/0.3").batch.highest_time == 0.3
    for cell in ("cedd/absorb", "cedd/uniform/2", "cedd/uniform/0.1/0.2", "cedd", "cedd/uniform+", "cedd/uniform+more"):
        with pytest.raises(ValueError, match="a cell is one of"):
            benchmark.Arguments(only=(cell,)).check()


def test_device_is_used_in_turns(benchmark, tmp_path):
    first, second = (benchmark.Turn(tmp_path) for _ in range(2))
    first.take()
    waits = threading.Thread(target=second.take)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    assert not second.is_mine
    third = benchmark.Turn(tmp_path)
    third.take(give_up=lambda: True)
    assert not third.is_mine
    first.give_back()
    waits.join(10)
    assert second.is_mine
    second.give_back()


def test_missing_books_are_reported(tmp_path, monkeypatch):
    monkeypatch.delenv("CEDD_DATA", raising=False)
    places = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results.json"), "--device", "cpu"]
    code, said = run(BENCHMARK, *places)
    assert code == 2
    assert said == "spelling: error: name the folder of the novels, or set CEDD_DATA to a folder with novels/ in it\n"


@pytest.mark.slow
def test_benchmark_stops_in_time_and_resumes(tmp_path, shared_data):
    """A tiny network on the CPU: stopped by the clock with a checkpoint, resumed, finished, its table printed."""
    novels = shared_data / "novels"
    if not novels.is_dir():
        pytest.skip("needs the novels in CEDD_DATA/novels, and GPT-2's vocabulary in CEDD_DATA/gpt2-bpe")
    results = tmp_path / "results.json"
    sizes = ["--size", "tiny", "--length", "32", "--batch", "2", "--every", "20", "--warmup", "5", "--blocks", "8"]
    places = ["--data", str(novels), "--out", str(tmp_path / "runs"), "--results", str(results), "--device", "cpu"]
    command = [sys.executable, str(BENCHMARK), *sizes, *places, "--form", "clean"]

    def run(*more, cells=("bayes/roulette",)):
        done = subprocess.run([*command, "--only", *cells, *more], capture_output=True, text=True, check=True)
        return done.stdout, json.loads(results.read_text())["cells"]["bayes/roulette"]

    _, record = run("--steps", "100000", "--minutes", "0.6", "--save-seconds", "2", "--start-seconds", "0")
    stopped = record["step"]
    assert not record["finished"]
    assert 0 < stopped < 100_000
    printed, record = run("--steps", str(stopped + 7))
    assert f"from step {stopped} on" in printed
    assert record["finished"]
    assert record["curve"][-1]["step"] == stopped + 7
    assert "| bayes | roulette; width 64; " in printed
    assert not list((tmp_path / "runs").rglob(f"step-{stopped + 7:08d}"))

    others = ("cedd/uniform", "sedd/uniform")
    printed, _ = run("--steps", "20", cells=others)
    first, second = others
    told = [printed.index(f"{cell}: {event}") for cell, event in ((first, "its turn"), (second, "from step 0"))]
    assert told == sorted(told)
    assert printed.index(f"{first}: step 20, done") < printed.index(f"{second}: its turn at step 8")
