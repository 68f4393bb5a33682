# SPDX-License-Identifier: Apache-2.0
"""Softmax attention on GPUs: each kernel that PyTorch may choose, and NCCL."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.linear_cp.attention import _causal
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

# Relative RMS; bf16 rounds its inputs' products and its outputs.
GATES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[T, heads, dim]``, the queries being the last tokens of the context."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    seen = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(~seen.tril(k.shape[0] - q.shape[0]), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def _causal_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _causal(q, k, v, None)


def _with_grads(
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: list[torch.Tensor],
    upstream: torch.Tensor,
) -> dict[str, torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = function(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (36, 20)], ids=str)
@pytest.mark.parametrize("lengths", [(96, 96), (96, 257), (1, 130)], ids=str)
def test_kernel(dtype: torch.dtype, dims: tuple[int, int], lengths: tuple[int, int]) -> None:
    """Lower-right masks, grouped heads, head sizes that kernels pad or refuse."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((lengths[0], 4, dims[0]), (lengths[1], 2, dims[0]), (lengths[1], 2, dims[1]))
    inputs = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]
    upstream = torch.randn(lengths[0], 4, dims[1], generator=generator).to("cuda", dtype)
    actual = _with_grads(_causal_kernel, inputs, upstream)
    wide = _with_grads(_plain, [x.double() for x in inputs], upstream.double())
    assert_all_close(actual, wide, GATES[dtype])


def test_long_fp32_keeps_no_scores() -> None:
    """Grouped heads in fp32: a kernel that stores the score matrix would need gigabytes."""
    q = torch.randn(8192, 8, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(16384, 2, 64, device="cuda", requires_grad=True) for _ in range(2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _causal(q, k, v, None).sum().backward()
    # All scores of one layer: 8 * 8192 * 16384 * 4 bytes = 4.3 GB.
    assert torch.cuda.max_memory_allocated() - before < 0.5e9


def _run_on_gpu(boundaries: list[int]) -> dict[str, torch.Tensor]:
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron.linear_cp.attention import CoreAttention
    from megatron.linear_cp.context_parallel_layout import get_thd_context_parallel_rank_indices

    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    mine = get_thd_context_parallel_rank_indices(
        cu_seqlens, dist.get_world_size(), dist.get_rank(), "zigzag"
    )
    q, k, v = (x[mine].cuda().requires_grad_() for x in _inputs(boundaries[-1]))
    config: Any = SimpleNamespace(attention_dropout=0.0)
    groups: Any = SimpleNamespace(cp=dist.group.WORLD)
    core = CoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    on_device = cu_seqlens.cuda()
    longest = int(cu_seqlens.diff().max())
    params = PackedSeqParams("thd", on_device, on_device, None, None, longest, longest)
    out = core(q, k, v, packed_seq_params=params)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    result = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return {"index": mine, **result}


def _inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, heads, 32, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, one per rank")
def test_two_gpus_equal_one() -> None:
    boundaries = [0, 8, 40, 40, 104]
    [want] = run_distributed(_run_on_gpu, 1, boundaries, cuda=True)
    parts = run_distributed(_run_on_gpu, 2, boundaries, cuda=True)
    index = torch.cat([part.pop("index") for part in parts])
    assert want.pop("index").tolist() == list(range(boundaries[-1]))
    order = index.argsort()
    actual = {name: torch.cat([part[name] for part in parts])[order] for name in want}
    assert_all_close(actual, want, 1e-12)
