"""The command `render`: what would be sent to a cluster or passed to each rank."""

from __future__ import annotations

import typer

from holdfast.cli.common_options import (
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
from holdfast.cli.output import Output, print_json, print_text


def render(
    ctx: typer.Context,
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    ranks_per_node: RanksOption = None,
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show exactly what each rank, or the cluster, would get.

    Starts nothing. Secrets are named, not shown.
    """
    from holdfast import api
    from holdfast.cli.finding_text import print_findings

    loaded, base = job_from_args(
        file,
        ctx.obj,
        overrides,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
        name=name,
    )
    rendered = api.render(loaded, on, base=base)
    if rendered.findings:
        print_findings(rendered.findings, output)
    if output is Output.JSON:
        answer = {"target": on, "job": loaded.job.model_dump(mode="json"), "rendered": rendered.text}
        print_json(answer | ({"objects": rendered.objects} if rendered.objects else {}))
    else:
        print_text(rendered.text.rstrip("\n"))
