# SPDX-License-Identifier: Apache-2.0
"""Context-parallel groups of several sizes, made once, for micro-batches that each choose one."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.linear_cp.layout import check_layout


class ContextParallelGroups:
    """This process's group of every CP size; see :func:`create_context_parallel_groups`."""

    def __init__(self, groups: Mapping[int, dist.ProcessGroup]) -> None:
        if not groups:
            raise ValueError("there must be a group of at least one context-parallel size")
        for size, group in groups.items():
            if group.size() != size:
                raise ValueError(f"the group given for CP size {size} has {group.size()} ranks")
        self._groups = dict(sorted(groups.items()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The CP sizes there are, ascending."""
        return tuple(self._groups)

    def __getitem__(self, size: int) -> dist.ProcessGroup:
        """The group of ``size`` ranks that this process belongs to.

        Raises:
            ValueError: no group of that size was made.
        """
        if size not in self._groups:
            raise ValueError(
                f"no context-parallel group of size {size} was created at start-up; there are "
                f"{', '.join(map(str, self._groups))}"
            )
        return self._groups[size]

    def choose(
        self,
        lengths: Sequence[int],
        max_tokens_per_rank: int,
        *,
        layout: str = "zigzag",
        tensor_model_parallel_size: int = 1,
        alignment: int = 1,
    ) -> int:
        """Smallest CP size that keeps a rank within ``max_tokens_per_rank``, padding included.

        Args:
            lengths: real tokens of every sequence of the micro-batch.
            max_tokens_per_rank: the limit.
            layout, tensor_model_parallel_size, alignment: as in :func:`length_multiple`, to which
                every sequence will be padded.

        Raises:
            ValueError: even the largest size leaves too many tokens on a rank.
        """
        share = 0
        for size in self._groups:
            multiple = length_multiple(
                size,
                layout=layout,
                tensor_model_parallel_size=tensor_model_parallel_size,
                alignment=alignment,
            )
            share = sum(-(-n // multiple) * multiple for n in lengths) // size
            if share <= max_tokens_per_rank:
                return size
        raise ValueError(
            f"{sum(lengths)} tokens in {len(lengths)} sequences, padded, leave {share} on a rank "
            f"at the largest context-parallel size {self.sizes[-1]}, over the limit of "
            f"{max_tokens_per_rank}; create a larger group or raise the limit"
        )


def create_context_parallel_groups(
    sizes: Iterable[int], ranks: Sequence[int] | None = None
) -> ContextParallelGroups:
    """Create the groups of every CP size at start-up. Every process of the job must call.

    A group of ``size`` is an aligned block of ``size`` consecutive entries of the DP x CP ranks, as
    Megatron-Core cuts its own. Where Megatron-Core made them
    (``initialize_model_parallel(hybrid_context_parallel=True)``) its groups are used; it makes none
    of size 1, so that one is ours.

    Args:
        sizes: CP sizes that micro-batches may use; each divides the number of DP x CP ranks.
        ranks: global DP x CP ranks of this process; None asks Megatron-Core.

    Raises:
        ValueError: a size below 1, or one that does not divide the ranks.
    """
    if ranks is None:
        parent = parallel_state.get_data_parallel_group(with_context_parallel=True)
        ranks = dist.get_process_group_ranks(parent)
    wanted = sorted(set(sizes))
    bad = [size for size in wanted if size < 1 or len(ranks) % size]
    if bad or not wanted:
        raise ValueError(
            f"context-parallel sizes {wanted} must be at least 1 and divide the {len(ranks)} "
            f"data x context parallel ranks; {bad} do not"
        )
    # All processes create all groups in one order: that is what new_group asks for.
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, list(ranks))
    domains = sorted({tuple(domain) for domain in everyone})
    groups: dict[int, dist.ProcessGroup] = {}
    for size in wanted:
        existing = _megatron_group(size, ranks)
        if existing is not None:
            groups[size] = existing
            continue
        for domain in domains:
            for first in range(0, len(domain), size):
                block = domain[first : first + size]
                group = dist.new_group(list(block), group_desc=f"LINEAR_CP_GROUP_{size}")
                if dist.get_rank() in block:
                    groups[size] = group
    return ContextParallelGroups(groups)


def length_multiple(
    cp_size: int, *, layout: str = "zigzag", tensor_model_parallel_size: int = 1, alignment: int = 1
) -> int:
    """What every stored length must be a multiple of, so that every later cut is even.

    zigzag cuts a sequence into ``2 * cp_size`` chunks; contiguous cuts the buffer only. Sequence
    parallelism cuts a rank's tokens over TP; pipeline stages see the same tokens and need no more.

    Args:
        cp_size: of the micro-batch.
        layout: ``"zigzag"`` or ``"contiguous"``.
        tensor_model_parallel_size: TP where sequence parallelism is on, else 1.
        alignment: what a rank's tokens must divide by for other reasons, such as fp8.
    """
    check_layout(layout)
    chunks = 2 * cp_size if layout == "zigzag" and cp_size > 1 else cp_size
    return math.lcm(chunks, cp_size * tensor_model_parallel_size, cp_size * alignment)


def _megatron_group(size: int, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Megatron-Core's own group of this size and these ranks, if it made one. Sends nothing."""
    mine = ranks.index(dist.get_rank())
    block = list(ranks[mine - mine % size : mine - mine % size + size])
    candidates = []
    if parallel_state.model_parallel_is_initialized():
        candidates.append(parallel_state.get_context_parallel_group())
        hybrid = getattr(parallel_state, "_HYBRID_DP_CP_GROUPS", None) or {}
        candidates += [hybrid[size]] if size in hybrid else []
        candidates.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
    for group in candidates:
        if group.size() == size and dist.get_process_group_ranks(group) == block:
            return group
    return None
