"""Triton kernels without a GPU: run by Triton's interpreter, in a subprocess because its switch is read at import; or
compiled for a GPU without being run."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch


def run_interpreted(code: str) -> None:
    """Run Python code with interpreted kernels and check that it succeeds; skip without Triton or with a GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the device runs the kernel itself")
    code = f"from tests.interpreted import patch_interpreter_for_numpy; patch_interpreter_for_numpy(); {code}"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})


def patch_interpreter_for_numpy() -> None:
    """Let Triton 3.6's interpreter use one-element arrays as integers, which NumPy 2.4 and later reject."""
    from triton.runtime import interpreter  # type: ignore[import-not-found]

    prepare = interpreter._patch_lang_tensor

    def prepared(tensor: Any, *others: Any) -> None:
        prepare(tensor, *others)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = prepared


def compile_for_hopper(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, aligned: Sequence[str] = ()
) -> str:
    """The PTX code of a kernel for an H100 or H200; `aligned` arguments are known to be multiples of 16."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # some versions of Triton warn about it
        triton = pytest.importorskip("triton")
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found]
        from triton.compiler import ASTSource  # type: ignore[import-not-found]

        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        known = {name: value for name, value in constants.items() if name in names}
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
        source = ASTSource(kernel, signature, known, attributes)
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm
    assert code["cubin"]
    return code["ptx"]
