"""Decides which machines of a target later runs avoid, for how long, and which evidence is not believed.

Pure: a target stores the quarantine, as a file or an object, and passes the time and the number of its machines.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.findings import Finding

FORMAT = 1
"""Version of the stored quarantine."""

HOUR_S, DAY_S = 3600.0, 86400.0

MAX_SHARE = 0.1
"""Largest share of a target's machines that are quarantined at a time; one of them at least, if there are several.

At 6.5 failures per 1,000 node-days, 0.7 % of a fleet fails within the longest ordinary expiry of a week.
"""

SAME_CODE_MACHINES, SAME_CODE_WINDOW_S = 3, HOUR_S
"""Machines that one job may accuse with one code in so many seconds.

Independent faults of four machines of one job within an hour are rarer than an error in a check or in the program.
"""

STRIKE_WINDOW_S = DAY_S
"""Seconds within which the second failed check of a machine counts: the same as `recovery.suspect_window_s`."""

FORGET_S = 30 * DAY_S
"""Seconds after its end for which a quarantine lengthens the machine's next one."""

MAX_EXPIRY_S = 28 * DAY_S
MAX_STRIKES = 1000
MAX_EVIDENCE_LINES, MAX_LINE_CHARS = 5, 300


class Certainty(StrEnum):
    """How sure it is that a machine is at fault."""

    CERTAIN = "certain"
    """A device reported that it failed: the machine needs a repair."""
    NAMED = "named"
    """A probe, a replay, a comparison or repeated faults named the machine."""
    CHECK = "check"
    """One check failed on it; the second within `STRIKE_WINDOW_S` quarantines it."""


EXPIRY_S = {Certainty.CERTAIN: 7 * DAY_S, Certainty.NAMED: DAY_S, Certainty.CHECK: DAY_S}
"""Seconds of a machine's first quarantine; each further one within `FORGET_S` is twice as long.

A repair takes days, so that the machine would fail the next run too. What is only suspected is tried again after a day.
"""


class MachineEvidence(Struct, frozen=True, kw_only=True):
    """Why a machine is avoided."""

    certainty: Certainty
    finding: Finding


class Candidate(Struct, frozen=True, kw_only=True):
    """A machine that a run found to be at fault."""

    machine: str
    run: str
    """Id of the run: its job's name, a dash and six characters."""
    evidence: MachineEvidence

    @property
    def code(self) -> str:
        return self.evidence.finding.code


class QuarantineRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The latest quarantine of one machine; times are Unix seconds."""

    machine: str
    since: float
    until: float
    code: str
    """Code of the finding."""
    what: str = ""
    evidence: tuple[str, ...] = ()
    run: str = ""
    """The run that found it."""
    certainty: Certainty = Certainty.NAMED
    times: int = 1
    """How often in a row it was quarantined, each within `FORGET_S` of the last."""
    released_at: float = 0.0
    """When a user released it; 0 if it was not released."""

    @property
    def ends_at(self) -> float:
        return min(self.until, self.released_at) if self.released_at else self.until


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence against a machine that did not quarantine it."""

    machine: str
    at: float
    code: str
    run: str


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """All that a target remembers of bad machines."""

    format: int = FORMAT
    rows: tuple[QuarantineRow, ...] = ()
    """One per machine, also after it ended, until `FORGET_S` have passed."""
    strikes: tuple[Strike, ...] = ()

    def active(self, now: float) -> tuple[QuarantineRow, ...]:
        """The machines that runs avoid now."""
        return tuple(row for row in self.rows if row.ends_at > now)

    def over(self, now: float) -> frozenset[str]:
        """Machines that were repaired or forgiven: nothing has been held against them since their quarantine ended."""
        ended = {row.machine: row.ends_at for row in self.rows if row.ends_at <= now}
        accused = {strike.machine for strike in self.strikes if strike.at >= ended.get(strike.machine, now)}
        return frozenset(ended.keys() - accused)

    def row(self, machine: str) -> QuarantineRow | None:
        return next((row for row in self.rows if row.machine == machine), None)


def decode(content: bytes | str) -> Quarantine:
    """A stored quarantine; raises ValueError if it is damaged or of a later format."""
    found = msgspec.json.decode(content, type=Quarantine)
    if found.format > FORMAT:
        raise ValueError(f"a newer holdfast wrote it: format {found.format}")
    return found


class QuarantineOutcome(StrEnum):
    """What follows from evidence against a machine."""

    QUARANTINED = "quarantined"
    KNOWN = "known"
    """It is quarantined already."""
    NOTED = "noted"
    """Its first failed check."""
    ONLY_MACHINE = "alone"
    """The target has no other."""
    FULL = "full"
    """As many machines as may be are quarantined."""
    DOUBTFUL = "doubtful"
    """The same job accused several machines of the same lately: its own error is more likely."""


class Decision(Struct, frozen=True, kw_only=True):
    """What follows, and the quarantine afterwards."""

    outcome: QuarantineOutcome
    quarantine: Quarantine
    limit: int
    """Machines that may be quarantined at a time."""

    accepted: QuarantineRow | None
    """The machine's row, if it is quarantined now."""


def max_quarantined(machines: int) -> int:
    """How many of a target's machines may be quarantined at a time; never the only one."""
    return max(1, int(machines * MAX_SHARE)) if machines > 1 else 0


