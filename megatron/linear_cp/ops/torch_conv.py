# SPDX-License-Identifier: Apache-2.0
"""The depthwise causal convolution in plain torch, hand-written backward, any device.

``y_t = act(sum_w weight[:, w] * input[t - (W - 1) + w] + bias)``, where the ``W - 1`` inputs before
a segment come as its halo. All halos and segments are laid into one buffer,
``[halo_0 | segment_0 | halo_1 | segment_1 | ...]``, on which the convolution is ``W`` shifted
multiply-adds. Rows whose window reaches over the end of a segment are computed and not used.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.linear_cp.segments import HostTable, Segments


class _Layout(NamedTuple):
    source: HostTable  # row of [all halos | all tokens] for each row of the buffer
    position: HostTable  # row of the buffer for each row of [all halos | all tokens]
    window: HostTable  # first buffer row in the window of each token


def _build_layout(segments: Segments, halo_rows: int) -> _Layout:
    num = segments.num_segments
    segment = np.repeat(np.arange(num), segments.lengths)
    window = np.arange(segments.num_tokens) + segment * halo_rows
    halos = (segments.boundaries[:-1] + np.arange(num) * halo_rows)[:, None] + np.arange(halo_rows)
    position = np.concatenate([halos.reshape(-1), window + halo_rows])
    return _Layout(HostTable(np.argsort(position)), HostTable(position), HostTable(window))


def _layout_of(segments: Segments, halo_rows: int) -> _Layout:
    return segments.cached(("torch_conv", halo_rows), lambda: _build_layout(segments, halo_rows))


def _pick(rows: Tensor, table: HostTable, segments: Segments) -> Tensor:
    """``rows[table]``; with a single segment every table of this module counts from 0 up."""
    return rows if segments.num_segments == 1 else rows.index_select(0, table.on(rows.device))


def _buffer(x: Tensor, halo: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    rows = torch.cat([halo.to(dtype).flatten(0, 1), x[0].to(dtype)])
    return _pick(rows, _layout_of(segments, halo.shape[1]).source, segments)


def _convolve(buffer: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Window sums ``[M - (W - 1), D]`` of the buffer ``[M, D]``."""
    width = weight.shape[1]
    count = len(buffer) - width + 1
    taps = weight.to(buffer.dtype).t().contiguous()
    sums = buffer[:count] * taps[0]
    for w in range(1, width):
        sums.addcmul_(buffer[w : w + count], taps[w])
    return sums if bias is None else sums.add_(bias.to(buffer.dtype))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_activation(activation: str | None) -> None:
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")


def forward(
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> Tensor:
    """The convolution of every segment.

    Args:
        x: ``[1, T, D]``, any float dtype; ``T`` is ``segments.num_tokens`` and may be 0.
        halo: ``[N, W - 1, D]``, the inputs before each segment, zeros where a sequence begins.
        weight: ``[D, W]``.
        bias: ``[D]`` or ``None``.
        activation: ``"silu"`` or ``None``.
        segments: where each segment starts.

    Returns:
        ``y [1, T, D]`` in the dtype of ``x``; sums are float64 for float64 inputs, else float32.

    Raises:
        ValueError: an unknown activation.
    """
    _check_activation(activation)
    if segments.num_tokens == 0:
        return torch.empty_like(x)
    with torch.no_grad():
        sums = _convolve(_buffer(x, halo, segments, _compute_dtype(x)), weight, bias)
        if activation == "silu":
            F.silu(sums, inplace=True)
        return _pick(sums.to(x.dtype), _layout_of(segments, halo.shape[1]).window, segments)[None]


def backward(
    dy: Tensor,
    x: Tensor,
    halo: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the convolution; the sums before the activation are computed again.

    Args:
        dy: ``[1, T, D]``, gradient of the output.
        x: as given to `forward`, like all that follow.
        halo: ``[N, W - 1, D]``.
        weight: ``[D, W]``.
        bias: ``[D]`` or ``None``.
        activation: ``"silu"`` or ``None``.
        segments: where each segment starts.

    Returns:
        ``dx, dhalo, dweight, dbias``, each in the shape and dtype of its input; ``dbias`` is
        ``None`` without a bias.

    Raises:
        ValueError: an unknown activation.
    """
    _check_activation(activation)
    if segments.num_tokens == 0:
        dbias = None if bias is None else torch.zeros_like(bias)
        return torch.empty_like(x), torch.empty_like(halo), torch.zeros_like(weight), dbias
    with torch.no_grad():
        dtype, halo_rows = _compute_dtype(x), halo.shape[1]
        layout = _layout_of(segments, halo_rows)
        buffer = _buffer(x, halo, segments, dtype)
        count = len(buffer) - halo_rows
        if segments.num_segments == 1:
            dsums = dy[0].to(dtype)
        else:  # rows that no token uses stay zero
            dsums = buffer.new_zeros(count, buffer.shape[1])
            dsums.index_copy_(0, layout.window.on(x.device), dy[0].to(dtype))
        if activation == "silu":
            dsums = torch.ops.aten.silu_backward(dsums, _convolve(buffer, weight, bias))
        dbuffer = torch.zeros_like(buffer)
        taps = weight.to(dtype).t().contiguous()
        dtaps = torch.empty_like(taps)
        for w in range(halo_rows + 1):
            dbuffer[w : w + count].addcmul_(dsums, taps[w])
            torch.sum(dsums * buffer[w : w + count], 0, out=dtaps[w])
        drows = _pick(dbuffer, layout.position, segments)
        dhalo, dx = drows.split([segments.num_segments * halo_rows, segments.num_tokens])
        return (
            dx.to(x.dtype)[None],
            dhalo.to(halo.dtype).view_as(halo),
            dtaps.t().to(weight.dtype).contiguous(),
            None if bias is None else dsums.sum(0).to(bias.dtype),
        )
