"""Compares the ranks of each replica while they run, and its steps with its earlier ones: what they send, not the log.

Detectors are in watch/. What they find goes into the log as an event, on which watch_handlers.py acts.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

from holdfast import events
from holdfast.control.slow_stacks import SlowStacks
from holdfast.control.state import ReplicaState
from holdfast.control.step_times import compare_step_times, interval_s
from holdfast.control.watch_findings import (
    data_stall_finding,
    run_slow_finding,
    straggler_finding,
    waited_for_finding,
)
from holdfast.diagnose.stack_rounds import ROUNDS
from holdfast.events import FindingRaised, StackDumpRequested, StepCommitted, StragglerObserved
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Job
from holdfast.protocol.orders import Progress, StackRound
from holdfast.protocol.phase_times import Phase, PhaseTimes, merged
from holdfast.watch.data_stalls import DataStallDetector
from holdfast.watch.slow_runs import SlowRunDetector
from holdfast.watch.stragglers import Straggler, StragglerDetector

MAX_NODES_NAMED = 3
"""Nodes that are named together: if more ranks are slow, the layout is the reason."""
MAX_NOTES = 32
"""Findings that are kept as candidates for the cause of a slow run."""
STACKS_AGAIN_S = 600.0
"""Least seconds between two requests for the stacks of a replica: dumps cost its ranks some time."""
STACK_PHASES = (Phase.COMMUNICATION, Phase.HOST)
"""Phases of a straggler of which stacks show more than the times do."""
CPU_WAIT = "waiting for a CPU"
"""The part of a step that other processes of the node take."""
_CHECKPOINT = "checkpoint"
MAX_WAITING = 4
"""Times of a rank that wait for the same steps of other ranks."""


class RunWatch:
    """All replicas of a run."""

    def __init__(self) -> None:
        self._attempts: dict[int, _AttemptWatch] = {}
        """By replica."""
        self._slow: dict[tuple[int, int], SlowRunDetector] = {}
        """By replica and number of nodes: with fewer nodes a step has other work."""
        self._notes: deque[tuple[float, Finding]] = deque(maxlen=MAX_NOTES)
        self._stacks: dict[int, SlowStacks] = {}
        """By replica."""
        self._stacks_asked: dict[int, float] = {}
        """By replica, when its stacks were last requested because it is slow."""

    def add_phases(self, progress: Progress, at: float) -> list[events.AnyEvent]:
        """Add how ranks of a node spent their steps; what is observed in them."""
        watch = self._attempts.get(progress.replica)
        if watch is None or watch.attempt != progress.attempt:
            watch = self._attempts[progress.replica] = _AttemptWatch(progress.replica, progress.attempt, at)
            for (replica, _), detector in self._slow.items():
                if replica == progress.replica:
                    detector.restart()
        found = watch.add(progress.node, progress.phases, at)
        unclear = any(isinstance(each, StragglerObserved) and each.phase in STACK_PHASES for each in found)
        return [*found, *(self._ask_for_stacks(progress.replica, at) if unclear else ())]

    def add_step(self, step: StepCommitted, *, nodes: int) -> list[events.AnyEvent]:
        """Add a committed step; what is observed in it."""
        watch = self._attempts.get(step.replica)
        parts = {} if watch is None else dict(watch.typical)
        if step.checkpoint_s or _CHECKPOINT in parts:
            parts[_CHECKPOINT] = step.checkpoint_s
        detector = self._slow.setdefault((step.replica, nodes), SlowRunDetector())
        slow = detector.add(step.step, step.ended - step.started, parts)
        if slow is None:
            return []
        since = step.ended - (slow.last_step - slow.first_step + 1) * slow.step_s
        raised = FindingRaised(at=step.at, finding=run_slow_finding(slow, step.replica, self._notes_since(since)))
        return [raised, *self._ask_for_stacks(step.replica, step.at)]

    def add_stacks(self, message: StackRound, job: Job, replica: ReplicaState, at: float) -> list[events.AnyEvent]:
        """Add the stacks of a node's ranks; what those of all ranks show, once they are complete."""
        compared = self._stacks.setdefault(message.replica, SlowStacks()).add(message, job, replica, at)
        if compared is None:
            return []
        if not compared.suspects:
            return [compared]
        return [compared, FindingRaised(at=at, finding=waited_for_finding(compared))]

    def _ask_for_stacks(self, replica: int, at: float) -> list[events.AnyEvent]:
        """Request several dumps of a slow replica, unless that was done lately."""
        if at - self._stacks_asked.get(replica, -math.inf) < STACKS_AGAIN_S:
            return []
        self._stacks_asked[replica] = at
        return [StackDumpRequested(at=at, rounds=ROUNDS, replica=replica)]

    def note(self, event: FindingRaised | StragglerObserved) -> None:
        """Note a finding, which may be why a run is slow."""
        if event.finding.severity is not Severity.INFO:
            self._notes.append((event.at, event.finding))

    def _notes_since(self, at: float) -> list[Finding]:
        return [finding for noted_at, finding in self._notes if noted_at >= at]


