"""Sampler guarantees besides their law: constraints, cost, reproducibility, tails, grids, and clear errors."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import cedd
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import AllowedTokens, Capabilities
from cedd.samplers import GRIDS, Corrector, Fixed, Sharpening, default_steps, inverse_cdf, prompt, sample, time_grid
from cedd.samplers.choice import check_excluded
from cedd.samplers.grids import last_time
from tests.combinations import covering
from tests.samplers.chains import ERROR_RATE, PROCESSES, HalvedTable, Table, p_value, same_law_p_value

COMBINATIONS = [
    (process, method, sampler)
    for process in PROCESSES
    for method in ("sedd", "cedd", "bayes")
    for sampler in ("analytic", "euler")
] + [("absorb", "cedd", "first-hitting"), ("absorb", "dfm", "first-hitting"), ("absorb", "dfm", "euler")]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- constraints ----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    combination=st.sampled_from(COMBINATIONS),
    where=st.lists(st.booleans(), min_size=3, max_size=3),
    tokens=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    halved=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_fixed_positions_hold_at_every_step(combination, where, tokens, halved, seed):
    process, method, sampler = combination
    made = PROCESSES[process](4)
    model = (HalvedTable if halved else Table)(made, 3, seed=seed)
    fixed = Fixed(torch.tensor(tokens), torch.tensor(where))
    seen = []
    options = {"method": method, "sampler": sampler, "steps": 4, "constraint": fixed, "generator": seeded(seed)}
    x = sample(model, made, (5, 3), callback=lambda k, t, x: seen.append((k, t, x.clone())), **options)
    assert torch.equal(seen[-1][2], x)
    assert x.max() < 4
    for _, _, state in seen:
        assert torch.equal(state[:, fixed.where], fixed.tokens[fixed.where].expand(5, -1))
    assert [k for k, _, _ in seen] == list(range(len(seen)))
    assert all(earlier[1] >= later[1] for earlier, later in itertools.pairwise(seen))


@pytest.mark.parametrize(
    ("process", "method", "sampler", "temperature"),
    covering((*combination, temperature) for combination in COMBINATIONS for temperature in (1.0, 0.7)),
)
def test_excluded_tokens_never_appear(process, method, sampler, temperature):
    """Neither in the noise nor in the samples; fixed tokens may include them."""
    made = PROCESSES[process](4)
    fixed = Fixed(torch.tensor([1, 0, 0]), torch.tensor([True, False, False]))
    seen = []
    options = {"method": method, "sampler": sampler, "steps": 4, "constraint": fixed, "temperature": temperature}
    sample(
        HalvedTable(made, 3), made, (200, 3), exclude=(3, 1), generator=seeded(),
        callback=lambda k, t, x: seen.append(x.clone()), **options,
    )  # fmt: skip
    drawn = torch.stack(seen)[..., 1:]
    assert set(drawn.unique().tolist()) <= {0, 2, 4}
    assert {0, 2} <= set(drawn[-1].unique().tolist())


def test_probability_of_excluded_tokens_is_redistributed():
    process = cedd.absorb(5)
    model = HalvedTable(process, 1, seed=3)
    drawn = sample(
        model, process, (4000, 1), method="cedd", sampler="first-hitting", exclude=[2], generator=seeded(),
        t_start=1.0, x_start=torch.full((4000, 1), 5),
    )  # fmt: skip
    seen = np.bincount(drawn.flatten().numpy(), minlength=5)
    assert seen[2] == 0
    weights = torch.zeros(5, dtype=torch.float64)
    times = torch.linspace(0.0005, 0.9995, 1000, dtype=torch.float64)  # the reveal time is uniform on this schedule
    for t in times.tolist():
        outputs = model.outputs(torch.tensor([[5]]), process.sigma(t)[None])[0, 0]
        weights += torch.softmax(outputs.index_fill(0, torch.tensor([2]), -torch.inf), 0) / 1000
    assert stats.chisquare(seen[[0, 1, 3, 4]], 4000 * weights[[0, 1, 3, 4]].numpy()).pvalue > ERROR_RATE


@pytest.mark.parametrize("sampler", ["analytic", "tau-leaping"])
def test_exclusion_does_not_change_reveal_rate(sampler):
    """A network with the true ratios draws the same as one with the true probabilities."""
    process, p0 = cedd.absorb(3), torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)

    def ratios(x, sigma):
        return (p0 / torch.expm1(sigma.double())[:, None]).log()[:, None].expand(*x.shape, 3)

    def beliefs(x, sigma):
        return p0.log().expand(*x.shape, 3)

    grid, options = torch.tensor([0.7, 0.4], dtype=torch.float64), {"sampler": sampler, "exclude": [1]}
    options |= {"grid": grid, "final_denoise": False, "x_start": torch.full((20_000, 1), 3)}
    of_ratios, of_beliefs = (
        np.bincount(sample(model, process, (20_000, 1), method=method, generator=seeded(), **options)[:, 0])
        for model, method in ((ratios, "sedd"), (beliefs, "cedd"))
    )
    assert of_ratios[1] == of_beliefs[1] == 0
    assert same_law_p_value(of_ratios, of_beliefs) > ERROR_RATE


@pytest.mark.parametrize("process", ["roulette", "eroulette", "hybrid"])
def test_no_masks_remain_if_most_likely_token_is_excluded(process):
    """The ratio of an excluded token does not swamp the others."""
    made, said = PROCESSES[process](3), torch.tensor([0.0, 16.0, 0.5], dtype=torch.float64)
    options = {"method": "sedd", "exclude": [1], "steps": 4, "generator": seeded()}
    drawn = sample(lambda x, sigma: said.expand(*x.shape, 3), made, (2000, 1), **options)
    assert set(drawn.unique().tolist()) == {0, 2}


def only_at(where, tokens, V):
    return AllowedTokens(torch.tensor(where), torch.isin(torch.arange(V), torch.tensor(tokens)))


STEPPED = [("uniform", "bayes", "gibbs"), ("uniform", "cedd", "stratified")]
REVEALED = [
    ("absorb", "cedd", name) for name in ("probability", "margin", "gibbs", "remask-confidence", "remask-capped")
]


@pytest.mark.parametrize(
    ("process", "method", "sampler", "temperature", "network"),
    covering(
        (*combination, temperature, network)
        for combination in COMBINATIONS + STEPPED + REVEALED
        for temperature, network in ((1.0, HalvedTable), (0.7, Table), (0.0, HalvedTable))
    ),
)
def test_only_allowed_tokens_are_drawn(process, method, sampler, temperature, network):
    """With every sampler; unrestricted texts of the same batch are unchanged."""
    made, given = PROCESSES[process](4), torch.tensor([[True, False, False]]).expand(200, -1)
    where = torch.tensor([[False, True, False]]).expand(200, -1) & (torch.arange(200) % 2 == 0)[:, None]
    limited, free = (
        sample(
            network(made, 3, seed=7), made, (200, 3), method=method, sampler=sampler, steps=4, exclude=[0],
            constraint=Fixed(given.long(), given, only), temperature=temperature, generator=seeded(),
        )
        for only in (AllowedTokens(where, torch.tensor([True, False, True, True])), None)
    )  # fmt: skip
    assert set(limited[::2, 1].unique().tolist()) <= {2, 3}
    assert (limited[:, 0] == 1).all()
    assert torch.equal(limited[1::2], free[1::2])
    assert temperature == 0 or 1 in free[::2, 1]


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_allowed_tokens_follow_renormalized_law(deterministic):
    """Two masks, by enumeration: either is revealed first, and the allowed tokens share the probability of the others,
    given what has been revealed."""
    process, n = cedd.absorb(4), 800 if deterministic else 8000  # slower one by one
    model, mask, possible = HalvedTable(process, 2, seed=3), 4, torch.tensor([False, True, False, True])
    model.sway.zero_()  # the same at all times

    def belief(x, place):
        outputs = model.outputs(torch.tensor([x]), torch.ones(1))[0, place]
        return torch.softmax(outputs.where(possible, -torch.inf) if place == 0 else outputs, 0).numpy()

    law = np.zeros((4, 4))
    for first, second in itertools.product(range(4), repeat=2):
        law[first, second] += 0.5 * belief([mask, mask], 0)[first] * belief([first, mask], 1)[second]
        law[first, second] += 0.5 * belief([mask, mask], 1)[second] * belief([mask, second], 0)[first]
    held = Fixed(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), only_at([True, False], [1, 3], 4))
    drawn = sample(
        model, process, (n, 2), method="cedd", sampler="first-hitting", constraint=held, generator=seeded(),
        x_start=torch.full((n, 2), mask), deterministic=deterministic,
    )  # fmt: skip
    seen = np.bincount((4 * drawn[:, 0] + drawn[:, 1]).numpy(), minlength=16).reshape(4, 4)
    assert seen[[0, 2]].sum() == 0
    assert stats.chisquare(seen[[1, 3]].ravel(), n * law[[1, 3]].ravel()).pvalue > ERROR_RATE


@pytest.mark.parametrize("where", [[True], [True, False]])
def test_empty_or_misshapen_allowed_tokens_are_rejected(where):
    process, held = cedd.absorb(4), (torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
    only = only_at(where, [] if len(where) == 2 else [1], 4)
    with pytest.raises(ValueError, match="must leave one of the 4 tokens, and be of this shape"):
        sample(Table(process, 2), process, (1, 2), method="cedd", constraint=Fixed(*held, only))


@pytest.mark.parametrize("grid", ["uniform", "jumps"])
def test_huge_step_counts_are_rejected_up_front(grid):
    process = cedd.absorb(4)
    assert len(time_grid(process, 1_000_000, "uniform")) == 1_000_002
    with pytest.raises(ValueError, match=r"steps must be at most 1,000,000 \(got 10,000,000,000,000"):
        sample(Table(process, 2), process, (1, 2), method="cedd", steps=10**13, grid=grid)


@pytest.mark.parametrize("exclude", [[4], [-1], [0, 1, 2, 3]])
def test_invalid_or_complete_exclusions_are_rejected(exclude):
    process = cedd.absorb(4)
    with pytest.raises(ValueError, match=r"must be in 0\.\.3 and leave one to draw"):
        sample(Table(process, 2), process, (1, 2), method="cedd", exclude=exclude)


@pytest.mark.parametrize("exclude", ["e", ["e"], [1.5]])
def test_exclusions_must_be_token_ids(exclude):
    process = cedd.absorb(4)
    with pytest.raises(ValueError, match="exclude takes token ids"):
        sample(Table(process, 2), process, (1, 2), method="cedd", exclude=exclude)


@pytest.mark.parametrize("process", [cedd.absorb(4), cedd.uniform(4)])
def test_excluding_all_allowed_tokens_is_rejected(process):
    held = Fixed(torch.zeros(2, dtype=torch.int64), torch.tensor([False, False]), only_at([True, False], [1, 3], 4))
    with pytest.raises(ValueError, match=r"at some positions, all allowed tokens are excluded: \(1, 2, 3\)"):
        sample(Table(process, 2), process, (1, 2), method="cedd", constraint=held, exclude=[3, 2, 1])
    drawn = sample(Table(process, 2), process, (8, 2), method="cedd", constraint=held, exclude=[2, 3], steps=4)
    assert (drawn[:, 0] == 1).all()


@pytest.mark.parametrize("process", PROCESSES)
def test_any_callable_may_be_a_constraint(process):
    """A function that may mask and unmask: applied to the start and after every step, whatever it does."""
    made = PROCESSES[process](4)
    model, calls = HalvedTable(made, 3, seed=2), []

    def no_two_alike(x):
        calls.append(1)
        return torch.where(x == x[:, :1], torch.where(x == 3, 2, 3), x).index_fill(1, torch.tensor([0]), 1)

    seen = []
    x = sample(
        model, made, (40, 3), method="bayes", steps=6, constraint=no_two_alike, generator=seeded(),
        callback=lambda k, t, x: seen.append(x.clone()),
    )  # fmt: skip
    assert len(calls) == len(seen) == 8
    for state in seen:
        assert (state[:, 0] == 1).all()
    assert x.max() < 4


def test_constraint_that_remasks_is_respected():
    """The host's record of masks is updated when a custom constraint changes them."""
    process = cedd.absorb(4)
    model = HalvedTable(process, 2, seed=2)
    masks = []

    def keep_masked_until_the_end(x):
        masks.append(1)
        return torch.full_like(x, 4) if len(masks) < 6 else x

    x = sample(
        model, process, (2000, 2), method="cedd", steps=5, constraint=keep_masked_until_the_end, generator=seeded()
    )
    assert x.max() < 4  # the last step reveals them all
    assert model.rows > 2000


