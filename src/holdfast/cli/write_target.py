"""The commands that write files of targets: target init, target fetch."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.check import print_verdict
from holdfast.cli.common_options import OutputOption
from holdfast.cli.output import Output, print_json, print_result, print_text
from holdfast.errors import ExitCode


def target_init(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Kind of the target: `kubernetes`.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the target.")] = "cluster",
    context: Annotated[
        str | None, typer.Option(metavar="CONTEXT", help="Context of the kubeconfig (default: the current one).")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Namespace (default: the context's).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a target file from what a cluster shows.

    The file is `.holdfast/targets/NAME.yaml`, with the reason for each line. Then it checks the target like `check`.
    """
    from pathlib import Path

    from holdfast import api
    from holdfast.findings import Severity

    file = api.init_target(kind, name, folder=Path.cwd(), context=context, namespace=namespace, overwrite=overwrite)
    if output is Output.TEXT:
        print_text(f"wrote {file.relative_to(Path.cwd())}")
    findings = api.check_target(None, name, base=Path())
    lacking = any(finding.severity is Severity.ERROR for finding in findings)
    if output is Output.JSON:
        print_json({"file": str(file), "target": name, "can_run": not lacking, "findings": findings})
    else:
        print_verdict(name, findings, "a job", lacking=lacking)
    raise typer.Exit(ExitCode.CANNOT_RUN_HERE if lacking else ExitCode.OK)


def target_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Target whose file has `extends`.")],
    output: OutputOption = Output.TEXT,
) -> None:
    """Store the template that a target extends.

    The copy is next to the target's file, to be committed: no other command but `check` looks at the published one.
    """
    from holdfast import api

    fetched = api.fetch_template(name)
    done = "is up to date with" if fetched.was_stored else "stored from"
    text = f"{fetched.file} {done} {fetched.source}\nversions: {', '.join(fetched.versions)}"
    document = {
        "target": name,
        "source": fetched.source,
        "file": str(fetched.file),
        "was_stored": fetched.was_stored,
        "versions": fetched.versions,
    }
    print_result(output, document, text)
