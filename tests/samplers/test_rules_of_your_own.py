"""Custom step rules passed to `sample`, for networks that give probabilities."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import cedd
from cedd.cli import UserError
from cedd.cli.sampling import check_names
from cedd.parameterization import AffineScore, Denoiser
from cedd.process import Noise
from cedd.samplers import (
    GRIDS,
    RULES,
    SAMPLERS,
    Leap,
    SamplingOptions,
    StepRule,
    check_rule,
    flow_rules,
    remask_capped,
    remask_rescaled,
)
from tests.samplers.chains import ERROR_RATE, combined, p_value

V = 4


REVERSING = {name: rule for name, rule in RULES.items() if rule.only_reverses}


def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Arbitrary predictions that depend on token and time."""
    preferences = torch.tensor([1.0, 0.5, -0.5, 0.0])
    return preferences + 0.3 * x_t[..., None] + sigma[:, None, None] * torch.arange(V)


def remask_leap(score: AffineScore, earlier: Noise) -> Leap:
    """A fifth of the tokens are masked again, and correspondingly more masks are revealed."""
    noise, masked = score.noise, score.masked
    remask = torch.full_like(noise.t, 0.2).minimum(earlier.a / noise.alive)
    stay = torch.where(masked, (earlier.a - noise.alive * remask) / noise.a, 1 - remask)
    nothing = torch.zeros_like(stay)
    return Leap(stay, torch.where(masked, nothing, remask), nothing, masked.double())


REMASK = StepRule.from_leap("remask", remask_leap, jump_first=True)


@pytest.mark.parametrize("name", list(REVERSING))
def test_rule_object_matches_its_name(name: str):
    def draw(sampler: str | StepRule) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        process = cedd.roulette(V)
        return cedd.sample(model, process, (8, 16), method="bayes", sampler=sampler, steps=8, generator=generator)

    assert torch.equal(draw(name), draw(RULES[name]))


