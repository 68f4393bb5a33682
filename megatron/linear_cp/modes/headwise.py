# SPDX-License-Identifier: Apache-2.0
"""headwise: an all-to-all trades tokens for heads, so that each rank runs whole sequences."""

from dataclasses import replace

import torch

from megatron.linear_cp import comm
from megatron.linear_cp.modes.base import GatedDeltaNetInputs, run_rule
from megatron.linear_cp.modes.heads import check_heads
from megatron.linear_cp.permute import permute_rows
from megatron.linear_cp.plan import ContextParallelPlan


def headwise(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Trade tokens for heads, run whole sequences on ``1 / cp_size`` of the heads, trade back.

    The gate of the output norm takes no part: it stays with its tokens.

    Raises:
        ValueError: heads that do not divide over this micro-batch's group.
    """
    cp_size, rank = plan.cp_size, plan.cp_rank
    if cp_size == 1:
        return run_rule(inputs, plan)
    # Of the heads on this tensor-parallel rank.
    check_heads(
        "headwise",
        num_key_heads=inputs.num_key_heads,
        num_value_heads=inputs.num_value_heads,
        tensor_model_parallel_size=1,
        context_parallel_size=cp_size,
    )
    splits = [plan.local_tokens] * cp_size
    order = plan.global_order.on(inputs.qkv.device)
    back = plan.gathered_indices.on(inputs.qkv.device)

    q, k, v = inputs.qkv[0].split(inputs.qkv_sections, dim=-1)
    parts = [_by_rank(x, cp_size) for x in (q, k, v, inputs.beta[0], inputs.alpha[0])]
    widths = [p.shape[-1] for p in parts]
    rows = torch.cat(parts, dim=-1).transpose(0, 1).flatten(0, 1)
    received = comm.all_to_all_rows(rows, splits, splits, plan.group)
    whole = permute_rows(received, order, back).unsqueeze(0)
    qkv, beta, alpha = whole.split([sum(widths[:3]), *widths[3:]], dim=-1)

    mine = replace(
        inputs,
        qkv=qkv,
        beta=beta,
        alpha=alpha,
        conv_weight=_channels(inputs.conv_weight, inputs.qkv_sections, cp_size, rank),
        conv_bias=None
        if inputs.conv_bias is None
        else _channels(inputs.conv_bias, inputs.qkv_sections, cp_size, rank),
        A_log=inputs.A_log.chunk(cp_size)[rank],
        dt_bias=inputs.dt_bias.chunk(cp_size)[rank],
        num_key_heads=inputs.num_key_heads // cp_size,
        num_value_heads=inputs.num_value_heads // cp_size,
    )
    out = permute_rows(run_rule(mine, plan.full_plan)[0].flatten(1), back, order)
    returned = comm.all_to_all_rows(out, splits, splits, plan.group)
    # Rank after rank holds the heads in order: [cp, T, HV / cp * V] -> [T, HV, V].
    heads = returned.view(
        cp_size, plan.local_tokens, inputs.num_value_heads // cp_size, inputs.value_head_dim
    )
    return heads.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _by_rank(x: torch.Tensor, cp_size: int) -> torch.Tensor:
    """``[T, C] -> [T, cp_size, C / cp_size]``: whole heads for each rank."""
    return x.unflatten(-1, (cp_size, -1))


def _channels(
    x: torch.Tensor, sections: tuple[int, int, int], cp_size: int, rank: int
) -> torch.Tensor:
    """The rows of q, k and v that belong to ``rank``'s heads."""
    return torch.cat([part.chunk(cp_size)[rank] for part in x.split(sections)])
