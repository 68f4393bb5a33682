# SPDX-License-Identifier: Apache-2.0
"""The ``inspect`` command: a saved micro-batch, what a run says of it, and what would help."""

import argparse
import json
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp import inspector
from megatron.linear_cp.__main__ import main as linear_cp_main
from megatron.linear_cp.cost import Workload, predict_costs
from megatron.linear_cp.data import pack_sequences
from megatron.linear_cp.layout import rank_indices, token_ranges
from megatron.linear_cp.micro_batch import packed_plan, plan_for
from megatron.linear_cp.packed_seq_params import single_rank_group
from megatron.linear_cp.saved_batch import load_batch

SMALL = ("--heads", "4/8", "--head-dims", "32/32", "--hidden", "256")
# 12 does not divide by 2 * 4; all others do, and one sequence is empty.
REAL, STORED = [0, 60, 60, 90, 101, 161], [0, 64, 64, 96, 108, 172]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def params(real: list[int], stored: list[int] | None = None, **others: Any) -> PackedSeqParams:
    padded = None if stored is None else ints(stored)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ints(real),
        cu_seqlens_kv=ints(real),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        **others,
    )


def saved(tmp_path: Path, value: Any) -> str:
    file = tmp_path / "batch.pt"
    torch.save(value, file)
    return str(file)


def run(file: str, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    inspector.add_arguments(parser)
    return inspector.main(parser.parse_args([file, *SMALL, *flags]))


def report(capsys: pytest.CaptureFixture[str], file: str, *flags: str) -> dict[str, Any]:
    run(file, "--json", *flags)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def raised_by_the_layer(value: PackedSeqParams, cp: int, layout: str, local_tokens: int) -> str:
    group = dist.ProcessGroup(0, cp)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"\S+") as caught:
        plan_for(value, group, local_tokens=local_tokens, batch=1, layout=layout)
    return str(caught.value)


def test_a_failing_micro_batch_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = params(REAL, STORED)
    file = saved(tmp_path, value)
    assert run(file, "--cp", "4") == 0  # contiguous takes it
    said = capsys.readouterr().out
    assert raised_by_the_layer(value, 4, "zigzag", 43) in said
    assert "172 rows stored, 161 tokens, 11 rows of padding (6.4 %)" in said
    assert "5 sequences of 0 to 60 tokens, 1 of them empty" in said
    wrong = [line for line in said.splitlines() if line.endswith("<- not a multiple of 8")]
    assert [line.split()[:5] for line in wrong] == [["3", "96", "11", "12", "1"]]
    assert "pad 1 of 5 sequences to a multiple of 8 (3: 12 -> 16), 4 more rows (2.3 %)" in said
    assert "as stored it fits CP 1, 2\n" in said
    assert "softmax attention in the same stack brings hidden states to zigzag" in said


def test_what_it_advises_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, saved(tmp_path, params(REAL, STORED)), "--cp", "8")
    rows = np.diff(STORED) + [s["missing"] for s in found["sequences"]]
    file = saved(tmp_path, params(REAL, np.cumsum([0, *rows]).tolist()))
    mended = report(capsys, file, "--cp", "8")
    assert mended["layouts"]["zigzag"]["error"] == ""
    assert [s["real"] for s in mended["sequences"]] == np.diff(REAL).tolist()
    for layout, verdict in mended["layouts"].items():
        for size in range(1, 9):
            fits = report(capsys, file, "--cp", str(size))["layouts"][layout]["error"] == ""
            assert fits == (size in verdict["sizes"]), (layout, size)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ranks_hold_what_the_layout_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    real, stored = [0, 60, 90, 101, 161], [0, 64, 96, 112, 176]
    shares = report(capsys, saved(tmp_path, params(real, stored)), "--cp", "4")["shares"][layout]
    is_real = np.zeros(stored[-1], dtype=bool)
    for start, length in zip(stored, np.diff(real), strict=False):
        is_real[start : start + length] = True
    ranges = token_ranges(stored, 4, layout)
    for rank, share in enumerate(shares):
        mine = rank_indices(ranges, rank)
        held = np.concatenate([np.arange(start, stop) for _, start, stop in share["segments"]])
        assert held.tolist() == mine.tolist()
        assert (share["tokens"], share["real"]) == (len(mine), int(is_real[mine].sum()))
        for sequence, start, stop in share["segments"]:
            assert stored[sequence] <= start < stop <= stored[sequence + 1]


