# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own GDN module beside ours: same weights, same tokens, same gradients wanted."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from torch import Tensor

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.testing.module import (
    ModuleCase,
    context_parallel_groups,
    forward_backward,
    gradients,
    local_inputs,
    make_config,
    make_state,
)

UPSTREAM_MODULES = ("megatron.core.ssm.gated_delta_net", "megatron.core.ssm.gated_delta_net.common")


def upstream_gated_delta_net(
    config: TransformerConfig, groups: Any, *, conv_bias: bool = False
) -> UpstreamGatedDeltaNet:
    """Megatron-Core's module on its local linear and norm modules, as layer 1."""
    backend = LocalSpecProvider()
    submodules = GatedDeltaNetSubmodules(
        in_proj=backend.column_parallel_linear(),
        out_norm=backend.layer_norm(rms_norm=True),
        out_proj=backend.row_parallel_linear(),
    )
    return UpstreamGatedDeltaNet(
        config, submodules, layer_number=1, conv_bias=conv_bias, pg_collection=groups
    )


def build_upstream_module(case: ModuleCase, config: TransformerConfig, groups: Any) -> Any:
    """Megatron-Core's module with the weights of ``build_module``, at one tensor-parallel rank."""
    module = upstream_gated_delta_net(config, groups, conv_bias=True)
    state = make_state(case)
    wide = ("A_log", "dt_bias") if config.linear_cp_fp32_decay else ()
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in wide else case.dtype)
    module.load_state_dict(state, strict=True)
    return module.to(case.device)


def run_upstream_module(case: ModuleCase) -> dict[str, Tensor]:
    """As ``testing.module.run_module``, of Megatron-Core's module; its CP is headwise on zigzag."""
    groups = context_parallel_groups()
    config = make_config(case, groups.cp.size())
    with case.on_device(), plain_l2norm(case.device):
        module = build_upstream_module(case, config, groups)
        index, hidden, grad, params = local_inputs(case, groups)
        out, dhidden = forward_backward(module, hidden, grad, params)
    tokens = {"out": out, "dhidden": dhidden}
    flat = {name: x.transpose(0, 1).flatten(0, 1) for name, x in tokens.items()}
    return flat | gradients(module) | {"index": index}


@contextlib.contextmanager
def plain_l2norm(device: str) -> Iterator[None]:
    """On CPU, where FLA's kernel for it does not run, the norm of queries and keys in torch."""
    with contextlib.ExitStack() as stack:
        for name in UPSTREAM_MODULES if device == "cpu" else ():
            # A package with a `common` module from 0.19 on.
            with contextlib.suppress(ModuleNotFoundError):
                stack.enter_context(
                    mock.patch.object(importlib.import_module(name), "l2norm", _l2norm)
                )
        yield


def _l2norm(x: Tensor, eps: float = 1e-6, **kwargs: Any) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
