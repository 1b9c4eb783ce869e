"""Starts the step clock and a faster rendezvous when the program has imported torch.optim.

Python imports this module before the program.

For that, its folder is first on PYTHONPATH (agent/step_clock.py). It runs in every Python process below a rank, so it
imports nothing, and no error of it reaches the program. `python -E`, `-I` and `-S` run without it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
HOOKED = "torch.optim"
CLOCK, RENDEZVOUS = "holdfast_step_clock", "holdfast_rendezvous"


class TorchOptimFinder:
    """Finds torch.optim with the other finders, and has the clock start at the end of its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As every finder's; None for all other modules."""
        if name != HOOKED:
            return None
        for finder in sys.meta_path:
            find: Any = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                with _ErrorsIgnored():
                    _start_after_import(spec.loader)
                return spec
        return None


class _ErrorsIgnored:
    """As `contextlib.suppress`, without an import."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, Exception)


def _start_after_import(loader: Any) -> None:
    """Replace the loader's `exec_module` for one call: nothing of this remains where a program could find it."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        execute(module)
        with _ErrorsIgnored():
            _start_clock()
        with _ErrorsIgnored():
            _own_module(RENDEZVOUS).start(sys.modules["torch.distributed.rendezvous"])

    loader.exec_module = exec_module


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
sys.meta_path.insert(0, TorchOptimFinder())
_import_next()
