"""Runs that start from another model: they inherit its settings, keep learning, and reject incompatible models."""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import cedd
from cedd.apps.report.commands import train_command
from cedd.cli import main
from cedd.cli.arguments import parse
from cedd.data.tokenizers import BPETokenizer, ByteTokenizer
from cedd.models.deepening import deepened
from cedd.models.folder import save_folder
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.process import process_from_config
from cedd.training.config import ProcessConfig, TrainConfig, starting_from
from cedd.training.loop import Trainer
from cedd.training.run_log import LOG_FILE, read_log
from tests.models import ddit
from tests.training.runs import ALONE, changed, run, tiny_config
from tests.training.test_methods_train import fixed_loss

Make = Callable[..., TrainConfig]


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, ALONE, Console(quiet=True))


@pytest.fixture(scope="module")
def first(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run on absorb."""
    changes = {"process.name": "absorb", "method": "cedd", "steps": 40, "checkpoint_every": 40}
    made = tiny_config(corpus, cache, tmp_path_factory.mktemp("runs") / "first", changes)
    run(made)
    return made


def test_warm_start_from_absorb_to_roulette(config: Make, first: TrainConfig) -> None:
    """The first loss is well below that of an untrained model, and training lowers it further."""
    changes = {"steps": 30, "checkpoint_every": 30, "process.name": "roulette", "method": "bayes"}
    start = changed(starting_from(config("second"), str(first.out)), changes)
    begun, untrained = trainer(start), trainer(replace(start, start=None, out=start.out.with_name("third")))
    before = fixed_loss(begun)
    assert before < fixed_loss(untrained) - 0.05
    known = cedd.load(first.out, device="cpu").model.state_dict()
    for name, value in begun.state.ema.shadow.items():
        assert torch.equal(value, known[name])  # the average starts there too
    assert all(not tensor.any() for optimizer in begun.state.optimizers for tensor in optimizer.tensors().values())
    begun.run()
    assert fixed_loss(begun) < before - 0.005
    model = cedd.load(start.out, device="cpu")
    assert (model.method.name, model.process.config()["name"]) == ("bayes", "roulette")


def test_imported_network_learns(config: Make, tmp_path: Path) -> None:
    published = {"model_type": "mdlm", "vocab_size": 257, "hidden_dim": ddit.D, "cond_dim": ddit.C, "dropout": 0.0}
    published |= {"n_blocks": ddit.DEPTH, "n_heads": ddit.HEADS, "model_length": ddit.LENGTH}
    folder = ddit.write(tmp_path / "theirs", published, ddit.random_weights(257), "backbone.")
    model = cedd.import_model(folder, device="cpu")
    ours = tmp_path / "ours"
    save_folder(ours, replace(model.folder, tokenizer=ByteTokenizer()))
    start = changed(starting_from(config("run"), str(ours)), {"steps": 30, "checkpoint_every": 30})
    assert (start.method, start.model.time_input, start.model.mlp_bias) == ("ceddt", "none", True)
    begun = trainer(start)
    before = fixed_loss(begun)
    begun.run()
    assert fixed_loss(begun) < before - 0.1


@pytest.mark.slow
def test_wrapped_blocks_stay_wrapped(config: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A network trained on blocks between end-of-document tokens continues, and is evaluated, that way."""
    settings = config("run")
    pieces = BPETokenizer.train([Path(settings.data).read_text()], 270)
    pieces.save(tmp_path / "pieces")
    published = {"model_type": "mdlm", "vocab_size": pieces.vocab_size + 1, "hidden_dim": ddit.D, "cond_dim": ddit.C}
    published |= {"n_blocks": ddit.DEPTH, "n_heads": ddit.HEADS, "model_length": ddit.LENGTH}
    weights = ddit.random_weights(pieces.vocab_size + 1)
    folder = ddit.write(tmp_path / "theirs", published, weights, "backbone.")
    model = cedd.import_model(folder, tmp_path / "pieces", device="cpu")
    model.save_pretrained(tmp_path / "ours")
    start = changed(starting_from(settings, str(tmp_path / "ours")), {"steps": 2, "checkpoint_every": 2})
    assert start.text.wrap == "bos-eos"
    begun = trainer(start)
    for blocks in (begun.data.train[:5], begun.data.validation[:5], begun.data.train.from_starts(np.array([3, 20]))):
        assert blocks.shape[1] == ddit.LENGTH
        assert (blocks[:, [0, -1]] == pieces.eos_id).all()
        assert not (blocks[:, 1:-1] == pieces.eos_id).any()
    begun.run()
    assert cedd.load(start.out, device="cpu").folder.wrap == "bos-eos"
    words = ["--data", settings.data, "--wrap", "trained", "--draws", "2", "--max-sequences", "4", "--device", "cpu"]
    assert main(["evaluate", str(start.out), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["wrap"] == "bos-eos"
    assert main(["report", str(start.out), "--samples", "0", "--device", "cpu", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert main([*shlex.split(page["commands"]["evaluate"])[1:], "--device", "cpu", "--json"]) == 0
    (measured,) = json.loads(capsys.readouterr().out)["runs"]
    assert page["bound"]["nats_per_token"] == pytest.approx(measured["bounds"]["tight"]["nats_per_token"], rel=1e-12)
    # Wrapping can be turned off; it needs a tokenizer with an end token.
    plain = trainer(changed(start, {"text.wrap": "none", "out": tmp_path / "plain"}))
    assert (plain.data.train[:5][:, 0] != pieces.eos_id).any()
    with pytest.raises(ValueError, match="'byte' cannot be wrapped"):
        trainer(changed(config("bytes"), {"text.wrap": "bos-eos", "text.tokenizer": "byte"}))


def test_mask_row_is_dropped_for_uniform_and_cannot_be_restored(config: Make, first: TrainConfig) -> None:
    """From absorb to uniform the row of the mask is dropped; the way back fails because it is missing."""
    start = changed(starting_from(config("second"), str(first.out)), {"process.name": "uniform"})
    run(start)
    back = changed(starting_from(config("third"), str(start.out)), {"process.name": "absorb"})
    with pytest.raises(ValueError, match=r"was trained without a mask; start it on a process without one \(uniform\)"):
        trainer(back)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"method": "sedd"},
            r"\(cedd\) are probabilities of the clean token, those of sedd ratios; train it by a method whose",
        ),
        ({"method": "ar"}, "those of ar probabilities of the next token"),
        ({"text.tokenizer": "byte"}, r"are not those of the data \(byte\); use its own: --text.tokenizer"),
        ({"model.width": 32}, "has other sizes than the run's, first at backbone.blocks.0.attention.output.weight"),
    ],
)
def test_incompatible_start_model_is_rejected(config: Make, first: TrainConfig, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(changed(starting_from(config("second"), str(first.out)), changes))


def test_command_line_starts_from_run(first: TrainConfig, tmp_path: Path) -> None:
    words = ["tiny", "--from", str(first.out), "--out", str(tmp_path / "second"), "--process", "roulette"]
    asked = parse("train", words).config
    assert parse("train", ["tiny", f"--from={first.out}", *words[3:]]).config == asked
    assert asked.start == str(first.out)
    assert (asked.method, asked.process.name, asked.length) == ("cedd", "roulette", first.length)
    assert asked.model == first.model
    assert asked.text.tokenizer == str(first.out)
    again = parse("train", [*words, "--method", "bayes-star"]).config  # as tiny, not as the first run
    for config in (asked, again):
        command = train_command(config)
        assert f"--from {first.out}" in command
        assert parse("train", shlex.split(command)[2:]).config == config
    gone = replace(asked, start=str(tmp_path / "gone"))
    assert f"--from {gone.start}" in train_command(gone)
    # Without a preset: char's batch, rate and steps.
    for said in (words[1:], [f"--from={first.out}", *words[3:]], [*words[3:], *words[1:3]]):
        alone = parse("train", said).config
        assert alone == parse("train", ["char", *words[1:]]).config
        assert alone.start == str(first.out)
    with pytest.raises(ValueError, match="the preset is missing"):
        parse("train", words[3:])


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])  # the same depth, and more
def test_resumed_run_does_not_need_its_start_model(
    config: Make, first: TrainConfig, depth: int, tmp_path: Path
) -> None:
    """The same command resumes to the same weights; without a checkpoint it fails, as it needs the start model."""
    data = [
        "--data",
        str(first.data),
        "--text.cache",
        str(first.text.cache),
        "--device",
        "cpu",
        "--evaluation.every",
        "0",
    ]

    def command(name: str, steps: int) -> list[str]:
        out = str(tmp_path / name)
        words = ["tiny", "--from", str(tmp_path / "source"), f"--out={out}", "--process", "roulette", *data]
        words += ["--model.depth", str(depth), "--batch.size", "4"]
        return ["train", *words, "--steps", str(steps), "--checkpoint-every", "2"]

    shutil.copytree(first.out, tmp_path / "source")
    assert main(command("whole", 4)) == 0
    assert main(command("halves", 2)) == 0
    shutil.rmtree(tmp_path / "source")
    assert main(command("halves", 4)) == 0
    whole, halves = (cedd.load(tmp_path / name, device="cpu").model.state_dict() for name in ("whole", "halves"))
    assert all(torch.equal(value, halves[name]) for name, value in whole.items())
    with pytest.raises(ValueError, match="no run or model at"):
        parse("train", command("another", 4)[1:])
    shutil.rmtree(tmp_path / "halves" / "checkpoints")
    with pytest.raises(ValueError, match=r"no complete checkpoint, and .*source, where it started, is missing"):
        trainer(parse("train", command("halves", 4)[1:]).config).run()


