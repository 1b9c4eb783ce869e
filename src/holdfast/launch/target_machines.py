"""What is known of a target's machines: which are in use, and which runs avoid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.findings import Finding
from holdfast.job.quarantine import Quarantine, QuarantineRow, max_quarantined
from holdfast.job.quarantine_text import describe


class MachineState(StrEnum):
    """State of a machine for a new run."""

    FREE = "free"
    USED = "used"
    QUARANTINED = "quarantined"
    CORDONED = "cordoned"
    """The cluster places nothing on it; holdfast or an operator decided that."""


class MachineStatus(Struct, frozen=True, kw_only=True):
    """One machine of a target."""

    name: str
    state: MachineState
    runs: tuple[str, ...] = ()
    """Runs with a node on it."""
    quarantine: QuarantineRow | None = None
    note: str = ""
    """The reason that a run gave when it cordoned the machine, if the quarantine is over."""


class TargetMachines(Struct, frozen=True, kw_only=True):
    """A target's machines, by name."""

    machines: tuple[MachineStatus, ...]
    limit: int
    """Machines that may be quarantined at a time."""
    findings: tuple[Finding, ...] = ()


def list_machines(
    names: Iterable[str],
    uses: Iterable[tuple[str, str]],
    quarantine: Quarantine,
    *,
    now: float,
    cordoned: Mapping[str, str] | None = None,
    findings: tuple[Finding, ...] = (),
) -> TargetMachines:
    """The machines of these names, and those that are used or quarantined; `uses` are pairs of machine and run.

    `cordoned` has the reason that a run gave for each cordoned machine, or nothing.
    """
    runs, known = defaultdict[str, set[str]](set), dict.fromkeys(names)
    for machine, run in uses:
        runs[machine].add(run)
    rows = {row.machine: row for row in quarantine.active(now)}
    everyone = sorted({*known, *runs, *rows}, key=_by_number)
    out = cordoned or {}
    return TargetMachines(
        machines=tuple(
            MachineStatus(
                name=name,
                state=_state(name in rows, name in out, bool(runs[name])),
                runs=tuple(sorted(runs[name])),
                quarantine=rows.get(name),
                note="" if name in rows else out.get(name, ""),
            )
            for name in everyone
        ),
        limit=max_quarantined(len(everyone)),
        findings=findings,
    )


def _state(is_quarantined: bool, is_cordoned: bool, is_used: bool) -> MachineState:
    if is_quarantined:
        return MachineState.QUARANTINED
    if is_cordoned:
        return MachineState.CORDONED
    return MachineState.USED if is_used else MachineState.FREE


def _by_number(name: str) -> tuple[str, int, str]:
    """Sorts `m9` before `m10`."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0), name


def not_quarantined(machine: str, target: str, quarantine: Quarantine, now: float) -> HoldfastError:
    """The error for a release of a machine that is not quarantined."""
    return failure(
        "machine-not-quarantined",
        f"{machine} is not quarantined on {target}",
        exit_code=ExitCode.NOT_FOUND,
        where=machine,
        evidence=tuple(map(describe, quarantine.active(now))),
        remedy=f"`holdfast nodes --on {target}` lists the machines.",
    )
