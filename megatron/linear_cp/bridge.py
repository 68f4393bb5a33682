# SPDX-License-Identifier: Apache-2.0
"""Declaring a mode on a config that exists already, such as a provider of Megatron-Bridge.

A Bridge provider is a model's config and its factory in one ready-made object, of a class that
users do not write. :func:`with_linear_cp` extends the class of that one object; nothing of Bridge
is imported or changed here.
"""

import dataclasses
import functools
import importlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as _UpstreamGatedDeltaNet
from megatron.core.transformer.attention import SelfAttention as _MegatronSelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.linear_cp.attention import SelfAttention
from megatron.linear_cp.config import LinearCPConfigMixin
from megatron.linear_cp.gated_delta_net import GatedDeltaNet
from megatron.linear_cp.layer_specs import use_linear_cp

logger = logging.getLogger(__name__)

_classes: dict[int, type] = {}
# The name of an extended class says which class it extends, so that it can be found again. Dots
# become slashes: loaders split names at dots.
_NAME = re.compile(r"LinearCP\[(?P<module>[^:\[\]]+):(?P<qualname>[^:\[\]]+)\]")


def with_linear_cp[Config](config: Config, linear_cp_mode: str, **declared: Any) -> Config:
    """Declare a mode on a ready-made config; the object itself is changed and returned.

    Its class is extended by :class:`LinearCPConfigMixin`: every field and method stays, ``fields``,
    ``replace``, ``asdict``, copies, pickles and Megatron's YAML files carry the declaration, and
    the class that it had is left alone. On a config that declares a mode already, only what is
    given here changes.

    Where the class checks in ``finalize()``, as Bridge's do, the rules of the mode are checked
    there, so call this before it; elsewhere they are checked here. The spec is not touched: also
    set ``provider.transformer_layer_spec = use_linear_cp(provider.transformer_layer_spec)``.
    ``provide()`` refuses a model that is left with a layer which would not follow the declaration.
    A provider that builds its spec in a method (``build_language_spec``) needs no such step.

    Args:
        config: an instance of a Megatron-Core ``TransformerConfig`` class.
        linear_cp_mode: a registered mode; ``auto`` is for :func:`resolve_linear_cp_mode`.
        **declared: other fields of :class:`LinearCPConfigMixin`.

    Returns:
        ``config``.

    Raises:
        TypeError: no config, a class that cannot be extended, or a name that is no such field.
        ValueError: an unknown mode or layout, or heads that do not fit; the config is as before.
    """
    if not isinstance(config, TransformerConfig):
        raise TypeError(
            "with_linear_cp takes an instance of a Megatron-Core TransformerConfig class, got "
            f"{config!r:.80}; of an object that holds one, pass that"
        )
    unknown = declared.keys() - _declared_names()
    if unknown:
        raise TypeError(
            f"with_linear_cp knows no {', '.join(sorted(unknown))}; choose from "
            f"{', '.join(_declared_names())}"
        )
    before, state = type(config), dict(vars(config))
    known = isinstance(config, LinearCPConfigMixin)
    settings = {**({} if known else _defaults()), **declared, "linear_cp_mode": linear_cp_mode}
    try:
        # Past the class's own __setattr__, which may have locked the config after finalize().
        if not known:
            object.__setattr__(config, "__class__", _extended(before))
        for name, value in settings.items():
            object.__setattr__(config, name, value)
        checked: Any = config
        checked.check_linear_cp(final=not checked.defers_checks)
    except Exception:
        object.__setattr__(config, "__class__", before)
        vars(config).clear()
        vars(config).update(state)
        raise
    if known and state.get("linear_cp_mode") != linear_cp_mode:
        logger.info("linear_cp_mode: now %s, was %s", linear_cp_mode, state.get("linear_cp_mode"))
    return config


def __getattr__(name: str) -> Any:
    """Find an extended class by its name, for YAML files and for pickles of the class.

    A module of Megatron's is imported for it, any other must have been: a name in a file may not
    import what it likes.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, qualname = match["module"].replace("/", "."), match["qualname"].replace("/", ".")
    if module.partition(".")[0] == "megatron":
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, TransformerConfig)):
        raise AttributeError(
            f"{name} extends {module}.{qualname}, which is no TransformerConfig class that can be "
            "found here; import its module first"
        )
    return _extended(found)


class _Extension(LinearCPConfigMixin):
    """What an extended class has besides its fields: the base's behaviour, plus the declaration.

    The mixin is a dataclass with methods of its own; ``super(LinearCPConfigMixin, self)`` goes past
    them to those of the class that is extended.
    """

    _extended_class: type

    def __eq__(self, other: object) -> Any:
        equal = super(LinearCPConfigMixin, self).__eq__(other)
        return equal if equal is not True else _declaration(self) == _declaration(other)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in _declaration(self).items())
        return f"{super(LinearCPConfigMixin, self).__repr__()} with {settings}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the class that was extended: pickle finds that one wherever it found it before.

        Copies and pickles alike come here, also where that class reduces in a way of its own.
        """
        # Below protocol 2 Python's default is another, which needs more than the class.
        reduced = super().__reduce_ex__(max(2, protocol))
        cls = type(self)
        if isinstance(reduced, str) or "_extended_class" not in vars(cls):
            return reduced  # a subclass of an extended class pickles by its own name
        function, arguments, *rest = reduced
        plain = tuple(self._extended_class if value is cls else value for value in arguments)
        return _rebuilt, (function, plain, _declaration(self)), *rest


