"""Estimators of other projects: against their formulas, and against values computed with LLaDA's original code."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import cedd
from cedd.data.tokenizers import CharTokenizer
from cedd.evaluation.likelihood import TextLikelihoods
from cedd.evaluation.protocols import PROTOCOLS, LLaDA, Masks, Protocol
from cedd.models.folder import load_folder
from cedd.models.llama import Llama
from cedd.models.loaded_model import LoadedModel
from tests.models import plain_llama
from tests.models.test_published_llama import fixture_folder
from tests.tasks.models import save_random


class Recorded(Protocol):
    """A protocol with given masks."""

    name = "recorded"

    def __init__(self, given: list[Masks]) -> None:
        self.given, self.draws = given, 2

    def masks(self, length: int, batch: int, generator: torch.Generator) -> Masks:
        raise NotImplementedError

    def batches(self, length: int, draws: int, generator: torch.Generator) -> Iterator[Masks]:
        return iter(self.given)


def words(ids: Tensor) -> str:
    return " ".join(map(str, ids.tolist()))


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(tmp_path_factory.mktemp("llada"), "llada"), device="cpu")


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    return cedd.import_model(plain_llama.write(tmp_path_factory.mktemp("dream"), "dream"), device="cpu")


# ---- values of the original code --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "guidance"), [("ll.value", 0.0), ("ll.value_cfg", 0.5)])
def test_llada_estimator_matches_original_code(name: str, guidance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fixture_folder("llada")
    io, model = load_file(folder / "io.safetensors"), cedd.import_model(folder, device="cpu")
    assert isinstance(model.model, Llama)
    prompt, answer, noisy = io["ll.prompt"], io["ll.answer"], io["ll.noisy"]
    where = noisy[..., len(prompt) :] == model.model.options.mask_row
    weights = (1 / io["ll.p_mask"].double())[..., None].expand(where.shape)
    given = [Masks(*one) for one in zip(where, weights, strict=True)]
    for one in given:
        assert torch.allclose(one.where.sum(1) * one.weights[:, 0], torch.full((4,), 10.0).double())
    monkeypatch.setitem(PROTOCOLS, "recorded", Recorded(given))
    likelihoods = TextLikelihoods(model, protocol="recorded", guidance=guidance)
    found = likelihoods.answer(words(prompt), " " + words(answer))
    assert found.value == pytest.approx(float(io[name]), abs=1e-4)
    assert (found.evaluations, found.tokens, found.greedy) == (12, 10, False)
    assert likelihoods.answer(words(prompt), " " + words(io["greedy_suffix.target"])).greedy


# ---- their formulas ---------------------------------------------------------------------------------------------


def nats_of(kind: str, shown: Tensor, place: int, token: int) -> float:
    """-log p of a token at a place of rows [L], by the reference network; shifted if the network's outputs are."""
    weights = plain_llama.random_weights(kind)
    logits = plain_llama.outputs(kind, weights, shown[None], plain_llama.visible_of("full", len(shown)))[0]
    row = logits[max(place - 1, 0) if kind == "dream" else place]
    return float(row.logsumexp(0) - row[token])


