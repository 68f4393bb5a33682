# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes, flops and time of one layer under each mode, counted, not fitted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.linear_cp.exchange_choice import LayerSizes, choose_for
from megatron.linear_cp.layout import (
    TokenRanges,
    check_divisible,
    mixed_token_ranges,
    token_ranges,
)
from megatron.linear_cp.modes.heads import heads_fit
from megatron.linear_cp.routes import halo_rows_by_rank, state_bytes_by_rank, summary_wants
from megatron.linear_cp.segments import WANTS_BOTH, WANTS_OFFSET, IntArray

_CHUNK = 64
# Backward does about two products for each of forward's, and repeats part of forward.
_BACKWARD = 2.5
# Times that a row is read or written here on its way through an exchange: gathered for its
# destination, joined with others, taken by the collective and put down by it, put into order.
_TOUCHES = 8


@dataclass(frozen=True)
class Machine:
    """What a rank can do; ``MACHINES`` has one for GPUs and one for CPU ranks.

    Attributes:
        bytes_per_second: what a rank can send, all peers together.
        flops_per_second: what a rank computes in the rule, convolution and gates included in the
            time and not in the count.
        summary_flops_per_second: what it computes in the summaries of segments.
        dense_flops_per_second: what it computes in large products, which the projections are.
        memory_bytes_per_second: what it reads or writes of its own memory in the copies around an
            exchange.
        seconds_per_collective: what one exchange takes however little it moves, waiting for the
            slowest rank included.
        seconds_per_row: what a token takes in the rule however few heads the rank runs; headwise
            runs more tokens with fewer heads.
        shrinks_chunks: the kernels take smaller chunks where every segment is short.
        element_size: bytes of an activation.
        cores: processors that the ranks share, where they are fewer: a rank that is done leaves
            its part to the others, and all rates are those of a time when every rank is at work.
            None where each has its own, as on GPUs.
    """

    bytes_per_second: float
    flops_per_second: float
    summary_flops_per_second: float
    dense_flops_per_second: float
    memory_bytes_per_second: float
    seconds_per_collective: float
    seconds_per_row: float
    shrinks_chunks: bool
    element_size: int
    cores: int | None = None


MACHINES = {
    # 200 GB/s is about what all-to-alls reach between two H200s of a host (8.6 GB in 13 % of 346
    # ms, docs/multi_gpu_2xh200.txt); across hosts use the network's figure. 100 and 650 TFLOP/s
    # give 16.8 ms for the layer that docs/benchmarks.md has at 18.0; 300 makes the summaries 12 %
    # of the rule, as there. 3.5 TB/s is about what a copy reaches. 20 us is what NCCL usually needs
    # to start inside one host: assumed, not measured, as is that a token's kernels cost nothing
    # beside their heads.
    "gpu": Machine(200e9, 100e12, 300e12, 650e12, 3.5e12, 20e-6, 0.0, False, 2),
    # fp32 over gloo on the loopback, torch kernels: what `tools/sweep_plan_choice.py` measured for
    # two ranks with a core each (medians over three head shapes). It measures any machine.
    "cpu": Machine(1.4e9, 19e9, 7.5e9, 100e9, 14e9, 1.0e-3, 10e-6, True, 4),
}
_GPU = MACHINES["gpu"]


@dataclass(frozen=True)
class Workload:
    """One layer, the micro-batch it sees, and the machine.

    Attributes:
        lengths: tokens of every packed sequence, each a multiple of what the layout needs.
        num_key_heads, num_value_heads: of the whole model.
        key_head_dim, value_head_dim: channels of a head.
        conv_kernel_size: taps of the convolution.
        hidden_size: of the model, which is what a moved token costs.
        element_size, bytes_per_second, flops_per_second, summary_flops_per_second: as in
            :class:`Machine`; the defaults are those of ``MACHINES["gpu"]``.
        dense_flops_per_second, memory_bytes_per_second: likewise.
        seconds_per_collective, seconds_per_row, shrinks_chunks, cores: likewise.
    """

    lengths: Sequence[int]
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel_size: int = 4
    hidden_size: int = 2048
    element_size: int = _GPU.element_size
    bytes_per_second: float = _GPU.bytes_per_second
    flops_per_second: float = _GPU.flops_per_second
    summary_flops_per_second: float = _GPU.summary_flops_per_second
    dense_flops_per_second: float = _GPU.dense_flops_per_second
    memory_bytes_per_second: float = _GPU.memory_bytes_per_second
    seconds_per_collective: float = _GPU.seconds_per_collective
    seconds_per_row: float = _GPU.seconds_per_row
    shrinks_chunks: bool = _GPU.shrinks_chunks
    cores: int | None = _GPU.cores


