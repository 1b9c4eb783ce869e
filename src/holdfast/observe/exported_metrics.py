"""The table of what is exported of a run, one row for each metric. Pure.

Every series has the label `run`. At 16,384 ranks a run has at most 5,000 series: ranks are counted by phase, and only
two metrics have a series for each node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from holdfast.metrics.metric_catalog import CATALOG, METRICS, Metric
from holdfast.observe.run_observation import Histogram, Raised, RunObservation
from holdfast.report.goodput import TimeCategory
from holdfast.report.rank_table import RankPhase
from holdfast.report.run_status import NodePhase, ReplicaStatus, RunPhase

PREFIX = "holdfast_"
USER_METRICS = "user_metric"
"""The metric that has a program's own metrics, by name."""
MAX_USER_METRICS = 128


class Kind(StrEnum):
    """A metric's type, as Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Sample(NamedTuple):
    """One series of a metric, now."""

    labels: tuple[str, ...]
    """Values of the row's labels."""
    value: float | Histogram


_Read = Callable[[RunObservation, float], Iterable[Sample]]
"""From what is known of a run and the time, in Unix seconds."""


class ExportedMetric(NamedTuple):
    """One row."""

    name: str
    """Without prefix, and without `_total` for counters; its unit is its last word."""
    kind: Kind
    help: str
    read: _Read
    labels: tuple[str, ...] = ()
    """Without `run`, which all have."""
    unit: str = ""


def _one(value: Callable[[RunObservation, float], float | Histogram | None]) -> _Read:
    """One series; none while the value is not known."""

    def read(known: RunObservation, now: float) -> Iterable[Sample]:
        found = value(known, now)
        return () if found is None else (Sample((), found),)

    return read


def _by_replica(value: Callable[[ReplicaStatus, float], float | None]) -> _Read:
    def read(known: RunObservation, now: float) -> Iterable[Sample]:
        for index, replica in known.status.replicas.items():
            if (found := value(replica, now)) is not None:
                yield Sample((str(index),), found)

    return read


def _by_state(states: Iterable[str], number: Callable[[RunObservation], Mapping[str, float]]) -> _Read:
    """One series for each state, also for those of which there is none."""
    every = tuple(states)

    def read(known: RunObservation, _now: float) -> Iterable[Sample]:
        found = number(known)
        return (Sample((state,), found.get(state, 0)) for state in every)

    return read


def _run_info(known: RunObservation, _now: float) -> Iterable[Sample]:
    yield Sample((known.status.job, known.status.code), 1)


def _phase(known: RunObservation) -> Mapping[str, float]:
    return {known.status.phase.value: 1}


def _nodes(known: RunObservation) -> Mapping[str, float]:
    return Counter(node.phase.value for node in known.status.nodes.values() if not node.standby)


def _standbys(known: RunObservation) -> Mapping[str, float]:
    return Counter("ready" if node.ready else "preparing" for node in known.status.nodes.values() if node.standby)


def _checks(known: RunObservation) -> Mapping[str, float]:
    failed = known.failed_nodes.bit_count()
    return {"passed": known.checked_nodes.bit_count() - failed, "failed": failed}


def _spent(known: RunObservation, now: float) -> Iterable[Sample]:
    parts = known.status.account(now).parts
    return (Sample((part.value,), parts.get(part, 0.0)) for part in TimeCategory)


def _raised(
    found: Callable[[RunObservation], Mapping[tuple[str, ...], Raised]], read: Callable[[Raised], float]
) -> _Read:
    return lambda known, _now: (Sample(key, read(each)) for key, each in found(known).items())


def _failures(known: RunObservation) -> Mapping[tuple[str, ...], Raised]:
    return {(code,): each for code, each in known.failures.items()}


def _findings(known: RunObservation) -> Mapping[tuple[str, ...], Raised]:
    return known.findings


def _ranks(known: RunObservation, _now: float) -> Iterable[Sample]:
    for index, replica in known.status.replicas.items():
        found = Counter(rank.phase for rank in replica.ranks.values())
        yield from (Sample((str(index), phase.value), found[phase]) for phase in RankPhase)


def _step_times(known: RunObservation, _now: float) -> Iterable[Sample]:
    return (Sample((str(index),), times) for index, times in known.step_times.items())


def _tokens(known: RunObservation, _now: float) -> Iterable[Sample]:
    return (Sample((str(index),), tokens) for index, tokens in known.tokens.items() if tokens)


def _fabric(known: RunObservation, _now: float) -> Iterable[Sample]:
    for index, replica in known.status.replicas.items():
        if (fabric := replica.worst_fabric) is not None:
            yield Sample((str(index), fabric.line), fabric.severity)


