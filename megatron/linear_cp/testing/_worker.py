# SPDX-License-Identifier: Apache-2.0
"""The side of ``workers.py`` that runs in a worker process: one rank of one job."""

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

DUMP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Job:
    module: str
    file: str | None
    qualname: str
    arguments: bytes
    world_size: int
    timeout: float
    folder: str
    cuda: bool


@dataclass
class Outcome:
    """What one rank reported. ``kind``: value, error, or clean-up (after a value)."""

    kind: str
    time: float
    payload: bytes = b""
    text: str = ""


def run_worker(job: Job, rank: int, channel: connection.Connection) -> None:
    os.setsid()
    _redirect_output(Path(job.folder, f"rank{rank}.log"))
    stack_file = open(Path(job.folder, f"rank{rank}.stack"), "w")  # noqa: SIM115 (kept open)
    faulthandler.enable(stack_file)
    faulthandler.register(DUMP_SIGNAL, stack_file, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        _join_group(job, rank)
        args, kwargs = _load_arguments(job)
        value = _load_function(job)(*args, **kwargs)
        outcome = Outcome("value", time.monotonic(), _pickle_value(value))
        del value, args, kwargs
    except BaseException as error:
        # SystemExit, KeyboardInterrupt and pytest's outcomes are failures of this rank, too.
        channel.send(Outcome("error", time.monotonic(), _pickle_error(error), _text(error)))
    else:
        channel.send(outcome)
        try:
            _leave_group()
        except Exception as error:
            channel.send(Outcome("cleanup", time.monotonic(), text=_text(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    # Processes this rank started must not outlive it; it leads their process group.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)


def _redirect_output(log: Path) -> None:
    # The server's own descriptors belong to whichever test happened to start it.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def _join_group(job: Job, rank: int) -> None:
    # What a launcher such as torchrun sets; some libraries read the rank from here.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    # A host name that does not resolve must not matter for processes of one machine.
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    own_gpu = False
    if job.cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses two ranks on one GPU; gloo stages through the host.
        own_gpu = torch.cuda.device_count() >= job.world_size
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


def _leave_group() -> None:
    """Take the groups down so that no rank loses a peer it still needs.

    A gloo group still referenced after ``destroy_process_group`` aborts the process at exit.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _load_function(job: Job) -> Callable[..., Any]:
    target: Any = _load_module(job)
    for part in job.qualname.split("."):
        target = getattr(target, part)
    return target


def _load_arguments(job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _load_module(job)  # its classes may be among the arguments
    return pickle.loads(job.arguments)


def _load_module(job: Job) -> ModuleType:
    """The module of the job's function, by name or else from its file, under the same name."""
    module = sys.modules.get(job.module)
    if module is None:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(job.module)
    if module is not None and (job.module == "__main__" or _same_file(module, job.file)):
        return module
    if job.file is None:
        raise ImportError(f"{job.module} cannot be imported in a worker and has no file")
    spec = importlib.util.spec_from_file_location(job.module, job.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {job.module} from {job.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return module


def _same_file(module: ModuleType, file: str | None) -> bool:
    found = getattr(module, "__file__", None)
    return file is None or (found is not None and os.path.abspath(found) == file)


def dumps(value: Any) -> bytes:
    """Pickle, with tensors as their values only: a view is not sent with all of its storage.

    Tensors are read back on the CPU. (Megatron-Core replaces PyTorch's own way by one that the
    reader can only follow by importing Megatron-Core.)
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        values = value.detach().cpu().contiguous().reshape(-1)
        # An empty tensor may have strides that cannot be viewed as bytes.
        raw = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
        # A result's history cannot be sent; an argument may be a leaf that wants a gradient.
        wants_grad = value.requires_grad and value.is_leaf
        return _make_tensor, (raw, value.dtype, tuple(value.shape), wants_grad)


def _make_tensor(
    raw: bytes, dtype: torch.dtype, shape: tuple[int, ...], wants_grad: bool
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(wants_grad)


def _pickle_value(value: Any) -> bytes:
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"the value returned by a rank cannot be pickled: {error}") from error


def _pickle_error(error: BaseException) -> bytes:
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return b""
    return payload


def _text(error: BaseException) -> str:
    frames = error.__traceback__
    # The first frame is this file's and the same in every report.
    below = frames.tb_next if frames and frames.tb_next else frames
    return "".join(traceback.format_exception(type(error), error, below))
