# SPDX-License-Identifier: Apache-2.0
"""Triton without tuning: for tests, where compiling dozens of configurations costs minutes."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def first_configuration() -> Iterator[None]:
    """Run the first configuration of every autotuned kernel that fits the device, untuned.

    FLA tunes each kernel over up to 27 configurations for each new shape.
    """
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

    with mock.patch.object(Autotuner, "run", run):
        yield
