"""When a rank's state is copied during its loop, and when copying stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.train.fake_accelerator import FakeAccelerator

from holdfast.agent.state_memory import PEER_CHECKPOINT_MEMFDS
from holdfast.host.memory_usage import MemoryUsage
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.stall_clock import StallClock
from holdfast.train.checkpoint.train_state import TrainState
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot, peer_checkpoint
from holdfast.train.ft.memory_snapshot import MemorySnapshot
from holdfast.train.ft.peer_checkpoint import MAX_STALL_SHARE, PeerCheckpointer
from holdfast.train.session.control_group import ControlGroup


@pytest.fixture
def device() -> FakeAccelerator | None:
    return None


@pytest.fixture
def copies(device: FakeAccelerator | None) -> Iterator[PeerCheckpointer]:
    pieces = [os.memfd_create("test") for _ in range(PEER_CHECKPOINT_MEMFDS)]
    model = torch.nn.Linear(8, 8)
    for tensor in model.parameters():
        (device or FakeAccelerator()).place(tensor)
    training = TrainState(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), find_accelerator=lambda _: device
    )
    memories = [Path(f"/proc/self/fd/{piece}") for piece in pieces]
    yield PeerCheckpointer(memories, train_state=training, ranks=ControlGroup(), writer=WriterId(), nodes=1)
    for piece in pieces:
        os.close(piece)


def seal(step: int) -> Manifest:
    return Manifest(step=step, world_size=1, samples=None, files={})


def test_next_copy_of_auto_waits_a_hundred_times_as_long_as_the_loop_has_waited(
    copies: PeerCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(peer_checkpoint, "time", SimpleNamespace(monotonic=lambda: now))
    copies._starts = StallClock(None, lambda: now)
    assert copies.is_due()
    copies.start(seal(1))
    copied = copies.wait_finished()
    assert copied is not None
    assert copied.problem is None
    assert copies.is_due()
    copies._staging[0].stalls._stalled_s = 0.25
    assert copies.take_stalled_s() == 0.25
    now += 0.25 / MAX_STALL_SHARE - 0.01
    assert not copies.is_due()
    now += 0.02
    assert copies.is_due()


def test_next_copy_of_auto_waits_until_the_device_tells_what_the_last_one_cost(
    copies: PeerCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, device = 100.0, FakeAccelerator()
    monkeypatch.setattr(peer_checkpoint, "time", SimpleNamespace(monotonic=lambda: now))
    copies._starts = StallClock(device)
    copies.start(seal(1))
    assert copies.wait_finished() is not None
    now += 1.0
    assert not copies.is_due()
    device.run()
    assert copies.is_due()


@pytest.mark.parametrize("device", [FakeAccelerator(pin_error="CUDA error: out of memory")])
def test_memory_that_cannot_be_pinned_is_reported_once_for_each_buffer(
    copies: PeerCheckpointer, device: FakeAccelerator
) -> None:
    found = []
    for step in (1, 2, 3):
        copies.start(seal(step))
        while not copies._running.done():
            device.run()
        copied = copies.wait_finished()
        assert copied is not None
        assert copied.problem is None
        found.append(copied.warning and copied.warning.code)
    assert found == ["host-memory-not-pinned"] * 2 + [None]


def test_copies_take_turns_so_that_the_one_before_stays_whole(copies: PeerCheckpointer) -> None:
    for step in (1, 2, 3):
        copies.start(seal(step))
        assert copies.wait_finished() is not None
    lying = [MemorySnapshot.load(memory) for memory in copies.memories]
    assert {handed.snapshot_id.step for handed in lying if handed is not None} == {2, 3}


def test_copies_that_memory_has_no_room_for_are_given_up_and_said(
    copies: PeerCheckpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> list[MemoryUsage]:
        return [MemoryUsage(where="/sys/fs/cgroup/pod", used_bytes=90, limit_bytes=100)]

    monkeypatch.setattr(memory_snapshot, "memory_usages", full)
    copies.start(seal(1))
    copied = copies.wait_finished()
    assert copied is not None
    assert copied.problem is not None
    assert copied.problem.code == "peer-checkpoints-stopped"
    assert "/sys/fs/cgroup/pod has 10 left" in copied.problem.evidence[0]
    assert not copies.is_due()
    assert [MemorySnapshot.load(memory) for memory in copies.memories] == [None] * PEER_CHECKPOINT_MEMFDS
