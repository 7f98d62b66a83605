"""Generate, infill and correct: given text is kept, errors are reported, nothing is lost."""

import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import cedd
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer, CharAsGPT2, CharTokenizer, IdTokenizer, PaddedTokenizer
from cedd.data.windows import windows
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.samplers import SamplingOptions
from cedd.tasks import Trajectory, correct, generate, infill, load, parse_template
from cedd.tasks.generate import generate_ids, prompt_template
from cedd.tasks.template import Blank, Given, Template
from tests.tasks.models import ALPHABET, fixer, save_random

FAST = SamplingOptions(steps=8, seed=0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        (process, method): save_random(folder / f"{process}-{method}", process, method)
        for process, method in [
            ("roulette", "bayes"), ("absorb", "cedd"), ("absorb", "dfm"), ("uniform", "sedd"), ("absorb", "ar"),
        ]
    }  # fmt: skip


# ---- generate -------------------------------------------------------------------------------------------------------


def test_crlf_is_restored_and_displayed_as_one_character():
    """Without the carriage return, which the model does not know, characters are at the positions of their tokens."""
    tokenizer = CharTokenizer(ALPHABET + "\n")
    template = parse_template("a\r\nb____\r\nc", tokenizer)
    assert template.width == 9
    assert template.characters == {0: "a", 1: "\n", 2: "b", 7: "\n", 8: "c"}
    assert template.write(tokenizer.encode("a\nbcats\nc")) == "a\r\nbcats\r\nc"
    assert template.write(tokenizer.encode("a\nbc\n\ns\nc")) == "a\r\nbc\r\n\r\ns\r\nc"
    assert parse_template("é____", ByteTokenizer()).characters == {}  # a byte is not a character


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPETokenizer.train(["a cat\nsat\n\non a mat\n"] * 50, 270)])
def test_new_lines_end_like_given_lines(tokenizer):
    """Also for tokens that are bytes or words; with mixed line endings, a new line ends in a plain newline."""
    written = tokenizer.encode("x\n\ny")
    for end, ends in (("\r\n", "\r\n"), ("\n", "\n"), ("", "\n"), ("\r\n\n", "\n"), ("\r", "\n")):
        template = Template.of([f"a cat{end}", len(written), f"{end}sat"], tokenizer)
        read = end.replace("\r\n", "\n")
        before, after = tokenizer.encode(f"a cat{read}"), tokenizer.encode(f"{read}sat")
        assert template.ids.tolist() == [*before, *[0] * len(written), *after]
        ids = np.concatenate([before, written, after])
        assert template.write(ids) == f"a cat{end}x{ends}{ends}y{end}sat"
    split = Template.of(["a\r", len(written), "\nb"], tokenizer)
    assert split.write(np.concatenate([tokenizer.encode("a\r"), written, tokenizer.encode("\nb")])) == "a\rx\n\ny\nb"


@pytest.mark.parametrize(
    "kind",
    [
        *(("roulette", "bayes"), ("absorb", "ar")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (("absorb", "cedd"), ("uniform", "sedd"))),
    ],
)
def test_texts_begin_with_prompt(runs, kind):
    model = cedd.load(runs[kind], device="cpu")
    texts = model.generate(3, prompt="The cat", steps=8, seed=1)
    assert len(texts) == 3
    assert len(set(texts)) == 3
    for text in texts:
        assert text.startswith("The cat")
        assert len(text) == model.length
        assert set(text) <= set(ALPHABET)
    assert texts == model.generate(3, prompt="The cat", steps=8, seed=1)
    assert texts != model.generate(3, prompt="The cat", steps=8, seed=2)


def test_generate_in_batches(runs):
    model = load(runs["absorb", "cedd"], device="cpu")
    assert len(model.generate(7, steps=4, batch=3, length=5)) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "a" * 40}, "the prompt has 40 tokens, but the text only 32"),
        ({"length": 0}, r"at least 1 \(got 0\)"),
        ({"length": 16.0}, r"a number of tokens, at least 1 \(got 16.0\)"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": 1.5}, "n must be at least 1 \\(got 1.5"),
        ({"sampler": "first-hitting"}, "use sampler='analytic'"),
    ],
)
def test_invalid_generate_options_are_rejected(runs, options, message):
    model = load(runs["roulette", "bayes"], device="cpu")
    with pytest.raises(ValueError, match=message):
        model.generate(**options)


@pytest.mark.parametrize("text", [["a ____ cat", "teh"], b"a ____", None])
@pytest.mark.parametrize("verb", ["infill", "correct", "perplexity"])
def test_non_string_text_is_rejected(runs, verb, text):
    if verb == "perplexity" and isinstance(text, list):
        text = [text]  # it accepts a list of texts
    with pytest.raises(TypeError, match=r"must be a string \(got (list|bytes|NoneType)\)"):
        getattr(load(runs["roulette", "bayes"], device="cpu"), verb)(text)


