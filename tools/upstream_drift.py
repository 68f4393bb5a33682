# SPDX-License-Identifier: Apache-2.0
"""What changed in the installed Megatron-Core and FLA, of what this package uses, and where.

    python -m tools.upstream_drift                     compare with the nearest recorded release
    python -m tools.upstream_drift --against 0.18.2    compare with that release
    python -m tools.upstream_drift --record            write the installed release's data

Exit status: 0 when nothing that we use changed, 1 when something did, 2 when it cannot be told.

What we use is read from our own sources; what cannot be seen there is listed in ``UNSEEN`` and
``CALLS``. Both sides are parsed, never imported: the answer is the same with and without a GPU or
torch, and a release can be looked at by unpacking it:

    pip install --no-deps --target release megatron-core==0.19.2 fla-core==0.6.0
    PYTHONPATH=release python -m tools.upstream_drift

Annotations of parameters and the bodies of functions are not compared: a change of meaning behind
the same signature shows in the tests, not here.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from tools.upstream_symbols import (
    Call,
    Description,
    Record,
    Upstream,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "megatron" / "linear_cp"
RECORDS = ROOT / "tools" / "upstream"
DISTRIBUTIONS = {"megatron-core": ("megatron.core", "megatron.training"), "fla-core": ("fla",)}

_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"
_PARAMS = "megatron.core.packed_seq_params.PackedSeqParams"
_GDN = "megatron.core.ssm.gated_delta_net.GatedDeltaNet"
_LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"
_BLOCK = "megatron.core.transformer.transformer_block.TransformerBlock"
_ATTENTION = "megatron.core.transformer.attention"

# Names that hold an upstream object wherever they appear in our sources.
RECEIVERS = {
    "config": _CONFIG,
    "pg_collection": "megatron.core.process_groups_config.ProcessGroupCollection",
    "packed_seq_params": _PARAMS,
    "params": _PARAMS,
    "backend": "megatron.core.models.backends.BackendSpecProvider",
}


@dataclass(frozen=True)
class Unseen:
    """Symbols that our sources use in a way that parsing them does not show.

    Attributes:
        symbols: full names.
        file: of ours, below ``megatron/linear_cp``.
        text: what stands in that file where the use is.
        reason: why it does not show.
    """

    symbols: tuple[str, ...]
    file: str
    text: str
    reason: str


def _of(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


def _feature(*symbols: str) -> Unseen:
    name = symbols[0].rpartition(".")[2]
    return Unseen(symbols, "ops/fla_capabilities.py", f'"{name}"', "looked up by name in FEATURES")


UNSEEN = (
    _feature("fla.ops.utils.chunk_local_cumsum"),
    _feature("fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_h"),
    _feature("fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_dhu"),
    _feature("fla.ops.common.chunk_o.chunk_fwd_o"),
    _feature("fla.ops.common.chunk_o.chunk_bwd_dv_local"),
    _feature("fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_intra"),
    _feature("fla.ops.cp.build_cp_context"),
    _feature("fla.ops.gated_delta_rule.chunk_gated_delta_rule"),
    _feature("fla.modules.causal_conv1d.causal_conv1d", "fla.modules.conv.causal_conv1d"),
    Unseen(
        _of("fla.ops.cp.FLACPContext", "group"),
        "ops/fla_exchange.py",
        "context.group",
        "set on what build_cp_context returns",
    ),
    Unseen(
        _of(_CONFIG, "__post_init__"),
        "config.py",
        "super().__post_init__(*init_values)",
        "the mixin meets the class it precedes only when both are combined",
    ),
    Unseen(
        _of(
            _CONFIG,
            "linear_attention_freq",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ),
        "config.py",
        "getattr(config, name)",
        "required fields of GDN, checked in a loop",
    ),
    Unseen(
        _of(
            _CONFIG,
            "attention_dropout",
            "softmax_type",
            "window_size",
            "qk_clip",
            "log_max_attention_logit",
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
        ),
        "attention.py",
        "getattr(config, name, value)",
        "entries that CoreAttention refuses, checked in a loop",
    ),
    Unseen(
        _of(
            "megatron.core.tensor_parallel.CheckpointWithoutOutput",
            "checkpoint",
            "discard_output_and_register_recompute",
        ),
        "gated_delta_net.py",
        "CheckpointWithoutOutput(",
        "methods of the instance",
    ),
    Unseen(
        _of(
            "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
            "get_layer_id_list",
        ),
        "layer_specs.py",
        "layout.get_layer_id_list",
        "method of what the config holds",
    ),
    Unseen(
        _of("megatron.core.parallel_state", "_HYBRID_DP_CP_GROUPS"),
        "dynamic_cp.py",
        '"_HYBRID_DP_CP_GROUPS"',
        "read with getattr: releases without it are legal",
    ),
    Unseen(
        _of("megatron.core.tensor_parallel.random", "_get_cuda_rng_state", "_set_cuda_rng_state"),
        "testing/cpu.py",
        '"megatron.core.tensor_parallel.random"',
        "replaced by name in the CPU stand-in",
    ),
)


CALLS = (
    Call(f"{_LAYER}.__init__", "submodules.self_attention", "gated_delta_net.py", "def __init__("),
    Call(
        f"{_LAYER}._forward_attention", "self.self_attention", "gated_delta_net.py", "def forward("
    ),
    Call(
        f"{_ATTENTION}.SelfAttention.__init__",
        "submodules.core_attention",
        "attention.py",
        "def __init__(",
    ),
    Call(
        f"{_ATTENTION}.SelfAttention._run_core_attention",
        "apply_module(self.core_attention)",
        "attention.py",
        "def forward(",
    ),
    Call(f"{_LAYER}.__init__", "submodules.input_layernorm", "norm.py", "def __init__("),
    Call(f"{_ATTENTION}.SelfAttention.__init__", "q_norm_cls", "norm.py", "def __init__("),
    Call(
        f"{_BLOCK}._build_layers",
        "not_none(self.submodules.layer_norm)",
        "norm.py",
        "def __init__(",
    ),
    Call(f"{_GDN}.__init__", "submodules.out_norm", "norm.py", "def __init__("),
)

# ---- Our side: what we use, and where.


@dataclass
class Uses:
    """What our sources use.

    Attributes:
        lines: symbol to the places that use it, ``file:line``.
        implied: symbols that may as well be ours or torch's: they count where upstream has them.
    """

    lines: dict[str, list[str]]
    implied: set[str]

    def add(self, symbol: str, place: str, implied: bool = False) -> None:
        """Note one use."""
        if symbol not in self.lines and implied:
            self.implied.add(symbol)
        if not implied:
            self.implied.discard(symbol)
        places = self.lines.setdefault(symbol, [])
        if place not in places:
            places.append(place)


def find_uses(upstream: Upstream, sources: Path, unseen: tuple[Unseen, ...] = ()) -> Uses:
    """What the Python files below a folder use of upstream."""
    uses = Uses({}, set())
    for file in sorted(sources.rglob("*.py")):
        _read_file(upstream, file, file.relative_to(sources.parents[1]).as_posix(), uses)
    for entry in unseen:
        for symbol in entry.symbols:
            if upstream.covers(symbol):
                for place in places_of(sources, entry.file, entry.text):
                    uses.add(symbol, place)
    return uses


def places_of(sources: Path, file: str, text: str) -> list[str]:
    """Lines of one of our files that hold a text, ``file:line``.

    Raises:
        LookupError: there are none: the hand-written list is out of date.
    """
    path = sources / file
    name = path.relative_to(sources.parents[1]).as_posix()
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [f"{name}:{i}" for i, line in enumerate(lines, 1) if text in line]
    if not found:
        raise LookupError(f"{name} holds no {text!r} any more: mend UNSEEN or CALLS of this tool")
    return found


def _read_file(upstream: Upstream, file: Path, name: str, uses: Uses) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and upstream.covers(node.module):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                uses.add(f"{node.module}.{alias.name}", f"{name}:{node.lineno}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if upstream.covers(alias.name):
                    uses.add(alias.name, f"{name}:{node.lineno}")
                    if alias.asname:
                        imported[alias.asname] = alias.name
    for node in ast.walk(tree):
        for owner, attribute, line, certain in _attributes(node, imported):
            uses.add(f"{owner}.{attribute}", f"{name}:{line}", implied=not certain)
        if isinstance(node, ast.ClassDef):
            for base in (imported.get(ast.unparse(base)) for base in node.bases):
                if base is not None:
                    for attribute, line in _inherited(node):
                        uses.add(f"{base}.{attribute}", f"{name}:{line}", implied=True)


def _attributes(node: ast.AST, imported: dict[str, str]) -> Iterator[tuple[str, str, int, bool]]:
    """Attributes of imported names (certain) and of names that usually hold an upstream object."""
    match node:
        case ast.Attribute(attr=attribute) if attribute.startswith("__"):
            return
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in imported:
            yield imported[name], attribute, node.lineno, True
            return
        case ast.Attribute(value=value, attr=attribute):
            pass
        case ast.Call(
            func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attribute)), *_]
        ):
            pass
        case _:
            return
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in RECEIVERS:
            yield RECEIVERS[name], attribute, value.lineno, False


def _inherited(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """Methods that a class overrides perhaps, and what it takes from ``self`` and ``super()``."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name != "__init__":
            yield item.name, item.lineno
    for child in ast.walk(node):
        match child:
            case ast.Attribute(
                value=ast.Name(id="self") | ast.Call(func=ast.Name(id="super")), attr=attribute
            ) if attribute != "__init__":
                yield attribute, child.lineno


