"""Texts that people read, each compared as a whole with a file next to its test.

`HOLDFAST_WRITE_GOLDEN=1 pytest tests/cli` writes the files anew; read their diff.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.findings import Finding

WRITE = os.environ.get("HOLDFAST_WRITE_GOLDEN") == "1"


@dataclass(frozen=True)
class Golden:
    """The file of one test: `golden/MODULE/TEST.txt`."""

    path: Path

    def __call__(self, *texts: str) -> None:
        """Compare texts with the file, where an empty line is between them, and no line ends in spaces."""
        lines = "\n\n".join(each.rstrip() for each in texts).splitlines()
        text = "".join(f"{line.rstrip()}\n" for line in lines)
        if WRITE:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text)
        assert self.path.is_file(), f"no {self.path}: HOLDFAST_WRITE_GOLDEN=1 writes it"
        assert text == self.path.read_text(), f"not as in {self.path}; HOLDFAST_WRITE_GOLDEN=1 writes it anew"


def file_of(module: Path, test: str) -> Path:
    """Where a test's texts are."""
    return module.parent / "golden" / module.stem / f"{test}.txt"


def printed(finding: Finding) -> str:
    """A finding, as `holdfast` prints it."""
    from holdfast.cli.finding_text import render_finding  # it needs Rich, which is not there with the lowest torch

    return render_finding(finding).plain
