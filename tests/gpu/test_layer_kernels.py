# SPDX-License-Identifier: Apache-2.0
"""The fused convolution, norm and gates against float64 autograd, on the GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from megatron.linear_cp.norm import RMSNorm
from megatron.linear_cp.ops import triton_conv, triton_gates, triton_norm
from megatron.linear_cp.ops.heads import HeadShape
from tests.layer_kernel_checks import (
    check_conv,
    check_gates,
    check_norm,
    check_plain_conv,
    segments_of,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# One-token segments, some shorter than the convolution, and one with blocks inside it.
RAGGED = (1, 2, 3, 1500, 1, 64, 40)
QWEN = HeadShape(2, 128, 4, 128)
ODD = HeadShape(2, 24, 3, 40)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_conv_heads(dtype: torch.dtype) -> None:
    check_conv(RAGGED, QWEN, 4, True, "silu", True, dtype, "cuda")


@pytest.mark.parametrize(
    ("lengths", "heads", "width", "bias", "activation", "l2norm"),
    [
        (RAGGED, ODD, 4, False, "silu", True),
        ((33, 64, 1, 1, 1), HeadShape(1, 256, 1, 8), 2, True, None, False),
        ((1, 1, 1, 1, 9, 700), HeadShape(1, 8, 2, 16), 8, True, "silu", True),
        ((40,), HeadShape(1, 64, 1, 64), 1, True, "silu", True),
    ],
    ids=["odd", "plain", "wider-than-segments", "width-1"],
)
def test_conv_sizes(
    lengths: tuple[int, ...],
    heads: HeadShape,
    width: int,
    bias: bool,
    activation: str | None,
    l2norm: bool,
) -> None:
    check_conv(lengths, heads, width, bias, activation, l2norm, BF16, "cuda")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_conv_without_heads(dtype: torch.dtype) -> None:
    check_plain_conv(RAGGED, 640, 4, True, "silu", dtype, "cuda")


def test_conv_of_thousands_of_tiny_segments() -> None:
    check_conv((3, 1, 4) * 700, QWEN, 4, True, "silu", True, BF16, "cuda")


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_of_heads(dtype: torch.dtype, zero_centered: bool) -> None:
    check_norm((1, 3000, 5), 128, True, zero_centered, dtype, dtype, device="cuda")


@pytest.mark.parametrize("dim", [8, 96, 2048, 16384, 20480])
@pytest.mark.parametrize("gated", [False, True])
def test_norm_sizes(dim: int, gated: bool) -> None:
    check_norm((33, 7), dim, gated, False, BF16, gate_dtype=F32, device="cuda")


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_gates(dtype: torch.dtype) -> None:
    check_gates(5000, 32, dtype, device="cuda")
    check_gates(70_001, 5, dtype, torch.bfloat16 if dtype == BF16 else F32, device="cuda")


def test_norm_module_runs_fused_but_for_fp64() -> None:
    config = SimpleNamespace(
        params_dtype=BF16,
        sequence_parallel=False,
        layernorm_zero_centered_gamma=True,
        use_cpu_initialization=False,
    )
    norm = RMSNorm(config, 64)
    x = torch.randn(3, 5, 64, device="cuda", dtype=BF16, requires_grad=True)
    gate = torch.randn_like(x, requires_grad=True)
    y = norm(x, gate)
    assert torch.equal(y, triton_norm.forward(x, norm.weight, gate, norm.eps, True))
    y.backward(torch.ones_like(y))
    wide = [t.detach().double().requires_grad_() for t in (x, gate)]
    exact = RMSNorm(SimpleNamespace(**vars(config) | {"params_dtype": torch.float64}), 64)
    exact(*wide).backward(torch.ones_like(wide[0]))
    for got, want in zip((x, gate, norm.weight), (*wide, exact.weight), strict=True):
        assert got.grad is not None and want.grad is not None
        assert got.grad.dtype == BF16 and want.grad.dtype == torch.float64
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=3e-2, atol=3e-2)


def test_no_host_sync_once_tables_and_kernels_exist() -> None:
    segments = segments_of(RAGGED)
    tokens, dim = segments.num_tokens, QWEN.channels
    conv = (
        torch.randn(1, tokens, dim, device="cuda", dtype=BF16),
        torch.randn(len(RAGGED), 3, dim, device="cuda", dtype=BF16),
        torch.randn(dim, 4, device="cuda", dtype=BF16),
        torch.randn(dim, device="cuda", dtype=BF16),
        "silu",
        segments,
        QWEN,
        True,
    )
    x = torch.randn(1, tokens, 4, 128, device="cuda", dtype=BF16)
    weight = torch.ones(128, device="cuda", dtype=BF16)
    gates = [torch.randn(1, tokens, 4, device="cuda", dtype=BF16) for _ in range(2)]
    gates += [torch.randn(4, device="cuda") for _ in range(2)]

    def step() -> None:
        triton_conv.backward_heads(*triton_conv.forward_heads(*conv), *conv)
        triton_norm.backward(
            triton_norm.forward(x, weight, x, 1e-6, False), x, weight, x, 1e-6, False
        )
        triton_gates.backward(*triton_gates.forward(*gates), *gates)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()  # the mode does catch a sync
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_empty() -> None:
    segments = segments_of(())
    x = torch.zeros(1, 0, QWEN.channels, device="cuda")
    weight = torch.ones(QWEN.channels, 4, device="cuda")
    rest = (x, torch.zeros(0, 3, QWEN.channels, device="cuda"), weight, None, "silu", segments)
    q, k, v = triton_conv.forward_heads(*rest, QWEN, True)
    assert q.shape == k.shape == (1, 0, 2, 128) and v.shape == (1, 0, 4, 128)
    dx, dhalo, dweight, dbias = triton_conv.backward_heads(q, k, v, *rest, QWEN, True)
    assert dx.shape == x.shape and dhalo.shape == rest[1].shape and dbias is None
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert triton_conv.forward(*rest).shape == x.shape

    gamma = torch.ones(128, device="cuda")
    y = triton_norm.forward(v, gamma, v, 1e-6, False)
    assert y.shape == v.shape
    sums = triton_norm.backward(y, v, gamma, v, 1e-6, False)[1]
    assert torch.equal(sums, torch.zeros_like(gamma))

    alpha, rate = torch.zeros(1, 0, 4, device="cuda"), torch.ones(4, device="cuda")
    g, beta = triton_gates.forward(alpha, alpha, rate, rate)
    assert g.shape == beta.shape == alpha.shape
    grads = triton_gates.backward(g, beta, alpha, alpha, rate, rate)
    assert torch.equal(grads[2], torch.zeros_like(rate))


def test_inputs_that_the_kernels_cannot_take_are_refused() -> None:
    segments = segments_of((4,))
    x, halo = torch.zeros(1, 4, 16, device="cuda"), torch.zeros(1, 3, 16, device="cuda")
    weight = torch.zeros(16, 4, device="cuda")
    with pytest.raises(ValueError, match="float64"):
        triton_conv.forward(x.double(), halo, weight, None, "silu", segments)
    with pytest.raises(ValueError, match="halo must be"):
        triton_conv.forward(x, halo[:, 1:], weight, None, "silu", segments)
    with pytest.raises(ValueError, match="makes 24 channels"):
        triton_conv.forward_heads(
            x, halo, weight, None, "silu", segments, HeadShape(1, 8, 1, 8), True
        )
    with pytest.raises(ValueError, match="out must be"):
        triton_conv.backward_heads(
            *(x[..., :0], x[..., :0], x, x, halo, weight, None, "silu", segments),
            HeadShape(0, 1, 1, 16),
            False,
            out=x[:, 1:],
        )
    with pytest.raises(ValueError, match="float64"):
        triton_gates.forward(x.double(), x, weight[:, 0], weight[:, 0])
    with pytest.raises(ValueError, match=r"A_log and dt_bias must be \[16\]"):
        triton_gates.forward(x, x, weight[0], weight[0])
