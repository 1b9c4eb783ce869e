"""Owns the code of a job as it is shipped: what of its folder belongs to it, and the archive that is made of that."""

from __future__ import annotations

from pathlib import Path

from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import Job
from holdfast.launch.code.file_list import FileList, list_files
from holdfast.run_dir import runs_root


def list_code(job: Job, base: Path) -> FileList:
    """The job's code, without the runs and checkpoints that may lie in the same folder."""
    checkpoints = (base / job.checkpoint.write_path,) if job.checkpoint.write_path is not None else ()
    return list_files(job, base, exclude=(runs_root(), *checkpoints))


def package_code(job: Job, base: Path, into: Path) -> CodeArchive:
    """Put the job's code into an archive as it is now: later edits change nothing for this run."""
    from holdfast.launch.code.archive import pack  # tarfile and what it brings: most verbs ship nothing

    found = list_code(job, base)
    packed = pack(found, into)
    return CodeArchive(digest=packed.digest, bytes=packed.bytes, files=found.files, cwd=found.cwd)
