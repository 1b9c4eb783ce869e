"""holdfast's Python API: the functions behind each command-line verb.

A composition root: it knows the job models, the back ends and where runs are stored. A run belongs to its controller, a
separate process; these functions start it, read its log, and send it requests.

One long file, because it is the single list of operations. Diagnosis is imported on use: its rules are a fifth of all
imports, and no other verb needs them.
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

from holdfast import code_update, controller_client
from holdfast.clock import Clock
from holdfast.controller_client import (
    CHECKPOINT,
    POLL_S,
    STACK_DUMP,
    STEP_PROFILE,
    controller_dead,
    follow_request,
    is_finished,
    refuse_finished,
    send_request,
)
from holdfast.errors import ExitCode, HoldfastError, failure, require_extra
from holdfast.events import (
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    ControllerStarted,
    FaultAction,
    FaultRequested,
    FaultTarget,
    Outcome,
    ProfileRequested,
    RunCreated,
    RunFinished,
    StackDumpRequested,
    StacksDumped,
    StepCommitted,
)
from holdfast.events.log import EventReader, line_of, read_events
from holdfast.fabric.catalog import CATALOG, NAMES, Fabric, resolve
from holdfast.findings import Finding, Severity
from holdfast.host.files import atomic_write, read_small
from holdfast.job.fault_catalog import check_fault as check_drill
from holdfast.job.loader import LoadedJob, read_text, validate_data, validate_text
from holdfast.job.rules import check_job
from holdfast.job.run_spec import CodeArchive, RunSpec
from holdfast.job.spec import Job, Launch
from holdfast.job.targets import KUBERNETES, LOCAL, CodeDelivery, Target, find_target, located_in_target
from holdfast.job.virtual_nodes import as_virtual_nodes
from holdfast.job.yaml_source import YamlSource, printable
from holdfast.launch.code.package_code import list_code, package_code
from holdfast.launch.secret_values import missing_secrets, read_secrets
from holdfast.launch.shell_script import launcher_in_script
from holdfast.launch.start_supervisor import start_supervisor
from holdfast.metrics.metric_catalog import has_requested
from holdfast.os_errors import probe_disk, waiting_finding
from holdfast.report.log_tail import last_lines
from holdfast.report.rank_logs import RankLog, find_rank_logs
from holdfast.report.run_row import RunRow, make_run_row
from holdfast.report.run_status import RunStatus
from holdfast.report.run_summary import RunSummary, summarise
from holdfast.report.stall import DIAGNOSE_IDLE_S, STATUS_IDLE_S, Stall, find_stall, format_stacks
from holdfast.report.status_reducer import read_status, status_from_events
from holdfast.run_dir import RunDir, runs_root, write_private
from holdfast.security.tokens import new_token

if TYPE_CHECKING:
    from holdfast.diagnose.diagnosis import Diagnosis, Evidence
    from holdfast.launch.kubernetes.manifests.render_context import RenderContext
    from holdfast.launch.kubernetes.object_names import ObjectNames

LAST_LINES = 10
"""Last lines shown of the rank that failed first, if the diagnosis finds nothing better."""
LAST_LINE_CHARS = 2000
LEAVE_S = 5.0
"""Maximum seconds that `follow` waits, after a run's last event, for its processes to exit."""


# Describe


class Overrides(TypedDict, total=False):
    """Arguments that override a job file; without a file, `command` is the job's."""

    command: Sequence[str]
    overrides: Sequence[str]
    nodes: int | str | None
    gpus_per_node: int | None
    ranks_per_node: int | None
    name: str | None


def load(path: Path | None, **given: Unpack[Overrides]) -> LoadedJob:
    """Read a job file, or make a job from a command line, with its findings; raises if it is invalid."""
    fields = {key: given.get(key) for key in ("nodes", "gpus_per_node", "ranks_per_node", "name")}
    field_overrides = [f"{key}={value}" for key, value in fields.items() if value is not None]
    overrides = [*field_overrides, *given.get("overrides", ())]
    if path is not None:
        return validate_text(read_text(path), os.fspath(path), overrides, NAMES).loaded_or_raise()
    return validate_data({"command": list(given.get("command", ()))}, overrides, NAMES).loaded_or_raise()


