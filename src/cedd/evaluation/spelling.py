"""Spelling: how many mistakes a model puts right, and how much that was right it breaks.

Shapes: N blocks, B of them at once, L positions, V vocabulary, R corrupted positions.

Two protocols.

*The paper's* (`restore`): noise of the model's own process at a small t, the network once, the likeliest clean token
argmax p(x_0 | x_t) at every corrupted position; the score is the share of corrupted positions that are restored. The
places are known and what was right is never looked at: on roulette it is mostly the filling of masks.

*The user's* (`outcomes`): letters replaced by other letters, or neighbours exchanged, at places nobody is told. Three
texts, the original, the one with mistakes and the corrected one, are compared letter by letter: what was wrong is
fixed, missed or changed into another mistake, what was right is left alone or broken.

Mistakes of one block share its words, so every share comes with an interval whose independent units are blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cedd.bounds.estimate import Interval, student_quantile
from cedd.device import has_float64, model_device
from cedd.network import has_head
from cedd.objectives.methods import Method
from cedd.process import Noise, TokenProcess
from cedd.samplers.network import HostNetwork, Network, Places, chunks, evaluate
from cedd.storage import atomic_write

Progress = Callable[[int, int], None]

# ----------------------------------------------------------------------------------------------------------------
# A share, counted block by block


@dataclass(frozen=True)
class Share:
    """`hits` out of `totals`, one pair a block: [N] int64 each."""

    hits: Tensor
    totals: Tensor

    def __add__(self, other: Share) -> Share:
        """Both kinds together, block by block."""
        return Share(self.hits + other.hits, self.totals + other.totals)

    @property
    def count(self) -> int:
        return int(self.hits.sum())

    @property
    def total(self) -> int:
        return int(self.totals.sum())

    @property
    def value(self) -> float:
        """The ratio estimate: all hits by all that was counted."""
        return self.count / self.total if self.total else math.nan

    @property
    def stderr(self) -> float:
        """Of the ratio R = sum h / sum m over N independent blocks: sqrt(N/(N-1) sum (h - R m)^2) / sum m."""
        blocks = len(self.hits)
        if blocks < 2 or not self.total:
            return math.nan
        residuals = self.hits.double() - self.value * self.totals.double()
        return math.sqrt(blocks / (blocks - 1) * float((residuals**2).sum())) / self.total

    @property
    def ci95(self) -> Interval:
        """Wilson's interval for as many independent things as would have this standard error, at most the total.

        Unlike value +- 2 stderr it stays within [0, 1] and says something where nothing, or everything, was hit.
        """
        value, error, blocks = self.value, self.stderr, len(self.hits)
        if math.isnan(error):
            return math.nan, math.nan
        count = min(self.total, value * (1 - value) / error**2) if error > 0 else self.total
        squared = student_quantile(blocks - 1) ** 2 / count
        centre = (value + squared / 2) / (1 + squared)
        half = math.sqrt(squared * (value * (1 - value) + squared / 4)) / (1 + squared)
        return max(0.0, centre - half), min(1.0, centre + half)

    def record(self) -> dict[str, Any]:
        """As JSON: null where there was nothing to count."""
        numbers = {"share": self.value, "stderr": self.stderr, "low": self.ci95[0], "high": self.ci95[1]}
        finite = {name: round(x, 6) if math.isfinite(x) else None for name, x in numbers.items()}
        return {**finite, "count": self.count, "total": self.total}


# ----------------------------------------------------------------------------------------------------------------
# The paper's protocol


@dataclass(frozen=True)
class Restoration:
    """Corrupted positions and how many of them were restored: those that were masked and those that were shuffled."""

    masked: Share
    shuffled: Share
    t: float

    @property
    def all(self) -> Share:
        """The paper's accuracy."""
        return self.masked + self.shuffled

    def record(self) -> dict[str, Any]:
        kinds = {"all": self.all, "masked": self.masked, "shuffled": self.shuffled}
        return {"t": self.t, "blocks": len(self.all.hits)} | {name: share.record() for name, share in kinds.items()}


