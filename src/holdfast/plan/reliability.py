"""Simulates a long run that faults interrupt, with the controller's own failure policy; pure.

Discrete events: faults begin, are detected, and the policy (`holdfast.control.policy.decide`) says what follows. Every
second of the run is either kept as training or lost to one cause. Faults come from a table (fault_table.py), so that
runs with and without a feature meet the same faults on the same nodes. Long for one file, because it is one machine.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice

from msgspec import Struct, field

from holdfast.control.policy import FLAP_S, PROGRESS_STEPS, Action, Failure, FailureKind, Spare, Verdict, decide
from holdfast.failure_rates import DAY_S
from holdfast.job.spec import Recovery

CHECKPOINTS = "checkpoints"
"""The cause of time that saves cost."""
BY_PERSON = "a person restarts"
IN_A_ROW = 6
"""A replica's latest failures that the policy always gets, besides all that came soon after a start."""


class FaultEffect(StrEnum):
    """What a fault does to the run until it is detected."""

    STOPS = "stops"
    """No step ends."""
    DAMAGES = "damages"
    """Steps end, and none since counts."""
    SLOWS = "slows"
    """Steps take longer."""


class Loss(StrEnum):
    """How a cause costs time."""

    DETECTING = "detecting"
    RECOVERING = "recovering"
    """Restarts, checks of nodes, waits for nodes and for a person."""
    RECOMPUTING = "recomputing"
    SLOWED = "slowed"
    SAVING = "saving"


class Restarting(StrEnum):
    """Who restarts a run that a fault has stopped."""

    PERSON = "person"
    """A person, who leaves out a faulty node."""
    REQUEUE = "requeue"
    """The scheduler, on the same machines, as torchrun in a batch job; a person after the third end by one fault."""
    POLICY = "policy"
    """holdfast."""


REQUEUES = 3
"""Ends of a run by one fault, of which a person notices the last."""


class Delay(Struct, frozen=True, kw_only=True):
    """A time with a uniform distribution, in seconds."""

    low_s: float = 0.0
    high_s: float

    @property
    def mean_s(self) -> float:
        return (self.low_s + self.high_s) / 2

    def at(self, chance: float) -> float:
        """The time for a chance of 0 to 1."""
        return self.low_s + (self.high_s - self.low_s) * chance


class Detection(Struct, frozen=True, kw_only=True):
    """How a fault becomes known, from its beginning."""

    delay: Delay
    kind: FailureKind | None
    """What the policy receives; None if a person notices it, who finds the node without losing time."""
    code: int = 0
    error: str = ""
    names_node: bool = True
    """Whether the faulty node is named; otherwise some rank of another one is."""
    again: Delay | None = None
    """The delay where the fault is still there at the start of an attempt, if it differs."""


class FaultKind(Struct, frozen=True, kw_only=True):
    """A kind of fault."""

    name: str
    per_day: float
    """Faults of the whole run in a day."""
    effect: FaultEffect = FaultEffect.STOPS
    persists: float = 0.0
    """The share of these faults that stays on its node until the node is replaced."""
    slowdown: float = 0.0
    """The share of its speed that the run loses."""
    detection: Detection
    detector: str = ""
    """The part of Watch that detects it sooner or knows more about it; empty if none does."""
    watched: Detection | None = None
    """The detection by that part."""
    hits_rack: bool = False
    """Whether all nodes of the rack are lost together."""

    def detected(self, detectors: frozenset[str]) -> Detection:
        """How it becomes known where only these detectors run."""
        return self.watched if self.watched is not None and self.detector in detectors else self.detection


RACK_NODES = 2
"""Nodes that share a rack."""


class Fleet(Struct, frozen=True, kw_only=True):
    """The run, and what each action costs; times in seconds."""

    nodes: int
    gpus_per_node: int
    step_s: float
    checkpoint_every_s: float
    checkpoint_cost_s: float
    restart_s: float
    """From the decision to the first step, on nodes that are there."""
    requeue_s: float
    """The same, if a node has to be started anew."""
    checks_s: float
    """What checks of all nodes add."""
    person_s: float
    """What a stopped run adds until a person has restarted it."""
    standbys: int
    repair_s: float
    """Until a replaced machine is a standby again."""
    rack_nodes: int = RACK_NODES
    """Nodes that share a rack."""
    restarting: Restarting = Restarting.POLICY
    quarantine: bool = True
    """Whether holdfast avoids a replaced machine until it is repaired; otherwise the machine may come back."""
    pool: int = 0
    """Machines from which one is drawn without quarantine, if these are more than the standbys."""
    recovery: Recovery = field(default_factory=Recovery)
    """With several replicas, each has as many consecutive nodes, and a failed one restarts alone."""

    @property
    def saving_share(self) -> float:
        return self.checkpoint_cost_s / (self.checkpoint_every_s + self.checkpoint_cost_s)