@pytest.mark.parametrize(("kind", "protocol"), [("llada", "llada"), ("dream", "dream")])
def test_value_is_mean_over_draws(kind: str, protocol: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    context, answer = torch.tensor([4, 9, 3]), torch.tensor([5, 5, 17, 1])
    masks = PROTOCOLS[protocol].masks(4, 6, torch.Generator().manual_seed(3))
    assert int(masks.where.sum()) > 5
    total = 0.0
    for where, weights in zip(masks.where.tolist(), masks.weights.tolist(), strict=True):
        shown = torch.cat([context, answer])
        shown[3:][torch.tensor(where)] = 20  # the mask's row
        for i in range(4):
            if where[i]:
                total += weights[i] * nats_of(kind, shown, 3 + i, int(answer[i])) / 6
    likelihoods = TextLikelihoods(model, protocol=protocol)
    given = Recorded([masks])
    found = likelihoods._by_protocol(given, context, answer, torch.Generator())
    assert found.value == pytest.approx(-total, abs=1e-4)


def test_llada_masks_have_stratified_counts() -> None:
    for seed, length, batch in itertools.product(range(20), (1, 2, 5, 40), (4, 32)):
        masks = LLaDA().masks(length, batch, torch.Generator().manual_seed(seed))
        counts = masks.where.sum(1)
        first = int(counts[0])
        steps = torch.linspace(first, first + (batch - 1) * (length / batch), batch).round().long()
        assert torch.equal(counts, (steps - 1) % length + 1)
        assert torch.allclose(masks.weights, (length / counts)[:, None].expand(batch, length).double())


def test_dream_masks_are_independent_at_stratified_times() -> None:
    masks = PROTOCOLS["dream"].masks(5000, 8, torch.Generator().manual_seed(0))
    p = 1 / masks.weights[:, 0]
    times = ((p - 1e-3) / 0.999).sort().values
    assert torch.allclose(times.diff(), torch.full((7,), 1 / 8, dtype=torch.float64))
    # 8 shares of 5,000 draws each: 5 standard deviations, 5e-6 of false alarms
    share = masks.where.double().mean(1)
    assert bool(((share - p).abs() < 5 * (p * (1 - p) / 5000).sqrt() + 1e-9).all())


def test_dream_frames_answer_with_special_tokens(dream: cedd.LanguageModel) -> None:
    tokenizer = CharTokenizer("ab")
    tokenizer.eos_id = 1
    context, answer, kept = PROTOCOLS["dream"].framed(torch.tensor([0]), torch.tensor([0, 0]), tokenizer)
    assert (context.tolist(), answer.tolist(), kept) == ([1, 0], [0, 0, 1], 1)


def test_dream_ar_is_left_to_right_product(dream: cedd.LanguageModel) -> None:
    context, answer = torch.tensor([4, 9, 3]), torch.tensor([5, 11, 17])
    total = 0.0
    for i in range(3):
        shown = torch.cat([context, answer[:i], torch.full((3 - i,), 20)])
        total += nats_of("dream", shown, 3 + i, int(answer[i]))
    found = TextLikelihoods(dream, protocol="dream-ar").answer(words(context), " " + words(answer))
    assert (found.value, found.stderr) == (pytest.approx(-total, abs=1e-4), 0.0)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_random(
        tmp_path_factory.mktemp("letters") / "absorb", "absorb", "ceddt", tokenizer=CharTokenizer("ab ")
    )
    return LoadedModel(load_folder(folder))


def test_llada_expectation_is_bound_over_random_orders(letters: LoadedModel) -> None:
    """Over all orders: the sum of -log p of each token given those before it."""
    ids = torch.from_numpy(letters.tokenizer.encode("abba"))
    V, nats = letters.process.vocab_size, {}
    for shown in itertools.product([False, True], repeat=4):
        x = torch.where(torch.tensor(shown), ids, V)[None]
        share = (x == V).double().mean(1)
        sigma = torch.minimum(-torch.log1p(-share), letters.process.sigma(1.0)).float()
        with torch.no_grad():
            log_p = letters.model(x, sigma)[0].double().log_softmax(-1)
        nats[shown] = -log_p[torch.arange(4), ids]
    total, orders = 0.0, list(itertools.permutations(range(4)))
    for order in orders:
        for step, place in enumerate(order):
            total += float(nats[tuple(i in order[:step] for i in range(4))][place]) / len(orders)
    found = TextLikelihoods(letters, 3200, protocol="llada").answer("", "abba")
    assert abs(-found.value - total) < 4 * found.stderr + 1e-6  # 100 batches: 1e-4 of false alarms
    assert found.stderr < 0.1


def test_answers_share_random_numbers(letters: LoadedModel) -> None:
    likelihoods = TextLikelihoods(letters, 64, protocol="llada")
    same = [likelihoods.answer("a", text, 3) for text in (" ba", " ba")]
    assert same[0] == same[1]
    assert likelihoods.answer("a", " ba", 4) != same[0]
    for name in ("llada", "dream"):
        short, long = (PROTOCOLS[name].masks(n, 4, torch.Generator().manual_seed(1)) for n in (6, 9))
        if name == "dream":  # the same tokens are masked
            assert torch.equal(long.where[:, :6], short.where)


def test_reported_error_matches_spread_of_repetitions(letters: LoadedModel) -> None:
    """The spread of 60 repetitions matches the reported errors: a chi-square of 59 degrees, 1e-4 of false alarms."""
    found = [TextLikelihoods(letters, 128, seed, protocol="dream").answer("", "abbab a") for seed in range(60)]
    values = torch.tensor([one.value for one in found], dtype=torch.float64)
    variance = sum(one.stderr**2 for one in found) / len(found)
    assert 0.45 < float(values.var()) / variance < 2.2
    assert not math.isnan(variance)


def test_invalid_options_are_rejected(letters: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="invalid protocol: 'lada'; did you mean 'llada'"):
        TextLikelihoods(letters, protocol="lada")
    with pytest.raises(ValueError, match=r"draws must be a multiple of 32, the batch of the protocol llada \(got 40\)"):
        TextLikelihoods(letters, 40, protocol="llada").answer("", "ab")
    with pytest.raises(ValueError, match="guidance needs a protocol"):
        TextLikelihoods(letters, guidance=0.5)
    shuffles = LoadedModel(
        load_folder(save_random(tmp_path / "uniform", "uniform", "bayes", tokenizer=CharTokenizer("ab ")))
    )
    with pytest.raises(
        ValueError, match="the protocol llada needs a model that only masks; this one is bayes on uniform"
    ):
        TextLikelihoods(shuffles, protocol="llada")


def test_language_model_accepts_protocol(llada: cedd.LanguageModel) -> None:
    found = llada.log_likelihood("4 9 3", [" 5 5 1", " 7"], protocol="llada", seed=1)
    assert [one.tokens for one in found] == [3, 1]
    assert all(one.stderr > 0 or one.tokens == 1 for one in found)
    assert found[1] == pytest.approx(llada.log_likelihood("4 9 3", [" 7"])[0], abs=1e-5)  # a single token: exact
