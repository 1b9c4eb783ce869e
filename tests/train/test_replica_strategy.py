"""Replicas killed without warning cost the others no step, and return to bit-exact weights.

Each test runs on Gloo, and on a group that fails like NCCL: there only the agent's notice ends a survivor's wait, and
with the first result read early the replicas would end apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.train.replica_job import GLOBAL, Job, run

from holdfast.train.checkpoint import manifest_file

pytestmark = pytest.mark.slow

STEPS = 12

NewJob = Callable[..., Job]


@pytest.fixture(params=[False, True], ids=["gloo", "nccl-like"])
def new_job(request: pytest.FixtureRequest, tmp_path: Path) -> NewJob:
    """Configures a job, except for its folder and the group that its replicas communicate by."""
    return partial(Job, out=tmp_path, nccl_like=request.param)


def steps_of(out: Path, replica: int, life: int) -> list[tuple[int, bool]]:
    """As its first rank did them, and whether they counted."""
    lines = (out / f"{replica}.{life}.0.jsonl").read_text().splitlines()
    return [(line["step"], line["counts"]) for line in map(json.loads, lines)]


def asked(out: Path, replica: int) -> list[int]:
    """How often its first life had asked the quorum service by the end of each step."""
    return [json.loads(line)["asked"] for line in (out / f"{replica}.0.0.jsonl").read_text().splitlines()]


def assert_exact(job: Job, *, undone_from: int = STEPS + 1) -> None:
    """Every sample is in exactly one committed step, its own, and all replicas end alike.

    Steps of the first lives from `undone_from` on were lost with all who knew them.
    """
    taken: dict[int, list[int]] = {}
    for told in job.out.glob("*.jsonl"):
        for line in map(json.loads, told.read_text().splitlines()):
            undone = told.name.split(".")[1] == "0" and line["step"] >= undone_from
            if line["counts"] and not undone:
                taken.setdefault(line["step"], []).extend(line["samples"])
    assert {step: sorted(samples) for step, samples in taken.items()} == {
        step: [*range(GLOBAL * (step - 1), GLOBAL * step)] for step in range(1, job.steps + 1)
    }
    for rank in range(job.ranks):
        ends = [torch.load(job.out / f"{replica}.{rank}.end") for replica in range(job.count)]
        assert all(end[1:] == (ends[0][1], job.steps) for end in ends)
        for end in ends:
            assert all(torch.equal(one, other) for one, other in zip(end[0], ends[0][0], strict=True))


def test_replicas_that_nobody_kills_end_alike(tmp_path: Path, new_job: NewJob):
    job = new_job(steps=4, count=2)
    run(job)
    assert_exact(job)
    assert steps_of(tmp_path, 0, 0) == steps_of(tmp_path, 1, 0) == [(step, True) for step in range(1, 5)]
    # Before anybody has looked for checkpoints, and after; replicas on NCCL then ask before each step.
    assert asked(tmp_path, 0) == asked(tmp_path, 1) == ([2, 3, 4, 5] if job.nccl_like else [2] * 4)


@pytest.mark.parametrize(("count", "fault"), [(2, 4), (2, 1), (3, 4)])
def test_survivors_do_the_step_again_and_the_lost_replica_catches_up(
    tmp_path: Path, new_job: NewJob, count: int, fault: int
):
    job = new_job(steps=STEPS, count=count, faults=(f"1:{fault}:computing",))
    run(job)
    assert_exact(job)
    for survivor in {*range(count)} - {1}:
        before, after = asked(tmp_path, survivor)[: fault - 1], asked(tmp_path, survivor)[fault:]
        assert job.nccl_like or set(before) <= {2}
        assert min(after) > 2
        done = steps_of(tmp_path, survivor, 0)
        assert (fault, False) in done
        assert [step for step, counts in done if counts] == [*range(1, STEPS + 1)]
    assert steps_of(tmp_path, 1, 1)[0][0] > fault


def test_a_batch_that_scales_is_of_those_that_take_the_step_and_leaves_no_sample_out(tmp_path: Path, new_job: NewJob):
    job = new_job(steps=STEPS, count=2, faults=("1:4:computing",), scales=True)
    run(job)
    taken: dict[int, list[int]] = {}
    for told in tmp_path.glob("*.jsonl"):
        for line in map(json.loads, told.read_text().splitlines()):
            if line["counts"]:
                taken.setdefault(line["step"], []).extend(line["samples"])
    sizes = [len(taken[step]) for step in range(1, STEPS + 1)]
    assert sizes[:4] == [GLOBAL, GLOBAL, GLOBAL, GLOBAL // 2]
    assert set(sizes) == {GLOBAL, GLOBAL // 2}
    assert sizes[-1] == GLOBAL
    assert sorted(sample for samples in taken.values() for sample in samples) == [*range(sum(sizes))]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_whose_replica_dies_after_it_was_agreed_counts_with_its_samples(
    tmp_path: Path, new_job: NewJob, ranks: int
):
    job = new_job(steps=STEPS, count=2, ranks=ranks, faults=("1:4:agreed",))
    run(job)
    assert_exact(job)
    assert (4, True) in steps_of(tmp_path, 0, 0)


def test_replicas_that_are_all_killed_at_once_continue_from_their_checkpoint(tmp_path: Path, new_job: NewJob):
    job = new_job(steps=STEPS, count=2, faults=("0:6:computing", "1:6:computing"), checkpoints=True)
    run(job)
    step, counts = steps_of(tmp_path, 0, 1)[0]
    assert steps_of(tmp_path, 1, 1)[0] == (step, counts)
    assert step in {3, 5}
    assert_exact(job, undone_from=step)


@pytest.mark.parametrize("moment", ["saving", "sealing"])
def test_a_replica_that_dies_in_its_save_leaves_nothing_and_the_others_save_the_next(
    tmp_path: Path, new_job: NewJob, moment: str
) -> None:
    job = new_job(steps=STEPS, count=2, faults=(f"0:4:{moment}",), checkpoints=True)
    run(job)
    assert_exact(job)
    kept = tmp_path / "kept"
    assert [folder.name for folder in sorted(kept.glob("step-*"))] == [f"step-{step:08d}" for step in (8, 10, 12)]
    assert [*kept.glob("*writing*/*")] == []


def test_a_replica_that_is_back_saves_in_the_store_that_it_had_before(tmp_path: Path, new_job: NewJob) -> None:
    job = new_job(steps=STEPS, count=2, faults=("0:4:saving",), checkpoints=True, tiers=True)
    run(job)
    assert_exact(job)
    assert (tmp_path / "kept" / f"step-{STEPS:08d}.1" / manifest_file.NAME).exists()


def test_replicas_that_are_all_killed_in_a_save_continue_from_the_one_before(tmp_path: Path, new_job: NewJob) -> None:
    job = new_job(steps=STEPS, count=2, faults=("0:4:saving", "1:5:computing"), checkpoints=True)
    run(job)
    assert steps_of(tmp_path, 0, 1)[0] == steps_of(tmp_path, 1, 1)[0] == (3, True)
    assert_exact(job, undone_from=3)


@pytest.mark.parametrize(("ranks", "donor"), [(1, 0), (2, 1)])  # TorchFT has each rank take from another replica
def test_a_donor_that_dies_is_followed_by_another(tmp_path: Path, new_job: NewJob, ranks: int, donor: int):
    job = new_job(steps=STEPS, count=3, ranks=ranks, faults=("2:4:computing", f"{donor}:5:giving"))
    run(job)
    assert_exact(job)
    assert steps_of(tmp_path, donor, 1)
    assert len([step for step, counts in steps_of(tmp_path, 1 - donor, 0) if counts]) == STEPS


def test_replicas_of_several_ranks_that_share_the_model_out_do_likewise(tmp_path: Path, new_job: NewJob):
    job = new_job(steps=STEPS, count=2, ranks=2, faults=("1:4:computing",))
    run(job)
    assert_exact(job)
    assert (4, False) in steps_of(tmp_path, 0, 0)
    assert steps_of(tmp_path, 1, 1)[0][0] > 4


def test_a_replica_that_cannot_be_sent_the_state_fails_once_and_the_others_continue(tmp_path: Path) -> None:
    job = Job(out=tmp_path, steps=7, count=3, faults=("1:2:computing",), unsendable=True)
    run(job)
    error = (tmp_path / "1.1.0.err").read_text()
    assert "the replica that has the state cannot send it to this rank" in error
    assert error.count("got exception in recovery") == 1
    ends = [torch.load(tmp_path / f"{survivor}.0.end") for survivor in (0, 2)]
    assert all(torch.equal(one, other) for one, other in zip(ends[0][0], ends[1][0], strict=True))
    for survivor in (0, 2):
        assert "Traceback" not in (tmp_path / f"{survivor}.0.0.err").read_text()
        assert [step for step, counts in steps_of(tmp_path, survivor, 0) if counts] == [*range(1, 8)]
