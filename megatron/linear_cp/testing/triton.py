# SPDX-License-Identifier: Apache-2.0
"""Triton without tuning: for tests and examples, which do not repay minutes of compiling."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock


def _compile_time(config: Any) -> tuple[bool, int, int]:
    """Sorts configurations by how long they take to compile, roughly.

    Loops over a tile are unrolled into each thread's code, so that two warps have twice the code
    of four, and spill registers on top; with more than four, layouts repeat work instead. Stages
    multiply the shared memory, and a configuration with too much of it is compiled in vain.
    """
    tile = math.prod(value for value in config.kwargs.values() if isinstance(value, int))
    return config.num_warps != 4, config.num_stages, tile


@contextlib.contextmanager
def first_configuration() -> Iterator[None]:
    """Run one configuration of every autotuned kernel, untuned: the first that fits the device.

    FLA tunes each kernel over up to 27 configurations for each new shape. The order is that of
    the time to compile, which with float32 is a second or two for some and minutes for others.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = sorted(self.prune_configs(kwargs), key=_compile_time)
        for config in configs:
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except OutOfResources:
                if config is configs[-1]:
                    raise
        return None

    with mock.patch.object(Autotuner, "run", run):
        yield
