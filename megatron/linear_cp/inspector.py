# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron.linear_cp inspect``: what a run does with a saved micro-batch."""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import planner
from megatron.linear_cp.cost import Workload, chunkwise_work, uniform_bytes
from megatron.linear_cp.layout import LAYOUTS, TokenRanges
from megatron.linear_cp.micro_batch import plan_for
from megatron.linear_cp.modes.heads import heads_fit
from megatron.linear_cp.packed_seq_params import is_packed, resolve_cu_seqlens
from megatron.linear_cp.saved_batch import FIELDS, SavedBatch, load_batch
from megatron.linear_cp.segments import IntArray

_SHOWN_SEQUENCES = 16
_SHOWN_SEGMENTS = 6
_SHOWN_SIZES = 8
MOVED = "zigzag, short sequences moved"


@dataclass(frozen=True)
class Sequence:
    """One packed sequence.

    Attributes:
        real: its tokens.
        stored: rows that it takes, padding included.
        start: where it begins in the packed buffer.
        missing: rows of padding that zigzag asks for beyond those stored.
    """

    real: int
    stored: int
    start: int
    missing: int


@dataclass(frozen=True)
class RankShare:
    """What one rank has of the micro-batch under one layout.

    Attributes:
        tokens: rows that it works on, padding included.
        real: of them, tokens that are no padding.
        segments: ``(sequence, start, stop)`` of every run of tokens, in storage order.
        sends: bytes to other ranks in one layer, forward and backward: by mode, and for chunkwise
            also what it consists of. Modes that the heads do not fit are missing.
    """

    tokens: int
    real: int
    segments: list[tuple[int, int, int]]
    sends: dict[str, int]


@dataclass(frozen=True)
class LayoutVerdict:
    """Whether a layout takes the micro-batch.

    Attributes:
        error: what every rank of a run raises, empty where the layout fits.
        advice: what would make it fit; or, where it fits, what else to know.
        sizes: CP sizes, of those up to 64, at which it fits as it is stored.
    """

    error: str
    advice: str
    sizes: list[int]


