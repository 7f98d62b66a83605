"""Particles by enumeration: weights times the estimated normalizer are unbiased for every text and particle count."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import cedd
from cedd.samplers import Fixed, sample
from cedd.samplers.particle_set import ParticleSet
from cedd.samplers.particles import Particles, systematic
from tests.samplers.chains import Table
from tests.samplers.languages import constraint, members, tilted_law

V, L = 3, 3
PATTERN = "(ab|c)*a?"
PROCESS = cedd.absorb(V, cedd.LogLinear(eps=1e-9))
TEXTS = members(PATTERN, V, L)
FALSE_ALARM = 5.5
"""In standard errors: a false-alarm rate of 4e-8 for each of about 60 comparisons."""


def table() -> Table:
    """A network that depends on the text, not on the time."""
    made = Table(PROCESS, L, seed=5, size=0.7)
    made.sway *= 0
    return made


def base_law(steps: int) -> dict[tuple[int, ...], float]:
    """p(x): each step reveals the required number of masks, every set equally likely, each by its own law."""
    network, reached = table(), {(V,) * L: 1.0}
    for left in range(steps, 0, -1):
        following: dict[tuple[int, ...], float] = {}
        for seen, chance in reached.items():
            f = torch.softmax(network.outputs(torch.tensor([seen]), torch.ones(1))[0], -1).numpy()
            masks = [i for i in range(L) if seen[i] == V]
            sets = list(itertools.combinations(masks, -(-len(masks) // left)))
            for places in sets:
                for tokens in itertools.product(range(V), repeat=len(places)):
                    after = list(seen)
                    for place, token in zip(places, tokens, strict=True):
                        after[place] = token
                    own = chance / len(sets) * math.prod(f[i, v] for i, v in zip(places, tokens, strict=True))
                    following[tuple(after)] = following.get(tuple(after), 0.0) + own
        reached = following
    return reached


def run(count: int, texts: int, **how) -> list[ParticleSet]:
    found: list[ParticleSet] = []
    settings = {"constraint": constraint(PATTERN, V, L)} | how.pop("sample", {})
    sampler = Particles(count, report=found.append, **how)
    sample(table(), PROCESS, (texts, L), method="cedd", sampler=sampler, seeds=range(texts), **settings)
    return found


def reward(x: torch.Tensor) -> torch.Tensor:
    return (x == 2).sum(1) - 0.5 * (x[:, 0] == 0)


@pytest.mark.parametrize(
    ("count", "steps", "strength", "language", "runs"),
    [
        pytest.param(1, 3, 0.0, True, 250, marks=pytest.mark.slow),
        pytest.param(4, 3, 1.3, True, 80, marks=pytest.mark.slow),
        pytest.param(3, 2, -0.7, True, 250, marks=pytest.mark.slow),
        (2, 2, 1.0, False, 150),
    ],
)
def test_weights_are_unbiased_for_every_text(count, steps, strength, language, runs):
    """E [Z-hat sum_j w_j [x_j = x]] = p(x) exp(strength r(x)), of texts in the language."""
    law = base_law(steps)
    how = {"reward": reward, "strength": strength} if strength else {}
    sets = run(count, runs, steps=steps, **how, sample={} if language else {"constraint": None})
    texts = TEXTS if language else list(law)
    values = np.zeros((runs, len(texts)))
    place = {text: k for k, text in enumerate(texts)}
    for number, one in enumerate(sets):
        weights = one.log_weights.exp() * math.exp(one.log_normalizer)
        for text, weight in zip(map(tuple, one.tokens.tolist()), weights.tolist(), strict=True):
            values[number, place[text]] += weight
    tilts = np.exp(strength * reward(torch.tensor(texts)).numpy()) if strength else np.ones(len(texts))
    expected = np.array([law[text] for text in texts]) * tilts
    error = values.std(0) / math.sqrt(runs) + 1e-3 * expected
    assert (np.abs(values.mean(0) - expected) < FALSE_ALARM * error + 1e-12).all()
    total = values.sum(1)
    assert abs(total.mean() - expected.sum()) < FALSE_ALARM * total.std() / math.sqrt(runs) + 1e-9


@pytest.mark.slow
def test_more_particles_approach_law_given_language():
    """The distance to p(x | language) of one particle, whose law is the tilted one, and of 16 by their weights."""
    law, network = base_law(L), table()
    target = np.array([law[text] for text in TEXTS])
    target /= target.sum()
    tilted = tilted_law(lambda seen: torch.softmax(network.outputs(torch.tensor([seen]), torch.ones(1))[0], -1).numpy(),
                        L, TEXTS, V)  # fmt: skip
    sets, shares = run(16, 120), np.zeros(len(TEXTS))
    for one in sets:
        for text, weight in zip(map(tuple, one.tokens.tolist()), one.log_weights.exp().tolist(), strict=True):
            shares[TEXTS.index(text)] += weight / len(sets)
    near, far = (0.5 * np.abs(found - target).sum() for found in (shares, np.array([tilted[text] for text in TEXTS])))
    assert near < 0.12 < 0.3 < far


def test_texts_depend_only_on_their_seeds():
    how = {"method": "cedd", "constraint": constraint(PATTERN, V, L), "sampler": Particles(4, reward=reward)}
    together = sample(table(), PROCESS, (6, L), seeds=range(6), **how)
    alone = sample(table(), PROCESS, (2, L), seeds=[3, 4], **how)
    assert torch.equal(together[3:5], alone)


def test_fixed_tokens_stay():
    held = Fixed(torch.tensor([[2, 0, 0], [0, 0, 0]]), torch.tensor([[True, False, False]] * 2))
    for how in (held, constraint(PATTERN, V, L).holding(held)):
        sampler = Particles(3, reward=reward)
        x = sample(table(), PROCESS, (2, L), method="cedd", sampler=sampler, constraint=how, seeds=[0, 1])
        assert x[:, 0].tolist() == [2, 0]


def test_systematic_resampling_is_unbiased_and_within_one():
    shares = torch.tensor([0.5, 0.05, 0.27, 0.18], dtype=torch.float64)
    grid = (np.arange(2000) + 0.5) / 2000
    counts = np.array([torch.bincount(systematic(shares, u), minlength=4).numpy() for u in grid])
    np.testing.assert_allclose(counts.mean(0), 4 * shares.numpy(), atol=2e-3)
    assert (np.abs(counts - 4 * shares.numpy()) < 1).all()


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_particles_violating_constraint_are_replaced(strength):
    def network(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Uniform; after an a, no further a is possible."""
        outputs = torch.zeros(*x.shape, V)
        outputs[(x == 0).any(1), :, 0] = -math.inf
        return outputs

    found, runs = list[ParticleSet](), 20
    sampler = Particles(8, reward=(lambda x: (x == 1).sum(1)) if strength else None, strength=strength)
    sampler = replace(sampler, report=found.append)
    language = constraint("aaa|bbb", V, L)
    texts = sample(network, PROCESS, (runs, L), method="cedd", sampler=sampler, seeds=range(runs), constraint=language)
    assert (texts == 1).all()
    normalizers = np.exp([one.log_normalizer for one in found])
    error = normalizers.std() / math.sqrt(runs)
    assert abs(normalizers.mean() - math.exp(strength * L) / V**L) < FALSE_ALARM * error


