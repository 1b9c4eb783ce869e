"""Writes a first target file of a project from what a cluster shows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from holdfast.errors import ExitCode, failure
from holdfast.host.files import atomic_write_shared
from holdfast.job.target_files import LOCAL, project_file
from holdfast.launch.target import TARGET_KINDS


def init_target(
    kind: str,
    name: str,
    *,
    folder: Path,
    context: str | None = None,
    namespace: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the target file `name` of the project in a folder; returns its path.

    `context` and `namespace` default to the kubeconfig's. Raises HoldfastError if the file exists, unless `overwrite`,
    or if the cluster does not answer.
    """
    kinds = [known for known, row in TARGET_KINDS.items() if row.draft]
    if kind not in kinds:
        what = f"there is nothing to look at for a target of kind `{kind}`"
        remedy = f"Use {' or '.join(f'`{known}`' for known in kinds)}; `local` needs no file."
        raise failure("unknown-target-kind", what, exit_code=ExitCode.USAGE, remedy=remedy)
    path = project_file(name, folder)
    if path is None:
        what = f"`{name}` cannot be the name of a target"
        remedy = "Use letters, digits, hyphens, underscores and dots, at most 64, such as `cluster`."
        raise failure("bad-name", what, exit_code=ExitCode.USAGE, remedy=remedy)
    if name == LOCAL:
        what = f"`{LOCAL}` is the target of commands without `--on`, which would then use the cluster"
        remedy = "Give the cluster another name, such as `cluster`."
        raise failure("bad-name", what, exit_code=ExitCode.USAGE, remedy=remedy)
    if path.exists() and not overwrite:
        what = f"{path} is there already"
        remedy = "Give another name, or replace it with `--overwrite`."
        raise failure("file-exists", what, exit_code=ExitCode.USAGE, where=str(path), remedy=remedy)
    text = import_module(TARGET_KINDS[kind].draft).draft_target(name, context=context, namespace=namespace)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_shared(path, text.encode())
    return path
