# SPDX-License-Identifier: Apache-2.0
"""Who sends which rows to whom: exchange routes derived from a table of token ranges.

Every rank builds the routes of a micro-batch from the same table, so both ends of each message
agree on its rows without asking each other. Rows of one message are ordered by the receiver's or
sender's local position; all tables live on the host and are copied to a device once.
"""

from dataclasses import dataclass

import numpy as np

from megatron.linear_cp.layout import TokenRanges, expand_runs, rank_indices
from megatron.linear_cp.permute import RowSums
from megatron.linear_cp.segments import WANTS_BOTH, WANTS_OFFSET, HostTable, IntArray


@dataclass(frozen=True)
class HaloRoute:
    """How each local segment gets the ``width - 1`` tokens before it (the conv halo).

    Attributes:
        crosses: whether any rank needs a token of another; the same on every rank.
        send_index: local tokens to send, grouped by destination; one token may go to several.
        send_splits: rows for each rank.
        recv_splits: rows from each rank.
        own_rows, own_index: rows of the halos ``[N * (width - 1)]`` that are local tokens, and
            which tokens.
        far_rows, far_index: rows of the halos that are received, and which received rows. Rows in
            neither lie before a sequence and are zero.
        received_uses: which rows of the halos each received row became.
        sent_tokens, sent_uses: local tokens that are in a halo anywhere, and for each of them the
            rows of ``[own_rows' gradients | gradients of the sent rows]`` that belong to it.
    """

    crosses: bool
    send_index: HostTable
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    own_rows: HostTable
    own_index: HostTable
    far_rows: HostTable
    far_index: HostTable
    received_uses: RowSums
    sent_tokens: HostTable
    sent_uses: RowSums


@dataclass(frozen=True)
class StateRoute:
    """How segment summaries reach the owner of their chain, and entry states come back.

    A chain is the segments of one sequence in time order; a unit is one head of a chain of more
    than one segment. Units of chains that cross ranks are dealt evenly over the ranks; a chain that
    stays on one rank is owned there. Position ``p`` of a unit of ``n`` segments sends ``(A, b)``
    if ``0 < p < n - 1`` ("middle"), ``b`` only if ``p == 0`` ("first"), nothing if ``p == n - 1``,
    and gets an entry state if ``p > 0``.

    Owned units are sorted by length, longest first, so that the units with a segment at position
    ``p`` are a prefix. "State rows" list the entry states of position 1, then 2, ...; "middle
    rows" the summaries in the same order. "Local rows" index ``[N * heads]``.

    Attributes:
        crosses: whether any chain spans ranks; the same on every rank. Without it, no collective.
        middle_send, first_send: local rows whose summaries leave, grouped by owner.
        middle_order, first_order: puts received summaries into owner order.
        state_send, state_recv: state rows that leave an owner; local rows they arrive at.
        state_order: puts gradients that came back along ``state_recv`` into state-row order.
        grad_send, grad_recv: state rows whose gradient leaves an owner for the segment before.
        units_at: ``units_at[p]`` owned units that have a position ``p + 1``.
        forward_wants, backward_wants: what of each local segment ``[N]`` is read, as
            :mod:`megatron.linear_cp.segments` spells it.
    """

    crosses: bool
    middle_send: HostTable
    middle_send_splits: tuple[int, ...]
    middle_recv_splits: tuple[int, ...]
    middle_order: HostTable
    first_send: HostTable
    first_send_splits: tuple[int, ...]
    first_recv_splits: tuple[int, ...]
    first_order: HostTable
    state_send: HostTable
    state_send_splits: tuple[int, ...]
    state_recv: HostTable
    state_recv_splits: tuple[int, ...]
    state_order: HostTable
    grad_send: HostTable
    grad_send_splits: tuple[int, ...]
    grad_recv: HostTable
    grad_recv_splits: tuple[int, ...]
    units_at: tuple[int, ...]
    forward_wants: HostTable
    backward_wants: HostTable

    @property
    def is_empty(self) -> bool:
        """No chain anywhere crosses ranks, and none here has a second segment."""
        return not self.crosses and not self.units_at

    def bytes_sent(self, rank: int, key_dim: int, value_dim: int, element_size: int = 4) -> int:
        """Bytes that ``rank`` (the one this route was built for) sends, forward and backward.

        Forward moves ``(A, b)`` or ``b`` to owners and entry states back; backward moves one
        ``[key_dim, value_dim]`` gradient each way. Nothing depends on the sequence lengths.
        """
        state = key_dim * value_dim

        def elsewhere(splits: tuple[int, ...]) -> int:
            return sum(splits) - splits[rank]

        elements = (
            elsewhere(self.middle_send_splits) * (key_dim * key_dim + state)
            + elsewhere(self.first_send_splits) * state
            + elsewhere(self.state_send_splits) * state
            + elsewhere(self.state_recv_splits) * state
            + elsewhere(self.grad_send_splits) * state
        )
        return elements * element_size


