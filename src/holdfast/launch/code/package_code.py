"""Lists and archives the code of a job for upload."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.findings import Finding
from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import Job
from holdfast.launch.code.file_list import FileList, list_files
from holdfast.launch.target import Submission
from holdfast.run_dir import runs_root


def list_code(job: Job, base: Path) -> FileList:
    """The job's code, without runs and checkpoints in the same folder."""
    checkpoints = (base / job.checkpoint.write_path,) if job.checkpoint.write_path is not None else ()
    return list_files(job, base, exclude=(runs_root(), *checkpoints))


def package_code(job: Job, base: Path, into: Path) -> CodeArchive:
    """Archive the job's code as it is now: later edits do not affect this run."""
    from holdfast.launch.code.archive import pack  # imports tarfile, which most commands do not need

    found = list_code(job, base)
    packed = pack(found, into)
    return CodeArchive(digest=packed.digest, bytes=packed.bytes, files=found.files, cwd=found.cwd)


def code_findings(wanted: Submission) -> tuple[Finding, ...]:
    """What keeps the code of a submission from being archived."""
    return () if wanted.has_archive else list_code(wanted.job, wanted.base).findings


def submitted_code(wanted: Submission, into: Path) -> CodeArchive:
    """Archive the code of a submission: that of the run that it resumes, or the files as they are now."""
    resumption = wanted.resumption
    if resumption is None or resumption.code is None:
        return package_code(wanted.job, wanted.base, into)
    from holdfast.launch.code.archive import archive_path

    digest = resumption.code.digest
    try:
        into.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.link(archive_path(resumption.archives, digest), archive_path(into, digest))
    except OSError as error:
        raise failure(
            "unwritable-folder",
            f"the code of {resumption.resumed.run} cannot be linked in {into}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(into),
            evidence=(str(error),),
            remedy="Set HOLDFAST_HOME to the folder that has the run.",
        ) from error
    return resumption.code
