# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch: chunked WY form, hand-written backward, any device.

Within a chunk of ``C`` tokens, with the cumulative log decay ``G_i = g_1 + ... + g_i`` and the
state ``S`` that enters the chunk (Yang et al. 2025, Gated Delta Networks)::

    E_i = exp(G_i)   D_ij = exp(G_i - G_j) for i >= j   F_i = exp(G_C - G_i)
    x   = beta (v - E k S)
    u   = T x        T = (I + L)^-1,  L_ij = beta_i (k_i . k_j) D_ij for i > j
    o   = scale (E q S + ((q k^T) D) u)
    S'  = E_C S + k^T (F u)

Heads that share a key head share its Gram matrices, and their states lie side by side, so that
``q S`` and ``k S`` are one wide product per key head; q and k are never repeated.

Tokens are gathered into chunks and chunks into blocks by `torch_chunks`; a block is worked on while
it lies in the cache. Index letters below: ``n`` chunks, ``H`` key heads, ``G`` value heads per key
head, ``C`` tokens of a chunk, ``K`` and ``V`` head sizes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.linear_cp.ops.torch_chunks import (
    Block,
    Chunks,
    from_chunks,
    narrowed,
    prepare_chunks,
    restore_chunks,
    to_chunks,
)
from megatron.linear_cp.segments import WANTS_BOTH, WANTS_OFFSET, HostTable, Segments

# Below this a layer keeps what backward would recompute (a third of the time), above it nothing.
KEEP_BYTES = 64 * 2**20


class _Trace(NamedTuple):
    """What the state recurrence leaves behind for outputs and gradients, ``n`` chunks of it."""

    carried: Tensor  # q S, then k S [n, H, 2C, G, V]
    update: Tensor  # u [n, H, G, C, V]
    states: Tensor | None  # S [n, H, K, G, V]


class _Backward(NamedTuple):
    chunks: Chunks
    trace: _Trace
    dtypes: tuple[torch.dtype, ...]  # of q, k, v, g, beta
    do: Tensor  # [n, C, H, G, V]


