# SPDX-License-Identifier: Apache-2.0
"""Every way to run a layer under context parallelism on several GPUs over NCCL, checked and timed.

    torchrun --nproc-per-node 4 tools/bench_multi_gpu.py --tokens 32768 131072 524288

For each global length and number of sequences, one GDN layer (Qwen3-Next sizes, bf16) and a block
of 3 GDN layers and softmax attention, MLPs left out: forward and backward in ms (of ``--steps``
that follow each other like the layers of a model; median of the slowest rank), peak memory of a
step, bytes sent, share of the time that NCCL kernels run, and host syncs of a step. Ratios are
against "upstream's scheme" and, as parallel efficiency, against one GPU that runs the whole input
alone. Outputs and input gradients are compared with those of one GPU before anything is timed, or
with the first scheme's where that length is too much for one GPU. Ends with one line for each
configuration. Needs fla-core; ``--json FILE`` keeps all figures.
"""

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_gpu_layer import median_ms, peak_gib
from bench_layout_policies import wide_conversion
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.layout import rank_indices, token_ranges
from megatron.linear_cp.modes import register_linear_cp_mode
from megatron.linear_cp.testing.parity import relative_rms

HIDDEN = 2048
WIDE = "wide conversion"
# mode, layout, state exchange, whether sequences may move
SCHEMES: dict[str, tuple[str, str, str, str]] = {
    "upstream's scheme": (WIDE, "zigzag", "fla", "never"),
    "FLA's exchange, narrow": ("chunkwise", "zigzag", "fla", "never"),
    "chunkwise, chosen": ("chunkwise", "zigzag", "scan", "auto"),
    "chunkwise, states": ("chunkwise", "zigzag", "scan", "never"),
    "chunkwise, contiguous": ("chunkwise", "contiguous", "scan", "never"),
    "headwise": ("headwise", "zigzag", "scan", "never"),
    "all_gather": ("all_gather", "zigzag", "scan", "never"),
}
CHUNKWISE = ("chunkwise, chosen", "chunkwise, contiguous")
GATE = 2e-2  # relative RMS against one GPU; both runs round to bf16 throughout


def boundaries(tokens: int, sequences: int, multiple: int) -> list[int]:
    """One, equal, or (from 64 on) uneven sequences whose lengths divide by ``multiple``."""
    weights = np.ones(sequences)
    if sequences >= 64:
        weights = np.random.default_rng(0).lognormal(0.0, 1.0, sequences)
    units, rest = divmod(tokens, multiple)
    if rest or units < sequences:
        raise SystemExit(
            f"error: {tokens} tokens are no multiple of {multiple} that leaves {sequences} "
            f"sequences {multiple} each"
        )
    # One unit each, and the others by weight.
    ends = np.cumsum(weights) / weights.sum() * (units - sequences)
    return [0, *((ends.round().astype(int) + np.arange(1, sequences + 1)) * multiple).tolist()]


def make_config(scheme: str, size: int, layers: int) -> TransformerConfig:
    """Of ``layers`` layers: one GDN layer, or four of which the last is softmax attention."""
    mode, layout, exchange, move = SCHEMES[scheme]
    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=16,
        num_query_groups=2,
        kv_channels=256,
        context_parallel_size=size,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_cp_mode=mode,
        linear_cp_layout=layout,
        linear_cp_state_exchange=exchange,
        linear_cp_move_sequences=move,
        normalization="RMSNorm",
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )


def make_stack(scheme: str, groups: ProcessGroupCollection, layers: int) -> Callable[..., Tensor]:
    """The token mixers of the layers one after another, with residuals if there are several."""
    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    config = make_config(scheme, groups.cp.size(), layers)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    mixers = []
    for number, layer in enumerate(get_gdn_hybrid_layer_spec(config).layer_specs, start=1):
        spec = layer.submodules.self_attention
        mixer = spec.module(
            config=config,
            submodules=spec.submodules,
            layer_number=number,
            pg_collection=groups,
            **(spec.params or {}),
        )
        mixers.append(mixer.cuda().bfloat16())

    def run(hidden: Tensor, params: PackedSeqParams) -> Tensor:
        for mixer in mixers:
            out = mixer(hidden, None, packed_seq_params=params)[0]
            hidden = out if layers == 1 else hidden + out
        return hidden

    return run


