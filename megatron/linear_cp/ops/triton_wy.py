# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels for the WY representation of every chunk.

With ``L_ts = beta_t exp(g_t - g_s) k_t.k_s`` for ``s < t`` and ``A = (I + L)^-1``, a chunk has
``w = A (beta exp(g) k)`` and ``u = A (beta v)``.

The triangular factor is inverted by blocks: with the inverses ``X`` and ``Y`` of two neighbouring
blocks and the part ``C`` of ``L`` between them, ``[[X, 0], [-Y C X, Y]]`` is the inverse of both
together. This starts at single rows and ends at the whole chunk. Like substitution, and unlike a
power series of ``L``, it stays accurate where ``L`` is large: nearly parallel keys, ``beta`` up to
2. One warp inverts a chunk: the blocks are then groups of registers, and nothing waits at barriers.

Float32 is for debugging and tests, where a kernel is compiled for a few launches, and each of its
products becomes three: there every step is on whole tiles, in a loop that is compiled once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.linear_cp.ops.triton_summary import CHUNK, decay

_KEYS = 64  # columns of keys at a time in the inversion
_COLUMNS, _NUM_WARPS, _NUM_STAGES = 64, 4, 3  # when the inverse is applied
# Of keys in the inversion and of keys or values when it is applied, in float32.
_FLOAT32_COLUMNS, _FLOAT32_WARPS, _FLOAT32_STAGES = 16, 4, 1


@triton.jit
def chunk_of(cu_seqlens, chunk_indices, i_c, BT: tl.constexpr):
    """First token and token count of a chunk."""
    i_n = tl.load(chunk_indices + i_c * 2).to(tl.int64)
    i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
    bos = tl.load(cu_seqlens + i_n).to(tl.int64) + i_t * BT
    eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    return bos, tl.minimum(eos - bos, BT).to(tl.int32)


