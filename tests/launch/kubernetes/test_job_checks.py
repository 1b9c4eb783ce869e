"""What is refused before anything is rendered, and what is said of the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.kubernetes.golden_cases import CASES, Case, render_context

from holdfast.findings import Finding, Severity
from holdfast.job.spec import CheckLevel, OnFallback
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.kubernetes_target import with_default_checks
from holdfast.launch.kubernetes.manifests.run_manifests import render
from holdfast.launch.kubernetes.manifests.volume_mounts import visible_dirs
from holdfast.launch.kubernetes.object_names import VOLUME_ROOT
from holdfast.launch.kubernetes.preflight.job_checks import check_job_on_cluster

PRODUCTION = {"template": "production", "fabric_verified": "2026-11-20, nccl-tests over both rails"}


def found(job: Mapping[str, Any] | None = None, place: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    return {
        finding.code: finding
        for finding in check_job_on_cluster(render_context(Case(job=job or {}, target=place or {})))
    }


@pytest.mark.parametrize("name", CASES)
def test_every_golden_case_may_be_rendered(name: str) -> None:
    findings = check_job_on_cluster(render_context(CASES[name]))
    assert [finding for finding in findings if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize(
    ("job", "place", "code", "where"),
    [
        ({"image": None}, {}, "no-image", "image"),
        ({"checkpoint": "/home/me/checkpoints"}, {}, "path-not-shared", "checkpoint.path"),
        ({"checkpoint": "~/checkpoints"}, {}, "path-not-shared", "checkpoint.path"),
        ({"resources": {"cpu": 0.0001}}, {}, "impossible-quantity", "resources.cpu"),
        ({"resources": {"memory": "1GiB", "shm": "2GiB"}}, {}, "impossible-quantity", "resources.shm"),
        ({"queue": "Our queue"}, {}, "bad-name", "queue"),
        ({"queue": "q" * 64}, {}, "bad-name", "queue"),
        ({"placement": "rack"}, {}, "placement-level-unknown", "placement.level"),
        ({"placement": "example.com/rack"}, {"queue": None}, "placement-needs-queue", "placement"),
        (
            {"placement": {"level": "a.com/block", "slices": {"level": "a.com/rack", "nodes": 1}}},
            {"queue": None, "pod_group": "volcano"},
            "not-supported",
            "placement.slices",
        ),
        (
            {"placement": {"level": "a.com/block", "slices": {"level": "rack", "nodes": 1}}},
            {"topology_levels": {"block": "a.com/block"}},
            "placement-level-unknown",
            "placement.slices.level",
        ),
        (
            {"placement": {"level": "a.com/block", "slices": {"level": "a.com/rack", "nodes": 1}}},
            {},
            "not-supported",
            "placement.slices",
        ),
        ({"fabric": "infiniband"}, {}, "fabric-device-unnamed", "target.fabric_device"),
        ({"fabric": "roce"}, {}, "fabric-device-unnamed", "target.fabric_device"),
        ({"fabric": "efa"}, {}, "fabric-device-unnamed", "target.fabric_device"),
        ({"fabric": "efa", "resources": {}}, {}, "impossible-quantity", "resources.memory"),
        ({"fabric": "sriov"}, {}, "fabric-device-unnamed", "target.fabric_device"),
        (
            {"fabric": "sriov"},
            {"fabric_device": {"network": "rail", "rails": [{"resource": "nvidia.com/vf"}, {}]}},
            "fabric-device-unnamed",
            "target.fabric_device",
        ),
        (
            {"fabric": "gke-rdma"},
            {"fabric_device": {"rails": [{"network": "rdma-0"}]}},
            "fabric-device-unnamed",
            "target.fabric_device.rails",
        ),
        ({"fabric": "dra"}, {"fabric_device": {"per_node": 8}}, "fabric-device-unnamed", "target.fabric_device"),
        (
            {"fabric": "dra"},
            {"fabric_device": {"device_class": "rdma"}},
            "fabric-device-unnamed",
            "target.fabric_device",
        ),
        ({"fabric": "gke-tcpxo", "gpus_per_node": 4}, {}, "fabric-needs-whole-machine", "gpus_per_node"),
        ({"launch": "per-node"}, {"workload": "leaderworkerset", "agent": False}, "needs-agent", "launch"),
        ({}, {"workload": "mpijob", "agent": False}, "needs-agent", "launch"),
        ({}, {"agent": False}, "needs-agent", "launch"),
        ({"recovery": {"replicas": 2}}, {"agent": False}, "needs-agent", "recovery.replicas"),
        ({"checks": "quick", "launch": "per-node"}, {"agent": False}, "needs-agent", "checks"),
        (
            {"launch": "accelerate", "command": "accelerate launch train.py"},
            {"agent": False},
            "needs-agent",
            "launch",
        ),
    ],
)
def test_what_a_cluster_can_make_nothing_of_is_refused(
    job: Mapping[str, Any], place: Mapping[str, Any], code: str, where: str
) -> None:
    finding = found(job, place)[code]
    assert (finding.severity, finding.where) == (Severity.ERROR, where)
    assert finding.remedy


@pytest.mark.parametrize("path", ["checkpoints", "s3://bucket/run", "/holdfast/team/run"])
def test_a_path_that_all_nodes_reach_is_taken(path: str) -> None:
    assert "path-not-shared" not in found({"checkpoint": path})


CLAIM = {"claim": "shared", "folders": ["data"]}


@pytest.mark.parametrize("path", ["runs/other/checkpoints", "/holdfast/data/out", "data"])
def test_a_folder_of_the_volume_that_ranks_may_see_is_taken(path: str) -> None:
    assert not {"folder-refused", "folder-not-mounted"} & set(found({"checkpoint": path}, {"volume": CLAIM}))
    command = ["python", "train.py", f"--data=/holdfast/data/c4:{VOLUME_ROOT}/{path.removeprefix(VOLUME_ROOT)}"]
    assert "folder-not-mounted" not in found({"command": command, "checkpoint": path}, {"volume": CLAIM})


@pytest.mark.parametrize("path", [".", "/holdfast", "runs", "runs/other", "runs/other/logs", "../etc", "a/../runs/x"])
def test_a_folder_that_holds_what_is_anothers_is_refused(path: str) -> None:
    assert found({"checkpoint": {"path": path}})["folder-refused"].where == "checkpoint.path"
    place = {"volume": {"claim": "shared", "folders": ["data", path]}}
    assert found({}, place)["folder-refused"].where == "target.volume.folders"
    asked = render_context(Case(job={"checkpoint": {"path": path}}, target=place))
    own = f"runs/{asked.names.name}"
    assert visible_dirs(asked) == ("data", f"{own}/logs")


def test_what_the_job_names_on_the_volume_and_ranks_would_not_see_is_refused() -> None:
    finding = found({"command": ["python", "train.py", "--out=/holdfast/elsewhere/run"]})["folder-not-mounted"]
    assert "/holdfast/elsewhere/run" in finding.what
    assert "folders: [elsewhere]" in finding.remedy
    assert found({"env": {"DATA": "/holdfast/c4"}})["folder-not-mounted"].where == "env.DATA"
    assert "folder-not-mounted" not in found({"env": {"DATA": "/holdfast/c4"}}, {"volume": None})


@pytest.mark.parametrize(
    "script",
    [
        "(cd /holdfast/data)",
        "cat /holdfast/data|wc",
        "ls `echo /holdfast/data`; ls >/holdfast/data/x& echo See /holdfast/data.",
        "cat ${R}/holdfast/x $R/holdfast/x /mnt/holdfast /holdfast-of-others /holdfast.tar",
    ],
)
def test_what_a_shell_does_with_a_folder_that_ranks_see_is_taken(script: str) -> None:
    assert "folder-not-mounted" not in found({"command": ["sh", "-c", script]}, {"volume": CLAIM})


def test_the_volume_itself_holds_little_that_ranks_see() -> None:
    finding = found({"env": {"ROOT": "/holdfast"}}, {"volume": CLAIM})["folder-not-mounted"]
    assert finding.severity is Severity.WARNING, "it may be the beginning of a path to what they see"
    assert found({"workdir": "/holdfast"}, {"volume": CLAIM})["folder-refused"].where == "workdir"
    assert "folder-refused" not in found({"workdir": "/holdfast/code"}, {"volume": CLAIM})


@pytest.mark.parametrize(
    ("job", "place", "code"),
    [
        ({"nodes": "2..4"}, {}, "gang-size-fixed"),
        ({}, {"workload": "leaderworkerset", "ttl_s": 3600}, "not-supported"),
        ({"fabric": "rdma-shared"}, {}, "memory-lock"),
        ({"fabric": "oke-roce"}, {}, "host-network"),
    ],
)
def test_what_will_be_otherwise_is_warned_of(job: Mapping[str, Any], place: Mapping[str, Any], code: str) -> None:
    assert found(job, place)[code].severity is Severity.WARNING


def test_mpijob_says_what_its_image_must_have_and_a_jobset_asks_for_nothing() -> None:
    finding = found(CASES["mpijob-tcp"].job, CASES["mpijob-tcp"].target)["image-needs-ssh"]
    assert finding.severity is Severity.INFO
    assert "/usr/sbin/sshd" in finding.remedy
    assert "image-needs-ssh" not in found(CASES["jobset-tcp-mpi"].job, CASES["jobset-tcp-mpi"].target)


@pytest.mark.parametrize(
    ("resource", "job", "words"),
    [
        ("nvidia.com/mig-1g.10gb", {}, "no P2P"),
        ("nvidia.com/gpu.shared", {"nodes": 2, "gpus_per_node": 1}, "Duplicate GPU"),
        ("nvidia.com/gpu.shared", {"nodes": 1, "gpus_per_node": 1}, ""),
        ("nvidia.com/gpu.shared", {"gpus_per_node": 0}, ""),
        ("amd.com/gpu", {}, ""),
    ],
)
def test_part_of_a_gpu_is_warned_of_when_there_are_several_ranks(
    resource: str, job: Mapping[str, Any], words: str
) -> None:
    finding = found(job, {"gpu_resource": resource}).get("gpu-shared")
    assert (finding is not None) == bool(words)
    if finding:
        assert (finding.severity, finding.where) == (Severity.WARNING, "target.gpu_resource")
        assert words in finding.what


def test_root_may_lock_memory() -> None:
    assert "memory-lock" not in found({"fabric": "rdma-shared"}, {"user": 0})


def test_production_that_has_it_all_is_rendered() -> None:
    assert found({}, PRODUCTION) == {}


@pytest.mark.parametrize(
    ("job", "place", "level"),
    [
        ({}, PRODUCTION, CheckLevel.QUICK),
        ({}, {}, CheckLevel.OFF),
        ({"checks": "off"}, PRODUCTION, CheckLevel.OFF),
        ({}, PRODUCTION | {"agent": False}, CheckLevel.OFF),
    ],
)
def test_nodes_are_checked_in_production_unless_the_job_says_otherwise(
    job: Mapping[str, Any], place: Mapping[str, Any], level: CheckLevel
) -> None:
    case = render_context(Case(job=job, target=place))
    assert with_default_checks(case.job, case.target).checks.before_start is level


@pytest.mark.parametrize(
    ("job", "place", "action"),
    [
        ({}, PRODUCTION, OnFallback.STOP),
        ({}, {}, OnFallback.WARN),
        ({"fabric": {"name": "infiniband", "on_fallback": "warn"}}, PRODUCTION, OnFallback.WARN),
        ({"fabric": "infiniband"}, PRODUCTION, OnFallback.STOP),
    ],
)
def test_other_fabric_ends_a_run_in_production_unless_the_job_says_otherwise(
    job: Mapping[str, Any], place: Mapping[str, Any], action: OnFallback
) -> None:
    case = render_context(Case(job=job, target=place))
    accepted = with_default_checks(case.job, case.target)
    assert (accepted.fabric.on_fallback, accepted.fabric.name) == (action, case.job.fabric.name)


@pytest.mark.parametrize(
    ("job", "place", "code"),
    [
        ({}, {"fabric_verified": None}, "fabric-not-verified"),
        ({}, {"volume": None}, "checkpoint-not-shared"),
        ({}, {"queue": None}, "no-gang-scheduling"),
        ({"recovery": {}}, {}, "no-restart-budget"),
    ],
)
def test_production_that_lacks_one_thing_is_refused_and_a_demo_is_told(
    job: Mapping[str, Any], place: Mapping[str, Any], code: str
) -> None:
    refused = found(job, {**PRODUCTION, **place})
    assert set(refused) == {code}
    assert refused[code].severity is Severity.ERROR
    told = found(job, {**PRODUCTION, **place, "template": "demo"})
    assert set(told) - {"checkpoint-not-shared"} == {"demo-template"}
    if code in told:  # whoever tries it learns before the run what a lost pod costs
        assert told[code].severity is Severity.WARNING
        assert "begins again at step 0" in told[code].what
        assert told[code].where == "target.volume"
    assert told["demo-template"].severity is Severity.INFO
    assert told["demo-template"].evidence == (refused[code].what,)


def test_pod_group_is_a_gang_for_production_and_only_of_a_jobset() -> None:
    assert found({}, {**PRODUCTION, "queue": None, "pod_group": True}) == {}
    refused = found({}, {**PRODUCTION, "pod_group": True, "workload": "trainjob"})["not-supported"]
    assert refused.where == "target.pod_group"
    assert "TrainJob" in refused.what or "trainjob" in refused.what


@pytest.mark.parametrize("scheduler", [None, "kubernetes", "volcano"])
def test_queue_of_volcano_is_refused_where_volcano_does_not_schedule(scheduler: str | None) -> None:
    refused = found({}, {**PRODUCTION, "pod_group": scheduler, "volcano_queue": "team"})
    assert set(refused) == (set() if scheduler == "volcano" else {"not-supported"})


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({}, ()),
        ({"workload": "trainjob"}, ("a trainjob",)),
        ({"agent": False}, ("a run without agents",)),
        ({"pod_group": True}, ("a PodGroup",)),
        ({"controller": {"gateway": {"name": "runs", "host": "runs.example"}}}, ("a controller behind a Gateway",)),
        ({"volume": {"claim": "home", "size": "1GiB"}}, ("a claim that a run creates",)),
    ],
)
def test_run_that_multikueue_cannot_send_elsewhere_is_refused(target: dict[str, Any], words: tuple[str, ...]) -> None:
    asked = Case(target={**PRODUCTION, "multikueue": {"west": "west"}, **target})
    refused = check_job_on_cluster(render_context(asked))
    errors = [each for each in refused if each.where == "target.multikueue"]
    assert [each.what for each in errors] == [f"{word} cannot be sent to a worker cluster" for word in words]


def test_multikueue_sends_only_runs_of_a_queue() -> None:
    refused = found({}, {**PRODUCTION, "queue": None, "multikueue": {"west": "west"}})
    assert "multikueue-needs-queue" in refused


def test_one_node_needs_neither_gang_nor_fabric() -> None:
    assert found({"nodes": 1}, {**PRODUCTION, "queue": None, "fabric_verified": None}) == {}


def test_target_shown_in_the_page_is_one_for_production() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    target = yaml.safe_load(_shown(page)[0])
    assert target["template"] == "production"
    assert set(found({"fabric": target["fabric"]}, target)) == {"memory-lock"}


def _shown(page: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize("volume", [{"claim": "home"}, None])
def test_role_shown_in_the_page_allows_what_any_controller_needs(
    workload: str, volume: Mapping[str, str] | None
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
    account, role, binding = yaml.safe_load_all(next(each for each in _shown(page) if "kind: ServiceAccount" in each))
    assert (account["kind"], binding["roleRef"]["name"]) == ("ServiceAccount", role["metadata"]["name"])
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    objects = render(render_context(Case(target={"workload": workload, "volume": volume}))).objects
    (needed,) = (each for each in objects if each["kind"] == "Role")
    for rule in needed["rules"]:
        for group, resource, verb in product(rule["apiGroups"], rule["resources"], rule["verbs"]):
            assert (group, resource, verb) in allowed
    ready = render(
        render_context(Case(target={"workload": workload, "volume": volume, "service_account": "runs"}))
    ).objects
    assert not {"ServiceAccount", "Role", "RoleBinding"} & {each["kind"] for each in ready}
    (controller,) = (each for each in ready if each["kind"] == "ReplicaSet")
    assert controller["spec"]["template"]["spec"]["serviceAccountName"] == "runs"
