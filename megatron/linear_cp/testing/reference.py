# SPDX-License-Identifier: Apache-2.0
"""The specification of both ops: float64, token by token, in plain torch under autograd."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor


def l2norm_reference(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _boundaries(cu_seqlens: Sequence[int] | None, num_tokens: int) -> list[int]:
    bounds = [0, num_tokens] if cu_seqlens is None else [int(b) for b in cu_seqlens]
    if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must go from 0 to the token count {num_tokens} without going down, "
            f"got {bounds}"
        )
    return bounds


@overload
def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    use_qk_l2norm: bool = ...,
    return_final_state: Literal[False] = ...,
) -> Tensor: ...


@overload
def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | None = ...,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    use_qk_l2norm: bool = ...,
    return_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def gated_delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Sequence[int] | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = False,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule, one token at a time.

    Per packed sequence and value head, from ``S_0 = initial_state`` (zero by default)::

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
        o_t = scale * S_t^T q_t

    (Yang et al. 2025, Gated Delta Networks). All sequences advance together, one token a step.

    Args:
        q: ``[1, T, H, K]``, any float dtype; everything is computed in float64.
        k: ``[1, T, H, K]``.
        v: ``[1, T, HV, V]``, ``HV`` a multiple of ``H``; value head ``j`` reads key head
            ``j // (HV // H)``.
        g: ``[1, T, HV]``, natural log of the decay.
        beta: ``[1, T, HV]``.
        cu_seqlens: ``N + 1`` host token offsets from 0 to ``T``; equal neighbours are empty
            sequences. ``None`` is one sequence.
        scale: factor on ``q``; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``.
        use_qk_l2norm: normalise ``q`` and ``k`` with :func:`l2norm_reference` first.
        return_final_state: also return the state after each sequence.

    Returns:
        ``o [1, T, HV, V]`` in float64, and with ``return_final_state`` the states
        ``[N, HV, K, V]`` in float64.

    Raises:
        ValueError: ``cu_seqlens`` does not cover ``T`` tokens in order.
    """
    num_tokens, num_value_heads = v.shape[1], v.shape[2]
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    bounds = _boundaries(cu_seqlens, num_tokens)
    num_sequences = len(bounds) - 1
    lengths = [end - start for start, end in pairwise(bounds)]
    scale = key_dim**-0.5 if scale is None else scale
    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = l2norm_reference(q), l2norm_reference(k)
    group = num_value_heads // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    if initial_state is None:
        state = v.new_zeros(num_sequences, num_value_heads, key_dim, value_dim)
    else:
        state = initial_state.double()

    # Longest sequence first: those still running at any step are then the first rows of `state`.
    order = sorted(range(num_sequences), key=lambda n: -lengths[n])
    steps = max(lengths, default=0)
    active = [sum(length > t for length in lengths) for t in range(steps)]
    tokens = torch.tensor(
        [bounds[n] + t for t in range(steps) for n in order[: active[t]]],
        dtype=torch.long,
        device=v.device,
    )
    per_step = [x[tokens].split(active) if steps else () for x in (q, k, v, g, beta)]

    state = state[torch.tensor(order, dtype=torch.long, device=v.device)]
    outputs = [v[:0]]
    finished: list[Tensor] = []  # states of the sequences that have ended, shortest first
    for q_t, k_t, v_t, g_t, beta_t in zip(*per_step, strict=True):
        finished.insert(0, state[len(q_t) :])
        state = state[: len(q_t)] * g_t.exp()[..., None, None]
        error = v_t - torch.einsum("nhk,nhkv->nhv", k_t, state)
        state = state + torch.einsum("nhk,nhv->nhkv", k_t, beta_t[..., None] * error)
        outputs.append(scale * torch.einsum("nhk,nhkv->nhv", q_t, state))
    o = torch.cat(outputs)[torch.argsort(tokens)]
    if not return_final_state:
        return o[None]
    inverse = torch.argsort(torch.tensor(order, dtype=torch.long, device=v.device))
    return o[None], torch.cat([state, *finished])[inverse]


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    *,
    cu_seqlens: Sequence[int] | None = None,
    halo: Tensor | None = None,
) -> Tensor:
    """The depthwise causal convolution ``y_t = act(sum_w weight[:, w] x_{t-(W-1)+w} + bias)``.

    Args:
        x: ``[1, T, D]``, any float dtype; everything is computed in float64.
        weight: ``[D, W]``; the last tap multiplies the token itself.
        bias: ``[D]`` or ``None``.
        activation: ``"silu"`` or ``None``.
        cu_seqlens: ``N + 1`` host token offsets from 0 to ``T``; equal neighbours are empty
            sequences. ``None`` is one sequence.
        halo: ``[N, W - 1, D]``, the inputs before each sequence; zeros by default.

    Returns:
        ``y [1, T, D]`` in float64.

    Raises:
        ValueError: ``cu_seqlens`` does not cover ``T`` tokens in order, or an unknown activation.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    bounds = _boundaries(cu_seqlens, x.shape[1])
    weight = weight.double()
    dim, width = weight.shape
    if halo is None:
        halo = x.new_zeros(len(bounds) - 1, width - 1, dim)
    outputs = [x[0, :0].double()]
    for n, (start, end) in enumerate(pairwise(bounds)):
        inputs = torch.cat([halo[n].double(), x[0, start:end].double()])
        taps = [inputs[w : w + end - start] * weight[:, w] for w in range(width)]
        outputs.append(torch.stack(taps).sum(0))
    y = torch.cat(outputs)
    if bias is not None:
        y = y + bias.double()
    return (F.silu(y) if activation == "silu" else y)[None]
