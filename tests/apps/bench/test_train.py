"""`cedd bench`: methods that are compared on shared cores take turns."""

import json
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch

from cedd.apps.bench.options import machine
from cedd.apps.bench.train import TEXTBOOK, llama, one_by_one, timed_in_turn
from cedd.cli import main
from cedd.cli.arguments import Bench
from cedd.cli.quickstart import device_text
from cedd.models.architectures import build_network
from cedd.models.transformer import SIZES
from cedd.training.config import PRESETS


def test_every_size_can_be_timed_and_trained():
    assert get_args(get_type_hints(Bench)["preset"]) == tuple(SIZES)
    assert set(SIZES) <= set(PRESETS)


@pytest.mark.parametrize(("threads", "said"), [(1, "1 {}thread"), (2, "2 {}threads")])
def test_thread_count_is_singular_or_plural(threads, said, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    assert device_text(torch.device("cpu")) == said.format("CPU ")
    assert f", {said.format('')}, torch" in machine("cpu")


def test_steps_take_turns_and_warmup_is_not_timed():
    calls: list[str] = []
    times = timed_in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, steps=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert [len(times[name]) for name in "ab"] == [3, 3]


def test_network_is_freed_before_memory_of_next_is_measured():
    alive = weakref.WeakSet[torch.Tensor]()
    others: list[int] = []

    @contextmanager
    def opened():
        others.append(len(alive))
        network = torch.zeros(3)
        alive.add(network)
        yield lambda: network.add_(1)

    config = replace(PRESETS["tiny"][1], device="cpu")
    rows = one_by_one({name: opened() for name in "abc"}, config, steps=2, warmup=0)
    assert [row.what for row in rows] == ["a", "b", "c"]
    assert others == [0, 0, 0]


def test_cpu_training_takes_turns_with_textbook(capsys, monkeypatch):
    asked = []

    def watched(named, steps, warmup):
        asked.append(list(named))
        return timed_in_turn(named, steps, warmup)

    monkeypatch.setattr("cedd.apps.bench.train.timed_in_turn", watched)
    command = "bench train --preset tiny --vocab 9 --shapes 2x8 --steps 2 --warmup 1 --device cpu --json --methods"
    assert main([*command.split(), "cedd-star/absorb", "bayes/uniform"]) == 0
    assert asked == [[TEXTBOOK, "cedd-star/absorb", "bayes/uniform"]]
    first, *ours = json.loads(capsys.readouterr().out)["rows"]
    assert first["speedup"] is None
    for row in ours:
        assert row["speedup"] == first["milliseconds"] / row["milliseconds"]


def test_block_training_has_its_own_row(capsys):
    command = "bench train --preset tiny --vocab 9 --shapes 4x8 --steps 2 --warmup 1 --device cpu --json --no-textbook"
    pairs = ["cedd-star/absorb", "cedd-star/absorb/4"]
    assert main([*command.split(), "--complementary", "--methods", *pairs]) == 0
    assert [row["what"] for row in json.loads(capsys.readouterr().out)["rows"]] == pairs
    assert main([*command.split(), "--methods", "cedd/absorb/5"]) == 2
    assert "blocks of 5 do not divide a length of 8" in capsys.readouterr().err
    for suite, pair, form in (
        ("train", "cedd/absorb/x", "METHOD/PROCESS/BLOCK"),
        ("sample", "cedd/absorb/4", "PROCESS"),
    ):
        assert main(["bench", suite, "--methods", pair]) == 2
        assert f"{form} (got {pair})" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["train", "sample"])
def test_empty_list_of_shapes_is_rejected(suite, capsys):
    assert main(["bench", suite, "--shapes"]) == 2
    assert "--shapes needs at least one" in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["train", "sample"])
def test_oversized_shape_is_rejected(suite, capsys):
    assert main(["bench", suite, "--shapes", "99999999x99999999"]) == 2
    assert "at most 16,777,216 tokens (got 99999999x99999999: 9,999,999,800,000,001)" in capsys.readouterr().err


def test_llama_architecture_can_be_timed(capsys):
    command = "bench train --preset tiny --architecture llama --vocab 9 --shapes 4x8 --steps 1 --warmup 1 --device cpu"
    pairs = ["ar/absorb", "cedd-star/absorb", "cedd-star/absorb/4"]
    assert main([*command.split(), "--json", "--no-textbook", "--methods", *pairs]) == 0
    assert [row["what"] for row in json.loads(capsys.readouterr().out)["rows"]] == pairs
    with torch.device("meta"):
        network = build_network("llama", {**llama("small", 128), "vocab_size": 49152, "has_mask": True})
    assert network.num_parameters() == 134_515_008  # SmolLM2-135M
