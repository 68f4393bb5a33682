# SPDX-License-Identifier: Apache-2.0
"""The split of a projection: views forward, and one gradient buffer backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.linear_cp.ops.split import gradient_slot, split_channels

SIZES = (4, 3, 2)


class _Scale(torch.autograd.Function):
    """Twice the input; writes its gradient into the slot, as our kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, written: list[Tensor]) -> Tensor:
        ctx.slot, ctx.written = gradient_slot(x), written
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = ctx.slot.take(x) if ctx.slot else None
        out = torch.empty_like(grad) if out is None else out
        ctx.written.append(torch.mul(grad, 2, out=out))
        return out, None


def run(x: Tensor, written: list[Tensor]) -> Tensor:
    a, b, _ = split_channels(x, SIZES)
    # b through an op that knows nothing of slots, c unused.
    return (_Scale.apply(a, written) * torch.arange(4.0)).sum() + (b * b).sum()


def expected(x: Tensor) -> Tensor:
    grad = torch.zeros_like(x)
    grad[..., :4] = 2 * torch.arange(4.0)
    grad[..., 4:7] = 2 * x[..., 4:7].detach()
    return grad


def make_input() -> Tensor:
    return torch.randn(1, 5, sum(SIZES)).requires_grad_()


def test_parts_are_views() -> None:
    x = make_input()
    parts = split_channels(x, SIZES)
    assert [p.data_ptr() for p in parts] == [p.data_ptr() for p in x.split(SIZES, -1)]
    assert all(gradient_slot(p) is not None for p in parts)
    assert gradient_slot(parts[0] * 1) is None and gradient_slot(parts[0].view(5, 4)) is None


def test_gradient_is_written_in_place_and_right() -> None:
    x, written = make_input(), []
    grad: list[Tensor] = []
    x.register_hook(grad.append)
    run(x, written).backward()
    assert torch.equal(x.grad, expected(x))
    assert written[0].data_ptr() == grad[0].data_ptr()


def test_several_backward_passes_through_one_graph() -> None:
    x, written = make_input(), []
    loss = run(x, written)
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, x, retain_graph=True)[0]
    assert torch.equal(first, expected(x)) and torch.equal(second, first)
    assert first.data_ptr() != second.data_ptr()


def test_a_gradient_handed_out_is_not_overwritten() -> None:
    """A pass that stops at the parts leaves the buffer unfinished; the next must not reuse it."""
    x, written = make_input(), []
    a, b, _ = split_channels(x, SIZES)
    out = _Scale.apply(a, written)
    kept = torch.autograd.grad(out.sum(), a, retain_graph=True)[0]
    before = kept.clone()
    torch.autograd.grad((3 * out).sum() + b.sum(), x, retain_graph=True)
    assert torch.equal(kept, before)
    kept = torch.autograd.grad(out.sum(), a, retain_graph=True)[0]
    torch.autograd.grad(b.sum(), x)
    assert torch.equal(kept, before)


def test_a_part_used_twice_gets_the_sum() -> None:
    x, written = make_input(), []
    a, _, _ = split_channels(x, SIZES)
    (_Scale.apply(a, written).sum() + 3 * _Scale.apply(a, written).sum() + a.sum()).backward()
    grad = torch.zeros_like(x)
    grad[..., :4] = 9
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_parts_without_a_gradient_are_zero(frozen: int) -> None:
    x = make_input()
    parts = split_channels(x, SIZES)
    parts[frozen].sum().backward()
    grad = torch.zeros_like(x)
    grad.split(SIZES, -1)[frozen].fill_(1)
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(16, 8, 8), (16, 12, 4), (15, 8, 9)], ids=str)
def test_copies_of_every_width(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """16-byte numbers, where offsets, sizes and strides allow: a NaN and every bit survive."""
    x = torch.randn(2, 5, sum(sizes), dtype=dtype).requires_grad_()
    grads = [torch.randn(2, 5, size).to(dtype) for size in sizes]
    grads[0][0, 0, 0] = float("nan")
    grads[1] = grads[1].transpose(0, 1).contiguous().transpose(0, 1)
    torch.autograd.backward(split_channels(x, sizes), grads)
    assert x.grad is not None
    for actual, wanted in zip(x.grad.split(sizes, -1), grads, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
