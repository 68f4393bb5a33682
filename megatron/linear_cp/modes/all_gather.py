# SPDX-License-Identifier: Apache-2.0
"""all_gather: every rank brings the whole sequences together, runs them, and keeps its tokens."""

import torch

from megatron.linear_cp import comm
from megatron.linear_cp.modes.base import GatedDeltaNetInputs, run_rule, with_tokens
from megatron.linear_cp.permute import permute_rows
from megatron.linear_cp.plan import ContextParallelPlan


def all_gather(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Gather the projections (backward: reduce-scatter), run them whole, keep the local rows."""
    if plan.cp_size == 1:
        return run_rule(inputs, plan)
    sections = (inputs.qkv.shape[-1], inputs.beta.shape[-1], inputs.alpha.shape[-1])
    local = torch.cat([inputs.qkv[0], inputs.beta[0], inputs.alpha[0]], dim=-1)
    gathered = comm.all_gather_rows(local, plan.group)
    order = plan.global_order.on(local.device)
    back = plan.gathered_indices.on(local.device)
    whole = permute_rows(gathered, order, back).unsqueeze(0)
    qkv, beta, alpha = whole.split(sections, dim=-1)
    out = run_rule(with_tokens(inputs, qkv, beta, alpha), plan.full_plan)
    return out.index_select(1, plan.local_indices.on(local.device))