class _Scratch(NamedTuple):
    """Gradients of one block, ``n`` chunks of it."""

    do: Tensor  # scale * do [n, H, G, C, V]
    dx: Tensor  # [n, H, G, C, V]
    dcarried: Tensor  # gradient of q S, then of k S [n, H, 2C, G, V]
    carried_back: Tensor  # k dS' [n, H, C, G, V]
    dstates: Tensor  # dS' [n, H, K, G, V]


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """No autograd, and no autocast that would run the recurrence in bfloat16."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _advance(
    chunks: Chunks, block: Block, state: Tensor, trace: _Trace | None = None, values: bool = True
) -> None:
    """Run ``state [N, H, K, G, X]`` (rows in step order) in place through one block.

    Args:
        chunks: the inputs.
        block: where to run.
        state: entry states, exit states afterwards; ``X`` is ``V`` unless ``values`` is false.
        trace: filled for the block's chunks when given.
        values: false runs the rule with zero values: from the identity this gives ``A``.
    """
    chunk, (heads, group) = chunks.layout.chunk, chunks.heads
    width = state.shape[-1]
    # Every view that can be taken once is: on CPU the views of a step would cost as much as its
    # smaller operations.
    qk, solve = chunks.qk.flatten(0, 1), chunks.solve.flatten(0, 2)
    keys, keys_t = qk[:, chunk:], qk[:, chunk:].mT
    state_flat = state.flatten(3).flatten(0, 1)
    v, enter, beta = (
        chunks.v.permute(0, 2, 3, 1, 4),
        chunks.enter[..., None],
        chunks.beta[..., None],
    )
    leave, whole = chunks.leave.transpose(2, 3)[..., None], chunks.whole[:, :, None, :, None]
    for a, b, row in block.pieces:
        count = b - a
        s, flat = state[row : row + count], state_flat[row * heads : (row + count) * heads]
        per_head = slice(a * heads, b * heads)
        x = s.new_empty(count, heads, group, chunk, width)
        if trace is None:
            u = torch.empty_like(x)
            carried = torch.bmm(keys[per_head], flat).view(count, heads, chunk, group, width)
        else:
            here = slice(a - block.start, b - block.start)
            if trace.states is not None:
                trace.states[here] = s
            u, both = trace.update[here], trace.carried[here]
            out = both.view(count * heads, 2 * chunk, group * width)
            torch.bmm(qk[per_head], flat, out=out)
            carried = both[:, :, chunk:]
        carried = carried.transpose(2, 3)
        if values:
            torch.addcmul(v[a:b], carried, enter[a:b], value=-1.0, out=x).mul_(beta[a:b])
        else:
            torch.mul(carried, enter[a:b], out=x).mul_(-beta[a:b])
        rows = (count * heads * group, chunk, width)
        torch.bmm(solve[a * heads * group : b * heads * group], x.view(rows), out=u.view(rows))
        leaving = s.new_empty(count, heads, chunk, group, width)
        torch.mul(u.transpose(2, 3), leave[a:b], out=leaving)
        s.mul_(whole[a:b])
        flat.baddbmm_(keys_t[per_head], leaving.view(count * heads, chunk, group * width))


def _new_trace(chunks: Chunks, num: int, keep_states: bool) -> _Trace:
    chunk, (heads, group) = chunks.layout.chunk, chunks.heads
    key_dim, value_dim = chunks.qk.shape[3], chunks.v.shape[4]
    new = chunks.qk.new_empty
    return _Trace(
        carried=new(num, heads, 2 * chunk, group, value_dim),
        update=new(num, heads, group, chunk, value_dim),
        states=new(num, heads, key_dim, group, value_dim) if keep_states else None,
    )


def _rows(trace: _Trace, a: int, b: int) -> _Trace:
    states = None if trace.states is None else trace.states[a:b]
    return _Trace(trace.carried[a:b], trace.update[a:b], states)


def _sorted_state(chunks: Chunks, state: Tensor | None) -> Tensor:
    """``[N, HV, K, V]`` (``None`` is zero) as a new ``[N, H, K, G, V]`` in step order."""
    heads, group = chunks.heads
    shape = (len(chunks.layout.order), heads, chunks.qk.shape[3], group, chunks.v.shape[4])
    if state is None:
        return chunks.qk.new_zeros(shape)
    rows = state.to(chunks.qk.dtype).unflatten(1, (heads, group)).transpose(2, 3)
    result = chunks.qk.new_empty(shape)
    return torch.index_select(rows, 0, chunks.layout.order.on(state.device), out=result)


def _segment_state(chunks: Chunks, state: Tensor) -> Tensor:
    """``[N, H, K, G, X]`` in step order as a new ``[N, HV, K, X]`` in segment order."""
    rows = state.transpose(2, 3).flatten(1, 2)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    return result.index_copy_(0, chunks.layout.order.on(state.device), rows)


def _weights(chunks: Chunks, a: int, b: int) -> Tensor:
    """``(q k^T) D`` of chunks ``a:b`` as ``[(b - a) H G, C, C]``."""
    chunk = chunks.layout.chunk
    return (chunks.decay[a:b] * chunks.gram[a:b, :, None, :chunk]).flatten(0, 2)


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, segments: Segments
) -> Chunks:
    """Everything of the forward pass that does not depend on a state.

    Args:
        q: ``[1, T, H, K]``, any float dtype; ``T`` is ``segments.num_tokens`` and may be 0.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``, ``HV`` a multiple of ``H``.
        g: ``[1, T, HV]``, natural log of the decay, ``<= 0``.
        beta: ``[1, T, HV]``.
        scale: factor on the output.
        segments: where each segment starts.

    Returns:
        An opaque value for `summarize` and `forward`.
    """
    with _exact(q.device):
        return prepare_chunks(q, k, v, g, beta, scale, segments)


def summarize(fwd: Chunks, wants: HostTable | None = None) -> tuple[Tensor, Tensor]:
    """The summary of each segment: ``S_out = A S_in + b``.

    Args:
        fwd: from `prepare_forward`.
        wants: ``[N]`` what will be read of each segment, as in
            :mod:`megatron.linear_cp.segments`; None means everything.

    Returns:
        ``A [N, HV, K, K]`` and ``b [N, HV, K, V]``; what is not wanted is undefined.
    """
    with _exact(fwd.qk.device):
        offset = _sorted_state(fwd, None)
        key_dim, group = fwd.qk.shape[3], offset.shape[3]
        for block in narrowed(fwd, wants, WANTS_OFFSET):
            _advance(fwd, block, offset)
        blocks = narrowed(fwd, wants, WANTS_BOTH)
        if not blocks:
            offset = _segment_state(fwd, offset)
            return offset.new_empty(*offset.shape[:2], key_dim, key_dim), offset
        eye = torch.eye(key_dim, dtype=offset.dtype, device=offset.device)
        transition = eye[:, None].repeat(*offset.shape[:2], 1, group, 1)
        for block in blocks:
            _advance(fwd, block, transition, values=False)
        return _segment_state(fwd, transition), _segment_state(fwd, offset)


def forward_ahead(fwd: Chunks) -> None:
    """Nothing: what :func:`forward` computes, each chunk needs the state before it for."""


def forward(fwd: Chunks, initial_state: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs of every segment from its entry state.

    Args:
        fwd: from `prepare_forward`.
        initial_state: ``[N, HV, K, V]`` or ``None`` for zeros.

    Returns:
        ``o [1, T, HV, V]`` in the dtype of ``v``, and the residual: everything that backward needs
        where that is small and on CPU, else nothing, and backward recomputes from the inputs.
    """
    with _exact(fwd.qk.device):
        chunk, (heads, group) = fwd.layout.chunk, fwd.heads
        state = _sorted_state(fwd, initial_state)
        keep = _is_small(fwd)
        largest = max((block.stop - block.start for block in fwd.blocks), default=0)
        scratch = _new_trace(fwd, fwd.layout.num_chunks if keep else largest, keep_states=keep)
        o = fwd.qk.new_empty(fwd.v.shape)
        for block in fwd.blocks:
            a, b = block.start, block.stop
            trace = _rows(scratch, a, b) if keep else _rows(scratch, 0, b - a)
            _advance(fwd, block, state, trace)
            local = torch.bmm(_weights(fwd, a, b), trace.update.flatten(0, 2))
            torch.addcmul(
                local.view(b - a, heads, group, chunk, -1).permute(0, 3, 1, 2, 4),
                trace.carried[:, :, :chunk].transpose(1, 2),
                fwd.enter[a:b].permute(0, 3, 1, 2)[..., None],
                out=o[a:b],
            ).mul_(fwd.scale)
        residual: tuple[Tensor, ...] = ()
        if keep:
            assert scratch.states is not None
            residual = (*fwd.tensors(), scratch.carried, scratch.update, scratch.states)
        return from_chunks(o.flatten(2, 3), fwd.layout, fwd.value_dtype), residual


