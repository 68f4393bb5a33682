# SPDX-License-Identifier: Apache-2.0
"""GPU tests: skipped without CUDA, and one Triton configuration a kernel unless asked for all."""

import os
from typing import Any

import pytest
import torch

FULL_AUTOTUNE = os.environ.get("LINEAR_CP_FULL_AUTOTUNE") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def first_configuration_that_fits() -> Any:
    """FLA tunes each kernel over up to 27 configurations for each new shape: minutes of compiling.

    Here the first one that fits the device runs. ``LINEAR_CP_FULL_AUTOTUNE=1`` tunes as in
    production.
    """
    if FULL_AUTOTUNE or not torch.cuda.is_available():
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = list(self.prune_configs(kwargs))
        for config in configs:
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except OutOfResources:
                if config is configs[-1]:
                    raise
        return None

    patch = pytest.MonkeyPatch()
    patch.setattr(Autotuner, "run", run)
    yield
    patch.undo()
