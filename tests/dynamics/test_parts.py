"""Dynamics as a part of a method: invalid combinations fail at construction, and custom dynamics work everywhere."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import cedd
from cedd import Bayes
from cedd.dynamics import DYNAMICS, Causal, Corrector, Dynamics, Flow, Reversal, StepRule
from cedd.dynamics.reverse import RULES
from cedd.methods import method_from_config
from cedd.objectives import WEIGHTS, CrossEntropy, ScoreEntropy
from cedd.parameterization import PARAMETERIZATIONS
from cedd.process import Noise

V = 4


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((cedd.Score(), CrossEntropy()), "Score gives ratios; use Denoiser or Bayes"),
        ((cedd.Score(), ScoreEntropy(), Flow()), "flow matching learns"),
        ((cedd.Bayes(), CrossEntropy(), Flow()), "flow matching learns"),
        ((cedd.Denoiser(), ScoreEntropy(), Flow()), "flow matching learns"),
        ((cedd.Bayes(), CrossEntropy(), Causal()), "an autoregressive model learns"),
        ((cedd.Denoiser(), ScoreEntropy(), Causal()), "an autoregressive model learns"),
    ],
)
def test_invalid_combinations_are_rejected_at_construction(parts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cedd.Method("wrong", *parts)


def test_time_reversal_is_the_default() -> None:
    assert cedd.Method("mine", cedd.Bayes(), CrossEntropy()).dynamics == Reversal()
    assert [name for name, method in cedd.METHODS.items() if not method.dynamics.noisy] == ["ar"]


def test_corrector_needs_flow_matching() -> None:
    corrector = Corrector(0.5)
    assert Flow().with_corrector(corrector) == Flow(corrector)
    for dynamics in (Reversal(), Causal()):
        with pytest.raises(ValueError, match="belongs to flow matching"):
            dynamics.with_corrector(corrector)
    with pytest.raises(TypeError, match=r"corrector must be a cedd\.Corrector"):
        Flow().with_corrector(0.5)


@dataclass(frozen=True)
class Picky(Reversal):
    """Time reversal for processes with a mask only, without the paper's bounds."""

    bounds = ("tight",)

    def check_process(self, process: cedd.TokenProcess) -> None:
        if not process.has_mask:
            raise ValueError("picky needs a mask")


def test_custom_dynamics_are_used_by_loss_bound_and_sampler() -> None:
    bayes = cedd.METHODS["bayes"]
    method = cedd.Method("picky", bayes.parameterization, bayes.objective, Picky())

    def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_t.shape, V)

    x0 = torch.zeros(2, 3, dtype=torch.int64)
    for call in (
        lambda: cedd.loss(model, cedd.uniform(V), x0, method=method),
        lambda: cedd.estimate_bound(model, cedd.uniform(V), x0, method=method),
        lambda: cedd.exact_bound(model, cedd.uniform(V), torch.full((V,), 1 / V), method=method),
        lambda: cedd.sample(model, cedd.uniform(V), (2, 3), method=method),
    ):
        with pytest.raises(ValueError, match="picky needs a mask"):
            call()
    with pytest.raises(ValueError, match="picky has its own bound and no j1"):
        cedd.estimate_bound(model, cedd.absorb(V), x0, method=method, bound="j1")
    p0 = torch.full((V,), 1 / V, dtype=torch.float64)
    assert cedd.exact_bound(model, cedd.absorb(V), p0, method=method) == pytest.approx(torch.tensor(V).log().item())


