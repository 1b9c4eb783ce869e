"""The Slurm job that a process of a run is in: its number, and what has Slurm start it again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec import Struct

from holdfast.errors import HoldfastError
from holdfast.launch.slurm import slurm_commands

log = logging.getLogger("holdfast.slurm")


class OwnJob(Struct, frozen=True, kw_only=True):
    """A job, seen from within."""

    number: str
    restarts: int
    """How often Slurm had started it again by now."""
    node: str
    """The node of this process."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> OwnJob:
        """The job that an environment belongs to; raises KeyError outside of one."""
        restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(number=environ["SLURM_JOB_ID"], restarts=restarts, node=environ["SLURMD_NODENAME"])

    @property
    def start(self) -> str:
        """Tells its starts apart: a job that is requeued keeps its number."""
        return f"{self.number}.{self.restarts}"

    def continue_elsewhere(self) -> None:
        """Have Slurm start it again, unless somebody cancelled it, or Slurm has done so or does so already."""
        try:
            job = slurm_commands.show(self.number)
            if job is not None and job.is_cut_short and job.restarts == self.restarts:
                slurm_commands.requeue(self.number)
                log.warning("Slurm job %s is requeued", self.number)
        except HoldfastError as error:
            log.warning("Slurm job %s is not requeued: %s", self.number, error)

    def continue_without_batch_host(self) -> None:
        """Have Slurm start it again if it runs without the node of its batch script.

        Slurm itself does so only if that was its last node: with `--no-kill` it keeps the others.
        """
        try:
            job = slurm_commands.show(self.number)
            if job is None or job.state != "RUNNING" or job.batch_host in slurm_commands.expand(job.node_list):
                return
        except HoldfastError as error:
            log.warning("%s", error)
            return
        self.continue_elsewhere()
