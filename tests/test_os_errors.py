from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.conftest import SmallDisk, fill, mount_read_only

from holdfast.findings import Severity
from holdfast.os_errors import (
    RESOURCE_ERRORS,
    os_error_finding,
    probe_disk,
    resource_error_in,
    resource_error_of,
    room_in,
    waiting_finding,
)


@pytest.mark.parametrize("number", RESOURCE_ERRORS)
def test_resource_error_is_recognised_by_number_text_and_cause(number: int) -> None:
    row = RESOURCE_ERRORS[number]
    error = OSError(number, os.strerror(number))
    outer = RuntimeError("writing failed")
    outer.__cause__ = error
    assert resource_error_of(error) is resource_error_of(outer) is row
    assert row.phrase in os.strerror(number)
    assert resource_error_in(f"OSError: {error}") is row


def test_other_errors_are_no_shortage() -> None:
    assert resource_error_of(FileNotFoundError(errno.ENOENT, "no such file")) is None
    assert resource_error_of(ValueError("28")) is None
    assert resource_error_in("ValueError: bad batch [Errno 2]") is None
    assert (
        resource_error_in("holdfast: error [disk-full]: the checkpoint could not be written")
        is RESOURCE_ERRORS[errno.ENOSPC]
    )


@pytest.mark.root
def test_full_disk_is_named_with_its_room(small_disk: SmallDisk) -> None:
    disk = small_disk(128 << 10)
    assert probe_disk(disk) is None
    fill(disk)
    refusal = probe_disk(disk)
    assert refusal is not None
    finding = waiting_finding(refusal, "it waits", disk)
    assert finding.code == "disk-full"
    assert finding.evidence[-1].startswith(f"tmpfs on {disk}: 0 of 131,072 bytes free")


@pytest.mark.root
def test_read_only_mount_is_named_with_its_device_and_kind(small_disk: SmallDisk) -> None:
    disk = small_disk(128 << 10)
    mount_read_only(disk)
    refusal = probe_disk(disk / "out" / "ckpt")
    assert refusal is not None
    assert os_error_finding(refusal, "nothing was saved", disk / "out").evidence[-1] == (
        f"{disk} is mounted read-only (tmpfs, none)"
    )


@pytest.mark.root
def test_disk_is_the_one_of_the_path_among_a_programs_words(small_disk: SmallDisk, tmp_path: Path) -> None:
    full, read_only = small_disk(128 << 10), small_disk(128 << 10)
    fill(full)
    mount_read_only(read_only)
    said, log = (f"{read_only} is mounted read-only (tmpfs, none)",), tmp_path / "rank-0.log"
    for words in (
        f"OSError: [Errno 30] Read-only file system: '{read_only}/out/ckpt'",
        f"OSError: [Errno 30] Read-only file system: '{tmp_path}/a b' -> '{read_only}/ckpt'",
        "OSError: [Errno 30] Read-only file system: 'disk1/ckpt'",
        f"cp: cannot create ‘{read_only}/ckpt’: Read-only file system",
        f"panic: open {read_only}/ckpt: Read-only file system",
    ):
        assert room_in(words, tmp_path, log) == said
    assert room_in("what(): open failed: Read-only file system", read_only, log) == said
    assert room_in("what(): open failed: Read-only file system", tmp_path, log) == ()
    (line,) = room_in(f"OSError: [Errno 28] No space left on device: '{full}/ckpt'", tmp_path, log)
    assert line.startswith(f"tmpfs on {full}: 0 of")
    (line,) = room_in("OSError: [Errno 28] No space left on device", tmp_path, full / "rank-0.log")
    assert line.startswith(f"tmpfs on {full}: 0 of")
    assert room_in(f"OSError: [Errno 24] Too many open files: '{full}/a'", tmp_path, log) == ()
    assert room_in(f"ValueError: '{full}'", tmp_path, log) == ()
    assert room_in(f"OSError: [Errno 30] Read-only file system: '{'x' * 5000}'", tmp_path, log) == ()


def test_finding_names_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    finding = os_error_finding(OSError(errno.EROFS, "Read-only file system"), "nothing was saved", tmp_path / "a" / "b")
    assert finding.code == "read-only-file-system"
    assert finding.where == str(tmp_path / "a" / "b")
    assert len(finding.evidence) == 2


def test_that_something_waits_is_said_only_of_what_does(tmp_path: Path) -> None:
    for number in (*RESOURCE_ERRORS, errno.EPERM):
        error = OSError(number, os.strerror(number))
        plain, waiting = (
            os_error_finding(error, "nothing was saved", tmp_path),
            waiting_finding(error, "it waits", tmp_path),
        )
        assert waiting.remedy == f"{plain.remedy} What waits for it resumes by itself."
        assert waiting.severity is Severity.WARNING
