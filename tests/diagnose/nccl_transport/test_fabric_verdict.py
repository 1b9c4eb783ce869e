"""What set-up logs prove of the fabric: each outcome with its lines and its remedy, and none without lines."""

from __future__ import annotations

import pytest
from bench.nccl_log_generator import Job, Version, versions
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import (
    JOB,
    OLD,
    by_rank,
    chunks,
    chunks_of_lines,
    edited,
    mixed,
    on_last_node,
    only,
)
from tests.golden import Golden

from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.nccl_transport import TransportReport, format_transport, read_setup_logs
from holdfast.diagnose.nccl_transport.transport_report import FabricOutcome
from holdfast.fabric.catalog import CATALOG

BOTH = pytest.mark.parametrize("job", [JOB, OLD], ids=["2.27.7", "2.18.6"])


def proves(transport: TransportReport, *words: str) -> None:
    """Evidence has these words, each on a line of a file that is named with its number."""
    quoted = [str(evidence) for evidence in transport.verdict.evidence]
    for word in words:
        assert any(word in quote for quote in quoted), quoted
    assert all(evidence.line > 0 and evidence.source.startswith("rank-") for evidence in transport.verdict.evidence)


def test_each_outcome_says_what_was_seen_expected_and_to_do(golden: Golden) -> None:
    infiniband, sockets = CATALOG["infiniband"], replace(JOB, network="Socket", gdr=False)
    asked = replace(sockets, env=(("NCCL_NET", "Socket"),))
    alone = edited(replace(JOB, nodes=1, within="SHM"), lambda _, line: line.replace(b"type PHB/", b"type NVL/"))
    reports = {
        "verified": read_setup_logs(by_rank(JOB), infiniband),
        "verified, TCP as asked": read_setup_logs(by_rank(asked)),
        "sockets": read_setup_logs(by_rank(sockets), infiniband),
        "sockets, fabric not known": read_setup_logs(by_rank(sockets)),
        "one node without GPUDirect": read_setup_logs(mixed(JOB, replace(JOB, gdr=False)), infiniband),
        "another fabric than the job's": read_setup_logs(by_rank(JOB), CATALOG["efa"]),
        "Ethernet devices": read_setup_logs(by_rank(replace(JOB, layer="RoCE")), infiniband),
        "host memory between GPUs": read_setup_logs(alone),
        "one node": read_setup_logs(by_rank(replace(JOB, nodes=1)), infiniband),
        "nothing of NCCL": read_setup_logs(chunks_of_lines("step 1 loss 2.3")),
    }
    golden(*(f"{name}\n\n" + "\n".join(format_transport(report)) for name, report in reports.items()))


# Verified


@BOTH
def test_network_that_all_nodes_use_is_verified(job: Job) -> None:
    transport = read_setup_logs(by_rank(job), CATALOG["infiniband"])
    assert transport.verdict.outcome is FabricOutcome.VERIFIED
    proves(transport, "via NET/IB/", "/GDRDMA", "Using network IB")
    assert transport.findings == ()


@pytest.mark.parametrize(
    ("network", "layer", "fabric"),
    [("IB", "RoCE", "roce"), ("AWS Libfabric", "IB", "efa"), ("IBext_v8", "IB", "infiniband"), ("Socket", "IB", "tcp")],
)
def test_network_of_the_jobs_fabric_is_verified(network: str, layer: str, fabric: str) -> None:
    job = replace(JOB, network=network, layer=layer, gdr=network != "Socket")
    assert read_setup_logs(by_rank(job), CATALOG[fabric]).verdict.outcome is FabricOutcome.VERIFIED


def test_tcp_that_every_rank_asks_for_is_verified() -> None:
    job = replace(JOB, network="Socket", gdr=False, env=(("NCCL_NET", "Socket"),))
    transport = read_setup_logs(by_rank(job))
    assert transport.verdict.outcome is FabricOutcome.VERIFIED


def test_nodes_joined_by_nvlink_alone_are_verified() -> None:
    lines = [
        line.replace(b"[send] via NET/IB/0/GDRDMA", b"via P2P/MNNVL").replace(b"NET/IB/1/GDRDMA", b"P2P/MNNVL")
        for rank in range(JOB.ranks)
        for line in JOB.log(rank)
        if b"[receive]" not in line
    ]
    transport = read_setup_logs(chunks("rank-all.log", b"".join(lines).replace(b"[send] via P2P", b"via P2P")))
    assert transport.verdict.outcome is FabricOutcome.VERIFIED
    assert transport.verdict.what == "NVLink connected the nodes"


