"""Attributes failures to injected faults, so that no one searches for another cause. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from holdfast.events import (
    AnyEvent,
    FaultAction,
    FaultInjected,
    FaultTarget,
    FindingRaised,
    RecoveryDecided,
    ShutdownDecided,
)
from holdfast.findings import Finding, Owner
from holdfast.os_errors import resource_error_in

BALLAST = "drill.ballast"
"""The file that fills the disk, in the target folder."""

ATTRIBUTION_WINDOW_S = 3600.0
"""Seconds in which the first failure of the target is attributed to the fault: a hang shows only after its timeout."""

InjectedFaults = Sequence[FaultInjected]
"""Injected faults that have not caused a failure yet."""

_NODE = re.compile(r"\bnode\d+")
_PARTS_OF_NODES = frozenset(
    target for target in FaultTarget if target.is_numbered and target is not FaultTarget.COLLECTIVE
)
_DISKS = frozenset({FaultTarget.RUN_DIR, FaultTarget.CHECKPOINTS})
_DISK_CODES = frozenset({"disk-full", "checkpoint-upload-failed"})
_WITHOUT_OUTPUT = frozenset({"rank-crashed", "failure-cause-unknown"})
"""Findings of a rank that exited without output, because the run's folder is full."""
_HARMLESS = frozenset({FaultAction.CLOCK_SKEW, FaultAction.RESTORE, FaultAction.SLOW})


def unattributed_after(faults: InjectedFaults, event: AnyEvent) -> InjectedFaults:
    """Faults that remain unattributed after an event; a filled disk stays full."""
    if isinstance(event, FaultInjected):
        return (*faults, event) if event.action not in _HARMLESS else faults
    if isinstance(event, RecoveryDecided):
        behind = injected_cause(faults, event)
        return tuple(fault for fault in faults if fault is not behind or fault.target in _DISKS)
    return faults


def injected_cause(faults: InjectedFaults, event: AnyEvent) -> FaultInjected | None:
    """The injected fault that caused this event's finding; None if none did."""
    match event:
        case RecoveryDecided(finding=finding, failed_at=at):
            pass
        case ShutdownDecided(finding=Finding() as finding, at=at) | FindingRaised(finding=finding, at=at):
            pass
        case _:
            return None
    failed = not isinstance(event, FindingRaised)
    found = (fault for fault in reversed(faults) if -1.0 <= at - fault.at <= ATTRIBUTION_WINDOW_S)
    return next((fault for fault in found if _caused(fault, finding, failed=failed)), None)


def with_injected_cause(finding: Finding, fault: FaultInjected | None) -> Finding:
    """The finding, extended with the injected fault that caused it."""
    if fault is None:
        return finding
    what = f"{finding.what}; {format_fault(fault)}"
    remedy = f"{remedy_for(fault).capitalize()}." if fault.action == FaultAction.FILL else finding.remedy
    return msgspec.structs.replace(finding, what=what, remedy=remedy, owner=Owner.USER)


def remedy_for(fault: FaultInjected) -> str:
    """What to do about an injected fault."""
    if fault.action != FaultAction.FILL:
        return "nothing: the fault was injected on purpose"
    folder = "the run's folder" if fault.target == FaultTarget.RUN_DIR else "the checkpoints' folder"
    return f"remove {BALLAST} from {folder}, which gives the space back; the run removes it when it ends"


def format_fault(fault: FaultInjected) -> str:
    """`injected by a drill: kill rank 1`."""
    numbered = " " not in fault.target and fault.node >= 0
    return f"injected by a drill: {fault.action} {fault.target}{f' {fault.node}' if numbered else ''}"


def node_of(finding: Finding) -> str | None:
    """The node that the finding names."""
    found = _NODE.search(finding.what) or _NODE.search(finding.where)
    return found[0] if found else None


def _is_disk_full(finding: Finding, target: str) -> bool:
    """Whether another finding is due to a full disk: its text names it, or the rank could write no output."""
    rows = map(resource_error_in, (finding.what, *finding.evidence))
    if any(row is not None and row.code == "disk-full" for row in rows):
        return True
    return target == FaultTarget.RUN_DIR and finding.code in _WITHOUT_OUTPUT and not finding.evidence


def _caused(fault: FaultInjected, finding: Finding, *, failed: bool) -> bool:
    """Whether the fault's target failed; for a warning, whether it can have no other cause."""
    target = fault.target.partition(" ")[0]  # a rank target includes its number
    if target in _DISKS:
        return finding.code in _DISK_CODES or (failed and _is_disk_full(finding, target))
    if target == FaultTarget.COLLECTIVE:
        return finding.code == "rank-hung"
    here = target in _PARTS_OF_NODES and node_of(finding) == f"node{fault.node}"
    return here and (failed or finding.code in ("memory-pressure", "too-few-nodes"))
