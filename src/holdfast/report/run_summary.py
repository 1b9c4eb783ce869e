"""The summary of a run, finished or not, as text: result, goodput, and each failure with its cost."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from holdfast.events import Outcome, UpdateEnded, WorldSizeChanged
from holdfast.findings import Finding
from holdfast.metrics.metric_text import format_metrics
from holdfast.report.formatting import count, duration, percentage, sanitize, short_digest
from holdfast.report.goodput import Account, TimeCategory
from holdfast.report.predicted_step import PredictedStep
from holdfast.report.run_history import CodeVersion, RecoverySummary
from holdfast.report.run_status import RunStatus
from holdfast.report.world_size_text import format_world_size

OTHER_FINDINGS_SHOWN = 5
BAR_WIDTH = 24
"""Width in characters of a 100 % bar."""


class Heading(StrEnum):
    """Headings of the text."""

    TIME = "where the time went"
    FAILED = "what failed"
    OTHER_FINDINGS = "what was noticed"
    WORLD_SIZES = "how many took part"
    VERSIONS = "which code ran"
    CODE = "code"
    LOGS = "logs"
    EVIDENCE = "evidence"


class RunSummary(Struct, frozen=True, kw_only=True):
    """The summary of a run."""

    run: str
    job: str
    outcome: Outcome | None
    """None while the run is not finished."""
    exit_code: int | None
    reason: str
    finding: Finding | None
    """The finding that ended the run, if one did."""
    account: Account
    recoveries: tuple[RecoverySummary, ...]
    world_size_changes: tuple[WorldSizeChanged, ...]
    """Changes of the world size, oldest first."""
    restarts: int
    logs: str
    evidence: tuple[str, ...] = ()
    """Folders with the evidence of failures, one per node and failure, the newest last."""
    other_findings: tuple[Finding, ...] = ()
    """Errors and warnings that caused no recovery, each once, in order."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last committed step; for metrics reported only with some steps, the latest value."""
    corrupt_lines: int = 0
    """Number of corrupt log lines; their events are missing here."""
    resumed_run: str = ""
    """The run that it resumed, from `resumed_step`; empty if none."""
    resumed_step: int = 0
    code: str = ""
    """Digest of the code that ran last; empty if ranks ran in the working directory."""
    code_versions: tuple[CodeVersion, ...] = ()
    """The code of each step, oldest first."""
    updates: tuple[UpdateEnded, ...] = ()
    """Outcomes of the requested code updates."""
    fabric: str = ""
    """What carried the traffic between nodes in the last attempt; empty if not known."""
    predicted_step: PredictedStep | None = None
    """The prediction for its steps; none if none can be made."""


def summarise(
    status: RunStatus,
    *,
    logs: str,
    now: float,
    evidence: tuple[str, ...] = (),
    predicted_step: PredictedStep | None = None,
) -> RunSummary:
    """Project a status; `logs` is the folder of the ranks' output, `evidence` are the folders of its failures.

    `now` (Unix seconds) ends a live run's account.
    """
    history = status.history
    return RunSummary(
        run=status.run,
        job=status.job,
        outcome=status.outcome if status.finished_at is not None else None,
        exit_code=status.exit_code,
        reason=status.reason,
        finding=history.end,
        account=status.account(now),
        recoveries=history.recoveries,
        world_size_changes=history.world_size_changes,
        restarts=status.restarts,
        logs=logs,
        evidence=evidence,
        other_findings=tuple(history.raised.values()),
        metrics=history.metrics,
        corrupt_lines=status.corrupt_lines,
        resumed_run=status.resumed_run,
        resumed_step=status.resumed_step,
        code=status.code,
        code_versions=history.code_versions,
        updates=history.updates,
        fabric=status.fabric,
        predicted_step=predicted_step,
    )


def format_maybe_recomputed(seconds: float) -> str:
    """Cost of restarting a program without a Session."""
    unless = "unless it loads its own checkpoint, it repeats"
    return f"the program has no Session: {unless} the last {duration(seconds)}"


def format_ettr(account: Account) -> str:
    """The ETTR, or the range that it lies in; empty if no steps are reported."""
    if account.ettr is None or account.most_ettr is None:
        return ""
    most = f" to {percentage(account.most_ettr)}" if account.most_ettr > account.ettr else ""
    return f"ETTR {percentage(account.ettr)}{most}"


def format_summary(summary: RunSummary) -> str:
    """The summary as text."""
    blocks = [
        _result(summary),
        *_time(summary.account),
        *_failures(summary),
        *_other_findings(summary),
        *_worlds(summary),
        *_versions(summary),
        _locations(summary),
    ]
    if summary.corrupt_lines:
        blocks.insert(1, f"  incomplete: {count(summary.corrupt_lines, 'line')} of the event log cannot be read")
    return "\n\n".join(blocks)


def _result(summary: RunSummary) -> str:
    word = summary.outcome.value if summary.outcome else "is not over"
    account = summary.account
    ettr = format_ettr(account) or "no steps reported, so no ETTR"
    facts = [count(account.steps, "step")] if account.steps else []
    facts += [duration(account.total_s), count(summary.restarts, "restart"), ettr]
    facts += [f"resumed {summary.resumed_run} after step {summary.resumed_step:,}"] if summary.resumed_run else []
    because = f": {sanitize(summary.reason)}" if summary.reason else ""
    code = f" (exit code {summary.exit_code})" if summary.exit_code else ""
    last = f"\n  last step: {', '.join(words)}" if (words := format_metrics(summary.metrics)) else ""
    fabric = f"\n  fabric: {sanitize(summary.fabric)}" if summary.fabric else ""
    predicted = "".join(f"\n  {words}" for words in summary.predicted_step.lines) if summary.predicted_step else ""
    return f"{summary.run} {word}{because}{code}\n  {', '.join(facts)}{last}{predicted}{fabric}"


