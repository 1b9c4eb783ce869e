"""What the live page shows of a run, as JSON in parts: a part is sent again only when it has changed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from holdfast.diagnose.knowledge.index import find
from holdfast.events import StepTimesCompared
from holdfast.findings import Finding
from holdfast.report.formatting import size
from holdfast.report.goodput import TimeCategory
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_record import MarkKind, Point, Quantity, RunRecord
from holdfast.report.run_status import NodePhase, ReplicaStatus

MAX_FAILURES = 50
"""Failures that are shown, the last ones."""
LETTERS: Mapping[RankPhase, str] = {
    RankPhase.RUNNING: "r",
    RankPhase.EXITED: "e",
    RankPhase.FAILED: "f",
    RankPhase.HUNG: "h",
    RankPhase.STOPPED: "s",
    RankPhase.LOST: "l",
}
"""One letter for each rank of the grid."""


class _Part(NamedTuple):
    """One part of the view."""

    name: str
    depends_on: Callable[[RunRecord], object]
    """Compared by identity: while it is the same object, so is the part."""
    read: Callable[[RunRecord, float], Any]


def _head(record: RunRecord, now: float) -> dict[str, Any]:
    status, leader = record.status, record.status.leader
    times = leader.step_times if status.is_progressing(now) else None
    account = status.account(None if status.finished_at else now)
    return {
        "run": status.run,
        "job": status.job,
        "phase": status.phase.value,
        "waiting_for": status.waiting_for,
        "reason": status.reason,
        "degraded": status.is_degraded,
        "fabric": status.fabric,
        "ettr": account.ettr,
        "total_s": account.total_s,
        "step": leader.step,
        "total_steps": leader.total_steps,
        "step_s": leader.seconds_per_step if status.is_progressing(now) else None,
        "step_p50_p99_s": (times.step_p50_s, times.step_p99_s) if times else None,
        "own_p50_p99_s": (times.own_p50_s, times.own_p99_s) if times else None,
        "remaining_s": leader.remaining_s if status.finished_at is None and status.is_progressing(now) else None,
        "tokens_per_s": status.tokens_per_s if status.is_progressing(now) else None,
        "stalled_s": leader.stalled_s(now) if status.finished_at is None else 0.0,
        "loss": leader.loss,
        "mfu": leader.metrics.get(Quantity.MFU),
        "restarts": status.restarts,
        "checkpoint_step": status.checkpoint.step if status.checkpoint else None,
        "checkpoint_size": size(status.checkpoint.size_bytes) if status.checkpoint else "",
        "checkpoint_age_s": max(0.0, now - status.checkpoint.at) if status.checkpoint else None,
        "time": {part.value: account.parts[part] for part in TimeCategory if account.parts.get(part)},
        "created_at": status.created_at,
        "now": status.finished_at or now,
        "over": status.finished_at is not None,
    }


def _nodes(record: RunRecord, _now: float) -> list[dict[str, Any]]:
    return [
        {"node": each.node, "phase": each.phase.value, "host": each.hostname, "standby": each.standby}
        | ({"reason": each.reason} if each.reason and each.phase is not NodePhase.JOINED else {})
        for each in record.status.nodes.values()
    ]


def _ranks(record: RunRecord, _now: float) -> list[dict[str, Any]]:
    return [_replica(each) for each in record.status.replicas.values()]


def _replica(replica: ReplicaStatus) -> dict[str, Any]:
    """The phase of each rank as a letter, in order, and on how many consecutive ranks each node has them."""
    ranks = list(replica.ranks.values())
    odd = [each for each in ranks if each.detail]
    return {
        "replica": replica.replica,
        "attempt": replica.attempt,
        "letters": "".join(LETTERS[each.phase] for each in ranks),
        "nodes": _run_lengths([each.node for each in ranks]),
        "details": {str(each.rank): each.detail for each in odd[:MAX_FAILURES]},
    }


def _lags(record: RunRecord, _now: float) -> list[dict[str, Any]]:
    return [_lag(each.step_times) for each in record.status.replicas.values() if each.step_times]


def _lag(times: StepTimesCompared) -> dict[str, Any]:
    """How far the slowest ranks of a replica are behind the median, and how far the others are at most."""
    lags = [times.lag_of(each) for each in times.slowest]
    return {
        "replica": times.replica,
        "steps": (times.first_step, times.last_step),
        "phases_s": times.phases_s,
        "ranks": [
            {"rank": each.rank, "own_s": each.own_s, "lag": lag, "phase": each.phase, "beyond_s": each.beyond_s}
            for each, lag in zip(times.slowest, lags, strict=True)
        ],
        "others": max(0.0, lags[-1]) if times.ranks > len(lags) > 0 else None,
    }


def _run_lengths(values: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = value, found[-1][1] + 1
        else:
            found.append((value, 1))
    return found


def _curves(record: RunRecord, _now: float) -> dict[str, Any]:
    """By replica, the steps and the value of each quantity that the program reports; null where one has none."""
    return {str(replica): _curve(points) for replica, points in record.curves.items()}


def _curve(points: Sequence[Point]) -> dict[str, Any]:
    values = {quantity.value: [point.of(quantity) for point in points] for quantity in Quantity}
    known = {name: found for name, found in values.items() if any(value is not None for value in found)}
    return {"step": [point.step for point in points], **known}


def _marks(record: RunRecord, _now: float) -> dict[str, Any]:
    return {kind.value: [(mark.at, mark.text) for mark in record.marks.get(kind, ())] for kind in MarkKind}


def _failures(record: RunRecord, _now: float) -> list[dict[str, Any]]:
    return [
        {
            "after_s": each.after_s,
            "attempt": each.attempt,
            "action": each.action,
            "until_step_s": each.until_step_s,
            **finding_view(each.finding),
        }
        for each in record.status.history.recoveries[-MAX_FAILURES:][::-1]
    ]


def _findings(record: RunRecord, _now: float) -> list[dict[str, Any]]:
    """The latest that are not a failure's own."""
    failures = {(each.finding.code, each.finding.what) for each in record.status.history.recoveries}
    others = [each for each in record.status.findings if (each.code, each.what) not in failures]
    return [{"severity": each.severity.value, **finding_view(each)} for each in reversed(others)]


