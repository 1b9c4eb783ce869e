"""A rank's state in memory: whole and of one step on every rank, or not gone on from."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.host.memory import Reading
from holdfast.train import handover
from holdfast.train.handover import Handed, Unfit, judged
from holdfast.train.seal import Seal
from holdfast.train.tenure import Writer

WRITER = Writer(run="r", attempt=1)
SEAL = Seal(step=7, world_size=2, samples=70, files={})


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


def leave(memory: Path, *, step: int = 7, attempt: int = 1, rank: int = 0) -> Handed | None:
    seal = Seal(step=step, world_size=2, samples=70, files={})
    handover.write(memory, Writer(run="r", attempt=attempt), rank, seal, state(1.5), b"own")
    return Handed.find(memory, rank=rank)


def part(handed: Handed | None) -> handover.Part | None:
    return (handed.origin, handed.bytes, handed.damage()) if handed is not None else None


def test_state_comes_out_as_it_went_in_and_is_left_there(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    assert (handed.damage(), handed.seal, handed.own().read()) == (None, SEAL, b"own")
    for _ in range(2):
        taken = state()
        handed.fill(taken)
        assert taken["model"]["a"].tolist() == [[1.5] * 5] * 3
        assert taken["model"]["b"].item() == taken["optimizer"]["state"]["a"]["step"].item() == 1.5
        assert taken["optimizer"]["param_groups"][0]["lr"] == 1.5
        taken["model"]["a"].zero_()


def test_later_state_takes_the_place_of_an_earlier_one(memory: Path) -> None:
    leave(memory, step=3)
    handed = leave(memory)
    assert handed is not None
    assert handed.seal.step == 7


@pytest.mark.parametrize("size", [0, 10, 200])
def test_state_that_was_not_finished_is_none(memory: Path, size: int) -> None:
    leave(memory)
    os.truncate(memory, size)
    assert Handed.find(memory, rank=0) is None


def test_state_whose_head_was_not_written_is_none(memory: Path) -> None:
    leave(memory)
    with open(memory, "r+b") as file:
        file.write(bytes(8))
    assert Handed.find(memory, rank=0) is None


def test_state_of_another_rank_is_none(memory: Path) -> None:
    leave(memory, rank=1)
    assert Handed.find(memory, rank=0) is None


def test_flipped_bit_is_found(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    with open(memory, "r+b") as file:
        file.seek(70)
        file.write(b"\xff")
    assert "CRC-32" in (handed.damage() or "")


@pytest.mark.parametrize("shape", [(5, 3), (4, 5)])
def test_state_does_not_go_into_another_model(memory: Path, shape: tuple[int, ...]) -> None:
    handed, other = leave(memory), state()
    other["model"]["a"] = torch.zeros(shape)
    assert handed is not None
    with pytest.raises(Unfit, match=r"model\.a"):
        handed.fill(other)


def test_state_that_lacks_a_part_does_not_fit(memory: Path) -> None:
    handed, other = leave(memory), state()
    other["model"]["z"] = torch.zeros(1)
    assert handed is not None
    with pytest.raises(Unfit, match=r"model\.z was not handed over"):
        handed.fill(other)


def test_room_that_is_not_there_is_refused(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> list[Reading]:
        return [Reading(where="this machine", used_bytes=1, limit_bytes=1)]

    monkeypatch.setattr(handover, "readings", full)
    with pytest.raises(OSError, match="not there"):
        leave(memory)


def test_all_ranks_have_the_same_or_nobody_has_anything(memory: Path) -> None:
    whole, other, later = part(leave(memory)), part(leave(memory, step=8)), part(leave(memory, attempt=2))
    assert whole is not None
    finding, good = judged([whole, whole])
    assert good
    assert finding is not None
    assert finding.code == "state-handed-over"
    assert judged([None, None]) == (None, False)
    damaged = (*whole[:2], "flipped")
    for parts in ([whole, None], [whole, other], [whole, later], [whole, damaged], [whole], [whole] * 3):
        finding, good = judged(parts)
        assert not good
        assert finding is not None
        assert finding.code == "handover-refused"


def test_own_part_is_read_as_a_file(memory: Path) -> None:
    handed = leave(memory)
    assert handed is not None
    assert isinstance(handed.own(), io.BytesIO)


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
    handover.refuse_too_large(1500, root=tmp_path)
    with pytest.raises(OSError, match=r"1,501 bytes .*cgroup/pod/main has 1,500 left"):
        handover.refuse_too_large(1501, root=tmp_path)
