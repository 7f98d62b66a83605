"""Spelling: shares with honest intervals, the paper's protocol against dense matrices, letters compared one by one."""

import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import cedd
from cedd.evaluation.spelling import Correction, Share, outcomes, restore, save_plot
from tests.networks import random_network

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "spelling.py"

# ----------------------------------------------------------------------------------------------------------------
# Shares


def make_share(hits, totals):
    return Share(torch.tensor(hits), torch.tensor(totals))


def test_a_share_is_the_ratio_of_sums():
    share = make_share([1, 0, 3], [2, 4, 4])
    assert share.value == 0.4
    residuals = [1 - 0.8, 0 - 1.6, 3 - 1.6]
    assert share.stderr == pytest.approx(math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 10)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8))
def test_an_interval_lies_within_bounds_and_holds_its_share(pairs):
    share = make_share([a for a, _ in pairs], [a + b for a, b in pairs])
    low, high = share.ci95
    if not share.total:
        assert math.isnan(low)
        assert share.record()["share"] is None
        return
    assert 0 <= low <= share.value + 1e-12
    assert share.value - 1e-12 <= high <= 1
    assert low < high


def test_nothing_seen_is_not_nothing_there():
    """With no hit among 300 the interval is Wilson's, which reaches to about 3.7 in 300."""
    low, high = make_share([0] * 100, [3] * 100).ci95
    assert low < 1e-12
    assert 3.0 < 300 * high < 4.5


def test_intervals_of_clustered_mistakes_cover():
    """Blocks differ in how hard they are (standard deviation 0.2). 600 intervals of 95% cover in 95%, give or take
    0.9%: outside of 92% to 98% a right interval falls once in a thousand. Taken as independent they cover less."""
    generator = torch.Generator().manual_seed(1)
    truth, covered, naive = 0.7, 0, 0
    for _ in range(600):
        hard = (truth + 0.2 * torch.randn(80, generator=generator).clamp(-1.5, 1.5)).clamp(0, 1)
        totals = torch.randint(2, 12, (80,), generator=generator)
        share = Share(torch.binomial(totals.float(), hard, generator=generator).long(), totals)
        low, high = share.ci95
        covered += low <= truth <= high
        naive += abs(share.value - truth) <= 1.96 * math.sqrt(share.value * (1 - share.value) / share.total)
    assert 0.92 < covered / 600 < 0.98
    assert naive < covered


# ----------------------------------------------------------------------------------------------------------------
# The paper's protocol

V, LENGTH = 4, 3
BLOCKS = torch.randint(V, (400, LENGTH), generator=torch.Generator().manual_seed(0))


def dense_guess(method, process, outputs, x, t):
    """argmax of p(x_0 | x_t = x) at one position by whole matrices, from outputs [V]."""
    matrix = process.transition_matrix(t)
    if method in ("cedd", "cedd-star"):
        return int(outputs.argmax())
    if method == "bayes":
        return int((outputs.softmax(-1) * matrix[x, :V]).argmax())
    scores = torch.zeros(process.num_states, dtype=torch.float64)
    time = torch.tensor([t], dtype=torch.float64)
    scores[:V] = cedd.log_scores(method, process, outputs[None, None], torch.tensor([[x]]), time)[0, 0].exp()
    if x == V:
        scores[V] = 1.0
    posterior = torch.linalg.solve(matrix, scores) * matrix[x]  # (K^-1 s)(z) K(x|z)
    return int(posterior[:V].argmax())


