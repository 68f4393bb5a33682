# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's distributed optimizer on a hybrid: the ordinary one's losses and weights."""

import os
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.linear_cp.testing.distributed_optimizer import (
    DTYPES,
    Job,
    check_decay_dtypes,
    check_resumed,
    check_same_training,
    train_both,
)
from megatron.linear_cp.testing.workers import WorkerError, run_distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed_optimizer")


@cache
def outcome(cp: int, dtype: str, folder: Path) -> list[dict[str, Any]] | Exception:
    try:
        # Products of matrices in one order.
        with mock.patch.dict(os.environ, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}):
            job = Job(dtype, folder=folder / f"cp{cp}")
            return run_distributed(train_both, cp, job, cuda=True, timeout=300)
    except WorkerError as error:
        return error


def results_of(cp: int, dtype: str, folder: Path) -> list[dict[str, Any]]:
    if cp > 1 and torch.cuda.device_count() < cp:
        pytest.skip("it reduces and scatters CUDA tensors, which takes NCCL and a GPU per rank")
    results = outcome(cp, dtype, folder)
    if isinstance(results, Exception):
        raise results
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.timeout(360)
def test_trains_as_the_ordinary_optimizer(cp: int, dtype: str, folder: Path) -> None:
    for result in results_of(cp, dtype, folder):
        check_same_training(result, cp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.timeout(360)
def test_decay_stays_in_float32(cp: int, dtype: str, folder: Path) -> None:
    for result in results_of(cp, dtype, folder):
        check_decay_dtypes(result, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.timeout(360)
def test_resumes_from_files(cp: int, dtype: str, folder: Path) -> None:
    for result in results_of(cp, dtype, folder):
        check_resumed(result)
