# SPDX-License-Identifier: Apache-2.0
"""Names of the modes, what runs each, and how often it ran."""

from collections import Counter

import torch

from megatron.linear_cp.modes.all_gather import all_gather
from megatron.linear_cp.modes.base import GatedDeltaNetInputs, LinearCPMode, run_rule
from megatron.linear_cp.modes.chunkwise import chunkwise
from megatron.linear_cp.modes.headwise import headwise
from megatron.linear_cp.plan import ContextParallelPlan

# A mode without an executor is declared only: a framework's wrapper is to supply it.
_EXECUTORS: dict[str, LinearCPMode | None] = {
    "headwise": headwise,
    "chunkwise": chunkwise,
    "all_gather": all_gather,
}
_runs: Counter[tuple[str, int]] = Counter()


def linear_cp_modes() -> tuple[str, ...]:
    """Names of the registered modes."""
    return tuple(_EXECUTORS)


def register_linear_cp_mode(
    name: str, executor: LinearCPMode | None = None, *, replace: bool = False
) -> None:
    """Make ``linear_cp_mode=name`` legal, and run ``executor`` for it.

    Args:
        name: what a config declares.
        executor: see :class:`megatron.linear_cp.modes.LinearCPMode`. None declares the mode only:
            it runs plainly at CP 1 and fails above until a later call supplies the executor.
        replace: allow a name that has an executor already.

    Raises:
        ValueError: ``"auto"``, which is resolved before construction and never runs, or a name
            whose executor would be replaced and ``replace`` is not set.
    """
    if name == "auto":
        raise ValueError("'auto' is resolved to a mode before construction; register another name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"a mode needs a name, got {name!r}")
    if executor is not None and not callable(executor):
        raise ValueError(f"the executor of mode {name!r} must be callable, got {executor!r}")
    if _EXECUTORS.get(name) is not None and not replace:
        raise ValueError(f"mode {name!r} is registered already; pass replace=True to replace it")
    _EXECUTORS[name] = executor


def run_linear_cp_mode(
    name: str, inputs: GatedDeltaNetInputs, plan: ContextParallelPlan
) -> torch.Tensor:
    """Run the executor of a mode, and count it.

    Returns:
        The rule's output ``[1, T, HV, V]`` of the local tokens.

    Raises:
        ValueError: the mode is unknown, or declared without an executor and the plan has CP > 1.
    """
    executor = _checked_executor(name, plan.cp_size)
    _runs[name, plan.cp_size] += 1
    return executor(inputs, plan)


def check_linear_cp_executor(name: str, cp_size: int) -> None:
    """Raise what :func:`run_linear_cp_mode` would, before anything is computed or sent."""
    _checked_executor(name, cp_size)


def linear_cp_mode_runs() -> Counter[tuple[str, int]]:
    """How often each ``(mode, CP size)`` ran in this process, recompute included; a copy."""
    return Counter(_runs)


def _checked_executor(name: str, cp_size: int) -> LinearCPMode:
    if name not in _EXECUTORS:
        raise ValueError(f"unknown linear_cp_mode {name!r}; registered are {', '.join(_EXECUTORS)}")
    executor = _EXECUTORS[name]
    if executor is not None:
        return executor
    if cp_size > 1:
        raise ValueError(
            f"linear_cp_mode {name!r} is declared but nothing runs it at context-parallel size "
            f"{cp_size}: the framework's wrapper must call register_linear_cp_mode({name!r}, "
            "executor) before training; at CP 1 it runs without one"
        )
    return run_rule
