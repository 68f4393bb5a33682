# SPDX-License-Identifier: Apache-2.0
"""The examples run and reach what they promise, each in a few seconds."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

EXAMPLES = Path(__file__).parents[2] / "examples"
CPU = torch.device("cpu")


def load(folder: str) -> ModuleType:
    """The script of an example, which is in no package and imports its neighbours by name."""
    sys.path.insert(0, str(EXAMPLES / folder))
    spec = importlib.util.spec_from_file_location(f"{folder}_train", EXAMPLES / folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def run_functional() -> Any:
    return load("functional").train(4, CPU)


def test_functional_gradients_are_those_of_one_rank() -> None:
    for losses, worst in run_distributed(run_functional, 2):
        assert worst < 1e-5
        assert 0 < losses[-1] < 100


def run_rollouts() -> Any:
    module = load("rl_dynamic_cp")
    with cpu_cuda():
        dynamic, static = (module.train(3, CPU, choice) for choice in (True, False))
    difference = module.largest_difference(dynamic, static)
    plain = [(s.loss, s.gradient_norm, s.engine_gap, s.sizes) for s in dynamic]
    return plain, difference


def test_rollouts_of_mixed_cp_sizes_train_as_cp_one_does() -> None:
    for steps, difference in run_distributed(run_rollouts, 4, timeout=240):
        assert {size for *_, sizes in steps for size in sizes} == {1, 2, 4}
        assert difference < 1e-4
        first, *later = (gap for _, _, gap, _ in steps)
        assert first < 1e-5, "before its first step the policy is the engine's"
        assert min(later) > 1e-3, "and then it learns"
        losses = [loss for loss, *_ in steps]
        assert losses == sorted(losses, reverse=True), "the loss must fall"