def load_job(path: Path | None, **given: Unpack[Overrides]) -> Job:
    """Read a job file, or make a job from a command line; raises if it is invalid."""
    return load(path, **given).job


def check(job: Job | LoadedJob, target: str, *, base: Path) -> tuple[Finding, ...]:
    """All problems and warnings of a job on a target, before anything is started."""
    from holdfast.launch.local.local_preflight import check_locally

    target_spec, loaded = _target(target, base), _loaded(job)
    known = (*loaded.findings, *map(loaded.located, launcher_in_script(loaded.job, base)))
    if target_spec.backend == KUBERNETES:
        return (*known, *_check_cluster(loaded, target_spec, target, base))
    code = list_code(loaded.job, base).findings if target_spec.code is CodeDelivery.SHIPPED else ()
    here = check_locally(
        loaded.job,
        isolation=target_spec.isolation,
        base=base,
        environ=os.environ,
        checkpoint_root=target_spec.checkpoint_root,
        capacity=target_spec.capacity,
    )
    return (*known, *map(loaded.located, (*here, *code)))


def check_target(loaded: LoadedJob | None, target: str, *, base: Path) -> tuple[Finding, ...]:
    """Everything that a target lacks for a job, or for a minimal one; queries a cluster but creates nothing there.

    Raises HoldfastError if the cluster does not answer, or does not know this user.
    """
    target_spec = _target(target, base)
    smallest = load(None, command=("true",), overrides=("image=any",))
    if target_spec.backend != KUBERNETES:
        return check(loaded or smallest, target, base=base)
    known = check(loaded or smallest, target, base=base)
    if loaded is None:  # a minimal job's own findings concern no user, except one that any job would get there
        known = tuple(each for each in known if each.code == "checkpoint-not-shared")
    if any(each.code == "no-image" for each in known):
        return known
    require_extra("kubernetes", "kr8s", "a Kubernetes target needs")
    from holdfast.launch.kubernetes.client.api_errors import as_holdfast_error
    from holdfast.launch.kubernetes.preflight.cluster_checks import check_cluster
    from holdfast.launch.kubernetes.preflight.collect_inventory import collect_inventory

    context = _submission((loaded or smallest).job, target_spec, target, None)
    with as_holdfast_error():
        seen = collect_inventory(context)
    return (*known, *check_cluster(context, seen))


