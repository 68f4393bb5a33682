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

_BLOCK = 64
_WY_WARPS, _WY_STAGES = 4, 1
_CHUNK_WARPS, _CHUNK_STAGES = 4, 1


@triton.jit
def _chunk_of(cu_seqlens, chunk_indices, i_c, BT: tl.constexpr):
    """First token and token count of a chunk."""
    i_n = tl.load(chunk_indices + i_c * 2).to(tl.int64)
    i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
    bos = tl.load(cu_seqlens + i_n).to(tl.int64) + i_t * BT
    eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    return bos, tl.minimum(eos - bos, BT).to(tl.int32)


@triton.jit
def _rows(pointer, stride, o_row, o_col, m_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows ``stride`` apart, ``SIZE`` values each; in-chunk offsets fit 32 bits."""
    mask = m_row[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (o_col < SIZE)[None, :]
    return tl.load(pointer + o_row[:, None] * stride + o_col[None, :], mask=mask, other=0.0)


@triton.jit
def _rows_t(pointer, stride, o_row, o_col, m_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The same tile transposed."""
    mask = m_row[None, :]
    if SIZE % BLOCK != 0:
        mask = mask & (o_col < SIZE)[:, None]
    return tl.load(pointer + o_row[None, :] * stride + o_col[:, None], mask=mask, other=0.0)


@triton.jit
def _state(pointer, o_k, o_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """A tile of a ``[K, V]`` state."""
    at = o_k[:, None] * V + o_v[None, :]
    if K % BK == 0 and V % BV == 0:
        return tl.load(pointer + at)
    return tl.load(pointer + at, mask=(o_k < K)[:, None] & (o_v < V)[None, :], other=0.0)


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
    dl,
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
    PRECISION: tl.constexpr,
):
    # A chunk of one value head: dA = dw (beta exp(g) k)^T + du (beta v)^T with dw = -du h^T, then
    # dL = -A^T dA A^T, of which `dl` keeps the part that multiplies keys for _chunk_kernel.
    pid = tl.program_id(0)
    i_c, i_h = (pid // HV).to(tl.int64), (pid % HV).to(tl.int64)
    bos, length = _chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    head = bos * HV + i_h
    o_i = tl.arange(0, BT)
    m_t = o_i < length
    dtype = k.dtype.element_ty
    b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
    b_beta = tl.load(beta + head + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
    wy_t = _rows_t(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
    b_wy = _rows(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)

    da_t = tl.zeros([BT, BT], dtype=tl.float32)
    b_dbeta = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        b_du = _rows(du + head * V, HV * V, o_i, o_v, m_t, V, BV)
        b_v = _rows(v + head * V, HV * V, o_i, o_v, m_t, V, BV)
        da_t = tl.dot(b_v, tl.trans(b_du), da_t, input_precision=PRECISION)
        dvb = tl.dot(wy_t, b_du, input_precision=PRECISION)
        b_dbeta += tl.sum(dvb * b_v.to(tl.float32), axis=1)
        p_dv = dv + head * V + o_i[:, None] * (HV * V) + o_v[None, :]
        dvb = (dvb * b_beta[:, None]).to(dv.dtype.element_ty)
        tl.store(p_dv, dvb, mask=m_t[:, None] & (o_v < V)[None, :])

    e_g = decay(b_g, LOG2)
    keys = k + (bos * H + i_h // (HV // H)) * K
    kk = tl.zeros([BT, BT], dtype=tl.float32)
    da_keys_t = tl.zeros([BT, BT], dtype=tl.float32)
    through_w = tl.zeros([BT], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        dw_t = tl.zeros([BK, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_du = _rows(du + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_h = _state(h + (i_c * HV + i_h) * (K * V), o_k, o_v, K, V, BK, BV)
            dw_t = tl.dot(b_h, tl.trans(b_du), dw_t, input_precision=PRECISION)
        b_dw_t = (-dw_t).to(dtype)
        b_k = _rows(keys, H * K, o_i, o_k, m_t, K, BK)
        b_k_t = _rows_t(keys, H * K, o_i, o_k, m_t, K, BK)
        kk = tl.dot(b_k, b_k_t, kk, input_precision=PRECISION)
        da_keys_t = tl.dot(b_k, b_dw_t, da_keys_t, input_precision=PRECISION)
        dx_t = tl.dot(b_dw_t, b_wy, input_precision=PRECISION)
        through_w += tl.sum(dx_t * b_k_t.to(tl.float32), axis=0)

    upper = (o_i[:, None] < o_i[None, :]) & m_t[None, :]
    da_t = (da_t + da_keys_t * e_g[:, None]) * b_beta[:, None]
    b_da_t = tl.where(upper, da_t, 0.0).to(dtype)
    b_dl_t = tl.dot(b_wy, b_da_t, input_precision=PRECISION).to(dtype)
    dl_t = tl.dot(b_dl_t, b_wy, input_precision=PRECISION)
    gap_t = decay(tl.where(upper, b_g[None, :] - b_g[:, None], 0.0), LOG2)
    dl_t = tl.where(upper, -dl_t * gap_t, 0.0)
    pairs = dl_t * kk
    through_w *= e_g
    b_dbeta += tl.sum(pairs, axis=0) + through_w
    pairs *= b_beta[None, :]
    b_dg = tl.sum(pairs, axis=0) - tl.sum(pairs, axis=1) + through_w * b_beta
    tl.store(dbeta + head + o_i * HV, b_dbeta.to(dbeta.dtype.element_ty), mask=m_t)
    tl.store(dg + head + o_i * HV, b_dg, mask=m_t)
    p_dl = dl + head * BT + o_i[:, None] * (HV * BT) + o_i[None, :]
    tl.store(p_dl, (dl_t * b_beta[None, :]).to(dtype), mask=m_t[:, None])


@triton.jit
def _chunk_kernel(
    q,
    k,
    g,
    beta,
    wy,
    h,
    dh,
    v_new,
    do,
    du,
    dl,
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
    # A chunk of one key head, BK of its columns, over all of its value heads.
    NUM_K: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    i_k = (pid % NUM_K).to(tl.int64)
    i_hk = (pid // NUM_K % H).to(tl.int64)
    i_c = (pid // (NUM_K * H)).to(tl.int64)
    bos, length = _chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    o_i = tl.arange(0, BT)
    o_k = (i_k * BK).to(tl.int32) + tl.arange(0, BK)
    m_t, m_k = o_i < length, o_k < K
    dtype = k.dtype.element_ty
    at_key = (bos * H + i_hk) * K

    dq_sum = tl.zeros([BT, BK], dtype=tl.float32)
    dk_sum_t = tl.zeros([BK, BT], dtype=tl.float32)
    for i_r in tl.range(HV // H, num_stages=1):
        i_h = i_hk * (HV // H) + i_r
        head = bos * HV + i_h
        state = (i_c * HV + i_h) * (K * V)
        b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
        b_beta = tl.load(beta + head + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
        g_last = tl.load(g + head + (length - 1) * HV)
        e_g = decay(b_g, LOG2)

        # Through w and u.
        dw_t = tl.zeros([BK, BT], dtype=tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_du = _rows(du + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_h = _state(h + state, o_k, o_v, K, V, BK, BV)
            dw_t = tl.dot(b_h, tl.trans(b_du), dw_t, input_precision=PRECISION)
        b_wy = _rows(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
        dx_t = tl.dot((-dw_t).to(dtype), b_wy, input_precision=PRECISION)
        dk_sum_t += dx_t * (e_g * b_beta)[None, :]
        b_k_t = _rows_t(k + at_key, H * K, o_i, o_k, m_t, K, BK)
        dl_t = _rows(dl + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
        dk_sum_t = tl.dot(b_k_t, dl_t, dk_sum_t, input_precision=PRECISION)
        dk_sum_t = tl.dot(b_k_t, tl.trans(dl_t), dk_sum_t, input_precision=PRECISION)

        # Through the outputs and the state at the chunk's end. In dg every pair of tokens counts
        # once with each sign, from the same float32 number: what cancels, cancels exactly.
        # Decay is put on the rows of `do` and `v_new` so that their products add up in place.
        b_q = _rows(q + at_key, H * K, o_i, o_k, m_t, K, BK)
        b_k = _rows(k + at_key, H * K, o_i, o_k, m_t, K, BK)
        e_rest = decay(tl.where(m_t, g_last - b_g, 0.0), LOG2)
        ds = tl.zeros([BT, BT], dtype=tl.float32)
        from_start = tl.zeros([BT], dtype=tl.float32)
        to_end = tl.zeros([BT], dtype=tl.float32)
        state_dot = 0.0
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            b_do = _rows(do + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_new = _rows(v_new + head * V, HV * V, o_i, o_v, m_t, V, BV)
            b_h = _state(h + state, o_k, o_v, K, V, BK, BV)
            b_dh = _state(dh + state, o_k, o_v, K, V, BK, BV)
            ds = tl.dot(b_do, tl.trans(b_new), ds, input_precision=PRECISION)
            b_do = (b_do.to(tl.float32) * (e_g * scale)[:, None]).to(dtype)
            b_new = (b_new.to(tl.float32) * e_rest[:, None]).to(dtype)
            dq_sum = tl.dot(b_do, tl.trans(b_h), dq_sum, input_precision=PRECISION)
            dk_sum_t = tl.dot(b_dh, tl.trans(b_new), dk_sum_t, input_precision=PRECISION)
            qh = tl.dot(b_q, b_h, input_precision=PRECISION)
            from_start += tl.sum(qh * b_do.to(tl.float32), axis=1)
            kdh = tl.dot(b_k, b_dh, input_precision=PRECISION)
            to_end += tl.sum(kdh * b_new.to(tl.float32), axis=1)
            state_dot += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32))
        at_end = decay(g_last, LOG2) * state_dot + tl.sum(to_end)
        b_dg = from_start - to_end + tl.where(o_i == length - 1, at_end, 0.0)
        lower = (o_i[:, None] >= o_i[None, :]) & m_t[:, None]
        gap = decay(tl.where(lower, b_g[:, None] - b_g[None, :], 0.0), LOG2)
        ds = tl.where(lower, ds * gap * scale, 0.0)
        pairs = ds * tl.dot(b_q, b_k_t, input_precision=PRECISION)
        b_dg += tl.sum(pairs, axis=1) - tl.sum(pairs, axis=0)
        tl.store(dg + i_k * num_tokens * HV + head + o_i * HV, b_dg, mask=m_t)
        b_ds = ds.to(dtype)
        dq_sum = tl.dot(b_ds, b_k, dq_sum, input_precision=PRECISION)
        b_q_t = _rows_t(q + at_key, H * K, o_i, o_k, m_t, K, BK)
        dk_sum_t = tl.dot(b_q_t, b_ds, dk_sum_t, input_precision=PRECISION)

    p_dq = dq + at_key + o_i[:, None] * (H * K) + o_k[None, :]
    p_dk = dk + at_key + o_i[None, :] * (H * K) + o_k[:, None]
    tl.store(p_dq, dq_sum.to(dq.dtype.element_ty), mask=m_t[:, None] & m_k[None, :])
    tl.store(p_dk, dk_sum_t.to(dk.dtype.element_ty), mask=m_k[:, None] & m_t[None, :])


def _block(size: int) -> int:
    return min(_BLOCK, max(16, triton.next_power_of_2(size)))


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
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    dl = torch.empty_like(wy)
    key_blocks = triton.cdiv(key_dim, _block(key_dim))
    dg = g.new_empty(key_blocks + 1, *g.shape)  # one share per key block, the last through w and u
    shared = {
        "cu_seqlens": tables["cu_seqlens"],
        "chunk_indices": tables["chunk_indices"],
        "H": num_key_heads,
        "HV": num_value_heads,
        "K": key_dim,
        "V": value_dim,
        "BT": CHUNK,
        "BK": _block(key_dim),
        "BV": _block(value_dim),
        "LOG2": log2_decay,
        "PRECISION": precision,
    }
    _wy_kernel[(num_chunks * num_value_heads,)](
        k=k,
        v=v,
        g=g,
        beta=beta,
        wy=wy,
        h=h,
        du=du,
        dv=dv,
        dbeta=dbeta,
        dg=dg[-1],
        dl=dl,
        num_warps=_WY_WARPS,
        num_stages=_WY_STAGES,
        **shared,
    )
    _chunk_kernel[(num_chunks * num_key_heads * key_blocks,)](
        q=q,
        k=k,
        g=g,
        beta=beta,
        wy=wy,
        h=h,
        dh=dh,
        v_new=v_new,
        do=do,
        du=du,
        dl=dl,
        dq=dq,
        dk=dk,
        dg=dg,
        scale=scale,
        num_tokens=num_tokens,
        num_warps=_CHUNK_WARPS,
        num_stages=_CHUNK_STAGES,
        **shared,
    )
    return dq, dk, dv, dg.sum(0), dbeta
