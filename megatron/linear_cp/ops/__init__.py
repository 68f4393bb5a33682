# SPDX-License-Identifier: Apache-2.0
"""The two context-parallel ops. They need PyTorch only: any trainer can use them."""

from megatron.linear_cp.ops.causal_conv1d import causal_conv1d
from megatron.linear_cp.ops.gated_delta_rule import gated_delta_rule

__all__ = ["causal_conv1d", "gated_delta_rule"]
