"""Checks that of two jobs that do not fit together, each gets all of its nodes or none, and that both end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct
from msgspec.structs import replace

from holdfast.accept.agreement import CheckName, GangTerms
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.accept.site import ObservedRun, Site
from holdfast.events import AgentConnected, AnyEvent
from holdfast.findings import Finding, Owner

KUBERNETES = "kubernetes"
PREEMPTED_S = 20.0
"""Seconds for which the job of lower priority would keep its nodes."""
MAX_DELAY_S = 2.0
"""Most seconds between the two submissions of a round."""


class Holding(Struct, frozen=True, kw_only=True):
    """When a run of a round had nodes, in Unix seconds."""

    run: ObservedRun
    nodes: int

    @property
    def joined_at(self) -> list[float]:
        """When each node first joined, in order."""
        first: dict[int, float] = {}
        for event in self.run.events:
            if isinstance(event, AgentConnected):
                first.setdefault(event.node, event.at)
        return sorted(first.values())

    @property
    def joins(self) -> list[float]:
        """When any node joined, again too, in order."""
        return sorted(event.at for event in self.run.events if isinstance(event, AgentConnected))

    @property
    def partial_s(self) -> float:
        """Seconds for which it had some of its nodes and not all."""
        joined = self.joined_at
        if not joined:
            return 0.0
        complete = joined[self.nodes - 1] if len(joined) >= self.nodes else self.run.events[-1].at
        return complete - joined[0]

    @property
    def held(self) -> tuple[float, float] | None:
        """From all nodes to the end; None if it never had all."""
        joined = self.joined_at
        return (joined[self.nodes - 1], self.run.events[-1].at) if len(joined) >= self.nodes else None


def check_gang(site: Site) -> CheckReport:
    """Submit pairs of jobs, each of more than half of the target's nodes."""
    terms = site.agreement.gang
    if site.is_one_machine:
        return _not_applicable(
            "this machine has no scheduler: it starts each run immediately, with as many nodes as it wants",
            "Nothing: use a target of kind `hosts`, `slurm` or `kubernetes` to check scheduling.",
        )
    if site.nodes < 2:
        return _not_applicable(f"{site.target} has one node, so no job can get a part of its nodes", "Add nodes.")
    nodes = site.nodes // 2 + 1
    chance = random.Random(site.agreement.seed)
    rounds: list[tuple[Holding, Holding]] = []
    for number in range(terms.rounds):
        site.log(f"round {number + 1} of {terms.rounds}: two jobs of {nodes} of {site.nodes} nodes")
        rounds.append(_contend(site, nodes, chance.uniform(0.0, MAX_DELAY_S)))
        if _problem(rounds[-1], terms):
            break
    report = judge_gang(rounds, terms)
    if terms.priorities is None or report.verdict is not Verdict.PASSED:
        return report
    if site.spec.kind != KUBERNETES:
        unused = Figure(
            name="higher priority preempts", value=f"not checked: `priority` is not used on {site.spec.kind}"
        )
        return replace(report, figures=(*report.figures, unused))
    site.log(f"a job of priority {terms.priorities[0]}, then one of priority {terms.priorities[1]}")
    return judge_preemption(report, *_preempt(site, nodes, *terms.priorities))


def _preempt(site: Site, nodes: int, low: str, high: str) -> tuple[Holding, Holding]:
    """A job with the lower priority that has all of its nodes, and one with the higher that is submitted then."""
    deadline_s = site.agreement.gang.deadline_s
    program = f"import time; time.sleep({PREEMPTED_S})", f"import time; time.sleep({site.agreement.gang.hold_s})"
    has_all = threading.Event()

    def first() -> Holding:
        joined: set[int] = set()

        def on_event(event: AnyEvent) -> None:
            if isinstance(event, AgentConnected):
                joined.add(event.node)
                if len(joined) == nodes:
                    has_all.set()

        try:
            run = site.start("gang-low", (site.python, "-c", program[0]), nodes=nodes, priority=low)
            return Holding(run=site.observe(run, deadline_s=deadline_s, on_event=on_event), nodes=nodes)
        finally:
            has_all.set()  # whatever came of it: the other one is submitted, and shows why nothing runs

    def second() -> Holding:
        has_all.wait()
        run = site.start("gang-high", (site.python, "-c", program[1]), nodes=nodes, priority=high)
        return Holding(run=site.observe(run, deadline_s=deadline_s), nodes=nodes)

    with ThreadPoolExecutor(2) as both:
        lower, higher = both.submit(first), both.submit(second)
        return lower.result(), higher.result()


def judge_preemption(report: CheckReport, lower: Holding, higher: Holding) -> CheckReport:
    """The report, extended by whether the higher priority had its nodes first, and the lower resumed and ended."""
    ends, begins = lower.held, higher.held
    before = ends is not None and begins is not None and begins[0] < ends[1]
    again = [at for at in lower.joins if begins is not None and at > begins[0]]
    preempted = before and len(again) >= lower.nodes
    finding = higher.run.problem or lower.run.problem
    if finding is None and not preempted:
        finding = Finding(
            code="priority-ignored",
            what="a job of higher priority did not take the nodes of one of lower priority, which then got them back",
            where=higher.run.folder.run_id,
            remedy="Allow preemption in the queue (Kueue: `preemption.withinClusterQueue: LowerPriority`).",
            owner=Owner.CLUSTER,
        )
    waited_s = begins[0] - higher.run.events[0].at if begins else 0.0
    shown = f"yes, after {waited_s:.1f} s; the other one resumed" if preempted else "no"
    return replace(
        report,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=(*report.figures, Figure(name="higher priority preempts", value=shown, agreed="yes", met=preempted)),
        runs=(*report.runs, lower.run.folder.run_id, higher.run.folder.run_id),
    )