def _check_cluster(loaded: LoadedJob, target_spec: Target, target: str, base: Path) -> Iterator[Finding]:
    """Problems of the job on a cluster target, each finding with its line in either file."""
    from holdfast.launch.kubernetes.preflight.job_checks import TARGET_PREFIX, check_job_on_cluster

    for finding in check_job_on_cluster(_submission(loaded.job, target_spec, target, None)):
        if finding.where.startswith(TARGET_PREFIX):
            of_profile = replace_finding(finding, where=finding.where.removeprefix(TARGET_PREFIX))
            yield located_in_target(of_profile, target, start=base, environ=os.environ)
        else:
            yield loaded.located(finding)


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Exactly what would be sent to a target, or given to each rank."""

    text: str
    findings: tuple[Finding, ...]
    objects: tuple[dict[str, Any], ...] = ()
    """The same as data, if it is sent to a cluster."""


def render(job: Job | LoadedJob, target: str, *, base: Path) -> Rendered:
    """Exactly what would be sent to the target, or given to each rank; nothing is started.

    Raises HoldfastError if the job cannot run on a cluster.
    """
    loaded, target_spec = _loaded(job), _target(target, base)
    if target_spec.backend == KUBERNETES:
        return _render_objects(loaded, target_spec, target, base)
    from holdfast.launch.local.local_backend import render as render_local  # a fifth of all imports

    with tempfile.TemporaryDirectory() as scratch:
        text = render_local(_accepted(loaded.job, target, base, Path(scratch)))
    return Rendered(text=text, findings=loaded.findings)


def _render_objects(loaded: LoadedJob, target_spec: Target, target: str, base: Path) -> Rendered:
    from holdfast.launch.kubernetes.manifests.run_manifests import render

    findings = check(loaded, target, base=base)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise HoldfastError(findings, ExitCode.CANNOT_RUN_HERE)
    with tempfile.TemporaryDirectory() as scratch:
        code = package_code(loaded.job, base, Path(scratch)) if target_spec.agent else None
        rendering = render(_submission(loaded.job, target_spec, target, code))
    return Rendered(text=rendering.text, findings=findings, objects=tuple(rendering.objects))


# Run


def start(
    job: Job | LoadedJob, target: str, *, base: Path, on_findings: Callable[[Sequence[Finding]], object] | None = None
) -> RunDir:
    """Start a run and return as soon as its controller answers; raises if the job cannot run here.

    `on_findings` receives the warnings before anything is started.
    """
    findings = check(job, target, base=base)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise HoldfastError(findings, ExitCode.CANNOT_RUN_HERE)
    if on_findings and findings:
        on_findings(findings)
    return _STARTS[_target(target, base).backend](_loaded(job).job, target, base)


def _start_here(job: Job, target: str, base: Path) -> RunDir:
    with _new_run_dir(job.name) as folder:
        accepted = _accepted(job, target, base, folder.code)
        _write_inputs(folder, accepted, read_secrets(job, base.absolute(), os.environ))
        start_supervisor(folder, accepted)
    return folder


def _start_on_cluster(job: Job, target: str, base: Path) -> RunDir:
    from holdfast.launch.kubernetes.submit.submit_process import connect

    if lacking := tuple(missing_secrets(job, base.absolute(), os.environ)):
        raise HoldfastError(lacking, ExitCode.CANNOT_RUN_HERE)
    require_extra("kubernetes", "kr8s", "a Kubernetes target needs")
    target_spec = _target(target, base)
    connect(target_spec.context, target_spec.namespace)  # connect in parallel with the rest
    from holdfast.launch.kubernetes.object_names import ObjectNames, name_stem
    from holdfast.launch.kubernetes.submit.submit_run import submit

    with _new_run_dir(name_stem(job)) as folder:
        code = package_code(job, base, folder.code) if target_spec.agent else None
        context = _submission(job, target_spec, target, code, at=time.time(), names=ObjectNames(folder.run_id))
        _write_inputs(folder, context.accepted)
        submit(folder, context, read_secrets(job, base.absolute(), os.environ))
    return folder


_STARTS = {LOCAL: _start_here, KUBERNETES: _start_on_cluster}
"""Start function of each back end."""


def restart_controller(run: RunDir) -> bool:
    """Start a controller for an unfinished run without one; returns whether this call did so."""
    if is_finished(run) or run.alive() or not run.secrets.exists():
        return False
    try:
        start_supervisor(run, accepted(run))
    except HoldfastError:
        if run.alive():  # another process was quicker
            return False
        raise
    return True


def cancel(run: RunDir, *, force: bool = False) -> bool:
    """End a run: SIGTERM and its grace period, or SIGKILL immediately with `force`; returns whether its controller does
    it.

    With `force` a local run whose controller does not answer is ended without it.
    """
    request = CancelRequested(at=time.time(), force=force, requested_by="command line")
    if not force or not _is_local(run):
        send_request(run, request)
        return True
    try:
        if controller_failing(run) is None:
            send_request(run, request)
            return True
    except HoldfastError as error:
        if error.exit_code is ExitCode.NOT_FOUND:  # it is over
            raise
    except OSError:  # its log, or the folder, cannot be read
        pass
    from holdfast.launch.local import force_cancel as by_force

    by_force.force_cancel(run, request)
    return False


def _is_local(run: RunDir) -> bool:
    """Whether a run's processes are on this machine, so that they can be killed from here."""
    if os.path.lexists(run.remote):
        return False
    try:
        return accepted(run).backend == LOCAL
    except HoldfastError:
        return os.path.lexists(run.nodes)  # only local runs have this folder


