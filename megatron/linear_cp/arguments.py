# SPDX-License-Identifier: Apache-2.0
"""Command-line flags for Megatron training scripts, resolved before the model is built."""

import argparse
from typing import Any

from megatron.linear_cp.config import (
    GATED_DELTA_NET,
    LinearCPConfigMixin,
    TransformerConfig,
    resolve_linear_cp_mode,
)
from megatron.linear_cp.exchange_choice import POLICIES
from megatron.linear_cp.layout import LAYOUTS
from megatron.linear_cp.modes import linear_cp_modes

# Switches of frameworks that run linear attention by all-gather; each contradicts another mode.
_ALL_GATHER_FLAGS = ("allgather_cp", "all_gather_cp", "gdn_allgather_cp")


def add_linear_cp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags; pass this as ``extra_args_provider`` to ``parse_and_validate_args``.

    Returns:
        The parser, as Megatron expects.
    """
    group = parser.add_argument_group("linear attention context parallelism")
    group.add_argument(
        "--linear-cp-mode",
        "--gdn-cp-mode",
        dest="linear_cp_mode",
        choices=("auto", *linear_cp_modes()),
        default="headwise",
        help="How linear-attention layers run under context parallelism. auto is resolved to a "
        "mode before the model is built.",
    )
    group.add_argument(
        "--linear-cp-layout",
        choices=LAYOUTS,
        default="zigzag",
        help="How context-parallel ranks store tokens.",
    )
    group.add_argument(
        "--linear-cp-move-sequences",
        choices=POLICIES,
        default="auto",
        help="Whether chunkwise brings packed sequences whole to one rank instead of exchanging "
        "their states; auto does where that moves fewer bytes.",
    )
    group.add_argument(
        "--linear-cp-fp32-decay",
        action="store_true",
        help="Keep A_log and dt_bias in float32 in a bf16 or fp16 model.",
    )
    group.add_argument(
        "--linear-cp-max-size",
        type=int,
        default=None,
        help="Largest CP size that any micro-batch uses, where it changes; auto resolves for it. "
        "The default is --context-parallel-size.",
    )
    return parser


def linear_cp_config_from_args(args: argparse.Namespace, config_class: type | None = None) -> Any:
    """The model config of parsed Megatron arguments, with our declaration in it.

    Resolves ``auto``, logs one line about it, writes the mode back to ``args``, and builds the
    config with Megatron's ``core_transformer_config_from_args``.

    Args:
        args: as parsed by Megatron's ``parse_args`` with :func:`add_linear_cp_args`.
        config_class: a config class with :class:`LinearCPConfigMixin`; None means
            :class:`megatron.linear_cp.TransformerConfig`.

    Raises:
        ValueError: heads that do not fit, or a switch that contradicts the mode.
        TypeError: a config class without the mixin, or an argument (MLA, heterogeneous layers) for
            which Megatron builds another class than the one asked for.
    """
    cls = TransformerConfig if config_class is None else config_class
    if not issubclass(cls, LinearCPConfigMixin):
        raise TypeError(
            f"{cls.__qualname__} declares no linear_cp_mode; put LinearCPConfigMixin before "
            "its base class"
        )
    swapped = [
        flag
        for flag, name in (
            ("--multi-latent-attention", "multi_latent_attention"),
            ("--heterogeneous-layers-config-path", "heterogeneous_layers_config_path"),
        )
        if getattr(args, name, None)
    ]
    if swapped:
        raise TypeError(
            f"with {swapped[0]} Megatron builds a config class of its own and drops "
            "linear_cp_mode; build the config yourself from a class with LinearCPConfigMixin"
        )
    if getattr(args, "experimental_attention_variant", None) == GATED_DELTA_NET:
        largest = max(args.linear_cp_max_size or 1, args.context_parallel_size)
        args.linear_cp_mode = resolve_linear_cp_mode(
            args.linear_cp_mode,
            num_key_heads=args.linear_num_key_heads,
            num_value_heads=args.linear_num_value_heads,
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            context_parallel_size=largest,
        )
    elif args.linear_cp_mode == "auto":
        args.linear_cp_mode = "headwise"  # no linear-attention layers: nothing will run it
    for flag in _ALL_GATHER_FLAGS:
        if getattr(args, flag, False) and args.linear_cp_mode != "all_gather":
            raise ValueError(
                f"--{flag.replace('_', '-')} runs linear attention by all-gather, but "
                f"linear_cp_mode is {args.linear_cp_mode!r}; drop the flag or declare all_gather"
            )
    # Imported here: megatron.training pulls in far more than the flags above need.
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args, cls)
    if not isinstance(config, cls):
        raise TypeError(
            f"Megatron built a {type(config).__qualname__} instead of {cls.__qualname__}, which "
            "drops linear_cp_mode"
        )
    return config
