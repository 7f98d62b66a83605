"""Samplers with stateful steps draw from their laws: all paths are enumerated, including the state."""

import itertools
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

import cedd
from cedd.samplers import SAMPLERS, Gibbs, RemaskByConfidence, Stratified, get_sampler, sample
from cedd.samplers.gibbs import redrawing_law
from tests.samplers.chains import ERROR_RATE, PROCESSES, Table, all_sequences, p_value, token_law

TIMES = (0.95, 0.6, 0.4, 0.1)


def drawn(model, process, method, sampler, x, times, seed=1, **options):
    """x [N, L] sampled through these times."""
    grid, generator = torch.tensor(times, dtype=torch.float64), torch.Generator().manual_seed(seed)
    arguments: Any = dict(grid=grid, final_denoise=False, x_start=x, generator=generator, **options)
    return sample(model, process, tuple(x.shape), method=method, sampler=sampler, **arguments)


def beliefs(model, process, x, t) -> np.ndarray:
    """softmax of the outputs at one sequence, [L, V]."""
    sigma = process.sigma(t).float()[None]
    return torch.softmax(model.outputs(torch.tensor([x]), sigma), -1)[0].numpy()


@pytest.mark.parametrize("tokens", [1.0, 3.0])
def test_remasking_by_confidence_follows_its_law(tokens):
    """Every path of two positions, with the probability that each token was drawn with."""
    process = cedd.absorb(2)
    model, mask = Table(process, 2, seed=7), 2
    states = {((mask, mask), (1.0, 1.0)): 1.0}
    for t, s in itertools.pairwise(TIMES):
        alive, a, later = float(process.kernel(t).alive), float(process.kernel(t).a), float(process.kernel(s).a)
        following = defaultdict[tuple, float](float)
        for (x, confidence), weight in states.items():
            shown = [i for i in range(2) if x[i] != mask]
            total = sum(np.exp(-confidence[i]) for i in shown)
            again = {i: min(1, later / alive) * min(1, tokens * np.exp(-confidence[i]) / total) for i in shown}
            stay = (later - alive * np.mean([*again.values()] or [0.0])) / a
            f = beliefs(model, process, x, t)
            ways = [
                [(x[i], confidence[i], 1 - again[i]), (mask, confidence[i], again[i])]
                if i in again
                else [(mask, confidence[i], stay), *((y, f[i, y], (1 - stay) * f[i, y]) for y in range(2))]
                for i in range(2)
            ]
            for way in itertools.product(*ways):
                tokens_now, sure_now, chances = zip(*way, strict=True)
                following[tokens_now, sure_now] += weight * np.prod(chances)
        states = following
    expected = np.zeros(9)
    for (x, _), weight in states.items():
        expected[x[0] * 3 + x[1]] += weight
    assert expected.sum() == pytest.approx(1)
    start = torch.full((40_000, 2), mask)
    counts = model.counts(drawn(model, process, "cedd", RemaskByConfidence(tokens), start, TIMES))
    assert p_value(counts, expected) > ERROR_RATE
    analytic = model.counts(drawn(model, process, "cedd", "analytic", start, TIMES))
    assert p_value(analytic, expected) < ERROR_RATE, "the test can fail"


def test_mask_fraction_follows_process():
    process = cedd.absorb(50)
    model = lambda x, sigma: torch.randn(*x.shape, 50, generator=torch.Generator().manual_seed(int(x.sum())))  # noqa: E731
    shares = list[float]()
    sample(
        model,
        process,
        (200, 64),
        method="cedd",
        sampler="remask-confidence",
        steps=16,
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, t, x: shares.append(float((x == 50).double().mean()) - float(process.kernel(t).a)),
    )
    assert max(map(abs, shares)) < 0.02


# ---- Gibbs --------------------------------------------------------------------------------------------------------