@dataclass(frozen=True)
class ModeCost:
    """What one rank (the busiest) spends on a layer, forward and backward.

    Attributes:
        bytes_sent: to other ranks.
        collectives: exchanges that it takes part in.
        flops: of the rule, summaries included, convolution and projections excluded; the last chunk
            of a segment counts whole.
        seconds: bytes over bandwidth, the start of every exchange, copies of what is exchanged,
            rows of the rule, and flops of rule, summaries and projections over their rates; nothing
            overlaps in this count, and the rest of the layer is the same in every mode.
    """

    bytes_sent: int
    collectives: int
    flops: float
    seconds: float = field(compare=False)


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends in one layer under chunkwise, forward and backward, in bytes.

    Attributes:
        states: summaries, entry states and their gradients, in fp32.
        halo: tokens that the convolution of another rank reads, and gradients of those it reads.
        moved: hidden states of sequences brought to one rank.
    """

    states: int
    halo: int
    moved: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.halo + self.moved


@dataclass(frozen=True)
class ChunkwiseWork:
    """Where chunkwise works on a micro-batch, and what that costs.

    Attributes:
        ranges: the segments that every rank works on.
        home: ``[S]`` the rank a sequence is brought to, or -1.
        tokens: ``[cp_size]`` tokens that every rank works on.
        traffic: of every rank.
        collectives: exchanges of a layer, forward and backward.
        states_cross: whether a state crosses ranks; without that nothing is exchanged of them.
    """

    ranges: TokenRanges
    home: IntArray
    tokens: IntArray
    traffic: tuple[RankTraffic, ...]
    collectives: int
    states_cross: bool


def predict_costs(
    workload: Workload,
    *,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    layout: str = "zigzag",
    move_sequences: str = "never",
) -> dict[str, ModeCost]:
    """Cost of every built-in mode whose head rule holds.

    Args:
        workload: the layer, the micro-batch and the machine.
        tensor_model_parallel_size: TP.
        context_parallel_size: CP.
        layout: ``"zigzag"`` or ``"contiguous"``.
        move_sequences: which sequences chunkwise moves instead of exchanging their states, on the
            zigzag layout; see :mod:`megatron.linear_cp.exchange_choice`.

    Returns:
        Mode name to cost; modes that the heads do not fit are missing.

    Raises:
        ValueError: lengths that the layout cannot cut.
    """
    tp, cp = tensor_model_parallel_size, context_parallel_size
    boundaries = np.concatenate([[0], np.cumsum(np.asarray(workload.lengths, dtype=np.int64))])
    check_divisible(boundaries, cp, layout)
    local = int(boundaries[-1]) // cp
    sizes = layer_sizes(workload, tp)
    rule = _rule_flops(workload, sizes.num_value_heads)
    lengths = np.diff(boundaries)
    one_rank = np.zeros_like(lengths)
    all_rows = int(_chunk_rows(lengths, one_rank, workload.shrinks_chunks).sum())
    several = cp > 1
    sent = {mode: uniform_bytes(workload, tp, cp, mode) for mode in ("headwise", "all_gather")}
    chunkwise = chunkwise_work(workload, tp, cp, layout, move_sequences)
    ranks = chunkwise.ranges.rank
    each = _chunk_rows(
        chunkwise.ranges.stop - chunkwise.ranges.start, ranks, workload.shrinks_chunks
    )
    rows = _slowest(np.bincount(ranks, weights=each, minlength=cp), workload)
    summaries = _summaries(workload, sizes.num_value_heads, chunkwise.ranges, each, cp)
    busiest = _slowest(chunkwise.tokens, workload)
    exchanged = 0.0
    if chunkwise.states_cross:
        exchanged += int(np.bincount(ranks).max()) * _state_bytes(sizes)
    if (chunkwise.home >= 0).any():
        exchanged += 4 * busiest * sizes.hidden_size * sizes.element_size
    # Bytes sent, exchanges, bytes that go through them (a rank's own share too), rows of the rule
    # and the ranks that share their heads, flops of summaries, tokens that are projected.
    counted = {
        "headwise": (
            sent["headwise"],
            4 * several,
            several * sent["headwise"] * cp // max(cp - 1, 1),
            all_rows,
            cp,
            0.0,
            local,
        ),
        "all_gather": (
            sent["all_gather"],
            2 * several,
            several * sent["all_gather"] * cp // max(cp - 1, 1),
            all_rows,
            1,
            0.0,
            local,
        ),
        "chunkwise": (
            max(traffic.total for traffic in chunkwise.traffic),
            chunkwise.collectives,
            exchanged,
            rows,
            1,
            summaries,
            busiest,
        ),
    }
    costs = {}
    for mode, (sent_bytes, collectives, handled, run, sharing, extra, tokens) in counted.items():
        if heads_fit(
            mode,
            num_key_heads=workload.num_key_heads,
            num_value_heads=workload.num_value_heads,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
        ):
            flops = rule * run / sharing
            projections = tokens * _projection_flops(workload, tp)
            seconds = (
                sent_bytes / workload.bytes_per_second
                + collectives * workload.seconds_per_collective
                + handled * _TOUCHES / workload.memory_bytes_per_second
                + run * workload.seconds_per_row
                + flops / workload.flops_per_second
                + extra / workload.summary_flops_per_second
                + projections / workload.dense_flops_per_second
            )
            costs[mode] = ModeCost(sent_bytes, collectives, flops + extra, seconds)
    return costs


def layer_sizes(workload: Workload, tensor_model_parallel_size: int) -> LayerSizes:
    """The workload's sizes on one tensor-parallel rank, without sequence parallelism."""
    heads = workload.num_value_heads // tensor_model_parallel_size
    key_heads = workload.num_key_heads // tensor_model_parallel_size
    return LayerSizes(
        hidden_size=workload.hidden_size,
        num_value_heads=heads,
        key_head_dim=workload.key_head_dim,
        value_head_dim=workload.value_head_dim,
        conv_channels=2 * key_heads * workload.key_head_dim + heads * workload.value_head_dim,
        conv_kernel_size=workload.conv_kernel_size,
        element_size=workload.element_size,
    )