@pytest.mark.parametrize("name", ["uniform", "roulette", "absorb"])
@pytest.mark.parametrize("method", ["sedd", "sedds", "cedd", "bayes"])
def test_restoring_is_the_argmax_of_the_dense_posterior(name, method):
    t = 0.4
    process = cedd.roulette(V, p_m=0.5) if name == "roulette" else getattr(cedd, name)(V)
    model = random_network(process, LENGTH, seed=3)
    measured = restore(model, process, cedd.get_method(method), BLOCKS, t=t, seed=5, batch=64)
    x_t = process.noise(t).sample(BLOCKS, torch.Generator().manual_seed(5))
    outputs = model(x_t, process.sigma(torch.full((len(x_t),), t)))
    counts = {"masked": [0, 0], "shuffled": [0, 0]}
    for n, i in (x_t != BLOCKS).nonzero().tolist():
        count = counts["masked" if x_t[n, i] == V else "shuffled"]
        count[0] += dense_guess(method, process, outputs[n, i], int(x_t[n, i]), t) == int(BLOCKS[n, i])
        count[1] += 1
    for kind, (hits, total) in counts.items():
        share = getattr(measured, kind)
        assert (share.count, share.total) == (hits, total)
    assert measured.all.total == int((x_t != BLOCKS).sum()) > 100
    assert measured.masked.total == 0 if name == "uniform" else measured.masked.total > 50
    assert measured.shuffled.total == 0 if name == "absorb" else measured.shuffled.total > 50


