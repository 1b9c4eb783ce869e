"""The published JSON Schema of job files, generated from spec.py."""

from __future__ import annotations

from typing import Any

from holdfast.job.field_descriptions import describe_fields
from holdfast.job.spec import Job

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, including shorthands."""
    describe_fields()
    return {"$schema": DIALECT, **Job.model_json_schema(mode="validation")}
