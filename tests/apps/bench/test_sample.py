"""The textbook baseline of `cedd bench sample` draws from the same distribution, and the benchmark runs."""

from dataclasses import replace

import pytest
import torch

import cedd
from cedd import network
from cedd.apps.bench.options import BenchOptions
from cedd.apps.bench.sample import bench_sample
from cedd.apps.bench.textbook_sample import textbook_sample
from cedd.parameterization import Denoiser
from cedd.samplers import sample
from tests.samplers.chains import ERROR_RATE, HalvedTable, Table, same_law_p_value


@pytest.mark.parametrize("name", ["absorb", "uniform"])
def test_textbook_sampler_draws_from_our_distribution(name):
    process = getattr(cedd, name)(3)
    model, times = Table(process, 2, seed=6), torch.linspace(1, 0.05, 7, dtype=torch.float64)
    torch.manual_seed(1)
    theirs = textbook_sample(model, name, 3, (15000, 2), times, torch.device("cpu"))
    method = replace(cedd.get_method("cedd"), parameterization=Denoiser(rescale=False))
    start = torch.full((15000, 2), 3) if name == "absorb" else None
    generator = torch.Generator().manual_seed(2)
    ours = sample(
        model, process, (15000, 2), method=method, grid=times, final_denoise=False, x_start=start, generator=generator
    )
    assert same_law_p_value(model.counts(theirs), model.counts(ours)) > ERROR_RATE


def test_bench_has_row_for_every_combination():
    methods = ("cedd/absorb", "sedd/uniform")
    options = BenchOptions(preset="tiny", shapes=((2, 8),), methods=methods, vocab_size=20, steps=5)
    rows = bench_sample(options, textbook_steps=2)
    assert [(row.what, row.sampler) for row in rows] == [
        ("textbook absorb", "analytic"),
        ("cedd/absorb", "analytic"),
        ("cedd/absorb", "first-hitting"),
        ("textbook uniform", "analytic"),
        ("sedd/uniform", "analytic"),
    ]
    assert all(row.milliseconds_per_step > 0 for row in rows)
    assert rows[2].network_calls <= 8
    (one,) = bench_sample(replace(options, samplers=("first-hitting",), textbook=False))
    assert (one.what, one.sampler) == ("cedd/absorb", "first-hitting")


def test_samples_do_not_depend_on_network_device(monkeypatch):
    process = cedd.roulette(4)
    model = HalvedTable(process, 3, seed=9)
    elsewhere = torch.device("cpu", 0)  # the CPU stands for it here
    monkeypatch.setattr(network, "has_float64", lambda device: torch.device(device) != elsewhere)
    x, y = (
        sample(model, process, (32, 3), method="bayes", steps=9, generator=torch.Generator().manual_seed(0), device=d)
        for d in ("cpu", elsewhere)
    )
    assert torch.equal(x, y)
