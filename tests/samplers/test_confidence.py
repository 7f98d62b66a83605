"""Confidence orders: the law of the sampler, and its exact likelihood, by enumeration."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import cedd
from cedd.samplers import CONFIDENCE_ORDERS, ConfidenceOrder, Fixed, SamplingOptions, order_nats, sample
from cedd.samplers.confidence import spread_out
from tests.samplers.chains import ERROR_RATE, HalvedTable, Table, p_value

V, L = 3, 3
PROBABILITY = SamplingOptions(sampler="probability")
BOUNDED = ConfidenceOrder("entropy", CONFIDENCE_ORDERS["entropy"].confidence, entropy_bound=0.8)


def confidence(name: str, probs: np.ndarray) -> float:
    ordered = np.sort(probs)[::-1]
    return {"probability": ordered[0], "margin": ordered[0] - ordered[1]}.get(
        name, float((probs * np.log(np.maximum(probs, 1e-300))).sum())
    )


def sharpened(f: np.ndarray, top_p: float) -> np.ndarray:
    """The fewest most likely tokens that reach top_p, renormalized."""
    order = np.argsort(-f)
    kept = np.zeros_like(f)
    kept[order[: 1 + np.searchsorted(f[order].cumsum(), top_p)]] = 1
    return f * kept / (f * kept).sum()


def enumerated(
    model: Table,
    process: cedd.TokenProcess,
    name: str,
    steps: int,
    bound: float | None,
    top_p: float = 1.0,
    excluded: int | None = None,
) -> np.ndarray:
    """p(x) of every sequence from masks only, by following the sampler for each, [V^L]."""
    law, most = [], float(process.kernel(1.0).a)
    for x0 in itertools.product(range(V), repeat=L):
        x, probability = [V] * L, 1.0
        for left in range(steps, 0, -1):
            masks = [i for i in range(L) if x[i] == V]
            if not masks:
                break
            sigma = torch.tensor([-np.log1p(-min(len(masks) / L, most))]).float()
            f = torch.softmax(model.outputs(torch.tensor([x]), sigma)[0], -1).numpy()
            if excluded is not None:
                f[:, excluded] = 0
                f /= f.sum(-1, keepdims=True)
            best = sorted(masks, key=lambda i: -confidence(name, f[i]))
            if bound is None:
                turn = best[: -(-len(masks) // left)]
            else:
                turn = [i for i in best if i == best[0] or -confidence("entropy", f[i]) <= bound]
            for i in turn:
                probability *= (f[i] if top_p == 1 else sharpened(f[i], top_p))[x0[i]]
                x[i] = x0[i]
        law.append(probability)
    return np.array(law)


@pytest.mark.parametrize("steps", [3, 2, 1])
@pytest.mark.parametrize("order", [*CONFIDENCE_ORDERS.values(), BOUNDED], ids=[*CONFIDENCE_ORDERS, "bounded"])
def test_likelihood_and_samples_match_enumerated_law(order: ConfidenceOrder, steps: int):
    """Starting from masks only, even if the process leaves tokens at t = 1."""
    process = cedd.absorb(V, cedd.LogLinear(eps=0.1))
    model = Table(process, L, seed=4)
    steps = 3 if order.entropy_bound is not None else steps
    law = enumerated(model, process, order.name, steps, order.entropy_bound)
    assert law.sum() == pytest.approx(1.0)
    everything = torch.tensor(list(itertools.product(range(V), repeat=L)))
    nats = order_nats(model, process, everything, method="cedd", options=SamplingOptions(sampler=order, steps=steps))
    np.testing.assert_allclose(nats.exp().reciprocal().numpy(), law, rtol=1e-9)
    drawn = sample(model, process, (6000, L), method="cedd", sampler=order, steps=steps, seeds=range(6000))
    counts = np.bincount((drawn * torch.tensor([9, 3, 1])).sum(-1).numpy(), minlength=27)
    assert p_value(counts, law) > ERROR_RATE


def test_likelihood_accounts_for_excluded_tokens_and_top_p():
    """As drawn by `cedd sample`: excluded tokens never, and only the most likely of the others."""
    process = cedd.absorb(V)
    model = Table(process, L, seed=4)
    law = enumerated(model, process, "probability", L, None, top_p=0.7, excluded=1)
    assert 0 < (law == 0).mean() < 1
    everything = torch.tensor(list(itertools.product(range(V), repeat=L)))
    options = SamplingOptions(sampler="probability", steps=L, top_p=0.7, exclude=[1])
    nats = order_nats(model, process, everything, method="cedd", options=options)
    np.testing.assert_allclose(nats.exp().reciprocal().numpy(), law, rtol=1e-9)
    drawn = sample(model, process, (3000, L), method="cedd", options=replace(options, seeds=range(3000)))
    counts = np.bincount((drawn * torch.tensor([9, 3, 1])).sum(-1).numpy(), minlength=27)
    assert p_value(counts, law) > ERROR_RATE
    with pytest.raises(ValueError, match="leave one to draw"):
        order_nats(model, process, everything, method="cedd", options=replace(options, exclude=range(V)))


def test_at_most_one_call_per_step_and_fixed_tokens_stay():
    process = cedd.absorb(V)
    model = HalvedTable(process, L, seed=4)
    fixed = Fixed(torch.tensor([2, 0, 0]), torch.tensor([True, False, False]))
    seen = []
    options = {"method": "bayes", "sampler": "margin", "constraint": fixed, "exclude": [1]}
    x = sample(model, process, (50, L), steps=2, seeds=range(50), callback=lambda k, t, x: seen.append(k), **options)
    assert len(model.calls) <= 2
    assert seen == list(range(len(seen)))
    assert bool((x[:, 0] == 2).all())
    assert set(x[:, 1:].unique().tolist()) <= {0, 2}


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.1}])
def test_most_confident_position_is_first_for_any_sharpening(options):
    """Tokens drawn with certainty are not necessarily those that the network is certain of."""
    process = cedd.absorb(V)
    model = Table(process, L, seed=7)
    masks = torch.full((1, L), V)
    beliefs = model(masks, process.sigma(1.0).float()[None]).double().softmax(-1)
    states = []
    how = {"method": "cedd", "sampler": "probability", "steps": L, "x_start": masks, **options}
    x = sample(model, process, (1, L), seeds=[0], callback=lambda k, t, x: states.append(x.clone()), **how)
    most_confident = int(beliefs.amax(-1)[0].argmax())
    assert most_confident != 0  # the first of equals
    assert (states[1] != V).nonzero()[:, 1].tolist() == [most_confident]
    assert int(x[0, most_confident]) == int(beliefs[0, most_confident].argmax())
    nats = order_nats(model, process, x, method="cedd", options=SamplingOptions(sampler="probability", **options))
    torch.testing.assert_close(nats, torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("order", ["probability", "margin", "entropy"])
def test_equally_confident_masks_are_revealed_spread_out(order):
    """The network gives the same output at every mask; neighbours are revealed only when unavoidable."""
    process, states = cedd.absorb(V), []

    def model(x, sigma):
        return torch.zeros(*x.shape, V)

    how = {"method": "cedd", "sampler": order, "steps": 4, "seeds": [0, 1]}
    sample(model, process, (2, 16), callback=lambda k, t, x: states.append(x.clone()), **how)
    revealed = [(after != before).nonzero()[:, 1].view(2, -1) for before, after in itertools.pairwise(states)]
    assert [step[0].tolist() for step in revealed] == [[0, 4, 8, 12], [2, 6, 10, 14], [1, 5, 9, 13], [3, 7, 11, 15]]
    assert all(torch.equal(step[0], step[1]) for step in revealed)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 100])
def test_spread_out_is_a_spaced_permutation(length):
    order = spread_out(length)
    assert sorted(order.tolist()) == list(range(length))
    half = order[: (length + 1) // 2].sort().values
    assert length < 3 or int(half.diff().min()) >= 1 + (length & (length - 1) == 0)


def test_unsupported_models_and_orders_are_rejected():
    zeros = torch.zeros(1, L, dtype=torch.int64)
    for process, method, message in (
        (cedd.uniform(V), "bayes", "has none"),
        (cedd.roulette(V), "bayes", "never change once revealed"),
        (cedd.absorb(V), "sedd", "gives ratios"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(Table(process, L), process, (2, L), method=method, sampler="margin")
        with pytest.raises(ValueError, match=message):
            order_nats(Table(process, L), process, zeros, method=method, options=PROBABILITY)
    process = cedd.absorb(V)
    with pytest.raises(ValueError, match="the order of its text"):
        order_nats(Table(process, L), process, zeros, method="ar", options=PROBABILITY)
    with pytest.raises(ValueError, match="unknown order 'best'"):
        order_nats(Table(process, L), process, zeros, method="cedd", options=SamplingOptions(sampler="best"))


class Rounded(torch.nn.Module):
    """Equally confident at all masks, except for rounding that depends on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn((V + 1) ** L, V, generator=torch.Generator().manual_seed(0)))

    def forward(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        del sigma
        said = self.table[(x_t * (V + 1) ** torch.arange(L)).sum(-1)][:, None].expand(-1, L, -1)
        return said * (1 + 1e-6 * torch.arange(L) * (1 if len(x_t) == 1 else -1))[:, None]


def test_likelihood_does_not_depend_on_batch():
    """The sampler runs modules on a CPU one text at a time, so the likelihood must do the same."""
    process, model = cedd.absorb(V), Rounded()
    everything = torch.tensor(list(itertools.product(range(V), repeat=L)))
    together = order_nats(model, process, everything, method="cedd", options=PROBABILITY)
    alone = torch.cat([order_nats(model, process, x[None], method="cedd", options=PROBABILITY) for x in everything])
    assert torch.equal(together, alone)
    faster = replace(PROBABILITY, deterministic=False)
    assert not torch.allclose(together, order_nats(model, process, everything, method="cedd", options=faster))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(L, dtype=torch.int64), r"sequences \[B, L\]"),
        (torch.zeros(1, L), "token ids must be int32 or int64"),
        (torch.full((1, L), V), "the mask is not data"),
    ],
)
def test_likelihood_rejects_invalid_token_ids(data: torch.Tensor, message: str):
    process = cedd.absorb(V)
    with pytest.raises(ValueError, match=message):
        order_nats(Table(process, L), process, data, method="cedd", options=PROBABILITY)
