"""Who is quarantined and for how long; no rule, however bad, takes more of a target than a tenth of its machines."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.findings import Finding, Owner
from holdfast.job.quarantine import (
    DAY_S,
    EXPIRY_S,
    FORGET_S,
    MAX_EXPIRY_S,
    SAME_CODE_MACHINES,
    SAME_CODE_WINDOW_S,
    STRIKE_WINDOW_S,
    Candidate,
    Certainty,
    Decision,
    MachineEvidence,
    Quarantine,
    QuarantineOutcome,
    judge,
    max_quarantined,
    release,
)
from holdfast.job.quarantine_text import avoided_finding, decision_finding

NOW = 1_800_000_000.0


def candidate(
    machine: str, *, code: str = "gpu-failed", run: str = "demo-aaaaaa", certainty: Certainty = Certainty.CERTAIN
) -> Candidate:
    finding = Finding(code=code, what=f"{machine} is bad", evidence=("Xid 79",), owner=Owner.CLUSTER)
    return Candidate(machine=machine, run=run, evidence=MachineEvidence(certainty=certainty, finding=finding))


def judged(
    machine: str, *, at: float = NOW, before: Quarantine | None = None, machines: int = 100, **more: object
) -> Decision:
    return judge(before or Quarantine(), candidate(machine, **more), machines=machines, now=at)  # type: ignore[arg-type] - passed through


def names(quarantine: Quarantine, at: float) -> list[str]:
    return [row.machine for row in quarantine.active(at)]


def test_machine_is_avoided_until_its_quarantine_expires_by_kind() -> None:
    for certainty in (Certainty.CERTAIN, Certainty.NAMED):
        decision = judged("m7", certainty=certainty)
        assert decision.outcome is QuarantineOutcome.QUARANTINED
        assert names(decision.quarantine, NOW + EXPIRY_S[certainty] - 1) == ["m7"]
        assert names(decision.quarantine, NOW + EXPIRY_S[certainty] + 1) == []


def test_failed_check_quarantines_at_the_second_time_within_a_day_only() -> None:
    first = judged("m7", certainty=Certainty.CHECK)
    assert (first.outcome, names(first.quarantine, NOW)) == (QuarantineOutcome.NOTED, [])
    later = {STRIKE_WINDOW_S - 1: QuarantineOutcome.QUARANTINED, STRIKE_WINDOW_S + 1: QuarantineOutcome.NOTED}
    for later_s, outcome in later.items():
        again = judged("m7", at=NOW + later_s, before=first.quarantine, certainty=Certainty.CHECK, run="other-bbbbbb")
        assert again.outcome is outcome, later_s


def test_only_machine_and_all_beyond_a_tenth_are_refused() -> None:
    for machines, limit in ((0, 0), (1, 0), (2, 1), (10, 1), (19, 1), (20, 2), (100, 10)):
        assert max_quarantined(machines) == limit, machines
        known = Quarantine()
        for number in range(limit):
            known = judged(f"m{number}", before=known, machines=machines, run=f"job{number}-aaaaaa").quarantine
        decision = judged("more", before=known, machines=machines, run="other-aaaaaa")
        assert decision.outcome is (QuarantineOutcome.FULL if limit else QuarantineOutcome.ONLY_MACHINE), machines
        assert len(names(decision.quarantine, NOW)) == limit
        finding = decision_finding(decision, candidate("more"), "cluster")
        assert (finding and (finding.code, finding.where)) == (("quarantine-full", "more") if limit else None)
        assert len(finding.evidence if finding else ()) == min(5, limit)


def test_known_machine_stays_one_row_and_may_only_stay_longer() -> None:
    first = judged("m7", certainty=Certainty.NAMED)
    again = judged("m7", at=NOW + 60, before=first.quarantine, certainty=Certainty.CERTAIN, run="other-bbbbbb")
    (row,) = again.quarantine.rows
    assert (again.outcome, row.times, row.run) == (QuarantineOutcome.KNOWN, 1, "demo-aaaaaa")
    assert row.until == NOW + 60 + EXPIRY_S[Certainty.CERTAIN]
    shorter = judged("m7", at=NOW + 120, before=again.quarantine, certainty=Certainty.NAMED)
    assert shorter.quarantine.rows == (row,)


def test_machine_that_comes_back_bad_is_avoided_twice_as_long_each_time() -> None:
    known, at, lengths = Quarantine(), NOW, list[float]()
    for _ in range(6):
        known = judged("m7", at=at, before=known).quarantine
        (row,) = known.rows
        lengths.append((row.until - row.since) / DAY_S)
        released = release(known, "m7", at + 60)
        assert released is not None
        assert names(released, at + 61) == []
        known, at = released, at + 3600
    assert lengths == [7, 14, 28, 28, 28, 28]
    assert lengths[-1] * DAY_S == MAX_EXPIRY_S
    (row,) = judged("m7", at=at + FORGET_S + 1, before=known).quarantine.rows
    assert row.times == 1


def test_release_of_a_healthy_machine_changes_nothing_and_one_forgets_strikes() -> None:
    assert release(Quarantine(), "m7", NOW) is None
    known = judged("m7").quarantine
    assert release(known, "m7", NOW + EXPIRY_S[Certainty.CERTAIN] + 1) is None
    once = release(judged("m7", certainty=Certainty.CHECK).quarantine, "m7", NOW + 1)
    assert once is not None
    assert judged("m7", at=NOW + 2, before=once, certainty=Certainty.CHECK).outcome is QuarantineOutcome.NOTED
    assert judged("m7", at=NOW + 2, before=once).quarantine.rows[0].times == 1
    struck = judged("m8", before=judged("m7", certainty=Certainty.CHECK).quarantine, certainty=Certainty.CHECK)
    again = judged("m7", before=struck.quarantine, certainty=Certainty.CHECK)
    released = release(again.quarantine, "m7", NOW + 1)
    assert released is not None
    assert [strike.machine for strike in released.strikes] == ["m8"]


def test_quarantine_is_over_once_it_was_released_or_expired_and_nothing_is_held_against_the_machine_since() -> None:
    known = judged("m7").quarantine
    released = release(known, "m7", NOW + 60)
    assert released is not None
    assert (known.over(NOW + 61), released.over(NOW + 59), released.over(NOW + 61)) == (set(), set(), {"m7"})
    assert known.over(NOW + EXPIRY_S[Certainty.CERTAIN]) == {"m7"}
    full = judged("m8", at=NOW + 61, before=released, machines=10).quarantine
    not_accepted = judged("m7", at=NOW + 62, before=full, machines=10)
    assert not_accepted.outcome is QuarantineOutcome.FULL
    assert not_accepted.quarantine.over(NOW + 63) == set()
    forgiven = release(not_accepted.quarantine, "m7", NOW + 64)
    assert forgiven is not None
    assert (forgiven.over(NOW + 64), forgiven.strikes) == ({"m7"}, ())
    assert judged("m7", at=NOW + 62, before=released).quarantine.over(NOW + 63) == set()


def test_job_that_accuses_many_machines_of_the_same_is_doubted_and_another_job_is_not() -> None:
    known = Quarantine()
    for number in range(SAME_CODE_MACHINES):
        known = judged(f"m{number}", at=NOW + number, before=known, run=f"demo-{number:06}").quarantine
    doubted = judged("m50", at=NOW + 10, before=known, run="demo-zzzzzz")
    assert doubted.outcome is QuarantineOutcome.DOUBTFUL
    finding = decision_finding(doubted, candidate("m50"), "cluster")
    assert finding is not None
    assert (finding.code, finding.owner) == ("quarantine-doubtful", Owner.USER)
    accepted = {
        "another job": judged("m50", at=NOW + 10, before=known, run="other-zzzzzz"),
        "another code": judged("m50", at=NOW + 10, before=known, code="nic-failed"),
        "later": judged("m50", at=NOW + SAME_CODE_WINDOW_S + 10, before=known),
    }
    assert {case: decision.outcome for case, decision in accepted.items()} == dict.fromkeys(
        accepted, QuarantineOutcome.QUARANTINED
    )
    still = judged("m51", at=NOW + SAME_CODE_WINDOW_S + 0.5, before=doubted.quarantine)
    assert still.outcome is QuarantineOutcome.DOUBTFUL, "what it is doubted for counts too"


def test_check_that_fails_on_every_machine_quarantines_few() -> None:
    known = Quarantine()
    for number in range(200):
        at, name = NOW + 10 * number, f"m{number // 2}"
        known = judged(name, at=at, before=known, code="driver-old", certainty=Certainty.CHECK).quarantine
    assert len(known.active(NOW + 2000)) == SAME_CODE_MACHINES


def test_new_run_is_told_how_many_machines_it_avoids() -> None:
    rows = judged("m7", before=judged("m3").quarantine, run="other-bbbbbb").quarantine.active(NOW)
    (finding,) = avoided_finding(rows, 16, "cluster")
    assert finding.what == "2 of 16 machines of cluster are quarantined: runs avoid them"
    assert finding.evidence[0].startswith("m3: gpu-failed, found by demo-aaaaaa; until 2027-01-22 08:00 UTC")
    assert "holdfast nodes --release m3 --on cluster" in finding.remedy
    (one,) = avoided_finding(rows[:1], None, "local")
    assert one.what == "1 machine of local is quarantined: runs avoid it"
    assert avoided_finding((), 16, "cluster") == ()


accusations = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(("gpu-failed", "straggler", "probe-slow")),
        st.sampled_from(tuple(Certainty)),
        st.integers(0, 5),
        st.floats(0, 2 * DAY_S),
        st.booleans(),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(accusations, st.integers(1, 120))
def test_never_more_than_a_tenth_nor_the_only_machine_whatever_comes(
    accused: list[tuple[int, str, Certainty, int, float, bool]], machines: int
) -> None:
    known, at = Quarantine(), NOW
    for number, code, certainty, job, pause_s, releases in accused:
        at += pause_s
        name = f"m{number % machines}"
        known = judged(
            name, at=at, before=known, machines=machines, code=code, certainty=certainty, run=f"job{job}-aaaaaa"
        ).quarantine
        active = names(known, at)
        assert len(active) == len(set(active)) <= max_quarantined(machines)
        assert len(active) < machines
        assert len(active) <= max(1, machines // 10)
        if releases and active:
            known = release(known, active[0], at) or known
            assert active[0] not in names(known, at)


def test_bad_rule_that_blames_a_random_healthy_machine_at_each_failure_takes_a_tenth_at_most() -> None:
    for seed in range(10):
        dice, known, at, worst = random.Random(seed), Quarantine(), NOW, 0
        for number in range(300):
            at += dice.expovariate(1 / 3600)
            known = judged(f"m{dice.randrange(100)}", at=at, before=known, run=f"job{number}-aaaaaa").quarantine
            worst = max(worst, len(known.active(at)))
        assert worst == 10, seed
