"""Shortcuts that save a sampler work do not change its samples."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cedd
from cedd import network
from cedd.constraints import TokenLanguage, compile_tokens, regex
from cedd.data.tokenizers import CharTokenizer
from cedd.models.mask_padding import MaskPadded
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Capabilities
from cedd.parameterization import Affine, Score, at_token, can_jump, put_at_token
from cedd.process import Noise
from cedd.samplers import (
    CONFIDENCE_ORDERS,
    RULES,
    Sharpening,
    StepRule,
    gibbs,
    graphs,
    grid_sampler,
    inverse_cdf,
    sample,
    stratified,
    text_seeds,
)
from cedd.samplers.choice import beliefs, is_surely_mask, jump_weights, leap_of, may_move
from cedd.samplers.feature_cache import CachedNetwork, with_cached_features
from cedd.samplers.graphs import MOST_ROWS, Recorder
from cedd.samplers.languages import LanguageConstraint, Span
from cedd.samplers.plan import Events, Moves, Plan, blocks, chances
from cedd.samplers.random_numbers import RandomNumbers, Use
from tests.combinations import covering


def transformer(process: cedd.TokenProcess, *, time_input: str = "sigma", depth: int = 1) -> Transformer:
    torch.manual_seed(0)
    size = {"vocab_size": process.vocab_size, "has_mask": process.has_mask, "length": 16, "depth": depth}
    config = config_from_preset("tiny", dropout=0.0, time_input=time_input, **size)
    model = Transformer(config).eval()
    conditioning = model.backbone.conditioning
    assert conditioning is not None
    torch.nn.init.normal_(model.head.weight, std=0.3)
    torch.nn.init.normal_(conditioning.modulation.weight, std=0.5)
    return model


def drawn(model: Any, process: cedd.TokenProcess, method: str, shape: tuple[int, int] = (3, 16), **options: Any):
    return sample(model, process, shape, method=method, generator=torch.Generator().manual_seed(3), **options)


class CountingNetwork:
    """Counts the sequences that a network processes, and records how many places are requested."""

    def __init__(self, model: Any) -> None:
        self._model, self.head, self.sequences = model, model.head, 0
        self.asked: list[int | None] = []
        self.capabilities = replace(model.capabilities, head_losses=False)

    def features(self, x_t: Tensor, sigma: Tensor, where: Tensor | None = None) -> Tensor:
        self.sequences += len(x_t)
        self.asked.append(None if where is None else len(where))
        return self._model.features(x_t, sigma, where=where)

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        return self._model.rows(features, places)


# ---- events ----------------------------------------------------------------------------------------------------------

HELD = cedd.Fixed(
    torch.arange(16).expand(3, 16), (torch.arange(48) % 7 < 2).view(3, 16) | (torch.arange(3) == 2)[:, None]
)
"""Some positions of each text, and all of one."""


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("absorb", "cedd", {}),
        ("absorb", "cedd", {"constraint": HELD}),
        pytest.param("absorb", "cedd", {"sampler": "remask-capped"}, marks=pytest.mark.slow),
        ("absorb", "cedd", {"sampler": "remask-rescaled", "final_denoise": False, "t_start": 0.7}),
        ("absorb", "dfm", {"corrector": cedd.Corrector(2.0)}),
        pytest.param("roulette", "bayes", {}, marks=pytest.mark.slow),
        ("roulette", "cedd-star", {"constraint": HELD, "temperature": 0.8}),
        ("uniform", "bayes", {"sampler": "euler"}),
    ],
)
def test_advancing_texts_independently_gives_same_samples(name: str, method: str, options: dict[str, Any]) -> None:
    process = getattr(cedd, name)(20)
    model = transformer(process)
    alone, together = CountingNetwork(model), CountingNetwork(model)
    how = {"steps": 10, "deterministic": True, **options}
    apart = drawn(alone, process, method, **how)
    assert torch.equal(apart, drawn(together, process, method, callback=lambda step, t, x: None, **how))
    assert alone.sequences == together.sequences  # each read at the same steps


@pytest.mark.parametrize(("name", "method", "share"), [("absorb", "cedd", 0.5), ("roulette", "bayes", 0.6)])
def test_each_call_serves_next_event_of_every_text(name: str, method: str, share: float) -> None:
    """At most as many calls as the busiest text has events (tokens, for absorb)."""
    process = getattr(cedd, name)(20)
    model = transformer(process)
    alone, together = CountingNetwork(model), CountingNetwork(model)
    how = {"shape": (4, 8), "steps": 100, "deterministic": False}
    drawn(alone, process, method, **how)
    drawn(together, process, method, callback=lambda step, t, x: None, **how)
    assert len(alone.asked) < share * len(together.asked)
    assert name != "absorb" or len(alone.asked) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_events_are_scheduled_in_order(seed: int) -> None:
    random, texts, length = np.random.default_rng(seed), 4, 5
    busy = np.array([True, True, False, True])
    events, expected, made = Events(busy, length), [list[tuple[int, int]]() for _ in range(texts)], list[Moves]()
    for k in range(30):
        rows = np.flatnonzero((random.random((texts, length)) < 0.1) & busy[:, None])
        for row in rows:
            expected[row // length].append((k, int(row)))
        numbers = random.random(len(rows))
        events.add(Moves(rows, np.full_like(rows, k), numbers, numbers, numbers < 0.3))
        if k % 4 == 0 or k == 29:
            made += events.calls(last=k == 29)
    assert len(made) == max(len({k for k, _ in steps}) for steps in expected)
    for text, steps in enumerate(expected):
        found = [
            [(int(k), int(row)) for k, row in zip(moves.steps, moves.rows, strict=True) if row // length == text]
            for moves in made
        ]
        assert [event for call in found for event in call] == steps
        assert all(len({k for k, _ in call}) <= 1 for call in found)  # one event per call
        assert [bool(call) for call in found] == sorted((bool(call) for call in found), reverse=True)  # from the first


def test_calls_have_same_shapes_on_another_device() -> None:
    """The meta device has all of a tensor but its values."""
    process, parameterization = cedd.roulette(20), cedd.get_method("bayes").parameterization
    assert isinstance(parameterization, Affine)
    times = torch.linspace(1, 0.1, 31, dtype=torch.float64)
    known = chances(RULES["analytic"], parameterization, process.noise(times[:-1]), process.noise(times[1:]))

    def calls(device: str) -> list[list[tuple[Any, Any]]]:
        masked, draws = torch.ones(5, 16, dtype=torch.bool), RandomNumbers(range(5), 16)
        made = list(Plan(known, masked, ~masked, draws, by_sequence=True).calls(0, 30, torch.device(device)))
        places = ([call.places.rows, call.places.sequences, call.places.index] for call in made)
        numbers = ([call.u, call.v, call.masked_again, call.steps, call.of_rows] for call in made)
        return [
            [(part.shape, part.dtype) if part is not None else (None, None) for part in (*where, *what)]
            for where, what in zip(places, numbers, strict=True)
        ]

    assert calls("meta") == calls("cpu")


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), [("absorb", "cedd"), ("roulette", "bayes")])
def test_evaluating_few_places_gives_same_samples(name: str, method: str, monkeypatch) -> None:
    process = getattr(cedd, name)(20)
    model = transformer(process, depth=2)
    counted = CountingNetwork(model)
    few = drawn(counted, process, method, steps=40)
    assert any(places is not None for places in counted.asked)
    monkeypatch.setattr(network, "SPARSE", 10**9)
    assert torch.equal(few, drawn(model, process, method, steps=40, deterministic=False))


def test_selected_places_of_mask_padded_network_match_all() -> None:
    model = MaskPadded(transformer(cedd.absorb(20), time_input="none", depth=2), 16)
    x, sigma, where = torch.randint(21, (3, 5)), torch.ones(3), torch.tensor([1, 7, 14])
    torch.testing.assert_close(
        model.rows(model.features(x, sigma, where=where), where), model.rows(model.features(x, sigma), where)
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param("sedd", marks=pytest.mark.slow), "bayes"])
def test_unchanged_text_reuses_features_without_time_conditioning(method: str, monkeypatch) -> None:
    process = cedd.uniform(20)
    model = transformer(process, time_input="none", depth=2)
    once, always = CountingNetwork(model), CountingNetwork(model)
    remembered = drawn(once, process, method, (2, 4), steps=50, deterministic=True)
    monkeypatch.setattr(grid_sampler, "with_cached_features", lambda model: model)
    assert torch.equal(remembered, drawn(always, process, method, (2, 4), steps=50, deterministic=True))
    assert once.sequences < 0.8 * always.sequences


def test_time_conditioned_network_is_called_at_every_step() -> None:
    process = cedd.uniform(20)
    counted = CountingNetwork(transformer(process))
    drawn(counted, process, "sedd", steps=10, deterministic=True)
    assert counted.sequences == 3 * 11


def test_feature_cache_is_used_only_on_cpu() -> None:
    model = transformer(cedd.uniform(20), time_input="none")
    assert isinstance(with_cached_features(model), CachedNetwork)

    class Elsewhere(CountingNetwork):
        device = torch.device("meta")

    elsewhere = Elsewhere(model)
    assert with_cached_features(elsewhere) is elsewhere


# ---- few rows of many ------------------------------------------------------------------------------------------------

SHARPENED = [{}, {"temperature": 0.6}, {"top_p": 0.8, "exclude": [0, 5]}, {"constraint": HELD}]


class HeadRows:
    """Counts the rows that a head computes."""

    capabilities = Capabilities(features=True)

    def __init__(self, model: Transformer) -> None:
        self._model, self.features, self.rows = model, model.features, 0

    def head(self, hidden: Tensor) -> Tensor:
        self.rows += len(hidden)
        return self._model.head(hidden)


@pytest.mark.parametrize(
    ("name", "method", "share", "options"),
    [
        ("absorb", "cedd", 0.4, SHARPENED[3]),
        ("roulette", "bayes", 0.9, SHARPENED[1]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("absorb", "cedd", 0.4, SHARPENED[2]),
                *(("roulette", "bayes", 0.9, SHARPENED[one]) for one in (0, 2)),
            )
        ),
    ],
)
def test_masks_certain_to_stay_are_not_evaluated(
    name: str, method: str, share: float, options: dict[str, Any], monkeypatch
) -> None:
    process = getattr(cedd, name)(20)
    model = transformer(process)
    few, all_ = HeadRows(model), HeadRows(model)
    how = {"sampler": "gibbs", "steps": 10, "deterministic": True, **options}
    spared = drawn(few, process, method, **how)
    for module in (grid_sampler, gibbs):
        monkeypatch.setattr(module, "is_surely_mask", lambda v, chance: torch.zeros_like(v, dtype=torch.bool))
    assert torch.equal(spared, drawn(all_, process, method, **how))
    assert few.rows < share * all_.rows


def test_is_surely_mask_implies_mask_is_drawn() -> None:
    """Laws with a mask of known probability, and numbers at the edge of its interval and beyond."""
    generator, chance = torch.Generator().manual_seed(0), torch.tensor(0.3, dtype=torch.float64)
    v = 0.7 + torch.linspace(-1e-8, 1e-8, 4001, dtype=torch.float64)
    tokens = torch.rand(4001, 50, generator=generator, dtype=torch.float64)
    law = torch.cat([0.7 * tokens / tokens.sum(1, keepdim=True), chance.expand(4001, 1)], 1)
    sure, drawn = is_surely_mask(v, chance), inverse_cdf(law, v)
    assert bool((drawn[sure] == 50).all())
    assert bool((drawn[~sure] < 50).any())
    assert int(sure.sum()) == pytest.approx(1800, abs=2)
    law[:, :25] = 0  # excluded tokens leave the mask more
    assert bool((inverse_cdf(law, v)[sure] == 50).all())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bayes", SHARPENED[3]),
        ("cedd", SHARPENED[2]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("bayes", SHARPENED[2]), ("cedd", SHARPENED[0]), ("cedd", SHARPENED[1]))
        ),
    ],
)
def test_jump_weights_are_computed_only_for_changing_tokens(method: str, options: dict[str, Any], monkeypatch) -> None:
    """Stratified sampler: computing the weights of all positions, most of which stay, gives the same."""
    process = cedd.uniform(20)
    model, asked, all_rows = transformer(process), [], []

    def counted(leap, probs, x, now, sharpening):
        asked.append(len(x))
        return jump_weights(leap, probs, x, now, sharpening)

    def counted_leaps(*given):
        all_rows.append(len(given[4]))
        return leap_of(*given)

    monkeypatch.setattr(stratified, "jump_weights", counted)
    monkeypatch.setattr(stratified, "leap_of", counted_leaps)
    how = {"sampler": "stratified", "steps": 16, "deterministic": True, **options}
    spared = drawn(model, process, method, **how)
    assert sum(asked) < 0.4 * sum(all_rows)

    def everywhere(run: grid_sampler.GridRun, x: Tensor, plain: Any) -> grid_sampler.GridStep:
        reached = run.uniform(Use.JUMP).flatten()

        def step(x: Tensor, k: int, noise: Noise, earlier: Noise) -> Tensor:
            nonlocal reached
            v, rows = run.uniform(Use.TARGET, k).flatten(), run.free.flatten().nonzero().squeeze(1)
            said = run.network.rows(x, noise.sigma.float(), network.Places(rows), full_precision=True)
            outputs, here = said.map(lambda part, _: part.double()), x.flatten()[rows]
            now, next_ = noise.like(here), earlier.like(here)
            how = (RULES["analytic"], run.affine, run.sharpening)
            leap, probs = leap_of(*how, outputs, here, now, next_)
            weights = jump_weights(leap, probs, here, now, run.sharpening)
            after = reached[rows] + (1 - leap.stay)
            moves = (after.floor() > reached[rows].floor()) & (weights.sum(-1) > 0)
            reached = reached.index_copy(0, rows, after)
            new = torch.where(moves, inverse_cdf(weights, v[rows]), here)
            return x.flatten().index_copy(0, rows, new).view(x.shape)

        return step

    monkeypatch.setattr(stratified.Stratified, "own_step", lambda self, *scene: everywhere(*scene))
    assert torch.equal(spared, drawn(model, process, method, **how))


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, SHARPENED[2]) for name in (*CONFIDENCE_ORDERS, "bounded")), *(("entropy", how) for how in SHARPENED)],
)
def test_drawing_only_revealed_tokens_matches_drawing_all(name: str, options: dict[str, Any]) -> None:
    """Confidence orders: ranking all masks by sorting, and drawing all of them, gives the same."""
    process, steps, length = cedd.absorb(20), 6, 16
    bounded = replace(CONFIDENCE_ORDERS["entropy"], entropy_bound=1.5)
    order = CONFIDENCE_ORDERS.get(name, bounded)
    model = transformer(process)
    how = {"sampler": order, "steps": steps, "deterministic": True, **options}
    spared, draws = drawn(model, process, "cedd", **how), RandomNumbers(seeds_of_drawn(3), length)
    sharpening = Sharpening(options.get("temperature", 1.0), options.get("top_p", 1.0), options.get("exclude", ()))
    x = torch.full((3, length), 20)
    x = HELD(x) if "constraint" in options else x
    spread = sorted(range(length), key=lambda i: f"{i:04b}"[::-1])
    for step in range(100):
        masked = x == 20
        if not bool(masked.any()):
            break
        share = masked.double().mean(1).clamp_max(float(process.kernel(1.0).a))
        v, said = draws.uniform(Use.TARGET, step), list[Tensor]()
        for i in range(3):  # as deterministic: one text at a time, and the head at its masks
            hidden = model.features(x[i : i + 1], -torch.log1p(-share[i : i + 1]).float())[0]
            said.append(model.head(hidden[masked[i]]).double().detach())
        for i, outputs in enumerate(said):
            places = masked[i].nonzero().squeeze(1).tolist()
            if not places:
                continue
            believed = Sharpening(excluded=sharpening.excluded).log_probs(outputs)
            probs = believed.exp()
            entropy = -(probs * believed.nan_to_num(neginf=0.0)).sum(-1)
            best = believed.topk(2, -1).values.exp()
            sure = {"probability": best[:, 0], "margin": best[:, 0] - best[:, 1]}.get(name, -entropy)
            ranked = sorted(range(len(places)), key=lambda j: (-float(sure[j]), spread.index(places[j])))
            turn = ranked[: -(-len(places) // max(1, steps - step))]
            if name == "bounded":
                turn = [j for j in ranked if j == ranked[0] or float(entropy[j]) <= 1.5]
            tokens = inverse_cdf(sharpening.log_probs(outputs), v[i][places], log=True)
            for j in turn:
                x[i, places[j]] = tokens[j]
    assert torch.equal(spared, x)


class Lookup:
    """Outputs from a table, without rounding from matrix products."""

    capabilities = Capabilities(features=True)

    def __init__(self) -> None:
        self._table = torch.randn(21, 20, generator=torch.Generator().manual_seed(1))

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self._table[(x_t + x_t.roll(1, -1) + torch.arange(x_t.shape[1])) % 21]

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    ("sampler", "options"), covering(product((*CONFIDENCE_ORDERS, "gibbs", "remask-confidence"), SHARPENED[2:]))
)
def test_chunk_size_does_not_change_samples(sampler: str, options: dict[str, Any], monkeypatch) -> None:
    process, how = cedd.absorb(20), {"sampler": sampler, "steps": 6, **options}
    at_once = drawn(Lookup(), process, "cedd", **how)
    for rows in (1, 47):
        monkeypatch.setitem(network._ENTRIES_AT_ONCE, "cpu", 20 * rows)
        assert torch.equal(at_once, drawn(Lookup(), process, "cedd", **how))


def seeds_of_drawn(n: int) -> list[int]:
    """The seeds of `drawn`."""
    return text_seeds(int(torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(3))), n)


@pytest.mark.parametrize("log_probs", [torch.randn(40, 7), torch.zeros(3, 4), torch.randn(5, 1)])
def test_margin_matches_sorted_probabilities(log_probs: Tensor) -> None:
    best = torch.cat([log_probs.double(), torch.full((len(log_probs), 1), -torch.inf)], 1).sort(-1, descending=True)
    best = best.values.exp()
    assert torch.equal(CONFIDENCE_ORDERS["margin"].confidence(log_probs.double()), best[:, 0] - best[:, 1])


# ---- precision -------------------------------------------------------------------------------------------------------


class LowPrecisionFeatures:
    """A network with features in bfloat16 and a head in float32, like a recorded one on a GPU."""

    capabilities = Capabilities(features=True)

    device = torch.device("cpu")

    def __init__(self, model: Transformer) -> None:
        self.model, self.head = model, model.head

    def features(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self.model.features(x_t, sigma).bfloat16()


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("absorb", "cedd", {}),
        ("absorb", "cedd", {"sampler": "first-hitting"}),
        ("absorb", "cedd", {"sampler": "margin"}),
        ("absorb", "sedds", {}),
        ("uniform", "sedd", {}),
        ("roulette", "sedd", {"sampler": "tau-leaping"}),
    ],
)
def test_low_precision_features_work_with_full_precision_head(name: str, method: str, options: dict[str, Any]) -> None:
    process = getattr(cedd, name)(20)
    x = drawn(LowPrecisionFeatures(transformer(process)), process, method, steps=8, **options)
    assert x.max() < 20


# ---- ratios: a law only where something may move ---------------------------------------------------------------------


class AtEachToken(torch.nn.Module):
    """A network that processes each token separately."""

    capabilities = Capabilities(features=True)

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Embedding(size + 1, 8), torch.nn.Linear(8, size)

    def features(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.features(x, sigma))


@pytest.mark.parametrize(
    ("name", "method", "sampler"),
    covering(
        itertools.product(("absorb", "uniform", "roulette"), ("sedd", "sedds"), ("analytic", "euler", "tau-leaping"))
    ),
)
def test_no_law_is_computed_for_positions_certain_to_stay(name: str, method: str, sampler: str, monkeypatch) -> None:
    process = getattr(cedd, name)(20)
    model, asked = AtEachToken(20), {"rows": 0}
    draw = grid_sampler._draw_dense

    def counting(rule: StepRule, run: grid_sampler.GridRun, outputs: Tensor, *others: Any) -> Tensor:
        asked["rows"] += len(outputs)
        return draw(rule, run, outputs, *others)

    monkeypatch.setattr(grid_sampler, "_draw_dense", counting)
    monkeypatch.setattr(grid_sampler, "FEW_OUTPUTS", 0)
    for options in ({}, {"temperature": 0.7, "top_p": 0.9}, {"exclude": [3, 5]})[: 3 if sampler == "analytic" else 1]:
        found, counts = [], []
        for rule in (RULES[sampler], replace(RULES[sampler], stay=None)):
            asked["rows"] = 0
            found.append(drawn(model, process, method, (2, 12), steps=12, sampler=rule, **options))
            counts.append(asked["rows"])
        assert torch.equal(*found)
        assert counts[0] <= counts[1]
        if method == "sedd" and name != "absorb":  # other ratios are so large here that nearly all may move
            assert (counts[0] < 0.9 * counts[1]) == ("exclude" not in options)


def exact_log_ratios(x: Tensor, sigma: Tensor) -> Tensor:
    """The exact log-ratios on uniform for tokens that are 0 in 4 of 5 places."""
    share = torch.full((27,), 0.2 / 26, dtype=torch.float64)
    share[0] = 0.8
    logs = torch.log1p(torch.exp(-sigma.double())[:, None] * (27 * share - 1))
    return (logs[:, None, :] - logs.gather(1, x)[:, :, None]).float()


@pytest.mark.parametrize(
    ("process", "method", "model"),
    [
        # Ratios that are 0 in float32, and sums that all but cancel.
        (cedd.absorb(20, cedd.Geometric(1e-3, 150.0)), "sedds", lambda x, sigma: torch.zeros(*x.shape, 20)),
        (cedd.uniform(27, cedd.Geometric(1e-5, 20.0)), "sedd", exact_log_ratios),
    ],
    ids=["tiny ratios", "sums that cancel"],
)
def test_rounded_sums_never_keep_a_position_from_moving(
    process: cedd.TokenProcess, method: str, model: Any, monkeypatch
) -> None:
    monkeypatch.setattr(grid_sampler, "FEW_OUTPUTS", 0)
    fast, slow = (
        drawn(model, process, method, (40, 100), steps=2, sampler=rule)
        for rule in (RULES["analytic"], replace(RULES["analytic"], stay=None))
    )
    assert torch.equal(fast, slow)


def test_start_may_have_any_integer_dtype(monkeypatch) -> None:
    monkeypatch.setattr(grid_sampler, "FEW_OUTPUTS", 0)
    for method in ("sedd", "cedd"):
        options: dict[str, Any] = {"steps": 3, "t_start": 0.5}
        narrow, wide = (
            drawn(AtEachToken(7), cedd.uniform(7), method, (2, 3), x_start=torch.ones(2, 3, dtype=dtype), **options)
            for dtype in (torch.int32, torch.int64)
        )
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("masked", [False, True])
def test_may_move_is_false_only_if_state_stays(masked: bool) -> None:
    """Every number that `may_move` rules out draws the current state, whatever its index."""
    generator = torch.Generator().manual_seed(4)
    size, rows = 6, 4000
    stay = torch.rand(rows, generator=generator, dtype=torch.float64) ** 0.3
    others = torch.rand(rows, size, generator=generator, dtype=torch.float64) ** 4
    here = torch.full((rows,), size - 1) if masked else torch.randint(size, (rows,), generator=generator)
    others.scatter_(1, here[:, None], 0.0)
    law = others * ((1 - stay) / others.sum(1))[:, None]
    law.scatter_(1, here[:, None], stay[:, None])
    v = torch.rand(rows, generator=generator, dtype=torch.float64)
    moves = may_move(v, stay, torch.full((rows,), masked))
    assert torch.equal(inverse_cdf(law, v)[~moves], here[~moves])
    assert 0.1 < float((~moves).double().mean()) < 0.9
    assert bool(may_move(v, torch.full_like(v, torch.nan), moves).all())


@pytest.mark.parametrize("name", ["absorb", "uniform", "roulette", "hybrid"])
@pytest.mark.parametrize("sampler", ["analytic", "euler", "tau-leaping"])
@pytest.mark.parametrize("method", ["sedd", "sedds"])
def test_stay_probability_from_ratio_sums_matches_law(name: str, sampler: str, method: str) -> None:
    process, generator = getattr(cedd, name)(7), torch.Generator().manual_seed(5)
    meaning, rule = cedd.METHODS[method].parameterization, RULES[sampler]
    assert isinstance(meaning, Score)
    x = torch.randint(process.num_states, (500,), generator=generator)
    t = 0.05 + 0.9 * torch.rand(500, generator=generator, dtype=torch.float64)
    noise, earlier = process.noise(t), process.noise(t * 0.9)
    outputs = torch.randn(500, 7, generator=generator, dtype=torch.float64)
    at = can_jump(x, noise).nonzero().squeeze(1)
    x, outputs, noise, earlier = x[at], outputs[at], noise.rows(at), earlier.rows(at)
    law = rule.law(meaning, outputs, x, noise, earlier)
    assert rule.stay is not None
    found = rule.stay(meaning.others(outputs, x, noise), x, noise, earlier)
    expected = law.gather(1, x[:, None]).squeeze(1)
    # where no jump is possible, a position stays whatever its probability
    jumps = expected < 1 - 1e-12
    torch.testing.assert_close(found[jumps], expected[jumps], rtol=1e-9, atol=1e-12)
    assert jumps.sum() > 30


# ---- recordings ------------------------------------------------------------------------------------------------------


def rerun(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], pool: object) -> Any:
    """Stand-in for a CUDA graph: the same input and output tensors at every replay."""
    outputs = function(*inputs)

    def replay() -> None:
        for room, values in zip(outputs, function(*inputs), strict=True):
            room.copy_(values)

    return graphs._Recording(replay, inputs, outputs)


class RecordingNetwork:
    """A CPU network that records like a GPU network."""

    capabilities = Capabilities(features=True, recorder=True)

    device, recorded = torch.device("cpu"), graphs.GraphedNetwork.recorded
    records, recorded_in = graphs.GraphedNetwork.records, graphs.GraphedNetwork.recorded_in

    def __init__(self, model: Transformer) -> None:
        self._model, self.head, self.captured = model, model.head, 0
        self._recorder, self._records, self._used = Recorder(self._capture), True, set[Any]()
        self._made = list[Tensor]()

    def features(self, *given: Any, **options: Any) -> Tensor:
        """The model's features. GPU recordings share memory, so the results of earlier ones are overwritten."""
        given = tuple(value.clone() for value in given)
        for value in self._made:
            value.fill_(-7)
        return self._model.features(*given, **options)

    def _capture(self, *what: Any) -> Any:
        self.captured += 1
        made = rerun(*what)
        self._made += made.outputs
        return made


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("absorb", "cedd", {}),
        ("absorb", "cedd", {"sampler": "first-hitting"}),
        ("roulette", "bayes", {}),
        pytest.param("uniform", "cedd", {"sampler": "euler"}, marks=pytest.mark.slow),
        ("uniform", "cedd", {"exclude": (3, 4)}),
    ],
)
def test_recorded_decisions_match_plain_ones(name: str, method: str, options: dict[str, Any]) -> None:
    process = getattr(cedd, name)(20)
    model = transformer(process)
    recording = RecordingNetwork(model)
    for seed in range(2):
        generators = (torch.Generator().manual_seed(seed) for _ in range(2))
        x, y = (
            sample(made, process, (5, 16), method=method, steps=16, generator=generator, deterministic=False, **options)
            for made, generator in zip((recording, model), generators, strict=True)
        )
        assert torch.equal(x, y)
    assert 0 < recording.captured < 16  # once for each size of a step, for all samples


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"temperature": 0.5}])
def test_value_dependent_sharpening_is_not_recorded(options: dict[str, Any]) -> None:
    process = cedd.roulette(20)
    recording = RecordingNetwork(transformer(process))
    drawn(recording, process, "bayes", steps=10, **options)
    assert recording.captured == 0


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule.of_tensors])
@pytest.mark.parametrize(("name", "method"), [("roulette", "bayes"), ("uniform", "cedd-star")])
def test_rules_declared_of_tensors_do_not_inspect_values(rule: StepRule, name: str, method: str) -> None:
    """Tensors on the meta device have no values."""
    process, parameterization = getattr(cedd, name)(20), cedd.get_method(method).parameterization
    assert isinstance(parameterization, Affine)
    jump = grid_sampler.Jump(rule, parameterization, Sharpening(excluded=(3,)), (20, process.has_mask))
    numbers = torch.empty(6, dtype=torch.float64, device="meta")
    levels = torch.empty(6, 2, 5, dtype=torch.float64, device="meta")
    drawn = jump(torch.empty(6, 20, device="meta"), numbers.long(), numbers, numbers, levels)
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((6,), torch.int64, "meta")


