"""What a network said lately of a sequence, so that it need not read it again.

Who types sends nearly the same text again and again. A corrector reads windows around the words that it doubts, and
most of them have not changed since the last pause.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

MOST_BYTES = 64 * 2**20


class Memory:
    """Features of sequences, the latest used, up to a size.

    Args:
        most_bytes: of all that is kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.size, self._most = 0, most_bytes
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()

    def read(self, whose: Hashable, x_t: Tensor, sigma: Tensor, features: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The features [B, L, D] of x_t [B, L] and sigma [B]; only sequences that are new are asked for."""
        keys = [(whose, level, tuple(row)) for level, row in zip(sigma.tolist(), x_t.tolist(), strict=True)]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        new = {key: number for number, key in enumerate(keys) if key not in found}
        if new:
            rows = torch.tensor(list(new.values()), device=x_t.device)
            made = features(x_t.index_select(0, rows), sigma.index_select(0, rows))
            found |= {key: row.clone() for key, row in zip(new, made, strict=True)}
        for key in found:
            self._keep(key, found[key])
        return torch.stack([found[key] for key in keys])

    def _keep(self, key: Hashable, row: Tensor) -> None:
        """Keep a row as the latest, and forget the oldest ones beyond the size."""
        if key not in self._kept:
            self._kept[key] = row
            self.size += row.nbytes
        self._kept.move_to_end(key)
        while self.size > self._most:
            _, oldest = self._kept.popitem(last=False)
            self.size -= oldest.nbytes
