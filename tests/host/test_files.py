"""Private files: whose they are, and that nobody finds half of one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from holdfast.host.files import private, put


def test_file_that_is_put_is_its_users_alone_whatever_lay_there(tmp_path: Path) -> None:
    place = tmp_path / "place.json"
    place.write_text("former")
    left_behind = tmp_path / f"place.json.{os.getpid()}"
    left_behind.write_text("half")
    left_behind.chmod(0o644)
    put(place, b"latter")
    assert place.read_bytes() == b"latter"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [place]


def test_file_that_cannot_be_put_leaves_nothing_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "place.json"
    place.mkdir()  # what it is put for cannot take its place
    with pytest.raises(OSError, match="directory"):
        put(place, b"content")
    assert [*tmp_path.iterdir()] == [place]


def test_file_that_is_opened_privately_is_its_users_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        with open(tmp_path / "log", "ab", opener=private):
            pass
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
