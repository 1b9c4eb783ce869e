"""Arguments that several commands share: job file, target, run, overrides, output format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output
from holdfast.errors import ExitCode, failure

if TYPE_CHECKING:
    from holdfast.job.loader import LoadedJob

DEFAULT_FILE = Path("job.yaml")
LOCAL = "local"
"""The default target."""


def complete_run(incomplete: str) -> list[str]:
    """Shell completion for RUN: run ids, newest first."""
    from holdfast import api

    return [run.run_id for run in api.runs() if run.run_id.startswith(incomplete)]


def complete_target(incomplete: str) -> list[str]:
    """Shell completion for `--on`."""
    import os

    from holdfast.job.target_files import known_targets

    return [name for name in known_targets(Path.cwd(), os.environ) if name.startswith(incomplete)]


def _complete_field(incomplete: str) -> list[str]:
    """Shell completion for `--set`: the fields of a job."""
    from holdfast.job.spec import Job

    return [f"{name}=" for name in Job.model_fields if name.startswith(incomplete)]


FileArgument = Annotated[Path | None, typer.Argument(metavar="FILE", help="Job file (default: job.yaml).")]
TargetOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Target to run on; `holdfast target` lists them.",
        autocompletion=complete_target,
    ),
]
RunTargetOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="Target that has the run; also finds runs of other machines there.",
        autocompletion=complete_target,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override one field of the job; repeatable.",
        autocompletion=_complete_field,
    ),
]
NodesOption = Annotated[
    str | None, typer.Option("--nodes", metavar="N", help="Same as --set nodes=N; 2..4 is a range.")
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks-per-node", metavar="N", help="Same as --set ranks_per_node=N.")
]
GpusOption = Annotated[int | None, typer.Option("--gpus-per-node", metavar="N", help="Same as --set gpus_per_node=N.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Same as --set name=NAME.")]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="Id of a run, or a unique prefix of it.", autocompletion=complete_run),
]
WaitOption = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="How long to wait for it.")]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]


def job_from_args(
    file: Path | None,
    command: Sequence[str],
    overrides: Sequence[str] | None,
    *,
    nodes: str | None = None,
    gpus_per_node: int | None = None,
    ranks_per_node: int | None = None,
    name: str | None = None,
) -> tuple[LoadedJob, Path]:
    """The job that a command line describes, and the folder its relative paths start from."""
    from holdfast import api

    if file is not None and command:
        what = "a job file and a command were given, and a run has one of them"
        remedy = "Leave one out; `--set` changes single fields of a file."
        raise failure("file-and-command", what, exit_code=ExitCode.USAGE, remedy=remedy)
    if not command:
        file = file or DEFAULT_FILE
    loaded = api.load(
        file,
        command=command,
        overrides=overrides or (),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        name=name,
    )
    return loaded, file.parent if file else Path()
