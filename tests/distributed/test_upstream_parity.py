# SPDX-License-Identifier: Apache-2.0
"""Our module against Megatron-Core's own on CPU, same weights: output and every gradient.

Its module runs there in deterministic mode, dense input and float32 only; tests/gpu has the rest.
"""

from functools import cache
from typing import Any

import pytest
import torch

from megatron.linear_cp.testing.module import ModuleCase, assemble_module, run_module
from megatron.linear_cp.testing.upstream import run_upstream_module
from megatron.linear_cp.testing.workers import run_distributed

# Chunks of 64 tokens: two and a part of a third, so that states are carried.
CASE = ModuleCase(
    mode="headwise",
    dtype=torch.float32,
    dense=(152, 2),
    config={"deterministic_mode": True},
)


def run_both() -> tuple[dict[str, Any], dict[str, Any]]:
    return run_module(CASE), run_upstream_module(CASE)


@cache
def both(cp: int) -> list[dict[str, torch.Tensor]]:
    return [assemble_module(parts) for parts in zip(*run_distributed(run_both, cp), strict=True)]


@pytest.mark.parametrize("cp", [1, 2])
def test_equals_megatron_cores_module(cp: int) -> None:
    ours, theirs = both(cp)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 + 7
    for name, value in ours.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(
            value,
            theirs[name],
            rtol=1e-5,
            atol=1e-5 * scale,
            msg=lambda text, n=name: f"{n}: {text}",
        )
