"""A step rule that is not in the table: handed to `sample` itself, for networks that give probabilities."""

import pytest
import torch

import cedd
from cedd.cli import UserError
from cedd.cli.arguments import SamplerOptions
from cedd.cli.sampling import sampling_options
from cedd.parameterization import AffineScore, Denoiser
from cedd.process import Noise
from cedd.samplers import GRIDS, RULES, SAMPLERS, Leap, StepRule

V = 4


def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Some belief, other at every token and time."""
    preferences = torch.tensor([1.0, 0.5, -0.5, 0.0])
    return preferences + 0.3 * x_t[..., None] + sigma[:, None, None] * torch.arange(V)


def remask_leap(score: AffineScore, earlier: Noise) -> Leap:
    """A fifth of the tokens are masked again, and as many masks more revealed."""
    noise, masked = score.noise, score.masked
    remask = torch.full_like(noise.t, 0.2).minimum(earlier.a / noise.alive)
    stay = torch.where(masked, (earlier.a - noise.alive * remask) / noise.a, 1 - remask)
    nothing = torch.zeros_like(stay)
    return Leap(stay, torch.where(masked, nothing, remask), nothing, masked.double())


REMASK = StepRule.from_leap("remask", remask_leap)


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_of_the_table_handed_over_is_the_one_with_its_name(name: str):
    def draw(sampler: str | StepRule) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        process = cedd.roulette(V)
        return cedd.sample(model, process, (8, 16), method="bayes", sampler=sampler, steps=8, generator=generator)

    assert torch.equal(draw(name), draw(RULES[name]))


def test_the_law_of_a_leap_is_a_law():
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


def test_masking_again_keeps_the_share_of_masks():
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


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="'remask' needs probabilities"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="sedd", sampler=REMASK, steps=4)
    with pytest.raises(ValueError, match="corrector belongs to flow matching's own rules"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="dfm", sampler=REMASK, corrector=cedd.Corrector())
    with pytest.raises(ValueError, match="or a StepRule"):
        cedd.sample(model, cedd.absorb(V), (2, 4), method="cedd", sampler="remask")


def test_the_command_line_takes_what_the_tables_hold():
    for sampler in SAMPLERS:
        assert sampling_options(SamplerOptions(sampler=sampler), seed=None).sampler == sampler
    for grid in GRIDS:
        assert sampling_options(SamplerOptions(grid=grid), seed=None).grid == grid
    with pytest.raises(UserError, match="did you mean 'jumps'"):
        sampling_options(SamplerOptions(grid="jump"), seed=None)
