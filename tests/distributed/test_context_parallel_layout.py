# SPDX-License-Identifier: Apache-2.0
"""zigzag <-> contiguous: the global slice, the identity there and back, and gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.context_parallel_layout import (
    contiguous_to_zigzag_chunks,
    get_thd_context_parallel_rank_indices,
    zigzag_to_contiguous_chunks,
)
from megatron.linear_cp.testing.workers import run_distributed

CASES = json.loads((Path(__file__).parent.parent / "cases" / "packed_rows.json").read_text())


def there_and_back(
    row: list[int] | None, length: int, seq_dim: int, with_plan: bool
) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    cu = torch.tensor([0, length] if row is None else row)
    indices = {
        layout: get_thd_context_parallel_rank_indices(cu, group.size(), group.rank(), layout)
        for layout in ("zigzag", "contiguous")
    }
    whole = torch.arange(length * 6.0).view(length, 2, 3)
    zigzag, contiguous = (
        whole[indices[layout]].movedim(0, seq_dim) for layout in ("zigzag", "contiguous")
    )
    zigzag = zigzag.clone().requires_grad_()
    packed = None if row is None else cu
    plan = ContextParallelPlan.build(cu, group) if with_plan else None
    other = plan.in_layout("contiguous") if plan is not None else None
    moved = zigzag_to_contiguous_chunks(zigzag, group, seq_dim, packed, plan=plan)
    weight = whole.movedim(0, seq_dim).index_select(seq_dim, indices["contiguous"])
    (moved * weight).sum().backward()
    back = contiguous_to_zigzag_chunks(moved.detach(), group, seq_dim, packed, plan=other)
    return {
        "moved": torch.equal(moved, contiguous),
        "back": torch.equal(back, zigzag),
        # d(sum of x * w) is w, brought to where x lies.
        "grad": torch.equal(zigzag.grad, zigzag.detach()),
    }


@pytest.mark.parametrize("with_plan", [False, True])
@pytest.mark.parametrize("seq_dim", [0, 1, -1])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_packed_round_trip(cp: int, seq_dim: int, with_plan: bool) -> None:
    row = [0, 16, 40, 40, 80] if cp < 4 else CASES["zigzag"][3]["cu_seqlens"]
    for result in run_distributed(there_and_back, cp, row, row[-1], seq_dim, with_plan):
        assert result == {"moved": True, "back": True, "grad": True}


@pytest.mark.parametrize("cp", [2, 4])
def test_dense_round_trip(cp: int) -> None:
    for result in run_distributed(there_and_back, cp, None, 32, 0, False):
        assert result == {"moved": True, "back": True, "grad": True}


def bad_call(case: str) -> str:
    group = dist.group.WORLD
    assert group is not None
    x, cu, plan = torch.zeros(8, 1), torch.tensor([0, 16]), None
    match case:
        case "decreasing":
            cu = torch.tensor([0, 16, 8])
        case "uneven":
            cu = torch.tensor([0, 6, 16])
        case "wrong length":
            x = torch.zeros(6, 1)
        case "plan of another layout":
            plan = ContextParallelPlan.build(cu, group, layout="contiguous")
    with count_traffic() as traffic, pytest.raises(ValueError) as error:  # noqa: PT011
        zigzag_to_contiguous_chunks(x, group, 0, cu, plan=plan)
    return f"{traffic.collectives} collectives: {error.value}"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("decreasing", "must not be decreasing"),
        ("uneven", "sequence 0 of length 6"),
        ("wrong length", "8 on each of 2 ranks, but x holds 6 along dim 0"),
        ("plan of another layout", "plan is of the contiguous layout but x is in zigzag"),
    ],
)
def test_refusals(case: str, message: str) -> None:
    for text in run_distributed(bad_call, 2, case, timeout=60):
        assert text.startswith("0 collectives: ")
        assert message in text
