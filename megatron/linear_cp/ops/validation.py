# SPDX-License-Identifier: Apache-2.0
"""Shape, dtype and device checks of the ops, made before anything is sent."""

import torch

from megatron.linear_cp.plan import ContextParallelPlan

STATE_EXCHANGES = ("scan", "fla")


def check_state_exchange(state_exchange: str) -> None:
    """Raise ``ValueError`` unless the way to carry states across ranks is known."""
    if state_exchange not in STATE_EXCHANGES:
        raise ValueError(
            f"unknown state_exchange {state_exchange!r}; choose one of {', '.join(STATE_EXCHANGES)}"
        )


def check_rule_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    plan: ContextParallelPlan,
    state_exchange: str,
) -> None:
    """Raise ``ValueError`` unless the tensors fit each other and the plan."""
    check_state_exchange(state_exchange)
    for name, x, dims in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 3), ("beta", beta, 3)):
        if x.dim() != dims or x.shape[0] != 1:
            shape = "[1, T, heads, dim]" if dims == 4 else "[1, T, heads]"
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape != k.shape:
        raise ValueError(f"q and k must share a shape, got {tuple(q.shape)} and {tuple(k.shape)}")
    if not q.is_floating_point():
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    heads, value_heads = q.shape[2], v.shape[2]
    if heads < 1 or value_heads < 1:
        raise ValueError(f"there must be heads, got {heads} key and {value_heads} value heads")
    if value_heads % heads:
        raise ValueError(
            f"{value_heads} value heads do not divide by {heads} key heads; every key head serves "
            "the same number of value heads"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x.shape[2] != value_heads:
            raise ValueError(f"{name} must have {value_heads} heads like v, got {x.shape[2]}")
    for name, x in (("q", q), ("v", v), ("g", g), ("beta", beta)):
        check_tokens(name, x, plan)


def check_conv_inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    plan: ContextParallelPlan,
) -> None:
    """Raise ``ValueError`` unless the tensors fit each other and the plan."""
    if x.dim() != 3 or x.shape[0] != 1:
        raise ValueError(f"x must be [1, T, D], got {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        raise ValueError(
            f"weight must be [D={x.shape[2]}, W] with at least one tap, got {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [D={x.shape[2]}], got {tuple(bias.shape)}")
    if activation not in ("silu", "swish", None):
        raise ValueError(f"unknown activation {activation!r}; choose 'silu' or None")
    check_tokens("x", x, plan)


def check_tokens(name: str, x: torch.Tensor, plan: ContextParallelPlan) -> None:
    """Raise ``ValueError`` unless ``x`` holds exactly this rank's tokens of the plan."""
    if x.shape[1] != plan.local_tokens:
        raise ValueError(
            f"{name} holds {x.shape[1]} tokens but rank {plan.cp_rank} of {plan.cp_size} stores "
            f"{plan.local_tokens} of the plan's {plan.total_tokens}"
        )
