"""What holdfast can be asked to do, as functions: the command line calls these, and so can a program.

A composition root: it knows the job's models, the back ends and where runs are kept. A run belongs to its controller,
a process of its own; these functions start it, read its log, and speak to its port.

One file, longer than others, because it is the one list of what can be asked for. What diagnoses is imported where it
is asked for: its rules are a fifth of all that would be loaded, and no other verb needs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, Unpack

from msgspec.structs import replace as replace_finding

from holdfast import asking, updating
from holdfast.asking import BEAT_S, CHECKPOINT, SPLIT, STACKS, after, ask, controller_gone, finished, refuse_finished
from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import (
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    ControllerStarted,
    DrillAction,
    DrillRequested,
    DrillTarget,
    Outcome,
    RunCreated,
    RunFinished,
    SplitRequested,
    StacksRequested,
    StacksTaken,
    StepCommitted,
)
from holdfast.events.log import EventReader, line_of, read_events
from holdfast.fabric.catalog import CATALOG, NAMES, Fabric, resolve
from holdfast.findings import Finding, Severity
from holdfast.folder import RunFolder, runs_root, write_private
from holdfast.guard.keys import fresh_token
from holdfast.host.files import put, read_small
from holdfast.job.accepted import Accepted, Shipped
from holdfast.job.document import Loaded, examine, examine_data, read_text
from holdfast.job.drills import check as check_drill
from holdfast.job.profile import KUBERNETES, LOCAL, Delivery, Profile, find_profile, placed_in_profile
from holdfast.job.replicas import divided
from holdfast.job.rules import check_job
from holdfast.job.source import Source, shown
from holdfast.job.spec import Job, Launch
from holdfast.launch.code.shipping import ship, survey_of
from holdfast.launch.script import launcher_in_script
from holdfast.launch.secretvalues import missing, values
from holdfast.launch.starting import start_keeper
from holdfast.measure.catalog import waited_for
from holdfast.report.advance import fold, status_of
from holdfast.report.brief import Brief, brief
from holdfast.report.logs import RankLog, rank_logs
from holdfast.report.standstill import ASKED_S, NOTICED_S, Standstill, places, standstill
from holdfast.report.status import RunStatus
from holdfast.report.summary import Summary, summarise
from holdfast.report.tail import last_lines
from holdfast.shortage import holding_up, lacking

if TYPE_CHECKING:
    from holdfast.diagnose.answer import Answer, Evidence
    from holdfast.launch.kubernetes.names import Names
    from holdfast.launch.kubernetes.submission import Submission

LAST_LINES = 10
"""Lines of the rank that failed first that are shown where nothing better is known of it."""
LAST_LINE_CHARS = 2000
LEAVE_S = 5.0
"""Longest that `follow` waits, after a run's last event, for its processes to have gone."""


# Describe


class Given(TypedDict, total=False):
    """What is given beside a job file, and goes over it; without a file, `command` is the job's."""

    command: Sequence[str]
    overrides: Sequence[str]
    nodes: int | str | None
    gpus_per_node: int | None
    ranks_per_node: int | None
    name: str | None


def load(path: Path | None, **given: Unpack[Given]) -> Loaded:
    """Read a job file, or make a job of a command line, with what is to be said of it; raises when it is wrong."""
    fields = {key: given.get(key) for key in ("nodes", "gpus_per_node", "ranks_per_node", "name")}
    asked = [f"{key}={value}" for key, value in fields.items() if value is not None]
    overrides = [*asked, *given.get("overrides", ())]
    if path is not None:
        return examine(read_text(path), os.fspath(path), overrides, NAMES).loaded()
    return examine_data({"command": list(given.get("command", ()))}, overrides, NAMES).loaded()


def load_job(path: Path | None, **given: Unpack[Given]) -> Job:
    """Read a job file, or make a job of a command line; raises when it is wrong."""
    return load(path, **given).job


