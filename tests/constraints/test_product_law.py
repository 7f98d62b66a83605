"""The product distribution restricted to a language, against enumeration: partition function, marginals and draws."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cedd.constraints import TokenAutomaton, TokenLanguage
from cedd.constraints.product_law import LogLaw, ScaledLaw, product_law
from cedd.constraints.token_automaton import Transitions
from cedd.samplers.choice import inverse_cdf
from tests.interpreted import compile_for_hopper, run_interpreted

LAWS = {"scaled": ScaledLaw, "logarithms": LogLaw}


def random_automaton(rng: np.random.Generator, vocab_size: int, states: int) -> TokenAutomaton:
    """Some tokens share a class; some states accept."""
    classes = rng.integers(0, vocab_size, vocab_size).astype(np.int32)
    made = [
        (state, label, int(rng.integers(states)))
        for state in range(states)
        for label in sorted(set(classes.tolist()))
        if rng.random() < 0.7
    ]
    source, label, target = np.array(made, dtype=np.int32).reshape(-1, 3).T
    return TokenAutomaton(classes, Transitions(source, label, target), rng.random(states) < 0.5)


def enumerated(automaton: TokenAutomaton, log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The weight of each sequence of the language, for log-probabilities [L, V]."""
    length, vocab_size = log_probs.shape
    weights = log_probs.exp().numpy()
    return {
        x: math.prod(float(weights[i, v]) for i, v in enumerate(x))
        for x in itertools.product(range(vocab_size), repeat=length)
        if automaton.matches(x)
    }


def cases(count: int = 40):
    rng = np.random.default_rng(1)
    for _ in range(count):
        vocab_size, length, states = (int(rng.integers(low, high)) for low, high in ((2, 5), (1, 7), (1, 5)))
        log_probs = torch.from_numpy(rng.normal(0, 3, (2, length, vocab_size)))
        yield random_automaton(rng, vocab_size, states), log_probs


def log_weights(language: TokenLanguage, log_probs: torch.Tensor, **how: bool) -> torch.Tensor:
    return torch.stack([language.class_log_weights(one, **how) for one in log_probs])


@pytest.mark.parametrize("kind", LAWS)
def test_partition_function_and_marginals_match_enumeration(kind):
    seen = 0
    for automaton, log_probs in cases():
        language = TokenLanguage(automaton)
        law = LAWS[kind](language, log_weights(language, log_probs))
        for b, one in enumerate(log_probs):
            weights = enumerated(automaton, one)
            if not sum(weights.values()):
                assert law.log_normalizer[b] == -math.inf
                continue
            total, seen = math.fsum(weights.values()), seen + 1
            assert abs(float(law.log_normalizer[b]) - math.log(total)) < 1e-12
            expected = np.zeros(one.shape)
            for x, weight in weights.items():
                expected[np.arange(len(x)), x] += weight / total
            places = torch.arange(len(one))
            factors = law.log_factors(torch.full_like(places, b), places)
            found = (one + language.at_tokens(factors)).exp().numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert seen > 40


