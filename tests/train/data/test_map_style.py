from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.train.data.fake_training import FakeTraining, as_they_are

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train import Data
from holdfast.train.data.prefetcher import Prefetcher
from holdfast.train.data.sharding import ShardPlan

attempts = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(length=st.integers(12, 60), seed=st.integers(0, 9), attempts=attempts)
def test_every_sample_is_in_one_committed_step_whatever_the_world_size(length: int, seed: int, attempts):
    training = FakeTraining(ranks_of_batch=4)
    for world_size, steps, lost in attempts:
        data = Data(range(length), batch_size=3, micro_batch_size=2, seed=seed, collate=as_they_are)
        training.run(data, world_size=world_size, steps=steps, lost=lost)
    unbroken = FakeTraining(ranks_of_batch=4)
    unbroken.run(data, world_size=1, steps=training.samples // 12 + 1, lost=1)
    assert training.taken == unbroken.taken
    whole, rest = divmod(training.samples, length)
    for epoch in range(whole):
        assert sorted(training.taken[epoch * length : (epoch + 1) * length]) == list(range(length))
    assert len(set(training.taken[whole * length :])) == rest


class Noisy:
    """Draws from every generator for each item."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> tuple[float, ...]:
        return (item, random.random(), np.random.rand(), torch.rand(1).item())


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_draw_the_same_at_random_for_a_sample_however_many_they_and_the_ranks_are(workers: int):
    def taken(world_size: int, workers: int) -> list[tuple[float, ...]]:
        training = FakeTraining(ranks_of_batch=2)
        data = Data(Noisy(), batch_size=4, num_workers=workers, collate=as_they_are)
        training.run(data, world_size=world_size, steps=3)
        return training.taken

    state = torch.get_rng_state(), random.getstate()
    first = taken(1, workers)
    assert len({row[1:] for row in first}) == 24
    assert taken(2, 1) == first
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()


class Rows:
    """Fetches a batch at a time, as `datasets` does."""

    def __len__(self) -> int:
        return 9

    def __getitems__(self, items: list[int]) -> list[dict[str, int]]:
        return [{"x": item} for item in items]

    def __getitem__(self, item: int) -> dict[str, int]:
        raise AssertionError("one at a time")


def test_samples_are_collated_as_torch_does_it():
    training = FakeTraining(ranks_of_batch=1)
    training.run(Data(Rows(), batch_size=3, shuffle=False), world_size=1, steps=1)
    assert training.taken == ["x"]


def refusal(data: Data, training: FakeTraining | None = None, world_size: int = 1):
    with pytest.raises(HoldfastError) as refused:
        (training or FakeTraining(ranks_of_batch=2)).run(data, world_size=world_size, steps=1)
    (finding,) = refused.value.findings
    assert finding.remedy
    return finding


def test_dataset_smaller_than_a_batch_is_refused():
    finding = refusal(Data(range(7), batch_size=4))
    assert (finding.code, "takes 8 samples" in finding.what, "has 7" in finding.what) == (
        "data-smaller-than-batch", True, True
    )  # fmt: skip


@pytest.mark.parametrize(("dataset", "code"), [([], "data-empty"), (7, "data-not-a-dataset")])
def test_what_is_no_dataset_is_refused_when_it_is_named(dataset: object, code: str):
    with pytest.raises(HoldfastError) as refused:
        Data(dataset, batch_size=1)
    assert refused.value.findings[0].code == code


class Faulty:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, item: int) -> int:
        if item == 5:
            raise failure("line-broken", "a line is broken", exit_code=ExitCode.USAGE, where="x:5", remedy="mend it")
        return item


@pytest.mark.parametrize("workers", [0, 1])
def test_error_in_a_worker_arrives_as_it_was_said(workers: int):
    assert refusal(Data(Faulty(), batch_size=4, num_workers=workers), FakeTraining(ranks_of_batch=2)).where == "x:5"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"seed": 1}, "order: was 1, seed 0, is 1, seed 1"),
        ({"shuffle": False}, "order: was 1, seed 0, is as it is"),
        ({"dataset": range(25)}, "samples in an epoch: was 24, is 25"),
        ({"dataset": list(range(24))}, "dataset: was range, is list"),
    ],
)
def test_data_that_changed_is_refused_with_what_changed_or_begins_where_it_is_told_to(changed, what: str):
    given = {"dataset": range(24), "batch_size": 2, "collate": as_they_are}
    training = FakeTraining(ranks_of_batch=2)
    training.run(Data(**given), world_size=2, steps=2)
    finding = refusal(Data(**given | changed), training)
    assert (finding.code, finding.evidence) == ("data-changed", (what,))
    assert "start_sample=8" in finding.remedy
    training.run(Data(**given | changed, start_sample=8), world_size=2, steps=6)
    assert "data-restarted" in training.codes()
    assert len(set(training.taken[8:])) == 24
    training.findings.clear()
    training.run(Data(**given | changed, start_sample=8), world_size=2, steps=1)
    assert training.findings == []
    assert refusal(Data(**given), training).code == "data-changed"


def test_data_that_begins_later_than_training_is_refused():
    assert refusal(Data(range(24), batch_size=2, start_sample=4)).code == "data-starts-at-offset"


def test_changed_batch_is_told_and_takes_every_sample_once():
    training = FakeTraining(ranks_of_batch=2)
    for batch in (2, 3, 3):
        training.run(Data(range(24), batch_size=batch, collate=as_they_are), world_size=2, steps=2)
    assert training.samples == len(training.taken) == 32
    assert sorted(training.taken[:24]) == list(range(24))
    (finding,) = set(training.findings)
    assert (finding.code, "took 4 samples, and takes 6 from sample 8" in finding.what) == ("global-batch-changed", True)


def test_loop_that_leaves_a_step_early_gets_the_next_step_whole():
    supply, plan = Prefetcher(lambda _: None), ShardPlan(global_batch=4, micro_batch_size=2, rank=0, world_size=1)
    data = Data(range(12), batch_size=4, micro_batch_size=2, shuffle=False, collate=as_they_are)
    parts = [*plan.step(0)[:1], *plan.step(4), *plan.step(0)]
    firsts = [0, 4, 4, 0, 0]
    taken = [supply.load(part, data, plan, first).data for part, first in zip(parts, firsts, strict=True)]
    assert taken == [[0, 1], [4, 5], [6, 7], [0, 1], [2, 3]]


class Deadly:
    """Ends the process that makes an item, as a shortage of memory does, for as long as a file is there."""

    fingerprint = "forty numbers"

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        return 40

    def __getitem__(self, item: int) -> int:
        if item == 8 and self._file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return item


@pytest.mark.parametrize("workers", [1, 2])
def test_lost_worker_is_named_and_training_continues_with_each_sample_once(tmp_path: Path, workers: int):
    file = tmp_path / "deadly"

    def data() -> Data:
        return Data(Deadly(file), batch_size=4, num_workers=workers, shuffle=False, collate=as_they_are)

    training = FakeTraining(ranks_of_batch=1)
    training.run(data(), world_size=1, steps=2)
    file.touch()
    with pytest.raises(HoldfastError) as lost:
        training.run(data(), world_size=1, steps=8)
    (finding,) = lost.value.findings
    assert (finding.code, lost.value.exit_code) == ("data-worker-lost", ExitCode.UNAVAILABLE)
    assert finding.evidence[0].startswith("DataLoader worker")
    file.unlink()
    training.run(data(), world_size=1, steps=8)
    assert training.taken == list(range(40))
