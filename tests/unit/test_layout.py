# SPDX-License-Identifier: Apache-2.0
"""Which token lies where: the shared tables, the refusals, and properties over random rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.linear_cp.context_parallel_layout import get_thd_context_parallel_rank_indices
from megatron.linear_cp.layout import (
    LONG_RUN,
    LONG_SHARE,
    TokenRanges,
    check_boundaries,
    dense_token_ranges,
    rank_indices,
    token_ranges,
)

CASES = Path(__file__).parent.parent / "cases"
TABLES = json.loads((CASES / "layout_tables.json").read_text())["tables"]
REFUSED = json.loads((CASES / "packed_rows.json").read_text())["refused"]


@pytest.mark.parametrize(
    "case", TABLES, ids=lambda c: f"{c['layout']}-{c['cu_seqlens']}-{c['rank']}"
)
def test_table(case: dict) -> None:
    indices = get_thd_context_parallel_rank_indices(
        torch.tensor(case["cu_seqlens"], dtype=torch.int32),
        case["cp"],
        case["rank"],
        case["layout"],
    )
    assert indices.dtype == torch.int64
    assert indices.tolist() == [i for a, b in case["spans"] for i in range(a, b)]


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c["error"])
def test_refused(case: dict) -> None:
    with pytest.raises(ValueError, match=r"divide|decreasing|start at 0|unknown layout"):
        token_ranges(case["cu_seqlens"], case["cp"], case["layout"])


def test_zigzag_refusal_names_sequence_length_and_divisor() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 of length 20 .* 2 \* cp_size = 8"):
        token_ranges([0, 16, 36], 4, "zigzag")


def test_contiguous_demands_only_the_total() -> None:
    ranges = token_ranges([0, 29, 73, 100], 2, "contiguous")
    assert rank_indices(ranges, 1).tolist() == list(range(50, 100))


def test_one_rank_demands_nothing() -> None:
    for layout in ("zigzag", "contiguous"):
        ranges = token_ranges([0, 3, 3, 10], 1, layout)
        assert rank_indices(ranges, 0).tolist() == list(range(10))
        assert ranges.stop.tolist() == [3, 10]


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0.0, 4.0], "integers"),
        ([[0, 4]], "one row"),
        ([0], "at least two"),
        ([4, 16], "start at 0"),
        ([0, 16, 8], "decreasing, got 16 then 8 at sequence 1"),
    ],
)
def test_malformed_boundaries(boundaries: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_boundaries(boundaries)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(rank: int) -> None:
    with pytest.raises(ValueError, match=f"0 to 1, got {rank}"):
        get_thd_context_parallel_rank_indices(torch.tensor([0, 8]), 2, rank, "zigzag")


def naive_zigzag(cu: list[int], cp: int, rank: int) -> list[int]:
    tokens: list[int] = []
    for start, stop in zip(cu, cu[1:], strict=False):
        chunks = np.array_split(np.arange(start, stop), 2 * cp)
        tokens += [*chunks[rank].tolist(), *chunks[2 * cp - 1 - rank].tolist()]
    return tokens


rows = st.lists(st.integers(0, 5), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(lengths=rows, cp=st.integers(1, 5))
def test_zigzag_equals_its_definition(lengths: list[int], cp: int) -> None:
    cu = [0, *np.cumsum(np.array(lengths) * 2 * cp).tolist()]
    ranges = token_ranges(cu, cp, "zigzag")
    for rank in range(cp):
        assert rank_indices(ranges, rank).tolist() == naive_zigzag(cu, cp, rank)


@settings(max_examples=60, deadline=None)
@given(lengths=rows, cp=st.integers(1, 5))
def test_contiguous_is_a_slice_of_the_flat_buffer(lengths: list[int], cp: int) -> None:
    lengths[-1] += -sum(lengths) % cp
    cu = [0, *np.cumsum(lengths).tolist()]
    ranges = token_ranges(cu, cp, "contiguous")
    span = cu[-1] // cp
    for rank in range(cp):
        assert rank_indices(ranges, rank).tolist() == list(range(rank * span, (rank + 1) * span))


@settings(max_examples=60, deadline=None)
@given(lengths=rows, cp=st.integers(1, 4), layout=st.sampled_from(["zigzag", "contiguous"]))
def test_segments_are_runs_of_one_sequence(lengths: list[int], cp: int, layout: str) -> None:
    cu = [0, *np.cumsum(np.array(lengths) * 2 * cp).tolist()]
    ranges = token_ranges(cu, cp, layout)
    bounds = np.array(cu)
    for rank in range(cp):
        mine = ranges.rank == rank
        start, stop, seq = ranges.start[mine], ranges.stop[mine], ranges.sequence[mine]
        assert (stop > start).all()
        assert (start >= bounds[seq]).all()
        assert (stop <= bounds[seq + 1]).all()
        touching = (start[1:] == stop[:-1]) & (seq[1:] == seq[:-1])
        assert not touching.any()
        assert (
            ranges.offset[mine].tolist()
            == [0, *np.cumsum(stop - start)[:-1].tolist()][: mine.sum()]
        )


def runs_of(ranges: TokenRanges) -> list[tuple[int, int, int]]:
    columns = (ranges.rank, ranges.start, ranges.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_long_runs_that_cross_ranks_are_cut_in_two_between_kernel_chunks() -> None:
    """60,000 tokens a rank; the second sequence is long and stays on one."""
    ranges = token_ranges([0, 80000, 120000], 2, "contiguous")
    cuts = [(0, 0, 30016), (0, 30016, 60000), (1, 60000, 70048), (1, 70048, 80000)]
    assert runs_of(ranges) == [*cuts, (1, 80000, 120000)]
    assert (30016 % 64, (70048 - 60000) % 64) == (0, 0)
    assert rank_indices(ranges, 1).tolist() == list(range(60000, 120000))
    assert runs_of(token_ranges([0, 30000], 1, "contiguous")) == [(0, 0, 30000)]
    short = token_ranges([0, 2 * LONG_RUN], 2, "contiguous")
    assert runs_of(short) == [(0, 0, LONG_RUN), (1, LONG_RUN, 2 * LONG_RUN)]
    dense = dense_token_ranges(2 * LONG_RUN + 256, 1, 2, "contiguous")
    assert len(runs_of(dense)) == 4


def test_long_runs_among_many_are_one_segment() -> None:
    """A rank that has eight times as much has enough to do beside it."""
    run = LONG_RUN + 64
    for tokens, segments in ((LONG_SHARE * run - 2, 2), (LONG_SHARE * run, 1)):
        ranges = token_ranges([0, tokens - run, tokens + run, 2 * tokens], 2, "contiguous")
        assert ((ranges.sequence == 1) & (ranges.rank == 1)).sum() == segments


@pytest.mark.parametrize(("tokens", "segments"), [(LONG_RUN, 1), (LONG_RUN + 2, 2)])
def test_the_last_rank_of_zigzag_joins_short_chunks_only(tokens: int, segments: int) -> None:
    ranges = token_ranges([0, 2 * tokens], 2, "zigzag")
    half = tokens // 2
    runs = [(0, 0, half), (0, 3 * half, 4 * half)]
    last = [(1, half, 2 * half), (1, 2 * half, 3 * half)]
    assert runs_of(ranges) == runs + (last if segments == 2 else [(1, half, 3 * half)])
    many = token_ranges([2 * tokens * i for i in range(10)], 2, "zigzag")
    assert (many.rank == 1).sum() == 9


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_dense_layouts_cut_every_sample(cp: int) -> None:
    zigzag = dense_token_ranges(16, 3, cp, "zigzag")
    contiguous = dense_token_ranges(16, 3, cp, "contiguous")
    for rank in range(cp):
        assert rank_indices(zigzag, rank).tolist() == naive_zigzag([0, 16, 32, 48], cp, rank)
        span = 16 // cp
        own = np.arange(rank * span, (rank + 1) * span)
        expected = [i + 16 * b for b in range(3) for i in own.tolist()]
        assert rank_indices(contiguous, rank).tolist() == expected


def test_dense_length_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"2 \* cp_size = 8"):
        dense_token_ranges(12, 2, 4, "zigzag")
    with pytest.raises(ValueError, match="10 tokens does not divide"):
        dense_token_ranges(10, 2, 4, "contiguous")
