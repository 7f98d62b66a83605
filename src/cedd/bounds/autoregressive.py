"""The likelihood of a causal network, exactly: -log p(x_i | x_<i), no path and no noise.

Shapes: B batch, L positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cedd.bounds.rows import run_rows
from cedd.objectives import Method, Model
from cedd.objectives.autoregressive import start_symbol
from cedd.objectives.times import shift_right
from cedd.parameterization import at_token
from cedd.process import TokenProcess


def sequence_nats(model: Model, process: TokenProcess, method: Method, x0: Tensor) -> Tensor:
    """-log p(x0) / L of each sequence of a batch: [B, L] -> [B] float64."""
    if not method.causal:
        raise ValueError(f"{method.name} has no exact likelihood; use estimate_bound")
    inputs = shift_right(x0, start_symbol(process))
    targets = x0.reshape(-1)
    sigma = torch.zeros(len(x0), dtype=torch.float32, device=x0.device)

    def nats(outputs: Tensor, part: slice) -> Tensor:
        logits = outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
        return torch.logsumexp(logits, -1).double() - at_token(logits, targets[part]).double()

    places = torch.arange(x0.numel(), device=x0.device)
    return run_rows(model, inputs, sigma, places, process.vocab_size, nats).reshape(x0.shape).mean(1)
