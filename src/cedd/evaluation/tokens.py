"""The cost of each token of a text: the chain-rule terms of the likelihood, as a file.

Shapes: N sequences, L positions.

For an autoregressive model the cost of a token is -log p(x_i | x_<i), exactly. For a model that only masks it is the
mean of -log f when the token is revealed, over the orders of `importance` (`ImportanceEstimate.per_token`): how
surprising the token is, given a random part of the others. The costs of a sequence sum to the bound for one order.

A file has one JSON object per line and sequence: {"sequence": n, "tokens": [[text, nats], ...]}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cedd.bounds.estimate import BoundEstimate
from cedd.bounds.importance import ImportanceEstimate
from cedd.data.tokenizers import Tokenizer
from cedd.device import model_device
from cedd.models.folder import ModelFolder
from cedd.network import Network, evaluating
from cedd.storage import atomic_write, finite, reading

_BATCH = 32
TOKEN_SUFFIXES = (".jsonl",)
TokenCosts = Sequence[tuple[str, float]]
"""The texts of a sequence's tokens, and their costs in nats."""


def token_nats(folder: ModelFolder, data: Tensor, estimate: BoundEstimate) -> Tensor:
    """The cost of every token of data [N, L] in nats, [N, L] float64."""
    if isinstance(estimate, ImportanceEstimate):
        return estimate.per_token
    if folder.method.dynamics.noisy:
        raise ValueError(f"the costs of tokens need bound='importance' (got {estimate.bound!r})")
    network = Network.of(folder.model, folder.process.vocab_size, model_device(folder.model))
    with evaluating(folder.model):
        parts = [
            folder.method.dynamics.token_nats(network, folder.process, rows.to(network.device)).cpu()
            for rows in data.split(_BATCH)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        ]
    return torch.cat(parts)


def save_tokens(path: Path, tokenizer: Tokenizer, data: Tensor, nats: Tensor) -> None:
    """Write the tokens of data [N, L] with their costs [N, L]."""
    lines: list[str] = []
    for n, (ids, costs) in enumerate(zip(data.cpu().numpy(), nats.tolist(), strict=True)):
        tokens = [[tokenizer.decode(ids[i : i + 1]), cost] for i, cost in enumerate(costs)]
        lines.append(json.dumps(finite({"sequence": n, "tokens": tokens})))
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())


def read_tokens(path: Path, most: int | None = None) -> list[TokenCosts]:
    """The sequences in such a file, at most `most`."""
    with reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()[:most]
        if not lines:
            raise ValueError("the file is empty")
        return [
            [(str(text), float("inf") if nats is None else float(nats)) for text, nats in json.loads(line)["tokens"]]
            for line in lines
        ]
