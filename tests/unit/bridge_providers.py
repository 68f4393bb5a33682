# SPDX-License-Identifier: Apache-2.0
"""Providers for the tests of ``megatron.linear_cp.bridge``.

A small stand-in with Megatron-Bridge's call pattern (checks and derived fields in ``finalize()``,
the spec a function, the model from ``provide()``), and Bridge's real ``GPTModelProvider`` where
megatron-bridge is installed: ``pip install --no-deps megatron-bridge==0.6.2``, and with their
dependencies ``omegaconf`` and ``transformers``, which its provider module imports.
"""

import abc
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig as UpstreamConfig

from megatron.linear_cp import GatedDeltaNet, LinearCPConfigMixin, get_gdn_hybrid_layer_spec
from megatron.linear_cp.attention import SelfAttention

DECLARED = tuple(field.name for field in dataclasses.fields(LinearCPConfigMixin))
# What Bridge's package init asks for is far more than its provider module does.
NEEDED = ("megatron.bridge", "omegaconf", "transformers")


def hybrid_spec(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """A hybrid's block spec with Megatron-Core's own GDN and attention, without Transformer Engine.

    Megatron-Core's function for this needs Transformer Engine, hence ours with its classes in it.
    """
    block = get_gdn_hybrid_layer_spec(config, vp_stage=vp_stage, pp_rank=pp_rank)
    theirs = {GatedDeltaNet: UpstreamGatedDeltaNet, SelfAttention: MegatronSelfAttention}
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.module = theirs[attention.module]
    return block


def stage_blind_spec(config: Any) -> TransformerBlockSubmodules:
    return hybrid_spec(config)


@dataclasses.dataclass
class LateConfig(UpstreamConfig):
    """Megatron-Core's work is put off, and called by the name of its class as Bridge does."""

    def __post_init__(self) -> None:
        pass

    def finalize(self) -> None:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False
        UpstreamConfig.__post_init__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            shared = name == "_pg_collection"
            setattr(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin


class Provides(abc.ABC):
    @abc.abstractmethod
    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Any: ...

    @abc.abstractmethod
    def finalize(self) -> None: ...


@dataclasses.dataclass
class StandInProvider(LateConfig, Provides):
    vocab_size: int | None = None
    seq_length: int = 1024
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0
    share_embeddings_and_output_weights: bool = True
    transformer_layer_spec: Callable[..., Any] = hybrid_spec
    _pg_collection: Any = None

    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Any:
        from megatron.core.models.gpt import GPTModel

        spec = self.transformer_layer_spec
        stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec).parameters else {}
        return GPTModel(
            self,
            transformer_layer_spec=spec(self, **stage),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            position_embedding_type=self.position_embedding_type,
            rotary_percent=self.rotary_percent,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            pg_collection=self._pg_collection,
            vp_stage=vp_stage,
        )


def missing_for_bridge() -> list[str]:
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def bridge_module(name: str) -> ModuleType:
    """A module of Megatron-Bridge without the two package inits above it, which need far more."""
    for package in ("megatron.bridge", "megatron.bridge.models"):
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.submodule_search_locations is not None
            stub = ModuleType(package)
            stub.__path__ = list(spec.submodule_search_locations)
            stub.__spec__ = spec
            sys.modules[package] = stub
    return importlib.import_module(f"megatron.bridge.models.{name}")


def provider_class(kind: str) -> Any:
    if kind == "stand-in":
        return StandInProvider
    return bridge_module("gpt_provider").GPTModelProvider


# A test of `kind` runs on both.
both_kinds = pytest.mark.parametrize(
    "kind",
    [
        "stand-in",
        pytest.param(
            "bridge",
            marks=pytest.mark.skipif(
                bool(missing_for_bridge()),
                reason=f"{', '.join(missing_for_bridge())} not installed: see bridge_providers.py",
            ),
        ),
    ],
)


QWEN35_27B = {
    "num_layers": 64,
    "hidden_size": 5120,
    "ffn_hidden_size": 17408,
    "num_attention_heads": 24,
    "num_query_groups": 4,
    "kv_channels": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}
QWEN3_NEXT = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_query_groups": 2,
    "kv_channels": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
HYBRID_MODEL = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
}


def make_provider(kind: str = "stand-in", **changes: Any) -> Any:
    settings = HYBRID_MODEL | QWEN3_NEXT | {"transformer_layer_spec": hybrid_spec} | changes
    return provider_class(kind)(**settings)


def values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def declared(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in DECLARED}
