from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.train.data.fake_training import FakeTraining, as_they_are

from holdfast.errors import HoldfastError
from holdfast.train import Data
from holdfast.train.data import iterable as streams
from holdfast.train.data.sharding import ShardPlan

LENGTH = 30

attempts = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def marks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RESUME_POINT_EVERY_S", 0.0)
    monkeypatch.setattr(streams, "BLOCK", 4)


class Plain:
    """A stream that can only be read from its beginning, in another order each epoch."""

    reads = 0

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        for number in range(self.length):
            type(self).reads += 1
            yield self.epoch, (number * 7 + self.epoch) % self.length, random.random()


class Placed(Plain):
    """One that knows where it stands."""

    honest = True
    reads = 0

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__(length)
        self.place = self.begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"] + (not self.honest and state["place"] > 0)

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        begin, self.begin = self.begin, 0
        for number in range(begin, self.length):
            type(self).reads += 1
            self.place = number + 1
            yield self.epoch, (number * 7 + self.epoch) % self.length, random.random()


class Deceived(Placed):
    """One that believes to stand elsewhere, as a shuffle buffer that is not saved does."""

    honest = False
    reads = 0


class Once:
    """Gives what it has in the first epoch only."""

    def __init__(self) -> None:
        self.left = list(range(9))

    def __iter__(self) -> Iterator[int]:
        left, self.left = self.left, []
        return iter(left)


def whole(epoch: int) -> list[tuple[int, int]]:
    return [(epoch, number) for number in range(LENGTH)]


@pytest.mark.parametrize("kind", [Plain, Placed, Deceived])
@settings(deadline=None, max_examples=40)
@given(attempts=attempts)
def test_every_sample_is_in_one_committed_step_whatever_the_world_size(kind: type[Plain], attempts):
    training = FakeTraining(ranks_of_batch=2)
    for world_size, steps, lost in attempts:
        training.run(Data(kind(), batch_size=3, collate=as_they_are), world_size=world_size, steps=steps, lost=lost)
    unbroken = FakeTraining(ranks_of_batch=2)
    unbroken.run(Data(kind(), batch_size=3, collate=as_they_are), world_size=1, steps=training.samples // 6 + 1, lost=1)
    assert training.taken == unbroken.taken
    for epoch in range(len(training.taken) // LENGTH):
        taken = training.taken[epoch * LENGTH : (epoch + 1) * LENGTH]
        assert sorted(sample[:2] for sample in taken) == whole(epoch)


def test_stream_with_a_state_continues_from_it_and_one_without_is_read_from_its_epoch_on_and_that_is_told():
    for kind, reads, codes in ((Placed, 10, set()), (Plain, 40, {"data-replayed"})):
        training = FakeTraining(ranks_of_batch=1)
        training.run(Data(kind(100), batch_size=10), world_size=1, steps=3)
        kind.reads = 0
        training.run(Data(kind(100), batch_size=10), world_size=1, steps=1)
        assert 0 <= kind.reads - reads <= 14
        assert training.codes() == codes
    (finding,) = training.findings
    assert (finding.what.split()[0], finding.evidence[0][-2:]) == ("30", " s")


def test_state_that_leads_elsewhere_is_not_believed_and_that_is_told():
    training = FakeTraining(ranks_of_batch=1)
    for _ in range(2):
        training.run(Data(Deceived(), batch_size=5, collate=as_they_are), world_size=1, steps=2)
    assert [sample[:2] for sample in training.taken] == [(0, number * 7 % LENGTH) for number in range(20)]
    assert [finding.code for finding in training.findings] == ["data-state-not-bit-exact", "data-replayed"]


class Packed:
    """As TorchTitan's text: it goes on where it was, and keeps the lists that it loads."""

    def __init__(self) -> None:
        self.read, self.ahead = 0, list[int]()

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "ahead": self.ahead}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read, self.ahead = state["read"], state["ahead"]

    def __iter__(self) -> Iterator[int]:
        while True:
            self.ahead += [self.read * 3 + each for each in range(3)]
            self.read += 1
            while len(self.ahead) > 1:
                yield self.ahead.pop(0)


@pytest.mark.parametrize("state", [True, False])
def test_stream_is_at_the_same_sample_for_each_reader_of_a_process(state: bool):
    """As in a replica that goes back with others, also before it has a place to go back to."""
    data = Data(Packed(), batch_size=5, collate=as_they_are)
    plan = ShardPlan(global_batch=5, micro_batch_size=5, rank=0, world_size=1)
    place = None
    for first in (0, 0, 50, 50, 50):
        reading = data.read(plan, first, place)
        batches = [next(reading) for _ in range(12)]
        assert [each.data for each in batches] == [[*range(at, at + 5)] for at in range(first, first + 60, 5)]
        assert state is False or [finding.code for each in batches for finding in each.findings] == []
        place = place or next(each.resume_point for each in batches if each.resume_point)
        place = place if state else place._replace(state=None)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_stream_is_read_ahead_by_one_process_and_continues_the_same(workers: int):
    taken: list[Any] = []
    for given_workers, cut in ((0, [6]), (workers, [2, 3, 1])):
        training = FakeTraining(ranks_of_batch=2)
        for steps in cut:
            data = Data(Placed(), batch_size=4, num_workers=given_workers, collate=as_they_are)
            training.run(data, world_size=2, steps=steps)
        taken.append(training.taken)
    assert taken[0] == taken[1]


def test_what_streams_draw_at_random_leaves_the_loop_its_own():
    state = random.getstate()
    FakeTraining(ranks_of_batch=1).run(Data(Plain(), batch_size=4), world_size=1, steps=2)
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("stream", "code"),
    [(Plain(7), "data-smaller-than-batch"), (Plain(0), "data-empty"), (Once(), "data-empty")],
)
def test_stream_smaller_than_a_batch_is_refused(stream: Any, code: str):
    with pytest.raises(HoldfastError) as refused:
        FakeTraining(ranks_of_batch=2).run(Data(copy(stream), batch_size=4), world_size=1, steps=4)
    assert refused.value.findings[0].code == code


