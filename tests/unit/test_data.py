# SPDX-License-Identifier: Apache-2.0
"""Packing, padding, sharding and the loss sum."""

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp import ContextParallelPlan
from megatron.linear_cp.data import (
    labels_ahead,
    make_packed_seq_params,
    pack_sequences,
    shard_batch,
    token_loss_sum,
)


def sequences(*lengths: int) -> list[torch.Tensor]:
    """Distinct tokens everywhere, so that any mix-up shows."""
    start, out = 1, []
    for n in lengths:
        out.append(torch.arange(start, start + n))
        start += n
    return out


def test_pack_pads_every_sequence_and_keeps_both_boundaries() -> None:
    batch = pack_sequences(sequences(3, 6), multiple_of=4)
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.cu_seqlens.tolist() == [0, 3, 9]
    assert batch.cu_seqlens_padded.tolist() == [0, 4, 12]
    assert batch.cu_seqlens.dtype == torch.int32


def test_labels_are_shifted_before_the_cut() -> None:
    """The last token of a chunk predicts the first of the next chunk, on whichever rank it lies."""
    batch = pack_sequences(sequences(8, 16), multiple_of=4)
    successor = {t: t + 1 for t in [*range(1, 8), *range(9, 24)]}
    seen: set[int] = set()
    for rank in range(2):
        plan = ContextParallelPlan.build(batch.cu_seqlens_padded, dist.ProcessGroup(rank, 2))
        local = shard_batch(batch, plan)
        assert local.tokens.shape == (1, 12)
        for token, label, mask in zip(
            local.tokens[0].tolist(),
            local.labels[0].tolist(),
            local.loss_mask[0].tolist(),
            strict=True,
        ):
            assert (label, mask) == ((successor[token], 1.0) if token in successor else (0, 0.0))
            seen.add(token)
    assert seen == set(range(1, 25))


def test_loss_over_ranks_counts_every_token_once() -> None:
    batch = pack_sequences(sequences(5, 9), multiple_of=4)
    losses = torch.rand(1, batch.tokens.shape[1])
    expected = (losses * batch.loss_mask).sum()
    total, count = 0.0, 0
    for rank in range(2):
        plan = ContextParallelPlan.build(batch.cu_seqlens_padded, dist.ProcessGroup(rank, 2))
        local = shard_batch(batch, plan)
        part, tokens = token_loss_sum(losses[:, plan.local_indices.array], local.loss_mask)
        total, count = total + float(part), count + int(tokens)
    assert count == 4 + 8
    assert total == pytest.approx(float(expected))


def test_params_carry_boundaries_and_group() -> None:
    batch = pack_sequences(sequences(3, 6), multiple_of=4)
    params = make_packed_seq_params(batch)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 12]
    assert params.max_seqlen_q == params.max_seqlen_kv == 8
    assert (params.cp_group, params.local_cp_size) == (None, None)
    group = dist.ProcessGroup(1, 2)
    params = make_packed_seq_params(batch, group)
    assert params.cp_group is group
    assert params.local_cp_size == 2


def test_total_multiple_keeps_the_sequences_multiple() -> None:
    batch = pack_sequences(sequences(5), multiple_of=8, total_multiple_of=12)
    assert batch.cu_seqlens_padded.tolist() == [0, 24]
    batch = pack_sequences(sequences(3, 2), total_multiple_of=4)
    assert batch.cu_seqlens_padded.tolist() == [0, 3, 8]


@pytest.mark.parametrize("pad_id", [0, 9])
def test_labels_ahead(pad_id: int) -> None:
    batch = pack_sequences(sequences(4, 2), multiple_of=4, pad_id=pad_id)
    batch.loss_mask[0, 2] = 0  # a label that the user masked
    labels, mask = labels_ahead(batch, 1)
    assert torch.equal(labels, batch.labels)
    assert torch.equal(mask, batch.loss_mask)
    labels, mask = labels_ahead(batch, 2)
    p = pad_id
    assert labels.tolist() == [[3, 4, p, p, p, p, p, p]]
    assert mask.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert not labels_ahead(batch, 5)[1].any()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        labels_ahead(batch, 0)
    plan = ContextParallelPlan.build(batch.cu_seqlens_padded, dist.ProcessGroup(0, 2))
    with pytest.raises(ValueError, match="shift first, then shard"):
        labels_ahead(shard_batch(batch, plan), 2)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0 and 1"):
        pack_sequences(sequences(4), multiple_of=0)
    plan = ContextParallelPlan.build([0, 16, 20], dist.ProcessGroup(0, 2))
    with pytest.raises(ValueError, match=r"boundaries \[0, 16, 20\] but the batch is stored at"):
        shard_batch(pack_sequences(sequences(8, 12)), plan)
    with pytest.raises(ValueError, match="at least one sequence"):
        pack_sequences([])
    with pytest.raises(ValueError, match="sequence 1 has 1 token"):
        pack_sequences(sequences(4, 1))
    plan = ContextParallelPlan.build([0, 8], dist.ProcessGroup(0, 2))
    with pytest.raises(
        ValueError, match=r"boundaries \[0, 8\] but the batch is stored at \[0, 12\]"
    ):
        shard_batch(pack_sequences(sequences(12)), plan)
