"""Methods with their own bounds: discrete flow matching by enumeration, autoregressive exactly."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import expit
from torch import Tensor

import cedd
from cedd.dynamics import Corrector
from tests.combinations import covering
from tests.networks import Model, random_data, random_network

V, L = 2, 2
MASK = V
LOW = 1e-3
SCHEDULES = {"kappa = t": cedd.LogLinear(), "kappa = t^2": cedd.Polynomial(2.0)}
CORRECTORS = {"plain": None, "corrected": Corrector(), "strongly corrected": Corrector(3.0, 1.0, 0.5)}
STATES = list(itertools.product(range(V + 1), repeat=L))
CLEAN = list(itertools.product(range(V), repeat=L))


def all_data() -> tuple[Tensor, Tensor]:
    """Every clean sequence, repeated in proportion to its probability, as data [N, L] and as p0 [V^L]."""
    counts = (random_data(V, L, seed=4).flatten() * 300).round().long() + 1
    data = torch.tensor(CLEAN).repeat_interleave(counts, 0)
    return data, counts.double() / counts.sum()


def predictions(model: Model, process: cedd.TokenProcess, t: float) -> Tensor:
    """p(. | x) of every position of every state, [states, L, V]."""
    sigma = process.sigma(t).float().expand(len(STATES))
    return torch.softmax(model(torch.tensor(STATES), sigma).double(), -1)


def rates(model: Model, process: cedd.TokenProcess, corrector: Corrector | None, t: float) -> np.ndarray:
    """The learned process's rates [to, from], off the diagonal, in flow time, directly from the velocity."""
    kappa, slope = math.exp(-float(process.alpha(t))), float(process.alpha_rate(t)) * math.exp(-float(process.alpha(t)))
    s = 1 - t
    excess = 0.0 if corrector is None else corrector.strength * s**corrector.start * (1 - s) ** corrector.stop
    p = predictions(model, process, t).tolist()
    matrix = np.zeros((len(STATES), len(STATES)))
    for column, x in enumerate(STATES):
        for i in range(L):
            for y in range(V + 1):
                if y == x[i]:
                    continue
                row = STATES.index((*x[:i], y, *x[i + 1 :]))
                if y != MASK:
                    matrix[row, column] += (1 + excess) * slope / (1 - kappa) * p[column][i][y]
                elif x[i] != MASK:
                    matrix[row, column] += excess * slope / kappa
    return matrix


def learned_data(model: Model, process: cedd.TokenProcess, corrector: Corrector | None) -> Tensor:
    """The law over clean sequences: from p_r at t = 1 to t = LOW by an ODE, then masks filled by the prediction."""
    start = process.prior()[torch.tensor(STATES)].prod(-1)

    def slope(w: float, law: Tensor) -> Tensor:
        t = float(expit(-w))  # w grows with the flow time; ds = t (1-t) dw
        matrix = rates(model, process, corrector, t)
        return t * (1 - t) * (matrix @ law - matrix.sum(0) * law)

    edges = (-15.0, math.log((1 - LOW) / LOW))
    found = solve_ivp(slope, edges, start.numpy(), method="LSODA", rtol=1e-8, atol=1e-12)
    law = torch.tensor(found.y[:, -1])
    p = predictions(model, process, LOW)
    result = torch.zeros(len(CLEAN), dtype=torch.float64)
    for k, x0 in enumerate(CLEAN):
        for n, x in enumerate(STATES):
            read = [float(p[n, i, x0[i]]) if x[i] == MASK else float(x[i] == x0[i]) for i in range(L)]
            result[k] += law[n] * math.prod(read)
    return result


def enumerated(model: Model, process: cedd.TokenProcess, corrector: Corrector | None, p0: Tensor) -> float:
    """The bound per token: generalised KL of the conditional path from the learned rates, over all states and times."""
    points, weights = np.polynomial.legendre.leggauss(80)
    low, high = math.log(LOW / (1 - LOW)), 15.0
    total = 0.0
    for point, weight in zip(points, weights, strict=True):
        w = (low + high) / 2 + (high - low) / 2 * point
        t = float(expit(w))
        learned = rates(model, process, corrector, t)
        alive = math.exp(-float(process.alpha(t)))
        unmask = float(process.alpha_rate(t)) * alive / (1 - alive)
        at = 0.0
        for chance, x0 in zip(p0.tolist(), CLEAN, strict=True):
            for column, x in enumerate(STATES):
                here = math.prod((1 - alive) if x[i] == MASK else alive * (x[i] == x0[i]) for i in range(L))
                if here == 0:
                    continue
                cost = float(learned[:, column].sum())
                for i in range(L):
                    if x[i] == MASK:
                        row = STATES.index((*x[:i], x0[i], *x[i + 1 :]))
                        cost += unmask * (math.log(unmask / float(learned[row, column])) - 1)
                at += chance * here * cost
        total += (high - low) / 2 * weight * t * (1 - t) * at
    p, alive = predictions(model, process, LOW), math.exp(-float(process.alpha(LOW)))
    for chance, x0 in zip(p0.tolist(), CLEAN, strict=True):
        for column, x in enumerate(STATES):
            here = math.prod((1 - alive) if x[i] == MASK else alive * (x[i] == x0[i]) for i in range(L))
            reading = sum(-math.log(float(p[column, i, x0[i]])) for i in range(L) if x[i] == MASK)
            total += chance * here * reading
    return total / L + process.terminal().kl