def controller_failing(run: RunDir) -> Finding | None:
    """The finding for a run whose controllers fail repeatedly; None if they do not or have no supervisor."""
    return controller_client.controller_failing(run)


def checkpoint(run: RunDir, *, timeout_s: float) -> CheckpointCommitted:
    """Have a run's ranks take a checkpoint at their next step; returns once it is complete in every replica.

    Raises HoldfastError if no rank can take one, if it fails, and if it is not complete after `timeout_s` seconds.
    """
    waited: dict[int, int] = {}
    for known, event in follow_request(run, CheckpointRequested(at=time.time()), CHECKPOINT, timeout_s):
        if isinstance(event, CheckpointRequested):
            waited = {index: replica.step or 0 for index, replica in known.replicas.items()}
        elif isinstance(event, CheckpointCommitted) and event.step >= waited.get(event.replica, 0):
            waited.pop(event.replica, None)
            if not waited:
                return event
    raise AssertionError("follow_request ends with the result or raises")


def profile_steps(run: RunDir, *, timeout_s: float) -> StepCommitted:
    """Have a run's ranks profile their next steps; returns the step whose metrics hold the step-time breakdown.

    Raises HoldfastError if no rank can, and if the profile is not there after `timeout_s` seconds.
    """
    seen = (event for _, event in follow_request(run, ProfileRequested(at=time.time()), STEP_PROFILE, timeout_s))
    return next(event for event in seen if isinstance(event, StepCommitted) and has_requested(event.metrics))


Updated, update = code_update.UpdateResult, code_update.update
"""Have a run's ranks resume with other code."""


def inject_fault(
    run: RunDir,
    *,
    target: FaultTarget,
    index: int,
    action: FaultAction,
    at_step: int | None = None,
    for_s: float | None = None,
    amount: float | None = None,
) -> None:
    """Inject a fault into a run, immediately or at a step, for some seconds or for good (job/fault_catalog.py)."""
    request = FaultRequested(
        at=time.time(), target=target, index=index, action=action, at_step=at_step, for_s=for_s, amount=amount
    )
    inject_faults(run, [request])


def inject_faults(run: RunDir, requests: Sequence[FaultRequested]) -> None:
    """Inject several faults into a run, or none if one of them is not possible."""
    refuse_finished(run)
    for each in requests:
        check_drill(each, accepted(run), run.run_id)
    for each in requests:
        send_request(run, each)


# Inspect


def accepted(run: RunDir) -> RunSpec:
    """What a run was started with."""
    return RunSpec.read(run.job)


def is_orphaned(run: RunDir) -> bool:
    """Whether a run is unfinished and has no controller, until `restart_controller`."""
    return not run.alive() and not is_finished(run)


def events(run: RunDir) -> list[AnyEvent]:
    """Every event of a run so far, in order."""
    return read_events(run.events)


def status(run: RunDir) -> RunStatus:
    """The status of a run, live or finished."""
    return read_status(run)


def pending_reason(run: RunDir) -> Finding | None:
    """Why a run's nodes are missing, as reported by its cluster; None if there is no reason or no cluster."""
    return controller_client.pending_reason(run)


def staleness(run: RunDir) -> Finding | None:
    """How old the local data of a remote run is, and why; None if its cluster is in contact."""
    return controller_client.staleness(run, now=time.time())


def run_row(run: RunDir) -> RunRow:
    """A run as one table row; the log of a finished run is folded for it only once."""
    try:
        log_bytes = run.events.stat().st_size
    except FileNotFoundError:
        log_bytes = 0
    if (known := _cached_row(run)) is not None and known.log_bytes == log_bytes:
        return known
    now = make_run_row(status(run), log_bytes=log_bytes)
    if now.finished_at is not None:
        _cache_row(run, now)
    return now