@pytest.mark.parametrize("process", ["roulette", "absorb"])
@pytest.mark.parametrize("verb", ["generate", "infill", "correct"])
def test_unknown_option_is_named_in_error(runs, verb, process):
    """Also for a task that the model does not support: correct, on absorb."""
    model = load(runs[process, "bayes" if process == "roulette" else "cedd"], device="cpu")
    words = {"generate": (), "infill": ("a ____",), "correct": ("teh",)}[verb]
    with pytest.raises(ValueError, match=r"unexpected argument 'stpes' in the options of [a-z]+; did you mean 'steps'"):
        getattr(model, verb)(*words, stpes=1)


def test_missing_model_folder_is_reported(tmp_path):
    with pytest.raises(ValueError, match="no run or model at"):
        load(tmp_path / "nothing")


# ---- infill ---------------------------------------------------------------------------------------------------------


ANY = st.one_of(st.sampled_from(ALPHABET), st.sampled_from("ü☃{}\n\r\t🙂é—“\ufffd\ud800\udfff"))


@settings(max_examples=8, deadline=None)
@given(parts=st.lists(st.text(ANY, max_size=6), min_size=2, max_size=3), tokens=st.sampled_from(["char", "96", "byte"]))
@example(["Ünïcödé ", " 😀 ", ""], "96")
@example(["{a} ", " b"], "char")
def test_any_given_text_is_returned_unchanged(parts, tokens):
    """Including unknown characters and lone surrogates, around blanks and in a prompt."""
    tokenizer = {"char": CharTokenizer(ALPHABET), "96": CharTokenizer(ALPHABET, "\ufffd"), "byte": ByteTokenizer()}
    loaded = fixer("roulette", length=200, tokenizer=tokenizer[tokens])
    filled = infill(loaded, "____{5}".join(parts), options=FAST)[0]
    if tokens != "byte":  # five bytes may be fewer characters
        place = 0
        for part in parts:
            assert filled[place : place + len(part)] == part
            place += len(part) + 5
    assert filled.startswith(parts[0])
    assert filled.endswith(parts[-1])
    assert generate(loaded, prompt=parts[0], options=FAST)[0].startswith(parts[0])


def test_unknown_characters_are_read_as_most_similar_ones():
    tokenizer = CharTokenizer(ALPHABET, "\ufffd")
    template = parse_template("é“ ____ ☃", tokenizer)
    assert template.constraint is not None
    held = template.constraint.tokens[template.given].numpy()
    assert tokenizer.decode(held) == "e\ufffd  \ufffd"  # the alphabet has no quotes


@pytest.mark.parametrize("process", ["uniform", "roulette", "absorb"])
def test_placeholder_of_unknown_characters_is_never_sampled(process):
    """Even if the model predicts nothing else; a placeholder that is a character itself is sampled like others."""

    def written(stand_in: str) -> str:
        loaded = fixer(process, tokenizer=CharTokenizer(ALPHABET, stand_in))
        believed = loaded.folder.model.get_buffer("table")
        believed[:, int(loaded.folder.tokenizer.encode(stand_in)[0])] += 20.0
        at_once = replace(FAST, deterministic=False)
        return "".join(generate(loaded, 20, options=at_once) + infill(loaded, "a ____ b", 20, options=at_once))

    assert "\ufffd" not in written("\ufffd")
    assert written(".").count(".") > 300


def test_blank_syntax():
    tokenizer = fixer().folder.tokenizer
    template = parse_template("a ____ b___{2}", tokenizer)
    assert template.given.tolist() == [True] * 2 + [False] * 4 + [True] * 2 + [False] * 2
    assert template.width == 10
    assert parse_template("______", tokenizer).given.tolist() == [False] * 6
    with pytest.raises(ValueError, match="no blank"):
        parse_template("a cat", tokenizer)
    for nothing in ("____{0}", "____{-3}", "____{}", "____{ 3 }", "____{2.5}", "____{name}", "____{"):
        with pytest.raises(ValueError, match=re.escape(f"the blank '{nothing}' has no width; write ____{{12}}, or ")):
            parse_template(f"a {nothing}", tokenizer)
    for wrong, shown in (
        ("a ___{int main() { return 0; }}", "'___{int main() { return 0; }'"),
        (f"a ____{{{'x' * 30}}} b", f"'____{{{'x' * 30}}}'"),
        (f"a ____{{{'x' * 300}}} b", f"'____{{{'x' * 38}…'"),  # shows that it is truncated
        ("one\ntwo ____ and ____{\n  three\n}\n", "'____{' in line 2"),
        ("one ____{}\n", "'____{}'"),  # a file of one line
    ):
        with pytest.raises(ValueError, match=re.escape(f"the blank {shown} has no width; write ____{{12}}, or ")):
            parse_template(wrong, tokenizer)
    text = parse_template("a ____{4}{} b ____ {}", tokenizer)  # braces of the text
    assert [part.text for part in text.parts if isinstance(part, Given)] == ["a ", "{} b ", " {}"]
    for many in ("____{99999999999999999999}", "____{600000} ____{600000}"):  # rejected before it is built
        with pytest.raises(ValueError, match="tokens in blanks; at most 1,000,000 are filled"):
            infill(fixer(length=8), f"a cat {many}")