def test_bytes_are_those_of_plan_and_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [512, 8, 16, 256, 8]
    found = report(capsys, saved(tmp_path, ints(np.cumsum([0, *lengths]).tolist())), "--cp", "4")
    workload = Workload(lengths, 4, 8, 32, 32, hidden_size=256)
    for name, layout, move in (
        ("zigzag", "zigzag", "never"),
        (inspector.MOVED, "zigzag", "auto"),
        ("contiguous", "contiguous", "never"),
    ):
        costs = predict_costs(
            workload,
            tensor_model_parallel_size=1,
            context_parallel_size=4,
            layout=layout,
            move_sequences=move,
        )
        sends = [share["sends"] for share in found["shares"][name]]
        assert max(s["chunkwise"] for s in sends) == costs["chunkwise"].bytes_sent
        assert all(s["chunkwise"] == s["states"] + s["halo"] + s["moved"] for s in sends)
        assert any(s["moved"] for s in sends) == (move == "auto")
        if move == "never":
            for mode in ("headwise", "all_gather"):
                assert {s[mode] for s in sends} == {costs[mode].bytes_sent}
    assert found["options"][found["recommended"]]["refused"] == ""


def test_a_mode_that_the_heads_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, ints([0, 64]))
    assert run(file, "--cp", "8") == 0
    said = capsys.readouterr().out
    assert "4 key heads do not divide by TP*CP = 8" in said
    assert "sends all_gather" in said and "sends headwise" not in said


FORMS = {
    "PackedSeqParams": params(REAL, STORED, local_cp_size=2),
    "in a micro-batch": {"tokens": torch.zeros(1, 8), "packed_seq_params": params(REAL, STORED)},
    "mapping of one side": {"cu_seqlens_q": ints(REAL), "cu_seqlens_q_padded": ints(STORED)},
    "mapping": OrderedDict(
        cu_seqlens_q=ints(REAL),
        cu_seqlens_kv=ints(REAL),
        cu_seqlens_q_padded=ints(STORED),
        cu_seqlens_kv_padded=ints(STORED),
        max_seqlen_q=64,
    ),
    "without a suffix": {"cu_seqlens": ints(REAL), "cu_seqlens_padded": ints(STORED)},
}


@pytest.mark.parametrize("value", FORMS.values(), ids=FORMS)
def test_every_form_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    found = report(capsys, saved(tmp_path, value), "--cp", "2")
    assert [s["stored"] for s in found["sequences"]] == np.diff(STORED).tolist()
    assert [s["real"] for s in found["sequences"]] == np.diff(REAL).tolist()


def test_boundaries_alone_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [saved(tmp_path, torch.tensor(STORED))]
    for name, value in (("list", STORED), ("mapping", {"cu_seqlens_q": STORED})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(value))
        files.append(str(file))
    for file in files:
        found = report(capsys, file, "--cp", "2")
        assert [s["real"] for s in found["sequences"]] == np.diff(STORED).tolist()


def test_a_packed_batch_and_a_used_micro_batch_load(tmp_path: Path) -> None:
    """Both have classes of ours in the file; the second keeps its plan beside it."""
    batch = pack_sequences([torch.arange(5), torch.arange(9)], multiple_of=8)
    assert load_batch(saved(tmp_path, batch)).params.cu_seqlens_q_padded.tolist() == [0, 8, 24]
    used = params(REAL, STORED)
    packed_plan(used, single_rank_group())
    assert load_batch(saved(tmp_path, used)).params.cu_seqlens_q.tolist() == REAL


def test_the_files_cp_size_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, params(REAL, STORED, local_cp_size=2))
    assert len(report(capsys, file)["shares"]["zigzag"]) == 2
    assert report(capsys, file, "--cp", "1")["notes"] == [
        "the file says local_cp_size 2, inspected at 1"
    ]


def test_a_buffer_of_another_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = params([0, 60, 90], [0, 64, 96])
    flags = ("--cp", "4", "--local-tokens")
    assert run(saved(tmp_path, value), *flags, "32") == 1
    said = capsys.readouterr().out
    assert said.count(raised_by_the_layer(value, 4, "zigzag", 32)) == 2
    assert "32 rows lie behind the last boundary" in said
    assert run(saved(tmp_path, value), *flags, "24") == 0


MALFORMED = {
    "lengths": (params([64, 32, 64]), "must start at 0", "if these are lengths"),
    "joined": (params([0, 64, 32]), "not be decreasing", "parts of two micro-batches"),
    "kv": (
        PackedSeqParams(qkv_format="thd", cu_seqlens_q=ints([0, 8]), cu_seqlens_kv=ints([0, 16])),
        "q and kv boundaries differ",
        "",
    ),
    "no room": (params([0, 20, 40], [0, 16, 40]), "sequence 0 has 20 tokens but", ""),
    "floats": (params([0, 8]), "must hold integers, got dtype float32", ""),
    "no format": (params([0, 8]), "qkv_format None and boundaries", ""),
    "empty": (PackedSeqParams(qkv_format="thd"), "without boundaries", ""),
}
MALFORMED["floats"][0].cu_seqlens_q = torch.zeros(2, requires_grad=True)
MALFORMED["floats"][0].cu_seqlens_kv = torch.nn.Parameter(torch.zeros(2))
MALFORMED["no format"][0].qkv_format = None


