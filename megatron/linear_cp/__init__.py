# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for linear-attention layers on Megatron-Core.

Names are imported on first use, so that ``megatron.linear_cp.ops`` needs PyTorch only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.linear_cp.version import __version__

if TYPE_CHECKING:
    from megatron.linear_cp.bridge import with_linear_cp
    from megatron.linear_cp.config import (
        LinearCPConfigMixin,
        TransformerConfig,
        resolve_linear_cp_mode,
    )
    from megatron.linear_cp.gated_delta_net import GatedDeltaNet
    from megatron.linear_cp.layer_specs import (
        get_gated_delta_net_module_spec,
        get_gdn_hybrid_layer_spec,
        use_linear_cp,
    )
    from megatron.linear_cp.modes import register_linear_cp_mode
    from megatron.linear_cp.packed_seq_params import resolve_cp_group
    from megatron.linear_cp.plan import ContextParallelPlan

__all__ = [
    "ContextParallelPlan",
    "GatedDeltaNet",
    "LinearCPConfigMixin",
    "TransformerConfig",
    "__version__",
    "get_gated_delta_net_module_spec",
    "get_gdn_hybrid_layer_spec",
    "register_linear_cp_mode",
    "resolve_cp_group",
    "resolve_linear_cp_mode",
    "use_linear_cp",
    "with_linear_cp",
]

_HOME = {
    "ContextParallelPlan": "plan",
    "GatedDeltaNet": "gated_delta_net",
    "LinearCPConfigMixin": "config",
    "TransformerConfig": "config",
    "get_gated_delta_net_module_spec": "layer_specs",
    "get_gdn_hybrid_layer_spec": "layer_specs",
    "register_linear_cp_mode": "modes",
    "resolve_cp_group": "packed_seq_params",
    "resolve_linear_cp_mode": "config",
    "use_linear_cp": "layer_specs",
    "with_linear_cp": "bridge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
