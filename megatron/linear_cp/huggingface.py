# SPDX-License-Identifier: Apache-2.0
"""Weights and config of Hugging Face's Qwen3-Next, as our hybrid GPTModel has them, and back.

State dicts are those of whole models: ``Qwen3NextForCausalLM`` (or a published checkpoint), and
``GPTModel`` built with :func:`megatron.linear_cp.get_gdn_hybrid_layer_spec` and
``transformer_impl="local"`` on one rank. A checkpoint saved from that one rank with Megatron-Core's
``dist_checkpointing`` loads under any parallel layout, and with Transformer Engine.

Every value is copied as it is, in its dtype, except ``out_norm``: it is zero-centred here, like all
norms, and the one norm that is not so there. Taking 1 away is exact for gamma in [0.5, 2]; adding
it back rounds a value that did not come from there to the dtype's precision at 1.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = [
    "config_fields_from_hugging_face",
    "model_fields_from_hugging_face",
    "state_from_hugging_face",
    "state_to_hugging_face",
]

# Config entries that decide which parameters there are and what they mean.
_REQUIRED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "moe_grouped_gemm": False,
}
# Names that differ and values that do not: theirs to ours.
_MODEL = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}
_HEAD = ("lm_head.weight", "output_layer.weight")
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
}
_LINEAR = {
    "linear_attn.conv1d.weight": "self_attention.conv1d.weight",
    "linear_attn.A_log": "self_attention.A_log",
    "linear_attn.dt_bias": "self_attention.dt_bias",
    "linear_attn.out_proj.weight": "self_attention.out_proj.weight",
}
_ATTENTION = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
}
_EXPERTS = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def state_from_hugging_face(
    state: Mapping[str, Tensor], config: TransformerConfig
) -> dict[str, Tensor]:
    """The state dict of our model.

    Args:
        state: names and values of ``Qwen3NextForCausalLM``; experts either one by one, as published
            checkpoints have them, or stacked, as recent transformers hold them. Any dtype.
        config: our model's, see :func:`config_fields_from_hugging_face`; heads and sizes are read.

    Returns:
        Name to tensor, some of them views; what ``GPTModel.load_state_dict`` takes.

    Raises:
        ValueError: a config that does not describe such a model, names that are missing or have no
            place in ours (multi-token prediction's ``mtp.*`` have none: leave them out), or a shape
            that the config does not explain.
    """
    _check_config(config)
    theirs = _Names(state, "the Hugging Face state dict")
    ours = {new: theirs.take(old) for old, new in _MODEL.items()}
    if _HEAD[0] in theirs:
        ours[_HEAD[1]] = theirs.take(_HEAD[0])
    for i in range(config.num_layers):
        layer: dict[str, Tensor] = {}
        with_prefix = _Prefixed(theirs, f"model.layers.{i}.")
        _copy(with_prefix, layer, _LAYER.items())
        if "linear_attn.A_log" in with_prefix:
            _linear_from(with_prefix, layer, config)
        else:
            _attention_from(with_prefix, layer, config)
        if "mlp.gate.weight" in with_prefix:
            _experts_from(with_prefix, layer, config)
        else:
            layer |= _mlp_from(with_prefix, "mlp.", "mlp.")
        ours |= {f"decoder.layers.{i}.{name}": value for name, value in layer.items()}
    theirs.check_empty()
    return ours


def state_to_hugging_face(
    state: Mapping[str, Tensor], config: TransformerConfig, *, stack_experts: bool = False
) -> dict[str, Tensor]:
    """The state dict of ``Qwen3NextForCausalLM``.

    Args:
        state: names and values of our ``GPTModel``; its ``_extra_state`` entries are skipped.
        config: our model's.
        stack_experts: one tensor for the experts of a layer, as recent transformers hold them in
            memory; otherwise one by one, as published checkpoints have them.

    Returns:
        Name to tensor, some of them views.

    Raises:
        ValueError: as for :func:`state_from_hugging_face`.
    """
    _check_config(config)
    ours = _Names(
        {n: x for n, x in state.items() if not n.endswith("_extra_state")},
        "the Megatron state dict",
    )
    theirs = {old: ours.take(new) for old, new in _MODEL.items()}
    if _HEAD[1] in ours:
        theirs[_HEAD[0]] = ours.take(_HEAD[1])
    for i in range(config.num_layers):
        layer: dict[str, Tensor] = {}
        with_prefix = _Prefixed(ours, f"decoder.layers.{i}.")
        _copy(with_prefix, layer, _turned(_LAYER))
        if "self_attention.A_log" in with_prefix:
            _linear_to(with_prefix, layer, config)
        else:
            _attention_to(with_prefix, layer, config)
        if "mlp.router.weight" in with_prefix:
            _experts_to(with_prefix, layer, config, stack_experts)
        else:
            layer |= _mlp_to(with_prefix, "mlp.", "mlp.")
        theirs |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    ours.check_empty()
    return theirs


def config_fields_from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of :class:`megatron.linear_cp.TransformerConfig` for a Qwen3-Next config.

    Args:
        config: content of ``config.json``, or ``Qwen3NextConfig.to_dict()``.

    Returns:
        What describes the model; parallel sizes, dtypes, ``linear_cp_mode`` and
        ``transformer_impl`` are the caller's.

    Raises:
        ValueError: something that our model has not: another activation, attention bias, or
            attention layers that do not come at even distances.
    """
    if config["hidden_act"] != "silu" or config.get("attention_bias"):
        raise ValueError(
            f"Qwen3-Next has hidden_act='silu' and no attention bias, got "
            f"{config['hidden_act']!r} and {config.get('attention_bias')}"
        )
    layers = config["num_hidden_layers"]
    fields: dict[str, Any] = {
        **_REQUIRED,
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": config.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": _attention_interval(config),
        "linear_conv_kernel_dim": config["linear_conv_kernel_dim"],
        "linear_key_head_dim": config["linear_key_head_dim"],
        "linear_value_head_dim": config["linear_value_head_dim"],
        "linear_num_key_heads": config["linear_num_key_heads"],
        "linear_num_value_heads": config["linear_num_value_heads"],
    }
    dense, step = config.get("mlp_only_layers") or [], config["decoder_sparse_step"]
    sparse = [int(i not in dense and (i + 1) % step == 0) for i in range(layers)]
    if config["num_experts"] and any(sparse):
        fields |= {
            "num_moe_experts": config["num_experts"],
            "moe_layer_freq": sparse,
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_pre_softmax": not config["norm_topk_prob"],
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": config["router_aux_loss_coef"],
        }
    return fields


def model_fields_from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``GPTModel`` for a Qwen3-Next config: vocabulary and rotary embedding.

    Args:
        config: content of ``config.json``, or ``Qwen3NextConfig.to_dict()``.

    Raises:
        ValueError: a scaled rotary embedding.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"only plain rotary embeddings are mapped, got rope_type={kind!r}")
    rope = {**config, **rope}
    return {
        "vocab_size": config["vocab_size"],
        "max_sequence_length": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_percent": rope["partial_rotary_factor"],
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": config["tie_word_embeddings"],
    }


