"""holdfast's Python API: the functions behind each command-line verb.

A composition root: it knows the job models, the targets and where runs are stored. A run belongs to its controller, a
separate process; these functions start it, read its log, and send it requests. The file is long because it is the list
of what Python callers can do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

from msgspec import json, structs
from msgspec.structs import replace

from holdfast import code_update, controller_client, prune_runs, resume_run, run_diagnosis, run_profile
from holdfast.controller_client import (
    CHECKPOINT,
    POLL_S,
    controller_dead,
    follow_request,
    is_finished,
    refuse_finished,
    send_request,
)
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import (
    AnyEvent,
    CancelRequested,
    CheckpointCommitted,
    CheckpointRequested,
    FaultAction,
    FaultRequested,
    FaultTarget,
    Outcome,
    RunFinished,
)
from holdfast.events.log import EventReader, UnsupportedFormat, last_event, read_events
from holdfast.fabric.catalog import CATALOG, NAMES
from holdfast.failure_rates import DEFAULT_RATE
from holdfast.findings import Finding
from holdfast.host.files import atomic_write_shared
from holdfast.job.fault_catalog import check_fault as check_drill
from holdfast.job.launcher_catalog import runs_python
from holdfast.job.loader import LoadedJob, read_text, validate_data, validate_text
from holdfast.job.rules import check_job
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import CheckLevel, Job, Launch, Nodes, Recovery
from holdfast.job.target_files import LOCAL
from holdfast.job.targets import TargetSpec, find_target
from holdfast.job.virtual_nodes import as_virtual_nodes
from holdfast.job.yaml_source import YamlSource
from holdfast.launch.cluster_contact import lost_contact
from holdfast.launch.code import upload_progress as code_upload
from holdfast.launch.code.upload_progress import UploadProgress
from holdfast.launch.init_target import init_target as init_target_file
from holdfast.launch.new_run import one_start_at_a_time
from holdfast.launch.node_requirements import node_requirements
from holdfast.launch.target import (
    TARGET_KINDS,
    Rendered,
    Resumption,
    Submission,
    is_alive,
    open_target,
    refuse_errors,
    target_of,
)
from holdfast.launch.target_runs import NOTHING_ARRIVED, run_not_on_target
from holdfast.os_errors import probe_disk, waiting_finding
from holdfast.report.log_problems import unreadable_log
from holdfast.report.predicted_step import PredictedStep
from holdfast.report.run_figures import report_document, report_markdown
from holdfast.report.run_record import RunRecord, record_run
from holdfast.report.run_row import read_run_row
from holdfast.report.run_status import RunStatus
from holdfast.report.run_summary import RunSummary, summarise
from holdfast.report.status_reducer import read_status
from holdfast.run_dir import RunDir, runs_root

if TYPE_CHECKING:
    from holdfast.job.scheduler_account import SchedulerAccount
    from holdfast.launch.fetch_template import FetchedTemplate
    from holdfast.launch.kubernetes.foreign.lint import LintedManifest
    from holdfast.launch.policy_request import PolicyRequest
    from holdfast.launch.target_machines import TargetMachines
    from holdfast.launch.target_runs import TargetRuns
    from holdfast.plan.ettr_by_scale import EttrCurve
    from holdfast.plan.predict import Plan
    from holdfast.plan.rank_layout import RankLayout
    from holdfast.plan.reliability_plan import ReliabilityPlan
    from holdfast.plan.review import Review
    from holdfast.preflight.node_reports import NodeReports
    from holdfast.prune_runs import Leftover
    from holdfast.web.run_action import RunAction

REVIEW_DAYS = 30.0
"""Days of the simulated run of a review."""

Prediction = TypeVar("Prediction")
CHECK_RUN = "check"
"""Name of a run that only checks its nodes."""

FIRST_COPY_S = 30.0
"""Maximum seconds that a command waits for the log of a run that another machine started."""

LEAVE_S = 5.0
"""Maximum seconds that `follow` waits, after a run's last event, for its processes to exit."""


# Describe


