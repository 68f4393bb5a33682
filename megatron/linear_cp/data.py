# SPDX-License-Identifier: Apache-2.0
"""Packed micro-batches under context parallelism, from token lists to the loss.

Pack and pad on the host, choose a CP group, keep this rank's tokens, and after the model sum the
loss or bring per-token values back together. Labels are shifted before any cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp.comm import all_gather_rows
from megatron.linear_cp.permute import permute_rows
from megatron.linear_cp.plan import ContextParallelPlan


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed into one buffer, or one rank's tokens of it.

    Labels are shifted before any cut, so the label of the last token of a rank's chunk is the first
    token of the next chunk, wherever that lies.

    Attributes:
        tokens: ``[1, T]`` int64 token ids; padding holds the pad id.
        labels: ``[1, T]`` int64 next tokens of the same sequence; the pad id where there is none.
        loss_mask: ``[1, T]`` float32, 1 where a label counts.
        position_ids: ``[1, T]`` int64 positions within the sequence.
        cu_seqlens: ``[S + 1]`` int32 real lengths, summed; what the loss sees.
        cu_seqlens_padded: ``[S + 1]`` int32 boundaries of the whole buffer as stored.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    cu_seqlens_padded: torch.Tensor

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with every tensor on ``device``."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def pack_sequences(
    sequences: Sequence[torch.Tensor],
    *,
    multiple_of: int = 1,
    total_multiple_of: int = 1,
    pad_id: int = 0,
) -> PackedBatch:
    """Pack token sequences into one buffer, padded to what the layout needs.

    Args:
        sequences: ``[n_i]`` int64 token ids, each of at least two tokens (one has no label).
        multiple_of: every stored length becomes a multiple of it, see
            :func:`megatron.linear_cp.dynamic_cp.length_multiple`.
        total_multiple_of: the whole buffer becomes a multiple of it (and of ``multiple_of``), by
            padding behind the last sequence; all that the contiguous layout asks for.
        pad_id: fills the padding and labels that do not count.

    Raises:
        ValueError: no sequences, one of fewer than two tokens, or a multiple below 1.
    """
    if multiple_of < 1 or total_multiple_of < 1:
        raise ValueError(
            f"multiple_of and total_multiple_of must be at least 1, got {multiple_of} and "
            f"{total_multiple_of}"
        )
    if not sequences:
        raise ValueError("pack_sequences needs at least one sequence")
    short = [i for i, s in enumerate(sequences) if len(s) < 2]
    if short:
        raise ValueError(
            f"sequence {short[0]} has {len(sequences[short[0]])} token; training needs at least "
            "two (one token has nothing to predict)"
        )
    lengths = [len(s) for s in sequences]
    stored = [-(-n // multiple_of) * multiple_of for n in lengths]
    # By steps of multiple_of, so that the last sequence keeps to it as well.
    stored[-1] += -sum(stored) % math.lcm(multiple_of, total_multiple_of)
    total = sum(stored)
    tokens = torch.full((total,), pad_id, dtype=torch.int64)
    labels = torch.full((total,), pad_id, dtype=torch.int64)
    loss_mask = torch.zeros(total)
    position_ids = torch.zeros(total, dtype=torch.int64)
    start = 0
    for sequence, n, room in zip(sequences, lengths, stored, strict=True):
        tokens[start : start + n] = sequence
        labels[start : start + n - 1] = sequence[1:]
        loss_mask[start : start + n - 1] = 1
        position_ids[start : start + room] = torch.arange(room)
        start += room
    return PackedBatch(
        tokens=tokens[None],
        labels=labels[None],
        loss_mask=loss_mask[None],
        position_ids=position_ids[None],
        cu_seqlens=_cumulative(lengths),
        cu_seqlens_padded=_cumulative(stored),
    )


def shard_batch(batch: PackedBatch, plan: ContextParallelPlan) -> PackedBatch:
    """This rank's tokens of the batch, in the plan's layout; the boundaries stay global.

    Raises:
        ValueError: a plan made for another buffer.
    """
    stored = batch.cu_seqlens_padded.cpu().numpy()
    if not np.array_equal(np.unique(plan.boundaries), np.unique(stored)):
        raise ValueError(
            f"the plan is for boundaries {plan.boundaries.tolist()} but the batch is stored at "
            f"{stored.tolist()}"
        )
    if plan.total_tokens != batch.tokens.shape[1]:
        raise ValueError(
            f"the plan covers {plan.total_tokens} tokens but the batch holds "
            f"{batch.tokens.shape[1]}"
        )
    index = plan.local_indices.on(batch.tokens.device)
    return PackedBatch(
        tokens=batch.tokens.index_select(1, index),
        labels=batch.labels.index_select(1, index),
        loss_mask=batch.loss_mask.index_select(1, index),
        position_ids=batch.position_ids.index_select(1, index),
        cu_seqlens=batch.cu_seqlens,
        cu_seqlens_padded=batch.cu_seqlens_padded,
    )


def make_packed_seq_params(
    batch: PackedBatch, cp_group: dist.ProcessGroup | None = None
) -> PackedSeqParams:
    """``PackedSeqParams`` of the batch with both kinds of boundaries.

    Args:
        batch: packed sequences, whole or sharded.
        cp_group: group of this micro-batch; None leaves it to the layers' own group.
    """
    longest = int(batch.cu_seqlens_padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=batch.cu_seqlens_padded,
        cu_seqlens_kv_padded=batch.cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=cp_group,
        local_cp_size=None if cp_group is None else cp_group.size(),
    )


def token_loss_sum(
    losses: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's summed loss and how many of its tokens count.

    With Megatron-Core's ``calculate_per_token_loss`` a loss function returns both: gradients are
    summed over data-parallel and context-parallel ranks and divided once by all counted tokens, so
    no factor of the CP size can slip in.

    Args:
        losses: ``[1, T]`` or ``[T]`` loss of every local token.
        loss_mask: the same number of entries, 1 where a token counts.

    Returns:
        The sum, a float32 scalar, and the count, an int32 scalar.
    """
    mask = loss_mask.reshape(-1).float()
    return (losses.reshape(-1).float() * mask).sum(), mask.sum().to(torch.int32)


