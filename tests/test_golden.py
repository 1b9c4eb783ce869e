"""Golden files: each has its test, and is not rewritten by a test run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden import Golden, file_of

TESTS = Path(__file__).parent


def test_every_golden_file_has_its_test() -> None:
    files = list(TESTS.rglob("golden/test_*/*.txt"))
    modules = {path: path.parents[2] / f"{path.parent.name}.py" for path in files}
    assert [path for path, module in modules.items() if f"def {path.stem}(" not in module.read_text()] == []
    assert files


def test_text_that_differs_or_has_no_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.golden.WRITE", True)
    compare = Golden(file_of(tmp_path / "test_words.py", "test_one"))
    compare("first  \nsecond", "third\n")
    monkeypatch.setattr("tests.golden.WRITE", False)
    assert compare.path.read_text() == "first\nsecond\n\nthird\n"
    compare("first\nsecond\n", "third")
    with pytest.raises(AssertionError, match="HOLDFAST_WRITE_GOLDEN"):
        compare("first")
    with pytest.raises(AssertionError, match="HOLDFAST_WRITE_GOLDEN"):
        Golden(tmp_path / "none.txt")("first")
