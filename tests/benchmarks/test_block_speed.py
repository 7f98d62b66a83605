"""benchmarks/block_speed.py with a tiny network: the figures that it compares."""

import json
from typing import Any

import pytest

from tests.benchmarks.scripts import definitions


def test_block_speed_is_compared_with_full_diffusion(capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    benchmark = definitions("block_speed")
    draw, calls = benchmark.LoadedModel.draw, list[Any]()

    def counted(model: Any, shape: Any, options: Any) -> Any:
        calls.append((model.method.block, options.sampler, options.steps, shape))
        return draw(model, shape, options)

    monkeypatch.setattr(benchmark.LoadedModel, "draw", counted)
    sizes = {"preset": "tiny", "vocab_size": 9, "shape": "4x8", "length": 8, "block": 4, "steps": 1, "warmup": 0}
    benchmark.main(benchmark.Arguments(**sizes, device="cpu", json=True))
    rows = json.loads(capsys.readouterr().out)["rows"]
    kinds = ["training step", "sampling, analytic", "sampling, first-hitting"]
    assert [row["what"] for row in rows] == [what + end for what in kinds for end in ("", " in blocks")]
    for full, blocks in zip(rows[::2], rows[1::2], strict=True):
        assert blocks["times"] == pytest.approx(blocks["milliseconds"] / full["milliseconds"])
    shape = (1, 8)  # one call per token
    once = [(None, "analytic", 8), (4, "analytic", 4), (None, "first-hitting", None), (4, "first-hitting", None)]
    assert calls == [(*how, shape) for how in once for _ in range(2)]  # the first one is not timed
    with pytest.raises(ValueError, match="blocks of 5 do not divide a length of 8"):
        benchmark.training(benchmark.Arguments(**{**sizes, "block": 5}, device="cpu"))
    with pytest.raises(ValueError, match="--block must be at least 1"):
        benchmark.Arguments(block=0).check()