@triton.jit
def rows(pointer, stride, o_row, o_col, m_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows ``stride`` apart, ``SIZE`` values each; in-chunk offsets fit 32 bits."""
    mask = m_row[:, None]
    if SIZE % BLOCK != 0:
        mask = mask & (o_col < SIZE)[None, :]
    return tl.load(pointer + o_row[:, None] * stride + o_col[None, :], mask=mask, other=0.0)


@triton.jit
def _lower(products, g_t, g_s, beta_t, m_t, DIAGONAL: tl.constexpr, LOG2: tl.constexpr):
    """A block of ``L`` from products of keys, on the diagonal or wholly below it."""
    valid = m_t[:, None] & (g_s == g_s)[None, :]
    if DIAGONAL:
        o = tl.arange(0, products.shape[0])
        valid = valid & (o[:, None] > o[None, :])
    # Masked before the exponential: a masked token has no decay of its own.
    gap = tl.where(valid, g_t[:, None] - g_s[None, :], 0.0)
    return tl.where(valid, products * beta_t[:, None] * decay(gap, LOG2), 0.0)


@triton.jit
def _halves(x):
    """A float32 tile as the sum of two bfloat16 tiles, 16 bits in all.

    In integers, because the compiler packs two values into one instruction only that way.
    """
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -65536
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (x - bits.to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
def _product(a, b):
    """``a @ b`` of float32 tiles to 16 bits, far below the result's rounding."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low)))


@triton.jit
def _quarters(x, HALF: tl.constexpr):
    """The quarters of a lower triangle: upper left, lower left, lower right."""
    left, right = tl.split(tl.permute(tl.reshape(x, [2 * HALF, 2, HALF]), (0, 2, 1)))
    upper, below = tl.split(tl.permute(tl.reshape(left, [2, HALF, HALF]), (1, 2, 0)))
    _, last = tl.split(tl.permute(tl.reshape(right, [2, HALF, HALF]), (1, 2, 0)))
    return upper, below, last


@triton.jit
def _triangle(upper, below, last, HALF: tl.constexpr):
    """The inverse of :func:`_quarters`."""
    left = tl.permute(tl.join(upper, below), (2, 0, 1))
    right = tl.permute(tl.join(tl.zeros_like(last), last), (2, 0, 1))
    both = tl.join(tl.reshape(left, [2 * HALF, HALF]), tl.reshape(right, [2 * HALF, HALF]))
    return tl.reshape(tl.permute(both, (0, 2, 1)), [2 * HALF, 2 * HALF])


@triton.jit
def _merge(x, lower, SIZE: tl.constexpr):
    """From inverses of blocks of ``SIZE`` rows to inverses of twice as many, side by side."""
    i = tl.arange(0, 16)[:, None] // SIZE
    j = tl.arange(0, 16)[None, :] // SIZE
    c = tl.where((i // 2 == j // 2) & (i != j), lower, 0.0)
    return x - _product(_product(x, c), x)


@triton.jit
def _inverse_16(lower):
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    x = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    x = _merge(x, lower, 2)
    x = _merge(x, lower, 4)
    return _merge(x, lower, 8)


@triton.jit
def _inverse_32(lower):
    upper, below, last = _quarters(lower, 16)
    x = _inverse_16(upper)
    y = _inverse_16(last)
    d = _product(_product(y, below), x)
    return _triangle(x, -d, y, 16)


@triton.jit
def _inverse(
    keys,
    g,
    beta,
    length,
    stride,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    LOG2: tl.constexpr,
):
    o_i = tl.arange(0, 64)
    p_x = tl.zeros([32, 32], dtype=tl.float32)
    p_d = tl.zeros([32, 32], dtype=tl.float32)
    p_y = tl.zeros([32, 32], dtype=tl.float32)
    for i_k in tl.static_range(0, K, BK):
        b_k = rows(keys, stride, o_i, i_k + tl.arange(0, BK), o_i < length, K, BK)
        k_x, k_y = tl.split(tl.permute(tl.reshape(b_k, [2, 32, BK]), (1, 2, 0)))
        p_x = tl.dot(k_x, tl.trans(k_x), p_x)
        p_d = tl.dot(k_y, tl.trans(k_x), p_d)
        p_y = tl.dot(k_y, tl.trans(k_y), p_y)
    o_x = tl.arange(0, 32)
    o_y = o_x + 32
    m_x = o_x < length
    m_y = o_y < length
    g_x = tl.load(g + o_x * HV, mask=m_x, other=0.0)
    g_y = tl.load(g + o_y * HV, mask=m_y, other=0.0)
    beta_x = tl.load(beta + o_x * HV, mask=m_x, other=0.0).to(tl.float32)
    beta_y = tl.load(beta + o_y * HV, mask=m_y, other=0.0).to(tl.float32)
    x = _inverse_32(_lower(p_x, g_x, g_x, beta_x, m_x, True, LOG2))
    y = _inverse_32(_lower(p_y, g_y, g_y, beta_y, m_y, True, LOG2))
    c = _lower(p_d, g_y, g_x, beta_y, m_y, False, LOG2)
    d = _product(_product(y, c), x)
    return _triangle(x, -d, y, 32)


@triton.jit
def _inverse_in_loops(
    keys,
    g,
    beta,
    length,
    stride,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_i = tl.arange(0, 64)
    m_t = o_i < length
    products = tl.zeros([64, 64], dtype=tl.float32)
    for i_k in range(0, K, BK):
        b_k = rows(keys, stride, o_i, i_k + tl.arange(0, BK), m_t, K, BK)
        products = tl.dot(b_k, tl.trans(b_k), products, input_precision=PRECISION)
    b_g = tl.load(g + o_i * HV, mask=m_t, other=0.0)
    b_beta = tl.load(beta + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
    lower = _lower(products, b_g, b_g, b_beta, m_t, True, LOG2)
    i = o_i[:, None]
    j = o_i[None, :]
    x = tl.where(i == j, 1.0, tl.zeros_like(lower))
    for level in range(6):
        # Between the two blocks of 2 ** level rows of each pair, as in _merge.
        between = ((i >> level) // 2 == (j >> level) // 2) & (i >> level != j >> level)
        c = tl.where(between, lower, 0.0)
        c = tl.dot(x, c, input_precision=PRECISION)
        x -= tl.dot(c, x, input_precision=PRECISION)
    return x


@triton.jit
def _apply(
    factor,
    x,
    y,
    stride_x,
    stride_y,
    m_t,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_i = tl.arange(0, BT)
    for start in range(0, SIZE, BC):
        o_c = start + tl.arange(0, BC)
        b_x = rows(x, stride_x, o_i, o_c, m_t, SIZE, BC)
        b_y = tl.dot(factor, b_x, input_precision=PRECISION).to(y.dtype.element_ty)
        p_y = y + o_i[:, None] * stride_y + o_c[None, :]
        tl.store(p_y, b_y, mask=m_t[:, None] & (o_c < SIZE)[None, :])


@triton.jit
def _inverse_kernel(
    k,
    g,
    beta,
    wy,
    cu_seqlens,
    chunk_indices,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    LOG2: tl.constexpr,
    IN_LOOPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A chunk of one value head.
    pid = tl.program_id(0)
    i_c, i_h = (pid // HV).to(tl.int64), (pid % HV).to(tl.int64)
    bos, length = chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    head = bos * HV + i_h
    keys = k + (bos * H + i_h // (HV // H)) * K
    if IN_LOOPS:
        b_wy = _inverse_in_loops(
            keys, g + head, beta + head, length, H * K, HV, K, BK, LOG2, PRECISION
        )
    else:
        b_wy = _inverse(keys, g + head, beta + head, length, H * K, HV, K, BK, LOG2)
    o_i = tl.arange(0, BT)
    p_wy = wy + head * BT + o_i[:, None] * (HV * BT) + o_i[None, :]
    tl.store(p_wy, b_wy.to(wy.dtype.element_ty), mask=(o_i < length)[:, None])


@triton.jit
def _apply_kernel(
    k,
    v,
    g,
    beta,
    wy,
    w,
    u,
    cu_seqlens,
    chunk_indices,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # A chunk of one value head. Decay and strength go on the columns of the small factor, so that
    # keys and values pass from memory to the products as they are.
    pid = tl.program_id(0)
    i_c, i_h = (pid // HV).to(tl.int64), (pid % HV).to(tl.int64)
    bos, length = chunk_of(cu_seqlens, chunk_indices, i_c, BT)
    head = bos * HV + i_h
    keys = k + (bos * H + i_h // (HV // H)) * K
    o_i = tl.arange(0, BT)
    m_t = o_i < length
    dtype = k.dtype.element_ty
    b_wy = rows(wy + head * BT, HV * BT, o_i, o_i, m_t, BT, BT)
    b_g = tl.load(g + head + o_i * HV, mask=m_t, other=0.0)
    b_beta = tl.load(beta + head + o_i * HV, mask=m_t, other=0.0).to(tl.float32)
    factor = b_wy.to(tl.float32) * b_beta[None, :]
    _apply(factor.to(dtype), v + head * V, u + head * V, HV * V, HV * V, m_t, V, BT, BC, PRECISION)
    factor *= decay(b_g, LOG2)[None, :]
    _apply(factor.to(dtype), keys, w + head * K, H * K, HV * K, m_t, K, BT, BC, PRECISION)


def block(size: int, most: int) -> int:
    """Columns of a tile for ``size`` columns."""
    # The products need at least 16 on every side.
    return min(most, max(16, triton.next_power_of_2(size)))


def wy_representation(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: dict[str, Any],
    log2_decay: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse factor ``A``, ``w`` and ``u`` of every chunk.

    Args:
        k: ``[1, T, H, K]``, contiguous, bfloat16, float16 or float32.
        v: ``[1, T, HV, V]``, contiguous, same dtype.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk of 64 tokens.
        beta: ``[1, T, HV]``, contiguous, any float dtype but float64.
        tables: device tables ``cu_seqlens`` and ``chunk_indices``.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        ``A [1, T, HV, 64]``: row ``t`` holds row ``t`` of its chunk's factor, zeros right of the
        diagonal, computed in float32 and rounded once; ``w [1, T, HV, K]``; ``u [1, T, HV, V]``.
        All in ``k``'s dtype.
    """
    in_loops = k.dtype == torch.float32
    wy = k.new_empty(*g.shape, CHUNK)
    num_key_heads, key_dim = k.shape[2:]
    num_value_heads = g.shape[2]
    _inverse_kernel[(tables["chunk_indices"].shape[0] * num_value_heads,)](
        k=k,
        g=g,
        beta=beta,
        wy=wy,
        cu_seqlens=tables["cu_seqlens"],
        chunk_indices=tables["chunk_indices"],
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        BT=CHUNK,
        BK=block(key_dim, _FLOAT32_COLUMNS if in_loops else _KEYS),
        LOG2=log2_decay,
        IN_LOOPS=in_loops,
        PRECISION=precision,
        num_warps=_FLOAT32_WARPS if in_loops else 1,
        num_stages=1,
    )
    return wy, *w_and_u(k, v, g, beta, wy, tables, log2_decay, precision)


def w_and_u(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    wy: Tensor,
    tables: dict[str, Any],
    log2_decay: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """``w`` and ``u`` again, from the inverse factor that :func:`wy_representation` left.

    Args:
        k: ``[1, T, H, K]``, contiguous, bfloat16, float16 or float32.
        v: ``[1, T, HV, V]``, contiguous, same dtype.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk of 64 tokens.
        beta: ``[1, T, HV]``, contiguous, any float dtype but float64.
        wy: ``[1, T, HV, 64]``, the inverse factor, contiguous.
        tables: device tables ``cu_seqlens`` and ``chunk_indices``.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        ``w [1, T, HV, K]`` and ``u [1, T, HV, V]`` in ``k``'s dtype.
    """
    num_key_heads, key_dim = k.shape[2:]
    num_value_heads, value_dim = v.shape[2:]
    columns, warps, stages = (
        (_FLOAT32_COLUMNS, _FLOAT32_WARPS, _FLOAT32_STAGES)
        if k.dtype == torch.float32
        else (_COLUMNS, _NUM_WARPS, _NUM_STAGES)
    )
    w, u = k.new_empty(*g.shape, key_dim), torch.empty_like(v)
    _apply_kernel[(tables["chunk_indices"].shape[0] * num_value_heads,)](
        k=k,
        v=v,
        g=g,
        beta=beta,
        wy=wy,
        w=w,
        u=u,
        cu_seqlens=tables["cu_seqlens"],
        chunk_indices=tables["chunk_indices"],
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        BT=CHUNK,
        BC=block(max(key_dim, value_dim), columns),
        LOG2=log2_decay,
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    return w, u
