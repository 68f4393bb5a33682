# SPDX-License-Identifier: Apache-2.0
"""Declaring, checking and resolving ``linear_cp_mode``."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig as _UpstreamConfig

from megatron.linear_cp.cost import Workload, predict_costs
from megatron.linear_cp.exchange_choice import check_move_sequences
from megatron.linear_cp.layout import check_layout
from megatron.linear_cp.modes import linear_cp_modes
from megatron.linear_cp.modes.heads import check_heads, heads_fit
from megatron.linear_cp.ops.validation import check_state_exchange

logger = logging.getLogger(__name__)

POLICIES = ("default", "cost")
GATED_DELTA_NET = "gated_delta_net"
_NORM_RECOMPUTE = "gdn_norm_out"


def check_linear_cp_mode(mode: str) -> None:
    """Raise ``ValueError`` unless ``mode`` is registered; ``auto`` is told apart."""
    names = ", ".join(linear_cp_modes())
    if mode == "auto":
        raise ValueError(
            "linear_cp_mode='auto' must be resolved before construction: pass "
            f"resolve_linear_cp_mode('auto', ...), which returns one of {names}"
        )
    if mode not in linear_cp_modes():
        raise ValueError(f"unknown linear_cp_mode {mode!r}; choose one of {names}")


def resolve_linear_cp_mode(
    mode: str,
    *,
    num_key_heads: int,
    num_value_heads: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    policy: str = "default",
    workload: Workload | None = None,
) -> str:
    """Turn ``"auto"`` into a mode, check any other, and log one line about it.

    Args:
        mode: ``"auto"`` or a registered mode.
        num_key_heads, num_value_heads: of the whole model.
        tensor_model_parallel_size: TP.
        context_parallel_size: the largest CP size that any micro-batch will use.
        policy: how ``"auto"`` decides. ``"default"``: headwise where the heads fit the largest CP
            size, else all_gather. ``"cost"``: the mode of the least predicted time, see
            :func:`megatron.linear_cp.cost.predict_costs`; it may be chunkwise, predicted on zigzag
            input with ``linear_cp_move_sequences="auto"``, as a config has them by default.
        workload: what ``"cost"`` predicts for; its head counts must be those given here.

    Returns:
        ``mode`` itself, or what ``"auto"`` became.

    Raises:
        ValueError: an unknown mode or policy, heads that do not fit, or a workload that is missing
            or of other heads.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; choose one of {', '.join(POLICIES)}")
    sizes = {
        "num_key_heads": num_key_heads,
        "num_value_heads": num_value_heads,
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    resolved = mode
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if mode == "auto" and policy == "cost":
        resolved = _cheapest_mode(workload, **sizes)
    elif mode == "auto":
        resolved = "headwise" if heads_fit("headwise", **sizes) else "all_gather"
    check_linear_cp_mode(resolved)
    check_heads(resolved, **sizes)
    logger.info(
        "linear_cp_mode: requested %s, resolved %s, TP %d, max CP %d, %d key heads, %d value heads",
        mode,
        resolved,
        tensor_model_parallel_size,
        context_parallel_size,
        num_key_heads,
        num_value_heads,
    )
    return resolved


def _cheapest_mode(
    workload: Workload | None,
    *,
    num_key_heads: int,
    num_value_heads: int,
    tensor_model_parallel_size: int,
    context_parallel_size: int,
) -> str:
    heads = (num_key_heads, num_value_heads)
    if workload is None:
        raise ValueError("policy='cost' predicts for a workload: pass workload=Workload(...)")
    if (workload.num_key_heads, workload.num_value_heads) != heads:
        raise ValueError(
            f"the workload has {workload.num_key_heads} key and {workload.num_value_heads} value "
            f"heads but the model has {heads[0]} and {heads[1]}; they must agree"
        )
    costs = predict_costs(
        workload,
        tensor_model_parallel_size=tensor_model_parallel_size,
        context_parallel_size=context_parallel_size,
        move_sequences="auto",
    )
    if not costs:
        return "all_gather"  # check_heads says why nothing fits
    return min(costs, key=lambda name: costs[name].seconds)


@dataclass
class LinearCPConfigMixin:
    """Adds the declaration of a linear-attention CP mode to a Megatron-Core config class.

    Put it before the config class: ``class MyConfig(LinearCPConfigMixin, MLATransformerConfig)``.
    Megatron-Core checks GDN heads against TP x CP, which only headwise needs; the mixin checks the
    rule of the mode actually declared, on the true head counts and sizes.

    Attributes:
        linear_cp_mode: ``"headwise"``, ``"chunkwise"``, ``"all_gather"`` or a registered name.
        linear_cp_layout: how the ranks store tokens, ``"zigzag"`` or ``"contiguous"``.
        linear_cp_state_exchange: how chunkwise carries states across ranks: ``"scan"``, or
            ``"fla"`` for FLA's own exchange after a re-layout, a cross-check on CUDA.
        linear_cp_move_sequences: whether chunkwise, on packed zigzag input, brings sequences whole
            to one rank instead of exchanging their states: ``"auto"`` where that moves fewer bytes
            (short sequences), ``"never"`` or ``"always"``.
        linear_cp_fp32_decay: keep ``A_log`` and ``dt_bias`` in float32 in a bf16 or fp16 model.
    """

    linear_cp_mode: str = "headwise"
    linear_cp_layout: str = "zigzag"
    linear_cp_state_exchange: str = "scan"
    linear_cp_move_sequences: str = "auto"
    linear_cp_fp32_decay: bool = False

    def __post_init__(self, *init_values: Any) -> None:
        self.check_linear_cp(final=False)
        with _variant_hidden(self):
            super().__post_init__(*init_values)  # type: ignore[misc]
        if not self.defers_checks:
            self.check_linear_cp()

    def finalize(self) -> None:
        """Check the declaration where a class defers its checks to ``finalize``.

        Megatron-Bridge's classes do. The base class's ``finalize`` runs in here, if it has one;
        without one there is nothing to finalize, and the checks run once more.

        Raises:
            ValueError: an unknown name, or heads that do not fit the mode.
        """
        self.check_linear_cp(final=False)
        if self.defers_checks:
            with _variant_hidden(self):
                super().finalize()  # type: ignore[misc]
        self.check_linear_cp()

    @property
    def defers_checks(self) -> bool:
        """Whether the class may be filled in until ``finalize``, and its sizes are not final."""
        return hasattr(super(), "finalize")

    def check_linear_cp(self, *, final: bool = True) -> None:
        """Raise ``ValueError`` unless the declaration is one that this model can run.

        Args:
            final: whether sizes, heads among them, are final; False checks names only.
        """
        check_linear_cp_mode(self.linear_cp_mode)
        check_layout(self.linear_cp_layout)
        check_state_exchange(self.linear_cp_state_exchange)
        check_move_sequences(self.linear_cp_move_sequences)
        if not isinstance(self.linear_cp_fp32_decay, bool):
            raise ValueError(
                f"linear_cp_fp32_decay={self.linear_cp_fp32_decay!r} is neither True nor False"
            )
        config: Any = self
        if not final:
            return
        if self.linear_cp_state_exchange == "fla" and config.deterministic_mode:
            raise ValueError(
                "linear_cp_state_exchange='fla' is not deterministic; use 'scan' with "
                "deterministic_mode"
            )
        if config.experimental_attention_variant == GATED_DELTA_NET:
            _check_gated_delta_net(config)


@dataclass
class TransformerConfig(LinearCPConfigMixin, _UpstreamConfig):
    """Megatron-Core's ``TransformerConfig`` with the fields of :class:`LinearCPConfigMixin`."""


def check_declares_linear_cp(config: Any) -> None:
    """Raise ``TypeError`` unless ``config`` has every field of :class:`LinearCPConfigMixin`.

    Catches a plain Megatron-Core config, whether it was built as one or Megatron built it in place
    of ours, which it does for multi-latent attention, heterogeneous layers and YAML files.
    """
    missing = [
        field.name for field in fields(LinearCPConfigMixin) if not hasattr(config, field.name)
    ]
    if missing:
        raise TypeError(
            f"config is a {type(config).__module__}.{type(config).__qualname__}, which declares no "
            f"{missing[0]}. Build it as megatron.linear_cp.TransformerConfig; from arguments, with "
            "megatron.linear_cp.arguments.linear_cp_config_from_args; as a class of your own, with "
            "LinearCPConfigMixin before its base; or pass a ready one, such as a Megatron-Bridge "
            "provider, through with_linear_cp(config, linear_cp_mode=...)"
        )


@contextlib.contextmanager
def _variant_hidden(config: Any) -> Iterator[None]:
    """Keep Megatron-Core from applying headwise's rule, which it does to every mode.

    It checks everything else with the variant, and the one recompute entry that depends on it, out
    of its sight.
    """
    if config.experimental_attention_variant != GATED_DELTA_NET:
        yield
        return
    recompute = config.recompute_modules
    held_back = recompute is not None and _NORM_RECOMPUTE in recompute
    config.experimental_attention_variant = None
    if held_back:
        config.recompute_modules = [m for m in recompute if m != _NORM_RECOMPUTE]
    try:
        yield
    finally:
        config.experimental_attention_variant = GATED_DELTA_NET
        if held_back:
            config.recompute_modules = recompute


def _check_gated_delta_net(config: Any) -> None:
    for name in (
        "linear_attention_freq",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ):
        value = getattr(config, name)
        if value is None or (isinstance(value, int) and value < 1):
            raise ValueError(
                f"{name} must be set for experimental_attention_variant={GATED_DELTA_NET!r}, got "
                f"{value}"
            )
    check_heads(
        config.linear_cp_mode,
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
    )
    _check_cuda_graphs(config)


def _check_cuda_graphs(config: Any) -> None:
    """Refuse what a CUDA graph of Megatron-Core's would capture once and then repeat wrongly."""
    if config.cuda_graph_impl == "none":
        return
    if config.linear_cp_state_exchange == "fla":
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} with linear_cp_state_exchange='fla': this "
            "cross-check is not made for CUDA graphs; use 'scan'"
        )
    if config.hybrid_context_parallel:
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} with hybrid_context_parallel: a graph "
            "holds for one context-parallel group and one set of boundaries; set "
            "cuda_graph_impl='none'"
        )
