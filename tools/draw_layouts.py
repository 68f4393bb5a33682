# SPDX-License-Identifier: Apache-2.0
"""Draw docs/layouts.svg: which rank stores which tokens, taken from the layout code itself."""

import argparse
from pathlib import Path

import numpy as np

from megatron.linear_cp.layout import token_ranges

CU_SEQLENS = [0, 8, 24, 40]
CP_SIZE = 2
CELL, GAP, TOP, LEFT = 18, 6, 34, 96
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


def draw() -> str:
    """The picture as SVG text."""
    width = x_of(CU_SEQLENS[-1] - 1) + CELL + 12
    parts = []
    for i, (start, stop) in enumerate(zip(CU_SEQLENS, CU_SEQLENS[1:], strict=False)):
        middle = (x_of(start) + x_of(stop - 1) + CELL) / 2
        parts.append(
            f'<text x="{middle}" y="22" text-anchor="middle">'
            f"sequence {i}: {stop - start} tokens</text>"
        )
    for row, layout in enumerate(("zigzag", "contiguous")):
        y = TOP + row * (CELL + 16)
        parts.append(f'<text x="8" y="{y + 14}">{layout}</text>')
        for token, rank in enumerate(owner(layout)):
            parts.append(
                f'<rect x="{x_of(token)}" y="{y}" width="{CELL - 1}" height="{CELL}" '
                f'fill="{RANKS[rank]}"/>'
            )
    y = TOP + 2 * (CELL + 16) + 14
    for rank in range(CP_SIZE):
        x = LEFT + rank * 90
        parts.append(f'<rect x="{x}" y="{y - 13}" width="16" height="16" fill="{RANKS[rank]}"/>')
        parts.append(f'<text x="{x + 22}" y="{y}">rank {rank}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 14}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="docs/layouts.svg")
    Path(parser.parse_args().output).write_text(draw())


if __name__ == "__main__":
    main()
