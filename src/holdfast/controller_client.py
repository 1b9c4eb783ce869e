"""Sends requests to a run's controller, and waits for their results.

An executed request is in the run's log, so the log shows the result even without an answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import AnyEvent, CancelRequested, FindingRaised, RecoveryDecided, RequestEvent, RunFinished
from holdfast.events.log import EventReader, last_event
from holdfast.events.requests import EXPIRES, Request
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import read_line
from holdfast.job.run_spec import RunSpec, corrupt_file_error
from holdfast.launch.cluster_contact import lost_contact
from holdfast.launch.target import is_alive, target_of
from holdfast.os_errors import disk_usage
from holdfast.protocol import routes
from holdfast.report.formatting import duration
from holdfast.report.run_status import RunPhase, RunStatus
from holdfast.report.status_reducer import status_from_events, update_status
from holdfast.run_dir import RunDir

POLL_S = 0.1
"""Seconds between polls for new events."""

REQUEST_TIMEOUT_S = 10.0
"""Maximum seconds for a controller to execute a request."""

ANSWER_MARGIN_S = 2.0
"""Maximum additional seconds for its answer."""

STALE_S = 3.0
"""Data older than this is shown with a warning; the pod that reports a run polls ten times per second."""


def is_finished(run: RunDir) -> bool:
    """Whether the log of a run is complete."""
    return isinstance(last_event(run.events), RunFinished)


def refuse_finished(run: RunDir) -> None:
    """Raises HoldfastError if a run is over: it accepts no requests."""
    if is_finished(run):
        raise failure("run-finished", f"{run.run_id} is over", exit_code=ExitCode.NOT_FOUND, remedy="holdfast ps")


def controller_dead(run: RunDir) -> HoldfastError:
    """The error for a run whose controller died and is not restarted; the target may know more of the reason."""
    known = None if run.remote.exists() else target_reason(run)
    return known or failure(
        "controller-dead",
        f"the controller of {run.run_id} has died and nothing restarts it",
        exit_code=ExitCode.UNAVAILABLE,
        where=str(run.controller_log),
        evidence=run.controller_log_tail(),
        remedy=f"holdfast attach {run.run_id}",
        owner=Owner.HOLDFAST,
    )


def controller_failing(run: RunDir) -> Finding | None:
    """The finding for controllers that fail repeatedly, as their supervisor recorded; None if they do not."""
    found = run.read_controller_record()
    if found.get("failed", 0) < 2 or is_finished(run) or not is_alive(run):
        return None
    for_s = max(0.0, time.time() - found.get("failing_since", time.time()))
    return Finding(
        code="controller-failing",
        what=f"the controller of {run.run_id} has failed {found['failed']} times in a row, for {duration(for_s)}",
        where=str(run.controller_log),
        evidence=run.controller_log_tail(),
        remedy="Ranks continue without it for `recovery.controller_grace_s`, and it is started again and again: fix "
        f"what its last words say. `holdfast cancel --force {run.run_id}` ends the run without it.",
        owner=Owner.CLUSTER,
    )


def send_request(run: RunDir, event: RequestEvent) -> None:
    """Send a request to a run's controller.

    Without an answer the run's log shows whether it was executed; a controller that reads it too late drops it.
    """
    import httpx
    import msgspec

    from holdfast.launch.controller_http import open_controller

    refuse_finished(run)
    path, is_cancel = routes.REQUEST_ROUTES[type(event)], isinstance(event, CancelRequested)
    if not is_cancel:
        _refuse_without_agent(run, path.rpartition("/")[2])
    event = msgspec.structs.replace(event, request_id=secrets.token_hex(8))
    token, content = _token(run), msgspec.json.encode(event)
    try:
        with open_controller(run, token, timeout_s=REQUEST_TIMEOUT_S + ANSWER_MARGIN_S) as controller:
            expires = {EXPIRES: repr(controller.clock() + REQUEST_TIMEOUT_S)}
            answer = controller.post(path, content, expires)
    except (httpx.TransportError, OSError) as error:
        # A controller that received a request to kill itself, for example, cannot answer.
        if _was_accepted(run, event) or (is_cancel and _has_ended(run)):
            return
        raise _no_answer(run, event) from error
    if answer.status_code == 401:
        what, remedy = f"{run.run_id} refused this token", f"Start `{run.run_id}` again: {run.path}/token was changed."
        raise failure("token-refused", what, exit_code=ExitCode.NOT_PERMITTED, where=str(run.path), remedy=remedy)
    if answer.status_code == 408:
        raise _no_answer(run, event)
    if answer.status_code == 503:
        raise failure(
            "event-log-blocked",
            f"the log of {run.run_id} cannot be written: the run waits, and executes the request once it can be",
            exit_code=ExitCode.UNAVAILABLE,
            where=str(run.events),
            evidence=disk_usage(run.events),
            remedy="Free some space there, or make it writable again.",
            owner=Owner.CLUSTER,
        )
    if answer.status_code != 200:
        raise failure(
            "request-refused",
            f"{run.run_id} did not accept the request",
            exit_code=ExitCode.INTERNAL,
            evidence=(answer.text[:500],),
            remedy="Use the version of holdfast that started the run. With the same one this is a fault of holdfast.",
            owner=Owner.HOLDFAST,
        )


def _token(run: RunDir) -> str:
    """The run's token; raises HoldfastError if its file is corrupt."""
    try:
        token = read_line(run.token)
    except OSError as error:
        raise corrupt_file_error(run.token, error) from error
    if not (token and token.isascii() and token.isprintable()):
        raise corrupt_file_error(run.token, ValueError("it holds no token"))
    return token


def _refuse_without_agent(run: RunDir, what: str) -> None:
    """Raises HoldfastError if a run has no agents, which would have to execute the request."""
    if not RunSpec.read(run.job).agent:
        raise failure(
            "needs-agent",
            f"{run.run_id} has no agent that could obey `{what}`: it was started with `agent: false`",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where="agent",
            remedy="Start it with a target without that setting.",
        )


def _was_accepted(run: RunDir, event: Request) -> bool:
    """Whether a request is in the log; a logged request was executed, or will be."""
    known = (one for one in EventReader(run.events).read() if isinstance(one, Request))
    return any(one.request_id == event.request_id for one in known)


def _has_ended(run: RunDir) -> bool:
    """Whether a cancelled run has ended, or is gone from its cluster, which its sync is about to notice."""
    if is_finished(run):
        return True
    seen = pending_reason(run)
    return seen is not None and seen.findings[0].code == "workload-deleted"


def _no_answer(run: RunDir, request: Request) -> HoldfastError:
    """Why a run's controller has not answered, and what happens to the request."""
    refuse_finished(run)
    if not is_alive(run):
        return controller_dead(run)
    if failing := controller_failing(run):
        return HoldfastError((failing,), ExitCode.UNAVAILABLE)
    seen = pending_reason(run)
    if seen is None or seen.findings[0].severity is Severity.INFO:
        return _controller_timeout(run)
    return _not_delivered(seen, request)


def pending_reason(run: RunDir) -> HoldfastError | None:
    """What keeps the nodes of a remote run, or this user, away, or why that is unknown; None if it runs here."""
    if not run.remote.exists():
        return target_reason(run)
    try:
        return target_of(run).pending_reason(run)
    except HoldfastError as corrupt:
        return corrupt


def target_reason(run: RunDir) -> HoldfastError | None:
    """Why a run that nothing here supervises has no controller, as its target says; None if it does not know."""
    try:
        return None if run.alive() else target_of(run).pending_reason(run)
    except HoldfastError:
        return None


def staleness(run: RunDir, *, now: float) -> Finding | None:
    """How old the local data of a remote run is, and why; None if its cluster is in contact, or the run is over."""
    if is_finished(run) or (silent := lost_contact(run)) is None:
        return None
    if silent.finding is not None:
        return silent.finding
    if now - silent.since < STALE_S or (not run.events.exists() and not silent.remedy):
        return None  # before its first event the run waits for its pods, and pending_reason reports why
    return Finding(
        code="cluster-status-stale",
        severity=Severity.WARNING,
        what=f"what is shown here is {duration(now - silent.since)} old: nothing has arrived from {run.run_id} since",
        where=run.run_id,
        evidence=(silent.reason,),
        remedy=f"{silent.remedy} The run continues there, and this view catches up once it is reachable. ".lstrip()
        + f"`{silent.command}` queries the cluster directly.",
        owner=Owner.CLUSTER,
    )


def _not_delivered(seen: HoldfastError, request: Request) -> HoldfastError:
    """The error if the target's own status explains why the controller does not answer."""
    import msgspec

    forced = isinstance(request, CancelRequested) and request.force
    then = (
        "The run is removed as soon as it can be."
        if forced
        else "The run has not received the request: repeat it then."
    )
    (finding,) = seen.findings
    return HoldfastError((msgspec.structs.replace(finding, remedy=f"{finding.remedy} {then}"),), seen.exit_code)


def _controller_timeout(run: RunDir) -> HoldfastError:
    return failure(
        "controller-timeout",
        f"the controller of {run.run_id} did not answer, so the request expired and will not run: "
        "the controller is busy, stopped or being replaced",
        exit_code=ExitCode.UNAVAILABLE,
        where=str(run.controller_log),
        evidence=run.controller_log_tail(),
        remedy=f"Try again in a moment. `holdfast cancel --force {run.run_id}` ends the run without it.",
        owner=Owner.HOLDFAST,
    )


class Expectation(Struct, frozen=True, kw_only=True):
    """A result of a run's ranks that a request waits for."""

    unmet: str
    """The clause that reports its absence."""
    code: str
    """Code of the error in that case."""
    fatal_findings: Mapping[str, ExitCode]
    """Findings of ranks and agents which mean that the result will not come."""
    partial_evidence: Callable[[RunStatus], tuple[str, ...]] = lambda _: ()
    """Partial results, as evidence."""
    survives_restarts: bool = False
    """Whether the result can still come after a restart."""


def _newest_checkpoint(known: RunStatus) -> tuple[str, ...]:
    last = known.checkpoint
    return (f"the newest is of step {last.step}: {last.path}" if last else "there is none of this run yet",)


CHECKPOINT = Expectation(
    unmet="no checkpoint is complete",
    code="checkpoint-not-taken",
    fatal_findings={
        "no-session": ExitCode.CANNOT_RUN_HERE,
        "checkpoint-skipped-nonfinite": ExitCode.CANNOT_RUN_HERE,
        "checkpoint-failed": ExitCode.STORAGE_FAILED,
        "checkpoint-manifest-missing": ExitCode.STORAGE_FAILED,
        "disk-error": ExitCode.STORAGE_FAILED,
        "disk-full": ExitCode.STORAGE_FAILED,
        "read-only-file-system": ExitCode.STORAGE_FAILED,
    },
    partial_evidence=_newest_checkpoint,
)
STEP_PROFILE = Expectation(
    unmet="it is not known where a step's time goes",
    code="step-profile-unavailable",
    fatal_findings={"no-session": ExitCode.CANNOT_RUN_HERE, "step-profile-failed": ExitCode.UNAVAILABLE},
)


STACK_DUMP = Expectation(unmet="it is not known where its ranks stand", code="stack-dump-incomplete", fatal_findings={})


UPDATE = Expectation(
    unmet="no step is done with the new code",
    code="update-not-confirmed",
    fatal_findings={"update-in-progress": ExitCode.UNAVAILABLE},
    survives_restarts=True,
)


def follow_request(
    run: RunDir, request: RequestEvent, expectation: Expectation, timeout_s: float
) -> Iterator[tuple[RunStatus, AnyEvent]]:
    """Send a request to a run, and yield its status and events from then on, until the result cannot come."""
    deadline = time.monotonic() + timeout_s
    reader = EventReader(run.events)
    known = status_from_events(reader.read(), RunStatus(run=run.run_id))
    refuse_finished(run)

    def refused(what: str, *evidence: str, exit_code: ExitCode = ExitCode.UNAVAILABLE, remedy: str = "") -> NoReturn:
        raise failure(
            expectation.code,
            what,
            exit_code=exit_code,
            where=run.run_id,
            evidence=tuple(filter(None, (*evidence, *expectation.partial_evidence(known)))),
            remedy=remedy or "Try again once `holdfast status` shows that it is running.",
        )

    if known.phase is not RunPhase.RUNNING and not expectation.survives_restarts:
        refused(f"{run.run_id} is {known.phase}", known.waiting_for)
    send_request(run, request)
    logged = False
    while True:
        for event in reader.read():
            known = update_status(known, event)
            logged = logged or type(event) is type(request)
            match event:
                case FindingRaised(finding=finding) if logged and finding.code in expectation.fatal_findings:
                    refused(
                        finding.what,
                        *finding.evidence,
                        exit_code=expectation.fatal_findings[finding.code],
                        remedy=finding.remedy,
                    )
                case RecoveryDecided(finding=finding) if logged and not expectation.survives_restarts:
                    refused(f"{run.run_id} restarts: {finding.what}", *finding.evidence)
                case RunFinished() if logged:
                    what = f"{run.run_id} ended, and {expectation.unmet}"
                    refused(what, event.reason, exit_code=ExitCode.NOT_FOUND, remedy="holdfast status")
                case _ if logged:
                    yield known, event
                case _:
                    pass
        if not is_alive(run):
            raise controller_dead(run)
        if time.monotonic() > deadline:
            remedy = (
                "A step may take longer than that: `--timeout SECONDS` waits longer, `holdfast status` shows steps."
            )
            refused(f"{timeout_s:g} s passed, and {expectation.unmet}", remedy=remedy)
        time.sleep(POLL_S)
