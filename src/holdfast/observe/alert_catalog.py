"""The table of alerts, one row each. Pure.

Expressions use the metrics of exported_metrics.py. An alert about a finding lasts as long as the finding is recent, and
only while its run is not over.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from holdfast.observe.exported_metrics import PREFIX


class AlertSeverity(StrEnum):
    """Value of an alert's label `severity`."""

    CRITICAL = "critical"
    """The run makes no progress, or may lose what it has done."""
    WARNING = "warning"


class Alert(NamedTuple):
    """One row."""

    name: str
    severity: AlertSeverity
    expression: str
    """PromQL; its result has the label `run`."""
    summary: str
    """One sentence, with Prometheus's templates."""
    explain: str
    """The argument of `holdfast explain` that says more, or another command."""
    for_s: int = 0
    """Seconds for which it must hold."""


RECENT_S = 900
"""Seconds for which a finding or a failure is recent."""
ETTR_GOAL, ETTR_SETTLED_S = 0.9, 3600
"""Lowest ETTR without an alert, and the age from which a run's ETTR says something."""
CHECKPOINT_AGE_S = 7200
"""Seconds of training that a failure may cost."""
LOOP_ATTEMPTS, LOOP_S = 4, 1800
"""Attempts within so many seconds that are a loop."""

LIVE = f'(sum by (run) ({PREFIX}run_phase{{phase=~"pending|starting|running|recovering"}}) > 0)'
"""Runs that are not over."""
RUNNING = f'({PREFIX}run_phase{{phase="running"}} == 1)'

_GPU_FAULTS = "gpu-(failed|memory-failed|needs-reset|not-ready|memory-error-contained|error-unclear)|nvlink-failed"
_NIC_FAULTS = "nic-failed|nic-link-down|fabric-link-down|fabric-link-errors|fabric-nic-slow"


def _recent(codes: str) -> str:
    """A finding or a failure with one of these codes was raised lately."""
    parts = (
        f'max by (run, code) (time() - {PREFIX}run_{kind}_timestamp_seconds{{code=~"{codes}"}} < {RECENT_S})'
        for kind in ("finding", "failure")
    )
    return f"({' or '.join(parts)}) and on (run) {LIVE}"


