"""The verb `schema`: the job file's JSON Schema."""

from __future__ import annotations

import json

from holdfast.cli.output import say


def schema() -> None:
    """Print the JSON Schema of a job file."""
    from holdfast.job.schema import job_schema

    say(json.dumps(job_schema(), indent=2))