def redrawing_kernel(process, believed, t) -> np.ndarray:
    """[n^L, n^L]: one of L equally likely positions is redrawn; believed(x, i) is its predicted law, [V]."""
    sequences = all_sequences(process, 2).tolist()
    size = process.num_states
    kernel = np.zeros((size**2, size**2))
    noise = process.noise(torch.tensor([t], dtype=torch.float64))
    for row, x in enumerate(sequences):
        for i in range(2):
            law = redrawing_law(torch.as_tensor(believed(x, i))[None], noise)[0].numpy()
            for y, chance in enumerate(law):
                changed = [y if j == i else x[j] for j in range(2)]
                kernel[row, changed[0] * size + changed[1]] += chance / 2
    return kernel


@pytest.mark.parametrize("name", PROCESSES)
def test_redrawing_preserves_distribution_of_perfect_network(name):
    process, t = PROCESSES[name](3), 0.4
    p0 = torch.rand(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    p0 /= p0.sum()
    forward = process.transition_matrix(t).numpy()[:, :3]  # from tokens to states
    p_t = (forward @ p0 @ forward.T).ravel()

    def believed(x, i):
        other = forward[x[1 - i]]  # p(x_j | its clean token)
        joint = p0 @ other if i == 0 else other @ p0
        return joint / joint.sum()

    kernel = redrawing_kernel(process, believed, t)
    np.testing.assert_allclose(kernel.sum(1), 1)
    np.testing.assert_allclose(p_t @ kernel, p_t, atol=1e-14)


@pytest.mark.parametrize(("name", "method"), [("roulette", "bayes"), ("uniform", "bayes"), ("absorb", "cedd")])
def test_gibbs_follows_its_law(name, method):
    """An analytic step, and then one position redrawn."""
    process, t, s = PROCESSES[name](2), 0.7, 0.4
    model = Table(process, 2, seed=5)
    x = all_sequences(process, 2)[1]
    step = token_law(method, "analytic", process, model.outputs(x[None], process.sigma(t).float()[None]), x[None], t, s)
    after = np.outer(*step[0]).ravel()

    def believed(x, i):
        shown = list(x) if process.can_shuffle else [process.vocab_size if j == i else x[j] for j in range(2)]
        return beliefs(model, process, shown, s)[i]

    expected = after @ redrawing_kernel(process, believed, s)
    counts = model.counts(drawn(model, process, method, "gibbs", x.expand(40_000, 2), (t, s)))
    assert p_value(counts, expected) > ERROR_RATE
    assert np.abs(counts / counts.sum() - after).sum() > 0.1, "the test can fail"


@pytest.mark.parametrize("sweeps", [False, True])
def test_gibbs_keeps_mask_fraction_with_excluded_tokens(sweeps):
    """In its step and in its redraws: the other tokens take the excluded probability, masks become no likelier."""
    process, t, s = PROCESSES["hybrid"](3), 0.7, 0.4
    sampler = Gibbs(share=1.0) if sweeps else Gibbs(start=0.0)
    x = drawn(Table(process, 1, seed=5), process, "bayes", sampler, torch.full((40_000, 1), 3), (t, s), exclude=[0, 1])
    masked = float(process.kernel(s).a) / (1 if sweeps else float(process.kernel(t).a))
    assert p_value(np.bincount(x.flatten(), minlength=4), np.array([0, 0, 1 - masked, masked])) > ERROR_RATE


def test_gibbs_runs_at_chosen_times_and_sweeps():
    process = cedd.uniform(4)
    for sampler, calls in ((Gibbs(), 9), (Gibbs(sweeps=3), 17), (Gibbs(start=0.5), 7), (Gibbs(stop=0.99), 5)):
        model = Table(process, 3, seed=1)
        sample(model, process, (2, 3), method="bayes", sampler=sampler, steps=4, seeds=[1, 2])
        assert len(model.calls) == calls, sampler


# ---- Stratified ---------------------------------------------------------------------------------------------------


def test_stratified_follows_its_law():
    """Every path of one position, for 4,000 phases."""
    process, phases = cedd.uniform(3), (np.arange(4000) + 0.5) / 4000
    model, x = Table(process, 1, seed=2), torch.arange(3)[:, None]
    laws = [
        token_law("bayes", "analytic", process, model.outputs(x, process.sigma(t).float().expand(3)), x, t, s)[:, 0]
        for t, s in itertools.pairwise(TIMES)
    ]
    expected = np.zeros(3)
    for phase in phases:
        states = {(0, phase): 1 / len(phases)}
        for law in laws:
            following = defaultdict[tuple, float](float)
            for (here, reached), weight in states.items():
                moving = 1 - law[here, here]
                after = reached + moving
                if np.floor(after) > np.floor(reached):
                    for y in set(range(3)) - {here}:
                        following[y, after] += weight * law[here, y] / moving
                else:
                    following[here, after] += weight
            states = following
        for (here, _), weight in states.items():
            expected[here] += weight
    start = torch.zeros(40_000, 1, dtype=torch.int64)
    counts = model.counts(drawn(model, process, "bayes", "stratified", start, TIMES))
    assert p_value(counts, expected) > ERROR_RATE
    analytic = model.counts(drawn(model, process, "bayes", "analytic", start, TIMES))
    assert p_value(analytic, expected) < ERROR_RATE, "the test can fail"


# ---- What all have in common --------------------------------------------------------------------------------------

FITTING = [("remask-confidence", "absorb", "cedd"), ("gibbs", "hybrid", "bayes"), ("stratified", "uniform", "cedd")]


@pytest.mark.parametrize(("sampler", "process", "method"), FITTING)
def test_text_depends_only_on_its_seed_and_ends_clean(sampler, process, method):
    made = PROCESSES[process](4)
    model, seeds = Table(made, 3, seed=3), [5, 6, 7, 8]
    held = cedd.Fixed(torch.tensor([2, 0, 0]), torch.tensor([True, False, False]))
    options: Any = {"method": method, "sampler": sampler, "steps": 6, "temperature": 0.8, "exclude": [1]}
    options["constraint"] = held
    four = sample(model, made, (4, 3), seeds=seeds, **options)
    assert torch.equal(four[1:3], sample(model, made, (2, 3), seeds=seeds[1:3], **options))
    assert (four[:, 0] == 2).all()
    assert not ((four == 1) | (four > 3)).any()


@pytest.mark.parametrize(
    ("sampler", "process", "method", "why"),
    [
        ("remask-confidence", "uniform", "cedd", "has no masks"),
        ("remask-confidence", "roulette", "bayes", "only masks"),
        ("remask-confidence", "absorb", "sedd", "needs probabilities"),
        ("remask-confidence", "absorb", "dfm", "runs a process backwards"),
        ("remask-capped", "absorb", "dfm", "runs a process backwards"),
        ("gibbs", "roulette", "cedd", "needs leave-one-out predictions"),
        ("gibbs", "uniform", "sedds", "needs probabilities"),
        ("stratified", "absorb", "cedd", "a mask is revealed only once"),
        ("stratified", "hybrid", "bayes", "a mask is revealed only once"),
        ("remask-capped", "absorb", "sedd", "needs probabilities"),
        ("remask-rescaled", "absorb", "sedds", "needs probabilities"),
    ],
)
def test_unsupported_combinations_are_rejected(sampler, process, method, why):
    with pytest.raises(ValueError, match=why):
        get_sampler(sampler, cedd.get_method(method)).check(cedd.get_method(method), PROCESSES[process](4))


def test_autoregressive_models_accept_any_sampler():
    """The process of an autoregressive run is irrelevant."""
    for sampler, process in itertools.product(SAMPLERS, PROCESSES.values()):
        get_sampler(sampler, cedd.get_method("ar")).check(cedd.get_method("ar"), process(4))


def test_sampler_parameters_are_validated():
    for wrong in (lambda: RemaskByConfidence(-1), lambda: Gibbs(share=0), lambda: Gibbs(sweeps=0)):
        with pytest.raises(ValueError, match=r"must not be negative|needs a share"):
            wrong()
    assert Stratified().name in SAMPLERS
