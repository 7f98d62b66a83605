"""Device selection, undisturbed capture of CUDA graphs, and devices without float64."""

import dataclasses
import gc
import re
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import cedd
from cedd.device import pick_device, recorded_graph
from cedd.models.transformer import Transformer, TransformerConfig
from tests.fake_device import DeviceTensor, device_without_float64


@pytest.mark.parametrize(
    ("name", "cuda", "mps", "said"),
    [
        ("cuda", 0, False, "no CUDA device found, only cpu"),
        ("cuda", 0, True, "no CUDA device found, only cpu and mps"),
        ("mps", 2, False, "no MPS device found, only cpu and cuda"),
        ("cuda:2", 2, False, "device not found: cuda:2 (the last one is cuda:1)"),
        ("mps:1", 0, True, "device not found: mps:1 (the last one is mps:0)"),
        ("cpu:1", 2, False, "device not found: cpu:1 (the last one is cpu:0)"),
        ("cpu", 0, False, None),
        ("cuda:1", 2, False, None),
        ("mps", 0, True, None),
    ],
)
def test_missing_device_error_lists_available_devices(name, cuda, mps, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: cuda)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: mps)
    if said is None:
        assert pick_device(name) == torch.device(name)
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            pick_device(name)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_gets_its_own_device(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [pick_device(name, rank) for rank in (0, 1)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(ValueError, match=r"^device not found: cuda:2 \(the last one is cuda:1\)$"):
        pick_device(name, 2)


@contextmanager
def fake_graph_capture(graph, **options):
    yield


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_disabled_during_graph_capture(collects, monkeypatch):
    """Destroying a collected graph would abort the capture. The setting is restored afterwards, also after an error."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", fake_graph_capture)
    (gc.enable if collects else gc.disable)()
    try:
        with recorded_graph(pool=None):
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError), recorded_graph():
            raise ZeroDivisionError
        assert gc.isenabled() == collects
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_unreachable_graph_does_not_abort_capture():
    x = torch.zeros(8, device="cuda")
    with recorded_graph() as old:
        x.add_(1)
    circle: list[object] = [old]
    circle.append(circle)
    del old, circle
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with recorded_graph() as graph:
            made = [[i] for i in range(1000)]
            y = x + len(made)
    finally:
        gc.set_threshold(*threshold)
    graph.replay()
    assert y.tolist() == [1000.0 + x[0].item()] * 8


# ----------------------------------------------------------------------------------------------------------------
# A device without float64

V, L = 6, 8
PAIRS = [
    *(("cedd", "absorb"), ("cedd", "uniform"), ("bayes", "roulette"), ("sedd", "roulette"), ("sedds", "uniform")),
    *(("dfm", "absorb"), ("ar", "absorb")),
]
MAKERS = {"absorb": cedd.absorb, "uniform": cedd.uniform, "roulette": cedd.roulette}


class Plain(nn.Module):
    """A network that is a lookup table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V + 1, V)

    def forward(self, x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.table(x_t) + 0.1 * sigma[:, None, None]


def small_transformer(method: str) -> Transformer:
    torch.manual_seed(0)
    causal = method == "ar"
    sizes = TransformerConfig(16, 1, 2, 8, vocab_size=V, has_mask=True, length=L, causal=causal)
    model = Transformer(dataclasses.replace(sizes, time_conditioning=not causal))
    nn.init.normal_(model.head.weight, std=0.3)
    return model.eval()


def test_simulated_device_rejects_float64_and_mixed_devices():
    with device_without_float64() as device:
        x = torch.zeros(3).to(device)
        assert isinstance(x, DeviceTensor)
        assert x.device == device
        for wide in (x.double, lambda: torch.zeros(3, dtype=torch.float64, device=device)):
            with pytest.raises(TypeError, match="no float64"):
                wide()
        with pytest.raises(RuntimeError, match="add has tensors of two devices"):
            _ = x + torch.zeros(3)
        assert (x + 1).cpu().tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("method", "process", "use_transformer"),
    [
        *(pytest.param(*pair, True, marks=pytest.mark.slow if pair[0] == "cedd" else ()) for pair in PAIRS),
        ("cedd", "absorb", False),
        pytest.param("sedd", "roulette", False, marks=pytest.mark.slow),
    ],
)
def test_sample_bound_and_loss_without_float64_match_cpu(method: str, process: str, use_transformer: bool):
    """Samples are equal; bound, loss and gradient agree up to float32 rounding."""
    chain, data = MAKERS[process](V), torch.randint(V, (2, L), generator=torch.Generator().manual_seed(1))

    def found(device: torch.device) -> list[torch.Tensor]:
        model = (small_transformer(method) if use_transformer else Plain()).to(device)
        drawn, bound, loss = (torch.Generator().manual_seed(seed) for seed in range(3))
        texts = cedd.sample(model, chain, (2, L), method=method, steps=4, generator=drawn)
        nats = cedd.estimate_bound(model, chain, data, method=method, draws=2, generator=bound).nats_per_token
        total = cedd.loss(model, chain, data.to(device), method=method, generator=loss)
        total.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return [texts.cpu(), torch.tensor(nats), total.detach().cpu(), gradient.cpu()]

    expected = found(torch.device("cpu"))
    with device_without_float64() as device:
        texts, *numbers = found(device)
    assert torch.equal(texts, expected[0])
    for number, right in zip(numbers, expected[1:], strict=True):
        torch.testing.assert_close(number.float(), right.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_process_samples_on_device_without_float64(name: str):
    x0, process = torch.arange(V)[None].repeat(3, 1), MAKERS[name](V)
    with device_without_float64() as device:
        x_t = process.sample(x0.to(device), 0.5, generator=torch.Generator().manual_seed(0))
        assert x_t.device == device
