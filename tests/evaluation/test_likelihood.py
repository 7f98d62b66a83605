"""Likelihoods of answers: against enumeration and plain torch, with the same noise for the answers of a question."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.bounds.drawing import Evaluation
from cedd.data.tokenizers import ByteTokenizer, CharTokenizer
from cedd.evaluation.likelihood import TextLikelihoods, WithContext
from cedd.models.folder import load_folder
from cedd.models.loaded_model import LoadedModel
from cedd.network import Network
from cedd.samplers import SamplingOptions
from tests.tasks.models import save_random

LETTERS = CharTokenizer("ab ")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("likelihood")
    kinds = {"absorb": "ceddt", "roulette": "bayes", "causal": "ar"}
    made = {}
    for name, method in kinds.items():
        process = "absorb" if name == "causal" else name
        made[name] = LoadedModel(load_folder(save_random(folder / name, process, method, tokenizer=LETTERS)))
        generator = torch.Generator().manual_seed(0)
        for parameter in made[name].model.parameters():  # so that the output at a position depends on the others
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return made


def exact(model: LoadedModel, network, tokens: Tensor) -> float:
    """The bound on -log p of one sequence, by enumeration."""
    p0 = torch.zeros([model.process.vocab_size] * len(tokens), dtype=torch.float64)
    p0[tuple(tokens.tolist())] = 1.0
    return len(tokens) * cedd.exact_bound(network, model.process, p0, method=model.method)


# ---- values ---------------------------------------------------------------------------------------------------------


def test_likelihood_kind_depends_on_model(models: dict[str, LoadedModel]) -> None:
    kinds = {name: TextLikelihoods(model).kind for name, model in models.items()}
    assert kinds == {"absorb": "conditional", "roulette": "joint", "causal": "exact"}


def test_autoregressive_likelihood_is_exact(models: dict[str, LoadedModel]) -> None:
    model, V = models["causal"], LETTERS.vocab_size
    ids = torch.from_numpy(LETTERS.encode("ab ba bb"))
    with torch.no_grad():
        outputs = model.model(torch.cat([torch.tensor([V]), ids[:-1]])[None], torch.zeros(1))[0].double()
    each = torch.log_softmax(outputs, -1).gather(1, ids[:, None])[:, 0]
    found = TextLikelihoods(model).answer("ab ba", " bb")
    assert found.value == pytest.approx(float(each[5:].sum()), abs=1e-6)
    assert (found.stderr, found.tokens, found.evaluations) == (0.0, 3, 1)
    assert TextLikelihoods(model).answer("ab ba ", "bb").value == found.value  # a space belongs to what follows it
    assert TextLikelihoods(model).text("ab ba bb").value == pytest.approx(float(each.sum()), abs=1e-6)
    best = LETTERS.decode(outputs[5:6].argmax(1).numpy())
    assert TextLikelihoods(model).answer("ab ba", best).greedy
    assert not TextLikelihoods(model).answer("ab ba", "ab "[("ab ".index(best) + 1) % 3]).greedy


def test_conditional_likelihood_keeps_context_clean(models: dict[str, LoadedModel]) -> None:
    """The estimate matches enumeration over the answer alone, with the context before it."""
    model = models["absorb"]
    context, answer = (torch.from_numpy(LETTERS.encode(text)) for text in ("ab b", " a"))
    after = WithContext(model.model, context)

    def network(x_t: Tensor, sigma: Tensor) -> Tensor:
        return after.head(after.features(x_t, sigma))

    expected = -exact(model, network, answer)
    found = TextLikelihoods(model, draws=512).answer("ab b", " a", exact=False)
    assert not found.exact
    assert abs(found.value - expected) < 5 * found.stderr
    assert found.stderr < 0.02 * abs(expected)
    whole = model.model(torch.cat([context, answer])[None], torch.ones(1))[:, 4:]
    torch.testing.assert_close(network(answer[None], torch.ones(1)), whole)  # sums differ in the last bit on some CPUs
    assert float((whole - model.model(answer[None], torch.ones(1))).abs().max()) > 1e-3


def test_short_answers_are_exact_and_sum_to_one(tmp_path: Path) -> None:
    """For a time-free network even with few draws: three tokens have 7 contexts."""
    folder = save_random(tmp_path / "run", "absorb", "cedd", tokenizer=LETTERS, time_input="none")
    model = LoadedModel(load_folder(folder))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    likelihoods = TextLikelihoods(model, draws=4)
    answers = ["".join(letters) for letters in itertools.product("ab ", repeat=3)]
    found = likelihoods.answers("ab", [answer for answer in answers if not answer.isspace()])
    assert all(one.exact and one.stderr == 0 and one.evaluations == 7 for one in found)
    blank = -float(
        cedd.exact_likelihood(
            model.reader(5), model.process, torch.from_numpy(LETTERS.encode("ab   "))[None], [2, 3, 4], method="cedd"
        )
    )
    total = sum(math.exp(one.value) for one in found) + math.exp(blank)
    assert total == pytest.approx(1.0, abs=1e-5)
    mixed = likelihoods.answers("ab", [" ba", " ab ba ab"])
    assert not any(one.exact for one in mixed)  # the bound of the longer one would lose against an exact value
    bound = likelihoods.answer("ab", " ba", exact=False)
    assert mixed[0] == bound
    assert likelihoods.answer("ab", " ba").exact


def test_shuffling_process_has_joint_likelihood(models: dict[str, LoadedModel]) -> None:
    model = models["roulette"]
    expected = -exact(model, model.model, torch.from_numpy(LETTERS.encode("b a")))
    found = TextLikelihoods(model, draws=512).answer("b", " a")
    assert found.tokens == 3
    assert abs(found.value - expected) < 5 * found.stderr
    assert not found.greedy


def test_greedy_matches_most_confident_first_decoding(models: dict[str, LoadedModel]) -> None:
    model = models["absorb"]
    prompt = torch.from_numpy(LETTERS.encode("ab b"))
    x = torch.cat([prompt, torch.full((3,), 3)])
    while (masked := torch.nonzero(x == 3)[:, 0]).numel():
        sigma = torch.minimum(-torch.log1p(-torch.tensor(len(masked) / 3)), model.process.sigma(1.0).float())
        with torch.no_grad():
            belief = model.model(x[None], sigma[None])[0, masked].softmax(-1)
        row = belief.max(1).values.argmax()
        x[masked[row]] = belief[row].argmax()
    written = LETTERS.decode(x[4:].numpy())
    likelihoods = TextLikelihoods(model, draws=2)
    assert likelihoods.answer("ab b", written).greedy == (not written.startswith(" ") or written.strip() != "")
    other = written[:-1] + ("a" if written[-1] != "a" else "b")
    assert not likelihoods.answer("ab b", other).greedy


# ---- long texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absorb", "roulette", "causal"])
def test_long_text_is_read_in_pieces(models: dict[str, LoadedModel], name: str) -> None:
    model, text = models[name], "ab ba b " * 10
    assert model.length == 32
    pieces = list(TextLikelihoods(model)._pieces(np.zeros(0, np.int64), LETTERS.encode(text)))
    assert "".join(LETTERS.decode(piece) for _, piece in pieces) == text
    assert [len(piece) for _, piece in pieces] == [32, 32, 16]
    contexts = [len(before) for before, _ in pieces]
    assert contexts == ([0, 0, 0] if name == "roulette" else [0, 0, 16])
    assert all(len(before) + len(piece) <= 32 for before, piece in pieces)
    found = TextLikelihoods(model, draws=2).text(text)
    assert found.tokens == 80
    assert math.isfinite(found.value)


def test_long_context_is_truncated_from_left(models: dict[str, LoadedModel]) -> None:
    for model in models.values():
        likelihoods = TextLikelihoods(model, draws=2)
        assert likelihoods.answer("a" * 50 + "b" * 29, "aba") == likelihoods.answer("b" * 29, "aba")
    with pytest.raises(ValueError, match="has no tokens"):
        TextLikelihoods(models["absorb"]).answer("ab", "")


# ---- common random numbers ------------------------------------------------------------------------------------------


def test_noise_of_shorter_text_is_prefix_of_longer_one(models: dict[str, LoadedModel]) -> None:
    model = models["roulette"]
    network = Network.of(model.model, 3, "cpu")
    method = model.method
    target = method.dynamics.target(method.parameterization, model.process, "tight", with_entropy=True, low=0.0)

    def drawn(length: int) -> Tensor:
        data = torch.zeros(1, length, dtype=torch.int64)
        one = Evaluation(network, model.process, data, (target,), 32, lambda _: None, nested=True)
        return one._uniforms(data.expand(4, -1), torch.Generator().manual_seed(5))

    short, long = drawn(3), drawn(7)
    assert torch.equal(short[:, :3], long[:, :3])
    assert torch.equal(short[:, 3:6], long[:, 7:10])
    assert torch.equal(short[:, -3:], long[:, -3:])
    assert len(long.unique()) == long.numel()


@pytest.mark.parametrize(
    ("name", "answers"),
    [pytest.param("absorb", (" ab ab ab", " ab ab abb"), marks=pytest.mark.slow), ("roulette", (" a", " ba"))],
)
def test_answers_to_same_question_share_noise(models: dict[str, LoadedModel], name: str, answers) -> None:
    """So their difference varies much less than with separate noise."""
    model, context = models[name], "ab ba ab b ba"
    same, own = [], []
    for seed in range(8):
        likelihoods = TextLikelihoods(model, draws=4, seed=seed)
        first, second = (likelihoods.answer(context, answer, question=1).value for answer in answers)
        same.append(second - first)
        own.append(second - likelihoods.answer(context, answers[0], question=2).value)
    assert np.std(same) < 0.7 * np.std(own)
    assert np.mean(same) == pytest.approx(np.mean(own), abs=float(4 * np.std(own) / math.sqrt(4)))


# ---- generated text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["absorb", "roulette", "causal"])
def test_continuation_ends_at_stop_or_limit(models: dict[str, LoadedModel], name: str) -> None:
    likelihoods, options = TextLikelihoods(models[name]), SamplingOptions(seed=3, steps=8)
    text = likelihoods.continued("ab b", 12, (), options)
    assert len(text) == 12
    assert likelihoods.continued("ab b", 12, (text[4:6],), options) == text[: text.index(text[4:6])]
    assert len(likelihoods.continued("ab " * 30, 100, (), options)) == 16  # half of the context
    whole = likelihoods.continued("", 5, (), SamplingOptions(seed=1, steps=4, temperature=0.0))
    assert len(whole) == 5


def test_non_ascii_bytes_are_scored_and_single_draw_is_rejected(tmp_path: Path) -> None:
    model = LoadedModel(load_folder(save_random(tmp_path / "run", "absorb", "ceddt", tokenizer=ByteTokenizer())))
    assert TextLikelihoods(model, draws=2).answer("é", "ü").tokens == 2
    with pytest.raises(ValueError, match="draws must be at least 2"):
        TextLikelihoods(model, draws=1)