@pytest.mark.parametrize(("schedule", "corrector"), covering(itertools.product(SCHEDULES, CORRECTORS)))
def test_flow_matching_bound_matches_enumeration(schedule: str, corrector: str) -> None:
    """The estimate matches the enumerated path KL (4 standard errors), which is above the model's cross entropy."""
    process, correct = cedd.absorb(V, SCHEDULES[schedule]), CORRECTORS[corrector]
    model = random_network(process, L, seed=3, size=0.7)
    data, p0 = all_data()
    exact = enumerated(model, process, correct, p0)
    cross_entropy = -float((p0 * torch.log(learned_data(model, process, correct))).sum()) / L
    assert cross_entropy <= exact
    found = cedd.estimate_bound(
        model,
        process,
        data,
        method="dfm",
        corrector=correct,
        time_floor=LOW,
        draws=32,
        fixed_set=True,
        generator=torch.Generator().manual_seed(1),
        batch=8192,
    )
    assert abs(found.nats_per_token - exact) < 4 * found.stderr
    assert found.stderr < 0.1 * exact


def test_flow_matching_bound_is_infinite_without_time_floor() -> None:
    process = cedd.absorb(V)
    model, data = random_network(process, L, seed=3), all_data()[0]
    assert cedd.estimate_bound(model, process, data, method="dfm", time_floor=0.0).nats_per_token == math.inf
    assert math.isfinite(cedd.estimate_bound(model, process, data, method="dfm", draws=2).nats_per_token)


@pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf])
def test_corrector_strength_must_be_finite_and_nonnegative(strength: float) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Corrector(strength)


# ---- autoregressive -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [cedd.absorb(3), cedd.uniform(3)], ids=["mask starts", "token 0 starts"])
def test_likelihood_of_causal_network_is_exact(process: cedd.TokenProcess) -> None:
    source = torch.Generator().manual_seed(1)
    table = torch.randn(4, 3, generator=source, dtype=torch.float64)

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        return torch.cumsum(table[x], 1)  # sees what is to the left

    data = torch.tensor(list(itertools.product(range(3), repeat=2)))
    p0 = torch.full((3, 3), 1 / 9, dtype=torch.float64)
    found = cedd.estimate_bound(model, process, data, method="ar", batch=4)
    assert found.nats_per_token == pytest.approx(cedd.exact_bound(model, process, p0, method="ar"), rel=1e-12)
    assert found.evaluations == 9
    assert found.monte_carlo_stderr == 0
    assert torch.exp(-2 * found.per_sequence).sum() == pytest.approx(1.0)  # a distribution over the nine


def test_ar_bound_matches_gpt2_loss() -> None:
    """The loss of Transformers with its own weights: the mean over all tokens but the first, which is not predicted."""
    transformers = pytest.importorskip("transformers", reason="the check against GPT-2 needs transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=17, n_positions=12, n_embd=16, n_layer=2, n_head=2)
    gpt2 = transformers.GPT2LMHeadModel(config).eval()
    data = torch.randint(17, (5, 12), generator=torch.Generator().manual_seed(1))

    def model(x: Tensor, sigma: Tensor) -> Tensor:
        """x is a start symbol and all tokens but the last; GPT-2 has no such symbol and does not predict token 0."""
        following = gpt2(x[:, 1:]).logits
        return torch.cat([torch.zeros_like(following[:, :1]), following], 1)

    found = cedd.estimate_bound(model, cedd.absorb(17), data, method="ar")
    with torch.no_grad():
        loss = float(gpt2(data, labels=data).loss)
    assert (12 * found.nats_per_token - math.log(17)) / 11 == pytest.approx(loss, rel=1e-5)
