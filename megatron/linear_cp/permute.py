# SPDX-License-Identifier: Apache-2.0
"""Reordering rows, and adding them up, by gathers only: the same bits on every run."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from megatron.linear_cp.segments import HostTable, IntArray


def permute_rows(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``x[order]`` along dim 0, with a gather, not a scattered add, in backward.

    Args:
        x: ``[T, ...]``.
        order: ``[T]`` int64, a permutation.
        inverse: ``[T]`` int64, its inverse.
    """
    out: torch.Tensor = _PermuteRows.apply(x, order, inverse)
    return out


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.index_select(0, ctx.inverse), None, None


@dataclass(frozen=True)
class RowSums:
    """Which rows of a tensor add up to each row of another, in a fixed order.

    A scattered add on a GPU adds in any order.

    Attributes:
        index: ``[rows * width]``; short lists are filled up with the number of source rows, which
            stands for a zero row.
        width: sources of a row, at most.
        padded: whether any list was filled up.
    """

    index: HostTable
    width: int
    padded: bool

    @staticmethod
    def build(target: IntArray, num_targets: int) -> "RowSums":
        """Source row ``i`` goes to ``target[i]``, 0 to ``num_targets - 1``."""
        counts = np.bincount(target, minlength=num_targets)
        width = int(counts.max()) if len(counts) else 0
        order = np.argsort(target, kind="stable")
        place = np.arange(len(target)) - (np.cumsum(counts) - counts)[target[order]]
        index = np.full((num_targets, width), len(target), dtype=np.int64)
        index[target[order], place] = order
        return RowSums(HostTable(index.ravel()), width, bool((counts < width).any()))

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """``[targets, ...]`` from ``rows [sources, ...]``."""
        if self.padded:
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        picked = rows.index_select(0, self.index.on(rows.device))
        if self.width <= 1:
            return picked
        return picked.unflatten(0, (-1, self.width)).sum(1)
