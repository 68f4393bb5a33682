# SPDX-License-Identifier: Apache-2.0
"""From the projections ``alpha`` and ``b`` to the rule's decay and write strength."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.linear_cp.ops.backends import resolve_backend
from megatron.linear_cp.ops.split import gradient_slot


@torch.compiler.disable
def gates(
    alpha: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``g = -exp(A_log) * softplus(alpha + dt_bias)`` and ``beta = sigmoid(b)``.

    Args:
        alpha: ``[1, T, HV]``; rows may be strided.
        b: ``[1, T, HV]``.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        backend: as in :func:`megatron.linear_cp.ops.gated_delta_rule`.

    Returns:
        The log decay ``g [1, T, HV]`` in fp32 (fp64 for fp64), and ``beta [1, T, HV]`` in the dtype
        of ``b``.
    """
    if resolve_backend(backend, alpha.device) == "fla":
        g, beta = _Gates.apply(alpha, b, A_log, dt_bias)
        return g, beta
    wide = torch.float64 if alpha.dtype == torch.float64 else torch.float32
    rate = A_log.to(wide).exp()
    return -rate * F.softplus(alpha.to(wide) + dt_bias.to(wide)), b.sigmoid()


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        alpha: torch.Tensor,
        b: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Imported late, with Triton.
        from megatron.linear_cp.ops import triton_gates

        ctx.slots = (gradient_slot(alpha), gradient_slot(b))
        ctx.save_for_backward(alpha, b, A_log, dt_bias)
        return triton_gates.forward(alpha, b, A_log, dt_bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dg: torch.Tensor, dbeta: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        from megatron.linear_cp.ops import triton_gates

        alpha, b, A_log, dt_bias = ctx.saved_tensors
        outs = [slot and slot.take(x) for slot, x in zip(ctx.slots, (alpha, b), strict=True)]
        return triton_gates.backward(
            dg, dbeta, alpha, b, A_log, dt_bias, out_alpha=outs[0], out_b=outs[1]
        )
