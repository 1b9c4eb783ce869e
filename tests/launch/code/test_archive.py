"""The archive: the same bytes for the same code, the same code out of it, and nothing else ever."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.code.conftest import Project

from holdfast.errors import ExitCode, HoldfastError
from holdfast.findings import Owner
from holdfast.launch.code import archive as archive_module
from holdfast.launch.code.archive import CorruptArchive, pack, unpack


def tree(path: Path) -> dict[str, tuple[str, bytes]]:
    """Every name below a folder, with what it is and what it holds."""
    found: dict[str, tuple[str, bytes]] = {}
    for item in path.rglob("*"):
        mode = item.lstat().st_mode
        name = str(item.relative_to(path))
        if stat.S_ISLNK(mode):
            found[name] = ("link", os.fsencode(os.readlink(item)))
        elif stat.S_ISDIR(mode):
            found[name] = ("folder", b"")
        else:
            found[name] = ("program" if mode & 0o100 else "file", item.read_bytes())
    return found


def fill(project: Project, order: int = 1) -> None:
    files = [("a.py", False), ("run.sh", True), ("pkg/b.py", False), ("empty", False)]
    for name, executable in files[::order]:
        project.write(name, f"content of {name}" if name != "empty" else "", executable=executable)
    (project.path / "no files").mkdir()
    (project.path / "pkg" / "link").symlink_to("../a.py")


def test_same_content_has_the_same_digest_whatever_else_differs(make_project: Callable[[str], Project]) -> None:
    first, second = make_project("first"), make_project("second")
    fill(first)
    fill(second, -1)
    for path in second.path.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    (second.path / "a.py").chmod(0o600)
    (second.path / "pkg").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(second.path / "a.py", 12345, 12345)
    assert first.pack().digest == second.pack().digest


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (path / "a.py").write_text("other"),
        lambda path: (path / "a.py").chmod(0o755),
        lambda path: (path / "a.py").rename(path / "c.py"),
        lambda path: (path / "new").mkdir(),
        lambda path: ((path / "pkg" / "link").unlink(), (path / "pkg" / "link").symlink_to("b.py")),
    ],
    ids=["content", "executable", "name", "folder", "link"],
)
def test_any_other_content_has_another_digest(project: Project, change: Callable[[Path], object]) -> None:
    fill(project)
    before = project.pack().digest
    change(project.path)
    assert project.pack().digest != before


def test_archive_is_private_and_named_by_its_sha256(project: Project) -> None:
    fill(project)
    packed = project.pack()
    assert packed.path == project.archives / f"{packed.digest}.tar"
    assert packed.digest == hashlib.sha256(packed.path.read_bytes()).hexdigest()
    assert packed.bytes == packed.path.stat().st_size
    assert stat.S_IMODE(packed.path.stat().st_mode) == 0o600
    assert list(project.archives.iterdir()) == [packed.path]


def test_what_goes_in_comes_out(project: Project, tmp_path: Path) -> None:
    fill(project)
    project.write(os.fsdecode(b"caf\xe9\n"), "any bytes")
    project.write(f"{'long' * 40}/{'name' * 50}", "longer than a tar header's field")
    (project.path / "far").symlink_to(f"{'long' * 40}/{'name' * 50}")
    project.write("large.bin").write_bytes(os.urandom(3 << 20))
    unpack(project.pack().path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(project.path)


def test_file_that_has_gone_since_it_was_seen_is_left_out(project: Project, tmp_path: Path) -> None:
    fill(project)
    found = project.list_files()
    (project.path / "a.py").unlink()
    unpack(pack(found, project.archives).path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(project.path)


def writes_while_read(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Have a file written `times` times just as it is being read."""
    real = archive_module._header
    left = [times]

    def header(*arguments: object) -> bytes:
        if left[0]:
            left[0] -= 1
            with path.open("a") as file:
                file.write("more")
        return real(*arguments)

    monkeypatch.setattr(archive_module, "_header", header)


def test_file_that_changes_for_a_moment_is_read_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project.write("log.txt", "first")
    writes_while_read(monkeypatch, path, 2)
    unpack(project.pack().path, tmp_path / "out")
    assert (tmp_path / "out" / "log.txt").read_text() == path.read_text() == "firstmoremore"