def check(job: Job | Loaded, profile: str, *, base: Path) -> tuple[Finding, ...]:
    """Everything that is wrong with a job here, or worth saying, before anything is started."""
    from holdfast.launch.local.possible import possible

    place, loaded = _profile(profile, base), _loaded(job)
    known = (*loaded.findings, *map(loaded.placed, launcher_in_script(loaded.job, base)))
    if place.backend == KUBERNETES:
        return (*known, *_possible_there(loaded, place, profile, base))
    code = survey_of(loaded.job, base).findings if place.code is Delivery.SHIPPED else ()
    here = possible(
        loaded.job,
        isolation=place.isolation,
        base=base,
        environ=os.environ,
        storage=place.storage,
        capacity=place.capacity,
    )
    return (*known, *map(loaded.placed, (*here, *code)))


def check_place(loaded: Loaded | None, profile: str, *, base: Path) -> tuple[Finding, ...]:
    """Everything that a place lacks for a job, or for the smallest one; a cluster is asked, and nothing is made there.

    Raises HoldfastError where the cluster does not answer, or does not know this user.
    """
    place = _profile(profile, base)
    smallest = load(None, command=("true",), overrides=("image=any",))
    if place.backend != KUBERNETES:
        return check(loaded or smallest, profile, base=base)
    known = check(loaded or smallest, profile, base=base)
    if loaded is None:  # what is said of the smallest job is of nobody's, but for what any job meets there
        known = tuple(each for each in known if each.code == "checkpoint-not-shared")
    if any(each.code == "no-image" for each in known):
        return known
    from holdfast.launch.kubernetes.check import check as check_cluster
    from holdfast.launch.kubernetes.inventory import inventory
    from holdfast.launch.kubernetes.refusals import told

    asked = _submission((loaded or smallest).job, place, profile, None)
    with told():
        seen = inventory(asked)
    return (*known, *check_cluster(asked, seen))


def _possible_there(loaded: Loaded, place: Profile, profile: str, base: Path) -> Iterator[Finding]:
    """What a cluster's profile and the job make of one another, each finding with its line in either file."""
    from holdfast.launch.kubernetes.possible import PROFILE, possible

    for finding in possible(_submission(loaded.job, place, profile, None)):
        if finding.where.startswith(PROFILE):
            of_profile = replace_finding(finding, where=finding.where.removeprefix(PROFILE))
            yield placed_in_profile(of_profile, profile, start=base, environ=os.environ)
        else:
            yield loaded.placed(finding)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Exactly what would be sent to a place, or given to each rank."""

    text: str
    findings: tuple[Finding, ...]
    objects: tuple[dict[str, Any], ...] = ()
    """The same as data, where it is sent to a cluster."""


def render(job: Job | Loaded, profile: str, *, base: Path) -> Rendered:
    """Exactly what would be sent to the place, or given to each rank; nothing is started.

    Raises HoldfastError where a cluster could make nothing of it.
    """
    loaded, place = _loaded(job), _profile(profile, base)
    if place.backend == KUBERNETES:
        return _render_objects(loaded, place, profile, base)
    from holdfast.launch.local.backend import render as render_local  # a fifth of all that would be loaded

    with tempfile.TemporaryDirectory() as aside:
        text = render_local(_accepted(loaded.job, profile, base, Path(aside)))
    return Rendered(text=text, findings=loaded.findings)


def _render_objects(loaded: Loaded, place: Profile, profile: str, base: Path) -> Rendered:
    from holdfast.launch.kubernetes.render import render

    findings = check(loaded, profile, base=base)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise HoldfastError(findings, ExitCode.IMPOSSIBLE)
    with tempfile.TemporaryDirectory() as aside:
        code = ship(loaded.job, base, Path(aside)) if place.agent else None
        rendering = render(_submission(loaded.job, place, profile, code))
    return Rendered(text=rendering.text, findings=findings, objects=tuple(rendering.objects))


# Run


def start(
    job: Job | Loaded, profile: str, *, base: Path, tell: Callable[[Sequence[Finding]], object] | None = None
) -> RunFolder:
    """Start a run and return as soon as its controller can be spoken to; raises when the job is not possible here.

    `tell` is given the warnings, before anything is started.
    """
    findings = check(job, profile, base=base)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise HoldfastError(findings, ExitCode.IMPOSSIBLE)
    if tell and findings:
        tell(findings)
    return _STARTS[_profile(profile, base).backend](_loaded(job).job, profile, base)


def _start_here(job: Job, profile: str, base: Path) -> RunFolder:
    with _fresh_folder(job.name) as folder:
        accepted = _accepted(job, profile, base, folder.code)
        _fill(folder, accepted, values(job, base.absolute(), os.environ))
        start_keeper(folder, accepted)
    return folder


def _start_on_cluster(job: Job, profile: str, base: Path) -> RunFolder:
    from holdfast.launch.kubernetes.envoy import head

    if lacking := tuple(missing(job, base.absolute(), os.environ)):
        raise HoldfastError(lacking, ExitCode.IMPOSSIBLE)
    place = _profile(profile, base)
    head(place.context, place.namespace)  # it connects while the rest is found out
    from holdfast.launch.kubernetes.names import Names, stem
    from holdfast.launch.kubernetes.sending import send

    with _fresh_folder(stem(job)) as folder:
        code = ship(job, base, folder.code) if place.agent else None
        asked = _submission(job, place, profile, code, at=time.time(), names=Names(folder.run))
        _fill(folder, asked.accepted)
        send(folder, asked, values(job, base.absolute(), os.environ))
    return folder


_STARTS = {LOCAL: _start_here, KUBERNETES: _start_on_cluster}
"""How a run is started, by its back end."""


def revive(run: RunFolder) -> bool:
    """Start a controller for an unfinished run that has none; whether this call did so."""
    if finished(run) or run.alive() or not run.secrets.exists():
        return False
    try:
        start_keeper(run, accepted(run))
    except HoldfastError:
        if run.alive():  # somebody else was quicker
            return False
        raise
    return True


def cancel(run: RunFolder, *, force: bool = False) -> bool:
    """End a run: SIGTERM and its grace, or SIGKILL at once with `force`; whether its controller does it.

    With `force` a local run whose controller does not answer is ended without it.
    """
    request = CancelRequested(at=time.time(), force=force, by="command line")
    if not force or not _is_here(run):
        ask(run, request)
        return True
    try:
        if controller_failing(run) is None:
            ask(run, request)
            return True
    except HoldfastError as error:
        if error.exit_code is ExitCode.NOT_FOUND:  # it is over
            raise
    except OSError:  # its log, or the folder, cannot be read
        pass
    from holdfast.launch.local import force as by_force

    by_force.end(run, request)
    return False


def _is_here(run: RunFolder) -> bool:
    """Whether a run's processes are on this machine, so that they can be killed from here."""
    if os.path.lexists(run.place):
        return False
    try:
        return accepted(run).backend == LOCAL
    except HoldfastError:
        return os.path.lexists(run.nodes)  # which only runs on this machine have


