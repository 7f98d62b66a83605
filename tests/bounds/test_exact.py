"""The exact bound and the exact law of the learned reverse process, against the dense oracle."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import cedd
from cedd.bounds.exact import Axis, Space, enumerated, learned_distribution
from cedd.dynamics import BOUNDS, Bound
from cedd.parameterization import Denoiser
from cedd.process import TokenProcess
from tests import reference
from tests.combinations import covering
from tests.networks import as_score, matching_chain, random_data, random_network

V, L = 2, 2
HYBRID_EPS = 1e-4
PROCESSES = {
    "absorb": cedd.absorb(V),
    "uniform": cedd.uniform(V),
    "roulette": cedd.roulette(V, 0.7),
    "eroulette": cedd.eroulette(V, p_m=lambda t: 0.3 + 0.4 * t),
    "running share": cedd.eroulette(V, mask_share=lambda t: t),
    "hybrid": cedd.hybrid(V, 0.3, eps=HYBRID_EPS),
}
METHODS = ("sedd", "sedds", "cedd", "bayes")
FLOAT64 = torch.float64


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest) -> TokenProcess:
    return PROCESSES[request.param]


def edges_of(process: TokenProcess, sigma_floor: float = 0.0015) -> tuple[float, ...]:
    return Axis(process, kinks=Denoiser(sigma_floor=sigma_floor).kinks(process)).edges


def kinks(process: TokenProcess) -> list[float]:
    """The times at which the paper's rescaled ratios are not smooth."""
    edges = edges_of(process)
    return [float(process.axis.inverse(edge)) for edge in edges[1:-1]]


@pytest.mark.parametrize(
    ("name", "method"),
    covering(
        [
            *itertools.product(("absorb", "uniform", "roulette"), METHODS),
            ("eroulette", "cedd"),
            ("running share", "bayes"),
            ("hybrid", "bayes"),
        ]
    ),
)
def test_exact_bounds_match_oracle_integrals(name: str, method: str) -> None:
    process = PROCESSES[name]
    model, p0 = random_network(process, L, seed=3), random_data(V, L, seed=4)
    slower = [1 - HYBRID_EPS] if name == "hybrid" else []  # where its time begins to run at half the speed
    breaks = [*kinks(process), 0.6, *slower]
    times = [t for t, _ in reference.time_nodes(96, tuple(breaks))]
    chain = matching_chain(process, L, times + [t for t, _ in reference.time_nodes(breaks=tuple(slower))])
    score, flat = as_score(method, process, model, L, times), p0.numpy().ravel()
    bounds = {
        b: cedd.exact_bound(model, process, p0, method=method, bound=b, time_floor=0.0, sigma_dtype=FLOAT64)
        for b in BOUNDS
    }
    if method == "sedds" and process.can_shuffle:  # which is why its path stops earlier
        assert set(bounds.values()) == {math.inf}
        return
    j1, j2 = (
        reference.conditional_loss_integral(chain, flat, score, loss, nodes=96, breaks=breaks) / L
        for loss in (reference.bregman, reference.score_entropy)
    )
    known = j2 - reference.out_rate_integral(chain, flat, breaks=slower) / L
    end = reference.cross_entropy(reference.marginal(chain, flat, 1.0), reference.prior(chain)) / L
    # Hybrid's shuffle clock starts like sqrt(t): at the oracle's first time, 4e-18, it is at 2e-9, and a jump costs 40.
    error = 8e-8 if name == "hybrid" else 1e-8
    assert bounds["j1"] == pytest.approx(j1, abs=error)
    assert bounds["j2"] == pytest.approx(known + (0 if process.has_mask else math.log(V)), abs=error)
    assert bounds["tight"] == pytest.approx(known + end, abs=error)


STOP = 0.05


def stopped_path(process: TokenProcess, p0: np.ndarray, score: reference.Score, low: float, loss) -> float:
    """int_low^1 E sum_y Q loss dt by Gauss-Legendre quadrature in log(sigma)."""
    chain, axis = matching_chain(process, L), process.axis
    points, weights = np.polynomial.legendre.leggauss(60)
    start, total = float(axis.sigma(low)), 0.0
    span = math.log(axis.end / start)
    for point, weight in zip(points, weights, strict=True):
        sigma = start * math.exp(span * (1 + point) / 2)
        t = float(axis.inverse(torch.tensor(sigma, dtype=FLOAT64)))
        at = float(p0 @ reference.mean_loss(chain, reference.conditionals(chain, t), t, score, loss))
        total += weight / 2 * span * sigma / float(axis.rate(t)) * at
    return total