class Halves(nn.Module):
    """A network in two halves whose prediction follows from the token that is there."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.table = nn.Embedding(states, 5)
        self.head = nn.Linear(5, V)
        self.rows_seen = 0
        self.head.register_forward_hook(lambda _module, inputs, _output: self.count(len(inputs[0])))

    def count(self, rows: int) -> None:
        self.rows_seen += rows

    def features(self, x_t, sigma):
        return self.table(x_t)


def test_the_head_runs_on_corrupted_positions_only_and_no_batch_matters():
    torch.manual_seed(0)
    process, method = cedd.roulette(V, p_m=0.5), cedd.get_method("bayes")
    model = Halves(V + 1)
    first = restore(model, process, method, BLOCKS, t=0.3, batch=64)
    assert model.rows_seen == first.all.total < BLOCKS.numel() / 2
    second = restore(lambda x, sigma: model.head(model.table(x)), process, method, BLOCKS, t=0.3, batch=7)
    assert torch.equal(first.all.hits, second.all.hits)
    assert 0 < first.all.value < 1
    other = restore(model, process, method, BLOCKS, t=0.3, seed=1)
    assert not torch.equal(first.all.totals, other.all.totals)


def test_a_network_that_knows_restores_all():
    """Every block repeats one token, and the network takes the majority."""
    blocks = torch.arange(V).repeat_interleave(50)[:, None].expand(-1, 16)

    def model(x, sigma):
        votes = torch.nn.functional.one_hot(x, V + 1)[..., :V].sum(1, keepdim=True)
        return votes.double().expand(-1, 16, -1)

    share = restore(model, cedd.roulette(V, p_m=0.5), cedd.get_method("cedd"), blocks, t=0.1).all
    assert share.value == 1.0
    assert share.total > 100
    assert share.ci95[0] > 0.95


def test_what_cannot_be_restored_is_refused():
    model, process = random_network(cedd.uniform(V), LENGTH, seed=0), cedd.uniform(V)
    method = cedd.get_method("cedd")
    with pytest.raises(ValueError, match="autoregressive"):
        restore(model, process, cedd.get_method("ar"), BLOCKS)
    with pytest.raises(ValueError, match="too short"):
        restore(model, process, method, BLOCKS[:0])
    with pytest.raises(ValueError, match="must lie in"):
        restore(model, process, method, BLOCKS, t=0.0)


# ----------------------------------------------------------------------------------------------------------------
# The user's protocol


def test_outcomes_of_a_known_text():
    #                    good  altered  missed  fixed
    original, corrupted = "the cat, sat.", "thx cqt, szt."
    corrected = "txx cbt, sat!"  # h broken; x missed; q altered; z fixed; the point broken
    seen = outcomes(original, corrupted, corrected, unit=4)
    counts = {name: (share["count"], share["total"]) for name, share in seen.record().items()}
    assert counts == {
        "fixed": (1, 3),
        "missed": (1, 3),
        "altered": (1, 3),
        "broken": (1, 6),
        "broken_others": (1, 4),
        "before": (3, 13),
        "after": (4, 13),
    }
    assert seen.after.totals.tolist() == [4, 4, 4, 1]


@given(st.data())
def test_outcomes_add_up(data):
    length = data.draw(st.integers(1, 40))
    words = st.text(alphabet="ab ,é", min_size=length, max_size=length)
    seen = outcomes(data.draw(words), data.draw(words), data.draw(words), unit=data.draw(st.integers(1, 50)))
    assert seen.fixed.count + seen.missed.count + seen.altered.count == seen.fixed.total == seen.before.count
    broken = seen.broken.count + seen.broken_others.count
    assert seen.after.count == seen.before.count - seen.fixed.count + broken
    assert seen.fixed.total + seen.broken.total + seen.broken_others.total == length


def test_accented_letters_are_letters():
    seen = outcomes("Zoë né 3.", "Zoë né 3.", "Zoe ne 3!", unit=3)
    assert (seen.broken.count, seen.broken.total) == (2, 5)
    assert (seen.broken_others.count, seen.broken_others.total) == (1, 4)


def test_what_was_made_has_no_interval():
    """So many mistakes are made: only what becomes of them varies."""
    record = outcomes("abcd" * 20, "abcx" * 20, "abcd" * 10 + "abxx" * 10, 8).record()
    assert record["before"] == {"share": 0.25, "count": 20, "total": 80}
    assert record["after"]["low"] < record["after"]["share"] < record["after"]["high"]


def test_exchanged_neighbours_are_one_mistake():
    original, corrupted = "the cat sat on mats", "teh act ast on amts"
    corrected = "the act sst on maxs"  # fixed, missed, altered; half of the last is right, and what was right is broken
    seen = outcomes(original, corrupted, corrected, unit=8, span=2)
    counts = {name: (share["count"], share["total"]) for name, share in seen.record().items()}
    assert counts == {
        "fixed": (2, 4),
        "missed": (1, 4),
        "altered": (1, 4),
        "broken": (1, 7),
        "broken_others": (0, 4),
        "before": (8, 19),
        "after": (4, 19),
    }
    assert seen.fixed.hits.tolist() == [1, 1, 0]
    assert seen.fixed.totals.tolist() == [2, 2, 0]


def test_texts_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="as long"):
        outcomes("abc", "abc", "ab")
    with pytest.raises(ValueError, match="no letter"):
        outcomes("", "", "")


def test_the_plot_is_written(tmp_path):
    made = [
        Correction(way, {"threshold": threshold}, outcomes("abcd" * 20, "abcx" * 20, "abcd" * 10 + "abxx" * 10, 8))
        for way in ("1 step", "8 steps")
        for threshold in (0.1, 1.0)
    ]
    for name in ("fixed.png", "fixed.svg"):
        save_plot(tmp_path / name, made)
    assert (tmp_path / "fixed.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "fixed.svg").read_text()


# ----------------------------------------------------------------------------------------------------------------
# benchmarks/spelling.py


@pytest.fixture(scope="module")
def benchmark():
    if not BENCHMARK.is_file():
        pytest.skip("benchmarks/ is part of the source tree only")
    spec = importlib.util.spec_from_file_location("spelling_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_books_are_written_a_character_at_a_time_in_gpt2s_tokens(benchmark):
    """A character that is two tokens becomes two stand-ins, the same in every book."""

    class TwoTokens:
        def encode(self, text):
            return {"“": [447, 250], "”": [447, 251], "\r": [201]}[text]

    known = {"a": 64, " ": 220, "\r": 201, "\n": 198}
    texts = [benchmark.spelt(text, TwoTokens(), known) for text in ("“a a”", "”a\r\n")]
    assert [[known[c] for c in text] for text in texts] == [[447, 250, 64, 220, 64, 447, 251], [447, 251, 64, 201, 198]]
    assert "\r" not in texts[1]  # where it would be read as a line's end


def books(value):
    share = {"share": value, "low": value - 0.01, "high": value + 0.01}
    return {name: {"all": share, "masked": share, "shuffled": share} for name in ("pap", "cap", "wap")}


def test_characters_can_be_the_first_tokens_of_fewer(benchmark):
    characters = {"a": 64, "b": 65, "A": 32, "\u00e4": 64}
    assert benchmark.renumbered(characters, 3) == {"a": 1, "b": 2, "A": 0, "\u00e4": 1}
    with pytest.raises(ValueError, match="--vocabulary must be at least 3"):
        benchmark.renumbered(characters, 2)
    small, plain = (benchmark.configuration(benchmark.Arguments(vocabulary=v), "cedd/uniform") for v in (512, None))
    assert set(benchmark.same_run(small, plain)) == {"text.tokenizer"}  # so that neither is taken for the other


def test_results_survive_a_stop_and_stand_beside_the_papers(benchmark, tmp_path):
    arguments = benchmark.Arguments(out=tmp_path / "runs", results=tmp_path / "results.json")
    cell = "cedd-star/roulette"
    config = benchmark.configuration(arguments, cell)
    results = benchmark.Results(arguments.results, arguments)

    def take(event, **values):
        results.take(cell, {"event": event, **values})

    begin = {"config": benchmark.to_json(config), "machine": "here", "time": 0.0}
    take("begin", step=0, **begin)
    for step in (5000, 10_000):
        take("point", step=step, books=books(0.8), seconds=1.0)
    take("end", step=7000, finished=False, loss=1.0, seconds=60.0, seconds_per_step=0.009)
    assert not results.is_done(cell, arguments)

    results = benchmark.Results(arguments.results, arguments)  # another process goes on, from step 7000
    take("begin", step=7000, **begin)
    assert [point["step"] for point in results.content["cells"][cell]["curve"]] == [5000]
    take("point", step=25_000, books=books(0.9123), seconds=1.0)
    take("raw", step=25_000, books=books(0.5))
    take("end", step=25_000, finished=True, loss=1.0, seconds=60.0, seconds_per_step=0.009)
    assert results.is_done(cell, arguments)
    for other in ({"seed": 1}, {"blocks": 8}, {"steps": 30_000}, {"steps": 20_000}, {"schedule": "cosine"}):
        assert not results.is_done(cell, benchmark.replace(arguments, **other)), other
    results.content["cells"][cell]["curve"].append({"step": 20_000})  # which 25,000 steps at a constant rate pass
    assert results.is_done(cell, benchmark.replace(arguments, steps=20_000))
    saved = benchmark.read_results(arguments.results)
    assert [part["step"] for part in saved["cells"][cell]["parts"]] == [7000, 25_000]
    table = benchmark.tables(saved)
    assert (
        "| cedd-star | roulette | 25,000 | 91.2 ± 1.0 | 89.7 | 91.2 ± 1.0 | 90.3 | 91.2, 91.2 | 91.2 | 9.0 |" in table
    )
    assert "| cedd-star/roulette | 80.0 / 80.0 / 80.0 | 91.2 / 91.2 / 91.2 | 50.0 / 50.0 / 50.0 |" in table

    other = benchmark.configuration(benchmark.replace(arguments, dropout=0.2, matrices="muon"), cell)
    saved["cells"][cell]["config"] = benchmark.to_json(other)
    assert "| cedd-star | roulette; dropout 0.2; matrices muon | 25,000 |" in benchmark.tables(saved)

    two = benchmark.replace(arguments, form="crlf", vocabulary=512, seed=1)
    saved["cells"][cell]["config"] = benchmark.to_json(benchmark.configuration(two, cell))
    assert "| cedd-star | roulette; vocabulary 512; form crlf; seed 1 | 25,000 |" in benchmark.tables(saved)

    def row(name, finished=True, **given):
        config = benchmark.to_json(benchmark.configuration(benchmark.replace(arguments, **given), name))
        record = {**saved["cells"][cell], "config": config, "finished": finished}
        return benchmark.tables({"cells": {name: record}})

    half = f"{cell}+half"  # beside the same figures of the paper
    assert "| cedd-star | roulette; rate 0.00015 | 25,000 | 91.2 ± 1.0 | 89.7 |" in row(half)
    part = "| cedd-star | roulette; rate 0.00015 | 25,000 of 50,000 | 91.2 ± 1.0 | 89.7 |"
    assert part in row(half, finished=False, steps=50_000)
    falling = row(cell, finished=False, schedule="cosine", steps=50_000)  # which has not got where the paper's is
    assert "| cedd-star | roulette; schedule cosine | 25,000 of 50,000 | 91.2 ± 1.0 |  |" in falling

    ours = benchmark.configuration(arguments, benchmark.OURS)
    saved["cells"] = {benchmark.OURS: {**saved["cells"][cell], "config": benchmark.to_json(ours)}}
    assert re.search(r"^\| bayes-star \| roulette, t ≤ 0.45; .*matrices muon", benchmark.tables(saved), re.MULTILINE)

    benchmark.show(benchmark.replace(arguments, plot=tmp_path / "curves.png"), saved)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for damaged in ("[]", '{"format": 1, "cells": []}', '{"format": 1, "cells": {"a": {"curve": [{}]}}}', '{"cells'):
        arguments.results.write_text(damaged)
        with pytest.raises(ValueError, match=r"results\.json is no results file of this benchmark, or a damaged one"):
            benchmark.read_results(arguments.results)
    with pytest.raises(ValueError, match=r"--plot makes a \.png"):
        benchmark.replace(arguments, plot=tmp_path / "curves.gif").check()


def test_seeds_are_compared(benchmark, capsys, monkeypatch, tmp_path):
    """Three runs of two cells: means, and Student's interval of how far one is ahead, t = 4.3027 for two degrees."""
    paths = [tmp_path / f"{seed}.json" for seed in range(3)]

    def write(seed, shares, other=None, **given):
        cells = {}
        for cell, share in zip(("cedd/roulette", "cedd-star/roulette"), shares, strict=True):
            given["seed"] = seed if other is None or cell == "cedd/roulette" else other
            config = benchmark.to_json(benchmark.configuration(benchmark.Arguments(**given), cell))
            curve = [{"step": 5000, "books": books(0.5)}, {"step": 9000, "books": books(share)}]
            cells[cell] = {"config": config, "curve": curve}
        cells[f"sedd/uniform+{'half' if seed else 'twice'}"] = cells["cedd/roulette"]  # which not all have
        paths[seed].write_text(json.dumps({"format": 1, "cells": cells}))

    def table(*names):
        monkeypatch.setattr(sys, "argv", ["spelling.py", "--table", *map(str, names)])
        code = benchmark.main()
        return code, capsys.readouterr()

    for seed, shares in enumerate([(0.80, 0.81), (0.82, 0.85), (0.84, 0.86)]):
        write(seed, shares)
    code, said = table(*paths)
    assert code == 0
    wanted = 4.30265 * statistics.stdev([1, 3, 2]) / 3**0.5
    between = f"2.00 ({2 - wanted:.2f} to {2 + wanted:.2f})"
    assert said.out.splitlines() == [
        "| PAP / CAP, % after 9,000 steps | seed 0 | seed 1 | seed 2 | mean |",
        "|---|--:|--:|--:|--:|",
        "| cedd/roulette | 80.00 / 80.00 | 82.00 / 82.00 | 84.00 / 84.00 | 82.00 / 82.00 |",
        "| cedd-star/roulette | 81.00 / 81.00 | 85.00 / 85.00 | 86.00 / 86.00 | 84.00 / 84.00 |",
        f"| cedd-star/roulette less cedd/roulette | 1.00 / 1.00 | 3.00 / 3.00 | 2.00 / 2.00 | {between} / {between} |",
    ]

    def refused(*names):
        code, said = table(*names)
        assert code == 2
        return said.err.removeprefix("spelling: ").removesuffix("\n")

    own = "each file must have a seed of its own, in all of its cells;"
    assert refused(paths[0], paths[0]) == f"{own} sedd/uniform+twice has [0, 0]"
    write(1, (0.82, 0.85), other=7)
    assert refused(*paths) == f"{own} cedd-star/roulette has [0, 7, 2]"
    write(1, (0.82, 0.85), rate=9e-4)
    assert refused(*paths) == "cedd/roulette was trained with other settings in one of these files than in another"
    paths[0].write_text('{"format": 1, "cells": {}}')
    assert refused(*paths) == "these results files share no cell that was tested at the same step"
    assert refused() == "--table needs a results file"
    with pytest.raises(ValueError, match="--plot draws the curves of one results file"):
        benchmark.Arguments(table=tuple(paths), plot=tmp_path / "curves.png").check()