def controller_failing(run: RunFolder) -> Finding | None:
    """That a run's controllers do not last; None where they do, or where nobody keeps any."""
    return asking.controller_failing(run)


def checkpoint(run: RunFolder, *, within_s: float) -> CheckpointCommitted:
    """Have a run's ranks take a checkpoint at their next step; returns once it is complete, in every replica.

    Raises HoldfastError where nobody can take one, where it fails, and when it is not there `within_s` seconds later.
    """
    waited: dict[int, int] = {}
    for known, event in after(run, CheckpointRequested(at=time.time()), CHECKPOINT, within_s):
        if isinstance(event, CheckpointRequested):
            waited = {index: replica.step or 0 for index, replica in known.replicas.items()}
        elif isinstance(event, CheckpointCommitted) and event.step >= waited.get(event.replica, 0):
            waited.pop(event.replica, None)
            if not waited:
                return event
    raise AssertionError("it is waited for until it is there or will not be")


def split(run: RunFolder, *, within_s: float) -> StepCommitted:
    """Have a run's ranks profile their next steps; returns the step whose metrics say where their time goes.

    Raises HoldfastError where no rank can, and when it is not known `within_s` seconds later.
    """
    seen = (event for _, event in after(run, SplitRequested(at=time.time()), SPLIT, within_s))
    return next(event for event in seen if isinstance(event, StepCommitted) and waited_for(event.metrics))


Updated, update = updating.Updated, updating.update
"""Have a run's ranks go on with other code."""


