"""Private files: their owner, and that no reader finds half of one."""

from __future__ import annotations

import os
import re
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from holdfast.host.files import (
    UnexpectedFile,
    atomic_write,
    atomic_write_shared,
    open_lock,
    private_opener,
    read_line,
    read_object,
    read_small,
)


def test_file_that_is_put_is_its_users_alone_whatever_lay_there(tmp_path: Path) -> None:
    place = tmp_path / "remote.json"
    place.write_text("former")
    left_behind = tmp_path / f"remote.json.{os.getpid()}"
    left_behind.write_text("half")
    left_behind.chmod(0o644)
    atomic_write(place, b"latter")
    assert place.read_bytes() == b"latter"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [place]


def test_shared_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    former = os.umask(0o022)
    try:
        atomic_write_shared(tmp_path / "3.yaml", b"content")
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "3.yaml").stat().st_mode) == 0o644


def test_file_that_cannot_be_put_leaves_nothing_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "remote.json"
    place.mkdir()  # what it is put for cannot take its place
    with pytest.raises(OSError, match="directory"):
        atomic_write(place, b"content")
    assert [*tmp_path.iterdir()] == [place]


def test_file_that_is_opened_privately_is_its_users_alone(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        with open(tmp_path / "log", "ab", opener=private_opener):
            pass
    finally:
        os.umask(former)
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


@pytest.mark.parametrize(("folder_mode", "lock_mode"), [(0o755, 0o600), (0o775, 0o660), (0o777, 0o666), (0o500, 0o600)])
def test_lock_is_for_those_alone_who_may_write_its_folder(tmp_path: Path, folder_mode: int, lock_mode: int) -> None:
    lock = tmp_path / "lock"
    lock.touch(mode=0o644)
    tmp_path.chmod(folder_mode)
    with open_lock(lock) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == lock_mode
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("how", ["symbolic", "hard"])
def test_lock_that_is_a_link_is_refused_and_its_target_keeps_its_mode(tmp_path: Path, how: str) -> None:
    theirs, folder = tmp_path / "id_rsa", tmp_path / "checkpoints"
    theirs.write_text("key")
    theirs.chmod(0o600)
    folder.mkdir()
    folder.chmod(0o777)
    lock = folder / "lock-0"
    if how == "symbolic":
        lock.symlink_to(theirs)
    else:
        lock.hardlink_to(theirs)
    with pytest.raises(UnexpectedFile, match="a link"):
        open_lock(lock)
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o600


def _make_damaged(path: Path, how: str) -> None:
    """Put something else in a file's place."""
    match how:
        case "missing":
            pass
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case _:
            path.write_bytes({"empty": b"", "binary": b"\xff\x00", "list": b"[]", "deep": b"[" * 100_000}[how])


@pytest.mark.parametrize("how", ["missing", "folder", "fifo", "device", "loop", "socket", "huge"])
def test_what_is_no_small_plain_file_is_refused_without_waiting(how: str) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as short:
        path = Path(short, "f")
        _make_damaged(path, how)
        with pytest.raises(OSError, match=re.escape(str(path))):
            read_small(path)


@pytest.mark.parametrize("how", ["empty", "binary", "list", "deep"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, how: str) -> None:
    _make_damaged(tmp_path / "f", how)
    with pytest.raises(UnexpectedFile):
        read_object(tmp_path / "f")


@pytest.mark.root
def test_file_of_another_user_in_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert read_line(tmp_path / "f") == "x"
    os.chown(tmp_path / "f", 4242, 4242)
    with pytest.raises(UnexpectedFile, match="another user"):
        read_line(tmp_path / "f")
    os.chown(tmp_path, 4242, 4242)
    assert read_line(tmp_path / "f") == "x"
