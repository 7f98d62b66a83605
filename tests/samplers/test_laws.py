"""Every sampler draws from its stated law: chi-square tests on enumerable chains, in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import cedd
from cedd.bounds.exact import learned_distribution
from cedd.dynamics import Flow
from cedd.network import AllowedTokens
from cedd.samplers import Corrector, Fixed, grid_sampler, sample, time_grid
from tests.combinations import covering
from tests.samplers.chains import (
    ERROR_RATE,
    METHODS,
    PROCESSES,
    RULE_NAMES,
    HalvedTable,
    Table,
    all_sequences,
    combined,
    continuous_law,
    p_value,
    reveal_law,
    same_law_p_value,
    sampler_law,
    token_law,
)
from tests.samplers.grid_distances import Perfect, data, distance

GRID = list(itertools.product(PROCESSES, METHODS, RULE_NAMES))


def draw_step(model, process, method, rule, x, t, s, seed, **options):
    """x_s drawn from every row of x, by the public function."""
    times = torch.tensor([t, s], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = dict(grid=times, final_denoise=False, x_start=x, generator=generator, **options)
    return sample(model, process, tuple(x.shape), method=method, sampler=rule, **arguments)


def chi_square_of_step(model, process, method, rule, t, s, seed, corrector=None, copies=4000):
    """The p-value of one step from every state of a chain of one position: each state has its own law."""
    x = all_sequences(process, 1)
    outputs = model.outputs(x, process.sigma(t).float().expand(len(x)))
    law = token_law(method, rule, process, outputs, x, t, s, corrector)[:, 0]
    drawn = draw_step(model, process, method, rule, x.repeat_interleave(copies, 0), t, s, seed, corrector=corrector)
    drawn = drawn.view(len(x), copies).numpy()
    values = [p_value(np.bincount(drawn[i], minlength=law.shape[1]), law[i]) for i in range(len(x))]
    return combined(values)


@pytest.mark.parametrize(
    ("process", "method", "rule", "t", "s"),
    covering(((*row, *times) for row in GRID for times in ((0.7, 0.5), (0.08, 0.0))), values=2),
)
def test_one_step_follows_its_law(process, method, rule, t, s):
    made = PROCESSES[process](4)
    if s == 0.0 and rule != "analytic":
        s = 0.02  # the step to clean data is the analytic one, whatever the rule
    assert chi_square_of_step(Table(made, 1, seed=3), made, method, rule, t, s, seed=5) > ERROR_RATE


@pytest.mark.parametrize(
    ("rule", "corrector", "t", "s"),
    covering(
        (rule, corrector, *times)
        for rule in RULE_NAMES
        for corrector in (None, Corrector(), Corrector(4.0, 1.0, 0.3))
        for times in ((0.7, 0.5), (0.2, 0.15))
    ),
)
def test_one_flow_matching_step_follows_its_law(rule, corrector, t, s):
    process = cedd.absorb(4, cedd.Polynomial(power=2.0))
    model = Table(process, 1, seed=4)
    assert chi_square_of_step(model, process, "dfm", rule, t, s, seed=6, corrector=corrector) > ERROR_RATE


@pytest.mark.parametrize(("process", "method"), covering(itertools.product(PROCESSES, ("cedd-star", "bayes"))))
def test_one_step_with_sharpening_follows_its_law(process, method):
    """p(z | x) = sum_h f_h p(x|z) p(z|h) / p(x|h), with the temperature, a top-p and an excluded token at once.

    f is p(x_0 | x), of bayes by the likelihood of x; jumps to the excluded token are shared by the others."""
    made, t, s, temperature, top_p, excluded = PROCESSES[process](4), 0.7, 0.5, 1.5, 0.75, 2
    model, x, copies = Table(made, 1, seed=3), all_sequences(made, 1), 4000
    now, later, step = (made.transition_matrix(*times).numpy() for times in ((t,), (s,), (t, s)))
    beliefs = torch.softmax(model.outputs(x, made.sigma(t).float().expand(len(x))), -1)[:, 0].numpy()
    sharpening = {"temperature": temperature, "top_p": top_p, "exclude": [excluded]}
    drawn = draw_step(model, made, method, "analytic", x.repeat_interleave(copies, 0), t, s, seed=5, **sharpening)
    values = []
    for here, f in enumerate(beliefs):
        if here == excluded or (here < 4 and not made.can_shuffle):
            continue
        f = (f * now[here, :4] if method == "bayes" else f) * (np.arange(4) != excluded)
        f = f ** (1 / temperature)
        f, order = f / f.sum(), np.argsort(-f)
        f[order[1 + np.searchsorted(f[order].cumsum(), top_p) :]] = 0
        law = step[here] * (later[:, :4] @ (f / f.sum() / now[here, :4]))
        stay, law[here], law[excluded] = law[here], 0, 0
        law *= (1 - stay) / law.sum()
        law[here] = stay
        values.append(p_value(np.bincount(drawn.view(len(x), copies)[here], minlength=len(law)), law))
    assert combined(values) > ERROR_RATE


def test_wrong_law_is_detected():
    """Shows that the tests above can fail: the same draws against the law of a step one sixth shorter."""
    process = PROCESSES["roulette"](4)
    model, x = Table(process, 1, seed=3), all_sequences(PROCESSES["roulette"](4), 1).repeat_interleave(4000, 0)
    drawn = draw_step(model, process, "bayes", "analytic", x, 0.7, 0.5, seed=5).view(5, 4000).numpy()
    outputs = model.outputs(x[::4000], process.sigma(0.7).float().expand(5))
    law = token_law("bayes", "analytic", process, outputs, x[::4000], 0.7, 0.535)[:, 0]
    values = [p_value(np.bincount(drawn[i], minlength=5), law[i]) for i in range(5)]
    assert combined(values) < ERROR_RATE


@pytest.mark.parametrize("rule", ["remask-capped", "remask-rescaled"])
@pytest.mark.parametrize("method", ["cedd", "bayes"])
def test_remasking_follows_its_law(rule, method):
    """Early and late steps, a trajectory of ten steps, and the mask fraction of the process."""
    process = cedd.absorb(4)
    for t, s in ((0.9, 0.6), (0.03, 0.01)):
        assert chi_square_of_step(Table(process, 1, seed=3), process, method, rule, t, s, seed=5) > ERROR_RATE
    small = cedd.absorb(3)
    model, times = HalvedTable(small, 2, seed=1), time_grid(small, 10)
    generator = torch.Generator().manual_seed(11)
    drawn = sample(model, small, (20000, 2), method=method, sampler=rule, steps=10, generator=generator)
    assert p_value(model.counts(drawn), sampler_law(model, method, rule, small, times)) > ERROR_RATE
    half = sampler_law(model, method, rule, small, times[:6])  # t = 0.5
    masks = (all_sequences(small, 2) == 3).double().mean(-1).numpy() @ half
    assert masks == pytest.approx(float(small.kernel(float(times[5])).a), abs=1e-12)


# ---- whole trajectories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("process", "method", "rule", "kind"),
    covering(
        (p, m, r, Table if m == "cedd" else HalvedTable)
        for p, m, r in GRID
        if r != "tau-leaping" and m in ("sedd", "cedd", "bayes")
    ),
)
def test_whole_trajectory_follows_its_law(process, method, rule, kind):
    """From the prior through seven steps and the denoising one: against the product of the steps' kernels."""
    made = PROCESSES[process](3)
    model = kind(made, 2, seed=1)
    generator = torch.Generator().manual_seed(11)
    drawn = sample(model, made, (12000, 2), method=method, sampler=rule, steps=7, generator=generator)
    assert p_value(model.counts(drawn), sampler_law(model, method, rule, made, time_grid(made, 7))) > ERROR_RATE