def test_per_sequence_constraints_are_split_with_batch():
    process = cedd.roulette(4)
    tokens = torch.arange(10)[:, None].repeat(1, 3) % 4
    fixed = Fixed(tokens, torch.tensor([True, False, True]).expand(10, 3))
    x = sample(
        Table(process, 3), process, (10, 3), method="bayes", constraint=fixed, steps=3, batch=3, generator=seeded()
    )
    assert torch.equal(x[:, [0, 2]], tokens[:, [0, 2]])


def test_prompt_fixes_the_beginning():
    fixed = prompt(torch.tensor([2, 1]), 4)
    assert torch.equal(fixed(torch.full((1, 4), 3)), torch.tensor([[2, 1, 3, 3]]))
    with pytest.raises(ValueError, match="prompt has 5 tokens"):
        prompt(torch.arange(5), 4)


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_absorb_needs_at_most_one_call_per_revealed_token():
    """1000 steps on 2 sequences of 3: at most 6 calls, each on the sequence that moves, the head on 6 rows in all."""
    process = cedd.absorb(4)
    model = HalvedTable(process, 3)
    sample(model, process, (2, 3), method="cedd", steps=1000, generator=seeded())
    assert len(model.calls) <= 6
    assert model.rows <= 6


@pytest.mark.parametrize("process", ["uniform", "roulette"])
def test_thinning_skips_most_rows(process):
    """With K steps a token is a candidate about log K times, not K times."""
    made = PROCESSES[process](4)
    model = HalvedTable(made, 3)
    sample(model, made, (200, 3), method="bayes", steps=300, generator=seeded())
    assert model.rows < 600 * 25


