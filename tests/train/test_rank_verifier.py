"""A flipped bit in one of the ranks that DDP keeps equal is found in time, on the right rank; else nothing is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.silent_corruption import COMPUTED, EVERY, STATE, Case, run

pytestmark = pytest.mark.slow

CLEAN = Case(every=2, steps=30)
FLIPS = [
    *(Case(target=target, rank=rank, seed=rank, after=6 + rank) for target in (*STATE, *COMPUTED) for rank in range(3)),
    *(Case(target=target, rank=1, seed=3, after=6, once=True, every=1) for target in COMPUTED),
]


def test_flip_on_each_rank_is_found_in_time_and_nothing_is_found_without_one(tmp_path: Path) -> None:
    kept = Case(target=STATE[0], rank=2, after=11, folder=str(tmp_path))
    clean, *found, with_checkpoints = run([CLEAN, *FLIPS, kept])
    assert [(each.step, each.code, each.findings) for each in clean] == [(CLEAN.steps, "", ())] * 3
    for case, outcomes in zip(FLIPS, found, strict=True):
        for each in outcomes:
            assert (each.code, each.where) == ("silent-corruption", f"rank {case.rank}"), case
            assert each.step - case.after <= case.every, case
    # State is compared before it is saved: that of step 12 never is, and a copy that the flip tears is not committed.
    assert [each.step for each in with_checkpoints] == [12] * 3
    assert {each.name for each in tmp_path.glob("step-*")} <= {f"step-{step:08d}" for step in range(8, 12)}


def test_gradient_that_is_always_wrong_sets_aside_all_checkpoints_since_passes_were_repeated(tmp_path: Path) -> None:
    (outcomes,) = run([Case(target=COMPUTED[0], rank=1, after=6, folder=str(tmp_path))])
    assert {(each.code, each.where, each.step) for each in outcomes} == {("silent-corruption", "rank 1", 2 * EVERY)}
    assert max(each.name for each in tmp_path.glob("step-*") if each.suffix == "") == f"step-{EVERY:08d}"


def test_two_ranks_that_differ_end_without_a_culprit_unless_one_contradicts_itself() -> None:
    state, always, once = run(
        [
            Case(target=STATE[0], rank=1),
            Case(target=COMPUTED[0], rank=1),
            Case(target=COMPUTED[0], rank=1, once=True, every=1),
        ],
        ranks=2,
    )
    assert {each.code for outcomes in (state, always) for each in outcomes} == {"ranks-diverged"}
    assert {(each.code, each.where) for each in once} == {("silent-corruption", "rank 1")}
