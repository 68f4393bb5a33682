# SPDX-License-Identifier: Apache-2.0
"""Specs and models of providers that declare a mode, and configs that declare none."""

import dataclasses
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_config import TransformerConfig as UpstreamConfig

from megatron.linear_cp import (
    GatedDeltaNet,
    get_gated_delta_net_module_spec,
    get_gdn_hybrid_layer_spec,
    use_linear_cp,
    with_linear_cp,
)
from megatron.linear_cp.attention import SelfAttention
from megatron.linear_cp.gated_delta_net import GatedDeltaNetSubmodules
from megatron.linear_cp.layout import dense_token_ranges, rank_indices
from megatron.linear_cp.modes import linear_cp_mode_runs
from megatron.linear_cp.testing.checkpoints import HYBRID
from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed
from tests.unit.bridge_providers import (
    HYBRID_MODEL,
    QWEN3_NEXT,
    QWEN35_27B,
    LateConfig,
    StandInProvider,
    both_kinds,
    hybrid_spec,
    make_provider,
    provider_class,
    stage_blind_spec,
)


def modules(block: TransformerBlockSubmodules) -> list[type]:
    return [layer.submodules.self_attention.module for layer in block.layer_specs]


@both_kinds
def test_every_stage_builds_its_own_layers(kind: str) -> None:
    """Bridge looks for ``vp_stage`` in the signature, and passes it by name."""
    provider = make_provider(
        kind,
        num_layers=8,
        linear_attention_freq=[1, 1, 1, 0, 1, 0, 1, 1],
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )
    with_linear_cp(provider, "chunkwise")
    provider.transformer_layer_spec = use_linear_cp(provider.transformer_layer_spec)
    provider.finalize()
    spec = provider.transformer_layer_spec
    assert list(inspect.signature(spec).parameters) == ["config", "vp_stage", "pp_rank"]
    ours, theirs = GatedDeltaNet, MegatronSelfAttention
    built = {
        (rank, stage): modules(spec(provider, vp_stage=stage, pp_rank=rank))
        for rank in range(2)
        for stage in range(2)
    }
    assert built == {
        (0, 0): [ours, ours],
        (1, 0): [ours, theirs],
        (0, 1): [ours, theirs],
        (1, 1): [ours, ours],
    }
    assert modules(spec(provider, 1, 0)) == built[0, 1], "positional, too"
    assert modules(spec(config=provider, vp_stage=1, pp_rank=0)) == built[0, 1]
    assert "vp_stage" not in inspect.signature(use_linear_cp(stage_blind_spec)).parameters


def test_contiguous_layout_follows_the_config() -> None:
    spec = use_linear_cp(functools.partial(hybrid_spec, pp_rank=0))
    provider = with_linear_cp(make_provider(num_layers=4), "chunkwise")
    provider.finalize()
    zigzag = [GatedDeltaNet] * 3 + [MegatronSelfAttention]
    contiguous = [GatedDeltaNet] * 3 + [SelfAttention]
    assert modules(spec(provider)) == zigzag
    with_linear_cp(provider, "chunkwise", linear_cp_layout="contiguous")
    assert modules(spec(provider)) == contiguous
    again = use_linear_cp(spec, linear_cp_layout="contiguous")
    assert again.args[0] is spec.args[0], "swapped once"
    assert modules(again(provider)) == contiguous
    with pytest.raises(ValueError, match="linear_cp_layout='zigzag' but the config declares 'cont"):
        use_linear_cp(spec, linear_cp_layout="zigzag")(provider)


def named_spec(name: str, settings: Any, *, again: Any = None) -> Any:
    return hybrid_spec(settings, pp_rank=0)


@dataclasses.dataclass
class SpecBuilder:
    """A function object that happens to be a dataclass."""

    pp_rank: int = 0

    def __call__(self, settings: Any) -> Any:
        return hybrid_spec(settings, pp_rank=self.pp_rank)


def test_the_config_is_found_wherever_it_stands() -> None:
    provider = with_linear_cp(make_provider(num_layers=4), "chunkwise")
    with_linear_cp(provider, "chunkwise", linear_cp_layout="contiguous")
    provider.finalize()
    contiguous = [GatedDeltaNet] * 3 + [SelfAttention]
    build = use_linear_cp(named_spec)
    assert modules(build("qwen", provider)) == contiguous
    assert modules(build("qwen", settings=provider)) == contiguous
    assert modules(use_linear_cp(SpecBuilder())(provider)) == contiguous
    with pytest.raises(TypeError, match="declares no linear_cp_mode"):
        build("qwen", make_provider(num_layers=4))
    other = with_linear_cp(make_provider(num_layers=4), "chunkwise")
    with pytest.raises(ValueError, match="linear_cp_layout='contiguous' but the config declares"):
        build("qwen", provider, again=other)


