# SPDX-License-Identifier: Apache-2.0
"""The whole module with the real kernels: NCCL, or gloo ranks that share a GPU.

Starting a process with CUDA takes seconds, so each number of ranks runs a dtype in one job and the
tests look at their part of what it returned. Every packed row has sequences that cross cuts.

In bf16 the module's own rounding is 5e-3 of its output, and more of some gradients. Where a cut
moves the chunks of 64 tokens, two runs round independently. So the contract's gates hold between
runs on a row whose long sequences are cut between chunks, and on any row a rank more must add no
error to that of one rank against float64. FLA's exchange runs FLA's kernels throughout, which round
elsewhere than ours: between runs it is compared with those kernels on one rank.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("fla", reason="needs fla-core (and Triton), which is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import triton

from megatron.linear_cp import ContextParallelPlan, register_linear_cp_mode
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.context_parallel_layout import (
    contiguous_to_zigzag_chunks,
    zigzag_to_contiguous_chunks,
)
from megatron.linear_cp.modes.chunkwise import run_fla_rule
from megatron.linear_cp.ops import fla_capabilities
from megatron.linear_cp.ops.fla_kernels import products_of
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import (
    ModuleCase,
    assemble_module,
    build_module,
    context_parallel_groups,
    forward_backward,
    gradients,
    local_inputs,
    make_config,
    module_reference,
    run_module,
    run_tensor_parallel,
)
from megatron.linear_cp.testing.parity import assert_all_close, relative_rms
from megatron.linear_cp.testing.triton import first_configuration
from megatron.linear_cp.testing.workers import WorkerError, run_distributed

CP = (2, 4)
ROW = (0, 8, 648, 664, 1176)
# Both layouts cut its long sequences at multiples of 64 tokens, up to 4 ranks.
ALIGNED_ROW = (0, 1024, 1032, 1048, 1280, 1792)
BASE = ModuleCase(
    row=ROW, shape=LayerShape(4, 8, 128, 128), hidden=256, device="cuda", dtype=torch.float32
)
VARIANTS = {
    "headwise": ("headwise", "zigzag", "scan"),
    "all_gather": ("all_gather", "zigzag", "scan"),
    "chunkwise zigzag scan": ("chunkwise", "zigzag", "scan"),
    "chunkwise contiguous scan": ("chunkwise", "contiguous", "scan"),
    "chunkwise zigzag fla": ("chunkwise", "zigzag", "fla"),
    "chunkwise contiguous fla": ("chunkwise", "contiguous", "fla"),
}
# Of FLA's own rule, which "fla" runs and "scan" does not.
FLA_FAULT = fla_capabilities.known_fault(
    fla_capabilities.probe().version,
    triton.__version__,
    torch.cuda.get_device_capability(),
    BASE.shape.key_head_dim,
    fla_capabilities.has_tilelang(),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("headwise", "chunkwise", "all_gather")
FP32_GATE, BF16_GATE, BF16_BETA_GATE = 1e-4, 5e-3, 1e-2
# FLA takes float32 products as TF32, which has 10 bits, unless Triton is told otherwise. Its kernel
# for gradients within a chunk, compiled for more, takes four minutes with values of 128 channels,
# ten seconds with 64.
FLA_FP32_SHAPE = LayerShape(4, 8, 128, 64)
FLA_KERNELS = "fla kernels"  # FLA's exchange on one rank, which has nobody to exchange with
# Qwen3-Next's layer, for what depends on its size.
QWEN = ModuleCase(
    row=(0, 16384),
    shape=LayerShape(16, 32, 128, 128),
    hidden=2048,
    device="cuda",
    dtype=torch.bfloat16,
)


def variant(name: str, dtype_name: str) -> ModuleCase:
    mode, layout, exchange = VARIANTS[name]
    shape = FLA_FP32_SHAPE if exchange == "fla" and dtype_name == "fp32" else BASE.shape
    return replace(
        BASE,
        shape=shape,
        mode=mode,
        layout=layout,
        state_exchange=exchange,
        dtype=DTYPES[dtype_name],
        # Sums over all tokens that nearly cancel: bf16 would show its rounding, not the kernels'.
        config={"linear_cp_fp32_decay": True},
    )


def run_part(part: str) -> dict[str, Any]:
    """Everything that is wanted of one dtype, or the rest."""
    with first_configuration(), fla_over_gloo():
        if part == "rest":
            return run_rest()
        if dist.get_world_size() == 1:
            return run_one_rank(part)
        names = [name for name in VARIANTS if not (name.endswith("fla") and FLA_FAULT)]
        results = {}
        for name in names:
            # Only FLA's own exchange is not told by us.
            with products_of(DTYPES[part]):
                results[name] = run_module(variant(name, part))
        if part == "bf16":
            for name in names:
                results[f"aligned {name}"] = run_module(aligned(variant(name, part)))
        return results


def run_one_rank(part: str) -> dict[str, Any]:
    """What the others are compared with."""
    ours = variant("chunkwise zigzag scan", part)
    results = {"ours": run_module(ours)}
    if part == "fp32":
        results["ours, FLA's shape"] = run_module(replace(ours, shape=FLA_FP32_SHAPE))
        return results
    results["ours, aligned"] = run_module(aligned(ours))
    if not FLA_FAULT:
        register_linear_cp_mode(FLA_KERNELS, run_fla_rule)
        case = variant("chunkwise contiguous fla", part)
        results["FLA's, aligned"] = run_module(aligned(replace(case, mode=FLA_KERNELS)))
    return results


def aligned(case: ModuleCase) -> ModuleCase:
    return replace(case, row=ALIGNED_ROW)


def run_rest() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for mode in MODES:
        results[f"deterministic {mode}"] = twice_deterministic(mode)
        results[f"recompute {mode}"] = recompute_differences(mode)
    results["round trip"] = round_trips()
    results["refused"] = refusals()
    results["checkpoint"] = checkpoint_differences()
    results["syncs"] = {"thd": syncs(BASE), "sbhd": syncs(replace(BASE, row=None))}
    results["saved"] = saved_bytes(QWEN)
    return results


@contextlib.contextmanager
def fla_over_gloo() -> Iterator[None]:
    """FLA gathers CUDA tensors into ``[ranks, ...]``: NCCL takes that, gloo host rows only."""
    if "nccl" in str(dist.get_backend_config()):
        yield
        return
    gather = dist.all_gather_into_tensor

    def staged(
        out: torch.Tensor, x: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        assert not async_op
        rows = x.cpu().reshape(-1)
        everyone = rows.new_empty(out.numel())
        gather(everyone, rows, group=group)
        out.copy_(everyone.view(out.shape))

    with mock.patch.object(dist, "all_gather_into_tensor", staged):
        yield


def twice_deterministic(mode: str) -> list[dict[str, torch.Tensor]]:
    case = replace(BASE, mode=mode, config={"deterministic_mode": True})
    return [run_module(case) for _ in range(2)]


def make_module(case: ModuleCase) -> tuple[torch.nn.Module, Any]:
    groups = context_parallel_groups()
    return build_module(case, make_config(case, groups.cp.size()), groups), groups


def recompute_differences(mode: str) -> list[str]:
    """Names of tensors that differ, in any bit, when forward is replayed in backward."""
    case = replace(BASE, mode=mode, dtype=torch.bfloat16)
    module, groups = make_module(case)
    _, hidden, grad, params = local_inputs(case, groups)
    out, dhidden = forward_backward(module, hidden, grad, params)
    plain = {"out": out, "dhidden": dhidden} | gradients(module)
    module.zero_grad()
    leaf = hidden.detach().requires_grad_()
    with count_traffic() as traffic:
        replayed = torch.utils.checkpoint.checkpoint(
            lambda x: module(x, None, packed_seq_params=params)[0], leaf, use_reentrant=False
        )
        replayed.backward(grad)
    again = {"out": replayed.detach(), "dhidden": leaf.grad} | gradients(module)
    differing = [name for name in plain if not torch.equal(plain[name], again[name])]
    if dist.get_world_size() > 1 and traffic.collectives == 0:
        differing.append("nothing was exchanged")
    return differing


def round_trips() -> dict[str, bool]:
    group = dist.group.WORLD
    assert group is not None
    cp = group.size()
    same = {}
    plan = ContextParallelPlan.build(list(ROW), group)
    x = torch.randn(plan.local_tokens, 1, 48, device="cuda", dtype=torch.bfloat16)
    moved = zigzag_to_contiguous_chunks(x, group, plan=plan)
    back = contiguous_to_zigzag_chunks(moved, group, plan=plan.in_layout("contiguous"))
    same["thd"] = torch.equal(back, x) and (cp == 1 or not torch.equal(moved, x))
    x = torch.randn(8 * cp, 3, 48, device="cuda", dtype=torch.bfloat16)
    moved = zigzag_to_contiguous_chunks(x, group)
    back = contiguous_to_zigzag_chunks(moved, group)
    same["sbhd"] = torch.equal(back, x) and (cp == 1 or not torch.equal(moved, x))
    return same


def refusals() -> dict[str, str]:
    """What each bad call says; nothing may reach the group, and good input works afterwards."""
    case = replace(BASE, dtype=torch.bfloat16)
    module, groups = make_module(case)
    _, hidden, grad, params = local_inputs(case, groups)

    def call(**changes: Any) -> None:
        module(hidden, None, packed_seq_params=replace(params, **changes))

    cut = torch.tensor([0, 8, 649, 664, 1176], dtype=torch.int32, device="cuda")
    short = torch.tensor([0, 8, 648], dtype=torch.int32, device="cuda")
    bad = {
        "size without group": lambda: call(local_cp_size=groups.cp.size() + 1),
        "boundaries that the layout cannot cut": lambda: call(cu_seqlens_q=cut, cu_seqlens_kv=cut),
        "boundaries that end early": lambda: call(cu_seqlens_q=short, cu_seqlens_kv=short),
        "inference": lambda: module(hidden, None, inference_context=object()),
        "mode per call": lambda: module(hidden, None, linear_cp_mode="headwise"),
    }
    said = {}
    with count_traffic() as traffic:
        for name, attempt in bad.items():
            try:
                attempt()
                said[name] = "accepted"
            except ValueError as error:
                said[name] = str(error)
    said["collectives"] = str(traffic.collectives)
    forward_backward(module, hidden, grad, params)
    return said


def checkpoint_differences() -> list[str]:
    """Save under chunkwise, load under all_gather, by files; what is not bitwise equal."""
    from megatron.core import dist_checkpointing, parallel_state

    groups = context_parallel_groups()
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    try:
        saved, loaded = (
            build_module(
                replace(BASE, mode=mode, dtype=torch.bfloat16),
                make_config(replace(BASE, mode=mode), groups.cp.size()),
                groups,
            )
            for mode in ("chunkwise", "all_gather")
        )
        for parameter in loaded.parameters():
            torch.nn.init.zeros_(parameter)
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        wanted = saved.sharded_state_dict(prefix="layer.")
        dist_checkpointing.save(dict(wanted), folders[0])
        state = dist_checkpointing.load(loaded.sharded_state_dict(prefix="layer."), folders[0])
        loaded.load_state_dict({k.removeprefix("layer."): v for k, v in state.items()})
        both = (dict(saved.named_parameters()), dict(loaded.named_parameters()))
        return [n for n in both[0] if not torch.equal(both[0][n], both[1][n])]
    finally:
        parallel_state.destroy_model_parallel()


def syncs(case: ModuleCase) -> str:
    """A step after the plan exists, with every host sync made an error.

    Gloo stages through the host and must wait; only NCCL ranks, or one rank, can be free of syncs.
    """
    group = dist.group.WORLD
    assert group is not None
    if group.size() > 1 and "nccl" not in str(dist.get_backend_config(group)):
        return "not measured: gloo stages through the host"
    case = replace(case, dtype=torch.bfloat16, dense=(256 * group.size(), 2))
    module, groups = make_module(case)
    _, hidden, grad, params = local_inputs(case, groups)
    for _ in range(2):
        forward_backward(module, hidden, grad, params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with count_traffic() as traffic:
            forward_backward(module, hidden, grad, params)
    except RuntimeError as error:
        return f"sync: {error}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"none in {traffic.collectives} collectives"


def saved_bytes(case: ModuleCase) -> int:
    """What one layer's forward leaves allocated for backward, its output and input aside."""
    module, groups = make_module(case)
    _, hidden, _, params = local_inputs(case, groups)
    hidden.requires_grad_()
    del groups
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        out = module(hidden, None, packed_seq_params=params)[0]
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        del out
    return kept


