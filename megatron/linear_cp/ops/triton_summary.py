# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the summary ``(A, b)`` of every segment and for its adjoint ``c``.

Both walk the chunks of a segment once and keep the state in registers, transposed (``[columns,
K]``): the state is then the register operand of each product and never passes through shared
memory, and nothing but the result is written. Columns of the state do not interact, so a program
owns a few columns of one value head of one segment.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.linear_cp import segments

CHUNK = 64  # tokens per chunk of the WY representation, fixed by FLA's kernels
_NUM_WARPS = 4
# Columns per program: with 64 the products run on Hopper's warp-group units. Two stages overlap
# loads in the first kernel; in the second they cost more registers than they save time.
_COLUMNS, _SUMMARY_STAGES, _ADJOINT_STAGES = 64, 2, 1
_SMALL_COLUMNS, _SMALL_STAGES = 32, 1  # large keys, or little shared memory
# Compiled for a few launches, and each product becomes three: what matters is how long that takes.
_FLOAT32_COLUMNS, _FLOAT32_WARPS = 16, 8
_SHARED_MEMORY = 70_000
WANTS_OFFSET, WANTS_BOTH = (tl.constexpr(x) for x in (segments.WANTS_OFFSET, segments.WANTS_BOTH))


@triton.jit
def decay(x, LOG2: tl.constexpr):
    """The factor that a cumulative decay ``x`` stands for: natural log, or log2 with ``LOG2``."""
    return tl.exp2(x) if LOG2 else tl.exp(x)