class IfExists(StrEnum):
    """What a start does if this user has a run of the job's name on the target that has not failed."""

    START = "start"
    """Starts another run."""
    ATTACH = "attach"
    """Returns the newest one: it runs, or has succeeded."""
    REFUSE = "refuse"
    """Fails."""


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
    overrides = _overrides(given)
    if path is not None:
        return validate_text(read_text(path), os.fspath(path), overrides, NAMES).loaded_or_raise()
    return validate_data({"command": list(given.get("command", ()))}, overrides, NAMES).loaded_or_raise()


def _overrides(given: Overrides) -> list[str]:
    fields = {key: given.get(key) for key in ("nodes", "gpus_per_node", "ranks_per_node", "name")}
    return [*(f"{key}={value}" for key, value in fields.items() if value is not None), *given.get("overrides", ())]


def load_job(path: Path | None, **given: Unpack[Overrides]) -> Job:
    """Read a job file, or make a job from a command line; raises if it is invalid."""
    return load(path, **given).job


def lint(path: Path) -> LintedManifest | None:
    """The mistakes in a Kubernetes manifest, with patches; None if the file is not a manifest."""
    from holdfast.launch.kubernetes.foreign.lint import lint_manifest
    from holdfast.launch.kubernetes.foreign.manifest_source import is_manifest

    text = read_text(path)
    return lint_manifest(text, os.fspath(path)) if is_manifest(text) else None


def convert(path: Path) -> str:
    """The text of a job file for the training job of a Kubernetes manifest."""
    from holdfast.launch.kubernetes.foreign.job_from_manifest import job_from_manifest

    return job_from_manifest(read_text(path), os.fspath(path))


def check(job: Job | LoadedJob, target: str, *, base: Path) -> tuple[Finding, ...]:
    """All problems and warnings of a job on a target, before anything is started."""
    wanted = _submission(job, target, base)
    return open_target(wanted.spec.kind).check(wanted)


def check_target(loaded: LoadedJob | None, target: str, *, base: Path) -> tuple[Finding, ...]:
    """Everything that a target lacks for a job, or for a minimal one; queries a cluster but creates nothing there.

    Raises HoldfastError if the cluster does not answer, or does not know this user.
    """
    wanted = _submission(loaded or load(None, command=("true",), overrides=("image=any",)), target, base)
    return open_target(wanted.spec.kind).check_site(wanted, for_any_job=loaded is None)


def check_nodes(
    loaded: LoadedJob | None,
    target: str,
    *,
    base: Path,
    nodes: int | None = None,
    level: CheckLevel = CheckLevel.QUICK,
    on_event: Callable[[AnyEvent], object] | None = None,
) -> NodeReports:
    """Check nodes of a target, by a run there that does nothing else; raises HoldfastError if it cannot start."""
    from holdfast.preflight.node_reports import NodeReportsFold  # imported on use: many small files
    from holdfast.preflight.run_checks import name_of, quick_checks

    given = loaded.job if loaded else load_job(None, command=("true",), overrides=("image=any",))
    job = given.model_copy(
        update={
            "name": CHECK_RUN,
            "command": (given.command[0], "-c", "") if runs_python(given) else ("true",),
            "launch": Launch.PER_RANK,
            "nodes": given.nodes if nodes is None else Nodes(min=nodes, max=nodes),
            "recovery": Recovery(prewarm=False),
            "checks": given.checks.model_copy(update={"before_start": level}),
        }
    )
    run = start(job, target, base=base)
    reports = NodeReportsFold(job.nodes.max)
    for event in follow(run):
        if on_event and event:
            on_event(event)
        if event:
            reports.add(event)
    accepted = RunSpec.read(run.job)
    return reports.result(
        checks=tuple(map(name_of, quick_checks(node_requirements(accepted, run)))),
        line_rate=CATALOG[accepted.fabric].expected_bandwidth,
    )


