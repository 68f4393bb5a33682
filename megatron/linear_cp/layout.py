# SPDX-License-Identifier: Apache-2.0
"""Which global token each context-parallel rank stores, and in which order. Pure index maths.

``zigzag`` is Megatron's load-balanced layout: every sequence is cut into ``2 * cp_size`` equal
chunks and rank ``r`` stores chunk ``r``, then chunk ``2 * cp_size - 1 - r``, of every sequence,
sequence after sequence. ``contiguous`` cuts the flat packed buffer, not each sequence, into
``cp_size`` equal spans and rank ``r`` stores span ``r``. Dense (SBHD) input has no flat buffer
across the batch: there ``contiguous`` cuts every sample into ``cp_size`` spans.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.linear_cp.segments import IntArray

LAYOUTS = ("zigzag", "contiguous")
_MAX_TOKENS = 2**40
# On two H200s, one sequence (32 heads, bf16), a layer with its run on a rank as two segments takes
# 0.90 of the time at 65,536 tokens a rank and 0.91 at 32,768; at 16,384 the state that it exchanges
# more costs what it saves and more (1.04). Beside eight times as many tokens there is enough to do.
LONG_RUN, LONG_SHARE = 16384, 8
_CHUNK = 64  # tokens that the kernels of the rule work on together


@dataclass(frozen=True)
class TokenRanges:
    """The segments of one micro-batch on every rank, rank after rank, in storage order.

    A segment is a run of consecutive tokens of one sequence on one rank. Kernels walk along a
    segment, so that one long run leaves most of a GPU idle: of a sequence that crosses ranks, a run
    over ``LONG_RUN`` tokens and over 1 / ``LONG_SHARE`` of its rank's is two segments. Those of
    zigzag are its two chunks, which touch on the last rank only. All columns are ``[N]`` int64 on
    the host.

    Attributes:
        sequence: index of the sequence the segment belongs to.
        start: global position of its first token in the packed buffer.
        stop: global position after its last token.
        rank: context-parallel rank that stores it.
        offset: position of its first token in that rank's local storage.
    """

    sequence: IntArray
    start: IntArray
    stop: IntArray
    rank: IntArray
    offset: IntArray


def check_layout(layout: str) -> None:
    """Raise ``ValueError`` unless ``layout`` is one of ``LAYOUTS``."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")


def check_boundaries(cu_seqlens: npt.ArrayLike) -> IntArray:
    """Return ``[S + 1]`` int64 sequence boundaries after checking them.

    Raises:
        ValueError: unless the boundaries are whole numbers that start at 0, never decrease and stay
            below 2^40, so that products of them fit 64 bits.
            Equal neighbours (sequences of no token) are legal anywhere.
    """
    values = np.asarray(cu_seqlens)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(
            f"cu_seqlens must be one row of at least two boundaries, got shape {values.shape}"
        )
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"cu_seqlens must hold integers, got dtype {values.dtype}")
    if values.max() > _MAX_TOKENS:
        raise ValueError(f"cu_seqlens may not exceed {_MAX_TOKENS}, got {values.max()}")
    boundaries = values.astype(np.int64)
    if boundaries[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {boundaries[0]}")
    falls = np.flatnonzero(np.diff(boundaries) < 0)
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"cu_seqlens must not be decreasing, got {boundaries[i]} then {boundaries[i + 1]} "
            f"at sequence {i}"
        )
    return boundaries


def check_divisible(cu_seqlens: IntArray, cp_size: int, layout: str) -> None:
    """Raise ``ValueError`` unless ``layout`` can cut these boundaries over ``cp_size`` ranks.

    ``zigzag`` needs every length divisible by ``2 * cp_size``; ``contiguous`` needs only the total
    divisible by ``cp_size``. One rank needs nothing.
    """
    if cp_size == 1:
        return
    if layout == "contiguous":
        total = int(cu_seqlens[-1])
        if total % cp_size:
            raise ValueError(
                f"contiguous layout: the total of {total} tokens does not divide by the "
                f"context-parallel size {cp_size}; pad the packed buffer to a multiple of {cp_size}"
            )
        return
    lengths = np.diff(cu_seqlens)
    bad = np.flatnonzero(lengths % (2 * cp_size))
    if bad.size:
        named = ", ".join(f"sequence {i} of length {lengths[i]}" for i in bad[:4])
        more = f" and {bad.size - 4} more" if bad.size > 4 else ""
        raise ValueError(
            f"zigzag layout: {named}{more} does not divide by 2 * cp_size = {2 * cp_size}; pad "
            f"every sequence to a multiple of {2 * cp_size} (was it packed for another CP size?)"
        )


