# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/: who stores which tokens, and what each mode moves.

    python -m tools.draw_pictures [--folder docs]

Ranks, segments and owners come from the layout and route code itself, so a picture cannot say
something else than what runs.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron.linear_cp.layout import TokenRanges, token_ranges
from megatron.linear_cp.routes import build_state_route

CU_SEQLENS = [0, 8, 24, 40]
CP_SIZE, HEADS = 2, 4
CELL, GAP, TOP, LEFT = 18, 6, 34, 96
HEAD = 9  # height of one head's cell
RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


def owner(layout: str) -> np.ndarray:
    """Rank of every global token."""
    ranges = token_ranges(CU_SEQLENS, CP_SIZE, layout)
    ranks = np.empty(CU_SEQLENS[-1], dtype=int)
    for start, stop, rank in zip(ranges.start, ranges.stop, ranges.rank, strict=True):
        ranks[start:stop] = rank
    return ranks


def x_of(token: int) -> int:
    """Left edge of a token; a gap parts the sequences."""
    return LEFT + token * CELL + GAP * int(np.searchsorted(CU_SEQLENS, token, side="right") - 1)


WIDTH = x_of(CU_SEQLENS[-1] - 1) + CELL + 12


def text(x: float, y: float, words: str, **attributes: str | int) -> str:
    """A line of text."""
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{x}" y="{y}"{extra}>{words}</text>'


def sequence_names() -> list[str]:
    """A heading over each sequence."""
    return [
        text(
            (x_of(start) + x_of(stop - 1) + CELL) / 2,
            22,
            f"sequence {i}: {stop - start} tokens",
            text_anchor="middle",
        )
        for i, (start, stop) in enumerate(pairwise(CU_SEQLENS))
    ]


def legend(y: float) -> list[str]:
    """Which colour is which rank."""
    parts = []
    for rank in range(CP_SIZE):
        x = LEFT + rank * 90
        parts.append(f'<rect x="{x}" y="{y - 13}" width="16" height="16" fill="{RANKS[rank]}"/>')
        parts.append(text(x + 22, y, f"rank {rank}"))
    return parts