@pytest.mark.parametrize("name", ["uniform", "roulette", pytest.param("eroulette", marks=pytest.mark.slow)])
def test_bound_of_early_stop_includes_last_step(name: str) -> None:
    """The bound and the sampled distribution of scaled scores whose path ends at t0 with p(x_t | z) s_z."""
    process, method = PROCESSES[name], cedd.METHODS["sedds"].with_stop(STOP)
    model, p0 = random_network(process, L, seed=3), random_data(V, L, seed=4)
    chain, flat = matching_chain(process, L), p0.numpy().ravel()
    score, kernel = as_score("sedds", process, model, L), reference.transition(chain, STOP)
    prior = reference.prior(chain)

    def read(x: tuple[int, ...], x0: tuple[int, ...]) -> float:
        """The probability that x_t0 = x is decoded as x0."""
        rows = [
            kernel[x[i], :V] * np.array([score(x, STOP)[i, z] if z != x[i] else 1.0 for z in range(V)]) for i in (0, 1)
        ]
        return math.prod(float(row[z] / row.sum()) for row, z in zip(rows, x0, strict=True))

    expected = stopped_path(process, flat, score, STOP, reference.bregman)
    for probability, x0 in zip(flat, chain.clean, strict=True):
        last = reference.conditional(chain, x0, 1.0)
        expected += probability * float(np.sum(last * np.log(np.maximum(last, 1e-300) / prior)))
        for chance, x in zip(reference.conditional(chain, x0, STOP), chain.states, strict=True):
            expected -= probability * chance * math.log(read(x, x0))
    bound = cedd.exact_bound(model, process, p0, method=method, sigma_dtype=FLOAT64)
    assert bound == pytest.approx(expected / L, abs=1e-7)
    assert bound == cedd.exact_bound(model, process, p0, method="sedds", time_floor=STOP, sigma_dtype=FLOAT64)

    marks = [math.log(math.expm1(float(process.axis.sigma(t)))) for t in (STOP, 1.0)]
    steps = math.ceil((marks[1] - marks[0]) * 250)
    law = runge_kutta(
        generators(process, "sedds", model, np.linspace(marks[1], marks[0], 2 * steps + 1)),
        prior,
        (marks[1] - marks[0]) / steps,
    )
    drawn = np.array([sum(p * read(x, x0) for p, x in zip(law, chain.states, strict=True)) for x0 in chain.clean])
    learned = learned_distribution(model, process, L, method=method, sigma_dtype=FLOAT64)
    assert np.abs(learned.numpy().ravel() - drawn).max() < 1e-7
    assert float(-np.sum(flat * np.log(drawn))) / L <= bound


@pytest.mark.parametrize(
    ("name", "bound"), covering(itertools.product(("absorb", "uniform", "roulette"), ("j1", "j2")))
)
def test_j1_and_j2_are_cut_at_time_floor_of_paper(name: str, bound: Bound) -> None:
    """The mean over t in (1e-4, 1) replaces the mean over all t; the analytic terms of j2 cover the whole interval."""
    process = PROCESSES[name]
    model, p0 = random_network(process, L, seed=3), random_data(V, L, seed=4)
    flat = p0.numpy().ravel()
    loss = {"j1": reference.bregman, "j2": reference.score_entropy}[bound]
    path = stopped_path(process, flat, as_score("bayes", process, model, L), 1e-4, loss) / (1 - 1e-4) / L
    known = -process.integrated_out_rate() + process.terminal().paper_prior_entropy if bound == "j2" else 0.0
    found = cedd.exact_bound(model, process, p0, method="bayes", bound=bound, sigma_dtype=FLOAT64)
    assert found == pytest.approx(path + known, abs=1e-7)


def test_integrated_out_rate_from_given_time(process: TokenProcess) -> None:
    t = torch.tensor([0.2, 0.7], dtype=FLOAT64)
    early, late = (process.integrated_out_rate(float(one)) for one in t)
    points, weights = np.polynomial.legendre.leggauss(40)
    times = torch.from_numpy(0.45 + 0.25 * points)
    rates = torch.exp(-process.alpha(times)) * (process.alpha_rate(times) + process.beta_rate(times) * (1 - 1 / V))
    assert early - late == pytest.approx(float((rates * 0.25 * torch.from_numpy(weights)).sum()), abs=1e-9)


