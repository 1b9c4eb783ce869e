"""Simulates a long run that faults interrupt, with the controller's own failure policy; pure.

Discrete events: faults begin, are detected, and the policy (`holdfast.control.policy.decide`) says what follows. Every
second of the run is either kept as training or lost to one cause. Faults come from a table (bench/month_inputs.py), so
that a run with a detector and one without meet the same faults on the same nodes.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.control.policy import PROGRESS_STEPS, Action, Failure, FailureKind, Spare, Verdict, decide
from holdfast.failure_rates import DAY_S
from holdfast.job.spec import Recovery

CHECKPOINTS = "checkpoints"
"""The cause of time that saves cost."""
REMEMBERED = 64
"""Failures that the policy is given: more than any of its rules looks back on."""


class Effect(StrEnum):
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


@dataclass(frozen=True, kw_only=True)
class Delay:
    """A time with a uniform distribution, in seconds."""

    low_s: float = 0.0
    high_s: float

    @property
    def mean_s(self) -> float:
        return (self.low_s + self.high_s) / 2

    def at(self, chance: float) -> float:
        """The time for a chance of 0 to 1."""
        return self.low_s + (self.high_s - self.low_s) * chance


@dataclass(frozen=True, kw_only=True)
class Detection:
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


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A kind of fault."""

    name: str
    per_day: float
    """Faults of the whole run in a day."""
    effect: Effect = Effect.STOPS
    persists: float = 0.0
    """The share of these faults that stays on its node until the node is replaced."""
    slowdown: float = 0.0
    """The share of its speed that the run loses."""
    detection: Detection
    detector: str = ""
    """The part of Watch that detects it sooner or knows more about it; empty if none does."""
    watched: Detection | None = None
    """The detection by that part."""

    def detected(self, detectors: frozenset[str]) -> Detection:
        """How it becomes known where only these detectors run."""
        return self.watched if self.watched is not None and self.detector in detectors else self.detection


@dataclass(frozen=True, kw_only=True)
class Fleet:
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
    recovery: Recovery = field(default_factory=Recovery)

    @property
    def saving_share(self) -> float:
        return self.checkpoint_cost_s / (self.checkpoint_every_s + self.checkpoint_cost_s)


@dataclass(frozen=True)
class Incident:
    """The beginning of a fault."""

    at: float
    cause: Cause
    node: int
    persists: bool
    chance: float
    """Decides how soon it is detected."""


@dataclass(frozen=True, kw_only=True)
class Trial:
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


@dataclass(kw_only=True)
class _Fault:
    """A fault of the run that has not been removed."""

    incident: Incident
    detection: Detection
    detected_at: float
    safe_work: float
    """The last checkpoint before it began."""

    @property
    def cause(self) -> Cause:
        return self.incident.cause


def incidents(causes: Iterable[Cause], *, nodes: int, total_s: float, seed: int) -> list[Incident]:
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


def simulate(fleet: Fleet, causes: Iterable[Cause], detectors: frozenset[str], *, total_s: float, seed: int) -> Trial:
    """One run of `total_s` seconds."""
    coming = iter(incidents(causes, nodes=fleet.nodes, total_s=total_s, seed=seed))
    return _Simulation(fleet, detectors, total_s, random.Random(f"{seed}/again")).run(coming)


