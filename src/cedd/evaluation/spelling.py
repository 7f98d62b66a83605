"""Spelling: how many mistakes a model puts right, and how much that was right it breaks.

Shapes: N blocks, B of them at once, L positions, V vocabulary, R corrupted positions.

Two protocols.

*The paper's* (`restore`): noise of the model's own process at a small t, the network once, the likeliest clean token
argmax p(x_0 | x_t) at every corrupted position; the score is the share of corrupted positions that are restored. The
places are known and what was right is never looked at: on roulette it is mostly the filling of masks.

*The user's* (`outcomes`): letters replaced by other letters at places nobody is told. Three texts, the original, the
one with mistakes and the corrected one, are compared letter by letter: what was wrong is fixed, missed or changed into
another mistake, what was right is left alone or broken.

Mistakes of one block share its words, so every share comes with an interval whose independent units are blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cedd.bounds.estimate import Interval, student_quantile
from cedd.network import has_head
from cedd.objectives.methods import Method
from cedd.process import Noise, TokenProcess
from cedd.samplers.network import HostNetwork, Network, Places, chunks, evaluate, model_device

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
    if device.type == "mps" and has_head(model):  # which has no float64
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