@pytest.mark.parametrize(("value", "error", "advice"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_boundaries_give_the_runs_own_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    value: PackedSeqParams,
    error: str,
    advice: str,
) -> None:
    assert run(saved(tmp_path, value), "--cp", "2") == 1
    said = capsys.readouterr().out
    assert "a run raises, in every mode and layout:" in said
    assert error in said and advice in said


class Foreign:
    """Not a class that a file may name."""


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (
            Foreign(),
            ("--cp", "2"),
            "Foreign, which inspect does not load because loading would run",
        ),
        ({"tokens": 1}, ("--cp", "2"), "has tokens and no boundaries"),
        (3, ("--cp", "2"), "holds a builtins.int"),
        (b"", ("--cp", "2"), "is empty"),
        (b"[0, 8", ("--cp", "2"), "looks like JSON and is not"),
        (b"PK broken", ("--cp", "2"), "neither JSON nor a whole file of torch.save"),
        (b'["a", 2]', ("--cp", "2"), "cu_seqlens_q is not one row of numbers"),
        (b"[0, 8]", (), "does not say its CP size: give it with --cp"),
        (b"[0, 8]", ("--cp", "0"), "--cp must be at least 1, got 0"),
        (b"[0, 8]", ("--cp", "1000000"), "--cp must be at most 512, got 1000000"),
        (b"[0, 8]", ("--cp", "2", "--local-tokens", "0"), "--local-tokens must be at least 1"),
        (b"[]", ("--cp", "2"), "must be a row of boundaries, got shape [0]"),
        (b'{"cu_seqlens_q": 5}', ("--cp", "2"), "must be a row of boundaries, got shape []"),
        (b"[0, Infinity]", ("--cp", "2", "--json"), "batch: cu_seqlens_q"),
        (b"[" * 100_000, ("--cp", "2"), "looks like JSON and is not"),
        (b"a,b\n1,2\n", ("--cp", "2"), "neither JSON nor a whole file of torch.save"),
        (b"tensor([0, 16, 40])", ("--cp", "2"), "neither JSON nor a whole file of torch.save"),
        (b'{"cu_seqlens_q": [0, 8], "local_cp_size": "2"}', (), "local_cp_size must be a whole"),
        (b'{"cu_seqlens_q": [0, 8], "local_cp_size": 2.0}', (), "local_cp_size must be a whole"),
        (b'{"cu_seqlens_q": [0, 8], "local_cp_size": true}', (), "local_cp_size must be a whole"),
        (params([0, 8], local_cp_size=torch.tensor(2)), (), "local_cp_size must be a whole"),
        (
            PackedSeqParams(qkv_format="thd", cu_seqlens_q=[0, 8], cu_seqlens_kv=[0, 8]),
            ("--cp", "2"),
            "cu_seqlens_q must be a tensor, got [0, 8]",
        ),
        (torch.zeros(2, device="meta"), ("--cp", "2"), "no plain values to read"),
        (torch.ones(2).to_sparse(), ("--cp", "2"), "no plain values to read"),
        (torch.ones(2, dtype=torch.complex64), ("--cp", "2"), "no plain values to read"),
        (b"[0, 0]", ("--cp", "2"), "adds up to 0 tokens"),
        (b"[0, 8]", ("--cp", "2", "--picture", "/nowhere/x.svg"), "/nowhere/x.svg"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, when it reads such a file
def test_bad_input_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    flags: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "batch"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    assert run(str(file), *flags) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "none.pt"), "--cp", "2") == 2
    assert "none.pt" in capsys.readouterr().err


def test_many_sequences_are_shortened_but_not_those_that_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [8] * 100 + [4]
    run(saved(tmp_path, ints(np.cumsum([0, *lengths]).tolist())), "--cp", "4")
    said = capsys.readouterr().out
    assert "     100       800         4         4         0  <- not a multiple of 8" in said
    assert "and 85 more" in said
    assert len(said.splitlines()) < 60


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    svg = tmp_path / "batch.svg"
    file = saved(tmp_path, params(REAL, STORED))
    command = ["linear_cp", "inspect", file, "--cp", "2", "--picture", str(svg)]
    monkeypatch.setattr(sys, "argv", command)
    with warnings.catch_warnings():  # the command silences them for its process
        assert linear_cp_main() == 0
    said = capsys.readouterr().out
    assert "PackedSeqParams, qkv_format thd" in said
    assert said.count("<- recommended") == 1
    titles = {t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}title")}
    assert titles == {"rank 0", "rank 1"}