def plan(
    job: Job | LoadedJob, target: str, *, base: Path, machine: str | None = None, calibration: Path | None = None
) -> Plan:
    """The prediction for a job: its best parallel layouts, their step time, memory and cost.

    `machine` names a kind of machine and replaces the target's; `calibration` is a JSON file of measured rates.
    """
    from holdfast.plan.predict import predict
    from holdfast.plan.request import nothing_fits, plan_request

    spec = _target_spec(target, base)
    request = plan_request(_loaded(job).job, base=base, machine=machine or spec.machine, calibration=calibration)
    made, found = predict(
        request.load,
        request.machine,
        nodes=request.nodes,
        per_node=request.per_node,
        fixed=request.fixed,
        budget_tokens=request.budget_tokens,
        price=spec.price_per_gpu_hour,
    )
    if not made.best:
        raise nothing_fits(request, found)
    return made


def rank_layout(plan: Plan, topology: Path) -> RankLayout:
    """The nodes of a topology file in the order of ranks, for a plan's best layout, with what crosses each level."""
    from holdfast.plan.topology_file import lay_out_plan

    return lay_out_plan(plan, topology)


def plan_failures(
    job: Job | LoadedJob,
    target: str,
    *,
    rate: str,
    days: float,
    base: Path,
    machine: str | None = None,
    calibration: Path | None = None,
) -> ReliabilityPlan:
    """What failures cost a job in so many days, by simulation with the controller's own policy.

    `rate` is a published fleet or a number of failures per 1,000 node-days. The step time is predicted if the job has a
    `model` and the machine is known.
    """
    from holdfast.plan.reliability_plan import predict_reliability, reliability_request

    wanted = _loaded(job).job
    step_s = _predicted_step_s(wanted, target, base, machine, calibration)
    return predict_reliability(reliability_request(wanted, rate=rate, days=days, step_s=step_s))


def failures_by_scale(
    job: Job | LoadedJob,
    target: str,
    *,
    rate: str,
    days: float,
    base: Path,
    machine: str | None = None,
    calibration: Path | None = None,
) -> tuple[EttrCurve, ...]:
    """ETTR of a job on fewer and more nodes, by simulation, and of torchrun in a batch job."""
    from holdfast.plan.ettr_by_scale import ettr_by_scale

    wanted = _loaded(job).job
    step_s = _predicted_step_s(wanted, target, base, machine, calibration)
    return ettr_by_scale(wanted, rate=rate, days=days, step_s=step_s)


def _predicted_step_s(job: Job, target: str, base: Path, machine: str | None, calibration: Path | None) -> float | None:
    """None if the job has no model, or the machine is not known."""
    if job.model is None or (machine or _target_spec(target, base).machine) is None:
        return None
    return plan(job, target, base=base, machine=machine, calibration=calibration).best[0].figures.step_s


def write_plan_page(job: Job | LoadedJob, plan: Plan, path: Path) -> None:
    """Write a plan with its scaling curve as one HTML file."""
    from holdfast.plan.plan_page import plan_page

    atomic_write_shared(path, plan_page(_loaded(job).job.name, plan).encode())


def write_failures_page(job: Job | LoadedJob, lost: ReliabilityPlan, curves: Sequence[EttrCurve], path: Path) -> None:
    """Write what failures cost, with ETTR against scale, as one HTML file."""
    from holdfast.plan.plan_page import reliability_page

    atomic_write_shared(path, reliability_page(_loaded(job).job.name, lost, curves).encode())


def write_hostfile(plan: Plan, placed: RankLayout, path: Path) -> None:
    """Write the nodes in the order of ranks, as Open MPI and DeepSpeed read them."""
    slots = plan.gpus // plan.nodes
    atomic_write_shared(path, "".join(f"{node} slots={slots}\n" for node in placed.nodes).encode())


