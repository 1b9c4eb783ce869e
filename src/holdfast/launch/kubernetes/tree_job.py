"""The job of a run from a tree of manifests, which is rendered before anyone knows when it is applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from holdfast.launch.kubernetes.object_names import CODE_KEY, JOB_KEY

COMPRESSED_CODE_KEY = f"{CODE_KEY}.gz"
"""Key of the run's code in the ConfigMap of a tree."""
MAX_COMPRESSED_CODE_BYTES = 180 << 10
"""Largest code in a tree: `kubectl apply` repeats an object in an annotation, and annotations have at most 256 KiB."""


def dated_job(config_map: Mapping[str, Any]) -> str:
    """The accepted run in its ConfigMap; a run from a tree was created when the ConfigMap was.

    Raises ValueError if it is not a JSON object.
    """
    text: str = config_map.get("data", {}).get(JOB_KEY, "")
    accepted = json.loads(text)
    if not isinstance(accepted, dict):
        raise ValueError(f"{JOB_KEY} holds no JSON object: {text:.100}")
    if not accepted.get("from_tree"):
        return text
    accepted["created_at"] = datetime.fromisoformat(config_map["metadata"]["creationTimestamp"]).timestamp()
    return json.dumps(accepted)