def _cached_row(run: RunDir) -> RunRow | None:
    """The cached row of a run; None if there is none, or none that this version can read."""
    import msgspec

    try:
        return msgspec.json.decode(read_small(run.run_row), type=RunRow)
    except (OSError, msgspec.MsgspecError):
        return None


def _cache_row(run: RunDir, known: RunRow) -> None:
    import msgspec

    with contextlib.suppress(OSError):  # an unwritable folder costs time, nothing else
        atomic_write(run.run_row, msgspec.json.encode(known))


def summary(run: RunDir) -> RunSummary:
    """How a run went so far: where its time went, and what failed."""
    reader = EventReader(run.events)
    known, logs = list(reader.read()), str(run.logs) if run.logs.is_dir() else ""
    clock = next((event.clock for event in reversed(known) if isinstance(event, ControllerStarted)), None)
    return summarise(
        known, run=run.run_id, logs=logs, now=Clock(clock)(), corrupt_lines=_corrupt_line_count(reader, known)
    )


def _corrupt_line_count(reader: EventReader, known: Sequence[AnyEvent]) -> int:
    """Number of corrupt lines of a log, at least 1 if its beginning is gone."""
    begins = not known or isinstance(known[0], RunCreated)
    return reader.corrupt_line_count or int(not begins)


def storage_finding(run: RunDir) -> Finding | None:
    """The problem of the disk with an unfinished run's folder, which may keep its controller from reporting it."""
    if is_finished(run):
        return None
    refusal = probe_disk(run.path)
    return refusal and waiting_finding(refusal, "the run waits when the space kept for its log is used up", run.path)


def runs() -> list[RunDir]:
    """All runs of this user, newest first."""
    root = runs_root()
    if not root.is_dir():
        return []
    begun = [(begun_at, RunDir(path)) for path in root.iterdir() if (begun_at := _begun_at(RunDir(path)))]
    return [run for _, run in sorted(begun, key=lambda each: each[0], reverse=True)]


def _begun_at(run: RunDir) -> float:
    """When a run was started; 0 for a folder that is not a run. A run whose job file was lost has its log."""
    for path in (run.job, run.events):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def find_run(prefix: str | None) -> RunDir:
    """The run whose id begins with `prefix`, or ends in it; the latest run if there is no prefix.

    A job's full name selects its latest run.
    """
    known = runs()
    if not known:
        raise failure("no-runs", "there are no runs yet", exit_code=ExitCode.NOT_FOUND, remedy="holdfast run JOB.yaml")
    if prefix is None:
        return _with_controller(_require_owner(known[0]))
    exact = [run for run in known if prefix in (run.run_id, run.run_id.rpartition("-")[2])]
    exact = exact or [run for run in known if run.run_id.rpartition("-")[0] == prefix][:1]
    found = exact or [
        run for run in known if run.run_id.startswith(prefix) or run.run_id.rpartition("-")[2].startswith(prefix)
    ]
    if len(found) == 1:
        return _with_controller(_require_owner(found[0]))
    if found:
        names = tuple(run.run_id for run in found[:10])
        what = f"{prefix!r} could be any of {len(found)} runs"
        raise failure("run-ambiguous", what, exit_code=ExitCode.NOT_FOUND, evidence=names, remedy="give more letters")
    what = f"there is no run {prefix!r}"
    raise failure("run-not-found", what, exit_code=ExitCode.NOT_FOUND, remedy="`holdfast ps` lists them")


