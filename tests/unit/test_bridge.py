# SPDX-License-Identifier: Apache-2.0
"""Declaring a mode on ready-made configs: their class, their copies, and when rules are checked."""

import abc
import copy
import dataclasses
import functools
import inspect
import logging
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as UpstreamGatedDeltaNet
from megatron.core.transformer.attention import SelfAttention as MegatronSelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_config import TransformerConfig as UpstreamConfig

from megatron.linear_cp import (
    GatedDeltaNet,
    LinearCPConfigMixin,
    use_linear_cp,
    with_linear_cp,
)
from megatron.linear_cp.testing.workers import run_distributed
from tests.unit.bridge_providers import (
    DECLARED,
    HYBRID_MODEL,
    QWEN3_NEXT,
    QWEN35_27B,
    StandInProvider,
    both_kinds,
    declared,
    hybrid_spec,
    make_provider,
    provider_class,
    values,
)


@both_kinds
def test_same_object_same_fields_and_their_class_untouched(kind: str) -> None:
    provider = make_provider(kind)
    provider.note = "set by hand"
    cls = type(provider)
    fields, attributes, before = dataclasses.fields(cls), dict(vars(cls)), values(provider)
    returned = with_linear_cp(provider, linear_cp_mode="chunkwise", linear_cp_layout="contiguous")
    assert returned is provider
    assert isinstance(provider, cls)
    assert isinstance(provider, LinearCPConfigMixin)
    assert values(provider) == before | declared(provider)
    assert provider.note == "set by hand"
    assert (provider.linear_cp_mode, provider.linear_cp_layout) == ("chunkwise", "contiguous")
    assert dataclasses.fields(cls) == fields
    assert dict(vars(cls)) == attributes
    assert type(make_provider(kind)) is cls
    assert not hasattr(make_provider(kind), "linear_cp_mode")
    assert type(provider) is type(with_linear_cp(make_provider(kind), "headwise"))


def by_pickle(protocol: int) -> Callable[[Any], Any]:
    return lambda config: pickle.loads(pickle.dumps(config, protocol))


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
    "pickle-0": by_pickle(0),
    "pickle-2": by_pickle(2),
    "pickle": by_pickle(pickle.HIGHEST_PROTOCOL),
}


@pytest.mark.parametrize("finalized", [False, True])
@pytest.mark.parametrize("clone", COPIES.values(), ids=COPIES.keys())
@both_kinds
def test_copies(kind: str, clone: Callable[[Any], Any], finalized: bool) -> None:
    provider = make_provider(kind, context_parallel_size=32)
    with_linear_cp(provider, linear_cp_mode="chunkwise", linear_cp_move_sequences="never")
    provider.transformer_layer_spec = use_linear_cp(provider.transformer_layer_spec)
    if finalized:
        provider.finalize()
    twin = clone(provider)
    assert type(twin) is type(provider)
    assert twin is not provider
    assert declared(twin) == declared(provider)
    for name, value in values(provider).items():
        # Initialisers and wrapped specs are partials: equal in what they hold.
        theirs = getattr(twin, name)
        assert theirs == value or repr(theirs) == repr(value), name
    assert dataclasses.asdict(twin)["linear_cp_mode"] == "chunkwise"
    assert "vp_stage" in inspect.signature(twin.transformer_layer_spec).parameters
    twin.linear_cp_mode = "headwise"
    assert provider.linear_cp_mode == "chunkwise"
    provider.finalize()
    with pytest.raises(ValueError, match="16 key heads"):
        twin.finalize()


def test_declaration_counts_in_equality_and_shows() -> None:
    one, other = (with_linear_cp(make_provider(), "chunkwise") for _ in range(2))
    assert one == other
    other.linear_cp_layout = "contiguous"
    assert one != other
    assert all(
        part in repr(other) for part in ("hidden_size=2048", "linear_cp_layout='contiguous'")
    )
    assert one != dataclasses.replace(one, seq_length=3)
    assert dataclasses.replace(one, linear_cp_mode="all_gather").linear_cp_mode == "all_gather"


