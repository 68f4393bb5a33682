# SPDX-License-Identifier: Apache-2.0
"""The drift tool: on a small upstream written here, and on what is installed."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from tools import upstream_drift as drift

RELEASE = {
    "__init__.py": "from .layers import Norm\nfrom up.layers import *\n",
    "layers.py": """
from dataclasses import dataclass, field

def fuse(x, *, scale=1.0): ...

class Base:
    def __init__(self, config, size=4, *, name=None):
        self.width = size
        if size > 1:
            self.norm = build_module(spec.norm, config, size=size, **optional)

    def forward(self, x, mask=None): ...

class Norm(Base): ...

@dataclass
class Params:
    first: int
    second: int = 2
    def describe(self): ...

@dataclass
class MoreParams(Params):
    third: list = field(default_factory=list, metadata={"about": "words"})
""",
    "extra.py": """
try:
    from missing_package import fast as scan
    HAVE_FAST = True
except ImportError:
    HAVE_FAST = False
    def scan(x, /, chunk=64): ...
""",
    "state/__init__.py": "def group(): ...\n",
}
OURS = """
from up import Norm, extra, state as groups
from up.layers import MoreParams, fuse

class Ours(Norm):
    def forward(self, x):
        return fuse(x) if extra.HAVE_FAST else self.width + self.own + groups.group()

def use(config):
    return config.second, config.ours, MoreParams(1)
