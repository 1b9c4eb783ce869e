"""Creates the folder of a new run, with the inputs of its supervisor and controllers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Mapping

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.host.files import open_lock
from holdfast.job.run_spec import RunSpec
from holdfast.run_dir import RunDir, runs_root, write_private
from holdfast.security.tokens import new_token


@contextlib.contextmanager
def new_run_dir(name: str) -> Generator[RunDir]:
    """A folder for a run, removed again if the block raises: it holds the environment."""
    try:
        folder = RunDir.create(name)
    except OSError as error:
        raise unwritable_folder(error) from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


@contextlib.contextmanager
def one_start_at_a_time(name: str) -> Generator[None]:
    """Wait until no other process of this user starts a run of a name for which it looks first."""
    root = runs_root()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open_lock(root.parent / f"starting-{name}.lock")
    except OSError as error:
        raise unwritable_folder(error) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unwritable_folder(error: OSError) -> HoldfastError:
    """The error for a run whose folder cannot be created."""
    return failure(
        "unwritable-folder",
        f"no folder for the run can be made in {runs_root()}",
        exit_code=ExitCode.CANNOT_RUN_HERE,
        where=str(runs_root()),
        evidence=(str(error),),
        remedy="Set HOLDFAST_HOME to a folder you can write to.",
    )


def write_inputs(
    folder: RunDir,
    accepted: RunSpec,
    secrets: Mapping[str, str] | None = None,
    notify: Mapping[str, str] | None = None,
) -> None:
    """Write the inputs of the run's supervisor and controllers; secrets if its controller runs here."""
    write_private(folder.job, accepted.model_dump_json(exclude_defaults=True))
    write_private(folder.token, new_token())
    write_private(
        folder.secrets, json.dumps({"environ": dict(os.environ), "secrets": secrets or {}, "notify": notify or {}})
    )
