# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.linear_cp plan``: what each mode and layout would cost on a micro-batch."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from megatron.linear_cp.cost import (
    MACHINES,
    Machine,
    ModeCost,
    Workload,
    layer_sizes,
    predict_costs,
)
from megatron.linear_cp.exchange_choice import choose_for
from megatron.linear_cp.layout import (
    LAYOUTS,
    TokenRanges,
    check_divisible,
    mixed_token_ranges,
    token_ranges,
)
from megatron.linear_cp.modes.heads import BUILT_IN_MODES, check_heads

_MAX_TOKENS = 2**40
# The state of every head of every segment is counted: a segment a sequence, rank and half.
_MAX_CP = 512
# Their products, times the tokens, must stay within floats and 64-bit counts.
_MAX_SIZE = 2**20
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


@dataclass(frozen=True)
class Option:
    """One way to run the layer.

    Attributes:
        mode: as a config declares it.
        layout: likewise.
        move_sequences: likewise; matters to chunkwise on zigzag.
        refused: why it cannot run, empty where it can. The numbers are then 0.
        bytes_sent: of the busiest rank, in one layer, forward and backward.
        seconds: predicted for the layer: exchanges, rule and projections, nothing overlapping.
        saved_bytes: that a rank keeps of a layer for backward, about.
        imbalance: tokens of the busiest rank over the mean.
    """

    mode: str
    layout: str
    move_sequences: str
    refused: str = ""
    bytes_sent: int = 0
    seconds: float = 0.0
    saved_bytes: int = 0
    imbalance: float = 1.0


def options(workload: Workload, tp: int, cp: int) -> list[Option]:
    """Every mode on every layout, in a fixed order.

    Args:
        workload: the layer, the micro-batch and the machine.
        tp: tensor-parallel size.
        cp: context-parallel size.
    """

    # Of all modes at once, and only where an option gets as far as that.
    @cache
    def costs(layout: str, move: str) -> dict[str, ModeCost]:
        return predict_costs(
            workload,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            layout=layout,
            move_sequences=move,
        )

    found = []
    for layout in LAYOUTS:
        for mode in BUILT_IN_MODES:
            both = ("never", "auto") if (mode, layout) == ("chunkwise", "zigzag") else ("never",)
            found += [_option(workload, tp, cp, mode, layout, move, costs) for move in both]
    return found


def recommended(found: list[Option]) -> Option | None:
    """The option of the least predicted time; of equals, the first. None if nothing can run."""
    allowed = [option for option in found if not option.refused]
    return min(allowed, key=lambda option: option.seconds) if allowed else None


def _option(
    workload: Workload,
    tp: int,
    cp: int,
    mode: str,
    layout: str,
    move: str,
    costs: Callable[[str, str], dict[str, ModeCost]],
) -> Option:
    boundaries = _boundaries(workload)
    try:
        check_divisible(boundaries, cp, layout)
        check_heads(
            mode,
            num_key_heads=workload.num_key_heads,
            num_value_heads=workload.num_value_heads,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
        )
    except ValueError as error:
        return Option(mode, layout, move, refused=str(error))
    cost = costs(layout, move)[mode]
    busiest = int(boundaries[-1]) // cp
    if mode == "chunkwise" and layout == "zigzag" and cp > 1:
        busiest = int(choose_for(boundaries, cp, layer_sizes(workload, tp), move).tokens.max())
    return Option(
        mode=mode,
        layout=layout,
        move_sequences=move,
        bytes_sent=cost.bytes_sent,
        seconds=cost.seconds,
        saved_bytes=_saved_bytes(workload, tp, busiest, cp if mode == "all_gather" else 1),
        imbalance=busiest * cp / max(int(boundaries[-1]), 1),
    )