def judge(quarantine: Quarantine, candidate: Candidate, *, machines: int, now: float) -> Decision:
    """Decide on evidence against a machine of a target with so many machines."""
    kept = _without_old(quarantine, now)
    found = (outcome for outcome, applies in _RULES if applies(kept, candidate, machines, now))
    outcome = next(found, QuarantineOutcome.QUARANTINED)
    accepted = None
    match outcome:
        case QuarantineOutcome.QUARANTINED | QuarantineOutcome.KNOWN:
            accepted = _row(kept, candidate, now)
            kept = _with_row(kept, accepted)
        case QuarantineOutcome.NOTED | QuarantineOutcome.FULL | QuarantineOutcome.DOUBTFUL:
            strike = Strike(machine=candidate.machine, at=now, code=candidate.code, run=candidate.run)
            kept = replace(kept, strikes=(*kept.strikes, strike)[-MAX_STRIKES:])
        case QuarantineOutcome.ONLY_MACHINE:
            pass
    return Decision(outcome=outcome, quarantine=kept, limit=max_quarantined(machines), accepted=accepted)


def release(quarantine: Quarantine, machine: str, now: float) -> Quarantine | None:
    """End the quarantine of a machine; None if nothing is held against it. What was held against it no longer counts.

    A run may avoid a machine that was accused and not quarantined, so that one can be released too.
    """
    row = quarantine.row(machine)
    strikes = [strike for strike in quarantine.strikes if strike.machine == machine]
    if row is None or row.ends_at <= now:
        if not strikes:
            return None
        last = strikes[-1]
        times = 0 if row is None else row.times
        row = QuarantineRow(machine=machine, since=last.at, until=now, code=last.code, run=last.run, times=times)
    others = tuple(strike for strike in quarantine.strikes if strike.machine != machine)
    return replace(_with_row(quarantine, replace(row, released_at=now)), strikes=others)


def _is_known(kept: Quarantine, candidate: Candidate, machines: int, now: float) -> bool:
    return any(row.machine == candidate.machine for row in kept.active(now))


def _is_only_machine(kept: Quarantine, candidate: Candidate, machines: int, now: float) -> bool:
    return machines <= 1


def _is_doubtful(kept: Quarantine, candidate: Candidate, machines: int, now: float) -> bool:
    since, job = now - SAME_CODE_WINDOW_S, _job(candidate.run)
    accused = [(row.machine, row.since, row.code, row.run) for row in kept.rows]
    accused += [(strike.machine, strike.at, strike.code, strike.run) for strike in kept.strikes]
    others = {
        machine
        for machine, at, code, run in accused
        if at > since and code == candidate.code and _job(run) == job and machine != candidate.machine
    }
    return len(others) >= SAME_CODE_MACHINES


def _is_first_check(kept: Quarantine, candidate: Candidate, machines: int, now: float) -> bool:
    struck = any(strike.machine == candidate.machine for strike in kept.strikes)
    return candidate.evidence.certainty is Certainty.CHECK and not struck


def _is_full(kept: Quarantine, candidate: Candidate, machines: int, now: float) -> bool:
    return len(kept.active(now)) >= max_quarantined(machines)


_RULES: tuple[tuple[QuarantineOutcome, Callable[[Quarantine, Candidate, int, float], bool]], ...] = (
    (QuarantineOutcome.KNOWN, _is_known),
    (QuarantineOutcome.ONLY_MACHINE, _is_only_machine),
    (QuarantineOutcome.DOUBTFUL, _is_doubtful),
    (QuarantineOutcome.NOTED, _is_first_check),
    (QuarantineOutcome.FULL, _is_full),
)
"""The first that applies decides; if none does, the machine is quarantined."""


def _row(kept: Quarantine, candidate: Candidate, now: float) -> QuarantineRow:
    before, finding = kept.row(candidate.machine), candidate.evidence.finding
    known = before is not None and before.ends_at > now
    times = 1 if before is None else before.times + (0 if known else 1)
    until = now + min(MAX_EXPIRY_S, EXPIRY_S[candidate.evidence.certainty] * 2.0 ** (times - 1))
    if before is not None and known:
        return replace(before, until=max(before.until, until))
    lines = tuple(line[:MAX_LINE_CHARS] for line in finding.evidence[:MAX_EVIDENCE_LINES])
    return QuarantineRow(
        machine=candidate.machine,
        since=now,
        until=until,
        code=finding.code,
        what=finding.what[:MAX_LINE_CHARS],
        evidence=lines,
        run=candidate.run,
        certainty=candidate.evidence.certainty,
        times=times,
    )


def _with_row(quarantine: Quarantine, row: QuarantineRow) -> Quarantine:
    others = (each for each in quarantine.rows if each.machine != row.machine)
    return replace(quarantine, rows=(*others, row))


def _without_old(quarantine: Quarantine, now: float) -> Quarantine:
    rows = tuple(row for row in quarantine.rows if row.ends_at > now - FORGET_S)
    strikes = tuple(strike for strike in quarantine.strikes if strike.at > now - STRIKE_WINDOW_S)
    return replace(quarantine, rows=rows, strikes=strikes)


def _job(run: str) -> str:
    return run.rpartition("-")[0] or run