def review(
    job: Job | LoadedJob, target: str, *, base: Path, machine: str | None = None, calibration: Path | None = None
) -> Review:
    """The four artefacts of a design review: layout, job template, network and placement, recovery plan."""
    from holdfast.plan.review import Predictions
    from holdfast.plan.review import review as review_job

    loaded = _loaded(job)
    made, no_plan = _or_reason(lambda: plan(loaded, target, base=base, machine=machine, calibration=calibration))
    lost, no_lost = _or_reason(
        lambda: plan_failures(
            loaded,
            target,
            rate=DEFAULT_RATE.fleet,
            days=REVIEW_DAYS,
            base=base,
            machine=machine if made else None,
            calibration=calibration,
        )
    )
    predictions = Predictions(plan=made, no_plan=no_plan, reliability=lost, no_reliability=no_lost)
    findings = check(loaded, target, base=base)
    return review_job(loaded.job, target, _target_spec(target, base), predictions, findings)


def _or_reason(predict: Callable[[], Prediction]) -> tuple[Prediction | None, str]:
    """The prediction, or why there is none."""
    try:
        return predict(), ""
    except HoldfastError as error:
        return None, "; ".join(finding.what for finding in error.findings)


def render(job: Job | LoadedJob, target: str, *, base: Path, tree: str | None = None) -> Rendered:
    """Exactly what would be sent to the target, or given to each rank; nothing is started.

    With `tree`, the objects of a run with this id that others apply, such as kubectl or a GitOps tool. Raises
    HoldfastError if the job cannot run on a cluster.
    """
    wanted = _submission(job, target, base, tree=tree)
    return open_target(wanted.spec.kind).render(wanted)


init_target = init_target_file
"""Write a first target file of a project from what a cluster shows."""


def fetch_template(target: str, *, base: Path = Path()) -> FetchedTemplate:
    """Validate a target with the published template that it extends, and store the template next to its file.

    Raises HoldfastError if it is not published, if its published content changed after it was fetched, or if the target
    is invalid with it.
    """
    from holdfast.launch.fetch_template import fetch_template as fetch

    return fetch(target, start=base, environ=os.environ)


def machines(target: str, *, base: Path = Path()) -> TargetMachines:
    """The machines of a target: free, used, and those that runs avoid; raises HoldfastError if it does not answer."""
    spec = _target_spec(target, base)
    return open_target(spec.kind).machines(target, spec)


def release_machine(machine: str, target: str, *, base: Path = Path()) -> tuple[Finding, ...]:
    """Let runs use a quarantined machine again; raises HoldfastError if it is not quarantined."""
    spec = _target_spec(target, base)
    return open_target(spec.kind).release_machine(target, spec, machine)


def policies(target: str, request: PolicyRequest, *, base: Path = Path()) -> Rendered:
    """Objects by which a target itself refuses runs that are not set up as requested."""
    spec = _target_spec(target, base)
    return open_target(spec.kind).policies(target, spec, request)


def monitoring_objects(target: str, *, base: Path = Path()) -> Rendered:
    """Alerts and dashboards as objects for a target's cluster; raises HoldfastError if it is none."""
    from holdfast.observe.monitoring_files import monitoring_objects

    spec = _target_spec(target, base)
    return open_target(spec.kind).manifests(target, spec, monitoring_objects())


def write_monitoring_files(folder: Path) -> list[Path]:
    """Write alerts for Prometheus and dashboards for Grafana; returns the paths."""
    from holdfast.observe.monitoring_files import monitoring_files

    folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / name: text for name, text in monitoring_files().items()}
    for path, text in paths.items():
        atomic_write_shared(path, text.encode())
    return list(paths)


# Run


def start(
    job: Job | LoadedJob,
    target: str,
    *,
    base: Path,
    on_findings: Callable[[Sequence[Finding]], object] | None = None,
    if_exists: IfExists = IfExists.START,
) -> RunDir:
    """Start a run and return as soon as its controller answers; raises if the job cannot run here.

    `on_findings` receives the warnings before anything is started. With another `if_exists` than START, calls for the
    same name wait for one another.
    """
    wanted = _submission(job, target, base)
    return _start_once(wanted, open_target(wanted.spec.kind).check, on_findings, if_exists)