def unshard(local: torch.Tensor, plan: ContextParallelPlan) -> torch.Tensor:
    """Bring every rank's tokens together in global order; differentiable.

    Args:
        local: ``[1, T, ...]`` values of the local tokens in plan order, such as losses.
        plan: the micro-batch; every rank of its group must call.

    Returns:
        ``[1, total, ...]``, the same on every rank. A gradient that every rank gives is summed.
    """
    if plan.cp_size == 1:
        return local
    rows = all_gather_rows(local[0], plan.group)
    order = plan.global_order.on(local.device)
    return permute_rows(rows, order, plan.gathered_indices.on(local.device))[None]


def token_log_probs(
    losses: torch.Tensor, loss_mask: torch.Tensor, plan: ContextParallelPlan
) -> torch.Tensor:
    """Log-probability of every label of the micro-batch, in global order, on every rank.

    Args:
        losses: ``[1, T]`` cross entropy of the local tokens, as the model returns it for labels.
        loss_mask: ``[1, T]``, 1 where a label counts; 0 elsewhere in the result.
        plan: the micro-batch; every rank of its group must call.

    Returns:
        ``[1, total]``, differentiable.
    """
    return unshard(-losses * loss_mask, plan)


def labels_ahead(batch: PackedBatch, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and mask of the token ``ahead`` steps on, as multi-token prediction asks for.

    Shift the whole batch, then shard: a shift after the cut would read the wrong neighbour.

    Args:
        batch: whole, not sharded.
        ahead: 1 gives the batch's own labels, 2 the token after, and so on.

    Returns:
        ``[1, T]`` labels and ``[1, T]`` mask: the batch's own, moved; the pad id and 0 where the
        sequence has ended. A label that the batch masks stays masked.

    Raises:
        ValueError: ``ahead`` below 1, or a sharded batch.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}")
    total = int(batch.cu_seqlens_padded[-1])
    if batch.tokens.shape[1] != total:
        raise ValueError(
            f"labels_ahead needs the whole batch of {total} tokens, got {batch.tokens.shape[1]}: "
            "shift first, then shard"
        )
    labels, mask = batch.labels.clone(), torch.zeros_like(batch.loss_mask)
    starts, lengths = batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist()
    for start, n in zip(starts, lengths, strict=False):
        if n == 0:
            continue
        # The last token of a sequence has no label; what stands there is the pad id.
        stop, kept = start + n, max(n - ahead + 1, 0)
        labels[:, start + kept : stop] = batch.labels[:, stop - 1 : stop]
        labels[:, start : start + kept] = batch.labels[:, stop - kept : stop]
        mask[:, start : start + kept] = batch.loss_mask[:, stop - kept : stop]
    return labels, mask


def _cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
