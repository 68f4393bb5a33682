# SPDX-License-Identifier: Apache-2.0
"""One way to compare: relative RMS of outputs and every gradient, all failures in one message."""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """``rms(actual - expected) / rms(expected)``, computed in float64 where they are.

    Args:
        actual: any shape and float dtype.
        expected: the same shape. Both are compared on the CPU if their devices differ.

    Returns:
        0.0 when the tensors are equal (two empty or two zero tensors included); infinity when
        only ``expected`` is zero or a value is NaN or infinite. Never NaN, which ``max`` and
        comparisons would lose.
    """
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    actual, expected = actual.detach().double(), expected.detach().double()
    if not (torch.isfinite(actual).all() and torch.isfinite(expected).all()):
        return math.inf
    difference, size = (actual - expected).norm().item(), expected.norm().item()
    if difference == 0.0:
        return 0.0
    return difference / size if size > 0.0 else math.inf


def _problem(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> str | None:
    if actual is None or expected is None:
        side = "actual" if actual is None else "expected"
        return f"{side} is None (no gradient?)"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    for side, value in (("actual", actual), ("expected", expected)):
        bad = int((~torch.isfinite(value.detach())).sum())
        if bad:
            return f"{bad} of {value.numel()} values of {side} are NaN or infinite"
    error = relative_rms(actual, expected)
    if error <= tolerance:
        return None
    worst = (actual.detach().double().cpu() - expected.detach().double().cpu()).abs().max().item()
    return f"relative RMS {error:.3e} > {tolerance:.1e} (largest difference {worst:.3e})"


def assert_all_close(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    tolerance: float | Mapping[str, float],
) -> None:
    """Compare outputs and gradients by name and report every failure at once.

    Args:
        actual: name to tensor.
        expected: the same names and shapes; values that are not float64 are compared as such.
        tolerance: bound on the relative RMS, one for all or one per name.

    Raises:
        AssertionError: a name is missing on either side, a gradient is ``None``, shapes differ,
            a value is NaN or infinite, or the relative RMS exceeds the tolerance.
    """
    problems: list[str] = []
    for name in sorted(actual.keys() | expected.keys()):
        if name not in actual or name not in expected:
            problems.append(f"{name}: missing in {'expected' if name in actual else 'actual'}")
            continue
        bound = tolerance[name] if isinstance(tolerance, Mapping) else tolerance
        problem = _problem(actual[name], expected[name], bound)
        if problem is not None:
            problems.append(f"{name}: {problem}")
    if problems:
        raise AssertionError(f"{len(problems)} of {len(actual)} differ\n  " + "\n  ".join(problems))


def assert_close(
    name: str, actual: Tensor | None, expected: Tensor | None, tolerance: float
) -> None:
    """:func:`assert_all_close` for one tensor."""
    assert_all_close({name: actual}, {name: expected}, tolerance)


def make_rule_inputs(
    num_tokens: int,
    *,
    num_key_heads: int = 2,
    num_value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 16,
    num_segments: int | None = None,
    dtype: torch.dtype = torch.float64,
    decay: float = 0.05,
    max_beta: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Random inputs of the gated delta rule, the same values on every device.

    The decay is slow by default (``g = -decay * softplus(normal)``), so a state that leaks from
    one sequence into the next stays visible for hundreds of tokens.

    Args:
        num_tokens: ``T``.
        num_key_heads: ``H``.
        num_value_heads: ``HV``, a multiple of ``H``.
        key_dim: ``K``.
        value_dim: ``V``.
        num_segments: when given, also make ``initial_state`` for that many segments.
        dtype: of q, k, v and beta. g and the states are float64 for float64, else float32.
        decay: ``A`` of the layer, 0 for no decay at all.
        max_beta: beta is uniform in ``(0, max_beta)``.
        seed: of the generator.
        device: where the tensors go.

    Returns:
        ``q, k [1, T, H, K]`` with unit norm, ``v [1, T, HV, V]``, ``g, beta [1, T, HV]`` and
        maybe ``initial_state [N, HV, K, V]``; none requires a gradient.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "q": F.normalize(normal(1, num_tokens, num_key_heads, key_dim), dim=-1).to(dtype),
        "k": F.normalize(normal(1, num_tokens, num_key_heads, key_dim), dim=-1).to(dtype),
        "v": normal(1, num_tokens, num_value_heads, value_dim).to(dtype),
        "g": (-decay * F.softplus(normal(1, num_tokens, num_value_heads))).to(wide),
        "beta": (max_beta * torch.sigmoid(normal(1, num_tokens, num_value_heads))).to(dtype),
    }
    if num_segments is not None:
        inputs["initial_state"] = normal(num_segments, num_value_heads, key_dim, value_dim).to(wide)
    return {name: value.to(device) for name, value in inputs.items()}