@pytest.mark.parametrize(
    ("process", "method", "rule"),
    covering(row for row in GRID if row[1] in ("sedd", "bayes") and row[2] != "tau-leaping"),
)
def test_whole_trajectory_with_allowed_tokens_follows_its_law(process, method, rule):
    """At the first of two positions: the chain of a network that gives the other tokens probability 0 there."""
    made, possible = PROCESSES[process](3), torch.tensor([True, False, True])
    model, told = HalvedTable(made, 2, seed=1), Table(made, 2, seed=1)
    told.level[:, 0] = told.level[:, 0].where(possible, -torch.inf)
    # Ratios are limited near t = 0, which leaves some noise that is not part of this chain.
    ends = {"final_denoise": True, "grid": time_grid(made, 7, end=0.05, final_denoise=False)}
    free, generator = torch.zeros(2, dtype=torch.int64), torch.Generator().manual_seed(11)
    held = Fixed(free, free.bool(), AllowedTokens(torch.tensor([True, False]), possible))
    drawn = sample(model, made, (12000, 2), method=method, sampler=rule, constraint=held, generator=generator, **ends)
    times = time_grid(made, 7, **ends)
    assert p_value(model.counts(drawn), sampler_law(told, method, rule, made, times, first=possible)) > ERROR_RATE


