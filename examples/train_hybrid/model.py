# SPDX-License-Identifier: Apache-2.0
"""One training run: Megatron-Core's GPTModel, DDP, schedule and optimizer with our layers."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.linear_cp import TransformerConfig, get_gdn_hybrid_layer_spec
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.data import (
    PackedBatch,
    make_packed_seq_params,
    shard_batch,
    token_loss_sum,
)
from megatron.linear_cp.micro_batch import packed_plan


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison share."""

    steps: int = 30
    rows_per_step: int = 2
    row_tokens: int = 1024
    hidden_size: int = 64
    linear_head_dim: int = 16
    vocab_size: int = 256
    learning_rate: float = 3e-3
    seed: int = 1234


@dataclass(frozen=True)
class Run:
    """One line of the comparison."""

    name: str
    mode: str
    cp_size: int


@dataclass(frozen=True)
class Result:
    """What a run produced.

    Attributes:
        losses: mean loss per counted token, one per step.
        bytes_per_step: bytes that this rank sent for context parallelism in a step, at most.
        seconds: wall time of all steps.
    """

    losses: list[float]
    bytes_per_step: int
    seconds: float


def make_config(run: Run, settings: Settings) -> TransformerConfig:
    """Three GDN layers, then one softmax-attention layer, as Qwen3-Next stacks them."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=2 * settings.hidden_size,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=settings.linear_head_dim,
        linear_value_head_dim=settings.linear_head_dim,
        linear_cp_mode=run.mode,
        context_parallel_size=run.cp_size,
        cp_comm_type="p2p",
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        transformer_impl="local",
        bf16=False,
        params_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
    )


def train(
    run: Run,
    settings: Settings,
    batches: Iterator[PackedBatch],
    device: torch.device,
    on_step: Callable[[float], None],
) -> Result:
    """Train from scratch and return every step's loss; needs the default process group."""
    parallel_state.initialize_model_parallel(context_parallel_size=run.cp_size)
    try:
        model_parallel_cuda_manual_seed(settings.seed)
        torch.manual_seed(settings.seed)
        return _train(run, settings, batches, device, on_step)
    finally:
        parallel_state.destroy_model_parallel()


def _train(
    run: Run,
    settings: Settings,
    batches: Iterator[PackedBatch],
    device: torch.device,
    on_step: Callable[[float], None],
) -> Result:
    config = make_config(run, settings)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gdn_hybrid_layer_spec(config),
        vocab_size=settings.vocab_size,
        max_sequence_length=settings.row_tokens,
        position_embedding_type="rope",
        rotary_percent=0.5,
        share_embeddings_and_output_weights=False,
    ).to(device)
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(overlap_grad_reduce=False), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=settings.learning_rate, clip_grad=1.0), [wrapped]
    )
    data_ranks = parallel_state.get_data_parallel_world_size()
    losses: list[float] = []
    most_bytes = 0
    began = time.perf_counter()
    for _ in range(settings.steps):
        # The same rows in the same order for every run, dealt over the data-parallel ranks.
        rows = [next(batches) for _ in range(settings.rows_per_step)]
        mine = rows[parallel_state.get_data_parallel_rank() :: data_ranks]
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        with count_traffic() as traffic:
            reports = get_forward_backward_func()(
                forward_step_func=partial(_forward_step, device=device),
                data_iterator=iter(mine),
                model=[wrapped],
                num_microbatches=len(mine),
                seq_length=settings.row_tokens,  # of all ranks: the schedule divides by CP
                micro_batch_size=1,
                forward_only=False,
            )
        optimizer.step()
        most_bytes = max(most_bytes, traffic.bytes_sent)
        losses.append(_mean_loss(reports))
        on_step(losses[-1])
    return Result(losses, most_bytes, time.perf_counter() - began)


def _forward_step(
    batches: Iterator[PackedBatch], model: torch.nn.Module, *, device: torch.device
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Shard one row over the CP group, run the model, hand the schedule a loss function."""
    batch = next(batches)
    group = parallel_state.get_context_parallel_group()
    params = make_packed_seq_params(batch.to(device), group)
    # Kept with the params: every layer reuses it.
    local = shard_batch(batch, packed_plan(params, group)).to(device)
    losses = model(
        local.tokens,
        local.position_ids,
        None,
        labels=local.labels,
        packed_seq_params=params,
    )

    def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, count = token_loss_sum(output, local.loss_mask)
        report = torch.stack([total.detach(), count.float()])
        return total, count, {"lm loss": report}

    return losses, loss_func


def _mean_loss(reports: list[dict[str, torch.Tensor]]) -> float:
    """Loss sum over count, over every rank that saw different tokens."""
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(total[0] / total[1])
