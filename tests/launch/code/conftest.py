"""A project directory to ship, and the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.job.spec import Code, Job
from holdfast.launch.code.archive import PackedArchive, pack
from holdfast.launch.code.file_list import FileList, list_files


@dataclass
class Project:
    """A directory of code."""

    path: Path
    archives: Path

    def write(self, name: str, content: str = "", *, executable: bool = False) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755 if executable else 0o644)
        return path

    def list_files(self, workdir: str = ".", exclude: tuple[Path, ...] = (), **code: Any) -> FileList:
        return list_files(Job(command=("train",), workdir=workdir, code=Code(**code)), self.path, exclude=exclude)

    def names(self, **code: Any) -> list[str]:
        found = self.list_files(**code)
        assert found.findings == ()
        return [entry.path for entry in found.entries]

    def pack(self, **code: Any) -> PackedArchive:
        return pack(self.list_files(**code), self.archives)


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[[str], Project]:
    def make(name: str) -> Project:
        path = tmp_path / name
        path.mkdir()
        return Project(path, tmp_path / "archives")

    return make


@pytest.fixture
def project(make_project: Callable[[str], Project]) -> Project:
    return make_project("project")
