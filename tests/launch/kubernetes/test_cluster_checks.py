"""Whether a cluster has what a run needs, by clusters that are described."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from tests.launch.kubernetes.fabric_needs import Need, needs
from tests.launch.kubernetes.golden_cases import CASES, FABRIC_CASES, Case, render_context

from holdfast.findings import Finding, Severity
from holdfast.job.quarantine import QuarantineRow
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.client.api_paths import KUEUE
from holdfast.launch.kubernetes.preflight.cluster_checks import check_cluster
from holdfast.launch.kubernetes.preflight.cluster_inventory import NOT_READABLE, ClusterInventory
from holdfast.launch.kubernetes.preflight.fabric_prerequisites import prerequisites
from holdfast.launch.kubernetes.preflight.pull_secrets import registries
from holdfast.launch.kubernetes.preflight.referenced_objects import referenced_objects
from holdfast.launch.kubernetes.preflight.run_permissions import required_permissions
from holdfast.launch.kubernetes.storage_catalog import CATALOG as STORAGE
from holdfast.launch.kubernetes.storage_catalog import StorageDriver, StorageKind
from holdfast.launch.kubernetes.workload_catalog import CATALOG

SERVED = {(kind.group, kind.resource): frozenset({kind.version}) for kind in CATALOG.values()}
SERVED[KUEUE, "localqueues"] = frozenset({"v1beta2"})


def machine(
    name: str, *, taints: list[dict[str, str]] | None = None, gpus: str = "8", **allocatable: str
) -> dict[str, Any]:
    offers = {"cpu": "100", "memory": "2Ti", "nvidia.com/gpu": gpus} | allocatable
    return {
        "metadata": {"name": name, "labels": {"node-group": "h100"}},
        "spec": {"taints": taints or []},
        "status": {"allocatable": offers},
    }


GOOD = ClusterInventory(
    served=SERVED,
    namespace={"metadata": {"name": "ml"}},
    local_queue={"status": {"conditions": [{"type": "Active", "status": "True"}]}},
    claim={"spec": {"accessModes": ["ReadWriteMany"]}},
    nodes=[machine("a"), machine("b"), machine("c", taints=[{"key": "k", "effect": "NoSchedule"}])],
    operators=[{"metadata": {"name": "kueue", "namespace": "kueue-system"}, "status": {"readyReplicas": 1}}],
    suspended_by_kueue=True,
)

POD_GROUP_KIND, HYPERNODE_KIND = ("scheduling.volcano.sh", "podgroups"), ("topology.volcano.sh", "hypernodes")


def found(cluster: ClusterInventory, case: Case | None = None) -> dict[str, Finding]:
    return {finding.code: finding for finding in check_cluster(render_context(case or Case()), cluster)}


@pytest.mark.parametrize("name", [*(f"{workload}-tcp" for workload in Workload), "jobset-tcp-bare"])
def test_cluster_that_has_all_is_good_for_every_kind(name: str) -> None:
    asked = render_context(CASES[name])
    assert check_cluster(asked, replace(GOOD, suspended_by_kueue=bool(asked.queue))) == ()


def test_machines_that_a_run_avoids_are_reported_and_offer_no_room() -> None:
    row = QuarantineRow(machine="b", since=1.0, until=2.0, code="gpu-failed", run="demo-aaaaaa")
    findings = found(replace(GOOD, quarantined=[row]))
    assert findings["machines-quarantined"].what.startswith("1 of 3 machines of ")
    others = replace(GOOD, quarantined=[row, QuarantineRow(machine="a", since=1.0, until=2.0, code="gpu-failed")])
    assert set(found(others)) == {"machines-quarantined", "no-machines"}


@pytest.mark.parametrize(
    ("fabric", "lacking"),
    [(name, need) for name in FABRIC_CASES for need in (None, *needs(name))],
    ids=lambda each: each if isinstance(each, str) else each and (each.resource or each.name),
)
def test_each_thing_that_a_fabric_lacks_is_found_alone(fabric: str, lacking: Need | None) -> None:
    asked = render_context(FABRIC_CASES[fabric])
    amounts = {need.resource: str(need.amount) for need in needs(fabric) if need.resource and need != lacking}
    missing = [
        each for each in prerequisites(asked) if lacking and (each.kind, each.name) == (lacking.kind, lacking.name)
    ]
    cluster = replace(GOOD, nodes=[machine(name, **amounts) for name in "ab"], missing_prerequisites=missing)
    findings = [each for each in check_cluster(asked, cluster) if each.severity is Severity.ERROR]
    assert [each.what for each in findings] == ([lacking.finding] if lacking else [])
    assert all(each.remedy for each in findings)


GFD, GKE = "nvidia.com/gpu", "cloud.google.com/gke-gpu"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({f"{GFD}.sharing-strategy": "time-slicing", f"{GFD}.replicas": "4"}, "a share of a GPU"),
        ({f"{GFD}.sharing-strategy": "mps"}, "a share of a GPU"),
        ({f"{GFD}.product": "NVIDIA-H100-NVL-SHARED"}, "a share of a GPU"),
        ({f"{GKE}-sharing-strategy": "time-sharing"}, "a share of a GPU"),
        ({f"{GFD}.product": "A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/mig.strategy": "single"}, "a part of a GPU"),
        ({f"{GKE}-partition-size": "1g.5gb"}, "a part of a GPU"),
        ({f"{GFD}.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/mig.strategy": "single"}, ""),
        ({f"{GFD}.sharing-strategy": "none", f"{GFD}.replicas": "1"}, ""),
    ],
)
def test_gpus_that_only_labels_show_to_be_shared_are_found(labels: dict[str, str], words: str) -> None:
    shared = machine("a")
    shared["metadata"]["labels"] |= labels
    cluster = replace(GOOD, nodes=[shared, machine("b")])
    finding = found(cluster).get("gpu-shared")
    assert bool(finding) == bool(words)
    if finding:
        assert f"on 1 of 2 machines `nvidia.com/gpu` is {words}" in finding.what
        assert finding.evidence[0] in {f"{key}={value}" for key, value in labels.items()}
        assert finding.severity is Severity.WARNING
    assert found(cluster, Case(job={"nodes": 1, "gpus_per_node": 1})) == {}


def test_pod_monitor_needs_the_prometheus_operator() -> None:
    monitored = CASES["jobset-pod-monitor"]
    finding = found(GOOD, monitored)["operator-missing"]
    assert "podmonitors (monitoring.coreos.com)" in finding.what
    assert "`pod_monitor`" in finding.remedy
    served = SERVED | {("monitoring.coreos.com", "podmonitors"): frozenset({"v1"})}
    assert found(replace(GOOD, served=served), monitored) == {}


GATEWAY: dict[str, Any] = {
    "metadata": {"name": "runs", "namespace": "gateways"},
    "spec": {
        "listeners": [
            {"name": "web", "protocol": "HTTPS", "tls": {"mode": "Terminate"}},
            {
                "name": "runs",
                "protocol": "TLS",
                "hostname": "*.example",
                "tls": {"mode": "Passthrough"},
                "allowedRoutes": {"namespaces": {"from": "All"}, "kinds": [{"kind": "TLSRoute"}]},
            },
        ]
    },
    "status": {"conditions": [{"type": "Accepted", "status": "True"}, {"type": "Programmed", "status": "True"}]},
}
WITH_GATEWAYS = replace(
    GOOD, served=SERVED | {("gateway.networking.k8s.io", "tlsroutes"): frozenset({"v1", "v1alpha3"})}, gateway=GATEWAY
)


def test_gateway_needs_gateway_api_and_the_gateway() -> None:
    asked = CASES["jobset-gateway"]
    assert found(WITH_GATEWAYS, asked) == {}
    missing = found(replace(GOOD, gateway=None), asked)
    assert set(missing) == {"operator-missing"}
    assert "tlsroutes (gateway.networking.k8s.io)" in missing["operator-missing"].what
    assert "Gateway API 1.5" in missing["operator-missing"].remedy
    older = {**SERVED, ("gateway.networking.k8s.io", "tlsroutes"): frozenset({"v1alpha2"})}
    assert set(found(replace(WITH_GATEWAYS, served=older), asked)) == {"operator-version"}
    (absent,) = found(replace(WITH_GATEWAYS, gateway=None), asked).values()
    assert (absent.code, absent.what) == ("referenced-object-missing", "there is no Gateway gateways/runs")
    assert found(replace(WITH_GATEWAYS, gateway=NOT_READABLE), asked) == {}


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        ({"protocol": "TCP"}, "its protocol is TCP"),
        ({"tls": {}}, "its TLS mode is Terminate"),
        ({"hostname": "*.other.example"}, "its hostname is *.other.example"),
        ({"hostname": "runs.example"}, "its hostname is runs.example"),
        ({"allowedRoutes": {}}, "it takes only routes of its namespace, gateways"),
        ({"allowedRoutes": {"namespaces": {"from": "All"}, "kinds": [{"kind": "TCPRoute"}]}}, "kind TCPRoute"),
    ],
)
def test_gateway_whose_listeners_pass_no_run_through_is_named(change: dict[str, Any], evidence: str) -> None:
    web, runs = GATEWAY["spec"]["listeners"]
    spec = {"listeners": [web, {**runs, **change}]}
    findings = found(replace(WITH_GATEWAYS, gateway={**GATEWAY, "spec": spec}), CASES["jobset-gateway"])
    assert set(findings) == {"gateway-no-listener"}
    assert findings["gateway-no-listener"].evidence[0] == "listener web: its protocol is HTTPS"
    assert findings["gateway-no-listener"].evidence[1].startswith("listener runs: ")
    assert findings["gateway-no-listener"].evidence[1].endswith(evidence)


def test_gateway_of_the_namespace_itself_and_without_a_hostname_will_do() -> None:
    _, runs = GATEWAY["spec"]["listeners"]
    named = {"name": "runs", "host": "a.runs.example"}
    listener = {key: value for key, value in runs.items() if key not in ("hostname", "allowedRoutes")}
    own = {**GATEWAY, "metadata": {"name": "runs", "namespace": "ml"}, "spec": {"listeners": [listener]}}
    assert found(replace(WITH_GATEWAYS, gateway=own), Case(target={"controller": {"gateway": named}})) == {}


@pytest.mark.parametrize(
    ("conditions", "evidence"),
    [
        ([], "Programmed: missing"),
        (
            [{"type": "Programmed", "status": "False", "reason": "AddressNotAssigned", "message": "no  address"}],
            "Programmed: False (AddressNotAssigned no address)",
        ),
    ],
)
def test_gateway_that_is_not_programmed_is_named(conditions: list[dict[str, str]], evidence: str) -> None:
    waiting = {**GATEWAY, "status": {"conditions": conditions}}
    findings = found(replace(WITH_GATEWAYS, gateway=waiting), CASES["jobset-gateway"])
    assert set(findings) == {"gateway-not-ready"}
    assert findings["gateway-not-ready"].evidence == (evidence,)


def test_users_of_a_gateway_need_no_port_forward() -> None:
    rights = set(map(str, required_permissions(render_context(CASES["jobset-gateway"]))))
    assert "create tlsroutes.gateway.networking.k8s.io" in rights
    assert not any("portforward" in right for right in rights)


def test_pod_group_needs_an_api_server_that_serves_it() -> None:
    grouped = CASES["jobset-pod-group"]
    missing = replace(GOOD, suspended_by_kueue=None)
    finding = found(missing, grouped)["operator-missing"]
    assert "podgroups (scheduling.k8s.io)" in finding.what
    assert "GenericWorkload" in finding.remedy
    older = SERVED | {("scheduling.k8s.io", "podgroups"): frozenset({"v1alpha2"})}
    assert "v1beta1" in found(replace(missing, served=older), grouped)["operator-version"].what
    served = SERVED | {("scheduling.k8s.io", "podgroups"): frozenset({"v1beta1"})}
    assert found(replace(missing, served=served), grouped) == {}


def test_pod_group_of_volcano_needs_volcano() -> None:
    grouped = CASES["jobset-pod-group-volcano"]
    known = replace(GOOD, suspended_by_kueue=None, priority_classes=GOOD.priority_classes)
    finding = found(known, grouped)["operator-missing"]
    assert "podgroups (scheduling.volcano.sh)" in finding.what
    assert "Install Volcano" in finding.remedy


def test_queue_of_volcano_that_is_missing_is_named() -> None:
    asked = CASES["jobset-pod-group-volcano"]
    (queue,) = referenced_objects(render_context(asked))
    assert (queue.kind, queue.name, queue.where) == ("Queue", "team", "volcano_queue")
    assert queue.path == "/apis/scheduling.volcano.sh/v1beta1/queues/team"
    known = replace(GOOD, suspended_by_kueue=None, missing_references=[queue])
    assert found(known, asked)["referenced-object-missing"].what == "there is no Queue team"


def of_multikueue(**clusters: str) -> dict[str, Any]:
    condition = {"type": "Active", "message": "no connection"}
    return {name: {"status": {"conditions": [{**condition, "status": state}]}} for name, state in clusters.items()}


@pytest.mark.parametrize(
    ("clusters", "codes"),
    [
        (None, {}),
        ({}, {"multikueue-not-configured": Severity.ERROR}),
        (of_multikueue(west="True"), {}),
        (of_multikueue(west="False"), {"multikueue-cluster-inactive": Severity.ERROR}),
        (
            of_multikueue(west="True", east="Unknown"),
            {"multikueue-context-missing": Severity.ERROR, "multikueue-cluster-inactive": Severity.WARNING},
        ),
    ],
)
def test_clusters_of_multikueue_are_compared_with_the_target(
    clusters: dict[str, Any] | None, codes: dict[str, Severity]
) -> None:
    findings = found(replace(GOOD, dispatch_clusters=clusters), CASES["jobset-multikueue"])
    assert {code: each.severity for code, each in findings.items()} == codes
    assert all(each.where == "target.multikueue" for each in findings.values())


def test_queue_that_sends_runs_elsewhere_asks_for_the_contexts() -> None:
    (finding,) = found(replace(GOOD, dispatch_clusters=of_multikueue(west="True"))).values()
    assert (finding.code, "`multikueue: {west: CONTEXT}`" in finding.remedy) == ("multikueue-context-missing", True)


def test_queue_that_is_asked_for_and_not_named_is_told_of() -> None:
    findings = found(GOOD, CASES["jobset-tcp-bare"])
    assert set(findings) == {"queue-required"}
    assert findings["queue-required"].remedy


@pytest.mark.parametrize(
    ("cluster", "code", "words"),
    [
        (replace(GOOD, namespace=None), "namespace-missing", "ml"),
        (replace(GOOD, namespace={"metadata": {"deletionTimestamp": "2026"}}), "namespace-terminating", "deleted"),
        (replace(GOOD, served=SERVED | {("jobset.x-k8s.io", "jobsets"): frozenset()}), "operator-missing", "jobsets"),
        (
            replace(GOOD, served=SERVED | {(KUEUE, "localqueues"): frozenset({"v1beta1"})}),
            "operator-version",
            "v1beta1",
        ),
        (
            replace(GOOD, operators=[{"metadata": {"name": "kueue", "namespace": "kueue-system"}, "status": {}}]),
            "operator-down",
            "kueue-system/kueue does not run",
        ),
        (replace(GOOD, local_queue=None), "queue-missing", "no queue train in namespace ml"),
        (
            replace(
                GOOD, local_queue={"status": {"conditions": [{"type": "Active", "status": "False", "message": "Held"}]}}
            ),
            "queue-closed",
            "train",
        ),
        (replace(GOOD, suspended_by_kueue=False), "kueue-integration-disabled", "jobset.x-k8s.io/jobset"),
        (replace(GOOD, denied=["create jobsets"]), "not-permitted", "ml"),
        (
            replace(GOOD, rejections=['failed calling webhook "mjobset.kb.io": failed to call: connection refused']),
            "webhook-down",
            "mjobset.kb.io",
        ),
        (replace(GOOD, rejections=["something new"]), "manifest-refused", "something new"),
        (replace(GOOD, nodes=[]), "no-machines", "labels"),
        (replace(GOOD, nodes=[machine("a", gpus="0")] * 2), "device-missing", "nvidia.com/gpu"),
        (replace(GOOD, nodes=[machine("a"), machine("b", memory="900Gi")]), "too-few-machines", "1 machines"),
        (replace(GOOD, claim=None), "claim-missing", "checkpoints"),
        (replace(GOOD, claim={"spec": {"accessModes": ["ReadWriteOnce"]}}), "claim-not-shared", "one machine"),
    ],
)
def test_what_is_lacking_is_named_with_its_remedy(cluster: ClusterInventory, code: str, words: str) -> None:
    findings = found(cluster)
    assert set(findings) == {code}
    assert words in findings[code].what
    assert findings[code].remedy


@pytest.mark.parametrize(("quota", "cohort", "fits"), [("15", "", False), ("16", "", True), ("15", "all", True)])
def test_queue_that_is_too_small_for_all_nodes_together_is_named(quota: str, cohort: str, fits: bool) -> None:
    flavors = [{"name": name, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": quota}]} for name in "ab"]
    spec = {"resourceGroups": [{"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}], "cohortName": cohort}
    findings = found(replace(GOOD, cluster_queue={"metadata": {"name": "train"}, "spec": spec}))
    assert set(findings) == (set() if fits else {"quota-too-small"})
    if not fits:
        assert findings["quota-too-small"].evidence == ("ClusterQueue train has at most 15",)


@pytest.mark.parametrize(
    ("hard", "more", "fits"),
    [
        ({"pods": "2"}, {}, False),
        ({"pods": "3", "requests.nvidia.com/gpu": "16", "limits.memory": "2049Gi"}, {}, True),
        ({"limits.memory": "2Ti"}, {}, False),
        ({"requests.nvidia.com/gpu": "15"}, {}, False),
        ({"pods": "2"}, {"scopes": ["BestEffort"]}, True),
    ],
)
def test_namespace_that_may_never_hold_all_nodes_is_named(
    hard: dict[str, str], more: dict[str, Any], fits: bool
) -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard, **more}}
    findings = found(replace(GOOD, resource_quotas=[quota]))
    assert set(findings) == (set() if fits else {"quota-too-small"})
    if not fits:
        ((resource, most),) = hard.items()
        assert resource in findings["quota-too-small"].what
        assert findings["quota-too-small"].evidence == (f"ResourceQuota team allows {most}",)


WHOLE = Case(job={"resources": {"cpu": 100, "memory": "1TiB"}})
"""Its nodes need all cores of a machine."""


@pytest.mark.parametrize(
    ("own", "machines", "words"),
    [
        ({}, "ab", "the controller's pod takes the room of a node: on a it leaves room for 1 of 2 nodes"),
        ({}, "abc", None),
        ({}, "ab+", "the controller's pod may take the room of a node: on a it leaves room for 1 of 2 nodes"),
        ({"node_selector": {"pool": "cpu"}}, "ab+", None),
        ({"node_selector": {"pool": "none"}}, "ab+", "no machine takes the controller's pod"),
        ({"tolerations": [{"key": "gpu"}]}, "AB", "the controller's pod takes the room of a node"),
        ({}, "AB", "no machine takes the controller's pod"),
        ({"cpu": 100}, "abc", None),
        ({"cpu": 101}, "abc", "no machine takes the controller's pod"),
    ],
)
def test_controller_has_a_machine_that_no_node_needs_whole(
    own: dict[str, Any], machines: str, words: str | None
) -> None:
    """Small letters are machines for nodes, capitals the same with a taint, and `+` is one without GPUs."""
    taint = [{"key": "gpu", "effect": "NoSchedule"}]
    nodes = [machine(name, taints=taint if name.isupper() else None) for name in machines.replace("+", "")]
    if "+" in machines:
        nodes.append(machine("small", cpu="2", gpus="0"))
        nodes[-1]["metadata"]["labels"]["pool"] = "cpu"
    place = {"controller": own, "tolerations": [{"key": "gpu"}]}
    findings = check_cluster(render_context(replace(WHOLE, target=place)), replace(GOOD, nodes=nodes))
    assert [words in finding.what for finding in findings if words] == [True] * bool(words)
    assert words or not findings


def test_small_nodes_share_machines_but_not_on_the_host_network() -> None:
    job = {"nodes": 4, "gpus_per_node": 4, "resources": {"cpu": 40}}
    assert found(GOOD, Case(job=job)) == {}
    shared = found(GOOD, Case(job={**job, "fabric": "oke-roce"}))["too-few-machines"]
    assert "2 of its 4 fit" in shared.what


def test_controllers_own_needs_count_in_the_namespaces_quota() -> None:
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {"requests.cpu": "192"}}}
    assert set(found(replace(GOOD, resource_quotas=[quota]))) == {"quota-too-small"}
    alone = Case(job={"launch": "per-node", "command": ["torchrun", "train.py"]}, target={"agent": False})
    assert found(replace(GOOD, resource_quotas=[quota]), alone) == {}


def test_field_of_the_patch_that_the_api_server_does_not_know_is_reported_once() -> None:
    patch = {"spec": {"dnsConfig": {"nameserverss": ["10.0.0.1"]}}}
    pods = (
        '400 Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.dnsConfig.{}"'
    )
    owner = '400 JobSet: strict decoding error: unknown field "spec.replicatedJobs[0].template.spec.dnsConfig.{}"'
    known, other = (
        replace(GOOD, rejections=[owner.format(name)], pod_rejections=[pods.format(name)])
        for name in ("nameserverss", "searchess")
    )
    findings = found(known, Case(target={"pod": {"patch": patch}}))
    assert set(findings) == {"unknown-field"}
    assert findings["unknown-field"].where == "target.pod.patch.spec.dnsConfig.nameserverss"
    assert set(found(other, Case(target={"pod": {"patch": patch}}))) == {"manifest-refused"}


def test_names_that_pods_rely_on_are_looked_for() -> None:
    case = CASES["jobset-rdma-shared"]
    offers = {"rdma/hca_shared_devices_a": "63"}
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    machines = [machine(name, taints=[taint], **offers) for name in "ab"]
    system = {**machine("c"), "metadata": {"name": "c", "labels": {"node-group": "system"}}}
    asked = render_context(Case(target={"image_pull_secrets": ["registry"]}))
    cluster = replace(GOOD, nodes=[*machines, system], missing_references=list(referenced_objects(asked)))
    assert set(found(cluster, case)) == {"referenced-object-missing"}
    there = replace(cluster, missing_references=(), priority_classes=frozenset({"training"}))
    assert found(there, case) == {}


@pytest.mark.parametrize(
    ("entries", "image", "used"),
    [
        ({"registry.example": {}}, "registry.example/team/train:1", True),
        ({"https://registry.example/v1/": {}}, "registry.example/train@sha256:0", True),
        ({"registry.example": {}}, "registry.example:5000/train", False),
        ({"other.example": {}, "*.example": {}}, "registry.example/train", True),
        ({"*.example": {}}, "eu.registry.example/train", False),
        ({"registry.example/team": {}}, "registry.example/other/train", False),
        ({"https://index.docker.io/v1/": {}}, "pytorch/pytorch:2", True),
        ({"docker.io": {}}, "localhost/train", False),
        ({}, "registry.example/train", False),
    ],
)
def test_pull_secret_that_is_for_no_image_of_the_run_is_reported(
    entries: Mapping[str, Any], image: str, used: bool
) -> None:
    secret = {"data": {".dockerconfigjson": base64.b64encode(json.dumps({"auths": entries}).encode()).decode()}}
    cluster = replace(GOOD, pull_secrets={"registry": registries(secret)})
    job = Case(job={"image": image}, target={"controller": {"image": "elsewhere.test/holdfast"}})
    assert set(found(cluster, job)) == (set() if used else {"pull-secret-unused"})


@pytest.mark.parametrize("data", [{}, {"password": "eA=="}, {".dockercfg": "eA=="}, {".dockerconfigjson": "W10="}])
def test_secret_without_registries_is_no_pull_secret(data: Mapping[str, str]) -> None:
    finding = found(replace(GOOD, pull_secrets={"registry": registries({"data": data})}))["pull-secret-unused"]
    assert "the kubelet ignores it" in finding.what


def test_levels_of_a_placement_are_looked_for_in_the_queues_topologies() -> None:
    case = CASES["trainjob-placement"]
    rack, clique = "cloud.provider.com/topology-rack", "nvidia.com/gpu.clique"
    cluster = replace(
        GOOD, nodes=[machine(name) for name in "abcdefgh"], queue_priorities=frozenset({"urgent"}), topologies=None
    )
    for levels, missing in (
        (None, False),  # this user may not read them
        ({"h100": ["block", rack, clique, "kubernetes.io/hostname"]}, False),
        ({"cpu": [], "h100": [rack, clique]}, False),
        ({"h100": [clique, rack]}, True),
        ({"h100": [rack], "cpu": [clique]}, True),
        ({"cpu": []}, True),
    ):
        findings = found(replace(cluster, topologies=levels), case)
        assert set(findings) == ({"placement-level-missing"} if missing else set()), levels
    bare = replace(case, job={**case.job, "gpus_per_node": 0, "resources": {}})
    for quotas, job, missing in (
        (["cpu", "nvidia.com/gpu"], case, False),
        (["example.com/x"], case, True),
        (["cpu", "nvidia.com/gpu"], bare, True),
        (["pods"], bare, False),
    ):
        queue = {"metadata": {"name": "q"}, "spec": {"resourceGroups": [{"coveredResources": quotas, "flavors": []}]}}
        counted = replace(cluster, topologies={"h100": [rack, clique]}, cluster_queue=queue)
        assert ("placement-needs-requests" in found(counted, job)) == missing, quotas
    unknown = replace(cluster, queue_priorities=frozenset({"low"}))
    assert set(found(unknown, case)) == {"referenced-object-missing"}


def test_tier_of_a_placement_is_looked_for_among_volcanos_hypernodes() -> None:
    case = CASES["jobset-placement-volcano"]
    assert set(found(replace(GOOD, suspended_by_kueue=None), case)) == {"operator-missing"}
    served = {**SERVED, POD_GROUP_KIND: frozenset({"v1beta1"}), HYPERNODE_KIND: frozenset({"v1alpha1"})}
    cluster = replace(GOOD, suspended_by_kueue=None, served=served)
    assert found(replace(cluster, tiers=None), case) == {}  # this user may not read them
    assert found(replace(cluster, tiers=frozenset({"cloud.provider.com/topology-rack"})), case) == {}
    missing = found(replace(cluster, tiers=frozenset({"block"})), case)
    assert missing.keys() == {"placement-level-missing"}
    assert missing["placement-level-missing"].evidence == ("tiers: block",)


def test_storage_class_of_a_claim_that_is_made_is_looked_for() -> None:
    case = Case(target={"volume": {"claim": "made", "size": "1TiB", "storage_class": "fss"}})
    assert set(found(replace(GOOD, claim=None), case)) == {"storage-class-missing"}
    assert found(replace(GOOD, claim=None, storage_classes=[storage_class("fss", "example.com/fss")]), case) == {}


def storage_class(name: str, provisioner: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "provisioner": provisioner, **more}


DEFAULT = {"metadata": {"name": "d", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
MADE: dict[str, Any] = {"volume": {"claim": "made", "size": "1TiB", "storage_class": "c"}}
EFS = storage_class("shared", "efs.csi.aws.com")


@pytest.mark.parametrize("driver", STORAGE.values(), ids=lambda row: row.name)
def test_class_whose_volumes_one_machine_mounts_is_found_for_every_driver(driver: StorageDriver) -> None:
    name = driver.provisioner
    chosen = storage_class("c", f"rook-ceph{name}" if name.startswith(".") else name)
    cluster = replace(GOOD, claim=None, storage_classes=[chosen, EFS])
    finding = found(cluster, Case(target=MADE)).get("storage-not-shared")
    assert bool(finding) == (driver.kind is not StorageKind.FILES)
    if finding:
        assert f"class c makes a volume of {driver.name}" in finding.what
        assert finding.evidence == ("classes for many machines here: shared",)
    assert "storage-not-shared" not in found(cluster, Case(job={"nodes": 1}, target=MADE))
    unbound = {"spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "c"}}
    assert ("storage-not-shared" in found(replace(cluster, claim=unbound))) == bool(finding)


def test_class_of_a_claim_is_the_default_one_unless_named_and_may_have_a_former_name() -> None:
    unnamed = Case(target={"volume": {"claim": "made", "size": "1TiB"}})
    gp2 = DEFAULT | {"provisioner": "kubernetes.io/aws-ebs"}
    cluster = replace(GOOD, claim=None, storage_classes=[EFS, gp2], csi_drivers=frozenset({"efs.csi.aws.com"}))
    findings = found(cluster, unnamed)
    assert set(findings) == {"storage-not-shared", "storage-driver-missing"}
    assert "there is no CSIDriver ebs.csi.aws.com" in findings["storage-driver-missing"].what
    assert found(replace(cluster, storage_classes=[EFS]), unnamed) == {}, "a volume without a class may be ready"
    assert found(cluster, Case(target={"volume": {"claim": "made", "size": "1TiB", "storage_class": "shared"}})) == {}


def test_volume_that_is_an_object_store_is_found_by_its_driver() -> None:
    mounted = {"spec": {"csi": {"driver": "gcsfuse.csi.storage.gke.io"}}}
    bound = {"spec": {"accessModes": ["ReadWriteMany"], "volumeName": "pv"}}
    finding = found(replace(GOOD, claim=bound, volume=mounted))["storage-not-shared"]
    assert "claim checkpoints has a volume of Cloud Storage FUSE: an object store" in finding.what


@pytest.mark.parametrize(
    ("provisioner", "parameters", "size", "least"),
    [
        ("filestore.csi.storage.gke.io", {"tier": "BASIC_SSD"}, "1TiB", "2560Gi"),
        ("filestore.csi.storage.gke.io", {"tier": "zonal"}, "500GiB", "1Ti"),
        ("filestore.csi.storage.gke.io", {"tier": "zonal"}, "1TiB", ""),
        ("fsx.csi.aws.com", {"perUnitStorageThroughput": "250"}, "1TiB", "1200Gi"),
        ("fsx.csi.aws.com", {}, "1200GiB", ""),
        ("fsx.csi.aws.com", {"storageType": "INTELLIGENT_TIERING"}, "1GiB", ""),
        ("lustre.csi.storage.gke.io", {"perUnitStorageThroughput": "500"}, "9000GiB", "18000Gi"),
        ("azurelustre.csi.azure.com", {"sku-name": "AMLFS-Durable-Premium-250"}, "4TiB", "8Ti"),
        ("file.csi.azure.com", {"skuName": "Premium_LRS", "protocol": "nfs"}, "10GiB", "100Gi"),
        ("file.csi.azure.com", {"protocol": "smb"}, "10GiB", ""),
        ("efs.csi.aws.com", {}, "1GiB", ""),
    ],
)
def test_size_below_a_drivers_smallest_is_warned_of(
    provisioner: str, parameters: dict[str, str], size: str, least: str
) -> None:
    cluster = replace(GOOD, claim=None, storage_classes=[storage_class("c", provisioner, parameters=parameters)])
    finding = found(cluster, Case(target={"volume": {"claim": "made", "size": size, "storage_class": "c"}}))
    assert set(finding) == ({"claim-too-small"} if least else set())
    if least:
        assert finding["claim-too-small"].severity is Severity.WARNING
        assert finding["claim-too-small"].what.endswith(f"has {least}")


ZONE = "topology.kubernetes.io/zone"


def in_zone(zone: str) -> dict[str, Any]:
    """A PersistentVolume there."""
    terms = [{"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}]
    return {"spec": {"nodeAffinity": {"required": {"nodeSelectorTerms": terms}}}}


def zonal(name: str, zone: str) -> dict[str, Any]:
    node = machine(name)
    node["metadata"]["labels"] |= {ZONE: zone}
    return node


def test_volume_that_no_selected_machine_can_mount_is_found() -> None:
    machines = [zonal("a", "east-a"), zonal("b", "east-a"), zonal("c", "east-b"), zonal("d", "east-b")]
    there = replace(GOOD, nodes=machines, volume=in_zone("east-b"))
    assert found(there) == {}
    finding = found(there, Case(target={"node_selector": {ZONE: "east-a"}}))["volume-elsewhere"]
    assert finding.evidence == (f"the volume is in {ZONE} east-b", f"machines with {ZONE}: east-a (2)")
    assert set(found(replace(there, nodes=machines[:3]))) == {"too-few-machines"}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": in_zone("east-a")["spec"]["nodeAffinity"]["required"]}
    patched = {"pod": {"patch": {"spec": {"affinity": {"nodeAffinity": required}}}}}
    assert set(found(there, Case(target=patched))) == {"volume-elsewhere"}
    assert found(replace(there, volume=in_zone("east-a")), Case(target=patched)) == {}
    where = [{"matchLabelExpressions": [{"key": ZONE, "values": ["east-c"]}]}]
    limited = storage_class("c", "lustre.csi.storage.gke.io", allowedTopologies=where)
    made = Case(target={"volume": {"claim": "made", "size": "9000GiB", "storage_class": "c"}})
    assert set(found(replace(there, claim=None, volume={}, storage_classes=[limited]), made)) == {"volume-elsewhere"}


def test_what_may_not_be_seen_is_said_to_be_unknown_and_nothing_else() -> None:
    """Most users see their namespace alone."""
    blind = replace(
        GOOD, namespace=NOT_READABLE, local_queue=NOT_READABLE, claim=NOT_READABLE, nodes=None, not_readable=["nodes"]
    )
    assert set(found(blind)) == {"not-checked"}
    hidden = replace(blind, priority_classes=None, storage_classes=None)
    assert set(found(hidden, Case(target={"priority_class": "training"}))) == {"not-checked"}


def test_needed_is_to_make_and_to_remove_all_of_it_and_to_speak_to_its_pods() -> None:
    assert set(map(str, required_permissions(render_context(Case())))) >= {
        "create jobsets.jobset.x-k8s.io",
        "delete jobsets.jobset.x-k8s.io",
        "create rolebindings.rbac.authorization.k8s.io",
        "create networkpolicies.networking.k8s.io",
        "create secrets",
        "create pods/portforward",
        "list pods",
    }