def load_in_this_process(kind: str, provider: bytes, cls: bytes) -> dict[str, Any]:
    provider_class(kind)  # as any process that uses Bridge has imported it
    loaded = pickle.loads(provider)
    loaded.finalize()
    blocks = loaded.transformer_layer_spec(loaded, pp_rank=0)
    return {
        "same class": type(loaded) is pickle.loads(cls),
        "declared": declared(loaded),
        "heads": loaded.linear_num_value_heads,
        "layers": {
            layer.submodules.self_attention.module.__module__ for layer in blocks.layer_specs
        },
    }


@both_kinds
def test_pickles_for_another_process(kind: str) -> None:
    provider = make_provider(kind, **QWEN35_27B, context_parallel_size=32)
    with_linear_cp(provider, linear_cp_mode="chunkwise")
    provider.transformer_layer_spec = use_linear_cp(provider.transformer_layer_spec)
    payload, cls = pickle.dumps(provider), pickle.dumps(type(provider))
    [loaded] = run_distributed(load_in_this_process, 1, kind, payload, cls)
    assert loaded == {
        "same class": True,
        "declared": declared(provider),
        "heads": 48,
        "layers": {GatedDeltaNet.__module__, MegatronSelfAttention.__module__},
    }


def test_class_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in ``__main__`` is found there, by the process that loads it as well."""

    @dataclasses.dataclass
    class InScript(StandInProvider):
        extra: int = 3

    InScript.__module__, InScript.__qualname__ = "__main__", "InScript"
    script = ModuleType("__main__")
    script.InScript = InScript  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", script)
    provider = with_linear_cp(InScript(**HYBRID_MODEL | QWEN3_NEXT), "all_gather")
    twin = pickle.loads(pickle.dumps(provider))
    assert type(twin) is type(provider)
    assert (twin.extra, twin.linear_cp_mode) == (3, "all_gather")
    assert b"LinearCP" not in pickle.dumps(provider), "found by their class, not by a name of ours"
    assert pickle.loads(pickle.dumps(type(provider))) is type(provider)


def test_local_class_copies_and_pickles_as_well_as_without_us() -> None:
    @dataclasses.dataclass
    class Local(StandInProvider):
        pass

    provider = with_linear_cp(Local(**HYBRID_MODEL | QWEN3_NEXT), "chunkwise")
    for clone in (copy.copy, copy.deepcopy, dataclasses.replace):
        assert clone(provider).linear_cp_mode == "chunkwise"
        assert type(clone(provider)) is type(provider)
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"<locals>\.Local"):
        pickle.dumps(provider)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(type(provider))


def test_classes_are_found_by_name_only_where_that_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.linear_cp import bridge

    name = "LinearCP[megatron/core/transformer/transformer_config:MLATransformerConfig]"
    assert issubclass(getattr(bridge, name), MLATransformerConfig)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for other in ("LinearCP[this:s]", "LinearCP[os:system]", "LinearCP[tests/nowhere:C]", "Other"):
        with pytest.raises(AttributeError):
            getattr(bridge, other)
    assert "this" not in sys.modules, "a name may not import any module it likes"


# -- classes that are not as others


class ByName(abc.ABCMeta):
    """Classes of one name pass for equal, as in some plug-in registries."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, ByName) and cls.__name__ == other.__name__

    def __hash__(cls) -> int:
        return hash(cls.__name__)


class Final(abc.ABCMeta):
    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError("no subclasses, please")
        return super().__new__(mcs, name, bases, body)


def test_unusual_metaclasses() -> None:
    first, second = (
        dataclasses.dataclass(
            ByName("Odd", (StandInProvider,), {"__annotations__": {"x": int}, "x": x})
        )
        for x in (1, 2)
    )
    assert first == second
    for cls, x in ((first, 1), (second, 2)):
        provider = with_linear_cp(cls(**HYBRID_MODEL | QWEN3_NEXT), "chunkwise")
        assert type(type(provider)) is ByName
        assert type(provider)(num_layers=1, num_attention_heads=1).x == x
        assert copy.copy(provider).linear_cp_mode == "chunkwise"

    closed = dataclasses.dataclass(Final("Closed", (StandInProvider,), {}))
    provider = closed(**HYBRID_MODEL | QWEN3_NEXT)
    before = dict(vars(provider))
    with pytest.raises(TypeError, match=r"Closed cannot be extended \(no subclasses, please\)"):
        with_linear_cp(provider, "chunkwise")
    assert type(provider) is closed
    assert vars(provider) == before