def finding_view(finding: Finding) -> dict[str, Any]:
    """A finding with its explanation."""
    known = next((each for each in find(finding.code) if each.code == finding.code), None)
    return {
        "code": finding.code,
        "what": finding.what,
        "where": finding.where,
        "evidence": finding.evidence[:12],
        "cause": known.cause if known else "",
        "remedy": finding.remedy or (known.remedy if known else ""),
    }


def _always(_record: RunRecord) -> object:
    return object()


def _newest_marks(record: RunRecord) -> object:
    return tuple((kind, found[-1]) for kind, found in record.marks.items())


def _step_times(record: RunRecord) -> object:
    return tuple(each.step_times.at if each.step_times else None for each in record.status.replicas.values())


def _rank_tables(record: RunRecord) -> object:
    return tuple(id(each.ranks) for each in record.status.replicas.values())


PARTS: tuple[_Part, ...] = (
    _Part("head", _always, _head),
    _Part("nodes", attrgetter("status.nodes"), _nodes),
    _Part("ranks", _rank_tables, _ranks),
    _Part("lags", _step_times, _lags),
    _Part("curves", attrgetter("status.history.latest_steps"), _curves),
    _Part("marks", _newest_marks, _marks),
    _Part("failures", attrgetter("status.history.recoveries"), _failures),
    _Part("findings", attrgetter("status.findings"), _findings),
)


class RunView:
    """What one reader of a run has been sent."""

    def __init__(self) -> None:
        self._made_of: dict[str, object] = {}

    def changed(self, record: RunRecord, now: float) -> dict[str, Any]:
        """The parts that may have changed since the last call."""
        found: dict[str, Any] = {}
        for part in PARTS:
            made_of = part.depends_on(record)
            before = self._made_of.get(part.name)
            if before is made_of or (isinstance(made_of, tuple) and before == made_of):
                continue
            self._made_of[part.name] = made_of
            found[part.name] = part.read(record, now)
        return found
