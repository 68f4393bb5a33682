# SPDX-License-Identifier: Apache-2.0
"""What ``tools/fla_parity.py`` says of two sides, given tensors that differ on purpose."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tools import fla_parity
from tools.fla_parity import ModeReport, compare, cosine


def side(**changes: Tensor) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(40, generator=generator) for name in ("out", "dhidden", "dA_log")}
    return {"CP 1": tensors | changes}


def only(*arguments: dict[str, dict[str, Tensor]], tolerance: float = 1e-2) -> ModeReport:
    (report,) = compare(*arguments, tolerance)
    return report


def test_equal_sides() -> None:
    report = only(side(), side())
    assert (report.tensors, report.bitwise, report.over) == (3, 3, {})
    assert report.rms[0] == 0.0 and report.cosine[0] == pytest.approx(1.0, abs=1e-15)
    assert report.agrees


@pytest.mark.parametrize(("scale", "over"), [(1.009, False), (1.011, True), (-1.0, True)])
def test_a_difference_is_measured(scale: float, over: bool) -> None:
    """A scaled tensor has the normalised RMS ``|scale - 1|`` and the cosine ``sign(scale)``."""
    first = side()
    report = only(first, side(dhidden=scale * first["CP 1"]["dhidden"]))
    assert report.rms == (pytest.approx(abs(scale - 1), rel=1e-4), "dhidden")
    assert (list(report.over) == ["dhidden"]) == over == (not report.agrees)
    assert report.bitwise == 2
    assert report.cosine[0] == pytest.approx(math.copysign(1, scale))


def test_the_last_bit_is_seen() -> None:
    first = side()
    second = side(out=first["CP 1"]["out"].clone())
    second["CP 1"]["out"][5] = torch.nextafter(second["CP 1"]["out"][5], torch.tensor(9.0))
    report = only(first, second)
    assert (report.tensors, report.bitwise) == (3, 2)
    assert report.agrees and 0 < report.rms[0] < 1e-6


def test_zeros_of_either_sign_and_equal_nans() -> None:
    zero, minus = torch.zeros(4), -torch.zeros(4)
    assert only(side(out=zero), side(out=minus)).bitwise == 2
    nan = torch.full((4,), math.nan)
    report = only(side(out=nan), side(out=nan))
    assert report.bitwise == 3 and not report.agrees  # alike in every bit, and wrong
    assert report.over["out"] == report.rms[0] == math.inf
    assert math.isnan(report.cosine[0])


def test_nan_is_worse_than_any_number() -> None:
    first = side()
    tensors = first["CP 1"]
    for order in (("out", "dhidden"), ("dhidden", "out")):
        changed = {order[0]: 5 * tensors[order[0]], order[1]: tensors[order[1]] / 0}
        report = only(first, side(**changed))
        assert set(report.over) == set(order)
        assert report.rms[0] == math.inf and report.rms[1] == order[1]


def test_what_one_side_lacks() -> None:
    first, second = side(), side(dextra=torch.ones(3))
    del second["CP 1"]["out"]
    second["CP 1"]["dA_log"] = second["CP 1"]["dA_log"].double()
    second["CP 1"]["dhidden"] = second["CP 1"]["dhidden"].view(4, 10)
    report = only(first, second)
    assert report.unmatched == {
        "out": "missing in second",
        "dextra": "missing in first",
        "dA_log": "torch.float32 (40,) and torch.float64 (40,)",
        "dhidden": "torch.float32 (40,) and torch.float32 (4, 10)",
    }
    assert report.tensors == 0 and not report.agrees


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_mode_that_one_side_lacks(lacking: int) -> None:
    sides = [side(), side()]
    sides[1 - lacking]["chunkwise, CP 2"] = side()["CP 1"]
    both = {report.mode: report for report in compare(*sides, 1e-2)}
    assert both["CP 1"].agrees and not both["chunkwise, CP 2"].agrees
    assert len(both["chunkwise, CP 2"].unmatched) == 3


def test_error_from_the_reference() -> None:
    exact = side()
    second = side(dA_log=1.5 * exact["CP 1"]["dA_log"])
    (report,) = compare(side(), second, 1.0, exact)
    assert (report.first_error, report.second_error) == (0.0, pytest.approx(0.5))


def test_cosine() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert cosine(x, y) == pytest.approx(0.5**0.5)
    assert (cosine(0 * x, 0 * y), cosine(0 * x, y)) == (1.0, 0.0)


def test_text_and_json() -> None:
    first = side()
    second = side(out=2 * first["CP 1"]["out"], dA_log=first["CP 1"]["dA_log"] / 0)
    reports = compare(first, second, 1e-2)
    said = fla_parity.text(reports, 1e-2)
    assert "CP 1: out is off by 1.00e+00" in said and "CP 1: dA_log is off by inf" in said
    (mode,) = json.loads(fla_parity.as_json(reports, {"dtype": "fp32"}))["modes"]
    assert (mode["tensors"], mode["bitwise"], mode["agrees"]) == (3, 1, False)
    assert mode["over"] == {"out": 1.0, "dA_log": None}
    assert mode["rms"] == [None, "dA_log"]
    assert "nothing was compared" in fla_parity.text(compare({"CP 1": {}}, {}, 1e-2), 1e-2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--first", "/nowhere", "--second", "/nowhere"), "/nowhere is neither a Python interpr"),
        (("--first", "/nowhere"), "give --first and --second"),
        (("--first", "a", "--second", "b", "--device", "cuda", "--dtype", "fp64"), "no float64"),
    ],
)
def test_bad_sides(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["fla_parity.py", *flags])
    try:
        status = fla_parity.main()
    except SystemExit as leaving:  # what argparse refuses
        status = int(leaving.code or 0)
    said = capsys.readouterr()
    assert status == 2
    assert message in said.out + said.err


def test_a_side_that_fails_is_shown(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such kernel >&2\nexit 3\n")
    broken.chmod(0o755)
    arguments = argparse.Namespace(device="cpu", dtype="fp32", cp=2)
    with pytest.raises(ValueError, match=r"python failed:\nno such kernel"):
        fla_parity.run_side(str(broken), arguments, reference=False)


def test_directories_come_first_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('found the directory')")
    arguments = argparse.Namespace(device="cpu", dtype="fp32", cp=2)
    with pytest.raises(ValueError, match="found the directory"):
        fla_parity.run_side(str(tmp_path), arguments, reference=False)


def test_one_side_runs_in_every_mode() -> None:
    """The process of a side, on CPU: all parameters, and each mode near float64."""
    collected = fla_parity.collect("cpu", "fp32", 2, reference=True)
    results, exact = collected["results"], collected["reference"]
    assert list(results) == ["CP 1", "headwise, CP 2", "all_gather, CP 2", "chunkwise, CP 2"]
    for mode, tensors in results.items():
        names = {name.partition(": ")[2] for name in tensors}
        assert {"out", "dhidden", "dA_log", "ddt_bias", "dconv1d.weight"} <= names
        assert tensors.keys() == exact[mode].keys()
    # The modes round differently, so that each is known to have run.
    for mode in ("headwise, CP 2", "all_gather, CP 2"):
        both = ({"": results[mode]}, {"": results["chunkwise, CP 2"]})
        assert only(*both, tolerance=1e-4).bitwise < len(exact[mode])
    reports = compare(results, exact, 1e-4)
    # float64 on one side: every dtype differs, which is what the report must say.
    assert all(len(report.unmatched) == len(results[report.mode]) for report in reports)
    reports = compare(results, results, 1e-4, exact)
    assert all(report.agrees and report.bitwise == report.tensors for report in reports)
    assert all(0 < (report.first_error or 0.0) < 1e-5 for report in reports)