def resume(
    run: RunDir,
    target: str | None = None,
    *,
    on_findings: Callable[[Sequence[Finding]], object] | None = None,
    if_exists: IfExists = IfExists.START,
    **given: Unpack[Overrides],
) -> RunDir:
    """Start a run that continues another one from its newest checkpoint, with its job and code.

    `given` overrides fields of the job; by default the target stays. The target must see the checkpoint. Raises
    HoldfastError if the run is not over, and with all that cannot move.
    """
    former = resume_run.read_former_run(run)
    loaded = validate_data(former.job_data, _overrides(given), NAMES).loaded_or_raise()
    loaded, resumed = resume_run.resumed_job(former, loaded)
    where = target or former.accepted.target
    known = resume_run.resume_findings(former, loaded, resumed, where)
    refuse_errors(known)
    wanted = _submission(loaded, where, former.base, resumption=resume_run.resumption(former, resumed))

    def check_all(wanted: Submission) -> tuple[Finding, ...]:
        return (*known, *open_target(wanted.spec.kind).check_site(wanted, for_any_job=False))

    return _start_once(wanted, check_all, on_findings, if_exists)


def _start_once(
    wanted: Submission,
    check: Callable[[Submission], tuple[Finding, ...]],
    on_findings: Callable[[Sequence[Finding]], object] | None,
    if_exists: IfExists,
) -> RunDir:
    if if_exists is IfExists.START:
        return _start(wanted, check, on_findings)
    name = wanted.job.name
    with one_start_at_a_time(name):
        found = _find_by_name(name, wanted.target)
        if found is None:
            return _start(wanted, check, on_findings)
    if if_exists is IfExists.ATTACH:
        return found
    raise failure(
        "run-exists",
        f"{found.run_id} has this name on `{wanted.target}` and has not failed",
        exit_code=ExitCode.USAGE,
        where=found.run_id,
        remedy=f"`holdfast attach {found.run_id}` follows it; another name starts another run.",
    )


def _find_by_name(name: str, target: str) -> RunDir | None:
    """The newest run of a job's name on a target that this user started here and that has not failed."""
    for run in runs():
        with contextlib.suppress(HoldfastError):
            if run.run_id.rpartition("-")[0] == name and accepted(run).target == target:
                last = last_event(run.events)
                if not isinstance(last, RunFinished) or last.outcome is Outcome.SUCCEEDED:
                    return run
    return None


def _start(
    wanted: Submission,
    check: Callable[[Submission], tuple[Finding, ...]],
    on_findings: Callable[[Sequence[Finding]], object] | None,
) -> RunDir:
    findings = check(wanted)
    refuse_errors(findings)
    if on_findings and findings:
        on_findings(findings)
    return open_target(wanted.spec.kind).start(wanted)


def restart_controller(run: RunDir) -> bool:
    """Start a controller for an unfinished run without one; returns whether this call did so."""
    if is_finished(run) or is_alive(run) or not run.secrets.exists():
        return False
    try:
        target_of(run).start_controller(run, accepted(run))
    except HoldfastError:
        if is_alive(run):  # another process was quicker
            return False
        raise
    return True


def cancel(run: RunDir, *, force: bool = False, requested_by: str = "command line") -> bool:
    """End a run: SIGTERM and its grace period, or SIGKILL immediately with `force`; returns whether its controller does
    it.

    With `force` a local run whose controller does not answer is ended without it, and so is a run whose target is yet
    to start its controller.
    """
    request = CancelRequested(at=time.time(), force=force, requested_by=requested_by)
    # Where a file system shows no locks of other machines, a run with a controller must be asked, not killed.
    waits = controller_client.target_reason(run) if is_alive(run) else None
    is_waiting = waits is not None and waits.findings[0].code == "allocation-pending"
    kill = _force_cancel(run) if force or is_waiting else None
    if kill is None:
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
    kill(run, request)
    return False


def _force_cancel(run: RunDir) -> Callable[[RunDir, CancelRequested], None] | None:
    try:
        return target_of(run).force_cancel()
    except HoldfastError:  # its job file is corrupt, and nothing of it is on this machine
        return None


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