WORDS = BPETokenizer.train(["The cat sat on the mat, and the cat was happy."] * 50, 300)


@settings(max_examples=10, deadline=None)
@given(parts=st.lists(st.text("abT. ☃", max_size=6), min_size=2, max_size=3))
@example(["The ", " sat on the ", "."])
@example(["The  ", ""])
def test_space_before_blank_belongs_to_word_in_blank(parts):
    """The model does not receive the space as a separate token; the text still has exactly one space."""
    loaded = fixer("absorb", length=64, tokenizer=WORDS)
    assert WORDS.encode(" cat").tolist() == [WORDS.vocab["Ġcat"]]
    filled = infill(loaded, "____{2}".join(parts), options=FAST)[0]
    assert filled.startswith(parts[0])
    assert filled.endswith(parts[-1])
    template = parse_template("The ____{1} sat", WORDS)
    ids = WORDS.encode("The cat sat")
    assert template.width == len(ids)
    assert template.given.tolist() == [True, False, *[True] * (len(ids) - 2)]
    assert template.write(ids) == "The cat sat"
    assert prompt_template(loaded, "The ", 8).given.tolist() == [True] + [False] * 7
    assert generate(loaded, prompt=parts[0], options=FAST)[0].startswith(parts[0])


PADDED = PaddedTokenizer(WORDS)


@pytest.fixture(scope="module")
def word_models(tmp_path_factory):
    """Models of word pieces that predict any piece after a space."""
    folder, kinds = tmp_path_factory.mktemp("word_models"), [("absorb", "cedd"), ("absorb", "sedd"), ("absorb", "ar")]
    kinds += [("uniform", "cedd"), ("uniform", "sedd"), ("roulette", "bayes")]
    made = {"-".join(kind): save_random(folder / "-".join(kind), *kind, tokenizer=WORDS) for kind in kinds}
    made["padded"] = save_random(folder / "padded", "absorb", "cedd", tokenizer=PADDED)
    return {name: load(path, device="cpu") for name, path in made.items()}


FILLED = [
    ("absorb-cedd", {}), ("absorb-cedd", {"sampler": "probability"}), ("absorb-cedd", {"top_p": 0.3}), ("padded", {}),
    ("absorb-sedd", {}), ("uniform-cedd", {"sampler": "euler"}), ("uniform-sedd", {}), ("roulette-bayes", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), FILLED)
@pytest.mark.parametrize("far", [False, True])
def test_blank_after_space_begins_with_spaced_token(word_models, name, how, far):
    """Also in windows of a long text; other tokens are drawn where no space precedes."""
    writer, before = word_models[name], "the cat sat on the mat. " * (4 * far)
    template = parse_template(f"{before}Mr. O ____{{2}} went, a____{{3}} T", writer.tokenizer)
    assert (template.width > writer.length) is far
    first, second = (blank.start for blank in template.blanks)
    options = SamplingOptions(steps=4, seed=0, deterministic=False, **how)  # 16 texts are read at once
    ids = template.draw(writer, 16, options).numpy()
    spaced = writer.tokenizer.spaced
    assert spaced[ids[:, first]].all()
    assert not spaced[ids[:, second]].all()
    for row in ids:
        filled = template.write(row)
        assert filled.startswith(f"{before}Mr. O ")
        assert " went, a" in filled
        assert filled.endswith(" T")


def test_text_after_prompt_ending_in_space_begins_with_spaced_token(word_models):
    """For an autoregressive model and for a masked model."""
    for name in ("absorb-ar", "absorb-cedd"):
        template = prompt_template(word_models[name], "The cat ", 12)
        ids = template.draw(word_models[name], 12, FAST).numpy()
        assert WORDS.spaced[ids[:, template.blanks[0].start]].all()
        assert not WORDS.spaced[ids[:, template.blanks[0].start + 1]].all()
    full = prompt_template(word_models["absorb-ar"], "The cat ", len(WORDS.encode("The cat")))
    assert full.only is None  # nothing is left to be written
    assert full.fill(word_models["absorb-ar"], 1) == ["The cat "]


def test_leading_blank_begins_with_word(word_models):
    """The word's space is not written; a template that is only a blank is generated like any text."""
    writer = word_models["absorb-cedd"]
    template = parse_template("____{3} was ____{1}", WORDS)
    ids = template.draw(writer, 16, FAST).numpy()
    assert WORDS.spaced[ids[:, 0]].all()
    assert not WORDS.spaced[ids[:, 1]].all()
    for row in ids:
        assert " " + template.write(row) == WORDS.decode(row)
    blank = parse_template("____{9}", WORDS)
    assert blank.constraint is None
    assert blank.fill(writer, 3, FAST) == generate(writer, 3, length=9, options=FAST)
    (one, two) = (part for part in parse_template("a____ ____", WORDS).parts if isinstance(part, Blank))
    assert (one.begins_word, two.begins_word) == (False, True)
    assert parse_template("____ cat", CharTokenizer(ALPHABET)).only is None