def test_rewards_beyond_exp_range_stay_finite():
    found = run(8, 3, reward=lambda x: 1e4 * (x == 2).sum(1), strength=2.0)
    for one in found:
        assert math.isfinite(one.log_normalizer)
        assert one.log_normalizer > 1e4
        assert one.effective_sample_size >= 1
        assert float(one.log_weights.exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run(0, 1), "number of particles must be at least 1"),
        (lambda: run(2, 1, guesses=0), "number of guesses must be at least 1"),
        (lambda: run(2, 1, strength=math.nan), "must be a finite number"),
        (lambda: run(2, 1, reward=lambda x: [math.nan] + [1.0] * 7), "returned nan or infinity for 1 of 8 texts"),
        (lambda: run(2, 1, reward=lambda x: x.sum(1) + 2, strength=1e308), "times the reward is infinite"),
        (lambda: run(2, 1, reward=lambda x: [1.0]), "one number for each of the 8 texts"),
        (lambda: run(2, 1, sample={"temperature": 0}), "temperature above 0 and top_p 1"),
        (lambda: run(2, 1, sample={"top_p": 0.9}), "temperature above 0 and top_p 1"),
        (lambda: run(2, 1, sample={"constraint": lambda x: x}), "only supports Fixed constraints"),
    ],
)
def test_invalid_options_give_one_line_errors(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_particles_are_rejected_for_shuffling_processes():
    with pytest.raises(ValueError, match="particles need a model that only masks"):
        sample(table(), cedd.roulette(V), (1, L), method="cedd", sampler=Particles(2))