def drill(
    run: RunFolder,
    *,
    target: DrillTarget,
    index: int,
    action: DrillAction,
    at_step: int | None = None,
    for_s: float | None = None,
    amount: float | None = None,
) -> None:
    """Break something of a run on purpose, at once or at a step, for some seconds or for good (job/drills.py)."""
    asked = DrillRequested(
        at=time.time(), target=target, index=index, action=action, at_step=at_step, for_s=for_s, amount=amount
    )
    drills(run, [asked])


def drills(run: RunFolder, asked: Sequence[DrillRequested]) -> None:
    """Break several things of a run, or none where it cannot have one of them."""
    refuse_finished(run)
    for each in asked:
        check_drill(each, accepted(run), run.run)
    for each in asked:
        ask(run, each)


# Look


def accepted(run: RunFolder) -> Accepted:
    """What a run was started with."""
    return Accepted.read(run.job)


def abandoned(run: RunFolder) -> bool:
    """Whether a run is unfinished and nothing goes on with it, until `revive`."""
    return not run.alive() and not finished(run)


def events(run: RunFolder) -> list[AnyEvent]:
    """Every event of a run until now, in order."""
    return read_events(run.events)


def status(run: RunFolder) -> RunStatus:
    """How a run is doing, or how it went."""
    return status_of(run)


def waits_for(run: RunFolder) -> Finding | None:
    """Why a run's nodes are not there, as its cluster shows it; None where nothing says so, or where it has none."""
    return asking.waits_for(run)


def unheard(run: RunFolder) -> Finding | None:
    """How old it is what is known of a run elsewhere, and why; None where its place is heard."""
    return asking.unheard(run, now=time.time())


def glance(run: RunFolder) -> Brief:
    """A run in a line; the log of one that is over is folded for that only once."""
    try:
        log_bytes = run.events.stat().st_size
    except FileNotFoundError:
        log_bytes = 0
    if (known := _kept(run)) is not None and known.log_bytes == log_bytes:
        return known
    now = brief(status(run), log_bytes=log_bytes)
    if now.finished_at is not None:
        _keep_brief(run, now)
    return now


def _kept(run: RunFolder) -> Brief | None:
    """What was kept of a run when it was last folded; none where nothing was, or nothing that this version knows."""
    import msgspec

    try:
        return msgspec.json.decode(read_small(run.brief), type=Brief)
    except (OSError, msgspec.MsgspecError):
        return None


def _keep_brief(run: RunFolder, known: Brief) -> None:
    import msgspec

    with contextlib.suppress(OSError):  # a folder that cannot be written costs time, nothing else
        put(run.brief, msgspec.json.encode(known))


def summary(run: RunFolder) -> Summary:
    """How a run went, or how far it is: where its time went, and what failed."""
    reader = EventReader(run.events)
    known, logs = list(reader.read()), str(run.logs) if run.logs.is_dir() else ""
    clock = next((event.clock for event in reversed(known) if isinstance(event, ControllerStarted)), None)
    return summarise(known, run=run.run, logs=logs, now=Clock(clock)(), damaged_lines=_missing_lines(reader, known))


def _missing_lines(reader: EventReader, known: Sequence[AnyEvent]) -> int:
    """How many lines of a log cannot be read, at least; one where its beginning is gone."""
    begins = not known or isinstance(known[0], RunCreated)
    return reader.damaged_lines or int(not begins)


def storage_finding(run: RunFolder) -> Finding | None:
    """What is wrong with the disk of an unfinished run's folder, which may keep its controller from saying so."""
    if finished(run):
        return None
    refusal = lacking(run.path)
    return refusal and holding_up(refusal, "the run waits when the space kept for its log is used up", run.path)


def runs() -> list[RunFolder]:
    """Every run of this user, newest first."""
    root = runs_root()
    if not root.is_dir():
        return []
    begun = [(begun_at, RunFolder(path)) for path in root.iterdir() if (begun_at := _begun_at(RunFolder(path)))]
    return [run for _, run in sorted(begun, key=lambda each: each[0], reverse=True)]