ALERTS: tuple[Alert, ...] = (
    Alert(
        "HoldfastRunFailed",
        AlertSeverity.CRITICAL,
        f'{PREFIX}run_phase{{phase="failed"}} == 1'
        f" and on (run) time() - {PREFIX}run_finished_timestamp_seconds < {RECENT_S}",
        "Run {{ $labels.run }} has failed.",
        "holdfast diagnose {{ $labels.run }}",
    ),
    Alert(
        "HoldfastRunStalled",
        AlertSeverity.CRITICAL,
        f"max by (run) ({PREFIX}replica_stalled_seconds) > 300 and on (run) {LIVE}",
        "Run {{ $labels.run }} has committed no step for {{ $value | humanizeDuration }}.",
        "holdfast diagnose {{ $labels.run }} --stacks",
    ),
    Alert(
        "HoldfastRunNotStarting",
        AlertSeverity.WARNING,
        f'max by (run) ({PREFIX}run_phase{{phase=~"pending|starting"}}) == 1',
        "Run {{ $labels.run }} has been waiting for its nodes for half an hour.",
        "holdfast status {{ $labels.run }}",
        for_s=1800,
    ),
    Alert(
        "HoldfastRunRecovering",
        AlertSeverity.CRITICAL,
        f'{PREFIX}run_phase{{phase="recovering"}} == 1',
        "Run {{ $labels.run }} has been recovering for ten minutes.",
        "holdfast status {{ $labels.run }}",
        for_s=600,
    ),
    Alert(
        "HoldfastRestartsLooping",
        AlertSeverity.CRITICAL,
        f"max by (run, replica) (max_over_time({PREFIX}replica_attempt[{LOOP_S}s])"
        f" - min_over_time({PREFIX}replica_attempt[{LOOP_S}s])) >= {LOOP_ATTEMPTS} and on (run) {LIVE}",
        "Run {{ $labels.run }} has restarted {{ $value }} times within half an hour.",
        "holdfast diagnose {{ $labels.run }}",
    ),
    Alert(
        "HoldfastEttrLow",
        AlertSeverity.WARNING,
        f"{PREFIX}run_ettr_ratio < {ETTR_GOAL} and on (run) sum by (run) ({PREFIX}run_time_seconds) > {ETTR_SETTLED_S}"
        f" and on (run) {LIVE}",
        "Run {{ $labels.run }} has trained in only {{ $value | humanizePercentage }} of its time.",
        "holdfast status {{ $labels.run }}",
        for_s=900,
    ),
    Alert(
        "HoldfastCheckpointOld",
        AlertSeverity.WARNING,
        f"time() - ({PREFIX}run_checkpoint_timestamp_seconds or {PREFIX}run_created_timestamp_seconds)"
        f" > {CHECKPOINT_AGE_S} and on (run) {RUNNING}",
        "Run {{ $labels.run }} has saved no checkpoint for {{ $value | humanizeDuration }}.",
        "holdfast checkpoint {{ $labels.run }}",
    ),
    Alert(
        "HoldfastFabricFallback",
        AlertSeverity.CRITICAL,
        f"max by (run, replica, fabric) ({PREFIX}replica_fabric_severity) == 2 and on (run) {LIVE}",
        "Run {{ $labels.run }} does not use its fabric: {{ $labels.fabric }}.",
        "holdfast status {{ $labels.run }}",
    ),
    Alert(
        "HoldfastDegraded",
        AlertSeverity.WARNING,
        f"{PREFIX}run_degraded == 1 and on (run) {RUNNING}",
        "Run {{ $labels.run }} has been training with fewer nodes than requested for half an hour.",
        "holdfast status {{ $labels.run }}",
        for_s=1800,
    ),
    Alert(
        "HoldfastNodeDown",
        AlertSeverity.WARNING,
        f"{PREFIX}node_up == 0 and on (run) {RUNNING}",
        "Node {{ $labels.node }} of run {{ $labels.run }} has had no agent for five minutes.",
        "holdfast status {{ $labels.run }}",
        for_s=300,
    ),
    Alert(
        "HoldfastStraggler",
        AlertSeverity.WARNING,
        _recent("straggler|rank-waited-for|data-stall"),
        "A rank of run {{ $labels.run }} slows down the others ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastRunSlow",
        AlertSeverity.WARNING,
        _recent("run-slow|gpu-throttled|link-slowed"),
        "Run {{ $labels.run }} is slower than it was ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastGpuFault",
        AlertSeverity.CRITICAL,
        _recent(_GPU_FAULTS),
        "A GPU of run {{ $labels.run }} is at fault ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastNetworkFault",
        AlertSeverity.WARNING,
        _recent(_NIC_FAULTS),
        "A network device of run {{ $labels.run }} is at fault ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastNotFinite",
        AlertSeverity.CRITICAL,
        _recent("(loss|weights|gradient)-not-finite"),
        "Run {{ $labels.run }} computed NaN or infinity ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastSilentCorruption",
        AlertSeverity.CRITICAL,
        _recent("silent-corruption|ranks-diverged|replicas-diverged"),
        "A machine of run {{ $labels.run }} computes wrong results ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastMemoryGrowing",
        AlertSeverity.WARNING,
        _recent("memory-growing|memory-pressure"),
        "Run {{ $labels.run }} will run out of memory ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
    Alert(
        "HoldfastMachineQuarantined",
        AlertSeverity.WARNING,
        _recent("machines?-quarantined|quarantine-full"),
        "Run {{ $labels.run }} has put a machine into quarantine ({{ $labels.code }}).",
        "holdfast nodes",
    ),
    Alert(
        "HoldfastDisk",
        AlertSeverity.CRITICAL,
        _recent("disk-full|disk-nearly-full|disk-error|read-only-file-system|event-log-blocked|checkpoint-failed"),
        "Run {{ $labels.run }} cannot write what it has to keep ({{ $labels.code }}).",
        "holdfast explain {{ $labels.code }}",
    ),
)
"""All alerts; docs/monitoring.md lists them."""
