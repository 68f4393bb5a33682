# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed optimizer beside its ordinary one: a hybrid trained with each.

The distributed one cuts its state over data- and context-parallel ranks, after a reduce-scatter.
Adam's epsilon is large here: a gradient that is nothing but rounding must not become a step of
full size.
"""

import contextlib
import queue
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.parity import assert_all_close

DECAY = ("A_log", "dt_bias")
DECAY_PATTERNS = ("*.A_log", "*.dt_bias")
STEPS, RESUME_AT = 6, 4
LENGTHS = ((96, 28, 68), (160, 36), (52, 88, 44))
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "ffn_hidden_size": 256,
    "kv_channels": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16, "linear_cp_fp32_decay": True},
}
# The norm of all gradients is summed in another order, so where it clips, its last bit differs. Of
# that bf16 makes whole roundings of weights, steps later 2e-3 of a loss: there it is compared only.
CLIP = {"fp32": 1.0, "bf16": 1e9}
GATE = 1e-5


@dataclass(frozen=True)
class Job:
    """What to train, on the CPU's stand-in or on GPUs."""

    dtype: str
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    device: str = "cuda"
    folder: Path | None = None

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """The stand-in for CUDA on CPU, nothing on a GPU."""
        return cpu_cuda() if self.device == "cpu" else contextlib.nullcontext()


class Trainer:
    """Model, DDP and optimizer on all ranks as one CP group; always from the same weights."""

    def __init__(self, job: Job, distributed: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import (
            OptimizerConfig,
            ParamGroupOverride,
            ParamKey,
            get_megatron_optimizer,
            get_standard_config_overrides,
        )
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module

        from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

        model_parallel_cuda_manual_seed(11)
        torch.manual_seed(11)
        self.device = job.device
        self.norms: list[float] = []
        config = hybrid_config(
            "chunkwise",
            **job.sizes,
            **DTYPES[job.dtype],
            deterministic_mode=True,
            # Rows this short would be brought to one rank, where no state crosses the cut.
            linear_cp_move_sequences="never",
        )
        self.model = hybrid_model(config).to(job.device)
        wrapped = Float16Module(config, self.model) if config.bf16 else self.model
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
            ),
            wrapped,
        )
        settings = OptimizerConfig(
            optimizer="adam",
            lr=5e-3,
            adam_eps=1e-4,
            weight_decay=0.01,
            clip_grad=CLIP[job.dtype],
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed,
        )
        overrides = get_standard_config_overrides(settings)
        # In a group with bf16 parameters Megatron-Core mixes up whose state is whose in files.
        overrides[ParamKey(name=DECAY_PATTERNS)] = ParamGroupOverride(max_lr=settings.lr)
        self.optimizer = get_megatron_optimizer(settings, [self.ddp], config_overrides=overrides)

    def train(self, first: int, last: int) -> list[float]:
        """Losses of the steps at these positions of the data."""
        return [self.step(i) for i in range(first, last)]

    def step(self, position: int) -> float:
        """One step on one row; its loss over all ranks."""
        from megatron.core import parallel_state

        from megatron.linear_cp.data import make_packed_seq_params, shard_batch, token_loss_sum
        from megatron.linear_cp.micro_batch import packed_plan

        row, count = make_row(position), sum(LENGTHS[position % len(LENGTHS)])
        group = parallel_state.get_context_parallel_group()
        params = make_packed_seq_params(row, group)
        local = shard_batch(row, packed_plan(params, group))
        tokens, positions, labels, mask = (
            x.to(self.device)
            for x in (local.tokens, local.position_ids, local.labels, local.loss_mask)
        )
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.ddp(tokens, positions, None, labels=labels, packed_seq_params=params)
        total, _ = token_loss_sum(losses, mask)
        (total / count).backward()
        self.ddp.finish_grad_sync()
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self.norms.append(float(norm))
        total = total.detach().float()
        dist.all_reduce(total, group=group)
        return float(total) / count

    def weights(self) -> dict[str, Tensor]:
        """Copies on the CPU, in float32."""
        return {n: p.detach().float().cpu().clone() for n, p in self.model.named_parameters()}

    def state_numbers(self) -> int:
        """How many values this rank's optimizer steps."""
        return sum(
            p.numel()
            for optimizer in self.optimizer.chained_optimizers
            for group in optimizer.optimizer.param_groups
            for p in group["params"]
        )

    def sharded_state(self, is_loading: bool) -> dict[str, Any]:
        """Of model and optimizer, for ``dist_checkpointing``."""
        # The other kind of files wants an optimizer of Apex or Transformer Engine.
        metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
        model: Any = self.model
        state: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state["model"], is_loading=is_loading, metadata=metadata
        )
        return state

    def save(self, folder: Path) -> None:
        """Write both; for all ranks."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        # Made for asynchronous saves, and each rank would start an interpreter for it.
        with mock.patch.object(filesystem_async, "get_write_results_queue", queue.Queue):
            dist_checkpointing.save(self.sharded_state(False), str(folder))
        dist.barrier()

    def load(self, folder: Path) -> dict[str, Tensor]:
        """Read both, into an optimizer that has taken a step; what the model's files alone gave."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded_state(True), str(folder))
        self.model.load_state_dict(state["model"])
        weights = self.weights()
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        for optimizer in self.optimizer.chained_optimizers:
            # Megatron-Core leaves the count of steps there, where torch's Adam does not look.
            for group in optimizer.optimizer.param_groups:
                for p in group["params"]:
                    optimizer.optimizer.state[p]["step"] = torch.tensor(group["step"])
        return weights


