"""Ends a run on hosts without its controller, which may be unable to start."""

from __future__ import annotations

import asyncio

from holdfast.events import CancelRequested
from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts.hosts_backend import HostsBackend
from holdfast.launch.local.force_cancel import end_processes, log_end
from holdfast.launch.local.run_network import run_network_for
from holdfast.run_dir import RunDir


def force_cancel(run: RunDir, request: CancelRequested) -> None:
    """Kill the controller here and the run's nodes on the hosts that answer, and log the run's end.

    Raises HoldfastError as the local target does. Agents on other hosts end when they have been without a controller
    for `recovery.controller_grace_s`.
    """
    accepted = RunSpec.read(run.job)
    end_processes(run)
    networks = run_network_for(accepted.isolation, run.run_id)
    asyncio.run(HostsBackend(folder=run, accepted=accepted, networks=networks, url="").cancel())
    log_end(run, request)
