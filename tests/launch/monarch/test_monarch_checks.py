"""Where Monarch places agents; elsewhere a run is refused before anything starts, and it says what to do."""

from __future__ import annotations

from importlib import metadata

import pytest

from holdfast.findings import Finding
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.monarch import monarch_checks
from holdfast.launch.monarch.monarch_checks import check_monarch_on_host, check_orchestrator

MONARCH = Job.model_validate({"command": "true", "orchestrator": "monarch"})


def found(job: Job, **target: object) -> list[Finding]:
    return list(check_orchestrator(job, TargetSpec.model_validate(target)))


def test_job_without_monarch_has_no_findings_anywhere() -> None:
    assert found(Job.model_validate({"command": "true"}), kind="slurm") == []


@pytest.mark.parametrize(
    "target",
    [{"isolation": "process"}, {"isolation": "netns"}, {"kind": "hosts", "hosts": ["a"]}, {"kind": "slurm"}],
)
def test_target_warns_that_monarch_does_not_authenticate_within_a_machine(target: dict[str, object]) -> None:
    assert [each.code for each in found(MONARCH, **target)] == ["orchestrator-not-authenticated"]


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ({"kind": "kubernetes"}, "`kind: kubernetes`"),
        ({"kind": "hosts", "hosts": ["a"], "ssh": {"shared_connection": True}}, "a shared connection"),
    ],
)
def test_target_that_monarch_does_not_reach_is_refused(target: dict[str, object], what: str) -> None:
    (refused,) = found(MONARCH, **target)
    assert (refused.code, refused.where) == ("not-supported", "orchestrator")
    assert what in refused.what


@pytest.mark.parametrize(("version", "codes"), [("", ["missing-extra"]), ("0.8.1", ["missing-extra"]), ("0.7.2", [])])
def test_host_needs_the_supported_version(version: str, codes: list[str]) -> None:
    assert [each.code for each in check_monarch_on_host(MONARCH, "alpha", version)] == codes
    assert list(check_monarch_on_host(Job.model_validate({"command": "true"}), "alpha", version)) == []


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
