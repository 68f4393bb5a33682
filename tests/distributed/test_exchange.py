# SPDX-License-Identifier: Apache-2.0
"""What crosses ranks, and what must not: leaks, bytes, empty sequences, dense batches."""

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.linear_cp.comm import all_gather_rows, all_to_all_rows, count_traffic
from megatron.linear_cp.ops import gated_delta_rule, torch_rule
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.segments import WANTS_NOTHING, WANTS_OFFSET
from megatron.linear_cp.testing.layer import (
    LayerShape,
    assemble,
    layer_reference,
    make_layer_inputs,
    run_mode,
    run_rows,
)
from megatron.linear_cp.testing.parity import assert_all_close, make_rule_inputs
from megatron.linear_cp.testing.workers import run_distributed

MODES = ("headwise", "chunkwise", "all_gather")
SHAPE = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=4, value_head_dim=6)


def run_perturbed(mode: str, layout: str, row: list[int], first: int, last: int) -> list[dict]:
    """One run as it is and one with tokens ``first`` to ``last`` changed."""
    plan = ContextParallelPlan.build(row, dist.group.WORLD, layout=layout)
    results = []
    for shift in (0.0, 1.0):
        tensors = make_layer_inputs(SHAPE, row[-1], torch.float32)
        for name in ("qkv", "beta", "alpha", "grad_out"):
            tensors[name][:, first:last] += shift
        results.append(run_mode(mode, plan, tensors, SHAPE))
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("layout", "row", "changed"),
    [
        ("zigzag", [0, 16, 40, 72], 1),
        ("contiguous", [0, 13, 41, 72], 0),
        ("contiguous", [0, 13, 41, 72], 1),
    ],
)
def test_a_sequence_sees_nothing_of_another(
    mode: str, layout: str, row: list[int], changed: int
) -> None:
    """Slow decay; the last tokens of one sequence change; every other stays bitwise equal."""
    stop = row[changed + 1]
    by_rank = run_distributed(run_perturbed, 2, mode, layout, row, stop - 3, stop)
    before, after = (assemble([parts[i] for parts in by_rank], row, layout) for i in range(2))
    for name in ("out", "dqkv", "dbeta", "dalpha"):
        for s, (start, end) in enumerate(zip(row, row[1:], strict=False)):
            same = torch.equal(before[name][:, start:end], after[name][:, start:end])
            assert same == (s != changed), f"{name} of sequence {s}"


def count_scan(lengths: list[int], layout: str, heads: int, key_dim: int, value_dim: int) -> dict:
    row = [0, *np.cumsum(lengths).tolist()]
    plan = ContextParallelPlan.build(row, dist.group.WORLD, layout=layout)
    whole = make_rule_inputs(
        row[-1],
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=torch.float32,
    )
    mine = plan.local_indices.on(torch.device("cpu"))
    leaves = {name: x[:, mine].requires_grad_() for name, x in whole.items()}
    with count_traffic() as traffic:
        gated_delta_rule(**leaves, plan=plan).sum().backward()
    formula = plan.state_route(heads).bytes_sent(dist.get_rank(), key_dim, value_dim)
    return {"sent": traffic.bytes_sent, "calls": traffic.collectives, "formula": formula}


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_scan_moves_what_the_formula_says_whatever_the_length(cp: int) -> None:
    heads, key_dim, value_dim = 4, 8, 6
    short, long = (
        run_distributed(
            count_scan, cp, [2 * cp * n, 4 * cp * n], "zigzag", heads, key_dim, value_dim
        )
        for n in (1, 16)
    )
    for rank in range(cp):
        assert short[rank]["sent"] == long[rank]["sent"] == short[rank]["formula"]
        assert short[rank]["calls"] == 4
    # The design's bound: two segments a sequence on a rank; (A, b) out and a state back in forward,
    # a state each way in backward; fp32.
    bound = 2 * 2 * heads * (key_dim * (key_dim + value_dim) + 3 * key_dim * value_dim) * 4
    assert max(result["sent"] for result in long) <= bound


def test_no_collective_where_no_chain_crosses() -> None:
    for result in run_distributed(count_scan, 2, [64, 64], "contiguous", 2, 4, 4):
        assert result == {"sent": 0, "calls": 0, "formula": 0}


def wanted_of_summaries() -> dict[str, list[int]]:
    """What the kernels are asked for on this rank, one sequence in two halves."""
    plan = ContextParallelPlan.build([0, 16], dist.group.WORLD, layout="contiguous")
    asked = {}
    with contextlib.ExitStack() as stack:
        for name in ("summarize", "backward_summarize"):
            spy = mock.patch.object(torch_rule, name, wraps=getattr(torch_rule, name))
            asked[name] = stack.enter_context(spy)
        run_mode("chunkwise", plan, make_layer_inputs(SHAPE, 16, torch.float32), SHAPE)
    return {name: spy.call_args.args[1].array.tolist() for name, spy in asked.items()}