def _contend(site: Site, nodes: int, delay_s: float) -> tuple[Holding, Holding]:
    command = (site.python, "-c", f"import time; time.sleep({site.agreement.gang.hold_s})")
    gate = threading.Barrier(2)

    def submit(which: int) -> Holding:
        gate.wait()
        if which:
            time.sleep(delay_s)
        run = site.start(f"gang-{which}", command, nodes=nodes, recovery__prewarm="false")
        return Holding(run=site.observe(run, deadline_s=site.agreement.gang.deadline_s), nodes=nodes)

    with ThreadPoolExecutor(2) as both:
        first, second = both.map(submit, (0, 1))
    return first, second


def judge_gang(rounds: Sequence[tuple[Holding, Holding]], terms: GangTerms) -> CheckReport:
    """Each round was all or nothing, and both of its jobs ended."""
    together = [pair for pair in rounds if _together(pair)]
    finding = next((found for pair in rounds if (found := _problem(pair, terms))), None)
    everyone = [each for pair in rounds for each in pair]
    runs = tuple(each.run.folder.run_id for each in everyone)
    if finding is None and together:
        return _not_applicable(
            "both jobs of a round had all of their nodes at the same time, so they did not contend",
            "Let the target give whole nodes (Slurm: `options: [--exclusive]`; Kubernetes: a queue with a quota), or "
            "set `nodes` in the agreement to what it has.",
            runs,
        )
    waited = [pair for pair in rounds if _waited(pair)]
    if finding is None and not waited:
        return _not_applicable(
            "in no round a job had to wait for the nodes of the other, so they did not contend",
            "Raise `gang.hold_s`, for which a job keeps its nodes, above the time in which one starts.",
            runs,
        )
    worst = max((each.partial_s for each in everyone), default=0.0)
    ended = sum(each.run.problem is None for each in everyone)
    return CheckReport(
        check=CheckName.GANG,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=(
            Figure(name="rounds", value=str(len(rounds)), agreed=str(terms.rounds), met=len(rounds) == terms.rounds),
            Figure(name="rounds in which a job waited for the other", value=str(len(waited))),
            Figure(
                name="jobs that ended", value=f"{ended} of {len(everyone)}", agreed="all", met=ended == len(everyone)
            ),
            Figure(
                name="longest time with some nodes and not all",
                value=f"{worst:.2f} s",
                agreed=f"at most {terms.max_partial_s:g} s",
                met=worst <= terms.max_partial_s,
            ),
        ),
        runs=runs,
    )


def _waited(pair: tuple[Holding, Holding]) -> bool:
    """Whether a job was submitted before the other had ended."""
    first, second = sorted(pair, key=lambda each: each.run.events[0].at)
    return second.run.events[0].at < first.run.events[-1].at


def _together(pair: tuple[Holding, Holding]) -> bool:
    """Whether both had all of their nodes at one time."""
    first, second = pair[0].held, pair[1].held
    return first is not None and second is not None and max(first[0], second[0]) < min(first[1], second[1])


def _problem(pair: tuple[Holding, Holding], terms: GangTerms) -> Finding | None:
    """A half-gang or a deadlock in a round; None if there is none."""
    unfinished = [each for each in pair if each.run.problem]
    partial = [each for each in pair if each.partial_s > terms.max_partial_s]
    evidence = tuple(
        f"{each.run.folder.run_id}: {len(each.joined_at)} of {each.nodes} nodes joined, some and not all for "
        f"{each.partial_s:.1f} s, {'did not end' if each.run.problem else 'ended'}"
        for each in pair
    )
    where = pair[0].run.folder.run_id
    if len(unfinished) == 2 and len(partial) == 2:
        return Finding(
            code="gang-deadlock",
            what="each of two jobs keeps some of the nodes that the other waits for, so that neither starts",
            where=where,
            evidence=evidence,
            remedy="Admit jobs as a whole: Kueue or Volcano with all-or-nothing admission, or one Slurm allocation.",
            owner=Owner.CLUSTER,
        )
    if partial:
        return Finding(
            code="half-gang",
            what=f"a job had some of its nodes and not all for {max(each.partial_s for each in partial):.1f} s",
            where=partial[0].run.folder.run_id,
            evidence=evidence,
            remedy="Admit jobs as a whole: nodes that wait for others are paid for, and keep others from starting.",
            owner=Owner.CLUSTER,
        )
    return unfinished[0].run.problem if unfinished else None


def _not_applicable(why: str, remedy: str, runs: tuple[str, ...] = ()) -> CheckReport:
    found = Finding(code="acceptance-not-applicable", what=why, where=CheckName.GANG.value, remedy=remedy)
    return CheckReport(check=CheckName.GANG, verdict=Verdict.NOT_APPLICABLE, finding=found, runs=runs)
