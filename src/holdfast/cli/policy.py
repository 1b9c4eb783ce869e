"""The command `policy`: the rules by which a cluster itself refuses runs that are not set up for it."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.common_options import OutputOption, TargetOption
from holdfast.cli.output import Output, print_result


def policy(
    on: TargetOption,
    fabrics: Annotated[
        list[str] | None, typer.Option("--fabric", metavar="NAME", help="Allow only this fabric; repeatable.")
    ] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY", help="Require this label of GPU pods; repeatable."),
    ] = None,
    warn: Annotated[bool, typer.Option("--warn", help="Have the cluster warn instead of refuse.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print policies by which a cluster refuses unsafe runs.

    They require /dev/shm, lasting checkpoints, a queue, and the labels and fabrics that you name.

    Applies nothing: `holdfast policy --on TARGET | kubectl apply -f -`.
    """
    from holdfast import api
    from holdfast.cli.look_up import unknown_fabric
    from holdfast.fabric.catalog import CATALOG
    from holdfast.launch.policy_request import PolicyRequest

    for name in fabrics or ():
        if name not in CATALOG:
            raise unknown_fabric(name)
    request = PolicyRequest(fabrics=fabrics or (), labels=labels or (), enforce=not warn)
    rendered = api.policies(on, request)
    print_result(output, {"target": on, "objects": rendered.objects}, rendered.text.rstrip("\n"))
