# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution over packed sequences that may continue on other ranks."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.linear_cp import comm
from megatron.linear_cp.ops.backends import conv_kernels, resolve_backend
from megatron.linear_cp.ops.validation import check_conv_inputs
from megatron.linear_cp.plan import ContextParallelPlan, single_sequence_plan


@torch.compiler.disable
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    plan: ContextParallelPlan | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Depthwise causal convolution, ``y_t = act(sum_w weight[:, w] * x[t - (W - 1) + w] + bias)``.

    Taps that fall before the first token of a sequence read zero. Taps on another rank, on another
    chunk of this rank, or on several of them, read the true token.

    Args:
        x: ``[1, T, D]``, the local tokens in plan order.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        activation: ``"silu"`` (``"swish"`` is the same) or None.
        plan: the micro-batch; None means one sequence and no context parallelism.
        backend: ``"auto"`` (FLA on CUDA, else torch), ``"torch"`` or ``"fla"``.

    Returns:
        ``[1, T, D]`` in the dtype of ``x``. The gradients of ``weight`` and ``bias`` are this
        rank's part: they sum over the context-parallel group.

    Raises:
        ValueError: tensors that do not fit each other or the plan, before anything is sent.
    """
    if plan is None:
        plan = single_sequence_plan(x.shape[1])
    check_conv_inputs(x, weight, bias, activation, plan)
    resolve_backend(backend, x.device)
    halo = _halo(x, plan, weight.shape[1])
    activation = "silu" if activation == "swish" else activation
    y: torch.Tensor = _CausalConv1d.apply(x, halo, weight, bias, activation, plan, backend)
    return y


def _halo(x: torch.Tensor, plan: ContextParallelPlan, width: int) -> torch.Tensor:
    """``[N, W - 1, D]``: the inputs before each local segment, zero where its sequence starts."""
    route = plan.halo_route(width)
    rows = [x[0]]
    if route.crosses:
        sent = x[0].index_select(0, route.send_index.on(x.device))
        rows.append(comm.all_to_all_rows(sent, route.send_splits, route.recv_splits, plan.group))
    rows.append(x.new_zeros(1, x.shape[2]))
    picked = torch.cat(rows).index_select(0, route.gather_index.on(x.device))
    return picked.view(plan.segments.num_segments, width - 1, x.shape[2])


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        halo: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        plan: ContextParallelPlan,
        backend: str,
    ) -> torch.Tensor:
        ctx.kernels = conv_kernels(backend, x.device)
        ctx.activation, ctx.plan = activation, plan
        ctx.save_for_backward(x, halo, weight, bias)
        y: torch.Tensor = ctx.kernels.forward(x, halo, weight, bias, activation, plan.segments)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, halo, weight, bias = ctx.saved_tensors
        dx, dhalo, dweight, dbias = ctx.kernels.backward(
            dy, x, halo, weight, bias, ctx.activation, ctx.plan.segments
        )
        return dx, dhalo, dweight, dbias, None, None, None
