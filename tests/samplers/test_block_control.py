"""Particles, rewards and prompt guidance in block diffusion: laws by enumeration, exact caches, seeds."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.samplers import Fixed, prompt, sample
from cedd.samplers.graphs import GraphedBlocks
from cedd.samplers.particle_set import ParticleSet
from tests.networks import BlockNetwork
from tests.reference import block_texts as reference
from tests.samplers import languages
from tests.samplers.chains import ERROR_RATE, p_value
from tests.samplers.test_blocks import IN_BLOCKS, MASKS, VOCABULARY, AttentionOnly, network, replayed

V, L, BLOCK, PATTERN = 3, 4, 2, "(ab|c)*"
PROCESS = cedd.absorb(V, cedd.LogLinear(eps=1e-9))
METHOD = cedd.METHODS["cedd"].in_blocks(BLOCK)
FALSE_ALARM, CONTEXT = 5.5, 12
"""In standard errors: a false-alarm rate of 4e-8 for each of about 300 comparisons."""


def laws_of(model: BlockNetwork) -> reference.Laws:
    """The network in the form that the reference takes."""

    def laws(past: tuple[int, ...], seen: tuple[int, ...]) -> np.ndarray:
        return torch.softmax(model.after(past)(torch.tensor([seen]), torch.ones(1))[0], -1).numpy()

    return laws


def reward(x: Tensor) -> Tensor:
    """A reward for texts of any length, including unfinished ones."""
    return (x == 2).sum(1) - 0.5 * (x[:, 0] == 0) + 0.3 * (x[:, -1] == 1)


def particles(model: Any, length: int, count: int, texts: int, **how: Any) -> list[ParticleSet]:
    found: list[ParticleSet] = []
    options: dict[str, Any] = {"method": METHOD, "seeds": range(texts)} | how
    sample(model, PROCESS, (texts, length), particles=count, on_particles=found.append, **options)
    return found


def check_unbiased(sets: Sequence[ParticleSet], expected: dict[tuple[int, ...], float]) -> None:
    """E [Z-hat sum_j w_j [x_j = x]] is the expected weight of each text, and of all."""
    place = {text: k for k, text in enumerate(expected)}
    values, wanted = np.zeros((len(sets), len(place))), np.array(list(expected.values()))
    for row, one in zip(values, sets, strict=True):
        weights = one.log_weights.exp() * math.exp(one.log_normalizer)
        for text, weight in zip(map(tuple, one.tokens.tolist()), weights.tolist(), strict=True):
            row[place[text]] += weight
    least = wanted * wanted.sum() / len(sets[0].tokens)  # of independent particles; rare texts may not be seen
    error = np.sqrt(np.maximum(values.var(0), least) / len(sets))
    assert (np.abs(values.mean(0) - wanted) < FALSE_ALARM * error).all()
    total = values.sum(1)
    assert abs(total.mean() - wanted.sum()) < FALSE_ALARM * total.std() / math.sqrt(len(sets)) + 1e-9


@pytest.mark.parametrize(
    ("count", "strength", "language", "given", "stop", "runs"),
    [
        (4, 0.0, True, (), None, 30),
        (3, 1.0, False, (2,), 1, 60),
        pytest.param(1, 0.0, True, (), None, 150, marks=pytest.mark.slow),
        pytest.param(2, 1.3, True, (2,), None, 150, marks=pytest.mark.slow),
        pytest.param(4, -0.7, False, (), 1, 150, marks=pytest.mark.slow),
        pytest.param(8, 2.0, False, (1,), 1, 150, marks=pytest.mark.slow),
    ],
)
def test_weights_are_unbiased_for_every_text(
    count: int, strength: float, language: bool, given: tuple[int, ...], stop: int | None, runs: int
) -> None:
    """With a language across blocks, rewards of whole texts, prompts that end within a block, and stop tokens."""
    model = BlockNetwork(PROCESS, L, BLOCK, seed=1, time_free=True)
    law = reference.text_law(laws_of(model), V, L, BLOCK, given)
    law = law if stop is None else reference.until(law, stop, len(given))
    members = [text for text in languages.members(PATTERN, V, L) if text[: len(given)] == given] if language else None
    of_text = None if strength == 0 else lambda text: float(reward(torch.tensor([text])))
    expected = reference.tilted(law, members, of_text, strength)
    how: dict[str, Any] = {"reward": reward, "strength": strength} if strength else {}
    held = prompt(torch.tensor(given, dtype=torch.int64), L)
    how["constraint"] = languages.constraint(PATTERN, V, L).holding(held) if language else held
    sets = particles(model, L, count, runs, stop=() if stop is None else (stop,), **how)
    if stop is not None:  # texts that end are among the particles, and are resampled with the others
        assert len({one.tokens[0, len(given) :].eq(stop).any().item() for one in sets}) == 2
    check_unbiased(sets, expected)


def test_reference_law_is_normalized_and_matches_package() -> None:
    model = BlockNetwork(PROCESS, L, BLOCK, seed=1, time_free=True)
    law = reference.text_law(laws_of(model), V, L, BLOCK)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    nats = cedd.exact_likelihood(model, PROCESS, torch.tensor(list(law)), range(L), method=METHOD)
    np.testing.assert_allclose(nats.neg().exp().numpy(), list(law.values()), rtol=1e-9)


# ---- caches, seeds ----------------------------------------------------------------------------------------------


def many_fives(x: Tensor) -> Tensor:
    return (x == 5).double().mean(1)


def steered(model: Any, length: int = 18, texts: int = 1, **how: Any) -> list[ParticleSet]:
    """Particles that are resampled in most blocks, for texts longer than the context."""
    found: list[ParticleSet] = []
    options: dict[str, Any] = {"method": IN_BLOCKS, "context": CONTEXT, "seed": 1, "on_particles": found.append}
    options |= {"particles": 3, "reward": many_fives, "strength": 60.0} | how
    sample(model, MASKS, (texts, length), **options)
    return found


def same(first: Sequence[ParticleSet], second: Sequence[ParticleSet]) -> bool:
    return all(
        torch.equal(one.tokens, other.tokens)
        and torch.equal(one.log_weights, other.log_weights)
        and (one.log_normalizer, one.chosen) == (other.log_normalizer, other.chosen)
        for one, other in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("how", [pytest.param({}, marks=pytest.mark.slow), {"stop": (7,)}])
def test_cache_does_not_change_particles(how: dict[str, Any]) -> None:
    """Nor do a network without cache support, or recorded calls: keys and values follow their particles."""
    model = network()
    kept = steered(model, **how)
    assert any(size < 2 for one in kept for size in one.effective_sizes)
    assert len(kept[0].tokens.unique(dim=0)) > 1
    assert same(kept, steered(model, cache=False, **how))
    assert same(kept, steered(AttentionOnly(model), **how))
    recorded: Any = GraphedBlocks(model, torch.float32, replayed)
    together, again = (steered(one, deterministic=False, **how) for one in (model, recorded))
    assert same(together, again)


def test_particles_depend_only_on_their_seed_and_prompt() -> None:
    model, held = network(), [0, 3, 9]
    tokens = torch.randint(VOCABULARY, (3, 18), generator=torch.Generator().manual_seed(1))
    where = torch.arange(18) < torch.tensor(held)[:, None]
    how: dict[str, Any] = {"seed": None, "stop": (7,)}
    together = steered(model, texts=3, seeds=[5, 6, 7], constraint=Fixed(tokens, where), **how)
    for row, one in enumerate(together):
        assert bool((one.tokens[:, : held[row]] == tokens[row, : held[row]]).all())
        alone = Fixed(tokens[row : row + 1], where[row : row + 1])
        assert same([one], steered(model, texts=1, seeds=[5 + row], constraint=alone, **how))


def test_rewards_receive_partial_then_complete_texts() -> None:
    seen: list[Tensor] = []
    steered(network(), 10, 1, reward=lambda x: seen.append(x.clone()) or many_fives(x), stop=(7,))
    assert {x.shape[1] for x in seen} == {4, 8, 10}
    assert seen[-1].shape == (3, 10)
    assert max(int(x.max()) for x in seen) < VOCABULARY
    for x in seen:
        after = (x == 7).cumsum(1) > 0
        assert bool((x[after] == 7).all())


def test_callback_receives_one_particle_and_finally_the_chosen_one() -> None:
    seen: list[tuple[int, float, Tensor]] = []
    found = steered(network(), 10, 1, callback=lambda step, t, x: seen.append((step, t, x.clone())))
    assert [step for step, _, _ in seen] == list(range(len(seen)))
    times = [t for _, t, _ in seen]
    assert times == sorted(times, reverse=True)
    assert {x.shape for _, _, x in seen} == {(1, 10)}
    assert torch.equal(seen[-1][2][0], found[0].tokens[found[0].chosen])


def test_particle_without_possible_token_is_replaced() -> None:
    def one_way(x: Tensor, sigma: Tensor, *, clean: Tensor) -> Tensor:
        """Uniform; after a block with an a, no other token is possible."""
        outputs = torch.zeros(*x.shape, V)
        outputs[:, BLOCK:, 0][(clean[:, :BLOCK] != 0).all(1)] = -math.inf
        outputs[:, BLOCK:, 1:][(clean[:, :BLOCK] == 0).any(1)] = -math.inf
        return outputs

    language = languages.constraint("(aa|bb)bb", V, L)
    sets = particles(one_way, L, 8, 40, constraint=language)
    assert all(bool((one.tokens == 1).all()) for one in sets)
    values = np.exp([one.log_normalizer for one in sets])
    assert abs(values.mean() - 1 / 9 / 4) < FALSE_ALARM * values.std() / math.sqrt(len(sets)) + 1e-9
    with pytest.raises(ValueError, match=r"every text that satisfies regex\('aabb'\) has probability 0"):
        particles(one_way, L, 4, 1, constraint=languages.constraint("aabb", V, L))


# ---- guidance by a prompt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "weight"), [((1,), 2.5), ((2, 0), 0.0), ((0, 1, 2), 1.7), ((2, 1), 1.0)])
def test_prompt_guidance_follows_reference_law(given: tuple[int, ...], weight: float) -> None:
    """Weight 1 gives the model given the prompt; weight 0 the law of a text that begins after the prompt's blocks."""
    length = 6
    model = BlockNetwork(PROCESS, length, BLOCK, seed=2, time_free=True)
    own = laws_of(model)
    guided = reference.guided_laws(own, len(given), BLOCK, weight, V)
    law = reference.text_law(guided, V, length, BLOCK, given)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    if weight == 1:
        plain = reference.text_law(own, V, length, BLOCK, given)
        np.testing.assert_allclose(list(law.values()), list(plain.values()), rtol=1e-9)
    if weight == 0 and len(given) == BLOCK:
        without = reference.text_law(own, V, length - BLOCK, BLOCK)
        np.testing.assert_allclose(list(law.values()), list(without.values()), rtol=1e-9)
    held = prompt(torch.tensor(given), length)
    how: dict[str, Any] = {"method": METHOD, "sampler": "first-hitting", "guidance": weight, "constraint": held}
    drawn = sample(model, PROCESS, (5_000, length), seed=3, **how)
    index = {text: k for k, text in enumerate(law)}
    counts = np.bincount([index[tuple(row)] for row in drawn.tolist()], minlength=len(law))
    assert p_value(counts, np.array(list(law.values()))) > ERROR_RATE