def generators(process: TokenProcess, method: str, model, w: np.ndarray) -> np.ndarray:
    """The learned reverse rates per unit of -w, w = log(exp(sigma) - 1), by loops over states: [K, N, N]."""
    states = reference.sequences(process.num_states, L)
    sigma = np.logaddexp(w, 0)
    t = process.axis.inverse(torch.from_numpy(sigma))
    x = torch.tensor(states).repeat(len(w), 1)
    times = t.repeat_interleave(len(states))
    scores = cedd.log_scores(model(x, process.sigma(times)), process, x, times, method=method).exp().numpy()
    scores = scores.reshape(len(w), len(states), L, V)
    factor = -np.expm1(-sigma) / process.axis.rate(t).numpy()
    masking, shuffling = process.alpha_rate(t).numpy() * factor, process.beta_rate(t).numpy() * factor
    result = np.zeros((len(w), len(states), len(states)))
    for column, source in enumerate(states):
        for i, y in itertools.product(range(L), range(V)):
            if y != source[i]:
                forward = masking if source[i] == V else shuffling / V
                rate = np.where(forward > 0, forward * scores[:, column, i, y], 0.0)
                row = states.index((*source[:i], y, *source[i + 1 :]))
                result[:, row, column] += rate
                result[:, column, column] -= rate
    return result


def runge_kutta(matrices: np.ndarray, law: np.ndarray, h: float) -> np.ndarray:
    """law' = A law with A at 0, h/2, h, 3h/2, ...: classical fourth-order steps of h."""
    for first, middle, last in zip(matrices[:-1:2], matrices[1::2], matrices[2::2], strict=True):
        k1 = first @ law
        k2 = middle @ (law + h / 2 * k1)
        k3 = middle @ (law + h / 2 * k2)
        k4 = last @ (law + h * k3)
        law = law + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return law


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("absorb", "cedd"),
        ("uniform", "cedd"),
        ("roulette", "sedd"),
        pytest.param("roulette", "bayes", marks=pytest.mark.slow),
        pytest.param("running share", "bayes", marks=pytest.mark.slow),
    ],
)
def test_learned_distribution_solves_reverse_equation(name: str, method: str) -> None:
    process = PROCESSES[name]
    model = random_network(process, L, seed=5, size=0.5)
    # Cut at the kinks, where the steps would lose their order.
    marks = [math.log(math.expm1(max(edge, 1e-12))) for edge in Axis(process).edges]
    law = reference.prior(matching_chain(process, L))
    for low, high in list(itertools.pairwise(marks))[::-1]:
        steps = math.ceil((high - low) * 250)
        law = runge_kutta(
            generators(process, method, model, np.linspace(high, low, 2 * steps + 1)),
            law,
            (high - low) / steps,
        )
    # As t -> 0 the posterior at a mask is proportional to its ratios.
    score, expected = as_score(method, process, model, L), np.zeros((V,) * L)
    for probability, x in zip(law, reference.sequences(process.num_states, L), strict=True):
        rows = [s / s.sum() if token == V else np.eye(V)[token] for s, token in zip(score(x, 1e-12), x, strict=True)]
        expected += probability * np.einsum("a,b->ab", *rows)
    learned = learned_distribution(model, process, L, method=method, sigma_dtype=FLOAT64)
    assert learned.sum() == pytest.approx(1.0, abs=1e-9)
    assert np.abs(learned.numpy() - expected).max() < 1e-8


@pytest.mark.parametrize(("name", "method"), covering(itertools.product(PROCESSES, METHODS)))
def test_tight_bound_exceeds_cross_entropy(name: str, method: str) -> None:
    process = PROCESSES[name]
    model, p0 = random_network(process, L, seed=0), random_data(V, L, seed=10)
    entropy = cedd.exact_cross_entropy(model, process, p0, method=method)
    assert cedd.exact_bound(model, process, p0, method=method) >= entropy
    assert entropy >= reference.entropy(p0.numpy().ravel()) / L


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("roulette", "hybrid") else pytest.mark.slow) for name in PROCESSES]
)
def test_float32_sigma_gives_nearly_same_result(name: str) -> None:
    process = PROCESSES[name]
    model, p0 = random_network(process, L, seed=3), random_data(V, L, seed=4)
    for function in (cedd.exact_bound, cedd.exact_cross_entropy):
        rough = function(model, process, p0, method="bayes")
        assert rough == pytest.approx(function(model, process, p0, method="bayes", sigma_dtype=FLOAT64), abs=1e-6)


