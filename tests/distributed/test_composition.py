# SPDX-License-Identifier: Apache-2.0
"""A hybrid stack under pipeline, tensor, expert and context parallelism at once, and recompute.

The same weights and micro-batches go through Megatron-Core's own schedule, DDP and
``finalize_model_grads`` on one rank and on many: the loss and every parameter's final gradient
must agree. Recompute must change no bit of them, and no rank may send more often than another.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.comm import count_traffic
from megatron.linear_cp.layout import dense_token_ranges, rank_indices, token_ranges
from megatron.linear_cp.plan import plan_builds
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.parity import assert_all_close
from megatron.linear_cp.testing.workers import run_distributed

MODES = ("headwise", "chunkwise", "all_gather")
FORMATS = ("thd", "sbhd")
GATES = {torch.float64: 1e-10, torch.float32: 1e-5}
TIMEOUT = 150.0  # a hang ends here, as a failure

VOCABULARY, HIDDEN, FFN = 32, 16, 32
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 8, 16, 4
EXPERTS = 4
# Micro-batches of 64 tokens: four packed rows, or four dense batches of two.
ROWS = ((0, 8, 24, 64), (0, 64), (0, 32, 40, 48, 64), (0, 16, 32, 48, 64))
LENGTH, BATCH = 32, 2
TOKENS = LENGTH * BATCH


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a job are used."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    virtual: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp


@dataclass(frozen=True)
class Case:
    """One model and its input on the ranks of a job."""

    mode: str = "chunkwise"
    format: str = "thd"
    dtype: torch.dtype = torch.float64
    moe: bool = False
    labels: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.format}"


def make_config(case: Case, ranks: Ranks) -> TransformerConfig:
    from megatron.core.distributed import finalize_model_grads

    moe: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_ffn_hidden_size": FFN,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp64",
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        tensor_model_parallel_size=ranks.tp,
        sequence_parallel=ranks.sp,
        pipeline_model_parallel_size=ranks.pp,
        virtual_pipeline_model_parallel_size=ranks.virtual if ranks.virtual > 1 else None,
        # Interleaving with batched point-to-point operations goes wrong without a word.
        overlap_p2p_comm=ranks.virtual > 1,
        batch_p2p_comm=ranks.virtual == 1,
        pipeline_dtype=case.dtype,
        context_parallel_size=ranks.cp,
        expert_model_parallel_size=ranks.ep,
        cp_comm_type="p2p",
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_cp_mode=case.mode,
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        gradient_accumulation_fusion=False,
        transformer_impl="local",
        params_dtype=case.dtype,
        **(moe if case.moe else {}),
        **case.config,
    )


def make_models(config: TransformerConfig, ranks: Ranks) -> list[Any]:
    """This rank's model chunks, each in Megatron-Core's DDP."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    models = []
    for chunk in range(ranks.virtual):
        stage = chunk if ranks.virtual > 1 else None
        where: dict[str, Any] = (
            {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gdn_hybrid_layer_spec(config, vp_stage=stage),
            vocab_size=VOCABULARY,
            max_sequence_length=TOKENS,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=False)
        models.append(DistributedDataParallel(config, ddp_config, model))
    return models


def global_names(model: Any, ranks: Ranks) -> dict[str, torch.nn.Parameter]:
    """Parameters of a chunk by the name they have in the whole model."""
    from megatron.core import parallel_state

    model = model.module
    first = model.decoder.layers[0].layer_number - 1
    experts = EXPERTS // ranks.ep * parallel_state.get_expert_model_parallel_rank()
    offsets = {"layers": first, "local_experts": experts}
    found = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for i, part in enumerate(parts[:-1]):
            if part in offsets:
                parts[i + 1] = str(int(parts[i + 1]) + offsets[part])
        found[".".join(parts)] = parameter
    return found


def make_weight(name: str, like: Tensor, zero_centered: bool) -> Tensor:
    """Its value follows from its name; decays are slow, so that a leak cannot hide."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    if name.endswith("A_log"):
        value = -3 + 0.3 * value
    elif "norm" in name:
        value = 0.1 * value + (0 if zero_centered else 1)
    elif like.dim() == 2 and "embedding" not in name:
        # Narrow residual branches, as at the start of training, keep rounding small.
        branch = name.endswith(("out_proj.weight", "linear_proj.weight", "linear_fc2.weight"))
        value = value / like.shape[1] ** 0.5 * (0.3 if branch else 1)
    return value.to(like.dtype)


_QK, _V = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
# Parameters cut over tensor-parallel ranks: the dimension, and the sections that are cut alone.
SECTIONS: dict[str, tuple[int, list[int] | None]] = {
    "in_proj.weight": (0, [_QK, _QK, _V, _V, VALUE_HEADS, VALUE_HEADS]),
    "conv1d.weight": (0, [_QK, _QK, _V]),
    "A_log": (0, None),
    "dt_bias": (0, None),
    "out_proj.weight": (1, None),
    "linear_qkv.weight": (0, None),
    "linear_proj.weight": (1, None),
    "linear_fc1.weight": (0, [FFN, FFN]),
    "linear_fc2.weight": (1, None),
    "word_embeddings.weight": (0, None),
    "output_layer.weight": (0, None),
}


def tensor_part(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """A tensor-parallel rank's part of a parameter or of its gradient."""
    for ending, (dim, sections) in SECTIONS.items():
        if name.endswith(ending) and size > 1:
            parts = whole.split(sections or whole.shape[dim], dim)
            return torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
    return whole


@dataclass(frozen=True)
class MicroBatch:
    """One rank's part of a micro-batch."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    weight: Tensor
    params: PackedSeqParams | None


def micro_batches(case: Case, ranks: Ranks) -> list[MicroBatch]:
    """Fresh objects, as a loader gives them; the same tokens whatever the ranks."""
    from megatron.core import parallel_state

    rank = parallel_state.get_context_parallel_rank()
    vocabulary = VOCABULARY // ranks.tp
    first = parallel_state.get_tensor_model_parallel_rank() * vocabulary
    layout = case.config.get("linear_cp_layout", "zigzag")
    generator = torch.Generator().manual_seed(3)
    batches = []
    for row in ROWS:
        if case.format == "thd":
            batch, ranges = 1, token_ranges(row, ranks.cp, layout)
            cu, longest = torch.tensor(row, dtype=torch.int32), int(np.diff(row).max())
            params = PackedSeqParams("thd", cu, cu, None, None, longest, longest)
        else:
            batch, ranges = BATCH, dense_token_ranges(LENGTH, BATCH, ranks.cp, layout)
            params = None
        index = torch.from_numpy(rank_indices(ranges, rank))
        tokens, labels = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)[:, index]
        weight = torch.randn(TOKENS, VOCABULARY, generator=generator, dtype=torch.float64)
        batches.append(
            MicroBatch(
                tokens.view(batch, -1),
                # RoPE counts by itself; nothing reads these.
                torch.arange(len(index) // batch).expand(batch, -1),
                labels.view(batch, -1),
                weight[index, first : first + vocabulary].view(batch, -1, vocabulary),
                params,
            )
        )
    return batches


def forward_step(batches: Iterator[MicroBatch], model: Any, labels: bool) -> tuple[Tensor, Any]:
    """Megatron-Core's cross-entropy, or a loss of the logits in their own precision."""
    batch = next(batches)
    output = model(
        batch.tokens,
        batch.positions,
        None,
        labels=batch.labels if labels else None,
        packed_seq_params=batch.params,
    )

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # Without labels each tensor-parallel rank has the part of its own vocabulary.
        losses = output if labels else batch.weight * output + 0.1 * output.square()
        total = losses.sum()
        return total, torch.tensor(batch.tokens.numel()), {"loss": total.detach().clone()}

    return output, loss_of


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Count forward calls of modules, by class."""
    calls: Counter[str] = Counter()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: calls.update([type(module).__name__])
    )
    try:
        yield calls
    finally:
        handle.remove()


def train_step(case: Case, ranks: Ranks, state: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """One step's loss and final gradients by their names in the whole model, and counts."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = make_config(case, ranks)
    models = make_models(config, ranks)
    parameters: dict[str, torch.nn.Parameter] = {}
    for model in models:
        parameters |= global_names(model, ranks)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in parameters.items():
            if state is None:
                parameter.copy_(make_weight(name, parameter, config.layernorm_zero_centered_gamma))
            else:
                parameter.copy_(tensor_part(name, state[name], tp_rank, ranks.tp))
    for model in models:
        model.zero_grad_buffer()
    data = [micro_batches(case, ranks) for _ in models]
    builds = plan_builds()
    with count_traffic() as traffic, count_calls() as calls:
        reports = get_forward_backward_func()(
            forward_step_func=partial(forward_step, labels=case.labels),
            data_iterator=[iter(d) for d in data] if len(models) > 1 else iter(data[0]),
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(ROWS),
            # The schedule divides by the CP and, under sequence parallelism, the TP size itself.
            seq_length=TOKENS if case.format == "thd" else LENGTH,
            micro_batch_size=1 if case.format == "thd" else BATCH,
            forward_only=False,
        )
    loss = torch.stack([r["loss"] for r in reports]).sum() if reports else None
    if loss is not None:
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        if not case.labels:
            dist.all_reduce(loss, group=parallel_state.get_tensor_model_parallel_group())
    return {
        "loss": loss,
        "tp_rank": tp_rank,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "grads": {name: p.main_grad.clone() for name, p in parameters.items()},
        "state": {name: p.detach().clone() for name, p in parameters.items()},
        "collectives": traffic.collectives,
        "calls": calls,
        "plans": plan_builds() - builds,
    }


def run_cases(
    cases: list[Case], ranks: Ranks, state: Mapping[str, Tensor] | None
) -> list[dict[str, Any]]:
    """Every case in turn on the same groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with cpu_cuda():
        parallel_state.initialize_model_parallel(
            ranks.tp,
            ranks.pp,
            ranks.virtual if ranks.virtual > 1 else None,
            context_parallel_size=ranks.cp,
            expert_model_parallel_size=ranks.ep,
        )
        model_parallel_cuda_manual_seed(5)
        return [train_step(case, ranks, state) for case in cases]


@cache
def one_rank(format: str, dtype: torch.dtype, moe: bool, real: bool) -> dict[str, Any]:
    """TP 1, PP 1, CP 1: where every mode and layout is the plain layer."""
    case = Case("chunkwise", format, dtype, moe, real, REAL if real else {})
    [[result]] = run_distributed(run_cases, 1, [case], Ranks(), None)
    return result


def check(cases: list[Case], ranks: Ranks) -> list[list[dict[str, Any]]]:
    """Run the cases and compare every rank with one rank; results by rank, then case."""
    wanted = [one_rank(case.format, case.dtype, case.moe, case.labels) for case in cases]
    results = run_distributed(
        run_cases, ranks.world, cases, ranks, wanted[0]["state"], timeout=TIMEOUT
    )
    for i, (case, expected) in enumerate(zip(cases, wanted, strict=True)):
        actual, reference, losses, seen = {}, {}, 0, set()
        for rank, parts in enumerate(results):
            part = parts[i]
            for name, grad in part["grads"].items():
                key = f"{case.name} rank {rank} {name}"
                actual[key] = grad
                reference[key] = tensor_part(
                    name, expected["grads"][name], part["tp_rank"], ranks.tp
                )
                seen.add(name)
            if part["loss"] is not None:
                losses += 1
                actual[f"{case.name} rank {rank} loss"] = part["loss"]
                reference[f"{case.name} rank {rank} loss"] = expected["loss"]
        assert losses == ranks.tp * ranks.cp, "every rank of the last stage has the loss"
        assert seen == expected["grads"].keys(), "together the stages hold every parameter"
        assert_all_close(actual, reference, GATES[case.dtype])
    return results


# What Qwen3-Next adds; the output gate and the cross-entropy round to float32 in any precision.
REAL = {
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "layernorm_epsilon": 1e-3,
}
PIPELINE = Ranks(pp=2, cp=2)
INTERLEAVED = Ranks(pp=2, virtual=2, cp=2)
SEQUENCE = Ranks(tp=2, sp=True, cp=2)
WIDE = Ranks(tp=2, cp=4)
CONTEXT = Ranks(cp=2)
CUBE = Ranks(tp=2, sp=True, pp=2, cp=2)
NAMES = {
    PIPELINE: "pp2-cp2",
    INTERLEAVED: "pp2-interleaved-cp2",
    SEQUENCE: "tp2-sp-cp2",
    CONTEXT: "cp2",
}


@pytest.mark.parametrize("ranks", [PIPELINE, INTERLEAVED, SEQUENCE], ids=NAMES.get)
def test_every_mode_and_format_composes(ranks: Ranks) -> None:
    check([Case(mode, format) for mode in MODES for format in FORMATS], ranks)


def test_eight_ranks() -> None:
    """TP 2 without sequence parallelism, CP 4: a short sequence has one token a chunk."""
    check([*(Case(mode) for mode in MODES), Case("chunkwise", "sbhd")], WIDE)


@pytest.mark.parametrize("ranks", [PIPELINE, INTERLEAVED, SEQUENCE], ids=NAMES.get)
def test_contiguous_layout_composes(ranks: Ranks) -> None:
    """A stage may begin between two GDN layers, where hidden states are stored contiguously."""
    config = {"linear_cp_layout": "contiguous"}
    cases = [Case("chunkwise", format, config=config) for format in FORMATS]
    check([*cases, Case("headwise", config=config)], ranks)


def test_four_parallelisms_at_once() -> None:
    check([Case("chunkwise"), Case("headwise", "sbhd")], CUBE)


@pytest.mark.parametrize("ranks", [PIPELINE, SEQUENCE], ids=NAMES.get)
def test_cross_entropy_of_a_model_like_qwen(ranks: Ranks) -> None:
    cases = [Case(mode, "thd", torch.float32, labels=True, config=REAL) for mode in MODES]
    check(cases, ranks)


@pytest.mark.parametrize(
    "ranks",
    [Ranks(pp=2, cp=2), Ranks(pp=2, cp=2, ep=2), Ranks(tp=2, sp=True, cp=2)],
    ids=["pp2-cp2", "pp2-cp2-ep2", "tp2-sp-cp2"],
)
def test_experts_between_the_layers(ranks: Ranks) -> None:
    check([Case("chunkwise", format, moe=True) for format in FORMATS], ranks)


FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
# What is recomputed, and the modules whose forward must therefore run more often. ("layernorm" is
# left out: Megatron-Core recomputes it with Transformer Engine only.)
RECOMPUTE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "full": ({**FULL, "recompute_method": "uniform"}, {"GatedDeltaNet", "CoreAttention"}),
    "block": ({**FULL, "recompute_method": "block"}, {"GatedDeltaNet"}),
    "norm": ({**SELECTIVE, "recompute_modules": ["gdn_norm_out"]}, {"RMSNorm"}),
    "selective": (
        {**SELECTIVE, "recompute_modules": ["gdn_norm_out", "core_attn", "mlp"]},
        {"RMSNorm", "CoreAttention", "MLP"},
    ),
}


@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(SEQUENCE, "chunkwise"), (PIPELINE, "headwise"), (CONTEXT, "all_gather")],
    ids=lambda value: NAMES.get(value, value),
)
def test_recompute_changes_no_bit(ranks: Ranks, mode: str) -> None:
    """Nor does it plan again, nor do the ranks of a group disagree on what they exchange."""
    cases = [Case(mode), *(Case(mode, config=config) for config, _ in RECOMPUTE.values())]
    results = check(cases, ranks)
    more_calls: dict[str, set[str]] = {name: set() for name in RECOMPUTE}
    for plain, *others in results:
        assert plain["plans"] == len(ROWS)
        for name, other in zip(RECOMPUTE, others, strict=True):
            differ = [n for n, g in plain["grads"].items() if not torch.equal(g, other["grads"][n])]
            assert not differ, (name, differ)
            assert other["plans"] == len(ROWS), name
            more_calls[name] |= (other["calls"] - plain["calls"]).keys()
    for name, (_, modules) in RECOMPUTE.items():
        assert modules <= more_calls[name], f"{name} recomputed {more_calls[name]} only"
    exchanged: dict[int, set[tuple[int, ...]]] = {}
    for parts in results:
        counts = tuple(part["collectives"] for part in parts)
        exchanged.setdefault(parts[0]["stage"], set()).add(counts)
    for counts_of_stage in exchanged.values():
        assert len(counts_of_stage) == 1, counts_of_stage
        [(plain, full, *_)] = counts_of_stage
        assert full > plain > 0, "full recompute exchanges again"
