"""A run without agents: its objects, as events in its log."""

from __future__ import annotations

from typing import Any

import pytest
from tests.launch.kubernetes.golden_cases import Case, render_context

from holdfast.events import AnyEvent, AttemptStarted, Outcome, RankExited, RanksStarted
from holdfast.job.run_spec import RunSpec
from holdfast.job.targets import Workload
from holdfast.launch.kubernetes.sync import pod_events
from holdfast.launch.kubernetes.workload_catalog import CATALOG


def pod(node: int, state: dict[str, Any], *, restarts: int = 0, remade: int = 0, **labels: str) -> dict[str, Any]:
    index = {"batch.kubernetes.io/job-completion-index": str(node), pod_events.RESTART_LABEL: str(remade)}
    sidecar: dict[str, Any] = {"name": "istio", "state": {"running": {}}, "restartCount": 7}
    status = {"containerStatuses": [sidecar, {"name": "node", "state": state, "restartCount": restarts}]}
    return {"metadata": {"name": f"pod-{node}", "labels": index | labels}, "status": status}


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code}}


RUNNING: dict[str, Any] = {"running": {}}


@pytest.fixture
def accepted() -> RunSpec:
    return render_context(Case(job={"nodes": 2, "ranks_per_node": 2, "launch": "per-node"})).accepted


def told(accepted: RunSpec, *looks: list[dict[str, Any]]) -> list[AnyEvent]:
    """Events of pods that are polled one after another."""
    known: list[AnyEvent] = []
    for pods in looks:
        known += pod_events.new_events(tuple(pod_events.pod_commands(pods, Workload.JOBSET)), accepted, known, now=1.0)
    return known


def test_what_is_seen_is_told_once(accepted: RunSpec) -> None:
    look = [pod(0, RUNNING), pod(1, {"waiting": {"reason": "ContainerCreating"}})]
    both = [pod(0, RUNNING), pod(1, RUNNING)]
    events = told(accepted, look, look, both, both)
    assert [type(event) for event in events] == [AttemptStarted, RanksStarted, RanksStarted]
    assert [event.ranks[0].rank for event in events if isinstance(event, RanksStarted)] == [0, 2]


def test_pod_of_somebody_else_with_labels_of_ours_hides_no_other(accepted: RunSpec) -> None:
    others = [pod(0, RUNNING), pod(0, RUNNING)]
    for other, name in zip(others, ("batch.kubernetes.io/job-completion-index", pod_events.RESTART_LABEL), strict=True):
        other["metadata"]["labels"][name] = "x"
    events = told(accepted, [*others, pod(1, RUNNING)])
    assert [event.node for event in events if isinstance(event, RanksStarted)] == [1]
    numbering = CATALOG[Workload.JOBSET].node_labels
    assert [numbering.node({numbering.label: said}) for said in ("", "x", "-1", "9" * 5000, "²", "7")] == [None] * 5 + [
        7
    ]


def test_attempt_is_counted_by_what_was_made_anew_and_what_was_started_again(accepted: RunSpec) -> None:
    events = told(accepted, [pod(0, RUNNING, remade=2), pod(1, RUNNING, restarts=1, remade=2)])
    assert [event.attempt for event in events if isinstance(event, AttemptStarted)] == [2, 3]


def test_exit_code_is_that_of_the_last_attempts_first_failure(accepted: RunSpec) -> None:
    events = told(
        accepted, [pod(0, ended(0)), pod(1, ended(7))], [pod(0, ended(0), remade=1), pod(1, ended(3), remade=1)]
    )
    assert len([event for event in events if isinstance(event, RankExited)]) == 4
    assert pod_events.exit_code(events) == 3
    assert pod_events.exit_code([]) == 1


@pytest.mark.parametrize(
    ("kind", "status", "outcome"),
    [
        ("Completed", "True", Outcome.SUCCEEDED),
        ("Complete", "True", Outcome.SUCCEEDED),
        ("Succeeded", "True", Outcome.SUCCEEDED),
        ("Failed", "True", Outcome.FAILED),
        ("Failed", "False", None),
        ("Suspended", "True", None),
    ],
)
def test_every_kind_of_object_says_how_it_ended(kind: str, status: str, outcome: Outcome | None) -> None:
    found = pod_events.run_end({"status": {"conditions": [{"type": kind, "status": status, "message": "so"}]}})
    assert found == (None if outcome is None else (outcome, "so"))


def test_launcher_speaks_for_an_mpi_run() -> None:
    (one,) = pod_events.pod_commands([pod(0, RUNNING, **{"holdfast/part": "launcher"})], Workload.MPIJOB)
    assert (one.node, pod_events.command_part(Workload.MPIJOB)) == (0, "launcher")
