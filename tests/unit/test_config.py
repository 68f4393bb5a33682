# SPDX-License-Identifier: Apache-2.0
"""Declaring, refusing and resolving linear_cp_mode."""

import copy
import dataclasses
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_config import TransformerConfig as UpstreamConfig

from megatron.linear_cp import LinearCPConfigMixin, TransformerConfig, resolve_linear_cp_mode
from megatron.linear_cp.modes.heads import check_heads

RULES = json.loads((Path(__file__).parent.parent / "cases" / "config_rules.json").read_text())


def make_config(cls: type = TransformerConfig, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 32,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    return cls(**settings | changes)


@pytest.mark.parametrize(
    "case", RULES["cases"], ids=lambda c: f"{c['heads']}-{c['tp']}x{c['cp']}-{c['mode']}"
)
def test_head_rule(case: dict) -> None:
    def build() -> Any:
        keys, values = case["heads"]
        return make_config(
            linear_num_key_heads=keys,
            linear_num_value_heads=values,
            tensor_model_parallel_size=case["tp"],
            context_parallel_size=case["cp"],
            linear_cp_mode=case["mode"],
        )

    if case["ok"]:
        config = build()
        assert config.linear_cp_mode == case["mode"]
        # No faked head counts, sizes or variant: what the user declared is what stands.
        assert [config.linear_num_key_heads, config.linear_num_value_heads] == case["heads"]
        assert config.context_parallel_size == case["cp"]
        assert config.experimental_attention_variant == "gated_delta_net"
        return
    with pytest.raises(ValueError, match=r"linear_cp_mode"):
        build()


HEADS = [(16, 32), (4, 8), (2, 4)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 32])
def test_head_rule_and_auto_over_the_whole_table(tp: int, cp: int, heads: tuple[int, int]) -> None:
    """headwise asks for TP * CP, the others for TP; auto is headwise where it fits."""
    sizes = {
        "num_key_heads": heads[0],
        "num_value_heads": heads[1],
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
    }
    # The key heads decide: here the value heads are twice as many.
    fits = {
        "headwise": heads[0] >= tp * cp,
        "chunkwise": heads[0] >= tp,
        "all_gather": heads[0] >= tp,
    }
    for mode, fit in fits.items():
        if fit:
            check_heads(mode, **sizes)
            continue
        with pytest.raises(
            ValueError, match=f"linear_cp_mode '{mode}': {heads[0]} key heads"
        ) as error:
            check_heads(mode, **sizes)
        others = [name for name in fits if name != mode and fits[name]]
        assert all(name in str(error.value) for name in others)
        assert ("no mode fits" in str(error.value)) == (not any(fits.values()))
    if any(fits.values()):
        expected = "headwise" if fits["headwise"] else "all_gather"
        assert resolve_linear_cp_mode("auto", **sizes) == expected
    else:
        with pytest.raises(ValueError, match="no mode fits"):
            resolve_linear_cp_mode("auto", **sizes)


def test_deterministic_mode_and_an_exchange_that_is_not() -> None:
    assert make_config(deterministic_mode=True, linear_cp_mode="chunkwise").deterministic_mode
    with pytest.raises(ValueError, match="'fla' is not deterministic; use 'scan'"):
        make_config(deterministic_mode=True, linear_cp_state_exchange="fla")


def test_refusal_names_heads_sizes_rule_and_what_would_fit() -> None:
    with pytest.raises(ValueError, match="headwise") as error:
        make_config(tensor_model_parallel_size=4, context_parallel_size=8)
    for part in (
        "'headwise'",
        "16 key heads",
        "TP*CP = 32",
        "TP=4",
        "CP=8",
        "chunkwise or all_gather",
    ):
        assert part in str(error.value)


def test_refusal_when_no_mode_fits() -> None:
    with pytest.raises(ValueError, match="no mode fits"):
        make_config(tensor_model_parallel_size=32, linear_cp_mode="chunkwise")


@pytest.mark.parametrize(
    "field", ["linear_attention_freq", "linear_conv_kernel_dim", "linear_num_key_heads"]
)
def test_missing_gdn_setting_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be set"):
        make_config(**{field: None})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "linear_cp_mode",
            "ring",
            "unknown linear_cp_mode 'ring'; choose one of headwise, chunkwise, all_gather",
        ),
        ("linear_cp_mode", "auto", "must be resolved before construction"),
        ("linear_cp_layout", "interleaved", "unknown layout 'interleaved'"),
        ("linear_cp_state_exchange", "ring", "unknown state_exchange 'ring'"),
    ],
)
def test_unknown_names(field: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**{field: value})


def test_defaults() -> None:
    config = make_config()
    assert config.linear_cp_mode == "headwise"
    assert config.linear_cp_layout == "zigzag"
    assert config.linear_cp_state_exchange == "scan"


def test_other_variants_keep_upstream_checks() -> None:
    with pytest.raises((ValueError, AssertionError), match="num_query_groups"):
        make_config(
            experimental_attention_variant=None, num_query_groups=5, tensor_model_parallel_size=2
        )
    assert make_config(experimental_attention_variant=None).experimental_attention_variant is None


