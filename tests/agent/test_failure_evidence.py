"""The folder that a node keeps of a failed attempt."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from holdfast.agent import failure_evidence
from holdfast.agent.failure_evidence import MAX_FAILURES, MAX_LINES, FailedRanks, keep_evidence
from holdfast.watch.memory_pressure import read_tightest
from holdfast.watch.monitor_loop import Latest

SECRET = "hunter2-hunter2"


def failed(folder: Path, attempt: int = 0) -> FailedRanks:
    logs = folder / "logs" / f"attempt-{attempt}"
    logs.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"line {number} {SECRET}\n" for number in range(MAX_LINES + 5))
    (logs / "rank-0.log").write_text(lines)
    common = {
        "NCCL_DEBUG": "INFO",
        "DATA": SECRET,
        "AWS_SECRET_ACCESS_KEY": "abcd1234",
        "URL": "http://u:pw1x9@h/",
        "OF_USER": SECRET,
    }
    return FailedRanks(
        folder=folder,
        replica=0,
        replica_count=1,
        attempt=attempt,
        logs=(logs / "rank-0.log", logs / "rank-1.log"),
        environs={rank: {**common, "RANK": str(rank)} for rank in (0, 1)},
        secret_names=frozenset({"DATA"}),
    )


def test_folder_has_what_shows_the_failure_and_no_secret(tmp_path: Path) -> None:
    for name in ("stacks-replica-0-attempt-0-rank-0.txt", "flight-attempt-0-rank-1.gloo", "flight-attempt-0-rank-1"):
        (tmp_path / name).write_text(name)
    for name in ("stacks-replica-0-attempt-10-rank-0.txt", "agent.log", "token"):
        (tmp_path / name).write_text("of something else")
    os.symlink("/etc/passwd", tmp_path / "stacks-replica-0-attempt-0-rank-7.txt")
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)
    (counters / "link_downed").write_text("3\n")
    readings = {"memory": Latest(age_s=1.5, reading=read_tightest())}
    kept = keep_evidence(failed(tmp_path), readings, system=tmp_path / "sys")
    assert kept.folder == tmp_path / "evidence" / "attempt-0"
    found = {str(path.relative_to(kept.folder)): path for path in kept.folder.rglob("*") if path.is_file()}
    assert sorted(found) == [
        "counters.json",
        "environment.json",
        "flight-attempt-0-rank-1",
        "flight-attempt-0-rank-1.gloo",
        "monitors.json",
        "output/rank-0.log",
        "output/rank-1.log",
        "stacks-replica-0-attempt-0-rank-0.txt",
        "versions.json",
    ]
    assert kept.files == len(found)
    assert kept.bytes == sum(path.stat().st_size for path in found.values())
    assert found["stacks-replica-0-attempt-0-rank-0.txt"].stat().st_nlink == 2
    output = found["output/rank-0.log"].read_text().splitlines()
    assert (len(output), output[0]) == (MAX_LINES, "line 5 <hidden>")
    environment = json.loads(found["environment.json"].read_text())
    assert environment["all ranks"]["NCCL_DEBUG"] == "INFO"
    assert {environment["all ranks"][name] for name in ("DATA", "AWS_SECRET_ACCESS_KEY")} == {"<hidden>"}
    assert environment["rank 1"] == {"RANK": "1"}
    everything = b"".join(path.read_bytes() for path in found.values())
    assert not any(secret in everything for secret in (SECRET.encode(), b"abcd1234", b"pw1x9"))
    read = json.loads(found["counters.json"].read_text())
    assert read[str(counters / "link_downed")] == "3"
    memory = json.loads(found["monitors.json"].read_text())["memory"]
    assert (memory["age_s"], memory["reading"]["limit_bytes"] > 0) == (1.5, True)
    assert "lo:" in read["/proc/net/dev"]
    assert json.loads(found["versions.json"].read_text()).keys() >= {"holdfast", "python", "kernel"}


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    kept = keep_evidence(failed(tmp_path))
    for path in (kept.folder.parent, kept.folder, *kept.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_newest_failures_are_kept_and_a_repeated_one_replaces_its_folder(tmp_path: Path) -> None:
    folder = tmp_path
    for attempt in range(MAX_FAILURES + 2):
        folder = keep_evidence(failed(tmp_path, attempt)).folder
        os.utime(folder, (attempt, attempt))
    (folder / "stale").touch()
    keep_evidence(failed(tmp_path, MAX_FAILURES + 1))
    left = sorted(path.name for path in (tmp_path / "evidence").iterdir())
    assert left == sorted(f"attempt-{attempt}" for attempt in range(2, MAX_FAILURES + 2))
    assert not (folder / "stale").exists()


def test_what_exceeds_the_limit_is_left_out_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_evidence, "MAX_BYTES", 100_000)
    (tmp_path / "stacks-replica-0-attempt-0-rank-0.txt").write_bytes(b"x" * 100_001)
    kept = keep_evidence(failed(tmp_path))
    assert kept.left_out == 1
    assert kept.bytes <= 100_000
    assert not (kept.folder / "stacks-replica-0-attempt-0-rank-0.txt").exists()
