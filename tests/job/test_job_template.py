"""The file that `holdfast init` writes is true to the models."""

from __future__ import annotations

import re

import pytest

from holdfast.fabric.catalog import NAMES
from holdfast.job.job_template import job_template
from holdfast.job.loader import validate_text


@pytest.mark.parametrize(
    ("folder", "name"),
    [("demo", "demo"), ("My Experiment_2", "my-experiment-2"), ("2026", "job"), ("../", "job"), ("é" * 80, "job")],
)
def test_starter_valid_and_named_after_its_folder(folder: str, name: str) -> None:
    examined = validate_text(job_template(folder), "job.yaml", (), NAMES)
    assert examined.findings == ()
    assert examined.job is not None
    assert examined.job.name == name


@pytest.mark.parametrize(
    "image", ["registry.example:5000/team/train:1.2@sha256:0ab", "1.10", "true", "tag:", "é 😀: #x"]
)
def test_starter_has_the_image_as_given(image: str) -> None:
    examined = validate_text(job_template(image=image), "job.yaml", (), NAMES)
    assert examined.findings == ()
    assert examined.job is not None
    assert examined.job.image == image


def test_starter_comments_opened_valid_too() -> None:
    opened = re.sub(r"^( *)# (?=( *)\w+:( |$))", r"\1", job_template(), flags=re.MULTILINE)
    assert opened.count("#") < job_template().count("#")
    examined = validate_text(opened, "job.yaml", (), NAMES)
    assert examined.findings == ()
    assert examined.job is not None
    assert examined.job.secrets["HF_TOKEN"].env == "HF_TOKEN"
    assert examined.job.recovery.step_timeout_s == 600
