# SPDX-License-Identifier: Apache-2.0
"""The capability probe: real releases as installed, releases that lack something, known faults."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron.linear_cp.ops import fla_capabilities as caps
from megatron.linear_cp.segments import Segments

HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.fixture(autouse=True)
def fresh_probe() -> Iterator[None]:
    caps.probe.cache_clear()
    yield
    caps.probe.cache_clear()


def release(
    monkeypatch: pytest.MonkeyPatch, version: str, absent: tuple[str, ...], newer: bool
) -> None:
    """Stand in for a release: modules with functions of the right signature, some left out."""
    monkeypatch.setattr(caps, "installed_version", lambda: version)
    entries = [entry for feature in caps.FEATURES.values() for entry in feature]
    entries += [caps._POWERS_OF_TWO] if newer else []
    # One function may serve several features: it takes the keywords of all.
    keywords: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        if entry.name not in absent:
            known = keywords.setdefault((entry.modules[0], entry.name), set())
            known |= {word for word in entry.keywords if word not in absent}
    modules: dict[str, Any] = {"fla": types.ModuleType("fla")}
    for (module_name, name), words in keywords.items():
        scope: dict[str, Any] = {}
        exec(
            f"def {name}({', '.join([f'{w}=None' for w in sorted(words)] + ['**more'])}): pass",
            scope,
        )
        module = modules.setdefault(module_name, types.ModuleType(module_name))
        setattr(module, name, scope[name])
    modules.setdefault("fla.ops", types.ModuleType("fla.ops"))
    for name in [name for name in sys.modules if name == "fla" or name.startswith("fla.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def test_release_with_natural_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, "0.4.2", (), newer=False)
    found = caps.require("rule")
    assert (found.log2_decay, found.grouped_value_heads, found.int64_offsets) == (False,) * 3
    assert found.missing == {}


def test_release_with_decay_in_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, "0.6.0", (), newer=True)
    found = caps.require("rule")
    assert (found.log2_decay, found.grouped_value_heads, found.int64_offsets) == (True,) * 3


def test_missing_function_is_named_with_the_release_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release(monkeypatch, "0.4.1", ("build_cp_context",), newer=False)
    assert caps.require("rule").version == "0.4.1"
    with pytest.raises(caps.FlaUnavailableError) as error:
        caps.require("cp_context")
    for words in ("fla-core 0.4.1", "fla.ops.cp.build_cp_context", "0.4.2 and later"):
        assert words in str(error.value)


def test_missing_keyword_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    release(monkeypatch, "0.4.1", ("chunk_indices",), newer=False)
    with pytest.raises(caps.FlaUnavailableError, match="takes no chunk_indices"):
        caps.require("rule")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "installed_version", lambda: None)
    with pytest.raises(caps.FlaUnavailableError, match=r"fla-core >= 0\.4\.2.*backend='torch'"):
        caps.require("rule")


def test_installed_but_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "installed_version", lambda: "0.4.2")
    monkeypatch.setitem(sys.modules, "fla.ops", None)
    with pytest.raises(caps.FlaUnavailableError, match="does not import"):
        caps.probe()


@pytest.mark.parametrize(
    ("fla", "triton", "device", "key_dim", "tilelang", "words"),
    [
        ("0.6.0", "3.6.0", HOPPER, 128, False, "tilelang"),
        ("0.6.0", "3.4.0", HOPPER, 128, False, "tilelang"),
        ("0.6.0", "3.7.0", HOPPER, 64, False, "tilelang"),
        ("0.4.2", "3.6.0", HOPPER, 64, False, "key dimensions up to 64"),
        ("0.4.2", "3.6.0", HOPPER, 64, True, "key dimensions up to 64"),
        ("0.6.0", "3.6.0", HOPPER, 128, True, None),
        ("0.6.0", "3.7.1", HOPPER, 128, False, None),
        ("0.6.0", "3.7.1+git1234", HOPPER, 128, False, None),
        ("0.6.0", "3.3.1", HOPPER, 128, False, None),
        ("0.6.0", "3.6.0", AMPERE, 128, False, None),
        ("0.4.2", "3.6.0", HOPPER, 128, False, None),
        ("0.4.2", "3.6.0", AMPERE, 64, False, None),
        ("0.4.2", "unknown", HOPPER, 64, False, None),
    ],
)
def test_known_faults(
    fla: str,
    triton: str,
    device: tuple[int, int],
    key_dim: int,
    tilelang: bool,
    words: str | None,
) -> None:
    fault = caps.known_fault(fla, triton, device, key_dim, tilelang)
    if words is None:
        assert fault is None
    else:
        assert fault is not None
        assert words in fault
        assert f"fla-core {fla} with Triton {triton}" in fault


def launch_tables() -> Any:
    return pytest.importorskip(
        "megatron.linear_cp.ops.fla_kernels", reason="needs Triton, which is not installed"
    )


def test_segments_are_cut_where_a_launch_grid_ends() -> None:
    kernels = launch_tables()
    segments = Segments(np.arange(2101) * 8)
    parts = kernels.split_for_launch(segments, 32, None)
    assert [(p.first_segment, p.last_segment) for p in parts] == [(0, 2047), (2047, 2100)]
    assert [(p.first_token, p.last_token) for p in parts] == [(0, 16376), (16376, 16800)]
    for part in parts:
        assert part.cu_seqlens.array[0] == 0
        assert part.cu_seqlens.array[-1] == part.last_token - part.first_token
        assert (part.last_segment - part.first_segment) * 32 <= 65535


def test_segments_are_cut_where_32_bit_offsets_end() -> None:
    kernels = launch_tables()
    segments = Segments([0, 100, 180, 300, 301])
    parts = kernels.split_for_launch(segments, 4, 200)
    assert [(p.first_token, p.last_token) for p in parts] == [(0, 180), (180, 301)]
    with pytest.raises(ValueError, match=r"segment 2 has 120 tokens.*at most 110"):
        kernels.split_for_launch(segments, 4, 110)


def test_chunk_tables() -> None:
    kernels = launch_tables()
    (part,) = kernels.split_for_launch(Segments([0, 1, 130, 194]), 4, None)
    assert part.chunk_offsets.array.tolist() == [0, 1, 4, 5]
    expected = [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0]]
    assert part.chunk_indices.array.tolist() == expected
