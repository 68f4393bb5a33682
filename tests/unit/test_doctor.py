# SPDX-License-Identifier: Apache-2.0
"""The doctor finds what is wrong, and says so with its exit status."""

import subprocess
import sys

import pytest
import torch

from megatron.linear_cp import doctor
from megatron.linear_cp.ops import torch_rule

CPU = torch.device("cpu")


def test_command_passes_here() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megatron.linear_cp", "doctor"],
        capture_output=True,
        text=True,
        timeout=200,
        env=None,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    for part in (
        "megatron-core",
        "mode chunkwise",
        "torch bfloat16: layer vs fp64",
        "all checks passed",
    ):
        assert part in result.stdout


def test_wrong_numbers_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = torch_rule.backward

    def wrong(*args: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv, dg, dbeta = right(*args)
        return dq, dk * 1.001, dv, dg, dbeta

    monkeypatch.setattr(torch_rule, "backward", wrong)
    monkeypatch.setattr(doctor, "REPEATS", 2)
    assert doctor.main() == 1
    out = capsys.readouterr().out
    assert "FAIL     torch float32: layer vs fp64" in out
    assert "some checks FAILED" in out


def test_results_that_change_between_calls_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = torch_rule.forward, iter(range(100))

    def unsteady(*args: object) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out, residual = right(*args)
        return out + 1e-6 * next(calls), residual

    monkeypatch.setattr(torch_rule, "forward", unsteady)
    found = {f.name: f for f in doctor.self_test("torch", CPU)}
    assert found[f"torch: {doctor.REPEATS} equal calls"].verdict == "FAIL"


def test_kernel_that_does_not_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(torch_rule, "prepare_forward", broken)
    verdicts = {f.verdict for f in doctor.self_test("torch", CPU)}
    assert verdicts == {"FAIL"}
