# SPDX-License-Identifier: Apache-2.0
"""Does the layer compute the same with two releases of FLA? Evidence for an upgrade.

    python tools/fla_parity.py --first release/fla-0.4.2 --second release/fla-0.6.0 \
        --device cuda --dtype bf16

Each side is a Python interpreter, or directories that are put before PYTHONPATH. The layer runs
there in a process of its own with the same weights and inputs: at CP 1, and at a larger CP in every
mode, on ranks that share the GPU over gloo where there are not enough. The output, the gradient of
the input and the gradients of all parameters are then compared, side against side, and each with
the float64 token-by-token recurrence.

Exit status 0: the same tensors, all within the tolerance; 1: not so; 2: a side did not run. On CPU
the layer runs its torch kernels and asks nothing of FLA: it compares Megatron-Core and torch.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.linear_cp.testing.parity import relative_rms

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Between two runs, not to the truth: both round, and bf16 rounds to 4e-3.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 1e-2}
MODES = ("headwise", "all_gather", "chunkwise")
PACKAGES = ("fla-core", "megatron-core", "torch", "triton")
# Sequences that cross cuts; the second row is cut inside chunks of 64 tokens, which changes them.
ROWS = {
    "cuda": {"aligned row": (0, 1024, 1032, 1048, 1280, 1792), "row": (0, 8, 648, 664, 1176)},
    "cpu": {"aligned row": (0, 64, 72, 96), "row": (0, 8, 48, 64, 88)},
}
DENSE = {"cuda": (256, 2), "cpu": (32, 2)}
# Mode, then "input: tensor", to tensor.
Results = Mapping[str, Mapping[str, Tensor]]


@dataclass
class ModeReport:
    """How two sides agree in one mode.

    Attributes:
        mode: with its CP size.
        tensors: compared.
        bitwise: of them, equal in every bit.
        over: normalised RMS of those over the tolerance, by name; NaN where values are not finite.
        unmatched: tensors that one side lacks, or of another shape or dtype, and what is wrong.
        rms: the largest normalised RMS, ``rms(second - first) / rms(first)``, and whose it is.
        cosine: the smallest cosine of the two as vectors, and whose it is.
        first_error, second_error: largest normalised RMS from float64, or None if not asked for.
    """

    mode: str
    tensors: int = 0
    bitwise: int = 0
    over: dict[str, float] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    rms: tuple[float, str] = (0.0, "")
    cosine: tuple[float, str] = (1.0, "")
    first_error: float | None = None
    second_error: float | None = None

    @property
    def agrees(self) -> bool:
        """Everything was compared, and nothing is over the tolerance."""
        return bool(self.tensors) and not self.over and not self.unmatched


def cosine(first: Tensor, second: Tensor) -> float:
    """Cosine of two tensors as vectors, in float64; 1 for two zeros, NaN if one is not finite."""
    a, b = (x.detach().double().cpu().flatten() for x in (first, second))
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return math.nan
    size = a.norm() * b.norm()
    if size == 0:
        return 1.0 if torch.equal(a, b) else 0.0
    return float(a @ b / size)


def compare(
    first: Results, second: Results, tolerance: float, reference: Results | None = None
) -> list[ModeReport]:
    """Compare two sides, mode by mode.

    Args:
        first: mode to tensors by name.
        second: the other side's; what one side lacks is reported.
        tolerance: on the normalised RMS of a tensor.
        reference: both are also compared with these, by the same names, where given.
    """
    reports = []
    for mode in [*first, *(mode for mode in second if mode not in first)]:
        ours, theirs = first.get(mode, {}), second.get(mode, {})
        report = ModeReport(mode)
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            _compare_tensor(report, name, ours.get(name), theirs.get(name), tolerance)
        if reference is not None:
            report.first_error = _largest_error(ours, reference[mode])
            report.second_error = _largest_error(theirs, reference[mode])
        reports.append(report)
    return reports


def _compare_tensor(
    report: ModeReport, name: str, first: Tensor | None, second: Tensor | None, tolerance: float
) -> None:
    if first is None or second is None:
        report.unmatched[name] = f"missing in {'first' if first is None else 'second'}"
        return
    if first.shape != second.shape or first.dtype != second.dtype:
        report.unmatched[name] = (
            f"{first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
        )
        return
    report.tensors += 1
    report.bitwise += torch.equal(_bits(first), _bits(second))
    rms, angle = relative_rms(second, first), cosine(first, second)
    if rms > tolerance:
        report.over[name] = rms
    if rms > report.rms[0]:
        report.rms = (rms, name)
    # "not >=" because NaN is the worst of all.
    if not angle >= report.cosine[0] and not math.isnan(report.cosine[0]):
        report.cosine = (angle, name)


def _bits(x: Tensor) -> Tensor:
    """The bytes: equality of values would tell NaN from NaN and miss the sign of zero."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _largest_error(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    errors = (relative_rms(x, reference[name]) for name, x in actual.items())
    return max(errors, default=math.nan)


