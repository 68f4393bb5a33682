# SPDX-License-Identifier: Apache-2.0
"""Moving hidden states to another layout: the narrowest place of a layer to do it.

A permutation of tokens commutes with everything that treats tokens one by one, so a layer that
works in another layout than its input moves the input of its first projection and the output of its
last: ``2 * hidden_size`` values a token and pass, where the projected activations would be several
times as many.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from megatron.linear_cp.context_parallel_layout import convert_rows, exchange_tokens
from megatron.linear_cp.plan import ContextParallelPlan


def convert_hidden(
    hidden: torch.Tensor,
    old: ContextParallelPlan,
    new: ContextParallelPlan,
    tp_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Hidden states ``[s, b, h]`` of one plan, moved to where another stores the tokens.

    Args:
        hidden: as plan ``old`` stores them; packed input has ``b == 1``.
        old, new: plans of the same micro-batch and group.
        tp_group: the tensor-parallel group under sequence parallelism, where ``hidden`` is this
            rank's part; None otherwise. One exchange over TP x CP then moves every row once, where
            Megatron-Core's group of both covers exactly these ranks; otherwise the parts are
            gathered, exchanged and scattered again.

    Returns:
        ``[s', b, h]``; ``s'`` may differ under a plan of uneven shares.
    """
    if old is new or old.cp_size == 1:
        return hidden
    batch = hidden.shape[1]
    if tp_group is None or tp_group.size() == 1:
        rows = convert_rows(hidden.transpose(0, 1).flatten(0, 1), old, new)
        return rows.unflatten(0, (batch, -1)).transpose(0, 1)
    joint = _tensor_and_context_group(tp_group, old.group)
    if joint is None:
        whole = gather_from_sequence_parallel_region(hidden, False, group=tp_group)
        moved = convert_hidden(whole, old, new)
        return scatter_to_sequence_parallel_region(moved.contiguous(), group=tp_group)
    route = old.route_to(new, shards=tp_group.size(), shard=tp_group.rank(), samples=batch)
    rows = exchange_tokens(hidden.transpose(0, 1).flatten(0, 1), route, joint)
    return rows.unflatten(0, (batch, -1)).transpose(0, 1)


def _tensor_and_context_group(
    tp_group: dist.ProcessGroup, cp_group: dist.ProcessGroup
) -> dist.ProcessGroup | None:
    """The group of both, if Megatron-Core has one whose rank is ``cp_rank * tp_size + tp_rank``."""
    try:
        joint = parallel_state.get_tensor_and_context_parallel_group(check_initialized=False)
    except AssertionError:
        return None
    if joint is None or joint.size() != tp_group.size() * cp_group.size():
        return None
    ranks = dist.get_process_group_ranks(joint)
    mine, first = cp_group.rank(), tp_group.size()
    same_cp = ranks[mine * first : (mine + 1) * first]
    if same_cp != dist.get_process_group_ranks(tp_group):
        return None
    if ranks[tp_group.rank() :: first] != dist.get_process_group_ranks(cp_group):
        return None
    return joint
