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
from holdfast.launch.code.package_code import list_code
from holdfast.launch.hosts.hosts_target import HostsTarget, accept, not_a_cluster
from holdfast.launch.slurm.batch_script import Meeting, batch_script, node_folder
from holdfast.launch.target import ControllerHooks, Rendered, Submission, Target
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.errors import HoldfastError
    from holdfast.events import CancelRequested
    from holdfast.findings import Finding
    from holdfast.job.targets import TargetSpec
    from holdfast.launch.rank_env import NodeResources
    from holdfast.launch.target_machines import TargetMachines


class SlurmTarget(HostsTarget):
    """Runs jobs in allocations of Slurm; nodes connect to the controller, and are then like hosts."""

    def check(self, wanted: Submission) -> tuple[Finding, ...]:
        """What can be told without asking Slurm."""
        from holdfast.launch.slurm.slurm_checks import check_job

        here = check_job(wanted.job, wanted.spec, base=wanted.base, environ=os.environ)
        code = list_code(wanted.job, wanted.base).findings
        return (*wanted.job_findings(), *map(wanted.loaded.located, (*here, *code)))

    def check_site(self, wanted: Submission, *, for_any_job: bool) -> tuple[Finding, ...]:
        """The same, and whether Slurm would accept the run."""
        from holdfast.launch.slurm.slurm_checks import check_slurm

        with tempfile.TemporaryDirectory() as scratch:
            there = tuple(check_slurm(accept(wanted, Path(scratch))))
        kept = (each for each in self.check(wanted) if not (for_any_job and each.code == "not-used-on-hosts"))
        return (*kept, *there)

    def render(self, wanted: Submission) -> Rendered:
        """The batch script, and every rank's environment and command."""
        if wanted.tree is not None:
            raise not_a_cluster(wanted.target, "a tree is applied to a cluster", "render --on TARGET --tree RUN")
        from holdfast.launch.local.rank_script import render

        with tempfile.TemporaryDirectory() as scratch:
            accepted = accept(wanted, Path(scratch))
            ranks = render(accepted)
        meeting = Meeting(address="CONTROLLER_ADDRESS", port="CONTROLLER_PORT", key="HOST_KEY", ca="CA")
        text = f"{batch_script(accepted, 'RUN_ID', meeting)}\n# then, on the nodes:\n\n{ranks}"
        return Rendered(text=text, findings=wanted.job_findings())

    def supervisor(self, accepted: RunSpec) -> tuple[str, ...]:
        """The process that restarts the controller here, which nodes reach over the network."""
        module, *options = super().supervisor(accepted)
        return (module, *options, "--listen", _own_address(accepted))

    def force_cancel(self) -> Callable[[RunDir, CancelRequested], None]:
        """Ends the controller here, and the allocation."""
        from holdfast.launch.slurm.force_cancel_slurm import force_cancel

        return force_cancel

    def machines(self, name: str, spec: TargetSpec) -> TargetMachines:
        """The nodes that this user's runs have; Slurm knows all others."""
        from holdfast.launch.file_machine_list import read_machines

        return read_machines(name, spec)

    def controller_hooks(self) -> ControllerHooks:
        """The controller is where the run was started; nodes connect to it."""
        from holdfast.launch.slurm.slurm_backend import SlurmBackend

        async def never(_run: str) -> bool:
            return False

        return ControllerHooks(
            backend=SlurmBackend,
            node_resources=lambda accepted, _environ: _resources(accepted),
            controller_host=lambda _folder, host: host,
            had_controller=never,
            others_may_listen=True,
            node_folder=lambda folder, accepted: RunDir(Path(node_folder(accepted)) / "runs" / folder.run_id),
        )


def _resources(accepted: RunSpec) -> tuple[NodeResources, ...]:
    from holdfast.launch.rank_env import NodeResources

    job = accepted.job
    node = NodeResources(cpus=job.resources.cpu or job.local_world_size, python=accepted.slurm.python or "python3")
    return (node,) * job.node_slots


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
