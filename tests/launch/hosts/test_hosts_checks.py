"""What hosts say, and what follows for a job; tests/runs/test_host_runs.py asks real ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast import api
from holdfast.findings import Severity
from holdfast.job.spec import Job
from holdfast.job.targets import TargetSpec
from holdfast.launch.hosts.host_survey import HostFacts, HostSurvey
from holdfast.launch.hosts.hosts_checks import check_job, check_survey
from holdfast.launch.hosts.ssh_command import explain_ssh, ssh_argv


def job(*overrides: str) -> Job:
    return api.load_job(None, command=("python", "train.py"), overrides=overrides)


def target(**fields: object) -> TargetSpec:
    return TargetSpec.model_validate({"kind": "hosts", "hosts": ("alpha", "beta"), **fields})


def facts(host: str, **fields: object) -> HostFacts:
    known = {"hostname": host, "address": f"10.0.0.{len(host)}", "port": 1, "gpus": 8, "cpus": 4, "holder": ""}
    return HostFacts(
        host=host, **{**known, "memory_bytes": 1 << 30, "programs": ("python",), "monarch": "0.7.0", **fields}
    )  # pyright: ignore[reportArgumentType]


def codes(wanted: Job, spec: TargetSpec, home: Path) -> dict[str, Severity]:
    found = check_job(wanted, spec, target="lab", base=home, environ={}, now=time.time())
    return {finding.code: finding.severity for finding in found}


@pytest.mark.parametrize(
    ("overrides", "fields", "code"),
    [
        (("nodes=3",), {}, "too-few-nodes"),
        ((), {"hosts": ("alpha", "alpha")}, "host-named-twice"),
    ],
)
def test_job_that_the_hosts_cannot_run_is_refused(
    overrides: tuple[str, ...], fields: dict[str, object], code: str, home: Path
) -> None:
    assert codes(job(*overrides), target(**fields), home)[code] is Severity.ERROR


def test_checkpoints_without_a_shared_place_are_warned_of_only_with_several_nodes(home: Path) -> None:
    assert codes(job("nodes=2"), target(), home) == {"checkpoint-not-shared": Severity.WARNING}
    for wanted, spec in (
        (job("nodes=1"), target()),
        (job("nodes=2", "checkpoint.path=s3://bucket/run"), target()),
        (job("nodes=2"), target(checkpoint_root="/shared")),
    ):
        assert codes(wanted, spec, home) == {}


@pytest.mark.parametrize(
    ("host", "overrides", "code"),
    [
        (facts("alpha", gpus=4), ("gpus_per_node=8",), "too-few-gpus"),
        (facts("alpha"), ("resources.memory=2GiB",), "too-little-memory"),
        (facts("alpha", programs=()), (), "missing-program"),
        (facts("alpha", holder="it is in use by x of y"), (), "host-in-use"),
        (facts("alpha"), (), ""),
    ],
)
def test_host_that_lacks_something_is_named(host: HostFacts, overrides: tuple[str, ...], code: str) -> None:
    found = check_survey(job(*overrides), HostSurvey(facts=(host,), unusable=(), unreachable=()))
    assert [finding.code for finding in found] == ([code] if code else [])


def test_hosts_without_a_connection_and_two_names_of_one_host_are_errors() -> None:
    found = HostSurvey(
        facts=(facts("alpha"), facts("again", hostname="alpha", address="10.0.0.5")),
        unusable=(),
        unreachable=(("alpha", "beta", "timed out"),),
    )
    assert [finding.code for finding in check_survey(job(), found)] == [
        "hosts-not-connected",
        "host-named-twice",
    ]


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "", "host;reboot", "$(id)"])
def test_name_of_a_host_cannot_be_an_option_or_a_command(host: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        target(hosts=(host,))


@pytest.mark.parametrize("kind", ["ssh", "slurm"])
def test_folder_on_other_machines_is_an_absolute_path(kind: str) -> None:
    with pytest.raises(ValueError, match="folder"):
        target(**{kind: {"folder": "relative"}})


def test_ssh_asks_nobody_and_checks_host_keys_as_the_user_configured(tmp_path: Path) -> None:
    words = ssh_argv("alpha", target().ssh, tmp_path, forward=(20001, 40000))
    assert "BatchMode=yes" in words
    assert not [word for word in words if word.startswith("StrictHostKeyChecking")]
    assert words[words.index("-R") + 1] == "127.0.0.1:20001:127.0.0.1:40000"
    assert words[-3:-1] == ["--", "alpha"]


def test_unknown_failure_of_ssh_is_shown_as_it_is() -> None:
    assert explain_ssh("alpha", "Warning: hm\nkex_exchange_identification: closed\n\n")[0].startswith("kex_exchange")
