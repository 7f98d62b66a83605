"""Small chains and networks for the sampler tests, and the exact laws to compare samples with.

Shapes: M sequences, L positions, V vocabulary, n states. Laws are derived independently here, from the package's
ratios (`log_scores`) or probabilities, so that a bug in a rule cannot hide in its own test.
"""

import itertools
import math

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import cedd
from cedd.network import Capabilities
from cedd.process import TokenProcess
from cedd.samplers import Corrector

PROCESSES = {
    "absorb": lambda v: cedd.absorb(v),
    "uniform": lambda v: cedd.uniform(v),
    "roulette": lambda v: cedd.roulette(v, p_m=0.6),
    "eroulette": lambda v: cedd.eroulette(v, mask_share=cedd.PowerShare(0.2, 0.9)),
    "hybrid": lambda v: cedd.hybrid(v, p_u=0.3),
}
METHODS = ("sedd", "sedds", "cedd", "bayes")
RULE_NAMES = ("analytic", "euler", "tau-leaping")

ERROR_RATE = 1e-7
"""The false-alarm rate of one chi-square test; about 150 of them run, on fixed seeds."""


class Table:
    """A network without weights: outputs from a table of all n^L sequences, varying with sigma. A plain callable."""

    def __init__(self, process: TokenProcess, length: int, seed: int = 0, size: float = 1.0) -> None:
        self.states, self.length = process.num_states, length
        generator = torch.Generator().manual_seed(seed)
        shape = (self.states**length, length, process.vocab_size)
        self.level, self.sway = (size * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        self.calls: list[int] = []
        """The number of sequences in each call."""

    def outputs(self, x: Tensor, sigma: Tensor) -> Tensor:
        index = self.index(x)
        return self.level[index] + self.sway[index] * torch.sin(3 * sigma.double())[:, None, None]

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        self.calls.append(len(x))
        return self.outputs(x, sigma)

    def index(self, x: Tensor) -> Tensor:
        return (x * self.states ** torch.arange(self.length - 1, -1, -1)).sum(-1)

    def counts(self, x: Tensor) -> np.ndarray:
        return np.bincount(self.index(x).numpy(), minlength=self.states**self.length)


class HalvedTable(Table):
    """The same network split into backbone and head: samplers run it on chosen sequences, its head on chosen rows."""

    capabilities = Capabilities(features=True)

    rows = 0

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        self.calls.append(len(x_t))
        return self.outputs(x_t, sigma)

    def head(self, features: Tensor) -> Tensor:
        self.rows += len(features)
        return features.double()

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        raise AssertionError("a network with features and a head is run through them")


def all_sequences(process: TokenProcess, length: int) -> Tensor:
    return torch.tensor(list(itertools.product(range(process.num_states), repeat=length)))


# ---- one step -----------------------------------------------------------------------------------------------------


def token_law(
    method: str,
    rule: str,
    process: TokenProcess,
    outputs: Tensor,
    x: Tensor,
    t: float,
    s: float,
    corrector: Corrector | None = None,
) -> np.ndarray:
    """p(x_s | x_t) of every position, [M, L, n]."""
    if method == "dfm":
        return _flow_law(rule, process, outputs, x, t, s, corrector)
    if s == 0 and method == "sedds" and process.can_shuffle:
        return _reconstruction_law(process, outputs, x, t)
    if rule.startswith("remask"):
        return _remasking_law(rule, process, outputs, x, t, s)
    if rule == "analytic":
        noise, earlier = process.noise(t).like(x), process.noise(s).like(x)
        law = cedd.get_method(method).parameterization.reverse_step(outputs, x, noise, earlier).numpy()
    else:
        law = _law_by_rates(method, rule, process, outputs, x, t, s)
    return _clean(law, s, process)


def _remasking_law(rule: str, process: TokenProcess, outputs: Tensor, x: Tensor, t: float, s: float) -> np.ndarray:
    """A token is masked with probability r; of a(t) masks and alive(t) r new ones a(s) are left."""
    alive, later = (math.exp(-float(process.alpha(v))) for v in (t, s))
    possible = min(1.0, (1 - later) / alive)
    remask = min(0.04, possible) if rule == "remask-capped" else 0.05 * possible
    stay = (1 - later - alive * remask) / (1 - alive)
    probs, V = torch.softmax(outputs, -1).numpy(), process.vocab_size
    law = np.zeros((*x.shape, V + 1))
    for place in np.ndindex(*x.shape):
        if int(x[place]) == V:
            law[place] = [*((1 - stay) * probs[place]), stay]
        else:
            law[place][int(x[place])], law[place][V] = 1 - remask, remask
    return law


def _reconstruction_law(process: TokenProcess, outputs: Tensor, x: Tensor, t: float) -> np.ndarray:
    """The last step of scaled scores, which their bound includes: p(x_t | z) s_z over the tokens z."""
    scores, V = cedd.log_scores(outputs, process, x, t, method="sedds").exp(), process.vocab_size
    law = process.transition_matrix(t)[x, :V] * scores
    law = law / law.sum(-1, keepdim=True)
    return torch.nn.functional.pad(law, (0, process.num_states - V)).numpy()


def _clean(law: np.ndarray, s: float, process: TokenProcess) -> np.ndarray:
    """At s = 0 there are no masks."""
    if s == 0 and process.has_mask:
        law[..., -1] = 0
        law /= law.sum(-1, keepdims=True)
    return law


def _law_by_rates(
    method: str, rule: str, process: TokenProcess, outputs: Tensor, x: Tensor, t: float, s: float
) -> np.ndarray:
    scores = cedd.log_scores(outputs, process, x, t, method=method).exp().numpy()
    rates, V = process.rate_matrix(t).numpy(), process.vocab_size
    law = np.zeros((*x.shape, process.num_states))
    for place in np.ndindex(*x.shape):
        here = int(x[place])
        jumps = np.array([(t - s) * rates[here, y] * scores[place][y] if y != here else 0.0 for y in range(V)])
        total = jumps.sum()
        jumping = min(1.0, total) if rule == "euler" else 1 - math.exp(-total)
        if total > 0:
            law[place][:V] = jumps / total * jumping
        law[place][here] += 1 - jumping
    return law


def _flow_law(
    rule: str, process: TokenProcess, outputs: Tensor, x: Tensor, t: float, s: float, corrector: Corrector | None
) -> np.ndarray:
    """Redrawn from f at the rate alpha kappa'/(1-kappa), masked again at beta kappa'/kappa; kappa = alive.

    The last step, to s = 0, draws what is masked and keeps the tokens."""
    V, kappa, later = process.vocab_size, *(math.exp(-float(process.alpha(v))) for v in (t, s))
    beta = corrector.strength * (1 - t) ** corrector.start * t**corrector.stop if corrector else 0.0
    if rule == "analytic":
        towards, away = math.log((1 - kappa) / (1 - later)) if s > 0 else 0.0, math.log(later / kappa)
    else:
        speed = (t - s) * float(process.alpha_rate(t)) * kappa  # h kappa'
        towards, away = speed / (1 - kappa), speed / kappa
    probs = torch.softmax(outputs, -1).numpy()
    law = np.zeros((*x.shape, V + 1))
    for place in np.ndindex(*x.shape):
        here = int(x[place])
        reveal, mask = (1 + beta) * towards, beta * away if here < V else 0.0
        if s == 0:
            reveal, mask = math.inf if here == V else 0.0, 0.0
        event = min(1.0, reveal + mask) if rule == "euler" else 1 - math.exp(-(reveal + mask))
        share = mask / (reveal + mask) if math.isfinite(reveal) and reveal + mask > 0 else 0.0
        law[place][:V] = event * (1 - share) * probs[place]
        law[place][V] += event * share
        law[place][here] += 1 - event
    return law


def sequence_kernel(law: np.ndarray, x: Tensor) -> np.ndarray:
    """p(x_s | x_t) on sequences, [n^L, n^L], columns x_t, from the law of each position [n^L, L, n], as positions move
    independently."""
    joint = np.ones((len(x), len(x)))
    for i in range(x.shape[1]):
        joint *= law[:, i, :][:, x[:, i].numpy()]
    return joint.T


def sampler_law(
    model: Table,
    method: str,
    rule: str,
    process: TokenProcess,
    times: Tensor,
    corrector: Corrector | None = None,
    first: Tensor | None = None,
) -> np.ndarray:
    """The law over n^L sequences at the end of a grid [K+1], from the prior: the product of its steps, where a step to
    s = 0 is analytic. The network is called once for all times.

    first: the tokens, [V] bool, that are allowed in the noise of the first position."""
    x, steps = all_sequences(process, model.length), len(times) - 1
    sigma = process.sigma(times[:-1].repeat_interleave(len(x))).float()
    outputs = model.outputs(x.repeat(steps, 1), sigma).view(steps, *x.shape, -1)
    law = process.prior()[x].prod(-1).numpy()
    if first is not None:
        share = torch.ones(process.num_states, dtype=torch.float64)
        share[: len(first)] = first * len(first) / first.sum()
        law = law * share[x[:, 0]].numpy()
    for now, (t, s) in zip(outputs, itertools.pairwise(times.tolist()), strict=True):
        how = ("analytic", None) if s == 0 else (rule, corrector)
        law = sequence_kernel(token_law(method, how[0], process, now, x, t, s, how[1]), x) @ law
    return law


# ---- continuous time ----------------------------------------------------------------------------------------------


def continuous_law(model: Table, method: str, process: TokenProcess, start: float, end: float) -> np.ndarray:
    """The law over n^L sequences at `end` of the reverse process with rates Q_t(x, y) s_y, from the prior at `start`.

    By Runge-Kutta.
    """
    x = all_sequences(process, model.length)
    others = torch.arange(process.vocab_size) != x[..., None]  # [M, L, V]
    column, i, y = (place.numpy() for place in others.nonzero(as_tuple=True))
    changed = x[column]
    changed[torch.arange(len(column)), i] = torch.from_numpy(y)
    row, here = model.index(changed).numpy(), x[column, i].numpy()

    pieces = 24
    times = torch.linspace(start, end, 2 * pieces + 1, dtype=torch.float64)  # each piece has its middle
    at = times.repeat_interleave(len(x))
    outputs = model.outputs(x.repeat(len(times), 1), process.sigma(at).float())
    scores = (
        cedd.log_scores(outputs, process, x.repeat(len(times), 1), at, method=method)
        .exp()
        .view(len(times), *x.shape, -1)
    )
    matrices = np.zeros((len(times), len(x), len(x)))
    for rates, of_token, score in zip(matrices, process.rate_matrix(times).numpy(), scores.numpy(), strict=True):
        rates[row, column] = of_token[here, y] * score[column, i, y]
        rates -= np.diag(rates.sum(0))
    law, step = process.prior()[x].prod(-1).numpy(), (start - end) / pieces
    for first, middle, last in zip(matrices[:-1:2], matrices[1::2], matrices[2::2], strict=True):
        k1 = first @ law
        k2 = middle @ (law + step / 2 * k1)
        k3 = middle @ (law + step / 2 * k2)
        k4 = last @ (law + step * k3)
        law = law + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return law


def reveal_law(model: Table, process: TokenProcess, nodes: int = 160) -> np.ndarray:
    """The law over V^2 of absorb's reverse process on two positions, whose reveal times are a_i = a_1 u_i.

    Given that both are masked at t = 1, one of them (either, with probability 1/2) is revealed first, at the larger of
    two uniform numbers, the other at the smaller: a double integral. Numbers below u_0 = a(0+) / a_1 are not reached:
    the masks that are left at 0+ are drawn at once, none of them seeing the other.
    """
    V, a = process.vocab_size, float(process.kernel(1.0).a)
    least = -math.expm1(-float(process.alpha(torch.tensor(1e-300, dtype=torch.float64)))) / a
    points, weights = np.polynomial.legendre.leggauss(nodes)
    points, weights = (points + 1) / 2, weights / 2

    def probs(x: tuple[int, int], i: int, u: np.ndarray) -> np.ndarray:
        """At every u, [*S, V]."""
        sigma = torch.from_numpy(-np.log1p(-a * u.ravel())).float()
        found = torch.softmax(model.outputs(torch.tensor([x]).expand(len(sigma), 2), sigma)[:, i], -1).numpy()
        return found.reshape(*u.shape, V)

    def revealed(x: tuple[int, int], i: int, below: np.ndarray) -> np.ndarray:
        """The token law, [N, V], of a mask whose number is uniform below `below` [N]."""
        u = least + (below[:, None] - least) * points
        later = np.einsum("s,nsv->nv", weights, probs(x, i, u)) * (below - least)[:, None]
        return (later + least * probs(x, i, np.full(len(below), least))) / below[:, None]

    law, alive = np.zeros((V, V)), 1 - a
    law += alive**2 / V**2
    for late in (0, 1):  # the other position is a token from the start
        for token in range(V):
            x = (V, token) if late == 0 else (token, V)
            place = (slice(None), token) if late == 0 else (token, slice(None))
            law[place] += alive / V * a * revealed(x, late, np.ones(1))[0]
    first_two = [probs((V, V), i, np.full(1, least))[0] for i in (0, 1)]
    law += (a * least) ** 2 * np.outer(*first_two)
    larger = least + (1 - least) * points  # with density 2 m
    weight = a**2 * 0.5 * weights * (1 - least) * 2 * larger
    for first in (0, 1):
        early = probs((V, V), first, larger)
        for token in range(V):
            x = (token, V) if first == 0 else (V, token)
            row = np.einsum("m,m,mv->v", weight, early[:, token], revealed(x, 1 - first, larger))
            law[(token, slice(None)) if first == 0 else (slice(None), token)] += row
    return law.flatten()


# ---- chi-square ---------------------------------------------------------------------------------------------------


def p_value(observed: np.ndarray, law: np.ndarray) -> float:
    """The p-value of the counts under the law; states with fewer than 8 expected draws are pooled."""
    assert abs(law.sum() - 1) < 1e-9
    assert observed[law <= 0].sum() == 0, "an impossible state was drawn"
    expected = law * observed.sum()
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    pooled = max(1, int(np.searchsorted(expected.cumsum(), 8)) + 1)
    observed = np.append(observed[:pooled].sum(), observed[pooled:])
    expected = np.append(expected[:pooled].sum(), expected[pooled:])
    return 1.0 if len(expected) == 1 else float(stats.chisquare(observed, expected).pvalue)


def combined(values: list[float]) -> float:
    """Fisher's combination of independent p-values."""
    statistic = -2 * float(np.log(np.clip(values, 1e-300, 1)).sum())
    return float(stats.chi2.sf(statistic, 2 * len(values)))


def same_law_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sample chi-square of two tables of counts."""
    table = np.stack([first, second])
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return float(stats.chi2.sf(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1))
