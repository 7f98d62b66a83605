"""The importance-weighted bound, against the sampler's law by enumeration."""

import itertools
import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.bounds.estimate import mean_interval
from cedd.bounds.importance import (
    ImportanceEstimate,
    importance_bound,
    level_at_zero,
    nested_orders,
    reveal_levels,
)
from cedd.bounds.options import BoundOptions
from cedd.bounds.order_weights import WeightFile
from cedd.network import Capabilities
from tests.networks import Model, random_network
from tests.reference.reveals import order_weight, time_conditioned_law, time_free_law
from tests.samplers.chains import ERROR_RATE, HalvedTable, p_value

Z = 5.0
"""Allowed deviation of a Monte Carlo mean in standard errors: exceeded once in 1.7 million. The seeds are fixed."""


class TimeFree:
    """A network that does not depend on sigma."""

    time_conditioned = False

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.model(x, torch.ones_like(sigma))


def all_sequences(V: int, L: int) -> Tensor:
    """All sequences [V^L, L]."""
    return torch.tensor(list(itertools.product(range(V), repeat=L)))


def logits(model: Model):
    """A network in the oracle's calling convention, with cached outputs."""
    known: dict[object, np.ndarray] = {}

    def asked(x: list[tuple[int, ...]], sigma: float) -> np.ndarray:
        key = (*x, sigma)
        if key not in known:
            known[key] = model(torch.tensor(x), torch.full((len(x),), sigma, dtype=torch.float64)).numpy()
        return known[key]

    return asked


def laws(law: Callable[..., float], model: Model, data: Tensor, *rest: float) -> np.ndarray:
    """p(x) of every sequence by the oracle."""
    said = logits(model)
    return np.array([law(said, tuple(x), *rest) for x in data.tolist()])


def estimate(
    model: Model, process: cedd.TokenProcess, data: Tensor, method: str = "cedd", **options: Any
) -> ImportanceEstimate:
    options.setdefault("generator", torch.Generator().manual_seed(0))
    found = cedd.estimate_bound(model, process, data, method=method, bound="importance", **options)
    assert isinstance(found, ImportanceEstimate)
    return found


NETWORKS = {"mild": 0.5, "strong": 2.0, "nearly certain": 5.0}


@pytest.mark.parametrize(
    ("size", "antithetic"),
    [
        (5.0, True),
        (0.5, False),
        *(
            pytest.param(size, antithetic, marks=pytest.mark.slow)
            for size, antithetic in itertools.product(NETWORKS.values(), (True, False))
            if (size, antithetic) not in ((5.0, True), (0.5, False))
        ),
    ],
)
def test_mean_weights_match_sampler_probabilities_and_sum_to_one(size: float, antithetic: bool):
    V, L = 3, 4
    process = cedd.absorb(V)
    model, data = TimeFree(random_network(process, L, seed=2, size=size)), all_sequences(V, L)
    law = laws(time_free_law, model, data, V)
    assert law.sum() == pytest.approx(1.0)
    generator = torch.Generator().manual_seed(0)
    options = BoundOptions(orders=400, generator=generator)
    found = importance_bound(model, process, data, cedd.METHODS["cedd"], options, {}, antithetic)
    pairs = found.log_weights.exp().reshape(len(data), -1, 2).mean(2)
    errors = pairs.std(1) / math.sqrt(pairs.shape[1])
    # For nearly certain networks one order may dominate a sequence, so its own error is unreliable.
    assert float(pairs.mean(1).sum()) == pytest.approx(1.0, abs=Z * float(errors.norm()))
    if size < 5:
        assert np.all(np.abs(pairs.mean(1).numpy() - law) <= Z * errors.numpy())


class Conditioned:
    """A time-conditioned network, and the law of its sampler."""

    V, L = 2, 3
    process = cedd.absorb(V, cedd.LogLinear(eps=0.1))
    model = staticmethod(random_network(process, L, seed=5, size=1.5))

    @cached_property
    def law(self) -> np.ndarray:
        most = float(self.process.kernel(1.0).a)
        every = all_sequences(self.V, self.L)
        return laws(time_conditioned_law, self.model, every, self.V, most)


@pytest.fixture(scope="module")
def conditioned() -> Conditioned:
    return Conditioned()


