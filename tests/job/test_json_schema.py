"""The published schema matches the models."""

from __future__ import annotations

import json
from typing import Any

from holdfast.job.json_schema import job_schema
from holdfast.job.spec import Job


def alternatives(schema: dict[str, Any], field: str) -> set[str]:
    """The kinds a field may have: JSON types, or the model's name."""
    forms = schema["properties"][field].get("anyOf", [schema["properties"][field]])
    return {form.get("type") or form["$ref"].rpartition("/")[2] for form in forms}


def test_schema_names_every_field_and_no_other() -> None:
    schema = job_schema()
    assert set(schema["properties"]) == set(Job.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["command"]
    assert json.loads(json.dumps(schema)) == schema


def test_schema_describes_every_field() -> None:
    schema = job_schema()
    for model in (schema, *(part for part in schema["$defs"].values() if part["type"] == "object")):
        assert all("description" in field for field in model["properties"].values()), model["title"]


def test_schema_has_the_shorthands() -> None:
    schema = job_schema()
    assert alternatives(schema, "nodes") == {"integer", "string", "Nodes"}
    assert alternatives(schema, "fabric") == {"string", "Fabric"}
    assert alternatives(schema, "checkpoint") == {"string", "Checkpoint"}
    assert alternatives(schema, "command") == {"string", "array"}
