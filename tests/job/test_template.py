"""The file that `holdfast init` writes is true to the models."""

from __future__ import annotations

import re

import pytest

from holdfast.fabric.catalog import NAMES
from holdfast.job.document import examine
from holdfast.job.template import starter


@pytest.mark.parametrize(
    ("folder", "name"),
    [("demo", "demo"), ("My Experiment_2", "my-experiment-2"), ("2026", "job"), ("../", "job"), ("é" * 80, "job")],
)
def test_starter_valid_and_named_after_its_folder(folder: str, name: str) -> None:
    examined = examine(starter(folder), "job.yaml", (), NAMES)
    assert examined.findings == ()
    assert examined.job is not None
    assert examined.job.name == name


def test_starter_comments_opened_valid_too() -> None:
    opened = re.sub(r"^( *)# (?=( *)\w+:( |$))", r"\1", starter(), flags=re.MULTILINE)
    assert opened.count("#") < starter().count("#")
    examined = examine(opened, "job.yaml", (), NAMES)
    assert examined.findings == ()
    assert examined.job is not None
    assert examined.job.secrets["HF_TOKEN"].env == "HF_TOKEN"
    assert examined.job.recovery.step_deadline_s == 600
