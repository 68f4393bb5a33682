# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over packed sequences that may continue on other ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.linear_cp.ops import state_scan
from megatron.linear_cp.ops.backends import resolve_backend, rule_kernels
from megatron.linear_cp.ops.l2norm import l2norm
from megatron.linear_cp.ops.side_stream import on_side_stream
from megatron.linear_cp.ops.validation import check_rule_inputs
from megatron.linear_cp.plan import ContextParallelPlan, single_sequence_plan


@torch.compiler.disable
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    plan: ContextParallelPlan | None = None,
    state_exchange: str = "scan",
    backend: str = "auto",
    use_qk_l2norm_in_kernel: bool = False,
) -> torch.Tensor:
    """Run the gated delta rule over the local tokens.

    Per sequence and value head, from a zero state::

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    Yang et al. 2025, "Gated Delta Networks", in its chunked WY form, with a state in fp32 (fp64 for
    fp64 input). Where a sequence continues on another rank its state does too: see
    :mod:`megatron.linear_cp.ops.state_scan`.

    Args:
        q: ``[1, T, H, K]`` queries of the local tokens in plan order.
        k: ``[1, T, H, K]`` keys, of unit norm (or ask for it below).
        v: ``[1, T, HV, V]`` values; ``HV`` divides by ``H`` and value head ``j`` uses key head
            ``j // (HV // H)``.
        g: ``[1, T, HV]`` natural-log decay, finite and at most 0 (-100 forgets everything).
        beta: ``[1, T, HV]`` write strength, 0 to 2.
        scale: of the output; None means ``K ** -0.5``.
        plan: the micro-batch; None means one sequence and no context parallelism.
        state_exchange: ``"scan"``, or ``"fla"`` for FLA's own exchange (CUDA, a plan of the
            contiguous layout): a cross-check.
        backend: ``"auto"`` (FLA on CUDA, else torch), ``"torch"`` or ``"fla"``.
        use_qk_l2norm_in_kernel: divide q and k by their norm, ``sqrt(sum(x^2) + 1e-6)``, first.

    Returns:
        ``[1, T, HV, V]`` in the dtype of ``v``.

    Raises:
        ValueError: tensors that do not fit each other or the plan, before anything is sent.
    """
    if plan is None:
        plan = single_sequence_plan(q.shape[1])
    check_rule_inputs(q, k, v, g, beta, plan, state_exchange)
    resolve_backend(backend, q.device)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if state_exchange == "fla" and plan.cp_size > 1:
        if backend == "torch":
            raise ValueError("state_exchange='fla' runs FLA's kernels; use 'scan' with 'torch'")
        # Imported late, with FLA.
        from megatron.linear_cp.ops import fla_exchange

        return fla_exchange.gated_delta_rule(q, k, v, g, beta, scale, plan)
    o: torch.Tensor = _GatedDeltaRule.apply(q, k, v, g, beta, scale, plan, backend)
    return o


class _GatedDeltaRule(torch.autograd.Function):
    """Local kernel, state scan, local kernel; backward is its mirror image."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float,
        plan: ContextParallelPlan,
        backend: str,
    ) -> torch.Tensor:
        kernels = rule_kernels(backend, q.device)
        route = plan.state_route(v.shape[2])
        group: dist.ProcessGroup | None = plan.group if route.crosses else None
        prepared = kernels.prepare_forward(q, k, v, g, beta, scale, plan.segments)
        initial_state = kept = None
        if not route.is_empty:
            a, b = kernels.summarize(prepared, route.forward_wants)
            if route.crosses:
                scan = on_side_stream(lambda: state_scan.entry_states(a, b, route, group), (a, b))
                kernels.forward_ahead(prepared)
                initial_state, kept = scan()
            else:
                initial_state, kept = state_scan.entry_states(a, b, route, group)
        o, residual = kernels.forward(prepared, initial_state)
        ctx.kernels, ctx.scale, ctx.plan, ctx.route = kernels, scale, plan, route
        ctx.save_for_backward(q, k, v, g, beta, initial_state, kept, *residual)
        out: torch.Tensor = o
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, g, beta, initial_state, kept, *residual = ctx.saved_tensors
        kernels, plan, route = ctx.kernels, ctx.plan, ctx.route
        prepared = kernels.prepare_backward(
            q, k, v, g, beta, ctx.scale, plan.segments, tuple(residual), initial_state, do
        )
        final_state_grad = None
        if not route.is_empty:
            c = kernels.backward_summarize(prepared, route.backward_wants)
            group = plan.group if route.crosses else None
            if route.crosses:
                scan = on_side_stream(
                    lambda: (state_scan.exit_gradients(c, kept, route, group),), (c, kept)
                )
                kernels.backward_ahead(prepared)
                (final_state_grad,) = scan()
            else:
                final_state_grad = state_scan.exit_gradients(c, kept, route, group)
        dq, dk, dv, dg, dbeta = kernels.backward(prepared, final_state_grad)
        return dq, dk, dv, dg, dbeta, None, None, None