def test_fields_of_ours_and_values_for_init_only() -> None:
    @dataclasses.dataclass
    class Taken(StandInProvider):
        linear_cp_mode: str = "mine"

    with pytest.raises(TypeError, match=r"Taken cannot be extended .*linear_cp_mode"):
        with_linear_cp(Taken(**HYBRID_MODEL | QWEN3_NEXT), "chunkwise")

    @dataclasses.dataclass
    class Scaled(StandInProvider):
        scale: dataclasses.InitVar[int] = 1

        def __post_init__(self, scale: int) -> None:
            super().__post_init__()
            self.seq_length *= scale

    provider = with_linear_cp(Scaled(**HYBRID_MODEL | QWEN3_NEXT | {"seq_length": 8}), "chunkwise")
    again = dataclasses.replace(provider, scale=2)
    assert (again.seq_length, again.linear_cp_mode) == (16, "chunkwise")


@dataclasses.dataclass
class LockedProvider(StandInProvider):
    """Frozen once it is final; a frozen dataclass cannot derive from Megatron-Core's config."""

    locked: bool = False

    def finalize(self) -> None:
        super().finalize()
        self.locked = True

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "locked", False):
            raise dataclasses.FrozenInstanceError(f"cannot assign to {name}")
        super().__setattr__(name, value)


def test_locked_config() -> None:
    provider = LockedProvider(**HYBRID_MODEL | QWEN3_NEXT)
    provider.finalize()
    with_linear_cp(provider, "all_gather")
    assert provider.linear_cp_mode == "all_gather"
    for clone in (copy.copy, by_pickle(5)):
        assert clone(provider).linear_cp_mode == "all_gather"
        assert clone(provider).locked
    with pytest.raises(dataclasses.FrozenInstanceError):
        provider.linear_cp_mode = "headwise"
    with pytest.raises(ValueError, match="unknown linear_cp_mode"):
        with_linear_cp(provider, "ring")
    assert (provider.linear_cp_mode, provider.locked) == ("all_gather", True)


class HandWritten(StandInProvider):
    """A constructor and a reduction of its own."""

    def __init__(self, scale: int, **kwargs: Any) -> None:
        super().__init__(**HYBRID_MODEL | QWEN3_NEXT | {"hidden_size": 64 * scale} | kwargs)
        self.scale = scale

    def __reduce__(self) -> Any:
        return type(self), (self.scale,)


def test_constructor_and_reduction_of_their_own() -> None:
    provider = with_linear_cp(HandWritten(2), "chunkwise", linear_cp_layout="contiguous")
    for clone in (copy.copy, by_pickle(5)):
        twin = clone(provider)
        assert type(twin) is type(provider)
        assert (twin.scale, twin.hidden_size) == (2, 128)
        assert declared(twin) == declared(provider)
    parameters = inspect.signature(type(provider)).parameters
    assert list(parameters) == ["scale", *DECLARED, "kwargs"]
    made = type(provider)(3, linear_cp_mode="all_gather", num_layers=8)
    assert (made.linear_cp_mode, made.hidden_size, made.num_layers) == ("all_gather", 192, 8)


# -- checks, and when they run


SHAPES = {"qwen3.5-27b": QWEN35_27B, "qwen3-next": QWEN3_NEXT}