def test_many_rows_are_not_recorded() -> None:
    process = cedd.absorb(20)
    recording = RecordingNetwork(transformer(process))
    drawn(recording, process, "cedd", shape=(MOST_ROWS // 8, 16), steps=1)
    assert recording.captured == 0


def test_recorded_outputs_are_checked() -> None:
    process = cedd.absorb(20)
    model = transformer(process)
    torch.nn.init.constant_(model.head.bias, torch.nan)
    with pytest.raises(ValueError, match="the network returned nan"):
        drawn(RecordingNetwork(model), process, "cedd", steps=10)


def test_oldest_recordings_are_dropped(monkeypatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_RECORDINGS", 2)
    captured: list[int] = []

    def capture(function: Any, inputs: tuple[Tensor, ...], pool: object) -> Any:
        captured.append(len(inputs[0]))
        return rerun(function, inputs, pool)

    def double(x: Tensor) -> tuple[Tensor]:
        return (2 * x,)

    recorder = Recorder(capture)
    for room in (1, 2, 3, 3, 2, 1):
        assert recorder(double, [torch.full((1,), float(room))], [room])[0][0] == 2 * room
    assert captured == [1, 2, 3, 1]


LETTERS = "abcdefghijklmnopqrst"


def in_language(pattern: str, first: int = 0, **others: Any) -> LanguageConstraint:
    """Tokens from index `first` on form a text of the language; earlier ones are c."""
    compiled = TokenLanguage(compile_tokens(regex(pattern).automaton, CharTokenizer(LETTERS).texts, may_end=False))
    held = cedd.Fixed(torch.full((16,), 2), torch.arange(16) < first)
    return LanguageConstraint.of(16, [Span(first, 16, compiled, name=pattern, **others)]).holding(held)


@pytest.mark.parametrize(
    ("sampler", "options"),
    covering(
        product(("analytic", "first-hitting"), ({}, {"temperature": 0.5}, {"temperature": 0}, {"exclude": (0, 5)}))
    ),
)
def test_recorded_language_draws_match_plain_ones(sampler: str, options: dict[str, Any]) -> None:
    process = cedd.absorb(20)
    model, constraint = transformer(process), in_language("[a-f]{2,5}[^a]*(tt?|sr*)", first=3)
    recording = RecordingNetwork(model)
    how = {"constraint": constraint, "sampler": sampler, "steps": 6, "deterministic": False, **options}
    for seed in range(2):
        x, y = (
            sample(made, process, (3, 16), method="cedd", seeds=range(seed, seed + 3), **how)
            for made in (recording, model)
        )
        assert torch.equal(x, y)
        assert all(constraint.spans[0].language.automaton.matches(row) for row in x[:, 3:].tolist())
        assert bool(recording.captured) == (seed > 0)  # at the second use
    shown = list[Tensor]()
    sample(recording, process, (5, 16), method="cedd", callback=lambda *now: shown.append(now[2]), seed=0, **how)
    assert (torch.stack(shown) == 20).sum((1, 2)).diff().max() <= 0  # no state is overwritten


def test_recorded_draw_serves_other_temperatures_and_sends_masks_once(monkeypatch) -> None:
    process, constraint = cedd.absorb(20), in_language("[a-f]{2,5}[^a]*(tt?|sr*)")
    model = transformer(process)
    recording, captured = RecordingNetwork(model), list[int]()
    for temperature in (0.5, 0.5, 2):
        how = {"constraint": constraint, "temperature": temperature, "seeds": range(5), "deterministic": False}
        x, y = (sample(made, process, (5, 16), method="cedd", steps=6, **how) for made in (recording, model))
        assert torch.equal(x, y)
        captured.append(recording.captured)
    assert 0 == captured[0] < captured[1] == captured[2]
    masked = torch.ones(5, 16, dtype=torch.bool)
    steps = torch.tensor([[0.5, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]).double()
    plan = Plan(grid_sampler.Chances(*steps), masked, ~masked, RandomNumbers(range(5), 16), True, follows=True)
    first, second = plan.calls(0, 2, torch.device("meta"))  # tensors there have no values
    for call, count in ((first, 80), (second, 80 - len(first.places))):
        assert call.places.host is not None
        assert len(call.places.host.masks) == count
        assert call.places.host.masks_on(torch.device("meta")) is call.places.host.sent


def test_impossible_language_and_failed_recording() -> None:
    process = cedd.absorb(20)
    recording, how = RecordingNetwork(transformer(process)), {"method": "cedd", "sampler": "analytic", "steps": 3}
    how |= {"deterministic": False, "seed": 1}
    impossible, possible = in_language("[ab]*"), in_language("[ac]*")
    message = r"^every text that satisfies \[ab\]\* has probability 0: its tokens are excluded"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            sample(recording, process, (5, 16), constraint=impossible, exclude=(0, 1), **how)
    assert recording.captured

    def failing(*_: Any) -> Any:
        raise RuntimeError("an operation that cannot be recorded\nin detail")

    recording._recorder = Recorder(failing)
    expected = sample(recording, process, (5, 16), constraint=possible, **how)
    with pytest.warns(UserWarning, match=r"could not be recorded as a CUDA graph.*\(an operation that .* recorded\)$"):
        found = sample(recording, process, (5, 16), constraint=possible, **how)
    assert torch.equal(found, expected)


# ---- plans and draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "largest"), [(1, 32), (5, 32), (100, 32), (7, 1)])
def test_step_blocks_start_small_and_cover_all_steps(steps: int, largest: int) -> None:
    found = list(blocks(steps, largest))
    assert [k for start, stop in found for k in range(start, stop)] == list(range(steps))
    assert found[0] == (0, 1)
    assert max(stop - start for start, stop in found) <= largest


def test_nan_row_draws_valid_token_index() -> None:
    """On a GPU, NaN is reported only at the end; until then no index may be out of bounds."""
    assert int(inverse_cdf(torch.full((1, 11), torch.nan), torch.tensor([0.5]), log=True)) < 11


@pytest.mark.parametrize("process", ["absorb", "roulette", "uniform", "hybrid"])
@pytest.mark.parametrize("method", ["cedd", "bayes"])
def test_jump_weights_from_probabilities_match_log_probabilities(process, method):
    """For ordinary rows, rows whose last probability underflows, and rows that are certain of a token."""
    made, parameterization = getattr(cedd, process)(6), cedd.get_method(method).parameterization
    assert isinstance(parameterization, Affine)
    x = torch.arange(made.num_states).repeat_interleave(3)
    outputs = 3 * torch.randn(len(x), 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs[::3, -1] = -2000.0
    outputs[1::3, 2] = 900.0
    for (t, s), rule, sharpening in product(
        ((0.99, 0.5), (0.5, 0.499), (0.1, 1e-5)), RULES.values(), (Sharpening(), Sharpening(excluded=(5,)))
    ):
        if rule.name.startswith("remask") and process != "absorb":
            continue  # these rules need absorb
        now, next_ = made.noise(t).like(x), made.noise(s).like(x)
        leap, probs = leap_of(rule, parameterization, sharpening, outputs, x, now, next_)
        log_probs = beliefs(parameterization, sharpening, outputs, x, now)
        torch.testing.assert_close(probs, log_probs.exp(), rtol=1e-12, atol=1e-14)
        by_logs = rule.leap(parameterization.coefficients(at_token(log_probs, x), x, now), next_)
        for part, wanted in zip(vars(leap).values(), vars(by_logs).values(), strict=True):
            torch.testing.assert_close(part, wanted, rtol=1e-12, atol=1e-14)
        weights = torch.addcmul(by_logs.floor[:, None], by_logs.slope[:, None], log_probs.exp()).clamp_min(0.0)
        weights = sharpening.without(put_at_token(weights, x, 0.0, now.is_mask(x)), 0.0)
        torch.testing.assert_close(jump_weights(leap, probs, x, now, sharpening), weights, rtol=1e-12, atol=1e-14)
