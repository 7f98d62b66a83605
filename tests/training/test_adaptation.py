"""Adapting autoregressive networks to diffusion: equivalence before the first step, and the options."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from itertools import product as product_of
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import cedd
from cedd.block_layout import InBlocks
from cedd.cli import main
from cedd.cli.arguments import parse
from cedd.losses import NoisyBatch, batch_loss
from cedd.models.architectures import build_network
from cedd.models.backbone import Backbone
from cedd.models.llama import Llama
from cedd.network import AttentionPattern
from cedd.training.config import AdaptConfig, TrainConfig, adapted, starting_from
from cedd.training.loop import Hooks, Trainer
from cedd.training.warm_start import copy_weights
from tests.models.plain_llama import visible_of
from tests.training.runs import ALONE, changed, run

Make = Callable[..., TrainConfig]
NETWORK = {"width": 16, "depth": 2, "heads": 2, "key_heads": 1, "head_width": 8, "mlp_width": 24, "length": 64}
L = 12


@pytest.fixture(scope="module")
def parent(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> cedd.LanguageModel:
    """A short autoregressive run, whose start token is token 0."""
    from tests.training.runs import tiny_config

    arguments = {**NETWORK, "attention": "causal", "mask_row": 0}
    changes = {"process.name": "absorb", "method": "ar", "architecture": "llama", "architecture_arguments": arguments}
    made = tiny_config(corpus, cache, tmp_path_factory.mktemp("parent") / "ar", {**changes, "steps": 30})
    run(changed(made, {"checkpoint_every": 30, "batch.complementary": False}))
    return cedd.load(made.out, device="cpu")


def child_of(parent: cedd.LanguageModel, block: int | None = None, **options: Any) -> Llama:
    """The initial network of a run that starts --from the parent."""
    arguments = adapted(parent.model.config(), AdaptConfig(**options), block)
    made = build_network("llama", arguments)
    copy_weights(made, parent.folder)
    assert isinstance(made, Llama)
    made.eval().requires_grad_(False)
    return made


def text(parent: cedd.LanguageModel, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(parent.process.vocab_size, (batch, L), generator=generator)


def masked(x0: Tensor, V: int) -> Tensor:
    return x0.masked_fill(torch.rand(x0.shape, generator=torch.Generator().manual_seed(3)) < 0.6, V)


def parent_input(parent: cedd.LanguageModel, x0: Tensor) -> Tensor:
    """The input of the autoregressive network."""
    return parent.method.dynamics.network_input(x0, x0, parent.process)


# ---- before the first step ------------------------------------------------------------------------------------------


def test_shift_with_block_size_one_matches_parent_likelihood(
    parent: cedd.LanguageModel,
) -> None:
    x0, V = text(parent), parent.process.vocab_size
    child = child_of(parent, 1)
    x_t = masked(x0, V)
    levels = torch.zeros(len(x0), L)
    found = InBlocks(child, 1)(x_t, levels, clean=x0)
    expected = parent.model(parent_input(parent, x0))
    assert torch.equal(found, expected)
    method = cedd.get_method("cedd").in_blocks(1)
    nats = cedd.exact_likelihood(child, parent.process, x0, range(L), method=method)
    known = cedd.estimate_bound(parent.model, parent.process, x0, method="ar").per_sequence * L
    assert torch.equal(nats, known) or torch.allclose(nats, known, rtol=1e-15, atol=0)


@pytest.mark.parametrize("block", [3, 4, 12])
def test_first_token_of_each_block_matches_parent_prediction(parent: cedd.LanguageModel, block: int) -> None:
    """The past is processed as in the parent."""
    x0, V = text(parent), parent.process.vocab_size
    child = child_of(parent, block)
    found = InBlocks(child, block)(masked(x0, V), torch.zeros(len(x0), L // block), clean=x0)
    expected = parent.model(parent_input(parent, x0))
    assert torch.allclose(found[:, ::block], expected[:, ::block], atol=2e-6)
    other = child_of(parent, block, causal_past=False)
    if block == 4:
        changed_ = InBlocks(other, block)(masked(x0, V), torch.zeros(len(x0), L // block), clean=x0)
        assert float((changed_[:, 8] - expected[:, 8]).abs().max()) > 1e-5


def test_causal_attention_reproduces_parent_outputs(parent: cedd.LanguageModel) -> None:
    x0 = text(parent)
    causal = AttentionPattern(visible_of("causal", L))
    shifted, plain = child_of(parent), child_of(parent, shift=False)
    alone = parent.model(x0)[:, :-1]  # of positions 1, 2, ..., without a start token
    assert torch.allclose(shifted(x0, attention=causal)[:, 1:], alone, atol=2e-6)
    assert torch.allclose(plain(x0, attention=causal)[:, :-1], alone, atol=2e-6)
    started = child_of(parent, start=True)(x0, attention=causal)
    assert torch.allclose(started, parent.model(parent_input(parent, x0)), atol=2e-6)
    later = x0.clone()
    later[:, -1] = (later[:, -1] + 1) % parent.process.vocab_size
    assert bool(((shifted(later) - shifted(x0)).abs().amax((0, 2)) > 1e-6).all())  # full attention, everywhere


@pytest.mark.parametrize(
    "options", [{"block": 4}, {"block": 4, "causal_past": False}, {"start": True}, {"shift": False}]
)
def test_next_token_loss_matches_parent(parent: cedd.LanguageModel, options: dict[str, Any]) -> None:
    """In the same pass as the noisy half, or in a separate pass."""
    x0, process = text(parent, 4), parent.process
    block = options.pop("block", None)
    child = child_of(parent, block, **options)
    method = cedd.get_method("cedd").in_blocks(block)
    losses = []
    for weight in (0.0, 0.5):
        batch = batch_of(method, process, x0, next_token_weight=weight)
        losses.append(float(batch_loss(method, child, batch)))
    starts = child.options.start_row is not None
    logits, tokens = (parent.model(parent_input(parent, x0)), x0) if starts else (parent.model(x0)[:, :-1], x0[:, 1:])
    expected = -logits.log_softmax(-1).gather(-1, tokens[..., None]).mean()
    assert losses[1] - losses[0] == pytest.approx(0.5 * float(expected), abs=1e-5)


def batch_of(method: cedd.Method, process: cedd.TokenProcess, x0: Tensor, **changes: Any) -> NoisyBatch:
    from cedd.losses import NoiseDraws, noisy_batch

    generator = torch.Generator().manual_seed(0)
    draws = NoiseDraws.make(tuple(x0.shape), process.vocab_size, x0.device, generator)
    blocks = method.blocks_of(x0.shape[1])
    t = torch.full((len(x0), blocks) if blocks > 1 else (len(x0),), 0.5, dtype=torch.float64)
    return replace(noisy_batch(method, process, x0, t, draws, capacity=40), clean=x0, **changes)


@pytest.mark.parametrize(
    ("V", "length", "block"), [(2, 4, 2), (2, 4, 4), pytest.param(2, 8, 4, marks=pytest.mark.slow)]
)
def test_exact_block_likelihood_matches_average_over_orders(V: int, length: int, block: int) -> None:
    """With a shift, a causal past and a start token. The reference runs plain passes over the start token, the past and
    one block, with no cache and no clean half. The likelihoods of all texts sum to 1."""
    torch.manual_seed(0)
    sizes = {**NETWORK, "width": 8, "head_width": 4, "length": length, "vocab_size": V, "has_mask": True}
    kind = {"attention": "block-causal", "block": block, "causal_past": True, "shift": True, "start_row": 0}
    network = build_network("llama", {**sizes, **kind}).double().requires_grad_(False).eval()
    assert isinstance(network, Llama)
    for parameter in network.parameters():
        parameter.normal_(std=0.7)

    @cache
    def token_probabilities(past: tuple[int, ...], known: tuple[int, ...]) -> Tensor:
        """Token probabilities of a block in which some tokens are masked (V)."""
        ids = torch.tensor([[0, *past, *known]])
        begin = 1 + len(past)
        visible = torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        visible[begin:] = True
        logits = network.original_logits(ids, attention_mask=visible)[0]
        return logits[begin - 1 : begin - 1 + block].softmax(-1)  # each predicted by the token before it

    def probability(text: tuple[int, ...], order: tuple[int, ...], begin: int) -> float:
        known, product = [V] * block, 1.0
        for i in order:
            product *= float(token_probabilities(text[:begin], tuple(known))[i, text[begin + i]])
            known[i] = text[begin + i]
        return product

    texts, orders = list(product_of(range(V), repeat=length)), list(permutations(range(block)))
    expected = [
        math.prod(fmean(probability(x, order, k) for order in orders) for k in range(0, length, block)) for x in texts
    ]
    assert math.fsum(expected) == pytest.approx(1.0, abs=1e-12)
    method = cedd.get_method("cedd-star").in_blocks(block)
    found = cedd.exact_likelihood(network, cedd.absorb(V), torch.tensor(texts), range(length), method=method)
    torch.testing.assert_close(found, -torch.tensor(expected, dtype=torch.float64).log(), rtol=1e-12, atol=1e-12)


# ---- training -------------------------------------------------------------------------------------------------------


def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, ALONE, Console(quiet=True))


def adapting(config: Make, parent: cedd.LanguageModel, changes: dict[str, Any]) -> Trainer:
    start = starting_from(config("child"), str(parent.folder.path))
    return trainer(changed(start, {"method": "cedd", "steps": 40, "checkpoint_every": 40, **changes}))


def nats_of(model: Backbone, made: Trainer, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    how: dict[str, Any] = {"method": made.method, "draws": 8, "generator": generator}
    return cedd.estimate_bound(model, made.process, data, **how).nats_per_token


def test_attention_anneals_from_causal_to_full(config: Make, parent: cedd.LanguageModel) -> None:
    made = adapting(config, parent, {"adapt.anneal": 0.5})
    noising = made.noising()
    causal = visible_of("causal", L)
    shares = []
    for step in range(19):
        visible = noising.batch(step).parts[0].visible
        assert visible is not None
        assert bool(visible[causal].all())
        shares.append(float(visible[~causal].float().mean()))
    assert shares[0] < 0.2
    assert shares[-1] > 0.8
    assert all(part.visible is None for step in (19, 20, 39) for part in noising.batch(step).parts)
    again, before = (one.batch(7).parts[0].visible for one in (made.noising(), noising))
    assert again is not None
    assert before is not None
    assert torch.equal(again, before)


def test_block_size_grows_during_training(config: Make, parent: cedd.LanguageModel) -> None:
    noising = adapting(config, parent, {"block": 4, "adapt.first_block": 1, "adapt.growth": 0.5}).noising()
    sizes = [L // noising.batch(step).parts[0].sigma.shape[1] for step in (0, 9, 10, 19, 20, 39)]
    assert sizes == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("changes", [{"adapt.anneal": 0.5}, {"block": 4, "adapt.first_block": 1}])
def test_growth_schedule_follows_shortened_run(
    config: Make, parent: cedd.LanguageModel, changes: dict[str, Any]
) -> None:
    """A time limit shortens a run; the last steps are then still those with full attention or the largest blocks."""

    class Shortened(Hooks):
        def before_step(self, trainer: Trainer) -> None:
            if trainer.state.step == 4:
                trainer.change(replace(trainer.config, steps=20))

    seen = dict[int, tuple[int, bool]]()
    start = starting_from(config("child"), str(parent.folder.path))
    wanted = changed(start, {"method": "cedd", "steps": 400, "checkpoint_every": 400, **changes})
    made = Trainer(wanted, ALONE, Console(quiet=True), Shortened())
    step = made.train_step.step

    def observed(batch: Any, stop: bool = False) -> Any:
        part = batch.parts[0]
        seen[batch.step] = (L // part.sigma.shape[1] if part.in_blocks else L, part.visible is None)
        return step(batch, stop)

    made.train_step.step = observed
    assert made.run().step == 20
    begun = (1, True) if "block" in changes else (L, False)
    done = (4, True) if "block" in changes else (L, True)
    assert [seen[i] for i in (0, 6, 10, 19)] == [begun, begun, done, done]  # batches are drawn up to 3 steps ahead


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"adapt.anneal": 0.5, "adapt.next_token_weight": 0.2}, marks=pytest.mark.slow),
        {"block": 4, "adapt.first_block": 1, "batch.complementary": True},
        {"block": 4, "adapt.causal_past": False, "adapt.shift": False, "adapt.mask_id": 3},
    ],
)
def test_adapted_model_learns_and_loads(config: Make, parent: cedd.LanguageModel, changes: dict[str, Any]) -> None:
    """The run's folder loads as a model with the same options."""
    made = adapting(config, parent, changes)
    data = torch.from_numpy(made.data.validation[:16])
    before = nats_of(made.state.averaged_model(), made, data)
    assert made.run().finished
    model = cedd.load(made.config.out, device="cpu")
    assert nats_of(model.model, made, data) < before - 0.1
    assert isinstance(model.model, Llama)
    assert model.model.options.shift == changes.get("adapt.shift", True)
    assert model.method.block == changes.get("block")