def _rebuilt(
    function: Callable[..., Any], arguments: Iterable[Any], declared: dict[str, Any]
) -> Any:
    """What pickle and copy call first; the state follows."""
    config = function(*arguments)
    if not isinstance(config, LinearCPConfigMixin):
        object.__setattr__(config, "__class__", _extended(type(config)))
    for name, value in declared.items():
        object.__setattr__(config, name, value)
    return config


def _extended(cls: Any) -> Any:
    """A subclass of ``cls`` with our fields, always the same one."""
    # By identity: a metaclass may make classes unhashable. The subclass keeps ``cls`` alive.
    if id(cls) not in _classes:
        _classes[id(cls)] = _extend(cls)
    return _classes[id(cls)]


def _extend(cls: Any) -> type:
    place = f"{cls.__module__}:{cls.__qualname__}".replace(".", "/")
    try:
        methods = _methods_of(cls)
        extended = types.new_class(
            f"LinearCP[{place}]", (_Extension, cls), exec_body=lambda body: body.update(methods)
        )
        return dataclasses.dataclass(init=False, repr=False, eq=False)(extended)
    except Exception as error:  # whatever a metaclass or __init_subclass__ objects to
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot be extended ({error}); write a class with "
            "LinearCPConfigMixin before it, and build the config from that"
        ) from error


def _methods_of(cls: Any) -> dict[str, Any]:
    methods = {
        "__init__": _init_of(cls),
        "__hash__": cls.__hash__,
        "__doc__": cls.__doc__,
        "__module__": __name__,
        "_extended_class": cls,
    }
    if hasattr(cls, "provide"):
        methods["provide"] = _provide_of(cls)
    for name in ("build_language_spec", "build_mtp_spec"):
        if hasattr(cls, name):
            methods[name] = _spec_builder_of(cls, name)
    return methods


def _init_of(cls: Any) -> Callable[..., None]:
    """``cls.__init__``, generated or written by hand, with our fields as further keywords."""
    inherited = cls.__init__

    @functools.wraps(inherited)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, default in _defaults().items():
            object.__setattr__(self, name, kwargs.pop(name, default))
        inherited(self, *args, **kwargs)

    signature = inspect.signature(inherited)
    ours = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in _defaults().items()
    ]
    theirs = list(signature.parameters.values())
    rest = [theirs.pop()] if theirs and theirs[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    # Loaders of YAML files drop the keywords that a signature does not name.
    init.__signature__ = signature.replace(parameters=[*theirs, *ours, *rest])  # type: ignore[attr-defined]
    return init


def _provide_of(cls: Any) -> Callable[..., Any]:
    inherited = cls.provide

    @functools.wraps(inherited)
    def provide(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_linear_cp()
        model = inherited(self, *args, **kwargs)
        for part in model if isinstance(model, (list, tuple)) else [model]:
            if isinstance(part, torch.nn.Module):
                _check_layers(self, part)
        return model

    return provide


def _spec_builder_of(cls: Any, name: str) -> Callable[..., Any]:
    inherited = getattr(cls, name)

    @functools.wraps(inherited)
    def build_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = inherited(self, *args, **kwargs)
        if spec is None:  # a model without multi-token prediction
            return None
        return use_linear_cp(spec, linear_cp_layout=self.linear_cp_layout)

    return build_spec


def _check_layers(config: LinearCPConfigMixin, model: torch.nn.Module) -> None:
    """Refuse a model with a layer that would run as if nothing had been declared."""
    for name, module in model.named_modules():
        rule = ""
        if isinstance(module, _UpstreamGatedDeltaNet) and not isinstance(module, GatedDeltaNet):
            rule = f"does not run linear_cp_mode={config.linear_cp_mode!r}"
        elif (
            config.linear_cp_layout != "zigzag"
            and isinstance(module, _MegatronSelfAttention)
            and not isinstance(module, SelfAttention)
            and isinstance(module.config, LinearCPConfigMixin)  # a vision tower has another
        ):
            rule = f"does not know linear_cp_layout={config.linear_cp_layout!r}"
        if rule:
            cls = type(module)
            raise TypeError(
                f"layer {name} is a {cls.__module__}.{cls.__qualname__}, which {rule}; set "
                "provider.transformer_layer_spec = "
                "use_linear_cp(provider.transformer_layer_spec), and use no subclass of "
                "Megatron-Core's layer there"
            )


def _declared_names() -> list[str]:
    return [field.name for field in dataclasses.fields(LinearCPConfigMixin)]


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(LinearCPConfigMixin)}


def _declaration(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _declared_names()}
