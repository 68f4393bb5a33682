# SPDX-License-Identifier: Apache-2.0
"""Inputs of the gated delta rule in chunks: where tokens go, and all that needs no state.

Tokens are gathered into chunks in *step-major* order: segments sorted by their number of chunks,
longest first, then chunk 0 of every segment, chunk 1 of those that still run, and so on. A step of
the recurrence is then a batched product over a slice. Rows that only pad a chunk are zero in q, k,
v, g and beta, which makes them the identity.

The letters of shapes and the formulas are those of :mod:`megatron.linear_cp.ops.torch_rule`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.linear_cp.segments import HostTable, Segments

MAX_CHUNK = 64
INVERSE_BLOCK = 8
# Elements of one temporary: a few of this size stay in a CPU core's cache (measured).
CPU_BLOCK_ELEMENTS = 1 << 18


class Layout(NamedTuple):
    """Where the tokens of a `Segments` lie in chunks, and which chunks a step advances."""

    chunk: int
    num_chunks: int
    counts: tuple[int, ...]  # segments that still run at each step
    order: HostTable  # [N] segments, most chunks first
    slots: HostTable | None  # [T] row of each token in [num_chunks * chunk]; None: the same order


def _build_layout(segments: Segments) -> Layout:
    lengths, starts = segments.lengths, segments.boundaries[:-1]
    longest = int(lengths.max(initial=1))
    chunk = min(MAX_CHUNK, 1 << (longest - 1).bit_length())
    chunks = -(-lengths // chunk)
    order = np.argsort(-chunks, kind="stable")
    steps = np.arange(chunks.max(initial=0))
    counts = len(chunks) - np.searchsorted(np.sort(chunks), steps, side="right")
    first = np.cumsum(counts) - counts  # first chunk of every step
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    offset = np.arange(segments.num_tokens) - np.repeat(starts, lengths)
    index = first[offset // chunk] + np.repeat(rank, lengths)
    slots = index * chunk + offset % chunk
    same = len(slots) == chunks.sum() * chunk and bool(np.all(slots == np.arange(len(slots))))
    return Layout(
        chunk,
        int(chunks.sum()),
        tuple(counts.tolist()),
        HostTable(order),
        None if same else HostTable(slots),
    )


def _layout_of(segments: Segments) -> Layout:
    return segments.cached("torch_rule", lambda: _build_layout(segments))


def to_chunks(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """``[1, T, ...]`` to ``[n, C, ...]`` in ``dtype``; a view where tokens are in order."""
    shape = (layout.num_chunks, layout.chunk, *x.shape[2:])
    if layout.slots is None:
        return x[0].to(dtype).reshape(shape)
    rows = x.new_zeros(layout.num_chunks * layout.chunk, *x.shape[2:], dtype=dtype)
    return rows.index_copy_(0, layout.slots.on(x.device), x[0].to(dtype)).view(shape)


def from_chunks(x: Tensor, layout: Layout, dtype: torch.dtype) -> Tensor:
    """``[n, C, ...]`` to ``[1, T, ...]`` in ``dtype``."""
    rows = x.flatten(0, 1)
    if layout.slots is not None:
        rows = rows.index_select(0, layout.slots.on(x.device))
    return rows.to(dtype)[None]


class Block(NamedTuple):
    """Chunks ``start:stop``, worked on together while they lie in the cache."""

    start: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]  # (a, b, row): chunks a:b advance states row...


def _blocks(layout: Layout, elements: int, device: torch.device) -> tuple[Block, ...]:
    """Cut the chunks, in time order, into blocks that stay in a CPU core's cache.

    Args:
        layout: of the segments.
        elements: of one temporary, per chunk.
        device: elsewhere than on CPU, launches cost more than cache misses: one block.
    """
    size = max(1, CPU_BLOCK_ELEMENTS // elements) if device.type == "cpu" else layout.num_chunks
    blocks: list[Block] = []
    pieces: list[tuple[int, int, int]] = []
    start = first = 0
    for count in layout.counts:
        for row in range(0, count, size):
            a, b = first + row, first + min(row + size, count)
            if pieces and b - start > size:
                blocks.append(Block(start, a, tuple(pieces)))
                pieces, start = [], a
            pieces.append((a, b, row))
        first += count
    if pieces:
        blocks.append(Block(start, first, tuple(pieces)))
    return tuple(blocks)


def narrowed(chunks: "Chunks", wants: HostTable | None, level: int) -> tuple[Block, ...]:
    """The blocks of ``chunks``, cut to the segments of which ``level`` or more is wanted.

    Those between the first and the last of them in step order are kept as well: a step stays one
    slice.
    """
    if wants is None:
        return chunks.blocks
    wanted = np.flatnonzero(wants.array[chunks.layout.order.array] >= level)
    if len(wanted) in (0, len(wants)):
        return chunks.blocks if len(wanted) else ()
    first, last = int(wanted[0]), int(wanted[-1]) + 1
    blocks: list[Block] = []
    for block in chunks.blocks:
        run: list[tuple[int, int, int]] = []
        for a, b, row in block.pieces:
            start, stop = max(row, first), min(row + b - a, last)
            if start >= stop:
                continue
            piece = (a + start - row, a + stop - row, start)
            if run and run[-1][1] != piece[0]:
                blocks.append(Block(run[0][0], run[-1][1], tuple(run)))
                run = []
            run.append(piece)
        if run:
            blocks.append(Block(run[0][0], run[-1][1], tuple(run)))
    return tuple(blocks)


def _inverse_(lower: Tensor) -> Tensor:
    """Replace lower triangular ``L [B, C, C]`` (diagonal ignored) by ``(I + strict(L))^-1``.

    Small diagonal blocks by forward substitution, then ``T21 = -T22 L21 T11`` level by level. The
    product form ``(I - L)(I + L^2)(I + L^4)...`` is faster and wrong: with nearly parallel keys
    its factors grow like binomials and cancel.
    """
    batch, chunk, _ = lower.shape
    base = min(INVERSE_BLOCK, chunk)
    count = chunk // base
    diagonal = lower.view(batch, count, base, count, base).diagonal(dim1=1, dim2=3)
    small = diagonal.permute(1, 2, 0, 3).contiguous()  # [base, base, B, count]: batch innermost
    inverse = torch.zeros_like(small)
    for i in range(base):
        inverse[i, i] = 1.0
        for j in range(i):
            inverse[i, : j + 1].addcmul_(small[i, j], inverse[j, : j + 1], value=-1.0)
    diagonal.copy_(inverse.permute(2, 0, 1, 3))
    size = base
    while size < chunk:
        for start in range(0, chunk, 2 * size):
            first, second = slice(start, start + size), slice(start + size, start + 2 * size)
            corner = torch.bmm(lower[:, second, first], lower[:, first, first])
            corner = torch.bmm(lower[:, second, second], corner)
            torch.neg(corner, out=lower[:, second, first])
        size *= 2
    return lower


class Chunks(NamedTuple):
    """What both passes need of the inputs; float64 for float64 inputs, else float32."""

    layout: Layout
    scale: float
    heads: tuple[int, int]  # H, G
    value_dtype: torch.dtype
    qk: Tensor  # [n, H, 2C, K]: q, then k
    v: Tensor  # [n, C, H, G, V]
    beta: Tensor  # [n, H, G, C]
    enter: Tensor  # E [n, H, G, C]
    leave: Tensor  # F [n, H, G, C]
    whole: Tensor  # E_C [n, H, G]
    decay: Tensor  # D [n, H, G, C, C], zero above the diagonal
    gram: Tensor  # [n, H, 2C, C]: q k^T, then k k^T
    solve: Tensor  # T [n, H, G, C, C]
    blocks: tuple[Block, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything computed from the inputs, for :func:`restore_chunks`."""
        return (
            self.qk,
            self.v,
            self.beta,
            self.enter,
            self.leave,
            self.whole,
            self.decay,
            self.gram,
            self.solve,
        )

    @property
    def k(self) -> Tensor:
        """``[n, H, C, K]``, a view."""
        return self.qk[:, :, self.layout.chunk :]


