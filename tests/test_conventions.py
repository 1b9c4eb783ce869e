"""The rules of the house that no linter knows: every name is in the import contract, and light stays light."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.job.loading import parse_job

import holdfast

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "train"
TRAIN_MAY_IMPORT = {
    "clock",
    "host",
    "errors",
    "events",
    "findings",
    "metrics",
    "failure_rates",
    "os_errors",
    "protocol",
}
HEAVY = ("torch", "torchft", "transformers", "numpy", "kr8s")

NAMES = {module.name for module in pkgutil.iter_modules(holdfast.__path__)} - {"__main__"}


def contract(name_starts: str) -> dict[str, Any]:
    """The one import contract whose name begins so."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = (one for one in settings["contracts"] if one["name"].startswith(name_starts))
    return found


def tops(modules: list[str]) -> set[str]:
    return {module.removeprefix("holdfast.") for module in modules}


def test_layers_hold_every_top_level_name() -> None:
    layers = " ".join(contract("Imports point down only")["layers"])
    listed = {word.strip("()") for word in layers.split() if word not in {":", "|"}}
    assert NAMES - listed == {TRAIN}, "give the new name its floor in pyproject.toml, on purpose"


def test_floors_that_contributors_read_are_those_of_the_contract() -> None:
    (drawn,) = re.findall(r"```text\n(cli/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    shown = [re.findall(r"\w+(?=/|\.py)", line) for line in drawn.splitlines()]
    floors = [set(re.findall(r"\w+", layer)) for layer in contract("Imports point down only")["layers"]]
    assert [set(floor) for floor in shown if floor] == [*floors, {TRAIN}]


def test_train_is_forbidden_to_every_other_name() -> None:
    assert tops(contract("Nothing imports train")["source_modules"]) == NAMES - {TRAIN}


def test_train_is_kept_from_everything_it_may_not_import() -> None:
    assert tops(contract("train imports clock")["forbidden_modules"]) == NAMES - {TRAIN} - TRAIN_MAY_IMPORT


def test_heavy_libraries_are_forbidden_to_every_name_but_train() -> None:
    heavy = contract("torch stays in train")
    assert tops(heavy["source_modules"]) == NAMES - {TRAIN}
    assert set(heavy["forbidden_modules"]) == set(HEAVY)


def test_data_is_structs_and_dataclasses_are_left_to_train() -> None:
    package = Path(holdfast.__path__[0])
    sources = {path.relative_to(package): path.read_text() for path in package.rglob("*.py")}
    others = {str(path) for path, text in sources.items() if "dataclasses" in text and path.parts[0] != TRAIN}
    assert others == {"preflight/node_view.py"}, "use msgspec.Struct: docs/decisions/0094"


@pytest.mark.parametrize("name", ["requirements.lock", ".ci/torch-lowest.txt"])
def test_lock_names_no_address(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert "://" not in lock
    assert "--index-url" not in lock
    assert "--find-links" not in lock


@pytest.mark.parametrize("page", ["README.md", "docs/security.md"])
def test_jobs_shown_in_pages_are_valid(page: str) -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert shown
    for text in shown:
        parse_job(text if "command:" in text else f"command: 'true'\n{text}", page)
