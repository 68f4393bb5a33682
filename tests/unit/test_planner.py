# SPDX-License-Identifier: Apache-2.0
"""The ``plan`` command: what it allows, recommends and prints."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron.linear_cp import planner
from megatron.linear_cp.cost import Workload


def run(tmp_path: Path, lengths: str, *flags: str) -> int:
    file = tmp_path / "lengths.txt"
    file.write_text(lengths)
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    return planner.main(parser.parse_args(["--lengths", str(file), *flags]))


def test_every_mode_and_layout_is_listed() -> None:
    found = planner.options(Workload(lengths=[32768]), 1, 8)
    assert [(o.mode, o.layout, o.move_sequences) for o in found] == [
        ("headwise", "zigzag", "never"),
        ("chunkwise", "zigzag", "never"),
        ("chunkwise", "zigzag", "auto"),
        ("all_gather", "zigzag", "never"),
        ("headwise", "contiguous", "never"),
        ("chunkwise", "contiguous", "never"),
        ("all_gather", "contiguous", "never"),
    ]
    assert not any(o.refused for o in found)
    saved = {o.mode: o.saved_bytes for o in found}
    assert saved["all_gather"] > 3 * saved["chunkwise"] == 3 * saved["headwise"]


def test_long_sequences_want_chunkwise_and_short_ones_are_moved() -> None:
    slow = {"bytes_per_second": 20e9}
    long = planner.recommended(planner.options(Workload(lengths=[131072], **slow), 1, 8))
    assert long is not None and long.mode == "chunkwise"
    found = planner.options(Workload(lengths=[256] * 512, **slow), 1, 8)
    by_move = {o.move_sequences: o for o in found if (o.mode, o.layout) == ("chunkwise", "zigzag")}
    assert by_move["auto"].bytes_sent < 0.3 * by_move["never"].bytes_sent
    assert by_move["auto"].imbalance <= 1.25


def test_what_cannot_run_says_why() -> None:
    found = planner.options(Workload(lengths=[24, 40], num_key_heads=2, num_value_heads=4), 1, 8)
    reasons = {(o.mode, o.layout): o.refused for o in found}
    assert "sequence 0 of length 24" in reasons["chunkwise", "zigzag"]
    assert "2 key heads do not divide by TP*CP = 8" in reasons["headwise", "contiguous"]
    assert reasons["chunkwise", "contiguous"] == ""
    assert "cannot run: linear_cp_mode 'headwise'" in planner.table(found)


def test_nothing_fits() -> None:
    found = planner.options(Workload(lengths=[32]), 32, 2)
    assert planner.recommended(found) is None


def test_json_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "plan.svg"
    flags = ("--cp", "4", "--json", "--picture", str(svg))
    assert run(tmp_path, "4096, 64\n64", *flags) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["options"][printed["recommended"]]["refused"] == ""
    titles = {t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title")}
    assert titles == {f"rank {rank}" for rank in range(4)}


def test_profiles_and_what_overrides_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CPU ranks send fp32, slowly; a slow network alone makes long headwise sequences lose."""

    def best(*flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        assert run(tmp_path, "65536", "--cp", "8", "--json", *flags) == 0
        printed = json.loads(capsys.readouterr().out)
        return printed["options"][printed["recommended"]], printed["options"][0]

    _, gpu = best()
    _, cpu = best("--profile", "cpu")
    assert cpu["bytes_sent"] == 2 * gpu["bytes_sent"]
    assert cpu["seconds"] > 1000 * gpu["seconds"]
    fastest, slow = best("--bandwidth", "1")
    assert fastest["mode"] == "chunkwise"
    moving = gpu["bytes_sent"] / 1e9 - gpu["bytes_sent"] / 200e9
    assert slow["seconds"] == pytest.approx(gpu["seconds"] + moving)


@pytest.mark.parametrize(
    ("lengths", "flags", "message"),
    [
        ("12 twelve", ("--cp", "2"), "got 'twelve'"),
        ("", ("--cp", "2"), "got nothing"),
        ("0 0", ("--cp", "2"), "adds up to 0 tokens"),
        ("9223372036854775807 8", ("--cp", "2"), "adds up to 9223372036854775815 tokens"),
        ("64", ("--cp", "2", "--tflops", "-1"), "--tflops must be above 0, got -1.0"),
        ("64", ("--cp", "2", "--bandwidth", "nan"), "--bandwidth must be above 0, got nan"),
        ("64", ("--cp", "2", "--latency-us", "0"), "--latency-us must be above 0, got 0.0"),
        ("64", ("--cp", "2", "--conv", "0"), "--conv must be at least 1, got 0"),
        ("64", ("--cp", "2", "--picture", "/nowhere/x.svg"), "/nowhere/x.svg"),
        ("64", ("--cp", "0"), "--cp must be at least 1, got 0"),
        ("2000000", ("--cp", "1000000"), "--cp must be at most 512, got 1000000"),
        ("64", ("--cp", "2", "--hidden", "9" * 20), f"--hidden must be at most {2**20}"),
        ("64", ("--cp", "2", "--heads", f"{'9' * 20}/{'9' * 20}"), f"numbers of at most {2**20}"),
        ("64", ("--cp", "2", "--heads", "16x32"), "--heads must be two numbers such as 16/32"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lengths: str,
    flags: tuple[str, ...],
    message: str,
) -> None:
    assert run(tmp_path, lengths, *flags, "--json") == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


def test_lengths_that_are_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.bin"
    file.write_bytes(b"\xff\xfe8")
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    assert planner.main(parser.parse_args(["--lengths", str(file), "--cp", "2"])) == 2
    assert f"{file} is not UTF-8 text" in capsys.readouterr().err


def test_one_sequence_is_no_plural() -> None:
    assert "1 sequence, 64 tokens" in planner.heading(Workload(lengths=[64]), 1, 2)


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("8192 8192")
    command = [sys.executable, "-m", "megatron.linear_cp", "plan", "--lengths", str(file)]
    done = subprocess.run([*command, "--cp", "2"], capture_output=True, text=True, check=True)
    assert "2 sequences, 16384 tokens, TP 1, CP 2" in done.stdout
    assert done.stdout.count("<- recommended") == 1


def test_length_costs_no_time() -> None:
    """Tables of every token would be terabytes here."""
    found = planner.options(Workload(lengths=[2**38, 64]), 1, 8)
    assert not any(option.refused for option in found)