"""


type Files = dict[str, str | None]


def make_release(folder: Path, changes: Files | None = None) -> drift.Upstream:
    """The release above with some files replaced, added or (None) dropped."""
    for name, content in {**RELEASE, **(changes or {})}.items():
        if content is not None:
            file = folder / "up" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
    return drift.Upstream({"up": folder / "up"})


def our_sources(folder: Path) -> Path:
    sources = folder / "ours" / "package"
    sources.mkdir(parents=True)
    (sources / "use.py").write_text(OURS)
    return sources


@pytest.fixture(autouse=True)
def _config_is_params(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "RECEIVERS", drift.RECEIVERS | {"config": "up.layers.MoreParams"})


def changes_of(tmp_path: Path, changes: Files | None = None) -> dict[str, list[str]]:
    """What the tool says about a release with these changes: symbol to lines."""
    sources = our_sources(tmp_path)
    old = make_release(tmp_path / "old")
    new = make_release(tmp_path / "new", changes)
    record = drift.describe_all(old, drift.find_uses(old, sources))
    said: dict[str, list[str]] = {}
    for line in drift.compare(new, drift.find_uses(new, sources), record, (), sources):
        if line.startswith(" "):
            said[list(said)[-1]].append(line.strip())
        else:
            said[line] = []
    return said


def layers(old: str, new: str) -> str:
    assert old in RELEASE["layers.py"]
    return RELEASE["layers.py"].replace(old, new)


def test_uses_are_read_from_imports_attributes_and_subclasses(tmp_path: Path) -> None:
    upstream = make_release(tmp_path)
    uses = drift.find_uses(upstream, our_sources(tmp_path))
    record = drift.describe_all(upstream, uses)
    assert set(record) == {
        "up.Norm",
        "up.Norm.forward",
        "up.Norm.width",
        "up.extra",
        "up.extra.HAVE_FAST",
        "up.layers.MoreParams",
        "up.layers.MoreParams.second",
        "up.layers.fuse",
        "up.state",
        "up.state.group",
    }
    assert uses.lines["up.layers.fuse"] == ["ours/package/use.py:3"]
    assert uses.lines["up.state.group"] == ["ours/package/use.py:7"]


def test_what_is_recorded_of_each_kind(tmp_path: Path) -> None:
    upstream = make_release(tmp_path)
    assert upstream.describe("up.Norm") == {
        "kind": "class",
        "defined_in": "up.layers",
        "bases": ["Base"],
        "parameters": ["config", "size=4", "*", "name=None"],
    }
    more = upstream.describe("up.layers.MoreParams")
    assert more is not None
    assert more["parameters"] == ["first", "second=2", "third=field(default_factory=list)"]
    assert upstream.describe("up.Norm.forward") == {
        "kind": "method",
        "parameters": ["x", "mask=None"],
    }
    assert upstream.describe("up.Norm.width") == {"kind": "attribute"}
    assert upstream.describe("up.layers.MoreParams.second") == {
        "kind": "field",
        "type": "int",
        "default": "2",
    }
    assert upstream.describe("up.extra.scan") == {
        "kind": "function",
        "defined_in": "up.extra",
        "parameters": ["x", "/", "chunk=64"],
    }
    assert upstream.describe("up.extra.HAVE_FAST") == {"kind": "value", "defined_in": "up.extra"}
    assert upstream.describe("up.state") == {"kind": "module"}
    assert upstream.describe("up.nothing.here") is None


def test_arguments_of_a_call_that_upstream_makes(tmp_path: Path) -> None:
    text = layers("        if size", "        optional['group'] = 1\n        if size")
    upstream = make_release(tmp_path, {"layers.py": text})
    call = drift.Call("up.Norm.__init__", "spec.norm", "use.py", "class Ours")
    record = drift.describe_all(upstream, drift.Uses({}, set()), (call,))
    assert record == {
        "up.Norm.__init__ calls spec.norm": {
            "kind": "call",
            "arguments": ["config", "size=", "**optional", "group= (when set)"],
        }
    }


def test_nothing_changed(tmp_path: Path) -> None:
    assert changes_of(tmp_path) == {}


def test_changes_that_we_do_not_use_are_not_named(tmp_path: Path) -> None:
    text = RELEASE["extra.py"].replace("def scan(x, /, chunk=64)", "def scan2(y)")
    assert changes_of(tmp_path, {"extra.py": text}) == {}


def test_renamed_function(tmp_path: Path) -> None:
    said = changes_of(tmp_path, {"layers.py": layers("def fuse", "def fused")})
    assert said == {"up.layers.fuse": ["gone", "touches ours/package/use.py:3"]}


def test_lost_keyword(tmp_path: Path) -> None:
    said = changes_of(tmp_path, {"layers.py": layers(", *, scale=1.0", "")})
    assert said["up.layers.fuse"][:2] == ["lost parameter *", "lost parameter scale=1.0"]


@pytest.mark.parametrize(
    ("signature", "change"),
    [
        ("fuse(x, bias, *, scale=1.0)", "new required parameter bias"),
        ("fuse(x, *, bias=None, scale=1.0)", "new parameter bias=None"),
        ("fuse(x, *, scale=2.0)", "parameter scale=1.0 -> scale=2.0"),
        ("fuse(x, *, scale)", "parameter scale=1.0 -> scale"),
        ("fuse(x, scale=1.0)", "lost parameter *"),
    ],
)
def test_changed_signature(tmp_path: Path, signature: str, change: str) -> None:
    said = changes_of(tmp_path, {"layers.py": layers("fuse(x, *, scale=1.0)", signature)})
    assert said == {"up.layers.fuse": [change, "touches ours/package/use.py:3"]}


def test_new_required_argument_of_an_overridden_method(tmp_path: Path) -> None:
    said = changes_of(tmp_path, {"layers.py": layers("x, mask=None", "x, group, mask=None")})
    assert said == {
        "up.Norm.forward": ["new required parameter group", "touches ours/package/use.py:6"]
    }


def test_lost_attribute_of_a_base_class_and_field_of_a_config(tmp_path: Path) -> None:
    text = layers("self.width", "self.breadth").replace("second: int = 2", "other: int = 2")
    said = changes_of(tmp_path, {"layers.py": text})
    assert said["up.Norm.width"] == ["gone", "touches ours/package/use.py:7"]
    assert said["up.layers.MoreParams.second"] == ["gone", "touches ours/package/use.py:10"]


def test_class_that_moved_but_is_still_exported(tmp_path: Path) -> None:
    text = layers("class Norm(Base): ...", "from up.norms import Norm")
    said = changes_of(
        tmp_path,
        {"layers.py": text, "norms.py": "from up.layers import Base\nclass Norm(Base): ...\n"},
    )
    assert said == {
        "up.Norm": ["defined in: up.layers -> up.norms", "touches ours/package/use.py:2"]
    }


def test_class_that_moved_away_says_where_to(tmp_path: Path) -> None:
    text = layers("def fuse(x, *, scale=1.0): ...", "")
    said = changes_of(tmp_path, {"layers.py": text, "fused.py": "def fuse(x): ...\n"})
    assert said["up.layers.fuse"][0] == "gone; defined in up.fused"


def test_module_that_is_gone(tmp_path: Path) -> None:
    said = changes_of(tmp_path, {"state/__init__.py": None})
    assert {name: lines[0] for name, lines in said.items()} == {
        "up.state": "gone",
        "up.state.group": "gone",
    }


def test_use_that_was_never_recorded(tmp_path: Path) -> None:
    sources, upstream = our_sources(tmp_path), make_release(tmp_path)
    uses = drift.find_uses(upstream, sources)
    record = drift.describe_all(upstream, uses)
    del record["up.layers.fuse"]
    lines = drift.compare(upstream, uses, record, (), sources)
    assert lines[0] == "up.layers.fuse"
    assert "--record" in lines[1]


def test_stale_hand_written_entry(tmp_path: Path) -> None:
    upstream, sources = make_release(tmp_path), our_sources(tmp_path)
    unseen = drift.Unseen(("up.extra.scan",), "use.py", "getattr(extra", "by name")
    with pytest.raises(LookupError, match="mend UNSEEN"):
        drift.find_uses(upstream, sources, (unseen,))


@pytest.mark.parametrize(
    ("installed", "expected"),
    [("0.18.2", "0.18.2"), ("0.19.0", "0.18.2"), ("0.20.0rc1", "0.19.2"), ("0.17.0", "0.18.2")],
)
def test_nearest_release(installed: str, expected: str) -> None:
    assert drift.nearest(installed, ["0.19.2", "0.18.2"]) == expected


class TestInstalled:
    """On the releases that are here."""

    def record(self, distribution: str) -> tuple[str, drift.Record]:
        installed = importlib.metadata.version(distribution)
        if installed not in drift.recorded_releases(distribution):
            pytest.skip(f"{distribution} {installed} is not a supported release")
        return installed, drift.read_record(distribution, installed)

    @pytest.mark.parametrize("distribution", drift.DISTRIBUTIONS)
    def test_record_matches_and_the_tool_says_so(
        self, distribution: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        installed, _ = self.record(distribution)
        status = drift.main([distribution])
        said = capsys.readouterr().out
        assert status == 0, said
        assert f"{distribution} {installed} against {installed}: no changes" in said

    def test_a_change_exits_with_one(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, record = self.record("fla-core")
        symbol = "fla.ops.utils.chunk_local_cumsum"
        record[symbol] = {"kind": "function", "parameters": ["g", "*", "unheard_of=None"]}
        monkeypatch.setattr(drift, "read_record", lambda *_: record)
        assert drift.main(["fla-core"]) == 1
        said = capsys.readouterr().out
        assert "lost parameter unheard_of=None" in said
        assert "megatron/linear_cp/ops/fla_capabilities.py:" in said

    def test_every_supported_release_is_recorded(self) -> None:
        names = {}
        for stack in ("stack-0.18.in", "stack-0.19.txt"):
            lines = (drift.ROOT / "requirements" / stack).read_text().splitlines()
            for distribution in drift.DISTRIBUTIONS:
                (pin,) = [line for line in lines if line.startswith(f"{distribution}==")]
                release = pin.partition("==")[2]
                names[distribution, release] = set(drift.read_record(distribution, release))
        assert len(names) == 4

    def test_runs_as_a_script_without_importing_upstream(self) -> None:
        code = (
            "import runpy, sys; sys.argv = ['upstream_drift']\n"
            "try: runpy.run_module('tools.upstream_drift', run_name='__main__')\n"
            "except SystemExit: pass\n"
            "print(sorted({'torch', 'fla', 'megatron.core'} & sys.modules.keys()))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=drift.ROOT, capture_output=True, text=True
        )
        assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_unknown_release_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["fla-core", "--against", "0.0.1"]) == 2
    assert "no record of fla-core 0.0.1" in capsys.readouterr().err