def make_row(position: int) -> Any:
    """One of three packed rows: sequences that count up, cut over two ranks or fewer."""
    from megatron.linear_cp.data import pack_sequences

    position %= len(LENGTHS)
    generator = torch.Generator().manual_seed(position)
    sequences = []
    for length in LENGTHS[position]:
        start, stride = torch.randint(1, 8, (2,), generator=generator)
        sequences.append((start + stride * torch.arange(length + 1)) % 64)
    return pack_sequences(sequences, multiple_of=4)


def train_both(job: Job) -> dict[str, Any]:
    """The same steps with both optimizers; and the distributed one's, resumed from files."""
    from megatron.core import parallel_state

    with job.on_device():
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
        ordinary = Trainer(job, distributed=False)
        start = ordinary.weights()
        result: dict[str, Any] = {"start": start, "losses": ordinary.train(0, STEPS)}
        result["weights"], result["norms"] = ordinary.weights(), ordinary.norms

        cut = Trainer(job, distributed=True)
        assert all(torch.equal(start[n], x) for n, x in cut.weights().items())
        losses = cut.train(0, RESUME_AT)
        if job.folder is not None:
            cut.save(job.folder / job.dtype)
            result["weights saved"] = cut.weights()
        losses += cut.train(RESUME_AT, STEPS)
        result["losses of the distributed"] = losses
        result["norms of the distributed"] = cut.norms
        result["weights of the distributed"] = cut.weights()
        result["dtypes"] = {n: str(p.dtype) for n, p in cut.model.named_parameters()}
        result["numbers"] = ordinary.state_numbers(), cut.state_numbers()
        result["kinds"] = sorted(type(o).__name__ for o in cut.optimizer.chained_optimizers)
        if job.folder is not None:
            again = Trainer(job, distributed=True)
            # Where torch's Adam stands in for Apex, what will be read must be there already.
            again.step(0)
            result["weights loaded"] = again.load(job.folder / job.dtype)
            result["losses resumed"] = again.train(RESUME_AT, STEPS)
            result["weights resumed"] = again.weights()
        return result


def assert_same_steps(actual: list[float], expected: list[float]) -> None:
    """A loss or a norm, step by step, relative."""
    close = [abs(a / b - 1) <= GATE for a, b in zip(actual, expected, strict=True)]
    assert all(close), (actual, expected)


def check_same_training(result: dict[str, Any], cp: int) -> None:
    """Losses and steps agree, the model learns, and each rank holds its part of the state."""
    losses = result["losses"]
    again = losses[len(LENGTHS)]
    assert again < 0.95 * losses[0], "the same row: it must learn, or any optimizer would do"
    assert_same_steps(result["losses of the distributed"], losses)
    assert_same_steps(result["norms of the distributed"], result["norms"])
    # What the steps added, not what was there before them.
    start = result["start"]
    moved, wanted = (
        {n: x - start[n] for n, x in result[name].items()}
        for name in ("weights of the distributed", "weights")
    )
    assert_all_close(moved, wanted, 1e-3)
    assert set(result["kinds"]) == {"DistributedOptimizer"}
    everything, mine = result["numbers"]
    assert mine <= everything / cp * 1.05 + 1024, "each rank holds a part of the state"


def check_decay_dtypes(result: dict[str, Any], dtype: str) -> None:
    """Kept in float32, and moved by the optimizer, in both kinds."""
    decay = {n: d for n, d in result["dtypes"].items() if n.endswith(DECAY)}
    others = {d for n, d in result["dtypes"].items() if n not in decay}
    assert len(decay) == 3 * 2
    assert set(decay.values()) == {"torch.float32"}
    assert others == {"torch.float32" if dtype == "fp32" else "torch.bfloat16"}
    for name in decay:
        for which in ("weights", "weights of the distributed"):
            assert not torch.equal(result[which][name], result["start"][name]), (name, which)


def check_resumed(result: dict[str, Any]) -> None:
    """What a checkpoint on the way gave, model and optimizer, is what went on without one."""
    # Before the optimizer's own copies of the weights are read.
    for name, saved in result["weights saved"].items():
        assert torch.equal(result["weights loaded"][name], saved), name
    losses = result["losses of the distributed"][RESUME_AT:]
    assert_same_steps(result["losses resumed"], losses)
    assert_all_close(result["weights resumed"], result["weights of the distributed"], GATE)
