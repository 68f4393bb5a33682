# SPDX-License-Identifier: Apache-2.0
"""The causal depthwise convolution of q, k and v on the GPU, l2norm of q and k included.

A program owns one head (or as many channels) of a few runs of consecutive tokens, a run being a row
of its tile, and walks along them. The taps, the last ``W - 1`` inputs and, in backward, the
unfinished input gradients and the sums of the weight's gradient stay in registers: ``x`` and the
output's gradient are read once, the input's gradient is written once, and nothing but ``x`` is kept
for backward. Only blocks with a segment's first tokens look at halos, and thousands of short
segments cost no more launches than one. Sums are made in a fixed order: results repeat bitwise.

A convolution without heads is one that has only values.
"""

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from megatron.linear_cp.ops import triton_conv_kernels as kernels
from megatron.linear_cp.ops.heads import HeadShape
from megatron.linear_cp.segments import HostTable, Segments

_CHANNELS = 128  # of a program among the values, which need no whole heads
_AHEAD = 4  # tokens
_AHEAD_AT_HALOS = 1  # unrolled as well, the code for halos would be most of the compile time
_LONGEST = 64  # tokens of a run; long runs read little twice, short ones fill the GPU
_PROGRAMS = 2048  # wanted before runs grow
_NUM_WARPS = 4
_PER_THREAD = 4  # channels; with 8, registers leave room for too few warps
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _owner(segments: Segments, device: torch.device) -> Tensor:
    """``[T]`` int32: the segment of each token."""
    table = segments.cached(
        "triton_conv_owner",
        lambda: HostTable(np.repeat(np.arange(segments.num_segments), segments.lengths)),
    )
    return table.on(device, torch.int32)


def _check(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    activation: str | None,
    segments: Segments,
    heads: HeadShape,
) -> None:
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"backend 'fla' convolves float32, bfloat16 and float16, got {x.dtype}; "
            "backend='torch' takes it"
        )
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    dim, width = weight.shape
    if heads.channels != dim:
        raise ValueError(f"{heads} makes {heads.channels} channels, the weight has {dim}")
    if tuple(x.shape) != (1, segments.num_tokens, dim):
        raise ValueError(f"x must be {[1, segments.num_tokens, dim]}, got {list(x.shape)}")
    expected = (segments.num_segments, width - 1, dim)
    if tuple(halo.shape) != expected:
        raise ValueError(
            f"halo must be [segments, width - 1, channels] = {list(expected)}, got "
            f"{list(halo.shape)}"
        )