def _begun_at(run: RunFolder) -> float:
    """When a run was started; 0 of a folder that is none. A run whose job was lost has its log."""
    for path in (run.job, run.events):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def find_run(prefix: str | None) -> RunFolder:
    """The run whose id begins with `prefix`, or has it as its last part; the latest run when there is no prefix.

    A job's whole name means its latest run.
    """
    known = runs()
    if not known:
        raise failure("no-runs", "there are no runs yet", exit_code=ExitCode.NOT_FOUND, remedy="holdfast run JOB.yaml")
    if prefix is None:
        return _followed(_own(known[0]))
    exact = [run for run in known if prefix in (run.run, run.run.rpartition("-")[2])]
    exact = exact or [run for run in known if run.run.rpartition("-")[0] == prefix][:1]
    found = exact or [
        run for run in known if run.run.startswith(prefix) or run.run.rpartition("-")[2].startswith(prefix)
    ]
    if len(found) == 1:
        return _followed(_own(found[0]))
    if found:
        names = tuple(run.run for run in found[:10])
        what = f"{prefix!r} could be any of {len(found)} runs"
        raise failure("run-ambiguous", what, exit_code=ExitCode.NOT_FOUND, evidence=names, remedy="give more letters")
    what = f"there is no run {prefix!r}"
    raise failure("run-not-found", what, exit_code=ExitCode.NOT_FOUND, remedy="`holdfast ps` lists them")


def diagnose(
    paths: Sequence[Path], *, stdin: BinaryIO | None = None, hide: Callable[[str], str] | None = None
) -> Answer:
    """What happened, first to whom, and what to do, from files and folders of logs; `-` is standard input.

    `hide` replaces secrets in a line before it is cut.
    """
    from holdfast.diagnose.pile import Pile
    from holdfast.diagnose.pipeline import diagnose as diagnose_pile

    for path in paths:
        if str(path) != "-" and not os.path.exists(path):  # which answers for a name that is too long as well
            name, remedy = shown(str(path)), "Give files or folders that are there, or the id of a run."
            raise failure(
                "no-such-file", f"there is no {name}", exit_code=ExitCode.NOT_FOUND, where=name, remedy=remedy
            )
    pile = Pile(tuple(paths), stdin=stdin)
    answer = diagnose_pile(pile, hide=hide)
    if pile.bytes == 0:
        remedy = "Give the files or the folder of the ranks' logs, `-` for standard input, or the id of a run."
        raise failure(
            "nothing-to-read",
            "no line could be read in what was given",
            exit_code=ExitCode.NOT_FOUND,
            evidence=tuple(pile.notes),
            remedy=remedy,
        )
    return answer


def diagnose_run(
    run: RunFolder, known: Sequence[AnyEvent] | None = None, *, hide: Callable[[str], str] | None = None
) -> Answer:
    """What happened in the attempt of a run that failed last: from its event log and what the ranks wrote in it.

    `known` are the events to go by; all of the log when they are not given. `hide` replaces secrets in a line before it
    is cut.
    """
    from holdfast.diagnose.athand import OF_A_RUN, OF_STACKS, asked_for, is_vague, nothing_failed, placed, without
    from holdfast.diagnose.history import last_failure
    from holdfast.diagnose.pile import Pile
    from holdfast.diagnose.pipeline import diagnose as diagnose_pile

    known = events(run) if known is None else known
    failed = last_failure(known, str(run.events))
    fabric = CATALOG.get(accepted(run).fabric)
    if failed is None:
        outcome = next((event.outcome for event in reversed(known) if isinstance(event, RunFinished)), None)
        still = None if outcome else _standstill(run, fold(known), ASKED_S, known)
        if still is not None:
            return _where_it_stands(run, still, fabric, hide)
        answer = diagnose_pile(Pile(tuple(rank_logs(run).values())), fabric=fabric, hide=hide)
        return answer if outcome is Outcome.FAILED else nothing_failed(answer, outcome)
    job = accepted(run).job
    shared = job.launch is not Launch.PER_RANK
    logs = {
        log.rank: path
        for log, path in rank_logs(run).items()
        if (log.attempt, log.replica) == (failed.attempt, failed.replica)
    }
    stacks = tuple(path for path in map(Path, failed.stacks) if path.is_file())
    fact = replace(failed.fact, line=line_of(run.events, failed.event))
    pile = Pile((*logs.values(), *stacks), shared=shared)
    # The number of a launcher's process is that of the first rank of its node, whichever of them failed.
    first_rank = None if shared and failed.log_rank is None else failed.rank
    if first_rank is None:
        fact = replace(fact, who=replace(fact.who, rank=None))
    answer = diagnose_pile(pile, known=(fact, *failed.early), first_rank=first_rank, fabric=fabric, hide=hide)
    wrote = failed.rank if failed.log_rank is None else failed.log_rank
    if is_vague(answer) and wrote in logs:
        answer = replace(answer, last_lines=_last_lines(logs[wrote], hide))
    ranks = range(job.local_world_size if shared else 1)
    answer = placed(answer, {first + rank: node for first, node in failed.nodes.items() for rank in ranks})
    if failed.drill is not None:
        return asked_for(answer, failed.drill)
    answer = without(answer, OF_STACKS) if stacks else answer
    whole = len(logs) * (job.local_world_size if shared else 1) >= failed.world_size
    return without(answer, OF_A_RUN) if whole else answer