# ---- Recording and comparing.


def describe_all(upstream: Upstream, uses: Uses, calls: tuple[Call, ...] = ()) -> Record:
    """The record of the installed release: every symbol that we use, by name."""
    record: Record = {}
    for symbol in sorted(uses.lines):
        if upstream.covers(symbol):
            description = upstream.describe(symbol)
            if description is not None or symbol not in uses.implied:
                record[symbol] = description
    for call in calls:
        if upstream.covers(call.method):
            record[f"{call.method} calls {call.callee}"] = upstream.describe_call(call)
    return record


def differences(old: Description | None, new: Description | None) -> list[str]:
    """What changed about one symbol, in words."""
    if old is None or new is None:
        return [] if old is new else ["gone" if new is None else "new in this release"]
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key, ""), new.get(key, "")
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list) and key != "bases":
            found += _list_differences(key.removesuffix("s"), before, after)
        else:
            found.append(f"{key.replace('_', ' ')}: {_text(before)} -> {_text(after)}")
    return found


def _list_differences(word: str, old: list[str], new: list[str]) -> list[str]:
    before, after = ({item.partition("=")[0]: item for item in items} for items in (old, new))
    found = [f"lost {word} {item}" for name, item in before.items() if name not in after]
    for name, item in after.items():
        if name not in before:
            required = word == "parameter" and "=" not in item and not item.startswith(("*", "/"))
            found.append(f"new {'required ' if required else ''}{word} {item}")
        elif before[name] != item:
            found.append(f"{word} {before[name]} -> {item}")
    if [n for n in before if n in after] != [n for n in after if n in before]:
        found.append(f"other order of {word}s: {_text(new)}")
    return found