def _saved_bytes(workload: Workload, tp: int, tokens: int, gathered: int) -> int:
    """Projections, rule inputs and output, normed output, and each chunk's factor."""
    sizes = layer_sizes(workload, tp)
    value = sizes.num_value_heads * sizes.value_head_dim
    projected = sizes.conv_channels + value + 2 * sizes.num_value_heads
    rule = sizes.conv_channels + sizes.num_value_heads * 64
    if gathered > 1:
        rule += sizes.conv_channels  # the gathered projections, beside the local ones
    return tokens * sizes.element_size * (projected + 2 * value + gathered * rule)


def _boundaries(workload: Workload) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(workload.lengths, dtype=np.int64))])


def table(found: list[Option]) -> str:
    """The options as text, one line each."""
    best = recommended(found)
    lines = [
        f"{'mode':11} {'layout':11} {'move':6} {'MB sent':>10} {'ms':>9} {'MB saved':>10} "
        f"{'balance':>8}"
    ]
    for option in found:
        head = f"{option.mode:11} {option.layout:11} {option.move_sequences:6}"
        if option.refused:
            lines.append(f"{head} cannot run: {option.refused}")
            continue
        lines.append(
            f"{head} {option.bytes_sent / 1e6:10.2f} {1e3 * option.seconds:9.3f} "
            f"{option.saved_bytes / 1e6:10.1f} {option.imbalance:8.2f}"
            f"{'  <- recommended' if option is best else ''}"
        )
    return "\n".join(lines)


