# SPDX-License-Identifier: Apache-2.0
"""FLA's functions as the installed release has them, and the tables that they are launched with."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.linear_cp.ops import fla_capabilities
from megatron.linear_cp.ops.triton_summary import CHUNK
from megatron.linear_cp.segments import WANTS_BOTH, HostTable, IntArray, Segments

# Float32 inputs mean that accuracy is wanted: Triton's own default, tf32, keeps 10 bits.
FLOAT32_PRECISION = "tf32x3"
_MAX_GRID = 65535  # y and z of a launch grid; FLA 0.4.2 puts segments x heads and chunks there


@dataclass(frozen=True, eq=False)
class Part:
    """A run of segments that fits one launch of each kernel: all of them, nearly always."""

    first_segment: int
    last_segment: int
    first_token: int
    last_token: int
    cu_seqlens: HostTable
    chunk_indices: HostTable
    chunk_offsets: HostTable
    all_wanted: HostTable


@dataclass(frozen=True)
class Kernels:
    """FLA's functions and the unit of the cumulative decay they expect."""

    cumsum: Callable[..., Any]
    states: Callable[..., Any]
    outputs: Callable[..., Any]
    dv_local: Callable[..., Any]
    dstates: Callable[..., Any]
    log2_decay: bool
    grouped_value_heads: bool
    int64_offsets: bool


def _only_known(function: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the keywords that this release's function does not have."""
    known = inspect.signature(function).parameters

    def call(**kwargs: Any) -> Any:
        return function(**{name: value for name, value in kwargs.items() if name in known})

    return call


@functools.cache
def kernels() -> Kernels:
    """The functions of the installed release.

    Raises:
        FlaUnavailableError: it lacks one of them.
    """
    capabilities = fla_capabilities.require("rule")
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.utils import chunk_local_cumsum

    return Kernels(
        cumsum=chunk_local_cumsum,
        states=_only_known(chunk_delta_h.chunk_gated_delta_rule_fwd_h),
        outputs=_only_known(chunk_o.chunk_fwd_o),
        dv_local=_only_known(chunk_o.chunk_bwd_dv_local),
        dstates=_only_known(chunk_delta_h.chunk_gated_delta_rule_bwd_dhu),
        log2_decay=capabilities.log2_decay,
        grouped_value_heads=capabilities.grouped_value_heads,
        int64_offsets=capabilities.int64_offsets,
    )


@contextlib.contextmanager
def products_of(dtype: torch.dtype) -> Iterator[None]:
    """Compile float32 products exactly; Triton reads this variable when it compiles a kernel.

    A float32 specialization of an FLA kernel that the process compiled earlier, by a direct call
    of FLA's own functions, keeps the precision it was compiled with.
    """
    if dtype != torch.float32:
        yield
        return
    before = os.environ.get("TRITON_F32_DEFAULT")
    os.environ["TRITON_F32_DEFAULT"] = FLOAT32_PRECISION
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_F32_DEFAULT"]
        else:
            os.environ["TRITON_F32_DEFAULT"] = before


def _make_part(offsets: IntArray, first: int, last: int) -> Part:
    cu_seqlens = offsets[first : last + 1] - offsets[first]
    chunks = -(-np.diff(cu_seqlens) // CHUNK)
    chunk_offsets = np.concatenate([[0], np.cumsum(chunks)])
    owner = np.repeat(np.arange(len(chunks)), chunks)
    chunk_indices = np.stack([owner, np.arange(len(owner)) - chunk_offsets[owner]], axis=1)
    return Part(
        first_segment=first,
        last_segment=last,
        first_token=int(offsets[first]),
        last_token=int(offsets[last]),
        cu_seqlens=HostTable(cu_seqlens),
        chunk_indices=HostTable(chunk_indices),
        chunk_offsets=HostTable(chunk_offsets),
        all_wanted=HostTable(np.full(last - first, WANTS_BOTH)),
    )


def split_for_launch(segments: Segments, num_heads: int, max_tokens: int | None) -> list[Part]:
    """Cut a list of segments where a kernel launch would grow too large.

    Args:
        segments: of the micro-batch; at least one.
        num_heads: value heads; segments x heads and chunks are limited by the launch grid.
        max_tokens: limit of the kernels' own offsets, ``None`` when they have none.

    Raises:
        ValueError: one segment alone is over ``max_tokens``.
    """
    offsets = segments.boundaries
    chunks = np.concatenate([[0], np.cumsum(-(-segments.lengths // CHUNK))])
    max_segments = max(1, _MAX_GRID // num_heads)
    parts: list[Part] = []
    first = 0
    while first < segments.num_segments:
        last = min(first + max_segments, segments.num_segments)
        # The last boundary that keeps chunks and tokens within bounds, one segment at least.
        last = min(last, int(np.searchsorted(chunks, chunks[first] + _MAX_GRID, "right")) - 1)
        if max_tokens is not None:
            last = min(
                last, int(np.searchsorted(offsets, offsets[first] + max_tokens, "right")) - 1
            )
        if last <= first:
            length = int(offsets[first + 1] - offsets[first])
            limit = _MAX_GRID * CHUNK if max_tokens is None else min(max_tokens, _MAX_GRID * CHUNK)
            raise ValueError(
                f"segment {first} has {length:,} tokens; FLA's kernels with {num_heads} value "
                f"heads address at most {limit:,}. Use a larger context parallel group, or "
                "fla-core >= 0.6.0 if this is an earlier release"
            )
        parts.append(_make_part(offsets, first, last))
        first = last
    return parts


def parts_of(
    segments: Segments, num_heads: int, key_dim: int, value_dim: int, kernels: Kernels
) -> list[Part]:
    """:func:`split_for_launch` for one release and head shape, computed once per micro-batch."""
    max_tokens = None
    if not kernels.int64_offsets:
        max_tokens = (2**31 - 1) // (num_heads * max(key_dim, value_dim, CHUNK))
    return segments.cached(
        ("fla_rule", num_heads, max_tokens),
        lambda: split_for_launch(segments, num_heads, max_tokens),
    )


def shared_arguments(part: Part, device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """Arguments that every varlen kernel takes."""
    return {
        "cu_seqlens": part.cu_seqlens.on(device, torch.int32),
        "chunk_indices": part.chunk_indices.on(device, torch.int32),
        "chunk_offsets": part.chunk_offsets.on(device, torch.int32),
        "use_exp2": kernels.log2_decay,
    }
