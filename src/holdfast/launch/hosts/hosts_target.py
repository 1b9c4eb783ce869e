"""The target `hosts`: nodes are machines that OpenSSH reaches; the controller is where the run was started."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import ExitCode, failure
from holdfast.fabric.catalog import resolve
from holdfast.job.run_spec import RunSpec
from holdfast.launch.code.package_code import list_code, package_code
from holdfast.launch.new_run import new_run_dir, write_inputs
from holdfast.launch.secret_values import read_notify_secrets, read_secrets
from holdfast.launch.start_supervisor import start_supervisor
from holdfast.launch.target import ControllerHooks, Rendered, Submission, Target
from holdfast.launch.target_runs import run_not_on_target

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.policy_request import PolicyRequest
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.launch.target_runs import TargetRun
    from holdfast.run_dir import RunDir


class HostsTarget:
    """Runs jobs on hosts over ssh. Imports on use what only some verbs need."""

    can_update_code = True

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """What can be told without connecting to a host."""
        from holdfast.launch.hosts.hosts_checks import check_job

        job, spec = wanted.job, wanted.spec
        here = check_job(job, spec, target=wanted.target, base=wanted.base, environ=os.environ, now=time.time())
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *list_code(job, wanted.base).findings)))

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """The same, and what every host says of itself and of its way to the others."""
        from holdfast.launch.hosts.host_survey import survey
        from holdfast.launch.hosts.hosts_checks import check_survey

        found = survey(wanted.spec, wanted.base.absolute(), wanted.job.command[:1])
        here = map(wanted.loaded.located, check_survey(wanted.job, wanted.spec, found))
        return (*(each for each in self.check(wanted) if not (for_any_job and each.code == "not-used-on-hosts")), *here)

    def render(self, wanted: Submission) -> Rendered:
        """Every rank's environment and command."""
        if wanted.tree is not None:
            raise not_a_cluster(wanted.target, "a tree is applied to a cluster", "render --on TARGET --tree RUN")
        from holdfast.launch.local.rank_script import render

        with tempfile.TemporaryDirectory() as scratch:
            text = render(accept(wanted, Path(scratch)))
        return Rendered(text=text, findings=wanted.job_findings())

    def start(self, wanted: Submission) -> RunDir:
        """Start a supervisor here, which starts the controller."""
        with new_run_dir(wanted.job.name) as folder:
            accepted = accept(wanted, folder.code)
            base = wanted.base.absolute()
            notify = read_notify_secrets(accepted.notify, base, os.environ)
            write_inputs(folder, accepted, read_secrets(wanted.job, base, os.environ), notify)
            start_supervisor(folder, accepted)
        return folder

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller, which is on this machine."""
        return ("holdfast.launch.local.local_supervisor", "--isolation", accepted.isolation)

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """Ends the controller here, then the nodes on the hosts that answer."""
        from holdfast.launch.hosts.force_cancel_hosts import force_cancel

        return force_cancel

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """Nothing: the target reports missing hosts in the run's log."""

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The hosts of the target."""
        from holdfast.launch.file_machine_list import read_machines

        return read_machines(name, spec)

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """Change the target's quarantine file."""
        from holdfast.launch.file_machine_list import release_machine

        return release_machine(name, machine)

    def find_runs(self, spec: TargetSpec) -> None:
        """Nothing: each run has a folder on the machine that started it."""

    def adopt(self, spec: TargetSpec, run: str) -> RunDir:
        """Impossible: a run that has no folder here was started elsewhere."""
        raise run_not_on_target(run, spec.kind)

    def delete_objects(self, spec: TargetSpec, run: TargetRun) -> None:
        """Nothing: the end of a run deletes its files on the hosts."""

    def policies(self, name: str, spec: TargetSpec, request: PolicyRequest) -> Rendered:
        """Raises HoldfastError: nothing on hosts decides what may run."""
        raise not_a_cluster(name, "nothing there decides what may run", "policy --on TARGET")

    def manifests(self, name: str, spec: TargetSpec, objects: Sequence[Mapping[str, Any]]) -> Rendered:
        """Raises HoldfastError: objects are for clusters."""
        raise not_a_cluster(name, "no objects can be applied there", "observe render --on TARGET")

    def controller_hooks(self) -> ControllerHooks:
        """The controller is on the machine that started the run; hosts reach it through ssh."""
        from holdfast.launch.hosts.hosts_backend import HostsBackend, folder_on_hosts, host_resources

        async def never(_run: str) -> bool:
            return False

        return ControllerHooks(
            backend=HostsBackend,
            node_resources=lambda accepted, _environ: host_resources(accepted),
            controller_host=lambda _folder, host: host,
            had_controller=never,
            node_folder=folder_on_hosts,
            others_may_listen=True,
        )


def accept(wanted: Submission, archives: Path) -> RunSpec:
    """The specification of a run; its code is archived in the folder `archives`."""
    job, spec = wanted.job, wanted.spec
    fabric = resolve(job.fabric.name, spec.fabric)
    return RunSpec(
        job=job,
        base=str(wanted.base.absolute()),
        created_at=time.time(),
        code=package_code(job, wanted.base, archives),
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        target_kind=spec.kind,
        target=wanted.target,
        checkpoint_root=spec.checkpoint_root,
        notify=spec.notify,
        hosts=spec.hosts,
        ssh=spec.ssh,
        slurm=spec.slurm,
    )


def not_a_cluster(target: str, why: str, command: str) -> HoldfastError:
    """The error for what only a Kubernetes target can do."""
    return failure(
        "not-supported",
        f"target `{target}` is no Kubernetes cluster: {why}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        remedy=f"Name a Kubernetes target: `holdfast {command}`.",
    )


TARGET: Target = HostsTarget()
