"""Owns the start of a run's keeper here: a process of its own, that outlives whoever started it.

Of a local run it keeps the controller alive; of one elsewhere it keeps the run's folder as it is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from holdfast.errors import ExitCode, failure
from holdfast.findings import Fault
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted, Private
from holdfast.job.profile import KUBERNETES, LOCAL

KEEPERS: Mapping[str, Callable[[Accepted], tuple[str, ...]]] = {
    LOCAL: lambda accepted: ("holdfast.launch.local.keeper", "--isolation", accepted.isolation),
    KUBERNETES: lambda _: ("holdfast.launch.kubernetes.mirror",),
}
"""What keeps a run of each back end, with its own options."""

START_S = 10.0
"""Longest a keeper may take to listen."""


def start_keeper(run: RunFolder, accepted: Accepted) -> None:
    """Start a keeper with the environment the run was first started with, and wait until it listens."""
    environ = Private.read(run.secrets).environ
    module, *options = KEEPERS[accepted.backend](accepted)
    with run.controller_log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", module, str(run.path), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            cwd="/",
            start_new_session=True,
        )
    try:
        _wait_for_start(run, keeper)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        keeper.wait()
        raise


def _wait_for_start(run: RunFolder, keeper: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while run.description().get("keeper") != keeper.pid:
        if keeper.poll() is not None or time.monotonic() > deadline:
            how = f"did not listen within {START_S:g} s" if keeper.returncode is None else "ended at once"
            raise failure(
                "start-failed",
                f"{run.run} could not be started: its keeper {how}",
                exit_code=ExitCode.UNAVAILABLE,
                evidence=run.last_words(),
                remedy="Mend what its last words say, and try again.",
                fault=Fault.HOLDFAST,
            )
        time.sleep(0.005)
