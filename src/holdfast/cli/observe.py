"""The command `observe render`: alerts and dashboards for a monitoring system."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, TargetOption
from holdfast.cli.output import Output, print_result, print_text


def observe_render(
    on: TargetOption = LOCAL,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Write files for Prometheus and Grafana there.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print alerts for Prometheus and dashboards for Grafana.

    For a cluster, prints objects: `holdfast observe render --on TARGET | kubectl apply -f -`. Without one, --to names
    the folder for the files.
    """
    from holdfast import api

    if to is not None:
        for path in api.write_monitoring_files(to):
            print_text(str(path))
        return
    rendered = api.monitoring_objects(on)
    print_result(output, {"target": on, "objects": rendered.objects}, rendered.text.rstrip("\n"))