def test_causal_dynamics_have_no_rules_or_target() -> None:
    assert set(Flow().rules()) <= set(Reversal().rules())
    for call in (lambda: Causal().rules(), lambda: Causal().target()):
        with pytest.raises(ValueError, match="no noise process"):
            call()
    assert all(isinstance(method.dynamics, Dynamics) for method in cedd.METHODS.values())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            (cedd.Denoiser, CrossEntropy()),
            "the parameterization of a method must be an instance of Parameterization \\(got <class",
        ),
        (
            (cedd.Denoiser(), "cross entropy"),
            "the objective of a method must be an instance of Objective \\(got 'cross entropy'",
        ),
        (
            (cedd.Denoiser(), CrossEntropy(), None),
            "the dynamics of a method must be an instance of Dynamics \\(got None",
        ),
    ],
)
def test_part_of_wrong_type_is_named_in_error(parts, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cedd.Method("wrong", *parts)


@dataclass(frozen=True)
class WithStay(Reversal):
    """Time reversal with an additional rule under which nothing moves."""

    def rules(self) -> Mapping[str, StepRule]:
        euler = RULES["euler"]

        def stays(score, earlier):
            leap = euler.leap(score, earlier)
            return replace(leap, stay=torch.ones_like(leap.stay))

        return {**RULES, "stay": StepRule.from_leap("stay", stays)}


def through_json(method: cedd.Method) -> cedd.Method:
    return method_from_config(json.loads(json.dumps(method.config())))


def test_method_round_trips_through_json() -> None:
    """Registered methods also by name, with any parameters of their parts."""
    for method in cedd.METHODS.values():
        assert method_from_config(method.name) == method
        for changed in (method, method.with_sigma_floor(0.003), method.with_stop(0.02), replace(method, name="mine")):
            assert through_json(changed) == changed
    corrected = replace(cedd.METHODS["dfm"], dynamics=Flow(Corrector(2.0, 0.5, 0.25), stop=0.01))
    assert through_json(corrected) == corrected


@dataclass(frozen=True)
class Sharpened(Bayes):
    """bayes with its outputs multiplied."""

    factor: float = 2.0


@dataclass(frozen=True)
class Towards:
    """A weight that grows towards a time."""

    time: float = 0.5

    def __call__(self, noise: Noise, x_t: Tensor) -> Tensor:
        return 1 / (1 + (noise.t - self.time).abs())


def late(noise: Noise, x_t: Tensor) -> Tensor:
    return noise.t


def test_custom_method_is_saved_with_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes must be registered; otherwise the error names the registry."""
    mine = cedd.Method("mine", Sharpened(factor=3.0), CrossEntropy(Towards(0.25)), WithStay(stop=0.02))
    tables = {
        "cedd.parameterization.PARAMETERIZATIONS": (PARAMETERIZATIONS, Sharpened),
        "cedd.objectives.WEIGHTS": (WEIGHTS, Towards),
        "cedd.dynamics.DYNAMICS": (DYNAMICS, WithStay),
    }
    for place, (table, kind) in tables.items():
        with pytest.raises(ValueError, match=f"{kind.__name__} cannot be saved: add it to {place}"):
            mine.config()
        monkeypatch.setitem(table, kind.__name__.lower(), kind)
    assert mine.config()["objective"] == {"name": "cross-entropy", "weight": {"name": "towards", "time": 0.25}}
    assert through_json(mine) == mine
    monkeypatch.setitem(WEIGHTS, "late", late)
    by_function = replace(mine, objective=CrossEntropy(late))
    assert by_function.config()["objective"]["weight"] == "late"
    assert through_json(by_function) == by_function
    with pytest.raises(ValueError, match="the weight <lambda> cannot be saved"):
        replace(mine, objective=CrossEntropy(lambda noise, x_t: noise.t)).config()


class Careless(WithStay):
    """Stores a number that is not a dataclass field."""

    def __init__(self, number: float) -> None:
        super().__init__()
        object.__setattr__(self, "number", number)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record.pop("objective"),
            "needs name, parameterization, objective, dynamics; objective is missing",
        ),
        (
            lambda record: record["dynamics"].update(name="reversed"),
            "unknown dynamics 'reversed'; did you mean 'reversal'",
        ),
        (lambda record: record["parameterization"].update(floor=1), "invalid parameterization 'denoiser'"),
        (
            lambda record: record["objective"].update(weight="heavy"),
            "unknown weight 'heavy'; use one of constant, star",
        ),
    ],
)
def test_invalid_records_are_rejected(change, message: str) -> None:
    record = cedd.METHODS["cedd"].config()
    change(record)
    with pytest.raises(ValueError, match=message):
        method_from_config(record)


def test_parameters_outside_fields_cannot_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DYNAMICS, "careless", Careless)
    with pytest.raises(ValueError, match="Careless cannot be saved: make it a frozen dataclass"):
        replace(cedd.METHODS["bayes"], dynamics=Careless(2.0)).config()


def test_rule_of_custom_dynamics_is_selected_by_name() -> None:
    bayes = cedd.METHODS["bayes"]
    method = cedd.Method("staying", bayes.parameterization, bayes.objective, WithStay())

    def draw(method: str | cedd.Method) -> torch.Tensor:
        options = {"sampler": "stay", "steps": 4, "final_denoise": False}
        return cedd.sample(lambda x, _: torch.zeros(*x.shape, V), cedd.absorb(V), (3, 5), method=method, **options)

    assert bool((draw(method) == V).float().mean() > 0.9)  # alive(1) = 0.001 of the prior are tokens
    with pytest.raises(ValueError, match="unknown sampler 'stay'; use one of analytic, euler, tau-leaping, remask"):
        draw("bayes")
