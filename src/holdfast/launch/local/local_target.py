"""The local target: nodes are processes on this machine."""

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
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import CodeDelivery
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


class LocalTarget:
    """Runs jobs on this machine; the specification of every other target. Imports on use what only some verbs need."""

    can_update_code = True

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """Problems of the job on this machine."""
        from holdfast.launch.local.local_preflight import check_locally

        job, spec = wanted.job, wanted.spec
        here = check_locally(job, spec, base=wanted.base, environ=os.environ, target=wanted.target)
        code = list_code(job, wanted.base).findings if spec.code is CodeDelivery.SHIPPED else ()
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *code)))

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """The same, without what only a minimal job's placeholders cause: `check` has examined this machine."""
        return tuple(each for each in self.check(wanted) if not (for_any_job and each.code == "not-used-locally"))

    def render(self, wanted: Submission) -> Rendered:
        """Every rank's environment and command."""
        if wanted.tree is not None:
            raise failure(
                "not-supported",
                f"target `{wanted.target}` is this machine, and a tree is applied to a cluster",
                exit_code=ExitCode.CANNOT_RUN_HERE,
                remedy="Name a Kubernetes target: `holdfast render --on TARGET --tree RUN`.",
            )
        from holdfast.launch.local.rank_script import render  # a fifth of all imports

        with tempfile.TemporaryDirectory() as scratch:
            text = render(accept(wanted, Path(scratch)))
        return Rendered(text=text, findings=wanted.job_findings())

    def start(self, wanted: Submission) -> RunDir:
        """Start a supervisor, which starts the controller."""
        with new_run_dir(wanted.job.name) as folder:
            accepted = accept(wanted, folder.code)
            base = wanted.base.absolute()
            notify = read_notify_secrets(accepted.notify, base, os.environ)
            write_inputs(folder, accepted, read_secrets(wanted.job, base, os.environ), notify)
            start_supervisor(folder, accepted)
        return folder

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller."""
        return ("holdfast.launch.local.local_supervisor", "--isolation", accepted.isolation)

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """All processes of the run are on this machine."""
        from holdfast.launch.local.force_cancel import force_cancel

        return force_cancel

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """Nothing: the target reports missing machines in the run's log."""

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """This machine, or the simulated ones."""
        from holdfast.launch.file_machine_list import read_machines

        return read_machines(name, spec)

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """Change the target's file."""
        from holdfast.launch.file_machine_list import release_machine

        return release_machine(name, machine)

    def find_runs(self, spec: TargetSpec) -> None:
        """Nothing: each run has a folder on this machine."""

    def adopt(self, spec: TargetSpec, run: str) -> RunDir:
        """Impossible: a run that has no folder is not there."""
        raise run_not_on_target(run, LOCAL)

    def delete_objects(self, spec: TargetSpec, run: TargetRun) -> None:
        """Nothing: a run has only its folder."""

    def policies(self, name: str, spec: TargetSpec, request: PolicyRequest) -> Rendered:
        """Raises HoldfastError: nothing here decides what may run."""
        raise failure(
            "not-supported",
            f"target `{name}` is this machine, where nothing decides what may run",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="Name a Kubernetes target: `holdfast policy --on TARGET`.",
        )

    def manifests(self, name: str, spec: TargetSpec, objects: Sequence[Mapping[str, Any]]) -> Rendered:
        """Raises HoldfastError: objects are for clusters."""
        raise failure(
            "not-supported",
            f"target `{name}` is this machine, to which no objects can be applied",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            remedy="Write files with --to FOLDER, or name a Kubernetes target with --on TARGET.",
        )

    def controller_hooks(self) -> ControllerHooks:
        """The controller is on the nodes' machine, and its folder outlives it."""
        from holdfast.launch.local.local_backend import LocalBackend
        from holdfast.launch.local.resource_split import node_resources

        async def never(_run: str) -> bool:
            return False

        return ControllerHooks(
            backend=LocalBackend,
            node_resources=lambda accepted, environ: node_resources(accepted.job, environ),
            controller_host=lambda _folder, host: host,
            had_controller=never,
            node_folder=lambda folder, _accepted: folder,
        )


def accept(wanted: Submission, archives: Path) -> RunSpec:
    """The specification of a run; shipped code is archived in the folder `archives`."""
    job, spec = wanted.job, wanted.spec
    fabric = resolve(job.fabric.name, spec.fabric)
    return RunSpec(
        job=job,
        base=str(wanted.base.absolute()),
        created_at=time.time(),
        code=package_code(job, wanted.base, archives) if spec.code is CodeDelivery.SHIPPED else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        isolation=spec.isolation,
        capacity=spec.capacity,
        target=wanted.target,
        checkpoint_root=spec.checkpoint_root,
        notify=spec.notify,
    )


TARGET: Target = LocalTarget()
