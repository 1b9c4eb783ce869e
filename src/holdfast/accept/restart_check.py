"""Checks that a run recovers from failures of many kinds by itself, and computes what a run without failures does."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from statistics import median

from msgspec import Struct

from holdfast import api
from holdfast.accept.agreement import CheckName, RestartTerms
from holdfast.accept.check_report import CheckReport, Figure, Verdict
from holdfast.accept.fault_sequence import NO_RESTART, FaultSequence, plan_faults
from holdfast.accept.site import ObservedRun, Site
from holdfast.errors import HoldfastError
from holdfast.events import FaultInjected, FaultRequested, StepCommitted
from holdfast.findings import Finding
from holdfast.report.run_history import RecoverySummary
from holdfast.run_dir import RunDir

PACE_S = 0.05
"""Least time of a step, so that a fault at a step finds the run there."""
LOSS = "loss"
STATE: Mapping[str, str] = {
    "digest_samples": "the position in the data",
    "digest_random": "the state of the random number generators",
    "digest_weights": "the weights",
    "digest_optimizer": "the state of the optimizer or of its schedule",
    "digest_result": "the computation itself: all that is compared before the step is equal",
}
"""What is compared of a step, in the order in which a difference spreads to the next."""
NOT_SAVED = (
    "Save and load this state too: give it to the Session as `state={...}`, `scheduler` or `optimizer`. A loss differs "
    "as well where arithmetic is not repeated exactly (docs/checkpoints.md)."
)
NOT_DETERMINISTIC = (
    "Have torch repeat its arithmetic: `torch.use_deterministic_algorithms(True)`, and with DDP on three or more ranks "
    "`find_unused_parameters=True` (docs/checkpoints.md)."
)


class Difference(Struct, frozen=True, kw_only=True):
    """The first step of a run that differs from the run without failures."""

    step: int
    attempt: int
    metric: str

    @property
    def lost(self) -> str:
        """What differs first, in words."""
        return STATE.get(self.metric, "the loss; the program reports no digests, which would say more")


def check_restart(site: Site) -> CheckReport:
    """Train without failures, then again with faults at random steps, and compare."""
    terms = site.agreement.restart
    nodes = min(2, site.nodes)
    steps = terms.steps_per_fault * (terms.faults + 1)
    options = ("--steps", str(steps), *(() if site.agreement.program else ("--compare", "--pace", str(PACE_S))))
    site.log(f"training {steps} steps on {nodes} nodes without failures")
    reference = site.observe(_start(site, "reference", options, nodes, terms), deadline_s=terms.deadline_s)
    if reference.problem:
        return CheckReport(
            check=CheckName.RESTART,
            verdict=Verdict.FAILED,
            finding=reference.problem,
            runs=(reference.folder.run_id,),
        )
    run = _start(site, "restart", options, nodes, terms)
    planned, refused = plan_faults(terms, api.accepted(run), run.run_id, seed=site.agreement.seed)
    site.log(f"the same with {len(planned)} faults: {', '.join(f'{each.action} {each.target}' for each in planned)}")
    faults = FaultSequence(planned, partial(_inject, run), patience_steps=2 * terms.steps_per_fault)
    observed = site.observe(run, deadline_s=terms.deadline_s, on_event=faults.on_event)
    return judge_restart(reference, observed, planned, terms, refused)


def _inject(run: RunDir, fault: FaultRequested) -> bool:
    with contextlib.suppress(HoldfastError):  # no controller answers now, or the run is over
        api.inject_faults(run, (fault,))
        return True
    return False


def _start(site: Site, name: str, options: Sequence[str], nodes: int, terms: RestartTerms) -> RunDir:
    return site.start(
        name,
        site.program(*options),
        nodes=nodes,
        checkpoint__every_steps=terms.checkpoint_steps,
        recovery__step_timeout_s=terms.hang_s,
        recovery__max_restarts=50,
    )


def judge_restart(
    reference: ObservedRun,
    run: ObservedRun,
    planned: Sequence[FaultRequested],
    terms: RestartTerms,
    refused: Sequence[str] = (),
) -> CheckReport:
    """All faults were injected, each was recovered from, little was done again, and the result is the same."""
    injected = {event.requested_at for event in run.events if isinstance(event, FaultInjected)}
    recoveries = run.status.history.recoveries
    different = first_difference(reference.steps, run.steps)
    restarting = sum(each.target not in NO_RESTART for each in planned)
    finding = (
        _unrecovered(run, recoveries)
        or _not_injected(run, planned, injected)
        or _without_effect(run, recoveries, restarting)
        or _uncompared(reference.steps, run)
        or _redone(run, recoveries, terms)
        or _inexact(run, different)
        or _slow(run, recoveries, terms)
    )
    took = [each.until_step_s for each in recoveries if each.until_step_s is not None]
    redone = [each.recomputed_steps for each in recoveries]
    return CheckReport(
        check=CheckName.RESTART,
        verdict=Verdict.FAILED if finding else Verdict.PASSED,
        finding=finding,
        figures=(
            Figure(
                name="faults injected",
                value=str(len(injected)),
                agreed=str(terms.faults),
                met=len(injected) >= terms.faults,
            ),
            Figure(
                name="failures that were recovered from",
                value=str(len(recoveries)),
                agreed=f"at least {restarting}",
                met=len(recoveries) >= restarting,
            ),
            Figure(
                name="equal to the run without failures",
                value="every step that was kept, bit-exact" if different is None else f"until step {different.step}",
                agreed="every step",
                met=different is None,
            ),
            Figure(
                name="steps done again",
                value=f"{sum(redone)}, at most {max(redone, default=0)} for a failure",
                agreed=f"at most {terms.max_redone_steps} for a failure",
                met=max(redone, default=0) <= terms.max_redone_steps,
            ),
            Figure(
                name="failure to next step",
                value=f"median {median(took):.2f} s, longest {max(took):.2f} s" if took else "no failure",
                agreed=f"at most {terms.max_recovery_s:g} s",
                met=max(took, default=0.0) <= terms.max_recovery_s,
            ),
        ),
        evidence=(*map(_line, recoveries), *refused),
        runs=(reference.folder.run_id, run.folder.run_id),
    )


def _uncompared(reference: Sequence[StepCommitted], run: ObservedRun) -> Finding | None:
    """That nothing shows whether the two runs compute the same; None if their last step can be compared."""
    last = reference[-1] if reference else None
    again = [each for each in run.steps if last is not None and each.step == last.step]
    if last is not None and again and any(name in last.metrics for name in (*STATE, LOSS)):
        return None
    return Finding(
        code="nothing-to-compare",
        what="nothing shows whether the run with faults computes what the one without them does",
        where=run.folder.run_id,
        evidence=(f"last step without faults: {last.step if last else 'none'}",),
        remedy="Commit each step with a Session, with its loss; digests of the state say more.",
    )


def first_difference(reference: Sequence[StepCommitted], steps: Sequence[StepCommitted]) -> Difference | None:
    """The first step with another state than in the run without failures.

    Of steps that were done again only the last time counts: a fault may have damaged what was then given up. Without
    digests the losses are compared, except in the last step of a failed attempt: its mean may lack a rank.
    """
    expected = {each.step: each.metrics for each in reference}
    for each, has_failed in _kept(steps):
        if (known := expected.get(each.step)) is None:
            continue
        for metric in [name for name in STATE if name in known] or ([] if has_failed else [LOSS]):
            if known.get(metric) != each.metrics.get(metric):
                return Difference(step=each.step, attempt=each.attempt, metric=metric)
    return None


def _kept(steps: Sequence[StepCommitted]) -> list[tuple[StepCommitted, bool]]:
    """Steps that were not done again, oldest first, and whether each is the last of a failed attempt."""
    kept: list[tuple[StepCommitted, bool]] = []
    for number in reversed(range(len(steps))):
        each = steps[number]
        has_failed = number + 1 < len(steps) and steps[number + 1].attempt != each.attempt
        if not kept or each.step < kept[-1][0].first:
            kept.append((each, has_failed))
    return kept[::-1]


def _line(recovery: RecoverySummary) -> str:
    cost = "no step followed" if recovery.until_step_s is None else f"next step {recovery.until_step_s:.2f} s later"
    return f"{recovery.finding.code}: {cost}, {recovery.recomputed_steps} steps done again"


def _unrecovered(run: ObservedRun, recoveries: Sequence[RecoverySummary]) -> Finding | None:
    if (failed := run.problem) is None:
        return None
    last = recoveries[-1] if recoveries else None
    after = f" after {last.finding.code}" if last and last.until_step_s is None else ""
    return Finding(
        code="recovery-failed",
        what=f"the run did not recover by itself{after}",
        where=run.folder.run_id,
        evidence=(failed.what, *failed.evidence),
        remedy=failed.remedy,
    )


def _not_injected(run: ObservedRun, planned: Sequence[FaultRequested], injected: Collection[float]) -> Finding | None:
    # The log has the requests in the order in which they were made, with the controller's time.
    asked = [event.at for event in run.events if isinstance(event, FaultRequested)]
    missing = [each for number, each in enumerate(planned) if number >= len(asked) or asked[number] not in injected]
    absent = [f"{each.action} {each.target} at step {each.at_step}" for each in missing]
    if not absent:
        return None
    return Finding(
        code="faults-not-injected",
        what=f"{len(absent)} of {len(planned)} faults were not injected, so that recovery from them is unproven",
        where=run.folder.run_id,
        evidence=tuple(absent),
        remedy="Raise `restart.steps_per_fault`: the run was over, or restarting, when their step came.",
    )


def _without_effect(run: ObservedRun, recoveries: Sequence[RecoverySummary], restarting: int) -> Finding | None:
    """A fault that is injected and causes no failure proves no recovery."""
    if len(recoveries) >= restarting:
        return None
    return Finding(
        code="faults-without-effect",
        what=f"{restarting} faults should have made ranks restart, and {len(recoveries)} failures did",
        where=run.folder.run_id,
        evidence=tuple(map(_line, recoveries)),
        remedy="`holdfast events RUN` shows which fault had none; two that come together count as one: raise "
        "`restart.steps_per_fault`.",
    )


def _redone(run: ObservedRun, recoveries: Sequence[RecoverySummary], terms: RestartTerms) -> Finding | None:
    worst = max(recoveries, key=lambda each: each.recomputed_steps, default=None)
    if worst is None or worst.recomputed_steps <= terms.max_redone_steps:
        return None
    where = "at step 1" if worst.resumed_step == 1 else f"at step {worst.resumed_step}"
    return Finding(
        code="checkpoint-not-used",
        what=(
            f"after {worst.finding.code} at step {worst.step} the run resumed {where}, with checkpoints every "
            f"{terms.checkpoint_steps} steps: {worst.recomputed_steps} steps were done again"
        ),
        where=run.folder.run_id,
        remedy="Load the newest checkpoint at the start of the program, and see that every node reaches its folder.",
    )


def _inexact(run: ObservedRun, different: Difference | None) -> Finding | None:
    if different is None:
        return None
    return Finding(
        code="state-not-restored",
        what=f"step {different.step} differs from the run without failures: what differs first is {different.lost}",
        where=run.folder.run_id,
        evidence=(f"attempt {different.attempt}, metric {different.metric}",),
        remedy=NOT_DETERMINISTIC if different.metric == "digest_result" else NOT_SAVED,
    )


def _slow(run: ObservedRun, recoveries: Sequence[RecoverySummary], terms: RestartTerms) -> Finding | None:
    slow = [each for each in recoveries if (each.until_step_s or 0.0) > terms.max_recovery_s]
    if not slow:
        return None
    worst = max(slow, key=lambda each: each.until_step_s or 0.0)
    return Finding(
        code="recovery-slow",
        what=f"{worst.finding.code} cost {worst.until_step_s:.1f} s, more than the agreed {terms.max_recovery_s:g} s",
        where=run.folder.run_id,
        remedy="`holdfast report RUN` shows where the time went: detection, a new node, imports, or the checkpoint.",
    )