@pytest.mark.parametrize(
    ("kind", "rule", "corrector"),
    covering(itertools.product((Table, HalvedTable), ("analytic", "euler"), (None, Corrector(2.0)))),
)
def test_whole_flow_matching_trajectory_follows_its_law(rule, corrector, kind):
    process = cedd.absorb(3, cedd.Polynomial(power=2.0))
    model = kind(process, 2, seed=2)
    generator = torch.Generator().manual_seed(12)
    drawn = sample(
        model, process, (20000, 2), method="dfm", sampler=rule, steps=7, generator=generator, corrector=corrector
    )
    law = sampler_law(model, "dfm", rule, process, time_grid(process, 7, "flow", end=Flow.stop), corrector)
    assert p_value(model.counts(drawn), law) > ERROR_RATE


@pytest.mark.parametrize("process", PROCESSES)
def test_dense_and_jump_first_agree(process, monkeypatch):
    """The same chain, drawn by whole laws over the n states: two samples of one law (two-sample chi-square)."""
    made = PROCESSES[process](3)
    model = Table(made, 2, seed=8)
    tables = []
    for dense in (False, True):
        monkeypatch.setattr(grid_sampler.GridRun, "is_dense", dense)
        generator = torch.Generator().manual_seed(13 + dense)
        drawn = sample(model, made, (15000, 2), method="bayes", steps=5, generator=generator)
        tables.append(model.counts(drawn))
        monkeypatch.undo()
    assert same_law_p_value(*tables) > ERROR_RATE


@pytest.mark.parametrize(("process", "method"), covering(itertools.product(PROCESSES, METHODS)))
def test_many_steps_approach_continuous_process(process, method):
    """The law of the analytic sampler (kernels only, no draws) converges to that of the learned reverse process.

    Between t = 0.9 and 0.1, where an arbitrary network's rates are bounded.
    """
    made = PROCESSES[process](2)
    model = Table(made, 2, seed=7, size=0.5)
    exact = continuous_law(model, method, made, 0.9, 0.1)
    distance = []
    for steps in (12, 48):
        times = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        distance.append(np.abs(sampler_law(model, method, "analytic", made, times) - exact).sum() / 2)
    assert distance[1] < 0.03
    assert distance[1] < distance[0] / 2.5 or distance[0] < 1e-6


# ---- default grids --------------------------------------------------------------------------------------------------


def default_times(model, process, method, steps):
    """The times at which `sample` steps if no grid is given."""
    times: list[float] = []
    sample(model, process, (1, model.length), method=method, steps=steps, callback=lambda k, t, x: times.append(t))
    return torch.tensor(times, dtype=torch.float64)


@pytest.mark.parametrize("p_u", [0.1, 0.99])
def test_perfect_network_on_hybrid_reproduces_data(p_u):
    """Total variation from the data over 32 steps: 0.01 at most, where equal steps in time, down to t = 1e-5, are an
    order of magnitude off at p_u = 0.99 (noise rises like the root of t)."""
    process = cedd.hybrid(3, p_u=p_u)
    model = Perfect(process, data())
    times = default_times(model, process, "bayes", 32)
    assert float(process.sigma(times[-2])) <= 1.0001e-4
    assert distance(process, times) < 0.01
    even = distance(process, time_grid(process, 32, "uniform", end=1e-5))
    assert even > (0.1 if p_u == 0.99 else 1.2 * distance(process, times))


@pytest.mark.parametrize("copies", [0.0, 4.0], ids=["rough", "copying"])
def test_default_flow_matching_grid_is_close_to_process_of_bound(copies):
    """Total variation over 64 steps; equal steps in time are three times as far or more. A network that mostly copies
    what it sees redraws few tokens, and still needs steps near t = 0."""
    process = cedd.absorb(3)
    model = Table(process, 2, seed=2)
    model.level += copies * torch.nn.functional.one_hot(all_sequences(process, 2), 4)[..., :3]
    exact = learned_distribution(model, process, 2, method="dfm").numpy().flatten()

    def distance(times):
        law = sampler_law(model, "dfm", "analytic", process, times).reshape(4, 4)[:3, :3].flatten()
        return np.abs(law - exact).sum() / 2

    times = default_times(model, process, "dfm", 64)
    assert distance(times) < 0.05
    assert distance(time_grid(process, 64, "uniform", end=Flow.stop)) > 3 * distance(times)


