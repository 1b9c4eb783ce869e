from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.conftest import SmallDisk, fill

from holdfast.findings import Severity
from holdfast.shortage import SHORTAGES, finding_of, holding_up, lacking, shortage_in, shortage_of


@pytest.mark.parametrize("number", SHORTAGES)
def test_shortage_is_known_by_its_number_its_words_and_as_a_cause(number: int) -> None:
    row = SHORTAGES[number]
    error = OSError(number, os.strerror(number))
    outer = RuntimeError("writing failed")
    outer.__cause__ = error
    assert shortage_of(error) is shortage_of(outer) is row
    assert row.phrase in os.strerror(number)
    assert shortage_in(f"OSError: {error}") is row


def test_other_errors_are_no_shortage() -> None:
    assert shortage_of(FileNotFoundError(errno.ENOENT, "no such file")) is None
    assert shortage_of(ValueError("28")) is None
    assert shortage_in("ValueError: bad batch [Errno 2]") is None
    assert shortage_in("holdfast: error [disk-full]: the checkpoint could not be written") is SHORTAGES[errno.ENOSPC]


@pytest.mark.root
def test_full_disk_is_named_with_its_room(small_disk: SmallDisk) -> None:
    disk = small_disk(128 << 10)
    assert lacking(disk) is None
    fill(disk)
    refusal = lacking(disk)
    assert refusal is not None
    finding = holding_up(refusal, "it waits", disk)
    assert finding.code == "disk-full"
    assert finding.evidence[-1].startswith(f"tmpfs on {disk}: 0 of 131,072 bytes free")


def test_finding_names_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    finding = finding_of(OSError(errno.EROFS, "Read-only file system"), "nothing was saved", tmp_path / "a" / "b")
    assert finding.code == "read-only-file-system"
    assert finding.where == str(tmp_path / "a" / "b")
    assert len(finding.evidence) == 2


def test_that_something_waits_is_said_only_of_what_does(tmp_path: Path) -> None:
    for number in (*SHORTAGES, errno.EPERM):
        error = OSError(number, os.strerror(number))
        plain, waiting = finding_of(error, "nothing was saved", tmp_path), holding_up(error, "it waits", tmp_path)
        assert waiting.remedy == f"{plain.remedy} What waits for it goes on by itself."
        assert waiting.severity is Severity.WARNING
