# SPDX-License-Identifier: Apache-2.0
"""Specs of hybrid stacks, and swapping our module into specs of others."""

import copy
import functools
from typing import Any

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron.linear_cp import (
    GatedDeltaNet,
    TransformerConfig,
    get_gated_delta_net_module_spec,
    get_gdn_hybrid_layer_spec,
    use_linear_cp,
)
from megatron.linear_cp.attention import CoreAttention, SelfAttention
from megatron.linear_cp.gated_delta_net import GatedDeltaNetSubmodules
from megatron.linear_cp.norm import RMSNorm


def make_config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
    return TransformerConfig(**settings | changes)


def attentions(block: TransformerBlockSubmodules) -> list[type]:
    return [layer.submodules.self_attention.module for layer in block.layer_specs]


def test_three_linear_layers_then_one_softmax() -> None:
    block = get_gdn_hybrid_layer_spec(make_config(), pp_rank=0)
    assert attentions(block) == [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, SelfAttention] * 2
    softmax = block.layer_specs[3].submodules.self_attention
    assert softmax.submodules.core_attention is CoreAttention
    assert block.layer_norm is RMSNorm


def test_pattern_as_a_list() -> None:
    config = make_config(num_layers=3, linear_attention_freq=[0, 1, 1])
    assert attentions(get_gdn_hybrid_layer_spec(config, pp_rank=0)) == [
        SelfAttention,
        GatedDeltaNet,
        GatedDeltaNet,
    ]


def test_each_pipeline_stage_gets_its_own_layers() -> None:
    config = make_config(num_layers=4, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    stages = [attentions(get_gdn_hybrid_layer_spec(config, pp_rank=rank)) for rank in range(2)]
    assert stages == [[GatedDeltaNet, GatedDeltaNet], [GatedDeltaNet, SelfAttention]]


def test_checkpoint_keys_are_those_of_transformer_engine_specs() -> None:
    block = get_gdn_hybrid_layer_spec(make_config(), pp_rank=0)
    linear, softmax = (block.layer_specs[i].submodules.sharded_state_dict_keys_map for i in (0, 3))
    assert linear["input_layernorm."] == "self_attention.in_proj.layer_norm_"
    assert softmax["input_layernorm."] == "self_attention.linear_qkv.layer_norm_"
    assert linear["pre_mlp_layernorm."] == "mlp.linear_fc1.layer_norm_"


def test_expert_layers_keep_their_norm_key() -> None:
    config = make_config(num_moe_experts=2, moe_layer_freq=[1, 0, 0, 0, 0, 0, 0, 0])
    block = get_gdn_hybrid_layer_spec(config, pp_rank=0)
    maps = [layer.submodules.sharded_state_dict_keys_map for layer in block.layer_specs]
    assert "pre_mlp_layernorm." not in maps[0]
    assert "pre_mlp_layernorm." in maps[1]


def test_module_spec_follows_the_backend() -> None:
    spec = get_gated_delta_net_module_spec(make_config())
    assert spec.metainfo["fuse_input_layernorm"] is False
    assert spec.submodules.in_proj is ColumnParallelLinear
    assert spec.submodules.out_norm is RMSNorm

    class Fused(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return torch.nn.Linear

    fused = get_gated_delta_net_module_spec(make_config(), Fused())
    assert fused.metainfo["fuse_input_layernorm"] is True
    assert fused.submodules.in_proj is torch.nn.Linear


def upstream_layer(module: Any = UpstreamGatedDeltaNet) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=module,
                params={"A_init_range": (2, 3)},
                submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear),
                metainfo={"fuse_input_layernorm": True},
            ),
            sharded_state_dict_keys_map={"a": "b"},
        ),
    )


def check_swapped(layer: ModuleSpec, **params: str) -> None:
    attention = layer.submodules.self_attention
    assert attention.module is GatedDeltaNet
    assert attention.params == {"A_init_range": (2, 3), **params}
    assert attention.submodules.in_proj is ColumnParallelLinear
    assert attention.metainfo == {"fuse_input_layernorm": True}
    assert layer.submodules.sharded_state_dict_keys_map == {"a": "b"}


@pytest.mark.parametrize(
    "module",
    [UpstreamGatedDeltaNet, ("megatron.core.ssm.gated_delta_net", "GatedDeltaNet")],
    ids=["class", "location"],
)
def test_use_linear_cp_on_a_layer(module: Any) -> None:
    spec = upstream_layer(module)
    before = copy.deepcopy(spec)
    check_swapped(use_linear_cp(spec))
    assert spec == before, "the argument must stay as it is"


