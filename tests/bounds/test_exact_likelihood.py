"""The exact likelihood of a few positions, against brute force over all orders."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.network import Capabilities
from tests.bounds.test_importance import JUMPS_AT_ZERO, Conditioned, TimeFree, all_sequences, laws, logits
from tests.networks import random_network
from tests.reference.reveals import softmax, time_conditioned_law, time_free_law
from tests.samplers.chains import HalvedTable


class FreeTable(HalvedTable):
    """A network with a backbone and a head that does not depend on sigma."""

    capabilities = Capabilities(features=True, time_conditioned=False)

    def outputs(self, x: Tensor, sigma: Tensor) -> Tensor:
        return super().outputs(x, torch.zeros_like(sigma))


def free(process: cedd.TokenProcess, length: int, size: float = 2.0) -> TimeFree:
    model = TimeFree(random_network(process, length, seed=2, size=size))
    model.capabilities = Capabilities(time_conditioned=False)  # pyright: ignore
    return model


@pytest.mark.parametrize(("V", "L", "size"), [(3, 4, 0.5), (3, 4, 8.0), (2, 5, 2.0)])
def test_recursion_matches_mean_over_all_orders(V: int, L: int, size: float):
    process = cedd.absorb(V)
    model, data = free(process, L, size), all_sequences(V, L)
    found = cedd.exact_likelihood(model, process, data, range(L), method="cedd")
    law = laws(time_free_law, model, data, V)
    np.testing.assert_allclose((-found).exp().numpy(), law, rtol=1e-12)
    assert float((-found).exp().sum()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("positions", [[1], [3, 0], [0, 1, 3]])
def test_positions_are_scored_given_the_others(positions: list[int]):
    V, L = 3, 4
    process = cedd.absorb(V)
    model, data = free(process, L), all_sequences(V, L)[::5]
    found = cedd.exact_likelihood(model, process, data, positions, method="bayes")
    said = logits(model)
    for x, nats in zip(data.tolist(), found.tolist(), strict=True):
        total, orders = 0.0, list(itertools.permutations(positions))
        for order in orders:
            seen, weight = [V if i in positions else token for i, token in enumerate(x)], 1.0
            for i in order:
                weight *= softmax(said([tuple(seen)], 1.0))[0, i, x[i]]
                seen[i] = x[i]
            total += weight / len(orders)
        assert nats == pytest.approx(-math.log(total), abs=1e-12)


def test_reveal_times_are_integrated_for_time_conditioned_networks():
    case = Conditioned()
    data = all_sequences(case.V, case.L)
    found = cedd.exact_likelihood(case.model, case.process, data, range(case.L), method="cedd")
    np.testing.assert_allclose((-found).exp().numpy(), case.law, rtol=2e-5)  # the oracle's own tolerance
    assert float((-found).exp().sum()) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("timed", [pytest.param(True, marks=pytest.mark.slow), False])
def test_tokens_masked_at_time_zero_are_revealed_together(timed: bool):
    case = JUMPS_AT_ZERO
    model, data = case.model if timed else free(case.process, case.L), all_sequences(case.V, case.L)
    most, least = float(case.process.noise(1.0).a), -math.expm1(-0.7)
    law = case.law if timed else laws(time_conditioned_law, model, data, case.V, most, least)
    found = cedd.exact_likelihood(model, case.process, data, range(case.L), method="cedd")
    np.testing.assert_allclose((-found).exp().numpy(), law, rtol=2e-5)  # the oracle's own tolerance
    assert float((-found).exp().sum()) == pytest.approx(1.0, abs=1e-6 if timed else 1e-12)


def test_reveal_times_of_default_schedule_are_integrated():
    """On this schedule sigma goes up to 6.9."""
    process = cedd.absorb(2)
    model, data = random_network(process, 2, seed=3, size=2.0), all_sequences(2, 2)
    law = laws(time_conditioned_law, model, data, 2, float(process.kernel(1.0).a))
    found = cedd.exact_likelihood(model, process, data, [1, 0], method="cedd")
    np.testing.assert_allclose((-found).exp().numpy(), law, rtol=2e-5)


def test_network_discontinuous_in_time_is_rejected():
    def model(x: Tensor, sigma: Tensor) -> Tensor:
        jump = (sigma * 40).floor()[:, None, None] % 2
        return torch.stack([jump * 4, -jump * 4], -1).expand(*x.shape, 1, 2).squeeze(2)

    with pytest.raises(ValueError, match="not smooth in the noise level"):
        cedd.exact_likelihood(model, cedd.absorb(2), torch.zeros(1, 2).long(), [0, 1], method="cedd")


def test_result_does_not_depend_on_batch_size():
    process = cedd.absorb(3)
    model = FreeTable(process, 4, seed=1)
    data = all_sequences(3, 4)[:9]
    usual = cedd.exact_likelihood(model, process, data, range(4), method="cedd")
    some = cedd.exact_likelihood(model, process, data, range(4), method="cedd", batch=7)
    torch.testing.assert_close(some, usual, rtol=1e-12, atol=0)
    assert sum(model.calls) == 2 * 9 * 15


def test_zero_probability_is_infinite_and_small_ones_do_not_underflow():
    process = cedd.absorb(2)

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.tensor([0.0, -500.0]).expand(*x.shape, 2)

    data = torch.ones(1, 6, dtype=torch.int64)
    found = cedd.exact_likelihood(model, process, data, range(6), method="cedd")
    assert float(found) == pytest.approx(3000.0)
    model.capabilities = Capabilities(time_conditioned=False)  # pyright: ignore
    assert float(cedd.exact_likelihood(model, process, data, range(6), method="cedd")) == pytest.approx(3000.0)

    def never(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.tensor([0.0, -math.inf]).expand(*x.shape, 2)

    assert float(cedd.exact_likelihood(never, process, data, range(6), method="cedd")) == math.inf


@pytest.mark.parametrize(
    ("process", "positions", "message"),
    [
        (cedd.roulette(3), [0], "a revealed token never changes"),
        (cedd.absorb(3), range(13), "1 to 12"),
        (cedd.absorb(3), [], "1 to 12"),
        (cedd.absorb(3), [0, 20], "must be distinct and in 0..19"),
        (cedd.absorb(3), [1, 1], "must be distinct"),
        (cedd.absorb(3), [1.5], r"positions must be a list of integers, such as \[3, 4\] \(got \[1.5\]\)"),
        (cedd.absorb(3), [True, False], "positions must be a list of integers"),  # not the positions 0 and 1
        (cedd.absorb(3), [[0, 1]], "positions must be a list of integers"),
        (cedd.absorb(3), 3, "positions must be a list of integers"),
        (cedd.absorb(3), None, "positions must be a list of integers"),
    ],
)
def test_invalid_arguments_are_rejected(process, positions, message):
    data = torch.zeros(2, 20, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        cedd.exact_likelihood(random_network(process, 2, 0), process, data, positions, method="cedd")
