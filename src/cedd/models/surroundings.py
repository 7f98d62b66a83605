"""A short text amid masks: as a passage of a block of which nothing else is known.

Shapes: B batch, L positions of the text, N positions of a block, D width.

A network that was trained on whole blocks has never read a text that begins and ends with the block's edges closer
than N. But blocks in which all but some tokens are masks are what it learnt from: of these it says what the tokens
are, given those that are known, whatever stands around them. It must not be told the time, for the time says how many
masks there are, and here more are left than are to be filled.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from cedd.models.head import VocabularyHead
from cedd.models.transformer import Transformer


class AmidMasks(nn.Module):
    """A network on texts of fewer than N positions, which it reads in the middle of a block of masks."""

    def __init__(self, model: Transformer, positions: int) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    @property
    def head(self) -> VocabularyHead:
        return self.model.head

    @property
    def knows_time(self) -> bool:
        """As the network itself."""
        return self.model.knows_time

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        return self.head(self.features(x_t, sigma))

    def features(self, x_t: Tensor, sigma: Tensor, where: Tensor | None = None) -> Tensor:
        """[B, L, D]; with ``where``, those at distinct places [N] of the flattened batch are asked for."""
        room, length = self.positions - x_t.shape[1], x_t.shape[1]
        block = F.pad(x_t, (room // 2, room - room // 2), value=self.model.config.vocab_size)
        if where is not None:
            where = where // length * self.positions + room // 2 + where % length
        return self.model.features(block, sigma, where=where).narrow(1, room // 2, length)

    def rows(self, features: Tensor, places: Tensor) -> Tensor:
        """Features [B, L, D] at distinct places [N] of the flattened batch, [N, D]."""
        return self.model.rows(features, places)
