# SPDX-License-Identifier: Apache-2.0
"""Token layouts of context parallelism, as tensors, and the way from one to another.

The functions carry the names and meaning of Megatron-Core's own (commit 5139086e).
"""

import torch
import torch.distributed as dist

from megatron.linear_cp import comm
from megatron.linear_cp.layout import rank_indices, token_ranges
from megatron.linear_cp.permute import permute_rows
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.routes import LayoutRoute

_conversions = 0


def layout_conversions() -> int:
    """How often this process moved tokens to another layout so far, forward only."""
    return _conversions


def get_thd_context_parallel_rank_indices(
    cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, layout: str
) -> torch.Tensor:
    """Global positions of the packed tokens that one rank stores, in storage order.

    Args:
        cu_seqlens: ``[S + 1]`` integer boundaries of the whole packed buffer, from 0, on any device
            (read once, which waits for it).
        cp_size: context-parallel size.
        cp_rank: the rank, 0 to ``cp_size - 1``.
        layout: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        ``[total / cp_size]`` int64 tensor on the device of ``cu_seqlens``.

    Raises:
        ValueError: unknown layout, a rank out of range, malformed boundaries, or lengths that the
            layout cannot cut.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be 0 to {cp_size - 1}, got {cp_rank}")
    ranges = token_ranges(cu_seqlens.cpu().numpy(), cp_size, layout)
    return torch.from_numpy(rank_indices(ranges, cp_rank)).to(cu_seqlens.device)


def zigzag_to_contiguous_chunks(
    x: torch.Tensor,
    cp_group: dist.ProcessGroup,
    seq_dim: int = 0,
    cu_seqlens: torch.Tensor | None = None,
    *,
    plan: ContextParallelPlan | None = None,
) -> torch.Tensor:
    """Move this rank's tokens from zigzag to contiguous storage; differentiable, bit-exact.

    Args:
        x: local tokens in zigzag order along ``seq_dim``; other dims are anything.
        cp_group: every rank of it must call.
        seq_dim: the token dim; negative counts from the end.
        cu_seqlens: ``[S + 1]`` boundaries of the whole packed buffer; None means dense input, where
            every slice along the other dims is a sequence of its own.
        plan: the micro-batch's zigzag plan, whose route is then reused; without it one is built,
            which reads ``cu_seqlens`` on the host.

    Returns:
        The same number of tokens, in contiguous order.

    Raises:
        ValueError: lengths that either layout cannot cut, boundaries that do not cover ``x``, or a
            plan of another layout, before anything is sent.
    """
    return _convert(x, cp_group, seq_dim, cu_seqlens, plan, "zigzag", "contiguous")


def contiguous_to_zigzag_chunks(
    x: torch.Tensor,
    cp_group: dist.ProcessGroup,
    seq_dim: int = 0,
    cu_seqlens: torch.Tensor | None = None,
    *,
    plan: ContextParallelPlan | None = None,
) -> torch.Tensor:
    """The inverse of :func:`zigzag_to_contiguous_chunks`; ``plan`` is the contiguous one."""
    return _convert(x, cp_group, seq_dim, cu_seqlens, plan, "contiguous", "zigzag")


def convert_rows(
    x: torch.Tensor, old: ContextParallelPlan, new: ContextParallelPlan
) -> torch.Tensor:
    """``[T, ...]`` local tokens as plan ``old`` stores them, moved to where ``new`` does.

    Differentiable and bit-exact; every rank of the plans' group must call.
    """
    if old is new or old.cp_size == 1:
        return x
    return exchange_tokens(x, old.route_to(new), old.group)


def exchange_tokens(x: torch.Tensor, route: LayoutRoute, group: dist.ProcessGroup) -> torch.Tensor:
    """``[T, ...]`` rows along a route, over the group it was built for; differentiable."""
    global _conversions
    _conversions += 1
    device = x.device
    rows = permute_rows(x, route.send_order.on(device), route.send_inverse.on(device))
    rows = comm.all_to_all_rows(rows, route.send_splits, route.recv_splits, group)
    return permute_rows(rows, route.recv_order.on(device), route.recv_inverse.on(device))


def _convert(
    x: torch.Tensor,
    cp_group: dist.ProcessGroup,
    seq_dim: int,
    cu_seqlens: torch.Tensor | None,
    plan: ContextParallelPlan | None,
    old: str,
    new: str,
) -> torch.Tensor:
    local = x.shape[seq_dim]
    if plan is None:
        total = local * cp_group.size()
        boundaries = [0, total] if cu_seqlens is None else cu_seqlens
        plan = ContextParallelPlan.build(boundaries, cp_group, layout=old, conv_kernel_size=1)
    if plan.layout != old:
        raise ValueError(f"the plan is of the {plan.layout} layout but x is in {old}")
    if plan.local_tokens != local:
        raise ValueError(
            f"the boundaries cover {plan.total_tokens} tokens, {plan.local_tokens} on each of "
            f"{plan.cp_size} ranks, but x holds {local} along dim {seq_dim}"
        )
    rows = convert_rows(x.movedim(seq_dim, 0), plan, plan.in_layout(new))
    return rows.movedim(0, seq_dim)
