"""The target protocol: what holdfast does with a place to run, and the one table of its kinds."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

import holdfast
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Severity
from holdfast.host.files import read_small
from holdfast.job.target_files import LOCAL, target_file
from holdfast.launch.waiting_controller import ExpectedTarget

if TYPE_CHECKING:
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.backend import Backend
    from holdfast.job.loader import LoadedJob
    from holdfast.job.run_spec import CodeArchive, ResumedRun, RunSpec
    from holdfast.job.scheduler_account import SchedulerAccount
    from holdfast.job.spec import Job
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.local.run_network import RunNetwork
    from holdfast.launch.policy_request import PolicyRequest
    from holdfast.launch.rank_env import NodeResources
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.launch.target_runs import TargetRun, TargetRuns
    from holdfast.run_dir import RunDir


class TargetKind(Struct, frozen=True, kw_only=True):
    """One kind of target, by the modules that are imported on use."""

    module: str
    """The module with its target as TARGET."""
    prestart: str = ""
    """The module whose `prestart` starts, before the command is loaded, what a run's start waits for; if any."""
    connects_early: bool = False
    """Whether `prestart` connects the machines that the target's file names, too."""
    draft: str = ""
    """The module whose `draft_target` writes a target file from what the place shows, if it can be asked."""


ON_NODES = "on its nodes' own disks, each node's part on its own"
"""Where checkpoints are that no folder or store has whole."""

_SUPERVISOR = "holdfast.launch.prestarted_supervisor"

TARGET_KINDS: Mapping[str, TargetKind] = {
    LOCAL: TargetKind(module="holdfast.launch.local.local_target", prestart=_SUPERVISOR),
    "hosts": TargetKind(module="holdfast.launch.hosts.hosts_target", prestart=_SUPERVISOR, connects_early=True),
    "slurm": TargetKind(module="holdfast.launch.slurm.slurm_target", prestart=_SUPERVISOR),
    "kubernetes": TargetKind(
        module="holdfast.launch.kubernetes.kubernetes_target",
        prestart="holdfast.launch.kubernetes.submit.submit_process",
        draft="holdfast.launch.kubernetes.init.target_draft",
    ),
}

_KIND = re.compile(rb"""(?:^|[{,])\s*["']?kind["']?\s*:\s*["']?([\w-]+)""", re.MULTILINE)
"""The kind in a target's file, which is YAML or JSON. A wrong guess costs time, and nothing else."""


class Resumption(Struct, frozen=True, kw_only=True):
    """What a run continues of another one."""

    resumed: ResumedRun
    code: CodeArchive | None
    """The code that its ranks ran last; None if that was the files in place."""
    archives: Path
    """Folder of its archive."""


class Submission(Struct, frozen=True, kw_only=True):
    """A job and the target that it is for."""

    loaded: LoadedJob
    target: str
    """Name of the target."""
    spec: TargetSpec
    base: Path
    """Folder that the job's relative paths start from."""
    tree: str | None = None
    """Id of the run whose objects others apply; None if the target starts the run."""
    resumption: Resumption | None = None
    """What it continues of another run, if it resumes one."""

    @property
    def job(self) -> Job:
        return self.loaded.job

    @property
    def resumed(self) -> ResumedRun | None:
        """The run that it resumes."""
        return self.resumption.resumed if self.resumption else None

    @property
    def has_archive(self) -> bool:
        """Whether its code is the archive of the run that it resumes, so that the files in `base` do not matter."""
        return self.resumption is not None and self.resumption.code is not None

    def job_findings(self) -> tuple[Finding, ...]:
        """The findings that the job has on every target."""
        from holdfast.launch.monarch.monarch_checks import check_orchestrator
        from holdfast.launch.shell_script import launcher_in_script

        own = (*launcher_in_script(self.job, self.base), *check_orchestrator(self.job, self.spec))
        return (*self.loaded.findings, *map(self.loaded.located, own))


def refuse_errors(findings: tuple[Finding, ...]) -> None:
    """Raise HoldfastError if a finding is an error."""
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise HoldfastError(findings, ExitCode.CANNOT_RUN_HERE)


class Rendered(Struct, frozen=True, kw_only=True):
    """Exactly what would be sent to a target, or given to each rank."""

    text: str
    findings: tuple[Finding, ...]
    objects: tuple[dict[str, Any], ...] = ()
    """The same as data, if it is sent to a cluster."""


OrderNodes = Callable[["Job", Mapping[str, str]], tuple[str, ...]]
"""Orders nodes for a job's ranks by the switches above each."""


class MakeBackend(Protocol):
    """Creates a run's backend; nodes of this machine are in `networks`, and find the controller at `url`.

    `order_nodes` is for a target whose nodes are known only once the run has them.
    """

    def __call__(
        self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, order_nodes: OrderNodes
    ) -> Backend: ...


class ControllerHooks(Struct, frozen=True, kw_only=True):
    """What a run's controller needs from its target."""

    backend: MakeBackend
    node_resources: Callable[[RunSpec, Mapping[str, str]], tuple[NodeResources, ...]]
    """What a node may use of its machine."""
    controller_host: Callable[[RunDir, str], str]
    """The host name by which nodes reach ports on the controller's machine."""
    had_controller: Callable[[str], Awaitable[bool]]
    """Whether a run had a controller before, though its folder is empty."""
    node_folder: Callable[[RunDir, RunSpec], RunDir]
    """The run's folder as nodes see it."""
    others_may_listen: bool = False
    """Whether agents connect to a port that another user could listen on, so they verify the controller by TLS."""
    relays_quorum: bool = False
    """Whether ranks reach the quorum service of replicas through their agent and the controller's port."""


