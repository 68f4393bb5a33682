# SPDX-License-Identifier: Apache-2.0
"""The rule's decay and write strength from the layer's projections, on the GPU.

``g = -exp(A_log) * softplus(alpha + dt_bias)`` and ``beta = sigmoid(b)``: one kernel forward, one
backward. Rows may be strided, so slices of a projection are read, and slices of its gradient
written, in place. Sums over tokens are made in a fixed order: results repeat bitwise.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # of a program's tile
_PROGRAMS = 256  # at most, in backward: each leaves one row of partial sums
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _sigmoid_and_softplus(x):
    # As torch.nn.functional.softplus: the identity above 20. The exponential of -|x| overflows
    # nowhere and log1p is spelled out: for small e, log(1 + e) alone would lose the digits of e.
    e = tl.exp(-tl.abs(x))
    above = 1 + e
    rounded = above - 1
    log1p = tl.where(rounded == 0, e, tl.log(above) * (e / tl.where(rounded == 0, 1.0, rounded)))
    softplus = tl.where(x > 20, x, tl.maximum(x, 0.0) + log1p)
    sigmoid = tl.where(x >= 0, 1 / above, e / above)
    return sigmoid, softplus


@triton.jit(do_not_specialize=["T"])
def _gates_forward_kernel(
    alpha,
    b,
    a_log,
    dt_bias,
    g,
    beta,
    T,
    alpha_stride,
    b_stride,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_h = tl.arange(0, BH)
    m_h = o_h < HV
    mask = (o_t < T)[:, None] & m_h[None, :]
    rate = tl.exp(tl.load(a_log + o_h, mask=m_h, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    p_alpha = alpha + o_t[:, None] * alpha_stride + o_h[None, :]
    x = tl.load(p_alpha, mask=mask, other=0.0).to(tl.float32) + shift[None, :]
    _, softplus = _sigmoid_and_softplus(x)
    at = o_t[:, None] * HV + o_h[None, :]
    tl.store(g + at, -rate[None, :] * softplus, mask=mask)
    p_b = b + o_t[:, None] * b_stride + o_h[None, :]
    strength, _ = _sigmoid_and_softplus(tl.load(p_b, mask=mask, other=0.0).to(tl.float32))
    tl.store(beta + at, strength.to(beta.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "blocks"])
def _gates_backward_kernel(
    dg,
    dbeta,
    alpha,
    b,
    a_log,
    dt_bias,
    dalpha,
    db,
    partial,
    T,
    blocks,
    alpha_stride,
    b_stride,
    dg_stride,
    dbeta_stride,
    dalpha_stride,
    db_stride,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    # A program walks `blocks` blocks of tokens and keeps its sums in registers.
    pid = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BH)
    m_h = o_h < HV
    rate = tl.exp(tl.load(a_log + o_h, mask=m_h, other=0.0).to(tl.float32))
    shift = tl.load(dt_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
    of_a_log = tl.zeros([BT, BH], dtype=tl.float32)
    of_dt_bias = tl.zeros([BT, BH], dtype=tl.float32)
    for i in range(blocks):
        o_t = (pid * blocks + i) * BT + tl.arange(0, BT)
        mask = (o_t < T)[:, None] & m_h[None, :]
        p_alpha = alpha + o_t[:, None] * alpha_stride + o_h[None, :]
        x = tl.load(p_alpha, mask=mask, other=0.0).to(tl.float32) + shift[None, :]
        sigmoid, softplus = _sigmoid_and_softplus(x)
        p_dg = dg + o_t[:, None] * dg_stride + o_h[None, :]
        scaled = -rate[None, :] * tl.load(p_dg, mask=mask, other=0.0).to(tl.float32)
        of_a_log += scaled * softplus
        grad = scaled * tl.where(x > 20, 1.0, sigmoid)
        of_dt_bias += grad
        p_dalpha = dalpha + o_t[:, None] * dalpha_stride + o_h[None, :]
        tl.store(p_dalpha, grad.to(dalpha.dtype.element_ty), mask=mask)
        p_b = b + o_t[:, None] * b_stride + o_h[None, :]
        strength, _ = _sigmoid_and_softplus(tl.load(p_b, mask=mask, other=0.0).to(tl.float32))
        p_dbeta = dbeta + o_t[:, None] * dbeta_stride + o_h[None, :]
        grad = tl.load(p_dbeta, mask=mask, other=0.0).to(tl.float32) * strength * (1 - strength)
        p_db = db + o_t[:, None] * db_stride + o_h[None, :]
        tl.store(p_db, grad.to(db.dtype.element_ty), mask=mask)
    tl.store(partial + pid * 2 * HV + o_h, tl.sum(of_a_log, axis=0), mask=m_h)
    tl.store(partial + (pid * 2 + 1) * HV + o_h, tl.sum(of_dt_bias, axis=0), mask=m_h)


def _check(alpha: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
    if any(t.dtype not in _FLOATS for t in (alpha, b)):
        raise ValueError(
            f"the fused gates take float32, bfloat16 and float16, got {alpha.dtype} and {b.dtype}"
        )
    if alpha.ndim != 3 or len(alpha) != 1 or b.shape != alpha.shape:
        raise ValueError(
            f"alpha and b must both be [1, T, HV], got {list(alpha.shape)} and {list(b.shape)}"
        )
    expected = alpha.shape[-1:]
    if A_log.shape != expected or dt_bias.shape != expected:
        raise ValueError(
            f"A_log and dt_bias must be {list(expected)}, got {list(A_log.shape)} and "
            f"{list(dt_bias.shape)}"
        )


def _rows(x: Tensor) -> Tensor:
    """The tensor itself when heads are adjacent: a slice of a projection needs no copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gradient_of(x: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.shape != x.shape or out.dtype != x.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"a gradient buffer must be {list(x.shape)} {x.dtype} with adjacent heads, got "
            f"{list(out.shape)} {out.dtype} with strides {out.stride()}"
        )
    return out