def test_sends_from_host_memory_without_nvlink_are_how_nccl_does_it() -> None:
    def without_read(_: int, line: bytes) -> bytes:
        return line.replace(b"/GDRDMA", b"") if b"[send]" in line else line.replace(b"type NVL/", b"type PHB/")

    transport = read_setup_logs(edited(replace(JOB, within="IPC"), without_read))
    assert transport.verdict.outcome is FabricOutcome.VERIFIED
    assert transport.verdict.what == "IB connected the nodes"


# TCP instead


@BOTH
def test_sockets_where_infiniband_was_meant_are_a_fallback(job: Job) -> None:
    transport = read_setup_logs(by_rank(replace(job, network="Socket", gdr=False)), CATALOG["infiniband"])
    assert transport.verdict.outcome is FabricOutcome.TCP_FALLBACK
    proves(transport, "NET/IB : No device found", "via NET/Socket/")
    assert only(transport, "tcp-fallback").severity == "error"


@pytest.mark.parametrize("version", versions(), ids=str)
def test_one_node_on_sockets_is_named_in_every_version(version: Version) -> None:
    job = replace(JOB, version=version, within="IPC")
    transport = read_setup_logs(mixed(job, replace(job, network="Socket", gdr=False)))
    assert transport.verdict.outcome is FabricOutcome.TCP_FALLBACK
    assert transport.verdict.what == "plain TCP sockets carry the traffic on worker-0001"
    assert transport.verdict.expected == "some connections use IB"
    assert only(transport, "network-mixed").where == "worker-0001"
    assert only(transport, "transport-asymmetric").evidence


def test_variable_that_forbids_the_fabric_is_the_first_cause() -> None:
    job = replace(JOB, network="Socket", gdr=False, env=(("NCCL_IB_DISABLE", "1"),))
    transport = read_setup_logs(by_rank(job), CATALOG["infiniband"])
    assert transport.verdict.remedy == "Unset NCCL_IB_DISABLE."
    proves(transport, "NCCL_IB_DISABLE set by environment to 1")


def test_variable_set_to_zero_forbids_nothing() -> None:
    job = replace(JOB, network="Socket", gdr=False, env=(("NCCL_IB_DISABLE", "0"),))
    assert "Unset NCCL_IB_DISABLE" not in read_setup_logs(by_rank(job), CATALOG["infiniband"]).verdict.remedy


def test_sockets_where_nothing_says_what_else_there_is_say_so() -> None:
    transport = read_setup_logs(by_rank(replace(JOB, network="Socket", gdr=False)))
    assert transport.verdict.outcome is FabricOutcome.TCP_FALLBACK
    assert transport.verdict.expected == ""
    assert transport.verdict.remedy.endswith("If these nodes have no other fabric, set NCCL_NET=Socket.")
    assert only(transport, "tcp-fallback").severity == "warning"


# facebookresearch/detectron2#4730 and huggingface/accelerate#2183, shortened
def test_lines_of_an_image_without_libibverbs_name_it() -> None:
    def lines(host: str, rank: int) -> list[str]:
        head = f"{host}:5020:5091 [0] NCCL INFO "
        return [
            f"{head}NET/Plugin : No plugin found (libnccl-net.so), using internal implementation",
            f"{head}Failed to open libibverbs.so[.1]",
            f"{head}NET/Socket : Using [0]enp1s0f0:10.144.220.24<0>",
            f"{head}Using network Socket",
            f"{head}comm 0x55cd1a0bf930 rank {rank} nranks 2 cudaDev 0 busId 1a000 - Init COMPLETE",
        ]

    transport = read_setup_logs(chunks_of_lines(*lines("axon", 0), *lines("brane", 1), name="rank-0.log"))
    assert transport.verdict.outcome is FabricOutcome.TCP_FALLBACK
    assert transport.verdict.remedy.startswith("Install libibverbs1 and ibverbs-providers")
    proves(transport, "Failed to open libibverbs.so[.1]", "Using network Socket")


# Degraded


@BOTH
def test_one_node_without_gpudirect_is_degraded(job: Job) -> None:
    transport = read_setup_logs(mixed(job, replace(job, gdr=False)), CATALOG["infiniband"])
    assert transport.verdict.outcome is FabricOutcome.DEGRADED
    assert only(transport, "gdr-missing").where == "worker-0001"
    proves(transport, "via NET/IB/")


def test_other_network_than_the_jobs_fabric_is_degraded() -> None:
    transport = read_setup_logs(by_rank(JOB), CATALOG["efa"])
    assert transport.verdict.outcome is FabricOutcome.DEGRADED


