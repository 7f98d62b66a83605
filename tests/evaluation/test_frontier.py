"""Frontiers: curves compared at equal entropy, with texts that can be drawn and judged on different machines."""

import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch

import cedd
from cedd.cli import main
from cedd.evaluation.frontier import Frontier, Point, Setting, common_entropy, compare_curves, curves_of
from cedd.evaluation.generative import JudgedText, ModelJudge, judge_label, load_samples, open_judge
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import SamplingOptions
from cedd.tasks import load
from tests.tasks.models import save_random
from tests.training.processes import command as started
from tests.training.processes import start_server, wait


def point(setting, nats, entropies) -> Point:
    """A point whose texts have ten of the judge's tokens each."""
    nats, entropies = np.asarray(nats, dtype=float), np.asarray(entropies, dtype=float)
    return Point(setting, 10 * nats, np.full(len(nats), 10.0), np.zeros(len(nats)), entropies, {"2": 1.0}, None)


def two_curves(noise) -> list[Point]:
    """log perplexity = 3 + 2 (entropy - 4) with 64 steps, and 0.5 more with 8; between 4 and 5 nats."""
    return [
        point(Setting("run", "analytic", steps, temperature), 3 + 2 * x + more + noise, 4 + x + 0 * noise)
        for steps, more in ((64, 0.0), (8, 0.5))
        for temperature, x in ((1.0, 1.0), (0.8, 0.0))
    ]


def test_curves_are_interpolated_and_compared_at_equal_entropy():
    few, many = compare_curves(two_curves(np.zeros(5)), 4.25)[::-1]
    assert many.perplexity is not None
    assert many.perplexity.value == pytest.approx(math.exp(3.5))
    assert many.perplexity.low == pytest.approx(math.exp(3.5))
    assert many.over_most_steps is None
    assert few.over_most_steps is not None
    assert few.over_most_steps.value == pytest.approx(math.exp(0.5))


def test_points_of_equal_entropy_are_averaged():
    """Short texts without repeated tokens all have the same entropy."""
    points = [point(Setting("run", "analytic", 8, t), [nats] * 3, [2.0] * 3) for t, nats in ((1.0, 3.0), (0.5, 4.0))]
    (found,) = compare_curves(points, 2.0)
    assert found.perplexity is not None
    assert found.perplexity.value == pytest.approx(math.exp(3.5))
    assert found.perplexity.high == pytest.approx(math.exp(3.5))


def test_leave_one_out_does_not_extrapolate_curve_far():
    """Its two points may then have nearly the same entropy, and an arbitrary slope."""
    nats = ((1.0, [3.0, 5.0, 4.0], [2.0, 2.1, 2.2]), (0.5, [4.0, 3.0, 5.0], [2.15, 2.0, 2.16]))
    points = [point(Setting("run", "analytic", 8, temperature), *of_texts) for temperature, *of_texts in nats]
    (found,) = compare_curves(points, 2.102)
    shown = found.perplexity
    assert shown is not None
    assert shown.low is not None
    assert shown.high is not None
    assert 1 < shown.low < shown.high < math.exp(7)  # three texts: Student's t has two degrees of freedom


def width(interval) -> float:
    """The ratio of the upper end to the lower end."""
    return interval.high / interval.low


def test_shared_noise_of_cells_cancels_in_their_difference():
    """Text i has the same seed in every cell, and is left out of all cells together."""
    noise = np.random.default_rng(0).normal(0, 0.3, 40)
    few = compare_curves(two_curves(noise), 4.5)[1]
    assert width(few.perplexity) > 1.1
    assert width(few.over_most_steps) == pytest.approx(1)


def test_curves_are_not_extrapolated_beyond_their_ends():
    rows = compare_curves(two_curves(np.zeros(5)), 5.1)
    assert [row.perplexity for row in rows] == [None, None]
    alone = two_curves(np.zeros(5))[:1]
    assert compare_curves(alone, 5.0)[0].perplexity is None, "a point is no curve"


