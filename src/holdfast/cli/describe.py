"""The commands that describe a job and start nothing: init, validate, render, schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import (
    DEFAULT_FILE,
    LOCAL,
    FileArgument,
    GpusOption,
    NameOption,
    NodesOption,
    OutputOption,
    RanksOption,
    SetOption,
    TargetOption,
    job_from_args,
)
from holdfast.cli.output import Output, print_json, print_result, print_rich, print_text
from holdfast.errors import ExitCode, HoldfastError, failure

if TYPE_CHECKING:
    from holdfast.findings import Finding
    from holdfast.launch.kubernetes.foreign.lint import LintedManifest


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = DEFAULT_FILE,
    manifest: Annotated[
        Path | None, typer.Option("--from", metavar="MANIFEST", help="Kubernetes manifest to convert.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="Container image, for runs on a cluster.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a commented job file to start from.

    It never overwrites a file. With `--from` it converts the training job of a Kubernetes manifest.
    """
    from holdfast import api
    from holdfast.job.job_template import job_template

    if manifest and image:
        what = "a manifest has an image, and `--image` was given too"
        remedy = "Leave `--image` out, and edit `image` in the file."
        raise failure("bad-usage", what, exit_code=ExitCode.USAGE, remedy=remedy)
    text = api.convert(manifest) if manifest else job_template(file.absolute().parent.name, image=image)
    try:
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        what = f"{file} is there already"
        remedy = "Give another name, or move it away."
        raise failure("file-exists", what, exit_code=ExitCode.USAGE, where=str(file), remedy=remedy) from None
    except (FileNotFoundError, NotADirectoryError):
        what = f"there is no folder {file.parent}"
        remedy = f"Make it: `mkdir -p {file.parent}`."
        raise failure("no-such-folder", what, exit_code=ExitCode.NOT_FOUND, where=str(file), remedy=remedy) from None
    print_result(
        output,
        {"file": str(file)},
        f"wrote {file}; edit it, then `holdfast validate {file}` and `holdfast run {file}`",
    )


def validate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="Job files, or Kubernetes manifests (default: job.yaml)."),
    ] = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List every problem of job files or manifests.

    Reports all problems in one pass, each with its line and remedy. Starts nothing. A Kubernetes manifest is one that
    others wrote: a PyTorchJob, TrainJob, JobSet, MPIJob, Volcano Job or StatefulSet; each remedy is also a patch.
    """
    worst = ExitCode.OK
    answers: list[dict[str, object]] = []
    for file in files or [DEFAULT_FILE]:
        try:
            manifest = _linted(file, overrides)
        except HoldfastError as error:
            manifest, findings, code = None, error.findings, error.exit_code
        else:
            findings, code = _findings_in(manifest) if manifest else _findings_of(file, on, overrides)
        worst = worst or code
        if output is Output.JSON:
            answer: dict[str, object] = {"file": str(file), "valid": code is ExitCode.OK, "findings": findings}
            answers.append(answer | ({"patches": _patches(manifest)} if manifest else {}))
        elif manifest:
            _print_linted(file, manifest)
        else:
            _print(file, findings, code)
    if output is Output.JSON:
        print_json(answers)
    raise typer.Exit(worst)


def _linted(file: Path, overrides: list[str] | None) -> LintedManifest | None:
    """The findings of a manifest; None for a job file."""
    from holdfast import api

    manifest = api.lint(file)
    if manifest and overrides:
        what = f"`--set` changes a field of a job file, and {file} is a manifest"
        remedy = f"Convert it first: `holdfast init --from {file}`."
        raise failure("not-a-job-file", what, exit_code=ExitCode.USAGE, where=str(file), remedy=remedy)
    return manifest


def _findings_in(manifest: LintedManifest) -> tuple[tuple[Finding, ...], ExitCode]:
    return manifest.findings, ExitCode.OK if manifest.is_valid else ExitCode.INVALID_JOB


def _patches(manifest: LintedManifest) -> list[dict[str, object]]:
    """One patch per object, which removes all of its findings."""
    from holdfast.launch.kubernetes.foreign.lint import combined_patch

    return [{"object": workload.title, "patch": combined_patch(workload).operations} for workload in manifest.workloads]


def _print_linted(file: Path, manifest: LintedManifest) -> None:
    from holdfast.cli.manifest_text import render_linted, summary

    if manifest.findings:
        print_rich(render_linted(manifest))
    print_text(summary(file, manifest))


def _findings_of(file: Path, on: str, overrides: list[str] | None) -> tuple[tuple[Finding, ...], ExitCode]:
    """The findings of one file, and the exit code if it were the only one."""
    from holdfast import api
    from holdfast.findings import Severity

    try:
        loaded, base = job_from_args(file, (), overrides)
        findings = api.check(loaded, on, base=base)
    except HoldfastError as error:
        return error.findings, error.exit_code
    impossible = any(finding.severity is Severity.ERROR for finding in findings)
    return findings, ExitCode.CANNOT_RUN_HERE if impossible else ExitCode.OK


def _print(file: Path, findings: tuple[Finding, ...], code: ExitCode) -> None:
    from holdfast.cli.finding_text import render_findings

    if findings:
        print_rich(render_findings(findings))
    print_text(f"{file}: {'can run' if code is ExitCode.OK else 'cannot run'}")


def render(
    ctx: typer.Context,
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    ranks_per_node: RanksOption = None,
    name: NameOption = None,
    tree: Annotated[
        str | None,
        typer.Option(
            "--tree", metavar="RUN", help="Print objects for `kubectl apply` or a GitOps tool; RUN is the id."
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show exactly what each rank, or the cluster, would get.

    Starts nothing. Secrets are named, not shown. With `--tree`, the run starts when the objects are applied.
    """
    from holdfast import api
    from holdfast.cli.finding_text import print_findings

    loaded, base = job_from_args(
        file, ctx.obj, overrides, nodes=nodes, gpus_per_node=gpus_per_node, ranks_per_node=ranks_per_node, name=name
    )
    rendered = api.render(loaded, on, base=base, tree=tree)
    if rendered.findings:
        print_findings(rendered.findings, output)
    document = {"target": on, "job": loaded.job.model_dump(mode="json"), "rendered": rendered.text}
    document |= {"objects": rendered.objects} if rendered.objects else {}
    print_result(output, document, rendered.text.rstrip("\n"))


def schema() -> None:
    """Print the JSON Schema of a job file."""
    import json

    from holdfast.job.json_schema import job_schema

    print_text(json.dumps(job_schema(), indent=2))
