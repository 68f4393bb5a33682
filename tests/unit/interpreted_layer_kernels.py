# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402 - imports follow what must happen before them
"""Run the layer's memory-bound kernels on the CPU, in Triton's interpreter, against float64.

A script: ``TRITON_INTERPRET`` must be set before Triton is imported, for the whole process.
``tests/gpu/test_layer_kernels.py`` runs the same checks on the GPU.
"""

import inspect
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.runtime.interpreter as interpreter

# The interpreter takes a one-element array for a number, which NumPy no longer does.
_source = inspect.getsource(interpreter._patch_lang_tensor)
exec(_source.replace("int(self.handle.data)", "int(self.handle.data.item())"), vars(interpreter))

from megatron.linear_cp.ops import triton_norm
from megatron.linear_cp.ops.heads import HeadShape
from tests.layer_kernel_checks import check_conv, check_gates, check_norm, check_plain_conv

F32, F16 = torch.float32, torch.float16
RAGGED = (40, 1, 2, 30, 1, 1)


def wide_norm() -> None:
    """Rows too long for one program, at a size that the interpreter can do."""
    triton_norm._WIDEST, triton_norm._WIDE_BLOCK = 32, (8, 16)
    check_norm((3, 5), 75, True, True, F32)
    check_norm((3, 5), 75, False, False, F32)


CASES = {
    "conv-silu-bias": lambda: check_conv(RAGGED, HeadShape(2, 16, 3, 8), 4, True, "silu", True),
    "conv-odd-heads": lambda: check_conv(RAGGED, HeadShape(2, 12, 3, 20), 4, False, "silu", True),
    "conv-no-norm": lambda: check_conv((1, 1, 5), HeadShape(1, 16, 1, 40), 2, True, None, False),
    "conv-short-segments": lambda: check_conv(
        (1, 1, 1, 2, 6), HeadShape(1, 8, 2, 8), 7, False, "silu", True
    ),
    "conv-width-8": lambda: check_conv((30, 3), HeadShape(1, 8, 1, 8), 8, True, "silu", True),
    "conv-width-1": lambda: check_conv((7,), HeadShape(1, 16, 2, 8), 1, True, "silu", True),
    # Blocks (512 tokens forward, 416 backward) that touch no segment's start, that hold one, that
    # begin with one or just behind it, and that end just before one.
    "conv-long": lambda: check_conv(
        (416, 833, 286, 565), HeadShape(1, 16, 2, 8), 4, True, "silu", True
    ),
    "conv-fp16": lambda: check_conv(RAGGED, HeadShape(1, 16, 2, 8), 4, True, "silu", True, F16),
    "conv-plain": lambda: check_plain_conv(RAGGED, 24, 4, True, "silu"),
    "conv-plain-no-activation": lambda: check_plain_conv((1, 1, 5), 16, 2, False, None),
    "norm-gated": lambda: check_norm((1, 37, 3), 24, True, False, F32),
    "norm-plain": lambda: check_norm((5, 9), 40, False, True, F32),
    "norm-fp16": lambda: check_norm((1, 37, 3), 16, True, True, F16),
    "norm-wide": wide_norm,
    "gates": lambda: check_gates(70, 5, F32),
    "gates-fp16": lambda: check_gates(70, 4, F16),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        CASES[name]()
        print("ok", name, flush=True)