def test_file_that_keeps_changing_is_refused_and_nothing_is_left(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project.write("log.txt", "first")
    writes_while_read(monkeypatch, path, 100)
    with pytest.raises(HoldfastError) as error:
        project.pack()
    (finding,) = error.value.findings
    assert (finding.code, finding.where, finding.owner) == ("code-changed-during-upload", str(path), Owner.USER)
    assert error.value.exit_code == ExitCode.CANNOT_RUN_HERE
    assert list(project.archives.glob("*.tar")) == []


def test_fifo_in_the_place_of_a_file_is_not_waited_for(project: Project) -> None:
    path = project.write("data")
    found = project.list_files()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HoldfastError, match="being written"):
        pack(found, project.archives)


def test_link_in_the_place_of_a_file_is_not_followed(project: Project) -> None:
    path = project.write("data")
    found = project.list_files()
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(HoldfastError, match="cannot be read"):
        pack(found, project.archives)


def test_survey_with_errors_is_never_packed(project: Project) -> None:
    project.write("big", "x" * 100)
    with pytest.raises(HoldfastError) as error:
        project.pack(max_bytes=10)
    assert error.value.exit_code == ExitCode.CANNOT_RUN_HERE
    assert not project.archives.exists()


def test_folder_that_cannot_take_the_archive_is_said(project: Project) -> None:
    project.archives.write_text("a file where the folder should be")
    with pytest.raises(HoldfastError) as error:
        project.pack()
    assert error.value.findings[0].code == "unwritable-folder"


# What comes from elsewhere


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(content)
    return made


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:", format=tarfile.GNU_FORMAT) as tar:
        for one in members:
            tar.addfile(one, io.BytesIO(bytes(one.size)))
    return path


FOLDER, LINK = tarfile.DIRTYPE, tarfile.SYMTYPE


@pytest.mark.parametrize(
    "members",
    [
        (member("/etc/evil"),),
        (member("../evil"),),
        (member("a", FOLDER), member("a/../../evil")),
        (member(".."),),
        (member("."),),
        (member("no/folder/yet"),),
        (member("out", LINK, "/etc"),),
        (member("out", LINK, ".."),),
        (member("a", LINK, "."), member("a/evil")),
        (member("a", LINK, "."), member("b", LINK, "a/../x")),
        (member("a", FOLDER), member("a/b", LINK, ".."), member("c", LINK, "a/b/../x")),
        (member("twice"), member("twice")),
        (member("twice", LINK, "x"), member("twice")),
        (member("hard"), member("link", tarfile.LNKTYPE, "hard")),
        (member("pipe", tarfile.FIFOTYPE),),
        (member("disk", tarfile.BLKTYPE),),
        (member("tty", tarfile.CHRTYPE),),
    ],
    ids=lambda members: " ".join(f"{one.name}{'>' if one.linkname else ''}{one.linkname}" for one in members),
)
def test_hostile_archive_is_refused_and_leaves_nothing(tmp_path: Path, members: tuple[tarfile.TarInfo, ...]) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(CorruptArchive):
        unpack(archive_of(tmp_path / "evil.tar", *members), place / "out")
    assert list(place.iterdir()) == []
    assert not (tmp_path / "evil").exists()


def test_cut_and_foreign_archives_are_damaged(project: Project, tmp_path: Path) -> None:
    fill(project)
    whole = project.pack().path.read_bytes()
    for content in (b"", b"no tar at all" * 100, whole[: whole.index(b"content of") + 5]):
        (tmp_path / "cut.tar").write_bytes(content)
        with pytest.raises(CorruptArchive):
            unpack(tmp_path / "cut.tar", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_what_a_killed_process_left_is_cleared_away(project: Project, tmp_path: Path) -> None:
    fill(project)
    (tmp_path / "out.new" / "half").mkdir(parents=True)
    unpack(project.pack().path, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(project.path)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["archives", "out", "project"]


def test_folder_that_cannot_be_written_is_an_error_of_the_system(project: Project, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unpack(project.pack().path, tmp_path / "not" / "there")
