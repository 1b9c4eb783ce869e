"""A rank's state in memory: whole and of one step on every rank, or not gone on from."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.host.memory_usage import MemoryUsage
from holdfast.train.checkpoint.manifest_file import Manifest
from holdfast.train.checkpoint.writer_fence import WriterId
from holdfast.train.ft import memory_snapshot
from holdfast.train.ft.memory_snapshot import MemorySnapshot, StateMismatch, validate_all_ranks

WRITER = WriterId(run="r", attempt=1)
SEAL = Manifest(step=7, world_size=2, samples=70, files={})


@pytest.fixture
def memory() -> Iterator[Path]:
    piece = os.memfd_create("test")
    yield Path(f"/proc/self/fd/{piece}")
    os.close(piece)


def state(value: float = 0.0) -> dict[str, Any]:
    """Tensors of several kinds, an empty one, and what is none."""
    weights = {"a": torch.full((3, 5), value), "b": torch.full((), value, dtype=torch.bfloat16), "c": torch.empty(0)}
    groups = [{"lr": value, "params": ["a"], "betas": (value, 0.9)}]
    return {"model": weights, "optimizer": {"state": {"a": {"step": torch.tensor(value)}}, "param_groups": groups}}


def leave(memory: Path, *, step: int = 7, attempt: int = 1, rank: int = 0) -> MemorySnapshot | None:
    seal = Manifest(step=step, world_size=2, samples=70, files={})
    memory_snapshot.write(memory, WriterId(run="r", attempt=attempt), rank, seal, state(1.5), b"own")
    return MemorySnapshot.find_for_rank(memory, rank=rank)


def part(handed: MemorySnapshot | None) -> memory_snapshot.RankSnapshot | None:
    return (handed.snapshot_id, handed.bytes, handed.find_damage()) if handed is not None else None


def test_state_comes_out_as_it_went_in_and_is_left_there(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    assert (handed.find_damage(), handed.manifest, handed.per_rank_state().read()) == (None, SEAL, b"own")
    for _ in range(2):
        taken = state()
        handed.copy_into(taken)
        assert taken["model"]["a"].tolist() == [[1.5] * 5] * 3
        assert taken["model"]["b"].item() == taken["optimizer"]["state"]["a"]["step"].item() == 1.5
        assert taken["optimizer"]["param_groups"][0]["lr"] == 1.5
        taken["model"]["a"].zero_()


def test_later_state_takes_the_place_of_an_earlier_one(memory: Path) -> None:
    leave(memory, step=3)
    handed = leave(memory)
    assert handed is not None
    assert handed.manifest.step == 7


@pytest.mark.parametrize("size", [0, 10, 200])
def test_state_that_was_not_finished_is_none(memory: Path, size: int) -> None:
    leave(memory)
    os.truncate(memory, size)
    assert MemorySnapshot.find_for_rank(memory, rank=0) is None


def test_state_whose_head_was_not_written_is_none(memory: Path) -> None:
    leave(memory)
    with open(memory, "r+b") as file:
        file.write(bytes(8))
    assert MemorySnapshot.find_for_rank(memory, rank=0) is None


def test_state_of_another_rank_is_none(memory: Path) -> None:
    leave(memory, rank=1)
    assert MemorySnapshot.find_for_rank(memory, rank=0) is None


def test_flipped_bit_is_found(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    with open(memory, "r+b") as file:
        file.seek(70)
        file.write(b"\xff")
    assert "CRC-32" in (handed.find_damage() or "")


@pytest.mark.parametrize("shape", [(5, 3), (4, 5)])
def test_state_does_not_go_into_another_model(memory: Path, shape: tuple[int, ...]) -> None:
    handed, other = leave(memory), state()
    other["model"]["a"] = torch.zeros(shape)
    assert handed is not None
    with pytest.raises(StateMismatch, match=r"model\.a"):
        handed.copy_into(other)


def test_state_that_lacks_a_part_does_not_fit(memory: Path) -> None:
    handed, other = leave(memory), state()
    other["model"]["z"] = torch.zeros(1)
    assert handed is not None
    with pytest.raises(StateMismatch, match=r"model\.z was not transferred"):
        handed.copy_into(other)


def test_room_that_is_not_there_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> list[MemoryUsage]:
        return [MemoryUsage(where="this machine", used_bytes=1, limit_bytes=1)]

    monkeypatch.setattr(memory_snapshot, "memory_usages", full)
    with pytest.raises(OSError, match="not there"):
        leave(memory)


def test_all_ranks_have_the_same_or_nobody_has_anything(memory: Path) -> None:
    whole, other, later = part(leave(memory)), part(leave(memory, step=8)), part(leave(memory, attempt=2))
    assert whole is not None
    finding, good = validate_all_ranks([whole, whole])
    assert good
    assert finding is not None
    assert finding.code == "state-transfer-done"
    assert validate_all_ranks([None, None]) == (None, False)
    damaged = (*whole[:2], "flipped")
    for parts in ([whole, None], [whole, other], [whole, later], [whole, damaged], [whole], [whole] * 3):
        finding, good = validate_all_ranks(parts)
        assert not good
        assert finding is not None
        assert finding.code == "state-transfer-refused"


def test_own_part_is_read_as_a_file(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    assert isinstance(handed.per_rank_state(), io.BytesIO)


def test_more_memory_than_a_group_has_left_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/main\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    group = tmp_path / "sys/fs/cgroup/pod/main"
    group.mkdir(parents=True)
    for name, words in {
        "memory.events": "oom_kill 0",
        "memory.current": "3000",
        "memory.max": "4000",
        "memory.stat": "inactive_file 500",
    }.items():
        (group / name).write_text(f"{words}\n")
    memory_snapshot.require_memory(1500, root=tmp_path)
    with pytest.raises(OSError, match=r"1,501 bytes .*cgroup/pod/main has 1,500 left"):
        memory_snapshot.require_memory(1501, root=tmp_path)