def test_locations_and_partials_are_swapped_like_classes() -> None:
    attention = get_gated_delta_net_module_spec(with_linear_cp(make_provider(), "chunkwise"))
    for there, here, layout in (
        (("megatron.core.ssm.gated_delta_net", "GatedDeltaNet"), GatedDeltaNet, "zigzag"),
        ((MegatronSelfAttention.__module__, "SelfAttention"), SelfAttention, "contiguous"),
    ):
        spec = dataclasses.replace(attention, module=there)
        assert use_linear_cp(spec, linear_cp_layout=layout).module is here
    elsewhere = dataclasses.replace(attention, module=("somewhere.else", "GatedDeltaNet"))
    assert use_linear_cp(elsewhere).module == ("somewhere.else", "GatedDeltaNet")
    inside = [functools.partial(UpstreamGatedDeltaNet, bias=True)]
    [swapped] = use_linear_cp(inside)
    assert (swapped.func, swapped.keywords) == (GatedDeltaNet, {"bias": True})


@pytest.mark.parametrize("nothing", [None, 5, "spec"], ids=repr)
def test_what_is_no_spec_is_refused(nothing: Any) -> None:
    with pytest.raises(TypeError, match=f"a function that returns one, got {nothing!r}"):
        use_linear_cp(nothing)


def test_a_layout_given_to_an_inner_wrap_stays() -> None:
    block = hybrid_spec(with_linear_cp(make_provider(num_layers=4), "chunkwise"), pp_rank=0)
    twice = use_linear_cp(use_linear_cp(lambda: block, linear_cp_layout="contiguous"))
    assert modules(twice()) == [GatedDeltaNet] * 3 + [SelfAttention]


def test_a_provider_is_no_spec() -> None:
    with pytest.raises(TypeError, match="pass what its transformer_layer_spec holds"):
        use_linear_cp(make_provider())