StepProfile, profile_steps = run_profile.StepProfile, run_profile.profile_steps
"""Have a run's ranks profile their next steps, and some of them keep a trace."""
nsys_command = run_profile.nsys_command_of
"""The command by which ranks like those of a run are started under Nsight Systems."""
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
    return not is_finished(run) and not is_alive(run)


def events(run: RunDir) -> list[AnyEvent]:
    """Every event of a run so far, in order."""
    return read_events(run.events)


diagnose, diagnose_run = run_diagnosis.diagnose, run_diagnosis.diagnose_run
"""Diagnose log files, or a run's last failed attempt."""
diagnose_running_ranks = run_diagnosis.diagnose_running_ranks
diagnose_native_stacks = run_diagnosis.diagnose_native_stacks
"""Diagnose a live run with several dumps of its ranks' stacks."""
standstill_finding, dump_stacks = run_diagnosis.standstill_finding, run_diagnosis.dump_stacks
"""Whether a live run makes no progress, and where its ranks stand."""
controller_failing = controller_client.controller_failing
"""Whether a run's controllers fail repeatedly."""
status, run_row = read_status, read_run_row
"""The status of a run, live or finished, and as one table row."""


def pending_reason(run: RunDir) -> Finding | None:
    """Why a run's nodes are missing, as reported by its target; None if there is no reason."""
    seen = controller_client.pending_reason(run)
    return seen and seen.findings[0]


def staleness(run: RunDir) -> Finding | None:
    """How old the local data of a remote run is, and why; None if its cluster is in contact."""
    return controller_client.staleness(run, now=time.time())


def run_problems(run: RunDir) -> tuple[Finding, ...]:
    """Why a run's log cannot be read or is not up to date, or why the run cannot continue."""
    try:
        next(EventReader(run.events).read(), None)
    except (UnsupportedFormat, OSError) as error:
        return (unreadable_log(error, run.events),)
    dead = controller_dead(run).findings if is_orphaned(run) else ()
    found = (staleness(run), controller_failing(run), storage_finding(run))
    return (*filter(None, found), *dead)


def upload_progress(run: RunDir) -> UploadProgress | None:
    """How far this machine has uploaded a run's code; None if no upload is in progress."""
    return code_upload.upload_progress(run)


def summary(run: RunDir, status: RunStatus | None = None) -> RunSummary:
    """How a run went so far: where its time went, and what failed; reads its log unless its status is given."""
    status = status or read_status(run)
    return summarise(
        status,
        logs=str(run.logs) if run.logs.is_dir() else "",
        now=status.now,
        evidence=run.evidence_paths(),
        # A layout is searched for about a second, so not at every look at a run in progress.
        predicted_step=_predicted_step(run, status) if status.finished_at is not None else None,
    )


def record(run: RunDir) -> RunRecord:
    """What a report shows of a run: one pass over its log, and its target's scheduler, which has 10 s to answer."""
    found = record_run(EventReader(run.events).read(), run.run_id)
    return structs.replace(found, predicted_step=_predicted_step(run, found.status), scheduler=_scheduler_account(run))


def _scheduler_account(run: RunDir) -> SchedulerAccount | None:
    """What the target's scheduler accounted for a run; None if it has none, or the job file cannot be read."""
    try:
        return target_of(run).scheduler_account(run)
    except HoldfastError:
        return None


def _predicted_step(run: RunDir, status: RunStatus) -> PredictedStep | None:
    """What is predicted for the steps of a run; None if its job names no model, or nothing names its machines."""
    try:
        spec = accepted(run)
        if spec.job.model is None:
            return None
        from holdfast.plan.run_prediction import comparable_steps, compare_step  # most jobs name no model

        steps = comparable_steps(status.leader)
        if not steps:
            return None
        return compare_step(plan(spec.job, spec.target, base=Path(spec.base)), steps, status.leader.metrics)
    except HoldfastError:
        return None


