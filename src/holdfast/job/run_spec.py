"""The resolved specification of a run: the job and the target it was accepted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct, field
from pydantic import ValidationError

import holdfast
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import RunCreated
from holdfast.findings import Owner
from holdfast.host.files import read_object, read_small
from holdfast.job.isolation import Isolation
from holdfast.job.notify import Notification
from holdfast.job.spec import Job, Model
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import SlurmSettings, SshSettings, Workload


def corrupt_file_error(path: Path, error: Exception) -> HoldfastError:
    """The error for a corrupt file in a run's folder, which makes the run unusable."""
    return failure(
        "run-file-corrupt",
        f"{path.name} of {path.parent.name} is not what holdfast wrote there",
        exit_code=ExitCode.STORAGE_FAILED,
        where=str(path),
        evidence=(" ".join(str(error).split())[:500],),
        remedy=f"Put it back as it was, or end the run: `holdfast cancel --force {path.parent.name}`.",
        owner=Owner.CLUSTER,
    )


def _of_later_version(path: Path, fields: Sequence[str]) -> HoldfastError:
    """The error for a run that uses what only later versions have; fields with their default value are not stored."""
    return failure(
        "run-of-later-version",
        f"{path.parent.name} uses what this holdfast ({holdfast.__version__}) does not have: {', '.join(fields)}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=str(path),
        remedy="Use the version of holdfast that started the run; on Kubernetes set the controller's image back.",
    )


class RunSecrets(Struct, frozen=True, kw_only=True):
    """Secrets and environment in a run's folder, for restarted controllers only."""

    environ: Mapping[str, str]
    """Environment of the user who started the run."""
    secrets: Mapping[str, str]
    """The job's secrets, by name."""
    notify: Mapping[str, str] = field(default_factory=dict[str, str])
    """Those of the target's `notify`, by place; no rank gets them."""

    @classmethod
    def read(cls, path: Path) -> RunSecrets:
        """Read it from a run's folder; raises HoldfastError if the file is corrupt."""
        try:
            found = read_object(path)
        except OSError as error:
            raise corrupt_file_error(path, error) from error
        kept: dict[str, dict[str, str]] = {}
        for name in ("environ", "secrets", "notify"):
            values = found.get(name, {} if name == "notify" else None)  # earlier versions wrote none
            if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType] - it is untrusted JSON
                raise corrupt_file_error(path, ValueError(f"{name} is missing, or does not map names to text"))
            kept[name] = cast("dict[str, str]", values)
        return cls(environ=kept["environ"], secrets=kept["secrets"], notify=kept["notify"])


class CodeArchive(Model):
    """The code that a run was started with, as an archive in the run's folder."""

    digest: str
    """SHA-256 of the archive, in hexadecimal."""
    bytes: int
    files: int
    cwd: str
    """The ranks' working directory, relative to the folder the archive is unpacked in."""


class ResumedRun(Model):
    """The run that another one resumes, and its newest checkpoint."""

    run: str
    step: int
    checkpoint: str
    """Path or URL of the checkpoint, as its ranks see it."""
    world_size: int
    """Ranks that saved it, of one replica."""


class RunSpec(Model):
    """Written once to the run's folder; all that a controller needs to start or resume the run, except secrets."""

    job: Job
    base: str
    """Absolute folder that the job's relative paths start from."""
    created_at: float
    """Unix time in seconds at which the user requested the run."""
    code: CodeArchive | None = None
    """None if ranks run in the working directory itself."""
    fabric: str
    """The fabric's name, `auto` resolved."""
    fabric_env: dict[str, str] = {}
    """Environment variables that the fabric sets for every rank."""
    target_kind: str = LOCAL
    """The kind of the target it was started with."""
    workload: Workload = Workload.JOBSET
    """Kubernetes: the kind of object that represents the run."""
    node_selector: dict[str, str] = {}
    """Kubernetes: labels of the target's machines."""
    agent: bool = True
    """Whether holdfast's agents start the ranks; otherwise the cluster starts the command."""
    durable_controller_disk: bool = True
    """Whether the controller's disk outlives its machine; otherwise the nodes keep replicas of the log."""
    isolation: Isolation = Isolation.PROCESS
    """How local nodes are isolated."""
    interfaces: dict[str, int] = {}
    """Network interfaces of isolated local nodes and their Mbit/s; none means one without a limit."""
    target: str = LOCAL
    """Name of the target the run was started with."""
    from_tree: bool = False
    """Kubernetes: whether others apply and delete the run's objects, as rendered; `created_at` is then not known."""
    checkpoint_root: str | None = None
    """The target's default folder for checkpoints; each run has its own subfolder."""
    notify: tuple[Notification, ...] = ()
    """Whom to tell when something happens to the run."""
    capacity: int | None = None
    """Number of nodes the target has machines for; none means as many as the job requests."""
    hosts: tuple[str, ...] = ()
    """Hosts of the target, one node each."""
    ssh: SshSettings = SshSettings()
    """How to reach them."""
    slurm: SlurmSettings = SlurmSettings()
    """What to ask Slurm for."""
    resumed: ResumedRun | None = None
    """The run that it resumes; its ranks refuse to start without a checkpoint."""

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """Read it from a run's folder; raises HoldfastError if the file is corrupt."""
        try:
            return cls.model_validate_json(read_small(path))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            if any(each["type"] != "extra_forbidden" for each in found):
                raise corrupt_file_error(path, error) from error
            raise _of_later_version(path, [".".join(map(str, each["loc"])) for each in found]) from error
        except (OSError, ValueError, RecursionError) as error:
            raise corrupt_file_error(path, error) from error

    def created_event(self, run: str) -> RunCreated:
        """The first event of the run's log."""
        job = self.job.model_dump(mode="json", exclude_defaults=True)
        created = RunCreated(at=self.created_at, run=run, job=job, version=holdfast.__version__)
        if self.resumed is None:
            return created
        return msgspec.structs.replace(created, resumed_run=self.resumed.run, resumed_step=self.resumed.step)
