"""The language benchmark over several seeds: bounds by seed, the paper's order, and the distance to autoregression.

A figure of method m and seed s is modelled as y_ms = mean_m + effect_s + error_ms: equal seeds share the order of the
training text. The variance of training is that of the errors, which M methods and S seeds estimate with (M - 1)(S - 1)
degrees of freedom. An interval of a difference of methods covers it, and the choice of test blocks (paired by block).

`importance` may have been measured for some of the seeds only. Its intervals then use those seeds; from a single seed,
they use the variance of training of `tight` on the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from cells import different_seeds
from language_cells import own_settings, read_cell
from language_tables import ON, ORDER, Rows
from torch import Tensor

from cedd.bounds.estimate import mean_and_stderr, student_quantile
from cedd.data.packing import evenly_spaced
from cedd.methods import get_method
from cedd.parameterization import Affine

BOUNDS = ("tight", "importance")
RATIOS_NOTE = (
    "For networks that output ratios (sedd, sedds), importance bounds the sampler that draws a token from the ratios "
    "divided by their sum. The bound's part includes the effect of that sampler."
)


class Spread(NamedTuple):
    """The variance of training of one figure, and its degrees of freedom."""

    variance: float
    freedom: int


def over_seeds(files: Sequence[Rows]) -> str:
    """The tables of results files that differ in their seeds."""
    protocols = [rows.protocol for rows in files]
    names = dict.fromkeys(name for protocol in protocols for name in protocol)
    if different := [name for name in names if any(p.get(name) != protocols[0].get(name) for p in protocols)]:
        raise ValueError(f"these results files are of different protocols ({', '.join(different)} differ)")
    shared = [cell for cell in files[0].cells if all(rows.finished(cell) for rows in files)]
    if not shared:
        raise ValueError("these results files have no finished cell in common")
    plain = protocols[0].get("recipe", {})
    records = {cell: [rows.cells[cell] for rows in files] for cell in shared}
    seeds = different_seeds(records, lambda _, record: own_settings(record, plain) | {"seed": record["seed"]})
    refuse_different_orders(files)
    parts = (by_seed(files, shared, seeds), order(files, shared), distance(files))
    return "\n\n".join(filter(None, parts))


# ----------------------------------------------------------------------------------------------------------------
# Orders


def importance_records(rows: Rows) -> Iterator[tuple[str, str, Mapping[str, Any], Mapping[str, Any]]]:
    """(cell, text, record of `importance`, record of `tight`) of every row that has both."""
    for cell in rows.cells:
        for text, bounds in (rows.finished(cell) or {"rows": {"": {"texts": {}}}})["rows"][""]["texts"].items():
            if "importance" in bounds:
                yield cell, text, bounds["importance"], bounds["tight"]


def check_orders(rows: Rows) -> None:
    """Reject a results file whose rows have other orders, blocks or texts of `importance` than the arguments."""
    asked = rows.arguments
    for cell, _, record, tight in importance_records(rows):
        blocks = min(asked.order_blocks, tight["blocks"])
        texts = {text for other, text, _, _ in importance_records(rows) if other == cell}
        wanted = set(asked.order_texts or rows.cells[cell]["final"]["rows"][""]["texts"])
        same = {"orders": record["orders"] == asked.orders, "order_blocks": record["blocks"] == blocks}
        if different := [name for name, equal in (same | {"order_texts": texts == wanted}).items() if not equal]:
            raise ValueError(
                f"{asked.results} has results of another protocol ({', '.join(different)} of {cell} differ); name "
                "another file by --results"
            )


def refuse_different_orders(files: Sequence[Rows]) -> None:
    """Reject rows of one text and length whose `importance` has different numbers of orders or blocks. Rows without it,
    and exact ones, which have no orders, can be compared with all."""
    known: dict[tuple[str, int | None], tuple[str, int, int]] = {}
    for rows in files:
        for cell, text, record, _ in importance_records(rows):
            if record["less_tight"] == 0:
                continue
            here = (cell, record["orders"], record["blocks"])
            first = known.setdefault((text, read_cell(cell).length), here)
            if first[1:] != here[1:]:
                raise ValueError(
                    f"importance on {text} is that of {first[1]} orders of {first[2]} blocks for {first[0]}, but of "
                    f"{here[1]} orders of {here[2]} blocks for {cell}: these cannot be compared"
                )


# ----------------------------------------------------------------------------------------------------------------
# Tables


def by_seed(files: Sequence[Rows], cells: Sequence[str], seeds: Sequence[int]) -> str:
    """A table of every bound on every text: a column per seed, the mean, and the standard deviation over seeds."""
    heads = " | ".join((*(f"seed {seed}" for seed in seeds), "mean", "SD over seeds"))
    lines = [f"| nats per token | bound | text | {heads} |", f"|---|---|---|{'--:|' * (len(seeds) + 2)}"]
    for cell in cells:
        for bound in BOUNDS:
            for text in _texts(files, cell):
                found = [nats(rows, cell, text, bound) for rows in files]
                known = torch.tensor([value for value in found if value is not None], dtype=torch.float64)
                if len(known):
                    spread = f"{known.std():.4f}" if len(known) > 1 else "–"
                    shown = [*("–" if value is None else f"{value:.4f}" for value in found), f"{known.mean():.4f}"]
                    lines.append(f"| {cell} | {bound} | {text} | {' | '.join(shown)} | {spread} |")
    return "\n".join(lines)


class Difference(NamedTuple):
    """Two neighbours in the paper's order on one text."""

    better: str
    """Methods; the paper has this one ahead."""
    worse: str
    process: str
    bound: str
    text: str
    seeds: int
    mean: float
    half: float
    """Half of the 95% interval."""

    @property
    def pair(self) -> str:
        return f"{self.better} − {self.worse}"

    @property
    def answer(self) -> str:
        """Whether it is as in the paper."""
        return "yes" if self.mean + self.half < 0 else "no" if self.mean - self.half > 0 else "undecided"

    def shown(self, digits: int = 4) -> str:
        ends = f"{self.mean - self.half:+.{digits}f}, {self.mean + self.half:+.{digits}f}"
        return f"{self.mean:+.{digits}f} [{ends}]"


