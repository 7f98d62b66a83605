"""Texts longer than the context: which windows are filled, with which context, and the resulting texts."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import cedd
from cedd.cli.sampling import last_frame
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer, CharTokenizer
from cedd.models.folder import ModelFolder
from cedd.models.loaded_model import LoadedModel
from cedd.samplers import SamplingOptions
from cedd.tasks import Trajectory, infill, load, parse_template
from cedd.tasks.windows import infilling_windows, windows_of_filled_text
from tests.tasks.models import ALPHABET, fixer, save_random

FAST = SamplingOptions(steps=8, seed=0)
LETTERS = CharTokenizer(ALPHABET).decode(range(len(ALPHABET)))


class AlphabetNetwork(nn.Module):
    """Predicts with certainty that letters follow each other in the alphabet, cyclically: any known token determines
    all others. If none is known, all tokens are equally likely."""

    has_mask = True

    def __init__(self, V: int) -> None:
        super().__init__()
        self.V = V
        self.read: list[tuple[int, ...]] = []

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        del sigma
        self.read.append(tuple(x_t.shape))
        places = torch.arange(x_t.shape[1])
        far = (places[:, None] - places).abs() + 10_000 * (x_t == self.V)[:, None]
        nearest = far.argmin(-1)  # the nearest known token, [B, L]
        letters = (x_t.gather(1, nearest) + places - nearest) % self.V
        sure = torch.full((*x_t.shape, self.V), -40.0).scatter(2, letters[..., None], 0.0)
        return sure * (x_t < self.V).any(1)[:, None, None]


def alphabet_model(length: int, process: str = "absorb") -> LoadedModel:
    tokenizer = CharTokenizer(ALPHABET)
    made = getattr(cedd, process)(tokenizer.vocab_size)
    model = AlphabetNetwork(tokenizer.vocab_size)
    folder = ModelFolder(model, made, cedd.get_method("cedd"), tokenizer, length, {}, Path())  # pyright: ignore
    return LoadedModel(folder, torch.device("cpu"))


def alphabet_text(count: int, first: int = 0) -> str:
    """Letters in alphabetical order, cyclically."""
    return "".join(itertools.islice(itertools.cycle(LETTERS), first, first + count))


def with_blanks(text: str, blanks: list[range]) -> str:
    ends = [0, *(blank.stop for blank in blanks)]
    parts = [f"{text[end : blank.start]}____{{{len(blank)}}}" for end, blank in zip(ends[:-1], blanks, strict=True)]
    return "".join([*parts, text[ends[-1] :]])


@st.composite
def texts(draw, least_length: int = 1, least_start: int = 0) -> tuple[list[range], int, int]:
    """Blanks, the number of tokens of their text, and a smaller context length."""
    length = draw(st.integers(least_length, 40))
    blanks, end = [], least_start
    for gap, width in draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)), min_size=1, max_size=8)):
        blanks.append(range(end + gap, end + gap + width))
        end = blanks[-1].stop
    return blanks, max(length + 1, end + draw(st.integers(0, 50))), length


# ---- which windows --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(texts())
@example(([range(1)], 2, 1))
@example(([range(500)], 500, 128))
@example(([range(100, 164), range(400, 465)], 800, 128))
@example(([range(100, 110), range(154, 164)], 800, 128))  # just within half a window
@example(([range(300, 303), range(304, 504)], 900, 128))
@example(([range(30, 33), range(60, 70), range(70, 90)], 90, 40))
def test_windows_cover_every_blank_once_with_most_context(asked):
    blanks, count, length = asked
    cuts, half = infilling_windows(blanks, count, length), max(1, length // 2)
    tokens, ends = {token for blank in blanks for token in blank}, {blank.stop for blank in blanks}
    starts = {blank.start for blank in blanks}
    decided = [token for cut in cuts for token in range(cut.first, cut.last)]
    assert decided == sorted(set(decided))
    assert tokens <= set(decided)
    for cut in cuts:
        assert 0 <= cut.start <= cut.first < cut.last <= cut.stop <= count
        assert cut.stop - cut.start == length
        assert cut.last - cut.first <= half
        assert {cut.first, cut.last - 1} <= tokens
        before, after = cut.first - cut.start, cut.stop - cut.last
        if cut.last in ends:  # equal context on both sides, except at the text's ends and before later blanks
            assert (
                abs(before - after) <= 1
                or not cut.start
                or (before > after and (cut.stop == count or cut.stop in starts))
            )
            assert not (cut.stop > cut.last and cut.stop - 1 in tokens) or not cut.start
        else:  # a part of a wide blank, after which nothing is known
            assert not after or not cut.start
    for blank in blanks:
        parts = [cut for cut in cuts if cut.last > blank.start and cut.first < blank.stop]
        assert len(parts) == -(-len(blank) // half)
        sizes = [min(cut.last, blank.stop) - max(cut.first, blank.start) for cut in parts]
        assert max(sizes) - min(sizes) <= 1
    for cut, following in itertools.pairwise(cuts):  # blanks near each other share a window
        stop = next(blank.stop for blank in blanks if following.first in blank)
        assert stop - cut.first > half


@settings(deadline=None, max_examples=100)
@given(texts())
@example(([range(500)], 500, 128))
def test_windows_of_filled_text_are_centred_on_blanks(asked):
    blanks, count, length = asked
    cuts = windows_of_filled_text(blanks, count, length)
    assert [(cut.first, cut.last) for cut in cuts] == [
        (cut.first, cut.last) for cut in infilling_windows(blanks, count, length)
    ]
    for cut in cuts:
        assert 0 <= cut.start <= cut.first < cut.last <= cut.stop <= count
        assert cut.stop - cut.start == length
        before, after = cut.first - cut.start, cut.stop - cut.last
        assert abs(before - after) <= 1 or (before < after and not cut.start) or (before > after and cut.stop == count)
    (whole,) = windows_of_filled_text(blanks, count, count)
    assert (whole.start, whole.stop, whole.first, whole.last) == (0, count, 0, count)


def test_windows_depend_on_blanks_not_on_text_length():
    cuts = infilling_windows([range(10, 14), range(60, 70), range(500_000, 500_004)], 1_000_000, 128)
    assert [(cut.start, cut.first, cut.last) for cut in cuts] == [(0, 10, 70), (499_938, 500_000, 500_004)]


# ---- filled texts ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=4)
@given(texts(least_length=10, least_start=1), st.sampled_from(["analytic", "first-hitting", "probability"]))
@example(([range(1, 201)], 201, 16), "analytic")
@example(([range(1, 3), range(3, 6), range(10, 90), range(97, 98)], 98, 16), "analytic")
def test_deterministic_model_restores_text(asked, sampler):
    """For any windows, also where the only known tokens were written by the window before."""
    blanks, count, length = asked
    text, loaded = alphabet_text(count), alphabet_model(length)
    options = SamplingOptions(sampler=sampler, steps=2, seed=0)
    assert infill(loaded, with_blanks(text, blanks), options=options) == [text]
    assert {shape[1] for shape in loaded.model.read} == {length}  # pyright: ignore


def test_window_reads_output_of_previous_windows():
    """In a text that is only a blank, the first letter is random and determines all others."""
    found = set()
    for text in infill(alphabet_model(16), "____{100}", 8, options=SamplingOptions(sampler="first-hitting", seed=0)):
        assert text == alphabet_text(100, LETTERS.index(text[0]))
        found.add(text[0])
    assert len(found) > 1


@pytest.mark.parametrize("process", ["absorb", "roulette", "uniform"])
def test_text_within_context_is_filled_at_once(process):
    loaded = fixer(process, length=20)
    template = parse_template("a cat ____ on ____{5}", loaded.tokenizer)
    assert template.width == 19
    drawn = loaded.draw((3, 19), FAST, template.constraint)
    assert torch.equal(template.draw(loaded, 3, FAST), drawn)
    assert infill(loaded, "a cat ____ on ____{5}", 3, options=FAST) == [template.write(row.numpy()) for row in drawn]


ANY = st.one_of(st.sampled_from(ALPHABET), st.sampled_from("ü☃{}\n\r\t🙂é—“\ufffd\ud800\udfff"))
WORDS = BPETokenizer.train(["The cat sat on the mat, and the cat was happy."] * 50, 300)


@settings(max_examples=5, deadline=None)
@given(
    parts=st.lists(st.text(ANY, max_size=30), min_size=2, max_size=5),
    widths=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    tokens=st.sampled_from(["char", "byte", "words"]),
    process=st.sampled_from(["absorb", "roulette"]),
)
@example(["", "", "", ""], [30, 30, 30, 1], "char", "absorb")
@example(["The cat ", "\r\nsat \r\n", " 🙂 ", ""], [3, 30, 4, 1], "words", "absorb")
def test_given_text_is_returned_unchanged(parts, widths, tokens, process):
    tokenizer = {"char": CharTokenizer(ALPHABET), "byte": ByteTokenizer(), "words": WORDS}[tokens]
    text = parts[0] + "".join(f"____{{{w}}}{part}" for w, part in zip(widths, parts[1:], strict=False))
    filled = infill(fixer(process, length=8, tokenizer=tokenizer), text, options=SamplingOptions(steps=2, seed=0))[0]
    if tokens == "char":
        place = 0
        for part, width in zip(parts, widths, strict=False):
            assert filled[place : place + len(part)] == part
            place += len(part) + width
    assert filled.startswith(parts[0])
    assert filled.endswith(parts[-1])
    rest = filled
    for part in parts:  # in their order
        assert part in rest
        rest = rest[rest.index(part) + len(part) :]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        method: load(save_random(folder / method, "absorb", method, time_input="none" if method == "cedd" else "time"))
        for method in ("cedd", "ar")
    }


LONG = "the cat sat on the mat and ____ the dog ran. " * 6


def test_texts_depend_only_on_their_seeds(runs):
    """They do not depend on the batch size, and equal blanks are filled differently."""
    three = infill(runs["cedd"], LONG, 3, options=FAST)
    assert len(set(three)) == 3
    for more in (replace(FAST, batch=2), replace(FAST, deterministic=True)):
        assert infill(runs["cedd"], LONG, 3, options=more) == three
    assert infill(runs["cedd"], LONG, 1, options=FAST) == three[:1]
    seeds = cedd.samplers.text_seeds(0, 3)
    assert infill(runs["cedd"], LONG, 2, options=SamplingOptions(steps=8, seeds=seeds[1:])) == three[1:]
    width = len(LONG) // 6
    assert len({three[0][i * width : (i + 1) * width] for i in range(6)}) > 4


OVERLAPPING = "the cat sat on a mat____{14} an ____{3} the dog ran on and on and on."
"""The 32-token window of the first blank contains the second, which is drawn but not kept."""


@pytest.mark.parametrize(
    ("method", "text"),
    [
        pytest.param("cedd", LONG, marks=pytest.mark.slow),
        ("cedd", OVERLAPPING),
        ("ar", "the cat sat on the mat and then ____{60}"),
    ],
)
def test_callback_receives_whole_texts_and_one_time_for_all_windows(runs, method, text):
    loaded, template = runs[method], parse_template(text, runs[method].tokenizer)
    seen = []
    options = SamplingOptions(steps=8, seed=0, batch=2)
    drawn = template.draw(loaded, 3, replace(options, callback=lambda step, t, x: seen.append((step, t, x.clone()))))
    assert torch.equal(drawn, template.draw(loaded, 3, options))
    starts = [number for number, (step, _, _) in enumerate(seen) if step == 0]
    assert len(starts) == 2  # a batch of two texts and one of one
    for part, rows in ((seen[: starts[1]], drawn[:2]), (seen[starts[1] :], drawn[2:])):
        times = [t for _, t, _ in part]
        assert [step for step, _, _ in part] == list(range(len(part)))
        assert times == sorted(times, reverse=True)
        assert times[0] == pytest.approx(1)
        assert times[-1] == pytest.approx(0, abs=0.05)
        assert torch.equal(part[-1][2], rows)
        assert all((x[:, template.given] == template.ids[template.given]).all() for _, _, x in part)
        blank = part[0][2][:, ~template.given]
        assert (blank[0] == loaded.process.vocab_size).float().mean() > 0.8
    cuts = infilling_windows(template.blanks, template.width, loaded.length)
    for _, t, x in seen:  # later blanks are still masked
        turn = min(int((1 - t) * len(cuts) + 1e-6), len(cuts) - 1)
        later = (torch.arange(template.width) >= cuts[turn].last) & ~template.given
        assert (x[0, later] == loaded.process.vocab_size).all()


def test_long_text_is_recorded_and_displayed_where_it_changes(runs, tmp_path):
    template = parse_template(LONG, runs["cedd"].tokenizer)
    trajectory = Trajectory(template.tokenizer, template.characters)
    (first, _) = template.fill(runs["cedd"], 2, SamplingOptions(steps=8, seed=0, batch=1, callback=trajectory))
    assert "".join(trajectory.pieces(trajectory.frames[-1])) == first  # and not the second text
    assert all(trajectory.changed(k).any() for k in range(1, len(trajectory.frames)))
    assert last_frame(trajectory, 1000).plain.startswith(first)
    shown = last_frame(trajectory, 20).plain.split("\n")[0]
    assert shown in first
    assert 30 < len(shown) < 60
    trajectory.save_gif(tmp_path / "x.gif", columns=20)
    with pytest.raises(ValueError, match=r"the text has 1,\d\d\d lines; a picture shows at most 1,000"):
        Trajectory(ByteTokenizer(), {}, [torch.full((1500,), ord("\n")).numpy()], [1.0]).save_gif(tmp_path / "y.gif")


def test_invalid_infill_requests_are_rejected(runs):
    for text in (LONG, "the cat ____{60} sat."):  # in the second, windows before the last have only a prompt
        read = list[tuple[object, ...]]()
        with pytest.raises(ValueError, match="prompt, not text after a blank"):
            infill(runs["ar"], text, options=SamplingOptions(callback=lambda *state, read=read: read.append(state)))
        assert not read
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch": 0}, "batch must be at least 1"),
        ({"seeds": [1, 2]}, "1 sequences need a seed each \\(got 2"),
        ({"seed": 1, "seeds": [1]}, "not both"),
    )
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            infill(runs["cedd"], LONG, options=SamplingOptions(**options))
    with pytest.raises(ValueError, match="n must be at least 1"):
        infill(runs["cedd"], LONG, 0)
