# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels for everything in the backward that does not cross chunks.

They stand in for FLA's ``chunk_bwd_dqkwg`` and ``prepare_wy_repr_bwd``. The former is miscompiled
by Triton 3.4.0 to 3.7.0 on Hopper (flash-linear-attention issue 640: the transpose of a product as
the left factor of another product) and releases from 0.5 on refuse to run it there; before 0.5 keys
and queries must be repeated for grouped value heads. Here a program adds up the gradients of a key
head over its value heads in float32, and only tensors from memory and right factors are transposed.

Names follow Yang et al. 2025. With ``L_ts = beta_t exp(g_t - g_s) k_t.k_s`` for ``s < t`` and
``A = (I + L)^-1``, a chunk has ``w = A (beta exp(g) k)``, ``u = A (beta v)``, ``v' = u - w h``. A
trailing ``_t`` marks a transposed tile.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.linear_cp.ops.triton_summary import CHUNK, decay
from megatron.linear_cp.ops.triton_wy import chunk_of, rows
from megatron.linear_cp.ops.triton_wy_gradients import (
    diagonal,
    state_tile,
    tile_of,
    wy_gradients,
)


@triton.jit
def _state_dot(h, dh, o_k, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    # In a loop of its own: a tile that is both multiplied element by element and an operand of a
    # product loses its second buffer in Triton 3.6's pipeline, and is overwritten too early.
    total = 0.0
    for i_v in tl.static_range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_h = state_tile(h, o_k, o_v, K, V, BK, BV).to(tl.float32)
        b_dh = state_tile(dh, o_k, o_v, K, V, BK, BV).to(tl.float32)
        total += tl.sum(b_h * b_dh)
    return total


@triton.jit
def _query_part(
    q,
    k,
    g,
    h,
    v_new,
    do,
    dq,
    dg,
    bos,
    length,
    i_c,
    i_hk,
    o_k,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_i = tl.arange(0, BT)
    m_t, m_k = o_i < length, o_k < K
    dtype = k.dtype.element_ty
    at_key = (bos * H + i_hk) * K
    b_q = rows(q + at_key, H * K, o_i, o_k, m_t, K, BK)
    b_k = rows(k + at_key, H * K, o_i, o_k, m_t, K, BK)
    total = tl.zeros([BT, BK], dtype=tl.float32)
    for i_r in tl.range(HV // H, num_stages=1):
        i_h = i_hk * (HV // H) + i_r
        head = bos * HV + i_h
        state = (i_c * HV + i_h) * (K * V)
        b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
        ds = tl.zeros([BT, BT], dtype=tl.float32)
        part = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_do = rows(do + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_new = rows(v_new + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_h = state_tile(h + state, o_k, o_v, K, V, BK, BV)
            ds = tl.dot(b_do, tl.trans(b_new), ds, input_precision=PRECISION)
            part = tl.dot(b_do, tl.trans(b_h), part, input_precision=PRECISION)
        part *= (decay(b_g, LOG2) * scale)[:, None]
        total += part
        b_dg = diagonal(tl.dot(part.to(dtype), tl.trans(b_q), input_precision=PRECISION), BT)
        lower = (o_i[:, None] >= o_i[None, :]) & m_t[:, None]
        ds *= decay(tl.where(lower, b_g[:, None] - b_g[None, :], 0.0), LOG2)
        ds = tl.where(lower, ds * scale, 0.0)
        total = tl.dot(ds.to(dtype), b_k, total, input_precision=PRECISION)
        pairs = ds * tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_dg += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
        tl.store(dg + head + o_i * HV, b_dg, mask=m_t)
    at = o_i[:, None] * (H * K) + o_k[None, :]
    tl.store(dq + at_key + at, total.to(dq.dtype.element_ty), mask=m_t[:, None] & m_k[None, :])


@triton.jit
def _key_part(
    q,
    k,
    g,
    h,
    dh,
    v_new,
    do,
    dk_wy,
    dk,
    dg,
    bos,
    length,
    i_c,
    i_hk,
    o_k,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_i = tl.arange(0, BT)
    m_t, m_k = o_i < length, o_k < K
    dtype = k.dtype.element_ty
    at_key = (bos * H + i_hk) * K
    b_q = rows(q + at_key, H * K, o_i, o_k, m_t, K, BK)
    b_k = rows(k + at_key, H * K, o_i, o_k, m_t, K, BK)
    total = tl.zeros([BT, BK], dtype=tl.float32)
    for i_r in tl.range(HV // H, num_stages=1):
        i_h = i_hk * (HV // H) + i_r
        head = bos * HV + i_h
        state = (i_c * HV + i_h) * (K * V)
        b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
        g_last = tl.load(g + head + (length - 1) * HV)
        state_dot = _state_dot(h + state, dh + state, o_k, K, V, BK, BV)
        ds_t = tl.zeros([BT, BT], dtype=tl.float32)
        part = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_dh = state_tile(dh + state, o_k, o_v, K, V, BK, BV)
            b_new = rows(v_new + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_do = rows(do + head * V, HV * V, o_i, o_v, m_t, V, BV)
            part = tl.dot(b_new, tl.trans(b_dh), part, input_precision=PRECISION)
            ds_t = tl.dot(b_new, tl.trans(b_do), ds_t, input_precision=PRECISION)
        part *= decay(tl.where(m_t, g_last - b_g, 0.0), LOG2)[:, None]
        total += part
        to_end = diagonal(tl.dot(part.to(dtype), tl.trans(b_k), input_precision=PRECISION), BT)
        at_end = decay(g_last, LOG2) * state_dot + tl.sum(to_end)
        b_dg = tl.where(o_i == length - 1, at_end, 0.0) - to_end
        tl.store(dg + head + o_i * HV, b_dg, mask=m_t)
        upper = (o_i[:, None] <= o_i[None, :]) & m_t[None, :]
        ds_t *= decay(tl.where(upper, b_g[None, :] - b_g[:, None], 0.0), LOG2)
        ds_t = tl.where(upper, ds_t * scale, 0.0)
        total = tl.dot(ds_t.to(dtype), b_q, total, input_precision=PRECISION)
        total += rows(dk_wy + head * K, HV * K, o_i, o_k, m_t, K, BK).to(tl.float32)
    at = o_i[:, None] * (H * K) + o_k[None, :]
    tl.store(dk + at_key + at, total.to(dk.dtype.element_ty), mask=m_t[:, None] & m_k[None, :])


@triton.jit
def _chunk_kernel(
    q,
    k,
    g,
    h,
    dh,
    v_new,
    do,
    dk_wy,
    dq,
    dk,
    dg,
    cu_seqlens,
    chunk_indices,
    scale,
    num_tokens,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_K: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    of_keys = pid % 2
    i_k = (pid // 2 % NUM_K).to(tl.int64)
    i_hk = (pid // (2 * NUM_K) % H).to(tl.int64)
    i_c = (pid // (2 * NUM_K * H)).to(tl.int64)
    bos, length = chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    o_k = (i_k * BK).to(tl.int32) + tl.arange(0, BK)
    dg += (2 * i_k + of_keys) * num_tokens * HV
    if of_keys == 1:
        _key_part(
            q,
            k,
            g,
            h,
            dh,
            v_new,
            do,
            dk_wy,
            dk,
            dg,
            bos,
            length,
            i_c,
            i_hk,
            o_k,
            scale,
            H,
            HV,
            K,
            V,
            BT,
            BK,
            BV,
            LOG2,
            PRECISION,
        )
    else:
        _query_part(
            q,
            k,
            g,
            h,
            v_new,
            do,
            dq,
            dg,
            bos,
            length,
            i_c,
            i_hk,
            o_k,
            scale,
            H,
            HV,
            K,
            V,
            BT,
            BK,
            BV,
            LOG2,
            PRECISION,
        )


def chunk_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    wy: Tensor,
    h: Tensor,
    dh: Tensor,
    v_new: Tensor,
    do: Tensor,
    du: Tensor,
    scale: float,
    tables: dict[str, Any],
    log2_decay: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the inputs from the states and their gradients at every chunk.

    Args:
        q: ``[1, T, H, K]``, contiguous.
        k: ``[1, T, H, K]``, contiguous.
        v: ``[1, T, HV, V]``, contiguous.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk of 64 tokens.
        beta: ``[1, T, HV]``, contiguous.
        wy: ``[1, T, HV, 64]``, ``A`` of each chunk.
        h: ``[1, chunks, HV, K, V]``, the state at each chunk's start.
        dh: ``[1, chunks, HV, K, V]``, the gradient of the state at each chunk's end.
        v_new: ``[1, T, HV, V]``, ``u - w h``.
        do: ``[1, T, HV, V]``, gradient of the outputs.
        du: ``[1, T, HV, V]``, gradient of ``v_new``.
        scale: factor on ``q``.
        tables: device tables ``cu_seqlens`` and ``chunk_indices``.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        ``dq, dk, dv`` in the dtype of ``q``, ``dg`` float32 with respect to the natural logarithm
        and still to be summed over the later tokens of each chunk, ``dbeta`` in ``beta``'s dtype.
    """
    num_tokens, num_key_heads, key_dim = k.shape[1:]
    num_value_heads, value_dim = v.shape[2:]
    num_chunks = tables["chunk_indices"].shape[0]
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    tile = tile_of(k, value_dim)
    # One share of each program that works on a chunk, the last through w and u.
    programs = 2 * triton.cdiv(key_dim, tile["BK"])
    dg = g.new_empty(programs + 1, *g.shape)
    dk_wy, dv, dbeta = wy_gradients(k, v, g, beta, wy, h, du, dg[-1], tables, log2_decay, precision)
    _chunk_kernel[(num_chunks * num_key_heads * programs,)](
        q=q,
        k=k,
        g=g,
        h=h,
        dh=dh,
        v_new=v_new,
        do=do,
        dk_wy=dk_wy,
        dq=dq,
        dk=dk,
        dg=dg,
        scale=scale,
        num_tokens=num_tokens,
        cu_seqlens=tables["cu_seqlens"],
        chunk_indices=tables["chunk_indices"],
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        BT=CHUNK,
        LOG2=log2_decay,
        PRECISION=precision,
        **tile,
    )
    return dq, dk, dv, dg.sum(0), dbeta