def _locations(summary: RunSummary) -> str:
    code = [f"{Heading.CODE}  {short_digest(summary.code)}, shipped"] if summary.code else []
    logs = [f"{Heading.LOGS}  {summary.logs}"] if summary.logs else []
    more = f" and {len(summary.evidence) - 1} more" if len(summary.evidence) > 1 else ""
    evidence = [f"{Heading.EVIDENCE}  {summary.evidence[-1]}{more}"] if summary.evidence else []
    return "\n".join([*code, *logs, *evidence])


UNREMARKABLE_CATEGORIES = frozenset({TimeCategory.STARTING, TimeCategory.RUNNING, TimeCategory.STOPPING})
"""Categories of a run without steps and failures: a table of only these is not shown."""


def _time(account: Account) -> list[str]:
    if account.parts.keys() <= UNREMARKABLE_CATEGORIES:
        return []
    lines: list[str] = []
    width = max(14, *(len(part) + 1 for part in account.parts))
    for part in TimeCategory:
        spent = account.parts.get(part, 0.0)
        if spent <= 0:
            continue
        fraction = spent / account.total_s
        bar = "█" * round(fraction * BAR_WIDTH) or "▏"
        lines.append(
            f"  {part.value:<{width}}{duration(spent):>13}{percentage(fraction):>9}  {bar}{_note(part, account)}"
        )
    return _block(Heading.TIME, lines)


def _note(part: TimeCategory, account: Account) -> str:
    """The note after a row of the table."""
    match part:
        case TimeCategory.RECOMPUTING if account.recomputed_steps:
            return f"  {count(account.recomputed_steps, 'step')} done again"
        case TimeCategory.MAYBE_RECOMPUTING:
            return "  unless it loaded its own checkpoint"
        case _:
            return ""


def _failures(summary: RunSummary) -> list[str]:
    """One block with every recovery, and the finding that ended the run if it is another one."""
    lines: list[str] = []
    for recovery in summary.recoveries:
        finding = recovery.finding
        lines.append(f"  after {duration(recovery.after_s)}  {sanitize(finding.what)}  [{sanitize(finding.code)}]")
        lines += [f"    | {sanitize(line, 300)}" for line in finding.evidence[:3]]
        lines.append(f"    {recovery.action}{_cost(recovery)}")
    known = {recovery.finding.code for recovery in summary.recoveries}
    ended = summary.finding
    if ended is not None and ended.code not in known:
        lines.append(f"  {sanitize(ended.what)}  [{sanitize(ended.code)}]")
        lines += [f"    | {sanitize(line, 300)}" for line in ended.evidence[:3]]
    if ended is not None and ended.remedy:
        lines.append(f"  what to do: {sanitize(ended.remedy)}")
    return _block(Heading.FAILED, lines)


def _worlds(summary: RunSummary) -> list[str]:
    lines = [f"  attempt {world.attempt}  {format_world_size(world)}" for world in summary.world_size_changes]
    return _block(Heading.WORLD_SIZES, lines)


def _versions(summary: RunSummary) -> list[str]:
    """One block with the first step of each code version, if the code changed."""
    lines = [f"  from step {version.step}  {short_digest(version.digest)}" for version in summary.code_versions]
    updates = [f"  after step {event.step} an update was {event.outcome}" for event in summary.updates]
    return _block(Heading.VERSIONS, [*lines, *updates] if updates or len(lines) > 1 else [])


def _other_findings(summary: RunSummary) -> list[str]:
    """One block with the other findings; only the newest if there are many."""
    lines: list[str] = []
    for finding in summary.other_findings[-OTHER_FINDINGS_SHOWN:]:
        lines.append(f"  {sanitize(finding.what)}  [{sanitize(finding.code)}]")
        lines += [f"    | {sanitize(line, 300)}" for line in finding.evidence[:3]]
        lines += [f"    what to do: {sanitize(finding.remedy)}"] if finding.remedy else []
    if hidden := len(summary.other_findings) - OTHER_FINDINGS_SHOWN:
        lines += [f"  and {hidden} more before: `holdfast events`"] if hidden > 0 else []
    return _block(Heading.OTHER_FINDINGS, lines)


def _block(heading: Heading, lines: list[str]) -> list[str]:
    return ["\n".join([heading, *lines])] if lines else []


def _cost(recovery: RecoverySummary) -> str:
    others = recovery.other_replica_step_s
    continued = f"; another replica continued, with a step of {others:.2f} s" if others is not None else ""
    maybe = f"; {format_maybe_recomputed(recovery.maybe_recomputed_s)}" if recovery.maybe_recomputed_s else ""
    if recovery.until_step_s is None:
        return maybe or continued
    again = f", {count(recovery.recomputed_steps, 'step')} done again" if recovery.recomputed_steps else ""
    its = "its" if others is not None else "the"
    return (
        f"{continued}; {its} next step was committed {duration(recovery.until_step_s)} after the failure{again}{maybe}"
    )
