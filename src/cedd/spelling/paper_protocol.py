"""The paper's protocol of spelling: corrupted positions restored, at places that are known.

Shapes: N blocks, B of them at once, L positions, V vocabulary, R corrupted positions.

Noise of the model's own process at a small t, the network once, the likeliest clean token argmax p(x_0 | x_t) at every
corrupted position; the score is the share of corrupted positions that are restored. What was right is never looked at:
on roulette it is mostly the filling of masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cedd.methods import Method
from cedd.models.loaded import LoadedModel
from cedd.network import AnyModel, Network, Places, flat_places
from cedd.process import Noise, TokenProcess
from cedd.spelling.book import Book, Progress
from cedd.spelling.protocols import PaperOptions
from cedd.spelling.shares import Share


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


@dataclass(frozen=True)
class PaperProtocol(PaperOptions):
    """How the paper tests correction."""

    def why_not(self, loaded: LoadedModel, book: Book, seed: int) -> str:
        """Why it cannot be measured, or nothing if it can."""
        try:
            loaded.method.require_scores()
        except ValueError as error:
            return str(error)
        length, tokens = book.length, len(book.encoded.ids)
        return "" if tokens >= length else f"the text fills no block of {length} tokens: it has {tokens}"

    def measure(self, loaded: LoadedModel, book: Book, seed: int, progress: Progress | None = None) -> Restoration:
        """Corrupt the book's blocks and restore them."""
        how = {"t": self.t, "seed": seed, "batch": self.batch}
        return restore(loaded.model, loaded.process, loaded.method, book.blocks, **how, progress=progress)


@torch.no_grad()
def restore(
    model: AnyModel,
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
    method.require_scores()
    if blocks.dim() != 2 or not blocks.numel():
        raise ValueError("the text is too short: it fills no block of the model's length")
    process.check_tokens(blocks)
    if not 0 < t <= 1:
        raise ValueError(f"t is a time of the noise and must lie in (0, 1]; got {t:g}")
    network = Network.of(model, process.vocab_size)
    device = network.device
    noise = process.noise(t)
    x_t = noise.sample(blocks, torch.Generator().manual_seed(seed))
    noise = noise.to(device)
    right = torch.zeros_like(blocks, dtype=torch.bool)
    for start in range(0, len(blocks), batch):
        part = slice(start, start + batch)
        wrong = flat_places(x_t[part] != blocks[part])
        guesses = likeliest(network, method, x_t[part].to(device), noise, wrong.to(device)).cpu()
        right[part].view(-1)[wrong] = guesses == blocks[part].flatten()[wrong]
        if progress is not None:
            progress(min(start + batch, len(blocks)), len(blocks))
    masked, corrupted = noise.is_mask(x_t), x_t != blocks

    def share(kind: Tensor) -> Share:
        return Share((right & kind).sum(1), kind.sum(1))

    return Restoration(share(corrupted & masked), share(corrupted & ~masked), t)


def likeliest(network: Network, method: Method, x_t: Tensor, noise: Noise, places: Tensor) -> Tensor:
    """argmax p(x_0 | x_t) at the places [R] of the flattened x_t [B, L].

    Denoiser and bayes: of their posterior f. Scores: of the analytic step from t to clean data (its mask left out).
    """
    flat = x_t.flatten()[places]
    with torch.autocast(x_t.device.type, dtype=torch.bfloat16, enabled=x_t.device.type == "cuda"):
        rows = network.rows(x_t, noise.sigma, Places(places), full_precision=True)

    def guess(outputs: Tensor, part: slice) -> Tensor:
        return method.parameterization.log_posterior(outputs.double(), flat[part], noise.like(flat[part])).argmax(-1)

    return rows.map(guess) if len(places) else flat
