"""Text i depends only on (seed, i), not on the other texts, their number, or the batch size."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import cedd
from cedd.cli import main
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Network, Places
from cedd.process import seeded_generator
from cedd.samplers import Fixed, sample, text_seeds
from cedd.samplers.choice import Sharpening
from cedd.samplers.random_numbers import RandomNumbers, Use
from tests.samplers.chains import ERROR_RATE, Table
from tests.tasks.models import save_random

V, L = 11, 13
SEEDS = text_seeds(7, 5)


def transformer(process: cedd.TokenProcess, causal: bool = False) -> Transformer:
    torch.manual_seed(0)
    config = config_from_preset(
        "tiny", vocab_size=V, has_mask=process.has_mask, dropout=0.0, causal=causal, time_conditioning=not causal
    )
    model = Transformer(config).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)
    return model


# ---- the numbers ----------------------------------------------------------------------------------------------------


def test_seeds_may_be_any_integer_type():
    assert text_seeds(np.int64(7), 5) == SEEDS  # pyright: ignore[reportArgumentType]
    of_array = RandomNumbers(np.array([3, 4]), 2)  # pyright: ignore[reportArgumentType]
    assert torch.equal(of_array.uniform(Use.JUMP, 0), RandomNumbers([3, 4], 2).uniform(Use.JUMP, 0))
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"a seed must be in 0..2\^64 - 1 \(got {seed}"):
            text_seeds(seed, 2)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        text_seeds(1.0, 2)  # pyright: ignore[reportArgumentType]


def test_all_64_seed_bits_count_and_larger_seeds_are_rejected():
    """torch's own generator uses only the lowest 32."""
    first = {float(torch.rand((), generator=seeded_generator(seed))) for seed in (1, 1 + 2**32, 1 + 2**33, 2**64 - 1)}
    assert len(first) == 4
    assert torch.equal(seeded_generator(7).get_state(), torch.Generator().manual_seed(7).get_state())
    model = cedd.load("english-char", "cpu")
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=rf"a seed must be in 0..2\^64 - 1 \(got {seed}"):
            model.perplexity("The cat sat on the mat.", bound="tight", seed=seed)


def test_numbers_are_uniform_and_independent():
    """Bits, pairs of neighbours in every direction, and texts of neighbouring seeds: chi-square, 2^14 numbers each."""
    draws = RandomNumbers(text_seeds(3, 128), 128)
    u = draws.uniform(Use.JUMP, 5)
    assert u.dtype == torch.float64
    assert 0 <= float(u.min()) < float(u.max()) < 1
    neighbours = {
        "position": (u[:, 0::2], u[:, 1::2]),
        "text": (u[0::2], u[1::2]),
        "step": (u, draws.uniform(Use.JUMP, 6)),
        "use": (u, draws.uniform(Use.TARGET, 5)),
        "run": (u, RandomNumbers(text_seeds(4, 128), 128).uniform(Use.JUMP, 5)),
        "seed": (u, RandomNumbers([seed + 1 for seed in text_seeds(3, 128)], 128).uniform(Use.JUMP, 5)),
    }
    for name, (one, other) in neighbours.items():
        counts = torch.bincount(((one * 8).long() * 8 + (other * 8).long()).flatten(), minlength=64).numpy()
        assert stats.chisquare(counts).pvalue > ERROR_RATE, name
    for shift in (1, 16, 32, 40):  # lower and lower bits
        part = (u * 2.0**shift).frac()
        assert stats.chisquare(np.bincount((part * 64).long().flatten().numpy(), minlength=64)).pvalue > ERROR_RATE


def test_numbers_at_chosen_positions_match_full_draw():
    draws, rows = RandomNumbers(SEEDS, L), np.array([0, 14, 63])
    everywhere = draws.uniform(Use.TARGET, 3).flatten().numpy()
    assert np.array_equal(draws.at(rows, Use.TARGET, 3), everywhere[rows])
    for limit in (0.0, 0.2, 1.0):
        below, numbers = draws.below(limit, Use.TARGET, 3)
        assert np.array_equal(below, np.flatnonzero(everywhere < limit))
        assert np.array_equal(numbers, everywhere[below])


@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])  # 0: all tokens are equally likely
def test_top_p_keeps_most_probable_tokens_independent_of_other_rows(scale: float):
    log_probs = torch.log_softmax(scale * torch.randn(4, 600, generator=seeded_generator(1)).double(), -1)
    log_probs[1, :400] = -torch.inf
    sharpening = Sharpening(top_p=0.7)
    found = sharpening.log_probs(log_probs)
    for row, kept in zip(torch.log_softmax(log_probs, -1), found, strict=True):
        order = row.argsort(descending=True, stable=True)
        count = 1 + int(torch.searchsorted(row[order].exp().cumsum(0), 0.7))
        expected = torch.full_like(row, -torch.inf)
        expected[order[:count]] = torch.log_softmax(row[order[:count]], -1)
        torch.testing.assert_close(kept, expected, rtol=0, atol=1e-12)
        assert torch.equal(kept, sharpening.log_probs(row[None])[0])


