"""Loss of a linear vocabulary head, summed over rows, with one chunk of the [N, V] outputs at a time.

Shapes: N rows, R rows of one chunk, D width, V vocabulary.

    total = Σ_i w_i ℓ(W h_i + b, args_i)          rows h_i [D], weights w_i

The gradient of a row's loss with respect to its outputs, g_i = w_i ∂ℓ/∂o [V], depends on that row only. So the forward
pass processes the rows in chunks, overwrites the outputs of each chunk with their gradient, and multiplies:

    ∂total/∂h_i = Wᵀ g_i,      ∂total/∂W = Σ_i g_i h_iᵀ (float32),      ∂total/∂b = Σ_i g_i.

The backward pass scales these. If all rows are in one chunk, the g_i are kept and multiplied in the backward pass,
because scaling the h_i is cheaper than scaling ∂total/∂W. (In bfloat16 this rounds the h_i once more, unless the scale
is a power of two: include the divisor of a mean in the weights, as `batch_loss` does.)

A *row pass* turns the outputs of a chunk into losses and gradient in place. There is one for any row loss (by
autograd), and one each for the cross entropy and the score entropy, whose gradients have a closed form: w (softmax(o) -
onehot(target)), and w (exp(o + shift) - common) except for two entries.

Three products of R·D·V each dominate the cost; everything else is one or two sweeps over [R, V]. On CUDA the buffer's
rows are padded to a multiple of 64 outputs, since matrix units need aligned rows and V = 50257 is odd. The extra
outputs are exactly 0 and stay so, which is also their gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from cedd.device import takes_kernels
from cedd.models.kernels import at_least_float32
from cedd.models.kernels.matmul import matmul_dtype
from cedd.network import ScoreRows

RowLoss = Callable[..., Tensor]
"""(outputs [R, V] float32, *row_args [R]) -> [R]: differentiable in the outputs."""

RowPass = Callable[..., Tensor]
"""(outputs [R, V], weights [R], want_gradient, *row_args [R]) -> losses [R], 0 where the weight is 0; overwrites
the outputs with the gradient of Σ weights · losses if that is wanted."""


class RowLosses(NamedTuple):
    """The result of a head's loss."""

    total: Tensor
    """[] the weighted sum; the only differentiable part."""
    rows: Tensor
    """The losses of the rows, not weighted; 0 where the weight is 0."""


# ----------------------------------------------------------------------------------------------------------------
# The loop over chunks


