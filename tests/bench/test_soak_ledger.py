"""The ledger of soaks keeps what came of each, and adds it up."""

from __future__ import annotations

from pathlib import Path

from bench.soak.ledger import LEDGER, SoakOutcome, add, read, totals


def outcome() -> SoakOutcome:
    return SoakOutcome(faults={"kill rank": 3, "kill node": 2}, recoveries=4, failed=0, wrong=0, steps=100, minutes=1.0)


def test_outcomes_are_kept_with_their_commit_and_added_up(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    add(outcome(), target="local", seed=1, options="--brisk", path=path)
    add(
        SoakOutcome(faults={"kill rank": 1}, recoveries=0, failed=1, wrong=2, steps=7, minutes=1.0),
        target="hosts",
        seed=2,
        options="",
        path=path,
    )
    first, second = read(path)
    assert (first.target, first.seed, first.options, first.exit_code) == ("local", 1, "--brisk", 0)
    assert first.commit
    assert second.exit_code == 1
    assert "| all | 2 | 6 | 4 | 1 | 2 | 107 |" in totals([first, second])
    assert "4 kill rank, 2 kill node" in totals([first, second])


def test_ledger_of_the_repository_is_readable() -> None:
    assert all(row.faults and row.commit for row in read(LEDGER))
