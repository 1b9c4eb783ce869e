"""Ends a run in Slurm without its controller, which may be unable to start."""

from __future__ import annotations

import contextlib

from holdfast.events import CancelRequested
from holdfast.host.files import read_line
from holdfast.job.run_spec import RunSpec
from holdfast.launch.local.force_cancel import end_processes, log_end
from holdfast.launch.slurm import slurm_commands
from holdfast.launch.slurm.allocation_run import end_job
from holdfast.launch.slurm.slurm_backend import JOB_NAME
from holdfast.run_dir import RunDir


def force_cancel(run: RunDir, request: CancelRequested) -> None:
    """Kill the controller, give the allocation back, and log the run's end.

    Raises HoldfastError as the local target does, or if Slurm does not answer.
    """
    if RunSpec.read(run.job).slurm.in_allocation:
        end_job(run)
        run.delete_secrets()
        run.control_socket.unlink(missing_ok=True)
    else:
        end_processes(run)
        with contextlib.suppress(OSError):
            slurm_commands.cancel(read_line(run.path / JOB_NAME))
    log_end(run, request)
