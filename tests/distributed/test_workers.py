# SPDX-License-Identifier: Apache-2.0
"""The worker pool: results by rank, isolation, and one readable error for every kind of failure."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megatron.linear_cp.testing.workers import WorkerError, run_distributed

STATE: list[int] = []


@pytest.fixture(scope="module", autouse=True)
def started_server() -> None:
    """The first job of a session pays the fork server's imports, which no test here is about."""
    run_distributed(_sum_of_ranks, 1, 0, factor=1, timeout=250)


@dataclass
class Point:
    x: int


class AwkwardError(Exception):
    """Cannot be unpickled: its constructor wants two arguments and keeps one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def _sum_of_ranks(offset: int, *, factor: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank() * factor, total


def _echo_tensors(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    leaf = tensors[0]
    return [*tensors, leaf * 3], leaf.is_leaf and leaf.requires_grad


def _append_to_state(point: Point) -> tuple[int, int]:
    STATE.append(point.x)
    return len(STATE), os.getpid()


def _environment() -> dict[str, object]:
    return {
        "threads": torch.get_num_threads(),
        "rank": os.environ["RANK"],
        "world": os.environ["WORLD_SIZE"],
        "cuda": torch.cuda.is_available(),
        "backend": dist.get_backend(),
    }


def _backward() -> float:
    x = torch.randn(300, 300, requires_grad=True)
    torch.linalg.matrix_norm(x @ x).backward()
    assert x.grad is not None
    return float(x.grad.abs().sum())


def _raise_on(ranks: tuple[int, ...]) -> str:
    if dist.get_rank() in ranks:
        print(f"about to raise on {dist.get_rank()}")
        raise ValueError(f"bad value on {dist.get_rank()}")
    if ranks and len(ranks) < dist.get_world_size():
        dist.barrier()
    return "fine"


def _raise_awkward() -> None:
    raise AwkwardError("one", "two")


def _skip() -> None:
    pytest.skip("not in a worker")


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        _sleep_here()


def _sleep_here() -> None:
    time.sleep(60)


def _raise_while_others_sleep() -> None:
    if dist.get_rank() == 1:
        raise ValueError("bad value")
    _sleep_here()


def _die(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def _start_grandchild() -> int:
    child = subprocess.Popen(["sleep", "60"])
    if dist.get_rank() == 0:
        raise ValueError(f"child {child.pid}")
    time.sleep(60)
    return child.pid


def _loaded_at_start() -> bool:
    """Whether the slow imports were there before this job asked for any."""
    return {"torch", "megatron.core.parallel_state"} <= sys.modules.keys()


def _keep_group() -> object:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    STATE.append(parallel_state.get_context_parallel_group())
    return parallel_state.get_context_parallel_world_size()


def _return_group() -> object:
    return dist.group.WORLD


def test_results_come_back_by_rank() -> None:
    results = run_distributed(_sum_of_ranks, 4, 10, factor=3)
    assert [value for value, _ in results] == [0, 3, 6, 9]
    assert all(total == 46.0 for _, total in results)


def test_tensors_travel_by_value() -> None:
    leaf = torch.ones(2, requires_grad=True)
    tensors = [
        leaf,
        torch.arange(12).view(3, 4).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ]
    for returned, was_leaf in run_distributed(_echo_tensors, 2, tensors):
        assert was_leaf
        assert all(torch.equal(a, b) for a, b in zip(returned, [*tensors, leaf * 3], strict=True))
        assert [a.dtype for a in returned[:5]] == [b.dtype for b in tensors]
        assert not returned[5].requires_grad


def test_every_job_starts_fresh() -> None:
    """Module state of one job, and its process, are gone in the next."""
    first = run_distributed(_append_to_state, 2, Point(1))
    second = run_distributed(_append_to_state, 2, Point(2))
    assert [length for length, _ in first + second] == [1, 1, 1, 1]
    assert len({pid for _, pid in first + second}) == 4
    assert STATE == []


def test_environment_of_a_worker() -> None:
    results = run_distributed(_environment, 2)
    assert [r.pop("rank") for r in results] == ["0", "1"]
    assert results == [{"threads": 1, "world": "2", "cuda": False, "backend": "gloo"}] * 2


def test_autograd_and_linear_algebra_survive_the_fork() -> None:
    """A server with threads of its own would leave a worker waiting here."""
    assert all(value > 0 for value in run_distributed(_backward, 2, timeout=20))


def test_jobs_do_not_pay_the_imports() -> None:
    preloaded = run_distributed(_loaded_at_start, 2)
    assert preloaded == [True, True], "the fork server must have these imported"


def test_error_names_the_rank_and_the_place() -> None:
    with pytest.raises(WorkerError) as info:
        run_distributed(_raise_on, 3, (1,))
    text = str(info.value)
    assert text.index("rank 1 failed first") < text.index("rank 0 failed after")
    assert "ValueError: bad value on 1" in text
    assert "in _raise_on" in text
    assert "perhaps only because rank 1 did" in text
    assert "about to raise on 1" in text
    assert isinstance(info.value.__cause__, ValueError)
    assert set(info.value.exceptions) == {0, 1, 2}


def test_return_exceptions() -> None:
    results = run_distributed(_raise_on, 3, (0, 1, 2), return_exceptions=True)
    assert [str(r) for r in results] == [f"bad value on {rank}" for rank in range(3)]
    assert all(type(r) is ValueError for r in results)
    assert run_distributed(_raise_on, 2, (), return_exceptions=True) == ["fine", "fine"]


def test_exception_that_cannot_be_pickled() -> None:
    with pytest.raises(WorkerError, match=r"AwkwardError: one"):
        run_distributed(_raise_awkward, 2)


def test_skip_in_a_worker_is_not_a_pass() -> None:
    with pytest.raises(WorkerError, match="Skipped: not in a worker"):
        run_distributed(_skip, 2)


def test_hang_is_stopped_and_located() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 still running, after 1 s") as info:
        run_distributed(_hang_on, 2, 1, timeout=1.0)
    assert time.monotonic() - start < 45
    assert "_sleep_here" in str(info.value)
    # Rank 0 returned its value and only waited in the clean-up.
    assert "rank 0" not in str(info.value)


def test_first_error_does_not_wait_for_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 failed first") as info:
        run_distributed(_raise_while_others_sleep, 3, timeout=50.0)
    assert time.monotonic() - start < 45
    assert "ranks 0, 2 still running, stopped" in str(info.value)


@pytest.mark.parametrize(("how", "text"), [("exit", "exit code 3"), ("segfault", "SIGSEGV")])
def test_dead_worker_is_reported_at_once(how: str, text: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank 1 died: .*{text}") as info:
        run_distributed(_die, 2, how, timeout=50.0)
    assert time.monotonic() - start < 45
    if how == "segfault":
        assert "Fatal Python error" in str(info.value)


def test_processes_started_by_a_worker_are_stopped_with_it() -> None:
    with pytest.raises(WorkerError) as info:
        run_distributed(_start_grandchild, 2)
    pid = int(str(info.value.exceptions[0]).split()[1])
    deadline = time.monotonic() + 5
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(pid)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_group_left_in_a_global_does_not_spoil_the_exit() -> None:
    assert run_distributed(_keep_group, 2) == [2, 2]


def test_value_that_cannot_be_pickled() -> None:
    with pytest.raises(WorkerError, match="value returned by a rank cannot be pickled"):
        run_distributed(_return_group, 2)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        run_distributed(lambda: 1, 2)
    with pytest.raises(TypeError, match="cannot be pickled"):
        run_distributed(_raise_on, 2, (lambda: 1,))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_distributed(_raise_on, 0, ())


def test_function_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``__main__`` is another program in the worker; the script has to be found again."""
    script = tmp_path / "main.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "def here():\n    return dist.get_rank() + 5\n"
        "if __name__ == '__main__':\n    raise SystemExit('guarded')\n"
    )
    main = ModuleType("__main__")
    main.__file__ = str(script)
    main.__dict__["__spec__"] = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    source = script.read_text().partition("if __name__")[0]
    exec(compile(source, str(script), "exec"), main.__dict__)
    assert run_distributed(main.here, 2) == [5, 6]


def test_module_that_only_its_file_identifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are test modules under pytest's importlib mode; their classes can be arguments."""
    file = tmp_path / "aside.py"
    file.write_text(
        "import torch.distributed as dist\n"
        "class Box:\n    def __init__(self, v): self.v = v\n"
        "def there(box):\n    return box.v + dist.get_rank()\n"
    )
    spec = importlib.util.spec_from_file_location("tests.of.nobody", file)
    assert spec is not None and spec.loader is not None
    aside = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tests.of.nobody", aside)
    spec.loader.exec_module(aside)
    assert run_distributed(aside.there, 2, aside.Box(7)) == [7, 8]
