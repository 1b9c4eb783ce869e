"""Checks of room and writes in the job's folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Severity
from holdfast.preflight.checks import storage

GIB = 1 << 30


def file_system(free_bytes: int = 500 * GIB, free_files: int = 1 << 20, flags: int = 0) -> SimpleNamespace:
    """What statvfs answers for a disk of 1 TiB."""
    return SimpleNamespace(
        f_blocks=1 << 28, f_frsize=4096, f_bavail=free_bytes >> 12, f_files=1 << 24, f_favail=free_files, f_flag=flags
    )


@pytest.mark.parametrize(
    ("size", "gpus", "expected", "severity"),
    [
        (file_system(), 8, [], None),
        (file_system(5 * GIB), 0, [], None),  # a laptop
        (file_system(5 * GIB), 8, ["disk-nearly-full"], Severity.WARNING),
        (file_system(free_files=12), 0, ["disk-nearly-full"], Severity.WARNING),
        (file_system(4096), 0, ["disk-full"], Severity.ERROR),
        (file_system(flags=os.ST_RDONLY), 8, [], None),  # the check of writes says so
    ],
)
def test_there_is_room_for_checkpoints(
    node: MakeNode,
    monkeypatch: pytest.MonkeyPatch,
    size: SimpleNamespace,
    gpus: int,
    expected: list[str],
    severity: Severity | None,
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    # Logs are on the same file system, which is judged once.
    found = [*storage.disk_space(node(checkpoints="/data/run", logs="/data/logs", gpus=gpus))]
    assert codes(found) == expected
    assert all(each.severity is severity for each in found)


def test_workdir_may_be_full_or_read_only(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: file_system(4096))
    [finding] = storage.disk_space(node(workdir="/code"))
    assert (finding.code, finding.severity) == ("disk-nearly-full", Severity.WARNING)


@pytest.mark.parametrize("folder", ["", "s3://bucket/run", "relative/to/code/that/is/shipped"])
def test_folder_that_is_not_on_this_node_is_not_written(node: MakeNode, folder: str) -> None:
    def clock_s() -> float:
        raise AssertionError("it writes")

    view = node(checkpoints=folder)
    assert [*storage.disk_write(view, clock_s), *storage.disk_space(view)] == []


def clock_of(*times_s: float) -> Iterator[float]:
    return iter(times_s)


@pytest.mark.parametrize(("took_s", "expected"), [(0.01, []), (2.5, ["slow-fsync"])])
def test_write_reaches_the_disk_in_time(node: MakeNode, took_s: float, expected: list[str]) -> None:
    times_s = clock_of(100.0, 100.0 + took_s)
    view = node(workdir="/work", checkpoints="run/checkpoints")
    found = [*storage.disk_write(view, lambda: next(times_s))]
    assert codes(found) == expected
    assert [*view.root.iterdir()] == [], "it leaves nothing behind"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EROFS, "read-only-file-system"),
        (errno.EDQUOT, "disk-full"),
        (errno.ENOSPC, "disk-full"),
        (errno.EIO, "disk-error"),
        (errno.EACCES, "os-error"),
    ],
)
def test_write_that_fails_is_an_error(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, number: int, expected: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    [finding] = storage.disk_write(node(checkpoints="/data/run", logs="/data/run"))
    assert (finding.code, finding.severity) == (expected, Severity.ERROR)


def test_folder_that_is_a_file_cannot_be_written(node: MakeNode) -> None:
    [finding] = storage.disk_write(node({"data/run": "a file"}, checkpoints="/data/run"))
    assert (finding.code, finding.severity) == ("os-error", Severity.ERROR)


def test_folder_that_is_not_there_yet_is_judged_by_its_parent(node: MakeNode) -> None:
    view = node({"data/run/manifest": "", "data/logs": "a file"}, checkpoints="/data/run/a/b", logs="/data/logs/node0")
    [finding] = storage.disk_write(view)
    assert finding.where == str(view.root / "data/logs")
    view = node(workdir="/data", logs="logs")
    assert [each.where for each in storage.disk_write(view)] == [str(view.root / "data/logs")]
    assert [each.name for each in (view.root / "data/run").iterdir()] == ["manifest"]
