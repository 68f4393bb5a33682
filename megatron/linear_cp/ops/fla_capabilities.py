# SPDX-License-Identifier: Apache-2.0
"""What the installed fla-core release offers, and one sentence for what it lacks.

Releases differ in names and in meaning (fla-core 0.4.2 keeps the cumulative decay in natural
logarithms and one key head per value head, 0.5 and later use powers of two and grouped value
heads), so nothing else in the package looks at a release. Importing this module imports no FLA.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

MINIMUM_VERSION = "0.4.2"
TESTED_VERSIONS = ("0.4.2", "0.6.0")


@dataclass(frozen=True)
class Entry:
    """One function a feature is built on, where it lives, and since which release.

    Attributes:
        modules: places to look, in order.
        name: attribute of the module.
        keywords: parameters the function must take.
        since: first release that has all of it.
    """

    modules: tuple[str, ...]
    name: str
    keywords: tuple[str, ...]
    since: str


_VARLEN = ("cu_seqlens", "chunk_indices")
_DELTA_H = ("fla.ops.common.chunk_delta_h",)
_CHUNK_O = ("fla.ops.common.chunk_o",)
_CONV = ("fla.modules.causal_conv1d", "fla.modules.conv")

_RULE = (
    Entry(("fla.ops.utils",), "chunk_local_cumsum", _VARLEN, "0.4.2"),
    Entry(_DELTA_H, "chunk_gated_delta_rule_fwd_h", (*_VARLEN, "initial_state"), "0.4.2"),
    Entry(_DELTA_H, "chunk_gated_delta_rule_bwd_dhu", (*_VARLEN, "dht"), "0.4.2"),
    Entry(_CHUNK_O, "chunk_fwd_o", _VARLEN, "0.4.2"),
    Entry(_CHUNK_O, "chunk_bwd_dv_local", _VARLEN, "0.4.2"),
)
# Since it exists, releases keep the decay in powers of two and read grouped value heads.
_POWERS_OF_TWO = Entry(
    ("fla.ops.gated_delta_rule.chunk_fwd",), "chunk_gated_delta_rule_fwd_intra", _VARLEN, "0.5.0"
)

FEATURES: dict[str, tuple[Entry, ...]] = {
    "rule": _RULE,
    "cp_context": (
        Entry(("fla.ops.cp",), "build_cp_context", (), "0.4.2"),
        Entry(
            ("fla.ops.gated_delta_rule",),
            "chunk_gated_delta_rule",
            ("cu_seqlens", "cp_context"),
            "0.4.2",
        ),
        Entry(_CONV, "causal_conv1d", ("cu_seqlens", "cp_context"), "0.4.2"),
    ),
}
"""What the package builds on FLA: the chunked rule, and FLA's own CP exchange."""


class FlaUnavailableError(RuntimeError):
    """The installed fla-core cannot do what was asked; the message names what would."""


@dataclass(frozen=True)
class FlaCapabilities:
    """What one release can do.

    Attributes:
        version: of fla-core.
        missing: feature name to what it lacks, in words; a feature that works is absent.
        log2_decay: the cumulative decay between the kernels is in powers of two.
        grouped_value_heads: the kernels read key head ``j // (HV // H)`` themselves; where they
            do not, keys and queries are repeated to ``HV`` heads.
        int64_offsets: token offsets times head dimensions may pass 2**31.
    """

    version: str
    missing: dict[str, str]
    log2_decay: bool
    grouped_value_heads: bool
    int64_offsets: bool


def installed_version() -> str | None:
    """Version of the installed fla-core, ``None`` without one. Imports nothing."""
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def find(entry: Entry) -> tuple[str, Callable[..., Any]] | None:
    """The module and the function of an entry, ``None`` when the release lacks it."""
    for name in entry.modules:
        function = getattr(_module(name), entry.name, None)
        if function is not None:
            return name, function
    return None


def _lacks(entry: Entry) -> str | None:
    found = find(entry)
    where = f"{entry.modules[0]}.{entry.name}"
    if found is None:
        return f"has no {where} (fla-core {entry.since} and later do)"
    absent = [word for word in entry.keywords if word not in inspect.signature(found[1]).parameters]
    if absent:
        return f"{where} takes no {', '.join(absent)} (fla-core {entry.since} and later do)"
    return None


