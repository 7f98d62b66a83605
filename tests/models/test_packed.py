"""Products with packed weights, for calls of few tokens with a cache."""

import pytest
import torch
from torch import nn

from cedd.block_layout import FinishedText
from cedd.models.kernels.packed import MOST_ROWS, PackedWeights
from cedd.models.transformer import Transformer, config_from_preset
from cedd.network import Network

pytestmark = pytest.mark.skipif(not PackedWeights.helps(torch.zeros(1)), reason="this CPU's library packs no weights")


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_with_packed_weights(bias: bool) -> None:
    torch.manual_seed(0)
    layer, packed, order = nn.Linear(256, 300, bias=bias), PackedWeights(), torch.randperm(300)
    for rows in (1, 4, 16, 4, MOST_ROWS + 1):
        x = torch.randn(1, rows, 256)
        torch.testing.assert_close(packed.product(x, layer, order), layer(x)[..., order])


def test_gradients_do_not_pass_through_packed_weights() -> None:
    layer = nn.Linear(256, 300)
    assert PackedWeights().product(torch.randn(4, 256), layer).requires_grad


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_a_cache_changes_no_bit_of_a_network_with_packed_weights(time_conditioning: bool) -> None:
    torch.manual_seed(0)
    config = config_from_preset(
        "tiny", vocab_size=9, has_mask=True, width=256, time_input="none", time_conditioning=time_conditioning
    )
    model, x = Transformer(config).eval(), torch.randint(9, (1, 16))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)

    @torch.no_grad()
    def outputs(kept: bool) -> torch.Tensor:
        text = FinishedText.of(Network.of(model, 9), 4, 1, 16, kept)
        found = []
        for number in range(4):
            text.read_up_to(number, x, 4)
            found += [text(x[:, :4], torch.ones(1), **text.conditions) for _ in range(2)]
        return torch.cat(found)

    assert model.new_cache(1).packed is not None
    assert torch.equal(outputs(True), outputs(False))
    assert model.new_cache(2).packed is None
