"""Dynamics as a part of a method: what cannot be combined is refused when it is made, and nobody asks what it has."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch

import cedd
from cedd.dynamics import Causal, Corrector, Dynamics, Flow, Reversal, StepRule
from cedd.dynamics.reverse import RULES
from cedd.methods import method_from_config
from cedd.objectives import CrossEntropy, ScoreEntropy

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
def test_a_combination_without_sense_is_refused_when_the_method_is_made(parts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cedd.Method("wrong", *parts)


def test_time_reversal_is_the_default() -> None:
    assert cedd.Method("mine", cedd.Bayes(), CrossEntropy()).dynamics == Reversal()
    assert [name for name, method in cedd.METHODS.items() if not method.dynamics.noisy] == ["ar"]


def test_a_corrector_belongs_to_flow_matching() -> None:
    corrector = Corrector(0.5)
    assert Flow().with_corrector(corrector) == Flow(corrector)
    for dynamics in (Reversal(), Causal()):
        with pytest.raises(ValueError, match="belongs to flow matching"):
            dynamics.with_corrector(corrector)
    with pytest.raises(TypeError, match="a corrector is a"):
        Flow().with_corrector(0.5)


@dataclass(frozen=True)
class Picky(Reversal):
    """Time reversal of processes with a mask only, that has no paper's bounds."""

    bounds = ("tight",)

    def check_process(self, process: cedd.TokenProcess) -> None:
        if not process.has_mask:
            raise ValueError("picky needs a mask")


def test_dynamics_of_your_own_are_asked_by_loss_bound_and_sampler() -> None:
    bayes = cedd.METHODS["bayes"]
    method = cedd.Method("picky", bayes.parameterization, bayes.objective, Picky())

    def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_t.shape, V)

    x0 = torch.zeros(2, 3, dtype=torch.int64)
    for call in (
        lambda: cedd.loss(method, cedd.uniform(V), model, x0),
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


def test_every_dynamics_answers_or_says_why_not() -> None:
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
            "the parameterization of a method must be an instance of Parameterization; got <class",
        ),
        (
            (cedd.Denoiser(), "cross entropy"),
            "the objective of a method must be an instance of Objective; got 'cross entropy'",
        ),
        ((cedd.Denoiser(), CrossEntropy(), None), "the dynamics of a method must be an instance of Dynamics; got None"),
    ],
)
def test_a_part_of_a_wrong_type_is_named(parts, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cedd.Method("wrong", *parts)


def test_a_record_is_read_back_as_the_same_method_or_not_written() -> None:
    for method in cedd.METHODS.values():
        for changed in (method, method.with_sigma_floor(0.003)):
            assert method_from_config(changed.config()) == changed
    bayes, dfm = cedd.METHODS["bayes"], cedd.METHODS["dfm"]
    others = (
        cedd.Method("mine", bayes.parameterization, bayes.objective),
        replace(bayes, name="cedd"),
        replace(dfm, dynamics=Flow(Corrector())),
    )
    for method in others:
        with pytest.raises(ValueError, match=f"{method.name} cannot be saved"):
            method.config()


@dataclass(frozen=True)
class WithStay(Reversal):
    """Time reversal with one more rule, by which nothing moves."""

    def rules(self) -> Mapping[str, StepRule]:
        euler = RULES["euler"]

        def stays(score, earlier):
            leap = euler.leap(score, earlier)
            return replace(leap, stay=torch.ones_like(leap.stay))

        return {**RULES, "stay": StepRule.from_leap("stay", stays)}


def test_a_rule_that_only_your_dynamics_have_is_called_by_its_name() -> None:
    bayes = cedd.METHODS["bayes"]
    method = cedd.Method("staying", bayes.parameterization, bayes.objective, WithStay())

    def draw(method: str | cedd.Method) -> torch.Tensor:
        options = {"sampler": "stay", "steps": 4, "final_denoise": False}
        return cedd.sample(lambda x, _: torch.zeros(*x.shape, V), cedd.absorb(V), (3, 5), method=method, **options)

    assert bool((draw(method) == V).float().mean() > 0.9)  # alive(1) = 0.001 of the prior are tokens
    with pytest.raises(ValueError, match="unknown sampler 'stay'; use one of analytic, euler, tau-leaping, remask"):
        draw("bayes")
