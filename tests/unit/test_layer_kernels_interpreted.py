# SPDX-License-Identifier: Apache-2.0
"""The layer's memory-bound kernels on the CPU, in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_layer_kernels.py")
CASES = {
    "conv": (
        "conv-silu-bias",
        "conv-odd-heads",
        "conv-no-norm",
        "conv-short-segments",
        "conv-width-8",
        "conv-width-1",
        "conv-fp16",
        "conv-plain",
        "conv-plain-no-activation",
    ),
    "conv-long": ("conv-long",),
    "norm": ("norm-gated", "norm-plain", "norm-fp16", "norm-wide"),
    "gates": ("gates", "gates-fp16"),
}


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which is not installed"
)
@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_against_float64(cases: tuple[str, ...]) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *cases],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == [word for case in cases for word in ("ok", case)]