def test_prompt_guidance_beyond_context() -> None:
    """With two independently sliding caches, without, with recorded calls, and in batches of several prompts."""
    model, held = network(), [2, 4, 11]
    tokens = torch.randint(VOCABULARY, (3, 18), generator=torch.Generator().manual_seed(1))
    fixed = Fixed(tokens, torch.arange(18) < torch.tensor(held)[:, None])
    how: dict[str, Any] = {"method": IN_BLOCKS, "sampler": "first-hitting", "context": CONTEXT, "guidance": 2.5}
    how |= {"seeds": [5, 6, 7], "stop": (7,), "constraint": fixed}
    found = sample(model, MASKS, (3, 18), **how)
    assert torch.equal(found, sample(model, MASKS, (3, 18), cache=False, **how))
    assert torch.equal(found, sample(AttentionOnly(model), MASKS, (3, 18), **how))
    recorded: Any = GraphedBlocks(model, torch.float32, replayed)
    assert torch.equal(found, sample(recorded, MASKS, (3, 18), deterministic=False, **how))
    plain = sample(model, MASKS, (3, 18), **{**how, "guidance": None})
    assert torch.equal(plain, sample(model, MASKS, (3, 18), **{**how, "guidance": 1.0}))
    assert not torch.equal(plain, found)
    for row in range(3):
        one = Fixed(tokens[row : row + 1], fixed.where[row : row + 1])
        alone = sample(model, MASKS, (1, 18), **{**how, "seeds": [5 + row], "constraint": one})
        assert torch.equal(alone[0], found[row])