def test_train_adapt_command(corpus: Path, cache: Path, parent: cedd.LanguageModel, tmp_path: Path) -> None:
    start = tmp_path / "parent"
    shutil.copytree(parent.folder.path, start)
    words = ["--from", str(start), "--data", str(corpus), "--out", str(tmp_path / "run"), "--block", "4"]
    words += ["--steps", "2", "--batch.size", "8", "--length", str(L), "--text.cache", str(cache), "--device", "cpu"]
    words += ["--optimizer.warmup", "1", "--optimizer.ema-every", "1", "--evaluation.every", "0"]
    config = parse("train", ["adapt", *words]).config
    assert (config.method, config.process.name, config.block) == ("cedd-star", "absorb", 4)
    assert main(["train", "adapt", *words]) == 0
    loaded = cedd.load(tmp_path / "run", device="cpu")
    assert loaded.name == "cedd-star on absorb in blocks of 4"
    assert isinstance(loaded.model, Llama)
    assert (loaded.model.options.start_row, loaded.model.options.causal_past) == (0, True)
    shutil.rmtree(start)  # the run is resumed without its parent
    assert parse("train", ["adapt", *words]).config.start == str(start)


def test_block_or_process_option_selects_diffusion_method(parent: cedd.LanguageModel) -> None:
    def parsed(*more: str) -> tuple[str, str, int | None]:
        config = parse("train", ["--from", str(parent.folder.path), "--out", "run", *more]).config
        return config.method, config.process.name, config.block

    assert parsed("--block", "4") == ("cedd-star", "absorb", 4)
    assert parsed("--process=uniform") == ("cedd-star", "uniform", None)
    assert parsed("--process", "absorb", "--block=4", "--method", "bayes") == ("bayes", "absorb", 4)
    assert parsed()[0] == parsed("--process", "absorb", "--method", "ar")[0] == "ar"


