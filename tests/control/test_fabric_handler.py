"""A run that was promised another fabric is warned once for each attempt, or ends."""

from __future__ import annotations

import msgspec
import pytest
from tests.control.test_machine import Run, gone, joined
from tests.control.test_node_checks import checked
from tests.control.test_node_probes import probed, probed_run
from tests.diagnose.test_tcp_pairs import ends, measured, report

from holdfast.control.commands import Command, Send
from holdfast.control.fabric_handler import MAX_SLOW_LINKS
from holdfast.control.machine import Machine
from holdfast.control.state import ReplicaPhase
from holdfast.diagnose.tcp_pairs import DATA_BYTES
from holdfast.errors import ExitCode
from holdfast.events import FabricObserved, FindingRaised, LinkSlowed, ShutdownDecided
from holdfast.events.probe_results import PairRate, ProbeOutcome, ProbeResult
from holdfast.findings import Finding, Severity
from holdfast.job.spec import Fabric, Job, OnFallback
from holdfast.protocol.orders import StopRanks


def running(on_fallback: OnFallback, nodes: int = 2) -> Run:
    run = Run(nodes=nodes)
    fabric = Fabric(name="infiniband", on_fallback=on_fallback)
    run.job = Job.model_validate(run.job.model_dump() | {"fabric": fabric})
    run.machine = Machine(run.job)
    return run.running()


def observed(
    network: str, node: int = 0, *, attempt: int = 0, findings: tuple[Finding, ...] = (), spans_nodes: bool = True
) -> FabricObserved:
    return FabricObserved(
        at=9.0,
        node=node,
        replica=0,
        attempt=attempt,
        promised="infiniband",
        communicator="0x1",
        size=2,
        ranks=((node, node),),
        spans_nodes=spans_nodes,
        network=network,
        findings=findings,
    )


def reported(run: Run) -> list[str]:
    return [event.finding.code for event in run.decisions if isinstance(event, FindingRaised)]


def stops(commands: list[Command]) -> bool:
    return any(isinstance(command, Send) and isinstance(command.order, StopRanks) for command in commands)


def test_run_that_only_warns_continues_and_warns_once() -> None:
    run = running(OnFallback.WARN)
    assert run.do(observed("Socket")) == []
    assert reported(run) == ["tcp-fallback"]
    assert run.do(observed("Socket", node=1)) == []
    assert reported(run) == []
    assert run.phase() is ReplicaPhase.RUNNING


def test_run_that_stops_on_fallback_ends_with_the_cause() -> None:
    run = running(OnFallback.STOP)
    assert stops(run.do(observed("Socket")))
    (end,) = (event for event in run.decisions if isinstance(event, ShutdownDecided))
    assert end.exit_code == ExitCode.CANNOT_RUN_HERE
    assert end.finding is not None
    assert (end.finding.code, end.finding.severity) == ("tcp-fallback", Severity.ERROR)
    assert "fabric.on_fallback=warn" in end.finding.remedy
    assert run.do(observed("Socket", node=1)) == []


@pytest.mark.parametrize("on_fallback", OnFallback)
def test_promised_fabric_needs_nothing(on_fallback: OnFallback) -> None:
    run = running(on_fallback)
    assert run.do(observed("IB"), observed("Socket", spans_nodes=False)) == []
    assert run.decisions == []


def test_fabric_that_is_only_degraded_ends_no_run() -> None:
    run = running(OnFallback.STOP)
    assert run.do(observed("IB", findings=(Finding(code="gdr-missing", what="without GPUDirect"),))) == []
    assert reported(run) == ["fabric-degraded"]


def test_report_of_an_earlier_attempt_changes_nothing() -> None:
    run = running(OnFallback.STOP)
    assert run.do(observed("Socket", attempt=-1)) == []
    assert run.decisions == []


WRONG = tuple(report(near, ends(near, 1 - near, "eth0", DATA_BYTES)) for near in (0, 1))


def test_other_interface_ends_the_run_as_soon_as_both_ends_are_known() -> None:
    run = running(OnFallback.STOP)
    assert run.do(WRONG[0]) == []
    assert stops(run.do(WRONG[1]))
    (end,) = (event for event in run.decisions if isinstance(event, ShutdownDecided))
    assert end.exit_code == ExitCode.CANNOT_RUN_HERE
    assert end.finding is not None
    assert (end.finding.code, end.finding.severity) == ("wrong-interface", Severity.ERROR)
    assert "fabric.on_fallback=warn" in end.finding.remedy


def test_group_for_barriers_over_another_interface_only_warns_until_it_carries_the_data() -> None:
    run = running(OnFallback.STOP)
    assert run.do(*(report(near, ends(near, 1 - near, "eth0")) for near in (0, 1))) == []
    assert reported(run) == ["wrong-interface"]
    assert run.do(msgspec.structs.replace(WRONG[0], promised_bytes=9 * DATA_BYTES)) == []
    assert reported(run) == []
    assert stops(run.do(WRONG[1]))