@torch.no_grad()
def restore(
    model: Network,
    process: TokenProcess,
    method: Method,
    blocks: Tensor,
    *,
    t: float = 0.05,
    seed: int = 0,
    batch: int = 256,
    progress: Progress | None = None,
) -> Restoration:
    """The paper's protocol on blocks [N, L] of clean tokens.

    The noise is drawn on the host, so that a seed means the same mistakes on every device and in any batch. On CUDA the
    network runs in bfloat16, its head in float32 and on the corrupted positions only, a chunk [r, V] at a time.
    """
    _check(process, method, blocks, t)
    device = model_device(model)
    if not has_float64(device) and has_head(model):
        model, device = HostNetwork(model, device), torch.device("cpu")
    noise = process.noise(t)
    x_t = noise.sample(blocks, torch.Generator().manual_seed(seed))
    noise = noise.to(device)
    right = torch.zeros_like(blocks, dtype=torch.bool)
    for start in range(0, len(blocks), batch):
        part = slice(start, start + batch)
        wrong = (x_t[part] != blocks[part]).flatten().nonzero().squeeze(-1)
        guesses = likeliest(model, method, x_t[part].to(device), noise, wrong.to(device)).cpu()
        right[part].view(-1)[wrong] = guesses == blocks[part].flatten()[wrong]
        if progress is not None:
            progress(min(start + batch, len(blocks)), len(blocks))
    masked, corrupted = noise.is_mask(x_t), x_t != blocks

    def share(kind: Tensor) -> Share:
        return Share((right & kind).sum(1), kind.sum(1))

    return Restoration(share(corrupted & masked), share(corrupted & ~masked), t)


def _check(process: TokenProcess, method: Method, blocks: Tensor, t: float) -> None:
    method.require_scores()
    if blocks.dim() != 2 or not blocks.numel():
        raise ValueError("the text is too short: it fills no block of the model's length")
    process.check_tokens(blocks)
    if not 0 < t <= 1:
        raise ValueError(f"t is a time of the noise and must lie in (0, 1]; got {t:g}")


def likeliest(model: Network, method: Method, x_t: Tensor, noise: Noise, places: Tensor) -> Tensor:
    """argmax p(x_0 | x_t) at the places [R] of the flattened x_t [B, L].

    Denoiser and bayes: of their posterior f. Scores: of the analytic step from t to clean data (its mask left out).
    """
    flat = x_t.flatten()[places]
    with torch.autocast(x_t.device.type, dtype=torch.bfloat16, enabled=x_t.device.type == "cuda"):
        rows = evaluate(model, x_t, noise.sigma, Places(places, None, places))
    found = [
        method.parameterization.log_posterior(rows.chunk(part), flat[part], noise.like(flat[part])).argmax(-1)
        for part in chunks(len(flat), noise.vocab_size)
    ]
    return torch.cat(found) if found else flat


# ----------------------------------------------------------------------------------------------------------------
# The user's protocol


@dataclass(frozen=True)
class Outcomes:
    """What became of a text with mistakes; shares with blocks as their units.

    Of the mistakes: fixed, missed (left as they are), altered (changed into another mistake).
    Of what was right: broken letters (of any alphabet), and broken others (spaces, digits, punctuation).
    Of all characters: wrong before, as many as were made wrong, and after.
    """

    fixed: Share
    missed: Share
    altered: Share
    broken: Share
    broken_others: Share
    before: Share
    after: Share

    def record(self) -> dict[str, Any]:
        record = {field.name: getattr(self, field.name).record() for field in fields(self)}
        made = {name: record["before"][name] for name in ("share", "count", "total")}  # nothing that varies
        return record | {"before": made}


