"""`cedd.evaluate`: the perplexity of one or several models on a text, and their paired differences."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.bounds.estimate import exp_or_inf, mean_and_stderr, mean_interval
from cedd.bounds.estimator import BATCH
from cedd.bounds.options import Progress
from cedd.data.evaluation_sets import EvaluationData
from cedd.device import model_device, pick_device
from cedd.evaluation.comparison import TextUnits, common_units
from cedd.evaluation.intervals import IntervalEstimate, interval_estimate
from cedd.evaluation.options import EvaluationOptions
from cedd.evaluation.perplexity import (
    ModelEvaluation,
    add_order_likelihood,
    check_bound_of,
    compare,
    data_for,
    measure,
    names_evaluation_set,
    read_blocks,
)
from cedd.evaluation.tokens import save_tokens, token_nats
from cedd.models.architectures import Architecture
from cedd.models.folder import ModelFolder, load_folder
from cedd.models.loaded_model import LoadedModel
from cedd.names import changed
from cedd.samplers import SamplingOptions, Sharpening
from cedd.samplers.confidence import check_order
from cedd.storage import JSONMapping, JSONObject, atomic_file, atomic_write, finite, json_sha256

AnyTrainedModel = LoadedModel | ModelFolder | str | Path
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
VALUE_SUFFIXES = (".npy", ".jsonl")


# ----------------------------------------------------------------------------------------------------------------
# The result


@dataclass(frozen=True)
class EvaluationResult:
    """The result of `cedd.evaluate`, which `cedd evaluate --json` prints.

    Args:
        evaluations: one per model, with its bounds and the protocol of its data.
        units: the units over which models are paired.
        options: how it was measured.
        device: the requested device.
        seconds: duration, without loading the models.
        blocks: the tokens that each model read, [N, L].
    """

    evaluations: Sequence[ModelEvaluation]
    units: TextUnits
    options: EvaluationOptions
    device: str
    seconds: float
    blocks: Sequence[Tensor] = ()

    def __repr__(self) -> str:
        figures = (
            f"{one.folder.name}: {name} {found.perplexity:.4g} [{found.perplexity_ci95[0]:.4g}, "
            f"{found.perplexity_ci95[1]:.4g}]"
            for one in self.evaluations
            for name, found in one.bounds.items()
        )
        return f"{type(self).__name__}(perplexity per token, {'; '.join(figures)})"

    @property
    def perplexity(self) -> float:
        """Perplexity per token of the first model by the first bound."""
        return self.evaluations[0].main.perplexity

    @property
    def perplexity_ci95(self) -> tuple[float, float]:
        """The 95% interval of `perplexity`."""
        return self.evaluations[0].main.perplexity_ci95

    @property
    def pairs(self) -> int:
        """The number of units."""
        return len(self._values(0, next(iter(self.evaluations[0].bounds))))

    def nats_per_byte(self, model: int, bound: str) -> IntervalEstimate:
        """A model's bound on the text shared by all models; for a fixed set, with the Monte Carlo error only."""
        values, estimate = self._values(model, bound), self.evaluations[model].bounds[bound]
        mean = float(values.mean())
        if not estimate.fixed_set and not estimate.heavy_tailed:
            return interval_estimate(mean, mean_interval(values))
        per_byte = mean / estimate.nats_per_token
        low, high = (mean + (end - estimate.nats_per_token) * per_byte for end in estimate.ci95)
        return interval_estimate(mean, (low, high))

    def difference(self, model: int, bound: str) -> IntervalEstimate | None:
        """A model minus the first one in nats per byte, paired by unit; None if the first has no such bound."""
        if (values := self._differences(model, bound)) is None:
            return None
        heavy_tailed = any(self.evaluations[one].bounds[bound].heavy_tailed for one in (0, model))
        return interval_estimate(float(values.mean()), (math.nan, math.nan) if heavy_tailed else mean_interval(values))

    def bits_per_byte(self, nats_per_byte: IntervalEstimate) -> IntervalEstimate:
        """Nats per byte in bits."""
        return nats_per_byte.mapped(lambda nats: nats / math.log(2))

    def per_word(self, nats_per_byte: IntervalEstimate) -> IntervalEstimate:
        """The perplexity per word, or for a difference the ratio of two."""
        return nats_per_byte.mapped(lambda nats: exp_or_inf(nats * self.units.bytes_per_word))

    def _values(self, model: int, bound: str) -> Tensor:
        """A model's bound on each unit, [K] in nats per byte."""
        estimate = self.evaluations[model].bounds[bound]
        return self.units.nats_per_byte(model, estimate.per_sequence, estimate.length)

    def _differences(self, model: int, bound: str) -> Tensor | None:
        if bound not in self.evaluations[0].bounds:
            return None
        return self._values(model, bound) - self._values(0, bound)

    def record(self) -> JSONObject:
        """The result as JSON."""
        models = range(len(self.evaluations))
        record: JSONObject = {
            "data": self._common_protocol(),
            "runs": [self._run_record(model) for model in models],
            "seed": self.options.seed,
            "device": self.device,
            "seconds": round(self.seconds, 3),
        }
        if len(models) > 1:
            record["comparisons"] = [self._difference_record(model) for model in models[1:]]
        if len(models) == 2 and self.units.shares is None:
            record["comparison"] = self._comparison_record()
        return record | {"record_sha256": json_sha256({"data": record["data"], "runs": record["runs"]})}

    def _common_protocol(self) -> JSONObject:
        """The entries in which the protocols of all models agree."""
        first, *others = (one.protocol for one in self.evaluations)
        return {key: first[key] for key in first if all(other.get(key) == first[key] for other in others)}

    def _run_record(self, model: int) -> JSONObject:
        """A model on its own blocks, and, if other models read other blocks, on the shared text."""
        evaluation = self.evaluations[model]
        record = evaluation.record()
        if self.units.shares is None:
            return record
        common = self._common_protocol()
        figures = {bound: self._per_byte_record(self.nats_per_byte(model, bound)) for bound in evaluation.bounds}
        own = {key: value for key, value in evaluation.protocol.items() if key not in common}
        return record | {"data": own, "in_common": figures}

    def _per_byte_record(self, nats_per_byte: IntervalEstimate, per_word: str = "perplexity_per_word") -> JSONObject:
        bits, words = self.bits_per_byte(nats_per_byte), self.per_word(nats_per_byte)
        return finite(
            {
                "bits_per_byte": bits.value,
                "bits_per_byte_ci95": bits.ci95,
                per_word: words.value,
                f"{per_word}_ci95": words.ci95,
            }
        )

    def _difference_record(self, model: int) -> JSONObject:
        """A model minus the first one."""
        bounds: JSONObject = {}
        for bound in self.evaluations[model].bounds:
            values, found = self._differences(model, bound), self.difference(model, bound)
            if values is not None and found is not None:
                error = finite(mean_and_stderr(values)[1] / math.log(2))
                bounds[bound] = self._per_byte_record(found, "perplexity_per_word_ratio") | {"stderr": error}
        return {
            "run": self.evaluations[model].folder.name,
            "less": self.evaluations[0].folder.name,
            "paired_over": self.units.name,
            "pairs": self.pairs,
            "bytes_per_unit": self.units.bytes,
            "bounds": bounds,
        }

    def _comparison_record(self) -> JSONObject:
        """The second model minus the first in nats per token, on the same sequences."""
        first, second = (one.main for one in self.evaluations)
        found, both = compare(first, second), torch.stack([first.per_sequence, second.per_sequence])
        return finite(
            {
                "bound": first.bound,
                "difference_nats_per_token": found.value,
                "stderr": mean_and_stderr(both[1] - both[0])[1],
                "ci95": found.ci95,
                "perplexity_ratio": found.exp().value,
                "perplexity_ratio_ci95": found.exp().ci95,
                "correlation": float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else math.nan,
            }
        )

    def save_per_sequence(self, path: Path) -> None:
        """One value per sequence for each model and bound: .npy [models * bounds, N], or .jsonl."""
        columns = {
            f"{name}_nats_per_token" + f":{place}:{one.folder.path.name}" * (len(self.evaluations) > 1): estimate
            for place, one in enumerate(self.evaluations, 1)
            for name, estimate in one.bounds.items()
        }
        values = np.stack([estimate.per_sequence.numpy() for estimate in columns.values()])
        if path.suffix == ".npy":
            with atomic_file(path) as temporary, temporary.open("wb") as file:
                np.save(file, values, allow_pickle=False)
            return
        rows = [{"sequence": n, **dict(zip(columns, row, strict=True))} for n, row in enumerate(values.T.tolist())]
        atomic_write(path, "".join(f"{json.dumps(finite(row))}\n" for row in rows).encode())

    def save_tokens(self, path: Path) -> None:
        """Write every token of the first model's sequences with its cost in nats, in the format of
        `cedd.evaluation.tokens`: .jsonl.

        The first bound must be `importance`, unless the model is autoregressive.
        """
        folder, estimate, blocks = self.evaluations[0].folder, self.evaluations[0].main, self.blocks[0]
        save_tokens(path, folder.tokenizer, blocks, token_nats(folder, blocks, estimate))

    def save_plot(self, path: Path) -> None:
        """Plot the running estimate with its 95% band over the sequences, for each model and bound."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for evaluation in self.evaluations:
            for name, estimate in evaluation.bounds.items():
                if len(estimate.per_sequence) < 2:
                    continue
                mean, half = (x.numpy() for x in estimate.running())
                count = np.arange(2, len(estimate.per_sequence) + 1)
                label = name if len(self.evaluations) == 1 else f"{evaluation.folder.path.name}, {name}"
                (line,) = axes.plot(count, mean, label=label)
                axes.fill_between(count, mean - half, mean + half, alpha=0.2, color=line.get_color())
        axes.set_xlabel("sequences")
        axes.set_ylabel("nats per token, with 95% band")
        axes.legend()
        with atomic_file(path) as file:
            figure.savefig(file, format=path.suffix[1:], dpi=150)


# ----------------------------------------------------------------------------------------------------------------
# Evaluating


def evaluate(
    models: AnyTrainedModel | Sequence[AnyTrainedModel],
    data: str | Path = "python-manual",
    *,
    tolerance: float | None = None,
    device: str = "auto",
    progress: Callable[[str], AbstractContextManager[Progress]] | None = None,
    same_sequences: bool = False,
    architecture: Architecture | None = None,
    **options: Any,
) -> EvaluationResult:
    """Bound the perplexity of a model on a text, with 95% intervals; or of several models, with paired differences.

        result = cedd.evaluate("runs/first", "wikitext2", draws=32)
        result.perplexity, result.perplexity_ci95

    Args:
        models: a model returned by `cedd.load`, a run folder, or a name; or several of these, each compared with the
            first (tokenizers may differ).
        data: a text file, folder or .jsonl; wikitext2, wikitext103, ptb, lambada, lm1b; hf:NAME; or python-manual.
        tolerance: add draws (or orders) until the half-width of the 95% interval is at most this share of the
            perplexity (0.005).
        device: device to load models to: auto, cpu, cuda or cuda:1.
        progress: makes a context manager from the name of a model; it yields a callable that takes the evaluations done
            and planned.
        same_sequences: refuse models that read different sequences.
        architecture: the class of your own network, or package:Class, if models are given by their folders.
        options: fields of `cedd.evaluation.options.EvaluationOptions`: bound, draws, max_sequences, seed, ...
    """
    asked = changed(EvaluationOptions(), options, "the options of an evaluation")
    check_options(asked, str(data))
    given = [models] if isinstance(models, LoadedModel | ModelFolder | str | Path) else list(models)
    if not given:
        raise ValueError("an evaluation needs at least one model")
    if len(given) > 1 and asked.bound == "importance":
        if tolerance is not None or asked.seconds is not None:
            raise ValueError("models are compared with equal numbers of orders; give --orders, not a tolerance or time")
        if asked.checkpoint is not None:
            raise ValueError("--checkpoint keeps the orders of one model; evaluate the models one by one")
    place = pick_device(device)
    folders = [at_length(_folder(one, place, architecture), asked.length) for one in given]
    _refuse_options_of_noise(folders, asked)
    for folder in folders:
        check_bound_of(folder, asked.bound)
        if asked.order is not None:
            folder.method.check_whole("--order")
            check_order(asked.order, folder.method, folder.process, asked.steps)
    started = time.perf_counter()
    where = {"split": asked.split, "root": asked.data_root, "workers": asked.workers}
    texts = [
        data_for(folder, str(data), wrap=asked.wrap, labels=_labels_of_data(folder, asked.labels), **where)
        for folder in folders
    ]
    units = common_units(texts, [folder.tokenizer for folder in folders], asked.max_sequences)
    if same_sequences and units.shares is not None:
        raise ValueError("these runs read different sequences; values per sequence need runs with the same tokens")
    chosen = [
        read_blocks(text, blocks, folder.tokenizer, asked.max_unknown)
        for folder, text, blocks in zip(folders, texts, units.blocks, strict=True)
    ]
    conditions = [
        _conditions(folder, asked, text, which)
        for folder, text, which in zip(folders, texts, units.blocks, strict=True)
    ]
    found = list[ModelEvaluation]()
    for folder, (blocks, protocol), own in zip(folders, chosen, conditions, strict=True):
        with (progress or _silent)(folder.path.name) as move:
            found.append(_evaluation(folder, blocks, protocol, own, asked, tolerance, move))
    blocks = [one for one, _ in chosen]
    return EvaluationResult(found, units, asked, device, time.perf_counter() - started, blocks)


def check_options(options: EvaluationOptions, data: str) -> None:
    """Refuse invalid options before anything is read."""
    options.check()
    temperature, top_p = (1.0 if value is None else value for value in (options.temperature, options.top_p))
    Sharpening(temperature, top_p)
    if not names_evaluation_set(data):
        for name, usual in (("split", "test"), ("data_root", None)):
            if getattr(options, name) != usual:
                shown = name.replace("_", "-")
                raise ValueError(f"--{shown} has no effect on a --data that is not an evaluation set")


def _refuse_options_of_noise(folders: Sequence[ModelFolder], options: EvaluationOptions) -> None:
    """Refuse options of the noise if every model has an exact likelihood."""
    if any(folder.method.dynamics.noisy for folder in folders):
        return
    for name in ("sampling", "time_floor"):
        if getattr(options, name) is not None:
            shown = name.replace("_", "-")
            raise ValueError(f"--{shown} has no effect on an autoregressive model, whose likelihood is exact")


def _folder(model: AnyTrainedModel, device: torch.device, architecture: Architecture | None = None) -> ModelFolder:
    if isinstance(model, LoadedModel):
        return model.folder
    return model if isinstance(model, ModelFolder) else load_folder(model, device, architecture)


def at_length(folder: ModelFolder, length: int | None) -> ModelFolder:
    """The model for sequences of this length, which it reads as those that it generates."""
    if length is None or length == folder.length:
        return folder
    block = folder.method.block
    if length > folder.length:
        raise ValueError(f"--length must be at most {folder.length}, which {folder.name} reads at once (got {length})")
    if block is not None and length % block:
        raise ValueError(f"--length must be a multiple of the block, {block} (got {length})")
    network = folder.model if block is not None else LoadedModel(folder).reader(length)
    return replace(folder, length=length, model=network)


def _evaluation(
    folder: ModelFolder,
    blocks: Tensor,
    protocol: JSONMapping,
    conditions: Mapping[str, Tensor],
    options: EvaluationOptions,
    tolerance: float | None,
    progress: Progress,
) -> ModelEvaluation:
    """Evaluate one model on its blocks [N, L]."""
    given = {name: value for name in ("label", "labels") if (value := getattr(options, name)) is not None}
    how: dict[str, Any] = {"tolerance": tolerance, "progress": progress, "conditions": conditions}
    found = measure(folder, blocks, {**protocol, **given}, options, **how)
    if options.order is None:
        return found
    sampler = SamplingOptions(
        sampler=options.order, steps=options.steps, temperature=options.temperature, top_p=options.top_p
    )
    return add_order_likelihood(found, blocks, sampler, options.batch or BATCH, options.fixed_set, progress)


def _labels_of_data(folder: ModelFolder, field: str | None) -> tuple[str, Sequence[str]] | None:
    """The field of the labels, and the labels that a model was trained with."""
    return None if field is None else (field, LoadedModel(folder).trained_labels)


def _conditions(
    folder: ModelFolder, options: EvaluationOptions, text: EvaluationData, which: NDArray[np.integer]
) -> dict[str, Tensor]:
    """The labels of these blocks of a text, as a condition of the network."""
    if options.labels is None:
        return LoadedModel(folder).conditions(options.label, len(which))
    labels = text.packed.labels_of(which * text.packed.length)
    return {"label": torch.from_numpy(labels).to(model_device(folder.model))}


@contextmanager
def _silent(name: str) -> Iterator[Progress]:
    del name
    yield lambda done, planned: None
