# SPDX-License-Identifier: Apache-2.0
"""Training goes on where a checkpoint left it: under another mode, and after a kill."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import WorkerError, run_distributed

STEPS, RESUME_AT = 30, 20
SAVE_EVERY, KILLED_AT, INCOMPLETE = 4, 10, 12
TOLERANCE = 1e-6
LENGTHS = ((24, 7, 17), (40, 9), (13, 22, 11))


def make_row(position: int) -> Any:
    """The packed row at a position of the data: sequences that count up, cut over both ranks."""
    from megatron.linear_cp.data import pack_sequences

    generator = torch.Generator().manual_seed(position)
    sequences = []
    for length in LENGTHS[position % len(LENGTHS)]:
        start, stride = torch.randint(1, 8, (2,), generator=generator)
        sequences.append((start + stride * torch.arange(length)) % 64)
    return pack_sequences(sequences, multiple_of=4)


class Trainer:
    """Model, optimizer, step and data position on two ranks of one CP group, in fp32."""

    def __init__(self, mode: str, root: Path | None = None) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

        model_parallel_cuda_manual_seed(11)
        torch.manual_seed(11)
        # Rows this short would be brought to one rank, where no state crosses the cut.
        config = hybrid_config(
            mode,
            linear_cp_move_sequences="never",
            finalize_model_grads_func=finalize_model_grads,
        )
        self.model = hybrid_model(config)
        self.wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=2e-3, clip_grad=1.0), [self.wrapped]
        )
        self.root, self.mode = root, mode
        self.step, self.position = 0, 0

    def train(self, until: int, between: Callable[["Trainer"], None] | None = None) -> list[float]:
        losses = []
        while self.step < until:
            losses.append(self.train_step())
            if self.root is not None and self.step % SAVE_EVERY == 0:
                self.save(self.root)
            if between is not None:
                between(self)
        return losses

    def train_step(self) -> float:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # One row, then two, then one: the position does not follow from the step.
        rows = [make_row(self.position + i) for i in range(1 + self.step % 2)]
        self.position += len(rows)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=[self.wrapped],
            num_microbatches=len(rows),
            seq_length=64,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        self.step += 1
        total = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return float(total[0] / total[1])

    def save(self, root: Path) -> None:
        from megatron.linear_cp.testing.checkpoints import save_checkpoint, step_folder

        common = {"step": self.step, "position": self.position}
        save_checkpoint(step_folder(root, self.step), self.model, self.optimizer, common)

    def load(self, folder: Path) -> None:
        from megatron.linear_cp.testing.checkpoints import load_checkpoint

        common = load_checkpoint(folder, self.model, self.optimizer, verify_integrity=True)
        self.step, self.position = common["step"], common["position"]


def forward_step(rows: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    from megatron.core import parallel_state

    from megatron.linear_cp.data import make_packed_seq_params, shard_batch, token_loss_sum
    from megatron.linear_cp.micro_batch import packed_plan

    row, group = next(rows), parallel_state.get_context_parallel_group()
    params = make_packed_seq_params(row, group)
    local = shard_batch(row, packed_plan(params, group))
    losses = model(
        local.tokens, local.position_ids, None, labels=local.labels, packed_seq_params=params
    )

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        total, count = token_loss_sum(output, local.loss_mask)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return losses, loss_of


def make_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())


def train_straight(root: Path) -> list[float]:
    """30 steps in one go; what is there after 20 is written on the way."""
    with cpu_cuda():
        make_groups()
        trainer = Trainer("chunkwise")
        losses = trainer.train(RESUME_AT)
        trainer.save(root)
        return losses + trainer.train(STEPS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def straight(root: Path) -> list[float]:
    losses, other = run_distributed(train_straight, 2, root)
    assert losses == other, "both ranks report the loss of the whole row"
    return list(losses)


def resume(root: Path, mode: str) -> dict[str, Any]:
    from megatron.linear_cp.modes import linear_cp_mode_runs
    from megatron.linear_cp.testing.checkpoints import latest_checkpoint

    with cpu_cuda():
        make_groups()
        trainer = Trainer(mode)
        folder = latest_checkpoint(root)
        assert folder is not None
        trainer.load(folder)
        losses = trainer.train(STEPS)
        return {"losses": losses, "runs": dict(linear_cp_mode_runs())}


def test_resume_under_another_mode(root: Path, straight: list[float]) -> None:
    """20 steps chunkwise, a checkpoint, 10 steps headwise: the losses of 30 steps chunkwise."""
    assert straight[-1] < 0.9 * straight[0], "it must learn, or any state would do"
    for result in run_distributed(resume, 2, root, "headwise"):
        assert result["losses"] == pytest.approx(straight[RESUME_AT:], rel=TOLERANCE, abs=0)
        assert {mode for mode, _ in result["runs"]} == {"headwise"}, "no other mode ran"


def train_until_killed(root: Path) -> None:
    """Save every fourth step; rank 1 is killed after step 10."""

    def kill(trainer: Trainer) -> None:
        if trainer.step == KILLED_AT and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with cpu_cuda():
        make_groups()
        Trainer("chunkwise", root).train(STEPS, kill)


def restart_and_die_saving(root: Path) -> None:
    """From the last checkpoint; at the next save all files are written but the last is not."""
    from megatron.core.dist_checkpointing import serialization

    from megatron.linear_cp.testing.checkpoints import latest_checkpoint

    def kill(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with cpu_cuda():
        make_groups()
        trainer = Trainer("chunkwise", root)
        folder = latest_checkpoint(root)
        assert folder is not None
        trainer.load(folder)
        with mock.patch.object(serialization, "save_config", kill):
            trainer.train(STEPS)


def restart(root: Path) -> dict[str, Any]:
    from megatron.linear_cp.testing.checkpoints import latest_checkpoint

    with cpu_cuda():
        make_groups()
        trainer = Trainer("chunkwise", root)
        folder = latest_checkpoint(root)
        assert folder is not None
        trainer.load(folder)
        found = {"folder": folder.name, "step": trainer.step, "position": trainer.position}
        losses = trainer.train(INCOMPLETE + 2)
        return found | {"losses": losses, "latest": str(latest_checkpoint(root))}


def test_kill_and_restart_lose_nothing_saved(tmp_path: Path, straight: list[float]) -> None:
    """Killed between steps, then killed while saving: each restart takes the last whole one.

    The losses after it are bitwise those of a run that nothing happened to.
    """
    from megatron.linear_cp.testing.checkpoints import step_folder

    with pytest.raises(WorkerError, match=re.escape("rank 1 died: killed by SIGKILL")):
        run_distributed(train_until_killed, 2, tmp_path)
    saved = KILLED_AT - KILLED_AT % SAVE_EVERY
    assert sorted(f.name for f in tmp_path.iterdir()) == ["step_000004", "step_000008"]

    with pytest.raises(WorkerError, match=re.escape("rank 0 died: killed by SIGKILL")):
        run_distributed(restart_and_die_saving, 2, tmp_path)
    left = {f.name for f in step_folder(tmp_path, INCOMPLETE).iterdir()}
    assert {".metadata", "__0_0.distcp"} <= left and "metadata.json" not in left

    for result in run_distributed(restart, 2, tmp_path):
        assert result["folder"] == f"step_{saved:06d}", "the incomplete one is not taken"
        assert (result["step"], result["position"]) == (saved, saved + saved // 2)
        assert result["losses"] == straight[saved : INCOMPLETE + 2]
        assert result["latest"] == str(step_folder(tmp_path, INCOMPLETE)), "written over, and whole"