def chunked_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_pass: RowPass,
    row_args: tuple[Tensor, ...] = (),
    row_weights: Tensor | None = None,
    chunk_rows: int | None = None,
) -> RowLosses:
    """Σ_i row_weights_i · ℓ(features_i · weightᵀ + bias, *row_args_i), with the ℓ of a row pass.

    features [N, D], weight [V, D], bias [V]; row_args and row_weights [N], no gradient flows to them.
    """
    device_type = features.device.type
    dtype = matmul_dtype(device_type, features.dtype)
    if row_weights is None:
        row_weights = torch.ones(features.shape[0], device=features.device)
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(features.shape[0], weight.shape[0], dtype, device_type)
    inputs = (weight, features) if bias is None else (weight, features, bias)
    want_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    with torch.autocast(device_type, enabled=False):
        total, rows = _ChunkedHead.apply(  # type: ignore[misc]
            features, weight, bias, row_pass, row_args, row_weights, chunk_rows, dtype, want_gradient
        )
    return RowLosses(total, rows)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        row_pass: RowPass,
        row_args: tuple[Tensor, ...],
        row_weights: Tensor,
        chunk_rows: int,
        dtype: torch.dtype,
        want_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        count, vocab_size = features.shape[0], weight.shape[0]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        features_, row_weights = features.to(dtype), row_weights.to(exact)
        weight_, bias_ = _padded(weight, dtype), None if bias is None else _padded(bias, dtype)
        ctx.at_once = 0 < count <= chunk_rows
        wanted = want_gradient and not ctx.at_once
        gradients = _Gradients(features_, weight_, bias is not None, exact) if wanted else None
        losses = row_weights.new_empty(count)
        buffer = weight_.new_empty(min(chunk_rows, count), weight_.shape[0])
        for start in range(0, count, chunk_rows):
            chunk = slice(start, min(start + chunk_rows, count))
            outputs = buffer[: chunk.stop - start]
            _linear(features_[chunk], weight_, bias_, out=outputs)
            arguments = (argument[chunk] for argument in row_args)
            losses[chunk] = row_pass(outputs[:, :vocab_size], row_weights[chunk], want_gradient, *arguments)
            if gradients is not None:
                gradients.add(chunk, outputs)
        if want_gradient:
            ctx.vocab_size = vocab_size
            ctx.dtypes = features.dtype, weight.dtype, None if bias is None else bias.dtype
            kept = (features_, weight_, buffer) if gradients is None else gradients.of_parameters(vocab_size)
            ctx.save_for_backward(*kept)
        ctx.mark_non_differentiable(losses)
        return (losses * row_weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.at_once:
            features, weight, d_outputs = ctx.saved_tensors
            of_features, of_weight, of_bias = ctx.dtypes
            gradients = _Gradients((features * scale).to(features.dtype), weight, of_bias is not None, of_weight)
            gradients.add(slice(None), d_outputs)
            d_features, d_weight, d_bias = gradients.of_parameters(ctx.vocab_size)
            found = _scaled(d_features, scale, of_features), d_weight, _scaled(d_bias, scale, of_bias)
        else:
            found = (
                _scaled(gradient, scale, dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            )
        return (*found, *(None,) * 6)


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


class _Gradients:
    """∂total/∂(features, weight, bias), collected from the chunks' ∂total/∂outputs, the latter two in `dtype`."""

    def __init__(self, features: Tensor, weight: Tensor, has_bias: bool, dtype: torch.dtype) -> None:
        self.features, self.weight = features, weight
        self.d_features = torch.empty_like(features)
        self.begun = len(features) == 0  # zeros if there are no rows; otherwise the first chunk overwrites the buffer
        make = torch.zeros_like if self.begun else torch.empty_like
        self.d_weight = make(weight, dtype=dtype)
        self.d_bias = make(weight[:, 0], dtype=dtype) if has_bias else None

    def add(self, chunk: slice, d_outputs: Tensor) -> None:
        torch.mm(d_outputs, self.weight, out=self.d_features[chunk])
        _add_outer(self.d_weight, d_outputs, self.features[chunk], keep=self.begun)
        if self.d_bias is not None:
            column_sums = d_outputs.sum(0, dtype=self.d_bias.dtype)
            self.d_bias = self.d_bias + column_sums if self.begun else column_sums
        self.begun = True

    def of_parameters(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Without the padding."""
        return self.d_features, self.d_weight[:vocab_size], None if self.d_bias is None else self.d_bias[:vocab_size]


def default_chunk_rows(count: int, vocab_size: int, dtype: torch.dtype, device_type: str) -> int:
    """Rows per chunk, equal for all chunks; their outputs take up to 1 GiB on an accelerator, 64 MiB on a CPU. An
    accelerator needs enough rows, in multiples of 128, to keep the matrix units busy and the sweeps over ∂total/∂W
    rare. On a CPU more rows are no faster and exceed the cache.
    """
    budget = 2**26 if device_type == "cpu" else 2**30
    most = max(1, budget // (vocab_size * dtype.itemsize))
    tile = min(128, most)
    most -= most % tile
    chunks = max(1, math.ceil(count / most))
    return max(1, min(count, tile * math.ceil(count / chunks / tile)))


def _padded(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The parameter [V, ...] in ``dtype``, on CUDA with rows of zeros up to a multiple of 64."""
    missing = -parameter.shape[0] % 64 if parameter.is_cuda else 0
    if not missing:
        return parameter.to(dtype).contiguous()
    padded = parameter.new_empty(parameter.shape[0] + missing, *parameter.shape[1:], dtype=dtype)
    padded[: parameter.shape[0]] = parameter
    padded[parameter.shape[0] :] = 0
    return padded


_ROWS_AT_ONCE = 8192
"""Number of rows of a weight that are converted together."""


def float32_outputs(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs [N, V] in float32 of features [N, D] and a 16-bit weight, without a converted copy of the whole
    weight."""
    if features.is_cuda and features.dtype == weight.dtype and not torch.is_grad_enabled():
        outputs = torch.mm(features, weight.T, out_dtype=torch.float32)
        return outputs if bias is None else outputs + bias
    wide = at_least_float32(features)
    parts = [F.linear(wide, rows.to(wide.dtype)) for rows in weight.split(_ROWS_AT_ONCE)]
    outputs = torch.cat(parts, -1)
    return outputs if bias is None else outputs + bias


def _linear(features: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(features, weight.T, out=out)
    else:
        torch.addmm(bias, features, weight.T, out=out)


def _add_outer(total: Tensor, left: Tensor, right: Tensor, keep: bool) -> None:
    """total += leftᵀ right (if not `keep`, =), where total may be float32 and the others bfloat16."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right, beta=int(keep))
    elif _can_accumulate(left.device.type, left.dtype):
        torch.addmm(  # type: ignore[call-overload]
            total, left.T, right, beta=int(keep), out_dtype=total.dtype, out=total
        )
    else:
        # Each chunk's product is rounded to the low precision; the sum is in float32.
        product = left.T @ right
        total.copy_(total + product if keep else product)


@functools.cache
def _can_accumulate(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this torch multiplies low-precision matrices straight into a float32 sum (CUDA, torch >= 2.8)."""
    total = torch.zeros(8, 8, device=device_type)
    left = torch.zeros(8, 8, device=device_type, dtype=dtype)
    try:
        torch.addmm(total, left, left, out_dtype=total.dtype, out=total)  # type: ignore[call-overload]
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------
# Row passes


def any_pass(row_loss: RowLoss, *, fused: bool = False) -> RowPass:
    """The pass of any row loss.

    ``fused`` compiles it together with its gradient: ``row_loss`` should then be the same function in every call,
    because each new function is compiled.
    """
    return functools.partial(_fused_pass if fused else _autograd_pass, row_loss)


def _autograd_pass(
    row_loss: RowLoss, outputs: Tensor, weights: Tensor, want_gradient: bool, *row_args: Tensor
) -> Tensor:
    """Any row loss: one chunk's graph is built, differentiated and dropped."""
    with torch.set_grad_enabled(want_gradient):
        leaf = at_least_float32(outputs).detach().requires_grad_(want_gradient)
        losses = row_loss(leaf, *row_args)
        if want_gradient:
            (gradient,) = torch.autograd.grad(losses, leaf, weights.to(losses.dtype))
            outputs.copy_(gradient.masked_fill_((weights == 0)[:, None], 0.0))
    return losses.detach().to(weights.dtype).masked_fill(weights == 0, 0.0)


def _differentiated(
    row_loss: RowLoss, outputs: Tensor, weights: Tensor, want_gradient: bool, *row_args: Tensor
) -> Tensor:
    """The same for the compiler: loss, gradient and the update in place are one graph."""

    def weighted(leaf: Tensor) -> tuple[Tensor, Tensor]:
        losses = row_loss(leaf, *row_args).to(weights.dtype)
        return (losses * weights).sum(), losses

    counts = weights != 0
    if want_gradient:
        gradient, (_, losses) = torch.func.grad_and_value(weighted, has_aux=True)(at_least_float32(outputs))
        outputs.copy_(torch.where(counts[:, None], gradient, 0.0))
    else:
        losses = weighted(at_least_float32(outputs))[1]
    return torch.where(counts, losses, 0.0)


@functools.cache
def _compiled_differentiated() -> RowPass:
    return torch.compile(_differentiated)


def _fused_pass(row_loss: RowLoss, *arguments: Any) -> Tensor:
    from torch._dynamo import config as compiler  # takes seconds to import

    # One entry for each row loss, with and without gradient, for one and for any number of rows: a process that
    # compares several methods passes the usual limit of 8, beyond which nothing is compiled any more.
    with compiler.patch(cache_size_limit=max(compiler.cache_size_limit, 64)):
        return _compiled_differentiated()(row_loss, *arguments)


def cross_entropy_pass(
    outputs: Tensor,
    weights: Tensor,
    want_gradient: bool,
    targets: Tensor,
    shift_tokens: Tensor | None = None,
    shifts: Tensor | None = None,
) -> Tensor:
    """-log softmax(outputs)[targets]; the gradient is weights · (softmax - onehot).

    Each of ``shifts`` [R] is first added to the output of its token, ``shift_tokens`` [R].
    """
    if takes_kernels(outputs):
        from cedd.models.kernels.cross_entropy_triton import cross_entropy_in_place

        return cross_entropy_in_place(outputs, weights, want_gradient, targets, shift_tokens, shifts)
    return cross_entropy_in_place_torch(outputs, weights, want_gradient, targets, shift_tokens, shifts)


def cross_entropy_in_place_torch(
    outputs: Tensor,
    weights: Tensor,
    want_gradient: bool,
    targets: Tensor,
    shift_tokens: Tensor | None,
    shifts: Tensor | None,
) -> Tensor:
    """The reference of the Triton kernel, in torch operations, in one buffer if that is float32."""
    work = at_least_float32(outputs)
    if shift_tokens is not None and shifts is not None:
        work.scatter_add_(1, shift_tokens[:, None], shifts.to(work.dtype)[:, None])
    work -= work.amax(1, keepdim=True)
    target = work.gather(1, targets[:, None]).squeeze(1)
    normalizer = work.exp_().sum(1)
    counts = weights != 0
    if want_gradient:
        work *= torch.where(counts, weights / normalizer, 0.0)[:, None]
        work.scatter_add_(1, targets[:, None], -weights.to(work.dtype)[:, None])
        if work is not outputs:
            outputs.copy_(work)
    return torch.where(counts, normalizer.log() - target, 0.0)


def score_entropy_pass(outputs: Tensor, weights: Tensor, want_gradient: bool, *row_args: Tensor) -> Tensor:
    """The score entropy; the gradient is weights · (s - common), less extra at the target, and 0 at the skipped
    token."""
    if takes_kernels(outputs):
        from cedd.models.kernels.score_entropy_triton import score_entropy_in_place

        return score_entropy_in_place(outputs, weights, want_gradient, ScoreRows(*row_args))
    return score_entropy_in_place_torch(outputs, weights, want_gradient, ScoreRows(*row_args))


def score_entropy_in_place_torch(outputs: Tensor, weights: Tensor, want_gradient: bool, rows: ScoreRows) -> Tensor:
    """The reference of the Triton kernel, in torch operations, in one buffer if that is float32."""
    work, target = at_least_float32(outputs), rows.target[:, None]
    wide = rows.common.dtype  # float64, where the device has it
    skip, skipped = rows.skip.clamp_max(outputs.shape[1] - 1)[:, None], (rows.skip < outputs.shape[1])[:, None]

    def clear(values: Tensor) -> None:
        values.scatter_(1, skip, torch.where(skipped, 0.0, values.gather(1, skip)))

    work += rows.shift.to(work.dtype)[:, None]
    clear(work)
    log_sums = work.sum(1).to(wide)
    at_target = work.gather(1, target).squeeze(1).to(wide)
    clear(work.exp_())
    losses = work.sum(1).to(wide) - rows.common * log_sums - rows.extra * at_target
    counts = weights != 0
    if want_gradient:
        work -= rows.common.to(work.dtype)[:, None]
        work.scatter_add_(1, target, -rows.extra.to(work.dtype)[:, None])
        clear(work)
        work *= weights.to(work.dtype)[:, None]
        work.masked_fill_(~counts[:, None], 0.0)
        if work is not outputs:
            outputs.copy_(work)
    return torch.where(counts, losses, 0.0).to(weights.dtype)
