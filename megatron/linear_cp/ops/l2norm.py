# SPDX-License-Identifier: Apache-2.0
"""Unit norm of queries and keys."""

import torch

L2NORM_EPS = 1e-6


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dim, computed in fp32 or fp64, in x's dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + L2NORM_EPS)).to(x.dtype)
