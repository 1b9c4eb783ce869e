"""Starts a run's supervisor on this machine, as a separate process that outlives its parent.

The supervisor of a local run restarts the controller; that of a remote run mirrors the run's folder to this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from holdfast.errors import ExitCode, failure
from holdfast.findings import Owner
from holdfast.job.run_spec import RunSecrets, RunSpec
from holdfast.launch import prestarted_supervisor
from holdfast.launch.target import open_target
from holdfast.run_dir import RunDir

STARTUP_TIMEOUT_S = 10.0
"""Longest time from a supervisor's start until it listens."""


def start_supervisor(run: RunDir, accepted: RunSpec) -> None:
    """Start a supervisor with the environment of the run's first start, and wait until it listens."""
    environ = RunSecrets.read(run.secrets).environ
    module, *options = open_target(accepted.target_kind, where=run.job).supervisor(accepted)
    supervisor = prestarted_supervisor.begin(
        (module, str(run.path), *options), environ, run.controller_log, on_hosts=bool(accepted.hosts)
    )
    try:
        _wait_for_start(run, supervisor)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        raise


def _wait_for_start(run: RunDir, supervisor: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    while run.read_controller_record().get("supervisor_pid") != supervisor.pid:
        if supervisor.poll() is not None or time.monotonic() > deadline:
            how = (
                f"did not listen within {STARTUP_TIMEOUT_S:g} s"
                if supervisor.returncode is None
                else "exited during startup"
            )
            raise failure(
                "start-failed",
                f"{run.run_id} could not be started: its supervisor {how}",
                exit_code=ExitCode.UNAVAILABLE,
                evidence=run.controller_log_tail(),
                remedy="Fix the problem that its last output shows, and try again.",
                owner=Owner.HOLDFAST,
            )
        time.sleep(0.005)
