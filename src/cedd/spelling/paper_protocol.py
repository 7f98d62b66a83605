"""The paper's spelling protocol: corrupted positions, which are known, are restored.

Shapes: N blocks, B per batch, L positions, V vocabulary, R corrupted positions.

Noise of the model's own process at a small t, one forward pass, and the likeliest clean token argmax p(x_0 | x_t) at
every corrupted position. The score is the share of corrupted positions that are restored. Correct positions are not
considered; on roulette most corrupted positions are masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cedd.methods import Method
from cedd.models.loaded_model import LoadedModel
from cedd.network import AnyModel, Network, Places, flat_places
from cedd.process import Noise, TokenProcess, seeded_generator
from cedd.spelling.book import Book, Progress
from cedd.spelling.protocols import PaperOptions
from cedd.spelling.shares import Share
from cedd.storage import JSONObject


@dataclass(frozen=True)
class Restoration:
    """Corrupted positions and how many of them were restored, masked and shuffled ones separately."""

    masked: Share
    shuffled: Share
    t: float

    @property
    def all(self) -> Share:
        """The paper's accuracy."""
        return self.masked + self.shuffled

    def record(self) -> JSONObject:
        kinds = {"all": self.all, "masked": self.masked, "shuffled": self.shuffled}
        return {"t": self.t, "blocks": len(self.all.hits)} | {name: share.record() for name, share in kinds.items()}


@dataclass(frozen=True)
class PaperProtocol(PaperOptions):
    """The paper's protocol."""

    def why_not(self, loaded: LoadedModel, book: Book, seed: int) -> str:
        """Why it cannot be measured; empty if it can."""
        try:
            loaded.method.require_scores()
        except ValueError as error:
            return str(error)
        length, tokens = book.length, len(book.encoded.ids)
        return "" if tokens >= length else f"the text has {tokens} tokens, fewer than one block of {length}"

    def measure(self, loaded: LoadedModel, book: Book, seed: int, progress: Progress | None = None) -> Restoration:
        """Corrupt the book's blocks and restore them."""
        return restore(loaded.model, loaded.process, loaded.method, book.blocks, self, seed=seed, progress=progress)


@torch.no_grad()
def restore(
    model: AnyModel,
    process: TokenProcess,
    method: Method,
    blocks: Tensor,
    options: PaperOptions | None = None,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Restoration:
    """The paper's protocol on blocks [N, L] of clean tokens.

    Noise is drawn on the host, so that a seed gives the same mistakes on every device and with any batch size. On CUDA
    the network runs in bfloat16, and its head in float32 at the corrupted positions only, a chunk [r, V] at a time.
    """
    options = options or PaperOptions()
    t, batch = options.t, options.batch
    method.require_scores()
    if blocks.dim() != 2 or not blocks.numel():
        raise ValueError("the text is shorter than one block of the model's length")
    process.check_tokens(blocks)
    if not 0 < t <= 1:
        raise ValueError(f"t must be in (0, 1] (got {t:g})")
    network = Network.of(model, process.vocab_size)
    device = network.device
    noise = process.noise(t)
    x_t = noise.sample(blocks, seeded_generator(seed))
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

    For denoiser and bayes this is of their posterior f; for scores, of the analytic step from t to clean data (without
    its mask).
    """
    flat = x_t.flatten()[places]
    with torch.autocast(x_t.device.type, dtype=torch.bfloat16, enabled=x_t.device.type == "cuda"):
        rows = network.rows(x_t, noise.sigma, Places(places), full_precision=True)

    def guess(outputs: Tensor, part: slice) -> Tensor:
        return method.parameterization.log_posterior(outputs.double(), flat[part], noise.like(flat[part])).argmax(-1)

    return rows.map(guess) if len(places) else flat
