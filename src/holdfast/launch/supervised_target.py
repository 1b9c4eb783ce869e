"""What targets share whose controller is on the machine that starts the run, wherever the nodes are."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import ExitCode, failure
from holdfast.fabric.catalog import resolve
from holdfast.job.run_spec import RunSpec
from holdfast.launch.code.package_code import submitted_code
from holdfast.launch.new_run import new_run_dir, write_inputs
from holdfast.launch.secret_values import read_notify_secrets, read_secrets
from holdfast.launch.start_supervisor import start_supervisor
from holdfast.launch.target import ON_NODES, Rendered, Submission, Target
from holdfast.launch.target_runs import run_not_on_target

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.findings import Finding
    from holdfast.job.scheduler_account import SchedulerAccount
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.policy_request import PolicyRequest
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.launch.target_runs import TargetRun
    from holdfast.run_dir import RunDir

RENDER = "Name a Kubernetes target: `holdfast render --on TARGET --tree RUN`."
POLICY = "Name a Kubernetes target: `holdfast policy --on TARGET`."
OBSERVE = "Write files with --to FOLDER, or name a Kubernetes target with --on TARGET."


class SupervisedTarget(Target, Protocol):
    """Starts a supervisor here, which starts the controller. Imports on use what only some verbs need."""

    can_update_code = True
    unused_code: str
    """Code of the findings about fields that only other targets use."""

    def accept(self, wanted: Submission, archives: Path) -> RunSpec:
        """The specification of a run; shipped code is archived in the folder `archives`."""
        ...

    def check_there(self, wanted: Submission) -> tuple[Finding, ...]:
        """What the machines of the target, or its scheduler, say."""
        ...

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """Both, without what only a minimal job's placeholders cause."""
        here = (each for each in self.check(wanted) if not (for_any_job and each.code == self.unused_code))
        return (*here, *self.check_there(wanted))

    def render(self, wanted: Submission) -> Rendered:
        """Every rank's environment and command."""
        if wanted.tree is not None:
            raise _not_a_cluster(wanted.target, "a tree is applied to a cluster", RENDER)
        with tempfile.TemporaryDirectory() as scratch:
            text = self.rendered(self.accept(wanted, Path(scratch)))
        return Rendered(text=text, findings=wanted.job_findings())

    def rendered(self, accepted: RunSpec) -> str:
        """What a run is started with, as text."""
        from holdfast.launch.local.rank_script import render  # a fifth of all imports

        return render(accepted)

    def start(self, wanted: Submission) -> RunDir:
        """Start a supervisor, which starts the controller."""
        with new_run_dir(wanted.job.name) as folder:
            accepted = self.accept(wanted, folder.code)
            base = wanted.base.absolute()
            notify = read_notify_secrets(accepted.notify, base, os.environ)
            write_inputs(folder, accepted, read_secrets(wanted.job, base, os.environ), notify)
            self.start_controller(folder, accepted)
        return folder

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller."""
        interfaces = (f"--interface={name}={mbit}" for name, mbit in accepted.interfaces.items())
        return ("holdfast.launch.local.local_supervisor", "--isolation", accepted.isolation, *interfaces)

    def start_controller(self, run: RunDir, accepted: RunSpec) -> None:
        """Start the supervisor here."""
        start_supervisor(run, accepted)

    def keeps_alive(self, run: RunDir) -> bool:
        """No: the run has only its supervisor."""
        return False

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """Nothing: the target reports missing machines in the run's log."""

    def scheduler_account(self, run: RunDir) -> SchedulerAccount | None:
        """None: no scheduler accounts for the machines."""

    def base_here(self, accepted: RunSpec) -> Path:
        """Where the run was started."""
        return Path(accepted.base)

    def unreached_checkpoints(self, accepted: RunSpec, target: str) -> str:
        """Without a folder that machines share, each has a part."""
        shared = accepted.job.checkpoint.path or accepted.checkpoint_root
        return "" if shared else ON_NODES

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The machines that the target names, and those that this user's runs use."""
        from holdfast.launch.file_machine_list import read_machines

        return read_machines(name, spec)

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """Change the target's quarantine file."""
        from holdfast.launch.file_machine_list import release_machine

        return release_machine(name, machine)

    def find_runs(self, spec: TargetSpec) -> None:
        """Nothing: each run has a folder on this machine."""

    def adopt(self, spec: TargetSpec, run: str) -> RunDir:
        """Impossible: a run that has no folder here was started elsewhere."""
        raise run_not_on_target(run, spec.kind)

    def delete_objects(self, spec: TargetSpec, run: TargetRun) -> None:
        """Nothing: a run has only its folder."""

    def policies(self, name: str, spec: TargetSpec, request: PolicyRequest) -> Rendered:
        """Raises HoldfastError: nothing there decides what may run."""
        raise _not_a_cluster(name, "nothing there decides what may run", POLICY)

    def manifests(self, name: str, spec: TargetSpec, objects: Sequence[Mapping[str, Any]]) -> Rendered:
        """Raises HoldfastError: objects are for clusters."""
        raise _not_a_cluster(name, "no objects can be applied to it", OBSERVE)


def accepted_spec(wanted: Submission, archives: Path, *, ship_code: bool, **own: Any) -> RunSpec:
    """The specification of a run; `own` are the fields of its kind of target."""
    job, spec = wanted.job, wanted.spec
    fabric = resolve(job.fabric.name, spec.fabric)
    return RunSpec(
        job=job,
        base=str(wanted.base.absolute()),
        created_at=time.time(),
        code=submitted_code(wanted, archives) if ship_code else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        target_kind=spec.kind,
        target=wanted.target,
        checkpoint_root=spec.checkpoint_root,
        notify=spec.notify,
        resumed=wanted.resumed,
        **own,
    )


async def had_no_controller(_run: str) -> bool:
    """Whether a run had a controller before, though its folder is empty: its folder outlives controllers here."""
    return False


def _not_a_cluster(target: str, why: str, remedy: str) -> HoldfastError:
    return failure(
        "not-supported",
        f"target `{target}` is no Kubernetes cluster: {why}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        remedy=remedy,
    )
