# SPDX-License-Identifier: Apache-2.0
"""RMSNorm for stacks without Transformer Engine, with the gate that follows the delta rule."""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * gamma`` over the last dimension, optionally times ``silu(gate)``.

    Takes the place of Megatron-Core's local norm, which refuses sequence parallelism and
    zero-centred gamma. Statistics and products are fp32 (fp64 for fp64 input) whatever the input.
    The backward pass recomputes the normalised input: only ``x``, ``gate`` and at most one number a
    row are kept. On CUDA, but for float64, each pass is one Triton kernel of the same arithmetic.

    Args:
        config: read for ``params_dtype``, ``sequence_parallel``, ``layernorm_zero_centered_gamma``
            and ``use_cpu_initialization``.
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        persist_layer_norm, zero_centered_gamma, normalization: passed by Megatron-Core to its own
            norms; unused, the config decides.

    Attributes:
        weight: ``[hidden_size]``; gamma, or gamma - 1 where gamma is zero-centred.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "RMSNorm",
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        on_gpu = torch.cuda.is_available() and not config.use_cpu_initialization
        self.weight = torch.nn.Parameter(
            torch.empty(
                hidden_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device() if on_gpu else None,
            )
        )
        # Each rank sees a part of the sequence: Megatron-Core then sums this gradient over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gamma of one."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise ``x``.

        Args:
            x: ``[..., hidden_size]``.
            gate: of the same shape, any floating dtype; the normalised input, rounded to ``x``'s
                dtype, is multiplied by its SiLU.

        Returns:
            Of ``x``'s shape and dtype.

        Raises:
            ValueError: shapes that do not fit.
        """
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"RMSNorm over {self.hidden_size} values got input of shape {tuple(x.shape)}; the "
                "last dimension must be the normalised one"
            )
        if gate is not None and gate.shape != x.shape:
            raise ValueError(
                f"gate has shape {tuple(gate.shape)} but the input {tuple(x.shape)}; they must be "
                "equal"
            )
        out: torch.Tensor = _RMSNorm.apply(x, self.weight, gate, self.eps, self.zero_centered)
        return out

    def extra_repr(self) -> str:
        """Size, eps and kind of gamma, for printing."""
        return f"{self.hidden_size}, eps={self.eps}, zero_centered={self.zero_centered}"


_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _is_fused(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None) -> bool:
    tensors = [x, weight] if gate is None else [x, weight, gate]
    return all(t.is_cuda and t.dtype in _FUSED_DTYPES for t in tensors)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        gate: torch.Tensor | None,
        eps: float,
        zero_centered: bool,
    ) -> torch.Tensor:
        ctx.eps, ctx.zero_centered = eps, zero_centered
        ctx.fused = _is_fused(x, weight, gate)
        if ctx.fused:
            # Imported late: an installation for the CPU may lack Triton.
            from megatron.linear_cp.ops import triton_norm

            ctx.save_for_backward(x, weight, gate)
            return triton_norm.forward(x, weight, gate, eps, zero_centered)
        dtype = _compute_dtype(x)
        wide = x.to(dtype)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out = (wide * rstd).mul_(_gamma(weight, dtype, zero_centered)).to(x.dtype)
        if gate is not None:
            out = torch.nn.functional.silu(gate.to(dtype)).mul_(out).to(x.dtype)
        ctx.save_for_backward(x, weight, gate, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.fused:
            from megatron.linear_cp.ops import triton_norm

            x, weight, gate = ctx.saved_tensors
            grads = triton_norm.backward(grad, x, weight, gate, ctx.eps, ctx.zero_centered)
            return *grads, None, None
        x, weight, gate, rstd = ctx.saved_tensors
        dtype = _compute_dtype(x)
        gamma = _gamma(weight, dtype, ctx.zero_centered)
        normed = x.to(dtype) * rstd
        grad = grad.to(dtype)
        grad_gate = None
        if gate is not None:
            wide = gate.to(dtype)
            sigmoid = torch.sigmoid(wide)
            silu = wide * sigmoid
            if ctx.needs_input_grad[2]:
                # d silu = sigmoid * (1 + gate * (1 - sigmoid)), and gate * sigmoid is silu.
                slope = sigmoid + silu * (1 - sigmoid)
                rounded = (normed * gamma).to(x.dtype)
                grad_gate = slope.mul_(rounded).mul_(grad).to(gate.dtype)
            grad = silu.mul_(grad)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            rows = (grad * normed).reshape(-1, normed.shape[-1])
            grad_weight = rows.sum(0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad = grad * gamma
            projection = (grad * normed).mean(-1, keepdim=True)
            grad_x = grad.sub_(normed.mul_(projection)).mul_(rstd).to(x.dtype)
        return grad_x, grad_weight, grad_gate, None, None


def _gamma(weight: torch.Tensor, dtype: torch.dtype, zero_centered: bool) -> torch.Tensor:
    wide = weight.to(dtype)
    return wide + 1 if zero_centered else wide