@dataclass(frozen=True)
class LayoutRoute:
    """How tokens move from one layout to another over the same ranks.

    Attributes:
        send_order: local tokens of the old layout, grouped by destination.
        send_inverse: its inverse.
        send_splits: rows for each rank.
        recv_splits: rows from each rank.
        recv_order: puts received rows into the new layout's storage order.
        recv_inverse: its inverse.
    """

    send_order: HostTable
    send_inverse: HostTable
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv_order: HostTable
    recv_inverse: HostTable


def build_layout_route(
    old: TokenRanges, new: TokenRanges, cp_rank: int, cp_size: int
) -> LayoutRoute:
    """Route from layout ``old`` to layout ``new`` of the same tokens; see :class:`LayoutRoute`."""
    (leaves_from, _), (arrives_at, place) = _homes(old), _homes(new)
    sent = rank_indices(old, cp_rank)
    send_order = np.lexsort((place[sent], arrives_at[sent]))
    received = rank_indices(new, cp_rank)
    # Rows arrive source by source, and from one source in the order of the new layout.
    arrival = np.lexsort((place[received], leaves_from[received]))
    return LayoutRoute(
        send_order=HostTable(send_order),
        send_inverse=HostTable(np.argsort(send_order)),
        send_splits=_splits(arrives_at[sent], cp_size),
        recv_splits=_splits(leaves_from[received], cp_size),
        recv_order=HostTable(np.argsort(arrival)),
        recv_inverse=HostTable(arrival),
    )


@dataclass(frozen=True)
class _Halo:
    """What each segment reads before its first token; ``[N, width - 1]`` but for ``by_start``.

    Attributes:
        by_start: segments in the order of their first tokens.
        wanted: the token that a segment reads at a tap.
        inside: whether it belongs to the segment's sequence.
        source, target: the rank that stores it, and the rank of the segment.
        position: where ``source`` stores it.
        remote: whether it is inside and stored elsewhere.
    """

    by_start: IntArray
    wanted: IntArray
    inside: np.ndarray
    source: IntArray
    target: IntArray
    position: IntArray
    remote: np.ndarray


def _halo(ranges: TokenRanges, boundaries: IntArray, width: int) -> _Halo:
    by_start = np.argsort(ranges.start, kind="stable")
    wanted = ranges.start[:, None] + np.arange(1 - width, 0, dtype=np.int64)[None, :]
    inside = wanted >= boundaries[ranges.sequence][:, None]
    holder = by_start[
        np.searchsorted(ranges.start[by_start], np.where(inside, wanted, 0), "right") - 1
    ]
    source = ranges.rank[holder]
    target = np.broadcast_to(ranges.rank[:, None], wanted.shape)
    return _Halo(
        by_start=by_start,
        wanted=wanted,
        inside=inside,
        source=source,
        target=target,
        position=ranges.offset[holder] + wanted - ranges.start[holder],
        remote=inside & (source != target),
    )


