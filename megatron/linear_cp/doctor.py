# SPDX-License-Identifier: Apache-2.0
"""What is installed, what works here, and whether its numbers are right on this device."""

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatron.linear_cp.ops import fla_capabilities
from megatron.linear_cp.ops.gated_delta_rule import gated_delta_rule
from megatron.linear_cp.plan import ContextParallelPlan
from megatron.linear_cp.testing.layer import (
    LayerShape,
    layer_reference,
    make_layer_inputs,
    run_mode,
)
from megatron.linear_cp.testing.parity import make_rule_inputs, relative_rms
from megatron.linear_cp.testing.triton import first_configuration

REPEATS = 30
CU_SEQLENS = (0, 70, 71, 300)
# Relative RMS of the layer per input dtype; bf16 also rounds between convolution, norm and rule.
GATES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
_PACKAGES = ("torch", "triton", "megatron-core", "fla-core", "transformer-engine", "apex")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        verdict: ``"pass"``, ``"FAIL"``, ``"warning"`` or ``"info"``.
        detail: one sentence.
    """

    name: str
    verdict: str
    detail: str


def main() -> int:
    """Print the report; 0 if nothing failed, else 1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = False
    for finding in findings(device):
        print(f"{finding.verdict:<8} {finding.name:<34} {finding.detail}", flush=True)
        failed |= finding.verdict == "FAIL"
    print("some checks FAILED" if failed else "all checks passed")
    return int(failed)


def findings(device: torch.device) -> Iterator[Finding]:
    """Versions, what each mode can use, known faults, and the numeric self-test."""
    yield from versions(device)
    yield from known_problems(device)
    yield from mode_support(device)
    # Tuning every kernel would take longer than the test.
    with first_configuration() if device.type == "cuda" else contextlib.nullcontext():
        for backend in _backends(device):
            yield from self_test(backend, device)


def versions(device: torch.device) -> Iterator[Finding]:
    """Python, packages and device."""
    yield Finding("python", "info", platform.python_version())
    for package in _PACKAGES:
        yield Finding(package, "info", _version(package) or "not installed")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    yield Finding("device", "info", f"{device} {name}".strip())


def known_problems(device: torch.device) -> Iterator[Finding]:
    """Combinations that are known to be wrong."""
    fla, triton = _version("fla-core"), _version("triton")
    if device.type == "cuda" and fla and triton:
        for key_dim in (64, 128):
            fault = fla_capabilities.known_fault(
                fla,
                triton,
                torch.cuda.get_device_capability(device),
                key_dim,
                fla_capabilities.has_tilelang(),
            )
            if fault:
                yield Finding(f"FLA kernels, key dim {key_dim}", "warning", fault)
    if fla and fla.startswith("0.4.2"):
        yield Finding("KDA", "warning", "fla-core 0.4.2's KDA is wrong; use 0.5 or later for it")
    if _version("apex") and importlib.util.find_spec("apex") is not None:
        # NVIDIA's has this subpackage; the package index serves another project of the name.
        nvidia = importlib.util.find_spec("apex.normalization") is not None
        if not nvidia:
            yield Finding("apex", "warning", "this is not NVIDIA's apex; uninstall it")


def mode_support(device: torch.device) -> Iterator[Finding]:
    """What every mode runs on here."""
    kernels = "FLA" if device.type == "cuda" else "torch"
    for mode in ("headwise", "chunkwise", "all_gather"):
        yield Finding(f"mode {mode}", "info", f"{kernels} kernels; deterministic_mode: torch")
    if device.type != "cuda":
        yield Finding("state_exchange fla", "info", "needs CUDA; 'scan' runs here")
        return
    try:
        fla_capabilities.require("rule")
        fla_capabilities.require("cp_context")
        yield Finding("state_exchange fla", "info", "available")
    except fla_capabilities.FlaUnavailableError as error:
        yield Finding("FLA", "FAIL", str(error))


def self_test(backend: str, device: torch.device) -> Iterator[Finding]:
    """Rule and layer against fp64, output and every gradient, and repeatability."""
    for dtype, gate in GATES.items():
        name = f"{backend} {str(dtype).removeprefix('torch.')}"
        check = partial(_layer, backend, device, dtype, gate)
        yield _checked(f"{name}: layer vs fp64", check)
    yield _checked(f"{backend}: {REPEATS} equal calls", partial(_repeat, backend, device))


def _backends(device: torch.device) -> tuple[str, ...]:
    return ("torch", "fla") if device.type == "cuda" else ("torch",)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "pass", check())
    except Exception as error:  # a kernel that does not run is a finding, not the end of the report
        return Finding(name, "FAIL", f"{type(error).__name__}: {error}".splitlines()[0])


def _layer(backend: str, device: torch.device, dtype: torch.dtype, gate: float) -> str:
    shape = LayerShape(2, 4, 128, 128)
    tensors = make_layer_inputs(shape, CU_SEQLENS[-1], dtype)
    expected = layer_reference(tensors, shape, CU_SEQLENS)
    plan = ContextParallelPlan.build(CU_SEQLENS, None)
    on_device = {name: x.to(device) for name, x in tensors.items()}
    actual = run_mode("chunkwise", plan, on_device, shape, backend=backend)
    errors = {name: relative_rms(actual[name].cpu(), expected[name]) for name in expected}
    bad = [
        f"{name} {error:.1e}"
        for name, error in errors.items()
        if not error <= gate  # NaN compares false
    ]
    if bad:
        raise AssertionError(f"relative RMS above {gate:g}: {', '.join(bad)}")
    return f"largest relative RMS {max(errors.values()):.1e} of {len(errors)} tensors"


def _repeat(backend: str, device: torch.device) -> str:
    inputs = make_rule_inputs(256, key_dim=128, value_dim=128, dtype=torch.float32, device=device)
    first: list[torch.Tensor] | None = None
    for _ in range(REPEATS):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        q, k, v, g, beta = (leaves[name] for name in ("q", "k", "v", "g", "beta"))
        out = gated_delta_rule(q, k, v, g, beta, backend=backend)
        out.sum().backward()
        results = [out.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]
        if first is None:
            first = results
        elif not all(torch.equal(a, b) for a, b in zip(first, results, strict=True)):
            worst = max(relative_rms(b, a) for a, b in zip(first, results, strict=True))
            if backend == "torch" or worst > 1e-5:
                raise AssertionError(f"results differ between calls by {worst:.1e}")
    return "bitwise" if backend == "torch" else "within 1e-5"
