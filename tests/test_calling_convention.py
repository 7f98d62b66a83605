"""One calling convention: model (or outputs) first, process second, method by keyword."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cedd

V = 4
X0 = torch.zeros(2, 3, dtype=torch.int64)
P0 = torch.full((V, V), 1 / V**2, dtype=torch.float64)
REST: dict[Callable[..., Any], tuple[Any, ...]] = {
    cedd.log_scores: (X0, 0.5),
    cedd.loss: (X0,),
    cedd.estimate_bound: (X0,),
    cedd.exact_likelihood: (X0, [0]),
    cedd.exact_bound: (P0,),
    cedd.exact_cross_entropy: (P0,),
    cedd.sample: ((2, 3),),
}


def network(x_t: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*x_t.shape, V)


@pytest.mark.parametrize("function", REST, ids=lambda function: function.__name__)
def test_wrong_argument_order_raises_with_correct_call(function: Callable[..., Any]) -> None:
    process, rest = cedd.absorb(V), REST[function]
    model = network(X0, X0) if function is cedd.log_scores else network
    function(model, process, *rest, method="cedd")
    orders = [("cedd", process, model), (process, model), ("cedd", model, process), (cedd.METHODS["cedd"], process)]
    for wrong in (*orders, (model, process, *rest), (model, process, *rest, "cedd"), (model, "cedd", process)):
        with pytest.raises(TypeError, match=re.escape(f"call cedd.{function.__name__}(")):
            function(*wrong, *(rest if wrong in orders else ()))


@pytest.mark.parametrize(
    ("name", "meant"), [("stepz", "did you mean 'steps'"), ("sentiment", "conditions of the network must be tensors")]
)
def test_unexpected_argument_is_named_in_error(name: str, meant: str) -> None:
    wrong: dict[str, Any] = {name: 3}
    with pytest.raises(TypeError, match=f"unexpected argument {name!r}; {meant}"):
        cedd.sample(network, cedd.absorb(V), (2, 3), method="cedd", **wrong)


@pytest.mark.parametrize("name", ["constraints", "samplers", "dynamics", "schedules"])
def test_submodules_are_available_after_import_cedd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cedd, name, raising=False)
    assert getattr(cedd, name).__name__ == f"cedd.{name}"
    with pytest.raises(AttributeError, match="module 'cedd' has no attribute 'samplerz'"):
        _ = getattr(cedd, "samplerz")  # noqa: B009
