"""Lists and archives the code of a job for upload."""

from __future__ import annotations

from pathlib import Path

from holdfast.job.run_spec import CodeArchive
from holdfast.job.spec import Job
from holdfast.launch.code.file_list import FileList, list_files
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
