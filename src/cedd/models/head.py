"""The vocabulary head: features [..., D] to outputs [..., V], and losses that never hold all of those outputs.

A loss uses it through a network that declares `Capabilities(selected_rows=True, head_losses=True)`:

    features = model.features(x_t, sigma)                                        # [B, L, D]
    rows = model.rows(features, places)                                          # [N, D], those that count
    losses = model.head.loss(rows, row_loss, (x_t, x0, ...), weights)            # any loss of one row of outputs
    losses = model.head.cross_entropy(rows, x0, weights)                         # a closed form, fused on CUDA
    losses = model.head.score_entropy(rows, numbers, weights)                    # and another
    losses.total.backward()

For other networks the loss computes dense outputs [B, L, V].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cedd.models.kernels.head_loss import (
    RowLoss,
    RowLosses,
    any_pass,
    chunked_loss,
    cross_entropy_pass,
    float32_outputs,
    score_entropy_pass,
)
from cedd.models.kernels.matmul import Bfloat16Parts
from cedd.network import ScoreRows

_FEW_ROWS = 128
"""Rows below which reading the weight takes most of the time of a product."""


class VocabularyHead(nn.Linear):
    """A linear map to V outputs that starts at zero, so that the first prediction is uniform."""

    def __init__(self, width: int, vocab_size: int, bias: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__(width, vocab_size, bias=bias, dtype=dtype)
        nn.init.zeros_(self.weight)
        if bias:
            nn.init.zeros_(self.bias)
        self.float32_outputs = dtype is not None and dtype.itemsize == 2
        self.fused = False
        """Whether row losses are compiled, forward and gradient in one pass; set by ``Backbone.compile``."""
        self._parts: Bfloat16Parts | None = None

    def forward(self, features: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Outputs [..., V]; in float32 without autocast if the head was created with 16-bit weights."""
        weight = self.weight
        if not self.float32_outputs or torch.is_autocast_enabled(features.device.type):
            return super().forward(features)
        return float32_outputs(features.flatten(0, -2), weight, self.bias).unflatten(0, features.shape[:-1])

    def full_precision(self, features: Tensor) -> Tensor:
        """Outputs [N, V] of features [N, D] in the precision of the weights, without autocast."""
        if not self._takes_parts(features):
            return self(features.to(torch.promote_types(features.dtype, self.weight.dtype)))
        if self._parts is None:
            self._parts = Bfloat16Parts()
        return float32_outputs(features.repeat(1, 3), self._parts.of(self.weight), self.bias)

    def update_parts(self) -> None:
        """Update what recordings of `full_precision` read, if the weight has changed."""
        if self._parts is not None:
            self._parts.of(self.weight)

    def _takes_parts(self, features: Tensor) -> bool:
        """Whether the weight is multiplied in parts."""
        weight = self.weight
        if type(weight) not in (nn.Parameter, Tensor) or weight.is_inference() or not weight.is_cuda:
            return False  # among others, a part of a weight that several ranks share
        of_both = features.dtype == torch.bfloat16 and weight.dtype == torch.float32
        return of_both and len(features) >= _FEW_ROWS and not torch.is_grad_enabled()

    def loss(
        self,
        features: Tensor,
        row_loss: RowLoss,
        row_args: tuple[Tensor, ...] = (),
        row_weights: Tensor | None = None,
    ) -> RowLosses:
        """Sum of row_weights · row_loss(outputs, *row_args) over the rows of features [N, D].

        row_args and row_weights [N]. ``row_loss`` gets float32 outputs [R, V] and [R] slices of ``row_args``, and
        returns [R]; gradients flow to the features and the head alone. Rows of weight 0 have no effect.
        """
        row_pass = any_pass(row_loss, fused=self.fused)
        return chunked_loss(features, self.weight, self.bias, row_pass, row_args, row_weights)

    def cross_entropy(
        self,
        features: Tensor,
        targets: Tensor,
        row_weights: Tensor | None = None,
        *,
        shift: tuple[Tensor, Tensor] | None = None,
    ) -> RowLosses:
        """Sum of row_weights · -log softmax(outputs)[targets] over the rows of features [N, D].

        ``shift`` = (tokens [N], amounts [N]) adds each row's amount to its token's output before the softmax: the
        likelihood of the noisy token, in the bayes parameterization.
        """
        row_args = (targets, *(shift or ()))
        return chunked_loss(features, self.weight, self.bias, cross_entropy_pass, row_args, row_weights)

    def score_entropy(self, features: Tensor, rows: ScoreRows, row_weights: Tensor | None = None) -> RowLosses:
        """Sum of row_weights times the score entropies of the rows of features [N, D], with the coefficients
        ``rows``."""
        return chunked_loss(features, self.weight, self.bias, score_entropy_pass, rows, row_weights)
