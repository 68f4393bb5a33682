# SPDX-License-Identifier: Apache-2.0
"""Read the boundaries of a micro-batch that a training run saved, for ``inspect``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.linear_cp.data import PackedBatch
from megatron.linear_cp.micro_batch import _Plans

FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
# Collators that know one side only; PackedBatch is one.
_ONE_SIDE = {"cu_seqlens": "cu_seqlens_q", "cu_seqlens_padded": "cu_seqlens_q_padded"}
_ACCEPTED = (
    "PackedSeqParams, a mapping with cu_seqlens_q (and cu_seqlens_q_padded) or with "
    "packed_seq_params, a PackedBatch, or one row of boundaries"
)


@dataclass(frozen=True)
class SavedBatch:
    """What a file says about a micro-batch.

    Attributes:
        params: its boundaries, as they are; nothing about them was checked.
        kind: what the file holds.
        assumed: what the file does not say and was taken for granted.
    """

    params: PackedSeqParams
    kind: str
    assumed: tuple[str, ...] = ()


def load_batch(path: str | Path) -> SavedBatch:
    """Read a file made by ``torch.save``, or JSON.

    Nothing in the file is executed: ``torch.load`` runs with ``weights_only``, and knows
    Megatron-Core's PackedSeqParams and our PackedBatch beside tensors and plain containers.

    Args:
        path: of a PackedSeqParams, a mapping with its fields or with an entry
            ``packed_seq_params``, a PackedBatch, or the boundaries alone: a ``[S + 1]`` integer
            tensor or list.

    Raises:
        OSError: a file that cannot be opened.
        ValueError: one that is neither, holds other objects, or has no boundaries.
    """
    data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path} is empty")
    value = _read_json(path, data) if data.lstrip()[:1] in (b"[", b"{") else _read_torch(path)
    if isinstance(value, Mapping) and "packed_seq_params" in value:
        value = value["packed_seq_params"]
    if isinstance(value, PackedSeqParams):
        return SavedBatch(_checked(path, value), "PackedSeqParams")
    if isinstance(value, PackedBatch):
        value, kind = {n: getattr(value, n) for n in _ONE_SIDE}, "PackedBatch"
    elif isinstance(value, Mapping):
        kind = "mapping"
    elif isinstance(value, torch.Tensor | list | tuple):
        value, kind = {"cu_seqlens_q": value}, "boundaries"
    else:
        raise ValueError(f"{path} holds {_name(value)}; inspect reads {_ACCEPTED}")
    return _from_mapping(path, value, kind)


def _read_json(path: str | Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} looks like JSON and is not: {error}") from error


def _read_torch(path: str | Path) -> Any:
    with torch.serialization.safe_globals([PackedSeqParams, PackedBatch, _Plans]):
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a broken file fails in any of many ways in the unpickler
            foreign = _foreign_classes(path)
            if foreign:
                raise ValueError(
                    f"{path} holds objects of {', '.join(foreign)}, which inspect does not load "
                    "because loading would run code from the file; save the boundaries alone: "
                    "torch.save({n: getattr(params, n) for n in ('cu_seqlens_q', "
                    "'cu_seqlens_q_padded')}, file)"
                ) from error
            raise ValueError(
                f"{path} is neither JSON nor a whole file of torch.save; inspect reads {_ACCEPTED}"
            ) from error


def _foreign_classes(path: str | Path) -> list[str]:
    """Classes that the file asks for beyond those allowed; none if it cannot be parsed."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # the file is broken in any of many ways, which is what the caller reports
        return []


def _from_mapping(path: str | Path, values: Mapping[str, Any], kind: str) -> SavedBatch:
    found = {_ONE_SIDE.get(name, name): x for name, x in values.items()}
    found = {name: x for name, x in found.items() if x is not None}
    if not any(name in found for name in FIELDS):
        names = ", ".join(sorted(map(str, values))) or "nothing"
        raise ValueError(f"{path} has {names} and no boundaries; inspect reads {_ACCEPTED}")
    assumed = []
    if "qkv_format" not in found:
        found["qkv_format"] = "thd"
        assumed.append("qkv_format thd")
    tensors = {name: _boundaries(path, name, found[name]) for name in FIELDS if name in found}
    for side in ("", "_padded"):
        query, key = f"cu_seqlens_q{side}", f"cu_seqlens_kv{side}"
        # A file of one side is a shorthand; one that has both says what it means.
        if query in tensors and not any("_kv" in name for name in found):
            tensors[key] = tensors[query]
            assumed.append(f"{key} equal to {query}")
    size = found.get("local_cp_size")
    params = PackedSeqParams(qkv_format=found["qkv_format"], local_cp_size=size, **tensors)
    return SavedBatch(_checked(path, params), kind, tuple(assumed))


def _checked(path: str | Path, params: PackedSeqParams) -> PackedSeqParams:
    """The same with plain tensors, if its fields are of types that can be judged at all."""
    size = params.local_cp_size
    if size is not None and (type(size) is not int or size < 1):
        raise ValueError(
            f"{path}: local_cp_size must be a whole number of at least 1, got {size!r:.60}; leave "
            "it out and give --cp"
        )
    tensors = {name: getattr(params, name) for name in FIELDS}
    return replace(
        params, **{n: _plain_row(path, n, x) for n, x in tensors.items() if x is not None}
    )


def _plain_row(path: str | Path, name: str, value: Any) -> torch.Tensor:
    works = "a dense integer tensor of shape [S + 1] on the CPU or a GPU works, e.g. [0, 16, 40]"
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{path}: {name} must be a tensor, got {value!r:.60}; {works}")
    if value.layout != torch.strided or value.is_meta or value.is_complex() or value.is_quantized:
        raise ValueError(
            f"{path}: {name} has no plain values to read: layout {value.layout}, device "
            f"{value.device}, dtype {value.dtype}; {works}"
        )
    if value.ndim == 0 or value.numel() == 0:
        raise ValueError(
            f"{path}: {name} must be a row of boundaries, got shape {list(value.shape)}; {works}"
        )
    value = value.detach()
    if value.is_floating_point() and not torch.isfinite(value).all():
        raise ValueError(f"{path}: {name} has values that are not finite numbers; {works}")
    return value


def _boundaries(path: str | Path, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path}: {name} is not one row of numbers, got {value!r:.60}") from error


def _name(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
