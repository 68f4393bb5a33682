# SPDX-License-Identifier: Apache-2.0
"""The layer's memory-bound kernels against float64 autograd, interpreted on the CPU or on the GPU.

Inputs are slices of wider tensors, as the module passes them, and gradients go into slices of wider
buffers, whose other values must stay. Every check runs the kernels twice: results repeat bitwise.
"""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.linear_cp.norm import _RMSNorm
from megatron.linear_cp.ops import triton_conv, triton_gates, triton_norm
from megatron.linear_cp.ops.heads import HeadShape
from megatron.linear_cp.segments import Segments
from megatron.linear_cp.testing.parity import assert_all_close, relative_rms
from megatron.linear_cp.testing.reference import causal_conv1d_reference, l2norm_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
UNTOUCHED = 7.0
EPS = 1e-6


class _Draw:
    """Random tensors, the same values on every device."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.generator = torch.Generator().manual_seed(2)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator)
        return values.to(self.device, dtype or self.dtype)

    def slice(self, *shape: int) -> Tensor:
        """Of a tensor with 16 more channels, so rows are strided."""
        return self(*shape[:-1], shape[-1] + 16)[..., : shape[-1]]


def _slot(like: Tensor) -> tuple[Tensor, Tensor]:
    """A buffer with more channels on both sides, and the slice of it for a gradient."""
    whole = like.new_full((*like.shape[:-1], like.shape[-1] + 16), UNTOUCHED)
    return whole, whole[..., 8:-8]


def _assert_only_slice_written(whole: Tensor) -> None:
    assert bool((whole[..., :8] == UNTOUCHED).all()) and bool((whole[..., -8:] == UNTOUCHED).all())


def _leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def _compare(
    run: Callable[[], dict[str, Tensor]],
    expected: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    tolerance: float,
) -> None:
    actual, again = run(), run()
    assert {name: value.dtype for name, value in actual.items()} == dtypes
    assert [name for name in actual if not torch.equal(actual[name], again[name])] == []
    assert_all_close(actual, expected, tolerance)


def segments_of(lengths: tuple[int, ...]) -> Segments:
    return Segments([0, *itertools.accumulate(lengths)])


def _conv_inputs(
    lengths: tuple[int, ...], dim: int, width: int, bias: bool, draw: _Draw
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x = draw.slice(1, sum(lengths), dim)
    halo, weight = draw(len(lengths), width - 1, dim), draw(dim, width)
    return x, halo, weight, draw(dim) if bias else None


def _conv_gradients(
    leaves: list[Tensor | None], outputs: list[Tensor], grads: list[Tensor]
) -> dict[str, Tensor]:
    total = sum(
        ((y * dy.double()).sum() for y, dy in zip(outputs, grads, strict=True)),
        torch.zeros((), dtype=torch.float64, device=grads[0].device),
    )
    total.backward()
    return {
        f"d{name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in zip(("x", "halo", "weight", "bias"), leaves, strict=True)
        if leaf is not None
    }


def check_conv(
    lengths: tuple[int, ...],
    heads: HeadShape,
    width: int,
    bias: bool,
    activation: str | None,
    l2norm: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    segments, draw = segments_of(lengths), _Draw(dtype, device)
    inputs = _conv_inputs(lengths, heads.channels, width, bias, draw)
    for parameter in inputs[2:]:
        if parameter is not None:
            parameter[: heads.key_head_dim] *= 2e-4  # the first query is as small as l2norm's eps
    num_tokens = segments.num_tokens
    grads = [
        draw(1, num_tokens, heads.num_key_heads, heads.key_head_dim),
        draw.slice(1, num_tokens, heads.sections[1]).unflatten(
            -1, (heads.num_key_heads, heads.key_head_dim)
        ),
        draw.slice(1, num_tokens, heads.sections[2]).unflatten(
            -1, (heads.num_value_heads, heads.value_head_dim)
        ),
    ]

    leaves = _leaves(*inputs)
    x, halo, weight, offset = leaves
    assert x is not None and weight is not None
    y = causal_conv1d_reference(
        x, weight, offset, activation, cu_seqlens=segments.boundaries.tolist(), halo=halo
    )
    q, k, v = (
        part.unflatten(-1, grad.shape[2:])
        for part, grad in zip(y.split(list(heads.sections), dim=-1), grads, strict=True)
    )
    if l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    expected = {"q": q, "k": k, "v": v} | _conv_gradients(leaves, [q, k, v], grads)

    def run() -> dict[str, Tensor]:
        rest = (*inputs, activation, segments, heads, l2norm)
        outputs = triton_conv.forward_heads(*rest)
        assert all(t.is_contiguous() for t in outputs)
        whole, out = _slot(inputs[0])
        dx, *others = triton_conv.backward_heads(*grads, *rest, out=out)
        assert dx is out
        _assert_only_slice_written(whole)
        names = ("q", "k", "v", "dx", "dhalo", "dweight", "dbias")
        values = zip(names, (*outputs, dx, *others), strict=True)
        return {name: value for name, value in values if value is not None}

    _compare(run, expected, dict.fromkeys(expected, dtype), TOLERANCE[dtype])


def check_plain_conv(
    lengths: tuple[int, ...],
    dim: int,
    width: int,
    bias: bool,
    activation: str | None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """The convolution without heads, as ``causal_conv1d`` calls it."""
    segments, draw = segments_of(lengths), _Draw(dtype, device)
    inputs = _conv_inputs(lengths, dim, width, bias, draw)
    dy = draw.slice(1, segments.num_tokens, dim)
    leaves = _leaves(*inputs)
    x, halo, weight, offset = leaves
    assert x is not None and weight is not None
    y = causal_conv1d_reference(
        x, weight, offset, activation, cu_seqlens=segments.boundaries.tolist(), halo=halo
    )
    expected = {"y": y} | _conv_gradients(leaves, [y], [dy])

    def run() -> dict[str, Tensor]:
        out = triton_conv.forward(*inputs, activation, segments)
        assert out.is_contiguous()
        grads = triton_conv.backward(dy, *inputs, activation, segments)
        names = ("y", "dx", "dhalo", "dweight", "dbias")
        values = zip(names, (out, *grads), strict=True)
        return {name: value for name, value in values if value is not None}

    _compare(run, expected, dict.fromkeys(expected, dtype), TOLERANCE[dtype])


def check_norm(
    leading: tuple[int, ...],
    dim: int,
    gated: bool,
    zero_centered: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    draw = _Draw(dtype, device)
    dy = draw(*leading, dim)
    x = draw.slice(*leading, dim).mul_(2)
    weight = draw(dim, dtype=weight_dtype)
    gate = None
    if gated:
        # Rows of the last leading dimension side by side, as the heads of one token are.
        rows = draw(*leading[:-1], leading[-1] * dim + 16, dtype=gate_dtype)
        gate = rows[..., : leading[-1] * dim].unflatten(-1, (leading[-1], dim))

    leaves = _leaves(x, weight, gate)
    wide_x, wide_weight, wide_gate = leaves
    assert wide_x is not None and wide_weight is not None
    gamma = wide_weight + 1 if zero_centered else wide_weight
    y = F.rms_norm(wide_x, (dim,), None, EPS) * gamma
    if wide_gate is not None:
        y = y * F.silu(wide_gate)
    y.backward(dy.double())
    named = zip(("dx", "dweight", "dgate"), (x, weight, gate), leaves, strict=True)
    used = [(n, t, leaf.grad) for n, t, leaf in named if t is not None and leaf is not None]
    expected = {"y": y} | {name: grad for name, _, grad in used if grad is not None}

    def run() -> dict[str, Tensor]:
        out = triton_norm.forward(x, weight, gate, EPS, zero_centered)
        grads = triton_norm.backward(dy, x, weight, gate, EPS, zero_centered)
        values = zip(("y", "dx", "dweight", "dgate"), (out, *grads), strict=True)
        found = {name: value for name, value in values if value is not None}
        assert all(value.is_contiguous() for value in found.values())
        return found

    dtypes = {"y": dtype} | {name: t.dtype for name, t, _ in used}
    _compare(run, expected, dtypes, TOLERANCE[dtype])
    if dtype != torch.float32:
        # Rounded where torch rounds: another place would differ in every other value's last bit.
        on_cpu = [None if t is None else t.detach().cpu() for t in (x, weight, gate)]
        rounded = _RMSNorm.apply(*on_cpu, EPS, zero_centered)
        assert relative_rms(run()["y"], rounded) < torch.finfo(dtype).eps / 16


def check_gates(
    num_tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    draw = _Draw(dtype, device)
    alpha = draw.slice(1, num_tokens, num_heads).mul_(12)  # on both sides of softplus' threshold
    b = draw.slice(1, num_tokens, num_heads).mul_(3)
    a_log, dt_bias = (draw(num_heads, dtype=parameter_dtype) for _ in range(2))
    dg = draw(1, num_tokens, num_heads, dtype=torch.float32)
    dbeta = draw.slice(1, num_tokens, num_heads)

    inputs = (alpha, b, a_log, dt_bias)
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    g = -leaves[2].exp() * F.softplus(leaves[0] + leaves[3])
    beta = leaves[1].sigmoid()
    ((g * dg.double()).sum() + (beta * dbeta.double()).sum()).backward()
    names = ("dalpha", "db", "dA_log", "ddt_bias")
    expected = {"g": g, "beta": beta}
    for name, leaf in zip(names, leaves, strict=True):
        assert leaf.grad is not None
        expected[name] = leaf.grad

    def run() -> dict[str, Tensor]:
        out = triton_gates.forward(*inputs)
        slots = _slot(alpha), _slot(b)
        grads = triton_gates.backward(dg, dbeta, *inputs, out_alpha=slots[0][1], out_b=slots[1][1])
        for (whole, part), grad in zip(slots, grads, strict=False):
            assert grad is part
            _assert_only_slice_written(whole)
        return dict(zip(expected, (*out, *grads), strict=True))

    dtypes = {"g": torch.float32, "beta": dtype}
    dtypes |= {name: t.dtype for name, t in zip(names, inputs, strict=True)}
    _compare(run, expected, dtypes, TOLERANCE[dtype])
