# SPDX-License-Identifier: Apache-2.0
"""Is what ``plan`` recommends the fastest? Real layers on CPU ranks over gloo, against prediction.

    python tools/sweep_plan_choice.py                 # ten configurations
    python tools/sweep_plan_choice.py --all           # every combination: the ten and others

For every configuration all modes and layouts run in one job, round after round, so that a slow
moment of the machine meets all of them; a time is the median over rounds of the slowest rank.
What the prediction needs of the machine is measured first, with as many ranks: what an exchange
costs in the middle of work, its bandwidth, that of the copies around it, and the rates of products,
of the rule (with these heads and with one key head) and of summaries, without context parallelism.
Nothing is fitted to the times that are predicted. ``--profile`` predicts from constants of
``megatron.linear_cp.cost`` instead.

Options that the plan cannot tell apart (headwise and all_gather on either layout, chunkwise where
nothing is moved) count as one: the mean of a round. Exit status 1 unless the choice has the least
median in nine of ten configurations. Where it has not, a line says by how much it exceeds the
least, and names the options that were faster beyond chance: in so many rounds that a fair coin
would do it in one series of twenty (a sign test, since all of a round meet the same machine). Not
being named proves nothing: with few rounds a difference of 2 or 3 % goes unseen.

On a machine that does other work as well, ``--clock cpu`` counts the processor time of the busiest
rank instead of the time that passes. It leaves out waiting, for others' work and for messages.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.linear_cp.cost import MACHINES, Machine, Workload, predict_costs, summary_flops
from megatron.linear_cp.ops import torch_rule
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.planner import Option, options
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.layer import LayerShape, make_layer_inputs, run_mode
from megatron.linear_cp.testing.module import (
    ModuleCase,
    build_module,
    context_parallel_groups,
    forward_backward,
    local_inputs,
    make_config,
)
from megatron.linear_cp.testing.parity import make_rule_inputs
from megatron.linear_cp.testing.workers import run_distributed

HIDDEN, TOKENS = 256, 1024
EXCHANGED, PRODUCT = 4 * 2**20, 384  # bytes, rows and columns
STOPS, BETWEEN = 6, 5  # exchanges in a row of work, products between two of them
HEADS = {
    "4/8 of 32": LayerShape(4, 8, 32, 32),
    "2/4 of 64": LayerShape(2, 4, 64, 64),
    "8/16 of 16": LayerShape(8, 16, 16, 16),
}
LENGTHS = {
    "one": (2048,),
    "uneven": (1408, 384, 128, 64, 32, 32),
    "three": (704, 672, 672),
    "short": (32,) * 64,
}
# Every CP size, head shape and row occurs; the first is the least, the last the most parallel.
TEN = (
    (2, "4/8 of 32", "one"),
    (2, "4/8 of 32", "uneven"),
    (2, "2/4 of 64", "three"),
    (2, "2/4 of 64", "short"),
    (2, "8/16 of 16", "uneven"),
    (4, "4/8 of 32", "three"),
    (4, "4/8 of 32", "short"),
    (4, "2/4 of 64", "one"),
    (4, "2/4 of 64", "uneven"),
    (4, "8/16 of 16", "short"),
)
CHANCE = 0.05
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Configuration = tuple[int, str, str]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Row:
    """One configuration: groups of options that the plan holds equal, in predicted order.

    Attributes:
        configuration: CP size, heads, lengths.
        machine: what the prediction was given.
        names: of each group.
        predicted: milliseconds of each group.
        rounds: milliseconds of each group in every round.
    """

    configuration: Configuration
    machine: Machine
    names: tuple[str, ...]
    predicted: tuple[float, ...]
    rounds: tuple[tuple[float, ...], ...]

    @property
    def measured(self) -> tuple[float, ...]:
        """The median of each group."""
        return tuple(map(statistics.median, self.rounds))

    @property
    def loss(self) -> float:
        """How much slower the choice, the first, is than the least median: 0 where it has that."""
        return self.measured[0] / min(self.measured) - 1

    @property
    def is_fastest_on_zigzag(self) -> bool:
        """Whether the first option for stacks that need zigzag has the least median of those."""
        there = [
            time
            for name, time in zip(self.names, self.measured, strict=True)
            if "contiguous" not in name
        ]
        return there[0] == min(there)

    @property
    def pairs_in_order(self) -> list[bool]:
        """For every two groups, whether the one predicted faster was."""
        return [a <= b for a, b in itertools.combinations(self.measured, 2)]

    @property
    def beaten_by(self) -> list[str]:
        """The groups that are faster than the choice beyond chance."""
        choice, *others = self.rounds
        return [
            name
            for name, times in zip(self.names[1:], others, strict=True)
            if chance(sum(b < a for a, b in zip(choice, times, strict=True)), len(choice)) < CHANCE
        ]


def chance(wins: int, rounds: int) -> float:
    """The probability that a fair coin wins at least so many rounds."""
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds


def make_exchange(size: int) -> Callable[[], Any]:
    """An all-to-all in which every rank sends so many bytes."""
    ranks = dist.get_world_size()
    rows = torch.ones(ranks, size // (4 * (ranks - 1)))
    out = torch.empty_like(rows)
    return lambda: dist.all_to_all_single(out, rows)


def make_copies(shape: LayerShape) -> tuple[int, Callable[[], Any]]:
    """The copies before and after an exchange by heads, and the bytes that they read and write.

    Parts are joined, rows dealt by rank and put into order, as headwise does. The narrow pieces
    make it several times as slow as copying the same bytes in one run.
    """
    ranks = dist.get_world_size()
    widths = (
        shape.num_key_heads * shape.key_head_dim,
        shape.num_key_heads * shape.key_head_dim,
        shape.num_value_heads * shape.value_head_dim,
    )
    parts = [torch.ones(TOKENS, ranks, -(-width // ranks)) for width in widths]
    order = torch.randperm(TOKENS * ranks)

    def copy() -> torch.Tensor:
        rows = torch.cat(parts, dim=-1).transpose(0, 1).flatten(0, 1)
        return rows.index_select(0, order)

    return 6 * sum(part.numel() * part.element_size() for part in parts), copy


def seconds_per_stop(product: Callable[[], Any], rounds: int, clock: str) -> float:
    """What a small exchange between stretches of work costs: every rank waits for the slowest.

    Alone in a loop it costs a fraction of that, where ranks share cores above all.
    """
    exchange = make_exchange(4096)

    def run(every: int) -> None:
        for number in range(STOPS * BETWEEN):
            product()
            if (number + 1) % every == 0:
                exchange()

    # One after the other, so that both meet the same moments of the machine.
    pairs = [
        _times(partial(run, every), 1, clock)[0]
        for _ in range(rounds)
        for every in (BETWEEN, STOPS * BETWEEN)
    ]
    differences = [a - b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    return statistics.median(differences) / (STOPS - 1)


def rule_step(shape: LayerShape) -> Callable[[], Any]:
    """Convolution, gates and rule, both ways, of ``TOKENS`` tokens without context parallelism."""
    plan = ContextParallelPlan.build([0, TOKENS], None)
    tensors = make_layer_inputs(shape, TOKENS, torch.float32)
    return lambda: run_mode("chunkwise", plan, tensors, shape)


def summary_step(shape: LayerShape) -> Callable[[], Any]:
    """``A``, ``b`` and ``c`` of a segment of ``TOKENS``."""
    plan = ContextParallelPlan.build([0, TOKENS], None)
    inputs = make_rule_inputs(
        TOKENS,
        num_key_heads=shape.num_key_heads,
        num_value_heads=shape.num_value_heads,
        key_dim=shape.key_head_dim,
        value_dim=shape.value_head_dim,
        dtype=torch.float32,
    )
    forward = torch_rule.prepare_forward(**inputs, scale=1.0, segments=plan.segments)
    o, residual = torch_rule.forward(forward, None)
    backward = torch_rule.prepare_backward(
        **inputs, scale=1.0, segments=plan.segments, residual=residual, initial_state=None, do=o
    )

    def step() -> None:
        torch_rule.summarize(forward)
        torch_rule.backward_summarize(backward)

    return step


def in_turn(steps: dict[str, Callable[[], Any]], rounds: int, clock: str) -> dict[str, float]:
    """Median seconds of each step, round after round: their differences are wanted."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = CLOCKS[clock]()
            step()
            times[name].append(CLOCKS[clock]() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def _times(step: Callable[[], Any], rounds: int, clock: str) -> list[float]:
    """Seconds of each round, all ranks starting together; the first does not count."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = CLOCKS[clock]()
        step()
        times.append(CLOCKS[clock]() - start)
    return times[1:]


def figures(shape: LayerShape, rounds: int, clock: str) -> dict[str, float]:
    """Seconds of exchanges, a copy, a product, the rule and a summary, on this rank."""
    x, (copied, copies) = torch.ones(PRODUCT, PRODUCT), make_copies(shape)
    product = lambda: x @ x  # noqa: E731
    often = 4 * rounds
    return {
        "stop": seconds_per_stop(product, often, clock),
        "small": statistics.median(_times(make_exchange(4096), often, clock)),
        "large": statistics.median(_times(make_exchange(EXCHANGED), often, clock)),
        "copied byte": statistics.median(_times(copies, often, clock)) / copied,
        "product": statistics.median(_times(product, often, clock)),
        **in_turn(
            {
                "rule": rule_step(shape),
                "one key head": rule_step(_one_key_head(shape)),
                "summary": summary_step(shape),
            },
            2 * rounds,
            clock,
        ),
    }


def _one_key_head(shape: LayerShape) -> LayerShape:
    return replace(
        shape, num_key_heads=1, num_value_heads=shape.num_value_heads // shape.num_key_heads
    )


def measure_machine(cp: int, shape: LayerShape, rounds: int, clock: str) -> Machine:
    """The figures of :class:`megatron.linear_cp.cost.Machine` for so many ranks and these heads."""
    by_rank = run_distributed(figures, cp, shape, rounds, clock)
    slowest = {name: max(found[name] for found in by_rank) for name in by_rank[0]}
    few = _one_key_head(shape)
    flops, few_flops = (_rule_flops(heads) for heads in (shape, few))
    rate = (flops - few_flops) / (slowest["rule"] - slowest["one key head"])
    workload = make_workload(shape, (TOKENS,), MACHINES["cpu"])
    per_row = summary_flops(workload, shape.num_value_heads)
    summary = TOKENS * (per_row.offset + per_row.transition + per_row.gradient)
    # Half at least: noise in the small exchange must not make the network infinitely fast.
    moving = max(slowest["large"] - slowest["small"], slowest["large"] / 2)
    return Machine(
        bytes_per_second=EXCHANGED / moving,
        flops_per_second=rate,
        summary_flops_per_second=summary / slowest["summary"],
        dense_flops_per_second=2 * PRODUCT**3 / slowest["product"],
        memory_bytes_per_second=1 / slowest["copied byte"],
        # Noise must not make it cheaper than it is alone.
        seconds_per_collective=max(slowest["stop"], slowest["small"]),
        seconds_per_row=max(slowest["one key head"] - few_flops / rate, 0.0) / TOKENS,
        shrinks_chunks=MACHINES["cpu"].shrinks_chunks,
        element_size=4,
        cores=len(os.sched_getaffinity(0)),
    )


def _rule_flops(shape: LayerShape) -> float:
    workload = make_workload(shape, (TOKENS,), MACHINES["cpu"])
    alone = predict_costs(workload, tensor_model_parallel_size=1, context_parallel_size=1)
    return alone["chunkwise"].flops


def make_workload(shape: LayerShape, lengths: tuple[int, ...], machine: Machine) -> Workload:
    """What the plan is told."""
    return Workload(
        lengths=lengths,
        num_key_heads=shape.num_key_heads,
        num_value_heads=shape.num_value_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        conv_kernel_size=shape.conv_kernel_size,
        hidden_size=HIDDEN,
        **asdict(machine),
    )


def step_times(
    keys: list[Key], shape: LayerShape, lengths: tuple[int, ...], rounds: int, clock: str
) -> dict[Key, list[float]]:
    """Seconds of every round of every option on this rank, until the slowest rank is done."""
    times: dict[Key, list[float]] = {key: [] for key in keys}
    steps = {}
    with cpu_cuda():
        groups = context_parallel_groups()
        for mode, layout, move in keys:
            case = ModuleCase(
                mode=mode,
                layout=layout,
                dtype=torch.float32,
                row=tuple(np.cumsum([0, *lengths]).tolist()),
                shape=shape,
                hidden=HIDDEN,
                config={"linear_cp_move_sequences": move},
            )
            module = build_module(case, make_config(case, groups.cp.size()), groups)
            _, hidden, grad, params = local_inputs(case, groups)
            steps[mode, layout, move] = (module, hidden, grad, params)
        for round_ in range(rounds + 2):
            for key, step in steps.items():
                dist.barrier()
                start = CLOCKS[clock]()
                forward_backward(*step)
                dist.barrier()
                if round_ >= 2:
                    times[key].append(CLOCKS[clock]() - start)
    return times


def run(
    configuration: Configuration, machine: Machine, rounds: int, clock: str
) -> tuple[list[Option], dict[Key, list[float]]]:
    """The plan's options, and the milliseconds of the slowest rank in each round of each."""
    cp, heads, lengths = configuration
    workload = make_workload(HEADS[heads], LENGTHS[lengths], machine)
    found = [option for option in options(workload, 1, cp) if not option.refused]
    keys = [_key(option) for option in found]
    by_rank = run_distributed(step_times, cp, keys, HEADS[heads], LENGTHS[lengths], rounds, clock)
    return found, {
        key: [1e3 * max(times[key][i] for times in by_rank) for i in range(rounds)] for key in keys
    }


def compare(
    configuration: Configuration,
    machine: Machine,
    found: list[Option],
    times: dict[Key, list[float]],
) -> Row:
    """Put options that are predicted alike together, and order the groups by prediction."""
    groups: dict[tuple[str, int, float], list[Option]] = {}
    for option in found:
        groups.setdefault((option.mode, option.bytes_sent, option.seconds), []).append(option)
    ordered = sorted(groups.items(), key=lambda item: item[0][2])

    def name(group: list[Option]) -> str:
        layouts = {option.layout for option in group}
        moved = " moved" if all(option.move_sequences == "auto" for option in group) else ""
        return f"{group[0].mode}{f' {layouts.pop()}' if len(layouts) == 1 else ''}{moved}"

    return Row(
        configuration,
        machine,
        tuple(name(group) for _, group in ordered),
        tuple(1e3 * seconds for (_, _, seconds), _ in ordered),
        tuple(
            tuple(map(statistics.mean, zip(*(times[_key(o)] for o in group), strict=True)))
            for _, group in ordered
        ),
    )


def _key(option: Option) -> Key:
    return option.mode, option.layout, option.move_sequences


def main() -> int:
    """Print a block of lines for each configuration, and the count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every combination, not ten of them")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--profile", choices=tuple(MACHINES), help="do not measure the machine")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    rounds, clock = arguments.rounds, arguments.clock
    every = [(cp, heads, lengths) for cp in (2, 4) for heads in HEADS for lengths in LENGTHS]
    machines: dict[tuple[int, str], Machine] = {}
    rows = []
    for configuration in every if arguments.all else TEN:
        cp, heads, lengths = configuration
        if (cp, heads) not in machines:
            machines[cp, heads] = (
                MACHINES[arguments.profile]
                if arguments.profile
                else measure_machine(cp, HEADS[heads], rounds, clock)
            )
        machine = machines[cp, heads]
        row = compare(configuration, machine, *run(configuration, machine, rounds, clock))
        rows.append(row)
        verdict = "fastest" if row.loss == 0 else f"{100 * row.loss:.1f} % over the least median"
        if row.beaten_by:
            verdict += f", beaten by {', '.join(row.beaten_by)}"
        print(f"CP {cp}, heads {heads}, {lengths}: the choice is {verdict}", flush=True)
        for name, predicted, measured in zip(row.names, row.predicted, row.measured, strict=True):
            print(f"    {name:24} predicted {predicted:8.1f} ms, measured {measured:8.1f} ms")
    for (cp, heads), m in machines.items():
        print(
            f"CP {cp}, heads {heads}: {m.bytes_per_second / 1e9:.2f} GB/s, "
            f"{m.flops_per_second / 1e9:.1f} GFLOP/s of the rule, "
            f"{m.summary_flops_per_second / 1e9:.1f} of summaries, "
            f"{m.dense_flops_per_second / 1e9:.1f} of products, "
            f"{m.memory_bytes_per_second / 1e9:.1f} GB/s of memory, "
            f"{1e3 * m.seconds_per_collective:.2f} ms an exchange, "
            f"{1e6 * m.seconds_per_row:.2f} us a row"
        )
    unbeaten, fastest = (
        sum(not row.beaten_by for row in rows),
        sum(row.loss == 0 for row in rows),
    )
    print(
        f"the choice has the least median in {fastest} of {len(rows)}, elsewhere exceeds it by "
        f"{100 * max(r.loss for r in rows):.1f} % at most; no option is faster beyond chance in "
        f"{unbeaten}"
    )
    pairs = [right for row in rows for right in row.pairs_in_order]
    print(
        f"among the options on zigzag it has the least median in "
        f"{sum(row.is_fastest_on_zigzag for row in rows)} of {len(rows)}; of any two options the "
        f"one predicted faster was in {sum(pairs)} of {len(pairs)}"
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)
    return int(10 * fastest < 9 * len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