def _is_small(fwd: Chunks) -> bool:
    """Whether what backward would recompute is better kept: on CPU, while it takes little room."""
    if fwd.qk.device.type != "cpu":
        return False
    group, value_dim = fwd.v.shape[3:]
    states = fwd.qk.numel() // (2 * fwd.layout.chunk) * group * value_dim
    elements = sum(x.numel() for x in fwd.tensors()) + 3 * fwd.v.numel() + states
    return elements * fwd.qk.element_size() <= KEEP_BYTES


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    segments: Segments,
    residual: tuple[Tensor, ...],
    initial_state: Tensor | None,
    do: Tensor,
) -> _Backward:
    """Take what the gradients need from ``forward``, or run its recurrence again.

    Args:
        q: as given to `prepare_forward`, like all up to ``segments``.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        g: ``[1, T, HV]``.
        beta: ``[1, T, HV]``.
        scale: factor on the output.
        segments: where each segment starts.
        residual: from `forward`.
        initial_state: as given to `forward`.
        do: ``[1, T, HV, V]``, gradient of ``o``.

    Returns:
        An opaque value for `backward_summarize` and `backward`.
    """
    with _exact(q.device):
        if residual:
            chunks = restore_chunks(residual[:-3], scale, v.dtype, segments)
            trace = _Trace(*residual[-3:])
        else:
            chunks = prepare_chunks(q, k, v, g, beta, scale, segments)
            trace = _new_trace(chunks, chunks.layout.num_chunks, keep_states=True)
            state = _sorted_state(chunks, initial_state)
            for block in chunks.blocks:
                _advance(chunks, block, state, _rows(trace, block.start, block.stop))
        do_rows = to_chunks(do, chunks.layout, chunks.qk.dtype).unflatten(2, chunks.heads)
        dtypes = (q.dtype, k.dtype, v.dtype, g.dtype, beta.dtype)
        return _Backward(chunks, trace, dtypes, do_rows)


