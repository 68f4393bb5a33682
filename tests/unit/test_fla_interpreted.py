# SPDX-License-Identifier: Apache-2.0
"""The FLA backend's arithmetic on the CPU, in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
CASES = (
    "wy-fp32",
    "wy-bf16",
    "rule-equal-heads",
    "rule-grouped-heads",
    "rule-two-key-blocks",
    "rule-strong-decay",
    "rule-many-launches",
)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "fla")),
    reason="needs Triton and fla-core, which are not installed",
)
def test_against_reference() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(p for p in (str(root), os.environ.get("PYTHONPATH", "")) if p)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *CASES],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == [word for case in CASES for word in ("ok", case)]
