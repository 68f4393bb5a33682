# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over segments on FLA's chunked Triton kernels.

What walks over chunks, and the outputs, are FLA's kernels, called one by one so that the segment
summary and its adjoint (:mod:`triton_summary`) can use what they leave behind; the WY
representation (:mod:`triton_wy`) and the gradients within a chunk (:mod:`triton_gradients`) are
ours. :mod:`fla_capabilities` absorbs the differences between releases. Shapes are those of the
kernel backend interface: ``q, k [1, T, H, K]``, ``v [1, T, HV, V]``, ``g, beta [1, T, HV]``,
states ``[N, HV, K, V]`` in float32.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.linear_cp.ops.fla_kernels import (
    FLOAT32_PRECISION,
    Kernels,
    Part,
    parts_of,
    products_of,
    shared_arguments,
)
from megatron.linear_cp.ops.fla_kernels import kernels as kernels_of_release
from megatron.linear_cp.ops.triton_gradients import chunk_gradients
from megatron.linear_cp.ops.triton_summary import CHUNK, segment_adjoint, segment_summary
from megatron.linear_cp.ops.triton_wy import w_and_u, wy_representation
from megatron.linear_cp.segments import HostTable, Segments

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_KEY_DIM = 256  # FLA's state kernels hold at most four blocks of 64
_LN2 = 0.6931471805599453


@dataclass(frozen=True, eq=False)
class _Inputs:
    """One part's inputs, and what the steps of a direction share."""

    part: Part
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    scale: float
    g: Tensor  # float32, cumulative within each chunk, in the release's unit
    wy: Tensor  # [1, T, HV, 64], the inverse triangular factor of each chunk
    w: Tensor
    u: Tensor


@dataclass(frozen=True, eq=False)
class _Forward:
    parts: list[_Inputs]
    like: Tensor
    ahead: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # queries, keys of each part


@dataclass(frozen=True, eq=False)
class _BackwardPart:
    inputs: _Inputs
    q_fla: Tensor
    k_fla: Tensor
    do: Tensor
    dv_local: Tensor


@dataclass(frozen=True, eq=False)
class _Backward:
    parts: list[_BackwardPart]  # emptied by backward, so that each tensor is freed after its use
    initial_state: Tensor | None
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    ahead: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # states of the first part


def _check(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    if q.dtype not in _INPUT_DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"backend 'fla' computes in bfloat16, float16 or float32, q, k and v alike; got "
            f"{q.dtype}, {k.dtype}, {v.dtype}. backend='torch' takes float64"
        )
    if k.shape[-1] > _MAX_KEY_DIM:
        raise ValueError(
            f"backend 'fla' takes key dimensions up to {_MAX_KEY_DIM}, got {k.shape[-1]}; use "
            "backend='torch'"
        )
    if v.shape[1] != segments.num_tokens:
        raise ValueError(
            f"v has {v.shape[1]} tokens, the segments have {segments.num_tokens}; they must agree"
        )


def _cumulative(g: Tensor, part: Part, kernels: Kernels, reverse: bool = False) -> Tensor:
    result: Tensor = kernels.cumsum(
        g,
        chunk_size=CHUNK,
        reverse=reverse,
        scale=1 / _LN2 if kernels.log2_decay and not reverse else None,
        cu_seqlens=part.cu_seqlens.on(g.device, torch.int32),
        chunk_indices=part.chunk_indices.on(g.device, torch.int32),
    )
    return result


