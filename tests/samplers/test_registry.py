"""The sampler registry, custom samplers, and the options shared by all ways to sample."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch

import cedd
from cedd.cli import main
from cedd.samplers import SAMPLERS, Sampler, SamplingOptions, SamplingRun, SamplingSettings, get_sampler
from docs.examples.my_samplers import REMASKING, AboveThreshold
from tests.tasks.models import save_random

V = 5


def model(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return 0.1 * x_t[..., None] + torch.arange(V) * sigma[:, None, None]


class Constant(Sampler):
    """Every token is 3."""

    name = "constant"

    def sample(self, run: SamplingRun) -> torch.Tensor:
        return torch.full(run.shape, 3)


def test_custom_sampler_is_used_by_name_and_as_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SAMPLERS, "constant", Constant())
    for sampler in ("constant", Constant()):
        drawn = cedd.sample(model, cedd.uniform(V), (2, 4), method="bayes", sampler=sampler)
        assert torch.equal(drawn, torch.full((2, 4), 3))


@pytest.mark.parametrize("sampler", [REMASKING, AboveThreshold()])
def test_sampler_by_import_path_matches_object(sampler: Any) -> None:
    name = {"remasking": "REMASKING", "above-threshold": "AboveThreshold"}[sampler.name]
    how: dict[str, Any] = {"method": "cedd", "steps": 4, "seeds": [1, 2]}
    named = cedd.sample(model, cedd.absorb(V), (2, 8), sampler=f"docs.examples.my_samplers:{name}", **how)
    assert torch.equal(named, cedd.sample(model, cedd.absorb(V), (2, 8), sampler=sampler, **how))


def test_command_line_accepts_sampler_import_path(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save_random(tmp_path / "run", "absorb", "cedd")
    words = ["sample", str(tmp_path / "run"), "--length", "6", "--seed", "1", "--json", "--device", "cpu"]
    assert main([*words, "--sampler", "docs.examples.my_samplers:AboveThreshold"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["samples"]
    assert text == cedd.load(tmp_path / "run", "cpu").generate(length=6, seed=1, sampler=AboveThreshold())[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("docs.examples.nowhere:Sampler", "could not import docs.examples.nowhere for the sampler"),
        ("docs.examples.my_samplers:AboveThresold", "is not a sampler; did you mean 'AboveThreshold'?"),
        ("docs.examples.my_samplers:torch", "torch is not a sampler; use one of"),
        (":torch", "write package:NAME"),
    ],
)
def test_invalid_sampler_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_sampler(name, cedd.METHODS["cedd"]).check(cedd.METHODS["cedd"], cedd.absorb(V))


def test_sampler_names_match_registry_keys() -> None:
    for name, sampler in SAMPLERS.items():
        assert sampler.name == name
    assert get_sampler("euler", cedd.METHODS["ar"]).name == "next-token"
    with pytest.raises(ValueError, match="next-token is for autoregressive models"):
        get_sampler("next-token", cedd.METHODS["cedd"]).check(cedd.METHODS["cedd"], cedd.absorb(V))


def test_options_object_matches_keyword_arguments() -> None:
    how: dict[str, Any] = {"sampler": "euler", "steps": 3, "temperature": 0.7, "seeds": [3, 4], "exclude": (1,)}
    process = cedd.roulette(V)
    given = cedd.sample(model, process, (2, 6), method="bayes", options=SamplingOptions(**how))
    assert torch.equal(given, cedd.sample(model, process, (2, 6), method="bayes", **how))
    changed = SamplingOptions(**{**how, "steps": 9, "sampler": "analytic"})
    assert torch.equal(given, cedd.sample(model, process, (2, 6), method="bayes", options=changed, **how))


def test_sampling_settings_match_option_fields() -> None:
    hints = get_type_hints(SamplingOptions)
    assert {one.name: hints[one.name] for one in fields(SamplingOptions)} == get_type_hints(SamplingSettings)


def test_seed_gives_every_sequence_its_own_seed() -> None:
    drawn = cedd.sample(model, cedd.absorb(V), (3, 4), method="cedd", steps=4, seed=7)
    seeds = cedd.samplers.text_seeds(7, 3)
    assert torch.equal(drawn, cedd.sample(model, cedd.absorb(V), (3, 4), method="cedd", steps=4, seeds=seeds))
    with pytest.raises(ValueError, match="or a generator, not both"):
        cedd.sample(model, cedd.absorb(V), (3, 4), method="cedd", seed=7, generator=torch.Generator())
