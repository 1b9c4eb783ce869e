"""CONTRIBUTING answers each common question with at most two files; these, and the path of a failure, exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
SECTION = PAGE.read_text().partition("## Where is …?\n")[2].partition("\n## ")[0]
QUESTIONS = {
    cells[0]: cells[1:]
    for line in SECTION.splitlines()
    if (cells := [cell.strip() for cell in line.strip("|").split("|")])[0].endswith("?")
}


def defined_in(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                methods = [one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                names |= {name, *(f"{name}.{method.name}" for method in methods)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case _:
                pass
    return names


def test_eleven_questions_are_answered() -> None:
    assert len(QUESTIONS) == 11


@pytest.mark.parametrize("question", QUESTIONS)
def test_answer_names_at_most_two_files_that_define_what_it_names(question: str) -> None:
    files: set[str] = set()
    for cell in filter(None, QUESTIONS[question]):
        path, *names = re.findall(r"`([^`]+)`", cell)
        assert names
        assert [name for name in names if name not in defined_in(SOURCE / path)] == []
        files.add(path)
    assert 1 <= len(files) <= 2