def _node_info(known: RunObservation, _now: float) -> Iterable[Sample]:
    for index, node in known.status.nodes.items():
        if node.hostname:
            yield Sample((str(index), node.hostname), 1)


def _node_up(known: RunObservation, _now: float) -> Iterable[Sample]:
    for index, node in known.status.nodes.items():
        yield Sample((str(index),), node.phase is NodePhase.JOINED)


def _user_metrics(known: RunObservation, _now: float) -> Iterable[Sample]:
    for index, replica in known.status.replicas.items():
        own = [name for name in replica.metrics if name.partition("@")[0] not in METRICS]
        yield from (Sample((str(index), name), replica.metrics[name]) for name in sorted(own)[:MAX_USER_METRICS])


def _waited_s(known: RunObservation, now: float) -> float | None:
    """So far, if it still waits."""
    status = known.status
    if known.waited_s is not None or status.created_at is None:
        return known.waited_s
    return max(0.0, (now if status.finished_at is None else status.finished_at) - status.created_at)


_RUN_ROWS = (
    ExportedMetric("run", Kind.INFO, "The run's job and its code's digest.", _run_info, ("name", "code")),
    ExportedMetric("run_phase", Kind.GAUGE, "1 for the run's phase.", _by_state(RunPhase, _phase), ("phase",)),
    ExportedMetric(
        "run_created_timestamp_seconds",
        Kind.GAUGE,
        "When the run was created, in Unix seconds.",
        _one(lambda known, _: known.status.created_at),
        unit="seconds",
    ),
    ExportedMetric(
        "run_wait_seconds",
        Kind.GAUGE,
        "Seconds that the run waited for its first nodes: in a queue, for machines and for their images.",
        _one(_waited_s),
        unit="seconds",
    ),
    ExportedMetric(
        "run_finished_timestamp_seconds",
        Kind.GAUGE,
        "When the run ended, in Unix seconds; missing until then.",
        _one(lambda known, _: known.status.finished_at),
        unit="seconds",
    ),
    ExportedMetric(
        "run_exit_code",
        Kind.GAUGE,
        "The run's exit code; missing until it has ended.",
        _one(lambda known, _: None if known.status.finished_at is None else known.status.exit_code),
    ),
    ExportedMetric(
        "run_ettr_ratio",
        Kind.GAUGE,
        "Effective training time ratio: the share of the run's time in which it trained. Missing without steps.",
        _one(lambda known, now: known.status.account(now).ettr),
        unit="ratio",
    ),
    ExportedMetric(
        "run_time_seconds",
        Kind.GAUGE,
        "The run's time by category, the mean of its replicas; the categories add up to its age.",
        _spent,
        ("category",),
        unit="seconds",
    ),
    ExportedMetric(
        "run_steps",
        Kind.COUNTER,
        "Steps of the run; a repeated one counts once.",
        _one(lambda known, now: known.status.account(now).steps),
    ),
    ExportedMetric(
        "run_recomputed_steps",
        Kind.COUNTER,
        "Steps that were repeated after a failure.",
        _one(lambda known, now: known.status.account(now).recomputed_steps),
    ),
    ExportedMetric(
        "run_restarts", Kind.COUNTER, "Attempts after the first.", _one(lambda known, _: known.status.restarts)
    ),
    ExportedMetric(
        "run_failures",
        Kind.COUNTER,
        "Failures by the code of their cause (`holdfast explain CODE`).",
        _raised(_failures, lambda each: each.times),
        ("code",),
    ),
    ExportedMetric(
        "run_failure_timestamp_seconds",
        Kind.GAUGE,
        "When the last such failure was, in Unix seconds.",
        _raised(_failures, lambda each: each.last_at),
        ("code",),
        unit="seconds",
    ),
    ExportedMetric(
        "run_recovery_seconds",
        Kind.HISTOGRAM,
        "Seconds from a failure to the end of its replica's next step.",
        _one(lambda known, _: known.recovery_times),
        unit="seconds",
    ),
    ExportedMetric(
        "run_findings",
        Kind.COUNTER,
        "Findings other than failures, by code (`holdfast explain CODE`) and severity.",
        _raised(_findings, lambda each: each.times),
        ("code", "severity"),
    ),
    ExportedMetric(
        "run_finding_timestamp_seconds",
        Kind.GAUGE,
        "When it was last raised, in Unix seconds. Alerts use it, since Prometheus sees no increase in a new counter.",
        _raised(_findings, lambda each: each.last_at),
        ("code", "severity"),
        unit="seconds",
    ),
    ExportedMetric(
        "run_degraded",
        Kind.GAUGE,
        "1 while the run has fewer nodes than requested.",
        _one(lambda known, _: known.status.is_degraded),
    ),
    ExportedMetric("run_nodes", Kind.GAUGE, "Nodes by phase.", _by_state(NodePhase, _nodes), ("phase",)),
    ExportedMetric(
        "run_checked_nodes",
        Kind.GAUGE,
        "Nodes by the verdict of their last checks before a start.",
        _by_state(("passed", "failed"), _checks),
        ("verdict",),
    ),
    ExportedMetric(
        "run_standby_nodes",
        Kind.GAUGE,
        "Standby nodes by state.",
        _by_state(("preparing", "ready"), _standbys),
        ("state",),
    ),
    ExportedMetric(
        "run_checkpoint_step",
        Kind.GAUGE,
        "Step of the last complete checkpoint.",
        _one(lambda known, _: None if known.status.checkpoint is None else known.status.checkpoint.step),
    ),
    ExportedMetric(
        "run_checkpoint_timestamp_seconds",
        Kind.GAUGE,
        "When the last checkpoint was complete, in Unix seconds.",
        _one(lambda known, _: None if known.status.checkpoint is None else known.status.checkpoint.at),
        unit="seconds",
    ),
    ExportedMetric(
        "run_checkpoint_size_bytes",
        Kind.GAUGE,
        "Size of the last complete checkpoint, with the files of all ranks.",
        _one(lambda known, _: (known.status.checkpoint and known.status.checkpoint.size_bytes) or None),
        unit="bytes",
    ),
    ExportedMetric(
        "run_last_event_timestamp_seconds",
        Kind.GAUGE,
        "When the last event of the run's log happened, in Unix seconds.",
        _one(lambda known, _: known.last_event_at),
        unit="seconds",
    ),
    ExportedMetric(
        "run_log_unwritten_seconds",
        Kind.GAUGE,
        "Age of the oldest event that is not in the log yet: of steps that will share a line, or of all while the disk "
        "is full. Only from a controller.",
        _one(lambda known, _: None if known.live is None else known.live.log_lag.unwritten_s),
        unit="seconds",
    ),
    ExportedMetric(
        "run_log_unreplicated_seconds",
        Kind.GAUGE,
        "Age of the oldest lines of the log that no node has been sent. Only from a controller with log replicas.",
        _one(lambda known, _: None if known.live is None else known.live.log_lag.unreplicated_s),
        unit="seconds",
    ),
    ExportedMetric("node", Kind.INFO, "The host of a node.", _node_info, ("node", "hostname")),
    ExportedMetric("node_up", Kind.GAUGE, "1 while the node's agent is connected.", _node_up, ("node",)),
)


