# SPDX-License-Identifier: Apache-2.0
"""The rule at one rank of a context-parallel group, compute only, against the same without CP.

    python tools/bench_gpu_rule.py --tokens 32768 --cp 8

One GPU; bf16, Qwen3-Next heads. The neighbours are simulated: what would arrive from them is a
tensor of the right shape, made on the spot. Medians, and the ratio within one run.
"""

import argparse
from unittest import mock

import torch
from bench_gpu_layer import median_ms

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.ops import gated_delta_rule, state_scan
from megatron.linear_cp.testing.parity import make_rule_inputs

NAMES = ("q", "k", "v", "g", "beta")


class SimulatedGroup:
    """Size and rank of a process group whose other ranks do not exist."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """The rank that this process plays."""
        return self._rank


def simulated_exchange(
    x: torch.Tensor, send_splits: object, recv_splits: list[int], group: object
) -> torch.Tensor:
    """What an all-to-all would return, by shape."""
    return x.new_zeros((sum(recv_splits), *x.shape[1:]))


def main() -> None:
    """Run the comparison on GPU 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="local tokens of the rank")
    parser.add_argument("--cp", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    tokens, cp = arguments.tokens, arguments.cp
    x = make_rule_inputs(
        tokens,
        num_key_heads=16,
        num_value_heads=32,
        key_dim=128,
        value_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    leaves = [x[name].requires_grad_() for name in NAMES]
    do = torch.randn_like(x["v"])

    def time_of(plan: ContextParallelPlan) -> list[float]:
        def forward() -> torch.Tensor:
            return gated_delta_rule(*leaves, plan=plan)

        def both() -> None:
            torch.autograd.grad(forward(), leaves, do)

        for _ in range(3):
            both()
        return [
            median_ms(lambda: (forward(), None)[1], arguments.rounds),
            median_ms(both, arguments.rounds),
        ]

    for sequences in arguments.sequences:
        alone = ContextParallelPlan.build(
            [tokens * i // sequences for i in range(sequences + 1)], None
        )
        group = SimulatedGroup(cp, cp // 2)
        bounds = [cp * tokens * i // sequences for i in range(sequences + 1)]
        rank = ContextParallelPlan.build(bounds, group)
        without = time_of(alone)
        with mock.patch.object(state_scan.comm, "exchange_rows", simulated_exchange):
            assert not rank.state_route(32).is_empty
            within = time_of(rank)
        print(
            f"{tokens} local tokens, {sequences} sequences: without CP fwd {without[0]:.2f} "
            f"fwd+bwd {without[1]:.2f} ms; a rank of cp {cp}: "
            f"fwd {within[0]:.2f} fwd+bwd {within[1]:.2f} ms; ratios "
            f"{within[0] / without[0]:.3f} {within[1] / without[1]:.3f}"
        )


if __name__ == "__main__":
    main()