class Incident(Struct, frozen=True):
    """The beginning of a fault."""

    at: float
    cause: FaultKind
    node: int
    persists: bool
    chance: float
    """Decides how soon it is detected."""


class Trial(Struct, frozen=True, kw_only=True):
    """What became of the seconds of a run."""

    total_s: float
    kept_s: float
    lost_s: Mapping[tuple[str, Loss], float]
    """By cause and by how."""
    actions: Mapping[str, int]
    healthy_replaced: int
    """Nodes without a fault that were replaced."""

    @property
    def ettr(self) -> float:
        """Training that counts, at full speed, over all time."""
        return self.kept_s / self.total_s

    @property
    def ettr_at_any_speed(self) -> float:
        """The same, where a slow step counts like any other, as published figures count."""
        return (self.kept_s + sum(lost for (_, how), lost in self.lost_s.items() if how is Loss.SLOWED)) / self.total_s

    def lost_to(self, cause: str) -> float:
        return sum(lost for (name, _), lost in self.lost_s.items() if name == cause)


class _Fault(Struct, kw_only=True):
    """A fault of the run that has not been removed."""

    incident: Incident
    detection: Detection
    detected_at: float
    safe_work: float
    """The last checkpoint before it began."""
    stops: bool
    """Whether no step ends until it is detected."""

    @property
    def cause(self) -> FaultKind:
        return self.incident.cause


def incidents(causes: Iterable[FaultKind], *, nodes: int, total_s: float, seed: int) -> list[Incident]:
    """The faults of a run in their order: independent, each kind at its own constant rate."""
    found: list[Incident] = []
    for cause in causes:
        chance = random.Random(f"{seed}/{cause.name}")
        at = chance.expovariate(cause.per_day / DAY_S)
        while at < total_s:
            found.append(
                Incident(at, cause, chance.randrange(nodes), chance.random() < cause.persists, chance.random())
            )
            at += chance.expovariate(cause.per_day / DAY_S)
    return sorted(found, key=lambda one: one.at)


def simulate(
    fleet: Fleet, causes: Iterable[FaultKind], detectors: frozenset[str], *, total_s: float, seed: int
) -> Trial:
    """One run of `total_s` seconds."""
    coming = iter(incidents(causes, nodes=fleet.nodes, total_s=total_s, seed=seed))
    return _Simulation(fleet, detectors, total_s, random.Random(f"{seed}/again")).run(coming)


