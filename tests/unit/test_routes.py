# SPDX-License-Identifier: Apache-2.0
"""Exchange routes, run over all ranks in one process: what arrives is what the maths asks for."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron.linear_cp.layout
from megatron.linear_cp.layout import (
    TokenRanges,
    mixed_token_ranges,
    rank_indices,
    token_ranges,
)
from megatron.linear_cp.routes import (
    HaloRoute,
    StateRoute,
    build_halo_route,
    build_state_route,
    halo_rows_by_rank,
    state_bytes_by_rank,
)
from megatron.linear_cp.segments import WANTS_BOTH, WANTS_OFFSET


def deliver(sent: list[list[np.ndarray]]) -> list[np.ndarray]:
    """All-to-all on the host: ``sent[source][target]`` arrives at ``target`` in source order."""
    ranks = range(len(sent))
    return [np.concatenate([sent[source][target] for source in ranks]) for target in ranks]


def cut(rows: np.ndarray, splits: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum(splits)[:-1])


def ranges_of(cu: list[int], cp: int, layout: str, halved: bool) -> TokenRanges:
    """With ``halved``, runs of 3 tokens and more are long."""
    if not halved:
        return token_ranges(cu, cp, layout)
    with mock.patch.multiple(megatron.linear_cp.layout, LONG_RUN=2, LONG_SHARE=100, _CHUNK=1):
        return token_ranges(cu, cp, layout)


def check_halo(ranges: TokenRanges, cu: list[int], cp: int, width: int) -> None:
    routes: list[HaloRoute] = [
        build_halo_route(ranges, np.array(cu), rank, cp, width) for rank in range(cp)
    ]
    own = [rank_indices(ranges, rank) for rank in range(cp)]
    arrived = deliver(
        [cut(own[r][routes[r].send_index.array], routes[r].send_splits) for r in range(cp)]
    )
    for rank, route in enumerate(routes):
        assert len(arrived[rank]) == sum(route.recv_splits)
        mine = ranges.rank == rank
        halos = np.full(mine.sum() * (width - 1), -1)
        halos[route.own_rows.array] = own[rank][route.own_index.array]
        halos[route.far_rows.array] = arrived[rank][route.far_index.array]
        halos = halos.reshape(mine.sum(), width - 1)
        for halo, start, seq in zip(halos, ranges.start[mine], ranges.sequence[mine], strict=True):
            wanted = [t if t >= cu[seq] else -1 for t in range(start - width + 1, start)]
            assert halo.tolist() == wanted
        # A token is sent at most once to a rank, however many halos it feeds there.
        for block in cut(arrived[rank], route.recv_splits):
            assert len(np.unique(block)) == len(block)
    check_halo_gradient(routes, own)


def check_halo_gradient(routes: list[HaloRoute], own: list[np.ndarray]) -> None:
    """Every token gets the sum of its gradients over the halos that it is in, on any rank."""
    rng = np.random.default_rng(0)
    rows = [len(r.own_rows.array) + len(r.far_rows.array) for r in routes]
    tokens, grads, returned = [], [], []
    arrived = deliver(
        [cut(own[r][x.send_index.array], x.send_splits) for r, x in enumerate(routes)]
    )
    for rank, route in enumerate(routes):
        grad = torch.from_numpy(rng.normal(size=(rows[rank], 1)))
        local, far = grad.split([len(route.own_rows.array), len(route.far_rows.array)])
        tokens += [own[rank][route.own_index.array], arrived[rank][route.far_index.array]]
        grads.append((local, grad))
        returned.append(cut(route.received_uses.of(far).numpy(), route.recv_splits))
    expected, actual = (np.zeros(sum(map(len, own))) for _ in range(2))
    np.add.at(expected, np.concatenate(tokens), np.concatenate([g[:, 0] for _, g in grads]))
    for rank, (route, back) in enumerate(zip(routes, deliver(returned), strict=True)):
        sums = route.sent_uses.of(torch.cat([grads[rank][0], torch.from_numpy(back)]))
        assert len(np.unique(route.sent_tokens.array)) == len(sums)
        actual[own[rank][route.sent_tokens.array]] = sums[:, 0]
    np.testing.assert_allclose(actual, expected, atol=1e-12)


def check_states(ranges: TokenRanges, cp: int, heads: int) -> None:
    """Compose scalar affine maps along every chain through the routes, and by hand."""
    rng = np.random.default_rng(0)
    n = len(ranges.start)
    a, b = rng.normal(size=(n, heads)), rng.normal(size=(n, heads))
    entry, exit_grad, c = (np.zeros((n, heads)) for _ in range(3))
    c[:] = rng.normal(size=(n, heads))
    for sequence in np.unique(ranges.sequence):
        chain = np.flatnonzero(ranges.sequence == sequence)
        chain = chain[np.argsort(ranges.start[chain])]
        for before, after in zip(chain, chain[1:], strict=False):
            entry[after] = a[before] * entry[before] + b[before]
        for before, after in zip(chain[-2::-1], chain[:0:-1], strict=False):
            exit_grad[before] = a[after] * exit_grad[after] + c[after]

    routes: list[StateRoute] = [build_state_route(ranges, r, cp, heads) for r in range(cp)]
    local = [np.flatnonzero(ranges.rank == r) for r in range(cp)]
    # Whatever is not wanted may be anything, and everything wanted is sent.
    for r, route in enumerate(routes):
        forward, backward = route.forward_wants.array, route.backward_wants.array
        assert len(forward) == len(backward) == len(local[r])
        a[local[r][forward < WANTS_BOTH]] = np.nan
        b[local[r][forward < WANTS_OFFSET]] = np.nan
        c[local[r][backward < WANTS_OFFSET]] = np.nan
        middle, first = (index.array // heads for index in (route.middle_send, route.first_send))
        assert np.array_equal(np.unique(middle), np.flatnonzero(forward == WANTS_BOTH))
        assert np.array_equal(np.unique(first), np.flatnonzero(forward == WANTS_OFFSET))
        gets = np.unique(route.state_recv.array // heads)
        assert np.array_equal(gets, np.flatnonzero(backward == WANTS_OFFSET))

    def rows(table: np.ndarray, rank: int) -> np.ndarray:
        return table[local[rank]].ravel()

    def send(table: np.ndarray, index: str, splits: str) -> list[np.ndarray]:
        return deliver(
            [
                cut(rows(table, r)[getattr(routes[r], index).array], getattr(routes[r], splits))
                for r in range(cp)
            ]
        )

    middle_a = send(a, "middle_send", "middle_send_splits")
    middle_b = send(b, "middle_send", "middle_send_splits")
    first_b = send(b, "first_send", "first_send_splits")
    grads = send(c, "state_recv", "state_recv_splits")
    states, totals = [], []
    for r, route in enumerate(routes):
        ma, mb = middle_a[r][route.middle_order.array], middle_b[r][route.middle_order.array]
        state = np.zeros(sum(route.units_at))
        first = first_b[r][route.first_order.array]
        state[: len(first)] = first
        done = taken = 0
        for now, following in zip(route.units_at, route.units_at[1:], strict=False):
            here = slice(taken, taken + following)
            state[done + now : done + now + following] = (
                ma[here] * state[done : done + following] + mb[here]
            )
            done, taken = done + now, taken + following
        total = grads[r][route.state_order.array]
        done, taken = len(total), len(ma)
        for now, following in zip(route.units_at[-2::-1], route.units_at[:0:-1], strict=False):
            begin = done - following
            total[begin - now : begin - now + following] += (
                ma[taken - following : taken] * total[begin:done]
            )
            done, taken = begin, taken - following
        states.append(state)
        totals.append(total)

    back = deliver(
        [cut(states[r][routes[r].state_send.array], routes[r].state_send_splits) for r in range(cp)]
    )
    down = deliver(
        [cut(totals[r][routes[r].grad_send.array], routes[r].grad_send_splits) for r in range(cp)]
    )
    for r, route in enumerate(routes):
        got_entry, got_exit = np.zeros(len(local[r]) * heads), np.zeros(len(local[r]) * heads)
        got_entry[route.state_recv.array] = back[r]
        got_exit[route.grad_recv.array] = down[r]
        np.testing.assert_allclose(got_entry, rows(entry, r), atol=1e-12)
        np.testing.assert_allclose(got_exit, rows(exit_grad, r), atol=1e-12)
        # Every rank owns its even share of the units that cross.
    crossing = sum(route.units_at[0] if route.units_at else 0 for route in routes)
    for route in routes:
        owned = route.units_at[0] if route.units_at else 0
        assert owned in (crossing // cp, -(-crossing // cp))


lengths_strategy = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_strategy,
    cp=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    width=st.integers(1, 7),
    halved=st.booleans(),
)
def test_halo_route(lengths: list[int], cp: int, layout: str, width: int, halved: bool) -> None:
    scale = 2 * cp if layout == "zigzag" else 3
    lengths = [n * scale for n in lengths]
    lengths[-1] += -sum(lengths) % cp
    cu = [0, *np.cumsum(lengths).tolist()]
    check_halo(ranges_of(cu, cp, layout, halved), cu, cp, width)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_strategy,
    cp=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    heads=st.integers(1, 5),
    halved=st.booleans(),
)
def test_state_route(lengths: list[int], cp: int, layout: str, heads: int, halved: bool) -> None:
    scale = 2 * cp if layout == "zigzag" else 3
    lengths = [n * scale for n in lengths]
    lengths[-1] += -sum(lengths) % cp
    cu = [0, *np.cumsum(lengths).tolist()]
    check_states(ranges_of(cu, cp, layout, halved), cp, heads)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_strategy,
    cp=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous", "mixed"]),
    heads=st.integers(1, 5),
    width=st.integers(1, 7),
    homes=st.lists(st.integers(-1, 4), min_size=20, max_size=20),
)
def test_counts_of_all_ranks_are_those_of_their_routes(
    lengths: list[int], cp: int, layout: str, heads: int, width: int, homes: list[int]
) -> None:
    scale = 3 if layout == "contiguous" else 2 * cp
    lengths = [n * scale for n in lengths]
    lengths[-1] += -sum(lengths) % cp
    cu = np.cumsum([0, *lengths])
    if layout == "mixed":
        home = np.array([min(homes[i % 20], cp - 1) for i in range(len(lengths))])
        ranges = mixed_token_ranges(cu, cp, home)
    else:
        ranges = token_ranges(cu, cp, layout)
    states = [build_state_route(ranges, rank, cp, heads) for rank in range(cp)]
    halos = [build_halo_route(ranges, cu, rank, cp, width) for rank in range(cp)]
    sent, crosses = state_bytes_by_rank(ranges, cp, heads, 3, 5)
    assert sent.tolist() == [route.bytes_sent(rank, 3, 5) for rank, route in enumerate(states)]
    assert {crosses} == {route.crosses for route in states}
    rows, crosses = halo_rows_by_rank(ranges, cu, cp, width)
    assert rows.tolist() == [sum(route.send_splits) + sum(route.recv_splits) for route in halos]
    assert {crosses} == {route.crosses for route in halos}


def test_cut_on_a_sequence_end_needs_no_collective() -> None:
    ranges = token_ranges([0, 64, 128], 2, "contiguous")
    for rank in range(2):
        assert not build_halo_route(ranges, np.array([0, 64, 128]), rank, 2, 4).crosses
        route = build_state_route(ranges, rank, 2, 4)
        assert not route.crosses
        assert route.is_empty
        assert route.bytes_sent(rank, 128, 128) == 0


def test_chain_of_several_segments_on_one_rank_stays_there() -> None:
    """Any table of token ranges: here rank 0 holds both ends of a row whose middle nobody cut."""
    ranges = TokenRanges(
        sequence=np.array([0, 0, 1]),
        start=np.array([4, 0, 8]),
        stop=np.array([8, 4, 16]),
        rank=np.array([0, 0, 1]),
        offset=np.array([0, 4, 0]),
    )
    check_halo(ranges, [0, 8, 16], 2, 4)
    route = build_state_route(ranges, 0, 2, 3)
    assert not route.crosses
    assert route.units_at == (3,)
    assert build_state_route(ranges, 1, 2, 3).is_empty


@pytest.mark.parametrize(("cp", "sequences"), [(2, 1), (4, 1), (8, 1), (16, 1), (8, 8), (16, 8)])
def test_scan_bytes_do_not_depend_on_length_and_stay_bounded(cp: int, sequences: int) -> None:
    heads, key_dim, value_dim = 32, 128, 128
    sent = {}
    for scale in (1, 64):
        cu = (np.arange(sequences + 1) * 2 * cp * scale).tolist()
        ranges = token_ranges(cu, cp, "zigzag")
        sent[scale] = [
            build_state_route(ranges, r, cp, heads).bytes_sent(r, key_dim, value_dim)
            for r in range(cp)
        ]
    assert sent[1] == sent[64]
    # Design bound: two segments a sequence and rank, summary out and state back, both directions.
    wide, state = key_dim * (key_dim + value_dim), key_dim * value_dim
    bound = 2 * sequences * heads * ((wide + state) + 2 * state) * 4
    assert max(sent[1]) <= bound * 1.05
    assert torch.tensor(sent[1]).float().mean() > 0.2 * bound
