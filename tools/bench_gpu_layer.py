# SPDX-License-Identifier: Apache-2.0
"""Our GDN layer against Megatron-Core's own on one GPU: time, peak memory, and time of each stage.

    python tools/bench_gpu_layer.py --tokens 32768 131072

Same weights, same input, bf16, no CP, Qwen3-Next sizes; medians, and ratios within one run.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.linear_cp import GatedDeltaNet, TransformerConfig, get_gated_delta_net_module_spec
from megatron.linear_cp.testing.upstream import upstream_gated_delta_net

Step = Callable[[], None]


def make_modules() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and upstream's with the same weights."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=2048,
        num_attention_heads=16,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=1,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        normalization="RMSNorm",
        activation_func=F.silu,
        transformer_impl="local",
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    upstream = upstream_gated_delta_net(config, groups)
    spec = get_gated_delta_net_module_spec(config)
    ours = GatedDeltaNet(config, spec.submodules, layer_number=1, pg_collection=groups)
    ours.load_state_dict(upstream.state_dict())
    return ours.cuda().bfloat16(), upstream.cuda().bfloat16()


def median_ms(step: Step, rounds: int) -> float:
    """Median over rounds, by CUDA events."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def peak_gib(step: Step) -> float:
    """Highest allocation during a step, over what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def steps_of(
    module: torch.nn.Module, hidden: torch.Tensor, params: PackedSeqParams | None
) -> tuple[Step, Step]:
    """Forward alone (training mode), and forward with backward."""
    grad = torch.randn_like(hidden)

    def forward() -> Any:
        return module(hidden, None, packed_seq_params=params)[0]

    def both() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        hidden.grad = None
        forward().backward(grad)

    return lambda: (forward(), None)[1], both


# Kernels of each stage by a part of their name; the first match counts.
STAGES = {
    "conv + l2norm": ("conv", "l2norm"),
    "gates": ("gates",),
    "norm x gate": ("norm",),
    "rule": (
        *("wy", "w_u", "gated_delta_rule", "chunk", "cumsum", "summary", "adjoint"),
        *("_inverse_kernel", "_apply_kernel"),
    ),
    "projections": ("nvjet", "gemm", "cutlass"),
}


def floors(tokens: int) -> dict[str, float]:
    """Least time in ms of each stage, forward and backward, on an H200: bytes or products.

    4.8 TB/s and 989 Tflop/s dense bf16, which no kernel reaches. Every tensor that a stage must
    read or write counts once per pass; weights do not count.
    """
    hidden, qkv, value, heads, width = 2048, 8192, 4096, 32, 12352
    byte, flop = 1e3 / 4.8e12, 1e3 / 989e12
    # A token of one value head, chunks of 64: Gram matrices, the solve applied to keys and values,
    # output within the chunk, three products with the state; backward twice that.
    rule = 3 * heads * (2 * 64 * (3 * 128 + 2 * 128) + 2 * 3 * 128 * 128)
    return {
        "projections": 3 * 2 * tokens * hidden * (width + value) * flop,
        "conv + l2norm": 2 * tokens * qkv * (2 + 3) * byte,
        "gates": tokens * heads * (2 + 2 + 4 + 2 + 4 + 4 * 2) * byte,
        "norm x gate": 2 * tokens * value * (3 + 5) * byte,
        "rule": tokens * max(rule * flop, 2 * (qkv + value) * 3 * byte),
    }


def stages(module: torch.nn.Module, hidden: torch.Tensor, rounds: int) -> None:
    """Time on the GPU by stage beside its floor, and by kernel, the largest first."""
    _, both = steps_of(module, hidden, None)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(rounds):
            both()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in events:
        key = event.key.lower()
        stage = next((s for s, names in STAGES.items() if any(n in key for n in names)), "other")
        times[stage] = times.get(stage, 0.0) + event.self_device_time_total / rounds / 1000
    least = floors(hidden.shape[0])
    for stage, ms in sorted(times.items(), key=lambda item: -item[1]):
        floor = f"floor {least[stage]:6.3f} ms" if stage in least else ""
        print(f"    {ms:8.3f} ms  {stage:16} {floor}")
    for event in events[:34]:
        ms = event.self_device_time_total / rounds / 1000
        print(f"    {ms:8.3f} ms  {event.count // rounds:3d} x  {event.key[:90]}")


def compare(tokens: int, packed: bool, rounds: int) -> None:
    """One line: time and memory of both, and the ratios."""
    ours, upstream = make_modules()
    hidden = torch.randn(tokens, 1, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    params = None
    if packed:
        cu = torch.tensor([0, tokens // 4, tokens], dtype=torch.int32, device="cuda")
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    out = [m(hidden, None, packed_seq_params=params)[0] for m in (ours, upstream)]
    difference = float((out[0] - out[1]).float().norm() / out[1].float().norm())
    del out
    rows = []
    for module in (ours, upstream):
        forward, both = steps_of(module, hidden, params)
        for _ in range(3):
            both()
        torch.cuda.synchronize()
        rows.append((forward, both))
    result: dict[str, list[float]] = {"fwd": [], "fwd+bwd": [], "GiB": []}
    for forward, both in rows:
        result["fwd"].append(median_ms(forward, rounds))
        result["fwd+bwd"].append(median_ms(both, rounds))
        result["GiB"].append(peak_gib(both))
    line = "  ".join(f"{n} {a:.2f} / {b:.2f} = {a / b:.3f}" for n, (a, b) in result.items())
    print(f"{tokens} {'thd ' if packed else 'sbhd'} ours / upstream: {line}  diff {difference:.1e}")


def main() -> None:
    """Run the comparison on GPU 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--stages", action="store_true", help="also list the kernels of ours")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        for tokens in arguments.tokens:
            for packed in (False, True):
                compare(tokens, packed, arguments.rounds)
        if arguments.stages:
            for name, module in zip(("ours", "upstream"), make_modules(), strict=True):
                tokens = arguments.tokens[0]
                hidden = torch.randn(tokens, 1, 2048, device="cuda", dtype=torch.bfloat16)
                print(f"  {name}, {tokens} tokens, forward and backward:")
                stages(module, hidden.requires_grad_(), 3)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
