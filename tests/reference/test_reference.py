"""The reference against itself: quantities computed in two ways must agree, and the theorems must hold."""

import math
from functools import cache

import numpy as np
import pytest

from tests.reference import (
    Chain,
    Integrand,
    absorb_chain,
    bayes_posterior,
    bayes_scores,
    bregman,
    conditional,
    conditional_loss_integral,
    conditional_terminal_entropy,
    conditional_terminal_kl,
    conditionals,
    constant_k,
    cross_entropy,
    denoiser_scores,
    entropy,
    eroulette_chain,
    exact_cross_entropy,
    generalised_kl,
    integrand,
    integrate,
    j1_integral,
    j2_integral,
    kl,
    learned_data,
    learned_marginal,
    leave_one_out,
    log_linear,
    loss_integral,
    marginal,
    out_rate_integral,
    path_kl,
    posterior,
    prior,
    product_transition,
    random_data,
    random_score,
    rate_matrix,
    reverse_rate_matrix,
    reverse_transition,
    roulette_chain,
    scaled_shift,
    score_entropy,
    sequence_rate_matrix,
    sequence_transition,
    theorem_1,
    theorem_2,
    theorem_3,
    theorem_4,
    tight_bound,
    token_reverse_from_belief,
    token_reverse_from_posterior,
    transition,
    transition_at_clocks,
    transition_by_ode,
    true_score,
    uniform_chain,
)
from tests.reference.chain import Array

EPS = 1e-3
CHAINS = {
    "absorb": absorb_chain(3, 2),
    "uniform": uniform_chain(3, 2),
    "roulette": roulette_chain(3, 2, p_m=0.7),
    "eroulette": eroulette_chain(3, 2, p_m=lambda t: 0.3 + 0.5 * t, p_m_rate=lambda t: 0.5),
}
TIMES = (1e-9, 0.2, 0.75, 1.0)


@pytest.fixture(params=CHAINS)
def chain(request: pytest.FixtureRequest) -> Chain:
    return CHAINS[request.param]


by_default_on_roulette = pytest.mark.parametrize(
    "chain",
    [name if name == "roulette" else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS],
    indirect=True,
)
"""For integrals over all times: roulette both masks and shuffles tokens."""


@pytest.fixture
def generator() -> np.random.Generator:
    return np.random.default_rng(20240613)


# ---- the forward process ------------------------------------------------------------------------------------


def test_rates_are_derivatives_of_clocks(chain: Chain) -> None:
    for t in (0.1, 0.5, 0.9):
        step = 1e-6
        for clock, rate in ((chain.alpha, chain.alpha_rate), (chain.beta, chain.beta_rate)):
            assert (clock(t + step) - clock(t - step)) / (2 * step) == pytest.approx(rate(t), abs=1e-7)
            assert clock(0.0) == 0
            assert rate(t) >= 0


def test_columns_sum_to_zero_for_rates_and_one_for_transitions(chain: Chain) -> None:
    for t in TIMES:
        assert np.abs(rate_matrix(chain, t).sum(axis=0)).max() < 1e-12
        assert np.abs(sequence_rate_matrix(chain, t).sum(axis=0)).max() < 1e-11
        assert np.abs(transition(chain, t).sum(axis=0) - 1).max() < 1e-13
        assert transition(chain, t).min() >= 0


@pytest.mark.parametrize(("t", "s"), [(0.5, 0.0), (0.9, 0.2), (1.0, 0.0)])
def test_matrix_exponential_of_clocks_solves_the_ode(chain: Chain, t: float, s: float) -> None:
    assert np.abs(transition(chain, t, s) - transition_by_ode(chain, t, s)).max() < 1e-10


def test_positions_move_independently(chain: Chain) -> None:
    assert np.abs(sequence_transition(chain, 0.9, 0.2) - product_transition(chain, 0.9, 0.2)).max() < 1e-12


def test_transitions_compose_and_negative_clocks_invert(chain: Chain) -> None:
    assert np.abs(transition(chain, 0.8, 0.3) @ transition(chain, 0.3) - transition(chain, 0.8)).max() < 1e-13
    alpha, beta = chain.alpha(0.8), chain.beta(0.8)
    inverse = transition_at_clocks(chain.vocab_size, chain.has_mask, -alpha, -beta)
    assert np.abs(inverse @ transition(chain, 0.8) - np.eye(chain.num_states)).max() < 1e-12