@pytest.mark.parametrize("method", ["cedd", "bayes", "sedd", "sedds", "dfm"])
def test_time_conditioned_networks_use_reveal_times_of_process(method: str, conditioned: Conditioned):
    assert conditioned.law.sum() == pytest.approx(1.0)
    data = all_sequences(conditioned.V, conditioned.L)
    found = estimate(conditioned.model, conditioned.process, data, method, orders=1000)
    pairs = found.log_weights.exp().reshape(len(data), -1, 2).mean(2)
    errors = (pairs.std(1) / math.sqrt(pairs.shape[1])).numpy()
    assert np.all(np.abs(pairs.mean(1).numpy() - conditioned.law) <= Z * errors)


def test_enumerated_law_matches_sampler(conditioned: Conditioned):
    """Starting from masks only, even though the process leaves tokens at t = 1."""
    count, V, L = 4000, conditioned.V, conditioned.L
    generator, masks = torch.Generator().manual_seed(1), torch.full((count, L), V)
    how = {"method": "cedd", "sampler": "first-hitting", "x_start": masks, "generator": generator}
    drawn = cedd.sample(conditioned.model, conditioned.process, (count, L), **how)
    counts = np.bincount((drawn * torch.tensor([4, 2, 1])).sum(-1).numpy(), minlength=V**L)
    assert p_value(counts, conditioned.law / conditioned.law.sum()) > ERROR_RATE


class JumpsAtZero(Conditioned):
    """Half of the masks appear at t = 0+, and are drawn in one call."""

    process = cedd.absorb(2, cedd.Geometric(0.7, 8.0))
    model = staticmethod(random_network(process, 3, seed=5, size=1.5))

    @cached_property
    def law(self) -> np.ndarray:
        most, least = float(self.process.noise(1.0).a), -math.expm1(-0.7)
        return laws(time_conditioned_law, self.model, all_sequences(self.V, self.L), self.V, most, least)


JUMPS_AT_ZERO = JumpsAtZero()  # one for all tests, since its law takes a second


@pytest.mark.slow
def test_tokens_masked_at_time_zero_are_revealed_together():
    case = JUMPS_AT_ZERO
    assert case.law.sum() == pytest.approx(1.0)
    data = all_sequences(case.V, case.L)
    found = estimate(case.model, case.process, data, orders=2000)
    pairs = found.log_weights.exp().reshape(len(data), -1, 2).mean(2)
    errors = (pairs.std(1) / math.sqrt(pairs.shape[1])).numpy()
    assert np.all(np.abs(pairs.mean(1).numpy() - case.law) <= Z * errors)
    masks = torch.full((4000, case.L), case.V)
    how = {
        "method": "cedd",
        "sampler": "first-hitting",
        "x_start": masks,
        "generator": torch.Generator().manual_seed(1),
    }
    drawn = cedd.sample(case.model, case.process, (4000, case.L), **how)
    counts = np.bincount((drawn * torch.tensor([4, 2, 1])).sum(-1).numpy(), minlength=case.V**case.L)
    assert p_value(counts, case.law / case.law.sum()) > ERROR_RATE


def test_bound_decreases_towards_likelihood_with_more_orders():
    """For one and two orders (one and its reverse) the expectation is known exactly."""
    V, L = 3, 3
    process = cedd.absorb(V)
    model, data = TimeFree(random_network(process, L, seed=2, size=2.0)), all_sequences(V, L)
    orders = list(itertools.permutations(range(L)))
    weights = np.array([[order_weight(logits(model), tuple(x), o, V) for o in orders] for x in data.tolist()])
    reverse = weights[:, [orders.index(o[::-1]) for o in orders]]
    found = estimate(model, process, data, orders=1024)
    values = list(found.by_orders.values())
    assert list(found.by_orders) == [2**k for k in range(11)]
    one, two = found.of_orders(1), found.of_orders(2)
    assert one.nats_per_token == pytest.approx(-np.log(weights).mean() / L, abs=Z * one.monte_carlo_stderr)
    exactly_two = -np.log((weights + reverse) / 2).mean() / L
    assert two.nats_per_token == pytest.approx(exactly_two, abs=Z * two.monte_carlo_stderr)
    assert all(more < fewer for fewer, more in itertools.pairwise(values))
    exact = -np.log(weights.mean(1)).mean() / L
    assert exact - Z * found.monte_carlo_stderr < values[-1] < exact + 0.003
    assert found.nats_per_token == values[-1]
    assert 1 < found.effective_sample_size < 1024
    assert float(found.per_token.sum()) / data.numel() == pytest.approx(values[0])


