# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch says about itself: its context-parallel group and its boundaries, checked."""

from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp.layout import check_boundaries

DENSE_FORMATS = ("sbhd", "bshd")
BOUNDARY_FIELDS = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
)


@cache
def single_rank_group() -> dist.ProcessGroup:
    """A group of this process alone. It has no backend: there is nobody to talk to."""
    # Its stubs ask for a store; the class itself offers this constructor too.
    return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]


def is_packed(packed_seq_params: PackedSeqParams | None) -> bool:
    """Whether input is packed (THD); a params object of another format does not make it so.

    Raises:
        ValueError: boundaries with no format or an unknown one: whether they count cannot be told,
            and a packed row taken for one sequence leaks between documents.
    """
    if packed_seq_params is None:
        return False
    layout = packed_seq_params.qkv_format
    if layout in DENSE_FORMATS or layout == "thd":
        return bool(layout == "thd")
    bounded = any(boundaries is not None for boundaries in boundaries_of(packed_seq_params))
    if layout is not None or bounded:
        raise ValueError(
            f"packed_seq_params has qkv_format {layout!r}"
            f"{' and boundaries' if bounded else ''}; use 'thd' for packed input, "
            f"{' or '.join(map(repr, DENSE_FORMATS))} for dense input"
        )
    return False


def resolve_cp_group(
    static_cp_group: dist.ProcessGroup | None, packed_seq_params: PackedSeqParams | None
) -> dist.ProcessGroup:
    """The context-parallel group of this micro-batch.

    Args:
        static_cp_group: the group the layer was built with; None means one rank.
        packed_seq_params: the micro-batch's parameters; ``cp_group`` and ``local_cp_size`` are read
            whatever its format.

    Returns:
        ``packed_seq_params.cp_group`` when present, else the constructor's group. Nothing is
        created and nothing communicates.

    Raises:
        ValueError: another type than ``PackedSeqParams``, ``cp_group`` without ``local_cp_size``,
            ``local_cp_size`` above 1 without a group (1 alone is Megatron's spelling of CP 1), or
            sizes that disagree.
    """
    static = single_rank_group() if static_cp_group is None else static_cp_group
    if packed_seq_params is None:
        return static
    # Not its class: some frameworks have one of their own with these fields.
    fields = ("qkv_format", "cp_group", "local_cp_size", *BOUNDARY_FIELDS)
    if not all(hasattr(packed_seq_params, field) for field in fields):
        raise ValueError(
            f"packed_seq_params is a {type(packed_seq_params).__name__}; it must be a "
            "megatron.core.packed_seq_params.PackedSeqParams, or have its fields"
        )
    group = packed_seq_params.cp_group
    size = packed_seq_params.local_cp_size
    if group is None and size is None:
        return static
    if group is None:
        if size == 1:
            return single_rank_group()
        raise ValueError(
            f"packed_seq_params.local_cp_size is {size} but cp_group is missing; set both, or "
            "neither to use the layer's own group, or local_cp_size=1 alone for CP 1"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"packed_seq_params.cp_group is {group!r}, not a process group: this rank belongs to "
            "no group of this micro-batch and must not run it"
        )
    if size is None:
        raise ValueError(
            f"packed_seq_params.cp_group has {group.size()} ranks but local_cp_size is missing; "
            "set both on every micro-batch"
        )
    if size != group.size():
        raise ValueError(
            f"packed_seq_params.local_cp_size is {size} but cp_group has {group.size()} ranks; "
            "they must agree"
        )
    return group


def resolve_cu_seqlens(packed_seq_params: PackedSeqParams) -> torch.Tensor:
    """The boundaries of the packed buffer as stored: the padded ones where they are given.

    Returns:
        ``[S + 1]`` integer tensor, as the micro-batch holds it.

    Raises:
        ValueError: boundaries missing or not dense tensors, or of q and kv and different.
    """
    for boundaries in boundaries_of(packed_seq_params):
        if boundaries is not None and not isinstance(boundaries, torch.Tensor):
            raise ValueError(
                f"boundaries in packed_seq_params must be tensors, got {type(boundaries).__name__}"
            )
        if boundaries is not None and (boundaries.is_meta or boundaries.layout != torch.strided):
            kind = "on the meta device" if boundaries.is_meta else f"of {boundaries.layout}"
            raise ValueError(
                f"boundaries in packed_seq_params are {kind}; give a dense tensor that holds them"
            )
    query = _side(packed_seq_params.cu_seqlens_q_padded, packed_seq_params.cu_seqlens_q)
    key = _side(packed_seq_params.cu_seqlens_kv_padded, packed_seq_params.cu_seqlens_kv)
    if query is None and key is None:
        raise ValueError(
            "packed (thd) input without boundaries: set cu_seqlens_q and cu_seqlens_kv (and the "
            "padded pair where sequences are padded) in packed_seq_params"
        )
    if query is None or key is None:
        missing = "cu_seqlens_q" if query is None else "cu_seqlens_kv"
        raise ValueError(
            f"packed (thd) input has no {missing}; linear attention needs q and kv boundaries, "
            "and needs them equal"
        )
    if query is not key and not torch.equal(query, key):
        raise ValueError(
            f"q and kv boundaries differ{_first_difference(query, key)}; linear attention needs "
            "them equal"
        )
    return query


def _first_difference(query: torch.Tensor, key: torch.Tensor) -> str:
    if query.shape != key.shape:
        return f": {query.numel()} and {key.numel()} of them"
    at = int((query != key).nonzero()[0])
    return f" at {at}: {int(query[at])} and {int(key[at])}"


def boundaries_of(params: PackedSeqParams) -> tuple[torch.Tensor | None, ...]:
    """The tensors of ``BOUNDARY_FIELDS``, None where one is not given."""
    return tuple(getattr(params, name) for name in BOUNDARY_FIELDS)


def check_real_boundaries(params: PackedSeqParams) -> None:
    """Raise ``ValueError`` unless every real sequence fits the room it is stored in."""
    real_q, real_kv = params.cu_seqlens_q, params.cu_seqlens_kv
    if (
        real_q is not None
        and real_kv is not None
        and real_q is not real_kv
        and not torch.equal(real_q, real_kv)
    ):
        raise ValueError(
            f"q and kv boundaries differ{_first_difference(real_q, real_kv)}; linear attention "
            "needs them equal"
        )
    for side in ("q", "kv"):
        padded = getattr(params, f"cu_seqlens_{side}_padded")
        real = getattr(params, f"cu_seqlens_{side}")
        if padded is None or real is None or padded is real:
            continue
        stored, lengths = (check_boundaries(x.cpu().numpy()) for x in (padded, real))
        if len(stored) != len(lengths):
            raise ValueError(
                f"cu_seqlens_{side} has {len(lengths) - 1} sequences but cu_seqlens_{side}_padded "
                f"has {len(stored) - 1}; they must describe the same sequences"
            )
        over = np.flatnonzero(np.diff(lengths) > np.diff(stored))
        if over.size:
            i = int(over[0])
            raise ValueError(
                f"cu_seqlens_{side}: sequence {i} has {np.diff(lengths)[i]} tokens but "
                f"cu_seqlens_{side}_padded gives it room for {np.diff(stored)[i]}"
            )


def _side(padded: torch.Tensor | None, real: torch.Tensor | None) -> torch.Tensor | None:
    return real if padded is None else padded