def restore_chunks(
    tensors: tuple[Tensor, ...], scale: float, value_dtype: torch.dtype, segments: Segments
) -> Chunks:
    """The :class:`Chunks` whose ``tensors()`` these are, of the same segments."""
    qk, v, beta, enter, leave, whole, decay, gram, solve = tensors
    layout = _layout_of(segments)
    heads, group = beta.shape[1:3]
    return Chunks(
        layout=layout,
        scale=scale,
        heads=(heads, group),
        value_dtype=value_dtype,
        qk=qk,
        v=v,
        beta=beta,
        enter=enter,
        leave=leave,
        whole=whole,
        decay=decay,
        gram=gram,
        solve=solve,
        blocks=_blocks_of(layout, (heads, group), v.shape[4], qk.device),
    )


def _blocks_of(
    layout: Layout, heads: tuple[int, int], value_dim: int, device: torch.device
) -> tuple[Block, ...]:
    return _blocks(
        layout, heads[0] * heads[1] * layout.chunk * max(layout.chunk, value_dim), device
    )


def _write_decay(out: Tensor, high: Tensor, low: Tensor) -> None:
    """``out = D`` of the cumulative log decays ``high + low``, both ``[..., C]``.

    One rounded number would not do: after one strong decay ``G`` is large, and its rounding would
    reach every weak decay behind it.
    """
    torch.sub(high[..., :, None], high[..., None, :], out=out)
    out.add_(low[..., :, None]).sub_(low[..., None, :])
    # Masked before exp: above the diagonal the difference is positive and may overflow. Zero, not
    # -inf, because exp of -inf takes a slow path on CPU.
    out.tril_().exp_().tril_()