@pytest.mark.slow
def test_intervals_cover_expected_bound():
    """500 repetitions with 30 sequences each; a share of 93 to 97% is within two standard errors of 95%."""
    V, L, repetitions, sequences = 2, 3, 500, 30
    process = cedd.absorb(V)
    model, every = TimeFree(random_network(process, L, seed=8, size=1.5)), all_sequences(V, L)
    p0 = torch.softmax(torch.arange(8.0, dtype=torch.float64) / 4, 0)
    drawn = torch.multinomial(p0, repetitions * sequences, True, generator=torch.Generator().manual_seed(3))
    said, orders = logits(model), list(itertools.permutations(range(L)))
    weights = np.array([[order_weight(said, tuple(x), o, V) for o in orders] for x in every.tolist()])
    pairs = (weights + weights[:, [orders.index(o[::-1]) for o in orders]]) / 2
    means = {1: weights, 2: pairs, 4: (pairs[:, :, None] + pairs[:, None]).reshape(8, -1) / 2}
    found = estimate(model, process, every[drawn], orders=4)
    for orders, mean_weights in means.items():
        truth = -float((np.log(mean_weights).mean(1) * p0.numpy()).sum()) / L
        values = found.of_orders(orders).per_sequence.view(repetitions, sequences)
        intervals = [mean_interval(part) for part in values]
        assert 0.93 <= sum(low <= truth <= high for low, high in intervals) / repetitions <= 0.97
        low, high = found.of_orders(orders).ci95
        assert low < truth < high


def test_monte_carlo_error_on_fixed_sequences_is_not_too_small():
    """200 repetitions on the same sequences: the spread of the estimates against the reported error."""
    V, L, repetitions = 3, 3, 200
    process = cedd.absorb(V)
    model, data = TimeFree(random_network(process, L, seed=2, size=1.0)), all_sequences(V, L)[:9]
    generator = torch.Generator().manual_seed(2)
    found = estimate(model, process, data.repeat(repetitions, 1), orders=8, generator=generator, fixed_set=True)
    means = found.per_sequence.view(repetitions, len(data)).mean(1)
    given = found.stderr * math.sqrt(repetitions)
    assert 0.9 < given / float(means.std()) < 1.8
    for orders in (2, 4):
        nested = found.of_orders(orders)
        assert (
            0.8 < nested.stderr * math.sqrt(repetitions) / float(nested.per_sequence.view(200, 9).mean(1).std()) < 1.3
        )


@pytest.mark.parametrize("size", [pytest.param(0.3, marks=pytest.mark.slow), 1.0])
def test_lower_bound_is_valid_and_gap_shrinks_with_orders(size: float):
    """200 repetitions of each sequence; means are compared with the known -log p."""
    V, L, repetitions = 2, 3, 200
    process = cedd.absorb(V)
    model, data = TimeFree(random_network(process, L, seed=2, size=size)), all_sequences(V, L)
    exact = -torch.as_tensor(laws(time_free_law, model, data, V)).log() / L
    gaps = []
    for orders in (8, 64):
        found = estimate(model, process, data.repeat(repetitions, 1), orders=orders)
        both = found.two_sided()
        below = both.per_sequence.view(repetitions, -1)
        assert torch.all(below.mean(0) - Z * below.std(0) / math.sqrt(repetitions) <= exact)
        assert both.at_least <= float(exact.mean()) + Z * both.at_least_stderr
        assert both.at_most >= float(exact.mean()) - Z * both.at_most_stderr
        gaps.append(both.at_most - both.at_least)
    assert both.informative
    assert 0 < gaps[1] < gaps[0]
    assert gaps[1] < 0.03 * size


def test_lower_bound_is_uninformative_if_few_orders_dominate():
    V, L = 3, 4
    process = cedd.absorb(V)
    model, data = TimeFree(random_network(process, L, seed=2, size=5.0)), all_sequences(V, L)
    found = estimate(model, process, data, orders=16)
    assert found.log_weight_variance > 1
    assert not found.two_sided().informative
    with pytest.raises(ValueError, match=r"at least 4 orders \(got 3\)"):
        estimate(model, process, data[:2], orders=3).two_sided()


