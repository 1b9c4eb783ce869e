"""The kinds of faults that bench/watch_kinds.py plants, and what an event log tells of the one it has; pure.

What peers would see is that of their source (NVRx 0.4.1, DLRover 0.6.1); bench/watch_peers.py measures what it can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.events import (
    AnyEvent,
    FaultInjected,
    FaultRequested,
    FindingRaised,
    NodeRequested,
    NumericFaultObserved,
    RecoveryDecided,
    StandbyPromoted,
)
from holdfast.findings import Finding

E = TypeVar("E", bound=AnyEvent)

EXIT, SILENT = "an exit code", "nothing"
NVRX_HANG = "no heartbeat for 45 min (fault_tolerance/config.py), then a restart; no kind"
DLROVER_HANG = "no step and idle GPUs for 10 min (master/diagnosis/diagnosis_master.py); no rank"
NVRX_GPU = "recovery action of the driver every 60 s, from driver 570 (shared_utils/health_check.py)"
NVRX_SCORE = "a relative score per rank on GPUs (straggler/reporting.py); no action"
DLROVER_LOG = "lines that the user lists (diagnosis/diagnostician/node_failure.py)"
STARTS = "only when a node starts (trainer/torch/elastic_run.py)"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault: its drill, and how the log tells it from the others."""

    name: str
    action: str
    target: str
    amount: float | None = None
    codes: frozenset[str]
    """Codes of the finding that decides."""
    quantity: str = ""
    """What the named rank found to be no number first; empty if it does not matter."""
    failure_class: FailureClass | None = None
    """Class of the diagnosis, where kinds have one code; None if it does not matter."""
    evicts: bool = False
    """Whether the node of the fault is to be replaced."""
    overrides: tuple[str, ...] = ()
    forked: bool = True
    """Whether its runs can be forks, whose memory is partly their parent's."""
    nvrx: str
    dlrover: str


KINDS = (
    Kind(
        name="crash of a rank",
        action="kill",
        target="rank",
        codes=frozenset({"rank-killed"}),
        nvrx=EXIT,
        dlrover=EXIT,
    ),
    Kind(
        name="lost node",
        action="kill",
        target="node",
        codes=frozenset({"node-lost"}),
        evicts=True,
        nvrx="a rendezvous that ends (fault_tolerance/_ft_rendezvous.py)",
        dlrover="a node event or no heartbeat (master/node/dist_job_manager.py)",
    ),
    Kind(
        name="stopped rank",
        action="stop",
        target="rank",
        codes=frozenset({"rank-hung"}),
        failure_class=FailureClass.HANG_UNKNOWN,
        nvrx=NVRX_HANG,
        dlrover=DLROVER_HANG,
    ),
    Kind(
        name="collective that one rank does not enter",
        action="hang",
        target="collective",
        codes=frozenset({"rank-hung"}),
        failure_class=FailureClass.COLLECTIVE_MISMATCH,
        nvrx=NVRX_HANG,
        dlrover=DLROVER_HANG,
    ),
    Kind(
        name="NaN loss",
        action="nan",
        target="loss",
        codes=frozenset({"weights-not-finite"}),
        quantity="loss",
        nvrx=SILENT,
        dlrover=SILENT,
    ),
    Kind(
        name="NaN gradient",
        action="nan",
        target="gradient",
        codes=frozenset({"weights-not-finite"}),
        quantity="gradient",
        nvrx=SILENT,
        dlrover=SILENT,
    ),
    Kind(
        name="loss spike",
        action="spike",
        target="loss",
        amount=1000.0,
        codes=frozenset({"loss-spike"}),
        nvrx=SILENT,
        dlrover=SILENT,
    ),
    Kind(
        name="slow forward pass",
        action="slow",
        target="forward",
        amount=2.0,
        codes=frozenset({"straggler"}),
        nvrx=NVRX_SCORE,
        dlrover=STARTS,
    ),
    Kind(
        name="data stall",
        action="data-stall",
        target="rank",
        amount=0.1,
        codes=frozenset({"data-stall"}),
        nvrx=SILENT,
        dlrover=SILENT,
    ),
    Kind(
        name="memory leak",
        action="leak",
        target="rank",
        amount=1.0,  # MiB a step: the memory lasts for about 20 s
        codes=frozenset({"memory-growing"}),
        overrides=("resources.memory=700MiB",),
        forked=False,
        nvrx=SILENT,
        dlrover="the kill for lack of memory (master/node/dist_job_manager.py)",
    ),
    Kind(
        name="bit flip in weights",
        action="bitflip",
        target="weights",
        codes=frozenset({"silent-corruption"}),
        evicts=True,
        overrides=("recovery.verify_every_steps=10",),
        nvrx=SILENT,
        dlrover=SILENT,
    ),
    Kind(
        name="lost GPU",
        action="fail",
        target="gpu",
        codes=frozenset({"gpu-failed"}),
        evicts=True,
        nvrx=NVRX_GPU,
        dlrover=DLROVER_LOG,
    ),
    Kind(
        name="throttled GPU",
        action="throttle",
        target="gpu",
        codes=frozenset({"gpu-throttled"}),
        nvrx=NVRX_SCORE,
        dlrover=STARTS,
    ),
    Kind(
        name="link with errors",
        action="link-errors",
        target="nic",
        codes=frozenset({"fabric-link-errors"}),
        nvrx="only a link that goes down (shared_utils/health_check.py)",
        dlrover=SILENT,
    ),
)