@pytest.mark.parametrize("mode", ["chunkwise", "all_gather", "headwise"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("tp", "cp"), [(1, 16), (2, 8), (1, 32), (4, 8), (2, 6)])
@both_kinds
def test_finalize_applies_the_rule_of_the_mode(
    kind: str, tp: int, cp: int, shape: dict[str, Any], mode: str
) -> None:
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    headwise_fits = 16 % (tp * cp) == 0
    plain = make_provider(kind, **shape, **sizes)
    if not headwise_fits:  # Megatron-Core's own check, which knows headwise only
        with pytest.raises(AssertionError, match="linear_num_key_heads"):
            plain.finalize()
    provider = with_linear_cp(make_provider(kind, **shape), mode)
    for name, size in sizes.items():
        setattr(provider, name, size)  # late, as Bridge's recipes do
    if mode == "headwise" and not headwise_fits:
        with pytest.raises(ValueError, match=f"'headwise': 16 key heads .*TP={tp}, CP={cp}"):
            provider.finalize()
        return
    provider.finalize()
    provider.finalize()  # Bridge calls it as often as it likes
    # What was declared stands: no faked heads, sizes or variant.
    assert values(provider).items() >= (shape | sizes).items()
    assert provider.experimental_attention_variant == "gated_delta_net"


@both_kinds
def test_finalize_does_what_it_did(kind: str) -> None:
    """Derived fields, and every other check of theirs."""
    plain = make_provider(kind, num_query_groups=None, sequence_parallel=True)
    ours = with_linear_cp(copy.deepcopy(plain), "chunkwise")
    for provider in (plain, ours):
        provider.finalize()
    for name, value in values(plain).items():
        mine = getattr(ours, name)
        assert mine == value or repr(mine) == repr(value), name
    assert (ours.num_query_groups, ours.sequence_parallel) == (16, False)
    wrong = with_linear_cp(make_provider(kind, num_query_groups=5), "chunkwise")
    wrong.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match="num_query_groups"):
        wrong.finalize()
    assert wrong.experimental_attention_variant == "gated_delta_net"


@both_kinds
def test_fields_may_be_filled_in_until_finalize(kind: str) -> None:
    provider = provider_class(kind)(num_layers=4, hidden_size=64, num_attention_heads=4)
    with_linear_cp(provider, "chunkwise", linear_cp_state_exchange="fla")
    for name, value in HYBRID_MODEL.items():
        setattr(provider, name, value)
    provider.deterministic_mode = True
    twin = dataclasses.replace(provider, context_parallel_size=3)
    with pytest.raises(ValueError, match="'fla' is not deterministic"):
        twin.finalize()
    provider.linear_cp_state_exchange = "scan"
    provider.linear_num_key_heads = None
    with pytest.raises(ValueError, match="linear_num_key_heads must be set"):
        provider.finalize()
    provider.linear_num_key_heads, provider.linear_cp_mode = 16, "auto"
    with pytest.raises(ValueError, match="must be resolved before construction"):
        provider.finalize()
    provider.linear_cp_mode = "chunkwise"
    provider.finalize()


