# SPDX-License-Identifier: Apache-2.0
"""Predicted costs, and the policy that follows them."""

import pytest

from megatron.linear_cp import resolve_linear_cp_mode
from megatron.linear_cp.cost import Workload, predict_costs

SIZES = {"tensor_model_parallel_size": 1, "context_parallel_size": 8}


def test_chunkwise_bytes_do_not_grow_with_length() -> None:
    short, long = (
        predict_costs(Workload(lengths=[n]), **SIZES)["chunkwise"] for n in (16384, 131072)
    )
    assert short.bytes_sent == long.bytes_sent
    # The design's table: 18 MB for one sequence at CP 8 with 32 heads of 128 (states), plus halo.
    assert 15e6 < short.bytes_sent < 23e6


def test_other_modes_grow_with_length() -> None:
    short, long = (predict_costs(Workload(lengths=[n]), **SIZES) for n in (16384, 32768))
    for mode in ("headwise", "all_gather"):
        assert long[mode].bytes_sent == 2 * short[mode].bytes_sent


def test_all_gather_computes_everything_on_every_rank() -> None:
    costs = predict_costs(Workload(lengths=[16384]), **SIZES)
    assert costs["all_gather"].flops == pytest.approx(8 * costs["headwise"].flops)
    assert costs["chunkwise"].flops < 1.5 * costs["headwise"].flops


def test_modes_whose_heads_do_not_fit_are_missing() -> None:
    workload = Workload(lengths=[1024], num_key_heads=2, num_value_heads=4)
    assert set(predict_costs(workload, **SIZES)) == {"chunkwise", "all_gather"}


def test_one_rank_sends_nothing() -> None:
    costs = predict_costs(
        Workload(lengths=[1000]), tensor_model_parallel_size=1, context_parallel_size=1
    )
    assert {cost.bytes_sent for cost in costs.values()} == {0}


def resolve(workload: Workload | None, **changes: int | str) -> str:
    settings = {"num_key_heads": 16, "num_value_heads": 32, "policy": "cost"} | SIZES
    return resolve_linear_cp_mode("auto", workload=workload, **settings | changes)


def test_cost_policy_picks_by_predicted_time() -> None:
    slow_network = {"bytes_per_second": 20e9}
    assert resolve(Workload(lengths=[131072], **slow_network)) == "chunkwise"
    assert resolve(Workload(lengths=[32] * 512, **slow_network)) == "headwise"
    assert (
        resolve_linear_cp_mode("auto", num_key_heads=16, num_value_heads=32, **SIZES) == "headwise"
    )


def test_cost_policy_asks_for_a_fitting_workload() -> None:
    with pytest.raises(ValueError, match="pass workload"):
        resolve(None)
    with pytest.raises(ValueError, match="16 key and 32 value heads but the model has 4 and 8"):
        resolve(Workload(lengths=[1024]), num_key_heads=4, num_value_heads=8)
    with pytest.raises(ValueError, match="unknown policy 'fastest'"):
        resolve(None, policy="fastest")
    with pytest.raises(ValueError, match="no mode fits"):
        resolve(Workload(lengths=[1024]), tensor_model_parallel_size=32)
