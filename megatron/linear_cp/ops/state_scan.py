# SPDX-License-Identifier: Apache-2.0
"""The state scan: entry states of all segments from their summaries, at a cost free of length.

Each segment is an affine map of its entry state, ``S_out = A @ S_in + b``. The summaries of a chain
meet at one owner rank, which composes them in time order and sends every segment its entry state.
Backward runs the transposed maps the other way.
"""

import torch
import torch.distributed as dist

from megatron.linear_cp import comm
from megatron.linear_cp.routes import StateRoute


def entry_states(
    a: torch.Tensor, b: torch.Tensor, route: StateRoute, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry state of every local segment.

    Args:
        a: ``[N, heads, K, K]`` transition of each local segment, fp32 or fp64.
        b: ``[N, heads, K, V]`` final state of each local segment from a zero entry state.
        route: from :func:`megatron.linear_cp.routes.build_state_route`, for these segments.
        group: context-parallel group; may be None where no chain crosses ranks.

    Returns:
        The entry states ``[N, heads, K, V]`` (zero for a first segment), and the transitions of
        the middle segments owned here, ``[M, K, K]``, which backward needs again.
    """
    n, heads, key_dim, value_dim = b.shape
    device, transition, state = b.device, key_dim * key_dim, key_dim * value_dim
    a_rows, b_rows = a.reshape(n * heads, transition), b.reshape(n * heads, state)
    middle = route.middle_send.on(device)
    summaries = torch.cat([a_rows.index_select(0, middle), b_rows.index_select(0, middle)], dim=1)
    openings = b_rows.index_select(0, route.first_send.on(device))
    if route.crosses:
        assert group is not None
        summaries, openings = _exchange_pair(summaries, openings, route, group)
    summaries = summaries.index_select(0, route.middle_order.on(device))
    kept = summaries[:, :transition].reshape(-1, key_dim, key_dim)
    added = summaries[:, transition:].reshape(-1, key_dim, value_dim)

    states = b.new_empty(sum(route.units_at), key_dim, value_dim)
    if route.units_at:
        openings = openings.index_select(0, route.first_order.on(device))
        states[: route.units_at[0]] = openings.view(-1, key_dim, value_dim)
    done = taken = 0
    for now, following in zip(route.units_at, route.units_at[1:], strict=False):
        # Chains are sorted by length, so those that go on are the first `following` of `now`.
        torch.baddbmm(
            added[taken : taken + following],
            kept[taken : taken + following],
            states[done : done + following],
            out=states[done + now : done + now + following],
        )
        done, taken = done + now, taken + following

    leaving = states.view(-1, state).index_select(0, route.state_send.on(device))
    if route.crosses:
        assert group is not None
        leaving = comm.exchange_rows(
            leaving, route.state_send_splits, route.state_recv_splits, group
        )
    entry = b.new_zeros(n * heads, state)
    entry.index_copy_(0, route.state_recv.on(device), leaving)
    return entry.view(n, heads, key_dim, value_dim), kept


def exit_gradients(
    c: torch.Tensor, kept: torch.Tensor, route: StateRoute, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Gradient of every local segment's final state.

    Args:
        c: ``[N, heads, K, V]`` gradient of each entry state with a zero final-state gradient.
        kept: ``[M, K, K]`` from :func:`entry_states`.
        route: the route of the forward call.
        group: the group of the forward call.

    Returns:
        ``[N, heads, K, V]``, zero for a last segment.
    """
    n, heads, key_dim, value_dim = c.shape
    device, state = c.device, key_dim * value_dim
    arrived = c.reshape(n * heads, state).index_select(0, route.state_recv.on(device))
    if route.crosses:
        assert group is not None
        arrived = comm.exchange_rows(
            arrived, route.state_recv_splits, route.state_send_splits, group
        )
    grads = arrived.index_select(0, route.state_order.on(device)).view(-1, key_dim, value_dim)

    done, taken = sum(route.units_at), len(kept)
    for now, following in zip(route.units_at[-2::-1], route.units_at[:0:-1], strict=False):
        begin, end = done - following, done
        grads[begin - now : begin - now + following].baddbmm_(
            kept[taken - following : taken].transpose(1, 2), grads[begin:end]
        )
        done, taken = begin, taken - following

    leaving = grads.view(-1, state).index_select(0, route.grad_send.on(device))
    if route.crosses:
        assert group is not None
        leaving = comm.exchange_rows(leaving, route.grad_send_splits, route.grad_recv_splits, group)
    out = c.new_zeros(n * heads, state)
    out.index_copy_(0, route.grad_recv.on(device), leaving)
    return out.view(n, heads, key_dim, value_dim)


def _exchange_pair(
    summaries: torch.Tensor, openings: torch.Tensor, route: StateRoute, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send rows of two widths in one all-to-all: flat, for each rank middle then first rows."""
    wide, narrow = summaries.shape[1], openings.shape[1]
    pieces = []
    for long, short in zip(
        summaries.split(list(route.middle_send_splits)),
        openings.split(list(route.first_send_splits)),
        strict=True,
    ):
        pieces += [long.reshape(-1), short.reshape(-1)]
    counts = [
        (long * wide, short * narrow)
        for long, short in zip(route.middle_recv_splits, route.first_recv_splits, strict=True)
    ]
    sent = [
        long * wide + short * narrow
        for long, short in zip(route.middle_send_splits, route.first_send_splits, strict=True)
    ]
    flat = comm.exchange_rows(torch.cat(pieces), sent, [sum(pair) for pair in counts], group)
    parts = flat.split([size for pair in counts for size in pair])
    return (
        torch.cat(parts[0::2]).view(-1, wide),
        torch.cat(parts[1::2]).view(-1, narrow),
    )