def picture(parts: list[str], height: float) -> str:
    """An SVG file."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def draw_layouts() -> str:
    """The two layouts, one under the other."""
    parts = sequence_names()
    for row, layout in enumerate(("zigzag", "contiguous")):
        y = TOP + row * (CELL + 16)
        parts.append(text(8, y + 14, layout))
        parts += [
            f'<rect x="{x_of(token)}" y="{y}" width="{CELL - 1}" height="{CELL}" '
            f'fill="{RANKS[rank]}"/>'
            for token, rank in enumerate(owner(layout))
        ]
    y = TOP + 2 * (CELL + 16) + 14
    return picture(parts + legend(y), y + 14)


def grid(y: float, label: str, colours: np.ndarray) -> list[str]:
    """Heads from top to bottom, tokens from left to right, a rank for every cell."""
    lines = label.split("\n")
    parts = [text(8, y + 15 + 16 * i, line) for i, line in enumerate(lines)]
    for head in range(HEADS):
        changes = np.flatnonzero(np.diff(colours[head])) + 1
        for start, stop in pairwise(sorted({*CU_SEQLENS, *changes.tolist()})):
            parts.append(
                f'<rect x="{x_of(start)}" y="{y + head * HEAD}" '
                f'width="{x_of(stop - 1) + CELL - 1 - x_of(start)}" height="{HEAD - 1}" '
                f'fill="{RANKS[colours[head, start]]}"/>'
            )
    return parts


def move(y: float, words: str) -> list[str]:
    """An arrow down with what moves along it."""
    x = LEFT + 10
    return [
        f'<path d="M{x} {y + 4} v14 m-4 -5 l4 6 l4 -6" fill="none" stroke="black"/>',
        text(x + 16, y + 17, words),
    ]


def draw_steps(steps: list[tuple[str, np.ndarray] | str]) -> str:
    """Grids under each other, and arrows where a step is only words."""
    parts, y = sequence_names(), float(TOP)
    for step in steps:
        if isinstance(step, str):
            parts += move(y, step)
            y += 26
        else:
            parts += grid(y, *step)
            y += HEADS * HEAD + 6
    return picture(parts + legend(y + 20), y + 34)


def draw_headwise() -> str:
    """Tokens are traded for heads, and back."""
    mine = np.tile(owner("zigzag"), (HEADS, 1))
    heads = np.repeat(np.arange(HEADS) * CP_SIZE // HEADS, CU_SEQLENS[-1]).reshape(HEADS, -1)
    return draw_steps(
        [
            ("stored", mine),
            "all-to-all: q, k, v and gates",
            ("each rank\n1/CP of heads", heads),
            "all-to-all: the output",
            ("stored", mine),
        ]
    )


def draw_all_gather() -> str:
    """Every rank gets everything."""
    mine = np.tile(owner("zigzag"), (HEADS, 1))
    steps: list[tuple[str, np.ndarray] | str] = [
        ("stored", mine),
        "all-gather: q, k, v and gates",
    ]
    steps += [(f"rank {rank}\nruns all", np.full_like(mine, rank)) for rank in range(CP_SIZE)]
    steps += ["nothing: each rank keeps its own tokens", ("stored", mine)]
    return draw_steps(steps)


def state_owners(ranges: TokenRanges) -> dict[tuple[int, int], int]:
    """Rank that composes the states of a (sequence, head), from every rank's route."""
    owners = {}
    for rank in range(CP_SIZE):
        sequences = ranges.sequence[ranges.rank == rank]
        route = build_state_route(ranges, rank, CP_SIZE, HEADS)
        sources = np.repeat(np.arange(CP_SIZE), route.state_recv_splits)
        for row, source in zip(route.state_recv.array, sources, strict=True):
            owners[int(sequences[row // HEADS]), int(row % HEADS)] = int(source)
    return owners


def draw_chunkwise() -> str:
    """Summaries of the segments go to the owner of their sequence and head; states come back."""
    ranges = token_ranges(CU_SEQLENS, CP_SIZE, "zigzag")
    owners = state_owners(ranges)
    top, middle, bottom = TOP + 18, TOP + 108, TOP + 180
    parts = sequence_names()
    parts += [text(8, top + 14, "summaries"), text(8, middle + 14, "owners")]
    parts += [text(8, bottom + 14, "local kernel")]
    order = np.argsort(ranges.start)
    for sequence, (start, stop) in enumerate(pairwise(CU_SEQLENS)):
        segments = [i for i in order if ranges.sequence[i] == sequence]
        centre = (x_of(start) + x_of(stop - 1) + CELL) / 2
        left = centre - HEADS * CELL / 2
        for head in range(HEADS):
            parts.append(
                f'<rect x="{left + head * CELL}" y="{middle}" width="{CELL - 1}" '
                f'height="{CELL}" fill="{RANKS[owners[sequence, head]]}"/>'
            )
        for position, i in enumerate(segments):
            colour = RANKS[ranges.rank[i]]
            x = x_of(int(ranges.start[i]))
            width = x_of(int(ranges.stop[i]) - 1) + CELL - 1 - x
            near = centre + (x + width / 2 - centre) / 4
            for y in (top, bottom):
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{width}" height="{CELL}" fill="{colour}" '
                    'stroke="white"/>'
                )
            last = position == len(segments) - 1
            if not last:
                parts.append(arrow(x + width / 2, top + CELL, near, middle - 3))
                summary = "(A, b)" if position else "b"
                parts.append(
                    text(x + width / 2, top - 4, summary, text_anchor="middle", font_size=11)
                )
            if position:
                parts.append(arrow(near, middle + CELL, x + width / 2, bottom - 3))
                parts.append(
                    text(x + width / 2, bottom + 31, "S", text_anchor="middle", font_size=11)
                )
    y = bottom + 58
    return picture(parts + legend(y), y + 14)


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a dot at its end."""
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="#555"/>'
        f'<circle cx="{to_x:.1f}" cy="{to_y:.1f}" r="2.5" fill="#555"/>'
    )


PICTURES = {
    "layouts": draw_layouts,
    "headwise": draw_headwise,
    "all_gather": draw_all_gather,
    "chunkwise": draw_chunkwise,
}


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="docs")
    folder = Path(parser.parse_args().folder)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