def uniform_bytes(workload: Workload, tp: int, cp: int, mode: str) -> int:
    """Bytes that every rank sends in one layer under headwise or all_gather, both ways."""
    sizes = layer_sizes(workload, tp)
    local = sum(workload.lengths) // cp
    width = sizes.conv_channels + 2 * sizes.num_value_heads
    if mode == "all_gather":
        # Backward scatters the gradient of what forward gathered.
        return 2 * (cp - 1) * local * width * sizes.element_size
    # The projections go out and the output comes back; backward is the mirror image.
    out_width = sizes.num_value_heads * sizes.value_head_dim
    return 2 * local * (width + out_width) * sizes.element_size * (cp - 1) // cp


def chunkwise_work(
    workload: Workload, tp: int, cp: int, layout: str, move_sequences: str
) -> ChunkwiseWork:
    """Where chunkwise works and what it sends; see :func:`predict_costs` for the arguments."""
    boundaries = np.concatenate([[0], np.cumsum(np.asarray(workload.lengths, dtype=np.int64))])
    sizes = layer_sizes(workload, tp)
    working = token_ranges(boundaries, cp, layout)
    lengths = np.diff(boundaries)
    home = np.full(len(lengths), -1, dtype=np.int64)
    tokens = np.full(cp, int(boundaries[-1]) // cp, dtype=np.int64)
    if layout == "zigzag" and cp > 1:
        choice = choose_for(boundaries, cp, sizes, move_sequences)
        tokens = choice.tokens
        if choice.moved:
            home = choice.home
            working = mixed_token_ranges(boundaries, cp, home)
    states, states_cross = state_bytes_by_rank(
        working, cp, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim
    )
    halos, halos_cross = halo_rows_by_rank(working, boundaries, cp, sizes.conv_kernel_size)
    traffic = []
    for rank in range(cp):
        # A rank sends its share of what is brought elsewhere and gets the rest of what is brought
        # here. Hidden states go and come back; the gradients the other way.
        share = lengths // cp
        away = int(share[(home >= 0) & (home != rank)].sum())
        here = int((lengths - share)[home == rank].sum())
        traffic.append(
            RankTraffic(
                states=int(states[rank]),
                halo=int(halos[rank]) * sizes.conv_channels * sizes.element_size,
                moved=2 * (away + here) * sizes.hidden_size * sizes.element_size,
            )
        )
    moves = bool((home >= 0).any())
    collectives = 4 * states_cross + 2 * halos_cross + 4 * moves
    return ChunkwiseWork(working, home, tokens, tuple(traffic), collectives, states_cross)


def _state_bytes(sizes: LayerSizes) -> int:
    """Of one segment in fp32: ``A``, ``b`` and the entry state, and in backward two gradients."""
    key, value = sizes.key_head_dim, sizes.value_head_dim
    return sizes.num_value_heads * (key * key + 4 * key * value) * 4


def _chunk_rows(lengths: IntArray, rank: IntArray, shrinks_chunks: bool) -> IntArray:
    """Rows of the chunks that hold each segment: the last chunk of a segment is computed whole.

    A smaller chunk saves products and loses in their efficiency: a row is taken to cost the same.
    """
    longest = np.ones(int(rank.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(longest, rank, lengths)
    power = np.left_shift(1, np.ceil(np.log2(longest)).astype(np.int64))
    chunk = np.minimum(_CHUNK, power)[rank] if shrinks_chunks else np.full_like(lengths, _CHUNK)
    rows: IntArray = -(-lengths // chunk) * chunk
    return rows


def _projection_flops(workload: Workload, tp: int) -> float:
    """Per token: in and out projection, forward and the two products of backward."""
    sizes = layer_sizes(workload, tp)
    value = sizes.num_value_heads * sizes.value_head_dim
    width = sizes.conv_channels + value + 2 * sizes.num_value_heads
    return 3.0 * 2 * workload.hidden_size * (width + value)


def _rule_flops(workload: Workload, heads: int) -> float:
    """Per token, forward and backward: the chunked WY form with chunks of 64 tokens."""
    key, value = workload.key_head_dim, workload.value_head_dim
    # Gram matrices of keys and of queries with keys, the triangular solve applied to keys and
    # values, the intra-chunk output; then three products with the state.
    within = 2 * _CHUNK * (3 * key + 2 * value)
    with_state = 2 * 3 * key * value
    return float(heads * (within + with_state) * (1 + _BACKWARD))


@dataclass(frozen=True)
class SummaryFlops:
    """Of one token, in the rank's value heads, for each part of a segment's summary.

    Attributes:
        offset: ``b``, two products with the state.
        transition: ``A``, two products with a square state.
        gradient: ``c``, three products: keys, queries and weights.
    """

    offset: float
    transition: float
    gradient: float


def summary_flops(workload: Workload, heads: int) -> SummaryFlops:
    """The products of the recurrence, as in the kernels of ``ops``."""
    key, value = workload.key_head_dim, workload.value_head_dim
    return SummaryFlops(
        offset=2.0 * heads * 2 * key * value,
        transition=2.0 * heads * 2 * key * key,
        gradient=2.0 * heads * 3 * key * value,
    )


def _summaries(
    workload: Workload, heads: int, ranges: TokenRanges, rows: IntArray, cp: int
) -> float:
    """Flops of the summaries that are read; all wait for the rank with most, in each direction."""
    per_row = summary_flops(workload, heads)
    forward, backward = summary_wants(ranges)
    entering = (forward >= WANTS_OFFSET) * per_row.offset
    entering = entering + (forward == WANTS_BOTH) * per_row.transition
    returning = (backward >= WANTS_OFFSET) * per_row.gradient
    return sum(
        _slowest(np.bincount(ranges.rank, weights=rows * flops, minlength=cp), workload)
        for flops in (entering, returning)
    )


def _slowest(work: npt.NDArray[Any], workload: Workload) -> float:
    """The work of all ranks ``[cp_size]`` as one rank's that takes as long, all being at work."""
    most, mean = float(work.max()), float(work.mean())
    if workload.cores is None:
        return most
    # The busiest rank alone has a processor of its own, no more; together they have all of them.
    return max(most * min(1.0, workload.cores / len(work)), mean)
