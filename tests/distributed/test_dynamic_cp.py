# SPDX-License-Identifier: Apache-2.0
"""CP sizes that change from micro-batch to micro-batch, from the loader to the optimizer."""

import os
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import ContextParallelPlan, TransformerConfig
from megatron.linear_cp.data import (
    PackedBatch,
    make_packed_seq_params,
    pack_sequences,
    shard_batch,
    token_log_probs,
    token_loss_sum,
    unshard,
)
from megatron.linear_cp.dynamic_cp import (
    ContextParallelGroups,
    create_context_parallel_groups,
    length_multiple,
)
from megatron.linear_cp.micro_batch import packed_plan, plan_for
from megatron.linear_cp.modes import linear_cp_mode_runs
from megatron.linear_cp.plan import plan_builds
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

SIZES = (1, 2, 4)
MAX_TOKENS_PER_RANK = 48
# Per step, the documents of each micro-batch; their total decides the CP size.
STEPS: list[list[list[int]]] = [
    [[100, 70]],
    [[40, 3, 30], [61]],
    [[30], [12, 20], [41], [2, 2, 17]],
    [[9, 150]],
    [[44], [7, 8], [13], [31]],
]
LAYERS = 4


def make_model(**changes: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.linear_cp import get_gdn_hybrid_layer_spec

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        context_parallel_size=4,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_cp_mode="chunkwise",
        normalization="RMSNorm",
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        transformer_impl="local",
        **changes,
    )
    model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gdn_hybrid_layer_spec(config),
        vocab_size=64,
        max_sequence_length=256,
        position_embedding_type="rope",
    )


def loader(groups: ContextParallelGroups, step: list[list[int]], seed: int) -> list[PackedBatch]:
    """Whole micro-batches of one step, padded for the CP size that each will get."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for lengths in step:
        size = groups.choose(lengths, MAX_TOKENS_PER_RANK)
        documents = [torch.randint(1, 64, (n,), generator=generator) for n in lengths]
        batches.append(pack_sequences(documents, multiple_of=length_multiple(size)))
    return batches


def run_batch(
    model: Any, batch: PackedBatch, group: dist.ProcessGroup
) -> tuple[torch.Tensor, PackedBatch, ContextParallelPlan]:
    """As the README shows it: losses of this rank's tokens, those tokens, and the plan."""
    params = make_packed_seq_params(batch, group)
    plan = packed_plan(params, group)
    local = shard_batch(batch, plan)
    out = model(
        local.tokens, local.position_ids, None, labels=local.labels, packed_seq_params=params
    )
    return out, local, plan


