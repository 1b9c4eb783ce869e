"""`holdfast run --if-exists`: calls that are repeated share one run."""

from __future__ import annotations

import sys

import pytest
from tests.cli.conftest import Cli

from holdfast import api
from holdfast.errors import ExitCode

FAST = ("recovery.prewarm=false", "watch.step_clock=false")


@pytest.mark.slow
def test_command_line_attaches_to_the_run_of_a_name(cli: Cli) -> None:
    words = ("run", "--name", "night", "--if-exists")
    rest = ("--set", FAST[0], "--set", FAST[1], "--", sys.executable, "-c", "print('once')")
    assert cli(*words, "attach", *rest).code == 0
    assert cli(*words, "attach", *rest).code == 0
    assert len(api.runs()) == 1
    assert "run-exists" in cli(*words, "refuse", *rest).err
    assert cli(*words, "often", *rest).code == ExitCode.USAGE
