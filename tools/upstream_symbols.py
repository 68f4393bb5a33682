# SPDX-License-Identifier: Apache-2.0
"""The sources of installed packages: where a dotted name leads, and what of it can change.

Everything is parsed, nothing imported.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Hundreds of fields: the ones that we read are recorded one by one, not its constructor.
BY_FIELD = {"megatron.core.transformer.transformer_config.TransformerConfig"}
# A symbol's description: "kind" and what of it can change. None: the release has no such symbol.
type Description = dict[str, str | list[str]]
type Record = dict[str, Description | None]
type Function = ast.FunctionDef | ast.AsyncFunctionDef
type Definition = ast.ClassDef | Function | ast.Assign | ast.AnnAssign | ast.ImportFrom


@dataclass(frozen=True)
class Call:
    """A call that upstream makes to a class of ours: its arguments are our contract.

    Attributes:
        method: upstream's method that makes it; methods of that name in base classes count.
        callee: what is called there, or built by ``build_module``.
        file, text: as in :class:`Unseen`, of the class or method that is called.
    """

    method: str
    callee: str
    file: str
    text: str


@dataclass(frozen=True)
class Found:
    """Where a name leads: a module (``node`` is None) or a definition in it."""

    module: str
    node: ast.ClassDef | Function | ast.Assign | ast.AnnAssign | None


class Upstream:
    """The sources of some installed packages.

    Args:
        roots: package name to its folder.
    """

    def __init__(self, roots: dict[str, Path]) -> None:
        self.roots = roots
        self.tree = functools.cache(self._tree)

    def covers(self, name: str) -> bool:
        """Whether a module or symbol belongs to these packages."""
        return any(name == root or name.startswith(f"{root}.") for root in self.roots)

    def file(self, module: str) -> Path | None:
        """The source file of a module."""
        for root, folder in self.roots.items():
            if module == root or module.startswith(f"{root}."):
                path = folder.joinpath(*module[len(root) + 1 :].split("."))
                for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                    if file.is_file():
                        return file
        return None

    def _tree(self, module: str) -> ast.Module | None:
        file = self.file(module)
        return None if file is None else ast.parse(file.read_text(encoding="utf-8"))

    def find(self, name: str) -> Found | None:
        """Where a full name leads, through re-exports; None where it leads nowhere."""
        if self.file(name) is not None:
            return Found(name, None)
        owner, _, attribute = name.rpartition(".")
        return self._in_module(owner, attribute, frozenset()) if self.covers(owner) else None

    def _in_module(self, module: str, name: str, seen: frozenset[tuple[str, str]]) -> Found | None:
        tree = self.tree(module)
        if tree is None or (module, name) in seen:
            return None
        seen |= {(module, name)}
        fallback: Found | None = None
        for node in _definitions(tree.body):
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, node)
                for alias in node.names:
                    if alias.name == "*":
                        found = self._in_module(source, name, seen)
                    elif (alias.asname or alias.name) == name and self.covers(source):
                        submodule = f"{source}.{alias.name}"
                        found = self._in_module(source, alias.name, seen) or (
                            Found(submodule, None) if self.file(submodule) else None
                        )
                    else:
                        continue
                    if found is not None:
                        return found
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                if name in _targets(node):
                    fallback = fallback or Found(module, node)
            elif node.name == name:
                return Found(module, node)
        return fallback

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.file(module)
        parts = module.split(".")
        keep = len(parts) - node.level + (file is not None and file.name == "__init__.py")
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def bases(self, found: Found) -> list[tuple[str, ast.ClassDef]]:
        """A class and the classes below it that these packages define, nearest first."""
        classes: list[tuple[str, ast.ClassDef]] = []
        waiting = [found]
        while waiting:
            one = waiting.pop(0)
            if isinstance(one.node, ast.ClassDef) and (one.module, one.node) not in classes:
                classes.append((one.module, one.node))
                for base in one.node.bases:
                    parent = self._in_module(one.module, ast.unparse(base), frozenset())
                    waiting += [] if parent is None else [parent]
        return classes

    def describe(self, symbol: str) -> Description | None:
        """What can change about a symbol: a module's, or a member of a class."""
        found = self.find(symbol)
        if found is None:
            owner, _, member = symbol.rpartition(".")
            parent = self.find(owner)
            if parent is not None and isinstance(parent.node, ast.ClassDef):
                return self._member(parent, member)
            return None
        place: Description = {"defined_in": found.module}
        match found.node:
            case None:
                return {"kind": "module"}
            case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
                return {"kind": "function"} | place | {"parameters": _parameters(node)}
            case ast.ClassDef() as node:
                about: Description = {"bases": [ast.unparse(base) for base in node.bases]}
                if symbol not in BY_FIELD and (parameters := self._constructor(found)) is not None:
                    about["parameters"] = parameters
                return {"kind": "dataclass" if _is_dataclass(node) else "class"} | place | about
        return {"kind": "value"} | place

    def _constructor(self, found: Found) -> list[str] | None:
        classes = self.bases(found)
        for _, node in classes:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return _parameters(item, bound=True)
            if _is_dataclass(node):
                fields: dict[str, str] = {}
                for _, each in reversed(classes):
                    fields |= {
                        name: name + (f"={_default(item)}" if item.value else "")
                        for item in each.body
                        if isinstance(item, ast.AnnAssign) and _is_dataclass(each)
                        for name in _targets(item)
                        if "ClassVar" not in ast.unparse(item.annotation)
                    }
                return list(fields.values())
        return None

    def _member(self, found: Found, name: str) -> Description | None:
        classes = self.bases(found)
        for _, node in classes:
            for item in _definitions(node.body):
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name:
                    decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
                    if "property" in decorators:
                        return {"kind": "property"}
                    bound = "staticmethod" not in decorators
                    return {"kind": "method", "parameters": _parameters(item, bound=bound)}
                if isinstance(item, ast.AnnAssign) and name in _targets(item):
                    about: Description = {"type": ast.unparse(item.annotation)}
                    return {"kind": "field"} | about | {"default": _default(item)}
                if isinstance(item, ast.Assign) and name in _targets(item):
                    return {"kind": "value"}
        for _, node in classes:
            for child in ast.walk(node):
                assigned = child if isinstance(child, (ast.Assign, ast.AnnAssign)) else None
                if assigned is not None and f"self.{name}" in _targets(assigned):
                    return {"kind": "attribute"}
        return None

    def describe_call(self, call: Call) -> Description | None:
        """The arguments of a call that upstream makes."""
        owner, _, method = call.method.rpartition(".")
        found = self.find(owner)
        for _, node in [] if found is None else self.bases(found):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == method:
                    for made in ast.walk(item):
                        if isinstance(made, ast.Call) and _callee(made) == call.callee:
                            return {"kind": "call", "arguments": _arguments(made, item)}
        return None

    def elsewhere(self, symbol: str) -> list[str]:
        """Modules that now define a class or function of this name."""
        name = symbol.rpartition(".")[2]
        pattern = re.compile(rf"^(?:class|def) {re.escape(name)}\b", re.MULTILINE)
        modules = []
        for root, folder in self.roots.items():
            for file in sorted(folder.rglob("*.py")):
                if pattern.search(file.read_text(encoding="utf-8", errors="replace")):
                    parts = file.relative_to(folder).with_suffix("").parts
                    modules.append(".".join([root, *(p for p in parts if p != "__init__")]))
        return modules