def test_use_linear_cp_on_a_block() -> None:
    softmax = get_gpt_layer_local_spec()
    block = TransformerBlockSubmodules(layer_specs=[upstream_layer(), softmax], layer_norm=RMSNorm)
    swapped = use_linear_cp(block)
    assert isinstance(swapped, TransformerBlockSubmodules)
    check_swapped(swapped.layer_specs[0], stack_layout="zigzag")
    assert (
        swapped.layer_specs[1].submodules.self_attention.module
        is softmax.submodules.self_attention.module
    )
    assert swapped.layer_norm is RMSNorm


def test_contiguous_layout_needs_our_attention_too() -> None:
    softmax = get_gpt_layer_local_spec()
    assert softmax.submodules.self_attention.module is MegatronSelfAttention
    swapped = use_linear_cp(softmax, linear_cp_layout="contiguous")
    assert swapped.submodules.self_attention.module is SelfAttention
    assert softmax.submodules.self_attention.module is MegatronSelfAttention
    assert use_linear_cp(softmax).submodules.self_attention.module is MegatronSelfAttention
    with pytest.raises(ValueError, match="unknown layout 'striped'"):
        use_linear_cp(softmax, linear_cp_layout="striped")


def test_use_linear_cp_on_a_function() -> None:
    def build(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Doc."""
        assert vp_stage == 3
        return TransformerBlockSubmodules(layer_specs=[upstream_layer()], layer_norm=None)

    wrapped = use_linear_cp(build)
    check_swapped(wrapped(make_config(), vp_stage=3).layer_specs[0])
    assert wrapped.__doc__ == "Doc."
    check_swapped(use_linear_cp(functools.partial(build, vp_stage=3))(make_config()).layer_specs[0])


def test_use_linear_cp_leaves_other_stacks_alone() -> None:
    spec = get_gpt_layer_local_spec()
    assert (
        use_linear_cp(spec).submodules.self_attention.module
        is spec.submodules.self_attention.module
    )


def test_missing_transformer_engine_is_named() -> None:
    pytest.importorskip("megatron.core.extensions.transformer_engine")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        pytest.skip("Transformer Engine is installed: nothing is missing")
    config = make_config(transformer_impl="transformer_engine")
    for build in (get_gdn_hybrid_layer_spec, get_gated_delta_net_module_spec):
        with pytest.raises(ImportError, match="set transformer_impl='local'"):
            build(config)


def test_config_that_declares_no_mode_is_noticed() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig as Upstream

    config = Upstream(num_layers=1, hidden_size=16, num_attention_heads=2)
    with pytest.raises(TypeError, match="declares no linear_cp_mode"):
        GatedDeltaNet(config, GatedDeltaNetSubmodules(), pg_collection=None)


@pytest.mark.parametrize("attention", [MegatronSelfAttention, "location"], ids=["class", "place"])
def test_forgotten_layout_is_refused_when_the_layer_is_built(attention: Any) -> None:
    """Megatron-Core's attention would take contiguous tokens for zigzag, and say nothing."""
    if attention == "location":
        attention = (MegatronSelfAttention.__module__, "SelfAttention")
    layers = [upstream_layer(), upstream_layer(attention)]
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=None)
    config = make_config(linear_cp_layout="contiguous")

    def build(swapped: TransformerBlockSubmodules) -> None:
        spec = swapped.layer_specs[0].submodules.self_attention
        spec.module(config, spec.submodules, **spec.params)

    forgotten = use_linear_cp(block)
    with pytest.raises(ValueError, match=r"use_linear_cp\(spec, linear_cp_layout='contiguous'\)"):
        build(forgotten)
    config.linear_cp_layout = "zigzag"
    assert forgotten.layer_specs[0].submodules.self_attention.params["stack_layout"] == "zigzag"
    for right in (
        use_linear_cp(block, linear_cp_layout="contiguous"),
        use_linear_cp(forgotten, linear_cp_layout="contiguous"),
        use_linear_cp(lambda settings: block)(make_config(linear_cp_layout="contiguous")),
    ):
        check_swapped(right.layer_specs[0])
        assert right.layer_specs[1].submodules.self_attention.module is SelfAttention
    # Specs may come without parameters.
    block.layer_specs[0].submodules.self_attention.params = None
    assert use_linear_cp(block).layer_specs[0].submodules.self_attention.params == {
        "stack_layout": "zigzag"
    }
    # Softmax attention elsewhere, or none, is nobody's business.
    check_swapped(use_linear_cp(upstream_layer()))
