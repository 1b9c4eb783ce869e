"""Which files of a directory are shipped or left out, and the errors for one that cannot be shipped."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.code.conftest import Project

from holdfast.findings import Finding, Owner, Severity
from holdfast.launch.code import file_list as survey_module

NOBODY = 65534


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    return finding


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Be somebody whom permissions bind."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_parents_come_before_what_is_in_them_and_names_in_the_order_of_their_bytes(project: Project) -> None:
    for name in ("b/two.py", "b/one.py", "a.py", "Z.py", "ä.py"):
        project.write(name)
    assert project.names() == ["Z.py", "a.py", "b", "ä.py", "b/one.py", "b/two.py"]


def test_default_patterns_leave_out_what_no_rank_needs(project: Project) -> None:
    for name in (".git/HEAD", ".venv/bin/python", "pkg/__pycache__/a.pyc", ".holdfast/runs/r/x", "pkg/a.py"):
        project.write(name)
    assert project.names() == [".holdfast", "pkg", "pkg/a.py"]


def test_ignore_file_is_read_as_git_reads_its_own(project: Project) -> None:
    project.write(".holdfastignore", "# data\n*.bin\n!keep.bin\n/top\nlogs/\n")
    for name in ("a.bin", "keep.bin", "sub/b.bin", "top/x", "sub/top", "logs/y", "sub/logs/z"):
        project.write(name)
    assert project.names() == [".holdfastignore", "keep.bin", "sub", "sub/top"]


def test_job_patterns_come_before_those_of_the_ignore_file(project: Project) -> None:
    project.write(".holdfastignore", "!a.bin")
    project.write("a.bin")
    project.write("b.bin")
    assert project.names(ignore=("*.bin",)) == [".holdfastignore", "a.bin"]


@pytest.mark.parametrize("line", ["!", "[z-a]", "data\\"])
def test_bad_pattern_is_named_with_its_line(project: Project, line: str) -> None:
    path = project.write(".holdfastignore", f"*.bin\n{line}\n")
    finding = only(project.list_files().findings)
    assert (finding.code, finding.where, finding.owner) == ("bad-ignore-pattern", f"{path}:2", Owner.USER)
    assert line in finding.what


def test_bad_pattern_of_the_job_is_named_by_its_field(project: Project) -> None:
    assert only(project.list_files(ignore=("ok", "!")).findings).where == "code.ignore[1]"


def test_ignore_file_that_is_a_folder_is_said(project: Project) -> None:
    (project.path / ".holdfastignore").mkdir()
    assert only(project.list_files().findings).code == "bad-ignore-pattern"


def test_ignore_file_of_any_bytes_is_read(project: Project) -> None:
    (project.path / ".holdfastignore").write_bytes(b"\xff*\n")
    (project.path / os.fsdecode(b"\xff1")).touch()
    assert project.names() == [".holdfastignore"]


def test_too_much_code_is_refused_with_what_is_largest_and_where_to_name_it(project: Project) -> None:
    project.write("train.py", "x")
    project.write("data/deep/train.bin", "x" * 3000)
    project.write("data/test.bin", "x" * 2000)
    project.write("notes.txt", "x" * 1000)
    finding = only(project.list_files(max_bytes=5000).findings)
    assert (finding.code, finding.severity, finding.owner) == ("code-too-large", Severity.ERROR, Owner.USER)
    assert finding.where == "code.max_bytes"
    assert finding.evidence[:2] == ("data/  4.9 KiB in 2 files", "notes.txt  1000 B")
    assert finding.evidence[3:] == ("data/deep/train.bin  2.9 KiB", "data/test.bin  2 KiB")
    assert str(project.path / ".holdfastignore") in finding.remedy
    assert project.list_files(max_bytes=5000, ignore=("*.bin",)).findings == ()


def test_too_many_entries_end_the_look(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "MAX_ENTRIES", 5)
    for number in range(10):
        project.write(f"many/{number}")
    found = project.list_files()
    assert only(found.findings).code == "code-too-large"
    assert "more than 5 files and folders" in only(found.findings).what
    assert len(found.entries) == 5


def test_link_that_leads_out_is_refused_and_one_within_is_kept(project: Project) -> None:
    project.write("a/real.py")
    (project.path / "near").symlink_to("a/real.py")
    (project.path / "absolute").symlink_to(project.path / "a")
    (project.path / "dangling").symlink_to("not/there")
    (project.path / "a" / "up").symlink_to("..")
    targets = {entry.path: entry.target for entry in project.list_files().entries if entry.target}
    assert targets == {"near": "a/real.py", "absolute": "a", "dangling": "not/there", "a/up": ".."}
    (project.path / "out").symlink_to("/etc")
    (project.path / "chained").symlink_to("a/up/../etc")
    finding = only(project.list_files().findings)
    assert (finding.code, finding.severity) == ("code-link-outside", Severity.ERROR)
    assert finding.evidence == ("chained -> a/up/../etc", "out -> /etc")


def test_links_in_a_circle_are_only_links(project: Project) -> None:
    (project.path / "a").symlink_to("b")
    (project.path / "b").symlink_to("a")
    assert project.names() == ["a", "b"]


def test_fifos_and_sockets_are_left_out_with_a_word(project: Project) -> None:
    os.mkfifo(project.path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(project.path / "door"))
        found = project.list_files()
    assert found.entries == ()
    finding = only(found.findings)
    assert (finding.code, finding.severity) == ("code-file-skipped", Severity.WARNING)
    assert finding.evidence == ("door: socket", "pipe: fifo")
    assert project.names(ignore=("pipe", "door")) == []


def test_unreadable_file_and_folder_are_named() -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        path.chmod(0o755)
        (path / "secret.py").touch(0o000)
        (path / "locked").mkdir(0o000)
        with not_root():
            finding = only(Project(path, path).list_files().findings)
    assert (finding.code, finding.severity) == ("code-unreadable", Severity.ERROR)
    assert finding.evidence == ("secret.py: ----------", "locked/: Permission denied")


def test_names_of_any_bytes_are_taken_and_shown(project: Project) -> None:
    name = os.fsdecode(b"caf\xe9\n.bin")
    project.write(name, "x" * 100)
    assert project.names() == [name]
    assert only(project.list_files(max_bytes=10).findings).evidence[0] == "caf\\xe9\n.bin  100 B"


def test_folder_deeper_than_any_path_is_said_not_raised(project: Project) -> None:
    here = os.open(project.path, os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    finding = only(project.list_files().findings)
    assert finding.code == "code-unreadable"
    assert "File name too long" in finding.evidence[0]


def test_root_above_the_working_directory_ships_both(project: Project) -> None:
    project.write("lib/shared.py")
    project.write("jobs/train.py")
    found = project.list_files(workdir="jobs", root="..")
    assert found.cwd == "jobs"
    assert [entry.path for entry in found.entries] == ["jobs", "lib", "jobs/train.py", "lib/shared.py"]


@pytest.mark.parametrize("root", ["lib", "../elsewhere", "/etc"])
def test_root_without_the_working_directory_in_it_is_refused(project: Project, root: str) -> None:
    project.write("lib/shared.py")
    assert only(project.list_files(root=root).findings).code == "bad-code-root"


def test_runs_and_checkpoints_in_the_same_folder_are_not_code(project: Project) -> None:
    project.write("runs/r/events.jsonl")
    project.write("train.py")
    assert [entry.path for entry in project.list_files(exclude=(project.path / "runs",)).entries] == ["train.py"]