class _Simulation:
    """One run in progress. Work is measured in seconds of training at full speed."""

    def __init__(self, fleet: Fleet, detectors: frozenset[str], total_s: float, chance: random.Random) -> None:
        self._fleet = fleet
        self._detectors = detectors
        self._total_s = total_s
        self._chance = chance
        self._now = 0.0
        self._work = 0.0
        self._highest_work = 0.0
        self._attempt = 0
        self._attempt_work = 0.0
        self._attempt_at = 0.0
        self._faults: list[_Fault] = []
        self._failures: tuple[Failure, ...] = ()
        self._generations: Counter[int] = Counter()
        self._under_repair: list[float] = []
        self._lost: defaultdict[tuple[str, Loss], float] = defaultdict(float)
        self._actions: Counter[str] = Counter()
        self._healthy_replaced = 0

    def run(self, coming: Iterator[Incident]) -> Trial:
        upcoming = next(coming, None)
        while self._now < self._total_s:
            first = min(self._faults, key=lambda fault: fault.detected_at, default=None)
            detected_at = self._total_s if first is None else first.detected_at
            stopped = next((fault for fault in self._faults if fault.cause.effect is Effect.STOPS), None)
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
            if fault.cause.effect is Effect.DAMAGES:
                self._go_back(fault, fault.safe_work)
        return Trial(
            total_s=self._total_s,
            kept_s=self._work,
            lost_s=dict(self._lost),
            actions=dict(self._actions),
            healthy_replaced=self._healthy_replaced,
        )

    def _train(self, until: float) -> None:
        seconds = min(until, self._total_s) - self._now
        saving_s = seconds * self._fleet.saving_share
        slow = max((fault.cause for fault in self._faults), key=lambda cause: cause.slowdown, default=None)
        slowed_s = 0.0 if slow is None else (seconds - saving_s) * slow.slowdown
        self._lost[CHECKPOINTS, Loss.SAVING] += saving_s
        if slow is not None and slowed_s:
            self._lost[slow.name, Loss.SLOWED] += slowed_s
        self._work += seconds - saving_s - slowed_s
        self._highest_work = max(self._highest_work, self._work)
        self._now += seconds

    def _lose(self, cause: str, how: Loss, seconds: float) -> None:
        """Let time pass without training; what lies beyond the end of the run is not part of it."""
        seconds = max(0.0, min(seconds, self._total_s - self._now))
        self._lost[cause, how] += seconds
        self._now += seconds

    def _begin(self, incident: Incident, *, again: bool = False) -> None:
        detection = incident.cause.detected(self._detectors)
        delay = detection.again if again and detection.again is not None else detection.delay
        if incident.cause.effect is Effect.SLOWS and detection.kind is not None and not self._may_move_straggler():
            detection = incident.cause.detection
            delay = detection.delay
        chance = self._chance.random() if again else incident.chance
        self._faults.append(
            _Fault(
                incident=incident,
                detection=detection,
                detected_at=self._now + delay.at(chance),
                safe_work=self._last_checkpoint(),
            )
        )

    def _may_move_straggler(self) -> bool:
        """Whether a standby is ready and no straggler was moved lately: the rule of control/watch_handlers.py."""
        since = self._now - self._fleet.recovery.suspect_window_s
        moved = any(one.kind is FailureKind.STRAGGLING and one.at > since for one in self._failures)
        return self._standbys() > 0 and not moved

    def _last_checkpoint(self) -> float:
        every_s = self._fleet.checkpoint_every_s
        return self._attempt_work + (self._work - self._attempt_work) // every_s * every_s

    def _standbys(self) -> int:
        self._under_repair = [until for until in self._under_repair if until > self._now]
        return self._fleet.standbys - len(self._under_repair)

    def _fail(self, fault: _Fault) -> None:
        """End the attempt, do what the policy or a person decides, and start the next one."""
        fleet, name = self._fleet, fault.cause.name
        target = fault.safe_work if fault.cause.effect is Effect.DAMAGES else self._last_checkpoint()
        recovering_s, replaced = fleet.restart_s, set[int]()
        if fault.detection.kind is None:
            self._actions["a person restarts"] += 1
            replaced.add(fault.incident.node)
        else:
            failure = self._failure(fault, fault.detection.kind)
            spare = Spare.STANDBY if self._standbys() > 0 else Spare.NONE
            verdict = decide(failure, self._failures, fleet.recovery, spare)
            self._actions[verdict.action.value] += 1
            self._failures = (*self._failures, failure)[-REMEMBERED:]
            replaced |= self._replaced_by(verdict, failure)
            target -= verdict.checkpoints_back * fleet.checkpoint_every_s
            recovering_s += verdict.wait_s + fleet.checks_s * verdict.check_nodes
            if verdict.action is Action.STOP:
                recovering_s += fleet.person_s
                self._failures = ()  # it is another run
        for node in sorted(replaced):
            if not self._replace(node):
                recovering_s = max(recovering_s, fleet.requeue_s)
        self._go_back(fault, max(0.0, target))
        self._lose(name, Loss.RECOVERING, recovering_s)
        self._start(fault, replaced)

    def _failure(self, fault: _Fault, kind: FailureKind) -> Failure:
        detection, step_s = fault.detection, self._fleet.step_s
        node = fault.incident.node if detection.names_node else self._chance.randrange(self._fleet.nodes)
        return Failure(
            kind=kind,
            at=self._now,
            node=node,
            machine=f"machine{node}.{self._generations[node]}",
            attempt=self._attempt,
            rank=node * self._fleet.gpus_per_node,
            code=detection.code,
            error=detection.error,
            step=int(self._highest_work / step_s),
            made_progress=(self._work - self._attempt_work) / step_s >= PROGRESS_STEPS,
            has_session=True,
            uptime_s=self._now - self._attempt_at,
            confirmed=kind is FailureKind.STRAGGLING,
        )

    def _replaced_by(self, verdict: Verdict, failure: Failure) -> set[int]:
        """The nodes that a decision replaces: the named one, and faulty ones that checks or a person find."""
        nodes = {failure.node} if verdict.replace_node or verdict.action is Action.REPLACE_NODE else set[int | None]()
        if verdict.check_nodes or verdict.action is Action.STOP:
            nodes |= {fault.incident.node for fault in self._faults if fault.incident.persists}
        return {node for node in nodes if node is not None}

    def _replace(self, node: int) -> bool:
        """Give the node another machine; return whether a standby takes its place."""
        self._healthy_replaced += not any(fault.incident.node == node for fault in self._faults)
        self._generations[node] += 1
        had_standby = self._standbys() > 0
        if had_standby:
            self._under_repair.append(self._now + self._fleet.repair_s)
        return had_standby

    def _go_back(self, fault: _Fault, target: float) -> None:
        target = min(target, self._work)
        self._lost[fault.cause.name, Loss.RECOMPUTING] += self._work - target
        self._work = target

    def _start(self, failed: _Fault, replaced: set[int]) -> None:
        """The next attempt: without faults that a restart, another machine or an earlier checkpoint ends."""
        self._attempt += 1
        self._attempt_work, self._attempt_at = self._work, self._now
        remaining = [fault for fault in self._faults if fault.incident.node not in replaced and fault is not failed]
        if failed.incident.node not in replaced and failed.incident.persists:
            remaining.append(failed)
        self._faults = []
        for fault in remaining:
            if fault.cause.effect is Effect.STOPS or fault is failed:
                if fault.incident.persists:
                    self._begin(fault.incident, again=True)
            elif fault.cause.effect is Effect.SLOWS or fault.incident.persists or fault.safe_work < self._work:
                fault.safe_work = min(fault.safe_work, self._work)
                fault.detected_at = max(fault.detected_at, self._now)
                self._faults.append(fault)