class KnownFailures:
    """The failures of a run, indexed by what the policy's decisions depend on.

    It counts what is recent, compares the latest in a row, and looks for earlier failures of the same machine. If one
    of these may be the program's, it looks for one on any other machine that ended alike. At 100,000 GPUs a day has
    more than a hundred failures.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._all: list[Failure] = []
        self._of_machine: defaultdict[str, list[int]] = defaultdict(list)
        self._of_replica: defaultdict[int, list[int]] = defaultdict(list)
        self._of_ending: dict[tuple[FailureKind, int], tuple[int, ...]] = {}
        self._moved_at = -math.inf

    def add(self, failure: Failure) -> None:
        """Add the latest failure."""
        place, ending = len(self._all), (failure.kind, failure.code)
        self._all.append(failure)
        self._of_machine[failure.machine].append(place)
        self._of_replica[failure.replica].append(place)
        if failure.uptime_s >= FLAP_S:
            del self._of_replica[failure.replica][:-IN_A_ROW]
        if not failure.excused:
            others = (each for each in self._of_ending.get(ending, ()) if self._all[each].machine != failure.machine)
            self._of_ending[ending] = (place, *islice(others, 1))
        if failure.kind is FailureKind.STRAGGLING:
            self._moved_at = failure.at

    def relevant(self, failure: Failure) -> tuple[Failure, ...]:
        """Those on which the decision on a failure depends, oldest first."""
        of_machine = self._of_machine[failure.machine]
        found = {*of_machine, *self._of_replica[failure.replica]}
        suspected_from = failure.at - self._recovery.suspect_window_s
        counted_from = failure.at - self._recovery.restart_window_s
        for ending in {(one.kind, one.code) for one in (failure, *(self._all[each] for each in of_machine))}:
            for each in self._of_ending.get(ending, ()):
                if self._all[each].machine != failure.machine and self._all[each].at > suspected_from:
                    found.add(each)
        latest = len(self._all) - 1
        while latest >= 0 and self._all[latest].at > counted_from:
            found.add(latest)
            latest -= 1
        return tuple(self._all[each] for each in sorted(found))

    def has_moved_straggler(self, now: float) -> bool:
        """Whether a straggler was moved lately: the rule of control/watch_handlers.py."""
        return self._moved_at > now - self._recovery.suspect_window_s


class _Response(Struct, frozen=True, kw_only=True):
    """What follows the detection of a fault."""

    recovering_s: float
    replaced: frozenset[int] = frozenset()
    checkpoints_back: int = 0
    whole_run: bool = True
    """Whether all replicas restart from a checkpoint."""


class _Outage(Struct, frozen=True):
    """A replica that does not train."""

    until: float
    cause: str


class _Attempt(Struct, kw_only=True):
    """The current attempt of a replica."""

    number: int = 0
    work: float = 0.0
    """At its start."""
    at: float = 0.0


class _Simulation:
    """One run in progress. Work is measured in seconds of training at full speed."""

    def __init__(self, fleet: Fleet, detectors: frozenset[str], total_s: float, chance: random.Random) -> None:
        self._fleet = fleet
        self._replicas = fleet.recovery.replicas
        self._avoids = fleet.quarantine or fleet.restarting is not Restarting.POLICY
        self._detectors = detectors
        self._total_s = total_s
        self._chance = chance
        self._now = 0.0
        self._work = 0.0
        self._highest_work = 0.0
        self._resumed_work = 0.0
        self._attempts = [_Attempt() for _ in range(self._replicas)]
        self._outages: dict[int, _Outage] = {}
        self._faults: list[_Fault] = []
        self._failures = KnownFailures(fleet.recovery)
        self._tries: Counter[Incident] = Counter()
        self._generations: Counter[int] = Counter()
        self._under_repair: deque[float] = deque()
        self._lost: defaultdict[tuple[str, Loss], float] = defaultdict(float)
        self._actions: Counter[str] = Counter()
        self._healthy_replaced = 0

    def run(self, coming: Iterator[Incident]) -> Trial:
        upcoming = next(coming, None)
        while self._now < self._total_s:
            first = min(self._faults, key=lambda fault: fault.detected_at, default=None)
            detected_at = self._total_s if first is None else first.detected_at
            stopped = next((fault for fault in self._faults if fault.stops), None)
            if stopped is None and upcoming is not None and max(upcoming.at, self._now) < detected_at:
                self._train(max(upcoming.at, self._now))
                self._begin(upcoming)
                upcoming = next(coming, None)
                continue
            if stopped is None:
                self._train(detected_at)
            else:
                self._lose(stopped.cause.name, Loss.DETECTING, detected_at - self._now)
            if first is not None and self._now < self._total_s:
                self._fail(first)
        for fault in self._faults:
            if fault.cause.effect is FaultEffect.DAMAGES:
                self._go_back(fault, fault.safe_work)
        return Trial(
            total_s=self._total_s,
            kept_s=self._work,
            lost_s=dict(self._lost),
            actions=dict(self._actions),
            healthy_replaced=self._healthy_replaced,
        )

    def _train(self, until: float) -> None:
        until = min(until, self._total_s)
        while self._now < until:
            self._outages = {each: outage for each, outage in self._outages.items() if outage.until > self._now}
            self._train_evenly(min(until, *(outage.until for outage in self._outages.values()), until))

    def _train_evenly(self, until: float) -> None:
        """Train while the same replicas are up."""
        seconds, away = until - self._now, len(self._outages)
        enough = self._replicas - away >= self._fleet.recovery.min_replicas
        absent_s = seconds * away / self._replicas if enough else seconds
        for outage in self._outages.values():
            self._lost[outage.cause, Loss.RECOVERING] += absent_s / away
        training_s = seconds - absent_s
        saving_s = training_s * self._fleet.saving_share
        slow = max((fault.cause for fault in self._faults), key=lambda cause: cause.slowdown, default=None)
        slowed_s = 0.0 if slow is None else (training_s - saving_s) * slow.slowdown
        self._lost[CHECKPOINTS, Loss.SAVING] += saving_s
        if slow is not None and slowed_s:
            self._lost[slow.name, Loss.SLOWED] += slowed_s
        self._work += training_s - saving_s - slowed_s
        self._highest_work = max(self._highest_work, self._work)
        self._now = until

    def _lose(self, cause: str, how: Loss, seconds: float) -> None:
        """Let time pass without training; what lies beyond the end of the run is not part of it."""
        seconds = max(0.0, min(seconds, self._total_s - self._now))
        self._lost[cause, how] += seconds
        self._now += seconds

    def _begin(self, incident: Incident, *, again: bool = False) -> None:
        """Begin a fault now, or when its replica is back."""
        detection = incident.cause.detected(self._detectors)
        delay = detection.again if again and detection.again is not None else detection.delay
        if incident.cause.effect is FaultEffect.SLOWS and detection.kind is not None and not self._may_move_straggler():
            detection = incident.cause.detection
            delay = detection.delay
        chance = self._chance.random() if again else incident.chance
        replica = self._replica(incident.node)
        outage = self._outages.get(replica)
        absent = outage is not None and outage.until > self._now
        detected_at = (outage.until if outage is not None and absent else self._now) + delay.at(chance)
        stops = incident.cause.effect is FaultEffect.STOPS
        if absent and stops:
            self._outages[replica] = _Outage(detected_at, incident.cause.name)
        self._faults.append(
            _Fault(
                incident=incident,
                detection=detection,
                detected_at=detected_at,
                safe_work=self._last_checkpoint(),
                stops=stops and not absent,
            )
        )

    def _replica(self, node: int) -> int:
        return min(node * self._replicas // self._fleet.nodes, self._replicas - 1)

    def _nodes_of(self, fault: _Fault) -> range:
        node, rack = fault.incident.node, self._fleet.rack_nodes
        if not fault.cause.hits_rack:
            return range(node, node + 1)
        first = node - node % rack
        return range(first, min(first + rack, self._fleet.nodes))

    def _may_move_straggler(self) -> bool:
        """Whether a standby is ready and no straggler was moved lately."""
        return self._standbys() > 0 and not self._failures.has_moved_straggler(self._now)

    def _last_checkpoint(self) -> float:
        every_s = self._fleet.checkpoint_every_s
        return self._resumed_work + (self._work - self._resumed_work) // every_s * every_s

    def _standbys(self) -> int:
        while self._under_repair and self._under_repair[0] <= self._now:
            self._under_repair.popleft()
        return self._fleet.standbys - len(self._under_repair) * self._avoids

    def _fail(self, fault: _Fault) -> None:
        """End the attempt, do what follows, and start the next one."""
        fleet, name = self._fleet, fault.cause.name
        damages = fault.cause.effect is FaultEffect.DAMAGES
        target = fault.safe_work if damages else self._last_checkpoint()
        response = self._respond(fault)
        recovering_s, fixed = response.recovering_s, set[int]()
        for node in sorted(response.replaced):
            had_standby, is_good = self._replace(node)
            if not had_standby:
                recovering_s = max(recovering_s, fleet.requeue_s)
            if is_good:
                fixed.add(node)
        if self._replicas == 1 or response.whole_run or damages:
            self._go_back(fault, max(0.0, target - response.checkpoints_back * fleet.checkpoint_every_s))
            self._outages.clear()
            self._lose(name, Loss.RECOVERING, recovering_s)
            self._start(fault, fixed, range(self._replicas))
            return
        failed = {self._replica(node) for node in (fault.incident.node, *response.replaced)}
        self._outages = {each: outage for each, outage in self._outages.items() if outage.until > self._now}
        self._outages |= dict.fromkeys(failed, _Outage(self._now + recovering_s, name))
        if len(self._outages) == self._replicas:
            self._go_back(fault, target)
        self._start(fault, fixed, failed)

    def _respond(self, fault: _Fault) -> _Response:
        fleet, nodes = self._fleet, frozenset(self._nodes_of(fault))
        in_place = fleet.restarting is Restarting.POLICY
        if fault.detection.kind is None:
            self._actions[BY_PERSON] += 1
            return _Response(recovering_s=fleet.restart_s if in_place else fleet.requeue_s, replaced=nodes)
        if in_place:
            return self._decide(fault, fault.detection.kind)
        self._tries[fault.incident] += 1
        if fleet.restarting is Restarting.PERSON or self._tries[fault.incident] == REQUEUES:
            self._actions[BY_PERSON] += 1
            return _Response(recovering_s=fleet.restart_s + fleet.person_s, replaced=nodes)
        self._actions["the scheduler restarts"] += 1
        gone = fault.detection.kind is FailureKind.NODE_LOST
        return _Response(recovering_s=fleet.requeue_s, replaced=nodes if gone else frozenset())

    def _decide(self, fault: _Fault, kind: FailureKind) -> _Response:
        """What the controller's policy decides."""
        fleet, recovery = self._fleet, self._fleet.recovery
        failure = self._failure(fault, kind)
        spare = Spare.STANDBY if self._standbys() > 0 else Spare.NONE
        verdict = decide(failure, self._failures.relevant(failure), recovery, spare)
        self._actions[verdict.action.value] += 1
        self._failures.add(failure)
        recovering_s = fleet.restart_s + verdict.wait_s + fleet.checks_s * verdict.check_nodes
        stops = verdict.action is Action.STOP
        if stops:
            recovering_s += fleet.person_s
            self._failures = KnownFailures(recovery)  # it is another run
        return _Response(
            recovering_s=recovering_s,
            replaced=self._replaced_by(verdict, failure, fault),
            checkpoints_back=verdict.checkpoints_back,
            whole_run=stops or verdict.checkpoints_back > 0,
        )

    def _failure(self, fault: _Fault, kind: FailureKind) -> Failure:
        detection, step_s = fault.detection, self._fleet.step_s
        replica = self._replica(fault.incident.node)
        attempt = self._attempts[replica]
        node = fault.incident.node if detection.names_node else self._node_of(replica)
        return Failure(
            kind=kind,
            at=self._now,
            node=node,
            machine=f"machine{node}.{self._generations[node]}",
            attempt=attempt.number,
            replica=replica,
            rank=node * self._fleet.gpus_per_node,
            code=detection.code,
            error=detection.error,
            step=int(self._highest_work / step_s),
            made_progress=(self._work - attempt.work) / step_s >= PROGRESS_STEPS,
            has_session=True,
            uptime_s=self._now - attempt.at,
            confirmed=kind is FailureKind.STRAGGLING,
            excused=fault.cause.hits_rack,
        )

    def _node_of(self, replica: int) -> int:
        """Any node of a replica."""
        first, end = (-(-each * self._fleet.nodes // self._replicas) for each in (replica, replica + 1))
        return first + self._chance.randrange(end - first)

    def _replaced_by(self, verdict: Verdict, failure: Failure, fault: _Fault) -> frozenset[int]:
        """The nodes that a decision replaces: the named one, and faulty ones that checks or a person find."""
        nodes = {failure.node} if verdict.replace_node or verdict.action is Action.REPLACE_NODE else set[int | None]()
        if nodes and fault.cause.hits_rack:
            nodes |= set(self._nodes_of(fault))
        if verdict.check_nodes or verdict.action is Action.STOP:
            nodes |= {each.incident.node for each in self._faults if each.incident.persists}
        return frozenset(node for node in nodes if node is not None)

    def _replace(self, node: int) -> tuple[bool, bool]:
        """Give the node another machine; return whether a standby takes its place, and whether it is a good one."""
        fleet, faults = self._fleet, [each for each in self._faults if node in self._nodes_of(each)]
        self._healthy_replaced += not faults
        self._generations[node] += 1
        had_standby, bad = self._standbys() > 0, len(self._under_repair)
        if self._avoids:
            if had_standby:
                self._under_repair.append(self._now + fleet.repair_s)
            return had_standby, True
        if not any(each.incident.persists for each in faults):
            return had_standby, True
        self._under_repair.append(self._now + fleet.repair_s)
        return had_standby, self._chance.randrange(max(fleet.standbys, fleet.pool, bad + 1)) >= bad

    def _go_back(self, fault: _Fault, target: float) -> None:
        target = min(target, self._work)
        self._lost[fault.cause.name, Loss.RECOMPUTING] += self._work - target
        self._work = self._resumed_work = target

    def _start(self, failed: _Fault, fixed: Collection[int], replicas: Collection[int]) -> None:
        """The next attempt of replicas: without faults that a restart, another machine or a checkpoint ends."""
        for replica in replicas:
            outage = self._outages.get(replica)
            self._attempts[replica] = _Attempt(
                number=self._attempts[replica].number + 1,
                work=self._work,
                at=self._now if outage is None else outage.until,
            )
        before, self._faults = self._faults, []
        for fault in before:
            if fault is not failed and fault.incident.node not in fixed:
                self._carry_over(fault, replicas)
        if failed.incident.node not in fixed and failed.incident.persists:
            self._carry_over(failed, replicas, again=True)

    def _carry_over(self, fault: _Fault, replicas: Collection[int], *, again: bool = False) -> None:
        """Keep a fault that the restart of these replicas does not end."""
        if self._replica(fault.incident.node) not in replicas:
            self._faults.append(fault)
        elif fault.cause.effect is FaultEffect.STOPS or again:
            if fault.incident.persists:
                self._begin(fault.incident, again=True)
        elif fault.cause.effect is FaultEffect.SLOWS or fault.incident.persists or fault.safe_work < self._work:
            fault.safe_work = min(fault.safe_work, self._work)
            fault.detected_at = max(fault.detected_at, self._now)
            self._faults.append(fault)