def test_first_draws_partition_unit_interval_by_probability():
    """Draws for a grid of uniform numbers: the share of the cube that gives a sequence is its probability.

    The first position's number alone determines its token, so its share is exact up to the grid.
    """
    seen = 0
    for automaton, log_probs in cases(20):
        one = log_probs[:1]
        weights = enumerated(automaton, one[0])
        if not sum(weights.values()):
            continue
        language = TokenLanguage(automaton)
        grid = 4000
        u = torch.rand(grid, one.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        u[:, 0] = (torch.arange(grid) + 0.5) / grid
        law = LogLaw(language, log_weights(language, one).expand(grid, -1, -1))
        classes, rest = law.draw(u)
        assert bool(((rest >= 0) & (rest < 1)).all())
        first = np.zeros(automaton.num_classes)
        for x, weight in weights.items():
            first[automaton.classes[x[0]]] += weight / sum(weights.values())
        found = torch.bincount(classes[:, 0], minlength=automaton.num_classes) / grid
        np.testing.assert_allclose(found, first, rtol=0, atol=2 / grid * automaton.num_classes)
        # What is left of the number is uniform: the order within each class is kept.
        for label in classes[:, 0].unique():
            inside = rest[classes[:, 0] == label, 0]
            assert bool((inside.diff() > 0).all())
        seen += 1
    assert seen >= 10


@pytest.mark.parametrize("which", ["all", "some"])
def test_joint_draws_follow_distribution(which):
    """Pearson's statistic over the classes of the positions that are drawn, false alarm 1e-4 per case."""
    from scipy.stats import chi2

    seen = 0
    for number, (automaton, log_probs) in enumerate(cases(14)):
        weights = enumerated(automaton, log_probs[0])
        length = log_probs.shape[1]
        if not sum(weights.values()) or (which == "some" and length < 2):
            continue
        places = list(range(length)) if which == "all" else [*range(number % 2, length, 2)]
        expected: dict[tuple[int, ...], float] = {}
        for x, weight in weights.items():
            key = tuple(int(automaton.classes[x[place]]) for place in places)
            expected[key] = expected.get(key, 0.0) + weight / sum(weights.values())
        language, draws = TokenLanguage(automaton), 4000
        law = LogLaw(language, log_weights(language, log_probs[:1]).expand(draws, -1, -1))
        generator = torch.Generator().manual_seed(number)
        chosen = torch.zeros(draws, length, dtype=torch.bool)
        chosen[:, places] = True
        classes, _ = law.draw(torch.rand(draws, length, generator=generator, dtype=torch.float64), chosen)
        found: dict[tuple[int, ...], int] = {}
        for row in map(tuple, classes[:, places].tolist()):
            found[row] = found.get(row, 0) + 1
        assert set(found) <= set(expected)
        common = [key for key, chance in expected.items() if chance * draws >= 5]
        statistic = sum((found.get(key, 0) - expected[key] * draws) ** 2 / (expected[key] * draws) for key in common)
        rest = 1 - sum(expected[key] for key in common)
        if rest * draws >= 5:
            others = draws - sum(found.get(key, 0) for key in common)
            statistic += (others - rest * draws) ** 2 / (rest * draws)
        degrees = len(common) - (rest * draws < 5)
        assert degrees < 1 or statistic < chi2.ppf(1 - 1e-4, degrees)
        seen += 1
    assert seen >= 6


def test_known_tokens_are_certain():
    for automaton, log_probs in cases(10):
        at, token = log_probs.shape[1] - 1, 1
        certain = log_probs[0].index_fill(0, torch.tensor(at), 0.0)
        expected = sum(weight for x, weight in enumerated(automaton, certain).items() if x[at] == token)
        language = TokenLanguage(automaton)
        weights = log_weights(language, log_probs[:1])
        weights[0, at] = language.known_log_weights(torch.tensor([token]))[0]
        found = float(product_law(language, weights).log_normalizer)
        assert found == -math.inf if expected == 0 else abs(found - math.log(expected)) < 1e-12


@pytest.mark.parametrize("kind", LAWS)
def test_law_after_fixing_tokens_one_by_one(kind):
    """The marginals at each position are those of a law whose earlier tokens are known."""
    rng, seen = np.random.default_rng(3), 0
    for automaton, log_probs in cases(20):
        language = TokenLanguage(automaton)
        weights = log_weights(language, log_probs)
        law = LAWS[kind](language, weights.clone())
        rows = torch.isfinite(law.log_normalizer).nonzero().squeeze(1)
        for i in range(log_probs.shape[1]):
            if not len(rows) or rng.random() < 0.3:
                continue  # a position that is summed over
            at = torch.full_like(rows, i)
            found = law.log_factors(rows, at)
            expected = LAWS[kind](language, weights).log_factors(rows, at)
            np.testing.assert_allclose(found.exp(), expected.exp(), rtol=1e-12)
            tokens = (language.at_tokens(found) + log_probs[rows, i]).argmax(1)
            weights[rows, i] = language.known_log_weights(tokens)
            law.fix(rows, at, language.classes[tokens])
            seen += len(rows)
    assert seen > 20


def test_both_laws_give_same_draws_for_same_random_numbers():
    for automaton, log_probs in cases(20):
        language = TokenLanguage(automaton)
        weights = log_weights(language, log_probs)
        scaled, logs = ScaledLaw(language, weights), LogLaw(language, weights)
        if not scaled.has_marginals:
            continue
        generator = torch.Generator().manual_seed(5)
        for _ in range(20):
            u = torch.rand(log_probs.shape[:2], generator=generator, dtype=torch.float64)
            chosen = torch.rand(u.shape, generator=generator) < 0.7
            for one, other in zip(scaled.draw(u, chosen), logs.draw(u, chosen), strict=True):
                torch.testing.assert_close(one[chosen], other[chosen], rtol=0, atol=1e-9)


def test_greedy_draw_is_most_likely_sequence():
    seen = 0
    for automaton, log_probs in cases(30):
        weights = enumerated(automaton, log_probs[0])
        if not sum(weights.values()):
            continue
        language = TokenLanguage(automaton)
        law = product_law(language, log_weights(language, log_probs[:1], greedy=True), greedy=True)
        classes, _ = law.draw(torch.zeros(1, log_probs.shape[1]))
        best = max(weights, key=lambda x: weights[x])
        assert classes[0].tolist() == automaton.classes[list(best)].tolist()
        assert abs(float(law.log_normalizer) - math.log(weights[best])) < 1e-12
        seen += 1
    assert seen > 10


def automaton_of(transitions: list[tuple[int, int, int]], accepting: list[bool], vocab_size: int) -> TokenAutomaton:
    source, label, target = np.array(transitions, dtype=np.int32).T
    return TokenAutomaton(
        np.arange(vocab_size, dtype=np.int32), Transitions(source, label, target), np.array(accepting)
    )


def test_weights_beyond_float64_range():
    """The first token, 0 or 1, is repeated. Every later position costs texts of 0 four nats; texts of 1 pay it all at
    the first position. So one has 1e-600 of the other's weight in the middle, and a similar weight at the end."""
    length, cost = 400, 4.0
    automaton = automaton_of([(0, 0, 1), (0, 1, 2), (1, 0, 1), (2, 1, 2)], [False, True, True], 2)
    language = TokenLanguage(automaton)
    log_probs = torch.zeros(1, length, 2, dtype=torch.float64)
    log_probs[0, 1:, 0] = -cost
    log_probs[0, 0, 1] = -cost * (length - 1) + math.log(3)
    weights = log_weights(language, log_probs)
    assert not ScaledLaw(language, weights).has_marginals
    law = product_law(language, weights)
    assert abs(float(law.log_normalizer) - (math.log(4) - cost * (length - 1))) < 1e-9
    factors = law.log_factors(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    np.testing.assert_allclose((log_probs[0, :1] + language.at_tokens(factors)).exp()[0], [0.25, 0.75], rtol=1e-9)
    classes, _ = law.draw(torch.full((1, length), 0.2))
    assert classes.unique().tolist() == [0]


def test_class_weights_far_below_largest_are_exact():
    automaton = automaton_of([(0, 1, 0)], [True], 3)
    merged = TokenAutomaton(np.array([0, 1, 1], dtype=np.int32), automaton.transitions, automaton.accepting)
    both = TokenAutomaton(
        np.array([0, 1, 1], dtype=np.int32),
        Transitions(
            *(np.array([0, 0], dtype=np.int32), np.array([0, 1], dtype=np.int32), np.array([0, 0], dtype=np.int32))
        ),
        automaton.accepting,
    )
    log_probs = torch.tensor([[0.0, -2000.0, -2001.0], [-math.inf, 0.0, 0.0], [0.0, -math.inf, -math.inf]]).double()
    expected = torch.tensor([-2000 + math.log1p(math.exp(-1)), math.log(2), -math.inf]).double()
    for automaton in (merged, both):
        torch.testing.assert_close(TokenLanguage(automaton).class_log_weights(log_probs)[:, 1], expected)
    assert TokenLanguage(both).class_log_weights(log_probs)[:, 0].tolist() == [0.0, -math.inf, 0.0]


def test_law_of_sequence_does_not_depend_on_batch():
    """It is bitwise equal to that of the sequence alone; the result is float64 for float32 inputs."""
    rng = np.random.default_rng(0)
    automaton = random_automaton(rng, 4, 4)
    language = TokenLanguage(automaton)
    log_probs = torch.from_numpy(rng.normal(0, 2, (5, 6, 4))).float()
    together = product_law(language, log_weights(language, log_probs)).log_normalizer
    alone = [product_law(language, log_weights(language, log_probs[b : b + 1])).log_normalizer for b in range(5)]
    assert together.tolist() == torch.cat(alone).tolist()
    assert together.dtype == torch.float64


def check_kernels(device: str) -> None:
    """The kernels match the PyTorch operations, which the tests above compare with enumeration; for logits in float32,
    exponentials are in float32, too."""
    generator = torch.Generator().manual_seed(7)
    with pytest.MonkeyPatch.context() as patch:
        for number, (automaton, log_probs) in enumerate(kernel_cases()):
            language, shape = TokenLanguage(automaton), log_probs.shape[:2]
            u = torch.rand(shape, generator=generator, dtype=torch.float64)
            chosen = torch.rand(shape, generator=generator) < 0.6
            greedy = number % 3 == 0
            patch.undo()
            expected = laws_results(language, log_probs, u, chosen, greedy)
            patch.setattr("cedd.constraints.product_law._takes_kernels", lambda tensor: True)
            if number % 2:  # so that positions are searched in several pieces
                patch.setattr("cedd.constraints.product_law_triton.MARKS", 2)
            there = TokenLanguage(automaton, device)
            for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
                found = laws_results(there, log_probs.to(device, dtype), u.to(device), chosen.to(device), greedy)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=tolerance)


def kernel_cases():
    """The cases of the tests, some with many tokens per class, one with more states and classes than a tile, and some
    whose transitions fit in registers in each way."""
    yield from ((automaton, log_probs.float().double()) for automaton, log_probs in cases(8))
    rng = np.random.default_rng(2)
    few = automaton_of([(0, 0, 0), (0, 2, 1), (1, 1, 0)], [True, False], 3)
    for size, length in ((150, 4), (4000, 1)):  # the latter has classes of more tokens than a tile
        wide = np.array([token % 3 for token in range(size)], dtype=np.int32)
        yield replace(few, classes=wide), normal(rng, length, size)
    yield random_automaton(rng, 90, 70), normal(rng, 3, 90)
    for states, many, most in ((100, 0, 2), (100, 3, 20), (20, 2, 20), (40, 20, 90), (60, 40, 20)):
        made = [
            (state, label, (state + 1 + 7 * label) % states)
            for state in range(states)
            for label in range(most if state < many else 2)
        ]
        yield automaton_of(made, [state % 3 > 0 for state in range(states)], 90), normal(rng, 5, 90)


def normal(rng: np.random.Generator, length: int, vocab_size: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 3, (2, length, vocab_size))).float().double()


