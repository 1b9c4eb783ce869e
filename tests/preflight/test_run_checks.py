"""Checks that pass, fail, cannot look, hang or raise, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
from tests.preflight.conftest import MakeNode

from holdfast.findings import CheckOutcome, Finding, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.run_checks import (
    GPU_CHECKS,
    GPU_RDMA_CHECKS,
    HOST_CHECKS,
    RDMA_CHECKS,
    quick_checks,
    run_checks,
)
from holdfast.protocol.node_requirements import NodeRequirements

END = Event()


def passes(_: NodeView) -> Iterator[Finding]:
    return iter(())


def warns(_: NodeView) -> Iterator[Finding]:
    yield Finding(code="small", what="small", severity=Severity.WARNING)


def fails(_: NodeView) -> Iterator[Finding]:
    yield Finding(code="broken", what="broken")


def is_blind(_: NodeView) -> Iterator[Finding]:
    raise NotLookedAt("there is no program `x`")
    yield


def is_wrong(_: NodeView) -> Iterator[Finding]:
    raise KeyError("a field")
    yield


def never_ends(_: NodeView) -> Iterator[Finding]:
    END.wait()
    yield Finding(code="late", what="late")


def asks_what_hangs(_: NodeView) -> Iterator[Finding]:
    raise TimeoutError("`nvidia-smi` has not answered within 5 s")
    yield


def test_each_check_has_its_own_outcome(node: MakeNode) -> None:
    results = run_checks(node(), (passes, warns, fails, is_blind, is_wrong, never_ends, asks_what_hangs), 0.5)
    END.set()
    passed, failed, blind = CheckOutcome
    assert [result.outcome for result in results] == [passed, passed, failed, blind, blind, failed, failed]
    assert [result.check for result in results][3:5] == ["is-blind", "is-wrong"]
    assert [result.reason for result in results][3:5] == ["there is no program `x`", "KeyError('a field')"]
    assert [result.findings[0].code for result in results[-2:]] == ["node-check-hangs", "node-check-hangs"]
    assert results[-1].findings[0].evidence == ("`nvidia-smi` has not answered within 5 s",)


@pytest.mark.parametrize("gpus", [0, 8])
@pytest.mark.parametrize("network", ["Socket", "IB", "AWS Libfabric"])
def test_checks_are_those_on_whose_subject_the_job_depends(node: MakeNode, gpus: int, network: str) -> None:
    wanted = NodeRequirements(gpus=gpus, network=network)
    rdma = network != "Socket"
    chosen = quick_checks(wanted)
    assert (set(HOST_CHECKS) <= set(chosen), set(GPU_CHECKS) <= set(chosen)) == (True, gpus > 0)
    assert (set(RDMA_CHECKS) <= set(chosen), set(GPU_RDMA_CHECKS) <= set(chosen)) == (rdma, rdma and gpus > 0)
    # The others find nothing on any node, here on one that has nothing.
    others = {*GPU_CHECKS, *RDMA_CHECKS, *GPU_RDMA_CHECKS} - {*chosen}
    found = run_checks(node(gpus=gpus, network=network), tuple(others), 10.0)
    assert not [result for result in found if result.findings]