@both_kinds
def test_mixin_before_a_late_class(kind: str) -> None:
    """Without with_linear_cp, as a framework with provider classes of its own would write it."""

    @dataclasses.dataclass
    class Own(LinearCPConfigMixin, provider_class(kind)):  # type: ignore[misc]
        linear_cp_mode: str = "chunkwise"

    provider = Own(**HYBRID_MODEL | QWEN35_27B, context_parallel_size=32)
    provider.finalize()
    provider.linear_cp_mode = "headwise"
    with pytest.raises(ValueError, match="16 key heads"):
        provider.finalize()
    with_linear_cp(provider, "all_gather", linear_cp_layout="contiguous")
    assert type(provider) is Own
    provider.finalize()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"linear_cp_mode": "ring"}, ValueError, "unknown linear_cp_mode 'ring'; choose one of"),
        ({"linear_cp_mode": "auto"}, ValueError, "resolve_linear_cp_mode"),
        ({"linear_cp_layout": "striped"}, ValueError, "unknown layout 'striped'"),
        ({"linear_cp_move_sequences": "often"}, ValueError, "'often'"),
        ({"cp_mode": "chunkwise"}, TypeError, "knows no cp_mode; choose from linear_cp_mode"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_refusal_leaves_the_provider_as_it_was(
    settings: dict[str, str], error: type[Exception], message: str, wrapped: bool
) -> None:
    provider = make_provider()
    if wrapped:
        with_linear_cp(provider, "all_gather")
    cls, before = type(provider), dict(vars(provider))
    with pytest.raises(error, match=message):
        with_linear_cp(provider, **{"linear_cp_mode": "chunkwise"} | settings)
    assert type(provider) is cls
    assert vars(provider) == before


@pytest.mark.parametrize("thing", [StandInProvider, None, {"num_layers": 4}], ids=repr)
def test_only_config_objects(thing: Any) -> None:
    with pytest.raises(TypeError, match="takes an instance of a Megatron-Core TransformerConfig"):
        with_linear_cp(thing, "chunkwise")


def test_declaring_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    provider = with_linear_cp(make_provider(), "chunkwise", linear_cp_layout="contiguous")
    cls, before = type(provider), dict(vars(provider))
    assert with_linear_cp(provider, "chunkwise") is provider
    assert type(provider) is cls
    assert vars(provider) == before
    assert not caplog.records
    with_linear_cp(provider, "all_gather")
    assert (provider.linear_cp_mode, provider.linear_cp_layout) == ("all_gather", "contiguous")
    [record] = caplog.records
    assert record.getMessage() == "linear_cp_mode: now all_gather, was chunkwise"


def test_config_that_checks_at_once() -> None:
    """A plain Megatron-Core config has no finalize(): declaring checks."""
    settings = HYBRID_MODEL | QWEN3_NEXT
    config = with_linear_cp(UpstreamConfig(**settings), "chunkwise")
    assert dataclasses.replace(config, context_parallel_size=32).linear_cp_mode == "chunkwise"
    with pytest.raises(ValueError, match="16 key heads"):
        dataclasses.replace(config, context_parallel_size=32, linear_cp_mode="headwise")
    config.context_parallel_size = 32
    with pytest.raises(ValueError, match="16 key heads"):
        with_linear_cp(config, "headwise")
    assert config.linear_cp_mode == "chunkwise"
    config.finalize()

    plain = UpstreamConfig(**settings, deterministic_mode=True)
    with pytest.raises(ValueError, match="not deterministic"):
        with_linear_cp(plain, "chunkwise", linear_cp_state_exchange="fla")
    assert type(plain) is UpstreamConfig
    assert not hasattr(plain, "linear_cp_mode")


# -- Megatron's YAML files, in which Bridge stores the config of a run


@pytest.mark.parametrize("spec", [hybrid_spec, functools.partial(hybrid_spec, pp_rank=0)])
@both_kinds
def test_yaml_round_trip(kind: str, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml", reason="megatron.training's YAML files need PyYAML")
    pytest.importorskip("omegaconf", reason="megatron.training reads its YAML files with omegaconf")
    pytest.importorskip("megatron.training.config", reason="this release has no config package")
    from megatron.training.config import instantiate_utils, yaml_utils

    # Bridge lets every module of megatron be named in such a file; the functions here are none.
    monkeypatch.setattr(instantiate_utils.target_allowlist, "is_allowed", lambda target: True)
    provider = with_linear_cp(make_provider(kind, context_parallel_size=32), "chunkwise")
    provider.transformer_layer_spec = use_linear_cp(spec)
    target = f"{type(provider).__module__}.{type(provider).__qualname__}"
    content = {k: v for k, v in values(provider).items() if not k.startswith("_")}
    with yaml_utils.safe_yaml_representers():
        text = yaml.safe_dump({"_target_": target} | content)
    loaded = instantiate_utils.instantiate(yaml.safe_load(text) | {"key_of_another_release": 1})
    assert type(loaded) is type(provider)
    assert declared(loaded) == declared(provider)
    assert "vp_stage" in inspect.signature(loaded.transformer_layer_spec).parameters
    loaded.pipeline_dtype = torch.float32
    loaded.pipeline_model_parallel_size = 2
    loaded.finalize()
    block = loaded.transformer_layer_spec(loaded, vp_stage=None, **stage_of(spec, 0))
    assert len(block.layer_specs) == 24
    assert {layer.submodules.self_attention.module for layer in block.layer_specs} == {
        GatedDeltaNet,
        MegatronSelfAttention,
    }


def stage_of(spec: Any, pp_rank: int) -> dict[str, int]:
    return {} if isinstance(spec, functools.partial) else {"pp_rank": pp_rank}


def test_stage_is_dropped_where_the_wrapped_function_takes_none() -> None:
    """Read back from YAML the partial says it takes vp_stage, whatever it wraps."""
    calls = []

    def blind(config: Any) -> Any:
        calls.append(config)
        return UpstreamGatedDeltaNet

    plain = use_linear_cp(blind)
    assert "vp_stage" not in inspect.signature(plain).parameters
    from_yaml = functools.partial(plain.func, *plain.args)
    assert "vp_stage" in inspect.signature(from_yaml).parameters
    assert from_yaml(1, vp_stage=2) is GatedDeltaNet
    assert calls == [1]
