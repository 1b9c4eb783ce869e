"""Imports modules before a program starts, and decides whether the process may be forked for it.

It imports what import_scan.py finds, and what torch itself imports on first use. A process must not be forked
after it has started threads (a fork keeps only the forking thread) or opened an accelerator's driver (whose state does
not survive a fork). Nor after it has read a variable without a known value yet, such as the rank of a standby.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from import_scan import ImportScanner, scan

LAZY_IMPORTS = {"torch": ("torch.distributed", "torch._dynamo")}
"""What a package imports on first use: here in any optimizer and in DistributedDataParallel."""

_GC_THRESHOLD = 1_000_000
"""Allocations between two garbage collections while importing; with Python's 700 they take a fifth of the time."""

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband")


class NotForkable(Exception):
    """This process cannot be forked, or need not be, because of a module or of the whole program."""

    def __init__(self, module: str, why: str) -> None:
        super().__init__(module, why)
        self.module = module
        self.why = why


class _EnvironReads:
    """Detects which variables are read; a variable read together with all others, as in a copy, does not count."""

    def __init__(self, unknown: frozenset[str]) -> None:
        self._unknown = unknown
        self._counts: Counter[str] = Counter()
        self._first = frozenset(os.environ)
        """Variables present from the beginning; a copy made earlier cannot contain variables that an import sets."""
        self._kind = type(os.environ)
        self._read = self._kind.__getitem__

    def __enter__(self) -> _EnvironReads:
        counts, real = self._counts, self._read

        def read(self: os._Environ[str], key: str) -> str:
            counts[key] += 1
            return real(self, key)

        self._kind.__getitem__ = read
        return self

    def __exit__(self, *_: object) -> None:
        self._kind.__getitem__ = self._read

    def used(self) -> str:
        """A variable with an unknown value that was read, if any."""
        of_all = min((self._counts[name] for name in self._first.intersection(os.environ)), default=0)
        return next((name for name in sorted(self._unknown) if self._counts[name] > of_all), "")


def preload(
    kind: str, program: str, *, excluded: frozenset[str], unknown: frozenset[str] = frozenset(), min_modules: int
) -> tuple[dict[str, object], list[str]]:
    """Import the program's modules, unless there are fewer than `min_modules`.

    Returns the report for the agent, and the names. Raises NotForkable.
    """
    began = time.monotonic()
    reading, packages = ImportScanner(kind, program), installed_packages()
    with _EnvironReads(unknown) as reads, _rare_collections():
        _check_forkable("site", reads)
        names = scan(reading)
        for name in names:
            if name.partition(".")[0] not in excluded:
                _import(name, reads)
        for package, later in LAZY_IMPORTS.items():
            if package in sys.modules:
                for name in later:
                    _import(name, reads)
    if len(sys.modules) < min_modules:
        raise NotForkable("", reading.stopped_at)
    return {"modules": len(sys.modules), "took_s": time.monotonic() - began, "packages": packages}, names


@contextmanager
def _rare_collections() -> Generator[None]:
    """Collects garbage less often; a threshold that an imported module sets stays."""
    thresholds = gc.get_threshold()
    ours = (_GC_THRESHOLD, *thresholds[1:])
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*thresholds)


def installed_packages() -> dict[str, int]:
    """Folders of installed packages, with the time of the last installation or removal."""
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages")) and os.path.isdir(path)]
    return {folder: os.stat(folder).st_mtime_ns for folder in folders}


def _import(name: str, reads: _EnvironReads) -> None:
    """Import a module, or its parent if the name is not a module; import errors are left to the program."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, child = name.rpartition(".")
        if parent:
            _import(parent, reads)
            getattr(sys.modules.get(parent), child, None)
    except Exception as error:
        sys.stderr.write(f"holdfast: import {name}: {error!r}\n")
    _check_forkable(name.partition(".")[0], reads)


def _check_forkable(module: str, reads: _EnvironReads) -> None:
    if used := reads.used():
        raise NotForkable(module, f"it reads {used}")
    if _threads() > 1:
        # OpenBLAS and other careful libraries stop their threads before a fork and restart them on demand.
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        if (threads := _threads()) > 1:
            raise NotForkable(module, f"it starts {threads - 1} threads")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if path.startswith(_DEVICES):
            raise NotForkable(module, f"it opens {path}")


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
