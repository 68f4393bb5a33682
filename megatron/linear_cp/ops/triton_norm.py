# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with its optional gate on the GPU: one pass forward, one pass backward.

:mod:`megatron.linear_cp.norm` is the specification, roundings included. Nothing is kept but the
inputs: the backward finds the norms again, with the sum that it needs anyway. Rows may be strided,
so that a slice of a projection serves as the gate without a copy.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST = 16384  # values of a row that a program can hold; longer rows are read twice
_WIDE_BLOCK = (8, 1024)  # rows and columns of a tile then
_TILE = 1024  # values of a tile of shorter rows
_PARTIAL = 1 << 22  # values of the partial sums of gamma's gradient
_PROGRAMS = 8192  # in backward, at most


@triton.jit
def _load(p, rows, outer, inner, o_n, mask, INNER: tl.constexpr):
    """Rows of a tensor that are ``INNER`` to an outer stride; also the values in float32."""
    at = (rows // INNER) * outer + (rows % INNER) * inner
    raw = tl.load(p + at[:, None] + o_n[None, :], mask=mask, other=0.0)
    return raw.to(tl.float32)


@triton.jit
def _gamma(weight, o_n, m_n, ZERO_CENTERED: tl.constexpr):
    gamma = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma += 1.0
    return gamma[None, :]


@triton.jit(do_not_specialize=["M"])
def _norm_forward_kernel(
    x,
    gate,
    weight,
    out,
    M,
    eps,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    N: tl.constexpr,
    INNER: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    m_r = (rows < M)[:, None]
    squares = tl.zeros([R, BN], dtype=tl.float32)
    for start in tl.static_range(0, N, BN):
        o_n = start + tl.arange(0, BN)
        mask = m_r & (o_n < N)[None, :]
        values = _load(x, rows, x_outer, x_inner, o_n, mask, INNER)
        squares += values * values
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
    for start in tl.static_range(0, N, BN):
        o_n = start + tl.arange(0, BN)
        mask = m_r & (o_n < N)[None, :]
        if N > BN:
            values = _load(x, rows, x_outer, x_inner, o_n, mask, INNER)
        result = values * rstd * _gamma(weight, o_n, o_n < N, ZERO_CENTERED)
        if GATED:
            g = _load(gate, rows, gate_outer, gate_inner, o_n, mask, INNER)
            result = result.to(out.dtype.element_ty).to(tl.float32) * (g * tl.sigmoid(g))
        p_out = out + (rows * N)[:, None] + o_n[None, :]
        tl.store(p_out, result.to(out.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _through_gate(
    dy, gate, normed_gamma, dgate, rows, gate_outer, gate_inner, o_n, mask,
    N: tl.constexpr, INNER: tl.constexpr, STORE: tl.constexpr,
):
    # fmt: on
    """``dy`` times the gate's SiLU; stores the gate's gradient if asked."""
    g = _load(gate, rows, gate_outer, gate_inner, o_n, mask, INNER)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    if STORE:
        slope = sigmoid + silu * (1 - sigmoid)
        p_dgate = dgate + (rows * N)[:, None] + o_n[None, :]
        tl.store(p_dgate, (slope * normed_gamma * dy).to(dgate.dtype.element_ty), mask=mask)
    return dy * silu


@triton.jit(do_not_specialize=["M", "blocks"])
def _norm_backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    partial,
    M,
    blocks,
    eps,
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    N: tl.constexpr,
    INNER: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    # A program walks `blocks` blocks of R whole rows and sums gamma's gradient on the way.
    pid = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    gamma = _gamma(weight, o_n, m_n, ZERO_CENTERED)
    sums = tl.zeros([R, BN], dtype=tl.float32)
    for i in range(blocks):
        rows = (pid * blocks + i) * R + tl.arange(0, R)
        mask = (rows < M)[:, None] & m_n[None, :]
        values = _load(x, rows, x_outer, x_inner, o_n, mask, INNER)
        d = _load(dy, rows, dy_outer, dy_inner, o_n, mask, INNER)
        rstd = tl.rsqrt(tl.sum(values * values, axis=1) / N + eps)[:, None]
        normed = values * rstd
        if GATED:
            rounded = (normed * gamma).to(dx.dtype.element_ty).to(tl.float32)
            # fmt: off
            d = _through_gate(d, gate, rounded, dgate, rows, gate_outer, gate_inner, o_n, mask,
                              N, INNER, True)
            # fmt: on
        sums += d * normed
        d *= gamma
        along = tl.sum(d * normed, axis=1)[:, None] / N
        p_dx = dx + (rows * N)[:, None] + o_n[None, :]
        tl.store(p_dx, ((d - normed * along) * rstd).to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + pid * N + o_n, tl.sum(sums, axis=0), mask=m_n)


@triton.jit(do_not_specialize=["M"])
def _norm_wide_backward_kernel(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    partial,
    M,
    eps,
    dy_outer,
    dy_inner,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    N: tl.constexpr,
    INNER: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    # R rows that no program can hold: once for the sums along them, once more for the gradients.
    pid = tl.program_id(0).to(tl.int64)
    rows = pid * R + tl.arange(0, R)
    m_r = (rows < M)[:, None]
    squares = tl.zeros([R, BN], dtype=tl.float32)
    products = tl.zeros([R, BN], dtype=tl.float32)
    for start in range(0, N, BN):
        o_n = start + tl.arange(0, BN)
        mask = m_r & (o_n < N)[None, :]
        values = _load(x, rows, x_outer, x_inner, o_n, mask, INNER)
        d = _load(dy, rows, dy_outer, dy_inner, o_n, mask, INNER)
        if GATED:
            # fmt: off
            d = _through_gate(d, gate, 0.0, dgate, rows, gate_outer, gate_inner, o_n, mask,
                              N, INNER, False)
            # fmt: on
        squares += values * values
        products += values * d * _gamma(weight, o_n, o_n < N, ZERO_CENTERED)
    rstd = tl.rsqrt(tl.sum(squares, axis=1) / N + eps)[:, None]
    along = tl.sum(products, axis=1)[:, None] * rstd / N
    for start in range(0, N, BN):
        o_n = start + tl.arange(0, BN)
        mask = m_r & (o_n < N)[None, :]
        gamma = _gamma(weight, o_n, o_n < N, ZERO_CENTERED)
        normed = _load(x, rows, x_outer, x_inner, o_n, mask, INNER) * rstd
        d = _load(dy, rows, dy_outer, dy_inner, o_n, mask, INNER)
        if GATED:
            rounded = (normed * gamma).to(dx.dtype.element_ty).to(tl.float32)
            # fmt: off
            d = _through_gate(d, gate, rounded, dgate, rows, gate_outer, gate_inner, o_n, mask,
                              N, INNER, True)
            # fmt: on
        tl.store(partial + pid * N + o_n, tl.sum(d * normed, axis=0), mask=o_n < N)
        p_dx = dx + (rows * N)[:, None] + o_n[None, :]
        grad = (d * gamma - normed * along) * rstd
        tl.store(p_dx, grad.to(dx.dtype.element_ty), mask=mask)


class _Rows(NamedTuple):
    tensor: Tensor
    inner: int  # rows to one outer stride
    outer_stride: int
    inner_stride: int

    def strides(self, inner: int) -> tuple[int, int]:
        """Outer and inner stride with ``inner`` rows to the outer one."""
        if inner == self.inner:
            return self.outer_stride, self.inner_stride
        return self.outer_stride * inner, self.outer_stride


def _rows(x: Tensor) -> _Rows:
    """The rows of ``x`` as at most two nested strides, or those of a contiguous copy."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        return _Rows(x.contiguous(), 1, x.shape[-1], 0)
    if len(sizes) == 2:
        return _Rows(x, sizes[1], strides[0], strides[1])
    return _Rows(x, 1, strides[0] if strides else 0, 0)


def _nested_alike(tensors: list[Tensor]) -> tuple[list[Tensor], int, list[int]]:
    """The tensors (copied where they must be), their common inner count, and all their strides."""
    rows = [_rows(x) for x in tensors]
    inner = max(r.inner for r in rows)
    rows = [r if r.inner in (1, inner) else _rows(r.tensor.contiguous()) for r in rows]
    return [r.tensor for r in rows], inner, [s for r in rows for s in r.strides(inner)]


def _sizes(dim: int) -> dict[str, Any]:
    """Tile and warps for rows of ``dim`` values."""
    if dim > _WIDEST:
        return {"N": dim, "R": _WIDE_BLOCK[0], "BN": _WIDE_BLOCK[1], "num_warps": 16}
    width = triton.next_power_of_2(dim)
    return {
        "N": dim,
        "R": max(1, _TILE // width),
        "BN": width,
        "num_warps": min(max(4, width // 1024), 16),
    }


def forward(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, zero_centered: bool
) -> Tensor:
    """``x / rms(x) * gamma``, rounded, and with a gate then times ``silu(gate)``.

    Args:
        x: ``[..., N]``; float32, bfloat16 or float16, like all that follow. Two leading dimensions
            may be strided freely, any other layout is copied.
        weight: ``[N]``, gamma, or gamma - 1 if ``zero_centered``.
        gate: of ``x``'s shape, strided likewise, of any such dtype; or None.
        eps: added to the mean square.
        zero_centered: see ``weight``.

    Returns:
        Of ``x``'s shape and dtype, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tensors, inner, strides = _nested_alike([x, x if gate is None else gate])
    sizes = _sizes(x.shape[-1])
    num_rows = x.numel() // x.shape[-1]
    with torch.cuda.device_of(x):
        _norm_forward_kernel[(triton.cdiv(num_rows, sizes["R"]),)](
            *tensors,
            weight.contiguous(),
            out,
            num_rows,
            eps,
            *strides,
            INNER=inner,
            GATED=gate is not None,
            ZERO_CENTERED=zero_centered,
            **sizes,
        )
    return out


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`forward`.

    Args:
        dy: of ``x``'s shape, strided likewise.
        x, weight, gate, eps, zero_centered: as for :func:`forward`.

    Returns:
        ``dx``, ``dweight`` and ``dgate`` (None without a gate), each contiguous and in its input's
        dtype.
    """
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    dim = x.shape[-1]
    if x.numel() == 0:
        return dx, torch.zeros_like(weight), dgate
    tensors, inner, strides = _nested_alike([dy, x, x if gate is None else gate])
    sizes = _sizes(dim)
    num_rows = x.numel() // dim
    blocks = triton.cdiv(num_rows, sizes["R"])
    wide = dim > _WIDEST
    each = 1 if wide else triton.cdiv(blocks, min(max(_PARTIAL // dim, 256), _PROGRAMS))
    programs = triton.cdiv(blocks, each)
    partial = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    outputs = (dx, dx if dgate is None else dgate, partial)
    counts = (num_rows,) if wide else (num_rows, each)
    kernel = _norm_wide_backward_kernel if wide else _norm_backward_kernel
    with torch.cuda.device_of(x):
        kernel[(programs,)](
            *tensors,
            weight.contiguous(),
            *outputs,
            *counts,
            eps,
            *strides,
            INNER=inner,
            GATED=gate is not None,
            ZERO_CENTERED=zero_centered,
            **sizes,
        )
    return dx, partial.sum(0).to(weight.dtype), dgate