def test_other_interface_is_reported_once_if_the_run_only_warns() -> None:
    run = running(OnFallback.WARN)
    assert run.do(*WRONG) == []
    assert reported(run) == ["wrong-interface"]
    run.do(WRONG[0])
    assert reported(run) == []
    assert run.phase() is ReplicaPhase.RUNNING


def test_named_interface_and_one_that_no_run_names_need_nothing() -> None:
    run = running(OnFallback.STOP)
    assert run.do(report(0, ends(0, 1)), report(1, ends(1, 0))) == []
    assert run.do(*(report(near, ends(near, 1 - near, "eth0"), promised=()) for near in (0, 1))) == []
    assert run.decisions == []


def test_slow_link_is_reported_once_and_ends_no_run() -> None:
    run = running(OnFallback.STOP)
    run.do(report(0, ends(0, 1)), report(1, ends(1, 0)))
    slowed = LinkSlowed(
        at=9.0,
        node=0,
        replica=0,
        attempt=0,
        ends=ends(0, 1),
        before_bytes_s=9,
        now_bytes_s=1,
        retransmits=0,
        segments=5,
    )
    assert run.do(slowed) == []
    assert reported(run) == ["link-slowed"]
    run.do(slowed)
    assert reported(run) == []
    assert run.phase() is ReplicaPhase.RUNNING


def test_slow_link_is_one_for_both_ends_and_few_are_reported() -> None:
    run = running(OnFallback.STOP)
    nodes = range(MAX_SLOW_LINKS + 4)
    run.do(*(report(node) for node in nodes))
    slow = LinkSlowed(
        at=9.0,
        node=0,
        replica=0,
        attempt=0,
        ends=ends(0, 1),
        before_bytes_s=9,
        now_bytes_s=1,
        retransmits=0,
        segments=5,
    )
    run.do(slow)
    assert reported(run) == ["link-slowed"]
    run.do(msgspec.structs.replace(slow, node=1, ends=ends(1, 0)))
    assert reported(run) == []
    run.do(*(msgspec.structs.replace(slow, ends=ends(0, far)) for far in nodes[2:]))
    assert reported(run) == ["link-slowed"] * (MAX_SLOW_LINKS - 1)


def test_link_that_is_far_slower_in_the_other_direction_is_reported_again() -> None:
    """Acknowledgements that wait behind data slow the other direction as well."""
    run = running(OnFallback.STOP)
    run.do(report(0, ends(0, 1)), report(1, ends(1, 0)))
    slow = LinkSlowed(
        at=9.0,
        node=0,
        replica=0,
        attempt=0,
        ends=ends(0, 1),
        before_bytes_s=1000,
        now_bytes_s=50,
        retransmits=0,
        segments=5,
    )
    other = msgspec.structs.replace(slow, node=1, ends=ends(1, 0))
    run.do(slow, msgspec.structs.replace(other, now_bytes_s=13))
    assert reported(run) == ["link-slowed"]
    run.do(msgspec.structs.replace(other, now_bytes_s=3))
    assert reported(run) == ["link-slowed"]
    run.do(slow, other)
    assert reported(run) == []


def test_slow_connection_to_a_server_is_none_of_the_fabric() -> None:
    run = running(OnFallback.STOP)
    run.do(
        LinkSlowed(
            at=9.0,
            node=0,
            replica=0,
            attempt=0,
            ends=ends(0, 1),
            before_bytes_s=9,
            now_bytes_s=1,
            retransmits=0,
            segments=5,
        )
    )
    assert run.decisions == []


def test_link_that_is_slower_than_in_the_probe_is_reported_until_one_of_its_nodes_is_another() -> None:
    run = probed_run()
    pair = PairRate(nodes=(0, 1), gb_s=1.0)
    result = ProbeResult(rank=0, outcome=ProbeOutcome.PASSED, elapsed_s=1.0, pairs=(pair,))
    run.do(joined(0), joined(1), checked(0), checked(1))
    run.do(msgspec.structs.replace(probed(0, (0, 1)), result=result), probed(1, (0, 1)))
    reports = report(0, ends(0, 1)), report(1, ends(1, 0))
    run.do(*reports, measured((0, 900)))
    assert reported(run) == []
    run.do(measured((0, 100)))
    assert reported(run) == ["link-slowed"]
    run.do(report(7, ends(7, 1)), measured((7, 1)))  # no node has this number
    assert reported(run) == []
    rates = run.state.replicas[0].probed_bytes_s
    run.do(gone(1), joined(1, generation=1))
    assert frozenset(node.node_id for node in run.state.nodes) not in rates
