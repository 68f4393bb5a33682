# SPDX-License-Identifier: Apache-2.0
"""``linear_cp_fp32_decay``: A_log and dt_bias stay float32 in a bf16 model, from start to file."""

from pathlib import Path
from typing import Any

import torch

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

DECAY = ("A_log", "dt_bias")
BF16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}


def make_model(**changes: Any) -> tuple[Any, Any]:
    """The small hybrid as a training script builds it, and its config."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(7)
    config = hybrid_config("chunkwise", **changes)
    return hybrid_model(config), config


def split(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The decay's parameters, and the others."""
    named = dict(model.named_parameters())
    decay = {n: p for n, p in named.items() if n.endswith(DECAY)}
    assert len(decay) == 3 * 2
    return decay, {n: p for n, p in named.items() if n not in decay}


def dtypes(tensors: dict[str, torch.Tensor]) -> set[torch.dtype]:
    return {x.dtype for x in tensors.values()}


def values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: x.detach().clone() for n, x in tensors.items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def check_conversions() -> None:
    from megatron.core.transformer.module import Float16Module

    # Weights built in fp32 and converted by the wrapper, and weights built in bf16.
    for built in ({"bf16": True}, BF16, {"fp16": True}):
        half = torch.float16 if "fp16" in built else torch.bfloat16
        model, config = make_model(**built, linear_cp_fp32_decay=True)
        decay, others = split(model)
        assert dtypes(decay) == {torch.float32}
        assert dtypes(others) == {built.get("params_dtype", torch.float32)}
        before = values(decay)
        wrapped = Float16Module(config, model)
        decay, others = split(wrapped)
        assert same_bits(values(decay), {f"module.{n}": x for n, x in before.items()})
        assert dtypes(others) == {half}
        plain, config = make_model(**built)
        drawn, _ = split(plain)
        # What is drawn does not depend on the flag.
        assert all(torch.equal(drawn[n].float(), before[n]) for n in drawn)
        assert dtypes(split(Float16Module(config, plain))[0]) == {half}


def check_other_conversions() -> None:
    from megatron.linear_cp.gated_delta_net import GatedDeltaNet

    model, _ = make_model(linear_cp_fp32_decay=True)
    layer = next(m for m in model.modules() if isinstance(m, GatedDeltaNet))
    for name in DECAY:
        parameter = getattr(layer, name)
        parameter.grad = torch.ones_like(parameter)
    layer.conv1d.weight.grad = torch.ones_like(layer.conv1d.weight)
    before = values({n: getattr(layer, n) for n in DECAY})
    layer.to(dtype=torch.bfloat16)
    assert same_bits(values({n: getattr(layer, n) for n in DECAY}), before)
    assert {getattr(layer, n).grad.dtype for n in DECAY} == {torch.float32}
    assert layer.conv1d.weight.dtype == layer.conv1d.weight.grad.dtype == torch.bfloat16
    layer.double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    layer.bfloat16()
    assert {getattr(layer, n).dtype for n in DECAY} == {torch.float32}
    halves = {n: p.data.bfloat16() for n, p in layer.named_parameters()}
    layer.load_state_dict(halves, strict=False, assign=True)
    assert {getattr(layer, n).dtype for n in DECAY} == {torch.float32}
    assert all(torch.equal(getattr(layer, n), halves[n].float()) for n in DECAY)
    # As Megatron's scripts do with a model that was built on the meta device.
    model, _ = make_model(**BF16, linear_cp_fp32_decay=True)
    layer = next(m for m in model.modules() if isinstance(m, GatedDeltaNet))
    layer.to("meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    assert bool((layer.dt_bias == 1).all())


def check_all_conversions() -> None:
    with cpu_cuda():
        check_conversions()
        check_other_conversions()


def test_conversions_leave_the_decay_alone() -> None:
    run_distributed(check_all_conversions, 1)


def train_and_save(folder: Path) -> dict[str, Any]:
    """Steps too small for bf16, then files, under DDP with Megatron-Core's ordinary optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron.linear_cp.testing.checkpoints import load_checkpoint, save_checkpoint

    with cpu_cuda():
        model, config = make_model(**BF16, linear_cp_fp32_decay=True)
        wrapped = DistributedDataParallel(
            config, DistributedDataParallelConfig(), Float16Module(config, model)
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16),
            [wrapped],
        )
        before = values(split(model)[0])
        tokens = torch.arange(33)[None]
        for _ in range(2):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            positions = torch.arange(32)[None]
            wrapped(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).sum().backward()
            wrapped.finish_grad_sync()
            optimizer.step()
        decay = values(split(model)[0])
        save_checkpoint(folder, model)
        other, _ = make_model(**BF16, linear_cp_fp32_decay=True)
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        load_checkpoint(folder, other)
        moved = torch.cat([decay[n] != before[n] for n in decay])
        in_bf16 = torch.cat([decay[n].bfloat16() != before[n].bfloat16() for n in decay])
        return {
            "moved": float(moved.float().mean()),
            "moved in bf16": float(in_bf16.float().mean()),
            "others": dtypes(split(model)[1]),
            "loaded": same_bits(values(split(other)[0]), decay),
        }


def test_small_steps_count_and_files_keep_them(tmp_path: Path) -> None:
    [result] = run_distributed(train_and_save, 1, tmp_path / "step")
    assert result["moved"] > 0.9
    assert result["moved in bf16"] < 0.1, "what bf16 would have lost"
    assert result["others"] == {torch.bfloat16}
    assert result["loaded"]
