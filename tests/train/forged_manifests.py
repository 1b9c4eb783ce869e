"""Forged manifests: internally valid, with other content."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from holdfast.train.checkpoint.digested_json import with_digest


def rewrite(file: Path, changes: dict[str, Any], *, without: Collection[str] = ()) -> None:
    """Change or drop fields of a manifest, and update its digest."""
    fields = {name: value for name, value in json.loads(file.read_bytes()).items() if name != "digest"}
    kept = {name: value for name, value in (fields | changes).items() if name not in without}
    file.write_bytes(with_digest(json.dumps(kept).encode()))


def as_format_1(file: Path) -> None:
    """Rewrite a manifest as earlier versions wrote it, without a digest."""
    fields = {name: value for name, value in json.loads(file.read_bytes()).items() if name != "digest"}
    file.write_bytes(json.dumps(fields | {"format": 1}).encode())