def laws_results(
    language: TokenLanguage, log_probs: torch.Tensor, u: torch.Tensor, chosen: torch.Tensor, greedy: bool
) -> list[torch.Tensor]:
    """Weights of classes, the partition function, draws and marginals, of sequences that are possible."""
    weights = log_weights(language, log_probs, greedy=greedy)
    law = LogLaw(language, weights, greedy=greedy)
    found = [weights, law.log_normalizer]
    rows = torch.isfinite(law.log_normalizer)
    found += [torch.where(chosen & rows[:, None], one, 0) for one in law.draw(u, chosen)]
    if not greedy:
        places = (chosen & rows[:, None]).nonzero().T
        found.append(law.log_factors(*places))
    return [*found, picked(language, log_probs.flatten(0, 1), u.flatten(), greedy)]


def picked(language: TokenLanguage, logits: torch.Tensor, u: torch.Tensor, greedy: bool) -> torch.Tensor:
    """A token of each row from last to first, within the class of some token that is in a transition."""
    rows = torch.arange(len(logits), device=logits.device).flip(0)
    alive = language.by_label.label
    classes = alive[torch.arange(len(logits), device=logits.device) % len(alive)]
    found = language.tokens_of(logits, rows, classes, u, greedy=greedy)
    if found is not None:
        return found
    inside = logits[rows].masked_fill(language.classes != classes[:, None], -math.inf)
    return inside.argmax(-1) if greedy else inverse_cdf(inside, u, log=True)