def _text(value: str | list[str]) -> str:
    return ", ".join(value) if isinstance(value, list) else value or "nothing"


def compare(
    upstream: Upstream, uses: Uses, old: Record, calls: tuple[Call, ...], sources: Path
) -> list[str]:
    """Lines about everything that we use and that differs from a recorded release."""
    new = describe_all(upstream, uses, calls)
    places = dict(uses.lines)
    for call in calls:
        places[f"{call.method} calls {call.callee}"] = places_of(sources, call.file, call.text)
    lines = []
    for symbol in sorted({*old, *new}):
        if symbol not in places:
            continue  # recorded once, and no longer used
        if symbol not in old:
            changes = ["used here but not recorded: run --record under every supported release"]
        else:
            changes = differences(old[symbol], new.get(symbol))
        if changes == ["gone"] and (elsewhere := upstream.elsewhere(symbol)):
            changes = [f"gone; defined in {', '.join(elsewhere)}"]
        if changes:
            lines += [symbol, *(f"    {change}" for change in changes)]
            lines.append(f"    touches {', '.join(places[symbol])}")
    return lines


def nearest(installed: str, recorded: list[str]) -> str:
    """The newest recorded release that is not newer than the installed one, else the oldest."""
    ordered = sorted(recorded, key=Version)
    older = [release for release in ordered if Version(release) <= Version(installed)]
    return older[-1] if older else ordered[0]


