"""Stores the quarantine of a target without an object store: a private file per target, next to the folder of runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import UnexpectedFile, atomic_write, open_lock, read_small
from holdfast.job.quarantine import Candidate, Decision, Quarantine, decode, judge
from holdfast.job.quarantine_text import decision_finding
from holdfast.run_dir import runs_root

LOCK_TIMEOUT_S, LOCK_POLL_S = 10.0, 0.01
"""Longest wait for another process that changes the file, which takes it a millisecond, and the time between tries."""

MAX_FILE_BYTES = 16 << 20


def quarantine_path(target: str) -> Path:
    """The file of a target; targets of the same name in different projects share it."""
    return runs_root().parent / "quarantine" / f"{target}.json"


class QuarantineFile:
    """One target's file."""

    def __init__(self, target: str) -> None:
        self._path, self.target = quarantine_path(target), target

    def read(self) -> tuple[Quarantine, tuple[Finding, ...]]:
        """What it holds, without changing anything; a damaged one counts as empty, with a finding."""
        try:
            return self._read(), ()
        except (OSError, ValueError) as error:
            return Quarantine(), (self._damaged(error, "it counts as empty until the next change, which keeps a copy"),)

    def change(self, change: Callable[[Quarantine], Quarantine]) -> tuple[Finding, ...]:
        """Replace it with what `change` returns, while no other process does; a damaged file is kept by another name.

        Raises OSError if it cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        findings = tuple[Finding, ...]()
        with _locked(self._path.with_suffix(".lock")):
            try:
                known = self._read()
            except (OSError, ValueError) as error:
                kept = self._keep_copy()
                known, findings = Quarantine(), (self._damaged(error, f"it begins anew; the old content is in {kept}"),)
            changed = change(known)
            if changed != known or findings:
                atomic_write(self._path, msgspec.json.format(msgspec.json.encode(changed), indent=1))
        return findings

    def _read(self) -> Quarantine:
        try:
            return decode(read_small(self._path, limit_bytes=MAX_FILE_BYTES))
        except FileNotFoundError:
            return Quarantine()

    def _keep_copy(self) -> str:
        """Move a damaged file, or whatever is there, to a name that is free."""
        number = 1
        while (kept := self._path.with_name(f"{self._path.name}.damaged-{number}")).exists():
            number += 1
        self._path.rename(kept)
        return str(kept)

    def _damaged(self, error: Exception, consequence: str) -> Finding:
        return Finding(
            code="quarantine-unreadable",
            severity=Severity.WARNING,
            what=f"the quarantined machines of {self.target} cannot be read: {consequence}",
            where=str(self._path),
            evidence=(" ".join(str(error).split())[:300],),
            remedy="Correct the old content and put it back, or let the quarantine begin anew.",
            owner=Owner.CLUSTER,
        )


def remember(file: QuarantineFile, candidate: Candidate, *, machines: int, target: str) -> tuple[Finding, ...]:
    """Decide on evidence against a machine of a target, and store the result; returns what the user must know."""
    decisions = list[Decision]()

    def decide(known: Quarantine) -> Quarantine:
        decisions.append(judge(known, candidate, machines=machines, now=time.time()))
        return decisions[-1].quarantine

    findings = file.change(decide)
    told = decision_finding(decisions[-1], candidate, target)
    return (*findings, told) if told else findings


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Hold the lock; raises OSError if another process holds it for LOCK_TIMEOUT_S."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with open_lock(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    held = f"another process has held it for {LOCK_TIMEOUT_S:g} s"
                    raise UnexpectedFile(errno.EAGAIN, held, str(path)) from None
            time.sleep(LOCK_POLL_S)
        yield
