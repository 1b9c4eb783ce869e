"""A bit that changes in one replica is found at the next comparison, and nothing is found where none does."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.diverging_job import CASES, CASES_OF, STEPS, run

pytestmark = pytest.mark.slow

FOUND = "[replicas-diverged]"
STEPS_COMPARED = 5
"""After steps 1, 4, 8, 12 and 14, the last."""
RESTORED = [
    "weight",
    "weight of the first replica",
    "frozen weight",
    "optimizer state",
    "gradient",
    "after the last comparison but one",
    "shard",
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains all cases of a group, once; the folder with their ends."""

    @cache
    def train(group: str) -> Path:
        out = tmp_path_factory.mktemp("diverging")
        run(out, group)
        failed = [each.read_text() for each in out.glob("*.failed")]
        assert not failed, failed[0]
        return out

    return train


@pytest.fixture
def ended(request: pytest.FixtureRequest, ends: Callable[[str], Path]) -> Path:
    """The folder with the end of every case of the group that the parameter names."""
    return ends(request.param)


def on_each_group(*names: str) -> pytest.MarkDecorator:
    """Of these cases, those of each group."""
    given = [(group, name) for group, cases in CASES_OF.items() for name in names if name in cases]
    return pytest.mark.parametrize(("ended", "name"), given, indirect=["ended"])


on_gloo = pytest.mark.parametrize("ended", ["gloo"], indirect=True)


def told(ended: Path, name: str) -> list[dict[str, Any]]:
    """What each rank did."""
    return [json.loads(each.read_text()) for each in sorted(ended.glob(f"{name}.?.?.json"))]


def findings(ended: Path, name: str) -> dict[str, str]:
    """The line of each replica that reported that it differs."""
    logs = {each.name.split(".")[-3]: each.read_text().splitlines() for each in ended.glob(f"{name}.?.?.err")}
    return {replica: line for replica, lines in logs.items() for line in lines if FOUND in line}


def assert_equal(ended: Path, *names: str, of_rank: int = 0) -> None:
    """All replicas of these cases ended with the same state on this rank."""
    ends = [torch.load(each) for name in names for each in sorted(ended.glob(f"{name}.?.{of_rank}.end"))]
    assert len(ends) >= 2
    for end in ends:
        assert all(torch.equal(*pair) for pair in zip(end, ends[0], strict=True))


@on_each_group("clean", "clean pair", "clean shards", "clean ddp")
def test_equal_replicas_are_compared_and_nothing_is_found(ended: Path, name: str) -> None:
    for each in told(ended, name):
        assert each == {"steps": [*range(1, STEPS + 1)], "digests": STEPS_COMPARED, "code": ""}
    assert not findings(ended, name)
    assert_equal(ended, name)


@on_each_group(*RESTORED)
def test_replica_that_differs_is_named_and_receives_the_state_of_the_majority(ended: Path, name: str) -> None:
    case = CASES[name]
    for each in told(ended, name):
        assert each == {"steps": [*range(1, STEPS + 1)], "digests": STEPS_COMPARED + 1, "code": ""}
    (found,) = findings(ended, name).items()
    assert found[0] == str(case.outlier)
    assert f"where: rank {case.ranks - 1} of replica {case.outlier};" in found[1]
    assert f"after step {STEPS if case.at == STEPS - 1 else 8} replica {case.outlier} held" in found[1]
    for rank in range(case.ranks):
        assert_equal(ended, name, of_rank=rank)


@on_each_group("no majority", "shards of two replicas")
def test_replicas_without_a_majority_end(ended: Path, name: str) -> None:
    for each in told(ended, name):
        assert each == {"steps": [*range(1, 9)], "digests": 3, "code": "replicas-diverged"}


@on_gloo
def test_ranks_that_differ_alike_in_all_replicas_end(ended: Path) -> None:
    for each in told(ended, "the same rank of all replicas"):
        assert each == {"steps": [*range(1, 9)], "digests": 3, "code": "ranks-diverged"}


@on_gloo
def test_run_without_a_majority_resumes_from_the_last_agreement_as_if_nothing_had_happened(ended: Path) -> None:
    assert [each["steps"] for each in told(ended, "no majority, resumed")] == [[*range(5, STEPS + 1)]] * 2
    assert (ended / "pair" / "step-00000008.diverged").exists()
    assert_equal(ended, "clean pair", "no majority, resumed")


@on_gloo
def test_checkpoints_that_an_outlier_saved_are_set_aside(ended: Path) -> None:
    kept = {each.name for each in (ended / "first").glob("step-*")}
    assert "step-00000008.diverged" in kept
    assert {each for each in kept if "diverged" not in each} == {"step-00000012", "step-00000014"}


@on_each_group("local_sgd", "diloco")
def test_replicas_that_step_alone_are_compared_when_they_synchronise(ended: Path, name: str) -> None:
    for each in told(ended, name):
        assert (each["digests"], each["code"]) == (4, "")
    assert not findings(ended, name)


@on_each_group("local_sgd, restored", "diloco, restored")
def test_replica_that_differs_after_a_synchronisation_receives_the_state_of_the_majority(
    ended: Path, name: str
) -> None:
    for each in told(ended, name):
        assert each == {"steps": [*range(1, STEPS + 1)], "digests": 5, "code": ""}
    (found,) = findings(ended, name).items()
    assert found[0] == str(CASES[name].outlier)
    assert f"after step 6 replica {CASES[name].outlier} held" in found[1]
