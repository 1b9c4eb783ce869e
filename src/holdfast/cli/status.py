"""The command `status`: how a run is doing, or how it went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.common_options import LOCAL, OutputOption, RunArgument, RunTargetOption
from holdfast.cli.output import Output, print_json, print_rich, print_text, with_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.events import StepTimesCompared
    from holdfast.report.run_status import ReplicaStatus, RunStatus
from holdfast.report.run_summary import format_ettr

_SUMMARISED = ("history", "ledgers")
"""Fields of the status that the summary shows."""


def status(
    run: RunArgument = None,
    on: RunTargetOption = LOCAL,
    output: OutputOption = Output.TEXT,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also list what agents monitor, and what their nodes lack for it.")
    ] = False,
) -> None:
    """Show how a run is doing, or how it went.

    For a waiting run, it shows what the run waits for.
    """
    from holdfast import api
    from holdfast.cli.finding_text import join_blocks, render_finding, render_recent
    from holdfast.cli.live_view import render_status
    from holdfast.cli.monitor_text import monitor_lines
    from holdfast.cli.summary_text import print_summary, summary_document
    from holdfast.report.run_status import RunPhase

    found = api.find_run(run, on)
    abandoned = api.is_orphaned(found)
    known = api.status(found)
    unheard = api.staleness(found)
    upload = api.upload_progress(found)
    # A run without a controller may wait for one, whatever it did last.
    may_wait = known.phase in (RunPhase.PENDING, RunPhase.RECOVERING) or not found.remote.exists()
    waits = api.pending_reason(found) if may_wait and known.finished_at is None else None
    no_controller = abandoned or (waits is not None and known.phase is RunPhase.RUNNING)
    if output is Output.JSON:
        summary = api.summary(found, known)
        moves = known.is_progressing(known.now)
        speed = {
            "tokens_per_s": known.tokens_per_s if moves else None,
            "tokens_per_s_per_device": known.tokens_per_s_per_device if moves else None,
        }
        now = {"phase": known.phase, "waiting_for": known.waiting_for, "pending": waits, "stale": unheard}
        now["controller_failing"] = api.controller_failing(found)
        shown = {"code_upload": upload, "ettr": summary.account.ettr, "orphaned": abandoned, "status": _document(known)}
        print_json({**now, **speed, **shown, "summary": summary_document(summary)})
    elif known.finished_at is not None:
        print_summary(found, output)
        if known.phase is RunPhase.FAILED:
            print_text(f"why   `holdfast diagnose {found.run_id}`")
    else:
        print_rich(
            render_status(known, known.now, format_ettr(known.account(known.now)), without_controller=no_controller)
        )
        if upload:
            print_text(upload.text)
        storage, failing = api.storage_finding(found), api.controller_failing(found)
        still = api.standstill_finding(found, known)
        present = [finding for finding in (unheard, waits, failing, storage, still) if finding]
        if abandoned:
            present += [each for each in api.controller_dead(found).findings if each not in present]
        if verbose:
            print_text("\n".join(monitor_lines(known.nodes.values())))
        if findings := [*render_recent(known, known.now), *map(render_finding, present)]:
            print_rich(join_blocks(findings))


def _replica_document(replica: ReplicaStatus) -> dict[str, object]:
    document = with_properties(replica, "seconds_per_step", "tokens_per_s", "remaining_s")
    del document["sockets"]  # `fabric` has their sum
    return document | {"fabric": replica.worst_fabric, "step_times": _step_times(replica.step_times)}


def _step_times(compared: StepTimesCompared | None) -> Mapping[str, object] | None:
    """As keys and values, also of each rank, which the log has as a list."""
    from msgspec.structs import asdict

    if compared is None:
        return None
    kept = ("first_step", "last_step", "ranks", "step_p50_s", "step_p99_s", "own_p50_s", "own_p99_s", "phases_s")
    slowest = [asdict(each) | {"lag": compared.lag_of(each)} for each in compared.slowest]
    return {name: getattr(compared, name) for name in kept} | {"slowest": slowest}


def _document(known: RunStatus) -> dict[str, object]:
    """The status as JSON."""
    replicas = {number: _replica_document(replica) for number, replica in known.replicas.items()}
    nodes = {number: with_properties(node, "name") for number, node in known.nodes.items()}
    document = with_properties(known, "is_degraded", "fabric") | {"replicas": replicas, "nodes": nodes}
    return {name: value for name, value in document.items() if name not in _SUMMARISED}
