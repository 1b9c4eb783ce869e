"""The ledger of soaks: what was run, at which commit, and what came of it.

.venv/bin/python -m bench.soak.ledger

prints the totals. `bench.soak --ledger` adds a line to bench/soak/ledger.jsonl, whether the soak went well or not.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from bench.paired_stats import say, table
from bench.result_file import today

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path(__file__).with_name("ledger.jsonl")


class SoakOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a soak's faults."""

    faults: Mapping[str, int]
    """By kind."""
    recoveries: int
    failed: int
    """Failed recoveries."""
    wrong: int
    """Steps or samples that were lost or done twice, states that differ, and leftovers."""
    steps: int
    """Committed steps."""
    minutes: float

    @property
    def exit_code(self) -> int:
        """Nonzero unless all went well."""
        return 1 if self.failed or self.wrong else 0


class Row(SoakOutcome, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the ledger."""

    date: str
    commit: str
    """Short hash; with `+` if files differed from it."""
    target: str
    seed: int
    options: str = ""
    """Further options of the soak."""
    note: str = ""
    """Why it failed, if that is known; added by hand."""


def add(outcome: SoakOutcome, *, target: str, seed: int, options: str, path: Path = LEDGER) -> None:
    """Append an outcome."""
    given = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
    row = Row(**given, date=today(), commit=_commit(), target=target, seed=seed, options=options)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")


def read(path: Path = LEDGER) -> list[Row]:
    """All rows, oldest first."""
    return [msgspec.json.decode(line, type=Row) for line in path.read_bytes().splitlines()] if path.exists() else []


def totals(rows: Sequence[Row]) -> str:
    """Faults and what came of them, by target and in all."""
    groups = {target: [row for row in rows if row.target == target] for target in sorted({row.target for row in rows})}
    lines = [_total(target, group) for target, group in groups.items()]
    kinds = Counter[str]()
    for row in rows:
        kinds.update(row.faults)
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
    head = ("target", "soaks", "faults", "recoveries", "failed", "lost, doubled, differing or left", "steps")
    return f"{table(head, [*lines, _total('all', rows)])}\n\n{shown}"


def _total(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    sums = (sum(row.recoveries for row in rows), sum(row.failed for row in rows), sum(row.wrong for row in rows))
    faults = sum(sum(row.faults.values()) for row in rows)
    return (name, str(len(rows)), *(f"{each:,}" for each in (faults, *sums, sum(row.steps for row in rows))))


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    ours = ("src", "bench", "lab", f":!{LEDGER.relative_to(ROOT)}")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *ours)
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    say(totals(read()))
