"""The generated reference is complete."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from tests.golden import WRITE

import holdfast
import holdfast.train
from holdfast.control.policy import FailureKind
from holdfast.control.state import ReplicaPhase
from holdfast.diagnose.knowledge.index import find
from holdfast.fabric.catalog import CATALOG
from holdfast.launch.target_features import REASONS, TARGETS, Feature
from holdfast.observe.dashboard_catalog import DASHBOARDS, PanelKind

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(holdfast.__file__).parent
NO_CODES = {"events", "protocol", "control", "agent", "diagnose"}
"""Folders whose words with hyphens are names of events, failures, and rules of diagnosis."""
OTHER_WORDS = {
    "default-scheduler",
    "first-run",
    "megatron-fused-experts",
    "megatron-without-graphs",
    "gang-high",
    "gang-low",
    "link-slowed",
    "not-used",
    "tcp-fallback",
    "ephemeral-storage",
    "pod-group",
    "user-queue",
    "step-clock-failed",
    "trace-written",
    "all-reduce",
    "exit-reason",
    "not-looked-at",
    "node-checked",
    "log-unreplicated",
    "restore-scratch",
    "dist-packages",
    "site-packages",
    "aws-ofi-nccl",
    "detect-secrets",
    "cpus-per-task",
    "nvidia-ml-py",
    "py-spy",
    "httpx-ws",
    "ibverbs-providers",
    "oci-layout",
    "openmpi-bin",
    "openssh-client",
    "sku-name",
    "time-sharing",
    "time-slicing",
    "openssh-server",
    *(dashboard.uid for dashboard in DASHBOARDS),
    *PanelKind,
    "metrics-token",
    "network-topology-aware",
    "no-referrer",
    "no-store",
    "holdfast-checkpoint",
    "holdfast-checkpoint-store",
    "holdfast-peer-copy",
    "holdfast-recall",
    "holdfast-quarantine",
    "holdfast-seal",
    "job-name",
    "controller-uid",
    "holdfast-staging",
    "holdfast-tidy",
    "per-rank",
    "per-node",
    "accelerate-launch",
    "in-place",
    "jobset-controller-manager",
    "kubeflow-trainer-controller-manager",
    "kueue-controller-manager",
    "mpi-operator",
    "nvidia-cuda-mps-server",
    "nvidia-nvswitchctl",
    "nvidia-smi",
    "training-operator",
    "lws-controller-manager",
    "unicode-escape",
    "util-linux",
    *CATALOG,
    *(sidecar.name for row in CATALOG.values() if (sidecar := row.pod.sidecar)),
}


NO_CODES_IN_PAGES = {
    "first-run",
    "attempt-started",
    "holdfast-quarantine",
    "holdfast-zygote",
    "link-errors",
    "metrics-token",
    "network-topology-aware",
    "nvidia-smi",
    "per-rank",
    "stacks-compared",
    "tp-cp-ep-dp-pp",
    *CATALOG,
}
"""Programs, events, drills, fabrics and values of a job field."""


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("reference")


@pytest.mark.parametrize("name", holdfast.train.__all__)
def test_python_page_has_every_parameter_and_method_of_a_public_class(name: str, reference: ModuleType) -> None:
    public: type[object] = getattr(holdfast.train, name)
    page = reference.PAGES["python"]()
    section = page.partition(f"## `{name}`\n")[2].partition("\n## ")[0]
    methods = [one for one in vars(public) if not one.startswith("_") and callable(getattr(public, one))]
    assert [one for one in methods if f"### `{name}.{one}`" not in section] == []
    called = [public, *(getattr(public, one) for one in methods)]
    parameters = {parameter for one in called for parameter in inspect.signature(one).parameters} - {"self"}
    assert parameters
    assert [one for one in parameters if not re.search(rf"\b{one}\b", section)] == []


def test_phases_page_names_what_each_event_does_and_what_follows(reference: ModuleType) -> None:
    rows = [
        row for table in ("RUN_HANDLERS", "NODE_HANDLERS", "REPLICA_HANDLERS") for row in reference.phase_rows(table)
    ]
    assert [row.handler for row in rows if not row.summary.endswith(".")] == []
    stops, judges = (row for row in rows if row.event == "*stop*")
    assert stops.phases == ("gathering", "running", "hang-suspected")
    assert stops.leads_to == ("stopping", "*advance*")
    assert "gathering" in judges.leads_to
    page = reference.phases_page()
    assert {row.event for row in rows if row.event not in page} == set()
    assert {phase.value for phase in ReplicaPhase if f"`{phase.value}`" not in page} == set()


def test_each_function_on_the_failure_page_exists() -> None:
    text = (ROOT / "docs" / "failure-path.md").read_text()
    path = re.findall(r"\| `(?P<file>[\w/]+\.py)` \| `(?P<function>[\w.]+)` \|", text)
    assert len(path) >= 10
    for file, function in path:
        found = importlib.import_module(f"holdfast.{file.removesuffix('.py').replace('/', '.')}")
        for name in function.split("."):
            found = getattr(found, name)
        assert callable(found)


@pytest.mark.slow
def test_findings_page_lists_every_code_in_the_source(reference: ModuleType) -> None:
    page = reference.findings_page()
    sources = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] not in NO_CODES]
    written = {code for path in sources for code in re.findall(r'(?<!b)"([a-z]+(?:-[a-z]+)+)"', path.read_text())}
    codes = written - OTHER_WORDS | set(map(str, FailureKind))
    assert {code for code in codes if f"`{code}`" not in page} == set()


def test_pages_name_only_codes_that_can_be_explained() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    named = {word for page in pages for word in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", page.read_text())}
    assert len(named) > 100
    assert {word for word in named - NO_CODES_IN_PAGES if not find(word)} == set()


def test_troubleshooting_names_codes_that_can_be_explained() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = [line.split("|")[-2] for line in page.splitlines() if line.startswith("|") and line.count("|") == 6]
    codes = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    assert len(codes) > 30
    assert [code for code in codes if not find(code)] == []


def test_targets_page_is_generated_from_the_table(reference: ModuleType) -> None:
    page, text = ROOT / "docs" / "targets.md", reference.targets_page()
    if WRITE:
        page.write_text(text)
    assert page.read_text() == text, "HOLDFAST_WRITE_GOLDEN=1 writes it"


SHOWN_BY = {
    Feature.RANK_KILLED: "test_killed_rank_is_recovered_from_the_last_checkpoint",
    Feature.RANK_RAISES: "test_rank_that_raises_is_recovered_and_its_error_is_shown",
    Feature.HANG: "test_stopped_rank_is_taken_for_hung_and_named",
    Feature.AGENT_KILLED: "test_killed_agent_is_replaced_on_the_same_machine_or_another",
    Feature.NODE_LOST: "test_lost_machine_is_replaced_by_a_spare",
    Feature.CONTROLLER_KILLED: "test_killed_controller_comes_back_without_a_rank_restarting",
    Feature.CODE_SHIPPED: "test_every_attempt_ran_the_code_of_the_start",
    Feature.CANCEL: "test_cancelled_run_ends_at_once_with_every_step_done",
    Feature.SHAPE_CHANGE: "test_elastic_run_continues_on_fewer_machines",
    Feature.SHAPE_GROWTH: "test_elastic_run_continues_on_fewer_machines",
    Feature.REPLICAS: "test_killed_replica_does_not_stop_the_other",
}
"""The test of each feature in tests/runs/test_targets.py, all of which run on all targets but Kubernetes."""
IN_CLUSTER = {Feature.RANK_RAISES, Feature.HANG, Feature.CODE_SHIPPED, Feature.SHAPE_CHANGE, Feature.SHAPE_GROWTH}
"""Those that tests/launch/kubernetes/test_survival_in_cluster.py runs there."""
SHOWN_ELSEWHERE = {
    (Feature.RANK_KILLED, "kubernetes"): "test_what_dies_comes_back_in_place_and_is_counted_once",
    (Feature.AGENT_KILLED, "kubernetes"): "test_what_dies_comes_back_in_place_and_is_counted_once",
    (Feature.NODE_LOST, "kubernetes"): "test_lost_machines_nodes_move_and_the_others_stay",
    (Feature.CONTROLLER_KILLED, "kubernetes"): "test_what_dies_comes_back_in_place_and_is_counted_once",
    (Feature.CANCEL, "kubernetes"): "test_what_dies_comes_back_in_place_and_is_counted_once",
    (Feature.REPLICAS, "kubernetes"): "test_replicas_meet_in_a_cluster_and_continue_without_one_that_is_evicted",
    (Feature.SUBMITTER_LEAVES, "kubernetes"): "test_client_that_was_away_and_another_machine_follow_the_run_and_end_it_"
    "without_a_trace",
    (Feature.SUBMITTER_LEAVES, "slurm"): "test_run_goes_on_without_the_process_that_started_it",
    (Feature.SUBMITTER_LEAVES, "slurm_monarch"): "test_run_goes_on_with_monarch_without_the_process_that_started_it",
    (Feature.RESUME, "local"): "test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code",
    (Feature.RESUME, "netns"): "test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code",
    (Feature.RESUME, "monarch"): "test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code",
    (Feature.RESUME, "hosts"): "test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code",
    (Feature.RESUME, "hosts_monarch"): "test_training_that_moves_to_hosts_and_back_is_bit_exact_and_keeps_its_code",
    (Feature.RESUME, "slurm"): "test_training_that_moves_to_slurm_is_bit_exact",
    (Feature.RESUME, "slurm_monarch"): "test_training_that_moves_to_slurm_is_bit_exact",
    (Feature.RESUME, "kubernetes"): "test_training_that_moves_into_a_cluster_and_back_is_bit_exact",
}
"""The test of a feature on a target that another file has."""


def test_what_a_target_is_said_to_do_has_a_test() -> None:
    files = [path for folder in ("runs", "launch/kubernetes") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    tests = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    claimed = {(feature, target) for feature in Feature for target in TARGETS} - REASONS.keys()
    shared = {(feature, target) for feature in SHOWN_BY for target in TARGETS if target != "kubernetes"}
    shared |= {(feature, "kubernetes") for feature in IN_CLUSTER}
    assert claimed == (shared - REASONS.keys()) | SHOWN_ELSEWHERE.keys()
    assert {*SHOWN_BY.values(), *SHOWN_ELSEWHERE.values()} <= tests
