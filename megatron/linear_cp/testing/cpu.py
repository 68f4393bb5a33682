# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA under which unmodified Megatron-Core builds and trains on the CPU.

Megatron-Core asks ``torch.cuda`` for its device, streams and random state even when nothing else
needs a GPU. Inside ``cpu_cuda()`` those calls answer for the CPU. ``torch.cuda.is_available()``
stays False, so no library takes the stand-in for a GPU and starts a kernel.

    with cpu_cuda():
        model_parallel_cuda_manual_seed(1)
        model = GPTModel(...)
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")

# Functions that Megatron-Core calls with device="cuda" or device=<int>, and who does.
FACTORIES = (
    "empty",  # checkpoint exchange
    "empty_like",  # checkpoint exchange
    "ones",  # attention masks (transformer.utils)
    "tensor",  # clip_grads, the grad scaler, the rerun state machine
    "zeros",  # schedules (token count), clip_grads
)

_installed: contextlib.ExitStack | None = None


@contextlib.contextmanager
def cpu_cuda() -> Iterator[None]:
    """Let Megatron-Core use the CPU where it asks for a GPU; everything is restored on exit.

    Raises:
        RuntimeError: a real GPU is available, or the stand-in is installed already.
    """
    install()
    try:
        yield
    finally:
        uninstall()


def install() -> None:
    """Put the stand-in in place until ``uninstall``; prefer ``cpu_cuda`` where a block will do.

    Raises:
        RuntimeError: a real GPU is available, or the stand-in is installed already.
    """
    global _installed
    if _installed is not None:
        raise RuntimeError("the CPU stand-in for CUDA is installed already: uninstall it first")
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU stand-in would hide a real GPU: set CUDA_VISIBLE_DEVICES='' to test on the CPU"
        )
    with contextlib.ExitStack() as stack:
        _patch_devices(stack)
        _patch_streams(stack)
        _patch_random_state(stack)
        # Megatron-Core's jit_fuser is torch.compile, which would start a C++ compiler.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        _installed = stack.pop_all()


def uninstall() -> None:
    """Take the stand-in away.

    Raises:
        RuntimeError: it is not installed.
    """
    global _installed
    if _installed is None:
        raise RuntimeError("the CPU stand-in for CUDA is not installed")
    stack, _installed = _installed, None
    stack.close()


def _patch_devices(stack: contextlib.ExitStack) -> None:
    # Every parameter and buffer: device=torch.cuda.current_device().
    _set(stack, torch.cuda, "current_device", lambda: CPU)
    # The asynchronous checkpoint writer selects rank % device_count.
    _set(stack, torch.cuda, "device_count", lambda: 1)
    _set(stack, torch.cuda, "set_device", lambda device: None)
    # Argument validation of Megatron's training scripts asks for the architecture.
    properties = SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1)
    _set(stack, torch.cuda, "get_device_properties", lambda device=None: properties)
    for name in FACTORIES:
        _set(stack, torch, name, _on_cpu(getattr(torch, name)))
    # Broadcast of a batch, RoPE under CP, checkpoints.
    _set(stack, torch.Tensor, "cuda", _tensor_cuda)
    # Checkpoints move loaded tensors back with .to("cuda").
    _set(stack, torch.Tensor, "to", _tensor_to(torch.Tensor.to))
    # Optimizers and gradient clipping compare names such as "torch.cuda.FloatTensor".
    _set(stack, torch.Tensor, "type", _tensor_type(torch.Tensor.type))


def _patch_streams(stack: contextlib.ExitStack) -> None:
    # Everything runs in program order here, so waiting is doing nothing.
    # Pipeline communication, timers and checkpoints synchronise.
    _set(stack, torch.cuda, "synchronize", lambda device=None: None)
    # MoE dispatchers, overlapped gradient reduction and offloading use streams and events.
    _set(stack, torch.cuda, "Stream", _Stream)
    _set(stack, torch.cuda, "Event", _Event)
    _set(stack, torch.cuda, "current_stream", lambda device=None: _Stream())
    _set(stack, torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    _set(stack, torch.Tensor, "record_stream", lambda tensor, stream: None)


def _patch_random_state(stack: contextlib.ExitStack) -> None:
    # Operators here draw from the CPU generator: it plays the part of the GPU's, so the tracker's
    # named states (model-parallel-rng and so on) and recompute work as they do on a GPU.
    _set(stack, torch.cuda, "manual_seed", torch.manual_seed)
    _set(stack, torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    _set(stack, torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    _set(stack, random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _set(
        stack, random, "_set_cuda_rng_state", lambda state, *args, **kw: torch.set_rng_state(state)
    )
    # fork() warns when the CPU generator moved, which is what it is for here.
    logger = logging.getLogger(random.__name__)
    logger.addFilter(_not_about_cpu_state)
    stack.callback(logger.removeFilter, _not_about_cpu_state)


def _set(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]
    setattr(owner, name, value)
    if inherited:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        # RoPE under CP builds its indices in pinned memory, which needs a driver.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _tensor_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(tensor, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.")

    return type_


def _not_about_cpu_state(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


class _Stream:
    """All work is done when it was issued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True
