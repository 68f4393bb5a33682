# SPDX-License-Identifier: Apache-2.0
"""Which kernels an op runs on: plain torch, or FLA's Triton kernels."""

from types import ModuleType

import torch

from megatron.linear_cp.ops import torch_conv, torch_rule

BACKENDS = ("auto", "torch", "fla")


def resolve_backend(backend: str, device: torch.device) -> str:
    """``"auto"`` becomes ``"fla"`` on CUDA and ``"torch"`` elsewhere, even where FLA imports.

    Raises:
        ValueError: an unknown backend, or ``"fla"`` for tensors that are not on CUDA.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "fla" if device.type == "cuda" else "torch"
    if backend == "fla" and device.type != "cuda":
        raise ValueError(
            f"backend 'fla' needs CUDA tensors, got {device}; use 'torch' or 'auto' there"
        )
    return backend


def rule_kernels(backend: str, device: torch.device) -> ModuleType:
    """The module that implements the gated delta rule on ``device``."""
    if resolve_backend(backend, device) == "torch":
        return torch_rule
    # Imported late: FLA takes seconds to import and needs a GPU.
    from megatron.linear_cp.ops import fla_rule

    return fla_rule


def conv_kernels(backend: str, device: torch.device) -> ModuleType:
    """The module that implements the causal convolution on ``device``."""
    if resolve_backend(backend, device) == "torch":
        return torch_conv
    from megatron.linear_cp.ops import triton_conv

    return triton_conv