def test_ethernet_devices_where_infiniband_was_meant_are_degraded() -> None:
    transport = read_setup_logs(by_rank(replace(JOB, layer="RoCE")), CATALOG["infiniband"])
    assert transport.verdict.outcome is FabricOutcome.DEGRADED


@BOTH
def test_fewer_devices_on_one_node_are_degraded(job: Job) -> None:
    transport = read_setup_logs(on_last_node(job, b" [1]mlx5_1:1/IB", b""))
    assert transport.verdict.outcome is FabricOutcome.DEGRADED
    finding = only(transport, "rdma-device-missing")
    assert finding.where == "worker-0001"
    assert "1 on 4 ranks" in finding.what
    assert all("NET/IB : Using" in line for line in finding.evidence)


@BOTH
def test_gpus_joined_through_host_memory_on_one_node_are_degraded(job: Job) -> None:
    job = replace(job, within="IPC")
    transport = read_setup_logs(mixed(job, replace(job, within="SHM")))
    assert transport.verdict.outcome is FabricOutcome.DEGRADED
    assert only(transport, "p2p-disabled").where == "worker-0001"


def test_host_memory_between_nvlinked_gpus_of_a_single_node_is_degraded() -> None:
    job = replace(JOB, nodes=1, within="SHM")
    transport = read_setup_logs(edited(job, lambda _, line: line.replace(b"type PHB/", b"type NVL/")))
    assert transport.verdict.outcome is FabricOutcome.DEGRADED


# Unknown


def test_nothing_of_nccl_is_unknown_and_says_how_to_get_it() -> None:
    transport = read_setup_logs(chunks_of_lines("step 1 loss 2.3", "node0:17:17 INFO NCCL is not here"))
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert "NCCL_DEBUG=INFO" in transport.verdict.missing
    assert transport.findings == ()


@BOTH
def test_missing_rank_is_unknown_and_named(job: Job) -> None:
    transport = read_setup_logs(block for block in by_rank(job) if block.source.name != "rank-5.log")
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert transport.verdict.missing == "the set-up log of rank 5 of all 7 ranks"
    assert only(transport, "ranks-missing").where == "rank 5"


@pytest.mark.parametrize("version", versions(), ids=str)
def test_log_cut_anywhere_never_verifies_and_names_no_root_cause(version: Version) -> None:
    """Each rank's log ends somewhere before its last connection."""
    job = replace(JOB, version=version, within="IPC")
    for part in range(1, 8):
        pile: list[LogChunk] = []
        for rank in range(job.ranks):
            log = job.log(rank)
            last = max(index for index, line in enumerate(log) if b"via NET/" in line or b" via P2P/" in line)
            pile += chunks(f"rank-{rank}.log", b"".join(log[: last * part // 8]))
        verdict = read_setup_logs(pile, CATALOG["infiniband"]).verdict
        if verdict.outcome is FabricOutcome.VERIFIED:
            # From 2.22 on connections follow the set-up: those seen by then must be of every node.
            assert version >= Version.of("2.22.3")
        else:
            assert verdict.outcome is FabricOutcome.UNKNOWN
            assert verdict.missing


def test_nodes_whose_connections_nobody_saw_are_unknown() -> None:
    job = replace(JOB, nodes=3)
    transport = read_setup_logs(edited(job, lambda rank, line: b"" if rank >= 8 and b" via " in line else line))
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert "worker-0002" in transport.verdict.missing


def test_single_node_needs_no_network_and_proves_none() -> None:
    transport = read_setup_logs(by_rank(replace(JOB, nodes=1)), CATALOG["infiniband"])
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN


def test_jobs_of_one_node_each_on_two_nodes_are_no_fallback() -> None:
    def alone(_: int, line: bytes) -> bytes:
        return line.replace(b"worker-0000", b"worker-0009")

    job = replace(JOB, nodes=1, network="Socket", gdr=False)
    pile = [*by_rank(job), *edited(job, alone)]
    assert read_setup_logs(pile, CATALOG["infiniband"]).verdict.outcome is FabricOutcome.UNKNOWN


def test_ranks_that_did_not_end_their_set_up_are_unknown() -> None:
    transport = read_setup_logs(edited(OLD, lambda rank, line: b"" if rank == 3 and b"Init COMPLETE" in line else line))
    assert transport.verdict.outcome is FabricOutcome.UNKNOWN
    assert only(transport, "comm-init-unfinished").where == "rank 3"
