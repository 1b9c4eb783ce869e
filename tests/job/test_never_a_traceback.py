"""10,000 nonsensical job files: each is a job, or is refused with a printable message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.job.loading import make_job, parse_job, read_job

from holdfast.errors import HoldfastError
from holdfast.findings import Finding
from holdfast.job.job_template import job_template
from holdfast.job.loader import RESERVED_FIELDS
from holdfast.job.spec import Job

FABRICS = ("auto", "tcp")
VALID = [
    job_template(),
    "command: python train.py --lr 1e-4\nnodes: 2\nfabric: tcp\n",
    "name: a\ncommand: [a, b]\nenv: {A: 1, B: on}\nsecrets: {C: {env: C}, D: {file: d}}\n"
    "resources: {cpu: 1.5, memory: 16GiB, shm: 1000}\ncheckpoint: {path: out, every_s: 3}\nrecovery: {replicas: 1}\n",
]
FIELDS = [
    *Job.model_fields,
    *RESERVED_FIELDS,
    "min",
    "max",
    "env",
    "file",
    "path",
    "max_restarts",
    "memory",
    "comand",
    "",
]
ODD = ["~", "1e999", ".nan", "-0", "9" * 60, "0x" + "f" * 50, "2026-11-20", "1:30", "yes", "<<", "*a", "&a", "!!set"]
ODD += [
    "\t",
    '"\\0"',
    '"\\ud800"',
    '"\\UFFFFFFFF"',
    "'",
    '"',
    "[",
    "]",
    "{",
    "}",
    ": ",
    "\n- ",
    "? ",
    "| ",
    "---\n",
    "%YAML 9",
]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**20, max_value=10**60)
    | st.floats()
    | st.dates()
    | st.binary(max_size=4)
    | st.text(max_size=8)
    | st.sampled_from(["1..2", "16GiB", "per-node", "auto", "a b", "a 'b", "\0", "0.0000001K", "999999999999P"])
)
keys = st.sampled_from(FIELDS) | st.text(max_size=4) | st.integers() | st.none() | st.booleans() | st.dates()
trees = st.recursive(
    scalars, lambda below: st.lists(below, max_size=3) | st.dictionaries(keys, below, max_size=3), max_leaves=8
)
overrides = st.lists(
    st.builds("{}={}".format, st.sampled_from(FIELDS) | st.text(max_size=6), st.sampled_from(ODD) | st.text(max_size=6))
    | st.builds("{}.{}={}".format, st.sampled_from(FIELDS), st.sampled_from(FIELDS), st.sampled_from(ODD))
    | st.text(max_size=8),
    max_size=2,
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A valid file with a few pieces cut out or put in."""
    text = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        text = text[:start] + draw(st.sampled_from([*ODD, *FIELDS, ""]) | st.text(max_size=3)) + text[end:]
    return text


def nonsense(examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def judge(make: Callable[[], Job]) -> None:
    """A job that survives its journey to disk, or findings that do and that speak no jargon."""
    try:
        job = make()
    except HoldfastError as error:
        refused(error.findings)
    else:
        assert Job.model_validate_json(job.model_dump_json()) == job


def refused(findings: tuple[Finding, ...]) -> None:
    assert findings
    msgspec.json.encode(findings)
    for finding in findings:
        assert finding.what
        assert "Input should" not in finding.what
        assert "\n" not in finding.what + finding.where + "".join(finding.evidence)


@pytest.mark.slow
@nonsense(4000)
@given(mutated(), overrides)
def test_valid_file_mutated_job_or_findings(text: str, sets: list[str]) -> None:
    judge(lambda: parse_job(text, "job.yaml", sets, FABRICS))


@pytest.mark.slow
@nonsense(2000)
@given(st.dictionaries(st.sampled_from(FIELDS) | keys, trees, max_size=4), overrides)
def test_random_tree_as_yaml_job_or_findings(tree: dict[Any, Any], sets: list[str]) -> None:
    judge(lambda: parse_job(yaml.dump(tree), "job.yaml", sets, FABRICS))


@pytest.mark.slow
@nonsense(2000)
@given(st.dictionaries(st.sampled_from(FIELDS) | keys, trees, max_size=4), overrides)
def test_random_tree_as_python_data_job_or_findings(tree: dict[Any, Any], sets: list[str]) -> None:
    judge(lambda: make_job({"command": ["a"], **tree}, sets, FABRICS))


@pytest.mark.slow
@nonsense(1000)
@given(st.text(max_size=60) | st.lists(st.sampled_from([*ODD, *FIELDS, "\n", "  ", "a"]), max_size=12).map("".join))
def test_random_text_job_or_findings(text: str) -> None:
    judge(lambda: parse_job(text, "job.yaml"))


@pytest.mark.slow
def test_random_bytes_in_a_file_job_or_findings(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"

    @nonsense(1000)
    @given(st.binary(max_size=60) | st.builds(bytes.__add__, st.sampled_from([t.encode() for t in VALID]), st.binary()))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        judge(lambda: read_job(path))

    check()