@dataclass
class Report:
    """Everything that ``inspect`` prints.

    Attributes:
        source: file and what it holds.
        notes: what was assumed or looks wrong and stops nothing.
        error: what a run raises whatever its layout; the rest is then empty.
        advice: about that error.
        sequences: in order.
        layouts: a verdict for each layout.
        shares: of every rank, for each way that tokens can lie.
        options: as in ``plan``.
    """

    source: str
    notes: list[str] = field(default_factory=list)
    error: str = ""
    advice: str = ""
    sequences: list[Sequence] = field(default_factory=list)
    layouts: dict[str, LayoutVerdict] = field(default_factory=dict)
    shares: dict[str, list[RankShare]] = field(default_factory=dict)
    options: list[planner.Option] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("file", help="PackedSeqParams or boundaries, by torch.save or as JSON")
    parser.add_argument("--cp", type=int, help="context-parallel size (default: the file's)")
    parser.add_argument("--local-tokens", type=int, help="rows that a rank's buffer really has")
    planner.add_layer_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Print the report; 0 if a mode can run, 1 if none can, 2 for input that cannot be read."""
    try:
        batch = load_batch(arguments.file)
        if arguments.cp is None:
            arguments.cp = batch.params.local_cp_size
        if arguments.cp is None:
            raise ValueError(f"{arguments.file} does not say its CP size: give it with --cp")
        report = inspect_batch(batch, arguments)
        if arguments.picture and report.options:
            workload = planner.make_workload(arguments, [s.stored for s in report.sequences])
            Path(arguments.picture).write_text(
                planner.picture(workload, arguments.tp, arguments.cp)
            )
    except (OSError, ValueError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_json(report), indent=2) if arguments.json else text(report, arguments.cp))
    return int(planner.recommended(report.options) is None)


def inspect_batch(batch: SavedBatch, arguments: argparse.Namespace) -> Report:
    """The report about a micro-batch under the options of :func:`add_arguments`.

    Raises:
        ValueError: an option that makes no sense, or a micro-batch of no tokens.
    """
    params, cp, tp = batch.params, arguments.cp, arguments.tp
    if arguments.local_tokens is not None and arguments.local_tokens < 1:
        raise ValueError(f"--local-tokens must be at least 1, got {arguments.local_tokens}")
    planner.make_workload(arguments, [1])  # the options are checked before the file is judged
    kind = f"{batch.kind}, qkv_format {params.qkv_format}"
    report = Report(f"{arguments.file}: {kind}", notes=[f"assumed: {x}" for x in batch.assumed])
    if params.local_cp_size not in (None, cp):
        report.notes.append(
            f"the file says local_cp_size {params.local_cp_size}, inspected at {cp}"
        )
    report.error, report.advice = _malformed(params)
    if report.error:
        return report
    if not is_packed(params):
        report.notes.append(
            f"a run takes qkv_format {params.qkv_format!r} for dense input and ignores the "
            "boundaries; inspected as 'thd'"
        )
        params = replace(params, qkv_format="thd")
    stored = resolve_cu_seqlens(params).numpy().astype(np.int64)
    real = _real_lengths(params, stored)
    multiple = 2 * cp if cp > 1 else 1
    report.sequences = [
        Sequence(int(r), int(n), int(start), int(-n % multiple))
        for r, n, start in zip(real, np.diff(stored), stored[:-1], strict=True)
    ]
    workload = planner.make_workload(arguments, [s.stored for s in report.sequences])
    tokens = arguments.local_tokens
    report.layouts = {
        layout: _verdict(params, report.sequences, cp, layout, tokens) for layout in LAYOUTS
    }
    if tokens is not None and stored[-1] != tokens * cp:
        return report
    report.shares = _shares(workload, real, tp, cp, report.layouts)
    report.options = planner.options(workload, tp, cp)
    return report


def _malformed(params: PackedSeqParams) -> tuple[str, str]:
    """What a run of any layout and CP size raises, and advice; both empty for good boundaries."""
    try:
        dense = replace(params, qkv_format="thd") if not is_packed(params) else params
        _run_checks(dense, 1, "zigzag", None)
    except ValueError as error:
        return str(error), _advice_on_malformed(params)
    return "", ""


def _run_checks(params: PackedSeqParams, cp: int, layout: str, local_tokens: int | None) -> None:
    """Raise what the layer raises: these are the layer's own checks, and they send nothing."""
    group = dist.ProcessGroup(0, cp)  # type: ignore[call-arg]
    if local_tokens is None:
        local_tokens = int(resolve_cu_seqlens(params)[-1]) // cp
    plan_for(params, group, local_tokens=local_tokens, batch=1, layout=layout)


def _advice_on_malformed(params: PackedSeqParams) -> str:
    for name in FIELDS:
        boundaries = getattr(params, name)
        if boundaries is None or boundaries.ndim != 1 or not len(boundaries):
            continue
        values = boundaries.tolist()
        shown = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
        if values[0] != 0 and all(value >= 0 for value in values):
            return (
                f"{name} is [{shown}]: if these are lengths, boundaries are their running sum from "
                "0 (`plan --lengths` takes lengths as they are); if they are boundaries, the first "
                "0 was dropped"
            )
        if any(b < a for a, b in zip(values, values[1:], strict=False)):
            return f"{name} is [{shown}]: lengths, or parts of two micro-batches, joined"
    return ""


def _real_lengths(params: PackedSeqParams, stored: IntArray) -> IntArray:
    real = params.cu_seqlens_q
    if real is None:
        return np.diff(stored)
    return np.diff(real.numpy().astype(np.int64))


