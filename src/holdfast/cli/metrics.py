"""The commands `metrics` and `metrics serve`: what Prometheus reads of runs."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.common_options import LOCAL, RunArgument, RunTargetOption
from holdfast.cli.output import print_text
from holdfast.errors import ExitCode, failure

PORT = 9851


def metrics(run: RunArgument = None, on: RunTargetOption = LOCAL) -> None:
    """Print a run's metrics as Prometheus reads them.

    `metrics serve` serves those of all runs that have a folder here.
    """
    from holdfast import api

    print_text(api.metrics_text(api.find_run(run, on)).rstrip())


def metrics_serve(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0: any free port.")] = PORT,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Scrapers must send its first line as bearer token."),
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", metavar="N", min=1, help="Maximum number of runs.")] = 20,
) -> None:
    """Serve the metrics of the latest runs for Prometheus.

    Finished runs are included. Any other address than this machine's own needs --token-file.
    """
    from holdfast import api

    if token_file is None and not _is_loopback(host):
        raise failure(
            "token-missing",
            f"at {host} other machines can read the metrics, and no token is required of them",
            exit_code=ExitCode.USAGE,
            remedy="Write a long random line to a file, and add --token-file FILE; or listen at 127.0.0.1.",
        )
    api.serve_metrics(
        host, port, token_file, last=last, ready=lambda url: print_text(f"metrics at {url}; Ctrl-C ends it")
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