def _last_lines(path: Path, hide: Callable[[str], str] | None) -> tuple[Evidence, ...]:
    """What a rank wrote last."""
    from holdfast.diagnose.answer import Evidence

    lines = (line for line in last_lines(path, 2 * LAST_LINES) if line.strip())
    texts = [(hide(line) if hide else line)[:LAST_LINE_CHARS] for line in lines]
    return tuple(Evidence(where=str(path), text=text, code="") for text in texts[-LAST_LINES:])


STACKS_S = 20.0
"""Longest to wait for the stacks of a live run's ranks."""


def _standstill(
    run: RunFolder, status: RunStatus, least_s: float, known: Sequence[AnyEvent] | None = None
) -> Standstill | None:
    """Since when a live run shows no sign of work; its log is read only where nothing else tells that it does."""
    written_s: dict[RankLog, float] = {}
    for log, path in rank_logs(run).items():
        with contextlib.suppress(OSError):
            written_s[log] = max(0.0, time.time() - path.stat().st_mtime)
    now = status.now
    stepped_s = (now - replica.window[-1].ended for replica in status.replicas.values() if replica.window)
    if min((*written_s.values(), *stepped_s), default=least_s) < least_s:
        return None
    return standstill(known or events(run), now=now, written_s=written_s, least_s=least_s)


def standstill_finding(run: RunFolder, status: RunStatus | None = None) -> Finding | None:
    """What is to be said of an unfinished run that has shown no sign of work for minutes."""
    still = None if finished(run) else _standstill(run, status or status_of(run), NOTICED_S)
    return still and still.finding(run.run)


def stacks(run: RunFolder, of: Collection[RankLog], *, within_s: float) -> list[StacksTaken]:
    """Have the agents take the stacks of ranks; what has come after so many seconds, at the latest."""
    taken: list[StacksTaken] = []
    waiting = set(of)
    with contextlib.suppress(HoldfastError):  # the run restarts or ends meanwhile, or nobody answers
        for _, event in after(run, StacksRequested(at=time.time()), STACKS, within_s):
            if isinstance(event, StacksTaken):
                taken.append(event)
                waiting.discard(RankLog(attempt=event.attempt, replica=event.replica, rank=event.rank))
            if not waiting:
                break
    return taken


def _where_it_stands(
    run: RunFolder, still: Standstill, fabric: Fabric | None, hide: Callable[[str], str] | None
) -> Answer:
    """What is known of a live run that shows no sign of work: its logs, and where its ranks stand now."""
    from holdfast.diagnose.athand import OF_STACKS, standing, without
    from holdfast.diagnose.history import left_early
    from holdfast.diagnose.pile import Pile
    from holdfast.diagnose.pipeline import diagnose as diagnose_pile

    taken = stacks(run, still.running, within_s=STACKS_S)
    files = tuple(path for path in (Path(each.stacks) for each in taken if each.stacks) if path.is_file())
    latest = {(log.attempt, log.replica) for log in still.running}
    logs = tuple(path for log, path in rank_logs(run).items() if (log.attempt, log.replica) in latest)
    early = tuple(left_early(exited, str(run.events)) for exited, _ in still.ended)
    answer = diagnose_pile(Pile((*logs, *files)), known=early, fabric=fabric, hide=hide)
    answer = standing(answer, "; ".join(filter(None, (still.what, places(taken)))))
    return without(answer, OF_STACKS) if files else answer


