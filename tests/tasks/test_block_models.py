"""Block diffusion models: texts of any length, prompts, likelihoods, the command line; long texts of other models."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cedd
from cedd.block_layout import GivenPast, InBlocks
from cedd.cli import main
from cedd.constraints import regex
from cedd.data.tokenizers import BPETokenizer, Tokenizer
from cedd.evaluation.generative import ModelJudge
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.models.folder import ModelFolder, save_folder
from cedd.models.transformer import Transformer, config_from_preset
from cedd.samplers import SamplingOptions
from cedd.tasks.generate import prompt_template
from cedd.tasks.language_model import Figure
from tests.tasks.models import ALPHABET, save_random

BLOCK, LENGTH = 4, 32


def save_blocks(
    path: Path, process: str = "absorb", method: str = "cedd", tokenizer: Tokenizer | None = None, **options: Any
) -> Path:
    """A folder with a transformer of one layer whose outputs are random but not uniform, in blocks of four."""
    chosen = tokenizer or cedd.data.tokenizers.CharTokenizer(ALPHABET)
    torch.manual_seed(0)
    made = getattr(cedd, process)(chosen.vocab_size)
    options = {"depth": 1, "dropout": 0.0, "time_conditioning": False, **options}
    config = config_from_preset("tiny", vocab_size=chosen.vocab_size, has_mask=made.has_mask, **options)
    model = Transformer(config)
    nn.init.normal_(model.head.weight, std=0.3)
    chosen_method = cedd.METHODS[method].in_blocks(BLOCK)
    save_folder(path, ModelFolder(model, made, chosen_method, chosen, LENGTH))
    return path


@pytest.fixture(scope="module")
def absorb(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.load(save_blocks(tmp_path_factory.mktemp("models") / "absorb"), device="cpu")


@pytest.fixture(scope="module")
def roulette(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    folder = save_blocks(tmp_path_factory.mktemp("models") / "roulette", "roulette", "bayes", time_conditioning=True)
    return cedd.load(folder, device="cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    """A model without blocks."""
    return cedd.load(save_random(tmp_path_factory.mktemp("models") / "whole", "absorb", "cedd"), device="cpu")


# ---- generation -------------------------------------------------------------------------------------------------


def test_shorter_text_is_prefix_of_longer_text(absorb: cedd.LanguageModel) -> None:
    (longest,) = absorb.generate(length=100, seed=1, sampler="first-hitting")
    assert len(longest) == 100
    for length in (7, 32):
        assert absorb.generate(length=length, seed=1, sampler="first-hitting") == [longest[:length]]
    assert len(absorb.generate(seed=1)[0]) == LENGTH


@pytest.mark.parametrize("prompt", ["T", "The cat sat on the mat and the dog sat there too."])
def test_prompts_of_any_length(absorb: cedd.LanguageModel, prompt: str) -> None:
    texts = absorb.generate(2, prompt=prompt, length=60, seed=2, steps=2)
    assert all(text.startswith(prompt) and len(text) == 60 for text in texts)
    assert texts == [
        absorb.generate(1, prompt=prompt, length=60, seeds=[seed], steps=2)[0]
        for seed in cedd.samplers.text_seeds(2, 2)
    ]
    assert len(set(texts)) == 2


@pytest.mark.slow
def test_roulette_blocks_with_several_samplers(roulette: cedd.LanguageModel) -> None:
    for sampler in ("analytic", "euler", "gibbs"):
        (text,) = roulette.generate(length=50, seed=1, steps=3, sampler=sampler)
        assert len(text) == 50


def test_until_end_stops_at_end_token(tmp_path: Path) -> None:
    pieces = BPETokenizer.train(["a cat sat on a mat, and the dog sat there. " * 20], 270)
    model = cedd.load(save_blocks(tmp_path / "pieces", tokenizer=pieces), device="cpu")
    assert pieces.eos_id is not None
    model.model.head.bias.data[pieces.eos_id] = 6.0  # type: ignore[union-attr]
    how: dict[str, Any] = {"length": 60, "seed": 1, "prompt": "a cat", "sampler": "first-hitting"}
    tokens = prompt_template(model, "a cat", 60).draw(
        model, 5, SamplingOptions(seed=1, sampler="first-hitting", stop=[pieces.eos_id])
    )
    texts = model.generate(5, until_end=True, **how)
    ends = []
    for row, text in zip(tokens.tolist(), texts, strict=True):
        end = row.index(pieces.eos_id) if pieces.eos_id in row else 60
        assert row[end:] == [pieces.eos_id] * (60 - end)
        assert text == "a cat" + pieces.decode(torch.tensor(row[len(pieces.encode("a cat")) : end]).numpy())
        ends.append(end)
    assert min(ends) < 20
    assert len(set(ends)) > 3
    with pytest.raises(ValueError, match="has no end-of-text token"):
        cedd.load(save_blocks(tmp_path / "chars"), device="cpu").generate(until_end=True)


def test_infill_supports_only_blanks_at_end(absorb: cedd.LanguageModel) -> None:
    assert absorb.infill("The cat ____{9}", seed=1, steps=2).startswith("The cat ")
    with pytest.raises(ValueError, match="text cannot be given in a later block than a blank"):
        absorb.infill("The ____{8} sat on the mat.", seed=1)


@pytest.mark.parametrize(
    ("which", "call", "message"),
    [
        ("absorb", lambda m: m.generate(guidance=2.0), "^guidance needs a condition: a label, a prompt or other given"),
        ("absorb", lambda m: m.generate(particles=4, temperature=0), "^particles weight texts by their probabilities"),
        ("roulette", lambda m: m.generate(particles=4), "^particles need a model that only masks"),
        ("roulette", lambda m: m.generate(constraint=regex("a+")), "^a constraint on the text .* needs a model"),
    ],
)
def test_unsupported_control_is_rejected_before_calling_network(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, which: str, call: Any, message: str
) -> None:
    model: cedd.LanguageModel = request.getfixturevalue(which)
    monkeypatch.setattr(model.model, "features", lambda *_, **__: pytest.fail("the network was called"))
    with pytest.raises(ValueError, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert "Constraint" not in str(caught.value)  # no names of classes


@pytest.mark.slow
def test_particles_with_prompts_constraints_and_rewards(absorb: cedd.LanguageModel) -> None:
    """With prompts of any length, a constraint across blocks, and a reward on texts."""
    seen: list[str] = []

    def reward(texts: list[str]) -> list[float]:
        seen.extend(texts)
        return [text.count("e") for text in texts]

    for prompt in ("The cat", "The cat sat on the mat and the dog sat there too."):
        length = len(prompt) + 11
        how: dict[str, Any] = {"prompt": prompt, "length": length, "constraint": regex("([a-e]{2} )*[a-e]+"), "seed": 1}
        (found,) = absorb.particles(1, 3, reward=reward, strength=3.0, **how)
        assert all(regex("([a-e]{2} )*[a-e]+").matches(text.removeprefix(prompt)) for text in found.texts)
        assert all(text.startswith(prompt) for text in seen)
        assert {len(text) for text in seen[-3:]} == {length}
        assert found.text == absorb.generate(particles=3, reward=reward, strength=3.0, **how)[0]
        seen.clear()
    texts = absorb.generate(3, prompt="The", length=16, guidance=2.0, seed=1)
    assert all(len(text) == 16 and text.startswith("The") for text in texts)
    assert texts[2:] == absorb.generate(
        1, prompt="The", length=16, guidance=2.0, seeds=cedd.samplers.text_seeds(1, 3)[2:]
    )
    assert texts != absorb.generate(3, prompt="The", length=16, seed=1)


def test_particle_reward_ignores_text_after_end(tmp_path: Path) -> None:
    """A reward does not receive what follows the end token."""
    pieces = BPETokenizer.train(["a cat sat on a mat, and the dog sat there. " * 20], 270)
    model = cedd.load(save_blocks(tmp_path / "pieces", tokenizer=pieces), device="cpu")
    assert pieces.eos_id is not None
    model.model.head.bias.data[pieces.eos_id] = 3.0  # type: ignore[union-attr]
    how: dict[str, Any] = {"length": 16, "seed": 1, "reward": lambda texts: [-len(text) for text in texts]}
    texts = model.generate(4, until_end=True, particles=4, **how)
    longer = model.generate(4, until_end=True, particles=4, strength=-1.0, **how)
    assert sum(map(len, texts)) < sum(map(len, longer))


def test_block_model_does_not_support_correction(roulette: cedd.LanguageModel) -> None:
    with pytest.raises(ValueError, match="correction is not available for block diffusion models"):
        roulette.correct("teh cat", engine="letters")


def test_other_models_generate_long_texts_in_parts(whole: cedd.LanguageModel) -> None:
    """Each part has at most half the context length, and follows as much preceding text."""
    seen: list[Tensor] = []
    texts = whole.generate(
        2, length=90, prompt="The", seed=1, steps=4, callback=lambda step, t, x: seen.append(x.clone())
    )
    assert all(len(text) == 90 and text.startswith("The") for text in texts)
    assert seen[-1].shape == (2, 90)
    assert texts[0] != texts[1]


# ---- the command line -------------------------------------------------------------------------------------------


def test_sample_notes_how_text_beyond_context_is_generated(
    absorb: cedd.LanguageModel, whole: cedd.LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--length", "70", "--seed", "1", "--device", "cpu", "--json", "--steps", "2"]
    for model, note in (
        (absorb, "the model's context is 32 tokens: each block of 4 is written given at most 28 tokens before it"),
        (
            whole,
            "the model's context is 32 tokens: longer text is written in parts of at most 16 tokens, each given at",
        ),
    ):
        assert main(["sample", str(model.folder.path), *words]) == 0
        printed = capsys.readouterr()
        assert [len(text) for text in json.loads(printed.out)["samples"]] == [70]
        assert note in printed.err
        assert main(["sample", str(model.folder.path), "--json", "--device", "cpu", "--steps", "2"]) == 0
        assert not capsys.readouterr().err


def test_particles_and_guidance_on_command_line(absorb: cedd.LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sample", str(absorb.folder.path), "--length", "12", "--seed", "1", "--device", "cpu", "--prompt", "The "]
    assert main([*words, "--regex", "[a-e]{3} [a-e]+", "--particles", "3", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert regex("The [a-e]{3} [a-e]+").matches(record["samples"][0])
    assert record["particles"][0]["log_normalizer"] < 0
    assert main([*words, "--guidance", "2"]) == 0
    assert capsys.readouterr().out.startswith("The ")


def test_sample_watch_and_html_replay(
    absorb: cedd.LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "x.html"
    words = ["sample", str(absorb.folder.path), "--length", "40", "--prompt", "The cat", "--device", "cpu", "--watch"]
    assert main([*words, "--html", str(page), "--seed", "1"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert len(text) == 40
    data = json.loads(page.read_text("utf-8").split('id="data">')[1].split("</script>")[0])
    shown = list(data["first"])
    for step in data["steps"]:
        for place, word in step:
            shown[place] = word
    assert "".join(data["words"][word] for word in shown) == text


# ---- likelihoods ------------------------------------------------------------------------------------------------


def nats_of(model: cedd.LanguageModel, text: str, first: int = 0) -> float:
    """-log p(text from token `first` on | what is before), by explicit enumeration of all orders of each block."""
    ids = torch.from_numpy(model.tokenizer.encode(text))
    total = 0.0
    for start in range(0, len(ids), BLOCK):
        block = range(start, min(start + BLOCK, len(ids)))
        free = [place for place in block if place >= first]
        laws = []
        for order in itertools.permutations(free):
            known, log_p = [place for place in block if place < first], 0.0
            for place in order:
                x = torch.tensor([[int(ids[i]) if i in known else model.process.vocab_size for i in block]])
                number = torch.arange(start + len(block)) // BLOCK
                pattern = cedd.network.AttentionPattern(number[:, None] >= number)
                features = model.model.features(torch.cat([ids[None, :start], x], 1), torch.zeros(1), attention=pattern)
                logits = model.model.head(features)[0, place].double()
                log_p += float(torch.log_softmax(logits, -1)[ids[place]])
                known.append(place)
            laws.append(log_p)
        total -= float(torch.logsumexp(torch.tensor(laws).double(), 0)) - math.log(len(laws))
    return total


@pytest.mark.parametrize("text", ["The", "The cat.", pytest.param("The cat sat on", marks=pytest.mark.slow)])
def test_perplexity_of_text_of_any_length(absorb: cedd.LanguageModel, text: str) -> None:
    """An incomplete last block is treated as a shorter block."""
    expected = nats_of(absorb, text) / len(text)
    found = absorb.perplexity(text)
    assert (found.bound, found.stderr) == ("exact", 0.0)
    assert found.nats_per_token == pytest.approx(expected, rel=1e-5)
    bounded = absorb.perplexity(text, bound="tight", draws=64)
    assert bounded.nats_per_token > expected - 4 * bounded.stderr
    weighted = absorb.perplexity(text, bound="importance", orders=64)
    assert weighted.nats_per_token == pytest.approx(expected, abs=4 * weighted.stderr + 1e-6)


@pytest.mark.parametrize("bound", ["tight", "importance"])
def test_perplexity_of_list_matches_single_texts(absorb: cedd.LanguageModel, bound: Figure) -> None:
    texts = ["The cat.", "The", "The mat.", "The dog sat"]
    how: dict[str, Any] = {"bound": bound} | ({"orders": 4} if bound == "importance" else {"draws": 4})
    found = absorb.perplexity(texts, **how)
    alone = [absorb.perplexity(text, **how) for text in texts]
    assert found == pytest.approx(alone, rel=1e-5)


def test_long_text_perplexity_is_computed_in_pieces(absorb: cedd.LanguageModel, roulette: cedd.LanguageModel) -> None:
    text = "The cat sat on the mat and the dog sat there."  # 32 tokens, and 13
    assert absorb.perplexity(text).nats_per_token == pytest.approx(
        (nats_of(absorb, text[:32]) + nats_of(absorb, text[32:])) / len(text), rel=1e-5
    )
    found = roulette.perplexity(text[:36], draws=4)
    assert found.bound == "tight"
    assert math.isfinite(found)
    with pytest.raises(ValueError, match="need a process on which a revealed token never changes"):
        roulette.perplexity(text, bound="exact")


def test_answer_likelihood_after_prompt_ending_within_block(absorb: cedd.LanguageModel) -> None:
    """Exact: the answer's tokens in each block, given those before them."""
    found = absorb.log_likelihood("The cat", [" sat", " ran off."])
    for one, answer in zip(found, (" sat", " ran off."), strict=True):
        expected = -nats_of(absorb, "The cat" + answer, first=7)
        assert float(one) == pytest.approx(expected, abs=1e-4 if one.exact else 6 * one.stderr)