def test_orders_depend_only_on_seed_and_index():
    V, L = 3, 4
    process, data = cedd.absorb(V), all_sequences(V, L)[:10]
    model = HalvedTable(process, L, seed=1)
    usual = estimate(model, process, data, orders=6)
    for batch in (1, 7):
        again = estimate(model, process, data, orders=6, batch=batch)
        torch.testing.assert_close(again.log_weights, usual.log_weights, rtol=1e-12, atol=0)
    fewer = estimate(model, process, data[:4], orders=3)
    torch.testing.assert_close(fewer.log_weights, usual.log_weights[:4, :3], rtol=1e-12, atol=0)
    other = estimate(model, process, data, orders=6, generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(other.log_weights, usual.log_weights)
    u = reveal_levels(7, 3, 4, 5)
    torch.testing.assert_close(u[0] + u[1], torch.ones(5, dtype=torch.float64))
    assert u[0].argsort().tolist() == u[1].argsort(descending=True).tolist()
    assert len(reveal_levels(7, 3, 3, 5)) == 3


def test_each_step_is_one_call_with_one_head_position_per_row():
    V, L = 3, 4
    process = cedd.absorb(V)
    model, rows, calls = HalvedTable(process, L, seed=1), [], []
    head = model.head
    model.head = lambda features: rows.append(len(features)) or head(features)
    found = estimate(
        model, process, all_sequences(V, L)[:5], orders=2, batch=10, progress=lambda *done: calls.append(done)
    )
    assert model.calls == [10] * L
    assert rows == [10] * L
    assert found.evaluations == 5 * 2 * L
    assert calls == [(10 * k, 40) for k in range(1, L + 1)]


class Untimed(HalvedTable):
    """A HalvedTable with the outputs of one noise level."""

    capabilities = Capabilities(features=True, time_conditioned=False)

    def outputs(self, x: Tensor, sigma: Tensor) -> Tensor:
        return super().outputs(x, torch.ones_like(sigma))


@pytest.mark.parametrize("process", [cedd.absorb(3), cedd.absorb(3, cedd.Geometric(0.7, 8.0))])
def test_orders_share_contexts_of_time_free_network(process: cedd.TokenProcess):
    """16 orders of 4 positions have at most 2^4 - 1 contexts in 64 steps."""
    L, K = 4, 16
    data = all_sequences(3, L)[:9]
    shared, separate = Untimed(process, L, seed=1), Untimed(process, L, seed=1)
    separate.capabilities = Capabilities(features=True)
    found, expected = (estimate(model, process, data, orders=K, batch=9 * K) for model in (shared, separate))
    torch.testing.assert_close(found.log_weights, expected.log_weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.per_token, expected.per_token, rtol=1e-12, atol=0)
    assert separate.calls == [9 * K] * L
    reached = torch.stack([reveal_levels(found_seed(), n, K, L) for n in range(9)]) * float(process.noise(1.0).a)
    assert shared.calls == [distinct_contexts(reached, step, level_at_zero(process)) for step in range(L)]
    assert found.evaluations == expected.evaluations


def found_seed() -> int:
    """The seed that `estimate` draws from its generator."""
    return int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(0)))


def distinct_contexts(reached: Tensor, step: int, least: float) -> int:
    """The number of sets of known positions before a step, over all sequences [N, K, L]."""
    ranks = reached.argsort(2, descending=True).argsort(2)
    known = (ranks < step) & (reached > least)
    return sum(len(set(map(tuple, one.tolist()))) for one in known)


def test_impossible_text_has_infinite_bound():
    process = cedd.absorb(2)
    never = torch.tensor([0.0, -math.inf])

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        return never.expand(*x.shape, 2)

    found = estimate(model, process, torch.tensor([[0, 0], [0, 1]]), orders=4)
    assert found.per_sequence.tolist() == [0.0, math.inf]
    assert found.nats_per_token == math.inf
    assert found.why_infinite
    assert found.effective_sample_size == 4.0


def test_nested_order_counts_divide_total():
    assert nested_orders(64) == [1, 2, 4, 8, 16, 32, 64]
    assert nested_orders(48) == [1, 2, 4, 8, 16, 48]
    assert nested_orders(1) == [1]
    found = estimate(random_network(cedd.absorb(2), 2, 0), cedd.absorb(2), torch.zeros(2, 2).long(), orders=6)
    assert list(found.by_orders) == [1, 2, 6]
    with pytest.raises(ValueError, match="must divide 6"):
        found.of_orders(4)


class Interrupted(Exception):
    """Raised in the middle of an evaluation."""


