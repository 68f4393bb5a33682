# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron training scripts, through Megatron's own parser and config builder."""

import argparse
import dataclasses
import logging
import sys

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig as UpstreamConfig

from megatron.linear_cp import TransformerConfig
from megatron.linear_cp.arguments import add_linear_cp_args, linear_cp_config_from_args

BASE = [
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "128",
    "--max-position-embeddings",
    "128",
    "--micro-batch-size",
    "1",
    "--transformer-impl",
    "local",
    "--no-rope-fusion",
    "--experimental-attention-variant",
    "gated_delta_net",
    "--linear-attention-freq",
    "4",
    "--linear-num-key-heads",
    "2",
    "--linear-num-value-heads",
    "4",
]


def parse(*flags: str) -> argparse.Namespace:
    from megatron.training.arguments import parse_args

    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["pretrain.py", *BASE, *flags])
    try:
        args = parse_args(add_linear_cp_args)
    finally:
        patch.undo()
    # What Megatron's validate_args would set; it wants a GPU.
    args.params_dtype = torch.float32
    return args


@pytest.mark.parametrize("flag", ["--linear-cp-mode", "--gdn-cp-mode"])
def test_declared_mode_reaches_the_config(flag: str) -> None:
    args = parse(
        flag, "chunkwise", "--linear-cp-layout", "contiguous", "--context-parallel-size", "8"
    )
    config = linear_cp_config_from_args(args)
    assert type(config) is TransformerConfig
    assert (config.linear_cp_mode, config.linear_cp_layout) == ("chunkwise", "contiguous")
    assert config.context_parallel_size == 8


def test_fp32_decay_is_asked_for_by_a_flag() -> None:
    assert linear_cp_config_from_args(parse("--linear-cp-fp32-decay")).linear_cp_fp32_decay
    assert not linear_cp_config_from_args(parse()).linear_cp_fp32_decay


def test_default_is_headwise() -> None:
    assert linear_cp_config_from_args(parse()).linear_cp_mode == "headwise"


@pytest.mark.parametrize(
    ("flags", "resolved"),
    [
        (["--context-parallel-size", "2"], "headwise"),
        (["--context-parallel-size", "4"], "all_gather"),
        (["--context-parallel-size", "2", "--linear-cp-max-size", "4"], "all_gather"),
    ],
)
def test_auto_is_resolved_for_the_largest_size(
    flags: list[str], resolved: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megatron.linear_cp")
    args = parse("--linear-cp-mode", "auto", *flags)
    config = linear_cp_config_from_args(args)
    assert config.linear_cp_mode == args.linear_cp_mode == resolved
    lines = [r.getMessage() for r in caplog.records if "requested auto" in r.getMessage()]
    assert len(lines) == 1
    assert f"resolved {resolved}" in lines[0]


def test_unknown_mode_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--linear-cp-mode", "ring")
    assert "'ring'" in capsys.readouterr().err


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="chunkwise or all_gather would fit"):
        linear_cp_config_from_args(parse("--context-parallel-size", "4"))


def test_auto_without_linear_layers() -> None:
    args = parse("--linear-cp-mode", "auto")
    args.experimental_attention_variant = None
    assert linear_cp_config_from_args(args).linear_cp_mode == "headwise"


def test_contradicting_switch() -> None:
    args = parse("--linear-cp-mode", "chunkwise")
    args.allgather_cp = True
    with pytest.raises(ValueError, match="--allgather-cp runs linear attention by all-gather"):
        linear_cp_config_from_args(args)
    args.linear_cp_mode = "all_gather"
    assert linear_cp_config_from_args(args).linear_cp_mode == "all_gather"


def test_class_that_megatron_would_swap_is_noticed() -> None:
    args = parse("--linear-cp-mode", "chunkwise")
    args.multi_latent_attention = True
    with pytest.raises(TypeError, match="--multi-latent-attention Megatron builds a config class"):
        linear_cp_config_from_args(args)


def test_class_without_the_mixin_is_refused() -> None:
    with pytest.raises(TypeError, match="declares no linear_cp_mode"):
        linear_cp_config_from_args(parse(), UpstreamConfig)


@dataclasses.dataclass
class OwnConfig(TransformerConfig):
    extra: int = 3


def test_own_class_is_built() -> None:
    config = linear_cp_config_from_args(parse("--linear-cp-mode", "chunkwise"), OwnConfig)
    assert type(config) is OwnConfig
    assert (config.extra, config.linear_cp_mode) == (3, "chunkwise")
