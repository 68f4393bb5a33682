# SPDX-License-Identifier: Apache-2.0
"""The demo's parts: whole training runs under every mode, its text, and its verdict."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron.linear_cp.testing.cpu import cpu_cuda
from megatron.linear_cp.testing.workers import run_distributed

DEMO = Path(__file__).parents[2] / "examples" / "train_hybrid"
TOLERANCE = 1e-4
STEPS = 4


def load(name: str) -> ModuleType:
    """A module of the demo, which is a script and no package."""
    full = f"train_hybrid_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, DEMO / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


def train_runs(runs: list[tuple[str, int]]) -> list[list[float]]:
    """Losses of each run on the same data."""
    model, text = load("model"), load("text")
    documents = text.load_documents(None)
    settings = model.Settings(steps=STEPS, row_tokens=256)
    results = []
    with cpu_cuda():
        for mode, cp_size in runs:
            batches = text.packed_batches(documents, row_tokens=256, multiple_of=4, seed=3)
            run = model.Run(mode, mode, cp_size)
            result = model.train(run, settings, batches, torch.device("cpu"), lambda loss: None)
            results.append(result.losses)
    return results


def test_every_mode_trains_as_cp_one_does() -> None:
    runs = [("headwise", 1), ("headwise", 2), ("chunkwise", 2), ("all_gather", 2)]
    base, *others = run_distributed(train_runs, 2, runs)[0]
    assert base[-1] < base[0], "the loss must fall"
    for (mode, _), losses in zip(runs[1:], others, strict=True):
        assert losses == pytest.approx(base, rel=TOLERANCE), mode


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "is empty"),
        ("a.txt", " \n\n ", "is empty"),
        ("a.txt", "x", "a document of 1 token"),
        ("a.txt", b"\xff\xfe\xfa", "not UTF-8"),
        ("a.jsonl", '{"text": "good"}\n{"text": ', "line 2: malformed JSON"),
        (
            "a.jsonl",
            '{"text": "good"}\n\n{"body": "x"}',
            'line 3: expected an object with a string "text"',
        ),
        ("a.jsonl", '["text"]', "line 1: expected an object"),
        ("a.jsonl", '{"text": "good"}\n{"text": "x"}', "line 2: a document of 1 token"),
        ("a.jsonl", '{"text": ""}', "line 1: a document of 0 token"),
        ("a.jsonl", r'{"text": "\ud800"}', "line 1: text with half a character"),
        ("a.jsonl", '{"text": ' + "9" * 5000 + "}", "line 1: malformed JSON"),
        ("a.jsonl", "[" * 100_000, "line 1: malformed JSON"),
    ],
)
def test_bad_text_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("text").load_documents(write(tmp_path, name, content))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load("text").load_documents(str(tmp_path / "missing.txt"))


def test_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a regular file"):
        load("text").load_documents(str(tmp_path))


def test_legal_json_is_read_as_it_is(tmp_path: Path) -> None:
    """Line separators inside strings, a byte order mark, CRLF, an upper-case suffix."""
    content = '\ufeff{"text": "one\u2028two"}\r\n{"text": "three"}\n'
    path = write(tmp_path, "A.JSONL", content)
    documents = [bytes(d.tolist()).decode() for d in load("text").load_documents(path)]
    assert documents == ["one\u2028two", "three"]


def test_files_become_documents(tmp_path: Path) -> None:
    text = load("text")
    lines = write(
        tmp_path, "a.jsonl", "\n".join(json.dumps({"text": t}) for t in ("héllo", "world"))
    )
    assert [bytes(d.tolist()).decode() for d in text.load_documents(lines)] == ["héllo", "world"]
    long = "word " * 20
    paragraphs = write(tmp_path, "a.txt", f"V\n\n{long}\n\n{long}\n\nThe end")
    documents = [bytes(d.tolist()).decode() for d in text.load_documents(paragraphs)]
    assert documents == [f"V\n\n{long}", f"{long}\n\nThe end"], "nothing may be dropped"


@pytest.mark.parametrize("row_tokens", [8, 64, 1024])
def test_rows_hold_every_token_once(row_tokens: int) -> None:
    lengths = [2, 3, 5, 7, 64, 65, 129]
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    documents = [torch.arange(s, s + n) for s, n in zip(first, lengths, strict=True)]
    batches = load("text").packed_batches(documents, row_tokens=row_tokens, multiple_of=4, seed=0)
    seen: list[int] = []
    while len(seen) < sum(lengths):
        batch = next(batches)
        assert batch.tokens.shape[1] <= row_tokens
        for start, real, following in zip(
            batch.cu_seqlens_padded.tolist(),
            batch.cu_seqlens.diff().tolist(),
            batch.cu_seqlens_padded.tolist()[1:],
            strict=False,
        ):
            assert (following - start) % 4 == 0
            seen += batch.tokens[0, start : start + real].tolist()
    # A row may run on into the next pass over the documents.
    assert sorted(seen[: sum(lengths)]) == list(range(sum(lengths)))


def test_same_seed_same_rows() -> None:
    text = load("text")
    documents = text.load_documents(None)
    one, two = (
        itertools.islice(text.packed_batches(documents, row_tokens=256, multiple_of=4, seed=5), 3)
        for _ in range(2)
    )
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.tokens, b.tokens)


def verdict(*losses: float) -> Any:
    report, model = load("report"), load("model")
    results = {
        "cp 1": model.Result([2.0, 1.0], 0, 1.0),
        "chunkwise": model.Result(list(losses), 10, 1.0),
    }
    return report.compare(results, TOLERANCE)[1]


def test_verdict_looks_at_every_step() -> None:
    assert verdict(2.0, 1.0).passed
    assert verdict(2.0 * (1 + 0.9e-4), 1.0).passed
    assert not verdict(2.0 * (1 + 1.1e-4), 1.0).passed
    assert not verdict(2.0, 1.0 - 1.1e-4).passed
    assert not verdict(float("nan"), 1.0).passed
    assert not verdict(2.0, float("inf")).passed
    assert verdict(2.0, 1.001).difference == pytest.approx(1e-3)