def test_common_entropy_of_curves():
    curves = two_curves(np.zeros(3))
    assert common_entropy(curves) == pytest.approx(4.5)
    assert common_entropy([*curves, point(Setting("real text", "", 0), [3.0], [4.2])]) == pytest.approx(4.2)
    apart = [point(Setting("run", "euler", 8, t), [1.0], [x]) for t, x in ((1.0, 8.0), (0.8, 7.0))]
    assert common_entropy([*curves, *apart]) is None
    assert len(curves_of([*curves, *apart])) == 3


def test_cells_with_more_texts_do_not_widen_other_intervals():
    """A cell of 40 texts has the same interval with or without a cell of 90, except for the degrees of freedom."""
    noise = np.random.default_rng(3).normal(0, 0.3, 90)
    more = [point(Setting("more", "analytic", 8, t), 3 + noise, x + 0 * noise) for t, x in ((1.0, 5.0), (0.8, 4.0))]
    alone, together = (compare_curves([*two_curves(noise[:40]), *rest], 4.5)[0].perplexity for rest in ([], more))
    assert math.log(width(together)) == pytest.approx(math.log(width(alone)), rel=0.05)


# ----------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("runs")
    kinds = {"absorb": ("absorb", "cedd"), "roulette": ("roulette", "bayes"), "causal": ("absorb", "ar")}
    return {name: str(save_random(place / name, *kind)) for name, kind in kinds.items()}


def words(runs, folder, *more):
    swept = "--samplers analytic first-hitting --step-counts 2 4 --temperatures 1 0.5 -n 3 --length 8 --device cpu"
    return ["genppl", *runs, "--frontier", str(folder), *swept.split(), *more]


def test_frontier_is_drawn_judged_resumed_and_plotted(runs, tmp_path, capsys, monkeypatch):
    book, plot = tmp_path / "book.txt", tmp_path / "curves.png"
    book.write_text("the cat sat on the mat. " * 20)
    given = words([runs["absorb"], runs["roulette"]], tmp_path / "curves", "--judge", runs["causal"], "--json")
    given += ["--text", str(book), "--plot", str(plot)]
    assert main(given) == 0
    said = capsys.readouterr()
    assert "roulette is left out of first-hitting: first-hitting needs tokens that" in said.err
    assert "use sampler" not in said.err
    found = json.loads(said.out)
    cells = [(cell["run"], cell["sampler"], cell["steps"], cell["temperature"]) for cell in found["cells"]]
    expected = [("absorb", "analytic", 2), ("roulette", "analytic", 2), ("absorb", "first-hitting", 8)]
    expected += [("absorb", "analytic", 4), ("roulette", "analytic", 4)]
    assert cells == [("real text", "", 0, 1.0), *((*one, t) for one in expected for t in (1.0, 0.5))]
    assert found["judge"] == "causal"
    assert found["entropy"] == found["cells"][0]["token_entropy"]["value"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    samples = load_samples(tmp_path / "curves" / "samples" / "absorb.analytic.2.t0.5.p1.jsonl")
    judged = ModelJudge(runs["causal"]).judge(samples.texts)
    total = sum(one.nats for one in judged) / sum(one.tokens for one in judged)
    assert found["cells"][2]["corpus_perplexity"]["value"] == pytest.approx(math.exp(total))

    def never(*_, **__):
        raise AssertionError("what is done is not done again")

    monkeypatch.setattr(LoadedModel, "draw", never)
    monkeypatch.setattr(ModelJudge, "judge", never)
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["genppl", "--frontier", str(tmp_path / "curves"), "--judge", runs["causal"], "--entropy", "1"]) == 0
    printed = capsys.readouterr().out
    assert "real text" in printed
    assert "not reached" in printed


