# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed optimizer at CP 2 on CPU, in bf16 with the decay in float32.

Gloo does not reduce and scatter; a gather and a sum do that here.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.linear_cp.testing.distributed_optimizer import (
    SIZES,
    Job,
    check_decay_dtypes,
    check_resumed,
    check_same_training,
    train_both,
)
from megatron.linear_cp.testing.workers import run_distributed

SMALL = {
    **SIZES,
    "hidden_size": 32,
    "ffn_hidden_size": 32,
    "kv_channels": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def reduce_scatter(
    out: torch.Tensor, x: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    """A sum; ``out`` may be a part of ``x``."""
    assert op == dist.ReduceOp.SUM
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.clone(), group=group)
    out.copy_(torch.stack(parts).sum(0).chunk(len(parts))[dist.get_rank(group)])


def train(job: Job) -> dict[str, Any]:
    from megatron.core.distributed import param_and_grad_buffer

    with mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", reduce_scatter):
        return train_both(job)


def test_trains_and_resumes_as_the_ordinary_optimizer(tmp_path: Path) -> None:
    job = Job("bf16", SMALL, "cpu", tmp_path / "files")
    for result in run_distributed(train, 2, job):
        check_same_training(result, 2)
        check_decay_dtypes(result, "bf16")
        check_resumed(result)
