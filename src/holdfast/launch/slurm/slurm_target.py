"""The target `slurm`: nodes of an allocation, and the controller on the first of them, or where the run was started."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.job.run_spec import RunSpec
from holdfast.launch.code.package_code import code_findings
from holdfast.launch.resumed_checkpoint import checkpoint_here
from holdfast.launch.slurm.batch_script import Meeting, batch_script, controller_script, node_folder, node_python
from holdfast.launch.supervised_target import SupervisedTarget, accepted_spec, had_no_controller
from holdfast.launch.target import ControllerHooks, OrderNodes, Submission, Target
from holdfast.run_dir import RunDir, runs_root

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.events import CancelRequested
    from holdfast.job.backend import Backend
    from holdfast.job.scheduler_account import SchedulerAccount
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.local.run_network import RunNetwork
    from holdfast.launch.target_machines import TargetMachines


class SlurmTarget(SupervisedTarget):
    """Runs jobs in allocations of Slurm; nodes connect to the controller, and are then like hosts."""

    unused_code = "not-used-on-hosts"

    def accept(self, wanted: Submission, archives: Path) -> RunSpec:
        """The run with what it asks Slurm for; its code is always sent."""
        return accepted_spec(wanted, archives, ship_code=True, slurm=wanted.spec.slurm)

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """What can be told without asking Slurm."""
        from holdfast.launch.hosts.hosts_checks import check_without_cluster

        here = check_without_cluster(wanted.job, wanted.spec, base=wanted.base, environ=os.environ)
        found = (*_folder_findings(wanted.spec.slurm.folder), *here, *code_findings(wanted))
        return (*wanted.job_findings(), *map(wanted.loaded.located, found))

    def check_there(self, wanted: Submission) -> tuple[Finding, ...]:
        """Whether Slurm would accept the run, and a resumed checkpoint is on this machine, as it should be on nodes."""
        from holdfast.launch.slurm.slurm_commands import refusal

        with tempfile.TemporaryDirectory() as scratch:
            accepted = self.accept(wanted, Path(scratch))
        return (*refusal(_script(accepted, "check")), *checkpoint_here(wanted))

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The cluster's nodes, those that this user's runs use, and those that they avoid."""
        from holdfast.launch.file_machine_list import read_machines
        from holdfast.launch.slurm.slurm_commands import node_names

        return read_machines(name, spec, node_names())

    def release_machine(self, name: str, spec: TargetSpec, machine: str) -> tuple[Finding, ...]:
        """Undo the drain of a run, and change the target's quarantine file."""
        from holdfast.launch.slurm.slurm_commands import undrain

        undrain(machine)  # first: whoever may not resume the node keeps its quarantine
        return super().release_machine(name, spec, machine)

    def scheduler_account(self, run: RunDir) -> SchedulerAccount:
        """What sacct says of the run's allocations."""
        from holdfast.launch.slurm.sacct import accounted

        return accounted(run.run_id, RunSpec.read(run.job).created_at)

    def rendered(self, accepted: RunSpec) -> str:
        """The batch script, and every rank's environment and command."""
        return f"{_script(accepted, 'RUN_ID')}\n# then, on the nodes:\n\n{super().rendered(accepted)}"

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller here, which nodes reach over the network."""
        module, *options = super().supervisor(accepted)
        return (module, *options, "--listen", _own_address(accepted))

    def start_controller(self, run: RunDir, accepted: RunSpec) -> None:
        """Start the supervisor here, or submit the batch script that does on a node."""
        if not accepted.slurm.in_allocation:
            super().start_controller(run, accepted)
            return
        from holdfast.launch.slurm.allocation_run import submit_run

        submit_run(run, accepted)

    def keeps_alive(self, run: RunDir) -> bool:
        """Whether the controller is in a job that Slurm runs or will run."""
        from holdfast.launch.slurm.allocation_run import is_live

        # A run that is over has no secrets, and Slurm need not be asked.
        return run.secrets.exists() and RunSpec.read(run.job).slurm.in_allocation and is_live(run)

    def pending_reason(self, run: RunDir) -> HoldfastError | None:
        """What Slurm says of the job that the controller is in; a controller here logs it."""
        from holdfast.launch.slurm.allocation_run import no_controller

        return no_controller(run) if RunSpec.read(run.job).slurm.in_allocation else None

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """Ends the controller here, and the allocation."""
        from holdfast.launch.slurm.force_cancel_slurm import force_cancel

        return force_cancel

    def controller_hooks(self) -> ControllerHooks:
        """Nodes connect to the controller."""
        from holdfast.launch.hosts.remote_nodes import remote_resources, run_dir_on_nodes

        return ControllerHooks(
            backend=_make_backend,
            node_resources=lambda accepted, _environ: remote_resources(accepted.job, node_python(accepted)),
            controller_host=lambda _folder, host: host,
            had_controller=had_no_controller,
            node_folder=lambda folder, accepted: run_dir_on_nodes(node_folder(accepted), folder.run_id),
            others_may_listen=True,
            relays_quorum=True,
        )


def _folder_findings(folder: str | None) -> Iterator[Finding]:
    """Nodes delete their files of a run at its end, and those of the controller are in `HOLDFAST_HOME`."""
    home = runs_root().parent
    if folder is not None and Path(folder).resolve() == home.resolve():
        yield Finding(
            code="bad-path",
            what=f"nodes would delete the files of runs in {home}, where the controller has its own",
            where="slurm.folder",
            remedy="Name a folder of each node, or leave it out: it is `/var/tmp/holdfast-USER` then.",
        )


def _script(accepted: RunSpec, run: str) -> str:
    """The batch script of a run that has no folder yet."""
    if accepted.slurm.in_allocation:
        return controller_script(accepted, RunDir(runs_root() / run))
    meeting = Meeting(address="CONTROLLER_ADDRESS", port="CONTROLLER_PORT", key="HOST_KEY", ca="CA")
    return batch_script(accepted, run, meeting)


def _make_backend(
    *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, order_nodes: OrderNodes
) -> Backend:
    """The run's backend, by where its controller is."""
    from holdfast.launch.slurm.allocation_backend import AllocationBackend
    from holdfast.launch.slurm.slurm_backend import SlurmBackend

    make = AllocationBackend if accepted.slurm.in_allocation else SlurmBackend
    return make(folder=folder, accepted=accepted, networks=networks, url=url, order_nodes=order_nodes)


def _own_address(accepted: RunSpec) -> str:
    """Where nodes reach this machine; raises HoldfastError if only this machine itself would."""
    try:
        address = accepted.slurm.address or socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise _no_address(str(error)) from error
    if address.startswith("127.") and accepted.slurm.address is None:
        raise _no_address(f"its name {socket.gethostname()} means {address}")
    return address


def _no_address(why: str) -> HoldfastError:
    return failure(
        "no-address",
        "it is not known how the nodes reach this machine",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where="slurm.address",
        evidence=(why,),
        remedy="Set `slurm.address` in the target to this machine's address on the cluster's network.",
    )


TARGET: Target = SlurmTarget()
