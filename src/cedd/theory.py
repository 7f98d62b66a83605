"""Every claim of the paper, and every one of ours about the paper, as a number on the left and one on the right.

Shapes: V vocabulary, L positions; N noisy and M clean sequences; K times.

A claim is a function from a ToyProblem (small enough to enumerate) to findings; CLAIMS is the table of them. What is
claimed is computed here from dense matrices, sums over all sequences and explicit ratios; what it is held against is
the package's closed form, or the other side of the inequality. Networks are random functions of (x_t, sigma) in
float64, different at every sequence, so that nothing holds by accident.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from cedd.bounds.exact import Axis, Enumerated, Space, enumerated, integrated_bound, learned_distribution
from cedd.clocks import PowerShare, first_negative
from cedd.dynamics import Bound
from cedd.methods import get_method
from cedd.network import AnyModel
from cedd.parameterization import Denoiser, ScaledScore
from cedd.process import TokenProcess, absorb, eroulette, roulette, uniform
from cedd.quadrature import gauss_legendre, integrate
from cedd.schedules import LogLinear
from cedd.splitmix import GAMMA

Relation = Literal["at most", "equals", "erratum"]
_EPS = 1e-3
_EXACT = 1e-9  # what two ways to the same number may differ by
_INTEGRAL = 1e-7  # the same, where one of them is an integral over a singular end
_VISIBLE = 1e-4  # an erratum must matter


@dataclass(frozen=True)
class Finding:
    """One comparison. `left` and `right` are the two sides; for an erratum they are the errors of the printed and of
    the corrected formula."""

    case: str
    left: float
    right: float
    tolerance: float = _EXACT
    relation: Relation = "equals"

    @property
    def slack(self) -> float:
        """What is left of an inequality; the error of an equality; the error that an erratum removes."""
        if self.relation == "at most":
            return self.right - self.left
        if self.relation == "equals":
            return abs(self.left - self.right)
        return self.left - self.right

    @property
    def holds(self) -> bool:
        if self.relation == "at most":
            return self.slack >= -self.tolerance
        if self.relation == "equals":
            return self.slack <= self.tolerance
        return self.left >= max(_VISIBLE, 2 * self.right) and self.right <= self.tolerance


_equals, _at_most = Finding, partial(Finding, relation="at most")
_erratum = partial(Finding, relation="erratum")


# ----------------------------------------------------------------------------------------------------------------
# Where the claims are tried


@dataclass(frozen=True)
class ToyProblem:
    """A small space: random data, random networks, and one process of each kind."""

    vocab_size: int = 3
    length: int = 2
    seed: int = 0
    p_m: float = 0.7
    _chains: dict[tuple[str, str], Chain] = field(default_factory=dict[tuple[str, str], "Chain"], repr=False)

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= 10 or self.length < 1 or (self.vocab_size + 1) ** self.length > 64:
            raise ValueError(
                "the vocabulary size V must be from 2 to 10, the length L at least 1, and (V+1)^L at most 64 "
                f"(got V = {self.vocab_size}, L = {self.length})"
            )

    def processes(self) -> dict[str, TokenProcess]:
        V = self.vocab_size
        return {
            "absorb": absorb(V),
            "uniform": uniform(V),
            "roulette": roulette(V, self.p_m),
            "eroulette": eroulette(V, mask_share=PowerShare(0.2, 0.9)),
        }

    def generator(self, salt: int) -> torch.Generator:
        number = (GAMMA * self.seed + salt) % 2**64
        return torch.Generator().manual_seed(number ^ (number >> 32))  # of which torch reads the last 32 bits

    def data(self, salt: int = 1) -> Tensor:
        """A random distribution over clean sequences [M]."""
        count = self.vocab_size**self.length
        return torch.softmax(torch.randn(count, generator=self.generator(salt), dtype=torch.float64), 0)

    def network(self, space: Space) -> AnyModel:
        """A smooth random function of (x_t, sigma) -> [B, L, V]."""
        shape = (3, *space.states.shape, self.vocab_size)
        level, slope, phase = 0.7 * torch.randn(shape, generator=self.generator(2), dtype=torch.float64)

        def model(x: Tensor, sigma: Tensor) -> Tensor:
            index = space.index(x)
            return level[index] + slope[index] * torch.sin(sigma.double()[:, None, None] + phase[index])

        return model

    def chain(self, process: str, method: str) -> Chain:
        """A random network on a process; made once."""
        if (process, method) not in self._chains:
            space = Space(self.processes()[process], self.length)
            network = enumerated(self.network(space), space, get_method(method), sigma_dtype=torch.float64)
            self._chains[process, method] = Chain(network, self.data())
        return self._chains[process, method]

    def chains(self) -> Iterator[tuple[str, Chain]]:
        """Every process with three meanings of the network (a scaled score's bound is infinite where tokens move)."""
        for process in self.processes():
            for method in ("sedd", "sedds" if process == "absorb" else "cedd", "bayes"):
                yield f"{process}, {method}", self.chain(process, method)


@dataclass(frozen=True)
class Grid:
    """Times [K] and weights [K] of a fixed rule for integrals over (0, 1]."""

    t: Tensor
    weight: Tensor

    @classmethod
    def of(cls, axis: Axis, panels: int = 24) -> Grid:
        """16 Gauss points in each panel of u, sigma = u^4 up to scale, with the kinks on panel edges."""
        x, w = gauss_legendre(16)
        end = axis.edges[-1]
        cuts = [(edge / end) ** 0.25 for edge in axis.edges]
        steps = torch.linspace(0, 1, panels + 1, dtype=torch.float64)
        parts = [low + (high - low) * steps[:-1] for low, high in itertools.pairwise(cuts)]
        edges = torch.cat([*parts, torch.ones(1, dtype=torch.float64)])
        width = edges.diff()[:, None]
        u = (edges[:-1, None] + width * x).reshape(-1)
        t, slope = axis.time(end * u**4)
        return cls(t, (width * w).reshape(-1) * 4 * end * u**3 * slope)

    def integral(self, values: Tensor) -> Tensor:
        """The integral over time of values [K, ...]."""
        return torch.einsum("k,k...->...", self.weight, values)


def _k(ratio: Tensor) -> Tensor:
    """K(r) = r (log r - 1)."""
    return torch.xlogy(ratio, ratio) - ratio


def _lbar(ratio: Tensor, log_s: Tensor) -> Tensor:
    """lbar(r, s) = s - r log s."""
    return torch.exp(log_s) - ratio * log_s


def _bregman(ratio: Tensor, log_s: Tensor) -> Tensor:
    """l(r, s) = lbar(r, s) + K(r)."""
    return _lbar(ratio, log_s) + _k(ratio)


def entropy(p: Tensor) -> float:
    """H(p)."""
    return float(-torch.xlogy(p, p).sum())


def cross_entropy(p: Tensor, q: Tensor) -> float:
    """H(p, q)."""
    return float(-torch.xlogy(p, q).sum())


class Chain:
    """A network on a space with data p0 [M], with what the theorems speak of, by enumeration over a time grid."""

    def __init__(self, network: Enumerated, p0: Tensor) -> None:
        self.network, self.p0, self.space = network, p0, network.space
        self.process = network.process
        self.grid = Grid.of(network.axis)
        self.log_s = network.method.require_scores().log_ratios(*network.at(self.grid.t))
        self._bounds: dict[Bound, float] = {}

    @cached_property
    def learned(self) -> Tensor:
        """p_0^theta [M]."""
        model, method = self.network.network.model, self.network.method
        law = learned_distribution(model, self.process, self.space.length, method=method, sigma_dtype=torch.float64)
        return law.reshape(-1)

    @property
    def prior(self) -> Tensor:
        """p_r over the noisy sequences [N]."""
        return self.process.prior()[self.space.states].prod(-1)

    def final(self, p0: Tensor) -> Tensor:
        """p_1 over the noisy sequences [N]."""
        return self.space.marginal(p0, torch.ones(1, dtype=torch.float64))[0]

    @cached_property
    def rate_matrices(self) -> Tensor:
        """Q_t of one token: [K, n, n]."""
        return self.process.rate_matrix(self.grid.t)

    @cached_property
    def marginals(self) -> Tensor:
        """p_t of the data: [K, N]."""
        return self.space.marginal(self.p0, self.grid.t)

    @cached_property
    def forward_rates(self) -> Tensor:
        """Q_t(x^i, y) for y != x^i, else 0, read from the dense matrices: [K, N, L, V]."""
        rates = self.rate_matrices[:, self.space.states][..., : self.process.vocab_size]
        here = self.space.states[..., None] == torch.arange(self.process.vocab_size)
        return torch.where(here, 0.0, rates)

    def out_rates(self) -> Tensor:
        """sum_y Q_t(y, x) over all positions: [K, N]."""
        return -torch.diagonal(self.rate_matrices, dim1=1, dim2=2)[:, self.space.states].sum(-1)

    def ratios(self, p0: Tensor) -> Tensor:
        """p_t(y) / p_t(x) for the marginals of p0: [K, N, L, V]."""
        marginal = self.space.marginal(p0, self.grid.t)
        return marginal[:, self.space.neighbours] / marginal[..., None, None]

    def density(self, values: Tensor) -> Tensor:
        """E_{x ~ p_t} sum over positions and tokens of values [K, N, L, V] weighted by the forward rates: [K]."""
        rates = self.forward_rates
        per_state = torch.where(rates > 0, rates * values, 0.0).sum((2, 3))
        return (self.marginals * per_state).sum(-1)

    def expected(self, values: Tensor) -> float:
        """The integral of the density over time."""
        return float(self.grid.integral(self.density(values)))

    def expected_out_rate(self) -> float:
        """int E_{x ~ p_t} sum_y Q_t(y, x)."""
        return float(self.grid.integral((self.marginals * self.out_rates()).sum(-1)))

    def conditional(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """int E_{x | x0} sum Q_t(x, y) loss(p(y|x0) / p(x|x0), s_y) dt for every clean sequence: [M]."""
        V, states = self.process.vocab_size, self.space.states
        matrix = self.process.kernel(self.grid.t).dense()
        # [K, N, L, V(y), V(h)]: how likely y and x are, given that the clean token is h.
        ratio = matrix[:, None, None, :V, :V] / matrix[:, states, :V][..., None, :]
        rates = self.forward_rates[..., None]
        costs = torch.where((rates > 0) & ratio.isfinite(), rates * loss(ratio, self.log_s[..., None]), 0.0).sum(3)
        per_sequence = torch.einsum("knm,knlh,mlh->km", self.space.likelihood(self.grid.t), costs, self.space.one_hot)
        return self.grid.integral(per_sequence)

    def conditional_kl(self) -> Tensor:
        """KL(p_{1|0}(. | x0) || p_r) for every clean sequence: [M]."""
        final = self.space.likelihood(torch.ones(1, dtype=torch.float64))[0]
        return (torch.xlogy(final, final) - torch.xlogy(final, self.prior[:, None])).sum(0)

    def bound(self, bound: Bound) -> float:
        """The package's own exact bound, per token: j1 by the integral of l, tight and j2 by that of lbar."""
        if bound not in self._bounds:
            network = replace(self.network, stop=0.0)
            self._bounds[bound] = integrated_bound(network, self.p0, bound, with_entropy=bound == "j1")
        return self._bounds[bound]


# ----------------------------------------------------------------------------------------------------------------
# Theorems, by the numbers that the paper prints


def kl_bound(problem: ToyProblem) -> Iterator[Finding]:
    """KL(p0 || p0_theta) <= int E_{p_t} sum Q l(p_t(y)/p_t(x), s_y) dt + KL(p_1 || p_r)."""
    for name, chain in problem.chains():
        path = chain.expected(_bregman(chain.ratios(chain.p0), chain.log_s))
        final = chain.final(chain.p0)
        left = cross_entropy(chain.p0, chain.learned) - entropy(chain.p0)
        yield _at_most(name, left, path + cross_entropy(final, chain.prior) - entropy(final))


def entropy_identity(problem: ToyProblem) -> Iterator[Finding]:
    """H(p0) = H(p_1) - int E sum_y Q K(p_t(y)/p_t(x)), y = x included; and Theorem 1 is an equality where the
    learned ratios are those of a process of its own, begun in its own p_1."""
    other = problem.data(salt=5)
    for name in problem.processes():
        chain = problem.chain(name, "bayes")
        ratios = chain.ratios(chain.p0)
        right = entropy(chain.final(chain.p0)) - chain.expected(_k(ratios)) - chain.expected_out_rate()
        yield _equals(f"{name}, entropy", entropy(chain.p0), right, _INTEGRAL)
        path = chain.expected(_bregman(ratios, chain.ratios(other).clamp_min(1e-300).log()))
        ends = [chain.final(p) for p in (chain.p0, other)]
        yield _equals(
            f"{name}, equality in Theorem 1",
            cross_entropy(chain.p0, other) - entropy(chain.p0),
            path + cross_entropy(*ends) - entropy(ends[0]),
            _INTEGRAL,
        )


def pointwise_bound(problem: ToyProblem) -> Iterator[Finding]:
    """-log p0_theta(x0) <= int E_{x_t|x0} sum Q l(p(y|x0)/p(x|x0), s_y) dt + KL(p_{1|0} || p_r), for each x0."""
    for name, chain in problem.chains():
        right = chain.conditional(_bregman) + chain.conditional_kl()
        left = -chain.learned.log()
        tightest = int((right - left).argmin())
        yield _at_most(f"{name}, tightest x0", float(left[tightest]), float(right[tightest]))


def cross_entropy_bound(problem: ToyProblem) -> Iterator[Finding]:
    """H(p0, p0_theta) <= int E_{p_t} sum Q lbar dt - int E out-rate dt + H(p_1, p_r); and the same number with the
    conditional ratios, which is what one can compute."""
    for name, chain in problem.chains():
        known = cross_entropy(chain.final(chain.p0), chain.prior) - chain.expected_out_rate()
        by_marginal = chain.expected(_lbar(chain.ratios(chain.p0), chain.log_s)) + known
        yield _at_most(name, cross_entropy(chain.p0, chain.learned), by_marginal)
        by_conditional = float(chain.p0 @ chain.conditional(_lbar)) + known
        yield _equals(f"{name}, denoising form", by_marginal, by_conditional, _INTEGRAL)
        yield _equals(f"{name}, exact_bound", by_marginal / problem.length, chain.bound("tight"), _INTEGRAL)


# ----------------------------------------------------------------------------------------------------------------
# Propositions


def _roulette_rates(V: int, p_m: float) -> Tensor:
    """P - I of the paper's roulette, [n, n], entry by entry as defined."""
    matrix = torch.zeros(V + 1, V + 1, dtype=torch.float64)
    matrix[:V, :V] = (1 - p_m) / V
    matrix[V, :V] = p_m
    matrix[V, V] = 1.0
    return matrix - torch.eye(V + 1, dtype=torch.float64)


def _printed_exponential(V: int, p_m: float, sigma: float, sign: float = -1.0) -> Tensor:
    """Proposition 5's matrix; `sign` is that of the exponent (1-p_m) sigma."""
    n, moved = V + 1, -math.expm1(sign * (1 - p_m) * sigma)
    alive = math.exp(-sigma * p_m)
    matrix = torch.full((n, n), alive * moved / (n - 1), dtype=torch.float64)
    matrix.fill_diagonal_(alive * (1 - (n - 2) / (n - 1) * moved))
    matrix[V, :] = 1 - alive
    matrix[:, V] = 0.0
    matrix[V, V] = 1.0
    return matrix


def _distance(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def proposition_5(problem: ToyProblem) -> Iterator[Finding]:
    """The exponential of the roulette matrix, in closed form."""
    for p_m in (0.05, problem.p_m, 1.0):
        process = roulette(problem.vocab_size, p_m)
        for t in (0.01, 1.0):
            sigma = float(process.sigma(t))
            exact = torch.matrix_exp(sigma * _roulette_rates(problem.vocab_size, p_m))
            printed = _printed_exponential(problem.vocab_size, p_m, sigma)
            yield _equals(f"p_m={p_m:g}, t={t:g}, printed", _distance(printed, exact), 0.0)
            yield _equals(f"p_m={p_m:g}, t={t:g}, package", _distance(process.transition_matrix(t), exact), 0.0)


def proposition_6(problem: ToyProblem) -> Iterator[Finding]:
    """-int E sum_{y != x} Q(y, x) dt per token, in closed form (printed for all but eroulette), and H(p_r)."""
    V, p_m = problem.vocab_size, problem.p_m
    printed = {
        "absorb": _EPS - 1,
        "uniform": -(1 - 1 / V) * LogLinear(_EPS).end,
        "roulette": (1 - (1 - p_m) / V) / p_m * (_EPS - 1),
    }
    for name, process in problem.processes().items():
        counted = -problem.chain(name, "bayes").expected_out_rate() / problem.length
        if name in printed:
            yield _equals(f"{name}, printed", printed[name], counted, _INTEGRAL)
        yield _equals(f"{name}, package", -process.integrated_out_rate(), counted, _INTEGRAL)
        own = torch.zeros(process.num_states, dtype=torch.float64)
        own[V if process.has_mask else slice(None)] = 1.0 if process.has_mask else 1 / V
        yield _equals(f"{name}, H(p_r)", process.terminal().paper_prior_entropy, entropy(own))
        final = process.transition_matrix(1.0)[:, 0]
        yield _equals(f"{name}, H(p_1, p_r)", process.terminal().cross_entropy, cross_entropy(final, process.prior()))


def proposition_7(problem: ToyProblem) -> Iterator[Finding]:
    """The same closed form for eroulette, with p_m(t): the exponential of the integrated rates."""
    V, share = problem.vocab_size, PowerShare(0.3, 0.7)
    process = eroulette(V, p_m=share)
    for t in (0.1, 0.6, 1.0):
        x, w = gauss_legendre(400)
        rates = process.rate_matrix(t * x)
        exact = torch.matrix_exp(torch.einsum("k,kij->ij", w * t, rates))
        share_now = float(share(torch.tensor(t, dtype=torch.float64)))
        printed = _printed_exponential(V, share_now, float(process.sigma(t)))
        yield _equals(f"t={t:g}, printed", _distance(printed, exact), 0.0, _INTEGRAL)
        yield _equals(f"t={t:g}, package", _distance(process.transition_matrix(t), exact), 0.0, _INTEGRAL)


# ----------------------------------------------------------------------------------------------------------------
# The two bounds


def same_bound(problem: ToyProblem) -> Iterator[Finding]:
    """With the terminal terms kept J1 = J2: J1 + KL(p_{1|0} || p_r) = J2 - H(p_r) + H(p_1, p_r), per token."""
    for name, chain in problem.chains():
        yield _equals(name, chain.bound("j1") + chain.process.terminal().kl, chain.bound("tight"), _INTEGRAL)


def paper_difference(problem: ToyProblem) -> Iterator[Finding]:
    """The paper's J1 - J2 is H(p_{1|0}) - H(p_r) per token, whatever the network."""
    for name, chain in problem.chains():
        final = chain.process.transition_matrix(1.0)[:, 0]
        constant = entropy(final) - (0.0 if chain.process.has_mask else math.log(problem.vocab_size))
        yield _equals(name, chain.bound("j1") - chain.bound("j2"), constant, _INTEGRAL)


def perfect_absorb(problem: ToyProblem) -> Iterator[Finding]:
    """With a perfect absorb network the paper's J1 and J2 lie below the entropy of the data; `tight` does not."""
    chain = problem.chain("absorb", "cedd")
    perfect = enumerated(_perfect(chain.space, chain.p0), chain.space, chain.network.method, sigma_dtype=torch.float64)
    chain = Chain(perfect, chain.p0)
    data_entropy = entropy(chain.p0) / problem.length
    for bound in ("j1", "j2"):
        yield _at_most(f"{bound} below the entropy", chain.bound(bound), data_entropy, tolerance=-1e-4)
    yield _at_most("the entropy at most tight", data_entropy, chain.bound("tight"))
    yield _at_most(
        "the learned law at most tight", cross_entropy(chain.p0, chain.learned) / problem.length, chain.bound("tight")
    )


def _perfect(space: Space, p0: Tensor) -> AnyModel:
    """The network that knows absorb's p(x_0 | x_t), which does not change with time."""
    posterior = torch.log(space.belief(p0, torch.full((1,), 0.5, dtype=torch.float64))[0].clamp_min(1e-300))
    return lambda x, sigma: posterior[space.index(x)]


def ratio_identity(problem: ToyProblem) -> Iterator[Finding]:
    """p_t(y)/p_t(x) = sum_h p(y|h)/p(x|h) p(x_0^i = h | x_t): the denoiser's ratios, at the true posterior."""
    t = torch.tensor([1e-6, 0.01, 0.3, 0.9, 1.0], dtype=torch.float64)
    for name, process in problem.processes().items():
        space, p0 = Space(process, problem.length), problem.data()
        marginal = space.marginal(p0, t)
        true = marginal[:, space.neighbours] / marginal[..., None, None]
        x_t = space.states.expand(len(t), *space.states.shape)
        outputs = torch.log(space.belief(p0, t).clamp_min(1e-300))
        scores = Denoiser(rescale=False).log_scores(outputs, x_t, process.noise(t).like(x_t)).exp()
        error = ((scores - true).abs() / (1 + true)).where(scores > 0, 0.0)  # 0: the process cannot jump back there
        yield _equals(name, float(error.max()), 0.0)


# ----------------------------------------------------------------------------------------------------------------
# Errata: what is printed is wrong by the left number, what the package has by the right one


def erratum_masked_score(problem: ToyProblem) -> Iterator[Finding]:
    """Roulette's ratios at a mask: printed b/a + f (c/b - b/a), right is b/a + f (c/a - b/a)."""
    V, process = problem.vocab_size, roulette(problem.vocab_size, problem.p_m)
    f = torch.softmax(torch.randn(V, generator=problem.generator(3), dtype=torch.float64), 0)
    for t in (0.1, 0.5, 0.9):
        matrix, noise = process.transition_matrix(t), process.noise(torch.tensor([t], dtype=torch.float64))
        a, b, c = matrix[V, 0], matrix[1, 0], matrix[0, 0]
        true = (matrix[:V, :V] / matrix[V, :V]) @ f
        package = Denoiser().log_scores(f.log()[None], torch.tensor([V]), noise)[0].exp()
        yield _erratum(f"t={t:g}", _distance(b / a + f * (c / b - b / a), true), _distance(package, true))


def erratum_sampler(problem: ToyProblem) -> Iterator[Finding]:
    """The analytic sampler's inverse matrix: printed b-bar has 1 - e^sigma, right is 1 - e^((1-p_m) sigma)."""
    V, p_m = problem.vocab_size, problem.p_m
    process = roulette(V, p_m)
    kernel, delta = process.kernel(0.5, 0.4), float(process.sigma(0.5) - process.sigma(0.4))
    printed = _printed_exponential(V, p_m, -delta)
    off_diagonal = math.exp(p_m * delta) * -math.expm1(delta) / V
    tokens = ~torch.eye(V, dtype=torch.bool)
    printed[:V, :V][tokens] = off_diagonal
    identity = torch.eye(V + 1, dtype=torch.float64)
    yield _erratum(
        "inverse times matrix",
        _distance(printed @ kernel.dense(), identity),
        _distance(kernel.inverse().dense() @ kernel.dense(), identity),
    )


def erratum_exponential(problem: ToyProblem) -> Iterator[Finding]:
    """The appendix's roulette exponential lacks the minus of e^(-(1-p_m) tau); its Proposition 5 has I - P."""
    V, process = problem.vocab_size, roulette(problem.vocab_size, problem.p_m)
    sigma = float(process.sigma(0.5))
    exact = torch.matrix_exp(sigma * _roulette_rates(V, problem.p_m))
    package = _distance(process.transition_matrix(0.5), exact)
    yield _erratum("lost minus", _distance(_printed_exponential(V, problem.p_m, sigma, sign=1.0), exact), package)
    of_negative = torch.matrix_exp(-sigma * _roulette_rates(V, problem.p_m))
    yield _erratum("I - P for P - I", _distance(of_negative, process.transition_matrix(0.5)), package)


def erratum_scale_factor(problem: ToyProblem) -> Iterator[Finding]:
    """In the uniform scale factor, 1 - V/(e^sigma - 1 + V) is p(y|x)/p(x|x), not a V-th of it."""
    V, process = problem.vocab_size, uniform(problem.vocab_size)
    for t in (0.05, 0.5):
        matrix, noise = process.transition_matrix(t), process.noise(torch.tensor([t], dtype=torch.float64))
        claimed = 1 - V / (math.expm1(float(process.sigma(t))) + V)
        ratio = float(matrix[1, 0] / matrix[0, 0])
        yield _erratum(f"t={t:g}, the ratio", abs(ratio / V - claimed), abs(ratio - claimed))
        mean = (matrix[1] / matrix[0]).mean()
        with_stray = mean - ratio / V + ratio / V**2
        shift = ScaledScore().shift(torch.tensor([0]), noise)[0].exp()
        yield _erratum(f"t={t:g}, the factor", float((with_stray - mean).abs()), float((shift - mean).abs()))


def erratum_cross_entropy_sign(problem: ToyProblem) -> Iterator[Finding]:
    """KL(p || f) = -E_p log f - H(p); the derivation of the cross entropy prints +E_p log f."""
    p, f = problem.data(salt=6), problem.data(salt=7)
    divergence = float((p * (p / f).log()).sum())
    expected_log = float((p * f.log()).sum())
    yield _erratum("KL", abs(expected_log - entropy(p) - divergence), abs(-expected_log - entropy(p) - divergence))


def erratum_constants(problem: ToyProblem) -> Iterator[Finding]:
    """J2's procedure adds eps = 1e-4 where the schedule has 1e-3, and cuts time at "e^-4" where 1e-4 is meant."""
    counted = -problem.chain("absorb", "bayes").expected_out_rate() / problem.length
    yield _erratum(
        "analytic term", abs(-1 + 1e-4 - counted), abs(-absorb(2).integrated_out_rate() - counted), _INTEGRAL
    )
    chain = problem.chain("uniform", "bayes")
    density = chain.density(_bregman(chain.ratios(chain.p0), chain.log_s))
    whole = float(chain.grid.integral(density))

    def cut(edge: float) -> float:
        inside = (chain.grid.t > edge) & (chain.grid.t < 1 - edge)
        return float((chain.grid.weight * density)[inside].sum()) / (1 - 2 * edge)

    yield _erratum("time cut, relative", abs(cut(math.exp(-4)) / whole - 1), abs(cut(1e-4) / whole - 1), 0.02)


def erratum_eroulette(problem: ToyProblem) -> Iterator[Finding]:
    """p_m(0) = 0, p_m(1) = 1 needs a negative rate; t^(1/(at)) is never valid; the share q(t) always is.

    Left: the lowest shuffle rate that the printed choice asks for. The first bad t stands in the name.
    """
    V, schedule = problem.vocab_size, LogLinear(_EPS)

    def shuffle_rate(share: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def rate(t: Tensor) -> Tensor:
            h = 1e-6 * torch.minimum(t, 1 - t).clamp_min(1e-9)
            low, high = t - h, (t + h).clamp_max(1.0)
            clocks = [(1 - share(s)) * schedule.sigma(s) for s in (low, high)]
            return (clocks[1] - clocks[0]) / (high - low)

        return rate

    choices: dict[str, Callable[[Tensor], Tensor]] = {"p_m = t": PowerShare(), "p_m = t^2": PowerShare(power=2.0)}
    for a in (0.1, 0.5, 1.0, 3.0, 10.0):
        choices[f"p_m = t^(1/({a:g}t))"] = lambda t, a=a: t ** (1 / (a * t))
    grid = torch.linspace(1e-3, 1.0, 4001, dtype=torch.float64)
    for name, share in choices.items():
        rate = shuffle_rate(share)
        refused_at = _refused_at(V, share)
        where = f"first bad t = {refused_at:.6g}" if refused_at is not None else "accepted"
        yield _at_most(f"{name}, {where}", float(rate(grid).min()), 0.0, tolerance=-1e-3)
        found = first_negative(rate)
        yield _equals(
            f"{name}, t in the error", math.nan if refused_at is None else refused_at, found or math.nan, 1e-3
        )
    always = eroulette(V, mask_share=PowerShare())
    lowest = min(float(always.alpha_rate(grid).min()), float(always.beta_rate(grid).min()))
    yield _at_most("mask_share = t, lowest rate", 0.0, lowest)


def _refused_at(V: int, share: Callable[[Tensor], Tensor]) -> float | None:
    """The t that eroulette's refusal names; None where it accepts the share."""
    try:
        eroulette(V, p_m=share)
    except ValueError as refusal:
        return float(str(refusal).split("t = ")[1].split(";")[0])
    return None


def erratum_rescaling(problem: ToyProblem) -> Iterator[Finding]:
    """The values of the rescaled sigma, which acts on unmasked ratios only; nearly continuous at 0.5 for roulette."""
    sigma = torch.tensor([0.0, 1e-4, 0.0015, 0.1, 0.5 - 1e-12, 0.5, 2.0], dtype=torch.float64)
    lifted = [math.log(1.1 * float(s) + 1.1) if s < 0.5 else float(s) for s in sigma]
    floored = [max(float(s), 0.0015) for s in sigma]
    for name, has_mask, values in (("roulette", True, lifted), ("uniform", False, floored)):
        rescaled = Denoiser().rescaled_sigma(sigma, has_mask)
        yield _equals(f"{name}'s values", _distance(rescaled, torch.tensor(values, dtype=torch.float64)), 0.0)
    jump = -Denoiser().rescaled_sigma(sigma, True).diff()[4]
    yield _equals("roulette's jump at 0.5", float(jump), math.log(1.65) - 0.5)
    V, process = problem.vocab_size, roulette(problem.vocab_size, problem.p_m)
    noise = process.noise(torch.full((V + 1,), 0.1, dtype=torch.float64))
    outputs = torch.randn(V + 1, V, generator=problem.generator(4), dtype=torch.float64)
    on, off = (Denoiser(rescale).log_scores(outputs, torch.arange(V + 1), noise) for rescale in (True, False))
    yield _equals("masked ratios untouched", _distance(on[V], off[V]), 0.0)
    yield _at_most("unmasked ratios changed", 0.01, _distance(on[:V], off[:V]))


def erratum_corrected(problem: ToyProblem) -> Iterator[Finding]:
    """The "probability of moving at least once before being masked" is that of being another token when masked."""
    V, p_m = problem.vocab_size, problem.p_m
    process = roulette(V, p_m)
    end = process.axis.end / p_m
    printed = (V - 1) / V * (p_m * math.exp(-end) - math.exp(-end * p_m) + 1 - p_m)

    # Five states: never moved, back at the first token, elsewhere; masked without, or after, a move.
    rates = torch.zeros(5, 5, dtype=torch.float64)
    jump, back = (1 - p_m) * (V - 1) / V, (1 - p_m) / V
    for source, target, rate in ((0, 2, jump), (1, 2, jump), (2, 1, back), (0, 3, p_m), (1, 4, p_m), (2, 4, p_m)):
        rates[target, source] += rate
        rates[source, source] -= rate
    moved = float(torch.matrix_exp(end * rates)[4, 0])

    other = _masked_elsewhere(process)
    yield _equals("printed is another token when masked", printed, other)
    yield _equals("package", process.corrected_probability(), other)
    yield _at_most("less than moving at least once", other, moved, tolerance=-1e-3)
    evolving = eroulette(V, mask_share=PowerShare(0.2, 0.9))
    yield _equals("package, eroulette", evolving.corrected_probability(), _masked_elsewhere(evolving))


def _masked_elsewhere(process: TokenProcess) -> float:
    """int alpha' P(x_t is a token, but not the first one) dt."""

    def density(t: Tensor) -> Tensor:
        column = process.kernel(t).dense()[..., : process.vocab_size, 0]
        return process.alpha_rate(t) * column[..., 1:].sum(-1)

    return integrate(density, 0.0, 1.0, 1e-11)


# ----------------------------------------------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Claim:
    """A claim with the function that computes it."""

    name: str
    check: Callable[[ToyProblem], Iterator[Finding]]

    @property
    def statement(self) -> str:
        return " ".join((self.check.__doc__ or "").split())


CLAIMS: Mapping[str, Claim] = {
    claim.name: claim
    for claim in (
        Claim("Theorem 1", kl_bound),
        Claim("Theorem 2", entropy_identity),
        Claim("Theorem 3", pointwise_bound),
        Claim("Theorem 4", cross_entropy_bound),
        Claim("Proposition 5", proposition_5),
        Claim("Proposition 6", proposition_6),
        Claim("Proposition 7", proposition_7),
        Claim("ratios of a posterior", ratio_identity),
        Claim("J1 = J2", same_bound),
        Claim("the paper's J1 - J2", paper_difference),
        Claim("no bound as printed", perfect_absorb),
        Claim("erratum 1", erratum_masked_score),
        Claim("erratum 2a", erratum_sampler),
        Claim("erratum 2b, 2c", erratum_exponential),
        Claim("erratum 3", erratum_scale_factor),
        Claim("erratum 4", erratum_cross_entropy_sign),
        Claim("erratum 5", erratum_constants),
        Claim("erratum 6", erratum_eroulette),
        Claim("erratum 7", erratum_rescaling),
        Claim("erratum 8", erratum_corrected),
    )
}
