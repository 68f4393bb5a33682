# SPDX-License-Identifier: Apache-2.0
"""Let ``megatron.training`` run without a GPU, so that the example can be tried anywhere.

For trying only. ``megatron.linear_cp.testing.cpu`` stands in for what Megatron-Core asks of CUDA;
this adds what the training loop asks for beyond that.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

from megatron.training import initialize, training

from megatron.linear_cp.testing.cpu import cpu_cuda


@contextlib.contextmanager
def megatron_training_on_cpu() -> Iterator[None]:
    """Inside, ``pretrain`` takes the CPU for its device; everything is restored on exit."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_cuda())
        # pretrain() gives no way to pass allow_no_cuda.
        initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
        stack.enter_context(mock.patch.object(training, "initialize_megatron", initialize_megatron))
        # Warming up fused kernels draws random numbers on the GPU, and is nothing to a CPU.
        stack.enter_context(mock.patch.object(training, "set_jit_fusion_options", mock.Mock()))
        yield
