"""The vocabulary head: features [..., D] to outputs [..., V], and losses that never hold all of those outputs.

What a loss needs of a model to use this, and all it needs:

    features = model.features(x_t, sigma)                                        # [B, L, D]
    rows = model.rows(features, places)                                          # [N, D], those that count
    losses = model.head.loss(rows, row_loss, (x_t, x0, ...), weights)            # any loss of one row of outputs
    losses = model.head.cross_entropy(rows, x0, weights)                         # a closed form, fused on CUDA
    losses = model.head.score_entropy(rows, numbers, weights)                    # and another
    losses.total.backward()

A model without these is a plain callable, and the loss takes its dense outputs.
"""

from __future__ import annotations

from torch import Tensor, nn

from cedd.models.kernels.head_loss import (
    RowLoss,
    RowLosses,
    any_pass,
    chunked_loss,
    cross_entropy_pass,
    score_entropy_pass,
)
from cedd.network import ScoreRows


class VocabularyHead(nn.Linear):
    """A linear map to V outputs that starts at zero, so that the first prediction is uniform."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__(width, vocab_size)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self.fused = False
        """Whether row losses are compiled, forward and gradient in one pass; set by ``Transformer.compile``."""

    def loss(
        self,
        features: Tensor,
        row_loss: RowLoss,
        row_args: tuple[Tensor, ...] = (),
        row_weights: Tensor | None = None,
    ) -> RowLosses:
        """Sum of row_weights · row_loss(outputs, *row_args) over the rows of features [N, D].

        row_args and row_weights [N]. ``row_loss`` gets float32 outputs [R, V] and [R] slices of ``row_args``, and
        returns [R]; gradients flow to the features and the head alone. A row of weight 0 counts for nothing.
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
        """Sum of row_weights times the score entropies of the rows of features [N, D], whose numbers are ``rows``."""
        return chunked_loss(features, self.weight, self.bias, score_entropy_pass, rows, row_weights)
