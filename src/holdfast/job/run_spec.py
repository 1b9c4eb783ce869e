"""Owns what a run was started with: the job as accepted, and the place it was accepted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import holdfast
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import RunCreated
from holdfast.findings import Owner
from holdfast.host.files import read_object, read_small
from holdfast.job.isolation import Isolation
from holdfast.job.spec import Job, Model
from holdfast.job.targets import LOCAL, Workload


def corrupt_file_error(path: Path, error: Exception) -> HoldfastError:
    """A file of a run's folder is not what holdfast wrote there, so that nothing can be done with the run."""
    return failure(
        "run-file-corrupt",
        f"{path.name} of {path.parent.name} is not what holdfast wrote there",
        exit_code=ExitCode.STORAGE_FAILED,
        where=str(path),
        evidence=(" ".join(str(error).split())[:500],),
        remedy=f"Put it back as it was, or end the run: `holdfast cancel --force {path.parent.name}`.",
        owner=Owner.CLUSTER,
    )


@dataclass(frozen=True, kw_only=True)
class RunSecrets:
    """What a run's folder keeps for controllers that are started again, and for nobody else."""

    environ: Mapping[str, str]
    """Of whoever started the run."""
    secrets: Mapping[str, str]
    """The job's, by name."""

    @classmethod
    def read(cls, path: Path) -> RunSecrets:
        """What a run's folder says; raises HoldfastError where that is not what was written."""
        try:
            found = read_object(path)
        except OSError as error:
            raise corrupt_file_error(path, error) from error
        kept: dict[str, dict[str, str]] = {}
        for name in ("environ", "secrets"):
            values = found.get(name)
            if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] - it is anybody's JSON
                raise corrupt_file_error(path, ValueError(f"{name} is missing, or not words by name"))
            kept[name] = cast("dict[str, str]", values)
        return cls(environ=kept["environ"], secrets=kept["secrets"])


class CodeArchive(Model):
    """The code that a run was started with, as an archive in its folder."""

    digest: str
    """SHA-256 of the archive, in hexadecimal."""
    bytes: int
    files: int
    cwd: str
    """Where ranks run, relative to the folder it is unpacked in."""


class RunSpec(Model):
    """Written once into a run's folder; everything a controller needs to (re)build the run, but for secrets."""

    job: Job
    base: str
    """Absolute folder that the job's relative paths start from."""
    created_at: float
    """Unix seconds at which the run was asked for."""
    code: CodeArchive | None = None
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
    durable_controller_disk: bool = True
    """Whether what a controller writes outlives its machine; else its nodes keep copies."""
    isolation: Isolation = Isolation.PROCESS
    """How local nodes are kept apart."""
    target: str = LOCAL
    """Name of the target the run was started with."""
    checkpoint_root: str | None = None
    """The target's folder for checkpoints of jobs that name none; each run has one of its own in it."""
    capacity: int | None = None
    """How many nodes the place has machines for; none means as many as the job asks for."""

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """What a run's folder says; raises HoldfastError where that is not what was written."""
        try:
            return cls.model_validate_json(read_small(path))
        except (OSError, ValueError, RecursionError) as error:
            raise corrupt_file_error(path, error) from error

    def created_event(self, run: str) -> RunCreated:
        """The first event of its run's log."""
        job = self.job.model_dump(mode="json", exclude_defaults=True)
        return RunCreated(at=self.created_at, run=run, job=job, version=holdfast.__version__)
