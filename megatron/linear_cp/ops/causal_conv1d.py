# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution over packed sequences that may continue on other ranks."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.linear_cp.ops.backends import conv_kernels, resolve_backend
from megatron.linear_cp.ops.halo import add_halo_gradient, gather_halo
from megatron.linear_cp.ops.heads import HeadShape
from megatron.linear_cp.ops.l2norm import l2norm
from megatron.linear_cp.ops.split import gradient_slot
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
    activation = "silu" if activation == "swish" else activation
    y: torch.Tensor = _CausalConv1d.apply(x, weight, bias, activation, plan, backend)
    return y


@torch.compiler.disable
def causal_conv1d_qkv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    plan: ContextParallelPlan,
    heads: HeadShape,
    use_qk_l2norm: bool,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`causal_conv1d` of a fused q, k, v, split into heads, q and k of unit norm if asked.

    On the GPU it is one kernel each way: nothing between the projection and the rule is written
    but q, k and v, and only ``x`` is kept for backward.

    Args:
        x: ``[1, T, 2 * H * K + HV * V]``; rows may be strided.
        weight, bias, activation, plan, backend: as in :func:`causal_conv1d`.
        heads: ``H``, ``K``, ``HV``, ``V``.
        use_qk_l2norm: divide every head of q and k by ``sqrt(sum(x^2) + 1e-6)``.

    Returns:
        ``q [1, T, H, K]``, ``k [1, T, H, K]``, ``v [1, T, HV, V]`` in the dtype of ``x``.

    Raises:
        ValueError: as in :func:`causal_conv1d`, or channels that are not those of ``heads``.
    """
    check_conv_inputs(x, weight, bias, activation, plan)
    if x.shape[-1] != heads.channels:
        raise ValueError(f"x has {x.shape[-1]} channels, {heads} makes {heads.channels}")
    if resolve_backend(backend, x.device) == "torch":
        y = causal_conv1d(x, weight, bias, activation, plan=plan, backend=backend)
        q, k, v = y.split(heads.sections, dim=-1)
        q, k = (part.unflatten(-1, (heads.num_key_heads, heads.key_head_dim)) for part in (q, k))
        if use_qk_l2norm:
            q, k = l2norm(q), l2norm(k)
        return q, k, v.unflatten(-1, (heads.num_value_heads, heads.value_head_dim))
    activation = "silu" if activation == "swish" else activation
    q, k, v = _CausalConv1dQKV.apply(x, weight, bias, activation, plan, heads, use_qk_l2norm)
    return q, k, v


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        plan: ContextParallelPlan,
        backend: str,
    ) -> torch.Tensor:
        halo = gather_halo(x[0], plan, weight.shape[1])
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
        add_halo_gradient(dx[0], dhalo, ctx.plan, weight.shape[1])
        return dx, dweight, dbias, None, None, None


class _CausalConv1dQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        plan: ContextParallelPlan,
        heads: HeadShape,
        l2norm: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        halo = gather_halo(x[0], plan, weight.shape[1])
        ctx.kernels = conv_kernels("fla", x.device)
        ctx.plan, ctx.slot = plan, gradient_slot(x)
        ctx.rest = (activation, plan.segments, heads, l2norm)
        ctx.save_for_backward(x, halo, weight, bias)
        q, k, v = ctx.kernels.forward_heads(x, halo, weight, bias, *ctx.rest)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, halo, weight, bias = ctx.saved_tensors
        dx, dhalo, dweight, dbias = ctx.kernels.backward_heads(
            dq, dk, dv, x, halo, weight, bias, *ctx.rest, out=ctx.slot and ctx.slot.take(x)
        )
        add_halo_gradient(dx[0], dhalo, ctx.plan, weight.shape[1])
        return dx, dweight, dbias, None, None, None, None