def _sizes(num_heads: int) -> dict[str, int]:
    width = triton.next_power_of_2(num_heads)
    return {"HV": num_heads, "BH": width, "BT": max(1, _ELEMENTS // width)}


def forward(alpha: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log decay ``g`` and write strength ``beta``.

    Args:
        alpha: ``[1, T, HV]``, float32, bfloat16 or float16; rows may be strided, ``T`` may be 0.
        b: ``[1, T, HV]``, beta before its sigmoid; likewise, of its own dtype.
        A_log: ``[HV]``, any float dtype; float64 is rounded to float32.
        dt_bias: ``[HV]``, likewise.

    Returns:
        ``g [1, T, HV]`` in float32 and ``beta [1, T, HV]`` in ``b``'s dtype, both contiguous.

    Raises:
        ValueError: float64 projections, or shapes that do not fit.
    """
    _check(alpha, b, A_log, dt_bias)
    g = torch.empty(alpha.shape, dtype=torch.float32, device=alpha.device)
    beta = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    if g.numel() == 0:
        return g, beta
    alpha, b = _rows(alpha), _rows(b)
    num_tokens, num_heads = alpha.shape[1:]
    sizes = _sizes(num_heads)
    _gates_forward_kernel[(triton.cdiv(num_tokens, sizes["BT"]),)](
        alpha,
        b,
        A_log.contiguous(),
        dt_bias.contiguous(),
        g,
        beta,
        num_tokens,
        alpha.stride(1),
        b.stride(1),
        **sizes,
    )
    return g, beta


def backward(
    dg: Tensor,
    dbeta: Tensor,
    alpha: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    out_alpha: Tensor | None = None,
    out_b: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward`, which is computed again.

    Args:
        dg: ``[1, T, HV]``, any dtype the kernels take; rows may be strided.
        dbeta: ``[1, T, HV]``, likewise.
        alpha, b, A_log, dt_bias: as for :func:`forward`.
        out_alpha: where to write its gradient: ``[1, T, HV]`` in ``alpha``'s dtype, rows may be
            strided. None allocates it.
        out_b: the same for ``b``.

    Returns:
        ``dalpha, db, dA_log, ddt_bias``, each in its input's shape and dtype.

    Raises:
        ValueError: as :func:`forward`, or a buffer of another shape, dtype or layout.
    """
    _check(alpha, b, A_log, dt_bias)
    if dg.shape != alpha.shape or dbeta.shape != alpha.shape:
        raise ValueError(
            f"dg and dbeta must be {list(alpha.shape)}, got {list(dg.shape)} and "
            f"{list(dbeta.shape)}"
        )
    dalpha, db = _gradient_of(alpha, out_alpha), _gradient_of(b, out_b)
    if alpha.numel() == 0:
        return dalpha, db, torch.zeros_like(A_log), torch.zeros_like(dt_bias)
    alpha, b, dg, dbeta = _rows(alpha), _rows(b), _rows(dg), _rows(dbeta)
    num_tokens, num_heads = alpha.shape[1:]
    sizes = _sizes(num_heads)
    token_blocks = triton.cdiv(num_tokens, sizes["BT"])
    blocks = triton.cdiv(token_blocks, _PROGRAMS)
    programs = triton.cdiv(token_blocks, blocks)
    partial = torch.empty(programs, 2, num_heads, dtype=torch.float32, device=alpha.device)
    _gates_backward_kernel[(programs,)](
        dg,
        dbeta,
        alpha,
        b,
        A_log.contiguous(),
        dt_bias.contiguous(),
        dalpha,
        db,
        partial,
        num_tokens,
        blocks,
        alpha.stride(1),
        b.stride(1),
        dg.stride(1),
        dbeta.stride(1),
        dalpha.stride(1),
        db.stride(1),
        **sizes,
    )
    dA_log, ddt_bias = partial.sum(0)
    return dalpha, db, dA_log.to(A_log.dtype), ddt_bias.to(dt_bias.dtype)
