"""Finds what a program imports from installed packages by reading its files, without running it.

It reads the imports at the top of the files, in Python's order, until the program changes what an import may depend on
(`os.environ`, the front of `sys.path`); later imports are ignored. The program's own modules are read but never
imported, since the user may edit them between two starts.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec

HOLDFAST_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Holdfast itself, which counts as installed however it was."""

IMPORT_DEPENDENCIES = (
    "os.environ",
    "environ",
    "os.putenv",
    "os.unsetenv",
    "os.sched_setaffinity",
    "load_dotenv",
    "dotenv.load_dotenv",
    "sys.path",
    "sys.meta_path",
    "site.addsitedir",
)
"""What an import may depend on. `sys.path.append` alone is harmless: earlier entries are found first."""

READ_METHODS = ("get", "append", "copy", "items", "keys", "values", "extend")
"""Methods of these that change no existing entry."""


class _ImportsMayChange(Exception):
    """The program changes what imports may depend on; the text is `file:line`."""


class ImportScanner:
    """The imports of a program: of a `script` (its path), a `module` (its name) or `code` (its text)."""

    def __init__(self, kind: str, program: str) -> None:
        self.stopped_at = ""
        """Where the program changes what imports may depend on, as `train.py:3`."""
        self._kind = kind
        self._program = program
        first = os.path.dirname(os.path.realpath(program)) if kind == "script" else os.getcwd()
        self._own = [first, *(path for path in sys.path if path and not _installed(path))]
        self._seen: set[str] = set()

    def imports(self) -> Iterator[str]:
        """Names to import, in order; `a.b` for `from a import b`, whether or not it is a module."""
        try:
            if self._kind == "code":
                yield from self._scan_source(self._program, "-c", "")
            elif self._kind == "script":
                yield from self._scan_file(os.path.realpath(self._program), "")
            else:
                yield from self._scan_module(self._program, main=True)
        except _ImportsMayChange as changed:
            self.stopped_at = str(changed)

    def _scan_file(self, path: str, package: str) -> Iterator[str]:
        if path in self._seen or (package and not path.endswith((".py", ".pyw"))):
            return
        self._seen.add(path)
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError:
            return
        yield from self._scan_source(source, path, package)

    def _scan_source(self, source: str | bytes, path: str, package: str) -> Iterator[str]:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
        yield from self._scan_statements(tree.body, path, package)

    def _scan_statements(self, body: list[ast.stmt], path: str, package: str) -> Iterator[str]:
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    yield from self._scan_module(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                module = _absolute(statement, package)
                if module != "__future__":
                    for alias in statement.names:
                        yield from self._scan_module(module if alias.name == "*" else f"{module}.{alias.name}")
            elif isinstance(statement, ast.Try):
                yield from self._scan_statements(statement.body, path, package)
            elif any(map(_changes, ast.walk(statement))):
                raise _ImportsMayChange(f"{_shown(path)}:{statement.lineno}")

    def _scan_module(self, name: str, *, main: bool = False) -> Iterator[str]:
        """Read a module of the program itself, from its outermost package on; yield any other as an import."""
        parts = name.split(".")
        spec = self._find(parts[0])
        if spec is None:
            return
        if _is_installed(spec):
            if main:
                yield from self._installed_main(name)
            else:
                yield name
            return
        package = ""
        for part, below in zip(parts, [*parts[1:], "__main__" if main else ""], strict=True):
            inside = package
            package = f"{package}.{part}" if package else part
            folders = spec.submodule_search_locations
            if spec.origin:
                yield from self._scan_file(spec.origin, inside if folders is None else package)
            spec = importlib.machinery.PathFinder.find_spec(below, list(folders)) if below and folders else None
            if spec is None:
                return
        if spec.origin:
            yield from self._scan_file(spec.origin, package)

    def _installed_main(self, name: str) -> Iterator[str]:
        """For an installed program, import the packages around it to find it, then read it like any other."""
        spec = _find_installed(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = _find_installed(name)
        if spec is not None and spec.origin:
            yield from self._scan_file(spec.origin, name.rpartition(".")[0])

    def _find(self, top: str) -> ModuleSpec | None:
        """Find a module as Python does: a folder without `__init__.py` is its last choice."""
        own = importlib.machinery.PathFinder.find_spec(top, self._own)
        return own if own is not None and own.has_location else _find_installed(top) or own


def scan(reading: ImportScanner) -> list[str]:
    """What a program imports, without duplicates, in the order of first occurrence."""
    return list(dict.fromkeys(reading.imports()))


def _find_installed(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    above = ".".join(parts[: len(parts) - statement.level + 1])
    return f"{above}.{statement.module}" if statement.module else above


def _shown(path: str) -> str:
    """The name of a file, with its package if the name is the same in every package."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.basename(folder), name) if name.startswith("__") else name


def _changes(node: ast.AST) -> bool:
    """Whether a piece of a statement changes what imports may depend on."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and _dotted(node.value) in IMPORT_DEPENDENCIES
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store) and _dotted(node) in IMPORT_DEPENDENCIES
    if isinstance(node, ast.AugAssign):
        return _dotted(node.target) in IMPORT_DEPENDENCIES
    if not isinstance(node, ast.Call):
        return False
    called = _dotted(node.func)
    owner, _, method = called.rpartition(".")
    return called in IMPORT_DEPENDENCIES or (owner in IMPORT_DEPENDENCIES and method not in READ_METHODS)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_installed(spec: ModuleSpec) -> bool:
    if not spec.has_location:
        return all(map(_installed, spec.submodule_search_locations or ()))
    return _installed(str(spec.origin))


def _installed(path: str) -> bool:
    """Whether a path is in a package installation folder, and so not part of the program.

    Installers may link the files or folders of a package to a store elsewhere, so the path counts as it is written too,
    unless it leads back to the program's own folder.
    """
    real = os.path.realpath(path)
    is_own = real.startswith(os.path.join(os.path.realpath(os.curdir), ""))
    return real.startswith(_INSTALLED) or (not is_own and os.path.abspath(path).startswith(_INSTALLED))


def _folders() -> tuple[str, ...]:
    """Folders of installed packages and of Python itself, with a trailing slash; including zipped Python."""
    known = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    known += [*site.getsitepackages(), site.getusersitepackages(), HOLDFAST_ROOT]
    zipped = [path for path in sys.path if path.endswith(".zip") and path.startswith(sys.base_prefix)]
    written = dict.fromkeys(each for path in known for each in (os.path.abspath(path), os.path.realpath(path)))
    return tuple(f"{path}/" for path in written) + tuple(map(os.path.realpath, zipped))


_INSTALLED = _folders()