@triton.jit
def _summary_kernel(
    k,
    w,
    u,
    g,
    a,
    b,
    cu_seqlens,
    wants,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Column blocks of one head of one segment are neighbours: they read the same w and k.
    NUM_B: tl.constexpr = (V + BC - 1) // BC
    NUM_A: tl.constexpr = (K + BC - 1) // BC
    pid = tl.program_id(0)
    i_c = pid % (NUM_A + NUM_B)
    i_nh = (pid // (NUM_A + NUM_B)).to(tl.int64)
    i_n = i_nh // HV
    i_h = i_nh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)

    is_b = i_c < NUM_B
    # Nobody reads what is not wanted: no chunk is walked for it and nothing written.
    wanted = tl.load(wants + i_n) >= tl.where(is_b, WANTS_OFFSET, WANTS_BOTH)
    eos = tl.where(wanted, eos, bos)
    o_c = tl.where(is_b, i_c, i_c - NUM_B) * BC + tl.arange(0, BC)
    o_k = tl.arange(0, BK)
    o_i = tl.arange(0, BT)
    m_k = o_k < K
    m_v = (o_c < V) & is_b

    # The state starts as a column block of [0 | I].
    state = ((o_c[:, None] == o_k[None, :]) & (i_c >= NUM_B)).to(tl.float32)
    p_w = w + i_h * K + o_k[:, None]
    p_k = k + (i_h // (HV // H)) * K + o_k[None, :]
    p_u = u + i_h * V + o_c[:, None]
    p_g = g + i_h
    for start in range(bos, eos, BT):
        o_t = start + o_i
        m_t = o_t < eos
        w_t = tl.load(p_w + o_t[None, :] * (HV * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
        u_t = tl.load(p_u + o_t[None, :] * (HV * V), mask=m_v[:, None] & m_t[None, :], other=0.0)
        keys = tl.load(p_k + o_t[:, None] * (H * K), mask=m_t[:, None] & m_k[None, :], other=0.0)
        g_t = tl.load(p_g + o_t * HV, mask=m_t, other=0.0)
        g_last = tl.load(p_g + (tl.minimum(start + BT, eos) - 1) * HV)

        value = u_t.to(tl.float32) - tl.dot(state.to(w_t.dtype), w_t, input_precision=PRECISION)
        # Masked before the exponential: a masked token has no decay of its own.
        value *= decay(tl.where(m_t, g_last - g_t, 0.0), LOG2)[None, :]
        state *= decay(g_last, LOG2)
        state = tl.dot(value.to(keys.dtype), keys, state, input_precision=PRECISION)

    if is_b:
        p_out = b + (i_nh * K + o_k[None, :]) * V + o_c[:, None]
        tl.store(p_out, state, mask=m_k[None, :] & ((o_c < V) & wanted)[:, None])
    else:
        p_out = a + (i_nh * K + o_k[None, :]) * K + o_c[:, None]
        tl.store(p_out, state, mask=m_k[None, :] & ((o_c < K) & wanted)[:, None])


@triton.jit
def _adjoint_kernel(
    q,
    k,
    w,
    do,
    dv,
    g,
    c,
    cu_seqlens,
    wants,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BK: tl.constexpr,
    LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    NUM_C: tl.constexpr = (V + BC - 1) // BC
    pid = tl.program_id(0)
    i_c = pid % NUM_C
    i_nh = (pid // NUM_C).to(tl.int64)
    i_n = i_nh // HV
    i_h = i_nh % HV
    bos = tl.load(cu_seqlens + i_n).to(tl.int64)
    eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    wanted = tl.load(wants + i_n) >= WANTS_OFFSET
    eos = tl.where(wanted, eos, bos)

    o_c = i_c * BC + tl.arange(0, BC)
    o_k = tl.arange(0, BK)
    o_i = tl.arange(0, BT)
    m_k = o_k < K
    m_c = o_c < V

    state = tl.zeros([BC, BK], dtype=tl.float32)
    key_head = i_h // (HV // H)
    p_w = w + i_h * K + o_k[None, :]
    p_q = q + key_head * K + o_k[None, :]
    p_k = k + key_head * K + o_k[:, None]
    p_do = do + i_h * V + o_c[:, None]
    p_dv = dv + i_h * V + o_c[:, None]
    p_g = g + i_h
    num_chunks = tl.cdiv(eos - bos, BT)
    for i in range(num_chunks):
        start = bos + (num_chunks - 1 - i) * BT
        o_t = start + o_i
        m_t = o_t < eos
        m_tk = m_t[:, None] & m_k[None, :]
        m_ct = m_c[:, None] & m_t[None, :]
        keys_t = tl.load(p_k + o_t[None, :] * (H * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
        queries = tl.load(p_q + o_t[:, None] * (H * K), mask=m_tk, other=0.0)
        weights = tl.load(p_w + o_t[:, None] * (HV * K), mask=m_tk, other=0.0)
        do_t = tl.load(p_do + o_t[None, :] * (HV * V), mask=m_ct, other=0.0)
        dv_t = tl.load(p_dv + o_t[None, :] * (HV * V), mask=m_ct, other=0.0)
        g_t = tl.load(p_g + o_t * HV, mask=m_t, other=0.0)
        g_last = tl.load(p_g + (tl.minimum(start + BT, eos) - 1) * HV)

        value = tl.dot(state.to(keys_t.dtype), keys_t, input_precision=PRECISION)
        value *= decay(tl.where(m_t, g_last - g_t, 0.0), LOG2)[None, :]
        value += dv_t.to(tl.float32)
        out = do_t.to(tl.float32) * (decay(g_t, LOG2) * scale)[None, :]
        state *= decay(g_last, LOG2)
        state = tl.dot(out.to(queries.dtype), queries, state, input_precision=PRECISION)
        state = tl.dot((-value).to(weights.dtype), weights, state, input_precision=PRECISION)

    p_out = c + (i_nh * K + o_k[None, :]) * V + o_c[:, None]
    tl.store(p_out, state, mask=m_k[None, :] & (m_c & wanted)[:, None])


@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether a program may use about as much shared memory as the large tiles need."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return bool(getattr(properties, "shared_memory_per_block_optin", 0) >= _SHARED_MEMORY)


def _tiles(like: Tensor, key_dim: int, columns: int, stages: int) -> dict[str, int]:
    exact = like.dtype == torch.float32
    large = not exact and key_dim <= 128 and has_room(like.device)
    block = _COLUMNS if large else _FLOAT32_COLUMNS if exact else _SMALL_COLUMNS
    # The products need at least 16 on every side.
    return {
        "BT": CHUNK,
        "BC": min(block, max(16, triton.next_power_of_2(columns))),
        "BK": max(16, triton.next_power_of_2(key_dim)),
        "num_warps": _FLOAT32_WARPS if exact else _NUM_WARPS,
        "num_stages": stages if large else _SMALL_STAGES,
    }


def segment_summary(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    wants: Tensor,
    log2_decay: bool,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """The affine map of the state over each segment: ``S_out = A @ S_in + b``.

    Args:
        k: ``[1, T, H, K]`` keys, contiguous.
        w: ``[1, T, HV, K]`` of the WY representation, chunks of 64 tokens.
        u: ``[1, T, HV, V]``, likewise.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk.
        cu_seqlens: ``[N + 1]`` integer boundaries on the device.
        wants: ``[N]`` int32 on the device, as in :mod:`megatron.linear_cp.segments`.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        ``A [N, HV, K, K]`` and ``b [N, HV, K, V]``, float32; undefined where not wanted.
    """
    (_, _, num_value_heads, value_dim), (num_key_heads, key_dim) = u.shape, k.shape[2:]
    num_segments = cu_seqlens.shape[0] - 1
    a = k.new_empty(num_segments, num_value_heads, key_dim, key_dim, dtype=torch.float32)
    b = k.new_empty(num_segments, num_value_heads, key_dim, value_dim, dtype=torch.float32)
    tiles = _tiles(k, key_dim, max(key_dim, value_dim), _SUMMARY_STAGES)
    blocks = triton.cdiv(key_dim, tiles["BC"]) + triton.cdiv(value_dim, tiles["BC"])
    _summary_kernel[(blocks * num_segments * num_value_heads,)](
        k,
        w,
        u,
        g,
        a,
        b,
        cu_seqlens,
        wants,
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        LOG2=log2_decay,
        PRECISION=precision,
        **tiles,
    )
    return a, b


def segment_adjoint(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    do: Tensor,
    dv: Tensor,
    g: Tensor,
    cu_seqlens: Tensor,
    wants: Tensor,
    scale: float,
    log2_decay: bool,
    precision: str,
) -> Tensor:
    """``c = dL/dS_in`` of each segment when nothing flows back into its final state.

    Args:
        q: ``[1, T, H, K]`` queries, contiguous.
        k: ``[1, T, H, K]`` keys, contiguous.
        w: ``[1, T, HV, K]`` of the WY representation, chunks of 64 tokens.
        do: ``[1, T, HV, V]`` gradient of the output, contiguous.
        dv: ``[1, T, HV, V]`` gradient of the new values from the outputs of their own chunk.
        g: ``[1, T, HV]`` float32 decay, cumulative within each chunk.
        cu_seqlens: ``[N + 1]`` integer boundaries on the device.
        wants: ``[N]`` int32 on the device, as in :mod:`megatron.linear_cp.segments`.
        scale: factor on ``q``.
        log2_decay: ``g`` is in powers of two.
        precision: of float32 products, Triton's ``input_precision``.

    Returns:
        ``c [N, HV, K, V]``, float32; undefined where not wanted.
    """
    (_, _, num_value_heads, value_dim), (num_key_heads, key_dim) = do.shape, k.shape[2:]
    num_segments = cu_seqlens.shape[0] - 1
    c = k.new_empty(num_segments, num_value_heads, key_dim, value_dim, dtype=torch.float32)
    tiles = _tiles(k, key_dim, value_dim, _ADJOINT_STAGES)
    blocks = triton.cdiv(value_dim, tiles["BC"])
    _adjoint_kernel[(blocks * num_segments * num_value_heads,)](
        q,
        k,
        w,
        do,
        dv,
        g,
        c,
        cu_seqlens,
        wants,
        scale,
        H=num_key_heads,
        HV=num_value_heads,
        K=key_dim,
        V=value_dim,
        LOG2=log2_decay,
        PRECISION=precision,
        **tiles,
    )
    return c