def test_first_hitting_needs_at_most_one_call_per_position():
    process = cedd.absorb(4)
    model = HalvedTable(process, 3)
    x = sample(model, process, (50, 3), method="cedd", sampler="first-hitting", generator=seeded())
    assert len(model.calls) <= 3
    assert x.max() < 4


# ---- reproducibility ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("process", "method", "sampler"), covering([*COMBINATIONS, ("absorb", "ar", "analytic")]))
def test_same_seed_gives_same_samples(process, method, sampler):
    made = PROCESSES[process](4)
    model = Table(made, 3, seed=1)
    x, y, z = (
        sample(model, made, (64, 3), method=method, sampler=sampler, steps=5, generator=seeded(s)) for s in (4, 4, 5)
    )
    assert torch.equal(x, y)
    assert not torch.equal(x, z)


def test_global_seed_is_used_without_generator():
    process = cedd.uniform(4)
    model = Table(process, 3)
    torch.manual_seed(3)
    x = sample(model, process, (32, 3), method="cedd", steps=4)
    torch.manual_seed(3)
    assert torch.equal(x, sample(model, process, (32, 3), method="cedd", steps=4))


def test_plain_and_split_networks_give_same_samples():
    process = cedd.roulette(4)
    x, y = (
        sample(kind(process, 3, seed=9), process, (64, 3), method="bayes", steps=9, generator=seeded())
        for kind in (Table, HalvedTable)
    )
    assert torch.equal(x, y)


