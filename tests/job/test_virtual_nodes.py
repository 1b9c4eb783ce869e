"""How a job is divided into replicas, and what of that is refused."""

from __future__ import annotations

import pytest
from tests.job.loading import parse_job

from holdfast.errors import HoldfastError
from holdfast.job.spec import Job


def job(text: str) -> Job:
    return parse_job(f"command: [a]\n{text}", "job.yaml")


def codes(text: str) -> list[str]:
    with pytest.raises(HoldfastError) as refused:
        job(text)
    return [finding.code for finding in refused.value.findings]


def test_replicas_of_whole_nodes_leave_the_nodes_as_they_are() -> None:
    one = job("nodes: 4\nranks_per_node: 2\nrecovery: {replicas: 2}")
    assert (one.nodes.max, one.local_world_size, one.replica_world_size) == (4, 2, 4)


@pytest.mark.parametrize("nodes", [1, 2])
def test_part_of_a_node_is_a_node_of_its_own(nodes: int) -> None:
    one = job(f"nodes: {nodes}\ngpus_per_node: 8\nresources: {{cpu: 16, memory: 64GiB}}\nrecovery: {{replicas: 4}}")
    each = 4 // nodes
    assert (one.nodes.min, one.nodes.max, one.gpus_per_node) == (4, 4, 8 // each)
    assert (one.local_world_size, one.replica_world_size) == (8 // each, 8 // each)
    assert (one.resources.cpu, one.resources.memory) == (16 / each, 64 * 2**30 // each)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nodes: 3\nrecovery: {replicas: 2}", "bad-replicas"),
        ("nodes: 2\nrecovery: {replicas: 3}", "bad-replicas"),
        ("nodes: 1\nranks_per_node: 3\nrecovery: {replicas: 2}", "bad-replicas"),
        ("nodes: 1\nranks_per_node: 2\ngpus_per_node: 3\nrecovery: {replicas: 2}", "bad-replicas"),
        ("nodes: 2\nrecovery: {replicas: 2, min_replicas: 3}", "bad-replicas"),
        ("nodes: 2\nrecovery: {replicas: 2, peer_checkpoints: auto}", "peer-checkpoints-unsupported"),
        ("nodes: 2\nrecovery: {peer_checkpoints: often}", "bad-value"),
        ("nodes: 1..2\nrecovery: {replicas: 2}", "not-supported"),
        ("nodes: 2\nlaunch: per-node\nrecovery: {replicas: 2}", "not-supported"),
        ("nodes: 2\nenv: {TORCHFT_LIGHTHOUSE: x}\nrecovery: {replicas: 2}", "reserved-name"),
        ("recovery: {replicas: true}", "wrong-type"),
        ("recovery: {step_timeout_s: soon}", "bad-value"),
    ],
)
def test_replicas_that_cannot_be_are_refused(text: str, code: str) -> None:
    assert codes(text) == [code]


def test_job_of_one_replica_may_be_one_of_somebody_elses() -> None:
    assert job("env: {TORCHFT_LIGHTHOUSE: http://there:29510}").env


def test_step_deadline_may_be_left_to_the_steps() -> None:
    assert job("recovery: {step_timeout_s: auto}").recovery.step_timeout_s == "auto"
    assert job("recovery: {step_timeout_s: 5}").recovery.step_timeout_s == 5


def test_replicas_that_meet_now_and_then_are_several() -> None:
    sync = "outer_sync: {method: diloco, every: 4}"
    assert job(f"nodes: 2\nrecovery: {{replicas: 2, {sync}}}").recovery.outer_sync is not None
    assert codes(f"nodes: 2\nrecovery: {{{sync}}}") == ["bad-replicas"]
