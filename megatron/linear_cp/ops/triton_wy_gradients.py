# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""A Triton kernel for the gradients through ``w`` and ``u``.

Each product takes as its left factor what the product before it left in registers: with
``P = A^T dA``, which is ``A^T du`` times ``v^T`` and times ``-h^T``, ``dL = -P A^T`` below the
diagonal. Names are those of :mod:`triton_gradients`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.linear_cp.ops.triton_summary import CHUNK, decay, has_room
from megatron.linear_cp.ops.triton_wy import block, chunk_of, rows

# Key columns and value columns of a tile, stages of the loop over the latter, and warps. Another
# tile must be checked with compute-sanitizer: for (128, 32, 1, 4) in bfloat16 and (16, 16, 1, 8) in
# float32, Triton 3.6 on an H200 takes the product of the transposed factor and a tile of ``du``
# from an address outside shared memory. These were checked against float64 on that GPU.
_LARGE_TILE, _SMALL_TILE = (128, 64, 2, 4), (64, 32, 2, 4)
# Compiled for a few launches, and each product becomes three: what matters is how long that takes.
_FLOAT32_TILE = (16, 16, 1, 4)


@triton.jit
def state_tile(
    pointer, o_k, o_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """A tile of a ``[K, V]`` state."""
    at = o_k[:, None] * V + o_v[None, :]
    if K % BK == 0 and V % BV == 0:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)


@triton.jit
def diagonal(x, BT: tl.constexpr):
    """The diagonal of a square tile: row by row the product of the two factors' rows."""
    o = tl.arange(0, BT)
    return tl.sum(tl.where(o[:, None] == o[None, :], x, 0.0), axis=1)


