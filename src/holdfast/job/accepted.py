"""Owns what a run was started with: the job as accepted, and the place it was accepted for."""

from __future__ import annotations

from pathlib import Path

import holdfast
from holdfast.events import RunCreated
from holdfast.job.isolation import Isolation
from holdfast.job.profile import LOCAL, Workload
from holdfast.job.spec import Job, Model


class Shipped(Model):
    """The code that a run was started with, as an archive in its folder."""

    digest: str
    """SHA-256 of the archive, in hexadecimal."""
    bytes: int
    files: int
    cwd: str
    """Where ranks run, relative to the folder it is unpacked in."""


class Accepted(Model):
    """Written once into a run's folder; everything a controller needs to (re)build the run, but for secrets."""

    job: Job
    base: str
    """Absolute folder that the job's relative paths start from."""
    created_at: float
    """Unix seconds at which the run was asked for."""
    code: Shipped | None = None
    """None where ranks run in the working directory itself."""
    fabric: str
    """The fabric's name, `auto` resolved."""
    fabric_env: dict[str, str] = {}
    """What the fabric sets for every rank."""
    backend: str = LOCAL
    """What makes the nodes."""
    workload: Workload = Workload.JOBSET
    """On Kubernetes: the kind of object that the run is."""
    agent: bool = True
    """Whether holdfast's agents start the ranks; without them the command is the cluster's to start."""
    lasting: bool = True
    """Whether what a controller writes outlives its machine; else its nodes keep copies."""
    isolation: Isolation = Isolation.PROCESS
    """How local nodes are kept apart."""
    profile: str = LOCAL
    """Name of the profile the run was started with."""
    storage: str | None = None
    """The profile's folder for checkpoints of jobs that name none; each run has one of its own in it."""
    capacity: int | None = None
    """How many nodes the place has machines for; none means as many as the job asks for."""

    @classmethod
    def read(cls, path: Path) -> Accepted:
        """What a run's folder says."""
        return cls.model_validate_json(path.read_text())

    def created(self, run: str) -> RunCreated:
        """The first event of its run's log."""
        job = self.job.model_dump(mode="json", exclude_defaults=True)
        return RunCreated(at=self.created_at, run=run, job=job, version=holdfast.__version__)
