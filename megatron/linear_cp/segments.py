# SPDX-License-Identifier: Apache-2.0
"""Host tables about one micro-batch, and their device copies, made once and without a sync."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
IntArray = npt.NDArray[np.int64]

# What is read of a segment's summary: nothing, ``b`` alone (``c`` in backward), or ``A`` and ``b``.
WANTS_NOTHING, WANTS_OFFSET, WANTS_BOTH = 0, 1, 2

# A captured CUDA graph holds addresses, not tensors: what it reads is kept here for good.
_read_by_graphs: dict[int, torch.Tensor] = {}


def is_capturing() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def keep_for_graphs(tensor: torch.Tensor) -> None:
    """Keep a tensor alive that the CUDA graph being captured will read on every replay."""
    _read_by_graphs[id(tensor)] = tensor


def to_device(
    array: IntArray, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Copy a host table to ``device`` without waiting for the device.

    Raises:
        ValueError: a CUDA graph is being captured. The copy would happen on replay only, from host
            memory that is free by then.
    """
    if device.type == "cuda" and is_capturing():
        raise ValueError(
            f"an index table of {len(array)} entries is not on the GPU yet, and none can be copied "
            "there while a CUDA graph is captured: run forward and backward once before the "
            "capture, with the same shape, boundaries and context-parallel group"
        )
    # A table made under inference mode would later be refused by autograd, and tables are kept.
    with torch.inference_mode(False):
        table = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if device.type == "cpu":
            return table
        if device.type == "cuda":
            table = table.pin_memory()
        return table.to(device, non_blocking=True)


class HostTable:
    """An integer table on the host and one copy of it per device that asked for one."""

    __slots__ = ("_copies", "array")

    def __init__(self, array: npt.ArrayLike) -> None:
        self.array: IntArray = np.asarray(array, dtype=np.int64)
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.array)

    def on(self, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """The table as a tensor on ``device``; later calls return the same tensor."""
        key = (device, dtype)
        if key not in self._copies:
            self._copies[key] = to_device(self.array, device, dtype)
        table = self._copies[key]
        if is_capturing():
            keep_for_graphs(table)
        return table


class Segments:
    """Runs of consecutive tokens stored back to back in a ``[1, T, ...]`` tensor.

    This is all a kernel backend learns about a micro-batch: where each run starts. A run has at
    least one token; its entry state and conv halo are given to the kernel as tensors.

    Args:
        boundaries: ``[N + 1]`` token offsets, from 0, strictly increasing; ``N`` may be 0.
    """

    def __init__(self, boundaries: Sequence[int] | IntArray) -> None:
        table = HostTable(np.asarray(boundaries, dtype=np.int64))
        offsets = table.array
        if (
            offsets.ndim != 1
            or len(offsets) == 0
            or offsets[0] != 0
            or np.any(np.diff(offsets) <= 0)
        ):
            raise ValueError(
                f"segment boundaries must start at 0 and strictly increase, got {offsets.tolist()}"
            )
        self._table = table
        self._cache: dict[Hashable, object] = {}

    @property
    def boundaries(self) -> IntArray:
        """``[N + 1]`` int64 token offsets on the host."""
        return self._table.array

    @property
    def lengths(self) -> IntArray:
        """``[N]`` int64 token counts on the host."""
        return np.diff(self._table.array)

    @property
    def num_segments(self) -> int:
        """``N``."""
        return len(self._table) - 1

    @property
    def num_tokens(self) -> int:
        """``T``."""
        return int(self._table.array[-1])

    def cu_seqlens(self, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The boundaries as a tensor on ``device``, copied once."""
        return self._table.on(device, dtype)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """A table that a backend derives from the boundaries, built on first use and then kept."""
        if key not in self._cache:
            self._cache[key] = build()
        return cast(T, self._cache[key])