def _verdict(
    params: PackedSeqParams, sequences: list[Sequence], cp: int, layout: str, tokens: int | None
) -> LayoutVerdict:
    total = sum(s.stored for s in sequences)
    if layout == "zigzag":
        common = math.gcd(*(s.stored for s in sequences))
        sizes = [size for size in range(1, 65) if size == 1 or common % (2 * size) == 0]
    else:
        sizes = [size for size in range(1, 65) if total % size == 0]
    try:
        _run_checks(params, cp, layout, tokens)
    except ValueError as error:
        return LayoutVerdict(str(error), _advice(sequences, cp, layout, tokens), sizes)
    misfits = sum(s.missing > 0 for s in sequences)
    if layout == "contiguous" and misfits:
        return LayoutVerdict(
            "",
            "softmax attention in the same stack brings hidden states to zigzag, and refuses this "
            "micro-batch",
            sizes,
        )
    return LayoutVerdict("", "", sizes)


def _advice(sequences: list[Sequence], cp: int, layout: str, tokens: int | None) -> str:
    total = sum(s.stored for s in sequences)
    if tokens is not None and tokens * cp > total:
        return (
            f"{tokens * cp - total} rows lie behind the last boundary: give padded boundaries that "
            "cover them, or boundaries of the whole buffer if these are of one rank's part"
        )
    if layout == "zigzag" and any(s.missing for s in sequences):
        padded = [(i, s) for i, s in enumerate(sequences) if s.missing]
        rows = sum(s.missing for _, s in padded)
        named = ", ".join(f"{i}: {s.stored} -> {s.stored + s.missing}" for i, s in padded[:4])
        more = ", ..." if len(padded) > 4 else ""
        return (
            f"pad {len(padded)} of {len(sequences)} sequences to a multiple of {2 * cp} ({named}"
            f"{more}), {rows} more rows ({100 * rows / max(total, 1):.1f} %): pack_sequences(..., "
            f"multiple_of=length_multiple({cp})), and give both real and padded boundaries"
        )
    if layout == "contiguous" and total % cp:
        return (
            f"pad the buffer by {-total % cp} rows behind the last sequence: pack_sequences(..., "
            f"total_multiple_of={cp})"
        )
    return ""


def _shares(
    workload: Workload, real: IntArray, tp: int, cp: int, layouts: dict[str, LayoutVerdict]
) -> dict[str, list[RankShare]]:
    """Every rank's share, for each layout that fits and with short sequences moved if any are."""
    shares: dict[str, list[RankShare]] = {}
    for name, layout, move in (
        ("zigzag", "zigzag", "never"),
        (MOVED, "zigzag", "auto"),
        ("contiguous", "contiguous", "never"),
    ):
        if layouts[layout].error:
            continue
        work = chunkwise_work(workload, tp, cp, layout, move)
        if name == MOVED and not (work.home >= 0).any():
            continue
        shares[name] = []
        for rank, traffic in enumerate(work.traffic):
            sends = {"chunkwise": traffic.total} | asdict(traffic)
            if name != MOVED:
                sends |= {m: uniform_bytes(workload, tp, cp, m) for m in ("headwise", "all_gather")}
            sends = {m: n for m, n in sends.items() if _runs(workload, tp, cp, m)}
            shares[name].append(_share(workload, work.ranges, real, rank, sends))
    return shares


def _runs(workload: Workload, tp: int, cp: int, mode: str) -> bool:
    return heads_fit(
        "headwise" if mode == "headwise" else "chunkwise",
        num_key_heads=workload.num_key_heads,
        num_value_heads=workload.num_value_heads,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
    )


def _share(
    workload: Workload, ranges: TokenRanges, real: IntArray, rank: int, sends: dict[str, int]
) -> RankShare:
    mine = ranges.rank == rank
    sequence, start, stop = ranges.sequence[mine], ranges.start[mine], ranges.stop[mine]
    begins = np.concatenate([[0], np.cumsum(workload.lengths)])[sequence]
    kept = np.clip(np.minimum(stop, begins + real[sequence]) - start, 0, None)
    return RankShare(
        tokens=int((stop - start).sum()),
        real=int(kept.sum()),
        segments=list(zip(sequence.tolist(), start.tolist(), stop.tolist(), strict=True)),
        sends=sends,
    )