def text(reports: list[ModeReport], tolerance: float) -> str:
    """One line for each mode, then everything that is wrong by name."""
    lines = [
        f"{'mode':18} {'tensors':>7} {'bitwise':>7} {f'over {tolerance:g}':>12} "
        f"{'largest RMS':>12} {'cosine':>12} {'float64: first':>14} {'second':>9}"
    ]
    for r in reports:
        errors = [" -" if e is None else f"{e:.2e}" for e in (r.first_error, r.second_error)]
        lines.append(
            f"{r.mode:18} {r.tensors:7} {r.bitwise:7} {len(r.over):12} {r.rms[0]:12.2e} "
            f"{r.cosine[0]:12.9f} {errors[0]:>14} {errors[1]:>9}  {r.rms[1]}"
        )
    for r in reports:
        lines += [f"{r.mode}: {name} is off by {rms:.2e}" for name, rms in r.over.items()]
        lines += [f"{r.mode}: {name}: {problem}" for name, problem in r.unmatched.items()]
        if not r.tensors:
            lines.append(f"{r.mode}: nothing was compared")
    return "\n".join(lines)


def as_json(reports: list[ModeReport], about: dict[str, Any]) -> str:
    """The same for programs; what is not a number becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(x) for name, x in value.items()}
        if isinstance(value, list | tuple):
            return [plain(x) for x in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    modes = [asdict(report) | {"agrees": report.agrees} for report in reports]
    return json.dumps(plain(about | {"modes": modes}), indent=2, allow_nan=False)


def cases(device: str, dtype: str) -> dict[str, Any]:
    """What runs, by name of the input; every side and mode gets the same values."""
    from megatron.linear_cp.testing.layer import LayerShape
    from megatron.linear_cp.testing.module import ModuleCase

    wide = device == "cuda"
    base = ModuleCase(
        shape=LayerShape(4, 8, 128, 128) if wide else LayerShape(4, 8, 16, 16),
        hidden=256 if wide else 32,
        device=device,
        dtype=DTYPES[dtype],
        # Sums over all tokens that nearly cancel: bf16 would show its rounding, not the kernels'.
        config={"linear_cp_fp32_decay": dtype == "bf16"},
    )
    found = {name: replace(base, row=row) for name, row in ROWS[device].items()}
    return found | {"dense": replace(base, dense=DENSE[device])}


def run_modes(device: str, dtype: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """This rank's results: mode and input to tensors."""
    from megatron.linear_cp.testing.module import run_module
    from megatron.linear_cp.testing.triton import first_configuration

    def run() -> dict[str, Any]:
        return {
            mode: {name: run_module(replace(c, mode=mode)) for name, c in inputs.items()}
            for mode in modes
        }

    inputs = cases(device, dtype)
    if device == "cpu":
        return run()
    if dtype == "fp32":
        # FLA's products otherwise have 10 bits, and two releases round them differently.
        os.environ["TRITON_F32_DEFAULT"] = "tf32x3"
    # Tuning takes minutes, and picks by a clock: another kernel may win in the next run.
    with first_configuration():
        return run()


