# SPDX-License-Identifier: Apache-2.0
"""The comparison's table and picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


class Result(Protocol):
    """What a run must have to be reported."""

    losses: list[float]
    bytes_per_step: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """One run beside CP 1, which is the first."""

    name: str
    final_loss: float
    difference: float
    bytes_per_step: int
    seconds: float
    passed: bool


def compare(results: Mapping[str, Result], tolerance: float) -> list[Row]:
    """Largest relative loss difference of every run to the first, over all steps."""
    base = next(iter(results.values()))
    rows = []
    for name, result in results.items():
        if len(result.losses) != len(base.losses):
            raise ValueError(f"{name} has {len(result.losses)} steps, CP 1 {len(base.losses)}")
        differences = [abs(a - b) / abs(b) for a, b in zip(result.losses, base.losses, strict=True)]
        # A NaN compares false with everything: it must fail.
        passed = all(difference <= tolerance for difference in differences)
        worst = max(differences, key=lambda d: (d != d, d))
        rows.append(
            Row(name, result.losses[-1], worst, result.bytes_per_step, result.seconds, passed)
        )
    return rows


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [
        f"{'mode':<12} {'final loss':>10} {'max rel diff':>12} "
        f"{'CP bytes/step':>14} {'seconds':>8}",
    ]
    for row in rows:
        mark = "" if row.passed else "  FAILED"
        lines.append(
            f"{row.name:<12} {row.final_loss:>10.5f} {row.difference:>12.1e} "
            f"{row.bytes_per_step:>14,} {row.seconds:>8.1f}{mark}"
        )
    return "\n".join(lines)


def draw(results: Mapping[str, Result], path: str) -> None:
    """Loss curves of all runs, and their distance to the first, as a PNG."""
    # Imported here: drawing is the last thing that happens, and needs the demo extra.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, distance) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    base_name, base = next(iter(results.items()))
    styles = ["-", "--", "-.", ":"]
    for i, (name, result) in enumerate(results.items()):
        steps = range(1, len(result.losses) + 1)
        curves.plot(steps, result.losses, styles[i % len(styles)], label=name)
        if name != base_name:
            off = [abs(a - b) / abs(b) for a, b in zip(result.losses, base.losses, strict=True)]
            distance.semilogy(
                steps, [max(d, 1e-9) for d in off], styles[i % len(styles)], label=name
            )
    distance.axhline(1e-4, color="grey", linewidth=0.8)
    curves.set(xlabel="step", ylabel="loss per token", title="training loss")
    distance.set(xlabel="step", ylabel="relative", title=f"distance to {base_name} (limit 1e-4)")
    curves.legend()
    distance.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
