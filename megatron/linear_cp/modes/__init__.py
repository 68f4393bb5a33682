# SPDX-License-Identifier: Apache-2.0
"""The context-parallel modes and their registry."""

from megatron.linear_cp.modes.base import GatedDeltaNetInputs, LinearCPMode
from megatron.linear_cp.modes.registry import (
    check_linear_cp_executor,
    linear_cp_mode_runs,
    linear_cp_modes,
    register_linear_cp_mode,
    run_linear_cp_mode,
)

__all__ = [
    "GatedDeltaNetInputs",
    "LinearCPMode",
    "check_linear_cp_executor",
    "linear_cp_mode_runs",
    "linear_cp_modes",
    "register_linear_cp_mode",
    "run_linear_cp_mode",
]
