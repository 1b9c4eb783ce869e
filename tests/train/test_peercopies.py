"""When a rank's state is copied beside its loop, and when it is not any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.agent.handed import COPIES
from holdfast.host.memory import Reading
from holdfast.train import handover, peercopies
from holdfast.train.handover import Handed
from holdfast.train.peercopies import MOST_SHARE, PeerCopies
from holdfast.train.ranks import Ranks
from holdfast.train.seal import Seal
from holdfast.train.tenure import Writer
from holdfast.train.training import Training


@pytest.fixture
def copies() -> Iterator[PeerCopies]:
    pieces = [os.memfd_create("test") for _ in range(COPIES)]
    model = torch.nn.Linear(8, 8)
    training = Training(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    memories = [Path(f"/proc/self/fd/{piece}") for piece in pieces]
    yield PeerCopies(memories, training=training, ranks=Ranks(), writer=Writer(), nodes=1)
    for piece in pieces:
        os.close(piece)


def seal(step: int) -> Seal:
    return Seal(step=step, world_size=1, samples=None, files={})


def test_next_copy_of_auto_waits_a_hundred_times_as_long_as_the_loop_has_waited(
    copies: PeerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(peercopies, "time", SimpleNamespace(monotonic=lambda: now))
    assert copies.is_due()
    copies.begin(seal(1))
    copied = copies.finish()
    assert copied is not None
    assert copied.problem is None
    assert copies.is_due()
    copies._staging[0].waited_s = 0.25
    assert copies.take_waited_s() == 0.25
    now += 0.25 / MOST_SHARE - 0.01
    assert not copies.is_due()
    now += 0.02
    assert copies.is_due()


def test_copies_take_turns_so_that_the_one_before_stays_whole(copies: PeerCopies) -> None:
    for step in (1, 2, 3):
        copies.begin(seal(step))
        assert copies.finish() is not None
    lying = [Handed.lying(memory) for memory in copies.memories]
    assert {handed.origin.step for handed in lying if handed is not None} == {2, 3}


def test_copies_that_memory_has_no_room_for_are_given_up_and_said(
    copies: PeerCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> list[Reading]:
        return [Reading(where="/sys/fs/cgroup/pod", used_bytes=90, limit_bytes=100)]

    monkeypatch.setattr(handover, "readings", full)
    copies.begin(seal(1))
    copied = copies.finish()
    assert copied is not None
    assert copied.problem is not None
    assert copied.problem.code == "peer-copies-stopped"
    assert "/sys/fs/cgroup/pod has 10 left" in copied.problem.evidence[0]
    assert not copies.is_due()
    assert [Handed.lying(memory) for memory in copies.memories] == [None] * COPIES
