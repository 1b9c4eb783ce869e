"""What the pages show can be copied: Python imports what it uses, loops train, and the CLI accepts the commands."""

from __future__ import annotations

import ast
import builtins
import difflib
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from holdfast.cli.app import app

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
READERS = {"model", "optimizer", "scheduler", "loss_of", "document"}
"""What a page leaves to its reader."""
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(page.read_text())]


SHELL = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = sorted(
    {
        line.removeprefix("$ ").strip()
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for block in SHELL.findall(page.read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if line.removeprefix("$ ").startswith("holdfast ")
    }
)


def snippets(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


def bound(tree: ast.AST) -> set[str]:
    """Names that are given something, at whatever depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippet_uses_nothing_that_its_page_does_not_have(page: Path):
    known = READERS | set(dir(builtins))
    for snippet in snippets(page):
        tree = ast.parse(snippet)
        known |= bound(tree)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert used <= known, f"{page.name} uses {sorted(used - known)} in:\n{snippet}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), page.name, "exec"), {})


@pytest.mark.parametrize("page", ["data-loading.md", "elastic.md", "fault-tolerance.md", "integration.md"])
def test_loop_of_a_page_trains(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loop = next(each for each in snippets(ROOT / "docs" / page) if "session.steps" in each).replace("1000", "3")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("it was the best of times, it was the worst of times\n" * 3000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss_of": lambda model, _: model(torch.ones(2)).square().sum(),
    }
    exec(compile(loop, page, "exec"), given)
    assert given["session"].step == 3


@pytest.mark.parametrize("name", ["loop", "transformers", "lightning"])
def test_diff_of_a_page_is_that_of_its_two_files(name: str):
    before, after = (f"examples/{name}/{file}.py" for file in ("without_holdfast", "train"))
    lines = difflib.unified_diff(
        *((ROOT / file).read_text().splitlines() for file in (before, after)), before, after, lineterm=""
    )
    assert "\n```diff\n" + "\n".join(lines) + "\n```\n" in (ROOT / "docs" / "integration.md").read_text()


def test_job_of_a_page_is_that_of_its_file():
    job = (ROOT / "examples" / "torchtitan" / "job.yaml").read_text()
    assert f"\n```yaml\n{job}```\n" in (ROOT / "docs" / "integration.md").read_text()


@functools.cache
def whole_command_line() -> Any:
    """All commands, which take 30 ms to build."""
    return get_command(app)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_of_a_page_is_one_that_the_cli_accepts(line: str):
    words = shlex.split(re.split(" [|>] ", line)[0], comments=True)[1:]
    program = whole_command_line()
    name, command, rest = program.resolve_command(
        program.make_context("holdfast", ["--help"], resilient_parsing=True), words
    )
    command.make_context(name, rest)


def test_page_that_the_source_names_exists():
    sources = [path.read_text() for folder in ("src", "bench", "lab") for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\b(?:docs|bench/results)/[\w/.-]+\.md\b", text)}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/results/HISTORY.md"])
def test_links_of_a_page_that_sphinx_does_not_build_resolve(name: str):
    page = ROOT / name
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert linked or name == "CONTRIBUTING.md"
    assert [link for link in linked if not (page.parent / link).exists()] == []
