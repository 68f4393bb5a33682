# SPDX-License-Identifier: Apache-2.0
"""What the distribution promises: one namespace portion, one version, a clean lock, a bootstrap."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_namespace_packages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron" / "linear_cp"
BOOTSTRAP = ROOT / "tools" / "bootstrap.sh"
BASH = "/bin/bash"
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def lock_text() -> str:
    return (ROOT / "requirements" / "lock.txt").read_text()


def locked() -> dict[str, tuple[str, list[str]]]:
    """Name -> (version, hashes) of every requirement, in the only form that a line may have."""
    text = re.sub(r"^ *#.*\n", "", lock_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pins = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = re.fullmatch(r"([a-z0-9-]+)==([^\s;]+)((?: +--hash=sha256:[0-9a-f]{64})*)", line)
        assert match, f"not a plain pin: {line[:100]}"
        pins[match[1]] = (match[2], match[3].split())
    return pins


class TestNamespace:
    def test_no_init_file_where_megatron_core_also_lives(self) -> None:
        assert not (ROOT / "megatron" / "__init__.py").exists()
        assert [path.name for path in (ROOT / "megatron").iterdir() if path.is_dir()] == [
            "linear_cp"
        ]

    def test_wheel_takes_exactly_the_package_folders(self) -> None:
        find = dict(project()["tool"]["setuptools"]["packages"]["find"])
        assert find.pop("namespaces") is True
        where = ROOT / find.pop("where")[0]
        found = set(find_namespace_packages(str(where), **find))
        folders = {file.parent for file in PACKAGE.rglob("*.py")}
        assert found == {".".join(folder.relative_to(ROOT).parts) for folder in folders}

    def test_every_package_folder_says_so(self) -> None:
        """A folder without an __init__.py imports from the tree but is easily lost in a wheel."""
        folders = {file.parent for file in PACKAGE.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []

    def test_both_portions_import(self) -> None:
        megatron = importlib.util.find_spec("megatron")
        assert megatron is not None
        assert megatron.origin is None
        for name in ("megatron.core", "megatron.linear_cp"):
            assert importlib.util.find_spec(name) is not None, name

    def test_typed_and_licensed(self) -> None:
        assert (PACKAGE / "py.typed").read_bytes() == b""
        licence = (ROOT / "LICENSE").read_text()
        assert "Apache License" in licence
        assert "END OF TERMS AND CONDITIONS" in licence
        files = [ROOT / "setup.py", *PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
        first = "# SPDX-License-Identifier: Apache-2.0"
        bare = [file for file in files if file.read_text().split("\n", 1)[0] != first]
        assert bare == []


class TestDistributions:
    """A wheel and an sdist, built from a copy of the tree that holds things they must not take."""

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], str]:
        """Files of the wheel and of the sdist, and the version in the wheel's name."""
        tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out")
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, tree / "megatron" / "linear_cp", ignore=skip)
        for stray in (
            "megatron/core/__init__.py",
            "megatron/linear_cp/notes.txt",
            "megatron/linear_cp/ops/__pycache__/plan.cpython-312.pyc",
            "tests/__init__.py",
            "tools/tool.py",
            "docs/conf.py",
        ):
            (tree / stray).parent.mkdir(parents=True, exist_ok=True)
            (tree / stray).touch()
        build = (
            "import sys; from setuptools import build_meta; out = sys.argv[1]; "
            "build_meta.build_sdist(out); build_meta.build_wheel(out)"
        )
        subprocess.run(
            [sys.executable, "-c", build, str(out)], cwd=tree, check=True, capture_output=True
        )
        (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
        with zipfile.ZipFile(wheel) as archive:
            in_wheel = archive.namelist()
        with tarfile.open(sdist) as archive:
            names = [member.name for member in archive if member.isfile()]
        in_sdist = [name.split("/", 1)[1] for name in names]
        return in_wheel, in_sdist, wheel.name.split("-")[1]

    @staticmethod
    def package_files() -> set[str]:
        files = [*PACKAGE.rglob("*.py"), PACKAGE / "py.typed"]
        return {str(file.relative_to(ROOT)) for file in files}

    def test_wheel_holds_the_package_and_its_metadata(
        self, built: tuple[list[str], list[str], str]
    ) -> None:
        in_wheel, _, version = built
        info = f"megatron_linear_cp-{version}.dist-info"
        metadata = {"METADATA", "RECORD", "WHEEL", "licenses/LICENSE", "top_level.txt"}
        assert set(in_wheel) == self.package_files() | {f"{info}/{name}" for name in metadata}

    def test_sdist_holds_what_a_wheel_is_built_from(
        self, built: tuple[list[str], list[str], str]
    ) -> None:
        _, in_sdist, _ = built
        files = {name for name in in_sdist if ".egg-info/" not in name}
        around = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
        assert files == self.package_files() | around

    def test_version_of_the_wheel_is_the_source_s(
        self, built: tuple[list[str], list[str], str]
    ) -> None:
        assert f'__version__ = "{built[2]}"' in (PACKAGE / "version.py").read_text()


class TestVersion:
    def test_written_in_one_place(self) -> None:
        source = (PACKAGE / "version.py").read_text()
        version = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
        assert version is not None
        assert "version" not in project()["project"]
        dynamic = project()["tool"]["setuptools"]["dynamic"]["version"]
        assert dynamic == {"attr": "megatron.linear_cp.version.__version__"}
        others = [file for file in PACKAGE.rglob("*.py") if file.name != "version.py"]
        others += [ROOT / "pyproject.toml", ROOT / "setup.py"]
        assert [file for file in others if version[1] in file.read_text()] == []

    def test_installed_metadata_agrees(self) -> None:
        try:
            installed = importlib.metadata.version("megatron-linear-cp")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip("runs from the source tree; megatron-linear-cp is not installed")
        assert f'__version__ = "{installed}"' in (PACKAGE / "version.py").read_text()


class TestLock:
    def test_every_requirement_is_pinned_and_hashed(self) -> None:
        assert [name for name, (_, hashes) in locked().items() if not hashes] == []

    def test_names_no_host_path_or_option(self) -> None:
        text = lock_text()
        assert "://" not in text
        assert re.findall(r"(?<![\w.-])(?:/\w+|[A-Za-z]:\\)", text) == []
        options = {word.split("=")[0] for word in re.findall(r"(?<=\s)--[\w-]+=?", text)}
        assert options - {"--require-hashes"} == {"--hash"}

    def test_satisfies_what_pyproject_declares(self) -> None:
        declared = project()["project"]
        wanted = list(declared["dependencies"])
        for extra in ("demo", "dev", "docs", "test"):
            wanted += declared["optional-dependencies"][extra]
        pins = locked()
        for requirement in map(Requirement, wanted):
            version, _ = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement

    @pytest.mark.parametrize("stack", ["stack-0.18.in", "stack-0.19.txt"])
    def test_tested_stacks_are_within_the_declared_ranges(self, stack: str) -> None:
        ranges = {
            requirement.name: requirement.specifier
            for requirement in map(Requirement, project()["project"]["dependencies"])
        }
        lines = (ROOT / "requirements" / stack).read_text().splitlines()
        pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
        assert {"megatron-core", "fla-core"} <= {pin.name for pin in pins}
        for pin in pins:
            exact = next(iter(pin.specifier)).version.replace(".*", ".0")
            assert ranges[pin.name].contains(exact), pin
            if stack == "stack-0.18.in":
                assert pin.specifier.contains(locked()[pin.name][0]), pin


class TestBootstrap:
    """The search for a Python, run for real in a world that holds only what a test puts there."""

    def find(self, tmp_path: Path, *path: Path, **extra: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(tmp_path), "PATH": ":".join(map(str, path)), **extra}
        command = [BASH, str(BOOTSTRAP), "--find-python"]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    def program(self, folder: Path, name: str, body: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / name
        file.write_text(f"#!{BASH}\n{body}\n")
        file.chmod(0o755)
        return file

    def dead_shim(self, folder: Path, name: str) -> Path:
        return self.program(folder, name, f"echo 'shim: {name}: command not found' >&2; exit 127")

    def real_python(self, folder: Path, name: str) -> Path:
        return self.program(folder, name, f'exec {sys.executable} "$@"')

    def old_python(self, folder: Path, name: str) -> Path:
        """The running Python, saying to the probe that it is 3.11."""
        lie = "import sys; sys.version_info = (3, 11, 7); exec(sys.argv[1])"
        return self.program(folder, name, f"exec {sys.executable} -I -c '{lie}' \"$3\"")

    def assert_found(self, result: subprocess.CompletedProcess[str]) -> None:
        assert result.returncode == 0, result.stderr
        question = "import sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix)"
        asked = subprocess.run(
            [result.stdout.strip(), "-I", "-c", question], capture_output=True, text=True
        )
        assert asked.stdout.strip() == f"{RUNNING} {sys.base_prefix}"

    def test_skips_a_dead_shim_in_an_earlier_directory(self, tmp_path: Path) -> None:
        for name in ("python3.12", "python3.13", "python3"):
            self.dead_shim(tmp_path / "shims", name)
        self.real_python(tmp_path / "bin", f"python{RUNNING}")
        self.assert_found(self.find(tmp_path, tmp_path / "shims", tmp_path / "bin"))

    def test_takes_a_plain_python3_that_is_new_enough(self, tmp_path: Path) -> None:
        self.real_python(tmp_path / "my bin", "python3")
        self.assert_found(self.find(tmp_path, tmp_path / "my bin"))

    def test_finds_what_pyenv_keeps_off_path(self, tmp_path: Path) -> None:
        self.old_python(tmp_path / "bin", "python3")
        self.real_python(tmp_path / ".pyenv" / "versions" / f"{RUNNING}.9" / "bin", "python")
        self.assert_found(self.find(tmp_path, tmp_path / "bin"))

    def test_asks_uv(self, tmp_path: Path) -> None:
        hidden = self.real_python(tmp_path / "uv-home", "python3")
        answer = f'[[ "$*" == *{RUNNING} ]] && echo {hidden}'
        self.program(tmp_path / "bin", "uv", answer)
        self.assert_found(self.find(tmp_path, tmp_path / "bin"))

    def test_an_unfit_choice_is_named_and_passed_over(self, tmp_path: Path) -> None:
        chosen = self.old_python(tmp_path / "old", "python")
        self.real_python(tmp_path / "bin", "python3")
        result = self.find(tmp_path, tmp_path / "bin", PYTHON=str(chosen))
        self.assert_found(result)
        assert f"PYTHON={chosen} does not fit" in result.stderr

    def test_one_clear_error_when_nothing_fits(self, tmp_path: Path) -> None:
        shim = self.dead_shim(tmp_path / "shims", "python3.12")
        old = self.old_python(tmp_path / "bin", "python3")
        bare = self.program(
            tmp_path / "bin",
            "python3.13",
            f'exec {sys.executable} -I -c \'import sys; sys.modules["ensurepip"] = None; '
            'exec(sys.argv[1])\' "$3"',
        )
        result = self.find(tmp_path, tmp_path / "shims", tmp_path / "bin")
        assert result.returncode == 1
        assert result.stdout == ""
        assert f"{shim}: shim: python3.12: command not found" in result.stderr
        assert f"{old}: is Python 3.11, not 3.12 or 3.13" in result.stderr
        assert f"{bare}: cannot import ensurepip" in result.stderr
        assert "uv python install 3.12" in result.stderr

    def test_an_empty_world_is_said_to_be_empty(self, tmp_path: Path) -> None:
        result = self.find(tmp_path, tmp_path / "nothing")
        assert result.returncode == 1
        assert "found no python3" in result.stderr
