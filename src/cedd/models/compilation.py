"""torch.compile of a network's stack of blocks."""

from __future__ import annotations

from typing import Any

import torch._functorch.config as functorch_config
from torch import nn


def compile_stack(stack: nn.Module, *args: Any, **options: Any) -> None:
    """Compile a module in place as one graph, whose backward pass may recompute what is cheap but wide.

    By default the compiler keeps the MLP's activations before and after the GELU, 8 of the 20 [B, L, D] tensors of a
    block. The compiler's setting is global, so it is changed only during the module's calls, in which compilation
    happens.
    """
    stack.compile(*args, **{"fullgraph": True, **options})
    compiled = stack._compiled_call_impl
    assert compiled is not None

    def call(*inputs: Any, **named: Any) -> Any:
        with functorch_config.patch(ban_recompute_materialized_backward=False):
            return compiled(*inputs, **named)

    stack._compiled_call_impl = call
