# SPDX-License-Identifier: Apache-2.0
"""The group, the boundaries and the plan of a micro-batch."""

import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import resolve_cp_group
from megatron.linear_cp.micro_batch import packed_plan, plan_for
from megatron.linear_cp.packed_seq_params import is_packed, resolve_cu_seqlens, single_rank_group
from megatron.linear_cp.plan import plan_builds


def group_of(size: int, rank: int = 0) -> dist.ProcessGroup:
    """A group that knows its size and nothing else: enough wherever nothing is sent."""
    return dist.ProcessGroup(rank, size)


def packed(cu: list[int], **changes: Any) -> PackedSeqParams:
    boundaries = torch.tensor(cu, dtype=torch.int32)
    settings: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": boundaries,
        "cu_seqlens_kv": boundaries.clone(),
        "max_seqlen_q": 64,
        "max_seqlen_kv": 64,
    }
    return PackedSeqParams(**settings | changes)


def plan(
    params: PackedSeqParams | None, group: dist.ProcessGroup, tokens: int, **changes: Any
) -> Any:
    settings: dict[str, Any] = {"local_tokens": tokens, "batch": 1, "layout": "zigzag"}
    return plan_for(params, group, **settings | changes)


class TestGroup:
    def test_constructor_group_when_the_micro_batch_names_none(self) -> None:
        static = group_of(2)
        assert resolve_cp_group(static, None) is static
        assert resolve_cp_group(static, packed([0, 8])) is static

    def test_micro_batch_group_wins(self) -> None:
        static, runtime = group_of(2), group_of(4)
        params = packed([0, 8], cp_group=runtime, local_cp_size=4)
        assert resolve_cp_group(static, params) is runtime

    def test_group_of_a_params_object_that_is_not_thd_counts(self) -> None:
        runtime = group_of(4)
        params = PackedSeqParams(qkv_format="sbhd", cp_group=runtime, local_cp_size=4)
        assert resolve_cp_group(group_of(2), params) is runtime
        assert not is_packed(params)

    def test_size_one_alone_is_cp_one(self) -> None:
        group = resolve_cp_group(group_of(4), packed([0, 8], local_cp_size=1))
        assert (group.size(), group.rank()) == (1, 0)

    def test_not_a_group(self) -> None:
        params = packed([0, 8], cp_group=dist.GroupMember.NON_GROUP_MEMBER, local_cp_size=2)
        with pytest.raises(ValueError, match="belongs to no group of this micro-batch"):
            resolve_cp_group(group_of(2), params)

    def test_no_static_group_is_cp_one(self) -> None:
        assert resolve_cp_group(None, None) is single_rank_group()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"local_cp_size": 4}, "local_cp_size is 4 but cp_group is missing"),
            ({"cp_group": group_of(4)}, "cp_group has 4 ranks but local_cp_size is missing"),
            ({"cp_group": group_of(4), "local_cp_size": 2}, "is 2 but cp_group has 4 ranks"),
        ],
    )
    def test_metadata_that_does_not_agree(self, changes: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            resolve_cp_group(group_of(2), packed([0, 8], **changes))


class TestBoundaries:
    def test_padded_ones_describe_storage(self) -> None:
        padded = torch.tensor([0, 16], dtype=torch.int32)
        params = packed([0, 13], cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
        assert resolve_cu_seqlens(params) is padded
        assert plan(params, group_of(2), 8).total_tokens == 16

    def test_missing(self) -> None:
        with pytest.raises(ValueError, match="without boundaries"):
            plan(packed([0, 8], cu_seqlens_q=None, cu_seqlens_kv=None), group_of(2), 4)
        with pytest.raises(ValueError, match="no cu_seqlens_kv"):
            plan(packed([0, 8], cu_seqlens_kv=None), group_of(2), 4)

    def test_q_and_kv_differ(self) -> None:
        other = torch.tensor([0, 4, 8], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"differ: 2 and 3 of them"):
            plan(packed([0, 8], cu_seqlens_kv=other), group_of(2), 4)

    def test_do_not_end_at_the_buffer(self) -> None:
        with pytest.raises(
            ValueError, match="end at 8 but the packed buffer holds 6 tokens on each of 2"
        ):
            plan(packed([0, 8]), group_of(2), 6)

    def test_real_q_and_kv_differ_behind_equal_padding(self) -> None:
        padded = torch.tensor([0, 40])
        params = packed([0, 30], cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
        params.cu_seqlens_kv = torch.tensor([0, 3])
        with pytest.raises(ValueError, match=r"differ at 1: 30 and 3"):
            plan(params, group_of(2), 20)

    @pytest.mark.parametrize("qkv_format", [None, "THD", "packed"])
    def test_boundaries_without_a_known_format(self, qkv_format: str | None) -> None:
        """Taken for dense input, the row would leak from one document into the next."""
        with pytest.raises(ValueError, match="and boundaries; use 'thd' for packed input"):
            plan(packed([0, 8], qkv_format=qkv_format), group_of(2), 4)

    def test_params_that_bring_a_group_only(self) -> None:
        assert not is_packed(PackedSeqParams(local_cp_size=1))

    def test_boundaries_that_are_no_tensor(self) -> None:
        with pytest.raises(ValueError, match="must be tensors, got list"):
            plan(packed([0, 8], cu_seqlens_q=[0, 8]), group_of(2), 4)

    def test_batch_above_one(self) -> None:
        with pytest.raises(ValueError, match="batch of 1, got 2"):
            plan(packed([0, 8]), group_of(2), 4, batch=2)

    def test_floating_boundaries(self) -> None:
        cu = torch.tensor([0.0, 8.0])
        with pytest.raises(ValueError, match="integers"):
            plan(packed([0], cu_seqlens_q=cu, cu_seqlens_kv=cu), group_of(2), 4)

    def test_length_that_does_not_divide(self) -> None:
        with pytest.raises(ValueError, match="sequence 0 of length 12"):
            plan(packed([0, 12, 32]), group_of(4), 8)

    def test_dense_format_ignores_boundaries(self) -> None:
        params = packed([0, 3], qkv_format="sbhd")
        assert plan(params, group_of(2), 8, batch=3).boundaries.tolist() == [0, 16, 32, 48]


class TestReuse:
    def test_loader_and_layers_share_a_plan(self) -> None:
        params, group = packed([0, 8, 24]), group_of(2)
        assert packed_plan(params, group) is plan(params, group, 12)
        with pytest.raises(ValueError, match="needs qkv_format 'thd', got 'sbhd'"):
            packed_plan(packed([0, 8], qkv_format="sbhd"), group)

    def test_one_plan_for_all_layers(self) -> None:
        params, group = packed([0, 8, 24]), group_of(2)
        before = plan_builds()
        plans = {id(plan(params, group, 12)) for _ in range(6)}
        assert len(plans) == 1
        assert plan_builds() == before + 1

    def test_other_boundaries_of_the_same_total(self) -> None:
        group = group_of(2)
        first, second = plan(packed([0, 8, 24]), group, 12), plan(packed([0, 24]), group, 12)
        assert first is not second
        assert second.boundaries.tolist() == [0, 24]

    def test_change_in_place_is_noticed(self) -> None:
        params, group = packed([0, 8, 24]), group_of(2)
        first = plan(params, group, 12)
        params.cu_seqlens_q[1] = 16
        params.cu_seqlens_kv[1] = 16
        second = plan(params, group, 12)
        assert second is not first
        assert second.boundaries.tolist() == [0, 16, 24]

    def test_replaced_tensor_is_noticed(self) -> None:
        params, group = packed([0, 8, 24]), group_of(2)
        first = plan(params, group, 12)
        params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 24])
        assert plan(params, group, 12) is not first

    def test_another_group_of_the_same_size(self) -> None:
        params, one, two = packed([0, 8, 24]), group_of(2, 0), group_of(2, 1)
        assert plan(params, one, 12).cp_rank == 0
        assert plan(params, two, 12).cp_rank == 1

    def test_layouts_are_kept_apart(self) -> None:
        params, group = packed([0, 8, 24]), group_of(2)
        assert plan(params, group, 12).layout == "zigzag"
        assert plan(params, group, 12, layout="contiguous").layout == "contiguous"

    def test_dense_plans_are_kept_by_length_batch_layout_and_group(self) -> None:
        group = group_of(2)
        first = plan(None, group, 12, batch=3)
        assert plan(None, group, 12, batch=3) is first
        assert plan(None, group, 24, batch=3) is not first
        assert plan(None, group, 12, batch=2) is not first
        assert plan(None, group, 12, batch=3, layout="contiguous") is not first
        assert plan(None, group_of(2, 1), 12, batch=3).cp_rank == 1

    def test_dense_cache_is_bounded_and_lets_groups_go(self) -> None:
        group = group_of(2)
        first = plan(None, group, 4)
        for tokens in range(6, 120, 2):
            plan(None, group, tokens)
        assert plan(None, group, 4) is not first
        gone = weakref.ref(group)
        del group
        gc.collect()
        assert gone() is None

    def test_plan_does_not_keep_a_group_alive(self) -> None:
        params, group = packed([0, 8]), group_of(2)
        kept = plan(params, group, 4)
        del group
        gc.collect()
        with pytest.raises(RuntimeError, match="was destroyed"):
            _ = kept.cp_group

    def test_params_with_a_plan_still_pickle(self) -> None:
        params = packed([0, 8])
        plan(params, single_rank_group(), 8)
        twin = pickle.loads(pickle.dumps(params))
        assert plan(twin, single_rank_group(), 8).total_tokens == 8
