"""Perplexity of a run on a data set: the bounds with their intervals, in every unit, and two runs compared.

Shapes: N sequences, L positions.

The data are packed by a policy that the result names and hashes (`protocol`); the remainder that fills no block is
counted there. A unit that models with different vocabularies share is the character (or byte, or word): a value in nats
per token times the data's tokens per character.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.bounds.estimate import BoundEstimate, Interval, exact_estimate, exp_or_inf, mean_and_stderr, mean_interval
from cedd.bounds.estimator import Progress, Sampling, estimate_bounds
from cedd.data.corpora import PYTHON_MANUAL, open_corpus
from cedd.data.evaluation_sets import EvaluationData, load_evaluation_set
from cedd.data.packing import ends_of_blocks, evenly_spaced, pack
from cedd.data.text import MOST_UNKNOWN, unknown_share
from cedd.data.tokenizers import Tokenizer
from cedd.dynamics import BOUNDS, Bound
from cedd.models.folder import ModelFolder
from cedd.samplers import order_nats
from cedd.storage import atomic_file, atomic_write, expanded, finite, json_sha256

Asked = Literal["tight", "j1", "j2", "all"]
UNITS = {"character": "characters", "byte": "utf8_bytes", "word": "words"}
"""A unit and the count of the protocol that it is."""
PLOT_SUFFIXES = (".png", ".pdf", ".svg")
VALUE_SUFFIXES = (".npy", ".jsonl")


# ----------------------------------------------------------------------------------------------------------------
# Data


def load_data(
    spec: str,
    tokenizer: Tokenizer,
    length: int,
    *,
    split: str = "test",
    root: str | Path | None = None,
    cache: str | Path | None = None,
    workers: int = 1,
    wrap: bool = False,
) -> EvaluationData:
    """An evaluation set by its name, or a file, folder or hub data set, as blocks with the protocol that made them.

    wrap: each block stands between the tokens that begin and end a document, and has two tokens of text fewer.
    """
    if wrap:
        ends = ends_of_blocks(tokenizer, length)
        inner = load_data(spec, tokenizer, length - 2, split=split, root=root, cache=cache, workers=workers)
        return inner.wrapped(*ends)
    is_file = expanded(spec).exists() or spec == PYTHON_MANUAL
    if not is_file and re.fullmatch(r"[\w-]+", spec):  # a bare word: an evaluation set, or refused by name
        return load_evaluation_set(spec, tokenizer, length, split=split, root=root, cache=cache, workers=workers)
    corpus = open_corpus(spec)
    packed = pack(corpus, tokenizer, length, cache=cache, workers=workers)
    protocol = {"set": corpus.name, "split": None, "source": corpus.name, "detokenizer": "none", **packed.report()}
    named = ("content_sha256", "policy_sha256", "tokenizer_fingerprint", "length")
    return EvaluationData(packed, protocol | {"protocol_sha256": json_sha256({key: protocol[key] for key in named})})


def data_for(folder: ModelFolder, spec: str, *, wrap: str = "none", **options: Any) -> EvaluationData:
    """The data as a model reads them, with the options of `load_data`.

    wrap: none, bos-eos, or trained, which is what the model was trained with.
    """
    ends = folder.wrap if wrap == "trained" else wrap
    return load_data(spec, folder.tokenizer, folder.length, wrap=ends == "bos-eos", **options)


def lost_text(tokenizer: Tokenizer) -> str | None:
    """What figures of a text leave out where the tokenizer does."""
    if tokenizer.lossless:
        return None
    return (
        f"The tokenizer {tokenizer.name!r} drops capitals, accents and line breaks: what these would cost is in "
        "neither the bits per byte or character nor the perplexity per word."
    )


def choose_sequences(
    data: EvaluationData, most: int | None, tokenizer: Tokenizer, most_unknown: float = MOST_UNKNOWN
) -> tuple[Tensor, dict[str, Any]]:
    """At most `most` sequences [N, L], evenly spaced over the set and in its order, and the protocol that says so.

    Refused where more than the share `most_unknown` of them are characters that the tokenizer does not know.
    """
    if most is not None and most < 1:
        raise ValueError(f"an evaluation needs at least one sequence; got {most}")
    return read_blocks(data, evenly_spaced(len(data.packed), most), tokenizer, most_unknown)


def read_blocks(
    data: EvaluationData, which: NDArray[np.integer], tokenizer: Tokenizer, most_unknown: float = MOST_UNKNOWN
) -> tuple[Tensor, dict[str, Any]]:
    """These sequences [N, L], and the protocol that says how many they are."""
    blocks = data.blocks(which)
    unknown = unknown_share(tokenizer, blocks, most_unknown)
    return torch.from_numpy(blocks), data.protocol | {"evaluated_sequences": len(blocks), "unknown_share": unknown}


# ----------------------------------------------------------------------------------------------------------------
# Measuring


@dataclass(frozen=True)
class Measurement:
    """What a run's bounds on the data are: an estimate for each that was asked for, and for a sampler's likelihood."""

    folder: ModelFolder
    bounds: Mapping[str, BoundEstimate]
    protocol: Mapping[str, Any]

    @property
    def main(self) -> BoundEstimate:
        """The first bound that was asked for."""
        return next(iter(self.bounds.values()))

    def per_unit(self, estimate: BoundEstimate) -> dict[str, float]:
        """Bits per character and byte, and perplexity per word; nothing where the tokenizer loses characters."""
        found: dict[str, float] = {}
        if self.folder.tokenizer.unknown is not None:
            return found
        for unit, counted in UNITS.items():
            if not self.protocol[counted]:
                continue
            nats = estimate.nats_per_token * (self.protocol["tokens"] / self.protocol[counted])
            if unit == "word":
                found["perplexity_per_word"] = exp_or_inf(nats)
            else:
                found[f"bits_per_{unit}"] = nats / math.log(2)
        return found


def asked_bounds(folder: ModelFolder, asked: Asked) -> tuple[Bound, ...]:
    """The bounds meant: `all` is every one that the method has."""
    if asked != "all":
        folder.method.check_bound(asked)
        return (asked,)
    return tuple(bound for bound in BOUNDS if bound in folder.method.dynamics.bounds)


def measure(
    folder: ModelFolder,
    data: Tensor,
    protocol: Mapping[str, Any],
    *,
    bound: Asked = "tight",
    sampling: Sampling | None = None,
    seed: int = 0,
    **options: Any,
) -> Measurement:
    """The bounds of a run on data [N, L], with the options of `estimate_bound`.

    The same seed shows any run the same times and noise; of `all`, stratified draws measure every bound that
    reaches nearly as far.
    """
    if folder.process.vocab_size < folder.tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer of {folder.path} has {folder.tokenizer.vocab_size} tokens and its model "
            f"{folder.process.vocab_size}: they do not belong together"
        )
    found = estimate_bounds(
        folder.model,
        folder.process,
        data,
        asked_bounds(folder, bound),
        method=folder.method,
        generator=torch.Generator().manual_seed(seed),
        sampling=sampling,
        **options,
    )
    return Measurement(folder, {**found}, protocol)


def with_order(
    found: Measurement, data: Tensor, order: str, steps: int | None, batch: int, fixed_set: bool, progress: Progress
) -> Measurement:
    """Beside the bounds on data [N, L], the exact likelihood of the sampler that reveals masks in this order."""
    folder, length, parts = found.folder, data.shape[1], list[Tensor]()
    for rows in data.split(batch):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        nats = order_nats(folder.model, folder.process, rows, method=folder.method, order=order, steps=steps)
        parts.append(nats.cpu() / length)
        progress(len(parts) * batch, len(data))
    estimate = exact_estimate(f"{order}-order", torch.cat(parts), min(steps or length, length), length, fixed_set)
    return replace(found, bounds={**found.bounds, estimate.bound: estimate})


# ----------------------------------------------------------------------------------------------------------------
# Two runs on the same sequences, times and noise


@dataclass(frozen=True)
class Comparison:
    """The second run less the first, in nats per token, sequence by sequence."""

    bound: str
    difference: float
    stderr: float
    ci95: Interval
    correlation: float

    @property
    def perplexity_ratio(self) -> float:
        """Second over first."""
        return exp_or_inf(self.difference)

    @property
    def perplexity_ratio_ci95(self) -> Interval:
        return exp_or_inf(self.ci95[0]), exp_or_inf(self.ci95[1])


def compare(first: BoundEstimate, second: BoundEstimate) -> Comparison:
    """The paired difference of two estimates on the same sequences, its error clustered by sequence."""
    if len(first.per_sequence) != len(second.per_sequence) or first.length != second.length:
        raise ValueError("a paired comparison needs the same sequences: evaluate both runs on the same blocks")
    values = second.per_sequence - first.per_sequence
    mean, error = mean_and_stderr(values)
    heavy_tailed = first.heavy_tailed or second.heavy_tailed
    interval = (math.nan, math.nan) if heavy_tailed else mean_interval(values)
    both = torch.stack([first.per_sequence, second.per_sequence])
    correlation = float(torch.corrcoef(both)[0, 1]) if len(values) > 1 else math.nan
    return Comparison(first.bound, mean, error, interval, correlation)


# ----------------------------------------------------------------------------------------------------------------
# Records and files


def measurement_record(measured: Measurement) -> dict[str, Any]:
    """A measurement as JSON."""
    return {
        "run": measured.folder.name,
        "method": measured.folder.method.name,
        "process": measured.folder.process.config(),
        "bounds": {
            name: finite(_estimate_record(estimate) | measured.per_unit(estimate))
            for name, estimate in measured.bounds.items()
        },
    }


def _estimate_record(estimate: BoundEstimate) -> dict[str, Any]:
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
    }


def comparison_record(compared: Comparison) -> dict[str, Any]:
    """A comparison as JSON."""
    return finite(
        {
            "bound": compared.bound,
            "difference_nats_per_token": compared.difference,
            "stderr": compared.stderr,
            "ci95": compared.ci95,
            "perplexity_ratio": compared.perplexity_ratio,
            "perplexity_ratio_ci95": compared.perplexity_ratio_ci95,
            "correlation": compared.correlation,
        }
    )


def save_per_sequence(path: Path, measurements: Sequence[Measurement]) -> None:
    """One value a sequence, for each run and bound, in the order of the data: .npy [runs * bounds, N], or .jsonl."""
    columns = {
        f"{name}_nats_per_token" + f":{place}:{measured.folder.path.name}" * (len(measurements) > 1): estimate
        for place, measured in enumerate(measurements, 1)
        for name, estimate in measured.bounds.items()
    }
    values = np.stack([estimate.per_sequence.numpy() for estimate in columns.values()])
    if path.suffix == ".npy":
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, values, allow_pickle=False)
        return
    rows = [{"sequence": n, **dict(zip(columns, row, strict=True))} for n, row in enumerate(values.T.tolist())]
    atomic_write(path, "".join(f"{json.dumps(finite(row))}\n" for row in rows).encode())


def save_plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """The running estimate with its 95% band over the sequences, for each run and bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for measured in measurements:
        for name, estimate in measured.bounds.items():
            if len(estimate.per_sequence) < 2:
                continue
            mean, half = (x.numpy() for x in estimate.running())
            count = np.arange(2, len(estimate.per_sequence) + 1)
            label = name if len(measurements) == 1 else f"{measured.folder.path.name}, {name}"
            (line,) = axes.plot(count, mean, label=label)
            axes.fill_between(count, mean - half, mean + half, alpha=0.2, color=line.get_color())
    axes.set_xlabel("sequences")
    axes.set_ylabel("nats per token, with 95% band")
    axes.legend()
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
