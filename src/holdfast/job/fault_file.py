"""Parses faults from the command line or from a fault file; fault_catalog.py checks them against a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import FaultAction, FaultRequested, FaultTarget
from holdfast.job.loader import read_text, validate_model
from holdfast.job.spec import Count, Model, NonEmpty, Number, Seconds
from holdfast.job.validation_messages import finding_at
from holdfast.job.yaml_source import parse, printable

FAULT_FILE_SUFFIXES = (".yaml", ".yml")
"""Suffixes that distinguish a fault file from an action."""


class FaultEntry(Model):
    """One fault of a file."""

    fault: NonEmpty
    """Action and target, such as `kill rank:3`."""
    at_step: Count | None = Field(default=None, ge=0)
    """Inject after this step; none means immediately."""
    for_s: Seconds | None = None
    """Seconds after which the fault is undone; none means never."""
    amount: Number | None = None
    """Magnitude, for a fault that requires one."""


class FaultFile(Model):
    """A fault file."""

    faults: tuple[FaultEntry, ...] = Field(min_length=1)


def read_fault_file(path: Path) -> tuple[FaultRequested, ...]:
    """The faults of a file; raises HoldfastError with all its problems."""
    source = parse(read_text(path), printable(str(path)))
    book = validate_model(source, FaultFile, reserved={})
    requests: list[FaultRequested] = []
    for number, entry in enumerate(book.faults if book else ()):
        try:
            requests.append(_request(entry))
        except HoldfastError as error:
            where = ("faults", number, "fault")
            source.findings.extend(
                finding_at(source.location(where), where, code=each.code, what=each.what, remedy=each.remedy)
                for each in error.findings
            )
    if book is None or source.findings:
        raise HoldfastError(source.all_findings(), ExitCode.USAGE)
    return tuple(requests)


def _request(entry: FaultEntry) -> FaultRequested:
    action, *target = entry.fault.split()
    on, index = parse_fault_target(target)
    what = parse_fault_action(action)
    return FaultRequested(
        at=0.0, action=what, target=on, index=index, at_step=entry.at_step, for_s=entry.for_s, amount=entry.amount
    )


def parse_fault_action(word: str) -> FaultAction:
    """Parse `kill`; raises HoldfastError for an unknown action."""
    if word in list(FaultAction):
        return FaultAction(word)
    raise _unknown("bad-fault-action", f"`{word}` is not a fault action", word, FaultAction)


def parse_fault_target(words: Sequence[str]) -> tuple[FaultTarget, int]:
    """Parse `rank:1`, `rank 1` or `controller`; raises HoldfastError for anything else."""
    name, *numbers = ":".join(words).split(":")
    numbered = len(numbers) == 1 and numbers[0].isascii() and numbers[0].isdecimal()
    if name in list(FaultTarget) and (numbered if FaultTarget(name).is_numbered else not numbers):
        return FaultTarget(name), int(numbers[0]) if numbers else 0
    known = [f"{target}:1" if target.is_numbered else target.value for target in FaultTarget]
    raise _unknown("bad-fault-target", f"`{' '.join(words)}` is not a fault target", ":".join(words), known)


def _unknown(code: str, what: str, given: str, known: Iterable[str]) -> HoldfastError:
    names = [str(name) for name in known]
    near = difflib.get_close_matches(given, names, 1)
    remedy = f"Name {', '.join(names[:-1])} or {names[-1]}."
    return failure(
        code, what, exit_code=ExitCode.USAGE, remedy=f"Did you mean `{near[0]}`? {remedy}" if near else remedy
    )