class BuildsSpecItself(StandInProvider):
    """As Bridge's Qwen3.5 vision-language providers do; there is no function to wrap."""

    def build_language_spec(self, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
        return hybrid_spec(self, vp_stage, pp_rank)

    def build_mtp_spec(self, vp_stage: int | None = None) -> Any:
        return None


def test_provider_that_builds_its_spec_in_a_method() -> None:
    provider = BuildsSpecItself(**HYBRID_MODEL | QWEN35_27B | {"num_layers": 4})
    with_linear_cp(provider, "chunkwise", linear_cp_layout="contiguous")
    provider.finalize()
    assert modules(provider.build_language_spec(pp_rank=0)) == [GatedDeltaNet] * 3 + [SelfAttention]
    assert provider.build_mtp_spec(0) is None
    assert "pp_rank" in inspect.signature(provider.build_language_spec).parameters
    assert not hasattr(with_linear_cp(make_provider(), "chunkwise"), "build_language_spec")


def spec_of_model_config(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    return hybrid_spec(config.transformer, vp_stage, 0)


def test_config_that_another_object_holds() -> None:
    """Megatron's and Bridge's ``GPTModelConfig``: specs get the holder, which passes for both."""
    models = pytest.importorskip("megatron.training.models.gpt", reason="only in newer releases")
    held = LateConfig(**HYBRID_MODEL | QWEN35_27B | {"num_layers": 4, "context_parallel_size": 32})
    holder = models.GPTModelConfig(
        transformer=held, transformer_layer_spec=use_linear_cp(spec_of_model_config)
    )
    with_linear_cp(holder.transformer, "chunkwise", linear_cp_layout="contiguous")
    holder.finalize()
    assert modules(holder.transformer_layer_spec(holder)) == [GatedDeltaNet] * 3 + [SelfAttention]
    assert pickle.loads(pickle.dumps(holder)).linear_cp_mode == "chunkwise"
    assert (
        models.GPTModelConfig.from_dict(holder.as_dict()).transformer.linear_cp_mode == "chunkwise"
    )
    with pytest.raises(TypeError, match="of an object that holds one, pass that"):
        with_linear_cp(holder, "headwise")


# -- configs that declare nothing


PLAIN = {
    "plain": UpstreamConfig,
    # What core_transformer_config_from_args builds in place of any class with
    # --multi-latent-attention, and the YAML route likewise.
    "mla": MLATransformerConfig,
}


def spec_of_nothing(config: Any, vp_stage: int | None = None) -> None:
    return None


@pytest.mark.parametrize("cls", PLAIN.values(), ids=PLAIN.keys())
def test_plain_config_is_refused_wherever_it_arrives(cls: type) -> None:
    config = cls(**HYBRID_MODEL | QWEN3_NEXT)
    wrapped = use_linear_cp(spec_of_nothing)
    softmax_only = dataclasses.replace(config, linear_attention_freq=[0] * config.num_layers)
    for reach in (
        lambda: GatedDeltaNet(config, GatedDeltaNetSubmodules(), pg_collection=None),
        lambda: get_gated_delta_net_module_spec(config),
        lambda: get_gdn_hybrid_layer_spec(config, pp_rank=0),
        lambda: get_gdn_hybrid_layer_spec(softmax_only, pp_rank=0),
        lambda: wrapped(config),
        lambda: wrapped(config=config, vp_stage=0),
    ):
        with pytest.raises(TypeError) as error:
            reach()
        for part in (
            f"config is a {cls.__module__}.{cls.__name__}, which declares no linear_cp_mode",
            "megatron.linear_cp.TransformerConfig",
            "linear_cp_config_from_args",
            "LinearCPConfigMixin",
            "with_linear_cp(config, linear_cp_mode=...)",
        ):
            assert part in str(error.value)


def test_mode_set_by_hand_is_no_declaration() -> None:
    config = UpstreamConfig(**HYBRID_MODEL | QWEN3_NEXT)
    config.linear_cp_mode = "chunkwise"
    with pytest.raises(TypeError, match="declares no linear_cp_layout"):
        get_gdn_hybrid_layer_spec(config, pp_rank=0)


# -- models


TOKENS = 32


class FrameworkAttention(MegatronSelfAttention):
    """A framework's own attention, which no swap can know."""


def framework_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    block = hybrid_spec(config, vp_stage)
    block.layer_specs[3].submodules.self_attention.module = FrameworkAttention
    return block


def ready_provider(kind: str, spec: Any, mode: str, cp: int, heads: int, **declared: str) -> Any:
    """Bridge's steps up to the model: declare, wrap, set sizes, finalize."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    provider = provider_class(kind)(
        **HYBRID | {"linear_num_key_heads": heads, "linear_num_value_heads": 3 * heads},
        params_dtype=torch.float64,
        transformer_layer_spec=spec,
        vocab_size=64,
        seq_length=TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        cp_comm_type="p2p",
        cross_entropy_loss_fusion=False,  # Bridge's default computes in float32
    )
    with_linear_cp(provider, mode, **declared)
    provider.context_parallel_size = cp
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider


def train_step(kind: str, mode: str, layout: str, cp: int, heads: int) -> dict[str, Any]:
    with cpu_cuda():
        spec = use_linear_cp(hybrid_spec)
        provider = ready_provider(kind, spec, mode, cp, heads, linear_cp_layout=layout)
        model = provider.provide(pre_process=True, post_process=True)
        assert model.config is provider
        generator = torch.Generator().manual_seed(5)
        for _, parameter in sorted(model.named_parameters()):
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = 0.2 * value
        tokens, labels = torch.randint(0, 64, (2, 1, TOKENS), generator=generator)
        ranges = dense_token_ranges(TOKENS, 1, cp, layout)
        index = torch.from_numpy(rank_indices(ranges, dist.get_rank()))
        losses = model(tokens[:, index], index[None], None, labels=labels[:, index])
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return {"loss": losses.sum(), "modes": linear_cp_mode_runs()} | gradients


@pytest.mark.parametrize(
    ("mode", "layout"), [("chunkwise", "zigzag"), ("all_gather", "contiguous")]
)
@both_kinds
def test_model_of_a_provider_under_cp(kind: str, mode: str, layout: str) -> None:
    """One key head on two ranks: the declared mode runs, and all gradients are those of one rank.

    Softmax attention is our core attention here, as there is no Transformer Engine.
    """
    [expected] = run_distributed(train_step, 1, kind, mode, "zigzag", 1, 1)
    ranks = run_distributed(train_step, 2, kind, mode, layout, 2, 1)
    assert [rank.pop("modes") for rank in ranks] == [{(mode, 2): 3}] * 2
    del expected["modes"]
    for name, value in expected.items():
        torch.testing.assert_close(
            sum(rank[name] for rank in ranks), value, rtol=1e-9, atol=1e-9, msg=name
        )


def refusals(kind: str) -> dict[str, str]:
    cases = {
        "unwrapped": (hybrid_spec, "zigzag"),
        "subclass": (use_linear_cp(framework_spec), "contiguous"),
    }
    found = {}
    with cpu_cuda():
        for name, (spec, layout) in cases.items():
            provider = ready_provider(kind, spec, "chunkwise", 1, 8, linear_cp_layout=layout)
            with pytest.raises(TypeError) as error:
                provider.provide(pre_process=True, post_process=True)
            found[name] = str(error.value)
            parallel_state.destroy_model_parallel()
    return found


@both_kinds
def test_layer_that_would_not_follow_is_noticed(kind: str) -> None:
    [found] = run_distributed(refusals, 1, kind)
    for name, parts in {
        "unwrapped": (
            "layer decoder.layers.0.self_attention is a megatron.core.ssm.gated_delta_net",
            "does not run linear_cp_mode='chunkwise'",
            "use_linear_cp(provider.transformer_layer_spec)",
        ),
        "subclass": (
            "layer decoder.layers.3.self_attention is a",
            "FrameworkAttention, which does not know linear_cp_layout='contiguous'",
        ),
    }.items():
        assert all(part in found[name] for part in parts), found[name]


@both_kinds
def test_provide_checks_what_changed_after_finalize(kind: str) -> None:
    provider = with_linear_cp(make_provider(kind, context_parallel_size=32), "chunkwise")
    provider.finalize()
    with_linear_cp(provider, "headwise")
    with pytest.raises(ValueError, match="'headwise': 16 key heads"):
        provider.provide()