def _attention_interval(config: Mapping[str, Any]) -> int:
    interval: int = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types")
    if kinds is not None:
        interval = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        expected = [
            "full_attention" if interval and (i + 1) % interval == 0 else "linear_attention"
            for i in range(len(kinds))
        ]
        if kinds != expected or not interval:
            raise ValueError(f"attention layers must come at even distances, got {kinds}")
    return interval


class _Names:
    """Names that are taken one by one, so that none is forgotten."""

    def __init__(self, state: Mapping[str, Tensor], what: str) -> None:
        self._left, self._what = dict(state), what

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            raise ValueError(f"{self._what} has no {name}")
        return self._left.pop(name)

    def check_empty(self) -> None:
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{self._what} has names without a place: {names[:5]}{more}")


class _Prefixed:
    """The names of one layer."""

    def __init__(self, names: _Names, prefix: str) -> None:
        self._names, self._prefix = names, prefix

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._names

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        value = self._names.take(self._prefix + name)
        if shape is not None and tuple(value.shape) != shape:
            raise ValueError(
                f"{self._prefix}{name} has shape {tuple(value.shape)}; the config says {shape}"
            )
        return value


def _turned(table: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(new, old) for old, new in table.items()]


def _copy(source: _Prefixed, target: dict[str, Tensor], names: Iterable[tuple[str, str]]) -> None:
    for old, new in names:
        target[new] = source.take(old)


def _check_config(config: TransformerConfig) -> None:
    for name, value in _REQUIRED.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"a model with Qwen3-Next's weights has {name}={value!r}, got "
                f"{getattr(config, name)!r}"
            )