@pytest.mark.slow
def test_texts_can_be_drawn_first_and_judged_later(runs, tmp_path, capsys):
    folder = tmp_path / "curves"
    assert main(words([runs["absorb"]], folder, "--draw-only", "--judge", "/no/judge")) == 0
    assert capsys.readouterr().out == ""
    assert all(cell["judged"] == {} for cell in Frontier(folder).cells.values())
    judged = ["genppl", "--frontier", str(folder), "--json", "--device", "cpu", "--judge"]
    assert main([*judged, runs["causal"]]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 6
    assert main([*judged, runs["roulette"]]) == 0, "another judge reads the same texts"
    assert json.loads(capsys.readouterr().out)["judge"] == "roulette"
    assert all(set(cell["judged"]) == {"causal", "roulette"} for cell in Frontier(folder).cells.values())


def test_different_judge_with_same_name_is_rejected(runs, tmp_path, capsys):
    """Otherwise the scores of both judges would be mixed."""
    folder, other = tmp_path / "curves", save_random(tmp_path / "causal", "absorb", "ar", mlp_ratio=2)
    assert main(words([runs["absorb"]], folder, "--judge", runs["causal"])) == 0
    capsys.readouterr()
    for given in (["genppl", "--frontier", str(folder)], words([runs["roulette"]], folder)):
        assert main([*given, "--judge", str(other)]) == 2
        assert "has scores of another judge named causal; rename this one" in capsys.readouterr().err
    moved = shutil.copytree(runs["causal"], tmp_path / "moved" / "causal")
    assert main(["genppl", "--frontier", str(folder), "--judge", str(moved)]) == 0, "wherever it lies"
    assert main(["genppl", "--frontier", str(folder), "--judge", str(tmp_path / "elsewhere" / "causal")]) == 0


@pytest.mark.slow
def test_interruption_loses_only_current_cell(runs, tmp_path, capsys, monkeypatch):
    folder, drawn = tmp_path / "curves", []
    draw = LoadedModel.draw

    def stopped(self, *given, **options):
        drawn.append(given)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return draw(self, *given, **options)

    monkeypatch.setattr(LoadedModel, "draw", stopped)
    given = words([runs["absorb"]], folder, "--judge", runs["causal"])
    assert main(given) == 130
    assert len(Frontier(folder).cells) == 2
    assert main(given) == 0
    assert len(drawn) == 3 + 4


@pytest.mark.slow
def test_concurrent_processes_share_one_frontier_folder(runs, tmp_path, capsys):
    """Two concurrent commands with overlapping sweeps give the same cells as one after the other in another folder."""
    swept = [("analytic", "euler"), ("euler", "first-hitting")]
    together, alone = tmp_path / "together", tmp_path / "alone"

    def command(folder, samplers):
        how = ["--samplers", *samplers, "--step-counts", "1", "2", "3", "--temperatures", "1", "0.5"]
        judged = ["-n", "3", "--length", "8", "--device", "cpu", "--judge", runs["causal"], "--json"]
        return ["genppl", runs["absorb"], "--frontier", str(folder), *how, *judged]

    start_server()
    children = [started(command(together, one), tmp_path / str(number)) for number, one in enumerate(swept)]
    assert [wait(child) for child in children] == [0, 0], [*tmp_path.glob("*/stderr")]
    for one in swept:
        assert main(command(alone, one)) == 0
    found, expected = (
        {name: {**cell, "seconds": None} for name, cell in Frontier(folder).cells.items()}
        for folder in (together, alone)
    )
    assert found == expected
    assert len(found) == 3 * 2 * 2 + 2
    assert all(set(cell["judged"]) == {"causal"} for cell in found.values())
    assert not [file for file in together.iterdir() if file.name.startswith(".")]


def test_results_of_other_processes_are_kept(runs, tmp_path, capsys):
    """Two views of one folder, each of which has loaded only its own cells, do not overwrite each other's texts."""
    folder, model = tmp_path / "curves", load(runs["absorb"], "cpu")
    one, other = Frontier(folder), Frontier(folder)
    first, second = Setting("absorb", "analytic", 2), Setting("absorb", "analytic", 4)
    for view, setting, n in ((one, first, 3), (other, second, 3), (other, first, 2)):
        view.begin({"absorb": model}, 8, 0)
        view.draw(setting, model, n, SamplingOptions())
    assert [cell["texts"] for cell in Frontier(folder).cells.values()] == [3, 3]
    assert len(load_samples(folder / "samples" / f"{first.name}.jsonl").texts) == 3

    class Slow:
        """A judge; while it scores a cell, another process draws more texts of that cell."""

        name, precision = "slow", "float32"
        readings = 0

        def judge(self, texts):
            self.readings += 1
            if self.readings == 1:
                other.draw(first, model, 5, SamplingOptions())
            return [JudgedText(1.0, 2) for _ in texts]

    slow = Slow()
    one.judge(first.name, slow, "slow")
    assert slow.readings == 2
    assert Frontier(folder).cells[first.name]["judged"]["slow"]["nats"] == [1.0] * 5
    other.refresh()
    other.judge(first.name, slow, "slow")
    assert slow.readings == 2, "what another has judged is not judged again"
    later = Frontier(folder)
    with pytest.raises(ValueError, match="cells of another seed"):
        later.begin({"absorb": model}, 8, 1)


def test_autoregressive_model_is_one_curve(runs, tmp_path, capsys):
    assert main(words([runs["causal"]], tmp_path / "curves", "--judge", runs["absorb"], "--json")) == 0
    found = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["sampler"], cell["steps"], cell["temperature"]) for cell in found] == [
        ("next-token", 8, 1.0),
        ("next-token", 8, 0.5),
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--samplers eulr", "did you mean 'euler'?"),
        ("--steps 4", "use --step-counts instead of --steps"),
        ("--top-ps 1 0.9", "sweep temperatures or top-p, not both"),
        ("--temperatures -1", "temperature must be finite and at least 0"),
        ("--step-counts 0", "steps must be at least 1"),
        ("--length 99", "the model reads 1 to 32 tokens"),
        ("--seed 5", "has cells of another seed"),
        ("--out x.jsonl", "leave out --samples and --out"),
        ("--plot x.txt", "x.txt must end in"),
        ("-n 0", "-n must be at least 1"),
        ("--entropy nan", "--entropy must be a finite number of nats"),
        ("--judge /no/judge", "judge not found: /no/judge"),
        ("--text /no/text", "file not found: /no/text"),
    ],
)
def test_invalid_input_gives_one_line_error(more, message, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = tmp_path / "curves"
    kept, model = Frontier(folder), load(runs["absorb"], "cpu")
    kept.begin({"absorb": model}, 8, 0)
    kept.draw(Setting("absorb", "analytic", 2), model, 1, SamplingOptions())
    assert main([*words([runs["absorb"]], folder, "--judge", runs["causal"]), *more.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def test_texts_of_one_token_are_not_judged(runs, tmp_path, capsys):
    given = words([runs["absorb"]], tmp_path / "curves", "--judge", runs["causal"], "--length", "1")
    assert main(given) == 2
    assert "has two tokens of the judge" in capsys.readouterr().err


def test_conflicting_or_damaged_frontiers_are_rejected(runs, tmp_path, capsys):
    other = save_random(tmp_path / "absorb", "absorb", "ceddt", mlp_ratio=2)
    folder = tmp_path / "curves"
    assert main(words([runs["absorb"], str(other)], folder, "--judge", runs["causal"])) == 2
    assert "two of the models are named absorb" in capsys.readouterr().err
    assert main(words([runs["absorb"]], folder, "--draw-only")) == 0
    assert main(words([str(other)], folder, "--draw-only")) == 2
    assert "has cells of another model named absorb" in capsys.readouterr().err
    whole = (folder / "frontier.json").read_text()
    for damaged in ('{"format": 7}', whole.replace("entropies", "x"), whole.replace('"texts": 3', '"texts": 4'), "{"):
        (folder / "frontier.json").write_text(damaged)
        assert main(words([runs["absorb"]], folder, "--draw-only")) == 2
        said = capsys.readouterr().err
        assert re.search(r"frontier.json(:| is damaged)", said)
        assert said.count("\n") == 1
    assert main(["genppl", "--frontier", str(tmp_path / "empty")]) == 2
    assert "no texts in" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------
# Our models as judges


def test_causal_judge_is_exact_and_scores_texts_separately(runs):
    judge, texts = ModelJudge(runs["causal"], "cpu", batch=2), ["the cat", "", "a", "the cat sat. " * 4]
    model = load(runs["causal"], "cpu")
    for text, one in zip(texts, judge.judge(texts), strict=True):
        ids = torch.from_numpy(model.tokenizer.encode(text))[: model.length]
        assert one.tokens == max(0, len(ids) - 1)
        assert one.cut_off == len(text) - len(ids)
        shown = torch.cat([torch.tensor([model.process.vocab_size]), ids[:-1]])[None] if len(ids) else None
        if shown is not None and len(ids) > 1:
            log_probs = model.model.eval()(shown, torch.zeros(1)).double().log_softmax(-1)[0]
            expected = -log_probs[torch.arange(1, len(ids)), ids[1:]].sum()
            assert one.nats == pytest.approx(float(expected), rel=1e-5)


def test_diffusion_judge_bounds_all_tokens(runs):
    one, none, again = open_judge(runs["absorb"], "cpu").judge(["the cat sat", "", "the cat sat"])
    bound = load(runs["absorb"], "cpu").perplexity("the cat sat", seed=0)
    assert one.nats == pytest.approx(bound.nats_per_token * 11)
    assert one.stderr == pytest.approx(bound.stderr * 11)
    assert (one.tokens, none.tokens, again.tokens) == (11, 0, 11)
    assert one.nats != again.nats, "each text has times and noise of its own"
    with pytest.raises(ValueError, match="--judge-batch must be at least 1 \\(got 0"):
        open_judge(runs["absorb"], "cpu", batch=0)


def test_judge_pads_short_texts_with_masks(tmp_path):
    """As `LanguageModel.perplexity` does: a network without a time input was trained on whole blocks only."""
    model = load(save_random(tmp_path / "plain", "absorb", "cedd", time_input="none"), "cpu")
    torch.manual_seed(0)
    for parameter in model.model.parameters():  # so that positions attend to each other
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "judge")
    (one,) = open_judge(str(tmp_path / "judge"), "cpu").judge(["the cat sat"])
    assert one.nats == pytest.approx(model.perplexity("the cat sat").nats_per_token * 11)
    ids, generator = torch.from_numpy(model.tokenizer.encode("the cat sat"))[None], torch.Generator().manual_seed(0)
    alone = cedd.estimate_bound(
        model.model, model.process, ids, method=model.method, draws=64, generator=generator, fixed_set=True
    )
    assert abs(one.nats / 11 - alone.nats_per_token) > 0.01


@pytest.mark.slow
def test_judge_errors_are_independent_between_texts(runs):
    """64 scores of one text: their spread matches the reported standard errors within a factor of 2 (a variance of 64
    values leaves this range with a probability below 1e-6)."""
    read = open_judge(runs["absorb"], "cpu").judge(["the cat sat on the mat."] * 64)
    stated = np.mean([one.stderr**2 for one in read])
    assert 0.25 < np.var([one.nats for one in read], ddof=1) / stated < 4


@pytest.mark.slow
def test_judge_rejects_texts_with_unknown_characters():
    """The token of unknown characters is easy to predict, so such texts would get too good a score."""
    judge = open_judge("english-char", "cpu")
    with pytest.raises(ValueError, match=r"^72.7% of the characters are unknown to .* such text, or another judge$"):
        judge.judge(["שלום עולם", "a "])
    assert len(judge.judge(["“A café,” she said.", "well"])) == 2  # read as similar letters


def test_judge_label_does_not_depend_on_location(runs):
    assert judge_label("/models/smollm2.gguf") == "smollm2.gguf"
    assert judge_label(runs["causal"]) == "causal"
    assert judge_label("openai-community/gpt2-large") == "openai-community/gpt2-large"
    assert judge_label("/some/folder", "model.gguf") == "folder/model.gguf"
