"""Networks that multiply in int8."""

import pytest
import torch
from torch import nn

from cedd.models.integers import IntegerLinear, has_integer_products, with_integers
from cedd.models.transformer import Transformer, config_from_preset

integers = pytest.mark.skipif(not has_integer_products(), reason="this CPU has no units for products of int8")


@integers
@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (2, 5, 512)])
def test_integer_products_are_those_of_rounded_factors(shape):
    """Against sums in int64; and no entry is further from the product in float64 than both roundings allow."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(shape[-1], 48, bias=len(shape) == 2)
    x = torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator) * 10
    x[..., 0, :] = x[..., 0, :].abs() * -20  # the largest entries are negative
    with torch.no_grad():
        linear.weight[0], linear.weight[1, 0] = 0.0, 7.0
        made, rounded = IntegerLinear(linear)(x), IntegerLinear(linear)
        unit = x.abs().amax(-1, True) / 127
        q = (x * unit.reciprocal()).round().long()
        sums = (q.unsqueeze(-2) * rounded.weight.long()).sum(-1)
        bias = 0.0 if linear.bias is None else linear.bias
        torch.testing.assert_close(made, sums.double() * unit * rounded.step + bias, check_dtype=False)
        exact = x.double() @ linear.weight.double().T + bias
        reach = x.abs().sum(-1, True) * rounded.step / 2 + linear.weight.abs().sum(1) * unit / 2
        reach = reach + shape[-1] * unit * rounded.step / 4
    assert ((made - exact).abs() <= 1.001 * reach + 1e-5).all()
    assert (made - exact).abs().max() > 0


@integers
def test_a_row_of_integer_products_is_the_same_beside_any_others():
    linear, x = nn.Linear(64, 32, bias=False), torch.randn(7, 64)
    x[3] = 0.0
    with torch.no_grad():
        made = IntegerLinear(linear)
        whole = made(x)
        assert torch.equal(whole, torch.cat([made(row[None]) for row in x]))
    assert torch.equal(whole[3], torch.zeros(32))


@integers
def test_a_network_with_integers_shares_all_but_its_blocks():
    model = Transformer(config_from_preset("tiny", vocab_size=20, has_mask=True, length=16)).eval()
    made = with_integers(model)
    own = dict(model.named_parameters())
    assert all(parameter is own[name] for name, parameter in made.named_parameters())
    assert {name for name in own if name not in dict(made.named_parameters())} == {
        name for name in own if ".blocks." in name and name.endswith(("qkv.weight", "output.weight", "hidden.weight"))
    }
    assert not any(isinstance(module, IntegerLinear) for module in model.modules())