def test_spaced_marks_tokens_that_begin_with_space():
    for tokenizer in (WORDS, PADDED):
        spaced = {tokenizer.decode([token]) for token in np.flatnonzero(tokenizer.spaced).tolist()}
        assert {" ", " cat", " the"} <= spaced
        assert all(text.startswith(" ") for text in spaced)
        assert len(tokenizer.spaced) == tokenizer.vocab_size
        assert not tokenizer.spaced[list(tokenizer.silent)].any()
    assert np.flatnonzero(ByteTokenizer().spaced).tolist() == [32]
    letters = CharTokenizer(ALPHABET)  # blanks may begin with anything, since the given space is a token
    assert parse_template("Mr. O ____ went", letters).only is None


def test_model_folder_can_set_sampling_defaults(tmp_path):
    """The defaults apply to options that are not given; given options override them."""
    plain, own = (
        load(save_random(tmp_path / name, "absorb", "cedd", extra=extra), device="cpu")
        for name, extra in (("plain", {}), ("own", {"sampling": {"temperature": 0.0, "steps": 2}}))
    )
    assert own.generate(seed=1) == plain.generate(seed=1, steps=2, temperature=0.0) != plain.generate(seed=1)
    assert own.with_defaults(SamplingOptions(), 32) == SamplingOptions(steps=2, temperature=0.0, top_p=1.0)
    assert plain.with_defaults(SamplingOptions(), 32) == SamplingOptions(steps=64, temperature=1.0, top_p=1.0)
    asked = SamplingOptions(steps=8, temperature=1.0, top_p=0.5)
    assert own.with_defaults(asked, 32) == asked
    assert own.generate(seed=1, steps=8, temperature=1.0) == plain.generate(seed=1, steps=8)
    for wrong in ("temprature", 0.0), ("top_p", "all"):
        damaged = load(save_random(tmp_path / wrong[0], extra={"sampling": dict([wrong])}), device="cpu")
        with pytest.raises(ValueError, match=r"numbers for steps, temperature, top_p \(got {}={!r}".format(*wrong)):
            damaged.generate(seed=1)


@pytest.mark.parametrize("kind", ["sampling", "correction"])
def test_invalid_default_options_are_rejected(tmp_path, kind):
    damaged = save_random(tmp_path / "damaged", extra={kind: [1]})
    with pytest.raises(ValueError, match=rf"config\.json: {kind} must be an object of options \(got \[1\]"):
        load(damaged, device="cpu")


def test_end_of_text_token_is_not_generated():
    """Even if the model predicts nothing but that token."""
    loaded = fixer("absorb", tokenizer=WORDS)
    loaded.folder.model.get_buffer("table")[:, WORDS.eos_id] += 20.0
    assert "<|" not in generate(loaded, options=FAST)[0]


