# SPDX-License-Identifier: Apache-2.0
"""The FLA backend's arithmetic on the CPU, in Triton's interpreter, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_kernels.py")
CASES = ("rule-equal-heads", "rule-grouped-heads", "rule-strong-decay", "rule-many-launches")
CONV_CASES = ("conv-silu-bias", "conv-plain", "conv-wider-than-segments", "conv-width-1")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "fla")),
    reason="needs Triton and fla-core, which are not installed",
)
@pytest.mark.parametrize("cases", [CASES, CONV_CASES], ids=["rule", "conv"])
def test_against_reference(cases: tuple[str, ...]) -> None:
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
