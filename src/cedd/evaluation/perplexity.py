"""Perplexity of one model on a data set: the bounds with their intervals, in every unit.

Shapes: N sequences, L positions.

The result's `protocol` names the packing policy and counts the remainder that fills no block. `protocol_sha256` is a
hash of the packing policy and of the content of the measured sequences. Models with different vocabularies share units
such as the character (or byte, or word): a value in nats per token times the measured sequences' tokens per character.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.bounds.estimate import BoundEstimate, exact_estimate, exp_or_inf, mean_interval
from cedd.bounds.estimator import estimate_bound, estimate_bounds
from cedd.bounds.exact_likelihood import MOST_POSITIONS
from cedd.bounds.importance import ORDERS, ImportanceEstimate, check_reveal_orders, first_hitting_law
from cedd.bounds.options import Progress
from cedd.bounds.order_weights import WeightFile
from cedd.data.corpora import PYTHON_MANUAL, LabelledCorpus, open_corpus
from cedd.data.evaluation_sets import EvaluationData, evaluation_data, load_evaluation_set
from cedd.data.packing import ends_of_blocks, evenly_spaced, pack
from cedd.data.text import MAX_UNKNOWN_SHARE, never_written, unknown_share
from cedd.data.tokenizers import Tokenizer
from cedd.device import model_device
from cedd.dynamics import BOUNDS, Bound, Corrector
from cedd.evaluation.intervals import IntervalEstimate, interval_estimate
from cedd.evaluation.options import BoundName, EvaluationOptions
from cedd.methods import Method
from cedd.models.folder import ModelFolder
from cedd.models.weights import weights_checksum
from cedd.process import seeded_generator
from cedd.samplers import SamplingOptions, order_nats
from cedd.storage import JSONMapping, JSONObject, expanded, finite, json_sha256

FIRST_HITTING_BOUNDS: tuple[BoundName, ...] = ("importance", "exact")
"""Bounds on the law of the first-hitting sampler."""
UNITS = {"character": "evaluated_characters", "byte": "evaluated_bytes", "word": "evaluated_words"}
"""The field of the protocol that counts each unit."""


# ----------------------------------------------------------------------------------------------------------------
# Data


def load_data(
    spec: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    split: str = "test",
    root: str | Path | None = None,
    workers: int = 1,
    wrap: bool = False,
    labels: tuple[str, Sequence[str]] | None = None,
) -> EvaluationData:
    """An evaluation set by name, or a file, folder or hub data set, as blocks with their protocol.

    Args:
        spec: the name, path or hub data set.
        tokenizer: the model's.
        length: L.
        split: of an evaluation set.
        root: folder of the evaluation sets' files.
        workers: processes for tokenization.
        wrap: put each block between the tokens that begin and end a document, with two tokens of text fewer.
        labels: the field of the .jsonl with the label of each document, and all labels. Documents are joined by label.
    """
    if wrap:
        ends = ends_of_blocks(tokenizer, length)
        inner = load_data(spec, tokenizer, length - 2, split=split, root=root, workers=workers, labels=labels)
        return inner.wrapped(*ends)
    if names_evaluation_set(spec):
        if labels is not None:
            raise ValueError(f"--labels needs a .jsonl file (got the evaluation set {spec})")
        return load_evaluation_set(spec, tokenizer, length, split=split, root=root, workers=workers)
    corpus = open_corpus(spec)
    if labels is not None:
        corpus = LabelledCorpus(corpus, *labels)
    packed = pack(corpus, tokenizer, length, workers=workers)
    described = {"set": corpus.name, "split": None, "source": corpus.name, "detokenizer": "none"}
    return evaluation_data(packed, described)


def names_evaluation_set(spec: str) -> bool:
    """Whether --data is the name of an evaluation set, not a file, folder or hub data set."""
    is_file = expanded(spec).exists() or spec == PYTHON_MANUAL
    return not is_file and re.fullmatch(r"[\w-]+", spec) is not None


def data_for(folder: ModelFolder, spec: str, *, wrap: str = "none", **options: Any) -> EvaluationData:
    """The data as a model reads them, with the options of `load_data`.

    `wrap` is none, bos-eos, or trained, which is how the model was trained.
    """
    ends = folder.wrap if wrap == "trained" else wrap
    return load_data(spec, folder.tokenizer, folder.length, wrap=ends == "bos-eos", **options)


def lost_text(tokenizer: Tokenizer) -> str | None:
    """A note about text that the tokenizer drops, which the results do not include."""
    if tokenizer.lossless:
        return None
    return (
        f"The tokenizer {tokenizer.name!r} drops capitals, accents and line breaks: what these would cost is in "
        "neither the bits per byte or character nor the perplexity per word."
    )


def choose_sequences(
    data: EvaluationData, most: int | None, tokenizer: Tokenizer, max_unknown: float = MAX_UNKNOWN_SHARE
) -> tuple[Tensor, JSONObject]:
    """At most `most` sequences [N, L], evenly spaced over the set and in order, with their protocol.

    Refused if more than the share `max_unknown` of them are characters that the tokenizer does not know.
    """
    if most is not None and most < 1:
        raise ValueError(f"max_sequences must be at least 1 (got {most})")
    return read_blocks(data, evenly_spaced(len(data.packed), most), tokenizer, max_unknown)


def read_blocks(
    data: EvaluationData, which: NDArray[np.integer], tokenizer: Tokenizer, max_unknown: float = MAX_UNKNOWN_SHARE
) -> tuple[Tensor, JSONObject]:
    """These sequences [N, L], and the protocol of their measurement: which they are, and how much text they contain."""
    blocks = data.blocks(which)
    unknown = unknown_share(tokenizer, blocks, max_unknown)
    sequences = hashlib.sha256(blocks.astype("<i8").tobytes()).hexdigest()
    return torch.from_numpy(blocks), data.protocol | {
        "evaluated_sequences": len(blocks),
        "evaluated_tokens": blocks.size,
        **{f"evaluated_{unit}": count for unit, count in data.text_counts(tokenizer, blocks).items()},
        "unknown_share": unknown,
        "sequences_sha256": sequences,
        "protocol_sha256": json_sha256({"set": data.protocol["protocol_sha256"], "sequences": sequences}),
    }


# ----------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class ModelEvaluation:
    """One model on the data: an estimate of each requested bound, and of the likelihood of a sampler."""

    folder: ModelFolder
    bounds: Mapping[str, BoundEstimate]
    protocol: JSONMapping

    @property
    def main(self) -> BoundEstimate:
        """The first requested bound."""
        return next(iter(self.bounds.values()))

    def per_unit(self, estimate: BoundEstimate) -> dict[str, float]:
        """Bits per character and byte, and perplexity per word; empty if the tokenizer loses characters."""
        found: dict[str, float] = {}
        if self.folder.tokenizer.unknown is not None:
            return found
        for unit, counted in UNITS.items():
            if not self.protocol[counted]:
                continue
            nats = estimate.nats_per_token * (self.protocol["evaluated_tokens"] / self.protocol[counted])
            if unit == "word":
                found["perplexity_per_word"] = exp_or_inf(nats)
            else:
                found[f"bits_per_{unit}"] = nats / math.log(2)
        return found

    def record(self) -> JSONObject:
        """The evaluation as JSON."""
        return {
            "run": self.folder.name,
            "method": self.folder.method.name,
            "process": self.folder.process.config(),
            "bounds": {
                name: finite(_estimate_record(estimate, self.folder.method) | self.per_unit(estimate))
                for name, estimate in self.bounds.items()
            },
        }


def check_bound_of(folder: ModelFolder, asked: BoundName) -> None:
    """Refuse a bound that a model does not have."""
    if asked not in FIRST_HITTING_BOUNDS:
        requested_bounds(folder, asked)
    elif folder.method.dynamics.noisy:
        check_reveal_orders(folder.method, folder.process)
        if asked == "exact" and (tokens := folder.method.block or folder.length) > MOST_POSITIONS:
            raise ValueError(
                f"the exact likelihood sums over all reveal orders of at most {MOST_POSITIONS} tokens; {folder.name} "
                f"generates {tokens} tokens together; use importance"
            )


def requested_bounds(folder: ModelFolder, asked: BoundName) -> tuple[Bound, ...]:
    """The requested bounds: `all` is those of `tight`, `j1` and `j2` that the method has."""
    if asked == "importance" or asked == "exact":  # an exact likelihood is the limit of many orders
        return ("tight",)
    if asked != "all":
        folder.method.check_bound(asked)
        return (asked,)
    return tuple(bound for bound in BOUNDS if bound in folder.method.dynamics.bounds)


def measure(
    folder: ModelFolder,
    data: Tensor,
    protocol: JSONMapping,
    options: EvaluationOptions,
    *,
    tolerance: float | None = None,
    progress: Progress | None = None,
    conditions: Mapping[str, Tensor] | None = None,
) -> ModelEvaluation:
    """The bounds of a run on data [N, L], with conditions of the network, such as labels, for each sequence.

    With the same seed all models get the same times and noise, and the same orders; for `all`, stratified draws measure
    every bound that reaches nearly as far. On a GPU the network computes `importance` and `exact` in bfloat16, as in
    sampling, and its head in float32. A model with an exact likelihood has that instead.
    """
    if folder.process.vocab_size < folder.tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer of {folder.path} has {folder.tokenizer.vocab_size} tokens and its model "
            f"{folder.process.vocab_size}: they do not match"
        )
    model, process, method, bound = folder.model, folder.process, folder.method, options.bound
    how: dict[str, Any] = {
        "method": method,
        "draws": options.draws,
        "tolerance": tolerance,
        "generator": seeded_generator(options.seed),
        "sampling": options.sampling,
        "time_floor": options.time_floor,
        "corrector": None if options.corrector is None else Corrector(options.corrector),
        "fixed_set": options.fixed_set,
        "batch": options.batch,
        "progress": progress,
        **(conditions or {}),
    }
    if bound not in FIRST_HITTING_BOUNDS:
        found = estimate_bounds(model, process, data, requested_bounds(folder, bound), **how)
        return ModelEvaluation(folder, {**found}, protocol)
    if method.dynamics.noisy:
        how["bound"] = bound
        if bound == "importance":
            path = options.checkpoint
            file = None if path is None else WeightFile(expanded(path), weights_checksum(model))
            how |= {"orders": options.orders, "seconds": options.seconds, "checkpoint": file}
        device = model_device(model)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            estimate = estimate_bound(model, process, data, **how)
    else:
        estimate = estimate_bound(model, process, data, **how)
    drawn: dict[str, int] = {}
    if bound == "importance":
        drawn["orders"] = estimate.orders if isinstance(estimate, ImportanceEstimate) else options.orders or ORDERS
    covered = {"data": protocol.get("protocol_sha256"), "sequences": len(data), "bound": bound, **drawn}
    return ModelEvaluation(folder, {bound: estimate}, {**protocol, **drawn, "protocol_sha256": json_sha256(covered)})


def add_order_likelihood(
    found: ModelEvaluation, data: Tensor, options: SamplingOptions, batch: int, fixed_set: bool, progress: Progress
) -> ModelEvaluation:
    """Add the exact likelihood of the sampler that reveals masks in an order to the bounds on data [N, L].

    `options` are those of the sampler; None means the default of `cedd sample` for this model. The likelihood's
    negative logarithm is infinite if the sampler never draws the data.
    """
    folder, length, parts = found.folder, data.shape[1], list[Tensor]()
    used = options.with_defaults(length, folder.config.get("sampling", {}))
    used = replace(used, exclude=never_written(folder.tokenizer))
    assert used.steps is not None
    for rows in data.split(batch):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        nats = order_nats(folder.model, folder.process, rows, method=folder.method, options=used)
        parts.append(nats.cpu() / length)
        progress(len(parts) * batch, len(data))
    estimate = exact_estimate(f"{used.sampler}-order", torch.cat(parts), min(used.steps, length), length, fixed_set)
    return replace(found, bounds={**found.bounds, estimate.bound: estimate})


def compare(first: BoundEstimate, second: BoundEstimate) -> IntervalEstimate:
    """The second estimate minus the first in nats per token, paired by sequence."""
    if len(first.per_sequence) != len(second.per_sequence) or first.length != second.length:
        raise ValueError("a paired comparison needs the same sequences: evaluate both runs on the same blocks")
    values = second.per_sequence - first.per_sequence
    heavy_tailed = first.heavy_tailed or second.heavy_tailed
    return interval_estimate(float(values.mean()), (math.nan, math.nan) if heavy_tailed else mean_interval(values))


def _two_sided_record(estimate: ImportanceEstimate) -> JSONObject:
    """The lower bound, if it is informative."""
    both = estimate.two_sided() if estimate.orders >= 4 else None
    if both is None or not both.informative:
        return {"at_least": None, "at_least_informative": False}
    return {"at_least": both.at_least, "at_least_stderr": both.at_least_stderr, "at_least_informative": True}


def _estimate_record(estimate: BoundEstimate, method: Method) -> JSONObject:
    weighted: JSONObject = {}
    if isinstance(estimate, ImportanceEstimate):
        nested = {orders: estimate.of_orders(orders) for orders in estimate.by_orders}
        weighted = {
            "law": first_hitting_law(method),
            "orders": estimate.orders,
            "by_orders": {str(orders): one.nats_per_token for orders, one in nested.items()},
            "by_orders_ci95": {str(orders): one.ci95 for orders, one in nested.items()},
            "effective_sample_size": estimate.effective_sample_size,
            "log_weight_variance": estimate.log_weight_variance,
            **_two_sided_record(estimate),
        }
    return {
        "nats_per_token": estimate.nats_per_token,
        "bits_per_token": estimate.bits_per_token,
        "perplexity": estimate.perplexity,
        "infinite": math.isinf(estimate.nats_per_token),
        "why_infinite": estimate.why_infinite,
        "stderr": estimate.stderr,
        "ci95": estimate.ci95,
        "heavy_tailed": estimate.heavy_tailed,
        "perplexity_ci95": estimate.perplexity_ci95,
        "clustered_by_sequence": not estimate.fixed_set,
        "sequence_stderr": estimate.sequence_stderr,
        "monte_carlo_stderr": estimate.monte_carlo_stderr,
        "terminal": estimate.terminal,
        "earliest_time": estimate.earliest_time,
        "evaluations": estimate.evaluations,
        "draws_per_sequence": estimate.draws,
        "sequences": len(estimate.per_sequence),
        "tolerance_reached": estimate.reached,
        **weighted,
    }
