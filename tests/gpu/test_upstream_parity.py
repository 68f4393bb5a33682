# SPDX-License-Identifier: Apache-2.0
"""Our module against Megatron-Core's own with the real kernels: same weights, bf16, headwise.

Both round by themselves, so two bounds hold: our error against float64 is not larger than theirs,
and the two are no further apart than independent rounding explains.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("fla", reason="needs fla-core (and Triton), which is not installed")

from megatron.linear_cp.ops import fla_capabilities
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import (
    ModuleCase,
    assemble_module,
    module_reference,
    run_module,
)
from megatron.linear_cp.testing.parity import relative_rms
from megatron.linear_cp.testing.triton import first_configuration
from megatron.linear_cp.testing.upstream import run_upstream_module
from megatron.linear_cp.testing.workers import WorkerError, run_distributed

DENSE = ModuleCase(
    mode="headwise",
    dense=(512, 2),
    shape=LayerShape(4, 8, 128, 128),
    hidden=256,
    device="cuda",
    dtype=torch.bfloat16,
    config={"linear_cp_fp32_decay": True},
)
CASES = {"sbhd": DENSE, "thd": replace(DENSE, row=(0, 8, 648, 664, 1176))}
GATE = 1e-2

Tensors = dict[str, torch.Tensor]


def run_both(cases: dict[str, ModuleCase]) -> dict[str, Tensors]:
    """By format and module; theirs only where its collectives work on the tensors' device."""
    can_send = (
        dist.get_world_size() == 1
        or "cuda:nccl" in str(dist.get_backend_config())
        or all(case.device == "cpu" for case in cases.values())
    )
    results = {}
    with first_configuration():
        for name, case in cases.items():
            results[f"ours {name}"] = run_module(case)
            if can_send:
                results[f"theirs {name}"] = run_upstream_module(case)
    return results


@cache
def outcome(cp: int) -> list[dict[str, Tensors]] | Exception:
    try:
        return run_distributed(run_both, cp, CASES, cuda=True, timeout=500)
    except WorkerError as error:
        return error


@cache
def fault_of_theirs() -> str | None:
    """Megatron-Core's module runs FLA's own rule, which some combinations get wrong."""
    import triton

    return fla_capabilities.known_fault(
        fla_capabilities.probe().version,
        triton.__version__,
        torch.cuda.get_device_capability(),
        DENSE.shape.key_head_dim,
        fla_capabilities.has_tilelang(),
    )


def results_of(cp: int, name: str) -> Tensors | None:
    """Whole tensors, or None where this was not run; a failed job fails every test at once."""
    fault = fault_of_theirs()
    if fault:
        pytest.skip(fault)
    parts = outcome(cp)
    if isinstance(parts, Exception):
        raise parts
    return assemble_module([part[name] for part in parts]) if name in parts[0] else None


@cache
def reference(input_format: str) -> Tensors:
    return module_reference(CASES[input_format])


def check_parity(ours: Tensors, theirs: Tensors, wanted: Tensors) -> None:
    """Both against float64 and against each other, all tensors in one message."""
    assert ours.keys() == theirs.keys() == wanted.keys()
    lines, failed = [], False
    for name in wanted:
        mine, upstream = (relative_rms(x[name], wanted[name]) for x in (ours, theirs))
        between = relative_rms(ours[name], theirs[name])
        # Sums that nearly cancel, such as the gradient of A_log, round by more than the gate.
        apart = max(GATE, 1.25 * math.hypot(mine, upstream))
        # Of eight values, the error itself scatters.
        factor = 2.0 if name in ("dA_log", "ddt_bias") else 1.25
        bad = not (mine <= factor * upstream + 1e-3 and between <= apart)
        failed |= bad
        lines.append(
            f"{name}: ours {mine:.2e}, theirs {upstream:.2e}, apart {between:.2e}"
            f"{'  <-- too much' if bad else ''}"
        )
    assert not failed, "\n" + "\n".join(lines)
    # The output must not hide behind that.
    assert relative_rms(ours["out"], theirs["out"]) <= GATE, "\n" + "\n".join(lines)


@pytest.mark.parametrize("input_format", CASES)
@pytest.mark.timeout(600)
def test_without_context_parallelism(input_format: str) -> None:
    ours, theirs = (results_of(1, f"{whose} {input_format}") for whose in ("ours", "theirs"))
    assert ours is not None
    assert theirs is not None
    check_parity(ours, theirs, reference(input_format))


@pytest.mark.parametrize("input_format", CASES)
@pytest.mark.timeout(600)
def test_headwise_on_two_ranks_against_theirs_on_one(input_format: str) -> None:
    ours, theirs = results_of(2, f"ours {input_format}"), results_of(1, f"theirs {input_format}")
    assert ours is not None
    assert theirs is not None
    check_parity(ours, theirs, reference(input_format))


@pytest.mark.parametrize("input_format", CASES)
@pytest.mark.timeout(600)
def test_headwise_on_two_ranks_against_theirs_on_two(input_format: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("Megatron-Core's module exchanges CUDA tensors, which takes NCCL and two GPUs")
    ours, theirs = (results_of(2, f"{whose} {input_format}") for whose in ("ours", "theirs"))
    assert ours is not None
    assert theirs is not None
    check_parity(ours, theirs, reference(input_format))