def diagnose(
    paths: Sequence[Path], *, stdin: BinaryIO | None = None, hide: Callable[[str], str] | None = None
) -> Diagnosis:
    """Diagnose log files and folders: what happened, where first, and what to do; `-` is standard input.

    `hide` replaces secrets in a line before it is cut.
    """
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs

    for path in paths:
        if str(path) != "-" and not os.path.exists(path):  # False also for a name that is too long
            name, remedy = printable(str(path)), "Give files or folders that are there, or the id of a run."
            raise failure(
                "no-such-file", f"there is no {name}", exit_code=ExitCode.NOT_FOUND, where=name, remedy=remedy
            )
    log_input = LogInput(tuple(paths), stdin=stdin)
    answer = diagnose_logs(log_input, hide=hide)
    if log_input.bytes == 0:
        remedy = "Give the files or the folder of the ranks' logs, `-` for standard input, or the id of a run."
        raise failure(
            "nothing-to-read",
            "no line could be read in what was given",
            exit_code=ExitCode.NOT_FOUND,
            evidence=tuple(log_input.notes),
            remedy=remedy,
        )
    return answer


def diagnose_run(
    run: RunDir, known: Sequence[AnyEvent] | None = None, *, hide: Callable[[str], str] | None = None
) -> Diagnosis:
    """Diagnose a run's last failed attempt from its event log and its ranks' logs.

    `known` are the events to use; by default the whole log. `hide` replaces secrets in a line before it is cut.
    """
    from holdfast.diagnose.failed_attempt import last_failure
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs
    from holdfast.diagnose.run_context import (
        RUN_LOGS_EVIDENCE,
        STACKS_EVIDENCE,
        caused_by_drill,
        is_inconclusive,
        nothing_failed,
        with_node,
        without_evidence,
    )

    known = events(run) if known is None else known
    failed = last_failure(known, str(run.events))
    fabric = CATALOG.get(accepted(run).fabric)
    if failed is None:
        outcome = next((event.outcome for event in reversed(known) if isinstance(event, RunFinished)), None)
        still = None if outcome else _standstill(run, status_from_events(known), DIAGNOSE_IDLE_S, known)
        if still is not None:
            return _diagnose_standstill(run, still, fabric, hide)
        answer = diagnose_logs(LogInput(tuple(find_rank_logs(run).values())), fabric=fabric, hide=hide)
        return answer if outcome is Outcome.FAILED else nothing_failed(answer, outcome)
    job = accepted(run).job
    shared = job.launch is not Launch.PER_RANK
    logs = {
        log.rank: path
        for log, path in find_rank_logs(run).items()
        if (log.attempt, log.replica) == (failed.attempt, failed.replica)
    }
    stacks = tuple(path for path in map(Path, failed.stacks) if path.is_file())
    fact = replace(failed.fact, line=line_of(run.events, failed.event))
    log_input = LogInput((*logs.values(), *stacks), shared_logs=shared)
    # A launcher process has the number of its node's first rank, whichever of its ranks failed.
    first_rank = None if shared and failed.log_rank is None else failed.rank
    if first_rank is None:
        fact = replace(fact, process=replace(fact.process, rank=None))
    answer = diagnose_logs(
        log_input, known=(fact, *failed.exited_early), first_rank=first_rank, fabric=fabric, hide=hide
    )
    wrote = failed.rank if failed.log_rank is None else failed.log_rank
    if is_inconclusive(answer) and wrote in logs:
        answer = replace(answer, last_lines=_last_lines(logs[wrote], hide))
    ranks = range(job.local_world_size if shared else 1)
    answer = with_node(answer, {first + rank: node for first, node in failed.nodes.items() for rank in ranks})
    if failed.drill is not None:
        return caused_by_drill(answer, failed.drill)
    answer = without_evidence(answer, STACKS_EVIDENCE) if stacks else answer
    whole = len(logs) * (job.local_world_size if shared else 1) >= failed.world_size
    return without_evidence(answer, RUN_LOGS_EVIDENCE) if whole else answer


