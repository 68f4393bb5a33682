# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives over a ``ProcessGroup``, and the bytes they move.

Every byte that this package sends goes through here. Rows are the unit of all exchanges: tensors
are split and joined along dim 0. Gloo cannot exchange CUDA tensors point to point, so with gloo
they are staged through host memory; NCCL and CPU tensors are exchanged in place.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


@dataclass
class Traffic:
    """What one rank exchanged while it was counted.

    Attributes:
        collectives: calls that reached the process group.
        bytes_sent: bytes sent to other ranks; what a rank keeps for itself does not count, and an
            all-gather counts the local shard once per peer.
    """

    collectives: int = 0
    bytes_sent: int = 0


_counters: list[Traffic] = []
_counters_lock = threading.Lock()  # CUDA backward runs on autograd's own thread


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count this rank's exchanges, forward and backward, inside the ``with`` block."""
    traffic = Traffic()
    with _counters_lock:
        _counters.append(traffic)
    try:
        yield traffic
    finally:
        with _counters_lock:
            # By identity: two counters that have counted the same are equal, not the same.
            _counters[:] = [c for c in _counters if c is not traffic]


def exchange_rows(
    x: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """All-to-all of rows with uneven splits; not differentiable.

    Args:
        x: ``[sum(send_splits), ...]`` rows for rank 0, then rank 1, and so on.
        send_splits: rows for each rank; zero is legal.
        recv_splits: rows from each rank.
        group: every rank of it must call.

    Returns:
        ``[sum(recv_splits), ...]`` rows of rank 0, then rank 1, and so on.
    """
    row_shape = x.shape[1:]
    row_bytes = math.prod(row_shape) * x.element_size()
    _count((sum(send_splits) - send_splits[group.rank()]) * row_bytes)
    source = _staged(x.contiguous(), group)
    out = source.new_empty((sum(recv_splits), *row_shape))
    dist.all_to_all_single(out, source, list(recv_splits), list(send_splits), group=group)
    return out.to(x.device)


def all_to_all_rows(
    x: torch.Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Differentiable :func:`exchange_rows`; backward sends each gradient row back."""
    out: torch.Tensor = _AllToAllRows.apply(x, tuple(send_splits), tuple(recv_splits), group)
    return out


def all_gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Differentiable all-gather along dim 0; backward is a reduce-scatter.

    Args:
        x: ``[T, ...]``, the same shape on every rank.

    Returns:
        ``[cp_size * T, ...]``, rank after rank.
    """
    out: torch.Tensor = _AllGatherRows.apply(x, group)
    return out


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    for entry in dist.get_backend_config(group).split(","):
        name, _, backend = entry.partition(":")
        if name == device.type:
            return backend
    return str(dist.get_backend(group))


def _staged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if x.device.type != "cpu" and _backend(group, x.device) == "gloo":
        return x.cpu()
    return x


def _count(sent: int) -> None:
    with _counters_lock:
        for traffic in _counters:
            traffic.collectives += 1
            traffic.bytes_sent += sent


def _gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    _count((group.size() - 1) * x.numel() * x.element_size())
    source = _staged(x.contiguous(), group)
    out = source.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(out, source, group=group)
    return out.to(x.device)


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    rows = x.shape[0] // group.size()
    if _backend(group, x.device) == "nccl":
        _count((group.size() - 1) * rows * math.prod(x.shape[1:]) * x.element_size())
        out = x.new_empty((rows, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out
    # Not every backend reduces and scatters. An all-to-all moves the same bytes, and the sum in
    # rank order is the same on every run.
    splits = [rows] * group.size()
    parts = exchange_rows(x, splits, splits, group)
    return parts.view(group.size(), rows, *x.shape[1:]).sum(0)


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        send_splits: tuple[int, ...],
        recv_splits: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (send_splits, recv_splits), group
        return exchange_rows(x, send_splits, recv_splits, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        send_splits, recv_splits = ctx.splits
        return exchange_rows(grad, recv_splits, send_splits, ctx.group), None, None, None


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None