def _node_row(name: str, help: str, kind: Kind = Kind.GAUGE, unit: str = "") -> ExportedMetric:
    """The row of what monitors read."""

    def read(known: RunObservation, _now: float) -> Iterable[Sample]:
        for node, values in known.live.nodes.items() if known.live is not None else ():
            if name in values:
                yield Sample((str(node),), values[name])

    return ExportedMetric(f"node_{name}", kind, f"{help} Only from a controller.", read, ("node",), unit)


NODE_ROWS = (
    _node_row("memory_used_ratio", "Memory in use, of the limit nearest to exhaustion.", unit="ratio"),
    _node_row("memory_stalled_ratio", "Share of 10 s in which all processes waited for memory.", unit="ratio"),
    _node_row("cpu_stalled_ratio", "Share of 10 s in which all processes waited for a CPU.", unit="ratio"),
    _node_row("cpu_throttled_periods", "Periods in which the node used up its CPU quota.", Kind.COUNTER),
    _node_row("disk_requests", "Requests to the node's disks.", Kind.COUNTER),
    _node_row("disk_wait_seconds", "Seconds that these requests took, added up.", Kind.COUNTER),
    _node_row("links_down", "Network interfaces without a link, unused ones included."),
    _node_row("rdma_ports_down", "RDMA ports that were active and are not any more."),
    _node_row("rdma_port_errors", "Symbol errors, receive errors and link recoveries of the RDMA ports.", Kind.COUNTER),
    _node_row("gpus_failed", "GPUs that are lost or need a reset."),
    _node_row("gpu_temperature_celsius", "Temperature of the hottest GPU.", unit="celsius"),
    _node_row("gpu_power_watts", "Power of all GPUs.", unit="watts"),
    _node_row("gpu_utilization_ratio", "Mean utilization of the GPUs.", unit="ratio"),
    _node_row("gpu_memory_errors", "Memory errors that ECC could not correct, since the driver loaded.", Kind.COUNTER),
)
"""One series for each of the first nodes (`MAX_NODES_READ` of control/node_readings.py)."""