def test_what_is_published_need_not_be_trained_again(benchmark):
    """All cells of the command without --only count as done by the published records."""
    path = BENCHMARK.parent / "results" / "spelling.json"
    arguments = benchmark.Arguments(results=path)
    results = benchmark.Results(path, arguments)
    missing = [cell for cell in arguments.only if not results.is_done(cell, arguments)]
    assert missing == []
    assert not results.is_done("sedd/roulette+quarter", arguments)


def test_line_ends_of_two_characters_are_asked_for(benchmark, tmp_path):
    book = tmp_path / "book.txt"
    for content, message in ((b"one\ntwo\n", "has no line ends of two"), (b"\xff\r\n", r"book\.txt is not UTF-8")):
        book.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            benchmark.as_shipped(book)
    book.write_bytes("\ufeffone\r\ntwo\r\n".encode())
    assert benchmark.as_shipped(book) == "one\r\ntwo\r\n"


def test_a_recipe_stands_above_the_command_line(benchmark):
    given = benchmark.Arguments(rate=1e-5, batch=8)
    plain, ours = (benchmark.configuration(given, f"cedd/uniform{plus}") for plus in ("", "+muon"))
    assert (plain.optimizer.matrices, plain.optimizer.rate) == ("adamw", 1e-5)
    assert (ours.optimizer.matrices, ours.optimizer.rate, ours.batch.size) == ("muon", 1e-3, 8)
    assert plain.out != ours.out
    for recipe in benchmark.RECIPES:
        benchmark.configuration(given, f"cedd/uniform+{recipe}").check()
    fast, faster = (benchmark.configuration(given, f"cedd/uniform/0.45+{name}") for name in ("fast", "faster"))
    assert (fast.batch.highest_time, fast.batch.last_highest_time, fast.model.dropout) == (0.45, 0.1, 0.0)
    assert set(benchmark.same_run(fast, faster)) == {"optimizer.rate"}
    long = benchmark.configuration(given, "cedd/uniform/0.45+long")
    assert set(benchmark.same_run(fast, long)) == {"model.dropout"}
    assert (fast.steps, long.steps) == (25_000, 50_000)
    assert fast.steps < long.checkpoint_every < long.steps  # only the long one has a checkpoint on its way
    crlf = benchmark.configuration(given, "cedd/uniform+crlf")
    assert set(benchmark.same_run(plain, crlf)) == {"data", "text.tokenizer", "text.validation"}


