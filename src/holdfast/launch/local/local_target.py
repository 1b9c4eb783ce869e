"""The local target: nodes are processes on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.job.spec import Orchestrator
from holdfast.job.targets import CodeDelivery
from holdfast.launch.code.package_code import code_findings
from holdfast.launch.resumed_checkpoint import checkpoint_here
from holdfast.launch.supervised_target import SupervisedTarget, accepted_spec, had_no_controller
from holdfast.launch.target import ControllerHooks, Submission, Target

if TYPE_CHECKING:
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.backend import Backend
    from holdfast.job.run_spec import RunSpec
    from holdfast.launch.local.run_network import RunNetwork
    from holdfast.run_dir import RunDir


class LocalTarget(SupervisedTarget):
    """Runs jobs on this machine; the specification of every other target."""

    unused_code = "not-used-locally"

    def accept(self, wanted: Submission, archives: Path) -> RunSpec:
        """The run with the isolation and the simulated machines of the target."""
        spec = wanted.spec
        ship = spec.code is CodeDelivery.SHIPPED or wanted.has_archive
        return accepted_spec(
            wanted,
            archives,
            ship_code=ship,
            isolation=spec.isolation,
            capacity=spec.capacity,
            interfaces=spec.interfaces,
        )

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """Problems of the job on this machine."""
        from holdfast.launch.local.local_preflight import check_locally

        job, spec = wanted.job, wanted.spec
        here = check_locally(
            job, spec, base=wanted.base, environ=os.environ, target=wanted.target, archived=wanted.has_archive
        )
        code = code_findings(wanted) if spec.code is CodeDelivery.SHIPPED else ()
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *code)))

    def check_there(self, wanted: Submission) -> tuple[Finding, ...]:
        """Whether a resumed checkpoint is here: `check` has examined this machine otherwise."""
        return checkpoint_here(wanted)

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller, and that starts Monarch's client meanwhile."""
        is_monarch = accepted.job.orchestrator is Orchestrator.MONARCH
        own = ("--prestart", "holdfast.launch.monarch.client_process") if is_monarch else ()
        return (*super().supervisor(accepted), *own)

    def unreached_checkpoints(self, accepted: RunSpec, target: str) -> str:
        """Other targets look for the folder on their own machines."""
        return ""

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """All processes of the run are on this machine."""
        from holdfast.launch.local.force_cancel import force_cancel

        return force_cancel

    def controller_hooks(self) -> ControllerHooks:
        """The controller is on the nodes' machine, and its folder outlives it."""
        from holdfast.launch.local.resource_split import node_resources

        return ControllerHooks(
            backend=_make_backend,
            node_resources=lambda accepted, environ: node_resources(accepted.job, environ),
            controller_host=lambda _folder, host: host,
            had_controller=had_no_controller,
            node_folder=lambda folder, _accepted: folder,
        )


def _make_backend(*, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, **_: object) -> Backend:
    """The backend of a run's orchestrator."""
    if accepted.job.orchestrator is Orchestrator.MONARCH:
        from holdfast.launch.monarch.monarch_backend import MonarchBackend as Chosen
    else:
        from holdfast.launch.local.local_backend import LocalBackend as Chosen

    return Chosen(folder=folder, accepted=accepted, networks=networks, url=url)


TARGET: Target = LocalTarget()
