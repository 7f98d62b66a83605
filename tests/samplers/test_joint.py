"""Constraints that draw the tokens of a sequence jointly, with every sampler that supports them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd.samplers import Fixed, JointConstraint, Sharpening, sample
from tests.combinations import covering
from tests.samplers.chains import ERROR_RATE, p_value

V, L = 3, 4
LOGITS = torch.randn(L, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
"""The network's output at each position, independent of the others."""
SAMPLERS = ["first-hitting", "probability", "entropy", "analytic", "euler", "remask-capped", "remask-confidence"]


def network(x_t: Tensor, sigma: Tensor) -> Tensor:
    return LOGITS.expand(len(x_t), L, V)


def allowed(tokens: tuple[int, ...]) -> bool:
    return sum(tokens) % V == 0


@dataclass(frozen=True)
class SumIsZero(JointConstraint):
    """The tokens of a sequence sum to 0 modulo V; by enumeration."""

    def draw(
        self, x: Tensor, rows: Tensor, outputs: Tensor, sharpening: Sharpening, chosen: Tensor, v: Tensor
    ) -> Tensor:
        drawn, length = torch.zeros_like(chosen), x.shape[1]
        probs = sharpening.log_probs(outputs.double()).exp().numpy()
        for text in (rows // length).unique().tolist():
            here = (rows // length == text).nonzero().squeeze(1).numpy()
            places = rows.numpy()[here] % length
            assert places.tolist() == (x[text] == V).nonzero().squeeze(1).tolist(), "all masks of the text"
            tables = np.array(list(itertools.product(range(V), repeat=len(here))))
            shown = int(x[text][x[text] < V].sum())
            law = probs[here, tables].prod(1) * ((tables.sum(1) + shown) % V == 0)
            for number in np.flatnonzero(np.isin(chosen.numpy(), here)):
                tokens = tables[:, int(np.flatnonzero(here == int(chosen[number]))[0])]
                edges = np.bincount(tokens, law, minlength=V).cumsum()
                drawn[number] = int(np.searchsorted(edges, float(v[number]) * edges[-1], side="right"))
                law = law * (tokens == int(drawn[number]))
        return drawn


def sum_is_zero(length: int = L) -> SumIsZero:
    return SumIsZero(torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.bool))


def expected(given: dict[int, int] | None = None) -> np.ndarray:
    """The product law of the network given the constraint, and given some tokens, [V^L]."""
    f = torch.softmax(LOGITS, -1).numpy()
    given, tables = given or {}, itertools.product(range(V), repeat=L)
    law = [
        np.prod(f[range(L), tokens]) * (allowed(tokens) and all(tokens[i] == y for i, y in given.items()))
        for tokens in tables
    ]
    return np.array(law) / sum(law)


def counted(x: Tensor) -> np.ndarray:
    return np.bincount((x * V ** torch.arange(L - 1, -1, -1)).sum(1).numpy(), minlength=V**L)


@pytest.mark.parametrize(
    ("sampler", "given"), covering(itertools.product(("first-hitting", "analytic"), (None, {1: 2})))
)
def test_samples_follow_network_law_given_constraint(sampler: str, given: dict[int, int] | None) -> None:
    """The network ignores the text, so every call has the same law."""
    n, constraint = 800, sum_is_zero()
    if given:
        where = torch.zeros(L, dtype=torch.bool).index_fill(0, torch.tensor([*given]), True)
        constraint = constraint.holding(Fixed(torch.full((L,), 2), where))
    how = {"sampler": sampler, "steps": 3, "constraint": constraint, "seeds": range(n)}
    law = expected(given)
    assert p_value(counted(sample(network, cedd.absorb(V), (n, L), method="cedd", **how)), law) > ERROR_RATE


@pytest.mark.parametrize(("sampler", "watched"), covering(itertools.product(SAMPLERS, (False, True))))
def test_every_text_satisfies_constraint(sampler: str, watched: bool) -> None:
    callback = (lambda step, t, x: None) if watched else None
    how = {"sampler": sampler, "steps": 3, "constraint": sum_is_zero(), "callback": callback, "temperature": 0.7}
    x = sample(network, cedd.absorb(V), (40, L), method="cedd", seeds=range(40), **how)
    assert all(allowed(tuple(text)) for text in x.tolist())
    alone = sample(network, cedd.absorb(V), (2, L), method="cedd", seeds=[7, 8], **how)
    assert torch.equal(alone, x[7:9])


@pytest.mark.parametrize(
    ("sampler", "process", "method"),
    [
        ("gibbs", cedd.absorb(V), "cedd"),
        ("stratified", cedd.uniform(V), "bayes"),
        ("analytic", cedd.uniform(V), "bayes"),
        ("analytic", cedd.absorb(V), "sedd"),
        ("analytic", cedd.roulette(V), "cedd"),
    ],
)
def test_unsupported_samplers_and_processes_are_rejected(sampler: str, process: cedd.TokenProcess, method: str) -> None:
    with pytest.raises(ValueError, match=r"a model that (only masks|predicts probabilities)"):
        sample(network, process, (2, L), method=method, sampler=sampler, constraint=sum_is_zero())
