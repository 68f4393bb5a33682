# SPDX-License-Identifier: Apache-2.0
"""Which sequences exchange states and which are moved: by bytes, balanced, alike on every rank."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.exchange_choice import (
    MAX_IMBALANCE,
    LayerSizes,
    check_move_sequences,
    choose_exchange,
    choose_for,
)
from megatron.linear_cp.layout import mixed_token_ranges, rank_indices, shard_ranges, token_ranges
from megatron.linear_cp.routes import halo_rows_by_rank, state_bytes_by_rank

QWEN = LayerSizes(
    hidden_size=2048,
    num_value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    conv_channels=8192,
    conv_kernel_size=4,
    element_size=2,
)


def bounds(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.array(lengths, dtype=np.int64))])


def test_long_sequences_exchange_states_and_short_ones_move() -> None:
    lengths = [32768, *[256] * 64, 16384]
    choice = choose_for(bounds(lengths), 8, QWEN, "auto")
    assert choice.home[0] == choice.home[-1] == -1
    assert (choice.home[1:-1] >= 0).all()
    assert choice.total_bytes < min(choice.scan_bytes.sum(), choice.move_bytes.sum())
    assert choice.tokens.sum() == sum(lengths)
    assert len(set(choice.tokens.tolist())) == 1
    assert "64 are brought to one rank" in choice.describe()


def test_bytes_of_a_scan_are_those_of_its_routes_whatever_the_length() -> None:
    """Two kinds of lengths: where the last rank's run is one segment, and where it is two."""
    choice = choose_for(bounds([1024, 131072, 64, 262144]), 4, QWEN, "never")
    assert choice.scan_bytes[0] == choice.scan_bytes[2] < choice.scan_bytes[1]
    assert choice.scan_bytes[1] == choice.scan_bytes[3]
    for i, length in enumerate((1024, 131072)):
        row = bounds([length])
        ranges = token_ranges(row, 4, "zigzag")
        states, _ = state_bytes_by_rank(ranges, 4, 32, 128, 128)
        rows, _ = halo_rows_by_rank(ranges, row, 4, 4)
        assert choice.scan_bytes[i] == states.sum() + rows.sum() * 8192 * 2


def test_policies() -> None:
    row = bounds([64, 64, 4096])
    assert choose_for(row, 2, QWEN, "never").moved == 0
    assert choose_for(row, 2, QWEN, "always").moved == 3
    with pytest.raises(ValueError, match=r"'often'.*auto, never, always"):
        check_move_sequences("often")


def test_a_few_short_sequences_are_not_worth_copying_the_long_ones() -> None:
    # On two H200s, moving some of the 64 sequences of 131,072 tokens took 1.5 % longer than none.
    assert choose_for(bounds([131072] * 4 + [16]), 2, QWEN, "auto").moved == 0
    assert choose_for(bounds([131072] * 4 + [16]), 2, QWEN, "always").moved == 5
    assert choose_for(bounds([2048] * 4 + [16] * 60), 2, QWEN, "auto").moved == 60


def test_balanced_rows_send_no_more_than_if_all_moved_or_none() -> None:
    for length in range(64, 4096, 64):
        choice = choose_for(bounds([length] * 16), 2, QWEN, "auto")
        assert choice.total_bytes <= min(choice.scan_bytes.sum(), choice.move_bytes.sum()), length


def test_one_short_sequence_is_not_worth_idle_ranks() -> None:
    assert choose_for(bounds([512]), 8, QWEN, "auto").moved == 0
    assert choose_for(bounds([512] * 8), 8, QWEN, "auto").moved == 8


def test_thousands_of_sequences_are_placed_at_once() -> None:
    lengths = [16] * 3000 + [320] * 500
    choice = choose_for(bounds(lengths), 8, QWEN, "auto")
    assert choice.moved == 3500


def test_sequence_parallel_shares_stay_even() -> None:
    sizes = replace(QWEN, token_multiple=4)
    lengths = [16, 24, 32, 64, 16, 32, 32, 64] * 8
    choice = choose_for(bounds(lengths), 2, sizes, "auto")
    assert choice.moved > 0
    assert (choice.tokens % 4 == 0).all()


rows = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(chunks=rows, cp=st.integers(1, 6))
def test_every_token_has_one_place(chunks: list[int], cp: int) -> None:
    row = bounds([2 * cp * n for n in chunks])
    choice = choose_for(row, cp, QWEN, "auto")
    ranges = mixed_token_ranges(row, cp, choice.home)
    held = [rank_indices(ranges, r) for r in range(cp)]
    assert [len(h) for h in held] == choice.tokens.tolist()
    assert sorted(np.concatenate(held).tolist()) == list(range(row[-1]))
    if choice.moved:
        assert choice.tokens.max() * cp <= MAX_IMBALANCE * row[-1]
    for sequence, home in enumerate(choice.home):
        if home >= 0:
            whole = np.arange(row[sequence], row[sequence + 1])
            assert np.isin(whole, held[home]).all()


@settings(max_examples=80, deadline=None)
@given(chunks=rows, cp=st.integers(1, 4), shards=st.integers(1, 4), samples=st.integers(1, 3))
def test_shards_cut_the_storage_in_order(
    chunks: list[int], cp: int, shards: int, samples: int
) -> None:
    row = bounds([2 * cp * shards * samples * n for n in chunks])
    ranges = token_ranges(row, cp, "zigzag")
    shared = shard_ranges(ranges, shards, samples)
    for rank in range(cp):
        blocks = np.split(rank_indices(ranges, rank), samples)
        for shard in range(shards):
            want = np.concatenate([np.split(block, shards)[shard] for block in blocks])
            assert rank_indices(shared, rank * shards + shard).tolist() == want.tolist()


def test_shards_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 0 stores 6 tokens.*4 tensor-parallel"):
        shard_ranges(token_ranges([0, 12], 2, "contiguous"), 4, 1)


def test_the_choice_shows_in_the_plan() -> None:
    plan = ContextParallelPlan.build([0, 64, 128], None)
    assert "exchange states" not in plan.describe()
    assert "2 sequences, 128 tokens" in plan.describe()
    choose_exchange(plan, QWEN)
    choose_exchange(plan, QWEN)
    assert plan.describe().count("exchange states") == 1