# ---- first-hitting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "kind"),
    covering(itertools.product((cedd.LogLinear(), cedd.Cosine(), cedd.Geometric(0.5, 8.0)), (Table, HalvedTable))),
)
def test_first_hitting_matches_continuous_process(kind, schedule):
    """Compared with the integral over reveal times: there is no discretization error to detect.

    With sigma(0) > 0 the masks that are left at 0+ are drawn at once, as in the process of the bound."""
    process = cedd.absorb(3, schedule)
    model = kind(process, 2, seed=5)
    exact = reveal_law(model, process)
    described = learned_distribution(Table(process, 2, seed=5), process, 2, method="cedd").numpy().ravel()
    np.testing.assert_allclose(exact, described, atol=2e-6)
    generator = torch.Generator().manual_seed(21)
    drawn = sample(model, process, (60000, 2), method="cedd", sampler="first-hitting", generator=generator)
    assert len(model.calls) <= 2 + process.jumps_at_zero
    observed = np.bincount((drawn[:, 0] * 3 + drawn[:, 1]).numpy(), minlength=9)
    assert p_value(observed, exact) > ERROR_RATE


def test_single_step_differs_from_continuous_process():
    """Shows that the test above can fail: a coarse sampler on the same chain is far from the integral."""
    process = cedd.absorb(3)
    model = Table(process, 2, seed=5)
    exact = reveal_law(model, process)
    generator = torch.Generator().manual_seed(21)
    drawn = sample(model, process, (60000, 2), method="cedd", steps=1, generator=generator)
    observed = np.bincount((drawn[:, 0] * 3 + drawn[:, 1]).numpy(), minlength=9)
    assert p_value(observed, exact) < ERROR_RATE


def test_first_hitting_from_partially_masked_start():
    """From t_start < 1 with some tokens known: the masked one follows f of what is there."""
    process = cedd.absorb(3)
    model = HalvedTable(process, 2, seed=5)
    model.sway.zero_()
    x = torch.tensor([[3, 1]]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(3)
    drawn = sample(
        model, process, (20000, 2), method="cedd", sampler="first-hitting", x_start=x, t_start=0.4, generator=generator
    )
    assert (drawn[:, 1] == 1).all()
    law = torch.softmax(model.outputs(x[:1], torch.zeros(1)), -1)[0, 0].numpy()
    assert p_value(np.bincount(drawn[:, 0].numpy(), minlength=3), law) > ERROR_RATE


# ---- autoregressive -------------------------------------------------------------------------------------------------


def test_autoregressive_samples_follow_product_of_conditionals():
    process = cedd.absorb(3)
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(3, generator=generator).double(), torch.randn(3, 3, generator=generator).double()

    def model(x, sigma):
        after_start = first.expand(len(x), 3)
        after_token = second[x[:, 1].clamp_max(2)]
        return torch.stack([after_start, after_token], 1)

    drawn = sample(model, process, (20000, 2), method="ar", generator=generator)
    law = (torch.softmax(first, 0)[:, None] * torch.softmax(second, 1)).flatten().numpy()
    assert p_value(np.bincount((drawn[:, 0] * 3 + drawn[:, 1]).numpy(), minlength=9), law) > ERROR_RATE


def test_flow_matching_bound_matches_samples():
    """The network is uninformative below sigma = 2e-5, where neither the bound nor the sampler calls it."""
    process, p0 = cedd.absorb(3), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)

    def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        copied = 40.0 * torch.nn.functional.one_hot(x_t.clamp_max(2), 3).double()
        knows = torch.where((x_t == 3)[..., None], p0.log(), copied)
        return torch.where((sigma < 2e-5)[:, None, None], torch.zeros(3, dtype=torch.float64), knows)

    drawn = sample(model, process, (20000, 1), method="dfm", steps=32, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(drawn.flatten(), minlength=3).numpy()
    assert p_value(counts, learned_distribution(model, process, 1, method="dfm").numpy()) > ERROR_RATE
    bound = cedd.exact_bound(model, process, p0, method="dfm")
    cross_entropy = -float((p0 * torch.from_numpy(counts / counts.sum()).log()).sum())
    assert cross_entropy < bound + 0.01


def test_scaled_scores_stop_where_bound_stops():
    """The last step is the one that the bound includes, which `test_one_step_follows_its_law` compares with its law."""
    process, method = cedd.uniform(3), cedd.METHODS["sedds"].with_stop(0.05)
    times: list[float] = []
    sample(Table(process, 1, seed=1), process, (1, 1), method=method, steps=4, callback=lambda k, t, x: times.append(t))
    assert times[-2:] == [0.05, 0.0]
