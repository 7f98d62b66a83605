"""Labels: from a .jsonl field to the conditioning of the network, in training and sampling."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cedd
from cedd.cli import main
from cedd.data.batches import BatchSampler
from cedd.data.corpora import FileCorpus, LabelledCorpus
from cedd.data.packing import pack
from cedd.data.training_data import prepare_training_data
from cedd.losses import batch_loss
from cedd.models.transformer import Transformer, TransformerConfig
from cedd.network import UNKNOWN_LABEL
from cedd.training.config import BatchConfig, TrainConfig, starting_from
from cedd.training.noising import NoisingSampler
from tests.training.runs import changed, run

Make = Callable[..., TrainConfig]
TEXTS = {"no": "aaaa", "yes": "bbbb", "1": "cccc"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shuffled documents, each repeating the letter of its label."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    labels = np.random.default_rng(0).choice(list(TEXTS), 240)
    path.write_text("".join(json.dumps({"text": TEXTS[one], "kind": one}) + "\n" for one in labels))
    return path


@pytest.fixture
def settings(rows: Path) -> dict[str, Any]:
    return {"data": str(rows), "labels": "kind", "process.name": "absorb", "method": "cedd", "steps": 2}


def make_labels_matter(model: cedd.LanguageModel) -> torch.Tensor:
    """Draw the weights that depend on labels and those of the head; returns the label embedding."""
    names = ("backbone.conditioning.labels.weight", "backbone.conditioning.modulation.weight", "head.weight")
    table, *_ = (model.model.get_parameter(name).data.normal_(std=0.5) for name in names)
    return table


def test_blocks_carry_label_of_their_text(rows: Path, tmp_path: Path) -> None:
    data = prepare_training_data(rows, 10, labels="kind")
    tokenizer = data.tokenizer
    packed = pack(LabelledCorpus(FileCorpus([rows]), "kind"), tokenizer, 10, cache=tmp_path)
    assert packed.labels == data.train.labels == data.validation.labels == sorted(TEXTS)
    starts, letters = np.arange(0, 10 * len(packed), 3), [{TEXTS[label][0]} for label in packed.labels]
    held_out = data.validation.evenly_spaced_labels(None)
    assert held_out is not None
    for labels, blocks in (
        (packed.labels_of(starts), packed.from_starts(starts)),
        (held_out, data.validation.evenly_spaced(None)),
    ):
        seen = [set(tokenizer.decode(block)) - {"\n"} for block in blocks]
        assert labels.tolist() == [letters.index(one) if len(one) == 1 else UNKNOWN_LABEL for one in seen]
        assert set(labels) == {UNKNOWN_LABEL, 0, 1, 2}


@pytest.mark.parametrize("complementary", [False, True])
def test_batch_labels_are_independent_of_rank_count(rows: Path, tmp_path: Path, complementary: bool) -> None:
    data = prepare_training_data(rows, 8, labels="kind")
    method, process = cedd.get_method("cedd"), cedd.absorb(data.tokenizer.vocab_size)

    def labels(step: int, ranks: int, dropout: float) -> list[int]:
        found: list[int] = []
        for rank in range(ranks):
            sampler = BatchSampler(data.train, 8, seed=1, rank=rank, world_size=ranks)
            config = BatchConfig(8 * (1 + complementary), complementary=complementary)
            noising = NoisingSampler(sampler, method, process, config, label_dropout=dropout)
            for part in noising.batch(step).parts:
                assert part.label is not None
                assert len(part.label) == len(part.inputs)
                found += part.label.tolist()
        return found

    given, half = labels(3, 1, 0.0), [labels(step, 2, 0.5) for step in range(40)]
    texts = BatchSampler(data.train, 8, seed=1).batch(3).repeat_interleave(1 + complementary, 0)
    assert given == data.train.labels_of(8 * _blocks(data.train.blocks, texts)).tolist()
    assert labels(3, 2, 0.0) == given
    assert labels(3, 1, 0.5) == half[3]
    dropped = [one == UNKNOWN_LABEL for step in half for one in step]
    assert 0.4 < np.mean(dropped) < 0.65


def _blocks(blocks: np.ndarray, texts: torch.Tensor) -> np.ndarray:
    """The index of a matching block for each text."""
    return np.array([(blocks == text.numpy()).all(1).argmax() for text in texts])


def test_label_conditioned_sampling_after_training(
    config: Make, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made = config("run", {**settings, "evaluation.every": 2})
    run(made)
    model = cedd.load(made.out, "cpu")
    assert model.labels == sorted(TEXTS)
    make_labels_matter(model)
    how: Any = {"length": 12, "seed": 0, "steps": 8}
    texts = {label: model.generate(3, label=label, **how) for label in model.labels}
    assert len({tuple(one) for one in texts.values()}) == 3
    guided = [model.generate(3, label="yes", guidance=w, **how) for w in (0, 0.5, 1)]
    assert guided[0] == model.generate(3, **how)
    assert guided[2] == texts["yes"]
    assert guided[1] not in (guided[0], guided[2])
    assert model.infill("a____{11}", n=4, label="no", seed=1, steps=8) != model.infill(
        "a____{11}", n=4, label="yes", seed=1, steps=8
    )
    with pytest.raises(ValueError, match=r"label: invalid choice: 'ye'.*yes"):
        model.generate(label="ye")
    with pytest.raises(ValueError, match="label: invalid choice: 5; use one of 1, no, yes"):
        model.generate(label=5)
    assert model.generate(3, label=1, **how) == texts["1"]
    assert main(["sample", str(made.out), "--label", "maybe"]) == 2
    assert capsys.readouterr().err.startswith("cedd: error: --label: invalid choice: 'maybe'")


def test_block_model_generates_with_label(config: Make, settings: dict[str, Any]) -> None:
    made = config("run", {**settings, "block": 4})
    run(made)
    model = cedd.load(made.out, "cpu")
    table = make_labels_matter(model)

    def texts(*labels: str | None) -> list[list[str]]:
        return [model.generate(2, length=20, label=label, seed=0) for label in labels]

    found = texts("1", "no", "yes", None)
    assert len({text for two in found for text in two if len(text) == 20}) == 8
    table[[2, 3]] = table[[3, 2]]  # those of no and yes, after that of unknown labels and that of 1
    assert texts("1", "yes", "no", None) == found


def test_warm_start_between_models_with_and_without_labels(config: Make, settings: dict[str, Any]) -> None:
    """Without a label, the outputs are unchanged."""
    x, sigma = torch.tensor([[0, 1, 2, 3]]), torch.tensor([0.7])
    first = config("labelled", settings)
    run(first)
    labelled = cedd.load(first.out, "cpu").model
    plain = Transformer(TransformerConfig(**{**vars(labelled.options), "labels": 0}))
    plain.load_state_dict(plain.weights_from(labelled), strict=False)
    assert torch.allclose(plain.eval()(x, sigma), labelled(x, sigma), atol=1e-6)
    more = Transformer(TransformerConfig(**{**vars(plain.options), "labels": 2}))
    more.load_state_dict(more.weights_from(plain), strict=False)
    assert torch.allclose(more.eval()(x, sigma, label=torch.tensor([1])), plain(x, sigma), atol=1e-6)
    changes = {"labels": "kind", "steps": 3, "optimizer.rate": 1e-6}
    second = changed(starting_from(config("second", settings), str(first.out)), changes)
    run(second)
    again, table = cedd.load(second.out, "cpu"), "backbone.conditioning.labels.weight"
    assert again.labels == sorted(TEXTS)
    assert torch.allclose(again.model.get_parameter(table), labelled.get_parameter(table), atol=1e-4)


def test_loss_uses_batch_labels(rows: Path) -> None:
    """The loss of a batch with labels is that of the network called with those labels."""
    data = prepare_training_data(rows, 8, labels="kind")
    V = data.tokenizer.vocab_size
    network = Transformer(
        TransformerConfig(width=16, depth=1, heads=2, vocab_size=V, has_mask=True, length=8, labels=3, dropout=0.0)
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    method = cedd.get_method("cedd")
    sampler = BatchSampler(data.train, 8, seed=1)
    (batch,) = NoisingSampler(sampler, method, cedd.absorb(V), BatchConfig(8)).batch(0).parts
    label = batch.label
    assert label is not None
    found = batch_loss(method, network, batch)
    calls: list[torch.Tensor] = []

    def called(x_t: torch.Tensor, sigma: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        calls.append(label)
        return network(x_t, sigma, label=label)

    assert batch_loss(method, called, batch).item() == pytest.approx(found.item(), rel=1e-5)
    assert torch.equal(calls[0], label)
    with torch.no_grad():
        other = network(batch.inputs, batch.sigma, label=(label + 1) % 3)
        assert not torch.allclose(other, network(batch.inputs, batch.sigma, label=label))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "a"}', r"line 1 has no label 'kind', a string or an integer \(it has text\)"),
        ('{"text": "a", "kind": 0.5}', r"line 1 has no label 'kind'.*'kind' is 0.5"),
        ('{"text": "a", "kind": "x"}', r"at least two labels 'kind' \(got x\)"),
    ],
)
def test_missing_or_too_few_labels_give_one_line_error(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        prepare_training_data(path, 8, labels="kind")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "ar"}, "labels need the architecture transformer and a diffusion method"),
        ({"model.time_conditioning": False}, "remove --no-model.time-conditioning"),
        ({"label_dropout": 1.5}, r"label_dropout must be in \[0, 1\] \(got 1.5\)"),
        ({"data": "words.txt"}, "labels are a field of the rows of .jsonl files; .*words.txt is not one"),
    ],
)
def test_unsupported_label_settings_are_rejected(
    config: Make, settings: dict[str, Any], corpus: Path, changes: dict[str, Any], message: str
) -> None:
    if "data" in changes:
        changes = {"data": str(corpus)}
    with pytest.raises(ValueError, match=message):
        run(config("run", {**settings, **changes}))


def test_label_for_unlabelled_model_gives_clear_error(config: Make) -> None:
    made = config("run", {"steps": 1})
    run(made)
    with pytest.raises(ValueError, match="not trained with labels; train one with cedd train --labels FIELD"):
        cedd.load(made.out, "cpu").generate(label="yes")


def test_label_conditional_likelihoods(
    config: Make, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound and the exact likelihood given a label are those of the network with this label."""
    made = config("run", {**settings, "evaluation.every": 0})
    run(made)
    model = cedd.load(made.out, "cpu")
    make_labels_matter(model)
    ids = torch.from_numpy(model.tokenizer.encode("aab"))[None]
    how: Any = {"method": model.method, "label": torch.tensor([1])}
    exact = float(cedd.exact_likelihood(model.reader(3), model.process, ids, range(3), **how)) / 3
    with_label, without = model.perplexity("aab", label="no", bound="exact"), model.perplexity("aab", bound="exact")
    assert model.labels[1] == "no"
    assert abs(with_label.nats_per_token - exact) < 1e-6
    assert abs(without.nats_per_token - exact) > 1e-3
    long = "ab" * model.length
    bounds = [model.perplexity([long, "aab" * 9], label=label, draws=2) for label in (None, "no")]
    assert len({float(one) for both in bounds for one in both}) == 4
    assert bounds[1][0].nats_per_token == pytest.approx(model.perplexity(long, label="no", draws=2).nats_per_token)
    rows = settings["data"]
    few: Any = {"draws": 2, "max_sequences": 8}
    assert len({cedd.evaluate(model, rows, label=label, **few).perplexity for label in (None, "no")}) == 2
    own = cedd.evaluate(model, rows, labels="kind", **few)
    packed = pack(LabelledCorpus(FileCorpus([Path(rows)]), "kind"), model.tokenizer, model.length)
    labels = packed.evenly_spaced_labels(8)
    assert labels is not None
    expected = cedd.estimate_bound(
        model.model,
        model.process,
        torch.from_numpy(packed.evenly_spaced(8)),
        method=model.method,
        draws=2,
        generator=torch.Generator().manual_seed(0),
        label=torch.from_numpy(labels),
    )
    assert own.perplexity == pytest.approx(expected.perplexity)
    assert own.record()["data"]["labels"] == "kind"
    with pytest.raises(ValueError, match="label: invalid choice: 'maybe'"):
        model.perplexity("aab", label="maybe")
    for words, message in (
        (["--label", "maybe"], "--label: invalid choice: 'maybe'"),
        (["--labels", "color"], "color"),
        (["--labels", "kind", "--label", "no"], "give --label or --labels, not both"),
        (["--label", "no", "--order", "entropy"], "--order cannot be used with labels"),
    ):
        assert main(["evaluate", str(made.out), "--data", str(rows), *words]) == 2
        assert message in capsys.readouterr().err.splitlines()[0]
