"""A forked rank is like one that was started, also where the process that is forked has remembered something."""

from __future__ import annotations

import os
import sys

from tests.runs.conftest import Runs

from holdfast.events import Outcome


def test_rank_has_the_folder_for_temporary_files_that_its_environment_names(runs: Runs) -> None:
    program = runs.base / "where.py"
    program.write_text("import tempfile\nprint(tempfile.gettempdir())\n")
    watched = runs.start(sys.executable, "where.py", nodes=1)
    assert watched.wait_for_end().outcome is Outcome.SUCCEEDED
    assert watched.log(0) == f"{os.environ['TMPDIR']}\n"
