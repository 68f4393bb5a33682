# SPDX-License-Identifier: Apache-2.0
"""The convolution's halo: the inputs before each local segment, wherever they are stored."""

import torch
from torch import Tensor

from megatron.linear_cp import comm
from megatron.linear_cp.plan import ContextParallelPlan


def gather_halo(x: Tensor, plan: ContextParallelPlan, width: int) -> Tensor:
    """The ``width - 1`` tokens before each local segment; not differentiable.

    Args:
        x: ``[T, D]`` local tokens; rows may be strided.
        plan: of the micro-batch; every rank of its group calls where the halo crosses ranks.
        width: taps of the convolution.

    Returns:
        ``[N, width - 1, D]``, zero where the sequence starts.
    """
    route, device = plan.halo_route(width), x.device
    num_segments = plan.segments.num_segments
    rows = x.new_zeros(num_segments * (width - 1), x.shape[1])
    own = x.index_select(0, route.own_index.on(device))
    rows.index_copy_(0, route.own_rows.on(device), own)
    if route.crosses:
        sent = x.index_select(0, route.send_index.on(device))
        received = comm.exchange_rows(sent, route.send_splits, route.recv_splits, plan.group)
        far = received.index_select(0, route.far_index.on(device))
        rows.index_copy_(0, route.far_rows.on(device), far)
    return rows.view(num_segments, width - 1, x.shape[1])


def add_halo_gradient(dx: Tensor, dhalo: Tensor, plan: ContextParallelPlan, width: int) -> None:
    """Add the gradient of :func:`gather_halo` to ``dx`` in place, in the same order on every run.

    Args:
        dx: ``[T, D]``; rows may be strided.
        dhalo: ``[N, width - 1, D]``, in ``dx``'s dtype.
        plan, width: as in forward.
    """
    route, device = plan.halo_route(width), dx.device
    rows = dhalo.flatten(0, 1)
    grads = rows.index_select(0, route.own_rows.on(device))
    if route.crosses:
        far = route.received_uses.of(rows.index_select(0, route.far_rows.on(device)))
        back = comm.exchange_rows(far, route.recv_splits, route.send_splits, plan.group)
        grads = torch.cat([grads, back])
    tokens = route.sent_tokens.on(device)
    sums = route.sent_uses.of(grads).add_(dx.index_select(0, tokens))
    dx.index_copy_(0, tokens, sums)
