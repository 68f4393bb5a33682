# SPDX-License-Identifier: Apache-2.0
"""chunkwise: every rank keeps its tokens and all heads; conv halos and states cross ranks."""

import torch

from megatron.linear_cp.modes.base import GatedDeltaNetInputs, run_rule
from megatron.linear_cp.plan import ContextParallelPlan


def chunkwise(inputs: GatedDeltaNetInputs, plan: ContextParallelPlan) -> torch.Tensor:
    """Run the local segments; the ops exchange what continues elsewhere."""
    return run_rule(inputs, plan)
