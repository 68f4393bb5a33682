# SPDX-License-Identifier: Apache-2.0
"""The kernels behind :mod:`megatron.linear_cp.ops.triton_conv`, which says how they go about it.

Their arguments are that module's, plus: ``owner [T]``, the segment of each token; ``steps``, tokens
of a run; ``H``, ``K`` and ``VC``, key heads, their channels and the channels of all values; ``R``,
runs of a program; ``U``, tokens read ahead at a
time, and ``UH`` those where halos may be met; ``BK`` and ``BV``, channels of a program.
"""

import triton
import triton.language as tl

from megatron.linear_cp.ops.l2norm import L2NORM_EPS

_L2NORM_EPS = tl.constexpr(L2NORM_EPS)


@triton.jit
def _load_taps(weight, bias, o_d, m_d, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    taps = ()
    for j in tl.static_range(W):
        tap = tl.load(weight + o_d * W + j, mask=m_d, other=0.0).to(tl.float32)
        taps += (tap[None, :],)
    shift = tl.zeros([1, o_d.shape[0]], dtype=tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return taps, shift


@triton.jit
def _load_rows(p, rows, stride, o_d, mask):
    return tl.load(p + (rows * stride)[:, None] + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def _locate(owner, cu_seqlens, t, T):
    """Segment of each token and the token's place in it, -1 behind the last token."""
    live = t < T
    row = tl.load(owner + t, mask=live, other=0).to(tl.int64)
    bos = tl.load(cu_seqlens + row, mask=live, other=0).to(tl.int64)
    return row, tl.where(live, t - bos, -1).to(tl.int32)


# fmt: off
@triton.jit
def _first_window(
    x, halo, owner, cu_seqlens, t, T, stride_t, o_d, m_d,
    D: tl.constexpr, W: tl.constexpr, INNER: tl.constexpr,
):
    # fmt: on
    """The ``W - 1`` inputs before each of the tokens ``t``, oldest first."""
    window = ()
    if INNER:
        for j in tl.static_range(W - 1):
            now = _load_rows(x, t - (W - 1 - j), stride_t, o_d, m_d[None, :])
            window += (now.to(tl.float32),)
    else:
        row, place = _locate(owner, cu_seqlens, t, T)
        for j in tl.static_range(W - 1):
            offset = W - 1 - j
            inside = (place >= offset)[:, None] & m_d[None, :]
            before = ((place >= 0) & (place < offset))[:, None] & m_d[None, :]
            token = _load_rows(x, t - offset, stride_t, o_d, inside).to(tl.float32)
            entry = _load_rows(halo, row * (W - 1) + place + j, D, o_d, before).to(tl.float32)
            window += (token + entry,)
    return window


@triton.jit
def _enter_segments(window, halo, row, place, o_d, m_d, D: tl.constexpr, W: tl.constexpr):
    """The window with the halo in rows that stand at a segment's first token."""
    fresh = (place == 0)[:, None]
    replaced = ()
    for j in tl.static_range(W - 1):
        entry = _load_rows(halo, row * (W - 1) + j, D, o_d, fresh & m_d[None, :])
        replaced += (tl.where(fresh, entry.to(tl.float32), window[j]),)
    return replaced


@triton.jit
def _sigmoid(z):
    # The square of a reciprocal root is two instructions; a division takes six more.
    root = tl.rsqrt(1 + tl.exp(-z))
    return root * root


@triton.jit
def _convolve(window, taps, shift, W: tl.constexpr):
    z = taps[W - 1] * window[W - 1] + shift
    for j in tl.static_range(W - 1):
        z += taps[j] * window[j]
    return z


@triton.jit
def _gradient_of_sums(z, d, SILU: tl.constexpr, NORM: tl.constexpr):
    """From the gradient of a head's output to that of the sums before the activation."""
    y, slope = z, 1.0
    if SILU:
        sigmoid = _sigmoid(z)
        y = z * sigmoid
        slope = sigmoid + y * (1 - sigmoid)
    if NORM:
        inverse = tl.rsqrt(tl.sum(y * y, axis=1) + _L2NORM_EPS)
        along = tl.sum(y * d, axis=1) * inverse * inverse
        d = (d - y * along[:, None]) * inverse[:, None]
    return d * slope


@triton.jit
def _is_inner(owner, cu_seqlens, first, last, T, W: tl.constexpr):
    """Whether the tokens are all of one segment, none of them among its first ``W - 1``."""
    row = tl.load(owner + first)
    same = row == tl.load(owner + tl.minimum(last, T - 1))
    return same & (last < T) & (first - tl.load(cu_seqlens + row) >= W - 1)


# fmt: off
@triton.jit
def _walk_forward(
    x, halo, weight, bias, out, owner, cu_seqlens, first, T, steps, stride_t, o_d, o_out, m_d,
    D: tl.constexpr, OUT: tl.constexpr, W: tl.constexpr, R: tl.constexpr, U: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, INNER: tl.constexpr,
):
    # fmt: on
    t = first + tl.arange(0, R) * steps
    taps, shift = _load_taps(weight, bias, o_d, m_d, W, HAS_BIAS)
    window = _first_window(x, halo, owner, cu_seqlens, t, T, stride_t, o_d, m_d, D, W, INNER)
    p_x = x + (t * stride_t)[:, None] + o_d[None, :]
    p_out = out + (t * OUT)[:, None] + o_out[None, :]
    for i in range(0, steps, U):
        inputs = ()
        for u in tl.static_range(U):
            mask = m_d[None, :]
            if not INNER:
                mask &= (t + (i + u) < T)[:, None]
            inputs += (tl.load(p_x + (i + u) * stride_t, mask=mask, other=0.0),)
        for u in tl.static_range(U):
            mask = m_d[None, :]
            if not INNER:
                row, place = _locate(owner, cu_seqlens, t + (i + u), T)
                window = _enter_segments(window, halo, row, place, o_d, m_d, D, W)
                mask &= (place >= 0)[:, None]
            window += (inputs[u].to(tl.float32),)
            y = _convolve(window, taps, shift, W)
            window = window[1:]
            if SILU:
                y *= _sigmoid(y)
            if NORM:
                y *= tl.rsqrt(tl.sum(y * y, axis=1) + _L2NORM_EPS)[:, None]
            tl.store(p_out + (i + u) * OUT, y.to(out.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _walk_backward(
    dy, x, halo, weight, bias, dx, partial, owner, cu_seqlens, first, T, steps, stride_t,
    dy_stride, dx_stride, o_d, o_out, m_d,
    D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, U: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, INNER: tl.constexpr,
):
    # fmt: on
    # x[t] feeds the outputs t .. t+W-1 of its own segment, so a run reads W - 1 tokens more than
    # it owns; those count for dx only.
    t = first + tl.arange(0, R) * steps
    taps, shift = _load_taps(weight, bias, o_d, m_d, W, HAS_BIAS)
    window = _first_window(x, halo, owner, cu_seqlens, t, T, stride_t, o_d, m_d, D, W, INNER)
    zero = tl.zeros([R, BD], dtype=tl.float32)
    pending, dtaps, dshift = (), (), zero
    for _ in tl.static_range(W - 1):
        pending += (zero,)
    for _ in tl.static_range(W):
        dtaps += (zero,)
    p_x = x + (t * stride_t)[:, None] + o_d[None, :]
    p_dy = dy + (t * dy_stride)[:, None] + o_out[None, :]
    p_dx = dx + ((t - (W - 1)) * dx_stride)[:, None] + o_d[None, :]
    for i in range(0, steps + W - 1, U):
        inputs, grads = (), ()
        for u in tl.static_range(U):
            mask = m_d[None, :]
            if not INNER:
                mask &= (t + (i + u) < T)[:, None]
            inputs += (tl.load(p_x + (i + u) * stride_t, mask=mask, other=0.0),)
            grads += (tl.load(p_dy + (i + u) * dy_stride, mask=mask, other=0.0),)
        for u in tl.static_range(U):
            if not INNER:
                row, place = _locate(owner, cu_seqlens, t + (i + u), T)
                window = _enter_segments(window, halo, row, place, o_d, m_d, D, W)
            window += (inputs[u].to(tl.float32),)
            z = _convolve(window, taps, shift, W)
            dz = _gradient_of_sums(z, grads[u].to(tl.float32), SILU, NORM)

            own = tl.where(i + u < steps, dz, 0.0)
            if not INNER:
                own = tl.where((place >= 0)[:, None], own, 0.0)
            sums = ()
            for j in tl.static_range(W):
                sums += (dtaps[j] + own * window[j],)
            dtaps = sums
            if HAS_BIAS:
                dshift += own
            window = window[1:]

            # The oldest of the pending gradients is W - 1 tokens back, and now complete.
            pending += (zero,)
            updated = ()
            for j in tl.static_range(W):
                share = dz
                if not INNER:
                    share = tl.where((place >= W - 1 - j)[:, None], dz, 0.0)
                updated += (pending[j] + taps[j] * share,)
            pending = updated[1:]
            mask = m_d[None, :] & (i + u >= W - 1)
            if not INNER:
                mask &= (t + (i + u - (W - 1)) < T)[:, None]
            tl.store(p_dx + (i + u) * dx_stride, updated[0].to(dx.dtype.element_ty), mask=mask)

    for j in tl.static_range(W):
        tl.store(partial + j * D + o_d, tl.sum(dtaps[j], axis=0), mask=m_d)
    if HAS_BIAS:
        tl.store(partial + W * D + o_d, tl.sum(dshift, axis=0), mask=m_d)


@triton.jit(do_not_specialize=["T", "steps"])
def conv_forward_kernel(
    x,
    halo,
    weight,
    bias,
    q,
    k,
    v,
    cu_seqlens,
    owner,
    T,
    steps,
    stride_t,
    H: tl.constexpr,
    K: tl.constexpr,
    VC: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    U: tl.constexpr,
    UH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
):
    """Outputs of one head over a block of tokens."""
    D: tl.constexpr = 2 * H * K + VC
    COLUMNS: tl.constexpr = 2 * H + (VC + BV - 1) // BV
    pid = tl.program_id(0)
    first = (pid // COLUMNS).to(tl.int64) * R * steps
    column = pid % COLUMNS
    inner = _is_inner(owner, cu_seqlens, first, first + R * steps - 1, T, W)
    if column < 2 * H:
        out = q
        if column >= H:
            out = k
        m_d = tl.arange(0, BK) < K
        o_d = column * K + tl.arange(0, BK)
        o_out = (column % H) * K + tl.arange(0, BK)
        # fmt: off
        if inner:
            _walk_forward(x, halo, weight, bias, out, owner, cu_seqlens, first, T, steps, stride_t,
                          o_d, o_out, m_d, D, H * K, W, R, U, HAS_BIAS, SILU, NORM, True)
        else:
            _walk_forward(x, halo, weight, bias, out, owner, cu_seqlens, first, T, steps, stride_t,
                          o_d, o_out, m_d, D, H * K, W, R, UH, HAS_BIAS, SILU, NORM, False)
        # fmt: on
    else:
        o_v = (column - 2 * H) * BV + tl.arange(0, BV)
        m_v = o_v < VC
        o_x = 2 * H * K + o_v
        # fmt: off
        if inner:
            _walk_forward(x, halo, weight, bias, v, owner, cu_seqlens, first, T, steps, stride_t,
                          o_x, o_v, m_v, D, VC, W, R, U, HAS_BIAS, SILU, False, True)
        else:
            _walk_forward(x, halo, weight, bias, v, owner, cu_seqlens, first, T, steps, stride_t,
                          o_x, o_v, m_v, D, VC, W, R, UH, HAS_BIAS, SILU, False, False)
        # fmt: on


@triton.jit(do_not_specialize=["T", "steps"])
def conv_backward_kernel(
    dq,
    dk,
    dv,
    x,
    halo,
    weight,
    bias,
    dx,
    partial,
    cu_seqlens,
    owner,
    T,
    steps,
    stride_t,
    dq_stride,
    dk_stride,
    dv_stride,
    dx_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    VC: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    U: tl.constexpr,
    UH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
):
    """Input gradients of one head over a block of tokens, and the block's share of dweight."""
    D: tl.constexpr = 2 * H * K + VC
    COLUMNS: tl.constexpr = 2 * H + (VC + BV - 1) // BV
    pid = tl.program_id(0)
    block = (pid // COLUMNS).to(tl.int64)
    first = block * R * steps
    column = pid % COLUMNS
    inner = _is_inner(owner, cu_seqlens, first, first + R * steps + W - 2, T, W)
    partial += block * ((W + HAS_BIAS) * D)
    if column < 2 * H:
        dy, dy_stride = dq, dq_stride
        if column >= H:
            dy, dy_stride = dk, dk_stride
        m_d = tl.arange(0, BK) < K
        o_d = column * K + tl.arange(0, BK)
        o_out = (column % H) * K + tl.arange(0, BK)
        # fmt: off
        if inner:
            _walk_backward(dy, x, halo, weight, bias, dx, partial, owner, cu_seqlens, first, T,
                           steps, stride_t, dy_stride, dx_stride, o_d, o_out, m_d,
                           D, W, R, BK, U, HAS_BIAS, SILU, NORM, True)
        else:
            _walk_backward(dy, x, halo, weight, bias, dx, partial, owner, cu_seqlens, first, T,
                           steps, stride_t, dy_stride, dx_stride, o_d, o_out, m_d,
                           D, W, R, BK, UH, HAS_BIAS, SILU, NORM, False)
        # fmt: on
    else:
        o_v = (column - 2 * H) * BV + tl.arange(0, BV)
        m_v = o_v < VC
        o_x = 2 * H * K + o_v
        # fmt: off
        if inner:
            _walk_backward(dv, x, halo, weight, bias, dx, partial, owner, cu_seqlens, first, T,
                           steps, stride_t, dv_stride, dx_stride, o_x, o_v, m_v,
                           D, W, R, BV, U, HAS_BIAS, SILU, False, True)
        else:
            _walk_backward(dv, x, halo, weight, bias, dx, partial, owner, cu_seqlens, first, T,
                           steps, stride_t, dv_stride, dx_stride, o_x, o_v, m_v,
                           D, W, R, BV, UH, HAS_BIAS, SILU, False, False)
        # fmt: on


# fmt: off
@triton.jit
def _walk_halo(
    dy, x, halo, weight, bias, dhalo, cu_seqlens, n, N, stride_t, dy_stride, o_d, o_out, m_d,
    D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    NORM: tl.constexpr,
):
    # fmt: on
    # Row r of a segment's halo feeds the outputs 0 .. r of that segment.
    live = n < N
    bos = tl.load(cu_seqlens + n, mask=live, other=0).to(tl.int64)
    length = tl.load(cu_seqlens + n + 1, mask=live, other=0).to(tl.int64) - bos
    taps, shift = _load_taps(weight, bias, o_d, m_d, W, HAS_BIAS)
    window, grads = (), ()
    for j in tl.static_range(W - 1):
        entry = _load_rows(halo, n * (W - 1) + j, D, o_d, live[:, None] & m_d[None, :])
        window += (entry.to(tl.float32),)
    for i in tl.static_range(W - 1):
        mask = (i < length)[:, None] & m_d[None, :]
        window += (_load_rows(x, bos + i, stride_t, o_d, mask).to(tl.float32),)
        z = _convolve(window, taps, shift, W)
        window = window[1:]
        d = _load_rows(dy, bos + i, dy_stride, o_out, mask).to(tl.float32)
        grads += (tl.where(mask, _gradient_of_sums(z, d, SILU, NORM), 0.0),)
    for r in tl.static_range(W - 1):
        grad = taps[r] * grads[0]
        for i in tl.static_range(1, r + 1):
            grad += taps[r - i] * grads[i]
        p_dhalo = dhalo + ((n * (W - 1) + r) * D)[:, None] + o_d[None, :]
        tl.store(p_dhalo, grad.to(dhalo.dtype.element_ty), mask=live[:, None] & m_d[None, :])


@triton.jit(do_not_specialize=["N"])
def conv_halo_kernel(
    dq,
    dk,
    dv,
    x,
    halo,
    weight,
    bias,
    dhalo,
    cu_seqlens,
    N,
    stride_t,
    dq_stride,
    dk_stride,
    dv_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    VC: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    NORM: tl.constexpr,
):
    """Halo gradients of one head over R segments."""
    D: tl.constexpr = 2 * H * K + VC
    COLUMNS: tl.constexpr = 2 * H + (VC + BV - 1) // BV
    pid = tl.program_id(0)
    n = (pid // COLUMNS).to(tl.int64) * R + tl.arange(0, R)
    column = pid % COLUMNS
    if column < 2 * H:
        dy, dy_stride = dq, dq_stride
        if column >= H:
            dy, dy_stride = dk, dk_stride
        m_d = tl.arange(0, BK) < K
        o_d = column * K + tl.arange(0, BK)
        o_out = (column % H) * K + tl.arange(0, BK)
        # fmt: off
        _walk_halo(dy, x, halo, weight, bias, dhalo, cu_seqlens, n, N, stride_t, dy_stride,
                   o_d, o_out, m_d, D, W, HAS_BIAS, SILU, NORM)
        # fmt: on
    else:
        o_v = (column - 2 * H) * BV + tl.arange(0, BV)
        m_v = o_v < VC
        o_x = 2 * H * K + o_v
        # fmt: off
        _walk_halo(dv, x, halo, weight, bias, dhalo, cu_seqlens, n, N, stride_t, dv_stride,
                   o_x, o_v, m_v, D, W, HAS_BIAS, SILU, False)
        # fmt: on