@pytest.mark.parametrize("kind", [Plain, Placed])
def test_stream_of_other_content_is_refused(kind: type[Plain]):
    training = FakeTraining(ranks_of_batch=1)
    training.run(Data(kind(), batch_size=5), world_size=1, steps=2)
    with pytest.raises(HoldfastError) as refused:
        training.run(Data(kind(LENGTH + 1), batch_size=5), world_size=1, steps=1)
    (finding,) = refused.value.findings
    assert (finding.code, "sample 4 of the stream" in finding.what) == ("data-changed", True)
    assert finding.remedy


@pytest.mark.slow
@pytest.mark.parametrize("buffer_size", [0, 8])
def test_stream_of_datasets_continues_exactly_also_from_a_shuffle_buffer(tmp_path: Path, buffer_size: int):
    from datasets import load_dataset

    for part in range(2):
        lines = [f'{{"x": {part * 25 + number}}}\n' for number in range(25)]
        (tmp_path / f"part{part}.jsonl").write_text("".join(lines))

    def data(workers: int) -> Data:
        files = [str(tmp_path / f"part{part}.jsonl") for part in range(2)]
        stream = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "c"))
        if buffer_size:
            stream = stream.shuffle(seed=3, buffer_size=buffer_size)
        return Data(stream, batch_size=5, num_workers=workers, collate=as_they_are)

    training = FakeTraining(ranks_of_batch=2)
    for world_size, steps, workers in ((2, 2, 0), (1, 2, 1), (3, 3, 0), (2, 4, 0)):
        training.run(data(workers), world_size=world_size, steps=steps)
    unbroken = FakeTraining(ranks_of_batch=2)
    unbroken.run(data(0), world_size=1, steps=11)
    assert training.taken == unbroken.taken
    for first in (0, 50):
        assert sorted(row["x"] for row in training.taken[first : first + 50]) == list(range(50))
    assert ("data-state-not-bit-exact" in training.codes()) == bool(buffer_size)