def test_dropout_is_off_only_while_sampling():
    config = config_from_preset("tiny", vocab_size=5, has_mask=True, dropout=0.5)
    torch.manual_seed(0)
    model = Transformer(config).train()
    torch.nn.init.normal_(model.head.weight)
    process = cedd.absorb(5)
    x, y = (sample(model, process, (4, 8), method="cedd", steps=8, generator=seeded()) for _ in range(2))
    assert torch.equal(x, y)
    assert model.training


def test_key_value_cache_does_not_change_samples():
    config = config_from_preset("tiny", vocab_size=7, has_mask=True, causal=True, time_conditioning=False)
    torch.manual_seed(0)
    model = Transformer(config).double().eval()
    torch.nn.init.normal_(model.head.weight)
    process, fixed = cedd.absorb(7), prompt(torch.tensor([3, 1, 4]), 12)
    options = {"method": "ar", "constraint": fixed}
    with_cache = sample(model, process, (16, 12), generator=seeded(), **options)
    without = sample(lambda x, s: model(x), process, (16, 12), generator=seeded(), **options)
    assert torch.equal(with_cache, without)
    assert (with_cache[:, :3] == torch.tensor([3, 1, 4])).all()


# ---- choosing a token -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 96, 1000])
def test_inverse_cdf_of_log_weights_matches_weights(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(64, size, generator=generator, dtype=torch.float64)
    logits[:, :-1].masked_fill_(torch.rand(64, size - 1, generator=generator) < 0.3, -torch.inf)
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    assert torch.equal(inverse_cdf(logits, u, log=True), inverse_cdf(logits.exp(), u))


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-300, 1e300)), min_size=1, max_size=40),
    u=st.floats(0, 1, exclude_max=True),
)
def test_inverse_cdf_returns_correct_index(weights, u):
    if sum(weights) in (0, float("inf")):
        return
    index = int(inverse_cdf(torch.tensor([weights], dtype=torch.float64), torch.tensor([u], dtype=torch.float64)))
    assert weights[index] > 0
    shares = np.array(weights) / sum(weights)
    assert shares[:index].sum() <= u + 1e-12
    assert shares[: index + 1].sum() >= u - 1e-12


