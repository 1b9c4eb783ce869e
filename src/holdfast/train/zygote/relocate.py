"""Moves a zygote to another version of the program's code, and checks whether that is possible.

A zygote has imported none of the program's own modules, so its only trace of the old code is the folder's path. Uses
only the standard library of Python 3.10, as zygote_main.py does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import PurePath
from types import ModuleType

from import_scan import ImportScanner, scan

SETTINGS = {"matplotlib": "matplotlibrc"}
"""Files that a package reads from the working folder during import."""

CONFIG_BYTES = 1024
"""More than a PyConfig has, and less than the interpreter's state has after it."""
WIDE_BYTES, MOST_CHARACTERS = ctypes.sizeof(ctypes.c_wchar), 4096


class CannotRelocate(Exception):
    """The zygote cannot run the other code; the text says why."""


class CodeLocation:
    """The zygote's code folder, and the module variables that contain its path."""

    def __init__(self, code: str, kind: str, program: str) -> None:
        self._code = os.path.realpath(code)
        self._kind, self._program = kind, program
        self._references: list[tuple[ModuleType, str]] = []
        loaded: list[object] = list(sys.modules.values())  # may contain any object
        for module in loaded:
            if isinstance(module, ModuleType):
                variables = object.__getattribute__(module, "__dict__")  # does not trigger lazy modules
                self._references += [(module, name) for name, value in list(variables.items()) if self._contains(value)]

    def check(self, rank: dict[str, str], imported: Sequence[str]) -> bool:
        """Relocate, and return whether the rank's code has further imports. Raises CannotRelocate."""
        for module, name in self._references:
            if name == "__file__":
                raise CannotRelocate(f"{module.__name__} is imported from the code itself")
        for package, file in SETTINGS.items():
            if package in sys.modules and _content(file) != _content(f"{rank['cwd']}/{file}"):
                raise CannotRelocate(f"{file} changed, which {package} has read")
        self.switch_to(rank)
        names = scan(ImportScanner(self._kind, self._program))
        rest = iter(names)
        if gone := next((name for name in imported if name not in rest), ""):
            raise CannotRelocate(f"{gone} is not imported any more where it was")
        return len(names) > len(imported)

    def switch_to(self, rank: dict[str, str]) -> None:
        """Switch to the folder of a rank's code, as if started there. Raises CannotRelocate."""
        os.chdir(rank["cwd"])
        if (code := os.path.realpath(rank["code"])) == self._code:
            return
        sys.path[:] = [self._relocated(path, code) if self._contains(path) else path for path in sys.path]
        for module, name in self._references:
            value = getattr(module, name)
            setattr(module, name, type(value)(self._relocated(str(value), code)))
        if self._kind == "script" and not os.path.isabs(self._program):
            self._patch_script_path(code)

    def _contains(self, value: object) -> bool:
        path = str(value) if isinstance(value, (str, PurePath)) else ""
        return path == self._code or path.startswith(f"{self._code}/")

    def _relocated(self, path: str, code: str) -> str:
        return code + path[len(self._code) :]

    def _patch_script_path(self, code: str) -> None:
        """Make Python run the script at its new path: it resolved the path before it imported site.

        The path is in the interpreter's settings (PyConfig, PEP 587), to which there is no public access.
        """
        python = ctypes.pythonapi
        try:
            settings, allocate = python._Py_GetConfig, python.PyMem_RawMalloc  # Python frees the final string
            memory = os.open("/proc/self/mem", os.O_RDONLY)
        except (AttributeError, OSError) as error:
            raise CannotRelocate(f"this Python does not show where it keeps its settings ({error})") from error
        settings.restype, allocate.restype, allocate.argtypes = ctypes.c_void_p, ctypes.c_void_p, (ctypes.c_size_t,)
        words = (ctypes.c_size_t * (CONFIG_BYTES // ctypes.sizeof(ctypes.c_size_t))).from_address(settings())
        paths = [_string(memory, word) for word in words]
        os.close(memory)
        found = [
            index
            for index, path in enumerate(paths)
            if self._contains(path) and path.endswith(os.path.basename(self._program))
        ]
        if len(found) != 1:
            raise CannotRelocate("this Python does not keep its program's place where others do")
        there = ctypes.create_unicode_buffer(self._relocated(paths[found[0]], code))
        words[found[0]] = allocate(ctypes.sizeof(there))
        ctypes.memmove(words[found[0]], there, ctypes.sizeof(there))


def _string(memory: int, address: int) -> str:
    """The wide string at an address, within readable memory; empty if there is none."""
    try:
        raw = os.pread(memory, MOST_CHARACTERS * WIDE_BYTES, address)
        return raw.decode(f"utf-32-{sys.byteorder[0]}e", "replace").partition("\0")[0]
    except (OSError, OverflowError, ValueError):
        return ""


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