@pytest.mark.parametrize("calls_before", [1, 3, 10, 29])
def test_interrupted_evaluation_resumes_from_checkpoint(tmp_path: Path, calls_before: int) -> None:
    """30 calls of 5 passes, a file after each of 4 steps."""
    V, L = 3, 4
    process, data = cedd.absorb(V), all_sequences(V, L)[:9]
    model = HalvedTable(process, L, seed=1)
    whole = estimate(model, process, data, orders=4, batch=5)
    file = WeightFile(tmp_path / "weights.npz", "a model", every=0.0)
    calls = len(model.calls)

    def stop(done: int, planned: int) -> None:
        if len(model.calls) - calls == calls_before:
            raise Interrupted

    with pytest.raises(Interrupted):
        estimate(model, process, data, orders=4, batch=5, checkpoint=file, progress=stop)
    told: list[tuple[int, int]] = []
    calls = len(model.calls)
    found = estimate(model, process, data, orders=4, batch=7, checkpoint=file, progress=lambda *done: told.append(done))
    torch.testing.assert_close(found.log_weights, whole.log_weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.per_token, whole.per_token, rtol=1e-12, atol=0)
    finished = calls_before // L * 5
    assert sum(model.calls[calls:]) == (9 * 4 - finished) * L
    assert told[-1] == (144, 144)
    more = estimate(model, process, data, orders=6, checkpoint=file)
    torch.testing.assert_close(more.log_weights, estimate(model, process, data, orders=6).log_weights)
    calls = len(model.calls)
    again = estimate(model, process, data, orders=6, checkpoint=file)
    assert len(model.calls) == calls
    assert torch.equal(again.log_weights, more.log_weights)


def test_interrupted_round_is_finished_before_drawing_more_orders(tmp_path: Path) -> None:
    V, L = 3, 4
    process, data = cedd.absorb(V), all_sequences(V, L)[:9]
    model, file = HalvedTable(process, L, seed=1), WeightFile(tmp_path / "weights.npz", "a model", every=0.0)

    def stop(done: int, planned: int) -> None:
        if done > 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        estimate(model, process, data, orders=4, batch=1, checkpoint=file, progress=stop)
    found = estimate(model, process, data, orders=10, checkpoint=file)
    usual = estimate(model, process, data, orders=10)
    torch.testing.assert_close(found.log_weights, usual.log_weights, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.per_token, usual.per_token, rtol=1e-12, atol=0)