def _own(run: RunFolder) -> RunFolder:
    """The run, refused when its folder is another user's: what is in it would be believed."""
    if run.path.stat().st_uid == os.geteuid():
        return run
    raise failure(
        "not-your-run",
        f"the folder of {run.run} belongs to another user",
        exit_code=ExitCode.REFUSED,
        where=str(run.path),
        remedy="Ask its owner, or set HOLDFAST_HOME to a folder of your own.",
    )


def _followed(run: RunFolder) -> RunFolder:
    """The run, with its folder as it is there where it runs elsewhere."""
    if run.place.exists():
        with contextlib.suppress(HoldfastError):  # what is known of it is told all the same
            revive(run)
    return run


def follow(run: RunFolder, *, beat_s: float = BEAT_S) -> Iterator[AnyEvent | None]:
    """Yield a run's events as they come, and None every `beat_s` seconds when none came; ends with `RunFinished`.

    Raises when the run can have no more events because its keeper is gone.
    """
    reader = EventReader(run.events)
    while True:
        alive = run.alive()
        count = 0
        for event in reader.read():
            count += 1
            if isinstance(event, RunFinished):
                _wait_for_end(run)
            yield event
            if isinstance(event, RunFinished):
                return
        if count == 0:
            if not alive:
                raise controller_gone(run)
            yield None
            time.sleep(beat_s)


# How


@contextlib.contextmanager
def _fresh_folder(name: str) -> Generator[RunFolder]:
    """A folder for a run, which is gone again where what is done with it fails: it holds an environment."""
    try:
        folder = RunFolder.create(name)
    except OSError as error:
        raise failure(
            "unwritable-folder",
            f"no folder for the run can be made in {runs_root()}",
            exit_code=ExitCode.IMPOSSIBLE,
            where=str(runs_root()),
            evidence=(str(error),),
            remedy="Set HOLDFAST_HOME to a folder you can write to.",
        ) from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _loaded(job: Job | Loaded) -> Loaded:
    if isinstance(job, Loaded):
        return job
    return Loaded(job=divided(job), findings=check_job(job, NAMES), source=Source(name=""))


def _profile(name: str, base: Path) -> Profile:
    return find_profile(name, start=base, environ=os.environ, fabrics=NAMES)


def _submission(
    job: Job, place: Profile, name: str, code: Shipped | None, *, at: float = 0.0, names: Names | None = None
) -> Submission:
    """The job on its way to a cluster, where relative paths start from the shared volume.

    `at` and `names` are known when it is started.
    """
    from holdfast.launch.kubernetes.names import HOME, UNKNOWN_ID, Names
    from holdfast.launch.kubernetes.submission import Submission, workload

    fabric = resolve(job.fabric.name, place.fabric)
    accepted = Accepted(
        job=job,
        base=HOME,
        created_at=at,
        code=code,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        backend=place.backend,
        workload=workload(job, place),
        agent=place.agent,
        lasting=place.volume is not None,
        profile=name,
    )
    return Submission(accepted=accepted, profile=place, names=names or Names.of(job, UNKNOWN_ID))


def _accepted(job: Job, name: str, base: Path, archives: Path) -> Accepted:
    """The job, and the place it is accepted for; its code goes into the folder `archives` where it is shipped."""
    profile = _profile(name, base)
    fabric = resolve(job.fabric.name, profile.fabric)
    return Accepted(
        job=job,
        base=str(base.absolute()),
        created_at=time.time(),
        code=ship(job, base, archives) if profile.code is Delivery.SHIPPED else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        isolation=profile.isolation,
        capacity=profile.capacity,
        profile=name,
        storage=profile.storage,
    )


def _fill(folder: RunFolder, accepted: Accepted, secrets: Mapping[str, str] | None = None) -> None:
    """Write what the run's keeper and controllers need to know; `secrets` where its ranks are started from here."""
    write_private(folder.job, accepted.model_dump_json(exclude_defaults=True))
    write_private(folder.token, fresh_token())
    write_private(folder.secrets, json.dumps({"environ": dict(os.environ), "secrets": secrets or {}}))


def _wait_for_end(run: RunFolder) -> None:
    """Wait, but not for ever, until the run's last process has gone."""
    deadline = time.monotonic() + LEAVE_S
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
