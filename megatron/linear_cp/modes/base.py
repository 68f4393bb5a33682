# SPDX-License-Identifier: Apache-2.0
"""What every mode is given and must return."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron.linear_cp.ops import causal_conv1d, gated_delta_rule
from megatron.linear_cp.plan import ContextParallelPlan


@dataclass(frozen=True)
class GatedDeltaNetInputs:
    """The projections of some tokens and what turns them into the rule's output.

    ``H`` key heads of ``K`` channels and ``HV`` value heads of ``V`` channels are those present
    here: the tensor-parallel rank's, or fewer inside a mode that deals heads out.

    Attributes:
        qkv: ``[1, T, 2 * H * K + HV * V]`` before the convolution.
        beta: ``[1, T, HV]`` before its sigmoid.
        alpha: ``[1, T, HV]``, the decay's input.
        conv_weight: ``[2 * H * K + HV * V, W]``.
        conv_bias: ``[2 * H * K + HV * V]`` or None.
        A_log, dt_bias: ``[HV]``.
        num_key_heads, num_value_heads, key_head_dim, value_head_dim: ``H``, ``HV``, ``K``, ``V``.
        activation: of the convolution.
        use_qk_l2norm: normalise q and k.
        state_exchange, backend: as in :func:`megatron.linear_cp.ops.gated_delta_rule`.
    """

    qkv: torch.Tensor
    beta: torch.Tensor
    alpha: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    activation: str = "silu"
    use_qk_l2norm: bool = True
    state_exchange: str = "scan"
    backend: str = "auto"

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Channels of q, k and v in ``qkv``."""
        qk = self.num_key_heads * self.key_head_dim
        return qk, qk, self.num_value_heads * self.value_head_dim


class LinearCPMode(Protocol):
    """One way to run a linear-attention layer whose tokens are spread over ranks.

    A mode is stateless: the group, its size and every route come from the plan of the call.
    """

    def __call__(self, inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
        """Return the rule's output ``[1, T, HV, V]`` for the same local tokens, in plan order."""
        ...


def run_rule(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Convolution, gates and rule over the tokens and heads given: ``[1, T, HV, V]``."""
    qkv = causal_conv1d(
        inputs.qkv,
        inputs.conv_weight,
        inputs.conv_bias,
        inputs.activation,
        plan=plan,
        backend=inputs.backend,
    )
    q, k, v = qkv.split(inputs.qkv_sections, dim=-1)
    key_shape = (inputs.num_key_heads, inputs.key_head_dim)
    g, beta = gates(inputs)
    return gated_delta_rule(
        q.unflatten(-1, key_shape),
        k.unflatten(-1, key_shape),
        v.unflatten(-1, (inputs.num_value_heads, inputs.value_head_dim)),
        g,
        beta,
        plan=plan,
        state_exchange=inputs.state_exchange,
        backend=inputs.backend,
        use_qk_l2norm_in_kernel=inputs.use_qk_l2norm,
    )


def gates(inputs: GatedDeltaNetInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay ``g`` in fp32 (fp64 for fp64) and write strength ``beta``, both ``[1, T, HV]``."""
    wide = torch.float64 if inputs.alpha.dtype == torch.float64 else torch.float32
    rate = inputs.A_log.to(wide).exp()
    g = -rate * F.softplus(inputs.alpha.to(wide) + inputs.dt_bias.to(wide))
    return g, inputs.beta.sigmoid()


def with_tokens(
    inputs: GatedDeltaNetInputs, qkv: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor
) -> GatedDeltaNetInputs:
    """The same layer over other tokens."""
    return replace(inputs, qkv=qkv, beta=beta, alpha=alpha)
