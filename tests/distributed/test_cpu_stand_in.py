# SPDX-License-Identifier: Apache-2.0
"""Unmodified Megatron-Core builds and trains on the CPU, and the stand-in leaves no trace."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp.testing import cpu
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

VOCABULARY, LENGTH, MICRO_BATCHES = 64, 16, 2


def _make_spec(config: Any, stage: int | None) -> Any:
    """Megatron-Core's local layers, with our modules where its own refuse CP and SP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    from megatron.linear_cp.attention import CoreAttention, SelfAttention
    from megatron.linear_cp.norm import RMSNorm

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attention.module = SelfAttention
    layer.self_attention.submodules.core_attention = CoreAttention
    count = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)


def _make_models(config: Any, chunks: int) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel

    models = []
    for chunk in range(chunks):
        stage: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk} if chunks > 1 else {}
        model = GPTModel(
            config,
            _make_spec(config, chunk if chunks > 1 else None),
            VOCABULARY,
            LENGTH,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=chunk if chunks > 1 else None,
        )
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        models.append(DistributedDataParallel(config, ddp_config, model))
    return models


def _forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    from megatron.core import parallel_state

    tokens = next(batches)
    cp, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    chunks = torch.arange(LENGTH).chunk(2 * cp)
    mine = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
    losses = model(
        tokens[:, :-1][:, mine],
        mine[None].expand(len(tokens), -1),
        None,
        labels=tokens[:, 1:][:, mine],
    )

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        # The schedule multiplies by the CP size, and DDP averages over the CP ranks.
        loss = losses.float().sum() / (len(tokens) * LENGTH)
        # The schedule divides the loss itself in place.
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_of


def train(
    steps: int = 4, tp: int = 1, pp: int = 1, cp: int = 1, chunks: int = 1, **settings: Any
) -> tuple[list[float], list[float]]:
    """Train a small GPT on a fixed batch; losses (where there are any) and gradient norms."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    with cpu_cuda():
        virtual = chunks if chunks > 1 else None
        parallel_state.initialize_model_parallel(tp, pp, virtual, context_parallel_size=cp)
        model_parallel_cuda_manual_seed(123)
        config = TransformerConfig(
            num_layers=2 * chunks,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=virtual,
            overlap_p2p_comm=chunks > 1,
            batch_p2p_comm=chunks == 1,
            context_parallel_size=cp,
            cp_comm_type="p2p",
            pipeline_dtype=torch.float32,
            add_bias_linear=False,
            normalization="RMSNorm",
            attention_dropout=0.0,
            **{"hidden_dropout": 0.0, **settings},
        )
        models = _make_models(config, chunks)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), models
        )
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        generator = torch.Generator().manual_seed(0)
        batches = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2, LENGTH + 1), generator=generator)
        losses, norms = [], []
        for _ in range(steps):
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            reports = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=[iter(batches) for _ in models] if virtual else iter(batches),
                model=models if virtual else models[0],
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            _, norm, _ = optimizer.step()
            norms.append(float(norm))
            if reports:
                loss = torch.stack([report["loss"] for report in reports]).mean()
                dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
                losses.append(float(loss))
    return losses, norms


def test_training_learns_and_cp_changes_nothing() -> None:
    """Schedule, DDP, gradient clipping and Adam; the same curve on one rank and on two."""
    [(losses, norms)] = run_distributed(train, 1)
    assert losses[-1] < 0.9 * losses[0]
    for other, other_norms in run_distributed(train, 2, cp=2):
        assert other == pytest.approx(losses, rel=2e-6)
        assert other_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"tp": 2}, {"pp": 2}, {"pp": 2, "chunks": 2}],
    ids=["tensor and sequence parallel", "pipeline", "interleaved pipeline"],
)
def test_training_under_the_other_parallelisms(settings: dict[str, Any]) -> None:
    for losses, norms in run_distributed(train, 2, **settings):
        assert not losses or losses[-1] < 0.9 * losses[0]
        assert all(0.3 < norm < 5 for norm in norms)


def test_recompute_repeats_the_random_numbers() -> None:
    """Dropout under recompute: the tracker and the saved states have to be the CPU generator's."""
    plain = run_distributed(train, 1, hidden_dropout=0.2)
    recomputed = run_distributed(
        train,
        1,
        hidden_dropout=0.2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert recomputed == plain
    assert plain != run_distributed(train, 1, hidden_dropout=0.1)


def _random_streams() -> tuple[list[torch.Tensor], list[str]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    with cpu_cuda():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        model_parallel_cuda_manual_seed(5)
        draws = [torch.rand(2)]
        for _ in range(2):
            with get_cuda_rng_tracker().fork():
                draws.append(torch.rand(2))
        draws.append(torch.rand(2))
    torch.manual_seed(5)
    draws.append(torch.rand(4))
    return draws, messages


def test_random_streams_of_tensor_parallel_ranks() -> None:
    (first, messages), (second, _) = run_distributed(_random_streams, 2)
    # Outside the tracker the ranks agree and the forks left no gap; inside they differ.
    assert torch.equal(first[0], second[0]) and torch.equal(first[3], second[3])
    assert torch.equal(torch.cat([first[0], first[3]]), first[4])
    assert not torch.equal(first[1], second[1]) and not torch.equal(first[1], first[2])
    assert messages == []


def _snapshot() -> dict[str, Any]:
    import megatron.core.tensor_parallel.random as random

    seen: dict[str, Any] = {}
    for owner in (torch, torch.cuda, torch.Tensor, random):
        for name, value in vars(owner).items():
            seen[f"{owner.__name__}.{name}"] = value
    seen["filters"] = list(logging.getLogger(random.__name__).filters)
    return seen


def test_everything_is_restored() -> None:
    before = _snapshot()
    with cpu_cuda():
        changed = {name for name, value in _snapshot().items() if before.get(name) is not value}
        assert "torch.cuda.current_device" in changed and "Tensor.cuda" in changed
        assert not torch.cuda.is_available()
    assert _snapshot().keys() == before.keys()
    assert all(value is before[name] or name == "filters" for name, value in _snapshot().items())
    assert _snapshot()["filters"] == before["filters"]
    with pytest.raises(KeyError), cpu_cuda():
        raise KeyError
    assert _snapshot().keys() == before.keys()


def test_devices_inside() -> None:
    with cpu_cuda():
        made = [
            torch.zeros(2, device="cuda"),
            torch.ones(2, device=torch.device("cuda", 0)),
            torch.tensor([1], device=0),
            torch.zeros(2).cuda(),
            torch.zeros(2).to("cuda"),
            torch.zeros(2).to(device=torch.cuda.current_device(), dtype=torch.float64),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.empty(1, device="meta"),
        ]
        assert [x.device.type for x in made] == ["cpu"] * 7 + ["meta"]
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        event = torch.cuda.current_stream().record_event()
        event.wait()
        torch.cuda.synchronize()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="is not installed"):
        cpu.uninstall()
    with cpu_cuda(), pytest.raises(RuntimeError, match="is installed already"):
        cpu.install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="hide a real GPU"):
        cpu.install()
    assert torch.cuda.current_device is before


def test_torch_compile_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that Megatron-Core fuses run as written: no compiler is started."""

    def refuse(*args: object) -> None:
        raise AssertionError("compiled")

    fused = torch.compile(lambda x: x + 1, backend=refuse)
    with cpu_cuda():
        assert torch.equal(fused(torch.zeros(2)), torch.ones(2))