def test_checkpoint_of_another_evaluation_is_rejected(tmp_path: Path) -> None:
    V, L = 3, 4
    process, data, path = cedd.absorb(V), all_sequences(V, L)[:9], tmp_path / "weights.npz"
    model = HalvedTable(process, L, seed=1)
    estimate(model, process, data, orders=4, checkpoint=WeightFile(path, "a model"))
    changes: list[tuple[dict[str, Any], str]] = [
        ({}, "another model"),
        ({"generator": torch.Generator().manual_seed(1)}, "a model"),
        ({"method": "bayes"}, "a model"),
    ]
    for change, other in changes:
        with pytest.raises(ValueError, match="belongs to another evaluation"):
            estimate(model, process, data, orders=4, checkpoint=WeightFile(path, other), **change)
    with pytest.raises(ValueError, match="belongs to another evaluation"):
        estimate(model, process, data.flip(0), orders=4, checkpoint=WeightFile(path, "a model"))
    with pytest.raises(ValueError, match="has the weights of 4 orders already"):
        estimate(model, process, data, orders=2, checkpoint=WeightFile(path, "a model"))
    for content in (b"", b"text", path.read_bytes()[:200]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a file of order weights, or is damaged"):
            estimate(model, process, data, orders=4, checkpoint=WeightFile(path, "a model"))


def test_checkpoint_of_other_labels_is_rejected(tmp_path: Path) -> None:
    process, data = cedd.absorb(3), all_sequences(3, 4)[:9]
    plain, path = random_network(process, 4, 0), tmp_path / "weights.npz"

    def model(x: Tensor, sigma: Tensor, **conditions: Tensor) -> Tensor:
        return plain(x, sigma) * (1 + conditions["label"][:, None, None])

    zeros, ones = torch.zeros(9), torch.ones(9)
    usual = estimate(model, process, data, orders=4, label=zeros)
    for _ in range(2):
        found = estimate(model, process, data, orders=4, label=zeros, checkpoint=WeightFile(path, "a model"))
        assert torch.equal(found.log_weights, usual.log_weights)
    with pytest.raises(ValueError, match="belongs to another evaluation"):
        estimate(model, process, data, orders=4, label=ones, checkpoint=WeightFile(path, "a model"))


def test_orders_are_doubled_until_interval_is_narrow() -> None:
    V, L = 3, 4
    process, data = cedd.absorb(V), all_sequences(V, L)[::9]
    model = HalvedTable(process, L, seed=1)
    found = estimate(model, process, data, tolerance=0.05, fixed_set=True)
    low, high = found.ci95
    assert found.reached
    assert (high - low) / 2 <= math.log(1.05)
    assert found.orders in (4, 8, 16, 32, 64, 128, 256)
    fewer = estimate(model, process, data, orders=found.orders // 2, fixed_set=True)
    low, high = fewer.ci95
    assert (high - low) / 2 > math.log(1.05)
    torch.testing.assert_close(found.log_weights[:, : fewer.orders], fewer.log_weights, rtol=1e-12, atol=0)
    most = estimate(model, process, data, tolerance=1e-9, orders=6, fixed_set=True)
    assert (most.orders, most.reached) == (6, False)
    hopeless = estimate(model, process, data, tolerance=1e-9)
    assert hopeless.monte_carlo_stderr**2 < 0.05 * hopeless.sequence_stderr**2
    assert hopeless.orders < 4096


def test_orders_are_doubled_within_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes a second: 5 sequences, 4 positions and a batch of 5 are 4 s per order. 2, 2, 4 and 8 orders take
    64 s, and the next 16 would take 64 s more."""
    V, L, now = 3, 4, [0.0]
    process, data = cedd.absorb(V), all_sequences(V, L)[:5]
    table = HalvedTable(process, L, seed=1)
    monkeypatch.setattr("cedd.bounds.importance.time", SimpleNamespace(monotonic=lambda: now[0]))

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        now[0] += 1.0
        return table.outputs(x, sigma)

    assert estimate(model, process, data, seconds=120.0, batch=5).orders == 16
    assert estimate(model, process, data, seconds=128.0, batch=5).orders == 32
    assert estimate(model, process, data, seconds=1.0, batch=5).orders == 2
    assert estimate(model, process, data, seconds=1e6, batch=5, orders=5).orders == 5


@pytest.mark.parametrize(
    ("process", "method", "options", "message"),
    [
        (cedd.roulette(3), "cedd", {}, "a revealed token never changes"),
        (cedd.uniform(3), "cedd", {}, "a revealed token never changes"),
        (cedd.absorb(3), "ar", {}, "exact; use bound='tight'"),
        (cedd.absorb(3), "cedd", {"orders": 0}, r"orders must be at least 1 \(got 0\)"),
        (cedd.absorb(3), "cedd", {"orders": 1.5}, r"orders must be an integer \(got 1.5\)"),
        (cedd.absorb(3), "cedd", {"orders": True}, r"orders must be an integer \(got True\)"),
        (cedd.absorb(3), "cedd", {"batch": 0}, "batch must be at least 1"),
        (cedd.absorb(3), "cedd", {"tolerance": -0.01}, "tolerance must be a positive fraction"),
        (cedd.absorb(3), "cedd", {"tolerance": "0.1"}, r"tolerance must be a positive fraction.*\(got '0.1'\)"),
        (cedd.absorb(3), "cedd", {"seconds": math.nan}, r"seconds must be a positive number \(got nan\)"),
        (cedd.absorb(3), "cedd", {"seconds": "3"}, r"seconds must be a positive number \(got '3'\)"),
        (cedd.absorb(3), "cedd", {"checkpoint": "w.npz"}, r"checkpoint must be a .*WeightFile \(got 'w.npz'\)"),
        (cedd.absorb(3), "cedd", {"bound": "j3"}, "unknown bound 'j3'; use one of tight, j1, j2, importance, exact"),
        (cedd.absorb(3), "cedd", {"bound": "tight", "orders": 4}, "the bound 'tight' takes no orders"),
        (cedd.absorb(3), "cedd", {"bound": "tight", "seconds": 4.0}, "the bound 'tight' takes no seconds"),
    ],
)
def test_invalid_options_are_rejected(process, method, options, message):
    data = torch.zeros(2, 3, dtype=torch.int64)
    given = {"bound": "importance", **options}
    with pytest.raises(ValueError, match=message):
        cedd.estimate_bound(random_network(process, 3, 0), process, data, method=method, **given)


def test_empty_data_are_rejected():
    process = cedd.absorb(3)
    with pytest.raises(ValueError, match="at least one of at least one token"):
        estimate(random_network(process, 3, 0), process, torch.zeros(0, 3, dtype=torch.int64))