def differences(files: Sequence[Rows], cells: Sequence[str]) -> Iterator[Difference]:
    """All of them that can be made from these cells, by process, text and bound."""
    for process in ON:
        present = [method for method in ORDER if f"{method}/{process}" in cells]
        names = [f"{method}/{process}" for method in present]
        for text in _texts(files, names[0]) if len(names) > 1 else ():
            tight = _measured(files, names, text, "tight")
            for bound in BOUNDS:
                here = _measured(files, names, text, bound)
                spread = _spread(files, names, text, bound, here) or _spread(files, names, text, "tight", tight)
                if not here or spread is None:
                    continue
                for better, worse in pairwise(present):
                    cell, other = f"{better}/{process}", f"{worse}/{process}"
                    found = _difference(here, cell, other, text, bound, spread)
                    yield Difference(better, worse, process, bound, text, len(here), *found)


def order(files: Sequence[Rows], cells: Sequence[str]) -> str:
    """Differences of neighbours in the paper's order with their 95% intervals, and where the whole order holds."""
    found = list(differences(files, cells))
    lines = ["| nats per token, mean over seeds [95%] | bound | text | seeds | difference | as in the paper |"]
    lines.append("|---|---|---|--:|--:|---|")
    for one in found:
        names = f"| {one.pair}, {one.process} | {one.bound} | {one.text} | {one.seeds}"
        lines.append(f"{names} | {one.shown()} | {one.answer} |")
    lines.append("")
    for (process, text, bound), group in groupby(found, lambda one: (one.process, one.text, one.bound)):
        parts = list(group)
        against = [one.pair for one in parts if one.answer == "no"]
        open_ones = [one.pair for one in parts if one.answer == "undecided"]
        verdict = "contradicted" if against else "undecided" if open_ones else "holds"
        why = ", ".join(against or open_ones)
        claim = f"{' < '.join([*(one.better for one in parts), parts[-1].worse])} on {process}, {text}, by {bound}"
        lines.append(f"- {claim}: {verdict}{f' ({why})' if why else ''}")
    return "\n".join(lines) if found else ""


def short_order(files: Sequence[Rows], text: str) -> str:
    """The differences by `tight` on one text, and on how many texts each is as in the paper."""
    shared = [cell for cell in files[0].cells if all(rows.finished(cell) for rows in files)]
    found = [one for one in differences(files, shared) if one.bound == "tight"]
    lines = [f"| difference, nats per token | mean of {len(files)} seeds [95%] | as in the paper |", "|---|--:|--:|"]
    for pair in dict.fromkeys((one.pair, one.process) for one in found):
        same = [one for one in found if (one.pair, one.process) == pair]
        (here,) = (one for one in same if one.text == text)
        agree = sum(one.answer == "yes" for one in same)
        lines.append(f"| {', '.join(pair)} | {here.shown(3)} | {agree} of {len(same)} |")
    return "\n".join(lines)


