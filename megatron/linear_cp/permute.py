# SPDX-License-Identifier: Apache-2.0
"""Reordering rows by a permutation whose inverse is known."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


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