def test_short_text_is_padded_with_masks_for_time_free_network(tmp_path):
    """Its outputs are those for the text in the middle of a block of masks; other networks receive the text alone."""
    told = load(save_random(tmp_path / "told", "absorb", "cedd"), device="cpu")
    free = load(save_random(tmp_path / "free", "absorb", "cedd", time_input="none"), device="cpu")
    shuffled = load(save_random(tmp_path / "shuffled", "roulette", "bayes", time_input="none"), device="cpu")
    assert [one.reads_passages for one in (told, free, shuffled)] == [False, True, False]
    assert free.network(1, free.length) is free.model
    assert told.network(1, 6) is told.model
    conditioning = free.model.get_submodule("backbone.conditioning.modulation")
    torch.nn.init.normal_(conditioning.get_parameter("bias"))  # open gates: positions see each other
    x, sigma = torch.tensor([[1, 2, len(ALPHABET), 3, 4, 5]]), torch.zeros(1)
    positions = max(12, free.length // 4)
    block = torch.full((1, positions), len(ALPHABET))
    start = (positions - 6) // 2
    block[:, start : start + 6] = x
    network = cast(Callable[[Tensor, Tensor], Tensor], free.network(1, 6))
    torch.testing.assert_close(network(x, sigma), free.model(block, sigma)[:, start : start + 6])
    assert not torch.allclose(network(x, sigma), free.model(x, sigma), atol=1e-3)
    for sampler in ("analytic", "first-hitting"):
        text = free.infill("a cat ____", seed=0, sampler=sampler)
        assert text.startswith("a cat ")
        assert len(text) == 10


def test_likelihoods_of_short_text_use_same_mask_padding_as_samples(tmp_path, monkeypatch):
    """Perplexity and the likelihood of an answer are computed with mask padding, as samples are drawn."""
    model, shown = load(save_random(tmp_path / "free", "absorb", "cedd", time_input="none"), device="cpu"), []
    features = model.model.features
    monkeypatch.setattr(
        model.model, "features", lambda x_t, *how, **more: shown.append(x_t) or features(x_t, *how, **more)
    )
    model.generate(length=6, steps=4)
    model.perplexity("abc de", draws=4)
    TextLikelihoods(model, draws=4).answer("abc", " de")
    positions = max(12, model.length // 4)
    assert {x_t.shape[1] for x_t in shown} == {positions}
    start = (positions - 6) // 2
    assert all(
        (x_t[:, :start] == len(ALPHABET)).all() and (x_t[:, start + 6 :] == len(ALPHABET)).all() for x_t in shown
    )


def test_autoregressive_model_rejects_infilling(runs):
    with pytest.raises(ValueError, match="prompt, not text after a blank"):
        load(runs["absorb", "ar"], device="cpu").infill("a ____ b")


# ---- correct --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.one_of(st.sampled_from(ALPHABET), st.sampled_from("ü☃\n🙂\ud800\udfff")), max_size=90))
@example("q" * 100)
@example("")
def test_correction_fixes_mistakes_and_loses_nothing(text):
    """In any text, also one much longer than the context, exactly the letters q and z are corrected."""
    result = correct(fixer(), text, change="all")
    assert result == text.replace("q", "a").replace("z", "y")
    assert result.original == text
    assert [change.position for change in result.changes] == [i for i, c in enumerate(text) if c in "qz"]
    for change in result.changes:
        assert change.before == text[change.position]
        assert change.after == result[change.position]
        assert change.confidence == pytest.approx(0.9 if change.before == "q" else 0.6, abs=0.02)
        assert change.error_probability == pytest.approx(1.0 if change.before == "q" else 0.61, abs=0.02)


def test_threshold_protects_plausible_letters():
    assert correct(fixer(), "qz", threshold=0.3) == "az"
    assert correct(fixer(), "qz", threshold=0.5) == "ay"
    assert correct(fixer(), "qz", threshold=0.0) == "qz"


@pytest.mark.parametrize("process", ["uniform", "roulette"])
def test_correction_in_many_steps(process):
    result = correct(fixer(process), "T cqt sqt on q mqt ü", steps=16, threshold=0.3, seed=1)
    assert result == "T cat sat on a mat ü"
    assert [change.before for change in result.changes] == ["q"] * 4
    assert all(math.isfinite(change.confidence) for change in result.changes)


def test_correction_with_bytes_and_partial_vocabularies():
    """Tokens that are not characters are passed through; a token without text is never written."""
    assert correct(fixer(tokenizer=ByteTokenizer()), "qü\ud800z") == "aü\ud800y"
    table = CharAsGPT2({c: 7 * i + 1 for i, c in enumerate(ALPHABET)}, vocab_size=400)
    loaded = fixer(tokenizer=table)
    believed = loaded.folder.model.get_buffer("table")
    believed[int(table.encode("b")[0])] = 0.0
    believed[int(table.encode("b")[0]), 399] = 9.0  # certain of a token that is not a character
    assert correct(loaded, "qbz") == "aby"


@settings(deadline=None)
@given(count=st.integers(1, 400), length=st.integers(1, 64))
def test_windows_decide_every_token_once(count, length):
    cuts = windows(count, length)
    decided = np.concatenate([np.arange(w.first, w.last) for w in cuts])
    assert np.array_equal(decided, np.arange(count))
    for w in cuts:
        assert 0 <= w.start <= w.first <= w.last <= w.stop <= count
        assert w.stop - w.start == min(length, count)


def test_correction_is_rejected_for_masking_and_causal_models(runs):
    with pytest.raises(ValueError, match="only masks"):
        load(runs["absorb", "cedd"], device="cpu").correct("teh")
    with pytest.raises(ValueError, match="autoregressive"):
        load(runs["absorb", "ar"], device="cpu").correct("teh")


# ---- perplexity and the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [("roulette", "bayes"), ("absorb", "ar")])
def test_perplexity_of_text(runs, kind):
    model = load(runs[kind], device="cpu")
    result = model.perplexity("the cat sat on the mat and the dog sat on the cat. then all of them sat on the hat.")
    assert result == pytest.approx(math.exp(result.nats_per_token))
    assert result.ci95[0] <= result <= result.ci95[1]
    assert 5 < result < 5000
    with pytest.raises(ValueError, match="empty"):
        model.perplexity("")


def test_perplexity_beyond_float64_is_infinite(runs):
    model = load(runs["absorb", "ar"], device="cpu")
    with torch.no_grad():
        for weight in model.model.parameters():
            weight.mul_(100.0)
    result = model.perplexity("the cat")
    assert result == math.inf
    assert 700 < result.nats_per_token < math.inf
    assert result.ci95 == (math.inf, math.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "length", "equal"),
    [
        *(("roulette", length, False) for length in (32, 64, 83, 160)),
        *((process, 160, True) for process in ("roulette", "absorb", "uniform")),
    ],
)
def test_perplexity_error_matches_spread_of_repetitions(runs, process, length, equal):
    """The reported error matches the spread over seeds: for one block, several different or equal ones, and blocks
    with a remainder.

    The standard deviation of 150 repetitions has an error of 6%, and 7 to 10% for costs with long tails; a correct
    error is outside of the limits in fewer than one case of a hundred. Squared differences of single draws, which
    ignore that times are stratified over the blocks, would be 1.6 to 1.9 times too large.
    """
    method = {"roulette": "bayes", "absorb": "cedd", "uniform": "sedd"}[process]
    model = load(runs[process, method], device="cpu")
    different = "the cat sat on the mat, " + "q" * 40 + " zzzz.,.,.," + "TTTT " * 30
    text = ("the cat sat on the mat and so on" * 5 if equal else different)[:length]
    found = [model.perplexity(text, draws=8, seed=seed) for seed in range(150)]
    scatter = np.std([one.nats_per_token for one in found], ddof=1)
    stated = np.sqrt(np.mean([one.stderr**2 for one in found]))
    assert 0.8 < stated / scatter < 1.3
    middle = np.mean([one.nats_per_token for one in found])
    inside = [math.log(low) <= middle <= math.log(high) for low, high in (one.ci95 for one in found)]
    assert sum(inside) >= 134  # 142 expected; fewer than 134 in three cases of a thousand


@pytest.fixture
def free(tmp_path):
    """A time-free model that only masks, whose outputs depend on the other positions."""
    model = load(save_random(tmp_path / "free", "absorb", "cedd", time_input="none"), device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def test_perplexity_of_short_text_is_exact(free):
    ids = torch.from_numpy(free.tokenizer.encode("abc de"))[None]
    nats = float(cedd.exact_likelihood(free.reader(6), free.process, ids, range(6), method="cedd"))
    found = free.perplexity("abc de")
    assert found.bound == "exact"
    assert found.nats_per_token == pytest.approx(nats / 6)
    assert (found.stderr, found.ci95) == (0.0, (found, found))
    above = free.perplexity("abc de", bound="tight", draws=256)
    assert above.bound == "tight"
    assert above.nats_per_token > found.nats_per_token
    weighted = free.perplexity("abc de", bound="importance", orders=256)
    assert weighted.bound == "importance"
    assert weighted.nats_per_token == pytest.approx(found.nats_per_token, abs=5 * weighted.stderr + 0.003)
    assert weighted.nats_per_token < above.nats_per_token
    assert free.perplexity("abc de", draws=8).bound == "tight"  # 63 evaluations instead of 8
    assert free.perplexity("abc de", draws=8, bound="exact") == pytest.approx(found)
    with pytest.raises(ValueError, match=r"at most 12 tokens \(got 14\)"):
        free.perplexity("the cat the ca", bound="exact")
    with pytest.raises(ValueError, match="bound must be exact, tight or importance"):
        free.perplexity("abc", bound="j1")
    with pytest.raises(ValueError, match="orders has no effect without bound='importance'"):
        free.perplexity("abc", orders=4)


def test_perplexity_of_list_matches_single_texts(free, runs):
    texts = ["abc de", "the cat sat on the mat", "abc", "cat", "de abc"]
    found = free.perplexity(texts, draws=32)
    assert [one.bound for one in found] == ["exact", "tight", "exact", "exact", "exact"]
    assert found == pytest.approx([free.perplexity(text, draws=32) for text in texts], rel=1e-4)
    causal = load(runs["absorb", "ar"], device="cpu")
    both = ["the cat sat on the mat and the dog sat on the cat.", "a cat"]
    assert causal.perplexity(both) == pytest.approx([causal.perplexity(text) for text in both], rel=1e-4)
    assert free.perplexity([]) == []
    with pytest.raises(ValueError, match="empty"):
        free.perplexity(["a", ""])
    with pytest.raises(TypeError, match="must be a string"):
        free.perplexity(["a", 3])
    assert [free.perplexity([], bound=bound) for bound in (None, "exact", "tight", "importance")] == [[]] * 4


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("free", "importance"),
        ("replaces", "tight"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("free", "tight"), ("masks", "tight"), ("masks", "importance"))
        ),
    ],
)
def test_bounds_of_list_match_single_texts_in_fewer_calls(free, runs, kind, bound, monkeypatch):
    model = {"free": free, "masks": load(runs["absorb", "cedd"]), "replaces": load(runs["roulette", "bayes"])}[kind]
    texts = ["abc de", "the cat sat on the mat", "de abc", "that on sat ", "cat bc"]
    how = {"bound": bound, "seed": 3} | ({"orders": 6} if bound == "importance" else {"draws": 4})
    calls, features = [], model.model.features
    monkeypatch.setattr(
        model.model, "features", lambda x_t, *given, **more: calls.append(len(x_t)) or features(x_t, *given, **more)
    )
    alone = [model.perplexity(text, **how) for text in texts]
    separate = calls.copy()
    calls.clear()
    for order in ([0, 1, 2, 3, 4], [4, 1, 0]):
        found = model.perplexity([texts[number] for number in order], **how)
        for number, one in zip(order, found, strict=True):
            assert one == pytest.approx(alone[number], rel=1e-5)
            assert one.stderr == pytest.approx(alone[number].stderr, rel=1e-3)
            assert (one.bound, one.tokens) == (bound, len(texts[number]))
        if len(order) == len(texts):
            assert len(calls) < 0.8 * len(separate)
            assert sum(calls) == sum(separate)


