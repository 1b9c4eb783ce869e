"""What one node's ranks log is judged against the promised fabric: each outcome, its cause and its fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.nccl_log_generator import Job, Version, versions
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import JOB, OLD, chunks

from holdfast.diagnose.nccl_transport import FabricJudgement, SetupLogReader, judge, observations
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome
from holdfast.events import FabricObserved

INCIDENTS = Path(__file__).parents[2] / "incidents" / "public.jsonl"
BOTH = pytest.mark.parametrize("job", [JOB, OLD], ids=["2.27.7", "2.18.6"])
ON_SOCKETS = replace(JOB, network="Socket", gdr=False)


def base(promised: str, node: int = 0) -> FabricObserved:
    return FabricObserved(
        at=1.0,
        node=node,
        replica=0,
        attempt=0,
        promised=promised,
        communicator="",
        size=0,
        ranks=(),
        spans_nodes=False,
    )


def observed(*logs: bytes, promised: str = "infiniband", interfaces: str = "") -> list[FabricObserved]:
    """What an agent sends when its ranks have logged this."""
    reader = SetupLogReader()
    for rank, data in enumerate(logs):
        for chunk in chunks(f"rank-{rank}.log", data, node="node0"):
            reader.feed(chunk)
    return [*observations(reader.result(), base(promised), interfaces)]


def logs_of(job: Job, node: int = 0) -> list[bytes]:
    return [b"".join(job.log(rank)) for rank in range(node * job.gpus, (node + 1) * job.gpus)]


def judged(job: Job, promised: str = "infiniband", node: int = 0, interfaces: str = "") -> FabricJudgement:
    (seen,) = observed(*logs_of(job, node), promised=promised, interfaces=interfaces)
    return judge(seen)


@pytest.mark.parametrize("version", versions(), ids=str)
def test_each_version_shows_that_a_node_has_the_promised_fabric(version: Version) -> None:
    job = replace(JOB, version=version, within="IPC")
    for node in range(job.nodes):
        found = judged(job, node=node)
        assert (found.outcome, found.finding) == (FabricOutcome.VERIFIED, None)
        assert found.line == "infiniband, 2 NICs, GPUDirect, as promised"


@BOTH
def test_observation_says_what_connects_the_ranks_of_a_node(job: Job) -> None:
    (seen,) = observed(*logs_of(job, node=1))
    assert (seen.size, seen.ranks, seen.spans_nodes) == (8, ((4, 7),), True)
    assert (seen.network, seen.channels, seen.nics) == ("IB", 2, 2)
    assert seen.devices == ("mlx5_0:1/IB", "mlx5_1:1/IB")
    assert seen.between.keys() == {"NET/IB/GDRDMA"}
    assert all(route.startswith("P2P/") for route in seen.within)


@BOTH
def test_network_is_judged_before_any_rank_has_connected(job: Job) -> None:
    lines = [line for log in logs_of(replace(ON_SOCKETS, version=job.version)) for line in log.splitlines(True)]
    (seen,) = observed(b"".join(line for line in lines if b" via " not in line))
    assert seen.between == {}
    assert judge(seen).outcome is FabricOutcome.TCP_FALLBACK


def test_communicator_whose_set_up_has_not_ended_is_not_judged() -> None:
    lines = logs_of(JOB)
    lines[2] = b"".join(line for line in lines[2].splitlines(True) if b"Init COMPLETE" not in line)
    assert observed(*lines) == []


def test_communicator_within_one_node_needs_no_network() -> None:
    found = judged(replace(ON_SOCKETS, nodes=1))
    assert found == FabricJudgement(outcome=FabricOutcome.UNKNOWN, line="")


@pytest.mark.parametrize(
    ("network", "layer", "fabric"),
    [("IB", "RoCE", "roce"), ("AWS Libfabric", "IB", "efa"), ("IBext_v8", "IB", "infiniband"), ("Socket", "IB", "tcp")],
)
def test_network_of_each_fabric_is_as_promised(network: str, layer: str, fabric: str) -> None:
    found = judged(replace(JOB, network=network, layer=layer, gdr=network != "Socket"), fabric)
    assert found.finding is None
    assert found.line.startswith(f"{fabric}, ")
    assert found.line.endswith(", as promised")


@pytest.mark.parametrize(
    ("env", "promised", "cause", "fix"),
    [
        ((), "infiniband", "NCCL found no RDMA device", "/dev/infiniband"),
        ((("NCCL_IB_DISABLE", "1"),), "infiniband", "NCCL_IB_DISABLE is set", "Unset NCCL_IB_DISABLE"),
        ((("NCCL_NET", "Socket"),), "roce", "NCCL_NET=Socket is set", "Unset NCCL_NET"),
        ((("NCCL_IB_DISABLE", "0"),), "infiniband", "NCCL found no RDMA device", "IPC_LOCK"),
    ],
)
def test_fallback_to_sockets_names_its_cause_and_fix(
    env: tuple[tuple[str, str], ...], promised: str, cause: str, fix: str
) -> None:
    found = judged(replace(ON_SOCKETS, env=env), promised)
    assert (found.outcome, found.line) == (FabricOutcome.TCP_FALLBACK, f"TCP instead of {promised}")
    assert found.finding is not None
    assert found.finding.what.endswith(f"instead of {promised}: {cause}")
    assert found.finding.where == "node0"
    assert fix in found.finding.remedy
    assert found.finding.evidence


def test_fallback_for_lack_of_a_plugin_names_the_plugin() -> None:
    line = b"worker-0000:41000:41000 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so)\n"
    first, *others = logs_of(ON_SOCKETS)
    (seen,) = observed(line + first, *others, promised="efa")
    found = judge(seen).finding
    assert found is not None
    assert found.what.endswith("instead of efa: NCCL found no network plugin")
    assert found.evidence == (line.decode().strip(),)


def test_one_rank_on_sockets_is_named() -> None:
    logs = [*logs_of(JOB)[:3], logs_of(ON_SOCKETS)[3]]
    (seen,) = observed(*logs)
    found = judge(seen)
    assert found.outcome is FabricOutcome.TCP_FALLBACK
    assert found.finding is not None
    assert found.finding.what.endswith(
        "instead of infiniband: rank 3: chose Socket, the others of this node IB: NCCL found no RDMA device"
    )


def test_one_rank_that_found_fewer_devices_is_named() -> None:
    logs = [*logs_of(JOB)[:3], logs_of(JOB)[3].replace(b" [1]mlx5_1:1/IB", b"")]
    (seen,) = observed(*logs)
    assert seen.differing == ("rank 3: found 1 RDMA devices, the others of this node 2",)
    assert judge(seen).outcome is FabricOutcome.DEGRADED


@BOTH
def test_traffic_through_host_memory_is_degraded(job: Job) -> None:
    found = judged(replace(job, gdr=False))
    assert found.outcome is FabricOutcome.DEGRADED
    assert found.line.startswith("infiniband, 2 NICs, but ")
    assert found.finding is not None
    assert "without GPUDirect RDMA" in found.finding.what
    assert "nvidia_peermem" in found.finding.remedy


def test_other_link_layer_is_degraded() -> None:
    found = judged(replace(JOB, layer="RoCE"))
    assert found.outcome is FabricOutcome.DEGRADED
    assert "are not IB" in found.line


def test_other_network_is_degraded() -> None:
    found = judged(JOB, "efa")
    assert (found.outcome, found.line) == (FabricOutcome.DEGRADED, "efa, 2 NICs, GPUDirect, but IB instead of efa")


@pytest.mark.parametrize(
    ("wanted", "as_promised"),
    [("eth0", True), ("eth", True), ("=eth0", True), ("net1", False), ("=eth", False), ("^eth", False), ("^lo", True)],
)
def test_interface_that_the_run_does_not_name_is_found(wanted: str, as_promised: bool) -> None:
    found = judged(ON_SOCKETS, "tcp", interfaces=wanted)
    assert (found.outcome is FabricOutcome.VERIFIED) == as_promised
    if found.finding is not None:
        assert "eth0, which NCCL_SOCKET_IFNAME does not name" in found.finding.what
        assert "fabric.env" in found.finding.remedy


def test_each_communicator_of_a_job_with_replicas_is_observed() -> None:
    job = replace(JOB, nodes=4, replicas=2)
    seen = observed(*logs_of(job))
    assert sorted(each.size for each in seen) == [2, 2, 2, 2, 8, 16]
    assert {judge(each).outcome for each in seen} == {FabricOutcome.VERIFIED}


def test_recorded_lines_of_a_container_without_devices_name_the_cause() -> None:
    incidents = map(json.loads, INCIDENTS.read_text().splitlines())
    (lines,) = (incident["evidence"] for incident in incidents if incident["id"] == "NVIDIA/nccl#941")
    prefix = "05-06-76-200:7839:7911 [0] NCCL INFO "
    ended = f"{prefix}comm 0x7f2a38000fa0 rank 0 nranks 16 cudaDev 0 busId 7000 - Init COMPLETE"
    assert all(line.startswith(prefix) for line in lines)
    (seen,) = observed("".join(f"{line}\n" for line in (*lines, ended)).encode())
    found = judge(seen)
    assert found.line == "TCP instead of infiniband"
    assert found.finding is not None
    assert found.finding.what.endswith(": NCCL found no RDMA device")
    assert found.finding.evidence == (f"{prefix}NET/IB : No device found.",)
