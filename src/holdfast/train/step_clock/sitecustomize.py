"""Lets a program import torch faster, and then starts the step clock and a faster rendezvous.

Python imports this module before the program.

For that, its folder is first on PYTHONPATH (agent/step_clock.py). It runs in every Python process below a rank, so it
imports nothing, and no error of it reaches the program. `python -E`, `-I` and `-S` run without it.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
GC_THRESHOLD = 1_000_000
"""Allocations between two collections while torch is imported: with Python's 700 they take a fifth of its time."""
CLOCK, RENDEZVOUS = "holdfast_step_clock", "holdfast_rendezvous"


class TorchFinder:
    """Finds torch and torch.optim with the other finders, and has their import do more."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As every finder's; None for all other modules."""
        if name not in AROUND:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                with _ErrorsIgnored():
                    _wrap_import(spec.loader, AROUND[name])
                return spec
        return None


class _ErrorsIgnored:
    """As `contextlib.suppress`, without an import."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, Exception)


def _wrap_import(loader: Any, around: Any) -> None:
    """Replace the loader's `exec_module` for one call: nothing of this remains where a program could find it."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        around(execute, module)

    loader.exec_module = exec_module


def _collect_rarely(execute: Any, module: Any) -> None:
    """Import a module with fewer garbage collections; a threshold that it sets stays."""
    thresholds = gc.get_threshold()
    ours = (max(GC_THRESHOLD, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    gc.set_threshold(*ours)
    try:
        execute(module)
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*thresholds)


def _start_clock_after(execute: Any, module: Any) -> None:
    execute(module)
    with _ErrorsIgnored():
        _start_clock()
    with _ErrorsIgnored():
        _own_module(RENDEZVOUS).start(sys.modules["torch.distributed.rendezvous"])


AROUND = {"torch": _collect_rarely, "torch.optim": _start_clock_after}
"""What happens around the import of a module."""


def _own_module(name: str) -> Any:
    """Import a module from its file: its folder is on no path."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec: Any = spec_from_file_location(name, os.path.join(FOLDER, name + ".py"))
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _start_clock() -> None:
    clock = _own_module(CLOCK)
    try:
        clock.start()
        sys.modules[CLOCK] = clock  # where a Session finds it
    except Exception as error:
        clock.report(error)


def _import_next() -> None:
    """Import the environment's own sitecustomize, if there is one, as Python would have done."""
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != FOLDER]
sys.path_importer_cache.pop(FOLDER, None)
sys.meta_path.insert(0, TorchFinder())
_import_next()