def test_small_times_keep_their_relative_accuracy() -> None:
    """At t = 1e-17 a token has been redrawn with probability t; the entry must not be lost to rounding next to 1."""
    t = 1e-17
    assert transition(uniform_chain(4, 1), t)[0, 1] == pytest.approx((1 - EPS) * t / 4, rel=1e-9)
    assert transition(absorb_chain(4, 1), t)[4, 1] == pytest.approx((1 - EPS) * t, rel=1e-9)


def test_state_space_too_large_to_enumerate_is_rejected() -> None:
    with pytest.raises(ValueError, match="enumerates"):
        absorb_chain(9, 2)


# ---- ratios, beliefs, reverse steps -------------------------------------------------------------------------


def test_marginals_are_distributions_and_start_at_data(chain: Chain, generator: np.random.Generator) -> None:
    p0 = random_data(chain, generator)
    for t in TIMES:
        assert marginal(chain, p0, t).sum() == pytest.approx(1, abs=1e-13)
        alone = [conditional(chain, x0, t) for x0 in chain.clean]
        assert conditionals(chain, t) == pytest.approx(np.array(alone), abs=1e-15)
        by_sequence = sum(p * law for p, law in zip(p0, alone, strict=True))
        assert marginal(chain, p0, t) == pytest.approx(by_sequence, abs=1e-15)
    start = marginal(chain, p0, 0.0)
    assert [start[chain.place[x0]] for x0 in chain.clean] == pytest.approx(list(p0), abs=1e-15)
    assert prior(chain).sum() == pytest.approx(1, abs=1e-13)


def test_posterior_and_leave_one_out_give_true_ratios(chain: Chain, generator: np.random.Generator) -> None:
    """Equation (reparam_c_to_s) with the true posterior, and Bayes' rule with the true belief."""
    p0 = random_data(chain, generator)
    t = 0.6
    score, matrix = true_score(chain, p0), transition(chain, t)
    for x in chain.states:
        f, g = posterior(chain, p0, x, t), leave_one_out(chain, p0, x, t)
        for i in range(chain.length):
            assert bayes_posterior(matrix, g[i], x[i]) == pytest.approx(f[i], abs=1e-12)
            assert bayes_scores(matrix, g[i], x[i]) == pytest.approx(score(x, t)[i], rel=1e-11)
            # An unmasked token of absorb is certain, so its ratio from the posterior sees only h = x.
            if (matrix[x[i], : chain.vocab_size] > 0).all():
                assert denoiser_scores(matrix, f[i], x[i]) == pytest.approx(score(x, t)[i], rel=1e-11)


def test_scaled_shift_matches_score_of_uniform_posterior() -> None:
    chain = CHAINS["roulette"]
    matrix, even = transition(chain, 0.4), np.full(3, 1 / 3)
    for x in range(chain.num_states):
        assert scaled_shift(matrix, 3, x) == pytest.approx(np.log(denoiser_scores(matrix, even, x)), rel=1e-12)


def test_reverse_transition_maps_marginals_back(chain: Chain, generator: np.random.Generator) -> None:
    p0 = random_data(chain, generator)
    back = reverse_transition(chain, p0, 0.8, 0.3)
    assert back.sum(axis=0) == pytest.approx(np.ones(len(chain.states)), abs=1e-12)
    assert back @ marginal(chain, p0, 0.8) == pytest.approx(marginal(chain, p0, 0.3), abs=1e-13)


def test_short_reverse_step_matches_reverse_rate(chain: Chain, generator: np.random.Generator) -> None:
    p0 = random_data(chain, generator)
    t, step = 0.5, 1e-6
    back = reverse_transition(chain, p0, t, t - step)
    slope = (back - np.eye(len(chain.states))) / step
    assert np.abs(slope - reverse_rate_matrix(chain, true_score(chain, p0), t)).max() < 1e-4


