# SPDX-License-Identifier: Apache-2.0
"""Checkpoint keys of local specs are those that Transformer Engine specs store."""

import re
from typing import Any

import pytest

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed
from tests.distributed.test_checkpoints import IN_PROJ_NAMES, make_groups

# What Transformer Engine's layers call their tensors: LayerNormLinear holds the norm in front of it
# as ``layer_norm_weight``, all else is a Linear or a norm with a ``weight``.
GDN_KEYS = {
    "self_attention.in_proj.layer_norm_weight",
    *(f"self_attention.in_proj.weight.{name}" for name in IN_PROJ_NAMES),
    *(f"self_attention.conv1d.weight.{name}" for name in IN_PROJ_NAMES[:3]),
    "self_attention.A_log",
    "self_attention.dt_bias",
    "self_attention.out_norm.weight",
    "self_attention.out_proj.weight",
}
ATTENTION_KEYS = {
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
}
DENSE_KEYS = {
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
}
# A router stands between the norm and the experts, so the norm is a layer of its own.
MOE_KEYS = {
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
}
MODEL_KEYS = {
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}


def stored_keys(experts: bool) -> tuple[set[str], set[str]]:
    """Keys of tensors and of other objects that a local spec stores."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    from megatron.linear_cp.testing.checkpoints import hybrid_config, hybrid_model

    changes: dict[str, Any] = (
        {"num_moe_experts": 2, "moe_layer_freq": [0, 1, 1, 1], "moe_ffn_hidden_size": 16}
        if experts
        else {}
    )
    with cpu_cuda():
        make_groups(1)
        state = hybrid_model(hybrid_config("chunkwise", **changes)).sharded_state_dict()
        apply_factories(state)
        shards = list(nested_values(state))
    objects = {x.key for x in shards if isinstance(x, ShardedObject)}
    return {x.key for x in shards} - objects, objects


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_keys_are_those_of_transformer_engine_specs(experts: bool) -> None:
    [(tensors, objects)] = run_distributed(stored_keys, 1, experts)
    wanted, wanted_objects = set(MODEL_KEYS), set()
    for i, attention in enumerate([GDN_KEYS, GDN_KEYS, GDN_KEYS, ATTENTION_KEYS]):
        mlp = MOE_KEYS if experts and i > 0 else DENSE_KEYS
        wanted |= {f"decoder.layers.{i}.{key}" for key in attention | mlp}
        # Every linear layer keeps an object, empty here, under Transformer Engine's name for it.
        linear = ("in_proj", "out_proj") if i < 3 else ("linear_qkv", "linear_proj")
        stems = {f"self_attention.{name}" for name in linear}
        stems |= {key.removesuffix(".weight") for key in mlp if re.search(r"fc\d\.weight$", key)}
        wanted_objects |= {f"decoder.layers.{i}.{stem}._extra_state" for stem in stems}
    assert tensors == wanted
    assert objects == wanted_objects