_NUMBER = re.compile(r"\b(?:rank |node)(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a log tells without its record of the drill. Each node has one rank, so that one number names both."""

    named: tuple[tuple[str, int | None], ...]
    """The code of each finding, and the rank or node that it names; decisions before the others."""
    replaced: frozenset[int]
    quantities: Mapping[int, str]
    """By rank: what it found first to be no number, when its weights were damaged."""
    failure_class: FailureClass | None = None


def without_drills(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    """The log without its record of drills."""
    return [event for event in events if not isinstance(event, FaultRequested | FaultInjected)]


def read_log(events: Sequence[AnyEvent], failure_class: FailureClass | None) -> Seen:
    """What the findings, decisions and replacements of a log tell."""
    decided = [(one.finding.code, _number(one.finding, one.first_failed_rank)) for one in _of(events, RecoveryDecided)]
    raised = [(one.finding.code, _number(one.finding, None)) for one in _of(events, FindingRaised)]
    damaged = [one for one in reversed(_of(events, NumericFaultObserved)) if one.damaged]
    promoted = {one.replaces for one in _of(events, StandbyPromoted)}
    requested = {one.node for one in _of(events, NodeRequested) if one.generation > 0}
    return Seen(
        named=(*decided, *raised),
        replaced=frozenset(promoted | requested),
        quantities={one.rank: one.quantity for one in damaged},
        failure_class=failure_class,
    )


def told(seen: Seen) -> list[tuple[str, int | None]]:
    """Every kind that the log fits, with the rank or node that it names."""
    return [(kind.name, number) for kind in KINDS for number in _matches(kind, seen)]


def is_right(kind: Kind, number: int, seen: Seen) -> bool:
    """Whether the log fits this kind alone, names this rank or node, and no healthy node was replaced."""
    return told(seen) == [(kind.name, number)] and not healthy_replaced(kind, number, seen)


def healthy_replaced(kind: Kind, number: int, seen: Seen) -> frozenset[int]:
    """Nodes that were replaced without a fault of theirs."""
    return seen.replaced - {number} if kind.evicts else seen.replaced


def _matches(kind: Kind, seen: Seen) -> list[int | None]:
    number = next((number for code, number in seen.named if code in kind.codes), -1)
    if number == -1 or kind.failure_class not in (None, seen.failure_class):
        return []
    fits = not kind.quantity or (number is not None and seen.quantities.get(number) == kind.quantity)
    return [number] if fits else []


def _number(finding: Finding, rank: int | None) -> int | None:
    """The rank or node that a finding is about."""
    if rank is not None:
        return rank
    found = _NUMBER.search(finding.where) or _NUMBER.search(finding.what)
    return int(found[1]) if found else None


def _of(events: Sequence[AnyEvent], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]
