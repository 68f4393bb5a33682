# SPDX-License-Identifier: Apache-2.0
"""Forward + backward time of the torch rule against Megatron-Core's eager chunk rule, in one run.

Both start from the same normalised q and k and the same gradient of the output; Megatron-Core's
rule gets q and k repeated to the value heads, as its module does, with the repeat in the timing.
Rounds alternate between the two so that a slow moment of the machine hits both.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule
from torch import Tensor

from megatron.linear_cp.ops import torch_rule
from megatron.linear_cp.segments import Segments
from megatron.linear_cp.testing.parity import make_rule_inputs, relative_rms

# T, H, HV, K, V
SHAPES = (
    (1024, 4, 8, 64, 64),
    (2048, 4, 8, 64, 64),
    (1024, 4, 8, 128, 128),
    (2048, 4, 8, 128, 128),
    (2048, 4, 4, 64, 64),
)


def ours(inputs: list[Tensor], do: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    q, k, v, g, beta = inputs
    scale = k.shape[-1] ** -0.5
    fwd = torch_rule.prepare_forward(q, k, v, g, beta, scale, segments)
    o, residual = torch_rule.forward(fwd, None)
    del fwd
    bwd = torch_rule.prepare_backward(q, k, v, g, beta, scale, segments, residual, None, do)
    return o, *torch_rule.backward(bwd, None)


def eager(inputs: list[Tensor], do: Tensor, segments: Segments) -> tuple[Tensor, ...]:
    del segments
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, g, beta = leaves
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    o, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


def seconds(run: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def measure(shape: tuple[int, int, int, int, int], rounds: int) -> tuple[float, float, float]:
    """Median seconds of eager and ours, and the largest relative RMS between their results."""
    tokens, key_heads, value_heads, key_dim, value_dim = shape
    inputs = list(
        make_rule_inputs(
            tokens,
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=torch.float32,
        ).values()
    )
    do = torch.randn_like(inputs[2])
    segments = Segments([0, tokens])
    pairs = zip(ours(inputs, do, segments), eager(inputs, do, segments), strict=True)
    error = max(relative_rms(a, b) for a, b in pairs)
    times: dict[str, list[float]] = {"eager": [], "ours": []}
    for _ in range(rounds):
        times["eager"].append(seconds(eager, inputs, do, segments))
        times["ours"].append(seconds(ours, inputs, do, segments))
    return statistics.median(times["eager"]), statistics.median(times["ours"]), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    torch.set_num_threads(arguments.threads)
    print(f"float32, forward + backward, {arguments.threads} threads, {arguments.rounds} rounds")
    print(
        f"{'T':>6} {'H':>3} {'HV':>3} {'K':>4} {'V':>4} {'eager ms':>9} {'ours ms':>8} ratio  diff"
    )
    for shape in SHAPES:
        theirs, mine, error = measure(shape, arguments.rounds)
        sizes = "{:6d} {:3d} {:3d} {:4d} {:4d}".format(*shape)
        print(
            f"{sizes} {theirs * 1e3:9.1f} {mine * 1e3:8.1f} {theirs / mine:5.2f}  {error:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
