"""Triton's kernels without a GPU: by its interpreter, in a process of its own because its switch is read at import."""

import os
import subprocess
import sys

import pytest
import torch


def run_interpreted(code: str) -> None:
    """Run Python code, which must end well, with kernels interpreted; skip without Triton or where there is a GPU."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the device runs the kernel itself")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
