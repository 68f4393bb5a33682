# SPDX-License-Identifier: Apache-2.0
"""The causal depthwise convolution with halo on the GPU: the companion of the FLA rule.

The kernels are ours. FLA's own convolution tunes and compiles anew for every multiple of 1,024
tokens, and wants the halo as ``[N, D, W]``. Here a program owns a block of tokens of the flat
buffer whatever segments it holds: thousands of short segments cost the same as one, and only blocks
with a segment's first tokens look at halos. The backward computes the pre-activation again.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.linear_cp.segments import HostTable, Segments

_TOKENS = 32  # per program
_CHANNELS = 128
_NUM_WARPS = 4


@triton.jit
def _tap(
    x, halo, start, o_i, offset, bos, row, m_t, o_d, m_d, stride_t, D: tl.constexpr, W: tl.constexpr
):
    """Input ``offset`` tokens before each token of a block that reaches into a halo."""
    position = start + o_i - bos - offset
    inside, before = m_t & (position >= 0), m_t & (position < 0)
    p_x = x + ((start + o_i - offset) * stride_t)[:, None] + o_d[None, :]
    p_halo = halo + ((row * (W - 1) + W - 1 + position) * D)[:, None] + o_d[None, :]
    inner = tl.load(p_x, mask=inside[:, None] & m_d[None, :], other=0.0).to(tl.float32)
    return inner + tl.load(p_halo, mask=before[:, None] & m_d[None, :], other=0.0).to(tl.float32)


@triton.jit
def _plain_tap(x, start, o_i, offset, m_t, o_d, m_d, stride_t):
    """The same in a block that needs no halo; offsets within a block fit 32 bits."""
    p_x = x + start * stride_t + (o_i - offset)[:, None] * stride_t + o_d[None, :]
    return tl.load(p_x, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def _output_kernel(
    x,
    halo,
    weight,
    bias,
    dy,
    out,
    dweight,
    dbias,
    cu_seqlens,
    owner,
    T,
    stride_t,
    dy_stride_t,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    # Forward: the outputs. Backward: the gradient of the pre-activation, and this block's share of
    # dweight and dbias.
    NUM_D: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_t = (pid // NUM_D).to(tl.int64)
    start = i_t * BT
    o_d = (pid % NUM_D) * BD + tl.arange(0, BD)
    o_i = tl.arange(0, BT)
    m_d, m_t = o_d < D, start + o_i < T
    row = tl.load(owner + start + o_i, mask=m_t, other=0).to(tl.int64)
    bos = tl.load(cu_seqlens + row, mask=m_t, other=0).to(tl.int64)
    reaches_halo = tl.min(tl.where(m_t, start + o_i - bos, W)) < W - 1

    z = tl.zeros([BT, BD], dtype=tl.float32)
    if HAS_BIAS:
        z += tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if reaches_halo:
        for i_w in tl.static_range(W):
            tap = tl.load(weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32)
            z += tap[None, :] * _tap(
                x, halo, start, o_i, W - 1 - i_w, bos, row, m_t, o_d, m_d, stride_t, D, W
            )
    else:
        for i_w in tl.static_range(W):
            tap = tl.load(weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32)
            z += tap[None, :] * _plain_tap(x, start, o_i, W - 1 - i_w, m_t, o_d, m_d, stride_t)

    mask = m_t[:, None] & m_d[None, :]
    if BACKWARD:
        p_dy = dy + start * dy_stride_t + o_i[:, None] * dy_stride_t + o_d[None, :]
        d = tl.load(p_dy, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            gate = tl.sigmoid(z)
            d *= gate * (1 + z * (1 - gate))
        z = d
        for i_w in tl.static_range(W):
            if reaches_halo:
                inputs = _tap(
                    x, halo, start, o_i, W - 1 - i_w, bos, row, m_t, o_d, m_d, stride_t, D, W
                )
            else:
                inputs = _plain_tap(x, start, o_i, W - 1 - i_w, m_t, o_d, m_d, stride_t)
            tl.store(dweight + (i_t * W + i_w) * D + o_d, tl.sum(inputs * d, axis=0), mask=m_d)
        if HAS_BIAS:
            tl.store(dbias + i_t * D + o_d, tl.sum(d, axis=0), mask=m_d)
    elif SILU:
        z *= tl.sigmoid(z)
    p_out = out + start * D + o_i[:, None] * D + o_d[None, :]
    tl.store(p_out, z.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _input_kernel(
    dz,
    weight,
    dx,
    cu_seqlens,
    owner,
    T,
    D: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    # x[t] feeds the outputs t .. t+W-1 of its own segment.
    NUM_D: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    start = (pid // NUM_D).to(tl.int64) * BT
    o_d = (pid % NUM_D) * BD + tl.arange(0, BD)
    o_i = tl.arange(0, BT)
    m_d, m_t = o_d < D, start + o_i < T
    row = tl.load(owner + start + o_i, mask=m_t, other=0).to(tl.int64)
    left = (tl.load(cu_seqlens + row + 1, mask=m_t, other=0).to(tl.int64) - start).to(tl.int32)
    at = o_i[:, None] * D + o_d[None, :]
    grad = tl.zeros([BT, BD], dtype=tl.float32)
    for shift in tl.static_range(W):
        m_s = m_t & (o_i + shift < left)
        d = tl.load(dz + (start + shift) * D + at, mask=m_s[:, None] & m_d[None, :], other=0.0)
        tap = tl.load(weight + o_d * W + W - 1 - shift, mask=m_d, other=0.0).to(tl.float32)
        grad += d.to(tl.float32) * tap[None, :]
    tl.store(dx + start * D + at, grad.to(dx.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])


@triton.jit
def _halo_kernel(
    dz,
    weight,
    dhalo,
    cu_seqlens,
    D: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    # Row r of a segment's halo feeds the outputs 0 .. r of that segment.
    NUM_D: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_n = (pid // NUM_D).to(tl.int64)
    o_d = (pid % NUM_D) * BD + tl.arange(0, BD)
    o_r = tl.arange(0, BP)
    m_d = o_d < D
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    grad = tl.zeros([BP, BD], dtype=tl.float32)
    for i_w in tl.static_range(W - 1):
        m_s = (o_r < W - 1) & (o_r >= i_w) & (o_r - i_w < length)
        p_dz = dz + bos * D + (o_r - i_w)[:, None] * D + o_d[None, :]
        d = tl.load(p_dz, mask=m_s[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        grad += d * tl.load(weight + o_d * W + i_w, mask=m_d, other=0.0).to(tl.float32)[None, :]
    p_out = dhalo + i_n * ((W - 1) * D) + o_r[:, None] * D + o_d[None, :]
    tl.store(p_out, grad.to(dhalo.dtype.element_ty), mask=(o_r < W - 1)[:, None] & m_d[None, :])


def _owner(segments: Segments, device: torch.device) -> Tensor:
    """``[T]`` int32: the segment of each token."""
    table = segments.cached(
        "fla_conv_owner",
        lambda: HostTable(np.repeat(np.arange(segments.num_segments), segments.lengths)),
    )
    return table.on(device, torch.int32)


def _check(x: Tensor, halo: Tensor, weight: Tensor, activation: str | None, n: int) -> None:
    if x.dtype == torch.float64:
        raise ValueError("backend 'fla' convolves in float32; backend='torch' takes float64")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    expected = (n, weight.shape[1] - 1, weight.shape[0])
    if tuple(halo.shape) != expected:
        raise ValueError(
            f"halo must be [segments, width - 1, channels] = {list(expected)}, got "
            f"{list(halo.shape)}"
        )


def _rows(x: Tensor) -> Tensor:
    """The tensor itself when its channels are adjacent: a slice of a projection needs no copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _sizes(weight: Tensor) -> dict[str, Any]:
    dim, width = weight.shape
    block = min(_CHANNELS, triton.next_power_of_2(dim))
    return {"D": dim, "W": width, "BD": block, "num_warps": _NUM_WARPS}