class _AttemptWatch:
    """The ranks of one attempt of a replica."""

    def __init__(self, replica: int, attempt: int, began_at: float) -> None:
        self.attempt = attempt
        self.typical: Mapping[str, float] = {}
        """By part, seconds of a step in the last round: the longest waits for data and CPU of any rank, and medians."""
        self._replica = replica
        self._began_at = self._compared_at = began_at
        """When its first times came, and when all were last compared for the log."""
        self._stragglers = StragglerDetector()
        self._stalls = DataStallDetector()
        self._fresh: dict[int, list[PhaseTimes]] = {}
        """By rank, times that no round has had yet; ranks without any are not in it."""
        self._senders: Counter[tuple[int, int]] = Counter()
        """By first and last step, of how many ranks there are such times."""
        self._is_full = False
        """Whether a rank has as many of these times as are kept."""
        self._last_steps: dict[int, int] = {}
        """By rank, the last step of its last times."""
        self._nodes: dict[int, int] = {}

    def add(self, node: int, times: Iterable[PhaseTimes], at: float) -> list[events.AnyEvent]:
        """Add times of ranks of a node; what is observed once all ranks have sent theirs."""
        for each in times:
            if each.is_valid and each.last_step > self._last_steps.get(each.rank, -1):
                self._keep(each)
                self._last_steps[each.rank] = each.last_step
                self._nodes[each.rank] = node
        if not (fresh := self._next_round()):
            return []
        self.typical = _typical(fresh)
        stragglers = self._stragglers.add(fresh)
        stall = self._stalls.add(fresh, is_named=any(each.phase is Phase.DATA for each in stragglers))
        found = self._observed(stragglers, at)
        if stall is not None:
            finding = data_stall_finding(stall, self._nodes[stall.rank], self._replica)
            found.append(FindingRaised(at=at, finding=finding))
        if at - self._compared_at >= interval_s(at - self._began_at):
            self._compared_at = at
            found.append(compare_step_times(fresh, replica=self._replica, attempt=self.attempt, at=at))
        return found

    def _keep(self, one: PhaseTimes) -> None:
        """Keep times for a round; a rank's oldest are dropped while another rank sends nothing."""
        known = self._fresh.setdefault(one.rank, [])
        known.append(one)
        self._senders[_steps(one)] += 1
        self._is_full |= len(known) >= MAX_WAITING
        if len(known) > MAX_WAITING:
            self._senders[_steps(known.pop(0))] -= 1

    def _next_round(self) -> list[PhaseTimes]:
        """Times of all ranks: of the newest steps that all have sent, or else of all that they have sent since.

        Nodes send at different times, so one may always be ahead, and their times may span different steps.
        """
        if len(self._fresh) < len(self._nodes):
            return []
        same = [steps for steps, senders in self._senders.items() if senders == len(self._nodes)]
        if same:
            newest = max(same)
            found = [each for known in self._fresh.values() for each in known if _steps(each) == newest]
            later = [each for known in self._fresh.values() for each in known if each.last_step > newest[1]]
        elif self._is_full:
            found, later = [reduce(merged, known) for known in self._fresh.values()], []
        else:
            return []
        self._fresh, self._senders, self._is_full = {}, Counter(), False
        for each in later:
            self._keep(each)
        return found

    def _observed(self, stragglers: Sequence[Straggler], at: float) -> list[events.AnyEvent]:
        """One event for each node with stragglers, of its slowest rank."""
        by_node: dict[int, list[Straggler]] = {}
        for each in stragglers:
            by_node.setdefault(self._nodes[each.rank], []).append(each)
        return [
            StragglerObserved(
                at=at,
                node=node,
                replica=self._replica,
                attempt=self.attempt,
                rank=slowest.rank,
                phase=slowest.phase,
                slowdown=slowest.slowdown,
                first_step=slowest.first_step,
                last_step=slowest.last_step,
                finding=straggler_finding(slowest, node, self._replica, others=others),
            )
            for node, (slowest, *others) in list(by_node.items())[:MAX_NODES_NAMED]
        ]


def _typical(times: Sequence[PhaseTimes]) -> dict[str, float]:
    medians = {phase.value: statistics.median(each.of(phase) for each in times) for phase in Phase}
    waits = max(each.of(Phase.DATA) for each in times), max(each.cpu_wait_s for each in times)
    return medians | dict(zip((Phase.DATA.value, CPU_WAIT), waits, strict=True))


def _steps(one: PhaseTimes) -> tuple[int, int]:
    return one.first_step, one.last_step