def test_token_reverse_steps_match_sequence_reverse_for_length_one(generator: np.random.Generator) -> None:
    """With L = 1 the leave-one-out belief is p0 itself, so all three forms are the same matrix."""
    for chain in (absorb_chain(4, 1), uniform_chain(4, 1), roulette_chain(4, 1, p_m=0.6)):
        p0 = random_data(chain, generator)
        back = reverse_transition(chain, p0, 0.8, 0.3)
        for x in range(chain.num_states):
            f = posterior(chain, p0, (x,), 0.8)[0]
            assert token_reverse_from_belief(chain, p0, x, 0.8, 0.3) == pytest.approx(back[:, x], abs=1e-13)
            assert token_reverse_from_posterior(chain, f, x, 0.8, 0.3) == pytest.approx(back[:, x], abs=1e-13)


# ---- information and quadrature -----------------------------------------------------------------------------


def test_bregman_matches_generalised_kl_and_vanishes_only_on_diagonal() -> None:
    for a in (1e-6, 0.3, 1.0, 20.0):
        assert bregman(a, a) == pytest.approx(0, abs=1e-14)
        for b in (1e-6, 0.31, 1.1, 20.5):
            assert bregman(a, b) == pytest.approx(generalised_kl([a], [b]), rel=1e-12)
            assert (bregman(a, b) > 0) == (a != b)
    assert bregman(0.0, 2.0) == 2.0
    assert constant_k(0.0) == 0.0
    assert math.isinf(bregman(1.0, 0.0))


@pytest.mark.parametrize("eps", [1e-1, 1e-3, 1e-6])
def test_quadrature_is_accurate_at_both_ends(eps: float) -> None:
    sigma, rate = log_linear(eps)
    assert integrate(rate) == pytest.approx(sigma(1.0), rel=1e-10)
    assert integrate(lambda t: -math.log(t)) == pytest.approx(1, rel=1e-12)
    assert integrate(lambda t: max(t - 0.3, 0), breaks=(0.3,)) == pytest.approx(0.245, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("absorb", 2 * (1 - EPS)),
        ("uniform", 2 * (1 - 1 / 3) * -math.log(EPS)),
        ("roulette", (1 - 0.3 / 3) * 2 / 0.7 * (1 - EPS)),
    ],
)
def test_out_rate_integral_matches_paper(name: str, expected: float, generator: np.random.Generator) -> None:
    """Proposition 6 (with its sign reversed), L = 2, V = 3."""
    chain = CHAINS[name]
    assert out_rate_integral(chain, random_data(chain, generator)) == pytest.approx(expected, rel=1e-10)


# ---- the learned process and the theorems -------------------------------------------------------------------


@by_default_on_roulette
def test_true_score_recovers_the_data(chain: Chain, generator: np.random.Generator) -> None:
    p0 = random_data(chain, generator)
    score, end = true_score(chain, p0), marginal(chain, p0, 1.0)
    assert learned_data(chain, score, end) == pytest.approx(p0, abs=1e-11)
    assert learned_marginal(chain, score, end, t=0.4) == pytest.approx(marginal(chain, p0, 0.4), abs=1e-11)
    assert exact_cross_entropy(chain, p0, score, end) == pytest.approx(entropy(p0), abs=1e-10)


@by_default_on_roulette
def test_path_kl_vanishes_only_for_equal_rates(chain: Chain, generator: np.random.Generator) -> None:
    p0 = random_data(chain, generator)
    score = true_score(chain, p0)
    assert path_kl(chain, p0, score) == pytest.approx(0, abs=1e-12)
    assert path_kl(chain, p0, lambda x, t: 1.01 * score(x, t)) > 1e-6


@by_default_on_roulette
def test_theorem_1_with_random_scores(chain: Chain, generator: np.random.Generator) -> None:
    p0, score = random_data(chain, generator), random_score(chain, generator, size=0.5)
    sides = theorem_1(chain, p0, score)
    assert sides.left > 0
    assert sides.slack > 0
    integral = sides.right - kl(marginal(chain, p0, 1.0), prior(chain))
    assert integral == pytest.approx(path_kl(chain, p0, score), rel=1e-9)


@by_default_on_roulette
def test_theorem_1_is_tight_for_the_score_of_another_data_set(chain: Chain, generator: np.random.Generator) -> None:
    """Two data sets under one forward process: the path-space KL is the KL of the data, by the chain rule."""
    p0, other = random_data(chain, generator), random_data(chain, generator)
    sides = theorem_1(chain, p0, true_score(chain, other), marginal(chain, other, 1.0))
    assert sides.left == pytest.approx(kl(p0, other), abs=1e-10)
    assert sides.slack == pytest.approx(0, abs=1e-9)


