"""The verb `render`: exactly what would be sent to a place or given to each rank."""

from __future__ import annotations

import typer

from holdfast.cli.output import Output, say, say_json
from holdfast.cli.request import (
    LOCAL,
    FileArgument,
    GpusOption,
    NameOption,
    NodesOption,
    OnOption,
    OutputOption,
    RanksOption,
    SetOption,
    asked_job,
)


def render(
    ctx: typer.Context,
    file: FileArgument = None,
    on: OnOption = LOCAL,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    ranks_per_node: RanksOption = None,
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show exactly what each rank, or a cluster, would be given.

    Nothing is started. Secrets are named, not shown.
    """
    from holdfast import api
    from holdfast.cli.findings import tell

    loaded, base = asked_job(
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
        tell(rendered.findings, output)
    if output is Output.JSON:
        answer = {"profile": on, "job": loaded.job.model_dump(mode="json"), "rendered": rendered.text}
        say_json(answer | ({"objects": rendered.objects} if rendered.objects else {}))
    else:
        say(rendered.text.rstrip("\n"))
