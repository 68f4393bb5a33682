# SPDX-License-Identifier: Apache-2.0
"""Per sequence: exchange states, or bring the whole sequence to one rank, whichever moves less.

The state scan moves the same bytes however short a sequence is; below some length (about 159 tokens
a segment at Qwen3-Next's sizes when activations are what moves, fewer for the narrower hidden
states) moving the tokens is cheaper. Everything here follows from the boundaries and sizes that all
ranks share, so every rank of a group chooses alike.
"""

import heapq
from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron.linear_cp.layout import LONG_RUN, is_long_run, token_ranges
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.routes import halo_rows_by_rank, state_bytes_by_rank
from megatron.linear_cp.segments import IntArray

POLICIES = ("auto", "never", "always")
# The busiest rank may hold this much more than the mean: bytes saved must not be paid in waiting.
MAX_IMBALANCE = 1.25
_PASSES = 4  # hidden states move to the working rank and back, in forward and in backward
# A byte less on the wire is worth this many less copied in memory: about what an H200's 3.5 TB/s
# are to NVLink's 200 GB/s. Over slower networks it is more.
_COPIED_FOR_SENT = 16


@dataclass(frozen=True)
class LayerSizes:
    """What decides how many bytes a token and a segment cost, on one tensor-parallel rank.

    Attributes:
        hidden_size: values of a hidden state that this rank moves for a token (under sequence
            parallelism the share of it that one rank moves on average).
        num_value_heads, key_head_dim, value_head_dim: of the rank.
        conv_channels, conv_kernel_size: of the rank's convolution.
        element_size: bytes of an activation.
        token_multiple: every rank's tokens must divide by this (the tensor-parallel size under
            sequence parallelism).
    """

    hidden_size: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_channels: int
    conv_kernel_size: int
    element_size: int
    token_multiple: int = 1


@dataclass(frozen=True)
class ExchangeChoice:
    """What happens to each sequence of a micro-batch.

    Attributes:
        home: ``[S]`` the rank a sequence is brought to, or -1 where states are exchanged.
        scan_bytes: ``[S]`` what all ranks together would send for it, forward and backward, if
            states and halos are exchanged.
        move_bytes: ``[S]`` the same if its hidden states are moved.
        tokens: ``[cp_size]`` tokens that each rank works on.
    """

    home: IntArray
    scan_bytes: IntArray
    move_bytes: IntArray
    tokens: IntArray

    @property
    def moved(self) -> int:
        """Number of sequences brought to one rank."""
        return int((self.home >= 0).sum())

    @property
    def total_bytes(self) -> int:
        """What all ranks together send in one layer, forward and backward."""
        return int(np.where(self.home >= 0, self.move_bytes, self.scan_bytes).sum())

    def describe(self) -> str:
        """A few lines for people: counts, bytes of this choice and of the two pure ones."""
        lines = [
            f"{len(self.home)} sequences: {len(self.home) - self.moved} exchange states, "
            f"{self.moved} are brought to one rank",
            f"bytes of all ranks per layer, forward and backward: {self.total_bytes:,} "
            f"(all scan {int(self.scan_bytes.sum()):,}, all moved {int(self.move_bytes.sum()):,})",
            f"tokens per rank: {', '.join(map(str, self.tokens.tolist()))}",
        ]
        return "\n".join(lines)


def check_move_sequences(policy: str) -> None:
    """Raise ``ValueError`` unless the policy is known."""
    if policy not in POLICIES:
        raise ValueError(
            f"unknown linear_cp_move_sequences {policy!r}; choose one of {', '.join(POLICIES)}"
        )


def working_plan(
    plan: ContextParallelPlan, sizes: LayerSizes, policy: str = "auto"
) -> ContextParallelPlan:
    """The plan that a chunkwise layer works under: ``plan`` itself, or one with sequences moved.

    Args:
        plan: a packed micro-batch in zigzag order.
        sizes: of the layer.
        policy: ``"auto"`` decides per sequence by counted bytes, ``"never"`` moves none,
            ``"always"`` moves all (under sequence parallelism, all that divide by its ranks).

    Raises:
        ValueError: an unknown policy.
    """
    choice = choose_exchange(plan, sizes, policy)
    if not choice.moved:
        return plan
    return plan.segments.cached(
        ("working plan", sizes, policy), lambda: plan.with_homes(choice.home)
    )


