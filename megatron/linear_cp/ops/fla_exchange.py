# SPDX-License-Identifier: Apache-2.0
"""``state_exchange="fla"``: FLA's own context parallelism through convolution and rule.

It is what Megatron-Core's chunkwise mode does (commit 5139086e), kept as a cross-check of the scan.
FLA knows the contiguous layout only, takes the convolution's halo from the direct predecessor only,
and (0.4.2) drops the tail of a buffer that does not divide: all of that is refused or converted
before it is called.
"""

import copy
from typing import Any

import numpy as np
import torch

from megatron.linear_cp.ops import fla_capabilities
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.segments import to_device


def check_fla_exchange(plan: ContextParallelPlan, device: torch.device, width: int) -> None:
    """Raise unless FLA's exchange can run this micro-batch; sends nothing.

    Args:
        plan: a plan of the contiguous layout.
        device: of the tensors.
        width: taps of the convolution.

    Raises:
        ValueError: tensors not on CUDA, another layout, or ranks with fewer tokens than the halo.
        FlaUnavailableError: the installed fla-core lacks ``cp_context``.
    """
    if device.type != "cuda":
        raise ValueError(
            f"state_exchange='fla' needs CUDA tensors, got {device}; 'scan' runs anywhere"
        )
    if plan.layout != "contiguous":
        raise ValueError(
            f"state_exchange='fla' needs the contiguous layout, got a {plan.layout} plan; convert "
            "the tokens first (the module does) or use 'scan', which runs on any layout"
        )
    if plan.cp_size > 1 and plan.local_tokens < width - 1:
        raise ValueError(
            f"state_exchange='fla' takes the convolution's {width - 1} earlier tokens from the "
            f"previous rank alone, which stores {plan.local_tokens}; use 'scan'"
        )
    fla_capabilities.require("cp_context")


def refuse_known_fault(device: torch.device, key_dim: int) -> None:
    """Raise ``FlaUnavailableError`` where FLA's own op is known to give wrong gradients."""
    import triton

    fault = fla_capabilities.known_fault(
        fla_capabilities.probe().version,
        triton.__version__,
        torch.cuda.get_device_capability(device),
        key_dim,
        fla_capabilities.has_tilelang(),
    )
    if fault is not None:
        raise fla_capabilities.FlaUnavailableError(
            f"{fault}; or state_exchange='scan', which does not run that kernel"
        )


def cp_context(plan: ContextParallelPlan, device: torch.device, width: int) -> Any:
    """FLA's context of this micro-batch, built once per plan and width."""

    def build() -> Any:
        from fla.ops.cp import build_cp_context

        # FLA mis-routes equal boundaries; a sequence of no token has nothing to route.
        boundaries = np.unique(plan.boundaries)
        host = torch.from_numpy(boundaries.astype(np.int64))
        # It is kept: nothing in it may be an inference tensor, which autograd refuses later.
        with torch.inference_mode(False):
            context = build_cp_context(
                to_device(boundaries, device),
                group=plan.group,
                conv1d_kernel_size=width,
                cu_seqlens_cpu=host,
            )
        # What is kept must not hold the group, which may be destroyed before the plan.
        kept = copy.copy(context)
        kept.group = None
        return kept

    context = copy.copy(plan.segments.cached(("fla_cp_context", device, width), build))
    context.group = plan.group
    return context


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    plan: ContextParallelPlan,
) -> torch.Tensor:
    """FLA's convolution under its CP context; shapes as in :mod:`megatron.linear_cp.ops`."""
    width = weight.shape[1]
    check_fla_exchange(plan, x.device, width)
    conv = fla_capabilities.find(fla_capabilities.FEATURES["cp_context"][2])
    assert conv is not None
    y, _ = conv[1](
        x=x.contiguous(),
        weight=weight,
        bias=bias,
        activation=activation,
        cp_context=cp_context(plan, x.device, width),
    )
    out: torch.Tensor = y
    return out


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    plan: ContextParallelPlan,
    width: int = 1,
) -> torch.Tensor:
    """FLA's rule under its CP context; shapes as in :mod:`megatron.linear_cp.ops`.

    Args:
        q: ``[1, T, H, K]``, of unit norm like ``k``; repeated where the release has no grouped
            value heads.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``.
        g: ``[1, T, HV]``.
        beta: ``[1, T, HV]``.
        scale: of the output.
        plan: of the contiguous layout.
        width: taps of the convolution that the layer runs before, whose context is then shared.
    """
    check_fla_exchange(plan, q.device, width)
    refuse_known_fault(q.device, q.shape[-1])
    group = v.shape[2] // q.shape[2]
    if group > 1 and not fla_capabilities.probe().grouped_value_heads:
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g=g.contiguous(),
        beta=beta.contiguous(),
        scale=scale,
        cp_context=cp_context(plan, q.device, width),
    )
    result: torch.Tensor = out
    return result
