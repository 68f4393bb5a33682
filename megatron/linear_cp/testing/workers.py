# SPDX-License-Identifier: Apache-2.0
"""Run a function on several ranks: fresh processes, a process group each, one readable error.

The processes are forked from a server that has the imports done, so a job costs tens of
milliseconds and still shares no state with the job before it.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.linear_cp.testing._worker import DUMP_SIGNAL, Job, Outcome, dumps, run_worker

# After the first failure the other ranks get this long to report theirs: with gloo they usually
# fail at once, because the failed rank closed its sockets.
GRACE_SECONDS = 2.0
# How long a rank that hangs may take to write where it is, and one that is done may take to exit.
DUMP_SECONDS = 2.0
EXIT_SECONDS = 15.0
LOG_TAIL_CHARS = 4000


class WorkerError(RuntimeError):
    """At least one rank raised, died or hung; the message has every rank's traceback.

    Attributes:
        exceptions: what each rank raised, by rank; ranks that died or hung are missing.
    """

    def __init__(self, message: str, exceptions: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.exceptions = exceptions


@dataclass
class _Rank:
    process: BaseProcess
    channel: connection.Connection
    outcome: Outcome | None = None
    cleanup_error: str = ""
    channel_open: bool = True


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    return_exceptions: bool = False,
    cuda: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` once per rank, in ``world_size`` fresh processes.

    The default process group exists when ``fn`` starts; the rank is ``torch.distributed``'s. Every
    process has one OpenMP thread and leads its own session; what it prints is echoed here when the
    job ends. Model-parallel groups of Megatron-Core are dropped after ``fn``.

    Args:
        fn: a function at the top level of a module (a test module will do, in any import mode).
        world_size: number of ranks, at least 1.
        *args: picklable; each rank gets its own copy.
        timeout: seconds from the start of ``fn``, also the timeout of a collective. A rank still
            running then is killed and reported with its stack.
        return_exceptions: put a rank's exception in its place in the list instead of raising. A
            rank that dies or hangs raises all the same.
        cuda: ranks see the GPUs: one each and ``cpu:gloo,cuda:nccl`` where there are enough, else
            shared and gloo. There is no fork server then, as CUDA does not survive a fork.
            Otherwise GPUs are hidden and the backend is gloo.
        **kwargs: picklable.

    Returns:
        What ``fn`` returned, by rank; tensors on the CPU and without history.

    Raises:
        WorkerError: a rank raised (the earliest is named first and is the ``__cause__``), died, or
            was still running after ``timeout``.
        ValueError: a bad ``world_size``.
        TypeError: ``fn`` or an argument cannot be sent to another process.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    with tempfile.TemporaryDirectory(prefix="linear_cp_job_") as folder:
        job = _describe(fn, world_size, args, kwargs, timeout, folder, cuda)
        ranks: list[_Rank] = []
        try:
            start = _start(job, ranks)
            problem = _wait(ranks, start, timeout, return_exceptions)
            stacks = _where(ranks, folder) if problem else {}
        finally:
            _stop(ranks)
            _echo_logs(world_size, folder)
        if not problem:
            problem = _exit_problem(ranks, folder)
        values, exceptions = _decode(ranks)
        if problem or (exceptions and not return_exceptions):
            message = _message(job, ranks, start, problem, stacks)
            raise WorkerError(message, exceptions) from _earliest(ranks, exceptions)
        return [exceptions.get(rank, values.get(rank)) for rank in range(world_size)]


def _describe(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    folder: str,
    cuda: bool,
) -> Job:
    name, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if not name or not qualname or "<" in qualname:
        raise TypeError(
            f"run_distributed needs a function at the top level of a module, got {fn!r}: move it "
            "there and pass what it closes over as arguments"
        )
    try:
        arguments = dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"arguments of {qualname} cannot be pickled: {error}") from error
    file = getattr(sys.modules.get(name), "__file__", None)
    file = os.path.abspath(file) if file else None
    return Job(name, file, qualname, arguments, world_size, timeout, folder, cuda)


def _start(job: Job, ranks: list[_Rank]) -> float:
    context: Any = multiprocessing.get_context("spawn" if job.cuda else "forkserver")
    if not job.cuda:
        context.set_forkserver_preload(["megatron.linear_cp.testing._preload"])
    environment = {
        # The server is started with this environment and its children keep it. It has no other
        # way to find what only sys.path names.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "LINEAR_CP_PRELOAD": " ".join(m for m in ("pytest", "hypothesis") if m in sys.modules),
    }
    if not job.cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with _environment(environment):
        for rank in range(job.world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_worker, args=(job, rank, theirs), name=f"rank {rank}", daemon=False
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours))
    return time.monotonic()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _wait(ranks: list[_Rank], start: float, timeout: float, return_exceptions: bool) -> str:
    """Collect outcomes until all ranks exited; returns what went wrong beyond exceptions."""
    deadline, failed, done = start + timeout, False, False
    while True:
        alive = [rank.process for rank in ranks if rank.process.is_alive()]
        # Judged before every wait: a death that came after the last look wakes nobody any more.
        for i, rank in enumerate(ranks):
            dead = rank.process not in alive
            _receive(rank)
            # Judged after the channel is drained: the last message may be older than the death.
            if dead and rank.outcome is None:
                return f"rank {i} died: {_exit_text(rank.process.exitcode)}"
        if not alive:
            return ""
        if not done and all(rank.outcome is not None for rank in ranks):
            done, deadline = True, min(deadline, time.monotonic() + EXIT_SECONDS)
        if not failed and any(r.outcome and r.outcome.kind == "error" for r in ranks):
            failed = True
            if not return_exceptions:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        waitable: list[Any] = [rank.channel for rank in ranks if rank.channel_open]
        waitable += [process.sentinel for process in alive]
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not connection.wait(waitable, remaining):
            running = [i for i, rank in enumerate(ranks) if rank.outcome is None]
            if running:
                after = "stopped" if failed and not return_exceptions else f"after {timeout:g} s"
                return f"{_names(running)} still running, {after}"
            leaving = [i for i, rank in enumerate(ranks) if rank.process.is_alive()]
            return "" if failed else f"{_names(leaving)} returned but did not exit"


def _receive(rank: _Rank) -> None:
    while rank.channel_open and rank.channel.poll():
        try:
            outcome: Outcome = rank.channel.recv()
        except EOFError:
            rank.channel_open = False
            return
        if outcome.kind == "cleanup":
            rank.cleanup_error = outcome.text
        else:
            rank.outcome = outcome


def _where(ranks: list[_Rank], folder: str) -> dict[int, str]:
    """Ask every rank that has not reported to write its stack; what it wrote, by rank."""
    silent = [i for i, rank in enumerate(ranks) if rank.outcome is None]
    files = {i: Path(folder, f"rank{i}.stack") for i in silent}
    asked = []
    for i in silent:
        # A rank that has not got as far as registering the handler would be killed by the signal.
        if ranks[i].process.is_alive() and files[i].exists():
            os.kill(_pid(ranks[i].process), DUMP_SIGNAL)
            asked.append(i)
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline and not all(files[i].stat().st_size for i in asked):
        time.sleep(0.01)
    if asked:
        time.sleep(0.05)
    return {i: file.read_text(errors="replace") for i, file in files.items() if file.exists()}


def _stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        # The worker leads a session: this reaches the processes it started, too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if rank.process.is_alive():
                os.killpg(_pid(rank.process), signal.SIGKILL)
        if rank.process.is_alive():
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.channel.close()


def _exit_problem(ranks: list[_Rank], folder: str) -> str:
    """A rank that returned a value may still fail while it takes its groups down."""
    if any(rank.outcome is None or rank.outcome.kind == "error" for rank in ranks):
        return ""
    for i, rank in enumerate(ranks):
        if rank.cleanup_error:
            return f"rank {i} returned but failed to clean up:\n{rank.cleanup_error}"
        if rank.process.exitcode != 0:
            stack = Path(folder, f"rank{i}.stack").read_text(errors="replace")
            return f"rank {i} returned, then died: {_exit_text(rank.process.exitcode)}\n{stack}"
    return ""


def _decode(ranks: list[_Rank]) -> tuple[dict[int, Any], dict[int, BaseException]]:
    values: dict[int, Any] = {}
    exceptions: dict[int, BaseException] = {}
    for i, rank in enumerate(ranks):
        if rank.outcome is None:
            continue
        if rank.outcome.kind == "value":
            values[i] = pickle.loads(rank.outcome.payload)
            continue
        try:
            error = pickle.loads(rank.outcome.payload)
        except Exception:
            error = RuntimeError(rank.outcome.text)
        error.add_note(f"raised by rank {i}:\n{rank.outcome.text}")
        exceptions[i] = error
    return values, exceptions


def _earliest(ranks: list[_Rank], exceptions: dict[int, BaseException]) -> BaseException | None:
    return exceptions[_by_time(ranks, exceptions)[0]] if exceptions else None


def _by_time(ranks: list[_Rank], exceptions: Any) -> list[int]:
    return sorted(exceptions, key=lambda i: ranks[i].outcome.time)  # type: ignore[union-attr]


def _message(
    job: Job, ranks: list[_Rank], start: float, problem: str, stacks: dict[int, str]
) -> str:
    failed = _by_time(
        ranks, [i for i, r in enumerate(ranks) if r.outcome and r.outcome.kind == "error"]
    )
    parts = [f"{job.module}.{job.qualname} on {job.world_size} ranks:"]
    for position, i in enumerate(failed):
        outcome = ranks[i].outcome
        assert outcome is not None
        when = f"{max(0.0, outcome.time - start):.2f} s"
        if position == 0:
            parts.append(f"rank {i} failed first, after {when}:\n{outcome.text}")
        else:
            parts.append(
                f"rank {i} failed after {when}, perhaps only because rank {failed[0]} did:\n"
                f"{outcome.text}"
            )
    if problem:
        # After an exception the ranks left waiting are a consequence; otherwise they are the news.
        parts.insert(len(parts) if failed else 1, problem)
    parts += [f"rank {i} was here:\n{text}" for i, text in stacks.items() if text]
    for i, rank in enumerate(ranks):
        log = Path(job.folder, f"rank{i}.log")
        if (rank.outcome is None or rank.outcome.kind == "error") and log.exists():
            text = log.read_text(errors="replace")
            if text:
                parts.append(f"rank {i} printed (end):\n{text[-LOG_TAIL_CHARS:]}")
    return "\n\n".join(part.rstrip() for part in parts)


def _echo_logs(world_size: int, folder: str) -> None:
    for i in range(world_size):
        log = Path(folder, f"rank{i}.log")
        if log.exists():
            for line in log.read_text(errors="replace").splitlines():
                print(f"[rank {i}] {line}")


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid
