"""Owns what is asked of a run's controller from outside, and the wait until it has come to something.

A request that was obeyed is in the run's log. So without an answer the log tells, and what is waited for is read there.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import (
    AnyEvent,
    CancelRequested,
    FindingRaised,
    OperatorEvent,
    RecoveryDecided,
    RunFinished,
    paths,
)
from holdfast.events.log import EventReader, last_event
from holdfast.events.operator import UNTIL, Request
from holdfast.findings import Fault, Finding, Severity
from holdfast.folder import RunFolder
from holdfast.host.files import read_line
from holdfast.job.accepted import Accepted, damaged_file
from holdfast.report.advance import advance, fold
from holdfast.report.status import Phase, RunStatus
from holdfast.report.words import duration
from holdfast.shortage import room

BEAT_S = 0.1
"""How often new events are looked for."""

ASK_S = 10.0
"""Longest a controller may take to obey."""

ANSWER_S = 2.0
"""Longest that its answer may take beyond that."""

STALE_S = 3.0
"""What is older is not shown without saying so; the pod that tells of a run looks ten times a second."""


def finished(run: RunFolder) -> bool:
    """Whether the log of a run is closed."""
    return isinstance(last_event(run.events), RunFinished)


def refuse_finished(run: RunFolder) -> None:
    """Raises HoldfastError where a run is over: nothing can be asked of it."""
    if finished(run):
        raise failure("run-finished", f"{run.run} is over", exit_code=ExitCode.NOT_FOUND, remedy="holdfast ps")


def controller_gone(run: RunFolder) -> HoldfastError:
    """What is to be said of an abandoned run."""
    return failure(
        "controller-gone",
        f"the controller of {run.run} has died and nothing restarts it",
        exit_code=ExitCode.UNAVAILABLE,
        where=str(run.controller_log),
        evidence=run.last_words(),
        remedy=f"holdfast attach {run.run}",
        fault=Fault.HOLDFAST,
    )


def controller_failing(run: RunFolder) -> Finding | None:
    """That a run's controllers do not last, as its supervisor has written it down; None where they do."""
    found = run.description()
    if found.get("failed", 0) < 2 or finished(run) or not run.alive():
        return None
    for_s = max(0.0, time.time() - found.get("failing_since", time.time()))
    return Finding(
        code="controller-failing",
        what=f"the controller of {run.run} has failed {found['failed']} times in a row, for {duration(for_s)}",
        where=str(run.controller_log),
        evidence=run.last_words(),
        remedy="Ranks go on without it for `recovery.controller_grace_s`, and it is started again and again: fix what "
        f"its last words say. `holdfast cancel --force {run.run}` ends the run without it.",
        fault=Fault.CLUSTER,
    )


def ask(run: RunFolder, event: OperatorEvent) -> None:
    """Send a request to a run's controller over its Unix socket.

    Without an answer its log tells whether it was obeyed; one that is read too late, by whichever controller, is not.
    """
    import httpx
    import msgspec

    refuse_finished(run)
    path, is_cancel = paths.REQUESTS[type(event)], isinstance(event, CancelRequested)
    if not is_cancel:
        _refuse_without_agent(run, path.rpartition("/")[2])
    event = msgspec.structs.replace(event, request=secrets.token_hex(8))
    directory = os.open(run.path, os.O_PATH | os.O_DIRECTORY)
    try:
        # Through /proc the path stays short however deep the folder lies; a Unix socket's path holds 107 bytes.
        transport = httpx.HTTPTransport(uds=f"/proc/self/fd/{directory}/{run.control_socket.name}")
        headers = {"Authorization": f"Bearer {_token(run)}", UNTIL: repr(time.monotonic() + ASK_S)}
        client = httpx.Client(
            transport=transport, base_url="http://controller", headers=headers, timeout=ASK_S + ANSWER_S
        )
        with client:
            answer = client.post(path, content=msgspec.json.encode(event))
    except (httpx.TransportError, OSError) as error:
        # A controller that was asked to kill itself, for one, has no time to answer.
        if _was_obeyed(run, event) or (is_cancel and _is_ended(run)):
            return
        raise _no_answer(run, event) from error
    finally:
        os.close(directory)
    if answer.status_code == 401:
        what, remedy = f"{run.run} refused this token", f"Start `{run.run}` again: {run.path}/token was changed."
        raise failure("token-refused", what, exit_code=ExitCode.REFUSED, where=str(run.path), remedy=remedy)
    if answer.status_code == 408:
        raise _no_answer(run, event)
    if answer.status_code == 503:
        raise failure(
            "run-holds",
            f"the log of {run.run} cannot be written: it waits, and does what was asked once it can be",
            exit_code=ExitCode.UNAVAILABLE,
            where=str(run.events),
            evidence=room(run.events),
            remedy="Free some space there, or make it writable again.",
            fault=Fault.CLUSTER,
        )
    if answer.status_code != 200:
        raise failure(
            "request-refused",
            f"{run.run} did not accept the request",
            exit_code=ExitCode.INTERNAL,
            evidence=(answer.text[:500],),
            remedy="Use the version of holdfast that started the run. With the same one this is a fault of holdfast.",
            fault=Fault.HOLDFAST,
        )


def _token(run: RunFolder) -> str:
    """The run's token; raises HoldfastError where its file is not what was written."""
    try:
        token = read_line(run.token)
    except OSError as error:
        raise damaged_file(run.token, error) from error
    if not (token and token.isascii() and token.isprintable()):
        raise damaged_file(run.token, ValueError("it holds no token"))
    return token


def _refuse_without_agent(run: RunFolder, what: str) -> None:
    """Raises HoldfastError where a run has no agents, so that nobody in it hears what is asked."""
    if not Accepted.read(run.job).agent:
        raise failure(
            "needs-agent",
            f"{run.run} has no agent that could obey `{what}`: it was started with `agent: false`",
            exit_code=ExitCode.IMPOSSIBLE,
            where="agent",
            remedy="Start it with a profile that does not say so.",
        )


def _was_obeyed(run: RunFolder, event: Request) -> bool:
    """Whether a request is in the log; whatever is there was done, or will be."""
    known = (one for one in EventReader(run.events).read() if isinstance(one, Request))
    return any(one.request == event.request for one in known)


def _is_ended(run: RunFolder) -> bool:
    """Whether a run that was to end has ended, or is not in its cluster any more, which its mirror is about to see."""
    if finished(run):
        return True
    seen = waits_for(run)
    return seen is not None and seen.code == "object-missing"


def _no_answer(run: RunFolder, request: Request) -> HoldfastError:
    """Why a run's controller has not answered, and what becomes of the request."""
    refuse_finished(run)
    if not run.alive():
        return controller_gone(run)
    if failing := controller_failing(run):
        return HoldfastError((failing,), ExitCode.UNAVAILABLE)
    seen = waits_for(run)
    return _controller_silent(run) if seen is None or seen.severity is Severity.INFO else _kept_away(seen, request)


def waits_for(run: RunFolder) -> Finding | None:
    """What a run's cluster shows that keeps its pods, or this user, away; None where nothing does, or there is none."""
    if not run.place.exists():
        return None
    from holdfast.launch.kubernetes import waiting
    from holdfast.launch.kubernetes.place import recorded

    place = recorded(run)
    return waiting.waits_for(context=place.context, namespace=place.namespace, owner=place.owner)


def unheard(run: RunFolder, *, now: float) -> Finding | None:
    """How old it is what is known of a run elsewhere, and why; None where its place is heard, or the run is over."""
    from holdfast.launch.kubernetes.hearing import silence
    from holdfast.launch.kubernetes.place import recorded

    if not run.place.exists() or finished(run) or (silent := silence(run)) is None:
        return None
    place = recorded(run)
    if silent.ends:
        return Finding(
            code="namespace-ending",
            what=f"namespace {place.namespace} is being deleted, and {run.run} with it",
            where=run.run,
            evidence=(f"deletionTimestamp: {silent.ends}",),
            remedy="Run it again in another `namespace`, or in this one once it is gone and made anew.",
            fault=Fault.CLUSTER,
        )
    if now - silent.since < STALE_S or (not run.events.exists() and not silent.remedy):
        return None  # before it begins it waits for its pods, and what keeps them away is said
    return Finding(
        code="cluster-unheard",
        severity=Severity.WARNING,
        what=f"what is shown here is {duration(now - silent.since)} old: nothing was heard of {run.run} since",
        where=run.run,
        evidence=(silent.why,),
        remedy=f"{silent.remedy} The run goes on there, and what is shown catches up once it is heard. ".lstrip()
        + f"`kubectl get pods -n {place.namespace} -l holdfast/run={run.run}` asks the cluster itself.",
        fault=Fault.CLUSTER,
    )


def _kept_away(seen: Finding, request: Request) -> HoldfastError:
    """The cluster says itself why nobody there answers."""
    import msgspec

    from holdfast.launch.kubernetes.refusals import EXIT_CODES

    forced = isinstance(request, CancelRequested) and request.force
    then = "The run is removed as soon as it can be." if forced else "The run has heard nothing: ask again then."
    seen = msgspec.structs.replace(seen, remedy=f"{seen.remedy} {then}")
    return HoldfastError((seen,), EXIT_CODES.get(seen.code, ExitCode.UNAVAILABLE))