def test_guided_particles_are_unbiased() -> None:
    """Guidance and a language: the weights are those of the guided model."""
    model, given = BlockNetwork(PROCESS, L, BLOCK, seed=1, time_free=True), (2,)
    guided = reference.guided_laws(laws_of(model), len(given), BLOCK, 2.0, V)
    law = reference.text_law(guided, V, L, BLOCK, given)
    members = [text for text in languages.members(PATTERN, V, L) if text[:1] == given]
    held = languages.constraint(PATTERN, V, L).holding(prompt(torch.tensor(given), L))
    check_unbiased(particles(model, L, 3, 40, guidance=2.0, constraint=held), reference.tilted(law, members))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"guidance": 2.0}, "^guidance needs a condition: a label, a prompt or other given text$"),
        ({"particles": 2, "temperature": 0}, "temperature above 0 and top_p 1"),
        ({"particles": 2, "reward": lambda x: [math.nan] * len(x)}, "returned nan or infinity for 8 of 8 texts"),
        ({"particles": 2, "reward": lambda x: [1.0]}, "one number for each of the 8 texts"),
    ],
)
def test_invalid_options_give_one_line_errors(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        sample(network(), MASKS, (1, 12), method=IN_BLOCKS, **how)
    assert "\n" not in str(caught.value)


def test_prompt_guidance_needs_masks() -> None:
    model, process = network(), cedd.uniform(VOCABULARY)
    how: dict[str, Any] = {"method": cedd.METHODS["bayes"].in_blocks(4), "guidance": 2.0}
    with pytest.raises(ValueError, match="guidance without a label needs a process with masks; give a label"):
        sample(model, process, (1, 12), constraint=prompt(torch.tensor([1]), 12), **how)