@cache
def outcome(cp: int, part: str) -> list[dict[str, Any]] | Exception:
    try:
        return run_distributed(run_part, cp, part, cuda=True, timeout=500)
    except WorkerError as error:
        return error


def job(cp: int, part: str = "rest") -> list[dict[str, Any]]:
    """What every rank returned; a job that failed fails every test that looks at it, at once."""
    result = outcome(cp, part)
    if isinstance(result, Exception):
        raise result
    return result


@cache
def reference(dtype_name: str, name: str = "headwise") -> dict[str, torch.Tensor]:
    return module_reference(variant(name, dtype_name))


def results_of(name: str, cp: int, dtype_name: str) -> dict[str, torch.Tensor]:
    if name.endswith("fla") and FLA_FAULT:
        pytest.skip(FLA_FAULT)
    return assemble_module([result[name] for result in job(cp, dtype_name)])


def errors_of(name: str, cp: int, dtype_name: str) -> dict[str, float]:
    """Relative RMS of every tensor against float64."""
    actual, wanted = results_of(name, cp, dtype_name), reference(dtype_name)
    assert actual.keys() == wanted.keys()
    return {n: relative_rms(actual[n].cpu(), wanted[n]) for n in wanted}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cp", CP)
@pytest.mark.timeout(600)
def test_whole_module_fp32(cp: int, name: str) -> None:
    actual = results_of(name, cp, "fp32")
    one = results_of("ours, FLA's shape" if name.endswith("fla") else "ours", 1, "fp32")
    assert_all_close(actual, one, FP32_GATE)
    assert_all_close(actual, reference("fp32", name), FP32_GATE)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cp", CP)
