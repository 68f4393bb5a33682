# SPDX-License-Identifier: Apache-2.0
"""Predicted bytes, flops and time of one layer under each mode, counted, not fitted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.linear_cp.exchange_choice import LayerSizes, choose_for
from megatron.linear_cp.layout import check_divisible, mixed_token_ranges, token_ranges
from megatron.linear_cp.modes.heads import heads_fit
from megatron.linear_cp.routes import build_halo_route, build_state_route
from megatron.linear_cp.segments import IntArray

_CHUNK = 64
# Backward does about two products for each of forward's, and repeats part of forward.
_BACKWARD = 2.5


@dataclass(frozen=True)
class Workload:
    """One layer and the micro-batch it sees.

    Attributes:
        lengths: tokens of every packed sequence, each a multiple of what the layout needs.
        num_key_heads, num_value_heads: of the whole model.
        key_head_dim, value_head_dim: channels of a head.
        conv_kernel_size: taps of the convolution.
        hidden_size: of the model, which is what a moved token costs.
        element_size: bytes of an activation, 2 for bf16.
        bytes_per_second: what a rank can send, all peers together. The default, 200 GB/s, is what
            an all-to-all reaches inside one NVLink host; across hosts use the network's figure.
        flops_per_second: what a rank computes in the rule; 100 TFLOP/s by default.
    """

    lengths: Sequence[int]
    num_key_heads: int = 16
    num_value_heads: int = 32
    key_head_dim: int = 128
    value_head_dim: int = 128
    conv_kernel_size: int = 4
    hidden_size: int = 2048
    element_size: int = 2
    bytes_per_second: float = 200e9
    flops_per_second: float = 100e12


@dataclass(frozen=True)
class ModeCost:
    """What one rank (the busiest) spends on a layer, forward and backward.

    Attributes:
        bytes_sent: to other ranks.
        flops: of convolution excluded, rule and summaries included.
        seconds: bytes over bandwidth plus flops over rate; nothing overlaps in this count.
    """

    bytes_sent: int
    flops: float
    seconds: float = field(compare=False)


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
    heads = workload.num_value_heads // tp
    key_heads = workload.num_key_heads // tp
    width = 2 * key_heads * workload.key_head_dim + heads * workload.value_head_dim + 2 * heads
    out_width = heads * workload.value_head_dim
    size = workload.element_size
    rule = _rule_flops(workload, heads) * local

    counted = {
        # The projections go out and the output comes back; backward is the mirror image.
        "headwise": (2 * local * (width + out_width) * size * (cp - 1) // cp, rule),
        # Backward scatters the gradient of what forward gathered.
        "all_gather": (2 * (cp - 1) * local * width * size, rule * cp),
        "chunkwise": _chunkwise(workload, boundaries, cp, tp, layout, move_sequences),
    }
    costs = {}
    for mode, (sent, flops) in counted.items():
        if heads_fit(
            mode,
            num_key_heads=workload.num_key_heads,
            num_value_heads=workload.num_value_heads,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
        ):
            seconds = sent / workload.bytes_per_second + flops / workload.flops_per_second
            costs[mode] = ModeCost(int(sent), flops, seconds)
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


def _chunkwise(
    workload: Workload, boundaries: IntArray, cp: int, tp: int, layout: str, move: str
) -> tuple[int, float]:
    """Bytes and flops of the busiest rank: states in fp32, halos both ways, and moved tokens."""
    sizes = layer_sizes(workload, tp)
    working = token_ranges(boundaries, cp, layout)
    lengths = np.diff(boundaries)
    home = np.full(len(lengths), -1, dtype=np.int64)
    tokens = int(boundaries[-1]) // cp
    if layout == "zigzag" and cp > 1:
        choice = choose_for(boundaries, cp, sizes, move)
        tokens = int(choice.tokens.max())
        if choice.moved:
            home = choice.home
            working = mixed_token_ranges(boundaries, cp, home)
    most = 0
    for rank in range(cp):
        sent = build_state_route(working, rank, cp, sizes.num_value_heads).bytes_sent(
            rank, sizes.key_head_dim, sizes.value_head_dim
        )
        halo = build_halo_route(working, boundaries, rank, cp, sizes.conv_kernel_size)
        rows = sum(halo.send_splits) + sum(halo.recv_splits)
        sent += rows * sizes.conv_channels * sizes.element_size
        # A rank sends its share of what is brought elsewhere and gets the rest of what is brought
        # here. Hidden states go and come back; the gradients the other way.
        share = lengths // cp
        away = int(share[(home >= 0) & (home != rank)].sum())
        here = int((lengths - share)[home == rank].sum())
        sent += 2 * (away + here) * sizes.hidden_size * sizes.element_size
        most = max(most, sent)
    flops = _rule_flops(workload, sizes.num_value_heads)
    if cp > 1:
        flops += _summary_flops(workload, sizes.num_value_heads)
    return most, flops * tokens


def _rule_flops(workload: Workload, heads: int) -> float:
    """Per token, forward and backward: the chunked WY form with chunks of 64 tokens."""
    key, value = workload.key_head_dim, workload.value_head_dim
    # Gram matrices of keys and of queries with keys, the triangular solve applied to keys and
    # values, the intra-chunk output; then three products with the state.
    within = 2 * _CHUNK * (3 * key + 2 * value)
    with_state = 2 * 3 * key * value
    return float(heads * (within + with_state) * (1 + _BACKWARD))


def _summary_flops(workload: Workload, heads: int) -> float:
    """Per token: the recurrence on ``[0 | I]`` in forward, and on the gradient in backward."""
    key, value = workload.key_head_dim, workload.value_head_dim
    return float(heads * 2 * 2 * key * ((key + value) + value))