def write_report(records: Sequence[RunRecord], output: str, path: Path | None = None) -> Path:
    """Write the report of runs as `html`, `md` or `json`; returns the path, by default RUN.html in this folder."""
    from holdfast.report.report_page import report_page

    match output:
        case "md":
            text = report_markdown(records)
        case "json":
            text = "".join(f"{json.encode(report_document(each), enc_hook=str).decode()}\n" for each in records)
        case _:
            text = report_page(records)
    written = path or Path(f"{records[0].status.run}.{output}")
    atomic_write_shared(written, text.encode())
    return written


def metrics_text(run: RunDir) -> str:
    """A run's metrics in the format that Prometheus scrapes."""
    from holdfast.observe.exposition import format_log_metrics

    return format_log_metrics(run.run_id, run.events)


def serve_metrics(
    host: str, port: int, token_file: Path | None = None, *, last: int, ready: Callable[[str], None]
) -> None:
    """Serve the metrics of the latest `last` runs until interrupted; `ready` gets the URL once it can be scraped.

    Scrapers must send the text of `token_file`, if given, as their bearer token. Raises HoldfastError if the port is
    taken or the file has none.
    """
    from holdfast.observe import metrics_server

    token = metrics_server.read_token(token_file) if token_file else ""
    with metrics_server.listen(host, port) as listener:
        ready(metrics_server.url_of(listener))
        metrics_server.serve_metrics(listener, lambda: {run.run_id: run.events for run in runs()[:last]}, token=token)


def serve_web(
    run: str, *, port: int, open_browser: bool, actions: Sequence[RunAction] = (), ready: Callable[[str], None]
) -> None:
    """Serve the live page of all runs, at first this one's, until interrupted; `ready` gets its address.

    It offers `actions`, to those who have this address. Raises HoldfastError if the port is taken.
    """
    from holdfast.web.web_server import serve_web

    opener = runs_root() / f"open-{os.getpid()}.html" if open_browser else None
    serve_web(port, run, runs, opener=opener, machines=machines, problems=run_problems, actions=actions, ready=ready)


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


def target_runs(target: str, *, base: Path = Path()) -> TargetRuns | None:
    """The runs that a target shows, whichever machine started them; None if each has a folder on this machine.

    Raises HoldfastError if the target does not answer or refuses this user.
    """
    spec = _target_spec(target, base)
    return open_target(spec.kind).find_runs(spec)


def prune(
    target: str, *, older_than_s: float, named: Collection[str] = (), dry_run: bool = False, base: Path = Path()
) -> tuple[Leftover, ...]:
    """Delete the folders of runs that are over, or on a target that shows its runs their objects there.

    Without names, of those that ended `older_than_s` ago or earlier. Returns them, and with the reason those that stay.
    """
    now = time.time()
    if target != LOCAL and (there := target_runs(target, base=base)) is not None:
        known, spec = {run.run for run in there.runs}, _target_spec(target, base)
        if absent := next((run for run in named if run not in known), None):
            raise run_not_on_target(absent, target)
        return prune_runs.prune_objects(spec, there, now=now, older_than_s=older_than_s, named=named, dry_run=dry_run)
    here = runs()
    if absent := next((run for run in named if run not in {each.run_id for each in here}), None):
        raise _no_such_run(absent)
    return prune_runs.prune_folders(here, now=now, older_than_s=older_than_s, named=named, dry_run=dry_run)


def _begun_at(run: RunDir) -> float:
    """When a run was started; 0 for a folder that is not a run. A run whose job file was lost has its log."""
    for path in (run.job, run.events):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def find_run(prefix: str | None, target: str = LOCAL, *, base: Path = Path()) -> RunDir:
    """The run whose id begins with `prefix`, or ends in it; the latest run if there is no prefix.

    A job's full name selects its latest run. With a target, it is selected among those that the target shows, and one
    that another machine started gets a folder here, with a copy of its log.
    """
    known = {run.run_id: run for run in runs()}
    if target != LOCAL and prefix not in known:
        there = target_runs(target, base=base)
        if there is not None:
            run = _select_there(prefix, there, target)
            return _with_controller(_require_owner(known[run])) if run in known else _adopt(run, target, base)
    if not known:
        remedy = "`holdfast run JOB.yaml` starts one; `--on TARGET` finds a run that another machine started there."
        raise failure("no-runs", "there are no runs yet", exit_code=ExitCode.NOT_FOUND, remedy=remedy)
    run = _select(prefix, tuple(known))
    if run is None:
        raise _no_such_run(prefix)
    return _with_controller(_require_owner(known[run]))