def _for_fla(x: Tensor, like: Tensor, kernels: Kernels) -> Tensor:
    """Keys or queries with as many heads as ``like`` where the release has no grouped heads.

    Copied as 16-byte numbers, three times as fast.
    """
    group = like.shape[2] // x.shape[2]
    if group == 1 or kernels.grouped_value_heads:
        return x
    fits = x.shape[-1] * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    wide = x.view(torch.complex128) if fits else x
    return wide.repeat_interleave(group, dim=2).view(x.dtype)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    segments: Segments,
    residual: tuple[Tensor, ...],
) -> list[_Inputs]:
    _check(q, k, v, segments)
    if segments.num_segments == 0:
        return []
    kernels = kernels_of_release()
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    inputs = []
    for part in parts_of(segments, v.shape[2], k.shape[-1], v.shape[-1], kernels):
        tokens = slice(part.first_token, part.last_token)
        k_p, v_p, beta_p = k[:, tokens], v[:, tokens], beta[:, tokens]
        tables = shared_arguments(part, v.device, kernels)
        unit = (tables, kernels.log2_decay, FLOAT32_PRECISION)
        if residual:
            g_p, wy = (x[:, tokens] for x in residual)
            w, u = w_and_u(k_p, v_p, g_p, beta_p, wy, *unit)
        else:
            g_p = _cumulative(g[:, tokens], part, kernels)
            wy, w, u = wy_representation(k_p, v_p, g_p, beta_p, *unit)
        inputs.append(
            _Inputs(
                part=part,
                q=q[:, tokens],
                k=k_p,
                v=v_p,
                beta=beta_p,
                scale=scale,
                g=g_p,
                wy=wy,
                w=w,
                u=u,
            )
        )
    return inputs