def _new_scratch(bwd: _Backward) -> _Scratch:
    num = max((block.stop - block.start for block in bwd.chunks.blocks), default=0)
    trace = _rows(bwd.trace, 0, num)
    n, heads, chunk2, group, value_dim = trace.carried.shape
    assert trace.states is not None
    return _Scratch(
        do=torch.empty_like(trace.update),
        dx=torch.empty_like(trace.update),
        dcarried=torch.empty_like(trace.carried),
        carried_back=trace.update.new_empty(n, heads, chunk2 // 2, group, value_dim),
        dstates=torch.empty_like(trace.states),
    )


def _retreat(bwd: _Backward, block: Block, dstate: Tensor, scratch: _Scratch) -> _Scratch:
    """Run ``dstate [N, H, K, G, V]`` (rows in step order) in place back through one block.

    Returns:
        The rows of ``scratch`` that belong to the block, filled.
    """
    chunks, start, stop = bwd.chunks, block.start, block.stop
    chunk, (heads, group) = chunks.layout.chunk, chunks.heads
    width = heads * group
    part = _Scratch(*(x[: stop - start] for x in scratch))
    torch.mul(bwd.do[start:stop].permute(0, 2, 3, 1, 4), chunks.scale, out=part.do)
    # Gradient of u from the outputs of its own chunk.
    local = torch.bmm(_weights(chunks, start, stop).mT, part.do.flatten(0, 2)).view_as(part.do)
    enter = chunks.enter[start:stop].transpose(2, 3)[..., None]
    torch.mul(part.do.transpose(2, 3), enter, out=part.dcarried[:, :, :chunk])
    factor = -enter * chunks.beta[start:stop].transpose(2, 3)[..., None]
    qk_t, keys = chunks.qk.flatten(0, 1).mT, chunks.qk[:, :, chunk:].flatten(0, 1)
    solve_t = chunks.solve.flatten(0, 2).mT
    dstate_flat = dstate.flatten(3).flatten(0, 1)
    leave, whole = chunks.leave[..., None], chunks.whole[:, :, None, :, None]
    for a, b, row in reversed(block.pieces):
        count, here = b - a, slice(a - start, b - start)
        ds, flat = dstate[row : row + count], dstate_flat[row * heads : (row + count) * heads]
        per_head, per_value_head = slice(a * heads, b * heads), slice(a * width, b * width)
        part.dstates[here] = ds
        back, dx, dcarried = part.carried_back[here], part.dx[here], part.dcarried[here]
        torch.bmm(keys[per_head], flat, out=back.view(count * heads, chunk, -1))
        du = local[here].addcmul_(back.transpose(2, 3), leave[a:b]).view(count * width, chunk, -1)
        torch.bmm(solve_t[per_value_head], du, out=dx.view(du.shape))
        torch.mul(dx.transpose(2, 3), factor[here], out=dcarried[:, :, chunk:])
        ds.mul_(whole[a:b])
        flat.baddbmm_(qk_t[per_head], dcarried.view(count * heads, 2 * chunk, -1))
    return part


def backward_summarize(bwd: _Backward, wants: HostTable | None = None) -> Tensor:
    """``c [N, HV, K, V]``: gradient of each entry state when no gradient enters from the exit.

    With a gradient ``dS_out`` at the exit, the gradient at the entry is ``A^T dS_out + c``.

    Args:
        bwd: from `prepare_backward`.
        wants: as in `summarize`; what is not wanted is undefined.
    """
    with _exact(bwd.do.device):
        dstate, scratch = _sorted_state(bwd.chunks, None), _new_scratch(bwd)
        for block in reversed(narrowed(bwd.chunks, wants, WANTS_OFFSET)):
            _retreat(bwd, block, dstate, scratch)
        return _segment_state(bwd.chunks, dstate)


def backward_ahead(bwd: _Backward) -> None:
    """Nothing: see :func:`forward_ahead`."""


def backward(
    bwd: _Backward, final_state_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs.

    Args:
        bwd: from `prepare_backward`.
        final_state_grad: ``[N, HV, K, V]``, gradient of each segment's exit state, or ``None``
            for zeros.

    Returns:
        ``dq, dk, dv, dg, dbeta``, each in the shape and dtype of its input.
    """
    with _exact(bwd.do.device):
        chunks = bwd.chunks
        layout, (heads, group) = chunks.layout, chunks.heads
        num, chunk = layout.num_chunks, layout.chunk
        grads = _Grads(
            qk=torch.empty_like(chunks.qk),
            v=torch.empty_like(chunks.v, memory_format=torch.contiguous_format),
            g=chunks.beta.new_empty(num, chunk, heads, group),
            beta=chunks.beta.new_empty(num, chunk, heads, group),
        )
        dstate, scratch = _sorted_state(chunks, final_state_grad), _new_scratch(bwd)
        for block in reversed(chunks.blocks):
            _write_grads(bwd, block, _retreat(bwd, block, dstate, scratch), grads)
        dq, dk = grads.qk[:, :, :chunk].transpose(1, 2), grads.qk[:, :, chunk:].transpose(1, 2)
        rows = (dq, dk, *(x.flatten(2, 3) for x in grads[1:]))
        dq, dk, dv, dg, dbeta = (
            from_chunks(x, layout, dtype) for x, dtype in zip(rows, bwd.dtypes, strict=True)
        )
        return dq, dk, dv, dg, dbeta


class _Grads(NamedTuple):
    qk: Tensor  # [n, H, 2C, K]
    v: Tensor  # [n, C, H, G, V]
    g: Tensor  # [n, C, H, G]
    beta: Tensor  # [n, C, H, G]


def _write_grads(bwd: _Backward, block: Block, part: _Scratch, grads: _Grads) -> None:
    """The gradients of one block's inputs, once `_retreat` has been through it."""
    a, b = block.start, block.stop
    chunks, trace = bwd.chunks, _rows(bwd.trace, a, b)
    chunk = chunks.layout.chunk
    u, do, dx = trace.update, part.do, part.dx
    beta, enter, decay = chunks.beta[a:b], chunks.enter[a:b], chunks.decay[a:b]
    qk, gram = chunks.qk[a:b].flatten(0, 1), chunks.gram[a:b]
    assert trace.states is not None
    # Gradients of the weights (q k^T) D and, with its sign turned, of L / beta, both times D.
    pairs_q = torch.bmm(do.flatten(0, 2), u.flatten(0, 2).mT).view_as(decay).mul_(decay)
    pairs_k = torch.bmm(dx.flatten(0, 2), u.flatten(0, 2).mT).view_as(decay)
    pairs_k.mul_(decay).tril_(-1)
    dgram = torch.cat([pairs_q.sum(2), (pairs_k * -beta[..., None]).sum(2)], dim=2).flatten(0, 1)

    leaving = torch.empty_like(part.carried_back)
    torch.mul(u.transpose(2, 3), chunks.leave[a:b].transpose(2, 3)[..., None], out=leaving)
    dstates = part.dstates.flatten(3).flatten(0, 1)
    states = trace.states.flatten(3).flatten(0, 1)
    dqk = grads.qk[a:b].flatten(0, 1)
    torch.bmm(part.dcarried.flatten(3).flatten(0, 1), states.mT, out=dqk)
    dqk.baddbmm_(dgram, qk[:, chunk:])
    dk = torch.bmm(leaving.flatten(3).flatten(0, 1), dstates.mT).baddbmm_(dgram.mT, qk)
    dqk[:, chunk:] += dk

    # The decay between tokens j < i counts for every g_t with j < t <= i. Summing those pairs
    # directly leaves out what would cancel: the diagonal, and pairs on one side of t.
    later = torch.ones(chunk, chunk, dtype=dqk.dtype, device=dqk.device).triu_(1)  # i < t
    pairs_q.mul_(gram[:, :, None, :chunk])
    pairs_k.mul_(gram[:, :, None, chunk:])
    dbeta = pairs_k.sum(-1).neg_()
    pairs_q.addcmul_(pairs_k, beta[..., None], value=-1.0)
    dgate = torch.matmul(pairs_q.view(-1, chunk), later).view_as(pairs_q).tril_().sum(-2)
    # From the entry of the chunk to i: every t <= i. From i to its exit: every t > i.
    carried = trace.carried.transpose(2, 3)
    entry_q = (do * carried[..., :chunk, :]).sum(-1).mul_(enter)
    entry_k = (dx * carried[..., chunk:, :]).sum(-1).mul_(enter)
    dbeta.sub_(entry_k)
    dgate += torch.matmul(entry_q.addcmul_(entry_k, beta, value=-1.0), 1.0 - later)
    exits = (part.carried_back * leaving).sum(-1).transpose(2, 3)
    dgate += torch.matmul(exits, later)
    crossing = (trace.states * part.dstates).sum((2, 4)).mul_(chunks.whole[a:b])
    dgate += crossing[..., None]
    grads.g[a:b] = dgate.permute(0, 3, 1, 2)

    dbeta += (dx * chunks.v[a:b].permute(0, 2, 3, 1, 4)).sum(-1)
    grads.beta[a:b] = dbeta.permute(0, 3, 1, 2)
    torch.mul(dx, beta[..., None], out=grads.v[a:b].permute(0, 2, 3, 1, 4))
