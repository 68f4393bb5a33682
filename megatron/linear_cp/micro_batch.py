# SPDX-License-Identifier: Apache-2.0
"""The plan of a micro-batch: built when it is first needed, and kept with it for every layer."""

import os
import weakref
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.cuda_graphs import is_graph_capturing

from megatron.linear_cp.packed_seq_params import (
    BOUNDARY_FIELDS,
    DENSE_FORMATS,
    boundaries_of,
    check_real_boundaries,
    is_packed,
    resolve_cu_seqlens,
)
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.segments import is_capturing, keep_for_graphs

_PLANS_ATTRIBUTE = "_linear_cp_plans"
_MAX_DENSE_PLANS = 32
CHECK_PEERS_VARIABLE = "LINEAR_CP_CHECK_PEERS"


def plan_for(
    packed_seq_params: PackedSeqParams | None,
    cp_group: dist.ProcessGroup,
    *,
    local_tokens: int,
    batch: int,
    layout: str,
    conv_kernel_size: int = 4,
) -> ContextParallelPlan:
    """The plan of this micro-batch, built on first use and then kept with it.

    A packed micro-batch keeps its plan on its ``PackedSeqParams``; a change of the boundaries in
    place, other boundaries, or another group of the same size get a new plan. Plans of dense input
    live in a small cache keyed by group, length, batch and layout.

    Args:
        packed_seq_params: the micro-batch's parameters, or None for dense input.
        cp_group: its group, from :func:`megatron.linear_cp.resolve_cp_group`.
        local_tokens: tokens of one sample (or of the packed buffer) that this rank stores.
        batch: samples; packed input has one.
        layout: ``"zigzag"`` or ``"contiguous"``.
        conv_kernel_size: taps of the causal convolution.

    Whether all ranks of a group were given the same micro-batch is compared on every call, at the
    price of a collective and a read of the boundaries, where the environment variable
    ``LINEAR_CP_CHECK_PEERS`` is 1 on all of them. It finds any difference between ranks that agree
    on the group.

    While a CUDA graph is captured nothing can be read from the GPU: the plan of packed input must
    exist by then, and the graph holds for its boundaries only. A replay after a change of
    boundaries on the GPU fails with a device-side assertion; boundaries on the host it cannot see.

    Raises:
        ValueError: boundaries that are malformed, differ between q and kv, cannot be cut, or do not
            end at ``local_tokens * cp_size``; packed input with a batch above 1; a CUDA graph that
            cannot be captured. The same on every rank, before any collective.
    """
    if is_capturing():
        _check_capture(cp_group)
    if os.environ.get(CHECK_PEERS_VARIABLE) == "1":
        # Before any check of this rank's own: a rank that raises alone leaves the others waiting.
        _check_peers(packed_seq_params, cp_group, local_tokens, batch, layout)
    packed = is_packed(packed_seq_params)
    if packed and packed_seq_params is not None:
        if batch != 1:
            raise ValueError(
                f"packed (thd) input must have a batch of 1, got {batch}: pack the samples into "
                "one buffer with boundaries between them"
            )
        plan = _packed_plan(packed_seq_params, cp_group, layout, conv_kernel_size)
        if plan.total_tokens != local_tokens * cp_group.size():
            raise ValueError(
                f"the boundaries end at {plan.total_tokens} but the packed buffer holds "
                f"{local_tokens} tokens on each of {cp_group.size()} ranks = "
                f"{local_tokens * cp_group.size()}; they must cover all of it (give padded "
                "boundaries where the buffer is padded)"
            )
        return plan
    return _dense_plan(cp_group, local_tokens * cp_group.size(), batch, layout, conv_kernel_size)


def packed_plan(
    packed_seq_params: PackedSeqParams,
    cp_group: dist.ProcessGroup,
    *,
    layout: str = "zigzag",
    conv_kernel_size: int = 4,
) -> ContextParallelPlan:
    """The plan of a packed micro-batch, for the loader that shards it; the layers then reuse it.

    Args:
        packed_seq_params: with ``qkv_format="thd"`` and boundaries.
        cp_group: the group of the micro-batch.
        layout: ``"zigzag"`` or ``"contiguous"``, as the model's config declares.
        conv_kernel_size: taps of the causal convolution.

    Raises:
        ValueError: params that are not packed, or boundaries that do not fit.
    """
    if not is_packed(packed_seq_params):
        raise ValueError(
            f"packed_plan needs qkv_format 'thd', got {packed_seq_params.qkv_format!r}"
        )
    return _packed_plan(packed_seq_params, cp_group, layout, conv_kernel_size)


