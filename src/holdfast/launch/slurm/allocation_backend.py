"""Runs nodes in the Slurm allocation that the controller itself is in; Slurm starts it again when it ends."""

from __future__ import annotations

import os

from holdfast.host.files import atomic_write
from holdfast.job.run_spec import RunSpec
from holdfast.launch.local.run_network import RunNetwork
from holdfast.launch.slurm.own_job import OwnJob
from holdfast.launch.slurm.slurm_backend import ENDING_NAME, JOB_NAME, SlurmBackend
from holdfast.launch.target import OrderNodes
from holdfast.run_dir import RunDir

START_NAME = "allocation.start"
"""File with the start of the job whose nodes the run has, for a later controller."""


class AllocationBackend(SlurmBackend):
    """One job for the whole run, which is requeued where another controller would ask for another one."""

    def __init__(
        self, *, folder: RunDir, accepted: RunSpec, networks: RunNetwork, url: str, order_nodes: OrderNodes
    ) -> None:
        super().__init__(folder=folder, accepted=accepted, networks=networks, url=url, order_nodes=order_nodes)
        self._own = OwnJob.of(os.environ)
        if self._recorded(START_NAME) != self._own.start:
            self._on_job_end(self._number())
            (folder.path / ENDING_NAME).unlink(missing_ok=True)  # it names the same job
            atomic_write(folder.path / JOB_NAME, self._own.number.encode())
            atomic_write(folder.path / START_NAME, self._own.start.encode())

    async def _submit_job(self, port: int) -> None:
        """Nothing: Slurm ends this controller with the job, and starts another one with the next."""

    def _give_back(self, number: str) -> None:
        """Have Slurm start the job again, with other nodes."""
        self._own.continue_elsewhere()

    def _end_job(self, number: str) -> None:
        """Nothing: the job ends with its batch script, which waits for this process."""