class SameLogits:
    """A network with one empty feature, whose head returns the same [.., V] logits everywhere."""

    capabilities = Capabilities(features=True)

    def __init__(self, logits):
        self.logits = logits

    def features(self, x_t, sigma):
        return torch.zeros(*x_t.shape, 1)

    def head(self, features):
        return self.logits.expand(*features.shape[:-1], len(self.logits))


def test_tails_of_large_vocabulary_are_sampled_correctly():
    """A token that stays with probability 1 - 1e-3, and 50,256 others that share the rest: 2e-8 each.

    Our sampler jumps at the right rate, to all tokens. The published method, argmax of p / (-log u) in float32, jumps
    about six times too rarely: -log u has no values between 0 and 6e-8. Our error rates are below 1e-6 (fixed seed).
    """
    V, positions, jump = 50257, 200_000, 1e-3
    process = cedd.uniform(V)
    t, s = 0.5, 0.499
    # bayes: stay = c_step m_s(x) / m_t(x); find the belief g_x for which it is 1 - jump
    law = process.kernel(t, s)
    early, late = process.kernel(s), process.kernel(t)

    def stay(g):
        return float(law.c * (early.b + early.keep * g) / (late.b + late.keep * g))

    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if stay(middle) < 1 - jump else (low, middle)
    probs = torch.full((V,), (1 - low) / (V - 1), dtype=torch.float64)
    probs[0] = low
    x = torch.zeros(100, positions // 100, dtype=torch.int64)
    drawn = sample(
        SameLogits(probs.log()), process, (100, positions // 100), method="bayes", x_start=x, final_denoise=False,
        grid=torch.tensor([t, s]).double(), generator=seeded(1),
    )  # fmt: skip
    jumped = drawn[drawn != 0]
    assert abs(len(jumped) - jump * positions) < 5 * np.sqrt(jump * positions)
    parts = np.bincount((jumped.numpy() - 1) * 10 // (V - 1), minlength=10)
    assert stats.chisquare(parts).pvalue > ERROR_RATE

    # The published draw of the same law. The others are alike, so only the largest of their float32 numbers k / 2^24
    # matters, and (k + 1) / 2^24 to the power V - 1 is its distribution function.
    draws, number = 1_000_000, seeded(2)
    levels = torch.rand(draws, generator=number, dtype=torch.float64) ** (1 / (V - 1)) * 2**24
    largest = ((levels.ceil() - 1) / 2**24).float()
    clock = 1e-10 - torch.log(torch.rand(draws, generator=number) + 1e-10)
    others = 1e-10 - torch.log(largest + 1e-10)
    published = int((jump / (V - 1) / others > (1 - jump) / clock).sum())
    assert 5.5 < jump * draws / published < 7.5


def test_sharpening():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))
    assert torch.allclose(Sharpening().log_probs(logits).exp(), logits.exp())
    assert Sharpening(temperature=0).log_probs(logits).exp().tolist() == [[1, 0, 0, 0]]
    half = Sharpening(temperature=0.5).log_probs(logits).exp()
    assert torch.allclose(half, (logits.exp() ** 2) / (logits.exp() ** 2).sum())
    assert torch.allclose(
        Sharpening(top_p=0.75).log_probs(logits).exp(), torch.tensor([[0.5, 0.3, 0, 0]]).double() / 0.8
    )
    assert Sharpening(top_p=0.5).log_probs(logits).exp().tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("method", ["sedd", "cedd", "bayes"])
@pytest.mark.parametrize("process", ["absorb", "roulette"])
def test_reveals_follow_sharpened_distribution(process, method):
    """At top_p = 0.01 every reveal of an absorb chain is the likeliest token."""
    made = PROCESSES[process](4)
    logits = torch.tensor([0.0, 1.0, 3.0, 2.0]).double()
    x = sample(
        SameLogits(logits), cedd.absorb(4), (100, 3), method=method, steps=4, top_p=0.01, generator=seeded(),
        x_start=torch.full((100, 3), 4),
    )  # fmt: skip
    assert (x == 2).all()
    assert sample(SameLogits(logits), made, (9, 3), method=method, steps=4, temperature=0, generator=seeded()).max() < 4


def test_samples_follow_temperature_scaled_law():
    process, logits = cedd.absorb(4), torch.tensor([0.0, 1.0, 3.0, 2.0]).double()
    x = sample(
        SameLogits(logits), process, (4000, 3), method="cedd", steps=3, temperature=2.0, generator=seeded(),
        x_start=torch.full((4000, 3), 4),
    )  # fmt: skip
    law = torch.softmax(logits / 2, 0).numpy()
    assert p_value(np.bincount(x.flatten().numpy(), minlength=4), law) > ERROR_RATE


@pytest.mark.parametrize("method", ["cedd", "bayes"])
def test_sharpening_keeps_tokens_the_model_is_certain_of(method):
    """Near clean data a token is its own best explanation, however unlikely it was before it was seen."""
    process, logits = cedd.uniform(4), torch.tensor([0.0, 0.0, 0.5, 0.0]).double()
    x = torch.arange(4).repeat(50, 2)
    drawn = sample(
        SameLogits(logits), process, (50, 8), method=method, steps=4, temperature=0, generator=seeded(),
        x_start=x, t_start=0.05,
    )  # fmt: skip
    if method == "bayes":
        assert torch.equal(drawn, x)
    else:  # a denoiser that ignores its input is trusted
        assert not torch.equal(drawn, x)


# ---- grids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("steps", [1, 2, 7, 300])
def test_grids_decrease_from_start_to_zero(process, name, steps):
    made = PROCESSES[process](100)
    if name == "flow" and not made.has_mask:
        with pytest.raises(ValueError, match="needs a process with masks"):
            time_grid(made, steps, name)
        return
    times = time_grid(made, steps, name, start=0.9)
    assert len(times) == steps + 2
    assert times[0] == 0.9
    assert times[-1] == 0
    assert (times.diff() < 0).all()


def test_jump_grid_spreads_jumps_evenly():
    """Expected jumps of the forward process between neighbouring times are equal (and are not on the uniform grid)."""
    process = cedd.uniform(50)
    times = time_grid(process, 20, "jumps", final_denoise=False)
    assert torch.allclose(-process.sigma(times).diff(), (process.sigma(1.0) - process.sigma(1e-5)) / 20, rtol=1e-2)
    absorb = cedd.absorb(50)
    assert torch.allclose(time_grid(absorb, 20, "jumps"), time_grid(absorb, 20, "uniform"), atol=1e-4)


@pytest.mark.parametrize("process", [*PROCESSES, "steep"])
def test_kept_grid_is_even_in_kept_tokens(process):
    """Also where nearly all tokens are gone after a millionth of the time, as on hybrid with p_u = 0.99."""
    made = cedd.hybrid(50, p_u=0.99) if process == "steep" else PROCESSES[process](50)
    keep = torch.exp(-made.sigma(time_grid(made, 20, "kept", final_denoise=False)))
    torch.testing.assert_close(keep.diff(), ((keep[-1] - keep[0]) / 20).expand(20), rtol=1e-3, atol=0)


def test_flow_grid_is_even_in_masks_and_log_masks():
    process = cedd.absorb(50, cedd.Polynomial(2.0))
    a = process.kernel(time_grid(process, 20, "flow", end=1e-4, final_denoise=False)).a
    parts = a.diff() / (a[-1] - a[0]) + a.log().diff() / (a[-1] / a[0]).log()
    torch.testing.assert_close(parts, torch.full((20,), 2 / 20, dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("process", "time", "noise"),
    [
        (cedd.absorb(50), 1e-5, 1e-5),
        (cedd.hybrid(50, p_u=0.99), 2.55e-13, 1e-4),
        (cedd.roulette(50, p_m=1e-3), 1e-7, 1e-4),
        (cedd.absorb(50, cedd.Geometric(0.5, 8.0)), 1e-5, 0.5),
    ],
    ids=["absorb", "hybrid", "roulette", "geometric"],
)  # fmt: skip
def test_last_time_has_little_noise(process, time, noise):
    """A schedule that already has noise at t = 0 keeps the usual end."""
    assert last_time(process) == pytest.approx(time, rel=1e-2)
    assert float(process.sigma(last_time(process))) == pytest.approx(noise, rel=1e-2)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"sampler": "ddim"}, "unknown sampler 'ddim'; use one of analytic"),
        ({"sampler": "first-hitting"}, "first-hitting reveals masks, and this process has none; use sampler='"),
        ({"sampler": "first-hitting", "process": cedd.roulette(4)}, "use sampler='analytic'"),
        ({"sampler": "first-hitting", "process": cedd.absorb(4), "method": "sedd"}, "network gives ratios"),
        ({"corrector": Corrector()}, "corrector belongs to flow matching"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"grid": "cosine"}, "unknown time grid"),
        ({"sampler": 5}, "sampler must be a name, a Sampler or a StepRule \\(got 5"),
        ({"sampler": None}, "sampler must be a name, a Sampler or a StepRule \\(got None"),
        ({"shape": (2**25, 3)}, "cannot draw more than 16,777,216 texts in one call \\(got 33,554,432"),
        ({"shape": (2**20, 2**12)}, "cannot draw more than 1,073,741,824 tokens in one call \\(got 1,048,576 x 4,096"),
        ({"grid": torch.tensor([0.1, 0.5])}, "from noise down to data"),
        ({"shape": (0, 3)}, "shape"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": "2"}, "batch must be an integer \\(got '2'"),
        ({"t_start": 1.5}, "t_start must be in"),
        ({"x_start": torch.zeros(1, 3, dtype=torch.int64)}, "x_start must have the shape"),
        ({"x_start": torch.full((2, 3), 4)}, "x_start must be states of the process, integers in 0..3"),
        ({"x_start": torch.full((2, 3), -1)}, "x_start must be states"),
        ({"x_start": torch.full((2, 3), 5), "process": cedd.absorb(4)}, "integers in 0..4"),
        ({"x_start": torch.zeros(2, 3)}, "x_start must be states"),
        ({"steps": 1.5}, "steps must be an integer \\(got 1.5"),
        ({"constraint": Fixed(torch.tensor([7, 0, 0]), torch.tensor([True, False, False]))}, "0..3"),
        ({"constraint": Fixed(torch.tensor([1, 0]), torch.tensor([True, False]))}, "samples are"),
        ({"method": "ar", "constraint": Fixed(torch.tensor([1, 0, 1]), torch.tensor([True, False, True]))}, "prompt"),
    ],
)  # fmt: skip
def test_invalid_input_is_rejected(options, message):
    arguments = {"process": cedd.uniform(4), "shape": (2, 3), "method": "cedd"} | options
    process = arguments.pop("process")
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        sample(Table(process, 3), process, arguments.pop("shape"), **arguments)


def test_long_exclusion_list_is_abbreviated_in_error():
    with pytest.raises(ValueError, match=r"\(got 0, \.\.\., 99: 100 tokens\)$"):
        check_excluded(range(100), 100)


def test_fixed_token_shape_error_names_shapes():
    with pytest.raises(ValueError, match=r"\(got \(3,\) and \(2,\)\)$"):
        Fixed(torch.zeros(3, dtype=torch.int64), torch.ones(2, dtype=torch.bool))


@pytest.mark.parametrize(("length", "steps"), [(1, 64), (64, 64), (256, 64), (512, 128), (1024, 256), (9999, 256)])
def test_default_steps_are_one_per_four_tokens(length: int, steps: int):
    assert default_steps(length) == steps