def train(dynamic: bool) -> dict[str, Any]:
    """Train over ``STEPS``; ``dynamic`` chooses the CP size by length, else every size is 1."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    with cpu_cuda():
        parallel_state.initialize_model_parallel(context_parallel_size=4)
        groups = create_context_parallel_groups(SIZES)
        model = make_model()
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0), [ddp]
        )
        rank = dist.get_rank()
        process_groups = len(dist.distributed_c10d._world.pg_map)
        losses: list[list[float]] = []
        norms, log_probs = [], []
        chosen: Counter[tuple[str, int]] = Counter()
        runs_before, builds_before, plans = linear_cp_mode_runs(), plan_builds(), 0
        for number, step in enumerate(STEPS):
            batches = loader(groups, step, seed=number)
            size = max(groups.choose(lengths, MAX_TOKENS_PER_RANK) for lengths in step)
            if not dynamic:
                size = 1
            group = groups[size]
            # One micro-batch a group; at size 1 some ranks may have none.
            mine = rank // size if rank // size < len(batches) else None
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            total = torch.zeros(len(step), 2)
            if mine is not None:
                chosen["chunkwise", size] += LAYERS - 1
                plans += 1
                batch = batches[mine]
                before = describe(model)
                out, local, plan = run_batch(ddp, batch, group)
                loss, count = token_loss_sum(out, local.loss_mask)
                loss.backward()
                total[mine] = torch.tensor([float(loss), float(count)])
                assert describe(model) == before, "forward must change no attribute"
                whole = token_log_probs(out.detach(), local.loss_mask, plan)
                if plan.cp_rank == 0:
                    log_probs.append((number, mine, whole))
            ddp.finish_grad_sync()
            dist.all_reduce(total)
            ddp.scale_gradients(1.0 / float(total[:, 1].sum()))
            _, norm, _ = optimizer.step()
            losses.append((total[:, 0] / total[:, 1]).tolist())
            norms.append(float(norm))
        runs = linear_cp_mode_runs() - runs_before
        assert len(dist.distributed_c10d._world.pg_map) == process_groups, "forward made a group"
        return {
            "losses": losses,
            "norms": norms,
            "log_probs": log_probs,
            "runs": runs,
            "chosen": chosen,
            "plans": plan_builds() - builds_before - plans,
            "parameters": {n: p.detach().clone() for n, p in model.named_parameters()},
        }


def describe(model: torch.nn.Module) -> list[tuple[Any, ...]]:
    """Attributes of every module and of its config and groups, by identity."""
    seen = []
    for name, module in model.named_modules():
        for holder in (
            module,
            getattr(module, "config", None),
            getattr(module, "pg_collection", None),
        ):
            if holder is None:
                continue
            values = {k: id(v) for k, v in vars(holder).items() if not k.startswith("_")}
            seen.append((name, type(holder).__name__, tuple(sorted(values.items()))))
    return seen


def test_sizes_mixed_in_one_run_train_as_cp_one_does() -> None:
    dynamic = run_distributed(train, 4, True, timeout=240)
    static = run_distributed(train, 4, False, timeout=240)
    used = sum((result["chosen"] for result in dynamic), Counter())
    assert {size for _, size in used} == set(SIZES), "the run must use every size"
    base = static[0]
    for result in dynamic:
        for step, losses in enumerate(result["losses"]):
            assert losses == pytest.approx(base["losses"][step], rel=1e-4), f"step {step}"
        assert result["norms"] == pytest.approx(base["norms"], rel=1e-4)
        # What ran is what the loader chose, and nothing ran as another mode.
        assert result["runs"] == result["chosen"]
        assert result["plans"] == 0, "one plan a micro-batch, whatever the depth"
        for name, parameter in result["parameters"].items():
            torch.testing.assert_close(
                parameter, base["parameters"][name], rtol=2e-3, atol=2e-4, msg=name
            )
    by_key = [{(s, m): x for r in run for s, m, x in r["log_probs"]} for run in (dynamic, static)]
    assert by_key[0].keys() == by_key[1].keys()
    for key, whole in by_key[0].items():
        # Stored lengths differ with the CP size's padding only: here both use the loader's.
        torch.testing.assert_close(whole, by_key[1][key], rtol=1e-3, atol=1e-3)


def count_plans(recompute: dict[str, Any]) -> tuple[int, int]:
    """Plans built, and GDN layers run, by two micro-batches, forward and backward."""
    with cpu_cuda():
        parallel_state.initialize_model_parallel(context_parallel_size=4)
        model = make_model(**recompute)
        group = parallel_state.get_context_parallel_group()
        builds, runs = plan_builds(), linear_cp_mode_runs()
        for lengths in ([16, 24], [40]):
            batch = pack_sequences([torch.arange(1, n + 1) for n in lengths], multiple_of=8)
            out, _, _ = run_batch(model, batch, group)
            out.sum().backward()
        return plan_builds() - builds, sum((linear_cp_mode_runs() - runs).values())


@pytest.mark.parametrize("recompute", [False, True])
def test_one_plan_a_micro_batch_whatever_depth_and_recompute(recompute: bool) -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    linear_layers = LAYERS - 1
    expected = (2, 2 * linear_layers * (2 if recompute else 1))
    assert run_distributed(count_plans, 4, full if recompute else {}) == [expected] * 4


def same_module_twice() -> dict[str, Any]:
    """One module at CP 1, 2, 4, 1: the last output must be the first, bit by bit."""
    with cpu_cuda():
        parallel_state.initialize_model_parallel(context_parallel_size=4)
        groups = create_context_parallel_groups(SIZES)
        model = make_model()
        batch = pack_sequences([torch.arange(1, 33), torch.arange(1, 25)], multiple_of=8)
        outputs = []
        for size in (1, 2, 4, 1):
            out, _, plan = run_batch(model, batch, groups[size])
            outputs.append(unshard(out.detach(), plan))
        return {"outputs": outputs}


def test_one_module_serves_every_size_and_comes_back_bitwise() -> None:
    for result in run_distributed(same_module_twice, 4):
        first, at_two, at_four, last = result["outputs"]
        assert torch.equal(first, last)
        torch.testing.assert_close(at_two, first, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(at_four, first, rtol=1e-4, atol=1e-4)


def make_groups(hybrid: bool, sizes: tuple[int, ...]) -> dict[int, tuple[list[int], bool]]:
    parallel_state.initialize_model_parallel(
        context_parallel_size=2, hybrid_context_parallel=hybrid
    )
    before = dict(dist.distributed_c10d._world.pg_map)
    groups = create_context_parallel_groups(sizes)
    return {
        size: (dist.get_process_group_ranks(groups[size]), groups[size] in before)
        for size in groups.sizes
    }


@pytest.mark.parametrize("hybrid", [False, True])
def test_groups_are_aligned_blocks_and_reuse_megatron_core(hybrid: bool) -> None:
    for rank, made in enumerate(run_distributed(make_groups, 4, hybrid, SIZES)):
        for size in SIZES:
            ranks, reused = made[size]
            first = rank - rank % size
            assert ranks == list(range(first, first + size))
            # CP groups and the DP x CP group exist anyway; size 1 never does.
            assert reused == (size > 1)


def make_bad_groups(sizes: tuple[int, ...]) -> None:
    create_context_parallel_groups(sizes, ranks=range(dist.get_world_size()))


@pytest.mark.parametrize("sizes", [(3,), (0, 2), (8,), ()])
def test_group_sizes_that_do_not_divide(sizes: tuple[int, ...]) -> None:
    errors = run_distributed(make_bad_groups, 4, sizes, return_exceptions=True)
    assert all(isinstance(e, ValueError) and "divide" in str(e) for e in errors), errors


def test_choice_by_padded_length() -> None:
    groups = ContextParallelGroups({n: dist.ProcessGroup(0, n) for n in SIZES})
    chosen = [groups.choose([n], 12) for n in (1, 12, 13, 24, 25, 48)]
    assert chosen == [1, 1, 2, 2, 4, 4]
    # Thirteen sequences of one token become 52 tokens at CP 2 and 104 at CP 4.
    assert groups.choose([1] * 13, 26) == 1
    with pytest.raises(ValueError, match="13 tokens in 13 sequences, padded, leave 26 on a rank"):
        groups.choose([1] * 13, 12)
    with pytest.raises(ValueError, match=r"leave 14 on a rank at the largest .* size 4, over the"):
        groups.choose([49], 12)
    with pytest.raises(
        ValueError, match=r"no context-parallel group of size 8 .* there are 1, 2, 4"
    ):
        groups[8]
    with pytest.raises(ValueError, match="given for CP size 2 has 4 ranks"):
        ContextParallelGroups({2: dist.ProcessGroup(0, 4)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"cp_size": 1}, 1),
        ({"cp_size": 4}, 8),
        ({"cp_size": 4, "layout": "contiguous"}, 4),
        ({"cp_size": 2, "tensor_model_parallel_size": 4}, 8),
        ({"cp_size": 2, "tensor_model_parallel_size": 3}, 12),
        ({"cp_size": 1, "tensor_model_parallel_size": 2}, 2),
        ({"cp_size": 2, "alignment": 16}, 32),
    ],
)
def test_length_multiple(arguments: dict, expected: int) -> None:
    assert length_multiple(**arguments) == expected


def plan_with_odd_rank(check: bool, case: str) -> None:
    """Rank 2 hands in something else than its peers."""
    os.environ["LINEAR_CP_CHECK_PEERS"] = "1" if check else "0"
    odd = dist.get_rank() == 2

    def packed(row: list[int], dtype: torch.dtype = torch.int32) -> PackedSeqParams:
        cu = torch.tensor(row, dtype=dtype)
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)

    def plan(params: PackedSeqParams, local_tokens: int = 6) -> None:
        plan_for(params, dist.group.WORLD, local_tokens=local_tokens, batch=1, layout="contiguous")

    last, mine, tokens = packed([0, 16, 24]), packed([0, 8, 24]), 6
    match case:
        case "boundaries":
            mine = last if odd else mine
        case "stale":  # the last micro-batch again, whose plan is there already
            plan(last)
            mine = last if odd else mine
        case "in place":
            plan(mine)
            if odd:
                mine.cu_seqlens_q[1] = 16
        case "format":
            mine.qkv_format = "THD" if odd else "thd"
        case "dtype":
            mine = packed([0, 8, 24], torch.float32) if odd else mine
        case "length":
            tokens = 5 if odd else 6
    plan(mine, tokens)


ODD_RANKS = {
    "boundaries": "different cu_seqlens_kv: rank 0 has [0, 8, 24], rank 2 has [0, 16, 24]",
    "stale": "different cu_seqlens_kv: rank 0 has [0, 8, 24], rank 2 has [0, 16, 24]",
    "in place": "different cu_seqlens_kv: rank 0 has [0, 8, 24], rank 2 has [0, 16, 24]",
    "format": "different qkv_format: rank 0 has thd, rank 2 has THD",
    "dtype": "dtype of cu_seqlens_kv: rank 0 has torch.int32, rank 2 has torch.float32",
    "length": "different local tokens: rank 0 has 6, rank 2 has 5",
}


@pytest.mark.parametrize("case", ODD_RANKS)
def test_a_rank_with_another_micro_batch_is_found_on_request(case: str) -> None:
    errors = run_distributed(plan_with_odd_rank, 4, True, case, return_exceptions=True, timeout=60)
    for error in errors:
        assert isinstance(error, ValueError)
        assert ODD_RANKS[case] in str(error)


def test_peers_are_not_asked_by_default() -> None:
    assert run_distributed(plan_with_odd_rank, 4, False, "boundaries") == [None] * 4
