# SPDX-License-Identifier: Apache-2.0
"""Every mode with the real kernels, on as many GPUs as there are: NCCL, or gloo on a shared one."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.context_parallel_layout import (
    contiguous_to_zigzag_chunks,
    zigzag_to_contiguous_chunks,
)
from megatron.linear_cp.testing.layer import (
    LayerShape,
    assemble,
    layer_reference,
    make_layer_inputs,
    run_mode,
    run_rows,
)
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.triton import first_configuration
from megatron.linear_cp.testing.workers import run_distributed

# Heads of the size of real models; every row has sequences that cross cuts.
SHAPE = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=128, value_head_dim=128)
ROWS = {2: [0, 64, 400, 408, 640], 4: [0, 8, 648, 664, 1176]}
VARIANTS = {
    "headwise": ("headwise", "zigzag", "scan"),
    "all_gather": ("all_gather", "zigzag", "scan"),
    "chunkwise zigzag scan": ("chunkwise", "zigzag", "scan"),
    "chunkwise contiguous scan": ("chunkwise", "contiguous", "scan"),
    "chunkwise zigzag fla": ("chunkwise", "zigzag", "fla"),
    "chunkwise contiguous fla": ("chunkwise", "contiguous", "fla"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The layer rounds between convolution, norm and rule; the kernels alone are held to 5e-3.
GATES = {"fp32": 1e-4, "bf16": 1.5e-2}


def run_everything(row: list[int]) -> dict[str, Any]:
    """All variants, dtypes and extras in one job: starting processes with CUDA takes long."""
    with first_configuration():
        return run_all(row)


def run_all(row: list[int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for dtype_name, dtype in DTYPES.items():
        for name, (mode, layout, exchange) in VARIANTS.items():
            [results[f"{name} {dtype_name}"]] = run_rows(
                mode, layout, [row], dtype, SHAPE, device="cuda", state_exchange=exchange
            )
    for mode in ("headwise", "chunkwise", "all_gather"):
        both = [
            run_rows(mode, "zigzag", [row], torch.float32, SHAPE, device="cuda", backend="torch")[0]
            for _ in range(2)
        ]
        results[f"deterministic {mode}"] = all(torch.equal(both[0][n], both[1][n]) for n in both[0])
        results[f"torch {mode}"] = both[0]
    results["round trip"] = round_trip(row)
    results["syncs"] = count_syncs(row)
    return results


def round_trip(row: list[int]) -> bool:
    group = dist.group.WORLD
    assert group is not None
    plan = ContextParallelPlan.build(row, group)
    x = torch.randn(plan.local_tokens, 3, device="cuda", dtype=torch.bfloat16)
    moved = zigzag_to_contiguous_chunks(x, group, plan=plan)
    back = contiguous_to_zigzag_chunks(moved, group, plan=plan.in_layout("contiguous"))
    return torch.equal(back, x)


def count_syncs(row: list[int]) -> str:
    """Forward and backward after the plan exists, with every host sync made an error.

    Gloo stages through the host and must wait; only NCCL ranks can be free of syncs.
    """
    group = dist.group.WORLD
    assert group is not None
    if "nccl" not in str(dist.get_backend_config(group)):
        return "not measured: gloo stages through the host"
    plan = ContextParallelPlan.build(row, group)
    tensors = {n: x.cuda() for n, x in make_layer_inputs(SHAPE, row[-1], torch.bfloat16).items()}
    for _ in range(2):
        run_mode("chunkwise", plan, tensors, SHAPE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with count_traffic() as traffic:
            run_mode("chunkwise", plan, tensors, SHAPE)
    except RuntimeError as error:
        return f"sync: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"none in {traffic.collectives} collectives"


@cache
def job(cp: int) -> list[dict[str, Any]]:
    return run_distributed(run_everything, cp, ROWS[cp], cuda=True, timeout=500)


@cache
def reference(cp: int, dtype_name: str) -> dict[str, torch.Tensor]:
    row = ROWS[cp]
    return layer_reference(make_layer_inputs(SHAPE, row[-1], DTYPES[dtype_name]), SHAPE, row)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cp", ROWS)
@pytest.mark.timeout(600)
def test_whole_layer(cp: int, name: str, dtype_name: str) -> None:
    parts = [result[f"{name} {dtype_name}"] for result in job(cp)]
    actual = assemble(parts, ROWS[cp], VARIANTS[name][1])
    assert_all_close(actual, reference(cp, dtype_name), GATES[dtype_name])


@pytest.mark.parametrize("mode", ["headwise", "chunkwise", "all_gather"])
@pytest.mark.parametrize("cp", ROWS)
@pytest.mark.timeout(600)
def test_deterministic_mode(cp: int, mode: str) -> None:
    results = job(cp)
    assert all(result[f"deterministic {mode}"] for result in results)
    actual = assemble([result[f"torch {mode}"] for result in results], ROWS[cp], "zigzag")
    assert_all_close(actual, reference(cp, "fp32"), 1e-5)


@pytest.mark.parametrize("cp", ROWS)
@pytest.mark.timeout(600)
def test_layout_round_trip(cp: int) -> None:
    assert all(result["round trip"] for result in job(cp))


@pytest.mark.parametrize("cp", ROWS)
@pytest.mark.timeout(600)
def test_no_host_sync_once_the_plan_exists(cp: int) -> None:
    for result in job(cp):
        if result["syncs"].startswith("not measured"):
            pytest.skip(result["syncs"])
        assert result["syncs"].startswith("none")