def test_model_card_shows_last_bound(config: Make, tmp_path: Path) -> None:
    made = config("run", {"steps": 4, "checkpoint_every": 4, "evaluation.every": 2, "evaluation.sequences": 8})
    run(made)
    bounds = [record for record in read_log(made.out / LOG_FILE) if record["kind"] == "bound"]
    cedd.load(made.out, device="cpu").save_pretrained(tmp_path / "saved")
    card, (low, high) = (tmp_path / "saved" / "README.md").read_text("utf-8"), bounds[-1]["ci95"]
    assert f"{bounds[-1]['nats_per_token']:.3f} nats per token [{low:.3f}, {high:.3f}]" in card
    assert f"{bounds[-1]['sequences']} held-out blocks, step 4" in card


@pytest.mark.parametrize("process", [ProcessConfig(name) for name in ("absorb", "uniform", "eroulette", "hybrid")])
def test_process_is_inherited_from_start_model(
    config: Make, first: TrainConfig, process: ProcessConfig, tmp_path: Path
) -> None:
    for made in (process.build(5), replace(process.build(5), spec=None)):  # by its name, or by its clocks
        folder = cedd.load(first.out, device="cpu").folder
        save_folder(tmp_path / "model", replace(folder, process=made))
        again = starting_from(config("second"), str(tmp_path / "model")).process
        assert again.build(5).config() == process_from_config(made.config()).config()


