"""The command `schema`: the JSON Schema of job files."""

from __future__ import annotations

import json

from holdfast.cli.output import print_text


def schema() -> None:
    """Print the JSON Schema of a job file."""
    from holdfast.job.json_schema import job_schema

    print_text(json.dumps(job_schema(), indent=2))
