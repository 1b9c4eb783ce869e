"""Owns which failure a drill brought about, and how that is said of it: nobody is to look for whom to blame.

Pure. Refuses to own what can be asked for (drills.py) and the log in which it stands (events).
"""

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
"""The file that holds the space of a disk that was filled, in the folder that was named."""

ATTRIBUTION_WINDOW_S = 3600.0
"""The first failure of its part within so many seconds of a drill is the drill's: a hang takes a deadline to show."""

InjectedFaults = Sequence[FaultInjected]
"""Those from which no failure has come yet."""

_NODE = re.compile(r"\bnode\d+")
_PARTS_OF_NODES = frozenset({FaultTarget.RANK, FaultTarget.NODE, FaultTarget.AGENT, FaultTarget.MEMORY})
_DISKS = frozenset({FaultTarget.RUN_DIR, FaultTarget.CHECKPOINTS})
_DISK_CODES = frozenset({"disk-full", "checkpoint-upload-failed"})
_WITHOUT_OUTPUT = frozenset({"rank-crashed", "failure-cause-unknown"})
"""What a rank's end is called whose own words found no room in the run's folder."""
_HARMLESS = frozenset({FaultAction.CLOCK_SKEW, FaultAction.RESTORE, FaultAction.SLOW})


def unattributed_after(drills: InjectedFaults, event: AnyEvent) -> InjectedFaults:
    """Those that are left once an event is over; a disk that was filled stays full."""
    if isinstance(event, FaultInjected):
        return (*drills, event) if event.action not in _HARMLESS else drills
    if isinstance(event, RecoveryDecided):
        behind = injected_cause(drills, event)
        return tuple(drill for drill in drills if drill is not behind or drill.target in _DISKS)
    return drills


def injected_cause(drills: InjectedFaults, event: AnyEvent) -> FaultInjected | None:
    """The drill that brought a failure about, or what was noticed; None where nobody asked for it."""
    match event:
        case RecoveryDecided(finding=finding, failed_at=at):
            pass
        case ShutdownDecided(finding=Finding() as finding, at=at) | FindingRaised(finding=finding, at=at):
            pass
        case _:
            return None
    failed = not isinstance(event, FindingRaised)
    found = (drill for drill in reversed(drills) if -1.0 <= at - drill.at <= ATTRIBUTION_WINDOW_S)
    return next((drill for drill in found if _caused(drill, finding, failed=failed)), None)


def with_injected_cause(finding: Finding, drill: FaultInjected | None) -> Finding:
    """The finding of what a drill did, which nobody has to mend."""
    if drill is None:
        return finding
    what = f"{finding.what}; {format_fault(drill)}"
    remedy = f"{remedy_for(drill).capitalize()}." if drill.action == FaultAction.FILL else finding.remedy
    return msgspec.structs.replace(finding, what=what, remedy=remedy, owner=Owner.USER)


def remedy_for(drill: FaultInjected) -> str:
    """What is to be done about it."""
    if drill.action != FaultAction.FILL:
        return "nothing: that is what was asked for"
    folder = "the run's folder" if drill.target == FaultTarget.RUN_DIR else "the checkpoints' folder"
    return f"remove {BALLAST} from {folder}, which gives the space back; the end of the run does it too"


def format_fault(drill: FaultInjected) -> str:
    """`a drill did it on purpose: kill rank 1`."""
    numbered = " " not in drill.target and drill.node >= 0
    return f"a drill did it on purpose: {drill.action} {drill.target}{f' {drill.node}' if numbered else ''}"


def node_of(finding: Finding) -> str | None:
    """The node that it names."""
    found = _NODE.search(finding.what) or _NODE.search(finding.where)
    return found[0] if found else None


def _is_disk_full(finding: Finding, target: str) -> bool:
    """Whether a failure of another name is of a full disk: its words say so, or it has none where they are written."""
    rows = map(resource_error_in, (finding.what, *finding.evidence))
    if any(row is not None and row.code == "disk-full" for row in rows):
        return True
    return target == FaultTarget.RUN_DIR and finding.code in _WITHOUT_OUTPUT and not finding.evidence


def _caused(drill: FaultInjected, finding: Finding, *, failed: bool) -> bool:
    """Whether it was done to what failed; of what was only noticed, whether it can be of nothing else."""
    target = drill.target.partition(" ")[0]  # that of a rank has its number
    if target in _DISKS:
        return finding.code in _DISK_CODES or (failed and _is_disk_full(finding, target))
    if target == FaultTarget.COLLECTIVE:
        return finding.code == "rank-hung"
    here = target in _PARTS_OF_NODES and node_of(finding) == f"node{drill.node}"
    return here and (failed or finding.code in ("memory-pressure", "too-few-nodes"))
