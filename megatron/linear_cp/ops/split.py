# SPDX-License-Identifier: Apache-2.0
"""Splitting a projection whose parts' gradients are written where they belong, not joined later.

The backward of ``torch.split`` copies all gradients into a new tensor. Here an op that knows about
it asks, in forward, for the slot of its input (:func:`gradient_slot`) and, in backward, writes its
gradient into the slot; gradients that come from anywhere else are copied as usual. A slot belongs
to the tensor object that :func:`split_channels` returned: a view or a copy of it has none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Buffer:
    """The gradient of one projection while a backward pass fills it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.whole: Tensor | None = None
        self.taken: set[int] = set()

    def finish(self, like: Tensor, shape: torch.Size, grads: Sequence[Tensor | None]) -> Tensor:
        """The whole gradient, from what is in place already and copies of the rest."""
        whole, taken = self.whole, self.taken
        self.whole, self.taken = None, set()
        if whole is not None:
            parts = whole.split(self.sizes, dim=-1)
            # A slot whose gradient is elsewhere was filled for somebody else: leave it alone.
            if not all(_same_memory(parts[i], grads[i]) for i in taken):
                whole = None
        if whole is None:
            whole = like.new_empty(shape)
        for part, grad in zip(whole.split(self.sizes, dim=-1), grads, strict=True):
            if grad is None:
                part.zero_()
            elif not _same_memory(part, grad):
                _copy(part, grad)
        return whole


def _copy(part: Tensor, grad: Tensor) -> None:
    """``part.copy_(grad)``, in 16-byte numbers where that is possible.

    PyTorch copies rows that are strided value by value, on a GPU at a third of the speed.
    """
    if part.dtype == grad.dtype and all(_is_wide(x) for x in (part, grad)):
        part, grad = part.view(torch.complex128), grad.view(torch.complex128)
    part.copy_(grad)


def _is_wide(x: Tensor) -> bool:
    values = 16 // x.element_size()
    steps = (x.shape[-1], *x.stride()[:-1], x.storage_offset())
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n % values == 0 for n in steps)


class GradientSlot:
    """Where the gradient of one part belongs."""

    def __init__(self, buffer: _Buffer, index: int) -> None:
        self._buffer = buffer
        self._index = index

    def take(self, part: Tensor) -> Tensor | None:
        """An uninitialised tensor for the gradient of ``part``, in place; None if it is in use.

        Args:
            part: the input in question, ``[..., channels]``; the slot has its shape and dtype.
        """
        buffer = self._buffer
        if self._index in buffer.taken:
            # Handed out in a pass that did not reach the split: whoever has it may still read it.
            return None
        if buffer.whole is None:
            buffer.whole = part.new_empty(*part.shape[:-1], sum(buffer.sizes))
        buffer.taken.add(self._index)
        return buffer.whole.split(buffer.sizes, dim=-1)[self._index]


def split_channels(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """``x.split(sizes, dim=-1)``, views of ``x``, with slots for their gradients.

    Args:
        x: ``[..., sum(sizes)]``.
        sizes: channels of each part.
    """
    buffer = _Buffer(sizes)
    parts: tuple[Tensor, ...] = _SplitChannels.apply(x, buffer)
    for index, part in enumerate(parts):
        part._gradient_slot = GradientSlot(buffer, index)  # type: ignore[attr-defined]
    return parts


def gradient_slot(x: Tensor) -> GradientSlot | None:
    """The slot of a part that :func:`split_channels` returned, None for any other tensor."""
    return getattr(x, "_gradient_slot", None)


class _SplitChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: _Buffer) -> tuple[Tensor, ...]:
        ctx.buffer, ctx.shape = buffer, x.shape
        ctx.like = x.new_empty(0)
        return x.split(buffer.sizes, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        return ctx.buffer.finish(ctx.like, ctx.shape, grads), None


def _same_memory(a: Tensor, b: Tensor | None) -> bool:
    if b is None:
        return False
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return same and a.shape == b.shape and a.dtype == b.dtype
