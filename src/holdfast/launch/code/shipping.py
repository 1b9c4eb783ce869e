"""Owns the code of a job as it is shipped: what of its folder belongs to it, and the archive that is made of that."""

from __future__ import annotations

from pathlib import Path

from holdfast.folder import runs_root
from holdfast.job.accepted import Shipped
from holdfast.job.spec import Job
from holdfast.launch.code.survey import Survey, survey


def survey_of(job: Job, base: Path) -> Survey:
    """The job's code, without the runs and checkpoints that may lie in the same folder."""
    checkpoints = (base / job.checkpoint.written,) if job.checkpoint.written is not None else ()
    return survey(job, base, apart=(runs_root(), *checkpoints))


def ship(job: Job, base: Path, into: Path) -> Shipped:
    """Put the job's code into an archive as it is now: later edits change nothing for this run."""
    from holdfast.launch.code.archive import pack  # tarfile and what it brings: most verbs ship nothing

    found = survey_of(job, base)
    packed = pack(found, into)
    return Shipped(digest=packed.digest, bytes=packed.bytes, files=found.files, cwd=found.cwd)