def test_kernels_are_asked_for_no_more_than_is_read() -> None:
    """``b`` of the first half in forward, ``c`` of the second in backward, nothing else."""
    assert run_distributed(wanted_of_summaries, 2) == [
        {"summarize": [WANTS_OFFSET], "backward_summarize": [WANTS_NOTHING]},
        {"summarize": [WANTS_NOTHING], "backward_summarize": [WANTS_OFFSET]},
    ]


def run_dense(mode: str, layout: str, length: int, batch: int) -> dict[str, torch.Tensor]:
    plan = ContextParallelPlan.build_dense(length, batch, dist.group.WORLD, layout=layout)
    tensors = make_layer_inputs(SHAPE, length * batch)
    return run_mode(mode, plan, tensors, SHAPE) | {
        "index": plan.local_indices.on(torch.device("cpu"))
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_dense_batch_of_three(mode: str, layout: str) -> None:
    length, batch = 16, 3
    parts = run_distributed(run_dense, 2, mode, layout, length, batch)
    row = [length * i for i in range(batch + 1)]
    expected = layer_reference(make_layer_inputs(SHAPE, row[-1]), SHAPE, row)
    actual = {}
    for name in expected:
        if name in ("out", "dqkv", "dbeta", "dalpha"):
            actual[name] = torch.full_like(expected[name], float("nan"))
            for part in parts:
                actual[name][:, part["index"]] = part[name]
        else:
            actual[name] = sum(part[name] for part in parts)
    assert_all_close(actual, expected, 1e-12)


def run_random(jobs: list[tuple[str, str, list[int], LayerShape]]) -> list[dict]:
    return [
        run_rows(mode, layout, [row], torch.float64, shape)[0] for mode, layout, row, shape in jobs
    ]


@st.composite
def random_jobs(draw: st.DrawFn, cp: int) -> list[tuple[str, str, list[int], LayerShape]]:
    """Several random rows a job: starting the ranks costs more than running a row."""
    jobs = []
    for _ in range(6):
        layout = draw(st.sampled_from(["zigzag", "contiguous"]))
        lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
        if layout == "zigzag":
            lengths = [2 * cp * n for n in lengths]
        lengths[-1] += -sum(lengths) % cp
        lengths.append(0 if sum(lengths) else 2 * cp)
        heads = cp * draw(st.integers(1, 2))
        shape = LayerShape(
            num_key_heads=heads,
            num_value_heads=heads * draw(st.integers(1, 3)),
            key_head_dim=draw(st.integers(1, 6)),
            value_head_dim=draw(st.integers(1, 6)),
            conv_kernel_size=draw(st.integers(1, 6)),
        )
        mode = draw(st.sampled_from(MODES))
        jobs.append((mode, layout, [0, *np.cumsum(lengths).tolist()], shape))
    return jobs


@pytest.mark.parametrize("cp", [2, 3])
def test_random_rows_equal_the_reference(cp: int) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(jobs=random_jobs(cp))
    def check(jobs: list[tuple[str, str, list[int], LayerShape]]) -> None:
        by_rank = run_distributed(run_random, cp, jobs)
        for i, (mode, layout, row, shape) in enumerate(jobs):
            actual = assemble([parts[i] for parts in by_rank], row, layout)
            expected = layer_reference(make_layer_inputs(shape, row[-1]), shape, row)
            try:
                assert_all_close(actual, expected, 1e-11)
            except AssertionError as error:
                raise AssertionError(f"{mode}, {layout}, {row}, {shape}: {error}") from None

    check()


def run_collectives() -> dict[str, torch.Tensor]:
    """Uneven all-to-all (some ranks send nothing) and all-gather, with their gradients."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    send = [(rank + peer) % size for peer in range(size)]
    x = (torch.arange(sum(send) * 2.0).view(-1, 2) + 100 * rank).requires_grad_()
    received = all_to_all_rows(x, send, send, group)
    (received * (rank + 1)).sum().backward()
    y = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = all_gather_rows(y, group)
    (gathered * (rank + 1)).sum().backward()
    return {
        "received": received.detach(),
        "dx": x.grad,
        "gathered": gathered.detach(),
        "dy": y.grad,
    }


def test_collectives_and_their_gradients() -> None:
    size = 3
    results = run_distributed(run_collectives, size)
    for rank, result in enumerate(results):
        rows, grads = [], []
        for peer in range(size):
            count = (rank + peer) % size
            before = sum((peer + other) % size for other in range(rank))
            own = torch.arange(before * 2.0, (before + count) * 2.0).view(-1, 2)
            rows.append(own + 100 * peer)
            grads.append(torch.full((count, 2), peer + 1.0))
        assert torch.equal(result["received"], torch.cat(rows))
        assert torch.equal(result["dx"], torch.cat(grads))
        assert torch.equal(
            result["gathered"], torch.arange(3.0).repeat_interleave(2)[:, None].expand(-1, 3)
        )
        # Every rank's gradient of this shard adds up: 1 + 2 + 3.
        assert torch.equal(result["dy"], torch.full((2, 3), 6.0))
