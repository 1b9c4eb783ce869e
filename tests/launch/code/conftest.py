"""A project folder to be shipped, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.job.spec import Code, Job
from holdfast.launch.code.archive import Packed, pack
from holdfast.launch.code.survey import Survey, survey


@dataclass
class Project:
    """A folder of code."""

    path: Path
    archives: Path

    def write(self, name: str, content: str = "", *, executable: bool = False) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755 if executable else 0o644)
        return path

    def survey(self, workdir: str = ".", apart: tuple[Path, ...] = (), **code: Any) -> Survey:
        return survey(Job(command=("train",), workdir=workdir, code=Code(**code)), self.path, apart=apart)

    def names(self, **code: Any) -> list[str]:
        found = self.survey(**code)
        assert found.findings == ()
        return [entry.path for entry in found.entries]

    def pack(self, **code: Any) -> Packed:
        return pack(self.survey(**code), self.archives)


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