def test_text_seeds_share_a_prefix_and_differ():
    assert text_seeds(7, 3) == SEEDS[:3]
    many = [seed for run in range(4) for seed in text_seeds(run, 1000)]
    assert len(set(many)) == 4000


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescaled", [False, True])
def test_one_by_one_outputs_do_not_depend_on_batch(rescaled: bool):
    """Output rows in a batch and alone; batched matrix products round differently."""
    process = cedd.roulette(V)
    network = Network(transformer(process), V, torch.device("cpu"), one_by_one=True)
    x = torch.randint(V + 1, (5, L), generator=torch.Generator().manual_seed(0))
    sigma = torch.rand(5) if rescaled else torch.tensor(0.7)
    places = torch.tensor([0, 3, 2 * L, 2 * L + 1, 2 * L + 12, 4 * L + 5])
    with torch.no_grad():
        together = network.rows(x, sigma, Places(places)).map(lambda outputs, _: outputs)
        alone = network.rows(x[2:3], sigma[2:3] if rescaled else sigma, Places(torch.tensor([0, 1, 12])))
        assert torch.equal(together[2:5], alone.map(lambda outputs, _: outputs))
        batched = Network(network.model, V, torch.device("cpu")).rows(x, sigma, Places(places))
        torch.testing.assert_close(together, batched.map(lambda outputs, _: outputs))


# ---- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "method", "sampler"),
    [
        (cedd.absorb(V), "cedd", "analytic"),
        (cedd.absorb(V), "cedd", "first-hitting"),
        pytest.param(cedd.absorb(V), "dfm", "euler", marks=pytest.mark.slow),
        pytest.param(cedd.uniform(V), "bayes", "tau-leaping", marks=pytest.mark.slow),
        (cedd.roulette(V, p_m=0.5), "sedd", "analytic"),
        (cedd.absorb(V), "ar", "analytic"),
    ],
)
def test_text_is_the_same_in_every_batch(process: cedd.TokenProcess, method: str, sampler: str):
    model, held = transformer(process, causal=method == "ar"), torch.arange(L) < 3

    def draw(numbers: list[int], batch: int | None = None) -> Tensor:
        fixed = Fixed(torch.tensor([[n % V] * L for n in numbers]), held.expand(len(numbers), L))
        return sample(
            model,
            process,
            (len(numbers), L),
            method=method,
            sampler=sampler,
            steps=6,
            constraint=fixed,
            exclude=[4],
            seeds=[SEEDS[n] for n in numbers],
            batch=batch,
        )

    whole = draw([0, 1, 2, 3, 4])
    assert torch.equal(draw([0, 1, 2, 3, 4], batch=2), whole)
    assert torch.equal(draw([3, 0]), whole[[3, 0]])
    assert torch.equal(draw([2]), whole[2:3])
    assert len(whole.unique(dim=0)) == 5


def test_generator_gives_one_seed():
    process = cedd.roulette(V)
    model = transformer(process)

    def draw(n: int, batch: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        return sample(model, process, (n, L), method="bayes", steps=5, generator=generator, batch=batch)

    assert torch.equal(draw(4)[:3], draw(3, batch=1))


def test_batch_out_of_memory_is_split():
    process = cedd.roulette(4)
    table = Table(process, 3, seed=1)

    def small(x_t: Tensor, sigma: Tensor) -> Tensor:
        if len(x_t) > 2:
            raise torch.OutOfMemoryError
        return table(x_t, sigma)

    whole, parts = (sample(m, process, (7, 3), method="bayes", steps=5, seeds=range(7)) for m in (table, small))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [1, 2]}, "3 sequences need a seed each \\(got 2"),
        ({"seeds": [1, 2, 3], "generator": torch.Generator()}, "not both"),
        ({"seeds": [1, 2, 2**64]}, r"a seed must be in 0..2\^64 - 1"),
    ],
)
def test_ambiguous_or_invalid_seeds_are_rejected(options, message):
    process = cedd.absorb(4)
    with pytest.raises(ValueError, match=message):
        sample(Table(process, 3), process, (3, 3), method="cedd", **options)


# ---- what users call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("process", "method"), [("roulette", "bayes"), ("absorb", "ar")])
def test_generated_texts_do_not_depend_on_batch(process: str, method: str, tmp_path):
    model = cedd.load(save_random(tmp_path / "run", process, method), device="cpu")
    four = model.generate(4, seed=3, steps=6, length=20, prompt="the ")
    assert four[2] == model.generate(3, seed=3, steps=6, length=20, prompt="the ", batch=1)[2]
    assert four[2:3] == model.generate(1, seeds=text_seeds(3, 4)[2:3], steps=6, length=20, prompt="the ")
    assert len(set(four)) == 4
    with pytest.raises(ValueError, match="not both"):
        model.generate(1, seed=3, seeds=[4])


@pytest.mark.parametrize("words", [["sample", "--length", "20"], ["infill", "a ____{9} cat"]])
def test_command_line_texts_do_not_depend_on_batch(words: list[str], tmp_path, capsys):
    run = str(save_random(tmp_path / "run"))

    def texts(*more: str) -> list[str]:
        assert main([words[0], run, *words[1:], "--seed", "3", "--steps", "6", "--device", "cpu", "--json", *more]) == 0
        printed = json.loads(capsys.readouterr().out)
        return printed["samples" if words[0] == "sample" else "texts"]

    four = texts("-n", "4")
    assert len(set(four)) == 4
    assert texts("-n", "3", "--batch", "1") == four[:3]
    assert texts("-n", "2", "--deterministic") == four[:2]