def _definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Definitions of a block, those in its conditions and tries included."""
    for node in body:
        match node:
            case (
                ast.ClassDef()
                | ast.FunctionDef()
                | ast.AsyncFunctionDef()
                | ast.Assign()
                | ast.AnnAssign()
                | ast.ImportFrom()
            ):
                yield node
            case ast.If() | ast.With():
                yield from _definitions(node.body)
                yield from _definitions(getattr(node, "orelse", []))
            case ast.Try():
                yield from _definitions(node.body)
                for handler in node.handlers:
                    yield from _definitions(handler.body)
                yield from _definitions(node.orelse)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [t for x in targets for t in (x.elts if isinstance(x, ast.Tuple) else [x])]
    return {ast.unparse(target) for target in flat}


def _default(node: ast.AnnAssign) -> str:
    """The default of a field, without documentation that comes with it."""
    value = node.value
    if isinstance(value, ast.Call):
        keywords = [k for k in value.keywords if k.arg != "metadata"]
        value = ast.Call(func=value.func, args=value.args, keywords=keywords)
    return "" if value is None else ast.unparse(value)


def _is_dataclass(node: ast.ClassDef) -> bool:
    names = (ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list)
    return any(name.rpartition(".")[2] == "dataclass" for name in names)


def _parameters(node: Function, bound: bool = False) -> list[str]:
    """The parameters as in a signature, without annotations: ``["x", "*", "scale=None"]``."""
    found: list[str] = []
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
    for i, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        if not (bound and i == 0):
            found.append(argument.arg + ("" if default is None else f"={default}"))
        if i + 1 == len(a.posonlyargs):
            found.append("/")
    if a.vararg is not None or a.kwonlyargs:
        found.append("*" if a.vararg is None else f"*{a.vararg.arg}")
    for argument, value in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        found.append(argument.arg + ("" if value is None else f"={ast.unparse(value)}"))
    return found + ([] if a.kwarg is None else [f"**{a.kwarg.arg}"])


def _callee(node: ast.Call) -> str:
    if ast.unparse(node.func) == "build_module" and node.args:
        return ast.unparse(node.args[0])
    return ast.unparse(node.func)


def _arguments(node: ast.Call, function: ast.FunctionDef) -> list[str]:
    """Names of the keywords, positions of the rest, and what a ``**dict`` may hold."""
    built = ast.unparse(node.func) == "build_module"
    found = [ast.unparse(argument) for argument in node.args[built:]]
    for keyword in node.keywords:
        if keyword.arg is not None:
            found.append(f"{keyword.arg}=")
            continue
        name = ast.unparse(keyword.value)
        keys = re.findall(rf"^\s*{re.escape(name)}\['(\w+)'\] = ", ast.unparse(function), re.M)
        found += [f"**{name}"] + [f"{key}= (when set)" for key in sorted(set(keys))]
    return found
