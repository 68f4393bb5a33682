# SPDX-License-Identifier: Apache-2.0
"""chunkwise: every rank keeps its tokens and all heads; conv halos and states cross ranks."""

import torch

from megatron.linear_cp.modes.base import GatedDeltaNetInputs, run_rule
from megatron.linear_cp.ops.gates import gates
from megatron.linear_cp.ops.l2norm import l2norm
from megatron.linear_cp.plan import ContextParallelPlan


def chunkwise(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Run the local segments; the ops exchange what continues elsewhere.

    With ``state_exchange="fla"`` FLA exchanges; the plan must then be of the contiguous layout.
    """
    if inputs.state_exchange == "fla" and plan.cp_size > 1:
        return run_fla_rule(inputs, plan)
    return run_rule(inputs, plan)


def run_fla_rule(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """FLA's own convolution and rule under its context parallelism, at any CP size."""
    # Imported late, with FLA.
    from megatron.linear_cp.ops import fla_exchange

    width = inputs.conv_weight.shape[1]
    qkv = fla_exchange.causal_conv1d(
        inputs.qkv, inputs.conv_weight, inputs.conv_bias, inputs.activation, plan
    )
    q, k, v = qkv.split(inputs.qkv_sections, dim=-1)
    q, k = (x.unflatten(-1, (inputs.num_key_heads, inputs.key_head_dim)) for x in (q, k))
    if inputs.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gates(inputs.alpha, inputs.beta, inputs.A_log, inputs.dt_bias, backend=inputs.backend)
    return fla_exchange.gated_delta_rule(
        q,
        k,
        v.unflatten(-1, (inputs.num_value_heads, inputs.value_head_dim)),
        g,
        beta,
        inputs.key_head_dim**-0.5,
        plan,
        width,
    )