def choose_exchange(
    plan: ContextParallelPlan, sizes: LayerSizes, policy: str = "auto"
) -> ExchangeChoice:
    """What :func:`working_plan` does with each sequence, and why; computed once per plan."""
    check_move_sequences(policy)

    def choose() -> ExchangeChoice:
        choice = choose_for(plan.boundaries, plan.cp_size, sizes, policy)
        plan.notes.append(choice.describe())
        return choice

    return plan.segments.cached(("exchange choice", sizes, policy), choose)


def choose_for(
    boundaries: IntArray, cp_size: int, sizes: LayerSizes, policy: str
) -> ExchangeChoice:
    """:func:`choose_exchange` for ``[S + 1]`` boundaries that zigzag can cut, without a plan."""
    lengths = np.diff(boundaries)
    leaving = lengths - lengths // cp_size
    move = leaving * sizes.hidden_size * sizes.element_size * _PASSES
    longs = is_long_run(lengths // cp_size, int(lengths.sum()) // cp_size)
    scan = np.array(
        [
            _scan_bytes(int(n), long, cp_size, sizes)
            for n, long in zip(lengths, longs.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    wanted = {"auto": move < scan, "never": lengths < 0, "always": lengths > 0}[policy]
    multiple = sizes.token_multiple
    wanted &= (lengths % multiple == 0) & (lengths // cp_size % multiple == 0)
    longest_first = [int(i) for i in np.argsort(-lengths, kind="stable") if wanted[i]]
    # Long sequences are the hardest to balance, and save the least: leave more and more of them.
    dropped = 0
    while True:
        home, tokens = _place(lengths, cp_size, longest_first[dropped:])
        balanced = tokens.max() * cp_size <= MAX_IMBALANCE * lengths.sum()
        if balanced or policy == "always" or dropped >= len(longest_first):
            break
        dropped = max(1, 2 * dropped)

    choice = ExchangeChoice(home, scan, move, tokens)
    if policy == "auto" and not _worth_the_copies(choice, int(lengths.sum()), sizes):
        return choose_for(boundaries, cp_size, sizes, "never")
    return choice


def _worth_the_copies(choice: ExchangeChoice, tokens: int, sizes: LayerSizes) -> bool:
    """Whether moving some sequences saves more than putting all hidden states in order costs.

    However few sequences move, all tokens of a rank are copied before the layer and after it.
    Where moving everything would send less than moving nothing, the question does not arise: it
    only ever falls back on the better of these two. (Balance may still keep sequences spread.)
    """
    scan = int(choice.scan_bytes.sum())
    copied = tokens * sizes.hidden_size * sizes.element_size * 2 * _PASSES  # read and written
    worth = (scan - choice.total_bytes) * _COPIED_FOR_SENT >= copied
    return not choice.moved or worth or scan > int(choice.move_bytes.sum())


def _place(lengths: IntArray, cp_size: int, candidates: list[int]) -> tuple[IntArray, IntArray]:
    """Longest first, each to the rank with the fewest tokens so far."""
    home = np.full(len(lengths), -1, dtype=np.int64)
    spread = int(lengths.sum() - lengths[candidates].sum()) // cp_size
    loads = [(spread, rank) for rank in range(cp_size)]
    for i in candidates:
        load, rank = loads[0]
        home[i] = rank
        heapq.heapreplace(loads, (load + int(lengths[i]), rank))
    tokens = np.zeros(cp_size, dtype=np.int64)
    for load, rank in loads:
        tokens[rank] = load
    return home, tokens


def _scan_bytes(length: int, long: bool, cp_size: int, sizes: LayerSizes) -> int:
    """Counted on the routes of a sequence alone that is cut alike: few lengths stand for all."""
    if length == 0 or cp_size == 1:
        return 0
    longest = 2 * cp_size * max(sizes.conv_kernel_size, 1)
    stands_for = 2 * cp_size * LONG_RUN if long else min(length, longest)
    return _counted_scan_bytes(stands_for, cp_size, sizes)


@cache
def _counted_scan_bytes(length: int, cp_size: int, sizes: LayerSizes) -> int:
    boundaries = np.array([0, length], dtype=np.int64)
    ranges = token_ranges(boundaries, cp_size, "zigzag")
    states, _ = state_bytes_by_rank(
        ranges, cp_size, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
    )
    rows, _ = halo_rows_by_rank(ranges, boundaries, cp_size, sizes.conv_kernel_size)
    return int(states.sum() + rows.sum() * sizes.conv_channels * sizes.element_size)
