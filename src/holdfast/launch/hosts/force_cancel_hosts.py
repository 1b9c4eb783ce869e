"""Ends a run on hosts without its controller, which may be unable to start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.events import CancelRequested
from holdfast.job.run_spec import RunSpec
from holdfast.launch.hosts.host_link import HostSettings, end_forwarding
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
    if port := run.read_controller_record().get("port"):
        asyncio.run(
            _end_forwardings(
                accepted, HostSettings(ssh=accepted.ssh, base=Path(accepted.base), port=port, run=run.run_id)
            )
        )
    log_end(run, request)


async def _end_forwardings(accepted: RunSpec, settings: HostSettings) -> None:
    await asyncio.gather(*(end_forwarding(host, settings, settings.first_port(host)) for host in accepted.hosts))