def token_ranges(cu_seqlens: npt.ArrayLike, cp_size: int, layout: str) -> TokenRanges:
    """Segments of packed (THD) input on all ranks.

    Args:
        cu_seqlens: ``[S + 1]`` integer boundaries of the whole packed buffer, from 0.
        cp_size: number of context-parallel ranks, at least 1.
        layout: ``"zigzag"`` or ``"contiguous"``.

    Raises:
        ValueError: unknown layout, malformed boundaries, or lengths the layout cannot cut.
    """
    check_layout(layout)
    boundaries = check_boundaries(cu_seqlens)
    check_divisible(boundaries, cp_size, layout)
    if layout == "zigzag":
        return _zigzag(boundaries, cp_size)
    total = int(boundaries[-1])
    span = max(total // cp_size, 1)
    cuts = np.arange(cp_size + 1, dtype=np.int64) * (total // cp_size)
    points = np.unique(np.concatenate([boundaries, cuts]))
    start, stop = points[:-1], points[1:]
    # side="right" lands on the last of several equal boundaries: the sequence that has tokens.
    sequence = np.searchsorted(boundaries, start, side="right") - 1
    return _finish(*_halve_long(sequence, start, stop, start // span))


def dense_token_ranges(seq_len: int, batch: int, cp_size: int, layout: str) -> TokenRanges:
    """Segments of dense (SBHD) input on all ranks, samples stored one after another.

    Args:
        seq_len: global tokens of one sample.
        batch: samples in the micro-batch.
        cp_size: number of context-parallel ranks.
        layout: ``"zigzag"`` or ``"contiguous"``; both cut every sample.

    Raises:
        ValueError: unknown layout, or a length that the layout cannot cut.
    """
    check_layout(layout)
    if seq_len < 0 or batch < 1:
        raise ValueError(
            f"dense input needs a batch of at least 1 and no negative length, got {batch} samples "
            f"of {seq_len} tokens"
        )
    boundaries = np.arange(batch + 1, dtype=np.int64) * seq_len
    if layout == "zigzag":
        check_divisible(boundaries, cp_size, layout)
        return _zigzag(boundaries, cp_size)
    check_divisible(boundaries[:2], cp_size, layout)
    span = seq_len // cp_size
    rank, sequence = (a.ravel() for a in np.indices((cp_size, batch), dtype=np.int64))
    start = boundaries[sequence] + rank * span
    return _finish(*_halve_long(sequence, start, start + span, rank))


def mixed_token_ranges(boundaries: IntArray, cp_size: int, home: IntArray) -> TokenRanges:
    """Zigzag for some sequences of packed input, and others whole on one rank each.

    Args:
        boundaries: ``[S + 1]`` boundaries that zigzag can cut.
        cp_size: number of context-parallel ranks.
        home: ``[S]`` the rank that holds all of a sequence, or -1 for zigzag.

    Returns:
        Every rank stores its parts in the order of the sequences.
    """
    spread = _zigzag(boundaries, cp_size)
    stays = home[spread.sequence] < 0
    whole = np.flatnonzero((home >= 0) & (np.diff(boundaries) > 0))
    sequence = np.concatenate([spread.sequence[stays], whole])
    start = np.concatenate([spread.start[stays], boundaries[whole]])
    stop = np.concatenate([spread.stop[stays], boundaries[whole + 1]])
    rank = np.concatenate([spread.rank[stays], home[whole]])
    order = np.lexsort((start, sequence, rank))
    return _finish(sequence[order], start[order], stop[order], rank[order])


def shard_ranges(ranges: TokenRanges, shards: int, samples: int) -> TokenRanges:
    """The same tokens when every rank's storage is cut again, as sequence parallelism does.

    Args:
        ranges: of the context-parallel ranks.
        shards: tensor-parallel ranks that share one rank's tokens.
        samples: equal blocks of every rank's storage, each of which is cut (1 for packed input).

    Returns:
        Shard ``j`` of rank ``r`` is rank ``r * shards + j``; it stores its part of the first block,
        then of the second, and so on.

    Raises:
        ValueError: a rank's storage that does not divide.
    """
    pieces: list[IntArray] = []
    for rank in np.unique(ranges.rank):
        mine = ranges.rank == rank
        tokens = int((ranges.stop - ranges.start)[mine].sum())
        if tokens % (shards * samples):
            raise ValueError(
                f"context-parallel rank {rank} stores {tokens} tokens, which do not divide over "
                f"{shards} tensor-parallel ranks of {samples} samples each"
            )
        width = tokens // (shards * samples)
        offset = ranges.offset[mine]
        points = np.union1d(np.append(offset, tokens), np.arange(0, tokens + 1, width))
        first, last = points[:-1], points[1:]
        owner = np.searchsorted(offset, first, side="right") - 1
        start = ranges.start[mine][owner] + first - offset[owner]
        shard = rank * shards + first // width % shards
        pieces.append(
            np.stack([ranges.sequence[mine][owner], start, start + last - first, shard, first])
        )
    if not pieces:
        return ranges
    sequence, start, stop, shard, place = np.concatenate(pieces, axis=1)
    order = np.lexsort((place, shard))
    return _finish(sequence[order], start[order], stop[order], shard[order])


def rank_indices(ranges: TokenRanges, cp_rank: int) -> IntArray:
    """Global positions of the tokens that ``cp_rank`` stores, in storage order: ``[T]`` int64."""
    mine = ranges.rank == cp_rank
    return expand_runs(ranges.start[mine], ranges.stop[mine])


def expand_runs(start: IntArray, stop: IntArray) -> IntArray:
    """Every integer of the runs ``[start_i, stop_i)``, run after run."""
    lengths = stop - start
    total = int(lengths.sum())
    # Position inside its run = global counter minus the counter at which the run begins.
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(start, lengths) + np.arange(total, dtype=np.int64) - first


def _zigzag(boundaries: IntArray, cp_size: int) -> TokenRanges:
    chunk = np.diff(boundaries) // (2 * cp_size)
    if cp_size == 1:
        sequence = np.arange(len(boundaries) - 1, dtype=np.int64)
        return _finish(sequence, boundaries[:-1], boundaries[1:], np.zeros_like(sequence))
    shape = (cp_size, len(chunk), 2)
    rank, sequence, slot = (a.ravel() for a in np.indices(shape, dtype=np.int64))
    index = np.where(slot == 0, rank, 2 * cp_size - 1 - rank)
    start = boundaries[sequence] + index * chunk[sequence]
    stop = start + chunk[sequence]
    # The last rank's two chunks of a sequence touch: one run, unless it is long.
    one = (rank == cp_size - 1) & ~is_long_run(2 * chunk[sequence], int(boundaries[-1]) // cp_size)
    stop = np.where(one & (slot == 0), stop + chunk[sequence], stop)
    start = np.where(one & (slot == 1), stop, start)
    return _finish(sequence, start, stop, rank)


def is_long_run(length: IntArray, rank_tokens: int | IntArray) -> npt.NDArray[np.bool_]:
    """Whether a run of so many tokens, on a rank of so many, is worth two segments."""
    return (length > LONG_RUN) & (length * LONG_SHARE > rank_tokens)


def _halve_long(
    sequence: IntArray, start: IntArray, stop: IntArray, rank: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Cut every long run of a sequence that crosses ranks in two, between chunks of the kernels."""
    length = stop - start
    shared = np.bincount(sequence, minlength=1)[sequence] > 1
    rank_tokens = np.bincount(rank, weights=length, minlength=1)[rank].astype(np.int64)
    half = -(-length // (2 * _CHUNK)) * _CHUNK
    cut = start + np.where(shared & is_long_run(length, rank_tokens), half, 0)
    # A run that is not cut leaves one of its two pieces empty.
    return (
        np.repeat(sequence, 2),
        np.stack([start, cut], axis=1).ravel(),
        np.stack([cut, stop], axis=1).ravel(),
        np.repeat(rank, 2),
    )


def _finish(sequence: IntArray, start: IntArray, stop: IntArray, rank: IntArray) -> TokenRanges:
    """Drop empty runs and number each rank's storage."""
    full = stop > start
    sequence, start, stop, rank = sequence[full], start[full], stop[full], rank[full]
    end = np.cumsum(stop - start)
    before_rank = np.concatenate([[0], end])[np.searchsorted(rank, rank, side="left")]
    return TokenRanges(sequence, start, stop, rank, end - (stop - start) - before_rank)
