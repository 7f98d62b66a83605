"""Measurements of a cell: bounds on all texts, samples, and the perplexity of the samples under the judges."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from cells import CellHooks, refuse_other_protocol
from language_cells import CORRECTORS, Arguments, file_name, read_cell
from language_text import Texts
from numpy.typing import NDArray

import cedd
from cedd.apps.bench.options import peak_gibibytes
from cedd.bounds.estimate import BoundEstimate, mean_and_stderr
from cedd.bounds.importance import ImportanceEstimate
from cedd.data.packing import evenly_spaced
from cedd.data.tokenizers import Tokenizer
from cedd.device import pick_device
from cedd.evaluation.generative import HubJudge, Judge, ModelJudge, Samples, generative_perplexity, token_entropy
from cedd.evaluation.options import EvaluationOptions
from cedd.evaluation.perplexity import ModelEvaluation, choose_sequences, measure
from cedd.methods import Method, method_from_config
from cedd.models.backbone import Backbone
from cedd.models.description import read_description
from cedd.models.folder import ModelFolder
from cedd.models.loaded_model import LoadedModel
from cedd.models.locate import WEIGHTS_FILE
from cedd.samplers import SamplingOptions
from cedd.storage import atomic_file, file_sha256, finite, reading
from cedd.training.loop import Trainer

OWN_JUDGE = "ar"
EXACT_BLOCK = 8
"""The longest block whose exact likelihood is measured; it takes 2^b - 1 evaluations of every text."""
BATCH = 256 * 128
"""Tokens shown to a network at once."""

Arrays = dict[str, NDArray[Any]]


@dataclass
class LanguageHooks(CellHooks):
    """Bound a cell on held-out text on the way, and measure all of it in the end."""

    cell: str = ""
    arguments: Arguments = field(default_factory=Arguments)
    texts: dict[str, tuple[torch.Tensor, Mapping[str, Any]]] = field(default_factory=dict)
    """Blocks [N, L] and their protocols, by name; the held-out ones first."""
    held_out: tuple[str, ...] = ()

    def prepare(self, trainer: Trainer) -> None:
        texts, length, most = Texts(self.arguments), trainer.config.length, self.arguments.blocks
        held_out = texts.held_out(length)
        self.held_out = tuple(held_out)
        data = held_out | texts.test_sets(length)
        self.texts = {name: choose_sequences(one, most, texts.tokenizer) for name, one in data.items()}

    def measured(
        self,
        trainer: Trainer,
        model: Backbone,
        blocks: torch.Tensor,
        protocol: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> ModelEvaluation:
        """The bounds on blocks, for these very blocks."""
        folder = self.folder(trainer, model)
        with torch.no_grad(), trainer.train_step.precision.autocast():
            usual = {"batch": max(1, BATCH // trainer.config.length), "fixed_set": True}
            return measure(folder, blocks, protocol, EvaluationOptions(**(usual | options)))

    def folder(self, trainer: Trainer, model: Backbone) -> ModelFolder:
        return ModelFolder(model, trainer.process, self.method(trainer), trainer.data.tokenizer, trainer.config.length)

    def method(self, trainer: Trainer) -> Method:
        """The method in the run's folder; after training it includes the chosen end of the path."""
        return method_from_config(read_description(trainer.config.out)["method"])

    def test(self, trainer: Trainer, model: Backbone) -> dict[str, Any]:
        """The bound on some blocks of each held-out text."""
        found: dict[str, Any] = {}
        for name in self.held_out:
            blocks, _ = self.texts[name]
            some = blocks[:: max(1, len(blocks) // self.arguments.point_blocks)]
            found[name] = bound_record(self.measured(trainer, model, some, draws=2).main)
        return {"held_out": found}

    def cost(self, figures: Mapping[str, Any]) -> float:
        nats = [record["nats_per_token"] for record in figures["held_out"].values()]
        return float("inf") if None in nats else sum(nats) / len(nats)

    def finish(self, trainer: Trainer, model: Backbone) -> dict[str, Any]:
        """Every bound on every text, samples and, of cells in blocks, speed; arrays go into the cell's own file."""
        began, arrays, block = time.perf_counter(), Arrays(), trainer.config.block
        training_gibibytes = peak_gibibytes(trainer.ranks.device)
        ways = CORRECTORS.get(trainer.method.name, {"": None})
        rows: dict[str, Any] = {way: {"texts": {}, "samples": {}} for way in ways}
        for way, corrector in ways.items():
            for name, (blocks, _) in self.texts.items():
                drawn: dict[str, Any] = {"draws": self.arguments.draws, "corrector": corrector}
                bounds = self.measured(trainer, model, blocks, bound="all", **drawn).bounds
                rows[way]["texts"][name] = {kind: bound_record(estimate) for kind, estimate in bounds.items()}
                arrays[key("bounds", way, name)] = bounds["tight"].per_sequence.numpy().astype(np.float32)
                if way == "" and self.weighs_orders(trainer, name):
                    weighted, values = self.weighted(trainer, model, name, bounds["tight"])
                    rows[way]["texts"][name]["importance"] = weighted
                    arrays[key("importance", way, name)] = values
                if self.is_exact(trainer):
                    exact = self.measured(trainer, model, blocks, bound="exact", batch=None).main
                    rows[way]["texts"][name]["exact"] = bound_record(exact)
                    arrays[key("exact", way, name)] = exact.per_sequence.numpy().astype(np.float32)
        bounded = time.perf_counter()
        loaded = LoadedModel(self.folder(trainer, model), trainer.ranks.device)
        length = trainer.config.length
        count = max(1, self.arguments.sampled_tokens // length)
        one_by_one = block is not None or not trainer.method.dynamics.noisy
        for way, corrector in ways.items():
            for steps in (length,) if one_by_one else self.arguments.sampler_steps:
                options = SamplingOptions(steps=steps, seed=trainer.config.seed, corrector=corrector)
                options = options if block is None else one_call_per_token(trainer, options)
                ids = loaded.draw((count, length), options).numpy()
                rows[way]["samples"][str(steps)] = sample_record(ids)
                arrays[key("samples", way, str(steps))] = ids.astype(np.uint16 if ids.max() < 2**16 else np.uint32)
        sampled = time.perf_counter()
        speed = {} if block is None else {"speed": self.speed(trainer, loaded)}
        file = self.arguments.extras(self.cell)
        with atomic_file(file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        for weights in trainer.config.out.glob("orders-*.npz"):
            weights.unlink()
        ended, config = time.perf_counter(), trainer.config
        return {
            "rows": rows,
            "method": self.method(trainer).config(),
            "tokens": config.steps * config.batch.size * config.length,
            "parameters": model.num_parameters(),
            "corpus_blocks": len(trainer.data.train),
            "versions": versions(),
            "training_gibibytes": training_gibibytes,
            **speed,
            "bound_seconds": round(bounded - began, 1),
            "sample_seconds": round(sampled - bounded, 1),
            "seconds": round(ended - began, 1),
        }

    def is_exact(self, trainer: Trainer) -> bool:
        """Whether the likelihood of a cell in blocks is the sum over the orders of every block."""
        block = trainer.config.block
        return block is not None and block <= EXACT_BLOCK and not trainer.process.can_shuffle

    def speed(self, trainer: Trainer, loaded: LoadedModel) -> dict[str, Any]:
        """Tokens per second and GiB of sampling with one network call per token, for each number of texts that are
        drawn at once."""
        device, length, found = trainer.ranks.device, trainer.config.length, dict[str, Any]()
        for batch in self.arguments.speed_batches:
            options = one_call_per_token(trainer, SamplingOptions(seed=trainer.config.seed, deterministic=False))
            loaded.draw((batch, length), options)  # records the graphs
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            loaded.draw((batch, length), options)  # on the host when it returns
            seconds = time.perf_counter() - began
            gibibytes = peak_gibibytes(device)
            found[str(batch)] = {"tokens_per_second": round(batch * length / seconds, 1), "gibibytes": gibibytes}
        return found

    def weighs_orders(self, trainer: Trainer, text: str) -> bool:
        """Whether the importance-weighted bound on a text is requested and defined."""
        asked = self.arguments.orders > 0 and text in (self.arguments.order_texts or self.texts)
        return asked and not trainer.process.can_shuffle

    def weighted(
        self, trainer: Trainer, model: Backbone, text: str, tight: BoundEstimate
    ) -> tuple[dict[str, Any], NDArray[Any]]:
        """The importance-weighted bound on some blocks of a text, or the exact likelihood for `ar`; its difference
        from `tight` on the same blocks; and its value per block. An interrupted measurement resumes from the weights in
        the run's folder."""
        (blocks, protocol), orders = self.texts[text], self.arguments.orders
        began, which = time.perf_counter(), evenly_spaced(len(blocks), self.arguments.order_blocks)
        checkpoint = trainer.config.out / f"orders-{text}-{len(which)}x{orders}.npz"
        options: dict[str, Any] = {"bound": "importance", "orders": orders, "batch": None, "checkpoint": checkpoint}
        evaluation = self.measured(trainer, model, blocks[which], protocol, **options)
        found = evaluation.main
        less, error = mean_and_stderr(found.per_sequence - tight.per_sequence[which])
        record = bound_record(found) | {
            "orders": orders,
            "protocol_sha256": evaluation.protocol["protocol_sha256"],
            "tight_of_blocks": float(tight.per_sequence[which].mean()),
            "less_tight": less,
            "less_tight_stderr": error,
            "seconds": round(time.perf_counter() - began, 1),
        }
        if isinstance(found, ImportanceEstimate):
            record["by_orders"] = {str(orders): nats for orders, nats in found.by_orders.items()}
            record["effective_sample_size"] = found.effective_sample_size
        return finite(record), found.per_sequence.numpy().astype(np.float32)


def one_call_per_token(trainer: Trainer, options: SamplingOptions) -> SamplingOptions:
    """Options with as many network calls as tokens: of the exact sampler where the process only masks, elsewhere in
    even steps of every block."""
    if not trainer.process.can_shuffle:
        return replace(options, sampler="first-hitting", steps=None)
    return replace(options, steps=trainer.config.block)


def bound_record(estimate: BoundEstimate) -> dict[str, Any]:
    """An estimate as a results file has it; the interval is that of these very blocks."""
    return finite(
        {
            "nats_per_token": estimate.nats_per_token,
            "low": estimate.monte_carlo_ci95[0],
            "high": estimate.monte_carlo_ci95[1],
            "stderr_of_blocks": estimate.sequence_stderr,
            "blocks": len(estimate.per_sequence),
            "draws": estimate.draws,
        }
    )


def sample_record(ids: NDArray[Any]) -> dict[str, Any]:
    """The record of texts [N, L] in a results file, before a judge has read them."""
    entropy = float(np.mean([token_entropy(row) for row in ids.tolist()]))
    return {"samples": len(ids), "token_entropy": entropy, "judges": {}}


def key(kind: str, way: str, name: str) -> str:
    """The name of an array in a cell's file."""
    return "/".join(filter(None, (kind, way, name)))


def stored(file: Path, name: str, rows: int | None) -> NDArray[Any] | None:
    """An array of a cell's file; None, and a line, where the file is missing, damaged or that of another row."""
    damage = (OSError, ValueError, RuntimeError, BadZipFile)
    with suppress(*damage), reading(file), file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
        if len(found := arrays[name]) == rows:
            return found
    what = f"{file} is damaged, or that of another row" if file.is_file() else f"there is no file {file}"
    _say_once(f"left out: {what}")
    return None


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
    """Versions of the software that figures depend on."""
    found = {"cedd": cedd.__version__, "python": platform.python_version()}
    found |= {"torch": torch.__version__, "numpy": np.__version__}
    triton = sys.modules.get("triton")
    return found if triton is None else {**found, "triton": triton.__version__}


# ----------------------------------------------------------------------------------------------------------------
# Judges


class OwnJudge(ModelJudge):
    """The autoregressive cell of the same length: texts in its own tokens, the first of which is not counted."""

    def __init__(self, folder: Path, device: str, batch: int) -> None:
        super().__init__(folder, device, batch)
        self.name, self.weights_sha256 = OWN_JUDGE, file_sha256(folder / WEIGHTS_FILE)


def judge_rows(arguments: Arguments, content: Mapping[str, Any]) -> Iterator[str]:
    """Let every judge read the samples that it has not read yet; the name of the cell after each reading.

    A judge that is missing, or samples that are, leave their column empty, and a line says so.
    """
    for name in (OWN_JUDGE, *arguments.judge):
        waiting = [cell for cell, record in content["cells"].items() if unjudged(record, name)]
        done = [cell for cell, record in content["cells"].items() if record["finished"]]
        for cell, judge in judges(arguments, name, waiting, done):
            refuse_other_texts(arguments, content)
            for way, row in content["cells"][cell]["final"]["rows"].items():
                for steps, sampled in row["samples"].items():
                    if name in sampled["judges"]:
                        continue
                    ids = stored(arguments.extras(cell), key("samples", way, steps), sampled.get("samples"))
                    if ids is not None:
                        sampled["judges"][name] = judged(ids.astype(np.int64), judge, Texts(arguments).tokenizer)
                        yield cell


def judge_texts(arguments: Arguments, content: dict[str, Any]) -> Iterator[str]:
    """Let every judge that is there read as many tokens of held-out text, beside which samples can be seen; the name of
    the text after each reading."""
    done = [cell for cell, record in content["cells"].items() if record["finished"]]
    of_length = {read_cell(cell).length or arguments.length: cell for cell in done}
    texts, known = Texts(arguments), content.get("held_out", {})
    for name in (OWN_JUDGE, *arguments.judge):
        read = [length for length in of_length if _has_read(name, known.get(str(length), {}).values())]
        waiting = [cell for length, cell in of_length.items() if length not in read]
        for cell, judge in judges(arguments, name, waiting, done, quiet=True):
            refuse_other_texts(arguments, content)
            length = read_cell(cell).length or arguments.length
            count = max(1, arguments.sampled_tokens // length)
            for text, data in texts.held_out(length).items():
                ids = choose_sequences(data, count, texts.tokenizer)[0][:count].numpy()
                records = content.setdefault("held_out", {}).setdefault(str(length), {})
                records.setdefault(text, sample_record(ids))["judges"][name] = judged(ids, judge, texts.tokenizer)
                yield text


def refuse_other_texts(arguments: Arguments, content: Mapping[str, Any]) -> None:
    """In other tokens the samples would be other texts; judges alone (--only without a cell) check no more than this of
    the protocol, for which they need no corpus."""
    now = {name: getattr(arguments, name) for name in ("length", "sampled_tokens", "holdout")}
    now["tokenizer"] = Texts(arguments).tokenizer.fingerprint
    known = content.get("protocol", {})
    refuse_other_protocol(arguments.results, {name: known.get(name, value) for name, value in now.items()}, now)


def _has_read(name: str, texts: Collection[Mapping[str, Any]]) -> bool:
    """Whether a judge has read these, of which there are some."""
    return bool(texts) and all(name in text["judges"] for text in texts)


def unjudged(record: Mapping[str, Any], name: str) -> bool:
    """Whether a judge has not read all samples of a cell."""
    rows = record.get("final", {}).get("rows", {}).values()
    return any(name not in sampled["judges"] for row in rows for sampled in row["samples"].values())


def judges(
    arguments: Arguments, name: str, cells: Sequence[str], done: Sequence[str], quiet: bool = False
) -> Iterator[tuple[str, Judge]]:
    """The judge of each cell: one for all, or the autoregressive cell of the same length, if it is done; a line says
    that it is not, unless `quiet`."""
    if name != OWN_JUDGE:
        if cells:
            judge = HubJudge(arguments.judge[name], str(pick_device(arguments.device)), arguments.judge_batch)
            yield from ((cell, judge) for cell in cells)
        return
    for length in dict.fromkeys(read_cell(cell).length for cell in cells):
        own = OWN_JUDGE if length is None else f"{OWN_JUDGE}@{length}"
        folder, these = arguments.out / file_name(own), [cell for cell in cells if read_cell(cell).length == length]
        if own not in done or not (folder / WEIGHTS_FILE).is_file():
            many = f"{len(these)} cell{'s' * (len(these) > 1)}"
            if not quiet:
                _say_once(f"the judge {own} is missing for {many}: train it in {arguments.out}")
            continue
        judge = OwnJudge(folder, arguments.device, arguments.judge_batch)
        if judge.tokenizer.fingerprint != Texts(arguments).tokenizer.fingerprint:
            raise ValueError(f"the judge in {folder} has another tokenizer than {arguments.tokenizer}")
        yield from ((cell, judge) for cell in these)


def judged(ids: NDArray[np.int64], judge: Judge, tokenizer: Tokenizer) -> dict[str, Any]:
    """Generative perplexity both ways, with intervals; of the judge that a benchmark trains, which one it was."""
    samples = Samples([tokenizer.decode(row) for row in ids], ids.tolist(), {})
    report = generative_perplexity(samples, judge)
    found = {"mean": report.mean_of_sample_perplexities, "corpus": report.corpus_perplexity}
    which = {"weights_sha256": judge.weights_sha256} if isinstance(judge, OwnJudge) else {}
    return {name: vars(interval) for name, interval in found.items()} | which