def build_halo_route(
    ranges: TokenRanges, boundaries: IntArray, cp_rank: int, cp_size: int, width: int
) -> HaloRoute:
    """Route of the conv halo for a kernel of ``width`` taps; see :class:`HaloRoute`."""
    halo = _halo(ranges, boundaries, width)
    by_start, wanted, inside, remote = halo.by_start, halo.wanted, halo.inside, halo.remote
    source, target, position = halo.source, halo.target, halo.position

    def unique_tokens(mine: np.ndarray, peer: IntArray) -> IntArray:
        """[M, 2] sorted distinct (peer, global token) pairs: a token is sent once per receiver."""
        pairs = np.stack([peer[mine], wanted[mine]], axis=1)
        return np.unique(pairs, axis=0) if len(pairs) else pairs

    sent = unique_tokens(remote & (source == cp_rank), target)
    received = unique_tokens(remote & (target == cp_rank), source)

    here = ranges.rank == cp_rank
    own = (inside[here] & ~remote[here]).ravel()
    own_index = position[here].ravel()[own]
    far = remote[here].ravel()
    # `received` is sorted by (source, token) and so is any key that keeps sources apart.
    stride = int(boundaries[-1]) + 1
    keys = received[:, 0] * stride + received[:, 1]
    wanted_keys = (source[here] * stride + wanted[here]).ravel()
    far_rows, far_index = np.flatnonzero(far), np.searchsorted(keys, wanted_keys[far])

    holds = by_start[np.searchsorted(ranges.start[by_start], sent[:, 1], "right") - 1]
    send_index = ranges.offset[holds] + sent[:, 1] - ranges.start[holds]
    tokens, use = np.unique(np.concatenate([own_index, send_index]), return_inverse=True)
    return HaloRoute(
        crosses=bool(remote.any()),
        send_index=HostTable(send_index),
        send_splits=_splits(sent[:, 0], cp_size),
        recv_splits=_splits(received[:, 0], cp_size),
        own_rows=HostTable(np.flatnonzero(own)),
        own_index=HostTable(own_index),
        far_rows=HostTable(far_rows),
        far_index=HostTable(far_index),
        received_uses=RowSums.build(far_index, len(received)),
        sent_tokens=HostTable(tokens),
        sent_uses=RowSums.build(use, len(tokens)),
    )