def test_the_papers_settings_are_the_defaults(benchmark):
    config = benchmark.configuration(benchmark.Arguments(), "cedd/uniform")
    assert (config.model.width, config.model.depth, config.model.dropout) == (768, 12, 0.1)
    assert (config.batch.size, config.length, config.steps) == (32, 128, 25_000)
    assert (config.optimizer.rate, config.optimizer.warmup, config.optimizer.ema) == (3e-4, 2500, 0.9999)
    optimizer = config.optimizer.of_mean(config.length)
    assert (optimizer.clip, optimizer.eps) == (1 / 128, 1e-8 / 128)
    assert (config.process.name, config.process.sigma_floor) == ("uniform", 0.003)
    assert config.checkpoint_every > config.steps
    config.check()
    assert benchmark.configuration(benchmark.Arguments(), "bayes*/roulette/0.3").batch.highest_time == 0.3
    for cell in ("cedd/absorb", "cedd/uniform/2", "cedd/uniform/0.1/0.2", "cedd", "cedd/uniform+", "cedd/uniform+more"):
        with pytest.raises(ValueError, match="a cell is one of"):
            benchmark.Arguments(only=(cell,)).check()


def test_the_device_is_used_in_turns(benchmark, tmp_path):
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


def test_the_benchmark_asks_for_its_books(tmp_path, monkeypatch):
    monkeypatch.delenv("CEDD_DATA", raising=False)
    places = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results.json"), "--device", "cpu"]
    done = subprocess.run([sys.executable, str(BENCHMARK), *places], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "spelling: name the folder of the novels, or set CEDD_DATA to a folder with novels/ in it\n"


@pytest.mark.slow
def test_the_benchmark_stops_in_time_and_goes_on(tmp_path, shared_data):
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