def test_answers_of_shuffling_model_are_scored_by_whole_blocks(roulette: cedd.LanguageModel) -> None:
    scores = TextLikelihoods(roulette, draws=4)
    assert scores.kind == "joint"
    pieces = [(len(before), len(piece)) for before, piece in scores._pieces(*scores.encoded("The cat", " sat on."))]
    assert pieces == [(4, 4), (8, 4), (12, 3)]
    found = roulette.log_likelihood("The cat", [" sat", " ran off."], draws=8)
    assert all(math.isfinite(one) and not one.exact for one in found)
    with pytest.raises(ValueError, match="needs a model that only masks"):
        roulette.log_likelihood("The cat", [" sat"], protocol="llada")


def test_long_context_is_cut_at_block_boundary(absorb: cedd.LanguageModel) -> None:
    scores = TextLikelihoods(absorb)
    context, answer = "a" * 50, "b" * 7
    pieces = [(len(before), len(piece)) for before, piece in scores._pieces(*scores.encoded(context, answer))]
    assert pieces == [(28 + 2, 2), (28, 4), (28, 1)]


def test_block_model_as_judge(absorb: cedd.LanguageModel) -> None:
    judge = ModelJudge(absorb.folder.path, device="cpu", draws=64)
    (judged,) = judge.judge(["The cat sat on"])
    assert judged.tokens == 14
    assert judged.nats > nats_of(absorb, "The cat sat on") - 4 * judged.stderr


def test_given_past_matches_layout_of_whole_blocks(absorb: cedd.LanguageModel) -> None:
    """`GivenPast` within a block, or at the end of a text, equals the layout of whole blocks with the rest masked."""
    ids = torch.randint(absorb.process.vocab_size, (2, 12))
    model, sigma = GivenPast(absorb.model, BLOCK), torch.rand(2)
    x_t = torch.cat([ids[:, :10], torch.full((2, 2), absorb.process.vocab_size)], 1)
    whole = InBlocks(absorb.model, BLOCK)(x_t, torch.zeros(2, 3), clean=ids)[:, 10:]
    torch.testing.assert_close(model(x_t[:, 10:], sigma, past=ids[:, :10]), whole, rtol=1e-4, atol=1e-5)
    assert model(x_t[:, 8:9], sigma, past=ids[:, :8]).shape == (2, 1, absorb.process.vocab_size)
    with pytest.raises(ValueError, match=r"a block has 4 tokens \(got 3 after 10, of which 2 are its own\)"):
        model(x_t[:, :3], sigma, past=ids[:, :10])
