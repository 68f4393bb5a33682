# SPDX-License-Identifier: Apache-2.0
"""Token layouts of context parallelism, as tensors."""

import torch

from megatron.linear_cp.layout import rank_indices, token_ranges


def get_thd_context_parallel_rank_indices(
    cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, layout: str
) -> torch.Tensor:
    """Global positions of the packed tokens that one rank stores, in storage order.

    Args:
        cu_seqlens: ``[S + 1]`` integer boundaries of the whole packed buffer, from 0, on any device
            (read once, which waits for it).
        cp_size: context-parallel size.
        cp_rank: the rank, 0 to ``cp_size - 1``.
        layout: ``"zigzag"`` or ``"contiguous"``.

    Returns:
        ``[total / cp_size]`` int64 tensor on the device of ``cu_seqlens``.

    Raises:
        ValueError: unknown layout, a rank out of range, malformed boundaries, or lengths that the
            layout cannot cut.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be 0 to {cp_size - 1}, got {cp_rank}")
    ranges = token_ranges(cu_seqlens.cpu().numpy(), cp_size, layout)
    return torch.from_numpy(rank_indices(ranges, cp_rank)).to(cu_seqlens.device)
