# SPDX-License-Identifier: Apache-2.0
"""The Megatron module whole: projections, convolution, rule, gated norm, under every mode."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.linear_cp.testing.module import (
    ModuleCase,
    assemble_module,
    module_reference,
    run_module,
    run_tensor_parallel,
)
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

CASES = json.loads((Path(__file__).parent.parent / "cases" / "packed_rows.json").read_text())
MODES = ("headwise", "chunkwise", "all_gather")
GATES = {torch.float64: 1e-12, torch.float32: 1e-5}


@cache
def reference(row: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return module_reference(ModuleCase(row=row, dtype=dtype))


@pytest.mark.parametrize("dtype", GATES, ids=["fp64", "fp32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed(cp: int, layout: str, mode: str, dtype: torch.dtype) -> None:
    rows = [case["cu_seqlens"] for case in CASES[layout] if case["cp"] == max(cp, 2)]
    row = tuple(max((r for r in rows if r[-1] <= 384), key=len))
    case = ModuleCase(mode, layout, dtype=dtype, row=row)
    parts = run_distributed(run_module, cp, case)
    assert_all_close(assemble_module(parts), reference(row, dtype), GATES[dtype])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2])
def test_dense_batch_of_three(cp: int, layout: str, mode: str) -> None:
    case = ModuleCase(mode, layout)
    parts = run_distributed(run_module, cp, case)
    wanted = reference(case.boundaries, torch.float64)
    assert_all_close(assemble_module(parts), wanted, 1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_no_tokens_at_all(layout: str, mode: str) -> None:
    """A rank's share may be empty where a loader runs out of sequences."""
    for result in run_distributed(run_module, 2, ModuleCase(mode, layout, row=(0, 0))):
        assert result["out"].shape[0] == 0
        assert not result["din_proj.weight"].any()


def check_tensor_parallel(case: ModuleCase, sequence_parallel: bool) -> int:
    actual, expected = run_tensor_parallel(case, sequence_parallel)
    assert_all_close(actual, expected, 1e-12)
    return len(actual)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_times_context_parallel(mode: str, sequence_parallel: bool) -> None:
    case = replace(ModuleCase(), mode=mode, row=(0, 16, 40, 64))
    assert run_distributed(check_tensor_parallel, 4, case, sequence_parallel) == [9] * 4