def perfect(process: TokenProcess, p0: torch.Tensor):
    """The network that returns the true posterior, as logits."""
    space, flat = Space(process, p0.dim()), p0.reshape(-1)
    place = process.num_states ** torch.arange(p0.dim() - 1, -1, -1)

    def model(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        times, which = torch.unique(sigma, return_inverse=True)
        own = times.double() / float(process.sigma(1.0)) * process.axis.end
        t = process.axis.inverse(own).clamp_min(1e-300)  # at 0 itself data are clean
        return torch.log(space.belief(flat, t).clamp_min(1e-300))[which, (x * place).sum(-1)]

    return model


@pytest.mark.parametrize("name", ["absorb", "uniform", "roulette"])
def test_perfect_network_reaches_entropy_up_to_prior_term(name: str) -> None:
    process = PROCESSES[name]
    p0 = random_data(V, L, seed=2)
    method = cedd.Method("plain", cedd.Denoiser(rescale=False), cedd.METHODS["cedd"].objective)
    bound = cedd.exact_bound(perfect(process, p0), process, p0, method=method, sigma_dtype=FLOAT64)
    chain, flat = matching_chain(process, L), p0.numpy().ravel()
    missing = reference.kl(reference.marginal(chain, flat, 1.0), reference.prior(chain)) / L
    assert bound == pytest.approx(reference.entropy(flat) / L + missing, abs=1e-8)
    learned = cedd.exact_cross_entropy(perfect(process, p0), process, p0, method=method, sigma_dtype=FLOAT64)
    assert reference.entropy(flat) / L <= learned <= bound + 1e-8


# ---- a schedule that does not start at zero ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [cedd.absorb, pytest.param(cedd.uniform, marks=pytest.mark.slow), cedd.roulette])
def test_bound_includes_initial_jump_of_geometric_schedule(make) -> None:
    p0 = random_data(V, L, seed=6)
    for sigma_min in (0.02, 0.3):
        process = make(V, schedule=cedd.Geometric(sigma_min, 9.0))
        model = random_network(process, L, seed=7)
        for method in ("cedd", "bayes"):
            bound = cedd.exact_bound(model, process, p0, method=method, sigma_dtype=FLOAT64)
            assert bound >= cedd.exact_cross_entropy(model, process, p0, method=method, sigma_dtype=FLOAT64)
        method = cedd.Method("plain", cedd.Denoiser(rescale=False), cedd.METHODS["cedd"].objective)
        oracle = perfect(process, p0)
        bound = cedd.exact_bound(oracle, process, p0, method=method, sigma_dtype=FLOAT64)
        entropy = reference.entropy(p0.numpy().ravel()) / L
        # The one step from sigma_min loses the dependence between positions that x_{0+} does not show.
        learned = cedd.exact_cross_entropy(oracle, process, p0, method=method, sigma_dtype=FLOAT64)
        assert entropy - 1e-9 <= learned <= bound + 1e-9
        assert bound - entropy < 0.6 * sigma_min
        assert bound - learned < 0.3 * sigma_min


def test_initial_jump_is_exact_for_one_position() -> None:
    """With L = 1 a perfect posterior loses nothing: the bound is the entropy, except for the prior term."""
    p0 = random_data(3, 1, seed=8)
    method = cedd.Method("plain", cedd.Denoiser(rescale=False), cedd.METHODS["cedd"].objective)
    for make in (cedd.absorb, cedd.uniform, cedd.roulette):
        process = make(3, schedule=cedd.Geometric(0.2, 20.0))
        bound = cedd.exact_bound(perfect(process, p0), process, p0, method=method, sigma_dtype=FLOAT64)
        assert bound == pytest.approx(reference.entropy(p0.numpy()), abs=1e-7)


def test_j1_minus_j2_of_geometric_schedule_is_entropy_gain() -> None:
    process = cedd.roulette(V, 0.7, cedd.Geometric(0.05, 9.0))
    model, p0 = random_network(process, L, seed=9), random_data(V, L, seed=9)
    whole = {"time_floor": 0.0, "sigma_dtype": FLOAT64}
    j1, j2 = (cedd.exact_bound(model, process, p0, method="bayes", bound=b, **whole) for b in ("j1", "j2"))
    start = process.transition_matrix(1e-300)[:, 0]
    gained = process.terminal().conditional_entropy + float(torch.xlogy(start, start).sum())
    assert j1 - j2 == pytest.approx(gained, abs=1e-8)


# ---- flow matching ----------------------------------------------------------------------------------------------


def flow_tables(process: TokenProcess, model, t: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """kappa'/(1-kappa) [K], kappa [K] and the predictions [K, N, L, V] at times t [K]."""
    states = torch.tensor(reference.sequences(V + 1, L))
    sigma = process.sigma(torch.from_numpy(t))
    outputs = model(states.repeat(len(t), 1), sigma.repeat_interleave(len(states)))
    f = torch.softmax(outputs, -1).reshape(len(t), len(states), L, V).numpy()
    kappa = np.exp(-sigma.numpy())
    return process.alpha_rate(torch.from_numpy(t)).numpy() * kappa / (1 - kappa), kappa, f


def corrected(strength: float, start: float, stop: float) -> cedd.Method:
    """dfm with a corrector."""
    dfm = cedd.METHODS["dfm"]
    return replace(dfm, dynamics=dfm.dynamics.with_corrector(cedd.Corrector(strength, start, stop)))


@pytest.mark.parametrize(
    ("schedule", "powers"),
    covering(itertools.product((cedd.LogLinear(), cedd.Polynomial(2.0)), ((0.0, 0.0, 0.0), (1.0, 0.5, 0.5)))),
)
def test_flow_matching_matches_explicit_sums(schedule: cedd.Schedule, powers: tuple[float, float, float]) -> None:
    """The corrector unmasks 1 + b times as fast and remasks at rate b kappa'/kappa."""
    process, p0, method = cedd.absorb(V, schedule), random_data(V, L, seed=1), corrected(*powers)
    model, states = random_network(process, L, seed=1, size=0.5), reference.sequences(V + 1, L)

    def corrector(t: np.ndarray) -> np.ndarray:
        strength, start, stop = powers
        return strength * (1 - t) ** start * t**stop

    # Its bound: KL of the paths down to t = 1e-4, the masks left there, and the prior.
    points, weights = np.polynomial.legendre.leggauss(400)
    log_t = (points - 1) / 2 * math.log(1e4)
    t = np.append(np.exp(log_t), 1e-4)
    rate, kappa, f = flow_tables(process, model, t)
    b, back = corrector(t), rate * (1 - kappa) / kappa
    cost = np.zeros(len(t))
    for x0 in reference.sequences(V, L):
        for k, x in enumerate(states):
            if all(token in (V, clean) for token, clean in zip(x, x0, strict=True)):
                likelihood = np.prod([1 - kappa if token == V else kappa for token in x], axis=0)
                for i in range(L):
                    drawn, elsewhere = -np.log(f[:, k, i, x0[i]]), 1 - f[:, k, i, x0[i]]
                    here = rate * (drawn + b - np.log1p(b)) if x[i] == V else rate * (1 + b) * elsewhere + b * back
                    here[-1] = drawn[-1] if x[i] == V else 0.0
                    cost += float(p0[x0]) * likelihood * here
    path = (cost[:-1] * t[:-1] * weights / 2 * math.log(1e4)).sum()
    expected = (path + cost[-1]) / L + process.terminal().kl
    bound = cedd.exact_bound(model, process, p0, method=method, sigma_dtype=FLOAT64)
    error = 1e-7 if powers[0] else 1e-8  # these sums end at t = 1, where the corrector begins as a root
    assert bound == pytest.approx(expected, abs=error)

    # Its law: every position moves towards the prediction, masked or not, and the corrector's back to the mask.
    steps = 4000
    w = np.linspace(0, math.log(1e-4), 2 * steps + 1)
    rate, kappa, f = flow_tables(process, model, np.exp(w))
    b, back = corrector(np.exp(w)), rate * (1 - kappa) / kappa
    generator = np.zeros((len(w), len(states), len(states)))
    for column, source in enumerate(states):
        for i, y in itertools.product(range(L), range(V + 1)):
            if y != source[i]:
                speed = np.exp(w) * (b * back if y == V else (1 + b) * rate * f[:, column, i, y])
                generator[:, states.index((*source[:i], y, *source[i + 1 :])), column] += speed
                generator[:, column, column] -= speed
    law = runge_kutta(generator, reference.prior(matching_chain(process, L)), -w[-1] / steps)
    expected_law = np.zeros((V,) * L)
    for k, (probability, x) in enumerate(zip(law, states, strict=True)):
        rows = [f[-1, k, i] if token == V else np.eye(V)[token] for i, token in enumerate(x)]
        expected_law += probability * np.einsum("a,b->ab", *rows)
    learned = learned_distribution(model, process, L, method=method, sigma_dtype=FLOAT64)
    assert np.abs(learned.numpy() - expected_law).max() < error
    assert bound >= cedd.exact_cross_entropy(model, process, p0, method=method)


def test_corrector_preserves_marginals_of_perfect_network() -> None:
    """The rates that it adds have p_t as stationary distribution at every t."""
    process, p0, t = cedd.absorb(V), random_data(V, L, seed=2), torch.tensor([0.05, 0.5, 0.95], dtype=FLOAT64)
    space = Space(process, L)
    with_it, without = (
        enumerated(perfect(process, p0), space, method, sigma_dtype=FLOAT64).reverse_rates(t)
        for method in (corrected(3.0, 0.5, 0.5), cedd.METHODS["dfm"])
    )
    law = space.marginal(p0.reshape(-1), t)[..., None]
    torch.testing.assert_close((with_it - without) @ law, torch.zeros_like(law), atol=1e-10, rtol=0)
    assert float(((with_it - without).abs() @ law).min()) > 1e-3, "the test can fail"


# ---- autoregressive, and errors ---------------------------------------------------------------------------------


def test_autoregressive_bound_is_chain_rule() -> None:
    process, p0 = cedd.absorb(V), random_data(V, L, seed=1)
    model = random_network(process, L, seed=1)
    expected = 0.0
    for x0 in reference.sequences(V, L):
        shown = torch.tensor([[V, *x0[:-1]]])
        logits = model(shown, torch.zeros(1))[0]
        expected -= float(p0[x0]) * sum(float(torch.log_softmax(logits[i], -1)[x0[i]]) for i in range(L))
    assert cedd.exact_bound(model, process, p0, method="ar") == pytest.approx(expected / L, abs=1e-12)
    assert cedd.exact_cross_entropy(model, process, p0, method="ar") == pytest.approx(expected / L, abs=1e-12)


def assert_rejected(message: str, process=None, p0=None, **arguments) -> None:
    process = process or cedd.absorb(V)
    p0 = random_data(V, L, seed=0) if p0 is None else p0
    with pytest.raises(ValueError, match=message):
        cedd.exact_bound(random_network(process, L, seed=0), process, p0, **{"method": "cedd", **arguments})


def test_invalid_arguments_are_rejected() -> None:
    assert_rejected("unknown bound 'jj3'; use one of tight, j1, j2", bound="jj3")
    assert_rejected("unknown method", method="nonsense")
    assert_rejected("ar has an exact likelihood and no j1; use bound='tight'", method="ar", bound="j1")
    assert_rejected("dfm has its own bound and no j2", method="dfm", bound="j2")
    assert_rejected("dfm runs from a mask source", process=cedd.uniform(V), method="dfm")
    assert_rejected("shape \\[V\\] \\* L", p0=torch.full((3, 3), 1 / 9, dtype=FLOAT64))
    assert_rejected("sum of one", p0=torch.full((V, V), 0.3, dtype=FLOAT64))
    assert_rejected("no negative entries", p0=torch.tensor([[1.5, -0.5], [0.0, 0.0]], dtype=FLOAT64))
    assert_rejected("cannot be enumerated", p0=torch.full((V,) * 8, V**-8.0, dtype=FLOAT64))
    with pytest.raises(ValueError, match="without a mask column"):
        cedd.exact_bound(
            lambda x, sigma: torch.zeros(*x.shape, V + 1), cedd.absorb(V), random_data(V, L, 0), method="cedd"
        )


def test_bound_is_finite_with_zero_probability_data() -> None:
    process = cedd.roulette(V, 0.7)
    p0 = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=FLOAT64)
    model = random_network(process, L, seed=0)
    bound = cedd.exact_bound(model, process, p0, method="bayes")
    assert math.isfinite(bound)
    assert bound >= cedd.exact_cross_entropy(model, process, p0, method="bayes")


def test_kinks_are_where_rescaling_is_not_smooth() -> None:
    assert edges_of(cedd.uniform(V)) == pytest.approx((0.0, 0.0015, -math.log(1e-3)))
    assert edges_of(cedd.uniform(V), sigma_floor=0.003)[1] == pytest.approx(0.003)
    # Roulette's total sigma is its schedule's divided by p_m.
    assert edges_of(cedd.roulette(V, 0.7))[1] == pytest.approx(0.5 * 0.7)
    assert Denoiser().kinks(cedd.uniform(V)) == (0.0015,)
    assert len(edges_of(cedd.absorb(V))) == 2
