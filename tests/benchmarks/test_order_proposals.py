"""The order proposals of benchmarks/order_proposals.py: each has unbiased weights, and all are compared."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.network import Capabilities, Network
from tests.benchmarks.scripts import definitions
from tests.networks import Model, random_network
from tests.tasks.models import save_random

proposals = definitions("order_proposals")
WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 1.0, 0.3, 3.0], dtype=torch.float64)
"""The weights of the orders of three positions."""


def weigh(u: Tensor) -> Tensor:
    """log w of the order of the levels u [N, K, 3]."""
    orders = torch.tensor(list(itertools.permutations(range(3))))
    which = (u.argsort(2, descending=True)[:, :, None] == orders).all(3).long().argmax(2)
    return WEIGHTS[which].log()


@pytest.mark.parametrize("name", [name for name in proposals.PROPOSALS if not name.startswith("late")])
def test_mean_weight_is_mean_over_all_orders(name: str):
    numbers, texts = np.random.default_rng(3), 20_000
    found = proposals.PROPOSALS[name](weigh, lambda k: torch.as_tensor(numbers.random((texts, k, 3))), 8)
    means = found.exp().mean(1)
    assert float(means.mean()) == pytest.approx(float(WEIGHTS.mean()), abs=4 * float(means.std()) / texts**0.5)


class TimeFree:
    """A network that declares that it does not depend on sigma."""

    capabilities = Capabilities(time_conditioned=False)

    def __init__(self, model: Model) -> None:
        self.model = model

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.model(x, torch.ones_like(sigma))


@pytest.mark.parametrize("timed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_mean_weight_of_resampled_orders_is_likelihood(timed: bool):
    """600 repetitions; most of them resample."""
    process, x, count = cedd.absorb(3), torch.tensor([[0, 2, 1, 1]]), 600
    network = random_network(process, 4, seed=2, size=2.0)
    model = network if timed else TimeFree(network)
    exact = float((-cedd.exact_likelihood(model, process, x, range(4), method="cedd")).exp())
    weigh = proposals.Weigh(Network.of(model, 3), x.expand(count, 4), float(process.noise(1.0).a))
    u = torch.as_tensor(np.random.default_rng(3).random((count, 4, 4)))
    plain, found = weigh(u), weigh.resampled(u, 1, np.random.default_rng(4))
    for log_weights in (plain, found):
        means = log_weights.exp().mean(1)
        assert float(means.mean()) == pytest.approx(exact, abs=4 * float(means.std()) / count**0.5)
    assert float((plain != found).any(1).double().mean()) > 0.5


@pytest.mark.parametrize("slope", [2.0, -1.0, 0.0])
def test_tilted_levels_match_reported_density(slope: float):
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    u, log_density = proposals.tilted_levels(torch.tensor([[slope]], dtype=torch.float64), grid[None, :, None])
    density = log_density[0].exp()
    steps = u[0, :, 0].diff() * (density[1:] + density[:-1]) / 2
    torch.testing.assert_close(steps, torch.full_like(steps, 1 / 4000), rtol=1e-4, atol=0)


def test_all_proposals_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("CEDD_CACHE", str(tmp_path / "cache"))
    run, text = save_random(tmp_path / "run", "absorb", "cedd"), tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    words = ["--set", str(text), "--length", "8", "--texts", "3", "--orders", "4", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["order_proposals.py", str(run), *words])
    assert proposals.command("order_proposals.py", proposals.Arguments, proposals.run) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["antithetic", *(n for n in proposals.PROPOSALS if n != "antithetic")]
    monkeypatch.setattr(sys, "argv", ["order_proposals.py", str(run), *words, "--orders", "6"])
    assert proposals.command("order_proposals.py", proposals.Arguments, proposals.run) == 2
    assert "--orders must be a power of two, at least 4 (got 6)" in capsys.readouterr().err
