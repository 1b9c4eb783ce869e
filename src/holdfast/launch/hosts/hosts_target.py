"""The target `hosts`: nodes are machines that OpenSSH reaches; the controller is where the run was started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.launch.code.package_code import code_findings
from holdfast.launch.resumed_checkpoint import checkpoint_missing, checkpoint_paths
from holdfast.launch.supervised_target import SupervisedTarget, accepted_spec, had_no_controller
from holdfast.launch.target import ControllerHooks, Submission, Target

if TYPE_CHECKING:
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.backend import Backend
    from holdfast.job.run_spec import RunSpec
    from holdfast.launch.local.run_network import RunNetwork
    from holdfast.run_dir import RunDir


class HostsTarget(SupervisedTarget):
    """Runs jobs on hosts over ssh."""

    unused_code = "not-used-on-hosts"

    def accept(self, wanted: Submission, archives: Path) -> RunSpec:
        """The run with the target's hosts; its code is always sent."""
        return accepted_spec(wanted, archives, ship_code=True, hosts=wanted.spec.hosts, ssh=wanted.spec.ssh)

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """What can be told without connecting to a host."""
        from holdfast.launch.hosts.hosts_checks import check_job

        job, spec = wanted.job, wanted.spec
        here = check_job(job, spec, target=wanted.target, base=wanted.base, environ=os.environ, now=time.time())
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *code_findings(wanted))))

    def check_there(self, wanted: Submission) -> tuple[Finding, ...]:
        """What every host says of itself and of its way to the others."""
        from holdfast.launch.hosts.host_survey import survey
        from holdfast.launch.hosts.hosts_checks import check_survey

        paths = checkpoint_paths(wanted.resumed)
        found = survey(wanted.spec, wanted.base.absolute(), wanted.job.command[:1], paths)
        missing = (checkpoint_missing(wanted.resumed, each.host) for each in found.facts if set(paths) - {*each.paths})
        return tuple(map(wanted.loaded.located, (*check_survey(wanted.job, found), *missing)))

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """Ends the controller here, then the nodes on the hosts that answer."""
        from holdfast.launch.hosts.force_cancel_hosts import force_cancel

        return force_cancel

    def controller_hooks(self) -> ControllerHooks:
        """The controller is on the machine that started the run; hosts reach it through ssh."""
        from holdfast.launch.hosts.hosts_backend import HostsBackend
        from holdfast.launch.hosts.remote_nodes import remote_resources, run_dir_on_nodes
        from holdfast.launch.hosts.ssh_command import host_folder

        def backend(*, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, **_: object) -> Backend:
            return HostsBackend(folder=folder, accepted=accepted, networks=networks, url=url)

        return ControllerHooks(
            backend=backend,
            node_resources=lambda accepted, _environ: remote_resources(accepted.job, accepted.ssh.python),
            controller_host=lambda _folder, host: host,
            had_controller=had_no_controller,
            node_folder=lambda folder, accepted: run_dir_on_nodes(host_folder(accepted.ssh), folder.run_id),
            others_may_listen=True,
            relays_quorum=True,
        )


TARGET: Target = HostsTarget()
