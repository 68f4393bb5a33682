# SPDX-License-Identifier: Apache-2.0
"""What every mode is given and must return."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megatron.linear_cp.ops import gated_delta_rule
from megatron.linear_cp.ops.causal_conv1d import causal_conv1d_qkv
from megatron.linear_cp.ops.gates import gates
from megatron.linear_cp.ops.heads import HeadShape
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
    def heads(self) -> HeadShape:
        """How ``qkv`` is divided."""
        return HeadShape(
            self.num_key_heads, self.key_head_dim, self.num_value_heads, self.value_head_dim
        )

    @property
    def qkv_sections(self) -> tuple[int, int, int]:
        """Channels of q, k and v in ``qkv``."""
        return self.heads.sections


class LinearCPMode(Protocol):
    """One way to run a linear-attention layer whose tokens are spread over ranks.

    A mode is stateless: the group, its size and every route come from the plan of the call.
    """

    def __call__(self, inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
        """Return the rule's output ``[1, T, HV, V]`` for the same local tokens, in plan order."""
        ...


def run_rule(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Convolution, gates and rule over the tokens and heads given: ``[1, T, HV, V]``."""
    q, k, v = causal_conv1d_qkv(
        inputs.qkv,
        inputs.conv_weight,
        inputs.conv_bias,
        inputs.activation,
        plan=plan,
        heads=inputs.heads,
        use_qk_l2norm=inputs.use_qk_l2norm,
        backend=inputs.backend,
    )
    g, beta = gates(inputs.alpha, inputs.beta, inputs.A_log, inputs.dt_bias, backend=inputs.backend)
    return gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        plan=plan,
        state_exchange=inputs.state_exchange,
        backend=inputs.backend,
    )


def with_tokens(
    inputs: GatedDeltaNetInputs, qkv: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor
) -> GatedDeltaNetInputs:
    """The same layer over other tokens."""
    return replace(inputs, qkv=qkv, beta=beta, alpha=alpha)
