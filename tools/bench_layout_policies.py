# SPDX-License-Identifier: Apache-2.0
"""One GDN layer under every layout policy against upstream's scheme, on CPU ranks over gloo.

    python tools/bench_layout_policies.py --tokens 4096 --cp 4 --sequences 1 8 64

Upstream's scheme (Megatron-Core commit 5139086e) moves the projected activations, gate included, to
the contiguous layout in every layer, and the output back. Forward and backward; bytes of all ranks
are counted, times are medians of the slowest rank, ratios are within one run. The contiguous policy
needs no conversion in a GDN layer: it pays once around each softmax attention.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.context_parallel_layout import convert_rows
from megatron.linear_cp.modes import GatedDeltaNetInputs, register_linear_cp_mode
from megatron.linear_cp.modes.base import with_tokens
from megatron.linear_cp.modes.chunkwise import chunkwise
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.layer import LayerShape
from megatron.linear_cp.testing.module import (
    ModuleCase,
    build_module,
    context_parallel_groups,
    forward_backward,
    local_inputs,
    make_config,
)
from megatron.linear_cp.testing.workers import run_distributed

SHAPE = LayerShape(num_key_heads=4, num_value_heads=8, key_head_dim=32, value_head_dim=32)
HIDDEN = 256
POLICIES: dict[str, tuple[str, str, str]] = {
    "upstream's scheme": ("wide conversion", "zigzag", "never"),
    "native scan": ("chunkwise", "zigzag", "never"),
    "chosen per sequence": ("chunkwise", "zigzag", "auto"),
    "contiguous": ("chunkwise", "contiguous", "never"),
}


def wide_conversion(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Everything projected moves to the contiguous layout, and the output back.

    ``state_exchange="fla"`` then exchanges states as upstream does too; the CPU has not got it.
    """
    contiguous = plan.in_layout("contiguous")
    # A stand-in for the gate, which this interface does not pass; nothing reads it.
    gate = inputs.qkv[0, :, : inputs.num_value_heads * inputs.value_head_dim]
    parts = [inputs.qkv[0], inputs.beta[0], inputs.alpha[0], gate]
    moved = convert_rows(torch.cat(parts, dim=-1), plan, contiguous).unsqueeze(0)
    qkv, beta, alpha, _ = moved.split([part.shape[-1] for part in parts], dim=-1)
    out = chunkwise(with_tokens(inputs, qkv, beta, alpha), contiguous)
    return convert_rows(out[0], contiguous, plan).unsqueeze(0)


def measure(policy: str, row: tuple[int, ...], rounds: int) -> tuple[float, int]:
    """Median seconds of a step on this rank, and the bytes that it sends."""
    register_linear_cp_mode("wide conversion", wide_conversion)
    mode, layout, move = POLICIES[policy]
    case = ModuleCase(
        mode=mode,
        layout=layout,
        dtype=torch.float32,
        row=row,
        shape=SHAPE,
        hidden=HIDDEN,
        config={"linear_cp_move_sequences": move},
    )
    with cpu_cuda():
        groups = context_parallel_groups()
        module = build_module(case, make_config(case, groups.cp.size()), groups)
        _, hidden, grad, params = local_inputs(case, groups)
        step: Callable[[], Any] = lambda: forward_backward(module, hidden, grad, params)  # noqa: E731
        for _ in range(2):
            step()
        with count_traffic() as traffic:
            step()
        times = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2], traffic.bytes_sent


def main() -> None:
    """Print one block of lines for each number of sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--cp", type=int, default=4)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for sequences in arguments.sequences:
        row = tuple(arguments.tokens * i // sequences for i in range(sequences + 1))
        print(f"{arguments.tokens} tokens, {sequences} sequences, CP {arguments.cp}:")
        base: tuple[float, int] | None = None
        for policy in POLICIES:
            results = run_distributed(measure, arguments.cp, policy, row, arguments.rounds)
            seconds, sent = max(r[0] for r in results), sum(r[1] for r in results)
            base = base or (seconds, sent)
            print(
                f"  {policy:22} {1e3 * seconds:8.1f} ms ({seconds / base[0]:.2f})"
                f" {sent / 1e6:9.2f} MB ({sent / base[1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
