# SPDX-License-Identifier: Apache-2.0
"""Exchanges beside the kernels that do not need what arrives."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def on_side_stream(
    run: Callable[[], tuple[Tensor, ...]], inputs: Sequence[Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Queue ``run`` beside what the caller queues next; the host does not wait for either.

    ``run`` is called at once, so ranks that all do this send in the same order. On the CPU there is
    nothing to overlap: it is just called.

    Args:
        run: queues kernels and collectives and returns new tensors; not differentiated.
        inputs: the tensors that ``run`` reads, all of one device. They may be freed afterwards.

    Returns:
        A function to be called once, which makes the current stream wait and returns the tensors.
    """
    device = inputs[0].device
    if device.type != "cuda":
        done = run()
        return lambda: done
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        outputs = run()
    for tensor in inputs:
        tensor.record_stream(side)

    def wait() -> tuple[Tensor, ...]:
        now = torch.cuda.current_stream(device)
        now.wait_stream(side)
        for tensor in outputs:
            tensor.record_stream(now)
        return outputs

    return wait
