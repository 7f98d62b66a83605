"""What is recorded on a CUDA device is recorded undisturbed."""

import gc
from contextlib import contextmanager

import pytest
import torch

from cedd.device import recorded_graph


@contextmanager
def no_recording(graph, **options):
    yield


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_during_a_recording(collects, monkeypatch):
    """A graph in it would be destroyed, which ends the recording; afterwards all is as before, after an error too."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", no_recording)
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
def test_a_forgotten_graph_does_not_end_a_recording():
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