def as_json(report: Report) -> dict[str, object]:
    """The report for programs; options and recommendation as ``plan`` gives them."""
    return asdict(report) | planner.as_json(report.options)


def text(report: Report, cp: int) -> str:
    """The report for people."""
    lines = [report.source, *report.notes]
    if report.error:
        lines += ["a run raises, in every mode and layout:", f"  ValueError: {report.error}"]
        return "\n".join([*lines, f"  {report.advice}"] if report.advice else lines)
    lines += ["", *_sequence_lines(report.sequences, cp), ""]
    for layout, verdict in report.layouts.items():
        sizes = ", ".join(map(str, verdict.sizes[:_SHOWN_SIZES]))
        more = ", ..." if len(verdict.sizes) > _SHOWN_SIZES else ""
        fits = f"as stored it fits CP {sizes}{more}"
        if not verdict.error:
            lines.append(f"{layout}: fits CP {cp}; {fits}")
        else:
            lines += [f"{layout}: a run raises, in every mode", f"  ValueError: {verdict.error}"]
            lines.append(f"  {fits}")
        if verdict.advice:
            lines.append(f"  {verdict.advice}")
    for name, shares in report.shares.items():
        lines += [
            "",
            f"who works on which tokens, {name}: sequence[start:stop]; MB sent in a layer:",
        ]
        lines += [_rank_line(rank, share) for rank, share in enumerate(shares)]
    return "\n".join([*lines, "", planner.table(report.options)] if report.options else lines)


def _sequence_lines(sequences: list[Sequence], cp: int) -> list[str]:
    stored, real = sum(s.stored for s in sequences), sum(s.real for s in sequences)
    empty = sum(s.stored == 0 for s in sequences)
    misfits = [i for i, s in enumerate(sequences) if s.missing]
    lengths = sorted(s.real for s in sequences)
    lines = [
        f"{planner.counted(len(sequences), 'sequence')} of {lengths[0]} to {lengths[-1]} tokens"
        + (f", {empty} of them empty" if empty else ""),
        f"{stored} rows stored, {real} tokens, {stored - real} rows of padding "
        f"({100 * (stored - real) / max(stored, 1):.1f} %)",
    ]
    # Those that do not fit come first: they are what one looks for.
    shown = sorted(range(len(sequences)), key=lambda i: not sequences[i].missing)
    shown = sorted(shown[:_SHOWN_SEQUENCES])
    lines.append(f"  {'sequence':>8} {'start':>9} {'tokens':>9} {'stored':>9} {'padding':>9}")
    for i in shown:
        s = sequences[i]
        wrong = f"  <- not a multiple of {2 * cp}" if s.missing else ""
        lines.append(f"  {i:8} {s.start:9} {s.real:9} {s.stored:9} {s.stored - s.real:9}{wrong}")
    hidden = len(sequences) - len(shown)
    if hidden:
        bad = len(misfits) - sum(sequences[i].missing > 0 for i in shown)
        lines.append(f"  and {hidden} more" + (f", {bad} of them no multiple" if bad else ""))
    return lines


def _rank_line(rank: int, share: RankShare) -> str:
    spans = [f"{i}[{start}:{stop}]" for i, start, stop in share.segments[:_SHOWN_SEGMENTS]]
    if len(share.segments) > _SHOWN_SEGMENTS:
        spans.append(f"and {len(share.segments) - _SHOWN_SEGMENTS} more")
    sends = [f"{mode} {share.sends[mode] / 1e6:.2f}" for mode in _ORDER if mode in share.sends]
    parts = [f"{part} {share.sends[part] / 1e6:.2f}" for part in _PARTS if share.sends.get(part)]
    if parts:
        sends[-1] += f" ({', '.join(parts)})"
    return (
        f"  rank {rank}: {share.tokens} rows, {share.real} tokens; "
        f"sends {', '.join(sends) or 'nothing'}\n"
        f"    {planner.counted(len(share.segments), 'segment')}: {' '.join(spans)}"
    )


_ORDER = ("headwise", "all_gather", "chunkwise")
_PARTS = ("states", "halo", "moved")