def network(depth: int, **options: Any) -> Transformer:
    sizes = {"vocab_size": 5, "length": 8, "width": 8, "heads": 2, "mlp_bias": True, "dropout": 0.0}
    return Transformer(TransformerConfig(depth=depth, has_mask=True, **sizes, **options)).eval()


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"time_conditioning": False, "causal": True}])
def test_deepened_block_copies_share_original_contribution(options: dict[str, bool]):
    """To first order in the residual branches: with branches ten times smaller, outputs differ a hundred times less."""
    torch.manual_seed(0)
    shallow, deep = network(2, **options), network(6, **options)
    for parameter in shallow.parameters():
        parameter.normal_(std=0.3)
    tokens, sigma = torch.tensor([[0, 3, 1, 5, 4, 2]]), torch.tensor([0.3])
    differences: list[float] = []
    for smaller in (1e-4, 1e-5):
        weights = {
            name: smaller * value if "blocks" in name and ".output." in name else value
            for name, value in shallow.state_dict().items()
        }
        alone = network(2, **options)
        alone.load_state_dict(weights)
        deep.load_state_dict(deepened(weights, 2, 6))
        made, known = (model.backbone.blocks.state_dict() for model in (deep, alone))
        for block in range(6):  # each is followed by its copies
            assert torch.equal(made[f"{block}.mlp.hidden.weight"], known[f"{block // 3}.mlp.hidden.weight"])
        features = [model.double().features(tokens, sigma.double()) for model in (alone, deep)]
        differences.append(float((features[0] - features[1]).norm()))
        deep.float()
    assert differences[0] > 0
    assert differences[1] < 0.02 * differences[0]


def test_deeper_run_starts_near_loss_of_shallow_one(config: Make, first: TrainConfig) -> None:
    start = starting_from(config("second"), str(first.out))
    deeper = changed(start, {"model.depth": 2 * first.model.depth, "steps": 60, "checkpoint_every": 60})
    untrained = fixed_loss(trainer(replace(deeper, start=None, out=start.out.with_name("untrained"))))
    known, begun = fixed_loss(trainer(start)), trainer(deeper)
    before = fixed_loss(begun)
    assert abs(before - known) < 0.2 * (untrained - known)
    begun.run()
    assert fixed_loss(begun) < before - 0.002
    assert cedd.load(deeper.out, device="cpu").model.config()["depth"] == 2
    for depth in (1, 3):
        other = changed(starting_from(config("third"), str(deeper.out)), {"model.depth": depth})
        with pytest.raises(ValueError, match=f"it has 2 blocks; use the same depth or a multiple of it, not {depth}"):
            trainer(other)


def test_sigma_floor_is_inherited_from_start_model(config: Make, first: TrainConfig, tmp_path: Path) -> None:
    folder = cedd.load(first.out, device="cpu").folder
    save_folder(tmp_path / "model", replace(folder, method=folder.method.with_sigma_floor(0.003)))
    start = starting_from(config("second"), str(tmp_path / "model"))
    assert trainer(start).method == folder.method.with_sigma_floor(0.003)
