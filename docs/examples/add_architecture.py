"""A network of your own: gated convolutions.

cedd train tiny --architecture docs.examples.add_architecture:Convolutions --architecture.width 48 --out runs/mine
"""

# region network
import torch
from torch import Tensor, nn


class Convolutions(nn.Module):
    """Dilated convolutions with gates, (x_t [B, L], sigma [B]) -> [B, L, V].

    Args:
        vocab_size: V.
        has_mask: whether x_t may contain the mask, token V.
        width: channels.
        depth: layers; the layer i looks 2 * 2**i tokens to each side.
    """

    def __init__(self, vocab_size: int, has_mask: bool, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size + has_mask, width)
        self.time = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, depth * width))
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, kernel_size=5, dilation=2**i, padding=2 * 2**i) for i in range(depth)
        )
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, x_t: Tensor, sigma: Tensor) -> Tensor:
        """One residual branch per layer, shifted by the noise level."""
        x = self.embedding(x_t).mT
        shifts = self.time(torch.stack([torch.exp(-sigma), sigma], -1)).chunk(len(self.layers), -1)
        for layer, shift in zip(self.layers, shifts, strict=True):
            value, gate = layer(x + shift[..., None]).chunk(2, 1)
            x = x + value * gate.sigmoid()
        return self.output(self.norm(x.mT))


# endregion