def test_law_from_leap_is_correct():
    process = cedd.absorb(V)
    noise, earlier = process.noise(0.6), process.noise(0.5)
    x_t = torch.tensor([V, 0, 3])
    outputs = torch.randn(3, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    law = REMASK.law(Denoiser(), outputs, x_t, noise.like(x_t), earlier.like(x_t))
    torch.testing.assert_close(law.sum(-1), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(law[1], torch.tensor([0.8, 0, 0, 0, 0.2], dtype=torch.float64))
    revealed = 1 - law[0, V]
    torch.testing.assert_close(law[0, :V], revealed * torch.softmax(outputs[0], -1))
    torch.testing.assert_close(law[0, V], (earlier.a - noise.alive * 0.2) / noise.a)


def test_remasking_keeps_mask_fraction():
    """After every step a(s) of the positions are masks: 4000 of them, five standard errors (false alarms of 6e-7)."""
    process, seen = cedd.absorb(V), {}

    def callback(step: int, t: float, x: torch.Tensor) -> None:
        seen[t] = float((x == V).double().mean())

    cedd.sample(
        model,
        process,
        (100, 40),
        method="cedd",
        sampler=REMASK,
        steps=10,
        callback=callback,
        generator=torch.Generator().manual_seed(0),
    )
    for t, share in seen.items():
        expected = float(process.kernel(t).a)
        assert abs(share - expected) <= 5 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-12, t


def test_unsupported_uses_of_custom_rule_are_rejected():
    with pytest.raises(ValueError, match="'remask' needs probabilities"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="sedd", sampler=REMASK, steps=4)
    with pytest.raises(ValueError, match="corrector belongs to flow matching's own rules"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="dfm", sampler=REMASK, corrector=cedd.Corrector())
    with pytest.raises(ValueError, match="unknown sampler 'remask'; use remask-capped or"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="cedd", sampler="remask")


@pytest.mark.parametrize("jump_first", [True, False])
@pytest.mark.parametrize(("method", "steps"), [("cedd", 4), ("bayes", 7)])
def test_rule_with_probability_above_one_is_rejected(jump_first: bool, method: str, steps: int):
    """A token is masked again with probability 8 h, which exceeds one for fewer than 8 steps."""

    def leap(score: AffineScore, earlier: Noise) -> Leap:
        remask = torch.where(score.masked, 0.0, 8 * (score.noise.t - earlier.t))
        stay = torch.where(score.masked, earlier.a / score.noise.a, 1 - remask)
        return Leap(stay, remask, torch.zeros_like(stay), score.masked.double())

    rule = StepRule.from_leap("greedy", leap, jump_first=jump_first)
    message = r"the step rule 'greedy' has no law from t = 1 to 0\.\d+: the probability 'stay' of a token is -"
    with pytest.raises(ValueError, match=message):
        cedd.sample(model, cedd.absorb(V), (2, 4), method=method, sampler=rule, steps=steps)
    cedd.sample(model, cedd.absorb(V), (2, 4), method=method, sampler=rule, steps=8)


def test_command_line_accepts_all_registered_names():
    for sampler in SAMPLERS:
        check_names(SamplingOptions(sampler=sampler))
    for grid in GRIDS:
        check_names(SamplingOptions(grid=grid))
    with pytest.raises(UserError, match="did you mean 'jumps'"):
        check_names(SamplingOptions(grid="jump"))


# ---- rules unsupported by jump-first -------------------------------------------------------------------------------


def remask_improbable(score: AffineScore, earlier: Noise) -> Leap:
    """The less probable a token, the more likely it is masked again."""
    p_mask = torch.where(score.masked, 0.0, 0.3 * -torch.expm1(score.log_prob_x))
    stay = torch.where(score.masked, earlier.a / score.noise.a, 1 - p_mask)
    nothing = torch.zeros_like(stay)
    return Leap(stay, p_mask, nothing, torch.ones_like(stay))


def redraw_uncertain(score: AffineScore, earlier: Noise) -> Leap:
    """Tokens are redrawn where f_x is near a half: `stay` falls and rises."""
    f = torch.exp(score.log_prob_x)
    stay = torch.where(score.masked, earlier.a / score.noise.a, 1 - 0.8 * f * (1 - f))
    nothing = torch.zeros_like(stay)
    return Leap(stay, nothing, nothing, torch.ones_like(stay))


def reveal_evenly(score: AffineScore, earlier: Noise) -> Leap:
    """A mask becomes any token, the likely ones somewhat more often."""
    stay = torch.where(score.masked, earlier.a / score.noise.a, 1.0)
    masked = score.masked.double()
    return Leap(stay, torch.zeros_like(stay), 0.2 * masked, masked)


def reveal_likely(score: AffineScore, earlier: Noise) -> Leap:
    """A mask becomes a token of probability above 0.6, and stays if there is none."""
    stay = torch.where(score.masked, earlier.a / score.noise.a, 1.0)
    masked = score.masked.double()
    return Leap(stay, torch.zeros_like(stay), -0.6 * masked, masked)


@pytest.mark.parametrize("leap", [remask_improbable, redraw_uncertain, reveal_evenly, reveal_likely])
@pytest.mark.parametrize("jump_first", [False, True])
def test_samples_follow_law_of_rule(leap, jump_first: bool):
    """One step from t = .5 to .4 of 4000 copies of each state; only `reveal_evenly` may be declared jump_first."""
    if jump_first and leap is not reveal_evenly:
        with pytest.raises(ValueError, match="jump_first is false"):
            check_rule(StepRule.from_leap("wrong", leap, jump_first=True), cedd.absorb(V))
        return
    process, rule = cedd.absorb(V), StepRule.from_leap("other", leap, jump_first=jump_first)
    check_rule(rule, process)
    states = torch.arange(V + 1)
    sigma = process.sigma(0.5).float()[None]
    law = rule.law(
        Denoiser(), model(states[:, None], sigma)[:, 0].double(), states,
        process.noise(0.5).like(states), process.noise(0.4).like(states),
    ).numpy()  # fmt: skip
    drawn = cedd.sample(
        model, process, (4000 * (V + 1), 1), method="cedd", sampler=rule, grid=torch.tensor([0.5, 0.4]).double(),
        final_denoise=False, x_start=states.repeat_interleave(4000)[:, None], seeds=range(4000 * (V + 1)),
    ).view(V + 1, 4000).numpy()  # fmt: skip
    values = [p_value(np.bincount(drawn[i], minlength=V + 1), law[i]) for i in range(V + 1)]
    assert combined(values) > ERROR_RATE


@pytest.mark.parametrize("process", [cedd.absorb(V), cedd.uniform(V), cedd.roulette(V, p_m=0.6)])
def test_registered_rules_match_their_declarations(process: cedd.TokenProcess):
    for rule in REVERSING.values():
        assert rule.jump_first
        for method in ("cedd", "bayes", "sedd"):
            check_rule(rule, process, method=method)
    if process.has_mask and not process.can_shuffle:
        for rule in flow_rules(cedd.Corrector()).values():
            check_rule(rule, process)
        for rule in (REMASK, remask_capped(0.3), remask_rescaled(1.0)):
            check_rule(rule, process)


@pytest.mark.parametrize("name", ["remask-capped", "remask-rescaled"])
def test_remasking_needs_absorb(name: str):
    for process, message in ((cedd.uniform(V), "has no masks"), (cedd.roulette(V), "only masks")):
        with pytest.raises(ValueError, match=message):
            cedd.sample(model, process, (2, 4), method="bayes", sampler=name, steps=4)
    with pytest.raises(ValueError, match="needs probabilities"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="sedd", sampler=name, steps=4)
    with pytest.raises(ValueError, match=r"must be in \[0, 1\] \(got 2"):
        remask_capped(2)


def test_false_declarations_are_detected():
    process = cedd.absorb(V)
    with pytest.raises(ValueError, match=r"'remask'.*only_reverses is false"):
        check_rule(replace(REMASK, only_reverses=True), process)
    with pytest.raises(ValueError, match="its leap has another law"):
        check_rule(replace(REMASK, law=RULES["analytic"].law), process)
    with pytest.raises(ValueError, match="whether a mask stays depends on the network"):
        check_rule(StepRule.from_leap("x", lambda score, earlier: replace(
            remask_leap(score, earlier), stay=torch.where(score.masked, 0.5 * score.log_prob_x.exp(), 0.8)
        ), jump_first=True), process)  # fmt: skip
