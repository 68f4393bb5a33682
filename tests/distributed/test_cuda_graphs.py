# SPDX-License-Identifier: Apache-2.0
"""While a CUDA graph is captured nothing is read from a GPU or copied there: it is refused.

No GPU takes part: torch is made to say that a capture is on.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import cuda_graphs

from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.micro_batch import (
    CHECK_PEERS_VARIABLE,
    _DeviceMark,
    _guard_replays,
    plan_for,
)
from megatron.linear_cp.packed_seq_params import single_rank_group
from megatron.linear_cp.plan import ContextParallelPlan, plan_builds
from megatron.linear_cp.segments import HostTable
from megatron.linear_cp.testing.module import (
    ModuleCase,
    build_module,
    context_parallel_groups,
    forward_backward,
    local_inputs,
    make_config,
)
from megatron.linear_cp.testing.workers import run_distributed


@contextmanager
def capturing() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


def packed(*cu: int) -> PackedSeqParams:
    boundaries = torch.tensor(cu, dtype=torch.int32)
    return PackedSeqParams("thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)


def plan(params: PackedSeqParams | None, tokens: int = 8, layout: str = "zigzag") -> object:
    return plan_for(params, single_rank_group(), local_tokens=tokens, batch=1, layout=layout)


EARLY = "run forward and backward once before the capture with the same PackedSeqParams object"


def test_packed_input_without_a_plan_is_refused() -> None:
    params = packed(0, 3, 8)
    with capturing():
        with pytest.raises(ValueError, match=EARLY):
            plan(params)
        builds = plan_builds()
    before = plan(params)
    assert plan_builds() == builds + 1
    with capturing():
        assert plan(params) is before
        # Another layout of a micro-batch that was read already needs no reading.
        assert plan(params, layout="contiguous") is before.in_layout("contiguous")
    assert plan_builds() == builds + 1


def test_changed_boundaries_and_another_object_are_refused() -> None:
    params = packed(0, 3, 8)
    plan(params)
    params.cu_seqlens_q.copy_(torch.tensor([0, 4, 8]))
    with capturing():
        with pytest.raises(ValueError, match=EARLY):
            plan(params)
        with pytest.raises(ValueError, match=EARLY):
            plan(packed(0, 3, 8))


def test_dense_input_needs_nothing_from_the_gpu() -> None:
    with capturing():
        assert plan(None, tokens=24).total_tokens == 24


def test_a_table_that_is_not_on_the_gpu_is_refused() -> None:
    table = HostTable([0, 3, 8])
    with capturing(), pytest.raises(ValueError, match="index table of 3 entries is not on the GPU"):
        table.on(torch.device("cuda"))


def test_tables_live_as_long_as_graphs_that_read_them() -> None:
    made = ContextParallelPlan.build([0, 3, 8], None)
    device = torch.device("cpu")
    read, unread = made.segments.cu_seqlens(device), made.local_indices.on(device)
    with capturing():
        assert made.segments.cu_seqlens(device) is read
    read_lives, unread_lives = weakref.ref(read), weakref.ref(unread)
    del made, read, unread
    gc.collect()
    assert unread_lives() is None
    assert read_lives() is not None


def test_a_replay_checks_the_boundaries() -> None:
    """What the graph records: on a GPU the same operation stops a replay."""
    boundaries, captured = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8])
    _guard_replays(boundaries, captured)
    boundaries[1] = 4
    with pytest.raises(RuntimeError, match="changed after the CUDA graph was captured"):
        _guard_replays(boundaries, captured)


def test_boundaries_on_a_gpu_are_guarded_and_those_on_the_host_are_not() -> None:
    def mark_of_a_gpu(tensor: torch.Tensor | None) -> _DeviceMark | None:
        return None if tensor is None else _DeviceMark(tensor._version, tensor.clone())

    module = "megatron.linear_cp.micro_batch"
    host, device = packed(0, 3, 8), packed(0, 3, 8)
    plan(host)
    with mock.patch(f"{module}._mark", mark_of_a_gpu):
        plan(device)
    with mock.patch(f"{module}._guard_replays") as guard:
        plan(device)
        with capturing():
            plan(host)
            assert guard.call_count == 0
            plan(device)
    assert guard.call_count == 2, "those of q and of kv"


def test_megatron_cores_graphs_of_layers_refuse_packed_input() -> None:
    params = packed(0, 3, 8)
    plan(params)
    with mock.patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True):
        assert plan(None).total_tokens == 8
        with pytest.raises(ValueError, match="cuda_graph_impl='none' for packed input"):
            plan(packed(0, 3, 8))


def early_and_late_capture(row: tuple[int, ...] | None) -> tuple[list[str], int]:
    """What a rank says at CP 2 on gloo, with a plan and without; and what was sent."""
    case = ModuleCase(row=row)
    groups = context_parallel_groups()
    said = []
    with case.on_device():
        module = build_module(case, make_config(case, 2), groups)
        _, hidden, grad, params = local_inputs(case, groups)
        forward_backward(module, hidden, grad, params)
        with count_traffic() as traffic, capturing():
            for value in ("0", "1"):
                with mock.patch.dict("os.environ", {CHECK_PEERS_VARIABLE: value}):
                    try:
                        module(hidden, None, packed_seq_params=params)
                    except ValueError as error:
                        said.append(str(error))
        forward_backward(module, hidden, grad, params)
    return said, traffic.collectives


@pytest.mark.parametrize("row", [(0, 8, 24, 64), None], ids=["thd", "sbhd"])
def test_exchanges_through_the_host_are_refused(row: tuple[int, ...] | None) -> None:
    for (gloo, peers), collectives in run_distributed(early_and_late_capture, 2, row):
        assert "a context-parallel group of 2 ranks" in gloo
        assert "capture with NCCL, or at CP 1" in gloo
        assert f"{CHECK_PEERS_VARIABLE}=1" in peers
        assert collectives == 0