def distance_table(files: Sequence[Rows]) -> str:
    """The distance of every row with `importance` to `ar` on the same blocks, and its two parts: by how much the bound
    falls, which is not the model's, and the rest. The intervals are over blocks. The fall from one order to all, on the
    same orders, has less noise than that from `tight`, and no interval."""
    heads = ("nats per token above ar", "text", "K", "seeds", "tight", "of which the bound, at least")
    heads += ("model, at most", "decrease from 1 to K orders")
    lines = [f"| {' | '.join(heads)} |", "|---|---|" + "--:|" * (len(heads) - 2)]
    found = [(cell, text) for rows in files for cell, text, record, _ in importance_records(rows)]
    for cell, text in dict.fromkeys(found):
        here = _measured(files, [cell], text, "importance")
        length = read_cell(cell).length
        ar = "ar" if length is None else f"ar@{length}"
        references = [rows for rows in files if rows.finished(ar) and nats(rows, ar, text, "tight") is not None]
        if cell == ar or not here or not references:
            continue
        records = [rows.cells[cell]["final"]["rows"][""]["texts"][text]["importance"] for rows in here]
        record, by_orders = records[0], [one["by_orders"] for one in records if "by_orders" in one]
        tight, weighted = (_mean_blocks(here, cell, text, bound) for bound in BOUNDS)
        exact, which = _mean_blocks(references, ar, text, "tight"), evenly_spaced(len(tight), record["blocks"])
        if len(exact) != len(tight):
            continue
        tight, exact = tight[which], exact[which]
        gap = float((tight - exact).mean())
        parts = [_share(part, gap) for part in (tight - weighted, weighted - exact)]
        falls = [found["1"] - found[str(record["orders"])] for found in by_orders]
        fall = f"{sum(falls) / len(falls):.4f}" if falls else ""
        shown = " | ".join((_with_error(tight - exact), *parts, fall))
        lines.append(f"| {cell} | {text} | {record['orders']} | {len(here)} | {shown} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def distance(files: Sequence[Rows]) -> str:
    """`distance_table`, with what it means for networks that output ratios."""
    table, cells = distance_table(files), [cell for rows in files for cell, *_ in importance_records(rows)]
    if table and any(not isinstance(get_method(read_cell(cell).method).parameterization, Affine) for cell in cells):
        table += f"\n\n{RATIOS_NOTE}"
    return table


# ----------------------------------------------------------------------------------------------------------------
# Figures


def nats(rows: Rows, cell: str, text: str, bound: str) -> float | None:
    """Nats per token of a row; None if they are infinite or were not measured."""
    final = rows.finished(cell)
    return None if final is None else final["rows"][""]["texts"].get(text, {}).get(bound, {}).get("nats_per_token")


def _texts(files: Sequence[Rows], cell: str) -> list[str]:
    return [*files[0].cells[cell]["final"]["rows"][""]["texts"]]


def _measured(files: Sequence[Rows], cells: Sequence[str], text: str, bound: str) -> list[Rows]:
    """The files in which all of these cells have the bound."""
    return [rows for rows in files if None not in [nats(rows, cell, text, bound) for cell in cells]]


def _spread(files: Sequence[Rows], cells: Sequence[str], text: str, bound: str, here: Sequence[Rows]) -> Spread | None:
    """The variance of training from the residuals of methods and seeds; None from fewer than two seeds."""
    if len(here) < 2:
        return None
    values = torch.tensor([[nats(rows, cell, text, bound) for rows in here] for cell in cells], dtype=torch.float64)
    residuals = values - values.mean(0) - values.mean(1, keepdim=True) + values.mean()
    freedom = (len(cells) - 1) * (len(here) - 1)
    return Spread(float(residuals.square().sum()) / freedom, freedom)


def _difference(
    here: Sequence[Rows], better: str, worse: str, text: str, bound: str, spread: Spread
) -> tuple[float, float]:
    """The mean difference over seeds, and half of its 95% interval."""
    first, second = ([nats(rows, cell, text, bound) for rows in here] for cell in (better, worse))
    mean = sum(a - b for a, b in zip(first, second, strict=True) if a is not None and b is not None) / len(here)
    blocks = _mean_blocks(here, better, text, bound) - _mean_blocks(here, worse, text, bound)
    _, of_blocks = mean_and_stderr(blocks)
    if not math.isfinite(of_blocks):  # the blocks were not stored: as if they were not the same
        records = [here[0].cells[cell]["final"]["rows"][""]["texts"][text][bound] for cell in (better, worse)]
        of_blocks = math.hypot(*(record.get("stderr_of_blocks") or 0.0 for record in records))
    of_training = math.sqrt(2 * spread.variance / len(here))
    return mean, math.hypot(student_quantile(spread.freedom) * of_training, 1.96 * of_blocks)


def _mean_blocks(here: Sequence[Rows], cell: str, text: str, bound: str) -> Tensor:
    """The bound of every block, averaged over seeds; NaN where it was not stored."""
    return torch.stack([rows.per_block(cell, "", text, bound) for rows in here]).mean(0)


def _with_error(values: Tensor) -> str:
    mean, error = mean_and_stderr(values)
    return f"{mean:.4f} ± {1.96 * error:.4f}"


def _share(values: Tensor, whole: float) -> str:
    share = float(values.mean()) / whole if whole > 0 else math.nan
    return _with_error(values) + (f" ({100 * share:.0f}%)" if 0 <= share <= 1 else "")
