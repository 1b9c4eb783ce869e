"""The project's prose is idiomatic technical English: phrases that readers had to read twice do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "holdfast"

HABITS = {
    r"go(?:es)? on\b": "continue, resume",
    r"(?:is|are|was|were) told\b": "receives, is notified; name the actor",
    r"mend(?:s|ed|ing)?\b": "fix",
    r"Owns\b|[Rr]efuses to own\b": "one plain sentence: what it does",
    r"in vain\b": "aborted, discarded",
    r"whoever\b|nobody\b": "name the actor",
    r"(?:can(?:not)? be|are|is|was) had\b": "is available, is not available",
    r"had better\b": "should",
    r"where need be\b": "if needed",
    r"by (?:its|his|their|whose) word\b|gives? (?:its|the) word\b": "reported by",
    r"what is left\b": "the remaining …",
    r"to the (?:last )?bit\b": "bit-exact",
    r"hears? of\b|is heard of\b": "receives, is notified of",
    r"says? so\b": "reports it, logs it",
    r"takes? (?:it|him) for\b|taken for\b": "mistaken for, treated as",
    r"but for\b": "except",
    r"(?:is|are|was|were) asked\b": "name who requests what",
    r"beside\b": "next to, compared with, while",
    r"of (?:its|their) own\b": "its own X",
    r"at once\b": "immediately",
    r"stands? (?:at|apart|by|aside)\b": "say what it is",
    r"is at work\b": "is running",
    r"vigil|hoard|liaison|tenure|envoy|errand|haunted|befell?|felled": "the field's term",
}
"""Each phrase of the old dialect, with what says it plainly."""

WELL_KEPT = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "src/holdfast/cli",
    "src/holdfast/job",
    "src/holdfast/findings.py",
)
"""What users read: none of these phrases at all."""

TOLERATED = 30
"""In the rest of the source, where some are right in their place: a proxy called Envoy, the user `nobody`."""

_HABIT = re.compile("|".join(rf"\b(?:{habit})" for habit in HABITS))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a document; of a Python file its docstrings, comments and strings. Numbered."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if tokenize.tok_name[token.type] in ("STRING", "FSTRING_MIDDLE", "COMMENT"):
            yield from enumerate(token.string.splitlines(), token.start[0])


def habits_in(*names: str) -> list[str]:
    files = [
        file for name in names for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    return [
        f"{file.relative_to(ROOT)}:{number}: {found[0]!r} ({hint_of(found[0])})"
        for file in sorted(files)
        if file.suffix in (".py", ".md") and "_build" not in file.parts and "generated" not in file.parts
        for number, line in prose(file)
        for found in _HABIT.finditer(line)
    ]


def hint_of(phrase: str) -> str:
    return next(hint for habit, hint in HABITS.items() if re.match(rf"(?:{habit})", phrase))


@pytest.mark.parametrize("name", WELL_KEPT)
def test_what_users_read_has_none_of_the_old_phrases(name: str) -> None:
    assert habits_in(name) == []


@pytest.mark.slow
def test_source_has_few_of_the_old_phrases() -> None:
    found = habits_in("src/holdfast")
    assert len(found) <= TOLERATED, "\n".join(found)


def test_old_phrases_are_found_in_every_kind_of_prose(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('"""It goes on."""\n# nobody\nvigil = "is told"\n')
    assert [number for number, line in prose(program) if _HABIT.search(line)] == [1, 2, 3]
