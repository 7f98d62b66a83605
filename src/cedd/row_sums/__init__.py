"""Rows of outputs: single entries, and the sums over the vocabulary that a bound needs.

Shapes: R rows, V vocabulary. `skip` [R] is a token that a sum omits; V or more omits none.

    log_sum_exp     log sum_y exp(o_y)
    softplus_sum    sum_y softplus(o_y + offset)
    score_sums      sum_y exp(o_y + offset)  and  sum_y (o_y + offset)

On a GPU each is one kernel (kernels_triton.py), which reads every output once in its own dtype. With torch operations,
hundreds of megabytes of outputs are read and written about ten times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.device import has_float64, runs_alone, takes_kernels


def at_token(values: Tensor, x_t: Tensor) -> Tensor:
    """values[..., x_t] where x_t is a token; an arbitrary finite entry where it is the mask. [*S, V] -> [*S]."""
    return values.gather(-1, x_t.clamp_max(values.shape[-1] - 1)[..., None]).squeeze(-1)


def put_at_token(values: Tensor, x_t: Tensor, replacement: Tensor | float, is_mask: Tensor) -> Tensor:
    """values with the entry at x_t replaced, where x_t is a token and not the mask."""
    index = x_t.clamp_max(values.shape[-1] - 1)[..., None]
    # A number is filled in on the device; copying it there would synchronize.
    new = replacement.to(values) if isinstance(replacement, Tensor) else values.new_full((), replacement)
    old = values.gather(-1, index)
    new = new.expand(x_t.shape)[..., None]
    return values.scatter(-1, index, torch.where(is_mask[..., None], old, new))


def full_precision(outputs: Tensor) -> Tensor:
    """Half-precision outputs in float32; float32 and float64 as they are."""
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def _takes_kernel(outputs: Tensor) -> bool:
    return takes_kernels(outputs) and outputs.dim() == 2 and runs_alone()


def log_sum_exp(outputs: Tensor, skip: Tensor | None = None) -> Tensor:
    """log sum_y exp(o_y) over y other than skip, [R, V] -> [R] float64, to the last digit that the outputs have.

    torch's `logsumexp` in float32 adds the largest output before it rounds, so that a constant added to all outputs
    would cause an error of the bound.
    """
    if _takes_kernel(outputs):
        from cedd.row_sums.kernels_triton import log_sum_exp_of_rows

        return log_sum_exp_of_rows(outputs, skip)
    outputs = full_precision(outputs)
    if skip is not None:
        outputs = put_at_token(outputs, skip, -torch.inf, skip >= outputs.shape[-1])
    largest = outputs.amax(-1, keepdim=True).detach()
    largest = torch.where(largest.isfinite(), largest, 0.0)
    terms = torch.exp(outputs - largest)
    # In float32, small terms would be lost next to the largest term, which is 1.
    total = terms.sum(-1, dtype=torch.float64) if has_float64(terms.device) else terms.sum(-1).cpu().double()
    return largest.squeeze(-1).to(total) + total.log()


def log_probabilities(outputs: Tensor) -> Tensor:
    """log softmax(o), [*S, V], with the float64 sum of `log_sum_exp`; half-precision outputs in float32."""
    outputs = full_precision(outputs)
    return outputs - log_sum_exp(outputs).to(outputs)[..., None]


def softplus_sum(outputs: Tensor, offset: Tensor, skip: Tensor) -> Tensor:
    """sum_y softplus(o_y + offset) over y other than skip: [R, V], offset [R] float64 -> [R] float64."""
    if _takes_kernel(outputs):
        from cedd.row_sums.kernels_triton import softplus_sum_of_rows

        return softplus_sum_of_rows(outputs, offset, skip)
    outputs = full_precision(outputs)
    largest = outputs.amax(-1, keepdim=True).detach()
    shift = (offset + largest.squeeze(-1).double()).to(outputs)
    terms = torch.nn.functional.softplus((outputs - largest) + shift[..., None])
    return (terms.sum(-1) - torch.where(skip < terms.shape[-1], at_token(terms, skip), 0.0)).double()


def score_sums(outputs: Tensor, offset: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """sum_y s_y and sum_y log s_y with log s_y = o_y + offset, over y other than skip: [R] float64 each."""
    if _takes_kernel(outputs):
        from cedd.row_sums.kernels_triton import score_sums_of_rows

        return score_sums_of_rows(outputs, offset, skip)
    outputs = full_precision(outputs)
    is_token = skip < outputs.shape[-1]
    logs = put_at_token(outputs + offset.to(outputs)[..., None], skip, 0.0, ~is_token)
    scores = torch.exp(logs).sum(-1, dtype=torch.float64) - is_token.double()  # the skipped entry is exp(0) = 1
    return scores, logs.sum(-1, dtype=torch.float64)
