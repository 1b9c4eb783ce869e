"""The status and the summary of a run say in one line what carries its traffic between nodes."""

from __future__ import annotations

from tests.diagnose.test_tcp_pairs import ends, report

from holdfast.events import AttemptStarted, FabricObserved, RunCreated, SocketsObserved
from holdfast.report.run_summary import format_summary, summarise
from holdfast.report.status_reducer import status_from_events, update_status

CREATED = RunCreated(at=0.0, run="r-1", job={"name": "r"})


def started(attempt: int) -> AttemptStarted:
    return AttemptStarted(
        at=1.0 + attempt, replica=0, attempt=attempt, world_size=16, master_addr="a", master_port=1, nodes=(0, 1)
    )


def observed(node: int = 0, network: str = "IB", nics: int = 8, size: int = 16, attempt: int = 0) -> FabricObserved:
    return FabricObserved(
        at=5.0,
        node=node,
        replica=0,
        attempt=attempt,
        promised="infiniband",
        communicator=f"0x{size}",
        size=size,
        ranks=((node, node),),
        spans_nodes=True,
        network=network,
        between={f"NET/{network}{'/GDRDMA' * (network == 'IB')}": 8} if nics else {},
        nics=nics,
    )


def line(*events: FabricObserved | SocketsObserved | AttemptStarted) -> str:
    return status_from_events((CREATED, started(0), *events)).fabric


def test_node_with_the_fewest_devices_counts() -> None:
    assert line(observed(0, nics=8), observed(1, nics=7)) == "infiniband, 7 NICs, GPUDirect, as promised"
    assert line(observed(1, nics=7), observed(0, nics=8)) == "infiniband, 7 NICs, GPUDirect, as promised"


def test_worst_node_counts() -> None:
    assert line(observed(0), observed(1, "Socket"), observed(2)) == "TCP instead of infiniband"


def test_largest_communicator_counts() -> None:
    assert line(observed(size=16), observed(nics=1, size=2)) == "infiniband, 8 NICs, GPUDirect, as promised"


def test_later_report_of_a_communicator_replaces_the_earlier() -> None:
    assert line(observed(nics=0)) == "infiniband, as promised"
    assert line(observed(nics=0), observed(nics=4), observed(nics=8)) == "infiniband, 8 NICs, GPUDirect, as promised"


def test_each_attempt_is_judged_afresh() -> None:
    assert line(observed(0, "Socket"), started(1)) == ""
    assert line(observed(0, "Socket"), started(1), observed(attempt=0)) == ""


def test_summary_shows_the_line() -> None:
    status = update_status(status_from_events((CREATED, started(0))), observed(0, "Socket"))
    assert "fabric: TCP instead of infiniband" in format_summary(summarise(status, logs="", now=9.0))


def test_sockets_count_when_two_nodes_have_reported_them() -> None:
    good, bad = ([report(near, ends(near, 1 - near, name)) for near in (0, 1)] for name in ("net1", "eth0"))
    assert line(good[0]) == ""
    assert line(*good) == "tcp over net1, as promised"
    assert line(*bad, *good) == "tcp over net1, as promised", "a later report replaces the earlier"
    assert line(*good, *bad) == "tcp over eth0 instead of net1"
    assert line(*bad, started(1)) == ""


def test_worse_of_what_nccl_logs_and_the_kernel_shows_counts() -> None:
    good, bad = ([report(near, ends(near, 1 - near, name)) for near in (0, 1)] for name in ("net1", "eth0"))
    assert line(*good, observed(0)) == "tcp over net1, as promised"
    assert line(*good, observed(0, "Socket")) == "TCP instead of infiniband"
    assert line(*bad, observed(0)) == "tcp over eth0 instead of net1"
