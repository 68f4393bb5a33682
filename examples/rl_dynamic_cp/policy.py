# SPDX-License-Identifier: Apache-2.0
"""The policy, and one packed micro-batch of rollouts on one context-parallel group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.linear_cp import TransformerConfig, get_gdn_hybrid_layer_spec
from megatron.linear_cp.data import (
    PackedBatch,
    make_packed_seq_params,
    pack_sequences,
    shard_batch,
    token_log_probs,
    token_loss_sum,
)
from megatron.linear_cp.dynamic_cp import length_multiple
from megatron.linear_cp.micro_batch import packed_plan

VOCABULARY = 64
CLIP = 0.2


@dataclass(frozen=True)
class Rollout:
    """A prompt and an answer, what it was worth, and the inference engine's log-probs."""

    tokens: torch.Tensor
    prompt_length: int
    advantage: float
    log_probs: torch.Tensor | None = None  # [len(tokens) - 1], of every token but the first


def make_policy(device: torch.device, cp_size: int) -> DistributedDataParallel:
    """Three GDN layers and one of softmax attention; ``cp_size`` is the largest there will be."""
    head_dim = 128 if device.type == "cuda" else 16
    config = TransformerConfig(
        num_layers=4,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=4,
        kv_channels=16,
        context_parallel_size=cp_size,
        cp_comm_type="p2p",
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=head_dim,
        linear_value_head_dim=head_dim,
        linear_cp_mode="chunkwise",  # 2 key heads would not divide by 4: headwise is out
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        transformer_impl="local",
    )
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    spec = get_gdn_hybrid_layer_spec(config)
    model = GPTModel(config, spec, VOCABULARY, 4096, position_embedding_type="rope").to(device)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def per_token(values: list[torch.Tensor], batch: PackedBatch) -> torch.Tensor:
    """``[1, T]`` of the whole buffer: ``values`` at the start of each sequence, 0 elsewhere."""
    buffer = torch.zeros_like(batch.loss_mask)
    for start, value in zip(batch.cu_seqlens_padded.tolist(), values, strict=False):
        buffer[0, start : start + len(value)] = value
    return buffer


def run_micro_batch(
    policy: DistributedDataParallel, rollouts: list[Rollout], group: dist.ProcessGroup, learn: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss sum and count of this rank, ``[2]``; log-probs of each whole rollout, on every rank."""
    device = next(policy.parameters()).device
    batch = pack_sequences([r.tokens for r in rollouts], multiple_of=length_multiple(group.size()))
    params = make_packed_seq_params(batch.to(device), group)
    plan = packed_plan(params, group)
    local = shard_batch(batch, plan).to(device)
    losses = policy(
        local.tokens, local.position_ids, None, labels=local.labels, packed_seq_params=params
    )
    whole = token_log_probs(losses.detach(), local.loss_mask, plan)[0].cpu()
    starts = batch.cu_seqlens_padded.tolist()
    log_probs = [whole[s : s + len(r.tokens) - 1] for s, r in zip(starts, rollouts, strict=False)]
    if not learn:
        return torch.zeros(2), log_probs
    # What belongs to a token is laid out for the whole buffer first, then cut as the tokens were.
    mine = plan.local_indices.on(batch.tokens.device)
    answers = [(torch.arange(len(r.tokens) - 1) >= r.prompt_length - 1).float() for r in rollouts]
    gains = [a * r.advantage for a, r in zip(answers, rollouts, strict=True)]
    mask, gain, engine = (
        per_token(values, batch)[:, mine].to(device)
        for values in (answers, gains, [r.log_probs for r in rollouts])
    )
    ratio = (-losses - engine).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss, count = token_loss_sum(-torch.minimum(ratio * gain, clipped * gain), mask)
    loss.backward()
    return torch.stack([loss.detach(), count]).cpu(), log_probs