def installed_upstream(packages: tuple[str, ...]) -> Upstream:
    """The sources of installed packages; nothing of them is imported.

    Raises:
        LookupError: a package that is not installed.
    """
    roots = {}
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise LookupError(f"{package} is not installed")
        roots[package] = Path(next(iter(spec.submodule_search_locations)))
    return Upstream(roots)


def recorded_releases(distribution: str) -> list[str]:
    """Releases that there is data of."""
    return [
        file.stem.removeprefix(f"{distribution}-") for file in RECORDS.glob(f"{distribution}-*")
    ]


def read_record(distribution: str, release: str) -> Record:
    """The data of one release."""
    symbols: Record = json.loads((RECORDS / f"{distribution}-{release}.json").read_text())[
        "symbols"
    ]
    return symbols


def write_record(distribution: str, release: str, symbols: Record) -> Path:
    """Write the data of one release."""
    file = RECORDS / f"{distribution}-{release}.json"
    data = {"distribution": distribution, "release": release, "symbols": symbols}
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(data, indent=1) + "\n")
    return file


def run(distribution: str, release: str | None, record: bool) -> bool:
    """Compare or record one distribution; whether something that we use changed.

    Raises:
        LookupError: it is not installed, or nothing is recorded to compare it with.
    """
    upstream = installed_upstream(DISTRIBUTIONS[distribution])
    uses = find_uses(upstream, SOURCES, UNSEEN)
    calls = tuple(call for call in CALLS if upstream.covers(call.method))
    installed = importlib.metadata.version(distribution)
    if record:
        symbols = describe_all(upstream, uses, calls)
        file = write_record(distribution, installed, symbols)
        print(f"{distribution} {installed}: wrote {len(symbols)} symbols to {file.name}")
        return False
    known = recorded_releases(distribution)
    if not known or release not in (None, *known):
        raise LookupError(f"no record of {distribution} {release or ''}: there is {known}")
    release = release or nearest(installed, known)
    lines = compare(upstream, uses, read_record(distribution, release), calls, SOURCES)
    count = sum(not line.startswith(" ") for line in lines)
    print(f"{distribution} {installed} against {release}: {count or 'no'} changes in what we use")
    for line in lines:
        print(f"  {line}")
    return bool(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="What changed upstream, of what this package uses, and where."
    )
    parser.add_argument("distributions", nargs="*", help=f"of {', '.join(DISTRIBUTIONS)}; all")
    parser.add_argument("--against", metavar="RELEASE", help="instead of the nearest recorded one")
    parser.add_argument("--record", action="store_true", help="write the installed release's data")
    options = parser.parse_args(arguments)
    chosen = options.distributions or list(DISTRIBUTIONS)
    if unknown := set(chosen) - set(DISTRIBUTIONS):
        parser.error(f"unknown distribution {', '.join(sorted(unknown))}")
    if options.against and len(chosen) != 1:
        parser.error("--against is a release of one distribution: name it")
    try:
        changed = [run(name, options.against, options.record) for name in chosen]
    except LookupError as error:
        print(f"upstream_drift: {error}", file=sys.stderr)
        return 2
    return int(any(changed))


if __name__ == "__main__":
    sys.exit(main())
