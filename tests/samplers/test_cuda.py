"""On a CUDA device: recorded graphs match the network, and samples follow the same laws."""

import warnings

import numpy as np
import pytest
import torch

import cedd
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Capabilities
from cedd.samplers import CONFIDENCE_ORDERS, Fixed, GraphedBlocks, GraphedNetwork, sample
from tests.samplers.chains import ERROR_RATE, p_value
from tests.samplers.languages import constraint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def network(process: cedd.TokenProcess, length: int, time_input: str = "sigma") -> Transformer:
    torch.manual_seed(0)
    states = {"vocab_size": process.vocab_size, "has_mask": process.has_mask}
    config = config_from_preset("tiny", **states, length=length, time_input=time_input)
    model = Transformer(config).cuda().eval()
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


@pytest.mark.parametrize("batch", [1, 3, 5, 8, 11])
def test_graphs_match_network(batch):
    """Up to bfloat16 rounding, for batch sizes between two recorded ones and one larger than all."""
    process = cedd.roulette(50)
    model = network(process, 16)
    graphed = GraphedNetwork(model, 8, 16)
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        x = torch.randint(51, (batch, 16), device="cuda", generator=generator)
        sigma = torch.rand(batch, device="cuda", generator=generator) * 5
        expected, got = model.features(x, sigma), graphed.features(x, sigma).clone()
        assert (expected - got).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(
    ("process", "sampler"), [("absorb", "first-hitting"), ("absorb", "analytic"), ("roulette", "analytic")]
)
def test_cuda_samples_are_reproducible_and_keep_fixed_tokens(process, sampler):
    made = getattr(cedd, process)(50)
    graphed = GraphedNetwork(network(made, 16), 8, 16)
    held = Fixed(torch.arange(16), torch.arange(16) % 3 == 0)
    options = {"method": "cedd", "sampler": sampler, "steps": 40, "constraint": held}
    x, y = (sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options) for _ in range(2))
    assert x.is_cuda
    assert torch.equal(x, y)
    assert x.max() < 50
    assert torch.equal(x.cpu()[:, held.where], held.tokens[held.where].expand(8, -1))


@pytest.mark.parametrize("method", ["sedd", "sedds"])
def test_ratio_networks_are_sampled_with_graphs(method):
    """Dense steps: the recorded features are in bfloat16, the head is in float32."""
    made = cedd.absorb(50)
    graphed = GraphedNetwork(network(made, 16), 8, 16)
    x = sample(graphed, made, (8, 16), method=method, steps=20, generator=torch.Generator().manual_seed(3))
    assert x.max() < 50


@pytest.mark.parametrize("places", [1, 3, 5, 30, 60])
def test_graphs_compute_requested_places(places):
    model = network(cedd.roulette(50), 16)
    graphed = GraphedNetwork(model, 8, 16)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x, sigma = torch.randint(51, (5, 16), generator=generator).cuda(), torch.rand(5, generator=generator).cuda()
        where = torch.randperm(80, generator=generator)[:places].cuda()
        expected = model.features(x, sigma).flatten(0, 1)[where]
        got = graphed.features(x, sigma, where=where).flatten(0, 1)[where]
        assert (expected - got).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize(("process", "method"), [("absorb", "cedd"), ("roulette", "bayes"), ("uniform", "cedd")])
def test_recorded_decisions_match_plain_ones(process, method, monkeypatch):
    made = getattr(cedd, process)(50)
    graphed = GraphedNetwork(network(made, 16), 8, 16)
    options = {"method": method, "steps": 40}
    recorded = sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options)
    monkeypatch.setattr(GraphedNetwork, "recorded", lambda *_: None)
    assert torch.equal(recorded, sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("process", "method"), [("absorb", "cedd"), ("roulette", "bayes"), ("uniform", "cedd")])