def test_interpreted_kernels_match_torch():
    run_interpreted("from tests.constraints.test_product_law import check_kernels; check_kernels('cpu')")


def test_draw_of_long_text_fits_in_cuda_grid(monkeypatch: pytest.MonkeyPatch):
    """CUDA limits the first dimension of a grid to 2^31 - 1, and the others to 65,535."""
    pytest.importorskip("triton")
    from cedd.constraints import product_law_triton as kernels

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(kernels, "_launch", lambda kernel, grid, *tables, **how: grids.append(grid))
    length, language = 70_000, TokenLanguage(automaton_of([(0, 0, 0)], [True], 1))
    rows = torch.zeros(1, length, dtype=torch.int64)
    numbers, beta = torch.zeros(1, length, dtype=torch.float64), torch.zeros(length + 1, 1, 1, dtype=torch.float64)
    kernels.draw(beta[0], rows, rows, beta, numbers, numbers == 0, language.edges, False)
    assert all(size < 65_536 for grid in grids for size in grid[1:])
    assert max(grid[0] for grid in grids) == length


@pytest.mark.gpu
def test_kernels_match_torch_on_gpu():
    check_kernels("cuda")


@pytest.mark.parametrize(
    "name", ["row_sums", "backward", "small_backward", "forward", "choose", "follow", "draw", "pick"]
)
@pytest.mark.parametrize("greedy", [False, True])
def test_kernels_compile_for_hopper(name: str, greedy: bool):
    pytest.importorskip("triton")
    from cedd.constraints import product_law_triton as kernels

    floats = ("sums", "beta", "alpha", "weights", "factors", "numbers", "used")
    integers = ("places", "starts", "labels", "sources", "targets", "drawn", "picked", "rows", "known", "tokens")
    by_count = name in ("backward", "small_backward", "choose", "follow", "draw")
    small = ("labels", "targets", "starts", "order", "rank", "edges", "path") if by_count else ()
    types = (
        {"values": "*fp32", "logits": "*fp32", "chosen": "*i8"}
        | dict.fromkeys(floats, "*fp64")
        | dict.fromkeys(integers, "*i64")
    )
    types |= dict.fromkeys(("columns", "groups", "length", "batch", "classes", "states", "many"), "i32")
    types |= dict.fromkeys(small, "*i32")
    sizes = {"TILE": 32, "DEPTH": 32, "PLACES": 64, "MANY": 16, "SINGLE": True}
    constants = {"GREEDY": greedy, **sizes}
    assert compile_for_hopper(getattr(kernels, f"_{name}_kernel"), types, constants, kernels.WARPS)
