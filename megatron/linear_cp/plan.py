# SPDX-License-Identifier: Apache-2.0
"""Everything host-side about one micro-batch under one context-parallel group, built once."""

import weakref
from collections.abc import Callable
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.linear_cp.layout import (
    TokenRanges,
    check_boundaries,
    dense_token_ranges,
    mixed_token_ranges,
    rank_indices,
    shard_ranges,
    token_ranges,
)
from megatron.linear_cp.routes import (
    HaloRoute,
    LayoutRoute,
    StateRoute,
    build_halo_route,
    build_layout_route,
    build_state_route,
)
from megatron.linear_cp.segments import HostTable, IntArray, Segments

_builds = 0


def plan_builds() -> int:
    """How many plans this process has built so far; a micro-batch should add one."""
    return _builds


class ContextParallelPlan:
    """Segments, conv-halo and state routes of one micro-batch under one context-parallel group.

    Build it with :meth:`build` (packed input) or :meth:`build_dense` (SBHD input) once per
    micro-batch and hand it to every layer. Routes are derived on first use and kept; their index
    tables are copied to a device once, without a host sync.

    Attributes:
        boundaries: ``[S + 1]`` int64 global sequence boundaries (host).
        layout: ``"zigzag"``, ``"contiguous"`` or ``"mixed"`` (see :meth:`with_homes`).
        cp_size, cp_rank: size of the group and this process's rank in it.
        segments: the runs of consecutive tokens that this rank stores, in storage order.
        notes: what layers chose for this micro-batch, for :meth:`describe`.
    """

    def __init__(
        self,
        ranges: TokenRanges,
        boundaries: IntArray,
        cp_group: dist.ProcessGroup | None,
        layout: str,
        conv_kernel_size: int,
        cut: Callable[[str], TokenRanges],
    ) -> None:
        if conv_kernel_size < 1:
            raise ValueError(f"conv_kernel_size must be at least 1, got {conv_kernel_size}")
        self.boundaries = boundaries
        self.layout = layout
        self.cp_size = 1 if cp_group is None else cp_group.size()
        self.cp_rank = 0 if cp_group is None else cp_group.rank()
        # Weak: a plan kept beside a micro-batch must not keep a destroyed group alive, which
        # aborts the process at exit under gloo.
        self._group = None if cp_group is None else weakref.ref(cp_group)
        self._ranges = ranges
        self._cut = cut
        self._in_layout: dict[str, ContextParallelPlan] = {}
        self._layout_routes: dict[tuple[ContextParallelPlan, int], LayoutRoute] = {}
        mine = ranges.rank == self.cp_rank
        ends = np.cumsum(ranges.stop[mine] - ranges.start[mine])
        self.segments = Segments(np.concatenate([[0], ends]))
        self._halo_routes: dict[int, HaloRoute] = {}
        self._state_routes: dict[int, StateRoute] = {}
        self._conv_kernel_size = conv_kernel_size
        self.notes: list[str] = []

    @classmethod
    def build(
        cls,
        cu_seqlens: torch.Tensor | npt.ArrayLike,
        cp_group: dist.ProcessGroup | None,
        *,
        layout: str = "zigzag",
        conv_kernel_size: int = 4,
        device: torch.device | str | None = None,
    ) -> "ContextParallelPlan":
        """Plan of packed (THD) input.

        Args:
            cu_seqlens: ``[S + 1]`` integer boundaries of the whole packed buffer as stored, padding
                included; a tensor on any device (read once, which waits for it) or host integers.
            cp_group: context-parallel group of this micro-batch; None means one rank.
            layout: how the ranks store the tokens, ``"zigzag"`` or ``"contiguous"``.
            conv_kernel_size: taps of the causal convolution; its halo route is built at once,
                others on demand.
            device: copy the index tables to this device now instead of on first use.

        Raises:
            ValueError: unknown layout, malformed boundaries, lengths that the layout cannot cut
                over the group, or a kernel size below 1. The same on every rank that has the same
                boundaries; :func:`megatron.linear_cp.micro_batch.plan_for` can check that.
        """
        if isinstance(cu_seqlens, torch.Tensor):
            cu_seqlens = cu_seqlens.cpu().numpy()
        boundaries = check_boundaries(cu_seqlens)
        cp_size = 1 if cp_group is None else cp_group.size()
        cut = partial(token_ranges, boundaries, cp_size)
        plan = cls(cut(layout), boundaries, cp_group, layout, conv_kernel_size, cut)
        return plan._built(device)

    @classmethod
    def build_dense(
        cls,
        seq_len: int,
        batch: int,
        cp_group: dist.ProcessGroup | None,
        *,
        layout: str = "zigzag",
        conv_kernel_size: int = 4,
        device: torch.device | str | None = None,
    ) -> "ContextParallelPlan":
        """Plan of dense (SBHD) input, whose samples are stored one after another.

        Args:
            seq_len: global tokens of a sample.
            batch: samples in the micro-batch.
            cp_group, layout, conv_kernel_size, device: as in :meth:`build`.

        Raises:
            ValueError: unknown layout, or a length that the layout cannot cut over the group.
        """
        cp_size = 1 if cp_group is None else cp_group.size()
        boundaries = np.arange(batch + 1, dtype=np.int64) * seq_len
        cut = partial(dense_token_ranges, seq_len, batch, cp_size)
        plan = cls(cut(layout), boundaries, cp_group, layout, conv_kernel_size, cut)
        return plan._built(device)

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The group the plan was built for, or None for one rank.

        Raises:
            RuntimeError: the group was destroyed since.
        """
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this plan was destroyed; build a new plan")
        return group

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, for code that runs only where tokens lie on several ranks."""
        group = self.cp_group
        if group is None:
            raise RuntimeError("this plan covers one rank and has no process group")
        return group

    @property
    def local_tokens(self) -> int:
        """Tokens that this rank stores."""
        return self.segments.num_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole micro-batch, padding included."""
        return int(self.boundaries[-1])

    @cached_property
    def local_indices(self) -> HostTable:
        """``[local_tokens]`` global positions of this rank's tokens, in storage order."""
        return HostTable(rank_indices(self._ranges, self.cp_rank))

    @cached_property
    def gathered_indices(self) -> HostTable:
        """``[total_tokens]`` global positions of all ranks' tokens, rank after rank."""
        return HostTable(
            np.concatenate([rank_indices(self._ranges, r) for r in range(self.cp_size)])
        )

    @cached_property
    def global_order(self) -> HostTable:
        """``[total_tokens]`` rows that put rank-after-rank tokens into global order."""
        return HostTable(np.argsort(self.gathered_indices.array))

    @cached_property
    def segment_context(self) -> tuple[tuple[int, int], ...]:
        """Global ``(sequence start, segment stop)`` of each local segment: what it may see."""
        mine = self._ranges.rank == self.cp_rank
        starts = self.boundaries[self._ranges.sequence[mine]]
        return tuple(zip(starts.tolist(), self._ranges.stop[mine].tolist(), strict=True))

    @cached_property
    def full_plan(self) -> "ContextParallelPlan":
        """The same sequences on one rank, for modes that bring them together."""
        cut = partial(token_ranges, self.boundaries, 1)
        return ContextParallelPlan(
            cut(self.layout), self.boundaries, None, self.layout, self._conv_kernel_size, cut
        )

    def halo_route(self, width: int) -> HaloRoute:
        """Route of the conv halo for a kernel of ``width`` taps, built once per width."""
        if width not in self._halo_routes:
            self._halo_routes[width] = build_halo_route(
                self._ranges, self.boundaries, self.cp_rank, self.cp_size, width
            )
        return self._halo_routes[width]

    def in_layout(self, layout: str) -> "ContextParallelPlan":
        """The plan of the same micro-batch and group under another layout, built once.

        Raises:
            ValueError: the layout is unknown or cannot cut these boundaries.
        """
        if layout == self.layout:
            return self
        if layout not in self._in_layout:
            ranges = self._cut(layout)
            other = ContextParallelPlan(
                ranges, self.boundaries, self.cp_group, layout, self._conv_kernel_size, self._cut
            )
            other._in_layout[self.layout] = self
            self._in_layout[layout] = other
        return self._in_layout[layout]

    def describe(self) -> str:
        """A few lines for people: who stores what, and what was chosen for this micro-batch."""
        per_rank = np.bincount(
            self._ranges.rank,
            weights=self._ranges.stop - self._ranges.start,
            minlength=self.cp_size,
        )
        tokens = sorted({int(n) for n in per_rank})
        stored = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]}"
        lines = [
            f"{len(self.boundaries) - 1} sequences, {self.total_tokens} tokens, {self.layout} "
            f"layout over {self.cp_size} ranks, {stored} tokens each",
            f"rank {self.cp_rank} holds {self.segments.num_segments} segments",
            *self.notes,
        ]
        return "\n".join(lines)

    def with_homes(self, home: IntArray) -> "ContextParallelPlan":
        """The plan of the same packed zigzag micro-batch with some sequences whole on one rank.

        Args:
            home: ``[S]`` the rank that holds all of a sequence, or -1 for zigzag.
        """
        ranges = mixed_token_ranges(self.boundaries, self.cp_size, home)
        return ContextParallelPlan(
            ranges, self.boundaries, self.cp_group, "mixed", self._conv_kernel_size, self._cut
        )

    def route_to(
        self, other: "ContextParallelPlan", *, shards: int = 1, shard: int = 0, samples: int = 1
    ) -> LayoutRoute:
        """Route of this rank's tokens to where another plan stores them, built once.

        Args:
            other: a plan of the same micro-batch and group.
            shards, shard: under sequence parallelism, how many tensor-parallel ranks share a rank's
                tokens and which of them this is; the route is then one over all of them, rank
                ``cp_rank * shards + shard`` being this one.
            samples: of dense input, see :func:`megatron.linear_cp.layout.shard_ranges`.

        Raises:
            ValueError: tokens that do not divide over the shards.
        """
        key = (other, shards)
        if key not in self._layout_routes:
            old, new = self._ranges, other._ranges
            if shards > 1:
                old, new = (shard_ranges(ranges, shards, samples) for ranges in (old, new))
            self._layout_routes[key] = build_layout_route(
                old, new, self.cp_rank * shards + shard, self.cp_size * shards
            )
        return self._layout_routes[key]

    def state_route(self, heads: int) -> StateRoute:
        """Route of the state scan for ``heads`` value heads, built once per head count."""
        if heads not in self._state_routes:
            self._state_routes[heads] = build_state_route(
                self._ranges, self.cp_rank, self.cp_size, heads
            )
        return self._state_routes[heads]

    def _built(self, device: torch.device | str | None) -> "ContextParallelPlan":
        """Count this plan, build its halo route now, and copy its tables where asked to."""
        global _builds
        _builds += 1
        route = self.halo_route(self._conv_kernel_size)
        if device is not None:
            device = torch.device(device)
            for table in (route.send_index, route.own_rows, route.own_index):
                table.on(device)
            self.segments.cu_seqlens(device)
        return self


@lru_cache(maxsize=64)
def single_sequence_plan(tokens: int) -> ContextParallelPlan:
    """Plan of one sequence of ``tokens`` on one rank: what the ops use when given no plan."""
    return ContextParallelPlan.build([0, tokens], None)
