"""Jobs from data, text and files, without their warnings."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.job.loader import read_text, validate_data, validate_text
from holdfast.job.spec import Job


def read_job(path: str | os.PathLike[str], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    return parse_job(read_text(path), os.fspath(path), overrides, fabrics)


def parse_job(text: str, source_name: str, overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    return validate_text(text, source_name, overrides, fabrics).loaded_or_raise().job


def make_job(data: Mapping[str, Any], overrides: Iterable[str] = (), fabrics: Collection[str] = ()) -> Job:
    return validate_data(data, overrides, fabrics).loaded_or_raise().job