def test_invalid_adapt_options_are_rejected(config: Make, parent: cedd.LanguageModel, capsys) -> None:
    with pytest.raises(ValueError, match=r"adapt.first_block needs a block to grow to"):
        adapting(config, parent, {"adapt.first_block": 2}).config.check()
    with pytest.raises(ValueError, match=r"adapt.first_block must be block 6 divided by a power of two \(got 2\)"):
        adapting(config, parent, {"block": 6, "adapt.first_block": 2}).config.check()
    with pytest.raises(ValueError, match="cedd train adapt needs an autoregressive model: --from MODEL"):
        parse("train", ["adapt", "--out", "run"])
    for command, *words in (["adapt"], ["train", "adapt", "--from"]):
        with pytest.raises(ValueError, match=r"^english-char is not autoregressive \(its method is .*\), so there is"):
            parse(command, [*words, "english-char", "--out", "run"])
    words = ["adapt", "--from", str(parent.folder.path), "--out", "run", "--adapt.growth", "0.2"]
    with pytest.raises(ValueError, match=r"--adapt.growth has no effect without adapt.first_block"):
        parse("train", words)
    assert main(["train", "char", "--out", "run", "--no-adapt.shift"]) == 2
    assert "has no effect unless a diffusion method starts --from an autoregressive" in capsys.readouterr().err