class Target(Protocol):
    """A place to run; the local one is the specification. All but `controller_hooks` run on the user's machine."""

    can_update_code: bool
    """Whether a run's code can be replaced while it runs."""

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """All findings about a job on this target, before anything starts; without a request over the network."""
        ...

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """The same and what the target itself lacks; queries it but creates nothing there.

        `for_any_job` leaves out what concerns only this job. Raises HoldfastError if the target does not answer.
        """
        ...

    def render(self, wanted: Submission) -> Rendered:
        """Exactly what would be sent, or given to each rank; raises HoldfastError if that is impossible."""
        ...

    def start(self, wanted: Submission) -> RunDir:
        """Start a run of a job without errors; returns as soon as its controller or its target has accepted it."""
        ...

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """Module and options of the process on this machine that supervises a run, or mirrors it from elsewhere."""
        ...

    def start_controller(self, run: RunDir, accepted: RunSpec) -> None:
        """Start what keeps a run's controller running: `supervisor` here, or what the target has for it.

        Raises HoldfastError if that is impossible.
        """
        ...

    def keeps_alive(self, run: RunDir) -> bool:
        """Whether the target itself runs a run's controller, or will, though nothing holds the lock in its folder."""
        ...

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None] | None:
        """What ends a run from here when its controller does not answer; None if nothing can."""
        ...

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """What keeps a run's nodes, or this user, away; None if nothing does."""
        ...

    def scheduler_account(self, run: RunDir) -> SchedulerAccount | None:
        """What the target's scheduler accounted for a run, or why that is not known; None if it has no scheduler."""
        ...

    def base_here(self, accepted: RunSpec) -> Path:
        """Folder on this machine from which a run's relative paths start."""
        ...

    def unreached_checkpoints(self, accepted: RunSpec, target: str) -> str:
        """Where a run's checkpoint files are that a run on `target` does not reach; empty if it may."""
        ...

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The machines of the target of this name: free, used, and those that runs avoid."""
        ...

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """End the quarantine of a machine; raises HoldfastError if it has none."""
        ...

    def find_runs(self, spec: TargetSpec) -> TargetRuns | None:
        """The runs that the target shows, whichever machine started them; None if each has a folder on this machine."""
        ...

    def adopt(self, spec: TargetSpec, run: str) -> RunDir:
        """Create the folder of a run that another machine started, for `supervisor` to mirror it.

        Raises HoldfastError if the target does not have the run, or does not show this user all that is needed.
        """
        ...

    def delete_objects(self, spec: TargetSpec, run: TargetRun) -> None:
        """Delete what represents a run that is over, with all that it owns; raises HoldfastError if refused."""
        ...

    def policies(self, name: str, spec: TargetSpec, request: PolicyRequest) -> Rendered:
        """Objects by which the target itself refuses runs that are not set up as requested.

        Raises HoldfastError if the target cannot refuse.
        """
        ...

    def manifests(self, name: str, spec: TargetSpec, objects: Sequence[Mapping[str, Any]]) -> Rendered:
        """Objects as text to apply there, in the target's namespace; raises HoldfastError if it is no cluster."""
        ...

    def controller_hooks(self) -> ControllerHooks:
        """The target's part in the controller's process, imported only there."""
        ...


def open_target(kind: str, *, where: Path | None = None) -> Target:
    """The target of a kind, which the file `where` names; raises HoldfastError if this version does not know it."""
    if kind not in TARGET_KINDS:
        raise failure(
            "unknown-target-kind",
            f"there is no kind of target `{kind}` in holdfast {holdfast.__version__}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(where or ""),
            evidence=(f"known kinds: {', '.join(sorted(TARGET_KINDS))}",),
            remedy="Use the version of holdfast that started the run.",
        )
    return import_module(TARGET_KINDS[kind].module).TARGET


def target_of(run: RunDir) -> Target:
    """The target of a run; raises HoldfastError if its job file names none and it has no nodes on this machine."""
    from holdfast.job.run_spec import RunSpec  # not needed for `prestart`, which comes first

    try:
        return open_target(RunSpec.read(run.job).target_kind, where=run.job)
    except HoldfastError:
        if not os.path.lexists(run.nodes):
            raise
        return open_target(LOCAL)


def is_alive(run: RunDir) -> bool:
    """Whether a run has a supervisor or a controller, or gets one, wherever that is."""
    if run.alive():
        return True
    try:
        return target_of(run).keeps_alive(run)
    except HoldfastError:
        return False


def prestart(name: str, *, start: Path, environ: Mapping[str, str]) -> None:
    """Start early what the start of a run on this target waits for, before its file has been validated."""
    path = target_file(name, start, environ)
    kind = TARGET_KINDS.get(kind_of_file(path) if path else LOCAL)
    if kind is None or not kind.prestart or (path is None and name != LOCAL):
        return
    starter = import_module(kind.prestart)
    if path is not None and kind.connects_early:
        starter.prestart(ExpectedTarget(target=path, base=start.absolute()))
    else:
        starter.prestart()


def kind_of_file(path: Path) -> str:
    """The kind that a target's file seems to name, before it has been validated; empty if it names none."""
    with contextlib.suppress(OSError):
        if found := _KIND.search(read_small(path)):
            return found[1].decode()
    return ""
