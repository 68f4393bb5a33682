# SPDX-License-Identifier: Apache-2.0
"""chunkwise: every rank keeps its tokens and all heads; conv halos and states cross ranks."""

import torch

from megatron.linear_cp.context_parallel_layout import convert_rows
from megatron.linear_cp.modes.base import GatedDeltaNetInputs, run_rule, with_tokens
from megatron.linear_cp.ops.gates import gates
from megatron.linear_cp.ops.l2norm import l2norm
from megatron.linear_cp.plan import ContextParallelPlan


def chunkwise(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Run the local segments; the ops exchange what continues elsewhere.

    With ``state_exchange="fla"`` the tokens move to the contiguous layout first and FLA exchanges.
    """
    if inputs.state_exchange == "fla" and plan.cp_size > 1:
        return _fla_exchange(inputs, plan)
    return run_rule(inputs, plan)


def _fla_exchange(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    # Imported late, with FLA.
    from megatron.linear_cp.ops import fla_exchange

    contiguous, width = plan.in_layout("contiguous"), inputs.conv_weight.shape[1]
    fla_exchange.check_fla_exchange(contiguous, inputs.qkv.device, width)
    sections = (inputs.qkv.shape[-1], inputs.beta.shape[-1], inputs.alpha.shape[-1])
    local = torch.cat([inputs.qkv[0], inputs.beta[0], inputs.alpha[0]], dim=-1)
    moved = convert_rows(local, plan, "contiguous").unsqueeze(0)
    inputs = with_tokens(inputs, *moved.split(sections, dim=-1))
    qkv = fla_exchange.causal_conv1d(
        inputs.qkv, inputs.conv_weight, inputs.conv_bias, inputs.activation, contiguous
    )
    q, k, v = qkv.split(inputs.qkv_sections, dim=-1)
    q, k = (x.unflatten(-1, (inputs.num_key_heads, inputs.key_head_dim)) for x in (q, k))
    if inputs.use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    g, beta = gates(inputs.alpha, inputs.beta, inputs.A_log, inputs.dt_bias, backend=inputs.backend)
    out = fla_exchange.gated_delta_rule(
        q,
        k,
        v.unflatten(-1, (inputs.num_value_heads, inputs.value_head_dim)),
        g,
        beta,
        inputs.key_head_dim**-0.5,
        contiguous,
        width,
    )
    return convert_rows(out[0], contiguous, plan.layout).unsqueeze(0)