def _no_such_run(run: str | None) -> HoldfastError:
    remedy = "`holdfast ps` lists them; `--on TARGET` also finds a run that another machine started there."
    return failure("run-not-found", f"there is no run {run!r}", exit_code=ExitCode.NOT_FOUND, remedy=remedy)


def _select(prefix: str | None, known: Sequence[str]) -> str | None:
    """The one of these ids, newest first, that `prefix` selects; raises HoldfastError if it could be several."""
    if prefix is None:
        return next(iter(known), None)
    exact = [run for run in known if prefix in (run, run.rpartition("-")[2])]
    exact = exact or [run for run in known if run.rpartition("-")[0] == prefix][:1]
    found = exact or [run for run in known if run.startswith(prefix) or run.rpartition("-")[2].startswith(prefix)]
    if len(found) > 1:
        what = f"{prefix!r} could be any of {len(found)} runs"
        remedy = "give more letters"
        raise failure("run-ambiguous", what, exit_code=ExitCode.NOT_FOUND, evidence=tuple(found[:10]), remedy=remedy)
    return next(iter(found), None)


def _select_there(prefix: str | None, there: TargetRuns, target: str) -> str:
    """The target's run that `prefix` selects; raises HoldfastError if there is none."""
    run = _select(prefix, [each.run for each in there.runs])
    if run is None:
        absent = run_not_on_target(prefix, target)
        raise HoldfastError((*absent.findings, *there.findings), absent.exit_code)
    return run


def _adopt(run: str, target: str, base: Path) -> RunDir:
    """Create the folder of a run that another machine started, and wait for the first copy of its log."""
    spec = _target_spec(target, base)
    folder = open_target(spec.kind).adopt(spec, run)
    restart_controller(folder)
    deadline = time.monotonic() + FIRST_COPY_S
    while folder.alive() and time.monotonic() < deadline:
        silent = lost_contact(folder)
        if silent is None or silent.reason != NOTHING_ARRIVED:
            break
        time.sleep(POLL_S)
    return folder


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
        alive = is_alive(run)
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


def _loaded(job: Job | LoadedJob) -> LoadedJob:
    if isinstance(job, LoadedJob):
        return job
    return LoadedJob(job=as_virtual_nodes(job), findings=check_job(job, NAMES), source=YamlSource(name=""))


def _submission(
    job: Job | LoadedJob,
    target: str,
    base: Path,
    *,
    tree: str | None = None,
    resumption: Resumption | None = None,
) -> Submission:
    spec, loaded = _target_spec(target, base), _loaded(job)
    if spec.hosts and spec.topology:
        from holdfast.launch.quarantine_file import QuarantineFile
        from holdfast.plan.topology_file import order_hosts  # few targets name a topology

        out = {row.machine for row in QuarantineFile(target).read()[0].active(time.time())}
        hosts, findings = order_hosts(loaded.job, spec.hosts, base / spec.topology, avoided=out)
        loaded = replace(loaded, findings=(*loaded.findings, *findings))
        spec = spec.model_copy(update={"hosts": hosts})
    return Submission(loaded=loaded, target=target, spec=spec, base=base, tree=tree, resumption=resumption)


def _target_spec(target: str, base: Path) -> TargetSpec:
    return find_target(target, start=base, environ=os.environ, fabrics=NAMES, kinds=TARGET_KINDS)


def _wait_for_end(run: RunDir) -> None:
    """Wait until the run's last process has exited, at most `LEAVE_S` seconds."""
    deadline = time.monotonic() + LEAVE_S
    while run.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
