# SPDX-License-Identifier: Apache-2.0
"""The bytes that ``plan`` predicts are those that a real layer sends, and in how many calls."""

import numpy as np
import pytest
import torch

from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.cost import Workload, predict_costs
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import ModuleCase, run_module
from megatron.linear_cp.testing.workers import run_distributed

SHAPE = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=4)
HIDDEN = 32
LENGTHS = {"one": [512], "mixed": [256, 8, 16, 8, 128, 0, 8, 8], "short": [16] * 24}
OPTIONS = [
    ("headwise", "zigzag", "never"),
    ("all_gather", "zigzag", "never"),
    ("chunkwise", "zigzag", "never"),
    ("chunkwise", "zigzag", "auto"),
    ("headwise", "contiguous", "never"),
    ("all_gather", "contiguous", "never"),
    ("chunkwise", "contiguous", "never"),
]
# Of a layer, forward and backward, as docs/modes.md has them.
COLLECTIVES = {"headwise": 4, "all_gather": 2, "chunkwise": 6}
COLLECTIVES_IF_MOVED = {"one": 6, "mixed": 10, "short": 4}


def traffic_of_layers(lengths: list[int]) -> list[tuple[int, int]]:
    """Bytes that this rank sends under each option, forward and backward, and collectives."""
    sent = []
    for mode, layout, move in OPTIONS:
        case = ModuleCase(
            mode=mode,
            layout=layout,
            dtype=torch.float32,
            row=tuple(np.cumsum([0, *lengths]).tolist()),
            shape=SHAPE,
            hidden=HIDDEN,
            config={"linear_cp_move_sequences": move},
        )
        with count_traffic() as traffic:
            run_module(case)
        sent.append((traffic.bytes_sent, traffic.collectives))
    return sent


@pytest.mark.parametrize("row", LENGTHS)
@pytest.mark.parametrize("cp", [2, 4])
def test_prediction_is_what_the_busiest_rank_sends(cp: int, row: str) -> None:
    lengths = LENGTHS[row]
    workload = Workload(
        lengths=lengths,
        num_key_heads=SHAPE.num_key_heads,
        num_value_heads=SHAPE.num_value_heads,
        key_head_dim=SHAPE.key_head_dim,
        value_head_dim=SHAPE.value_head_dim,
        conv_kernel_size=SHAPE.conv_kernel_size,
        hidden_size=HIDDEN,
        element_size=4,
    )
    by_rank = run_distributed(traffic_of_layers, cp, lengths)
    for i, (mode, layout, move) in enumerate(OPTIONS):
        predicted = predict_costs(
            workload,
            tensor_model_parallel_size=1,
            context_parallel_size=cp,
            layout=layout,
            move_sequences=move,
        )[mode]
        sent = max(result[i][0] for result in by_rank)
        assert sent == predicted.bytes_sent, (mode, layout, move)
        calls = COLLECTIVES_IF_MOVED[row] if move == "auto" else COLLECTIVES[mode]
        if (mode, layout, row) == ("chunkwise", "contiguous", "short"):
            calls = 0  # its cuts lie between sequences
        assert [result[i][1] for result in by_rank] == [calls] * cp, (mode, layout, move)
        assert predicted.collectives == calls, (mode, layout, move)
