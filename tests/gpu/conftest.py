# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped without CUDA, and one Triton configuration a kernel unless asked for all."""

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch

from megatron.linear_cp.testing.triton import first_configuration

FULL_AUTOTUNE = os.environ.get("LINEAR_CP_FULL_AUTOTUNE") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def untuned() -> Iterator[None]:
    """``LINEAR_CP_FULL_AUTOTUNE=1`` tunes as in production, at the price of minutes."""
    tuned = FULL_AUTOTUNE or not torch.cuda.is_available()
    with contextlib.nullcontext() if tuned else first_configuration():
        yield
