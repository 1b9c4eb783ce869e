"""The verb `status`: how a run is doing, or how it went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import Output, say, say_json, show, with_properties
from holdfast.cli.request import OutputOption, RunArgument

if TYPE_CHECKING:
    from holdfast.report.status import RunStatus

SPLIT_S = 600.0
"""Longest to wait for a profile."""


def status(
    run: RunArgument = None,
    split: Annotated[
        bool, typer.Option("--split", help="Have a few steps profiled first, and say where a step's time goes.")
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Say how a run is doing, or how it went.

    Of a run that waits, it says what for.
    """
    from holdfast import api
    from holdfast.cli.findings import below, block, past
    from holdfast.cli.summary import document, print_summary
    from holdfast.cli.view import picture
    from holdfast.report.status import Phase

    found = api.find_run(run)
    if split:
        api.split(found, within_s=SPLIT_S)
    abandoned = api.abandoned(found)
    known = api.status(found)
    unheard = api.unheard(found)
    waits = api.waits_for(found) if known.phase in (Phase.PENDING, Phase.RECOVERING) else None
    if output is Output.JSON:
        summary = api.summary(found)
        moves = known.moves(known.now)
        speed = {
            "tokens_per_s": known.tokens_per_s if moves else None,
            "tokens_per_s_per_device": known.tokens_per_s_per_device if moves else None,
        }
        now = {"phase": known.phase, "waiting_for": known.waiting_for, "pending": waits, "unheard": unheard}
        now["controller_failing"] = api.controller_failing(found)
        shown = {"ettr": summary.account.ettr, "abandoned": abandoned, "status": _document(known)}
        say_json({**now, **speed, **shown, "summary": document(summary)})
    elif known.finished_at is not None:
        print_summary(found, output)
        if known.phase is Phase.FAILED:
            say(f"why   `holdfast diagnose {found.run}`")
    else:
        show(picture(known, known.now, api.summary(found).account.ettr))
        storage, failing = api.storage_finding(found), api.controller_failing(found)
        still = api.standstill_finding(found, known)
        present = [finding for finding in (unheard, waits, failing, storage, still) if finding]
        present += api.controller_gone(found).findings if abandoned else ()
        if findings := [*past(known, known.now), *map(block, present)]:
            show(below(findings))


def _document(known: RunStatus) -> dict[str, object]:
    """The status as JSON."""
    replicas = {
        number: with_properties(replica, "seconds_per_step", "tokens_per_s", "remaining_s")
        for number, replica in known.replicas.items()
    }
    nodes = {number: with_properties(node, "name") for number, node in known.nodes.items()}
    return with_properties(known, "degraded") | {"replicas": replicas, "nodes": nodes}