def test_error_in_one_text_of_list_ends_all_threads(free, monkeypatch):
    threads = threading.active_count()
    with torch.no_grad():
        next(iter(free.model.head.parameters())).fill_(math.nan)
    with pytest.raises(ValueError, match="the network returned nan"):
        free.perplexity(["abc de", "the cat", "cat a"], bound="tight", draws=4)
    for _ in range(100):
        if threading.active_count() == threads:
            break
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_log_likelihood_of_answers(free, runs):
    values = free.log_likelihood("the cat", [" a", " b"])
    assert all(one.exact and one.stderr == 0 and one.tokens == 2 for one in values)
    ids = torch.from_numpy(free.tokenizer.encode("the cat a"))[None]
    nats = cedd.exact_likelihood(free.reader(9), free.process, ids, [7, 8], method="cedd")
    assert float(values[0]) == pytest.approx(-float(nats))
    mixed = free.log_likelihood("the cat", [" a", " sat on the mat"])
    assert not any(one.exact for one in mixed)
    assert free.log_likelihood("", ["a"])[0] < 0
    causal = load(runs["absorb", "ar"], device="cpu")
    assert all(one.exact for one in causal.log_likelihood("the cat", [" a", " sat on the mat"]))
    for bad in ("a", []):
        with pytest.raises(ValueError, match="list of at least one text"):
            free.log_likelihood("a", bad)