@pytest.mark.timeout(600)
def test_whole_module_bf16(cp: int, name: str) -> None:
    actual = results_of(f"aligned {name}", cp, "bf16")
    one = results_of("FLA's, aligned" if name.endswith("fla") else "ours, aligned", 1, "bf16")
    # beta's path, a part of in_proj here, may be twice as far off.
    gates = dict.fromkeys(one, BF16_GATE) | {"din_proj.weight": BF16_BETA_GATE}
    assert_all_close(actual, one, gates)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("cp", CP)
@pytest.mark.timeout(600)
def test_more_ranks_add_no_error_in_bf16(cp: int, name: str) -> None:
    one = errors_of("ours", 1, "bf16")
    for tensor, error in errors_of(name, cp, "bf16").items():
        # Of eight values, the error itself scatters.
        factor = 1.5 if tensor in ("dA_log", "ddt_bias") else 1.25
        assert error < factor * one[tensor] + 1e-3, (tensor, error, one[tensor])


@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_error_falls_when_the_dtype_rises(cp: int) -> None:
    name = "chunkwise zigzag scan" if cp > 1 else "ours"
    low, high = (errors_of(name, cp, dtype_name) for dtype_name in DTYPES)
    for tensor, error in high.items():
        assert 10 * low[tensor] < error < 3e-2, (tensor, low, high)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_deterministic_mode(cp: int, mode: str) -> None:
    pairs = [result[f"deterministic {mode}"] for result in job(cp)]
    for first, second in pairs:
        assert [n for n in first if not torch.equal(first[n], second[n])] == []
    assert_all_close(assemble_module([first for first, _ in pairs]), reference("fp32"), 1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_recompute_replays_bitwise(cp: int, mode: str) -> None:
    assert [result[f"recompute {mode}"] for result in job(cp)] == [[]] * cp


def tensor_parallel(sequence_parallel: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    with first_configuration():
        return run_tensor_parallel(replace(BASE, mode="chunkwise"), sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.timeout(600)
def test_tensor_parallel_2_times_context_parallel_2(sequence_parallel: bool) -> None:
    if sequence_parallel and torch.cuda.device_count() < 4:
        pytest.skip(
            "sequence parallelism reduces and scatters, which gloo has not for CUDA tensors"
        )
    for actual, expected in run_distributed(
        tensor_parallel, 4, sequence_parallel, cuda=True, timeout=300
    ):
        assert_all_close(actual, expected, FP32_GATE)


@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_layout_round_trip_is_bit_exact(cp: int) -> None:
    assert [result["round trip"] for result in job(cp)] == [{"thd": True, "sbhd": True}] * cp


@pytest.mark.parametrize("cp", CP)
@pytest.mark.timeout(600)
def test_bad_input_fails_fast_on_every_rank(cp: int) -> None:
    said = [result["refused"] for result in job(cp)]
    assert said == [said[0]] * cp
    assert "accepted" not in said[0].values()
    assert said[0].pop("collectives") == "0"
    assert all(text for text in said[0].values())


@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_checkpoint_does_not_know_the_mode(cp: int) -> None:
    assert [result["checkpoint"] for result in job(cp)] == [[]] * cp


@pytest.mark.parametrize("input_format", ["thd", "sbhd"])
@pytest.mark.parametrize("cp", [1, *CP])
@pytest.mark.timeout(600)
def test_no_host_sync_once_the_plan_exists(cp: int, input_format: str) -> None:
    for result in job(cp):
        outcome = result["syncs"][input_format]
        if outcome.startswith("not measured"):
            pytest.skip(outcome)
        assert outcome.startswith("none"), outcome


@pytest.mark.timeout(600)
def test_saved_activations_shrink_with_the_group() -> None:
    [whole] = [result["saved"] for result in job(1)]
    assert max(result["saved"] for result in job(4)) <= 0.27 * whole
