"""A node that differs from all others of a communicator is named, and only then."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace
from tests.control.test_fabric_handler import observed as event
from tests.control.test_fabric_handler import reported, running
from tests.diagnose.nccl_transport.generated_logs import JOB
from tests.diagnose.nccl_transport.test_promised_fabric import base, logs_of
from tests.diagnose.nccl_transport.test_promised_fabric import observed as by_agent

from holdfast.control.node_fabrics import NODES_DIFFER, FabricNodes, differences, with_report
from holdfast.events import FabricObserved
from holdfast.findings import Finding
from holdfast.job.spec import OnFallback

FOUR = replace(JOB, nodes=4)
NODES = 4


def reports(jobs: Sequence[Job]) -> list[FabricObserved]:
    """What each node's agent reports, whose ranks log as in the job at its place."""
    seen: list[FabricObserved] = []
    for node, job in enumerate(jobs):
        (one,) = by_agent(*logs_of(job, node))
        seen.append(msgspec.structs.replace(one, node=base("infiniband", node).node))
    return seen


def found(seen: Sequence[FabricObserved]) -> dict[str, Finding]:
    nodes: FabricNodes = {}
    for one in seen:
        nodes = with_report(nodes, one)
    return {aspect: finding for (_, size), of_nodes in nodes.items() for aspect, finding in differences(of_nodes, size)}


ODD = {
    "network": (replace(FOUR, network="Socket", gdr=False), "network: Socket on node2, IB on the other 3 nodes"),
    "nics": (replace(FOUR, nics=1), "NICs in use: 1 on node2, 2 on the other 3 nodes"),
    "devices": (replace(FOUR, nics=1), "RDMA devices: 1 on node2, 2 on the other 3 nodes"),
    "GPUDirect": (replace(FOUR, gdr=False), "GPUDirect: not used on node2, used on the other 3 nodes"),
    "version": (
        replace(FOUR, version=Version.of("2.27.5")),
        "version of NCCL: 2.27.5+cuda12.4 on node2, 2.27.7+cuda12.4 on the other 3 nodes",
    ),
}


@pytest.mark.parametrize("aspect", ODD)
def test_node_unlike_the_others_is_named(aspect: str) -> None:
    job, what = ODD[aspect]
    finding = found(reports([FOUR, FOUR, job, FOUR]))[aspect]
    assert (finding.code, finding.where) == (NODES_DIFFER, "node2")
    assert finding.what == f"nodes differ in their {what}"
    assert finding.remedy
    assert len(finding.evidence) == 2


def test_nodes_that_are_alike_differ_in_nothing() -> None:
    assert found(reports([FOUR] * NODES)) == {}


@pytest.mark.parametrize("aspect", ODD)
def test_two_nodes_that_differ_are_both_named(aspect: str) -> None:
    finding = found(reports([replace(JOB), replace(ODD[aspect][0], nodes=2)]))[aspect]
    assert finding.where == "node0, node1"


def test_nothing_is_compared_before_all_nodes_have_reported() -> None:
    seen = reports([FOUR, FOUR, ODD["network"][0], FOUR])
    assert found(seen[:3]) == {}


def test_node_that_is_still_connecting_has_not_fewer_nics() -> None:
    seen = reports([FOUR] * NODES)
    seen[1] = msgspec.structs.replace(seen[1], nics=1, connected=("all trees",))
    seen[2] = msgspec.structs.replace(seen[2], between={}, nics=0, connected=())
    assert found(seen) == {}


def test_links_within_a_node_do_not_make_it_connected() -> None:
    """It has logged links on all channels, but not yet those by the second NIC."""
    later = b"NET/IB/1", b"Connected all"
    lines = [log.splitlines(keepends=True) for log in logs_of(FOUR, 2)]
    (one,) = by_agent(*(b"".join(line for line in log if not any(word in line for word in later)) for log in lines))
    whole = reports([FOUR] * NODES)
    assert (one.channels, one.nics) == (whole[2].channels, 1)
    whole[2] = msgspec.structs.replace(one, node=2)
    assert found(whole) == {}


def test_nodes_with_fewer_ranks_may_use_less() -> None:
    seen = reports([FOUR, FOUR, ODD["nics"][0], replace(FOUR, gdr=False)])
    seen[2] = msgspec.structs.replace(seen[2], ranks=((8, 9),))
    seen[3] = msgspec.structs.replace(seen[3], size=14)
    assert found([msgspec.structs.replace(each, size=14) for each in seen]) == {}


def test_sends_of_a_pipeline_need_not_be_alike() -> None:
    def on_node(node: int, log: bytes) -> FabricObserved:
        (seen,) = by_agent(log)
        return msgspec.structs.replace(seen, node=node)

    logs = [b"".join(replace(FOUR, gpus=1, gdr=gdr).log(rank)) for rank, gdr in enumerate((True, True, True, False))]
    sends = [log.replace(b"Channel 00/0 ", b"Channel 00/1 ") for log in logs]
    assert found([on_node(node, log) for node, log in enumerate(logs)]).keys() == {"GPUDirect"}
    assert found([on_node(node, log) for node, log in enumerate(sends)]) == {}


def test_run_is_warned_once_of_each_difference() -> None:
    run = running(OnFallback.STOP)
    alike, other = event("IB"), msgspec.structs.replace(event("IB", node=1), nccl="2.27.5", devices=("mlx5_0:1/IB",))
    assert run.do(msgspec.structs.replace(alike, nccl="2.27.7"), other, other) == []
    assert reported(run) == [NODES_DIFFER]
    assert run.do(msgspec.structs.replace(alike, nccl="2.27.7", devices=("a:1/IB", "b:1/IB"))) == []
    assert reported(run) == [NODES_DIFFER]