def outcomes(original: str, corrupted: str, corrected: str, unit: int = 128, span: int = 1) -> Outcomes:
    """Three texts of the same length, compared letter by letter; `unit` characters make a block.

    A mistake is `span` wrong letters in a row (2: exchanged neighbours): fixed if all of them are right again, missed
    if none was touched; it counts in the block of its first.
    """
    if not len(original) == len(corrupted) == len(corrected):
        raise ValueError(
            "letters are compared place by place: the original, the corrupted and the corrected text must be as long"
        )
    if unit < 1 or not original:
        raise ValueError("there is no letter to compare: give a text and blocks of at least one character")
    was, seen, now = (np.frombuffer(text.encode("utf-32-le"), dtype="<u4") for text in (original, corrupted, corrected))
    letters = np.fromiter(map(str.isalpha, original), np.bool_, len(original))
    mistake, wrong, touched = seen != was, now != was, now != seen
    starts = np.arange(0, len(was), unit)
    first = np.zeros_like(mistake)
    first[np.flatnonzero(mistake)[::span]] = True
    any_wrong, any_touched = (_within(flags, span) for flags in (wrong, touched))

    def share(of: NDArray[np.bool_], what: NDArray[np.bool_]) -> Share:
        counts = (np.add.reduceat(hit.astype(np.int64), starts) for hit in (of & what, of))
        hits, totals = (torch.from_numpy(count) for count in counts)
        return Share(hits, totals)

    everywhere = np.ones_like(mistake)
    return Outcomes(
        fixed=share(first, ~any_wrong),
        missed=share(first, ~any_touched),
        altered=share(first, any_touched & any_wrong),
        broken=share(~mistake & letters, wrong),
        broken_others=share(~mistake & ~letters, wrong),
        before=share(everywhere, mistake),
        after=share(everywhere, wrong),
    )


def _within(flags: NDArray[np.bool_], span: int) -> NDArray[np.bool_]:
    """Whether a place or one of the span - 1 after it is flagged."""
    return np.logical_or.reduce(np.lib.stride_tricks.sliding_window_view(np.pad(flags, (0, span - 1)), span), axis=-1)


@dataclass(frozen=True)
class Correction:
    """One way to correct, with its options (see `cedd.tasks.correct`), and what came of it."""

    way: str
    options: Mapping[str, Any]
    outcomes: Outcomes

    @property
    def threshold(self) -> float:
        return self.options["threshold"]

    def record(self) -> dict[str, Any]:
        return {"way": self.way, "options": dict(self.options), **self.outcomes.record()}


def save_plot(path: Path, corrections: Sequence[Correction]) -> None:
    """Mistakes fixed over letters broken, in percent with 95% intervals: a curve over the threshold for each way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way in dict.fromkeys(c.way for c in corrections):
        curve = sorted((c for c in corrections if c.way == way), key=lambda c: c.threshold)
        broken, fixed = ([getattr(c.outcomes, name) for c in curve] for name in ("broken", "fixed"))
        x, y = ([100 * share.value for share in shares] for shares in (broken, fixed))
        axes.errorbar(x, y, xerr=_bars(broken), yerr=_bars(fixed), label=way, marker="o", ms=3, lw=1, elinewidth=0.6)
        for c, at in zip(curve, zip(x, y, strict=True), strict=True):
            axes.annotate(f"{c.threshold:g}", at, fontsize=7, textcoords="offset points", xytext=(4, -8))
    axes.set_xlabel("good letters broken, %")
    axes.set_ylabel("mistakes fixed, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="labels: threshold", title_fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=150)
    atomic_write(path, buffer.getvalue())


def _bars(shares: Sequence[Share]) -> NDArray[np.float64]:
    """How far the intervals reach below and above, in percent, [2, N]; 0 where there is none."""
    reach = [(share.value - share.ci95[0], share.ci95[1] - share.value) for share in shares]
    return 100 * np.nan_to_num(np.array(reach, dtype=np.float64).T.clip(0.0))
