# SPDX-License-Identifier: Apache-2.0
"""The layer between its projections: random inputs, the fp64 reference, one rank's run of a mode.

A test makes whole-sequence inputs, runs :func:`run_mode` on every rank, puts the parts together
with :func:`assemble`, and compares with :func:`layer_reference`: the output and every gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.linear_cp.context_parallel_layout import get_thd_context_parallel_rank_indices
from megatron.linear_cp.modes import GatedDeltaNetInputs, run_linear_cp_mode
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.testing.reference import (
    causal_conv1d_reference,
    gated_delta_rule_reference,
)

TOKEN_TENSORS = ("qkv", "beta", "alpha")
PARAMETERS = ("conv_weight", "conv_bias", "A_log", "dt_bias")


@dataclass(frozen=True)
class LayerShape:
    """Heads and widths of one layer."""

    num_key_heads: int = 4
    num_value_heads: int = 8
    key_head_dim: int = 8
    value_head_dim: int = 8
    conv_kernel_size: int = 4

    @property
    def conv_dim(self) -> int:
        """Channels of q, k and v together."""
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )


def make_layer_inputs(
    shape: LayerShape, num_tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> dict[str, Tensor]:
    """Random projections and parameters of ``num_tokens`` tokens, with slow decay.

    Returns:
        The tensors of :class:`megatron.linear_cp.modes.GatedDeltaNetInputs` by name, and
        ``grad_out [1, T, HV, V]`` to drive backward.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    heads = shape.num_value_heads
    tensors = {
        "qkv": normal(1, num_tokens, shape.conv_dim),
        "beta": normal(1, num_tokens, heads),
        "alpha": normal(1, num_tokens, heads),
        "conv_weight": normal(shape.conv_dim, shape.conv_kernel_size),
        "conv_bias": normal(shape.conv_dim),
        # exp(A_log) is about 0.05: a state that leaks across a boundary stays visible.
        "A_log": -3.0 + 0.3 * normal(heads),
        "dt_bias": normal(heads),
        "grad_out": normal(1, num_tokens, heads, shape.value_head_dim),
    }
    return {name: x.to(dtype) for name, x in tensors.items()}


def layer_reference(
    tensors: dict[str, Tensor], shape: LayerShape, cu_seqlens: Sequence[int]
) -> dict[str, Tensor]:
    """Output and all gradients of the layer in float64, token by token, on whole sequences."""
    leaves = {
        name: tensors[name].detach().double().requires_grad_()
        for name in TOKEN_TENSORS + PARAMETERS
    }
    qkv = causal_conv1d_reference(
        leaves["qkv"], leaves["conv_weight"], leaves["conv_bias"], cu_seqlens=cu_seqlens
    )
    qk = shape.num_key_heads * shape.key_head_dim
    q, k, v = qkv.split([qk, qk, shape.num_value_heads * shape.value_head_dim], dim=-1)
    out = gated_delta_rule_reference(
        q.unflatten(-1, (shape.num_key_heads, -1)),
        k.unflatten(-1, (shape.num_key_heads, -1)),
        v.unflatten(-1, (shape.num_value_heads, -1)),
        -leaves["A_log"].exp() * F.softplus(leaves["alpha"] + leaves["dt_bias"]),
        leaves["beta"].sigmoid(),
        cu_seqlens=cu_seqlens,
        use_qk_l2norm=True,
    )
    out.backward(tensors["grad_out"].double())
    return {"out": out.detach()} | {f"d{name}": _grad(leaf) for name, leaf in leaves.items()}


def run_mode(
    mode: str,
    plan: ContextParallelPlan,
    tensors: dict[str, Tensor],
    shape: LayerShape,
    *,
    backend: str = "auto",
    state_exchange: str = "scan",
) -> dict[str, Tensor]:
    """This rank's output and gradients under ``mode``, from the whole-sequence ``tensors``."""
    mine = plan.local_indices.on(tensors["qkv"].device)
    leaves = {name: tensors[name].detach().clone() for name in PARAMETERS}
    leaves |= {name: tensors[name].detach().index_select(1, mine) for name in TOKEN_TENSORS}
    for leaf in leaves.values():
        leaf.requires_grad_()
    inputs = GatedDeltaNetInputs(
        qkv=leaves["qkv"],
        beta=leaves["beta"],
        alpha=leaves["alpha"],
        conv_weight=leaves["conv_weight"],
        conv_bias=leaves["conv_bias"],
        A_log=leaves["A_log"],
        dt_bias=leaves["dt_bias"],
        num_key_heads=shape.num_key_heads,
        num_value_heads=shape.num_value_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
        backend=backend,
        state_exchange=state_exchange,
    )
    out = run_linear_cp_mode(mode, inputs, plan)
    out.backward(tensors["grad_out"].index_select(1, mine))
    return {"out": out.detach()} | {f"d{name}": _grad(leaf) for name, leaf in leaves.items()}


def run_rows(
    mode: str,
    layout: str,
    rows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    shape: LayerShape,
    *,
    device: str = "cpu",
    backend: str = "auto",
    state_exchange: str = "scan",
) -> list[dict[str, Tensor]]:
    """:func:`run_mode` over packed rows on the default group, for a worker pool."""
    results = []
    for row in rows:
        plan = ContextParallelPlan.build(
            row, dist.group.WORLD, layout=layout, conv_kernel_size=shape.conv_kernel_size
        )
        tensors = {
            name: x.to(device) for name, x in make_layer_inputs(shape, row[-1], dtype).items()
        }
        results.append(
            run_mode(mode, plan, tensors, shape, backend=backend, state_exchange=state_exchange)
        )
    return results


def assemble(
    parts: Sequence[dict[str, Tensor]], cu_seqlens: Sequence[int], layout: str
) -> dict[str, Tensor]:
    """Whole-sequence tensors from every rank's part; parameter gradients add up over ranks."""
    whole: dict[str, Tensor] = {}
    for name, first in parts[0].items():
        if name.removeprefix("d") in PARAMETERS:
            whole[name] = torch.stack([part[name] for part in parts]).sum(0)
            continue
        out = first.new_full((1, cu_seqlens[-1], *first.shape[2:]), float("nan"))
        for rank, part in enumerate(parts):
            index = get_thd_context_parallel_rank_indices(
                torch.tensor(cu_seqlens), len(parts), rank, layout
            )
            out[:, index] = part[name]
        whole[name] = out
    return whole


def _grad(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise AssertionError(f"no gradient reached a tensor of shape {tuple(leaf.shape)}")
    return leaf.grad
