"""The target `slurm`: nodes of an allocation; the controller runs where the run was started, such as a login node."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import ExitCode, failure
from holdfast.job.run_spec import RunSpec
from holdfast.launch.code.package_code import code_findings
from holdfast.launch.resumed_checkpoint import checkpoint_here
from holdfast.launch.slurm.batch_script import Meeting, batch_script, node_folder, node_python
from holdfast.launch.supervised_target import SupervisedTarget, accepted_spec, had_no_controller
from holdfast.launch.target import ControllerHooks, Submission, Target

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.scheduler_account import SchedulerAccount
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.run_dir import RunDir


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
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *code_findings(wanted))))

    def check_there(self, wanted: Submission) -> tuple[Finding, ...]:
        """Whether Slurm would accept the run, and a resumed checkpoint is on this machine, as it should be on nodes."""
        from holdfast.launch.slurm.slurm_commands import refusal

        with tempfile.TemporaryDirectory() as scratch:
            accepted = self.accept(wanted, Path(scratch))
        script = batch_script(accepted, "check", Meeting(address="127.0.0.1", port="1", key="", ca=""))
        return (*refusal(script), *checkpoint_here(wanted))

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
        meeting = Meeting(address="CONTROLLER_ADDRESS", port="CONTROLLER_PORT", key="HOST_KEY", ca="CA")
        script = batch_script(accepted, "RUN_ID", meeting)
        return f"{script}\n# then, on the nodes:\n\n{super().rendered(accepted)}"

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller here, which nodes reach over the network."""
        module, *options = super().supervisor(accepted)
        return (module, *options, "--listen", _own_address(accepted))

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """Ends the controller here, and the allocation."""
        from holdfast.launch.slurm.force_cancel_slurm import force_cancel

        return force_cancel

    def controller_hooks(self) -> ControllerHooks:
        """The controller is where the run was started; nodes connect to it."""
        from holdfast.launch.hosts.linked_hosts import remote_resources, run_dir_on_nodes
        from holdfast.launch.slurm.slurm_backend import SlurmBackend

        return ControllerHooks(
            backend=SlurmBackend,
            node_resources=lambda accepted, _environ: remote_resources(accepted.job, node_python(accepted)),
            controller_host=lambda _folder, host: host,
            had_controller=had_no_controller,
            node_folder=lambda folder, accepted: run_dir_on_nodes(node_folder(accepted), folder.run_id),
            others_may_listen=True,
            relays_quorum=True,
        )


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