_REPLICA = ("replica",)
_REPLICA_ROWS = (
    ExportedMetric("replica_step", Kind.GAUGE, "The last step.", _by_replica(lambda each, _: each.step), _REPLICA),
    ExportedMetric(
        "replica_attempt", Kind.GAUGE, "The attempt, from 0.", _by_replica(lambda each, _: each.attempt), _REPLICA
    ),
    ExportedMetric("replica_world_size", Kind.GAUGE, "Ranks.", _by_replica(lambda each, _: each.world_size), _REPLICA),
    ExportedMetric(
        "replica_missing_nodes",
        Kind.GAUGE,
        "Requested nodes that the replica runs without.",
        _by_replica(lambda each, _: len(each.world_size_change.missing_nodes) if each.world_size_change else 0),
        _REPLICA,
    ),
    ExportedMetric(
        "replica_recovering",
        Kind.GAUGE,
        "1 from a failure to the next step.",
        _by_replica(lambda each, _: each.recovering),
        _REPLICA,
    ),
    ExportedMetric(
        "replica_hung",
        Kind.GAUGE,
        "1 while a rank is reported as hung.",
        _by_replica(lambda each, _: each.hung_at is not None),
        _REPLICA,
    ),
    ExportedMetric(
        "replica_stalled_seconds",
        Kind.GAUGE,
        "Seconds since the last step, if that is unusually long; else 0.",
        _by_replica(lambda each, now: each.stalled_s(now)),
        _REPLICA,
        unit="seconds",
    ),
    ExportedMetric("replica_ranks", Kind.GAUGE, "Ranks by phase.", _ranks, ("replica", "phase")),
    ExportedMetric(
        "replica_step_seconds",
        Kind.HISTOGRAM,
        "Seconds of a step. In a long run steps are logged several at a time, and count with their mean.",
        _step_times,
        _REPLICA,
        unit="seconds",
    ),
    ExportedMetric("replica_tokens", Kind.COUNTER, "Tokens of all steps, repeated ones included.", _tokens, _REPLICA),
    ExportedMetric(
        "replica_tokens_per_second",
        Kind.GAUGE,
        "Tokens of all ranks per second, over the last steps.",
        _by_replica(lambda each, now: 0.0 if each.stalled_s(now) else each.tokens_per_s),
        _REPLICA,
    ),
    ExportedMetric(
        "replica_fabric_severity",
        Kind.GAUGE,
        "0 if the traffic between nodes is as promised, 1 if degraded, 2 if another network carries it.",
        _fabric,
        ("replica", "fabric"),
    ),
)

_BASE_UNITS = {"s": ("_s", "seconds"), "share": ("", "ratio"), "bytes": ("_bytes", "bytes")}
"""By a step metric's unit: the end of its name there, and the base unit with which it ends here."""
_OTHERWISE = frozenset({"step_s", "tokens_per_s", "tokens_per_s_per_device", "tokens", "tflops_full", "tflops_causal"})
"""Step metrics that other rows have, or that follow from others."""


def _step_row(metric: Metric) -> ExportedMetric:
    """The row of a metric of the latest step."""
    end, unit = _BASE_UNITS.get(metric.unit, ("", ""))
    name = "_".join(filter(None, ("step", metric.name.removesuffix(end), unit)))

    def read(known: RunObservation, _now: float) -> Iterable[Sample]:
        for index, replica in known.status.replicas.items():
            for full, value in replica.metrics.items():
                own, _, part = full.partition("@")
                if own == metric.name:
                    yield Sample((str(index), part), value)

    return ExportedMetric(name, Kind.GAUGE, f"Of the latest step. {metric.help}", read, ("replica", "part"), unit)


EXPORTED: tuple[ExportedMetric, ...] = (
    *_RUN_ROWS,
    *NODE_ROWS,
    *_REPLICA_ROWS,
    *(_step_row(metric) for metric in CATALOG if metric.name not in _OTHERWISE),
    ExportedMetric(
        USER_METRICS,
        Kind.GAUGE,
        f"Of the latest step: metrics that the program passes to `commit`, the first {MAX_USER_METRICS} by name.",
        _user_metrics,
        ("replica", "name"),
    ),
)
"""All rows; docs/monitoring.md lists them."""
