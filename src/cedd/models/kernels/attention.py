"""Attention with rotary positions, of a whole sequence at once.

Shapes: B batch, L positions, H heads, W head width.

With q, k [L, W] rotated by their positions (`rotation.py`), and v [L, W],

    S = q kᵀ / sqrt(W),        P = softmax(S),        o = P v,

and, given the gradient do of o,

    dv = Pᵀ do        dP = do vᵀ        dS = P (dP - Σ_j P dP) / sqrt(W)        dq = dS k        dk = dSᵀ q,

of which dq and dk are rotated back. torch's kernels process the keys in blocks, for sequences of any length, and do not
rotate. The S of a short sequence fits the registers of one program on a Hopper chip, which computes everything and
reads and writes each tensor once.

If scores have a largest value s, q and k are normalized: q ← q r with r = (mean q² + ε)^(-1/2), which a rotation does
not change. Then S = s q kᵀ / W, and r (dq - q mean(q dq)) takes the place of dq.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cedd.device import runs_alone, takes_kernels
from cedd.models.kernels import EPSILON, at_least_float32
from cedd.models.kernels.matmul import float32_matmul, matmul_dtype
from cedd.models.kernels.rotation import Heads, Product, linear, project_and_rotate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

SHORT = 128
"""Largest length for which one program computes the S of a head."""
HEAD_WIDTHS = (32, 64, 128)
SEQUENCES = 2**16 - 1
"""Largest size of a grid's second axis."""
TILED_WIDTHS = (16, 32, 64, 128)
"""Head widths for which FlexAttention is used."""

attention = float32_matmul(F.scaled_dot_product_attention)


def attend(
    x: Tensor,
    projection: nn.Linear,
    heads: int,
    rotation: tuple[Tensor, Tensor],
    causal: bool = False,
    largest_score: float | None = None,
) -> Tensor:
    """x [B, L, D] -> o [B, L, H, W]; each position attends to all positions, or to those up to its own if causal."""
    if is_short(x, heads):
        from cedd.models.kernels.attention_triton import attend_short

        return attend_short(projection(x).unflatten(-1, (3, heads, -1)), *rotation, causal, largest_score)
    return attention(*project(x, projection, heads, rotation, largest_score), is_causal=causal).transpose(1, 2)


def attend_after(
    x: Tensor,
    projection: nn.Linear,
    heads: int,
    rotation: tuple[Tensor, Tensor],
    largest_score: float | None,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor | None:
    """o [B, n, H, W] of x [B, n, D] at consecutive positions [n], which attends to itself and to all earlier positions
    in the cache [B, H, P, W], and whose keys and values are written there; None where one kernel does not do it."""
    fits = is_short(x, heads) and x.shape[1] * keys.shape[-1] <= SHORT * 64
    if not (fits and runs_alone() and keys.dtype.itemsize == 2 and keys.is_contiguous()):
        return None
    from cedd.models.kernels.cached_attention_triton import attend_cached

    qkv = projection(x).unflatten(-1, (3, heads, -1)).to(keys.dtype)
    return attend_cached(qkv, *rotation, positions, keys, values, largest_score)


def project(
    x: Tensor,
    projection: nn.Linear,
    heads: int,
    rotation: tuple[Tensor, Tensor],
    largest_score: float | None = None,
    product: Product = linear,
) -> Heads:
    """Rotated queries and keys, and values, of x [B, L, D]; with a largest score, queries and keys are normalized so
    that q·k / sqrt(W) never exceeds it."""
    queries, keys, values = project_and_rotate(x, projection, heads, *rotation, product)
    if largest_score is None:
        return Heads(queries, keys, values)
    width = values.shape[-1]
    queries, keys = (F.rms_norm(at_least_float32(part), (width,), eps=EPSILON) for part in (queries, keys))
    queries = queries * (largest_score * width**-0.5)
    return Heads(queries.to(values.dtype), keys.to(values.dtype), values)


def attend_visible(heads: Heads, visible: Tensor, tiles: BlockMask | None = None) -> Tensor:
    """o [B, L, H, W] where query i attends to the keys j with visible[..., i, j], [L, L] or [B, L, L]; by FlexAttention
    with these tiles (`tiles_of`) if a compiler traces this."""
    if tiles is not None and torch.compiler.is_compiling():
        return attend_tiles(*heads, tiles).transpose(1, 2)
    mask = visible if visible.dim() == 2 else visible[:, None]
    return attention(*heads, attn_mask=mask).transpose(1, 2)


def attend_tiles(queries: Tensor, keys: Tensor, values: Tensor, tiles: BlockMask) -> Tensor:
    """FlexAttention with these tiles, [B, H, L, W]; keys and values may have fewer heads, which groups of queries
    share."""
    from torch.nn.attention.flex_attention import flex_attention

    made = flex_attention(queries, keys, values, block_mask=tiles, enable_gqa=queries.shape[1] != keys.shape[1])
    assert isinstance(made, Tensor)
    return made


def takes_tiles(device: torch.device, head_width: int) -> bool:
    """Whether compiled attention with a rule uses FlexAttention: on a GPU, where it has kernels for both passes."""
    return device.type == "cuda" and head_width in TILED_WIDTHS


@functools.lru_cache(maxsize=16)
def tiles_of(rule: Callable[[Tensor, Tensor], Tensor], length: int, device: torch.device) -> BlockMask:
    """FlexAttention's description of a pattern of `length` queries and keys: the tiles of 128 x 128 that it skips."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return rule(query, key)

    return create_block_mask(visible, None, None, length, length, device=str(device))


def is_short(x: Tensor, heads: int, head_width: int | None = None) -> bool:
    """Whether one program per head is used for x [B, L, D]: for short sequences in 16-bit precision."""
    batch, length, width = x.shape
    fits = batch <= SEQUENCES and length <= SHORT and (head_width or width // heads) in HEAD_WIDTHS
    return takes_kernels(x) and fits and matmul_dtype(x.device.type, x.dtype).itemsize == 2 and _chip_fits()


def _chip_fits() -> bool:
    from cedd.models.kernels.attention_triton import CHIP_FITS

    return CHIP_FITS
