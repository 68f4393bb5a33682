# SPDX-License-Identifier: Apache-2.0
"""ModuleSpecs for stacks that mix Gated Delta Net and softmax attention."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _UpstreamGatedDeltaNet
from megatron.core.transformer.attention import SelfAttention as _MegatronSelfAttention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron.linear_cp.attention import CoreAttention, SelfAttention
from megatron.linear_cp.config import check_declares_linear_cp
from megatron.linear_cp.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.linear_cp.layout import check_layout
from megatron.linear_cp.norm import RMSNorm

_NOT_GIVEN: Any = object()


class LocalBackend(LocalSpecProvider):
    """Megatron-Core's Transformer-Engine-free modules, with ours where its own refuse CP or SP."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        """RMSNorm that works under sequence parallelism; LayerNorm as Megatron-Core has it."""
        if rms_norm:
            return RMSNorm
        return super().layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)

    def core_attention(self) -> type:
        """Softmax attention that works under context parallelism."""
        return CoreAttention


def get_gated_delta_net_module_spec(
    config: TransformerConfig, backend: BackendSpecProvider | None = None
) -> ModuleSpec:
    """Spec of one :class:`GatedDeltaNet`.

    Args:
        config: its ``normalization`` and ``transformer_impl`` are read.
        backend: which linear and norm modules to use; None follows ``transformer_impl``.

    Returns:
        A spec whose ``metainfo["fuse_input_layernorm"]`` says whether ``in_proj`` norms its input.

    Raises:
        TypeError: a config that declares no ``linear_cp_mode``.
    """
    check_declares_linear_cp(config)
    if backend is None:
        backend = _default_backend(config)
    fused = backend.fuse_layernorm_and_linear()
    in_proj = (
        backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear()
    )
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=in_proj,
            out_norm=backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False),
            out_proj=backend.row_parallel_linear(),
        ),
        metainfo={"fuse_input_layernorm": fused},
    )