def prepare_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, segments: Segments
) -> Chunks:
    """Gather the inputs into chunks and compute what needs no state.

    Args:
        q: ``[1, T, H, K]``.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        g: ``[1, T, HV]``.
        beta: ``[1, T, HV]``.
        scale: kept for later.
        segments: where each segment starts.
    """
    layout = _layout_of(segments)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num, chunk = layout.num_chunks, layout.chunk
    heads, key_dim = k.shape[2], k.shape[3]
    group = v.shape[2] // heads
    qk = q.new_empty(num, heads, 2 * chunk, key_dim, dtype=dtype)
    qk[:, :, :chunk] = to_chunks(q, layout, dtype).transpose(1, 2)
    qk[:, :, chunk:] = to_chunks(k, layout, dtype).transpose(1, 2)

    def per_token(x: Tensor, to: torch.dtype) -> Tensor:
        return to_chunks(x, layout, to).view(num, chunk, heads, group).permute(0, 2, 3, 1)

    gate = per_token(g, torch.float64).cumsum(-1)
    beta = per_token(beta, dtype).contiguous()
    v_rows = to_chunks(v, layout, dtype).unflatten(2, (heads, group))
    gram = torch.bmm(qk.flatten(0, 1), qk[:, :, chunk:].flatten(0, 1).mT).unflatten(0, (num, heads))
    decay = qk.new_empty(num, heads, group, chunk, chunk)
    solve = torch.empty_like(decay)
    high = gate.to(dtype)
    low = (gate - high).to(dtype)
    blocks = _blocks_of(layout, (heads, group), v.shape[3], q.device)
    for a, b, _ in blocks:
        _write_decay(decay[a:b], high[a:b], low[a:b])
        torch.mul(decay[a:b], gram[a:b, :, None, chunk:], out=solve[a:b]).mul_(beta[a:b, ..., None])
    _inverse_(solve.flatten(0, 2))
    return Chunks(
        layout=layout,
        scale=scale,
        heads=(heads, group),
        value_dtype=v.dtype,
        qk=qk,
        v=v_rows,
        beta=beta,
        enter=gate.exp().to(dtype),
        leave=(gate[..., -1:] - gate).exp().to(dtype),
        whole=gate[..., -1].exp().to(dtype),
        decay=decay,
        gram=gram,
        solve=solve,
        blocks=blocks,
    )
