from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from tests.train.data.fake_training import FakeTraining
from tests.train.data.test_iterable import Plain

from holdfast.errors import HoldfastError
from holdfast.train import Data, Packed
from holdfast.train.data import iterable as streams

attempts = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5)

DOCUMENTS = [[100 * number + place for place in range(number * 7 % 12)] for number in range(17)]
"""Of 0 to 11 tokens, each token another."""


@pytest.fixture(autouse=True)
def marks_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RESUME_POINT_EVERY_S", 0.0)
    monkeypatch.setattr(streams, "BLOCK", 4)


class Read(Plain):
    """Documents that can only be read from the beginning."""

    def __iter__(self) -> Any:
        return iter(DOCUMENTS)


def as_lists(windows: list[torch.Tensor]) -> list[list[int]]:
    return [window.tolist() for window in windows]


@pytest.mark.slow
@pytest.mark.parametrize("documents", [DOCUMENTS, Read()], ids=["numbered", "stream"])
@settings(deadline=None, max_examples=25)
@given(attempts=attempts, length=st.integers(1, 15), seed=st.integers(0, 9))
@example(attempts=[(1, 1, 0), (1, 1, 0), (1, 1, 0), (1, 2, 0), (1, 1, 0)], length=5, seed=0)  # inside the last document
def test_windows_are_those_of_an_unbroken_pass_whatever_the_restarts_and_the_world_size(
    documents: Any, attempts: list[tuple[int, int, int]], length: int, seed: int
):
    def data() -> Data:
        return Data(Packed(documents, length=length, seed=seed), batch_size=1, collate=as_lists)

    training = FakeTraining(ranks_of_batch=4)
    for world_size, steps, lost in attempts:
        training.run(data(), world_size=world_size, steps=steps, lost=lost)
    unbroken = FakeTraining(ranks_of_batch=4)
    unbroken.run(data(), world_size=1, steps=training.samples // 4 + 1, lost=1)
    assert training.taken == unbroken.taken
    assert training.codes() <= (set() if documents is DOCUMENTS else {"data-replayed"})
    assert all(len(window) == length for window in training.taken)
    epoch = sum(map(len, DOCUMENTS)) // length
    for first in range(0, len(training.taken) - epoch, epoch):
        tokens = [token for window in training.taken[first : first + epoch] for token in window]
        assert len(set(tokens)) == epoch * length


def test_text_is_packed_as_bytes_and_its_order_changes_with_the_epoch():
    packed = Packed([{"text": word} for word in ("ab", "cde", "f")], length=12)
    seen: set[bytes] = set()
    for epoch in range(20):
        packed.set_epoch(epoch)
        (window,) = packed
        seen.add(bytes(window.tolist()))
    assert {b"ab\n\ncde\n\nf\n\n", b"f\n\ncde\n\nab\n\n"} <= seen


def test_numbered_documents_are_gone_on_from_without_being_read_again():
    class Counted(list[list[int]]):
        reads = 0

        def __getitem__(self, item: Any) -> Any:
            type(self).reads += 1
            return super().__getitem__(item)

    training = FakeTraining(ranks_of_batch=1)
    training.run(Data(Packed(Counted([[0] * 10] * 1000), length=7), batch_size=10), world_size=1, steps=50)
    Counted.reads = 0
    training.run(Data(Packed(Counted([[0] * 10] * 1000), length=7), batch_size=10), world_size=1, steps=1)
    assert Counted.reads < 40
    assert training.codes() == set()


@pytest.mark.parametrize(
    ("changed", "code"),
    [({"seed": 1}, "data-changed"), ({"length": 5}, "data-changed"), ({"shuffle": False}, "data-changed")],
)
def test_packing_that_changed_is_refused(changed: dict[str, Any], code: str):
    given = {"length": 4, "seed": 0}
    training = FakeTraining(ranks_of_batch=1)
    training.run(Data(Packed(DOCUMENTS, **given), batch_size=2), world_size=1, steps=3)
    with pytest.raises(HoldfastError) as refused:
        training.run(Data(Packed(DOCUMENTS, **given | changed), batch_size=2), world_size=1, steps=1)
    assert refused.value.findings[0].code == code


def test_row_without_the_column_is_named():
    with pytest.raises(HoldfastError) as refused:
        list(Packed([{"body": "x"}], length=1))
    (finding,) = refused.value.findings
    assert (finding.code, finding.evidence) == ("data-unreadable", ("it has: body",))


@pytest.mark.slow
def test_stream_of_datasets_is_packed_exactly_over_restarts(tmp_path: Path):
    from datasets import load_dataset

    for part in range(3):
        (tmp_path / f"part{part}.jsonl").write_text(
            "".join(f'{{"text": "document {part}.{number} {"x" * number}"}}\n' for number in range(20))
        )

    def data(workers: int) -> Data:
        files = [str(tmp_path / f"part{part}.jsonl") for part in range(3)]
        stream = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "c"))
        return Data(Packed(stream, length=16), batch_size=2, num_workers=workers, collate=as_lists)

    training = FakeTraining(ranks_of_batch=2)
    for world_size, steps, workers in ((2, 3, 0), (1, 5, 1), (3, 20, 0), (2, 4, 1)):
        training.run(data(workers), world_size=world_size, steps=steps)
    unbroken = FakeTraining(ranks_of_batch=2)
    unbroken.run(data(0), world_size=1, steps=32)
    assert training.taken == unbroken.taken
    assert training.codes() == set()
    read = b"".join(bytes(window) for window in training.taken[:88]).decode()
    assert all(f"document {part}.{number} " in read for part in range(3) for number in range(15))
