"""The command `plan`: predicts a job's memory, step time and cost, and ranks its parallel layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict

from holdfast.cli.common_options import (
    LOCAL,
    FileArgument,
    GpusOption,
    NodesOption,
    OutputOption,
    SetOption,
    TargetOption,
    job_from_args,
)
from holdfast.cli.output import Output, print_json


def plan(
    file: FileArgument = None,
    on: TargetOption = LOCAL,
    overrides: SetOption = None,
    nodes: NodesOption = None,
    gpus_per_node: GpusOption = None,
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="Kind of machine (default: the target's).")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="Measured rates of the machines, as JSON.")
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", metavar="FILE", help="Labels of free nodes, as JSON; shows where ranks go."),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option("--hostfile", metavar="FILE", help="Writes the nodes in the order of ranks, with --topology."),
    ] = None,
    failures: Annotated[
        str | None,
        typer.Option(
            "--failures",
            metavar="FLEET",
            help="What failures cost at the rate of `llama-3`, `rsc-1`, `rsc-2`, `byterobust`, or a number per 1,000 "
            "node-days.",
        ),
    ] = None,
    days: Annotated[
        float, typer.Option("--days", metavar="N", min=0.1, max=1000, help="Length of the run, with --failures.")
    ] = 30.0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Writes a page with the scaling or ETTR curves.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Predict a job's step time, memory and cost.

    The job's `model` says what it trains. It ranks all parallel layouts; axes that `parallel` sets are fixed. With
    `--failures` it simulates failures and recoveries instead. Starts nothing, and needs no GPU. docs/plan.md says how
    accurate the predictions are.
    """
    from holdfast import api

    if hostfile and not topology:
        raise typer.BadParameter("needs --topology, which says where nodes are", param_hint="--hostfile")
    if topology and failures is not None:
        raise typer.BadParameter("places ranks, which --failures does not", param_hint="--topology")
    loaded, base = job_from_args(file, (), overrides, nodes=nodes, gpus_per_node=gpus_per_node)
    if failures is not None:
        lost = api.plan_failures(
            loaded, on, rate=failures, days=days, base=base, machine=machine, calibration=calibration
        )
        if html:
            curves = api.failures_by_scale(
                loaded, on, rate=failures, days=days, base=base, machine=machine, calibration=calibration
            )
            api.write_failures_page(loaded, lost, curves, html)
        if output is Output.JSON:
            print_json(lost)
            return
        from holdfast.cli.reliability_text import print_reliability

        print_reliability(lost)
        return
    found = api.plan(loaded, on, base=base, machine=machine, calibration=calibration)
    placed = api.rank_layout(found, topology) if topology else None
    if placed and hostfile:
        api.write_hostfile(found, placed, hostfile)
    if html:
        api.write_plan_page(loaded, found, html)
    if output is Output.JSON:
        print_json({**asdict(found), "rank_layout": placed} if placed else found)
        return
    from holdfast.cli.plan_text import print_plan, print_rank_layout

    print_plan(found)
    if placed:
        print_rank_layout(placed)