def _rows(x: Tensor) -> Tensor:
    """The tensor itself when its channels are adjacent: a slice of a projection needs no copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _flat(x: Tensor, channels: int) -> Tensor:
    """Heads side by side, ``[1, T, channels]``."""
    return _rows(x.reshape(1, -1, channels))


def _gradient_of(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out must be {list(x.shape)} {x.dtype} with adjacent channels, got {list(out.shape)} "
            f"{out.dtype} with strides {out.stride()}"
        )
    return out


class _Launch:
    """Sizes of one call: the kernels' constants and how tokens divide over programs."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        heads: HeadShape,
        l2norm: bool,
    ) -> None:
        width = weight.shape[1]
        values = heads.sections[2]
        block_k = triton.next_power_of_2(heads.key_head_dim) if heads.num_key_heads else 1
        block_v = min(_CHANNELS, triton.next_power_of_2(max(1, values)))
        self.runs = max(1, _PER_THREAD * 32 * _NUM_WARPS // max(block_k, block_v))
        self.columns = 2 * heads.num_key_heads + triton.cdiv(values, block_v)
        self.num_tokens = x.shape[1]
        self.constants: dict[str, Any] = {
            "H": heads.num_key_heads,
            "K": heads.key_head_dim,
            "VC": values,
            "W": width,
            "R": self.runs,
            "BK": block_k,
            "BV": block_v,
            "HAS_BIAS": bias is not None,
            "SILU": activation == "silu",
            "NORM": l2norm,
            "num_warps": _NUM_WARPS,
        }

    def steps(self, twice: int) -> int:
        """Tokens of a run that reads ``twice`` tokens of the next one as well."""
        rounds = self.num_tokens * self.columns // (_PROGRAMS * self.runs * _AHEAD)
        return min(max(rounds, 4), _LONGEST // _AHEAD) * _AHEAD - twice

    def blocks(self, steps: int) -> int:
        """Programs along the tokens."""
        return triton.cdiv(self.num_tokens, self.runs * steps)


def forward_heads(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
    heads: HeadShape,
    l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``y_t = act(sum_w weight[:, w] x_{t-(W-1)+w} + bias)`` within each segment, in heads.

    Args:
        x: ``[1, T, D]``, bfloat16, float16 or float32 on the GPU; rows may be strided.
        halo: ``[N, W - 1, D]``, the inputs before each segment.
        weight: ``[D, W]``.
        bias: ``[D]`` or ``None``.
        activation: ``"silu"`` or ``None``.
        segments: ``T`` tokens in ``N`` segments; both may be 0.
        heads: how the ``D`` channels divide.
        l2norm: divide every head of q and k, in float32 and before it is rounded, by
            ``sqrt(sum(y^2) + 1e-6)``.

    Returns:
        ``q [1, T, H, K]``, ``k [1, T, H, K]`` and ``v [1, T, HV, V]``, each contiguous, in ``x``'s
        dtype.

    Raises:
        ValueError: float64, an unknown activation, or shapes that do not fit.
    """
    _check(x, halo, weight, activation, segments, heads)
    key_shape = (1, x.shape[1], heads.num_key_heads, heads.key_head_dim)
    q, k = (torch.empty(key_shape, dtype=x.dtype, device=x.device) for _ in range(2))
    value_shape = (1, x.shape[1], heads.num_value_heads, heads.value_head_dim)
    v = torch.empty(value_shape, dtype=x.dtype, device=x.device)
    if segments.num_tokens == 0:
        return q, k, v
    launch = _Launch(x, weight, bias, activation, heads, l2norm)
    steps = launch.steps(0)
    x = _rows(x)
    with torch.cuda.device_of(x):
        kernels.conv_forward_kernel[(launch.blocks(steps) * launch.columns,)](
            x,
            halo.contiguous(),
            weight.contiguous(),
            x if bias is None else bias.contiguous(),  # never read if absent
            q,
            k,
            v,
            segments.cu_seqlens(x.device, torch.int32),
            _owner(segments, x.device),
            segments.num_tokens,
            steps,
            x.stride(1),
            U=_AHEAD,
            UH=_AHEAD_AT_HALOS,
            **launch.constants,
        )
    return q, k, v


def backward_heads(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
    heads: HeadShape,
    l2norm: bool,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`forward_heads`, which is computed again.

    Args:
        dq, dk: ``[1, T, H, K]``; rows may be strided.
        dv: ``[1, T, HV, V]``; rows may be strided.
        x, halo, weight, bias, activation, segments, heads, l2norm: as for :func:`forward_heads`.
        out: where to write the gradient of ``x``: of its shape and dtype, rows may be strided.
            None allocates it.

    Returns:
        ``dx, dhalo, dweight, dbias``, each in its input's shape and dtype; ``dbias`` is None
        without a bias.

    Raises:
        ValueError: as :func:`forward_heads`, or an ``out`` that does not fit.
    """
    _check(x, halo, weight, activation, segments, heads)
    dx = _gradient_of(x, out)
    if segments.num_tokens == 0:
        dbias = None if bias is None else torch.zeros_like(bias)
        return dx, torch.zeros_like(halo), torch.zeros_like(weight), dbias
    dim, width = weight.shape
    launch = _Launch(x, weight, bias, activation, heads, l2norm)
    steps = launch.steps(width - 1)
    blocks = launch.blocks(steps)
    num_sums = width if bias is None else width + 1
    partial = torch.empty(blocks, num_sums, dim, dtype=torch.float32, device=x.device)
    dhalo = torch.empty(halo.shape, dtype=halo.dtype, device=halo.device)
    x, halo, weight_rows = _rows(x), halo.contiguous(), weight.contiguous()
    grads = [_flat(g, size) for g, size in zip((dq, dk, dv), heads.sections, strict=True) if size]
    grads = [grads[-1]] * (3 - len(grads)) + grads  # absent heads are never read
    inputs = (*grads, x, halo, weight_rows, x if bias is None else bias.contiguous())
    cu_seqlens = segments.cu_seqlens(x.device, torch.int32)
    strides = (x.stride(1), *(g.stride(1) for g in grads))
    with torch.cuda.device_of(x):
        kernels.conv_backward_kernel[(blocks * launch.columns,)](
            *inputs,
            dx,
            partial,
            cu_seqlens,
            _owner(segments, x.device),
            segments.num_tokens,
            steps,
            *strides,
            dx.stride(1),
            U=_AHEAD,
            UH=_AHEAD_AT_HALOS,
            **launch.constants,
        )
        if width > 1:
            groups = triton.cdiv(segments.num_segments, launch.runs)
            kernels.conv_halo_kernel[(groups * launch.columns,)](
                *inputs, dhalo, cu_seqlens, segments.num_segments, *strides, **launch.constants
            )
    sums = partial.sum(0)
    dweight = sums[:width].t().to(weight.dtype, memory_format=torch.contiguous_format)
    return dx, dhalo, dweight, None if bias is None else sums[width].to(bias.dtype)


def forward(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> Tensor:
    """The convolution without heads: ``y [1, T, D]``, contiguous, in ``x``'s dtype.

    Arguments and errors are those of :func:`forward_heads`.
    """
    heads = HeadShape(0, 1, 1, weight.shape[0])
    y = forward_heads(x, halo, weight, bias, activation, segments, heads, l2norm=False)[2]
    return y.flatten(2)


def backward(
    dy: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of :func:`forward` from ``dy [1, T, D]``, whose rows may be strided.

    Other arguments, results and errors are those of :func:`backward_heads`.
    """
    heads = HeadShape(0, 1, 1, weight.shape[0])
    none = dy[..., :0]
    return backward_heads(
        none, none, dy, x, halo, weight, bias, activation, segments, heads, l2norm=False
    )
