"""A forked rank is like one that was started, also where the process that is forked has remembered something."""

from __future__ import annotations

import os
import sys

from tests.runs.conftest import Runs
from tests.runs.forked_starts import ForkedStarts

from holdfast.events import Outcome
from holdfast.launch.kubernetes.submit.submit_process import WORKER_MODULE

LISTS_STATE = """
import contextvars, itertools, sys, threading
from collections import deque

kinds = (list, deque, bytearray, contextvars.ContextVar, itertools.count)
kinds += (threading.Event, threading.Thread)
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "holdfast"]
variables = ((module.__name__, *each) for module in modules for each in vars(module).items())
own = (each for each in variables if not each[1].startswith("__"))
print(len(modules) > 300, [f"{module}.{name}" for module, name, value in own if isinstance(value, kinds)])
"""


def printed(runs: Runs, program: str) -> str:
    """What the one rank of a run prints."""
    (runs.base / "program.py").write_text(program)
    watched = runs.start(sys.executable, "program.py", nodes=1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    return watched.log(0)


def test_rank_has_the_folder_for_temporary_files_that_its_environment_names(runs: Runs) -> None:
    assert printed(runs, "import tempfile\nprint(tempfile.gettempdir())\n") == f"{os.environ['TMPDIR']}\n"


def test_modules_that_a_fork_keeps_have_no_state_that_it_would_not_get_anew(
    runs: Runs, forked_starts: ForkedStarts
) -> None:
    """It gets dictionaries, sets, locks and caches as they were after the import; constants do not change."""
    forked_starts.preload(WORKER_MODULE)
    assert printed(runs, LISTS_STATE) == "True []\n"
