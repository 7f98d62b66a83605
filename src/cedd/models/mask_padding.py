"""Short texts for a network that was trained on longer ones: padded with masks on both sides.

Shapes: B batch, L positions of the text, N positions with the masks, D width.

A network trained on blocks of N tokens has never seen shorter texts. It has seen blocks in which most tokens are
masked, and predicts masks given the other tokens at any position. It must not be conditioned on time, because time
determines the expected share of masks, and padding adds to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from cedd.models.backbone import Backbone
from cedd.network import Capabilities


class MaskPadded(Backbone):
    """A network for texts of fewer than N positions, padded with masks on both sides."""

    def __init__(self, model: Backbone, positions: int) -> None:
        super().__init__()
        self.model, self.positions, self.head = model, positions, model.head
        self.vocab_size, self.has_mask = model.vocab_size, model.has_mask

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Those of the network, except what depends on positions."""
        declared = self.model.capabilities
        return replace(declared, cache=False, attention=False, token_times=False, max_length=self.positions)

    def features(self, x_t: Tensor, sigma: Tensor | None = None, **options: Any) -> Tensor:
        """[B, L, D]; with ``where``, only those at these distinct places [N] of the flattened batch are defined."""
        length, where = x_t.shape[1], options.pop("where", None)
        room = self.positions - length
        block = F.pad(x_t, (room // 2, room - room // 2), value=self.vocab_size)
        if where is not None:
            options["where"] = where // length * self.positions + room // 2 + where % length
        return self.model.features(block, sigma, **options).narrow(1, room // 2, length)

    def rounded_parameters(self) -> set[str]:
        return {f"model.{name}" for name in self.model.rounded_parameters()}