def picture(workload: Workload, tp: int, cp: int) -> str:
    """SVG: which rank works on which tokens, per layout and with short sequences moved."""
    boundaries = _boundaries(workload)
    rows: dict[str, TokenRanges] = {}
    for layout in LAYOUTS:
        try:
            rows[layout] = token_ranges(boundaries, cp, layout)
        except ValueError:
            continue
    if "zigzag" in rows:
        choice = choose_for(boundaries, cp, layer_sizes(workload, tp), "auto")
        rows["zigzag, short sequences moved"] = mixed_token_ranges(boundaries, cp, choice.home)
    width, left, height = 900, 210, 26
    scale = width / max(int(boundaries[-1]), 1)
    parts = []
    for line, (name, ranges) in enumerate(rows.items()):
        y = 12 + line * (height + 12)
        parts.append(f'<text x="8" y="{y + 18}">{escape(name)}</text>')
        for start, stop, rank in zip(ranges.start, ranges.stop, ranges.rank, strict=True):
            parts.append(
                f'<rect x="{left + scale * start:.2f}" y="{y}" '
                f'width="{scale * (stop - start):.2f}" height="{height}" '
                f'fill="{_COLORS[rank % len(_COLORS)]}"><title>rank {rank}</title></rect>'
            )
        parts += [
            f'<line x1="{left + scale * b:.2f}" x2="{left + scale * b:.2f}" y1="{y}" '
            f'y2="{y + height}" stroke="white"/>'
            for b in boundaries
        ]
    bottom = 24 + len(rows) * (height + 12)
    for rank in range(cp):
        x = left + rank * 80
        color = _COLORS[rank % len(_COLORS)]
        parts.append(f'<rect x="{x}" y="{bottom - 12}" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom}">rank {rank}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 12} {bottom + 14}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#f7f7f7"/>\n{body}\n</svg>\n'
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--lengths", required=True, help="file of stored sequence lengths")
    parser.add_argument("--cp", type=int, required=True, help="context-parallel size")
    add_layer_arguments(parser)


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Options about the layer, the machine and the output, which ``inspect`` has too."""
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--heads", default="16/32", help="key/value heads of the model")
    parser.add_argument("--head-dims", default="128/128", help="key/value channels of a head")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--conv", type=int, default=4, help="taps of the convolution")
    parser.add_argument(
        "--profile",
        choices=tuple(MACHINES),
        default="gpu",
        help="bf16 on GPUs of one host, or fp32 on CPU ranks over gloo; the next six override it",
    )
    parser.add_argument("--bandwidth", type=float, help="GB/s that a rank sends")
    parser.add_argument("--tflops", type=float, help="TFLOP/s of the rule")
    parser.add_argument("--summary-tflops", type=float, help="TFLOP/s of summaries of segments")
    parser.add_argument("--dense-tflops", type=float, help="TFLOP/s of projections")
    parser.add_argument("--memory-bandwidth", type=float, help="GB/s that a rank reads or writes")
    parser.add_argument("--latency-us", type=float, help="microseconds that an exchange takes")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--picture", help="also write an SVG of who works on which tokens")


def main(arguments: argparse.Namespace) -> int:
    """Print the options; 0 if one can run, 1 if none can, 2 for input that makes no sense."""
    try:
        workload = make_workload(arguments, _read_lengths(arguments.lengths))
        found = options(workload, arguments.tp, arguments.cp)
        if arguments.picture:
            Path(arguments.picture).write_text(picture(workload, arguments.tp, arguments.cp))
    except (OSError, ValueError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print(f"{heading(workload, arguments.tp, arguments.cp)}\n{table(found)}")
    return int(recommended(found) is None)


def counted(number: int, noun: str) -> str:
    """The number with its noun, as one says it."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def heading(workload: Workload, tp: int, cp: int) -> str:
    """What the table is about."""
    return (
        f"{counted(len(workload.lengths), 'sequence')}, {sum(workload.lengths)} tokens, "
        f"TP {tp}, CP {cp}; one layer, forward and backward, busiest rank"
    )


def as_json(found: list[Option]) -> dict[str, object]:
    """The options and the index of the recommended one, or None."""
    best = recommended(found)
    return {
        "options": [asdict(option) for option in found],
        "recommended": None if best is None else found.index(best),
    }


def make_workload(arguments: argparse.Namespace, lengths: Sequence[int]) -> Workload:
    """The workload that the options of :func:`add_layer_arguments` describe.

    Raises:
        ValueError: an option that makes no sense, or more tokens than a micro-batch can have.
    """
    for name in ("tp", "cp", "hidden", "conv"):
        value, most = getattr(arguments, name), _MAX_CP if name == "cp" else _MAX_SIZE
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
        if value > most:
            raise ValueError(f"--{name} must be at most {most}, got {value}")
    if not 0 < sum(lengths) <= _MAX_TOKENS:
        raise ValueError(
            f"the micro-batch adds up to {sum(lengths)} tokens; it may have 1 to {_MAX_TOKENS}"
        )
    key_heads, value_heads = _pair("--heads", arguments.heads)
    key_dim, value_dim = _pair("--head-dims", arguments.head_dims)
    return Workload(
        lengths=list(lengths),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel_size=arguments.conv,
        hidden_size=arguments.hidden,
        **asdict(_machine(arguments)),
    )


def _machine(arguments: argparse.Namespace) -> Machine:
    machine = MACHINES[arguments.profile]
    for name, field, unit in (
        ("bandwidth", "bytes_per_second", 1e9),
        ("tflops", "flops_per_second", 1e12),
        ("summary_tflops", "summary_flops_per_second", 1e12),
        ("dense_tflops", "dense_flops_per_second", 1e12),
        ("memory_bandwidth", "memory_bytes_per_second", 1e9),
        ("latency_us", "seconds_per_collective", 1e-6),
    ):
        value = getattr(arguments, name)
        if value is None:
            continue
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        machine = replace(machine, **{field: unit * value})
    return machine


def _read_lengths(file: str) -> list[int]:
    try:
        words = Path(file).read_text(encoding="utf-8").replace(",", " ").split()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: {error}; save the lengths as plain text"
        ) from error
    bad = next((word for word in words if not word.isdecimal()), None)
    if bad is not None or not words:
        raise ValueError(
            f"{file} must hold sequence lengths, whole numbers parted by spaces, commas or lines; "
            f"got {'nothing' if bad is None else repr(bad)}"
        )
    return [int(word) for word in words]


def _pair(flag: str, text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
        raise ValueError(f"{flag} must be two numbers such as 16/32, got {text!r}")
    if max(int(first), int(second)) > _MAX_SIZE:
        raise ValueError(f"{flag} must be two numbers of at most {_MAX_SIZE}, got {text!r}")
    return int(first), int(second)
