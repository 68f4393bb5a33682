# SPDX-License-Identifier: Apache-2.0
"""Predicted costs, and the policy that follows them."""

from dataclasses import replace

import pytest

from megatron.linear_cp import resolve_linear_cp_mode
from megatron.linear_cp.cost import Workload, predict_costs

SIZES = {"tensor_model_parallel_size": 1, "context_parallel_size": 8}


def test_chunkwise_bytes_do_not_grow_with_length() -> None:
    short, long, longest = (
        predict_costs(Workload(lengths=[n]), **SIZES)["chunkwise"]
        for n in (131072, 262144, 1048576)
    )
    assert long.bytes_sent == longest.bytes_sent
    # The last rank's run is one segment while it is short.
    assert short.bytes_sent < long.bytes_sent < 1.05 * short.bytes_sent
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


def seconds_of_chunkwise(workload: Workload, layout: str = "zigzag", **sizes: int) -> float:
    return predict_costs(workload, layout=layout, **SIZES | sizes)["chunkwise"].seconds


def test_a_chunk_that_is_not_full_costs_as_much() -> None:
    """Sequences of 16 tokens fill a quarter of the chunks of 64 that they take."""
    full, short = (Workload(lengths=[n] * (65536 // n)) for n in (64, 16))
    one = {"context_parallel_size": 1}
    costs = [predict_costs(w, **SIZES | one)["chunkwise"].flops for w in (full, short)]
    assert costs[1] == pytest.approx(4 * costs[0])
    shrinking = replace(short, shrinks_chunks=True)
    assert predict_costs(shrinking, **SIZES | one)["chunkwise"].flops == pytest.approx(costs[0])


def test_no_summaries_where_nothing_crosses() -> None:
    """Eight sequences, one on each rank of the contiguous layout: what a rank does without CP."""
    workload = Workload(lengths=[4096] * 8)
    alone = replace(workload, lengths=[4096])
    costs = predict_costs(workload, layout="contiguous", **SIZES)["chunkwise"]
    assert (costs.bytes_sent, costs.collectives) == (0, 0)
    expected = predict_costs(alone, **SIZES | {"context_parallel_size": 1})["chunkwise"]
    assert costs.flops == expected.flops
    assert costs.seconds == pytest.approx(expected.seconds)
    cut = replace(workload, lengths=[4096 + 8] * 7 + [4096 - 56])
    assert predict_costs(cut, layout="contiguous", **SIZES)["chunkwise"].flops > costs.flops


def test_only_summaries_that_are_read_count() -> None:
    """One sequence in two halves: ``b`` of the first in forward, ``c`` of the other in backward."""
    workload, sizes = Workload(lengths=[2048]), SIZES | {"context_parallel_size": 2}
    contiguous = predict_costs(workload, layout="contiguous", **sizes)["chunkwise"].flops
    rule = predict_costs(workload, **sizes)["headwise"].flops
    heads, state = workload.num_value_heads, workload.key_head_dim * workload.value_head_dim
    assert contiguous - rule == pytest.approx(1024 * heads * (4 + 6) * state)
    # zigzag cuts it into four: the second rank has both middle ones, whose A is read as well.
    zigzag = predict_costs(workload, **sizes)["chunkwise"].flops
    assert zigzag - rule == pytest.approx(1024 * heads * (8 + 6) * state)


def test_ranks_that_share_processors_leave_them_to_the_busiest() -> None:
    """Contiguous, one sequence, CP 2: only one rank has a summary to compute, each way."""
    workload, sizes = Workload(lengths=[2048]), SIZES | {"context_parallel_size": 2}
    flops = {
        cores: predict_costs(replace(workload, cores=cores), layout="contiguous", **sizes)
        for cores in (None, 4, 2, 1)
    }
    summaries = {
        cores: costs["chunkwise"].flops - costs["headwise"].flops for cores, costs in flops.items()
    }
    assert summaries[None] == summaries[4] == summaries[2]
    assert summaries[1] == pytest.approx(summaries[2] / 2)


@pytest.mark.parametrize(
    ("field", "share"),
    [
        ("bytes_per_second", "bytes"),
        ("seconds_per_collective", "exchanges"),
        ("memory_bytes_per_second", "copies"),
        ("flops_per_second", "rule"),
        ("summary_flops_per_second", "summaries"),
        ("dense_flops_per_second", "projections"),
    ],
)
def test_every_figure_of_the_machine_counts(field: str, share: str) -> None:
    workload = Workload(lengths=[4096, 512])
    factor = 4.0 if field == "seconds_per_collective" else 0.25
    slower = replace(workload, **{field: factor * getattr(workload, field)})
    before, after = (predict_costs(w, **SIZES) for w in (workload, slower))
    grown = {mode for mode in before if after[mode].seconds > before[mode].seconds}
    assert grown == ({"chunkwise"} if share == "summaries" else set(before)), share


def test_rows_are_those_that_a_rank_runs() -> None:
    """headwise and all_gather run every token, chunkwise its own."""
    workload = Workload(lengths=[4096])
    costs = [predict_costs(w, **SIZES) for w in (workload, replace(workload, seconds_per_row=1.0))]
    grown = {mode: costs[1][mode].seconds - costs[0][mode].seconds for mode in costs[0]}
    assert grown == pytest.approx({"headwise": 4096, "all_gather": 4096, "chunkwise": 512})


def test_the_benchmarked_layer_on_one_gpu() -> None:
    """README's layer: 18.02 ms measured, of which norms and gates are not counted here."""
    one = Workload(lengths=[32768])
    assert 15e-3 < seconds_of_chunkwise(one, context_parallel_size=1) < 18.02e-3


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
    assert resolve(Workload(lengths=[2048] * 4, **slow_network)) == "headwise"
    # Brought whole to one rank each: exchanging their states would take longer than headwise.
    short = Workload(lengths=[32] * 512, **slow_network)
    costs = predict_costs(short, **SIZES)
    assert costs["headwise"].seconds < costs["chunkwise"].seconds
    assert resolve(short) == "chunkwise"
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