def _states(
    x: _Inputs, k_fla: Tensor, initial_state: Tensor | None, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """States at every chunk and the values that the chunks add, from the entry states."""
    entry = None
    if initial_state is not None:
        entry = initial_state[x.part.first_segment : x.part.last_segment].float().contiguous()
    h, v_new, _ = kernels.states(
        k=k_fla,
        w=x.w,
        u=x.u,
        g=x.g,
        initial_state=entry,
        output_final_state=False,
        **shared_arguments(x.part, x.v.device, kernels),
    )
    return h, v_new


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def _empty_states(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_zeros(0, like.shape[2], rows, columns, dtype=torch.float32)


def prepare_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, segments: Segments
) -> _Forward:
    """Compute what :func:`summarize` and :func:`forward` share.

    Args:
        q: ``[1, T, H, K]``, bfloat16, float16 or float32 on the GPU.
        k: ``[1, T, H, K]``, same dtype, ``K <= 256``.
        v: ``[1, T, HV, V]``, same dtype, ``HV`` a multiple of ``H``.
        g: ``[1, T, HV]`` natural log of the decay, any float dtype.
        beta: ``[1, T, HV]``, any float dtype but float64.
        scale: factor on ``q``.
        segments: ``T`` tokens in ``N`` segments; both may be 0.

    Raises:
        ValueError: a dtype or size the kernels cannot take.
        FlaUnavailableError: the installed release lacks a kernel, or is known to be wrong here.
    """
    parts = _prepare(q, k, v, g, beta, scale, segments, ())
    return _Forward(parts=parts, like=v.new_empty(0, k.shape[-1], *v.shape[2:]))


def _wants_of(part: Part, wants: HostTable | None, device: torch.device) -> Tensor:
    """``wants``, or everything, of one part's segments, on the device."""
    if wants is None:
        return part.all_wanted.on(device, torch.int32)
    return wants.on(device, torch.int32)[part.first_segment : part.last_segment]


def summarize(fwd: _Forward, wants: HostTable | None = None) -> tuple[Tensor, Tensor]:
    """The summary of every segment: ``S_out = A @ S_in + b``.

    Args:
        fwd: of :func:`prepare_forward`.
        wants: ``[N]`` what will be read of each segment, as in
            :mod:`megatron.linear_cp.segments`; None means everything.

    Returns:
        ``A [N, HV, K, K]`` and ``b [N, HV, K, V]``, float32; undefined where not wanted.
    """
    key_dim, num_heads, value_dim = fwd.like.shape[1:]
    if not fwd.parts:
        empty = fwd.like.new_empty(0, num_heads, key_dim, key_dim, dtype=torch.float32)
        return empty, fwd.like.new_empty(0, num_heads, key_dim, value_dim, dtype=torch.float32)
    pairs = [
        segment_summary(
            x.k,
            x.w,
            x.u,
            x.g,
            x.part.cu_seqlens.on(x.k.device, torch.int32),
            _wants_of(x.part, wants, x.k.device),
            kernels_of_release().log2_decay,
            FLOAT32_PRECISION,
        )
        for x in fwd.parts
    ]
    return _join([a for a, _ in pairs], 0), _join([b for _, b in pairs], 0)


def forward_ahead(fwd: _Forward) -> None:
    """Queue what :func:`forward` can do before the entry states arrive; optional."""
    kernels = kernels_of_release()
    fwd.ahead.extend((_for_fla(x.q, x.v, kernels), _for_fla(x.k, x.v, kernels)) for x in fwd.parts)


def forward(fwd: _Forward, initial_state: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, from given entry states.

    Args:
        fwd: of :func:`prepare_forward`.
        initial_state: ``[N, HV, K, V]`` float32, ``None`` for zeros.

    Returns:
        ``o [1, T, HV, V]`` in ``v``'s dtype, and for the backward the cumulative decay
        ``[1, T, HV]`` and the inverse factor of each chunk ``[1, T, HV, 64]``. Without the latter
        the backward computes both again.
    """
    if not fwd.parts:
        return fwd.like.new_empty(1, 0, *fwd.like.shape[2:]), ()
    kernels = kernels_of_release()
    outputs = []
    with products_of(fwd.like.dtype):
        for x in fwd.parts:
            q_fla = None
            if fwd.ahead:
                q_fla, k_fla = fwd.ahead.pop(0)
            else:
                k_fla = _for_fla(x.k, x.v, kernels)
            h, v_new = _states(x, k_fla, initial_state, kernels)
            outputs.append(
                kernels.outputs(
                    q=_for_fla(x.q, x.v, kernels) if q_fla is None else q_fla,
                    k=k_fla,
                    v=v_new,
                    h=h,
                    g=x.g,
                    scale=x.scale,
                    **shared_arguments(x.part, x.v.device, kernels),
                )
            )
    residual = (_join([x.g for x in fwd.parts], 1), _join([x.wy for x in fwd.parts], 1))
    return _join(outputs, 1), residual


def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    segments: Segments,
    residual: tuple[Tensor, ...],
    initial_state: Tensor | None,
    do: Tensor,
) -> _Backward:
    """Compute what :func:`backward_summarize` and :func:`backward` share.

    Args:
        q, k, v, g, beta, scale, segments: as for :func:`prepare_forward`.
        residual: of :func:`forward`; empty to compute it again.
        initial_state: the entry states of the forward.
        do: ``[1, T, HV, V]`` gradient of the outputs.
    """
    inputs = _prepare(q, k, v, g, beta, scale, segments, residual)
    do = do.to(v.dtype).contiguous()
    kernels = kernels_of_release() if inputs else None
    parts = []
    with products_of(v.dtype):
        for x in inputs:
            assert kernels is not None
            do_p = do[:, x.part.first_token : x.part.last_token]
            q_fla, k_fla = (_for_fla(y, x.v, kernels) for y in (x.q, x.k))
            shared = shared_arguments(x.part, v.device, kernels)
            dv = kernels.dv_local(q=q_fla, k=k_fla, g=x.g, do=do_p, scale=scale, **shared)
            parts.append(_BackwardPart(x, q_fla, k_fla, do_p, dv))
    return _Backward(parts, initial_state, (q, k, v, g, beta))


def backward_summarize(bwd: _Backward, wants: HostTable | None = None) -> Tensor:
    """``c [N, HV, K, V]`` float32: dL/dS_in of each segment, its final state without gradient.

    Args:
        bwd: of :func:`prepare_backward`.
        wants: as in :func:`summarize`; what is not wanted is undefined.
    """
    _, k, v, _, _ = bwd.inputs
    if not bwd.parts:
        return _empty_states(v, k.shape[-1], v.shape[-1])
    pieces = [
        segment_adjoint(
            p.inputs.q,
            p.inputs.k,
            p.inputs.w,
            p.do,
            p.dv_local,
            p.inputs.g,
            p.inputs.part.cu_seqlens.on(v.device, torch.int32),
            _wants_of(p.inputs.part, wants, v.device),
            p.inputs.scale,
            kernels_of_release().log2_decay,
            FLOAT32_PRECISION,
        )
        for p in bwd.parts
    ]
    return _join(pieces, 0)


def backward_ahead(bwd: _Backward) -> None:
    """Queue what :func:`backward` can do before the exit gradients arrive; optional.

    The states of the first part, of usually one, are then computed before their gradients, and
    live longer.
    """
    if bwd.parts:
        p = bwd.parts[0]
        with products_of(bwd.inputs[2].dtype):
            states = _states(p.inputs, p.k_fla, bwd.initial_state, kernels_of_release())
        bwd.ahead.append(states)


def _through_states(
    bwd: _Backward, final_state_grad: Tensor | None, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """States of the first part and their gradients; takes the part off the list.

    Returns with everything freed that the gradients within a chunk do not need.
    """
    p = bwd.parts.pop(0)
    x, k_fla = p.inputs, p.k_fla
    shared = shared_arguments(x.part, x.v.device, kernels)
    segments = slice(x.part.first_segment, x.part.last_segment)
    dht = None if final_state_grad is None else final_state_grad[segments].float().contiguous()
    # Before the states, unless they are there: by then the queries' copy and dv_local are gone.
    dh, _, du = kernels.dstates(
        q=p.q_fla,
        k=k_fla,
        w=x.w,
        g=x.g,
        h0=None,
        dht=dht,
        do=p.do,
        dv=p.dv_local,
        scale=x.scale,
        **shared,
    )
    do = p.do
    del p, dht
    h, v_new = bwd.ahead.pop() if bwd.ahead else _states(x, k_fla, bwd.initial_state, kernels)
    return h, dh, v_new, du, (x.part, x.q, x.k, x.v, x.g, x.beta, x.wy, do, x.scale)


def _backward_part(
    bwd: _Backward, final_state_grad: Tensor | None, kernels: Kernels
) -> tuple[Tensor, ...]:
    h, dh, v_new, du, rest = _through_states(bwd, final_state_grad, kernels)
    part, q, k, v, g, beta, wy, do, scale = rest
    dq, dk, dv, dg, dbeta = chunk_gradients(
        q,
        k,
        v,
        g,
        beta,
        wy,
        h,
        dh,
        v_new,
        do,
        du,
        scale,
        shared_arguments(part, v.device, kernels),
        kernels.log2_decay,
        FLOAT32_PRECISION,
    )
    return dq, dk, dv, _cumulative(dg, part, kernels, reverse=True), dbeta


def backward(
    bwd: _Backward, final_state_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the inputs.

    Args:
        bwd: of :func:`prepare_backward`; used up, as its tensors are freed on the way.
        final_state_grad: ``dL/dS_out [N, HV, K, V]`` float32, ``None`` for zeros.

    Returns:
        ``dq, dk, dv, dg, dbeta``, each in its input's shape and dtype.
    """
    if not bwd.parts:
        q, k, v, g, beta = (torch.zeros_like(x) for x in bwd.inputs)
        return q, k, v, g, beta
    kernels = kernels_of_release()
    with products_of(bwd.inputs[2].dtype):
        pieces = []
        while bwd.parts:
            pieces.append(_backward_part(bwd, final_state_grad, kernels))
    gradients = []
    for grads, like in zip(zip(*pieces, strict=True), bwd.inputs, strict=True):
        gradients.append(_join(list(grads), 1).to(like.dtype))
    dq, dk, dv, dg, dbeta = gradients
    return dq, dk, dv, dg, dbeta