@pytest.mark.parametrize("recorded", [True, False])
def test_no_step_synchronizes_with_device(process, method, recorded, monkeypatch):
    made = getattr(cedd, process)(50)
    graphed = GraphedNetwork(network(made, 16), 8, 16)
    if not recorded:
        monkeypatch.setattr(GraphedNetwork, "recorded", lambda *_: None)
    options = {"method": method, "steps": 40}
    sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options)  # records

    def strict(step: int, t: float, x: torch.Tensor) -> None:
        torch.cuda.set_sync_debug_mode("error" if 0 < step < 41 else "default")

    try:
        sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), callback=strict, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("sampler", "process", "waits"),
    [("gibbs", "absorb", 8), ("gibbs", "roulette", 8), ("remask-confidence", "absorb", 6), ("stratified", "uniform", 6)]
    + [(order, "absorb", 8) for order in CONFIDENCE_ORDERS],
)
def test_steps_rarely_synchronize_with_device(sampler, process, waits):
    """A network without time conditioning is called like any other: the host does not inspect the texts."""
    made = getattr(cedd, process)(50)
    graphed = GraphedNetwork(network(made, 16, time_input="none"), 8, 16)
    assert not graphed.capabilities.time_conditioned
    options = {"method": "bayes", "sampler": sampler, "steps": 8}
    first = sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options)  # records
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            again = sample(graphed, made, (8, 16), generator=torch.Generator().manual_seed(3), **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    assert bool((first < 50).all())
    assert len(waited) < waits * 9 + 20


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sampler", ["analytic", "first-hitting"])
def test_recorded_language_draws_match_plain_ones(sampler):
    """Recorded on second use, equal to the plain operations up to rounding, and almost without synchronization."""
    made, kept = cedd.absorb(4), constraint("(ab|c)*", 4, 16)
    graphed = GraphedNetwork(network(made, 16), 8, 16)
    options = {"method": "cedd", "sampler": sampler, "steps": 16, "constraint": kept}
    alone, first = (sample(graphed, made, (8, 16), seeds=range(8), **options) for _ in range(2))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waited:
            warnings.simplefilter("always")
            again = sample(graphed, made, (8, 16), seeds=range(8), **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphed._records
    assert torch.equal(first, again)
    assert (first == alone).float().mean() > 0.8
    assert all(kept.spans[0].language.automaton.matches(row) for row in again.tolist())
    assert len(waited) < 20


@pytest.mark.parametrize(("process", "sampler"), [("absorb", "first-hitting"), ("roulette", "analytic")])
def test_recorded_blocks_match_network(process, sampler):
    """Blocks after a cache, up to bfloat16 rounding; texts beyond the context are reproducible."""
    made = getattr(cedd, process)(50)
    model = network(made, 16)
    graphed, plain = GraphedBlocks(model), GraphedBlocks(model)
    cache, other = graphed.new_cache(3, 16), plain.new_cache(3, 16)
    generator = torch.Generator().manual_seed(1)
    for k in range(4):
        x, sigma = torch.randint(51, (3, 4), generator=generator).cuda(), torch.rand(3, generator=generator).cuda()
        expected = plain.features(x, sigma, cache=other)
        got = graphed.next_block(cache, x, sigma).clone()
        assert (expected - got).abs().max() < 0.05 * expected.abs().max()
        some = graphed.next_block(cache, x[1:2], sigma[1:2], torch.tensor([1]).cuda())
        assert (expected[1:2] - some).abs().max() < 0.05 * expected.abs().max()
        graphed.next_block(cache, x, sigma)
        cache.length = 4 * (k + 1)
    options = {"method": cedd.METHODS["cedd"].in_blocks(4), "sampler": sampler, "context": 16, "seed": 3}
    texts = [cedd.sample(graphed, made, (5, 38), **options) for _ in range(2)]
    assert graphed._records
    assert torch.equal(*texts)
    assert texts[0].max() < 50


@pytest.mark.parametrize("sampler", ["gibbs", "remask-confidence", *CONFIDENCE_ORDERS])
def test_cuda_and_cpu_draw_the_same(sampler):
    """A table of outputs has no rounding from matrix products; exponentials may differ by a bit."""
    process = cedd.absorb(6)

    class Same:
        capabilities = Capabilities(features=True, time_conditioned=False)

        def __init__(self, device):
            self.device = torch.device(device)
            self.table = torch.randn(7, 6, generator=torch.Generator().manual_seed(0)).to(device)

        def features(self, x_t, sigma):
            return self.table[(x_t + x_t.roll(1, -1)) % 7]

        def head(self, features):
            return features

    options = {"method": "bayes", "sampler": sampler, "steps": 6, "seeds": range(20), "temperature": 0.8}
    here, there = (sample(Same(place), process, (20, 16), **options).cpu() for place in ("cpu", "cuda"))
    assert (here == there).double().mean() > 0.99


@pytest.mark.parametrize("method", ["sedd", "bayes"])
def test_cuda_step_follows_its_law(method):
    process = cedd.roulette(4)
    logits = torch.tensor([0.1, 1.0, -0.5, 0.3], dtype=torch.float64, device="cuda")

    class Same:
        capabilities = Capabilities(features=True)
        device = torch.device("cuda")

        def features(self, x_t, sigma):
            return torch.zeros(*x_t.shape, 1, device="cuda")

        def head(self, features):
            return logits.expand(*features.shape[:-1], 4)

    times = torch.tensor([0.7, 0.5], dtype=torch.float64)
    x = torch.arange(5).repeat_interleave(4000)[:, None]
    drawn = sample(
        Same(), process, (20000, 1), method=method, grid=times, final_denoise=False, x_start=x,
        generator=torch.Generator("cuda").manual_seed(1),
    ).view(5, 4000).cpu().numpy()  # fmt: skip
    states = torch.arange(5)
    noise, earlier = process.noise(0.7).like(states), process.noise(0.5).like(states)
    parameterization = cedd.get_method(method).parameterization
    law = parameterization.reverse_step(logits.cpu().expand(5, 4), states, noise, earlier).numpy()
    for state in range(5):
        assert p_value(np.bincount(drawn[state], minlength=5), law[state]) > ERROR_RATE