def get_gdn_hybrid_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Block spec of a Qwen3-Next-style hybrid, for this pipeline stage.

    ``config.linear_attention_freq`` says which layers are Gated Delta Net (``4``: three of them,
    then one softmax attention), ``config.moe_layer_freq`` which have experts. With
    ``transformer_impl="transformer_engine"`` it is Megatron-Core's own block spec with our module;
    with ``"local"`` it needs no Transformer Engine, and its checkpoints have the same keys.

    Args:
        config: the model's config.
        vp_stage: virtual pipeline stage under interleaving.
        pp_rank: pipeline rank; None means this process's.

    Returns:
        What ``GPTModel`` takes as ``transformer_layer_spec``.

    Raises:
        TypeError: a config that declares no ``linear_cp_mode``.
    """
    check_declares_linear_cp(config)
    if config.transformer_impl == "transformer_engine":
        _require_transformer_engine()
        return use_linear_cp(
            get_transformer_block_with_experimental_attention_variant_spec(
                config, vp_stage=vp_stage, pp_rank=pp_rank
            ),
            linear_cp_layout=config.linear_cp_layout,
        )
    backend = LocalBackend()
    linear = get_linear_attention_pattern(config)
    experts = (
        get_moe_layer_pattern(config)
        if config.num_moe_experts is not None
        else [0] * config.num_layers
    )
    return TransformerBlockSubmodules(
        layer_specs=[
            _local_layer_spec(config, backend, is_linear=bool(linear[i]), is_moe=bool(experts[i]))
            for i in _layers_of_stage(config, vp_stage, pp_rank)
        ],
        layer_norm=_norm(config, backend),
    )


def use_linear_cp[Spec](spec: Spec, *, linear_cp_layout: str | None = None) -> Spec:
    """Swap our :class:`GatedDeltaNet` for Megatron-Core's in an existing spec.

    Args:
        spec: a layer spec, a block spec, or a function that returns one.
        linear_cp_layout: what the config declares. With ``"contiguous"`` Megatron-Core's
            ``SelfAttention``, which knows zigzag only, is swapped for ours as well. None means
            what the config among a function's arguments declares, and ``"zigzag"`` for a spec.

    Returns:
        The same kind of object with every Megatron-Core GatedDeltaNet replaced, at any depth; the
        argument is left as it is. A spec without any comes back equal (a pipeline stage may hold
        softmax-attention layers only). A function comes back with its signature, so that callers
        who look for ``vp_stage`` find it, and pickles where the one given does; called with a
        config that declares no mode, it raises ``TypeError``.

    Raises:
        TypeError: a config, or anything else that is no spec.
        ValueError: an unknown layout.
    """
    if linear_cp_layout is not None:
        check_layout(linear_cp_layout)
    if isinstance(spec, TransformerConfig):
        raise TypeError(
            f"use_linear_cp takes a spec or a function that returns one, got a config, "
            f"{type(spec).__qualname__}; pass what its transformer_layer_spec holds"
        )
    if isinstance(spec, (ModuleSpec, type)) or not callable(spec):
        if not (isinstance(spec, (type, list, tuple, dict)) or _is_dataclass(spec)):
            raise TypeError(
                f"use_linear_cp takes a spec or a function that returns one, got {spec!r}"
            )
        return _swapped_whole(spec, linear_cp_layout)
    build: Callable[..., Any] = spec
    if isinstance(build, functools.partial) and build.func is build_spec_with_linear_cp:
        # Swapped already; only the layout may be new.
        build, before = build.args[:2]
        linear_cp_layout = linear_cp_layout or before
    wrapped = functools.partial(build_spec_with_linear_cp, build, linear_cp_layout)
    return functools.update_wrapper(wrapped, build)  # type: ignore[return-value]


def build_spec_with_linear_cp(
    build: Callable[..., Any],
    linear_cp_layout: str | None,
    *args: Any,
    vp_stage: Any = _NOT_GIVEN,
    **kwargs: Any,
) -> Any:
    """What :func:`use_linear_cp` makes of a function: build the spec, then swap.

    At the top level of a module, and called through a ``functools.partial``, so that it pickles and
    that Megatron's YAML files can name it. Read back from YAML, the partial has lost the signature
    of ``build``; ``vp_stage`` stands in this one for that case, and a ``build`` that takes none
    gets none.
    """
    if vp_stage is not _NOT_GIVEN and _takes(build, "vp_stage"):
        kwargs["vp_stage"] = vp_stage
    layout = linear_cp_layout
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, TransformerConfig):
            check_declares_linear_cp(argument)
        declared = getattr(argument, "linear_cp_layout", None)
        if declared is not None:
            layout = layout or declared
            _check_same_layout(layout, declared)
    return _swapped_whole(build(*args, **kwargs), layout)


def _takes(build: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(build).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _check_same_layout(asked: str, declared: str) -> None:
    if asked != declared:
        raise ValueError(
            f"use_linear_cp was given linear_cp_layout={asked!r} but the config declares "
            f"{declared!r}; leave it out of use_linear_cp, or make them agree"
        )


def _swaps(layout: str) -> dict[type, type]:
    swaps: dict[type, type] = {_UpstreamGatedDeltaNet: GatedDeltaNet}
    if layout != "zigzag":
        swaps[_MegatronSelfAttention] = SelfAttention
    return swaps


def _swapped_whole(spec: Any, layout: str | None) -> Any:
    """All of a spec; where no layout is known, its layers are told what their neighbours need."""
    swaps = _swaps(layout or "zigzag")
    if layout is None and _mentions(spec, _MegatronSelfAttention):
        return _swapped(spec, swaps, {"stack_layout": "zigzag"})
    return _swapped(spec, swaps)


def _mentions(node: Any, cls: type) -> bool:
    location = node.module if isinstance(node, ModuleSpec) else None
    if isinstance(location, tuple) and _swap_of_location(location, {cls: cls}) is not None:
        return True
    if isinstance(node, (list, tuple)):
        return any(_mentions(item, cls) for item in node)
    if isinstance(node, dict):
        return any(_mentions(value, cls) for value in node.values())
    if isinstance(node, functools.partial):
        return any(_mentions(item, cls) for item in (node.func, node.args, node.keywords))
    if _is_dataclass(node):
        return any(_mentions(getattr(node, f.name), cls) for f in dataclasses.fields(node))
    return node is cls


def _swapped(node: Any, swaps: dict[type, type], params: dict[str, Any] | None = None) -> Any:
    """A copy with classes swapped; ``params`` go to the specs of our GatedDeltaNet."""
    if isinstance(node, type):
        return swaps.get(node, node)
    if isinstance(node, ModuleSpec) and isinstance(node.module, tuple):
        ours = _swap_of_location(node.module, swaps)
        if ours is not None:
            node = dataclasses.replace(node, module=ours)
    if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
        return type(node)(_swapped(item, swaps, params) for item in node)
    if isinstance(node, dict):
        return {key: _swapped(value, swaps, params) for key, value in node.items()}
    if isinstance(node, functools.partial):
        positional = [_swapped(value, swaps, params) for value in node.args]
        keywords = {key: _swapped(value, swaps, params) for key, value in node.keywords.items()}
        return functools.partial(_swapped(node.func, swaps, params), *positional, **keywords)
    if _is_dataclass(node):
        changes = {
            field.name: _swapped(getattr(node, field.name), swaps, params)
            for field in dataclasses.fields(node)
            if field.init
        }
        if isinstance(node, ModuleSpec) and changes["module"] is GatedDeltaNet:
            # What an earlier call said of the neighbours does not hold after this one.
            kept = {k: x for k, x in (changes["params"] or {}).items() if k != "stack_layout"}
            changes["params"] = kept | (params or {})
        return dataclasses.replace(node, **changes)
    return node


def _swap_of_location(location: tuple[str, ...], swaps: dict[type, type]) -> type | None:
    """Our class for a spec's ``(module path, class name)``, which Megatron-Core takes for a class.

    Releases that split a module into a package still serve its classes at the old path.
    """
    for theirs, ours in swaps.items():
        homes = (theirs.__module__, theirs.__module__.rpartition(".")[0])
        if location[-1] == theirs.__name__ and location[0] in homes:
            return ours
    return None


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _require_transformer_engine() -> None:
    """Without it Megatron-Core's spec functions return stand-ins that only fail in forward."""
    if not HAVE_TE:
        raise ImportError(
            "transformer_impl='transformer_engine' (the default) needs Transformer Engine, which "
            "is not installed; install megatron-linear-cp[te], or set transformer_impl='local'"
        )


