"""How tight the bound is: `tight` and `importance` for 1, 2, 4, ..., K orders on the same blocks, with their times.

    python benchmarks/how_tight.py english --data FOLDER --out how-tight.json
    python benchmarks/how_tight.py english --set wikitext2.test.raw.txt --start 64 --seconds 40 --out how-tight.json
    python benchmarks/how_tight.py runs/cedd-star --ar runs/ar --data FOLDER --plot how-tight.png
    python benchmarks/how_tight.py --saved how-tight.json --plot docs/images/how-tight.png

FOLDER has eval/ with the files of the evaluation sets. On a GPU, the network runs in bfloat16 (its head in float32) for
both bounds. A first pass with two orders warms up the device; its time is recorded separately. Orders are doubled until
there are --orders of them or --seconds are over. The results file is written after `tight` and after each doubling.
`difference` is importance minus tight, paired over blocks, with its standard error and 95% interval.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from command_line import command
from torch import Tensor

from cedd.bounds.estimate import BoundEstimate, mean_and_stderr, mean_interval
from cedd.bounds.importance import ORDERS, ImportanceEstimate, nested_orders
from cedd.cli.parser import argument
from cedd.device import pick_device
from cedd.evaluation.options import BoundName, EvaluationOptions
from cedd.evaluation.perplexity import ModelEvaluation, choose_sequences, load_data, measure, read_blocks
from cedd.models.folder import ModelFolder, load_folder
from cedd.storage import JSONMapping, atomic_file, atomic_write, check_writable, read_json


@dataclass(frozen=True)
class Arguments:
    """example: python benchmarks/how_tight.py english --data FOLDER --orders 64

    Measure how much tighter the importance-weighted bound is than the ELBO, and how long it takes.
    """

    model: str = field(default="english", metadata=argument("[MODEL]"))
    """A run's folder, or a model by its name."""
    data: Path | None = None
    """Folder of the evaluation sets (default: CEDD_DATA)."""
    set: str = "wikitext2"
    """An evaluation set, or a text file."""
    blocks: int = 64
    """Number of blocks."""
    start: int | None = None
    """Measure consecutive blocks from this one on, counted from 0 (default: blocks evenly spaced over the set)."""
    orders: int = ORDERS
    """Orders per block."""
    seconds: float | None = None
    """Stop doubling the orders if the next round would end later than this, in seconds without tight."""
    draws: int = 32
    """Noisy versions of each block for tight."""
    ar: str | None = None
    """An autoregressive run with the same tokenizer, whose exact likelihood is drawn as the reference."""
    seed: int = 0
    """Seed of orders, times and noise."""
    batch: int | None = None
    """Noisy blocks shown to the network at once for importance (default: by the memory of the device)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    out: Path | None = None
    """Write the figures to this .json."""
    plot: Path | None = None
    """Draw the bound over the number of orders to this .png."""
    saved: Path | None = None
    """Print and draw the figures of this file instead of measuring."""


def measured(arguments: Arguments) -> dict[str, Any]:
    """The figures of a run, which are also written as they are measured."""
    device = pick_device(arguments.device)
    folder = load_folder(arguments.model, device)
    data = load_data(arguments.set, folder.tokenizer, folder.length, root=arguments.data)
    if arguments.start is None:
        blocks, protocol = choose_sequences(data, arguments.blocks, folder.tokenizer)
    else:
        end, count = arguments.start + arguments.blocks, len(data.packed)
        if arguments.start < 0 or end > count:
            raise ValueError(f"--start {arguments.start} with --blocks {arguments.blocks}: the set has {count} blocks")
        blocks, protocol = read_blocks(data, np.arange(arguments.start, end), folder.tokenizer)
    record: dict[str, Any] = {
        "model": arguments.model,
        "method": folder.method.name,
        "set": protocol["set"],
        "blocks": len(blocks),
        "start": arguments.start,
        "length": folder.length,
        "seed": arguments.seed,
        "protocol_sha256": protocol["protocol_sha256"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }

    def evaluated(bound: BoundName, of: ModelFolder = folder, **options: Any) -> tuple[ModelEvaluation, float]:
        return timed(lambda: evaluation_of(of, blocks, protocol, bound, arguments, **options), device)

    if device.type == "cuda":
        record["warm_up_seconds"] = evaluated("importance", orders=2)[1]
    found, seconds = evaluated("tight", draws=arguments.draws)
    tight, spent, done = found.main, 0.0, 0
    record["tight"] = figures(tight) | {"seconds": seconds, "draws": arguments.draws}
    if arguments.ar is not None:
        reference = load_folder(arguments.ar, device)
        if reference.tokenizer.fingerprint != folder.tokenizer.fingerprint or reference.length != folder.length:
            raise ValueError(f"--ar {arguments.ar} has another tokenizer or length than {arguments.model}")
        record["ar"] = figures(evaluated("tight", of=reference)[0].main)
    write(record, arguments.out)
    with TemporaryDirectory() as folder_of_weights:
        weights = Path(folder_of_weights) / "weights.npz"
        for orders in nested_orders(arguments.orders)[min(1, arguments.orders - 1) :]:
            if done and arguments.seconds is not None and spent * orders / done > arguments.seconds:
                break
            found, seconds = evaluated("importance", orders=orders, batch=arguments.batch, checkpoint=weights)
            spent, done, weighted = spent + seconds, orders, found.main
            assert isinstance(weighted, ImportanceEstimate)
            record |= {"orders": orders, "importance": weighted_figures(weighted, tight, round(spent, 2))}
            record["importance"]["protocol_sha256"] = found.protocol["protocol_sha256"]
            write(record, arguments.out)
    return record


def write(record: dict[str, Any], path: Path | None) -> None:
    """Write the results file."""
    if path is not None:
        atomic_write(path, (json.dumps(record, indent=2) + "\n").encode())


def evaluation_of(
    folder: ModelFolder, blocks: Tensor, protocol: JSONMapping, bound: BoundName, arguments: Arguments, **options: Any
) -> ModelEvaluation:
    """A bound on the blocks."""
    device = next(folder.model.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        return measure(folder, blocks, protocol, EvaluationOptions(bound=bound, seed=arguments.seed, **options))


def timed(work: Callable[[], ModelEvaluation], device: torch.device) -> tuple[ModelEvaluation, float]:
    """The result of a function, and its duration in seconds."""
    started = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return found, round(time.perf_counter() - started, 2)


def weighted_figures(weighted: ImportanceEstimate, tight: BoundEstimate, seconds: float) -> dict[str, Any]:
    """The importance-weighted bound for 1, 2, 4, ..., K orders, and its differences from `tight`."""
    return figures(weighted, tight) | {
        "seconds": seconds,
        "effective_sample_size": weighted.effective_sample_size,
        "log_weight_std": float(weighted.log_weights.std(1).mean()),
        "by_orders": {str(orders): figures(weighted.of_orders(orders), tight) for orders in weighted.by_orders},
    }


def figures(estimate: BoundEstimate, tight: BoundEstimate | None = None) -> dict[str, Any]:
    """An estimate as JSON, also minus `tight`; intervals are those of the population."""
    less: dict[str, Any] = {}
    if tight is not None:
        differences = estimate.per_sequence - tight.per_sequence
        less["difference"], less["difference_stderr"] = mean_and_stderr(differences)
        less["difference_ci95"] = list(mean_interval(differences))
    return less | {
        "nats_per_token": estimate.nats_per_token,
        "stderr": estimate.sequence_stderr,
        "ci95": list(estimate.sequence_ci95),
        "monte_carlo_stderr": estimate.monte_carlo_stderr,
        "perplexity": estimate.perplexity,
    }


def table(record: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    tight, weighted = record["tight"], record.get("importance", {"by_orders": {}})
    rows = {f"`tight`, {tight['draws']} draws": tight}
    rows |= {f"`importance`, K = {orders}": found for orders, found in weighted["by_orders"].items()}
    rows |= {"`ar`, exact": record["ar"]} if "ar" in record else {}
    lines = ["| bound | nats per token | 95% interval | perplexity | minus `tight` |", "|---|--:|--:|--:|--:|"]
    for name, found in rows.items():
        low, high = found["ci95"]
        nats, less = f"{found['nats_per_token']:.4f}", ""
        if "difference_ci95" in found:
            less = "{:+.4f} ({:+.4f} to {:+.4f})".format(found["difference"], *found["difference_ci95"])
        lines.append(f"| {name} | {nats} | {low:.3f} to {high:.3f} | {found['perplexity']:.2f} | {less} |")
    about = (
        f"{record['model']} on {record['blocks']} blocks of {record['length']} tokens of {record['set']}, "
        f"{record['device']}: {tight['seconds']:.1f} s for tight"
    )
    if "importance" in record:
        about += (
            f", {weighted['seconds']:.1f} s for importance ({weighted['seconds'] * 64 / record['blocks']:.1f} s per 64 "
            f"blocks). Importance minus tight, paired: {weighted['difference']:+.4f} ± "
            f"{weighted['difference_stderr']:.4f} nats per token; effective sample size "
            f"{weighted['effective_sample_size']:.2f} of {record['orders']}; standard deviation of the log weights "
            f"{weighted['log_weight_std']:.1f} nats"
        )
    if "warm_up_seconds" in record:
        about += f"; {record['warm_up_seconds']:.1f} s for the warm-up"
    return "\n".join([*lines, "", f"{about}."])


def draw(record: dict[str, Any], path: Path) -> None:
    """The bound over the number of orders, with the interval of its paired difference to the ELBO of one order."""
    from matplotlib.figure import Figure

    nested = {int(orders): found for orders, found in record["importance"]["by_orders"].items()}
    orders, nats = list(nested), [found["nats_per_token"] for found in nested.values()]
    lows, highs = zip(*(found["ci95"] for found in nested.values()), strict=True)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(orders, nats, marker="o", label="importance")
    axes.fill_between(orders, lows, highs, alpha=0.15, label="95% interval over blocks")
    axes.axhline(record["tight"]["nats_per_token"], color="black", linestyle="--", label="tight (ELBO)")
    if "ar" in record:
        axes.axhline(record["ar"]["nats_per_token"], color="tab:red", linestyle=":", label="autoregressive, exact")
    axes.set_xscale("log", base=2)
    axes.set_xticks(orders, [str(one) for one in orders])
    axes.set_xlabel("orders per block, K")
    axes.set_ylabel("nats per token (upper bound)")
    axes.set_title(f"{record['model']}, {record['blocks']} blocks of {record['set']}", fontsize=10)
    axes.legend(fontsize=8)
    with atomic_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def run(arguments: Arguments) -> None:
    """Measure, print and draw."""
    for name in ("blocks", "orders", "draws"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} must be at least 1 (got {getattr(arguments, name)})")
    if arguments.seconds is not None and not arguments.seconds > 0:
        raise ValueError(f"--seconds must be positive (got {arguments.seconds})")
    check_writable(arguments.out, (".json",))
    record = measured(arguments) if arguments.saved is None else read_json(arguments.saved)
    print(table(record))
    if arguments.plot is not None:
        draw(record, arguments.plot)


if __name__ == "__main__":
    sys.exit(command(__file__, Arguments, run))
