"""Owns how drills are written down: in words on a command line, or many of them in a file.

What each of them does, and whether a run can have it, is told in drills.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import DrillAction, DrillRequested, DrillTarget
from holdfast.job.complaints import finding_at
from holdfast.job.document import read_text, validate
from holdfast.job.source import parse, shown
from holdfast.job.spec import Count, Filled, Model, Number, Seconds

SUFFIXES = (".yaml", ".yml")
"""By which a file is told from an action."""


class Entry(Model):
    """One drill of a file."""

    do: Filled
    """Action and target, such as `kill rank:3`."""
    at_step: Count | None = Field(default=None, ge=0)
    """As soon as this step is done; none means at once."""
    for_s: Seconds | None = None
    """Seconds after which it ends by itself; none means that it is for good."""
    by: Number | None = None
    """How much, for a drill that must be told."""


class Book(Model):
    """A file of drills."""

    drills: tuple[Entry, ...] = Field(min_length=1)


def read_drills(path: Path) -> tuple[DrillRequested, ...]:
    """The drills of a file; raises HoldfastError with everything that is wrong in it."""
    source = parse(read_text(path), shown(str(path)))
    book = validate(source, Book, reserved={})
    asked: list[DrillRequested] = []
    for number, entry in enumerate(book.drills if book else ()):
        try:
            asked.append(_asked(entry))
        except HoldfastError as error:
            where = ("drills", number, "do")
            source.findings.extend(
                finding_at(source.place(where), where, code=each.code, what=each.what, remedy=each.remedy)
                for each in error.findings
            )
    if book is None or source.findings:
        raise HoldfastError(source.said(), ExitCode.USAGE)
    return tuple(asked)


def _asked(entry: Entry) -> DrillRequested:
    action, *target = entry.do.split()
    on, index = target_of(target)
    what = action_of(action)
    return DrillRequested(
        at=0.0, action=what, target=on, index=index, at_step=entry.at_step, for_s=entry.for_s, amount=entry.by
    )


def action_of(word: str) -> DrillAction:
    """Read `kill`; raises HoldfastError for what no drill does."""
    if word in list(DrillAction):
        return DrillAction(word)
    raise _unknown("bad-action", f"`{word}` is nothing that a drill does", word, DrillAction)


def target_of(words: Sequence[str]) -> tuple[DrillTarget, int]:
    """Read `rank:1`, `rank 1` or `controller`; raises HoldfastError for anything else."""
    name, *numbers = ":".join(words).split(":")
    numbered = len(numbers) == 1 and numbers[0].isascii() and numbers[0].isdecimal()
    if name in list(DrillTarget) and (numbered if DrillTarget(name).numbered else not numbers):
        return DrillTarget(name), int(numbers[0]) if numbers else 0
    known = [f"{target}:1" if target.numbered else target.value for target in DrillTarget]
    raise _unknown("bad-target", f"`{' '.join(words)}` is nothing that can be broken", ":".join(words), known)


def _unknown(code: str, what: str, given: str, known: Iterable[str]) -> HoldfastError:
    names = [str(name) for name in known]
    near = difflib.get_close_matches(given, names, 1)
    remedy = f"Name {', '.join(names[:-1])} or {names[-1]}."
    return failure(
        code, what, exit_code=ExitCode.USAGE, remedy=f"Did you mean `{near[0]}`? {remedy}" if near else remedy
    )