def _default_backend(config: TransformerConfig) -> BackendSpecProvider:
    if config.transformer_impl != "transformer_engine":
        return LocalBackend()
    _require_transformer_engine()
    # Transformer Engine is optional and only needed here.
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _norm(config: TransformerConfig, backend: BackendSpecProvider, for_qk: bool = False) -> Any:
    return backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=for_qk)


def _layers_of_stage(
    config: TransformerConfig, vp_stage: int | None, pp_rank: int | None
) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        layers: list[int] = layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
        return layers
    first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(first, first + count))


def _local_layer_spec(
    config: TransformerConfig, backend: BackendSpecProvider, *, is_linear: bool, is_moe: bool
) -> ModuleSpec:
    attention = (
        get_gated_delta_net_module_spec(config, backend)
        if is_linear
        else _local_self_attention_spec(config, backend)
    )
    if is_moe:
        mlp = get_moe_module_spec_for_backend(
            backend=backend,
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
        )
    else:
        mlp = get_mlp_module_spec_for_backend(backend=backend, num_experts=None)
    # Transformer Engine stores these norms inside the linear layers that follow them; the map gives
    # ours the same checkpoint keys.
    projection = "in_proj" if is_linear else "linear_qkv"
    keys = {"input_layernorm.": f"self_attention.{projection}.layer_norm_"}
    if not is_moe:
        keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=_norm(config, backend),
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=_norm(config, backend),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _local_self_attention_spec(
    config: TransformerConfig, backend: BackendSpecProvider
) -> ModuleSpec:
    head_norm = _norm(config, backend, for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
