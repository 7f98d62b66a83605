"""Block training: one time per block, the same result on any number of ranks, and bit-exact resumption."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cedd
from cedd.cli import main
from cedd.data.batches import BatchSampler
from cedd.data.packing import PackedDataset
from cedd.losses import NoiseDraws, noisy_batch
from cedd.models.backbone import ModuleBackbone
from cedd.process import absorb, roulette, uniform
from cedd.training.config import BatchConfig, TrainConfig, starting_from
from cedd.training.loop import Trainer
from cedd.training.noising import NoisingSampler
from cedd.training.run_log import LOG_FILE, read_log
from cedd.training.warm_start import check_network
from tests.training.ranks import assert_near, double_precision, gradients, together
from tests.training.runs import ALONE, assert_resumes, changed, run
from tests.training.test_methods_train import fixed_batch, fixed_loss
from tests.training.test_noising import B, L, dataset  # noqa: F401

Make = Callable[..., TrainConfig]
METHOD = cedd.METHODS["cedd-star"].in_blocks(2)


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, ALONE, Console(quiet=True))


@pytest.mark.parametrize("kind", [absorb, roulette, uniform])
def test_capacity_suffices_at_every_step(dataset: PackedDataset, kind):  # noqa: F811
    sampler = BatchSampler(dataset, 128, seed=3)
    for complementary in (False, True):
        config = BatchConfig(128, complementary=complementary, highest_time=0.6)
        noising = NoisingSampler(sampler, METHOD, kind(dataset.vocab_size), config, steps=40)
        if noising.capacity is not None:
            numbers = {len(part.places) for step in range(40) for part in noising.batch(step).parts}
            assert numbers == {noising.capacity}


CHANGES: list[dict[str, Any]] = [
    {"block": 4},
    {"block": 3, "batch.complementary": True, "optimizer.matrices": "muon", "process.name": "absorb"},
    {"block": 6, "method": "sedd", "process.name": "uniform", "batch.accumulate": 2, "model.time_conditioning": False},
]


@pytest.mark.parametrize(
    "changes",
    [CHANGES[1] if one == 1 else pytest.param(CHANGES[one], marks=pytest.mark.slow) for one in range(3)],
    ids=["roulette", "complementary, muon", "sedd on uniform"],
)
def test_crashed_run_resumes_bit_exactly(config: Make, changes: dict[str, Any]):
    assert assert_resumes(config, changes).finished


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("strategy", "complementary"), [pytest.param("ddp", False, marks=pytest.mark.slow), ("fsdp", True)]
)
def test_distributed_gradients_match_single_process(config: Make, tmp_path: Path, strategy: str, complementary: bool):
    settings = {"model.dropout": 0.0, "model.width": 20, "model.depth": 2, "block": 4, "process.name": "absorb"}
    settings |= {"batch.complementary": complementary}
    with double_precision():
        gradients(ALONE, config("one", settings), "single", tmp_path / "one")
    both = config("two", {**settings, "batch.accumulate": 2})
    assert together(gradients, both, strategy, tmp_path / "two") == [0, 0]
    assert_near(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"method": "bayes", "process.name": "absorb", "batch.complementary": True},
    ],
)
def test_block_run_learns_and_is_evaluated_in_blocks(config: Make, changes: dict[str, Any]):
    made = config("run", {"block": 4, "steps": 40, "checkpoint_every": 40, "evaluation.every": 20, **changes})
    begun = trainer(made)
    batch = fixed_batch(begun)
    before = fixed_loss(begun, batch)
    begun.run()
    assert fixed_loss(begun, batch) < before - 0.05
    kinds = [record["kind"] for record in read_log(made.out / LOG_FILE)]
    assert kinds.count("bound") == 2
    assert kinds.count("sample") == 4
    model = cedd.load(made.out, device="cpu")
    assert model.method.block == 4
    assert "in blocks of 4" in repr(model)
    found = cedd.evaluate(made.out, made.data, draws=4, max_sequences=8, device="cpu")
    (estimate,) = found.evaluations[0].bounds.values()
    generator = torch.Generator().manual_seed(0)
    alone = cedd.estimate_bound(
        model.model, model.process, found.blocks[0], method=model.method, draws=4, generator=generator
    )
    torch.testing.assert_close(estimate.per_sequence, alone.per_sequence)


def test_evaluate_exact_bound_agrees_with_other_bounds_for_small_blocks(
    config: Make, capsys: pytest.CaptureFixture[str]
):
    changes = {"block": 3, "process.name": "absorb", "method": "cedd", "model.time_conditioning": False}
    made = config("run", changes)
    run(made)
    words = ["evaluate", str(made.out), "--data", made.data, "--max-sequences", "6", "--device", "cpu", "--json"]
    values = {}
    for bound in ("tight", "importance", "exact"):
        assert main([*words, "--bound", bound, *(["--draws", "256"] if bound == "tight" else [])]) == 0
        (found,) = json.loads(capsys.readouterr().out)["runs"]
        values[bound] = found["bounds"][bound]["nats_per_token"]
    assert values["exact"] == pytest.approx(values["importance"], abs=0.01)
    assert values["exact"] < values["tight"] + 0.02
    assert main([*words[:-1], "--bound", "exact"]) == 0
    assert "The perplexity is exact" in " ".join(capsys.readouterr().out.split())


# ----------------------------------------------------------------------------------------------------------------
# From another model


def test_warm_start_from_full_model_then_larger_blocks(config: Make):
    """Each run starts from the weights of the previous one; the block size of a block model is kept by default."""
    whole = config("whole", {"process.name": "absorb", "method": "cedd", "steps": 60, "checkpoint_every": 60})
    run(whole)
    in_blocks = changed(starting_from(config("blocks"), str(whole.out)), {"block": 3, "steps": 30})
    begun, untrained = trainer(in_blocks), trainer(changed(in_blocks, {"start": None, "out": "/nowhere"}))
    batch = fixed_batch(begun)
    before = fixed_loss(begun, batch)
    assert before < fixed_loss(untrained, batch) - 0.05
    begun.run()
    assert fixed_loss(begun, batch) < before
    kept = starting_from(config("larger"), str(in_blocks.out))
    assert (kept.block, kept.method, kept.process.name) == (3, "cedd", "absorb")
    larger = changed(kept, {"block": 6, "steps": 12})
    run(larger)
    assert cedd.load(larger.out, device="cpu").method.block == 6


@pytest.mark.slow
def test_warm_start_from_autoregressive_model(config: Make):
    """Its weights are copied; its outputs are token logits too, although for the next token."""
    causal = config("causal", {"method": "ar", "process.name": "absorb", "steps": 60, "checkpoint_every": 60})
    run(causal)
    start = changed(starting_from(config("blocks"), str(causal.out)), {"method": "cedd", "block": 1, "steps": 30})
    begun = trainer(start)
    known = cedd.load(causal.out, device="cpu").model.state_dict()
    assert all(torch.equal(value, known[name]) for name, value in begun.state.ema.shadow.items())
    batch = fixed_batch(begun)
    before = fixed_loss(begun, batch)
    begun.run()
    assert fixed_loss(begun, batch) < before - 0.05
    with pytest.raises(ValueError, match="those of sedd ratios"):
        trainer(changed(start, {"block": 4, "method": "sedd", "out": "/nowhere"}))


# ----------------------------------------------------------------------------------------------------------------
# Invalid input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block", "5"], "blocks of 5 do not divide a length of 32: use a block that divides it"),
        (["--block", "0"], "a block must have at least 1 token (got 0)"),
        (["--block", "16", "--method", "ar"], "ar is autoregressive and has no blocks (got block=16)"),
    ],
)
def test_invalid_block_gives_one_line_error(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "tiny", "--out", str(tmp_path / "run"), "--device", "cpu", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_block_size_mismatches_and_unsupported_options_are_rejected(config: Make):
    made = config("run", {"block": 4, "process.name": "absorb", "method": "cedd"})
    run(made)
    with pytest.raises(ValueError, match=r"holds another run \(block is 6, not 4\)"):
        run(config("run", {"block": 6, "process.name": "absorb", "method": "cedd"}))
    model = cedd.load(made.out, device="cpu")
    with pytest.raises(ValueError, match=r"the model is for blocks of 4 tokens \(got block=6\)"):
        cedd.estimate_bound(model.model, model.process, torch.zeros(2, 12).long(), method=model.method, block=6)
    with pytest.raises(ValueError, match=r"--order is not available for block diffusion models \(blocks of 4 tokens\)"):
        cedd.evaluate(made.out, made.data, order="probability", device="cpu")
    changes = {"block": 18, "length": 36, "process.name": "absorb", "method": "cedd", "steps": 1}
    long = config("long", changes)
    run(long)
    with pytest.raises(ValueError, match=r"at most 12 tokens; .* generates 18 tokens together; use importance"):
        cedd.evaluate(long.out, long.data, bound="exact", device="cpu")


def test_network_without_attention_capability_is_rejected(config: Make):
    plain = ModuleBackbone(torch.nn.Embedding(9, 8), 8, True)
    with pytest.raises(ValueError, match=r"does not declare Capabilities\(attention=True\)"):
        check_network(plain, config("run", {"block": 4}), METHOD)
    check_network(plain, config("run"), cedd.METHODS["cedd"])


def test_noise_level_follows_block_time():
    """Tokens of a block share its time: at t = 1 nearly all are masked, at t = 1e-3 nearly none."""
    x0 = torch.zeros(64, 8, dtype=torch.int64)
    t = torch.tensor([1.0, 1e-3]).double().repeat(64, 2)
    draws = NoiseDraws.make((64, 8), 5, x0.device, torch.Generator().manual_seed(0))
    batch = noisy_batch(METHOD, absorb(5), x0, t, draws)
    share = (batch.inputs == 5).float().mean(0)
    assert share[[0, 1, 4, 5]].min() > 0.95
    assert share[[2, 3, 6, 7]].max() < 0.05