def _launch(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
    out: Tensor,
    dy: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    num_tokens, dim = segments.num_tokens, weight.shape[0]
    sizes = _sizes(weight)
    grid = (triton.cdiv(num_tokens, _TOKENS) * triton.cdiv(dim, sizes["BD"]),)
    # Absent tensors are passed as `out`; the kernel reads none of them.
    _output_kernel[grid](
        x,
        halo,
        weight,
        out if bias is None else bias,
        out if dy is None else dy,
        out,
        out if dweight is None else dweight,
        out if dbias is None else dbias,
        segments.cu_seqlens(x.device, torch.int32),
        _owner(segments, x.device),
        num_tokens,
        x.stride(1),
        0 if dy is None else dy.stride(1),
        BT=_TOKENS,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        BACKWARD=dy is not None,
        **sizes,
    )


def forward(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> Tensor:
    """``y_t = act(sum_w weight[:, w] x_{t-(W-1)+w} + bias)`` within each segment.

    Args:
        x: ``[1, T, D]``, bfloat16, float16 or float32 on the GPU; rows may be strided.
        halo: ``[N, W - 1, D]``, the inputs before each segment.
        weight: ``[D, W]``.
        bias: ``[D]`` or ``None``.
        activation: ``"silu"`` or ``None``.
        segments: ``T`` tokens in ``N`` segments; both may be 0.

    Returns:
        ``y [1, T, D]``, contiguous, in ``x``'s dtype.

    Raises:
        ValueError: float64, an unknown activation, or a halo of another shape.
    """
    _check(x, halo, weight, activation, segments.num_segments)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens = segments.num_tokens
    if num_tokens == 0:
        return y
    x, halo, weight = _rows(x), halo.contiguous(), weight.contiguous()
    _launch(x, halo, weight, bias, activation, segments, y, None, None, None)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`forward`.

    Args:
        dy: ``[1, T, D]``; rows may be strided.
        x, halo, weight, bias, activation, segments: as for :func:`forward`.

    Returns:
        ``dx, dhalo, dweight, dbias``, each in its input's shape and dtype.
    """
    _check(x, halo, weight, activation, segments.num_segments)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, num_segments = segments.num_tokens, segments.num_segments
    if num_tokens == 0:
        dbias = None if bias is None else torch.zeros_like(bias)
        return dx, torch.zeros_like(halo), torch.zeros_like(weight), dbias
    dy, x, halo, weight = _rows(dy), _rows(x), halo.contiguous(), weight.contiguous()
    dim, width = weight.shape
    dz = torch.empty_like(dx)
    token_blocks = triton.cdiv(num_tokens, _TOKENS)
    dweight = torch.empty(token_blocks, width, dim, dtype=torch.float32, device=x.device)
    dbias = None if bias is None else torch.empty_like(dweight[:, 0])
    _launch(x, halo, weight, bias, activation, segments, dz, dy, dweight, dbias)
    sizes, cu_seqlens = _sizes(weight), segments.cu_seqlens(x.device, torch.int32)
    blocks = triton.cdiv(dim, sizes["BD"])
    _input_kernel[(token_blocks * blocks,)](
        dz,
        weight,
        dx,
        cu_seqlens,
        _owner(segments, x.device),
        num_tokens,
        BT=_TOKENS,
        **sizes,
    )
    dhalo = torch.empty_like(halo)
    if width > 1:
        rows = triton.next_power_of_2(width - 1)
        _halo_kernel[(num_segments * blocks,)](dz, weight, dhalo, cu_seqlens, BP=rows, **sizes)
    return (
        dx,
        dhalo,
        dweight.sum(0).t().contiguous().to(weight.dtype),
        None if bias is None or dbias is None else dbias.sum(0).to(bias.dtype),
    )