@by_default_on_roulette
def test_theorem_2_with_random_scores(chain: Chain, generator: np.random.Generator) -> None:
    score = random_score(chain, generator, size=0.5)
    for x0 in ((0, 0), (2, 1)):
        assert theorem_2(chain, x0, score).slack > 0


def test_theorem_3_gives_the_entropy_of_the_data(chain: Chain, generator: np.random.Generator) -> None:
    assert theorem_3(chain, random_data(chain, generator)).slack == pytest.approx(0, abs=1e-10)


@by_default_on_roulette
def test_theorem_4_has_the_slack_of_theorem_1(chain: Chain, generator: np.random.Generator) -> None:
    p0, score = random_data(chain, generator), random_score(chain, generator, size=0.5)
    fourth = theorem_4(chain, p0, score)
    assert fourth.slack > 0
    assert fourth.slack == pytest.approx(theorem_1(chain, p0, score).slack, rel=1e-8)


@by_default_on_roulette
def test_j1_and_j2_agree_with_terminal_terms(chain: Chain, generator: np.random.Generator) -> None:
    p0, score = random_data(chain, generator), random_score(chain, generator, size=0.5)
    sides = tight_bound(chain, p0, score)
    assert sides.slack == pytest.approx(0, abs=1e-9)
    assert sides.left > exact_cross_entropy(chain, p0, score)


@by_default_on_roulette
def test_paper_j1_and_j2_differ_by_a_constant(chain: Chain, generator: np.random.Generator) -> None:
    """The paper drops E KL(p_{1|0} || p_r) from one and writes H(p_r) for H(p_1, p_r) in the other."""
    p0 = random_data(chain, generator)
    dropped = cross_entropy(marginal(chain, p0, 1.0), prior(chain)) - conditional_terminal_kl(chain, p0)
    assert dropped == pytest.approx(conditional_terminal_entropy(chain, p0), abs=1e-12)
    leaving = out_rate_integral(chain, p0)
    for score in (random_score(chain, generator, size=0.5), true_score(chain, p0)):
        j1_part, j2_part = j1_integral(chain, p0, score), j2_integral(chain, p0, score)
        assert j1_part - j2_part + leaving == pytest.approx(dropped, abs=1e-9)


@by_default_on_roulette
def test_score_entropy_may_use_conditional_ratios(chain: Chain, generator: np.random.Generator) -> None:
    """l-bar is linear in the ratio, so its mean is the same for p(y|x0)/p(x|x0) as for p_t(y)/p_t(x); l's is not."""
    p0, score = random_data(chain, generator), random_score(chain, generator, size=0.5)
    true = loss_integral(chain, p0, score, score_entropy)
    assert conditional_loss_integral(chain, p0, score, score_entropy) == pytest.approx(true, rel=1e-10)
    gap = conditional_loss_integral(chain, p0, score, bregman) - loss_integral(chain, p0, score, bregman)
    assert gap > 1e-3


@by_default_on_roulette
def test_integrand_by_position_averages_to_integrals(chain: Chain, generator: np.random.Generator) -> None:
    score, x0 = random_score(chain, generator, size=0.5), (2, 0)

    @cache
    def means(t: float) -> Array:
        """The means of the three parts."""
        return np.sum(
            [
                probability * np.array(integrand(chain, x0, x, t, score(x, t))).sum(-1)
                for probability, x in zip(conditional(chain, x0, t), chain.states, strict=True)
                if probability > 0
            ],
            axis=0,
        )

    alone = np.array([float(clean == x0) for clean in chain.clean])
    for part, whole in (
        ("score_entropy", loss_integral(chain, alone, score, score_entropy)),
        ("constant", loss_integral(chain, alone, score, lambda r, _: constant_k(r))),
        ("out_rate", out_rate_integral(chain, alone)),
    ):
        place = Integrand._fields.index(part)
        assert integrate(lambda t, place=place: float(means(t)[place])) == pytest.approx(whole, rel=1e-8)