def _last_lines(path: Path, hide: Callable[[str], str] | None) -> tuple[Evidence, ...]:
    """The last lines that a rank wrote."""
    from holdfast.diagnose.diagnosis import Evidence

    lines = (line for line in last_lines(path, 2 * LAST_LINES) if line.strip())
    texts = [(hide(line) if hide else line)[:LAST_LINE_CHARS] for line in lines]
    return tuple(Evidence(where=str(path), text=text, code="") for text in texts[-LAST_LINES:])


STACK_DUMP_TIMEOUT_S = 20.0
"""Maximum seconds to wait for the stacks of a live run's ranks."""


def _standstill(
    run: RunDir, status: RunStatus, least_s: float, known: Sequence[AnyEvent] | None = None
) -> Stall | None:
    """Since when a live run shows no progress; reads its log only if nothing else shows progress."""
    written_s: dict[RankLog, float] = {}
    for log, path in find_rank_logs(run).items():
        with contextlib.suppress(OSError):
            written_s[log] = max(0.0, time.time() - path.stat().st_mtime)
    now = status.now
    stepped_s = (now - replica.recent_steps[-1].ended for replica in status.replicas.values() if replica.recent_steps)
    if min((*written_s.values(), *stepped_s), default=least_s) < least_s:
        return None
    return find_stall(known or events(run), now=now, written_s=written_s, least_s=least_s)


def standstill_finding(run: RunDir, status: RunStatus | None = None) -> Finding | None:
    """The finding for an unfinished run without progress for minutes."""
    still = None if is_finished(run) else _standstill(run, status or read_status(run), STATUS_IDLE_S)
    return still and still.finding(run.run_id)


def dump_stacks(run: RunDir, of: Collection[RankLog], *, timeout_s: float) -> list[StacksDumped]:
    """Have the agents dump the stacks of ranks; returns the dumps that arrived within `timeout_s` seconds."""
    taken: list[StacksDumped] = []
    waiting = set(of)
    with contextlib.suppress(HoldfastError):  # the run restarts or ends meanwhile, or its controller does not answer
        for _, event in follow_request(run, StackDumpRequested(at=time.time()), STACK_DUMP, timeout_s):
            if isinstance(event, StacksDumped):
                taken.append(event)
                waiting.discard(RankLog(attempt=event.attempt, replica=event.replica, rank=event.rank))
            if not waiting:
                break
    return taken


def _diagnose_standstill(
    run: RunDir, still: Stall, fabric: Fabric | None, hide: Callable[[str], str] | None
) -> Diagnosis:
    """Diagnose a live run without progress: its logs, and its ranks' current stacks."""
    from holdfast.diagnose.failed_attempt import early_exit_fact
    from holdfast.diagnose.log_input import LogInput
    from holdfast.diagnose.pipeline import diagnose as diagnose_logs
    from holdfast.diagnose.run_context import STACKS_EVIDENCE, with_standstill, without_evidence

    taken = dump_stacks(run, still.running, timeout_s=STACK_DUMP_TIMEOUT_S)
    files = tuple(path for path in (Path(each.stacks) for each in taken if each.stacks) if path.is_file())
    latest = {(log.attempt, log.replica) for log in still.running}
    logs = tuple(path for log, path in find_rank_logs(run).items() if (log.attempt, log.replica) in latest)
    early = tuple(early_exit_fact(exited, str(run.events)) for exited, _ in still.ended)
    answer = diagnose_logs(LogInput((*logs, *files)), known=early, fabric=fabric, hide=hide)
    answer = with_standstill(answer, "; ".join(filter(None, (still.what, format_stacks(taken)))))
    return without_evidence(answer, STACKS_EVIDENCE) if files else answer


def _require_owner(run: RunDir) -> RunDir:
    """The run; raises if its folder is another user's, whose content cannot be trusted."""
    if run.path.stat().st_uid == os.geteuid():
        return run
    raise failure(
        "not-your-run",
        f"the folder of {run.run_id} belongs to another user",
        exit_code=ExitCode.NOT_PERMITTED,
        where=str(run.path),
        remedy="Ask its owner, or set HOLDFAST_HOME to your own folder.",
    )


