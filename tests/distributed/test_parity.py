# SPDX-License-Identifier: Apache-2.0
"""Every mode against the fp64 token recurrence, output and every gradient; rows cross cuts."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron.linear_cp.layout
from megatron.linear_cp.layout import token_ranges
from megatron.linear_cp.testing.layer import (
    LayerShape,
    assemble,
    layer_reference,
    make_layer_inputs,
    run_rows,
)
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

CASES = json.loads((Path(__file__).parent.parent / "cases" / "packed_rows.json").read_text())
MODES = ("headwise", "chunkwise", "all_gather")
GATES = {torch.float64: 1e-12, torch.float32: 1e-5}
# 8 key heads let headwise deal them over 8 ranks; grouped value heads as in Qwen3-Next.
SHAPE = LayerShape(num_key_heads=8, num_value_heads=16, key_head_dim=4, value_head_dim=6)


def rows_of(layout: str, cp: int) -> list[list[int]]:
    if cp == 1:
        return [[0, 16, 40], [0, 5, 5, 61, 64]]
    return [case["cu_seqlens"] for case in CASES[layout] if case["cp"] == cp]


@cache
def expected(row: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return layer_reference(make_layer_inputs(SHAPE, row[-1], dtype), SHAPE, row)


@pytest.mark.parametrize("dtype", GATES, ids=["fp64", "fp32"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_mode_equals_reference(layout: str, cp: int, mode: str, dtype: torch.dtype) -> None:
    rows = rows_of(layout, cp)
    by_rank = run_distributed(run_rows, cp, mode, layout, rows, dtype, SHAPE)
    for i, row in enumerate(rows):
        actual = assemble([parts[i] for parts in by_rank], row, layout)
        try:
            assert_all_close(actual, expected(tuple(row), dtype), GATES[dtype])
        except AssertionError as error:
            raise AssertionError(f"{mode}, {layout}, cp {cp}, row {row}: {error}") from None


def run_rows_halved(*args: Any) -> list[dict[str, torch.Tensor]]:
    """A run of 5 tokens is long."""
    with mock.patch.multiple(megatron.linear_cp.layout, LONG_RUN=4, LONG_SHARE=100, _CHUNK=1):
        assert len(token_ranges([0, 64], dist.get_world_size(), "contiguous").rank) > (
            dist.get_world_size()
        )
        return run_rows(*args)


@pytest.mark.parametrize("cp", [2, 4])
def test_long_runs_in_two_segments(cp: int) -> None:
    rows = rows_of("contiguous", cp)
    by_rank = run_distributed(
        run_rows_halved, cp, "chunkwise", "contiguous", rows, torch.float64, SHAPE
    )
    for i, row in enumerate(rows):
        actual = assemble([parts[i] for parts in by_rank], row, "contiguous")
        assert_all_close(actual, expected(tuple(row), torch.float64), GATES[torch.float64])
