"""Monarch places agents on a local target; every other target refuses before anything starts, and says what to do."""

from __future__ import annotations

from importlib import metadata

import pytest

from holdfast.findings import Finding
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.monarch import monarch_checks
from holdfast.launch.monarch.monarch_checks import check_orchestrator

MONARCH = Job.model_validate({"command": "true", "orchestrator": "monarch"})


def found(job: Job, **target: object) -> list[Finding]:
    return list(check_orchestrator(job, TargetSpec.model_validate(target)))


def test_job_without_monarch_has_no_findings_anywhere() -> None:
    assert found(Job.model_validate({"command": "true"}), kind="slurm") == []


@pytest.mark.parametrize("isolation", ["process", "netns"])
def test_local_target_warns_that_monarch_does_not_authenticate(isolation: str) -> None:
    assert [each.code for each in found(MONARCH, isolation=isolation)] == ["orchestrator-not-authenticated"]


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ({"kind": "slurm"}, "`kind: slurm`"),
        ({"kind": "hosts", "hosts": ["a"]}, "`kind: hosts`"),
        ({"kind": "kubernetes"}, "`kind: kubernetes`"),
    ],
)
def test_target_that_monarch_does_not_reach_is_refused(target: dict[str, object], what: str) -> None:
    (refused,) = found(MONARCH, **target)
    assert (refused.code, refused.where) == ("not-supported", "orchestrator")
    assert what in refused.what


def test_untested_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monarch_checks, "version", lambda _: "0.70.1")
    (refused,) = found(MONARCH)
    assert refused.code == "not-supported"
    assert "torchmonarch 0.70.1" in refused.what


def test_version_that_cannot_be_read_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(monarch_checks, "version", missing)
    assert [each.code for each in found(MONARCH)] == ["orchestrator-not-authenticated"]