def halo_rows_by_rank(
    ranges: TokenRanges, boundaries: IntArray, cp_size: int, width: int
) -> tuple[IntArray, bool]:
    """Rows that every rank sends and gets back, ``[cp_size]``, and ``crosses``; see HaloRoute."""
    halo = _halo(ranges, boundaries, width)
    # A token is sent once to each rank that wants it.
    tokens = int(boundaries[-1]) + 1
    pairs = (halo.source * cp_size + halo.target) * tokens + halo.wanted
    source, target = np.divmod(np.unique(pairs[halo.remote]) // tokens, cp_size)
    rows = np.bincount(source, minlength=cp_size) + np.bincount(target, minlength=cp_size)
    return rows, bool(halo.remote.any())


@dataclass(frozen=True)
class _StateRows:
    """One row for each segment of a chain of several segments, and head; ``[N]`` columns.

    Attributes:
        key: tells units (a chain's head) apart.
        owner: the rank that composes the unit.
        rank: the rank that stores the segment.
        local: index of the segment and head among all of that rank.
        position: of the segment in its chain.
        count: segments of the chain.
        crosses: whether any chain spans ranks.
    """

    key: IntArray
    owner: IntArray
    rank: IntArray
    local: IntArray
    position: IntArray
    count: IntArray
    crosses: bool

    @property
    def sends(self) -> np.ndarray:
        """Rows whose summary leaves: all but a chain's last."""
        return self.position < self.count - 1

    @property
    def gets(self) -> np.ndarray:
        """Rows that get an entry state: all but a chain's first."""
        return self.position > 0


def summary_wants(ranges: TokenRanges) -> tuple[IntArray, IntArray]:
    """What is read of every segment, in forward and in backward; see :class:`StateRoute`.

    A first segment is entered by zero, so that its ``A`` says nothing, and nothing enters a state
    before it; nothing follows a last one.
    """
    rows = _state_rows(ranges, 1, 1)
    # One row for each segment of a chain of several, by its place in `ranges`, sorted by rank.
    place = np.searchsorted(ranges.rank, rows.rank, side="left") + rows.local
    forward, backward = np.zeros((2, len(ranges.rank)), dtype=np.int64)
    forward[place] = np.where(rows.gets, WANTS_BOTH, WANTS_OFFSET) * rows.sends
    backward[place] = WANTS_OFFSET * rows.gets
    return forward, backward


def _state_rows(ranges: TokenRanges, cp_size: int, heads: int) -> _StateRows:
    by_start = np.argsort(ranges.start, kind="stable")
    sequence, rank = ranges.sequence[by_start], ranges.rank[by_start]
    local = _local_index(ranges.rank)[by_start]
    opens = np.ones(len(sequence), dtype=bool)
    opens[1:] = sequence[1:] != sequence[:-1]
    chain = np.cumsum(opens) - 1
    count = np.bincount(chain, minlength=1)
    first = np.flatnonzero(opens)
    position = np.arange(len(chain)) - first[chain] if len(chain) else chain
    away = rank != rank[first[chain]] if len(chain) else opens
    crossing = np.bincount(chain, weights=away, minlength=1) > 0

    several = np.flatnonzero(count[chain] > 1) if len(chain) else np.zeros(0, dtype=np.int64)
    segment = np.repeat(several, heads)
    head = np.tile(np.arange(heads, dtype=np.int64), len(several))
    units = int(crossing.sum()) * heads
    unit = (np.cumsum(crossing) - 1)[chain[segment]] * heads + head
    return _StateRows(
        key=chain[segment] * heads + head,
        owner=np.where(crossing[chain[segment]], unit * cp_size // max(units, 1), rank[segment]),
        rank=rank[segment],
        local=local[segment] * heads + head,
        position=position[segment],
        count=count[chain[segment]],
        crosses=bool(crossing.any()),
    )


def state_bytes_by_rank(
    ranges: TokenRanges, cp_size: int, heads: int, key_dim: int, value_dim: int
) -> tuple[IntArray, bool]:
    """:meth:`StateRoute.bytes_sent` of every rank at once, ``[cp_size]``, and ``crosses``."""
    rows = _state_rows(ranges, cp_size, heads)
    away = rows.owner != rows.rank

    def counted(mask: np.ndarray, by: IntArray) -> IntArray:
        return np.bincount(by[mask & away], minlength=cp_size)

    opening = rows.position == 0
    state, summary = key_dim * value_dim, key_dim * (key_dim + value_dim)
    elements = (
        counted(rows.sends & ~opening, rows.rank) * summary
        + counted(rows.sends & opening, rows.rank) * state
        # Entry states leave their owners, and what they get back in backward comes from there.
        + counted(rows.gets, rows.owner) * state
        + counted(rows.gets, rows.rank) * state
        + counted(rows.sends, rows.owner) * state
    )
    return elements * 4, rows.crosses


def build_state_route(ranges: TokenRanges, cp_rank: int, cp_size: int, heads: int) -> StateRoute:
    """Route of the state scan for ``heads`` value heads; see :class:`StateRoute`."""
    rows_of_all = _state_rows(ranges, cp_size, heads)
    unit_key, owner = rows_of_all.key, rows_of_all.owner
    row_rank, row_local = rows_of_all.rank, rows_of_all.local
    row_position, row_count = rows_of_all.position, rows_of_all.count
    sends, gets = rows_of_all.sends, rows_of_all.gets
    middle, opening = sends & gets, sends & ~gets

    # Slots of the units this rank owns: longest chain first.
    owned = owner == cp_rank
    owned_first = np.flatnonzero(owned & opening)
    slot_order = owned_first[np.argsort(-row_count[owned_first], kind="stable")]
    slot_key = unit_key[slot_order]
    by_key = np.argsort(slot_key)

    def slots(rows: IntArray) -> IntArray:
        return by_key[np.searchsorted(slot_key[by_key], unit_key[rows])]

    longest = int(row_count[slot_order].max()) if len(slot_order) else 0
    units_at = tuple(int((row_count[slot_order] > p).sum()) for p in range(1, longest))
    state_start = np.concatenate([[0], np.cumsum(units_at)]).astype(np.int64)
    middle_start = np.concatenate([[0], np.cumsum(units_at[1:])]).astype(np.int64)

    def leaving(mask: np.ndarray) -> tuple[HostTable, tuple[int, ...]]:
        rows = np.flatnonzero(mask & (row_rank == cp_rank))
        rows = rows[np.lexsort((row_local[rows], owner[rows]))]
        return HostTable(row_local[rows]), _splits(owner[rows], cp_size)

    def arriving(mask: np.ndarray) -> tuple[IntArray, tuple[int, ...]]:
        rows = np.flatnonzero(mask & owned)
        rows = rows[np.lexsort((row_local[rows], row_rank[rows]))]
        return rows, _splits(row_rank[rows], cp_size)

    middle_send, middle_send_splits = leaving(middle)
    first_send, first_send_splits = leaving(opening)
    state_recv, state_recv_splits = leaving(gets)
    grad_recv, grad_recv_splits = leaving(sends)
    middle_rows, middle_recv_splits = arriving(middle)
    first_rows, first_recv_splits = arriving(opening)
    state_rows, state_send_splits = arriving(gets)
    grad_rows, grad_send_splits = arriving(sends)

    here = ranges.rank == cp_rank
    forward_wants, backward_wants = (wants[here] for wants in summary_wants(ranges))

    middle_place = middle_start[row_position[middle_rows] - 1] + slots(middle_rows)
    state_place = state_start[row_position[state_rows] - 1] + slots(state_rows)
    # The segment at position p feeds the entry state of position p + 1: state row (p + 1, slot).
    grad_place = state_start[row_position[grad_rows]] + slots(grad_rows)
    return StateRoute(
        crosses=rows_of_all.crosses,
        middle_send=middle_send,
        middle_send_splits=middle_send_splits,
        middle_recv_splits=middle_recv_splits,
        middle_order=HostTable(np.argsort(middle_place)),
        first_send=first_send,
        first_send_splits=first_send_splits,
        first_recv_splits=first_recv_splits,
        first_order=HostTable(np.argsort(slots(first_rows))),
        state_send=HostTable(state_place),
        state_send_splits=state_send_splits,
        state_recv=state_recv,
        state_recv_splits=state_recv_splits,
        state_order=HostTable(np.argsort(state_place)),
        grad_send=HostTable(grad_place),
        grad_send_splits=grad_send_splits,
        grad_recv=grad_recv,
        grad_recv_splits=grad_recv_splits,
        units_at=units_at,
        forward_wants=HostTable(forward_wants),
        backward_wants=HostTable(backward_wants),
    )


def _homes(ranges: TokenRanges) -> tuple[IntArray, IntArray]:
    """Rank and local position of every global token."""
    lengths = ranges.stop - ranges.start
    tokens = expand_runs(ranges.start, ranges.stop)
    rank, place = np.empty_like(tokens), np.empty_like(tokens)
    rank[tokens] = np.repeat(ranges.rank, lengths)
    place[tokens] = expand_runs(ranges.offset, ranges.offset + lengths)
    return rank, place


def _splits(ranks: IntArray, cp_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(ranks, minlength=cp_size).tolist())


def _local_index(rank: IntArray) -> IntArray:
    """Index of each segment among its rank's segments; ``rank`` is sorted."""
    return np.arange(len(rank), dtype=np.int64) - np.searchsorted(rank, rank, side="left")
