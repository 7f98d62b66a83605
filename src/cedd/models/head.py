"""The vocabulary head: features [..., D] to outputs [..., V], and losses that never hold all of those outputs.

What a loss needs of a model to use this, and all it needs:

    features = model.features(x_t, sigma)                                        # [B, L, D]
    losses = model.head.loss(features, row_loss, (x_t, x0, ...), weights)        # any loss of one row of outputs
    losses = model.head.cross_entropy(features, x0, weights)                     # the closed form, fused on CUDA
    losses.total.backward()

A model without ``features`` and ``head.loss`` is a plain callable, and the loss takes its dense outputs.
"""

from __future__ import annotations

from torch import Tensor, nn

from cedd.models.kernels.head_loss import RowLoss, RowLosses, chunked_head_loss, linear_cross_entropy
from cedd.models.kernels.rows import Rows


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
        *,
        active: Tensor | None = None,
        capacity: int | None = None,
        chunk_rows: int | None = None,
    ) -> RowLosses:
        """Sum of row_weights · row_loss(outputs, *row_args) over all positions, or over the ``active`` ones.

        features [..., D]; row_args, row_weights and active [...]. ``row_loss`` gets float32 outputs [R, V] and
        [R] slices of ``row_args``, and returns [R]; gradients flow to the features and the head alone.

        ``active`` (bool) says which positions count; only they go through the vocabulary. Their number is a
        shape: without ``capacity`` it is read from the device (a synchronization), with it, ``capacity`` rows
        are always computed and ``left_out`` counts the active ones beyond: 0, or the loss must be done again
        without a capacity.
        """
        rows = Rows.choose(features, active, capacity)
        losses = chunked_head_loss(
            rows.gather_features(features),
            self.weight,
            self.bias,
            row_loss,
            tuple(rows.gather(argument) for argument in row_args),
            rows.gather_weights(row_weights),
            chunk_rows,
            fused=self.fused,
        )
        return losses._replace(rows=rows.scatter(losses.rows), left_out=rows.left_out)

    def cross_entropy(
        self,
        features: Tensor,
        targets: Tensor,
        row_weights: Tensor | None = None,
        *,
        shift: tuple[Tensor, Tensor] | None = None,
        active: Tensor | None = None,
        capacity: int | None = None,
        chunk_rows: int | None = None,
    ) -> RowLosses:
        """Sum of row_weights · -log softmax(outputs)[targets]; ``active`` and ``capacity`` as in ``loss``.

        ``shift`` = (tokens [...], amounts [...]) adds each position's amount to its token's output before the
        softmax: the likelihood of the noisy token, in the bayes parameterization.
        """
        rows = Rows.choose(features, active, capacity)
        losses = linear_cross_entropy(
            rows.gather_features(features),
            self.weight,
            self.bias,
            rows.gather(targets),
            rows.gather_weights(row_weights),
            chunk_rows,
            shift=None if shift is None else (rows.gather(shift[0]), rows.gather(shift[1])),
        )
        return losses._replace(rows=rows.scatter(losses.rows), left_out=rows.left_out)