def physical_packed_seq_params(
    packed_seq_params: PackedSeqParams, plan: ContextParallelPlan
) -> PackedSeqParams:
    """The same micro-batch with boundaries that cover every stored row, padding included.

    For attention kernels that leave the rows outside ``cu_seqlens`` unwritten, as Transformer
    Engine's do: what they leave there would reach the next linear-attention layer. With the padded
    boundaries in the place of the real ones padding attends like tokens at the end of its own
    sequence, which the causal mask hides from all real rows.

    Args:
        packed_seq_params: with padded boundaries or without.
        plan: of the micro-batch.

    Returns:
        The argument itself where nothing is padded; else a copy, the same one on every call.
    """
    stored_q, stored_kv = (
        packed_seq_params.cu_seqlens_q_padded,
        packed_seq_params.cu_seqlens_kv_padded,
    )
    if stored_q is None and stored_kv is None:
        return packed_seq_params
    kept = _plans_of(packed_seq_params)
    if kept.physical is not None and kept.physical[0] is plan:
        return kept.physical[1]
    boundaries = stored_kv if stored_q is None else stored_q
    longest = int(np.diff(plan.boundaries).max(initial=0))
    copied = replace(
        packed_seq_params,
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    kept.physical = (plan, copied)
    return copied


@dataclass(frozen=True)
class _Kept:
    """A plan and what it was built from, to notice that it is stale."""

    plan: ContextParallelPlan
    group: "weakref.ref[dist.ProcessGroup]"
    tensors: tuple[torch.Tensor | None, ...]
    marks: tuple["torch.Tensor | _DeviceMark | None", ...]

    def fits(self, group: dist.ProcessGroup, tensors: tuple[torch.Tensor | None, ...]) -> bool:
        return (
            self.group() is group
            and all(a is b for a, b in zip(self.tensors, tensors, strict=True))
            and all(_unchanged(t, mark) for t, mark in zip(self.tensors, self.marks, strict=True))
        )


class _Plans(dict[str, _Kept]):
    """The plans of one micro-batch by layout; a copy or pickle of the micro-batch starts anew.

    Attributes:
        physical: a plan and the params of :func:`physical_packed_seq_params` for it.
    """

    physical: tuple[ContextParallelPlan, PackedSeqParams] | None = None

    def __reduce__(self) -> tuple[type["_Plans"], tuple[()]]:
        return _Plans, ()


def _plans_of(params: PackedSeqParams) -> _Plans:
    plans: _Plans = params.__dict__.setdefault(_PLANS_ATTRIBUTE, _Plans())
    return plans


def _packed_plan(
    params: PackedSeqParams, group: dist.ProcessGroup, layout: str, conv_kernel_size: int
) -> ContextParallelPlan:
    kept = _plans_of(params)
    tensors = boundaries_of(params)
    entry = kept.get(layout)
    if entry is None or not entry.fits(group, tensors):
        same = next((other for other in kept.values() if other.fits(group, tensors)), None)
        if same is not None:
            # The micro-batch was checked and read already, in another layout.
            entry = replace(same, plan=same.plan.in_layout(layout))
        else:
            _refuse_reading_in_capture()
            boundaries = resolve_cu_seqlens(params)
            check_real_boundaries(params)
            plan = ContextParallelPlan.build(
                boundaries, group, layout=layout, conv_kernel_size=conv_kernel_size
            )
            entry = _Kept(plan, weakref.ref(group), tensors, tuple(_mark(t) for t in tensors))
        kept[layout] = entry
    if is_capturing():
        for tensor, mark in zip(tensors, entry.marks, strict=True):
            if tensor is not None and isinstance(mark, _DeviceMark):
                _guard_replays(tensor, mark.values)
    return entry.plan


def _check_capture(group: dist.ProcessGroup) -> None:
    """Raise ``ValueError`` where this group's exchanges cannot be part of a CUDA graph."""
    if group.size() == 1:
        return
    if os.environ.get(CHECK_PEERS_VARIABLE) == "1":
        raise ValueError(
            f"{CHECK_PEERS_VARIABLE}=1 compares the ranks' boundaries on the host, which cannot be "
            "part of a CUDA graph; unset it to capture one"
        )
    backends = str(dist.get_backend_config(group))
    if "cuda:nccl" not in backends:
        raise ValueError(
            f"a context-parallel group of {group.size()} ranks on {backends} exchanges through "
            "host memory, which cannot be part of a CUDA graph; capture with NCCL, or at CP 1"
        )


def _refuse_reading_in_capture() -> None:
    if is_graph_capturing():
        raise ValueError(
            "Megatron-Core's CUDA graphs of layers (cuda_graph_impl='local') put buffers of their "
            "own in the place of packed (thd) boundaries, which linear attention has to know when "
            "it is captured; set cuda_graph_impl='none' for packed input"
        )
    if is_capturing():
        raise ValueError(
            "the boundaries of packed (thd) input cannot be read while a CUDA graph is captured: "
            "run forward and backward once before the capture with the same PackedSeqParams "
            "object, unchanged, and capture with it; the graph then holds for these boundaries"
        )


def _guard_replays(boundaries: torch.Tensor, captured: torch.Tensor) -> None:
    """Record a check, in the CUDA graph, that the boundaries are those that it was made for."""
    keep_for_graphs(captured)
    torch._assert_async(
        (boundaries == captured).all(),
        "packed boundaries changed after the CUDA graph was captured; capture again",
    )


def _check_peers(
    params: PackedSeqParams | None,
    group: dist.ProcessGroup,
    local_tokens: int,
    batch: int,
    layout: str,
) -> None:
    """Raise ``ValueError`` on every rank if one has another micro-batch than rank 0."""
    if group.size() == 1:
        return
    mine: dict[str, Any] = {"layout": layout, "local tokens": local_tokens, "batch": batch}
    if params is not None and params.qkv_format not in DENSE_FORMATS:
        for name, boundaries in zip(BOUNDARY_FIELDS, boundaries_of(params), strict=True):
            if boundaries is not None:
                mine["qkv_format"] = params.qkv_format
                mine[name] = boundaries
            if isinstance(boundaries, torch.Tensor):
                mine[name] = boundaries.tolist()
                mine[f"dtype of {name}"] = str(boundaries.dtype)
    everyone: list[dict[str, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        for name in sorted({*theirs, *everyone[0]}):
            if theirs.get(name) != everyone[0].get(name):
                raise ValueError(
                    f"the ranks of one context-parallel group have different {name}: rank 0 has "
                    f"{everyone[0].get(name)}, rank {rank} has {theirs.get(name)}; every rank of a "
                    "group must be given the same micro-batch"
                )


@dataclass(frozen=True)
class _DeviceMark:
    """Of boundaries on a device: their version, and what they were, which only a graph compares."""

    version: int | None
    values: torch.Tensor


def _mark(tensor: torch.Tensor | None) -> torch.Tensor | _DeviceMark | None:
    """What shows later that the tensor was changed in place."""
    if tensor is None:
        return None
    values = tensor.detach().clone()
    if tensor.device.type == "cpu":
        return values
    # Reading a device tensor would wait for it. Inference tensors count no versions: never reuse.
    return _DeviceMark(None if tensor.is_inference() else tensor._version, values)


def _unchanged(tensor: torch.Tensor | None, mark: torch.Tensor | _DeviceMark | None) -> bool:
    if tensor is None or mark is None:
        return True
    if isinstance(mark, torch.Tensor):
        return torch.equal(tensor, mark)
    return not tensor.is_inference() and tensor._version == mark.version


# Keyed by group first, weakly: the cache must not outlive, or keep alive, a process group.
_dense_plans: "weakref.WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Any, ContextParallelPlan]]"
_dense_plans = weakref.WeakKeyDictionary()


def _dense_plan(
    group: dist.ProcessGroup, seq_len: int, batch: int, layout: str, conv_kernel_size: int
) -> ContextParallelPlan:
    plans = _dense_plans.setdefault(group, OrderedDict())
    key = (seq_len, batch)
    if key not in plans:
        plans[key] = ContextParallelPlan.build_dense(
            seq_len, batch, group, layout=layout, conv_kernel_size=conv_kernel_size
        )
        if len(plans) > _MAX_DENSE_PLANS:
            plans.popitem(last=False)
    plans.move_to_end(key)
    return plans[key].in_layout(layout)