def _with_controller(run: RunDir) -> RunDir:
    """The run, after restarting its sync if it runs remotely."""
    if run.remote.exists():
        with contextlib.suppress(HoldfastError):  # without it the local copy is used
            restart_controller(run)
    return run


def follow(run: RunDir, *, poll_s: float = POLL_S) -> Iterator[AnyEvent | None]:
    """Yield a run's events as they arrive, and None every `poll_s` seconds without one; ends with `RunFinished`.

    Raises if the run can have no more events because its supervisor is gone.
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
                raise controller_dead(run)
            yield None
            time.sleep(poll_s)


# Helpers


@contextlib.contextmanager
def _new_run_dir(name: str) -> Generator[RunDir]:
    """A folder for a run, removed again if the block raises: it holds the environment."""
    try:
        folder = RunDir.create(name)
    except OSError as error:
        raise failure(
            "unwritable-folder",
            f"no folder for the run can be made in {runs_root()}",
            exit_code=ExitCode.CANNOT_RUN_HERE,
            where=str(runs_root()),
            evidence=(str(error),),
            remedy="Set HOLDFAST_HOME to a folder you can write to.",
        ) from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _loaded(job: Job | LoadedJob) -> LoadedJob:
    if isinstance(job, LoadedJob):
        return job
    return LoadedJob(job=as_virtual_nodes(job), findings=check_job(job, NAMES), source=YamlSource(name=""))


def _target(name: str, base: Path) -> Target:
    return find_target(name, start=base, environ=os.environ, fabrics=NAMES)


def _submission(
    job: Job,
    target_spec: Target,
    name: str,
    code: CodeArchive | None,
    *,
    at: float = 0.0,
    names: ObjectNames | None = None,
) -> RenderContext:
    """The render context of a job on a cluster, where relative paths start from the shared volume.

    `at` and `names` are known when it is started.
    """
    from holdfast.launch.kubernetes.manifests.render_context import RenderContext, workload_kind
    from holdfast.launch.kubernetes.object_names import PLACEHOLDER_ID, VOLUME_ROOT, ObjectNames

    fabric = resolve(job.fabric.name, target_spec.fabric)
    accepted = RunSpec(
        job=job,
        base=VOLUME_ROOT,
        created_at=at,
        code=code,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        backend=target_spec.backend,
        workload=workload_kind(job, target_spec),
        agent=target_spec.agent,
        durable_controller_disk=target_spec.volume is not None,
        target=name,
    )
    return RenderContext(accepted=accepted, target=target_spec, names=names or ObjectNames.of(job, PLACEHOLDER_ID))


def _accepted(job: Job, name: str, base: Path, archives: Path) -> RunSpec:
    """The run specification of a job on a target; shipped code is archived in the folder `archives`."""
    target = _target(name, base)
    fabric = resolve(job.fabric.name, target.fabric)
    return RunSpec(
        job=job,
        base=str(base.absolute()),
        created_at=time.time(),
        code=package_code(job, base, archives) if target.code is CodeDelivery.SHIPPED else None,
        fabric=fabric.name,
        fabric_env=dict(fabric.env),
        isolation=target.isolation,
        capacity=target.capacity,
        target=name,
        checkpoint_root=target.checkpoint_root,
    )


def _write_inputs(folder: RunDir, accepted: RunSpec, secrets: Mapping[str, str] | None = None) -> None:
    """Write the inputs of the run's supervisor and controllers; `secrets` if its ranks are started from here."""
    write_private(folder.job, accepted.model_dump_json(exclude_defaults=True))
    write_private(folder.token, new_token())
    write_private(folder.secrets, json.dumps({"environ": dict(os.environ), "secrets": secrets or {}}))


def _wait_for_end(run: RunDir) -> None:
    """Wait until the run's last process has exited, at most `LEAVE_S` seconds."""
    deadline = time.monotonic() + LEAVE_S
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
