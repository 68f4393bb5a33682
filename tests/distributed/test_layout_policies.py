# SPDX-License-Identifier: Apache-2.0
"""A hybrid stack under every layout policy: the same loss and gradients, counted conversions.

Native: zigzag all through, states exchanged. Per layer: every GDN layer brings whole sequences to
one rank and back. Regions: contiguous all through, converted around softmax attention alone.
"""

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import TransformerConfig, hidden_layout, plan
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.context_parallel_layout import layout_conversions
from megatron.linear_cp.exchange_choice import LayerSizes, choose_exchange
from megatron.linear_cp.layout import dense_token_ranges, rank_indices, token_ranges
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import ModuleCase, run_module, run_tensor_parallel
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

POLICIES = {
    "native": {"linear_cp_move_sequences": "never"},
    "per layer": {"linear_cp_move_sequences": "always"},
    "regions": {"linear_cp_layout": "contiguous"},
}
CONVERSIONS = {"native": 0, "per layer": 6, "regions": 2}
ROW = (0, 16, 16, 64, 88, 160)
DENSE = (16, 2)
VOCABULARY = 32


def run_hybrid(policy: str, row: tuple[int, ...] | None, recompute: bool = False) -> dict[str, Any]:
    """Loss and gradients of four layers; counts of conversions, plans and routes."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    size, rank = dist.get_world_size(), dist.get_rank()
    length, batch = DENSE
    settings = POLICIES[policy] | (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute
        else {}
    )
    layout = settings.get("linear_cp_layout", "zigzag")
    with cpu_cuda():
        parallel_state.initialize_model_parallel(context_parallel_size=size)
        config = TransformerConfig(
            num_layers=4,
            hidden_size=16,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=8,
            context_parallel_size=size,
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_cp_mode="chunkwise",
            normalization="RMSNorm",
            activation_func=F.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            transformer_impl="local",
            params_dtype=torch.float64,
            **settings,
        )
        model_parallel_cuda_manual_seed(5)
        torch.manual_seed(5)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gdn_hybrid_layer_spec(config),
            vocab_size=VOCABULARY,
            max_sequence_length=256,
            position_embedding_type="rope",
        )
        params = None
        if row is None:
            total, ranges = length * batch, dense_token_ranges(length, batch, size, layout)
        else:
            total, batch, ranges = row[-1], 1, token_ranges(row, size, layout)
            cu, longest = torch.tensor(row, dtype=torch.int32), int(np.diff(row).max())
            params = PackedSeqParams("thd", cu, cu, None, None, longest, longest)
        index = torch.from_numpy(rank_indices(ranges, rank))
        generator = torch.Generator().manual_seed(total)
        tokens = torch.randint(0, VOCABULARY, (total,), generator=generator)
        weight = torch.randn(total, VOCABULARY, generator=generator, dtype=torch.float64)
        routes = mock.Mock(wraps=plan.build_layout_route)
        before = layout_conversions(), plan.plan_builds()
        with mock.patch.object(plan, "build_layout_route", routes):
            logits = model(
                tokens[index].view(batch, -1),
                torch.arange(len(index) // batch).expand(batch, -1),
                None,
                packed_seq_params=params,
            )
            forward = layout_conversions() - before[0]
            loss = (logits * weight[index].view(batch, -1, VOCABULARY)).sum()
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for value in (loss := loss.detach(), *grads.values()):
        dist.all_reduce(value)
    counts = {
        "conversions": forward,
        "plans": plan.plan_builds() - before[1],
        "routes": routes.call_count,
    }
    return {"tensors": {"loss": loss, **grads}, "counts": counts}


@cache
def one_rank(row: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    [result] = run_distributed(run_hybrid, 1, "native", row)
    tensors: dict[str, torch.Tensor] = result["tensors"]
    return tensors


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize(
    ("policy", "row"),
    # Only packed input moves sequences.
    [("native", ROW), ("native", None), ("per layer", ROW), ("regions", ROW), ("regions", None)],
    ids=["native-thd", "native-sbhd", "per-layer-thd", "regions-thd", "regions-sbhd"],
)
@pytest.mark.parametrize("cp", [2, 4])
def test_policies_agree(cp: int, policy: str, row: tuple[int, ...] | None, recompute: bool) -> None:
    for result in run_distributed(run_hybrid, cp, policy, row, recompute):
        assert_all_close(result["tensors"], one_rank(row), 1e-10)
        conversions = CONVERSIONS[policy]
        # One plan and one route each way, whatever the depth and recompute.
        assert result["counts"] == {
            "conversions": conversions,
            "plans": 1,
            "routes": 2 if conversions else 0,
        }


MIXED = (0, 512, 520, 528, 1040, 1048, 1056)
SHAPE = LayerShape(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=8)


def traffic_of(case: ModuleCase) -> dict[str, Any]:
    from megatron.linear_cp import ContextParallelPlan

    with count_traffic() as traffic:
        run_module(case)
    sizes = LayerSizes(
        hidden_size=case.hidden,
        num_value_heads=SHAPE.num_value_heads,
        key_head_dim=SHAPE.key_head_dim,
        value_head_dim=SHAPE.value_head_dim,
        conv_channels=SHAPE.conv_dim,
        conv_kernel_size=SHAPE.conv_kernel_size,
        element_size=case.dtype.itemsize,
    )
    row = ContextParallelPlan.build(list(case.row or ()), dist.group.WORLD)
    choice = choose_exchange(row, sizes, case.config["linear_cp_move_sequences"])
    return {"bytes": traffic.bytes_sent, "counted": choice.total_bytes, "moved": choice.moved}


@pytest.mark.parametrize("row", [(0, 512), MIXED, tuple(range(0, 65 * 16, 16))], ids=len)
def test_bytes_are_those_counted_and_the_smallest(row: tuple[int, ...]) -> None:
    sent = {}
    for policy in ("never", "always", "auto"):
        case = ModuleCase(
            dtype=torch.float32,
            row=row,
            shape=SHAPE,
            hidden=32,
            config={"linear_cp_move_sequences": policy},
        )
        results = run_distributed(traffic_of, 4, case)
        sent[policy] = sum(result["bytes"] for result in results)
        assert len({(result["counted"], result["moved"]) for result in results}) == 1
        # Units of several chains are dealt over the ranks together, so what a rank keeps for
        # itself may differ a little from the count of each chain alone.
        several_scans = policy != "always" and len(row) > 2
        tolerance = 0.02 if several_scans else 0.0
        assert sent[policy] == pytest.approx(results[0]["counted"], rel=tolerance)
    assert sent["auto"] <= min(sent["never"], sent["always"])


def check_sequence_parallel(joint: bool) -> None:
    case = replace(
        ModuleCase(), row=(0, 16, 48, 64, 96), config={"linear_cp_move_sequences": "always"}
    )
    before = layout_conversions()
    if joint:
        actual, expected = run_tensor_parallel(case, True)
    else:
        with mock.patch.object(hidden_layout, "_tensor_and_context_group", return_value=None):
            actual, expected = run_tensor_parallel(case, True)
    assert layout_conversions() - before == 2
    assert_all_close(actual, expected, 1e-12)


@pytest.mark.parametrize("joint", [True, False], ids=["one exchange", "gather and scatter"])
def test_conversion_under_sequence_parallelism(joint: bool) -> None:
    run_distributed(check_sequence_parallel, 4, joint)


def one_exchange_moves_less(joint: bool) -> int:
    with count_traffic() as traffic:
        check_sequence_parallel(joint)
    return traffic.bytes_sent


def test_one_exchange_moves_every_row_once() -> None:
    """Gathered rows would be sent by every tensor-parallel rank: twice the bytes at TP 2."""
    once = sum(run_distributed(one_exchange_moves_less, 4, True))
    again = sum(run_distributed(one_exchange_moves_less, 4, False))
    assert once < 0.75 * again