def test_base_checks_still_run_for_gdn() -> None:
    """Hiding the variant must not hide the rest of the base class's work."""
    config, plain = make_config(), make_config(UpstreamConfig)
    own = {
        "linear_cp_mode",
        "linear_cp_layout",
        "linear_cp_state_exchange",
        "linear_cp_move_sequences",
        "linear_cp_fp32_decay",
    }
    for field in dataclasses.fields(UpstreamConfig):
        ours, theirs = getattr(config, field.name), getattr(plain, field.name)
        # Initialisers are partials made anew by every config: equal in what they hold.
        assert ours == theirs or repr(ours) == repr(theirs), field.name
    assert {f.name for f in dataclasses.fields(config)} - {
        f.name for f in dataclasses.fields(UpstreamConfig)
    } == own
    with pytest.raises((ValueError, AssertionError)):
        make_config(num_query_groups=5, tensor_model_parallel_size=2)


@pytest.mark.parametrize("value", ["false", None, 1])
def test_decay_flag_is_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match=f"linear_cp_fp32_decay={value!r} is neither"):
        make_config(linear_cp_fp32_decay=value)


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
def test_cuda_graphs_of_megatron_core(impl: str) -> None:
    """They hold for one group and the exchange that is made for them."""
    graphs = {"cuda_graph_impl": impl, "cuda_graph_modules": []}
    assert make_config(**graphs).cuda_graph_impl == impl
    for refused, message in (
        ({"linear_cp_state_exchange": "fla"}, "'fla'.*use 'scan'"),
        (
            {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64},
            "hybrid_context_parallel.*one context-parallel group",
        ),
    ):
        assert make_config(**refused).cuda_graph_impl == "none"
        with pytest.raises(ValueError, match=message):
            make_config(**graphs, **refused)


@pytest.mark.parametrize(
    ("field", "impl"),
    [("enable_cuda_graph", "local"), ("external_cuda_graph", "transformer_engine")],
)
def test_deprecated_switches_of_cuda_graphs(field: str, impl: str) -> None:
    with pytest.raises(ValueError, match=f"cuda_graph_impl='{impl}' with linear_cp_state_exchange"):
        make_config(**{field: True}, linear_cp_state_exchange="fla")


def test_norm_recompute_is_accepted_and_kept() -> None:
    config = make_config(
        recompute_granularity="selective", recompute_modules=["core_attn", "gdn_norm_out"]
    )
    assert config.recompute_modules == ["core_attn", "gdn_norm_out"]
    with pytest.raises((ValueError, AssertionError), match="nonsense"):
        make_config(
            recompute_granularity="selective", recompute_modules=["gdn_norm_out", "nonsense"]
        )


@pytest.mark.parametrize(
    "clone",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda config: pickle.loads(pickle.dumps(config)),
    ],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_copies_keep_the_declaration(clone: Any) -> None:
    config = make_config(linear_cp_mode="chunkwise", linear_cp_layout="contiguous")
    twin = clone(config)
    assert type(twin) is TransformerConfig
    assert (twin.linear_cp_mode, twin.linear_cp_layout) == ("chunkwise", "contiguous")
    assert dataclasses.asdict(twin)["linear_cp_mode"] == "chunkwise"


@dataclasses.dataclass
class MLAConfig(LinearCPConfigMixin, MLATransformerConfig):
    pass


def test_mixin_serves_other_config_classes() -> None:
    config = make_config(
        MLAConfig,
        linear_cp_mode="chunkwise",
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        context_parallel_size=2,
    )
    assert isinstance(config, MLATransformerConfig)
    with pytest.raises(ValueError, match="3 key heads"):
        make_config(
            MLAConfig, linear_num_key_heads=3, linear_num_value_heads=6, context_parallel_size=2
        )


@pytest.mark.parametrize(
    "case", RULES["auto"], ids=lambda c: f"{c['heads']}-{c['tp']}x{c['max_cp']}"
)
def test_auto(case: dict, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys, values = case["heads"]
    resolved = resolve_linear_cp_mode(
        "auto",
        num_key_heads=keys,
        num_value_heads=values,
        tensor_model_parallel_size=case["tp"],
        context_parallel_size=case["max_cp"],
    )
    assert resolved == case["resolves_to"]
    [record] = caplog.records
    line = record.getMessage()
    for part in (
        "requested auto",
        f"resolved {resolved}",
        f"TP {case['tp']}",
        f"max CP {case['max_cp']}",
        f"{keys} key",
        f"{values} value",
    ):
        assert part in line


@pytest.mark.parametrize("name", ["num_key_heads", "context_parallel_size"])
def test_sizes_below_one_are_named(name: str) -> None:
    sizes = {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        resolve_linear_cp_mode("auto", **sizes | {name: 0})


def test_resolving_a_mode_checks_it() -> None:
    sizes = {
        "num_key_heads": 2,
        "num_value_heads": 4,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
    }
    assert resolve_linear_cp_mode("chunkwise", **sizes) == "chunkwise"
    with pytest.raises(ValueError, match="2 key heads"):
        resolve_linear_cp_mode("headwise", **sizes)
    with pytest.raises(ValueError, match="unknown linear_cp_mode"):
        resolve_linear_cp_mode("ring", **sizes)