@triton.jit
def _values_part(
    wy,
    v,
    du,
    dv,
    beta,
    stride,
    m_t,
    dtype: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``A^T du v^T`` of a chunk, and its ``dv``."""
    o_i = tl.arange(0, BT)
    values = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_du = rows(du, stride, o_i, o_v, m_t, V, BV)
        du_a = tl.dot(tl.trans(wy), b_du, input_precision=PRECISION)
        p_dv = dv + o_i[:, None] * stride + o_v[None, :]
        b_dv = (du_a * beta[:, None]).to(dv.dtype.element_ty)
        tl.store(p_dv, b_dv, mask=m_t[:, None] & (o_v < V)[None, :])
        b_v = rows(v, stride, o_i, o_v, m_t, V, BV)
        values = tl.dot(du_a.to(dtype), tl.trans(b_v), values, input_precision=PRECISION)
    return values


@triton.jit
def _keys_part(
    wy,
    du,
    state,
    stride,
    o_k,
    m_t,
    dtype: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``A^T du h^T`` of a chunk, a few key columns."""
    o_i = tl.arange(0, BT)
    dx = tl.zeros([BT, BK], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_du = rows(du, stride, o_i, o_v, m_t, V, BV)
        b_h = state_tile(state, o_k, o_v, K, V, BK, BV)
        du_a = tl.dot(tl.trans(wy), b_du, input_precision=PRECISION)
        dx = tl.dot(du_a.to(dtype), tl.trans(b_h), dx, input_precision=PRECISION)
    return dx


@triton.jit
def _wy_kernel(
    k,
    v,
    g,
    beta,
    wy,
    h,
    du,
    dv,
    dbeta,
    dg,
    dk_wy,
    cu_seqlens,
    chunk_indices,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LOG2: tl.constexpr,
    IN_LOOPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # With IN_LOOPS, loops over key columns stay loops and hold one tile each.
    NUM_K: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_c, i_h = (pid // HV).to(tl.int64), (pid % HV).to(tl.int64)
    bos, length = chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    head = bos * HV + i_h
    keys = k + (bos * H + i_h // (HV // H)) * K
    state = h + (i_c * HV + i_h) * (K * V)
    o_i = tl.arange(0, BT)
    m_t = o_i < length
    dtype = k.dtype.element_ty
    b_wy = rows(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
    b_beta = tl.load(beta + head + o_i * HV, mask=m_t, other=0.0).to(tl.float32)

    dx_keys = tl.zeros([BT, BT], dtype=tl.float32)
    if IN_LOOPS:
        values = _values_part(
            b_wy,
            v + head * V,
            du + head * V,
            dv + head * V,
            b_beta,
            HV * V,
            m_t,
            dtype,
            V,
            BT,
            BV,
            PRECISION,
        )
        for i_k in range(NUM_K):
            o_k = i_k * BK + tl.arange(0, BK)
            dx = _keys_part(
                b_wy, du + head * V, state, HV * V, o_k, m_t, dtype, K, V, BT, BK, BV, PRECISION
            )
            b_k = rows(keys, H * K, o_i, o_k, m_t, K, BK)
            dx_keys = tl.dot(dx.to(dtype), tl.trans(b_k), dx_keys, input_precision=PRECISION)
        # Again, so that the loops need not keep it in registers for what follows.
        b_wy = rows(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
    else:
        values = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in tl.static_range(NUM_K):
            o_k = i_k * BK + tl.arange(0, BK)
            dx = tl.zeros([BT, BK], dtype=tl.float32)
            for i_v in tl.range(0, V, BV):
                o_v = i_v + tl.arange(0, BV)
                b_du = rows(du + head * V, HV * V, o_i, o_v, m_t, V, BV)
                du_a = tl.dot(tl.trans(b_wy), b_du, input_precision=PRECISION)
                b_du_a = du_a.to(dtype)
                if i_k == 0:
                    p_dv = dv + head * V + o_i[:, None] * (HV * V) + o_v[None, :]
                    b_dv = (du_a * b_beta[:, None]).to(dv.dtype.element_ty)
                    tl.store(p_dv, b_dv, mask=m_t[:, None] & (o_v < V)[None, :])
                    b_v = rows(v + head * V, HV * V, o_i, o_v, m_t, V, BV)
                    values = tl.dot(b_du_a, tl.trans(b_v), values, input_precision=PRECISION)
                b_h = state_tile(state, o_k, o_v, K, V, BK, BV)
                dx = tl.dot(b_du_a, tl.trans(b_h), dx, input_precision=PRECISION)
            b_k = rows(keys, H * K, o_i, o_k, m_t, K, BK)
            dx_keys = tl.dot(dx.to(dtype), tl.trans(b_k), dx_keys, input_precision=PRECISION)

    b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
    e_g = decay(b_g, LOG2)
    through_w = -diagonal(dx_keys, BT) * e_g
    b_dbeta = diagonal(values, BT) + through_w
    b_factor = ((values - dx_keys * e_g[None, :]) * b_beta[None, :]).to(dtype)
    dl = tl.dot(b_factor, tl.trans(b_wy), input_precision=PRECISION)
    later = (o_i[:, None] > o_i[None, :]) & m_t[:, None]
    dl *= decay(tl.where(later, b_g[:, None] - b_g[None, :], 0.0), LOG2)
    dl = tl.where(later, -dl, 0.0)
    if IN_LOOPS:
        kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(NUM_K):
            b_k = rows(keys, H * K, o_i, i_k * BK + tl.arange(0, BK), m_t, K, BK)
            kk = tl.dot(b_k, tl.trans(b_k), kk, input_precision=PRECISION)
    elif NUM_K == 1:
        kk = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
    else:
        kk = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in tl.static_range(NUM_K):
            b_k = rows(keys, H * K, o_i, i_k * BK + tl.arange(0, BK), m_t, K, BK)
            kk = tl.dot(b_k, tl.trans(b_k), kk, input_precision=PRECISION)
    pairs = dl * kk
    b_dbeta += tl.sum(pairs, axis=1)
    pairs *= b_beta[:, None]
    b_dg = tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0) + through_w * b_beta
    tl.store(dbeta + head + o_i * HV, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)
    tl.store(dg + head + o_i * HV, b_dg, mask=m_t)
    b_dl = (dl * b_beta[:, None]).to(dtype)
    # The same transposed, as a product of its own: see triton_gradients on transposed left factors.
    dl_t = tl.dot(b_wy, tl.trans(b_factor), input_precision=PRECISION)
    earlier = (o_i[:, None] < o_i[None, :]) & m_t[None, :]
    dl_t *= decay(tl.where(earlier, b_g[None, :] - b_g[:, None], 0.0), LOG2)
    b_dl += tl.where(earlier, -dl_t * b_beta[None, :], 0.0).to(dtype)
    if IN_LOOPS:
        for i_k in range(NUM_K):
            o_k = i_k * BK + tl.arange(0, BK)
            dx = _keys_part(
                b_wy, du + head * V, state, HV * V, o_k, m_t, dtype, K, V, BT, BK, BV, PRECISION
            )
            dx *= -(e_g * b_beta)[:, None]
            b_k = rows(keys, H * K, o_i, o_k, m_t, K, BK)
            dx = tl.dot(b_dl, b_k, dx, input_precision=PRECISION)
            p_dk = dk_wy + head * K + o_i[:, None] * (HV * K) + o_k[None, :]
            tl.store(p_dk, dx.to(dtype), mask=m_t[:, None] & (o_k < K)[None, :])
    else:
        for i_k in tl.static_range(NUM_K):
            o_k = i_k * BK + tl.arange(0, BK)
            if NUM_K > 1:
                dx = _keys_part(
                    b_wy, du + head * V, state, HV * V, o_k, m_t, dtype, K, V, BT, BK, BV, PRECISION
                )
                b_k = rows(keys, H * K, o_i, o_k, m_t, K, BK)
            dx *= -(e_g * b_beta)[:, None]
            dx = tl.dot(b_dl, b_k, dx, input_precision=PRECISION)
            p_dk = dk_wy + head * K + o_i[:, None] * (HV * K) + o_k[None, :]
            tl.store(p_dk, dx.to(dtype), mask=m_t[:, None] & (o_k < K)[None, :])


def tile_of(k: Tensor, value_dim: int) -> dict[str, int]:
    """The tile of a launch: small where there is little shared memory, smallest for float32."""
    if k.dtype == torch.float32:
        keys, values, stages, warps = _FLOAT32_TILE
    else:
        keys, values, stages, warps = _LARGE_TILE if has_room(k.device) else _SMALL_TILE
    return {
        "BK": block(k.shape[-1], keys),
        "BV": block(value_dim, values),
        "num_stages": stages,
        "num_warps": warps,
    }


def wy_gradients(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    wy: Tensor,
    h: Tensor,
    du: Tensor,
    dg: Tensor,
    tables: dict[str, Any],
    log2_decay: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through ``w`` and ``u``.

    Args:
        k: ``[1, T, H, K]``, contiguous.
        v: ``[1, T, HV, V]``, contiguous.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk of 64 tokens.
        beta: ``[1, T, HV]``, contiguous.
        wy: ``[1, T, HV, 64]``, ``A`` of each chunk.
        h: ``[1, chunks, HV, K, V]``, the state at each chunk's start.
        du: ``[1, T, HV, V]``, gradient of ``u``; that of ``w`` is ``-du h^T``.
        dg: ``[1, T, HV]`` float32, written here: this share of the gradient of ``g``.
        tables: device tables ``cu_seqlens`` and ``chunk_indices``.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        The share of ``dk`` of each value head ``[1, T, HV, K]``, ``dv``, and ``dbeta``.
    """
    num_key_heads, key_dim = k.shape[2:]
    num_value_heads, value_dim = v.shape[2:]
    dk_wy = k.new_empty(*g.shape, key_dim)
    dv, dbeta = torch.empty_like(v), torch.empty_like(beta)
    _wy_kernel[(tables["chunk_indices"].shape[0] * num_value_heads,)](
        k=k,
        v=v,
        g=g,
        beta=beta,
        wy=wy,
        h=h,
        du=du,
        dv=dv,
        dbeta=dbeta,
        dg=dg,
        dk_wy=dk_wy,
        cu_seqlens=tables["cu_seqlens"],
        chunk_indices=tables["chunk_indices"],
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        BT=CHUNK,
        LOG2=log2_decay,
        IN_LOOPS=k.dtype == torch.float32,
        PRECISION=precision,
        **tile_of(k, value_dim),
    )
    return dk_wy, dv, dbeta
