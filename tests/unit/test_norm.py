# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: numbers of PyTorch's and of Megatron-Core's gated norm, gradients, Megatron's marks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.linear_cp.norm import RMSNorm
from megatron.linear_cp.testing.cpu import cpu_cuda


def _config(**changes: Any) -> Any:
    values = {
        "params_dtype": torch.float32,
        "sequence_parallel": False,
        "layernorm_zero_centered_gamma": False,
        "use_cpu_initialization": False,
        **changes,
    }
    return SimpleNamespace(**values)


def _norm(size: int, **changes: Any) -> RMSNorm:
    norm = RMSNorm(config=_config(**changes), hidden_size=size, eps=1e-6)
    with torch.no_grad():
        norm.weight.add_(torch.randn(size, generator=torch.Generator().manual_seed(5)))
    return norm


def _plain(
    x: torch.Tensor, gamma: torch.Tensor, gate: torch.Tensor | None, eps: float
) -> torch.Tensor:
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gamma
    return normed if gate is None else normed * gate / (1 + torch.exp(-gate))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_numbers_of_torch_rms_norm(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 24, dtype=torch.float64).to(dtype)
    norm = _norm(24, params_dtype=dtype)
    expected = F.rms_norm(x.double(), (24,), norm.weight.double(), 1e-6)
    out = norm(x)
    assert out.dtype == dtype
    # One rounding at the end, so half a unit in the last place of each value.
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-7}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_statistics_are_wide_for_half_input() -> None:
    """The sum of squares of these values overflows fp16 and loses the tail in bf16."""
    for dtype, value in ((torch.float16, 300.0), (torch.bfloat16, 3.0)):
        x = torch.full((1, 4096), value, dtype=dtype)
        out = RMSNorm(config=_config(params_dtype=dtype), hidden_size=4096)(x)
        assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_form_is_that_of_the_gdn_module(dtype: torch.dtype) -> None:
    """Norm, rounded to the input's dtype, times the SiLU of the gate in fp32, rounded again."""
    x = torch.randn(40, 16).to(dtype)
    gate = torch.randn(40, 16).to(dtype)
    norm = _norm(16, params_dtype=dtype)
    expected = (norm(x) * F.silu(gate.float())).to(dtype)
    assert torch.equal(norm(x, gate), expected)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_against_autograd(zero_centered: bool, gated: bool) -> None:
    torch.manual_seed(0)
    norm = _norm(8, params_dtype=torch.float64, layernorm_zero_centered_gamma=zero_centered)
    x = (2 * torch.randn(6, 2, 8, dtype=torch.float64)).requires_grad_()
    gate = (3 * torch.randn(6, 2, 8, dtype=torch.float64)).requires_grad_() if gated else None
    upstream = torch.randn(6, 2, 8, dtype=torch.float64)
    inputs = [x, norm.weight] + ([gate] if gate is not None else [])
    out = norm(x, gate)
    grads = torch.autograd.grad(out, inputs, upstream)
    gamma = norm.weight + 1 if zero_centered else norm.weight
    expected = _plain(x, gamma, gate, 1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
    for got, want in zip(grads, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_gradients_have_the_dtypes_of_their_inputs() -> None:
    norm = _norm(8, params_dtype=torch.float32)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(4, 8, requires_grad=True)
    norm(x, gate).sum().backward()
    assert x.grad is not None and gate.grad is not None and norm.weight.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert gate.grad.dtype == norm.weight.grad.dtype == torch.float32


def test_only_what_needs_a_gradient_gets_one() -> None:
    norm = _norm(8)
    norm.weight.requires_grad_(False)
    x = torch.randn(4, 8)
    gate = torch.randn(4, 8, requires_grad=True)
    norm(x, gate).sum().backward()
    assert gate.grad is not None and norm.weight.grad is None and x.grad is None


def test_strided_and_empty_input() -> None:
    norm = _norm(8)
    x = torch.randn(8, 5, 3).permute(1, 2, 0)
    torch.testing.assert_close(norm(x), norm(x.contiguous()), rtol=1e-6, atol=1e-6)
    empty = torch.randn(0, 8, requires_grad=True)
    norm(empty, torch.randn(0, 8)).sum().backward()
    assert norm.weight.grad is not None and torch.equal(norm.weight.grad, torch.zeros(8))


def test_zero_centred_gamma_starts_at_one() -> None:
    norm = RMSNorm(config=_config(layernorm_zero_centered_gamma=True), hidden_size=8)
    assert torch.equal(norm.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    plain = RMSNorm(config=_config(), hidden_size=8)
    assert torch.equal(norm(x), plain(x))


def test_marks_and_dtype_that_megatron_reads() -> None:
    norm = RMSNorm(_config(params_dtype=torch.bfloat16, sequence_parallel=True), 8)
    assert norm.weight.dtype == torch.bfloat16
    assert norm.weight.sequence_parallel is True  # type: ignore[attr-defined]
    assert RMSNorm(_config(), 8).weight.sequence_parallel is False  # type: ignore[attr-defined]


def test_built_under_the_stand_in_from_a_real_config() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    with cpu_cuda():
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        assert RMSNorm(config=config, hidden_size=8, eps=1e-5).weight.device.type == "cpu"


def test_less_is_kept_than_by_autograd() -> None:
    """Saved for backward: the input, the gate, the weight and one number a row."""
    norm = _norm(64, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    gate = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x, gate)
    assert sum(kept) == 2 * 32 * 64 * 2 + 64 * 2 + 32 * 4


def test_bad_shapes() -> None:
    norm = _norm(8)
    with pytest.raises(ValueError, match=r"over 8 values got input of shape \(2, 7\)"):
        norm(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"gate has shape \(2, 1\)"):
        norm(torch.randn(2, 8), torch.randn(2, 1))