@functools.cache
def probe() -> FlaCapabilities:
    """Look at the installed release once.

    Returns:
        What it can do. A feature whose functions are missing is listed in ``missing``, it does
        not raise here.

    Raises:
        FlaUnavailableError: fla-core is not installed, or its modules do not import.
    """
    version = installed_version()
    if version is None:
        raise FlaUnavailableError(
            f"backend 'fla' needs fla-core >= {MINIMUM_VERSION}, which is not installed; install "
            "it or use backend='torch'"
        )
    try:
        importlib.import_module("fla.ops")
    except Exception as error:  # whatever FLA's import runs into is the user's answer
        raise FlaUnavailableError(
            f"fla-core {version} is installed but does not import ({type(error).__name__}: "
            f"{error}); backend='torch' works without it"
        ) from error

    missing: dict[str, str] = {}
    for feature, entries in FEATURES.items():
        lacks = [text for entry in entries if (text := _lacks(entry)) is not None]
        if lacks:
            missing[feature] = "; ".join(lacks)
    newer = _lacks(_POWERS_OF_TWO) is None
    return FlaCapabilities(
        version=version,
        missing=missing,
        log2_decay=newer,
        grouped_value_heads=newer,
        int64_offsets=Version(version) >= Version("0.6.0"),
    )


def require(feature: str) -> FlaCapabilities:
    """The capabilities, after checking that one feature is complete.

    Args:
        feature: a key of :data:`FEATURES`.

    Raises:
        FlaUnavailableError: the release lacks it; the message says what, and which release has it.
    """
    capabilities = probe()
    lack = capabilities.missing.get(feature)
    if lack is not None:
        raise FlaUnavailableError(
            f"fla-core {capabilities.version} {lack}; needed for {feature!r}. Tested releases: "
            f"{', '.join(TESTED_VERSIONS)}"
        )
    return capabilities


def known_fault(
    fla_version: str,
    triton_version: str,
    compute_capability: tuple[int, int],
    key_dim: int,
    has_tilelang: bool,
) -> str | None:
    """Say whether FLA's own gated rule is known to give wrong gradients on a combination.

    Triton 3.4.0 to 3.7.0 miscompile FLA's gated ``chunk_bwd_dqkwg`` on Hopper where its key tile is
    64 wide (flash-linear-attention issue 640). fla-core 0.5 and later refuse to run it there for
    every head size unless tilelang takes over; 0.4.2 runs it, and only key dimensions above 64
    get the tile that compiles right. This concerns FLA's complete op, ``state_exchange="fla"``; the
    ``"fla"`` backend has its own kernel for that step.

    Args:
        fla_version: of fla-core.
        triton_version: of Triton.
        compute_capability: of the device, ``(9, 0)`` for Hopper.
        key_dim: ``K``.
        has_tilelang: tilelang is installed.

    Returns:
        One sentence with what would work, ``None`` when nothing is known against it.
    """
    try:
        triton = Version(Version(triton_version).base_version)
        fla = Version(fla_version)
    except InvalidVersion:
        return None
    if compute_capability[0] != 9 or not Version("3.4.0") <= triton < Version("3.7.1"):
        return None
    pair = f"fla-core {fla_version} with Triton {triton_version} on Hopper"
    if fla >= Version("0.5.0"):
        if has_tilelang:
            return None
        return (
            f"{pair} has no correct kernel for the backward of FLA's own gated rule; use Triton >= "
            "3.7.1 or < 3.4.0, install tilelang, use fla-core 0.4.2 with a key dimension above 64, "
            "or state_exchange='scan'"
        )
    if key_dim <= 64:
        return (
            f"{pair} gives wrong gradients in FLA's own gated rule for key dimensions up to 64 "
            f"(here {key_dim}); use Triton >= 3.7.1 or < 3.4.0, a key dimension above 64, or "
            "state_exchange='scan'"
        )
    return None


def has_tilelang() -> bool:
    """Whether tilelang is installed. Imports nothing."""
    return importlib.util.find_spec("tilelang") is not None