def _controller_silent(run: RunFolder) -> HoldfastError:
    return failure(
        "controller-silent",
        f"the controller of {run.run} did not answer, and will not do it later: it is busy, stopped or being replaced",
        exit_code=ExitCode.UNAVAILABLE,
        where=str(run.controller_log),
        evidence=run.last_words(),
        remedy=f"Try again in a moment. `holdfast cancel --force {run.run}` ends the run without it.",
        fault=Fault.HOLDFAST,
    )


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of a run's ranks, and waited for."""

    what: str
    """What is so where it does not come."""
    code: str
    """Of the error then."""
    hopeless: Mapping[str, ExitCode]
    """What ranks and agents find that mean: it will not come."""
    so_far: Callable[[RunStatus], tuple[str, ...]] = lambda _: ()
    """What there is already."""
    outlives_restarts: bool = False
    """Whether a restart does not keep it from coming."""


def _newest(known: RunStatus) -> tuple[str, ...]:
    last = known.checkpoint
    return (f"the newest is of step {last.step}: {last.path}" if last else "there is none of this run yet",)


CHECKPOINT = Wanted(
    what="no checkpoint is complete",
    code="checkpoint-not-taken",
    hopeless={
        "no-session": ExitCode.IMPOSSIBLE,
        "checkpoint-withheld": ExitCode.IMPOSSIBLE,
        "checkpoint-failed": ExitCode.STORAGE,
        "checkpoint-not-sealed": ExitCode.STORAGE,
        "disk-error": ExitCode.STORAGE,
        "disk-full": ExitCode.STORAGE,
        "read-only-file-system": ExitCode.STORAGE,
    },
    so_far=_newest,
)
SPLIT = Wanted(
    what="it is not known where a step's time goes",
    code="split-not-known",
    hopeless={"no-session": ExitCode.IMPOSSIBLE, "split-not-taken": ExitCode.UNAVAILABLE},
)


STACKS = Wanted(what="it is not known where its ranks stand", code="stacks-not-taken", hopeless={})


UPDATE = Wanted(
    what="no step is done with the new code",
    code="update-not-seen",
    hopeless={"update-under-way": ExitCode.UNAVAILABLE},
    outlives_restarts=True,
)


def after(
    run: RunFolder, request: OperatorEvent, wanted: Wanted, within_s: float
) -> Iterator[tuple[RunStatus, AnyEvent]]:
    """Ask a run for something, and follow what happens from the request on, until it will not come."""
    deadline = time.monotonic() + within_s
    reader = EventReader(run.events)
    known = fold(reader.read(), RunStatus(run=run.run))
    refuse_finished(run)

    def refused(what: str, *evidence: str, exit_code: ExitCode = ExitCode.UNAVAILABLE, remedy: str = "") -> NoReturn:
        raise failure(
            wanted.code,
            what,
            exit_code=exit_code,
            where=run.run,
            evidence=tuple(filter(None, (*evidence, *wanted.so_far(known)))),
            remedy=remedy or "Try again once `holdfast status` shows that it is running.",
        )

    if known.phase is not Phase.RUNNING and not wanted.outlives_restarts:
        refused(f"{run.run} is {known.phase}", known.waiting_for)
    ask(run, request)
    asked = False
    while True:
        for event in reader.read():
            known = advance(known, event)
            asked = asked or type(event) is type(request)
            match event:
                case FindingRaised(finding=finding) if asked and finding.code in wanted.hopeless:
                    refused(
                        finding.what,
                        *finding.evidence,
                        exit_code=wanted.hopeless[finding.code],
                        remedy=finding.remedy,
                    )
                case RecoveryDecided(finding=finding) if asked and not wanted.outlives_restarts:
                    refused(f"{run.run} restarts: {finding.what}", *finding.evidence)
                case RunFinished() if asked:
                    what = f"{run.run} ended, and {wanted.what}"
                    refused(what, event.reason, exit_code=ExitCode.NOT_FOUND, remedy="holdfast status")
                case _ if asked:
                    yield known, event
                case _:
                    pass
        if not run.alive():
            raise controller_gone(run)
        if time.monotonic() > deadline:
            remedy = "A step may take longer than that: `--within SECONDS` waits longer, `holdfast status` shows steps."
            refused(f"{within_s:g} s passed, and {wanted.what}", remedy=remedy)
        time.sleep(BEAT_S)