def _linear_sizes(config: TransformerConfig) -> tuple[int, int, int, int]:
    """Key heads, value heads for each of them, key and value dimensions."""
    heads: int = config.linear_num_key_heads
    return (
        heads,
        config.linear_num_value_heads // heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )


def _linear_from(source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig) -> None:
    """Theirs projects key head by key head; ours all q, all k, all v, gates, beta, alpha."""
    heads, ratio, key, value = _linear_sizes(config)
    _copy(source, layer, _LINEAR.items())
    parts = [key, key, ratio * value, ratio * value]
    hidden = config.hidden_size
    qkvz = source.take("linear_attn.in_proj_qkvz.weight", (heads * sum(parts), hidden))
    ba = source.take("linear_attn.in_proj_ba.weight", (heads * 2 * ratio, hidden))
    sections = [
        *qkvz.view(heads, -1, hidden).split(parts, 1),
        *ba.view(heads, -1, hidden).split(ratio, 1),
    ]
    layer["self_attention.in_proj.weight"] = torch.cat([x.flatten(0, 1) for x in sections])
    layer["self_attention.out_norm.weight"] = source.take("linear_attn.norm.weight") - 1


def _linear_to(source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig) -> None:
    heads, ratio, key, value = _linear_sizes(config)
    _copy(source, layer, _turned(_LINEAR))
    widths = [heads * x for x in (key, key, ratio * value, ratio * value, ratio, ratio)]
    hidden = config.hidden_size
    fused = source.take("self_attention.in_proj.weight", (sum(widths), hidden))
    sections = [x.view(heads, -1, hidden) for x in fused.split(widths)]
    layer["linear_attn.in_proj_qkvz.weight"] = torch.cat(sections[:4], 1).flatten(0, 1)
    layer["linear_attn.in_proj_ba.weight"] = torch.cat(sections[4:], 1).flatten(0, 1)
    layer["linear_attn.norm.weight"] = source.take("self_attention.out_norm.weight") + 1


def _attention_from(source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig) -> None:
    """Theirs has (q, gate) head by head; ours, group by group, its q, its gates, its k, its v."""
    groups, dim, hidden = config.num_query_groups, config.kv_channels, config.hidden_size
    heads = config.num_attention_heads // groups
    _copy(source, layer, _ATTENTION.items())
    both = source.take("self_attn.q_proj.weight", (groups * heads * 2 * dim, hidden))
    query, gate = both.view(groups, heads, 2, dim, hidden).unbind(2)
    key, value = (
        source.take(f"self_attn.{name}_proj.weight", (groups * dim, hidden)) for name in "kv"
    )
    parts = [x.reshape(groups, -1, hidden) for x in (query, gate, key, value)]
    layer["self_attention.linear_qkv.weight"] = torch.cat(parts, 1).flatten(0, 1)


def _attention_to(source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig) -> None:
    groups, dim, hidden = config.num_query_groups, config.kv_channels, config.hidden_size
    heads = config.num_attention_heads // groups
    _copy(source, layer, _turned(_ATTENTION))
    parts = [heads * dim, heads * dim, dim, dim]
    fused = source.take("self_attention.linear_qkv.weight", (groups * sum(parts), hidden))
    query, gate, key, value = fused.view(groups, -1, hidden).split(parts, 1)
    both = [x.reshape(groups * heads, dim, hidden) for x in (query, gate)]
    layer["self_attn.q_proj.weight"] = torch.cat(both, 1).flatten(0, 1)
    layer["self_attn.k_proj.weight"] = key.flatten(0, 1)
    layer["self_attn.v_proj.weight"] = value.flatten(0, 1)


def _mlp_from(source: _Prefixed, theirs: str, ours: str) -> dict[str, Tensor]:
    gate_up = [source.take(f"{theirs}{name}_proj.weight") for name in ("gate", "up")]
    return {
        f"{ours}linear_fc1.weight": torch.cat(gate_up),
        f"{ours}linear_fc2.weight": source.take(f"{theirs}down_proj.weight"),
    }


def _mlp_to(source: _Prefixed, ours: str, theirs: str) -> dict[str, Tensor]:
    gate, up = source.take(f"{ours}linear_fc1.weight").chunk(2)
    return {
        f"{theirs}gate_proj.weight": gate,
        f"{theirs}up_proj.weight": up,
        f"{theirs}down_proj.weight": source.take(f"{ours}linear_fc2.weight"),
    }


def _experts_from(source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig) -> None:
    _copy(source, layer, _EXPERTS.items())
    layer |= _mlp_from(source, "mlp.shared_expert.", "mlp.shared_experts.")
    stacked = "mlp.experts.gate_up_proj"
    if stacked in source:
        gate_up, down = source.take(stacked), source.take("mlp.experts.down_proj")
        if len(gate_up) != config.num_moe_experts or len(down) != config.num_moe_experts:
            raise ValueError(
                f"{stacked} and down_proj hold {len(gate_up)} and {len(down)} experts; the config "
                f"says {config.num_moe_experts}"
            )
        for i, (fc1, fc2) in enumerate(zip(gate_up, down, strict=True)):
            layer[f"mlp.experts.local_experts.{i}.linear_fc1.weight"] = fc1
            layer[f"mlp.experts.local_experts.{i}.linear_fc2.weight"] = fc2
        return
    for i in range(config.num_moe_experts):
        layer |= _mlp_from(source, f"mlp.experts.{i}.", f"mlp.experts.local_experts.{i}.")


def _experts_to(
    source: _Prefixed, layer: dict[str, Tensor], config: TransformerConfig, stack: bool
) -> None:
    _copy(source, layer, _turned(_EXPERTS))
    layer |= _mlp_to(source, "mlp.shared_experts.", "mlp.shared_expert.")
    ours = [f"mlp.experts.local_experts.{i}." for i in range(config.num_moe_experts)]
    if stack:
        for old, new in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            parts = [source.take(f"{name}{old}.weight") for name in ours]
            layer[f"mlp.experts.{new}"] = torch.stack(parts)
        return
    for i, name in enumerate(ours):
        layer |= _mlp_to(source, name, f"mlp.experts.{i}.")