def test_trajectory_is_saved_as_html_and_gif(tmp_path):
    loaded = fixer("absorb")
    trajectory = Trajectory(loaded.folder.tokenizer)
    text = generate(loaded, 2, options=SamplingOptions(steps=40, seed=1, callback=trajectory))[0]
    last = trajectory.frames[-1]
    assert loaded.folder.tokenizer.decode(last) == text
    assert (trajectory.frames[0] == loaded.process.vocab_size).mean() > 0.9
    assert all(trajectory.changed(k).any() for k in range(1, len(trajectory.frames)))
    page = trajectory.page("</script><b>")
    assert "</script><b>" not in page
    assert "http" not in page
    assert page.count("<script") == 2
    trajectory.save_html(tmp_path / "run.html", "a run")
    assert "a run" in (tmp_path / "run.html").read_text("utf-8")
    trajectory.save_gif(tmp_path / "run.gif", most=5)
    from PIL import Image

    with Image.open(tmp_path / "run.gif") as picture:
        assert getattr(picture, "n_frames", 1) in range(2, 6)
    assert len(trajectory.thinned(3).frames) == 3


def test_gif_matches_font_rendering_and_renders_each_text_once(tmp_path, monkeypatch):
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    tokenizer = CharTokenizer("Tehcats. éΉ漢")  # the Ή begins left of its cell; the font has no 漢
    last = np.array(tokenizer.encode("The Ή cat sat é .. 漢"))
    when = (np.arange(len(last)) + 1) % 4
    frames = [np.where(when < k, last, tokenizer.vocab_size) for k in range(5)]
    trajectory = Trajectory(tokenizer, {}, frames, [1.0, 0.75, 0.5, 0.25, 0.0])
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), 16)
    slow = list[np.ndarray]()
    for k, frame in enumerate(frames):
        image = Image.new("RGB", (8 * 10 + 24, 4 * 22 + 24), "#14161a")
        pen = ImageDraw.Draw(image)
        for place, character in enumerate(trajectory.pieces(frame)):
            colour = "#4b5563" if when[place] >= k else "#fbbf24" if when[place] == k - 1 else "#e5e7eb"
            pen.text((12 + 10 * (place % 8), 12 + 22 * (place // 8)), character, colour, font)
        pen.text((12, 12 + 22 * 3), f"t = {trajectory.times[k]:.3f}", "#6b7280", font)
        slow.append(np.asarray(image).astype(int))

    asked, text = list[str](), ImageDraw.ImageDraw.text
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda pen, at, *a: asked.append(a[0]) or text(pen, at, *a))
    trajectory.save_gif(tmp_path / "run.gif", columns=8)
    with Image.open(tmp_path / "run.gif") as picture:
        for k, expected in enumerate(slow):
            picture.seek(k)
            found = np.asarray(picture.convert("RGB")).astype(int)
            assert np.abs(found - expected).max() <= 3  # half of one of 63 colour steps, rounded, out of 255
    assert len(asked) < 5 + 1 + 2 * 13  # the times, the mask, and each character in two colours


def test_first_hitting_calls_network_at_most_once_per_mask(monkeypatch):
    loaded = fixer("absorb")
    calls, original = [], loaded.folder.model.features
    monkeypatch.setattr(loaded.folder.model, "features", lambda x, s: calls.append(len(x)) or original(x, s))
    generate(loaded, 2, prompt="T cat", options=SamplingOptions(sampler="first-hitting", seed=0, deterministic=False))
    assert len(calls) <= 16 - 5


def test_model_repr(runs):
    assert repr(load(runs["roulette", "bayes"], device="cpu")) == (
        f"LanguageModel(bayes on roulette, V={len(ALPHABET)}, length=32)"
    )


# ---- constraints, and networks that are not in a folder --------------------------------------------------------------


def test_constraint_combines_with_prompt_and_given_text(runs):
    model = load(runs["absorb", "cedd"], device="cpu")
    a, b = model.tokenizer.encode("ab").tolist()
    where = torch.zeros(12, dtype=torch.bool)
    where[[0, 10]] = True
    held = cedd.Fixed(torch.full((12,), b), where)
    for text in model.generate(3, 12, prompt="a cat", constraint=held, steps=4, seed=0):
        assert text.startswith("a cat")  # which takes precedence where both fix a position
        assert text[10] == "b"
    for text in model.infill("a cat____{7}", 2, constraint=held, steps=4, seed=0):
        assert text.startswith("a cat")
        assert text[10] == "b"
    only_a = model.generate(1, 6, constraint=lambda x: torch.full_like(x, a), steps=4, seed=0)
    assert only_a == ["aaaaaa"]
    with pytest.raises(ValueError, match=f"a constraint needs a text of at most {model.length} tokens"):
        model.infill("a cat ____" * 99, constraint=held)


def test_infill_returns_string_or_list(runs):
    model = load(runs["absorb", "cedd"], device="cpu")
    one, several = model.infill("a ____ b", seed=1, steps=4), model.infill("a ____ b", 3, seed=1, steps=4)
    assert isinstance(several, list)
    assert one == several[0] == model.infill("a ____ b", 1, options=SamplingOptions(seed=1, steps=4))


def test_excluded_tokens_are_not_generated(runs):
    model = load(runs["absorb", "cedd"], device="cpu")
    letters = [i for i in range(model.process.vocab_size) if model.tokenizer.decode([i]).isalpha()]
    (text,) = model.generate(length=30, exclude=letters, steps=8, seed=0)
    assert not any(character.isalpha() for character in text)


def test_language_model_from_custom_network():
    tokenizer = CharTokenizer("abcd ")
    process = cedd.absorb(tokenizer.vocab_size)
    calls = []

    def network(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(x_t.shape))
        return torch.zeros(*x_t.shape, tokenizer.vocab_size)

    for own in (network, Uniform(tokenizer.vocab_size)):
        model = cedd.LanguageModel.from_network(own, process, "mdlm", tokenizer, length=16)
        assert model.method.name == "ceddt"
        (text,) = model.generate(seed=1, steps=4)
        assert len(text) == 16
        assert float(model.perplexity("abcd abcd")) == pytest.approx(tokenizer.vocab_size, rel=0.01)
        assert model.to("cpu") is model
        with pytest.raises(ValueError, match="invalid device: 'gpu'; use auto"):
            model.to("gpu")
    assert calls
    with pytest.raises(ValueError, match="network, process and tokenizer have"):
        cedd.LanguageModel.from_network(network, cedd.absorb(4), "cedd", tokenizer)
    with pytest.raises(ValueError, match=r"use model\.to\(device\)"):
        cedd.LanguageModel.from_network(network, process, "cedd", tokenizer).generate(device="cpu")


def test_default_length_is_256_tokens_after_prompt():
    tokenizer = CharTokenizer("abcd ")
    network, process = Uniform(tokenizer.vocab_size), cedd.absorb(tokenizer.vocab_size)
    model = cedd.LanguageModel.from_network(network, process, "cedd", tokenizer, length=600)
    assert len(model.generate(seed=1, steps=2)[0]) == 256
    assert len(model.generate(prompt="abcd", seed=1, steps=2)[0]) == 260
    assert len(model.generate(prompt="a" * 500, seed=1, steps=2)[0]) == 600
    assert len(model.generate(length=300, seed=1, steps=2)[0]) == 300
    assert generate_ids(model, 1, options=SamplingOptions(steps=2)).shape == (1, 600)  # evaluation uses whole sequences


@pytest.mark.parametrize("prompt", ["3 4", "3 4 ", ""])
def test_token_ids_are_separated_from_prompt(prompt: str):
    tokenizer = IdTokenizer(60)
    network, process = Uniform(tokenizer.vocab_size), cedd.absorb(tokenizer.vocab_size)
    model = cedd.LanguageModel.from_network(network, process, "cedd", tokenizer, length=8)
    (text,) = model.generate(prompt=prompt, seed=1, steps=2)
    assert text.startswith(prompt)
    assert len(tokenizer.encode(text)) == 8
    filled = model.infill(f"{prompt or '5 '}____ 7", seed=1)
    assert isinstance(filled, str)
    assert filled.endswith(" 7")
    assert len(tokenizer.encode(filled)) == len(tokenizer.encode(prompt or "5 ")) + 5


class Uniform(torch.nn.Module):
    """Equal outputs for all tokens."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(vocab_size))

    def forward(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(*x_t.shape, -1)