def packed(bounds: list[int]) -> PackedSeqParams:
    """The boundaries on the device."""
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    return PackedSeqParams("thd", cu, cu, None, None, longest, longest)


def whole_input(tokens: int) -> tuple[Tensor, Tensor]:
    """Hidden states and output gradients, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    shape = (tokens, 1, HIDDEN)
    hidden, grad = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    return hidden, grad


def step_of(
    stack: Callable[..., Tensor], hidden: Tensor, grad: Tensor, params: PackedSeqParams
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward; parameters keep adding up, as in gradient accumulation."""
    leaf = hidden.detach().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        leaf.grad = None
        out = stack(leaf, params)
        out.backward(grad)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    return step


def share_of_nccl(step: Callable[[], Any], milliseconds: float) -> float:
    """Time with an NCCL kernel running, over the time of a step; waiting for peers counts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    nccl = sum(e.self_device_time_total for e in events if "nccl" in e.key.lower())
    return nccl / 1000 / milliseconds


def synchronises(step: Callable[[], Any]) -> bool:
    """Whether a step, once warm, makes the host wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def measure(step: Callable[[], Any], rounds: int, steps: int) -> dict[str, float]:
    """Of this rank; the steps of all ranks start together."""

    def several() -> None:
        for _ in range(steps):
            step()

    for _ in range(2):
        step()
    with count_traffic() as traffic:
        step()
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append(median_ms(several, 1) / steps)
    milliseconds = sorted(times)[rounds // 2]
    return {
        "ms": milliseconds,
        "GiB": peak_gib(lambda: (step(), None)[1]),
        "MB sent": traffic.bytes_sent / 1e6,
        "NCCL": share_of_nccl(step, milliseconds),
        "syncs": float(synchronises(step)),
    }


def slowest(mine: dict[str, float]) -> dict[str, float]:
    """The largest of every figure over the ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: max(figures[name] for figures in everyone) for name in mine}


def assemble(tensor: Tensor, index: Tensor, tokens: int) -> Tensor:
    """The whole ``[T, 1, D]`` of what every rank holds at these positions."""
    world = dist.get_world_size()
    everyone = torch.empty(world, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    positions = torch.empty(world, len(index), dtype=index.dtype, device=index.device)
    dist.all_gather_into_tensor(everyone, tensor.contiguous())
    dist.all_gather_into_tensor(positions, index)
    whole = tensor.new_empty(tokens, *tensor.shape[1:])
    whole[positions.flatten()] = everyone.flatten(0, 1)
    return whole


def compare(
    bounds: list[int], layers: int, rounds: int, steps: int, schemes: list[str]
) -> list[dict[str, Any]]:
    """One row a scheme, after one for a GPU that runs everything.

    Lengths that a scheme refuses, on every rank alike, leave a row that says so. Where the one GPU
    refuses, the first scheme that runs is what the others are compared with.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    alone = ProcessGroupCollection(tp=groups.tp, cp=groups.tp)
    hidden, grad = whole_input(bounds[-1])
    wanted: list[Tensor] = []
    rows: list[dict[str, Any]] = []
    for name in ["one GPU", *schemes]:
        scheme = "chunkwise, states" if name == "one GPU" else name
        size = 1 if name == "one GPU" else world
        index = rank_indices(token_ranges(bounds, size, SCHEMES[scheme][1]), rank % size)
        mine = torch.from_numpy(index).cuda()
        stack = make_stack(scheme, alone if size == 1 else groups, layers)
        step = step_of(stack, hidden[mine], grad[mine], packed(bounds))
        try:
            found = step()
        except ValueError as error:
            rows.append({"scheme": name, "refused": str(error)})
            continue
        if not wanted:
            wanted = [x if size == 1 else assemble(x, mine, bounds[-1]) for x in found]
        pairs = zip(found, wanted, strict=True)
        difference = max(relative_rms(got, want[mine]) for got, want in pairs)
        del found
        figures = slowest({"difference": difference, **measure(step, rounds, steps)})
        rows.append({"scheme": name} | figures)
        del step, stack
        torch.cuda.empty_cache()
    times = {row["scheme"]: row["ms"] for row in rows if "ms" in row}
    for row in rows:
        if "ms" in row:
            row["of upstream's"] = row["ms"] / times.get("upstream's scheme", float("nan"))
            ranks = 1 if row["scheme"] == "one GPU" else world
            row["efficiency"] = times.get("one GPU", float("nan")) / row["ms"] / ranks
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """The table of one configuration."""
    print(title)
    names = [name for name in max(rows, key=len) if name != "scheme"]
    print(" " * 24 + "".join(f"{name:>15}" for name in names))
    for row in rows:
        cells = f"  refused: {row['refused']}" if "refused" in row else ""
        if not cells:
            cells = "".join(f"{row[name]:>15.3g}" for name in names)
        print(f"{row['scheme']:24}{cells}{'   DIFFERS' if differs(row) else ''}", flush=True)


def summarize(table: list[dict[str, Any]]) -> None:
    """One line a configuration: chunkwise, as chosen and contiguous, against the others."""
    print(f"\n{'layers':>8}{'tokens':>9}{'seqs':>6}   chunkwise: chosen / contiguous")
    cases: dict[tuple[int, int, int], dict[str, dict[str, Any]]] = {}
    for row in table:
        case = row["layers"], row["tokens"], row["sequences"]
        cases.setdefault(case, {})[row["scheme"]] = row
    for (layers, tokens, sequences), rows in cases.items():
        cells = []
        for name, label in (("upstream's scheme", "upstream's"), ("headwise", "headwise")):
            base = rows.get(name, {}).get("ms", float("nan"))
            both = [rows.get(n, {}).get("ms", float("nan")) / base for n in CHUNKWISE]
            cells.append(f"of {label} {both[0]:.2f} / {both[1]:.2f}")
        both = [rows.get(n, {}).get("efficiency", float("nan")) for n in CHUNKWISE]
        cells.append(f"efficiency {both[0]:.2f} / {both[1]:.2f}")
        print(f"{layers:>8}{tokens:>9}{sequences:>6}   {'   '.join(cells)}")


def differs(row: dict[str, Any]) -> bool:
    """Whether a scheme that ran gave something else than what it is compared with."""
    return "refused" not in row and not row["difference"] < GATE


def main() -> int:
    """Run on all ranks; exit status 1 if a scheme's results differ from one GPU's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072, 524288])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4], choices=[1, 4])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="in each round")
    parser.add_argument("--json", help="also write all rows to this file")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    model_parallel_cuda_manual_seed(1)
    register_linear_cp_mode(WIDE, wide_conversion)
    table = []
    for layers in arguments.layers:
        for tokens in arguments.tokens:
            for sequences in arguments.sequences:
                bounds = boundaries(tokens, sequences, 2 * world)
                rows = compare(bounds, layers, arguments.rounds, arguments.steps, arguments.schemes)
                case = {"layers": layers, "tokens": tokens, "sequences": sequences, "ranks": world}
                table += [case | row for row in rows]
                if dist.get_rank() == 0:
                    if arguments.json:
                        with open(arguments.json, "w") as file:
                            json.dump(table, file, indent=1)
                    what = "1 GDN layer" if layers == 1 else "3 GDN + 1 attention"
                    show(f"\n{what}, {tokens} tokens, {sequences} sequences, CP {world}", rows)
    if dist.get_rank() == 0:
        summarize(table)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return int(any(map(differs, table)))


if __name__ == "__main__":
    raise SystemExit(main())