def collect(device: str, dtype: str, cp: int, reference: bool) -> dict[str, Any]:
    """One side: versions, results by mode, and the float64 reference if asked for."""
    from megatron.linear_cp.testing.module import assemble_module, module_reference
    from megatron.linear_cp.testing.workers import run_distributed

    results: dict[str, dict[str, Tensor]] = {}
    for size, modes in ((1, ("chunkwise",)), (cp, MODES)):
        ranks = run_distributed(
            run_modes, size, device, dtype, modes, cuda=device == "cuda", timeout=1500
        )
        for mode in modes:
            label = "CP 1" if size == 1 else f"{mode}, CP {size}"
            parts = {name: [rank[mode][name] for rank in ranks] for name in ranks[0][mode]}
            results[label] = {
                f"{name}: {tensor}": value.cpu()
                for name, each in parts.items()
                for tensor, value in assemble_module(each).items()
            }
    exact: dict[str, Tensor] = {}
    if reference:
        for name, case in cases(device, dtype).items():
            exact |= {f"{name}: {n}": x for n, x in module_reference(case).items()}
    return {
        "versions": versions(device),
        "results": results,
        "reference": dict.fromkeys(results, exact) if reference else None,
    }


def versions(device: str) -> dict[str, str]:
    """What is installed in this process, and what it runs on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, torch kernels"
    return found | {"device": name}


def run_side(side: str, arguments: argparse.Namespace, reference: bool) -> dict[str, Any]:
    """Run :func:`collect` in the environment that ``side`` names.

    Raises:
        ValueError: a side that is neither an interpreter nor directories, or that fails.
    """
    python, path = sys.executable, [str(ROOT)]
    if os.path.isfile(side) and os.access(side, os.X_OK):
        python = side
    elif all(os.path.isdir(part) for part in side.split(os.pathsep)):
        path = [*map(os.path.abspath, side.split(os.pathsep)), *path]
    else:
        raise ValueError(f"{side} is neither a Python interpreter nor directories of packages")
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "side.pt")
        command = [python, str(Path(__file__).resolve()), "--dump", str(file)]
        command += ["--device", arguments.device, "--dtype", arguments.dtype]
        command += ["--cp", str(arguments.cp), *(["--reference"] if reference else [])]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ValueError(f"{side} failed:\n{(done.stdout + done.stderr)[-6000:]}")
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
        return loaded


def dump(arguments: argparse.Namespace) -> int:
    """The side's process: run, and write everything to a file."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda, but torch sees no CUDA device")
        return 2
    side = collect(arguments.device, arguments.dtype, arguments.cp, arguments.reference)
    torch.save(side, arguments.dump)
    return 0


def main() -> int:
    """Run both sides and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", help="interpreter, or directories put before PYTHONPATH")
    parser.add_argument("--second", help="the same for the other side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--cp", type=int, choices=(2, 4), default=2, help="of the modes")
    parser.add_argument("--tolerance", type=float, help="on the normalised RMS of a tensor")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    parser.add_argument("--reference", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dump:
        return dump(arguments)
    if not (arguments.first and arguments.second):
        parser.error("give --first and --second")
    if arguments.device == "cuda" and arguments.dtype == "fp64":
        parser.error("FLA's kernels have no float64: --dtype fp64 needs --device cpu")
    tolerance = arguments.tolerance or TOLERANCES[arguments.dtype]
    try:
        first = run_side(arguments.first, arguments, reference=True)
        second = run_side(arguments.second, arguments, reference=False)
    except ValueError as error:
        print(f"fla_parity: {error}")
        return 2
    reports = compare(first["results"], second["results"], tolerance, first["reference"])
    about = {
        "first": first["versions"],
        "second": second["versions"],
        "dtype": arguments.dtype,
        "tolerance": tolerance,
    }
    if arguments.json:
        print(as_json(reports, about))
    else:
        for name in ("first", "second"):
            installed = about[name].items()
            print(f"{name + ':':8}", ", ".join(f"{p} {v}" for p, v in installed))
        if about["first"] == about["second"]:
            print("the sides are alike: this shows repeatability, not an upgrade")
        print(f"{arguments.dtype}, normalised RMS rms(second - first) / rms(first)")
        print(text(reports, tolerance))
    return int(not all(report.agrees for report in reports))


if __name__ == "__main__":
    sys.exit(main())
