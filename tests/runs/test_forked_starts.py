"""A forked rank is like one that was started, also where the process that is forked has remembered something."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import threading
from collections import deque
from contextvars import ContextVar

from tests.programs.python_forks import IMPORTED, RESTORED
from tests.runs.conftest import Runs

from holdfast.events import Outcome


def test_rank_has_the_folder_for_temporary_files_that_its_environment_names(runs: Runs) -> None:
    program = runs.base / "where.py"
    program.write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    watched = runs.start(sys.executable, "where.py", nodes=1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.log(0) == f"{os.environ['TMPDIR']}\n"


def test_modules_keep_no_state_that_a_fork_would_not_get_anew() -> None:
    """Forks have dictionaries, sets, locks and caches as they were after the import, and whatever does not change."""
    kept = (list, deque, bytearray, threading.local, threading.Event, threading.Thread, ContextVar, itertools.count)
    for name in IMPORTED:
        importlib.import_module(name)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == RESTORED]
    assert len(modules) > 300
    variables = ((module.__name__, *each) for module in modules for each in vars(module).items())
    found = [f"{module}.{name}" for module, name, value in variables if isinstance(value, kept) and name[:2] != "__"]
    assert found == []
