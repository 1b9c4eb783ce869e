"""What differs between ranks and nodes that ought to be alike, and how all of it is said to a person and a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import JOB, OLD, by_rank, chunks, edited, mixed, on_last_node, only
from tests.golden import Golden

from holdfast.diagnose.log_chunk import LogChunk
from holdfast.diagnose.nccl_transport import TransportReport, format_transport, read_setup_logs, to_dict
from holdfast.fabric.catalog import CATALOG

BOTH = pytest.mark.parametrize("job", [JOB, OLD], ids=["2.27.7", "2.18.6"])
WIDE = replace(JOB, nodes=4)


def codes(transport: TransportReport) -> set[str]:
    return {finding.code for finding in transport.findings}


@BOTH
def test_ranks_that_are_alike_differ_in_nothing(job: Job) -> None:
    assert codes(read_setup_logs(by_rank(job))) == set()


def test_variable_of_another_value_is_skew() -> None:
    job = replace(WIDE, env=(("NCCL_IB_HCA", "mlx5"), ("NCCL_SOCKET_IFNAME", "eth0")))
    finding = only(read_setup_logs(on_last_node(job, b"to mlx5\n", b"to mlx5_0\n")), "env-skew")
    assert finding.what == "NCCL_IB_HCA differs between ranks: mlx5 on 12 ranks, mlx5_0 on 4 ranks"
    assert finding.where == "worker-0003"
    assert any("NCCL_IB_HCA set by environment to mlx5_0" in line for line in finding.evidence)


def test_variable_that_one_node_lacks_is_skew() -> None:
    job = replace(WIDE, env=(("NCCL_IB_HCA", "mlx5"), ("NCCL_DEBUG_SUBSYS", "INIT")))
    finding = only(read_setup_logs(on_last_node(job, b"NCCL_IB_HCA set by environment to mlx5\n", b"\n")), "env-skew")
    assert finding.what == "NCCL_IB_HCA=mlx5 on 3 nodes, but not set on 1"
    assert finding.where == "worker-0003"


def test_variable_that_a_cut_log_lacks_is_no_skew() -> None:
    job = replace(WIDE, env=(("NCCL_IB_HCA", "mlx5"),))
    pile = list(edited(job, lambda rank, line: b"" if rank >= 12 and b"NCCL_IB_HCA" in line else line))
    assert "env-skew" not in codes(read_setup_logs(pile))


def test_interfaces_may_differ_from_node_to_node() -> None:
    assert codes(read_setup_logs(on_last_node(JOB, b"eth0", b"ens5"))) == set()


def test_one_node_with_another_nccl_is_a_version_mismatch() -> None:
    finding = only(read_setup_logs(mixed(WIDE, replace(WIDE, version=Version.of("2.27.5")))), "version-mismatch")
    assert finding.what.endswith("2.27.7+cuda12.4 on 12 ranks, 2.27.5+cuda12.4 on 4 ranks")
    assert finding.where == "worker-0003"


def test_two_versions_on_equally_many_ranks_name_no_root_cause() -> None:
    finding = only(read_setup_logs(mixed(JOB, replace(JOB, version=Version.of("2.27.5")))), "version-mismatch")
    assert finding.where == ""
    assert len(finding.evidence) == 2


def test_one_node_with_another_driver_is_told() -> None:
    finding = only(
        read_setup_logs(on_last_node(WIDE, b"cudaDriverVersion 12040", b"cudaDriverVersion 12020")), "driver-mismatch"
    )
    assert finding.where == "worker-0003"


def test_one_node_with_another_plugin_is_told() -> None:
    job = replace(WIDE, network="AWS Libfabric")
    transport = read_setup_logs(on_last_node(job, b"aws-ofi-nccl 1.9.1-aws", b"aws-ofi-nccl 1.7.4-aws"))
    assert only(transport, "plugin-mismatch").where == "worker-0003"


@BOTH
def test_meeting_over_a_bridge_of_containers_is_the_wrong_interface(job: Job) -> None:
    transport = read_setup_logs(on_last_node(job, b"eth0:10.0.0.2", b"docker0:172.17.0.1"))
    finding = only(transport, "wrong-interface")
    assert finding.where == "worker-0001"
    assert any("docker0:172.17.0.1" in line for line in finding.evidence)


def test_ethernet_device_among_infiniband_is_told() -> None:
    transport = read_setup_logs(on_last_node(WIDE, b"mlx5_1:1/IB", b"mlx5_1:1/RoCE"))
    assert only(transport, "link-layer-mixed").where == "worker-0003"


def test_node_that_uses_fewer_of_its_devices_is_told() -> None:
    transport = read_setup_logs(on_last_node(WIDE, b"via NET/IB/1/", b"via NET/IB/0/"))
    assert only(transport, "fewer-nics-used").where == "worker-0003"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("version", ["2.18.6", "2.21.5", "2.27.7", "2.32.3"])
def test_communicators_are_called_by_who_is_in_them(version: str, split: bool) -> None:
    job = replace(JOB, version=Version.of(version), nodes=4, replicas=2, split=split)
    names = [communicator.name for communicator in read_setup_logs(by_rank(job)).communicators]
    assert names[:3] == ["all 16 ranks", "ranks 0-7", "ranks 8-15"]
    assert sorted(names[3:]) == sorted(f"ranks {rank}, {rank + 8}" for rank in range(8))


def test_communicators_are_called_by_replica_where_the_logs_place_says_which() -> None:
    job = replace(JOB, nodes=4, replicas=2)
    logs = (
        replace(block, source=replace(block.source, name=f"{block.source.name}-{rank}", replica=rank // 8))
        for rank in range(16)
        for block in chunks("rank.log", b"".join(job.log(rank)))
    )
    names = [communicator.name for communicator in read_setup_logs(logs).communicators]
    assert names[:3] == ["all 16 ranks", "replica 0", "replica 1"]
    assert names[3:] == [f"across replicas 0-1, rank {rank}" for rank in range(8)]


def test_replica_is_also_taken_from_what_a_log_says_of_its_environment() -> None:
    def logs(replica: int) -> Iterator[LogChunk]:
        for rank in range(JOB.ranks):
            log = b"".join(JOB.log(rank)).replace(b"worker-", b"w%d-" % replica)
            said = b"HOLDFAST_REPLICA=%d\n" % replica + log.replace(b"commId 0x", b"commId 0x%d" % replica)
            yield from chunks(f"{replica}-{rank}.log", said)

    transport = read_setup_logs((*logs(0), *logs(1)))
    assert [communicator.name for communicator in transport.communicators] == ["replica 0", "replica 1"]
    assert {process.replica for process in transport.processes} == {0, 1}


def test_sockets_of_communicators_across_replicas_alone_are_named(golden: Golden) -> None:
    job = replace(JOB, version=Version.of("2.21.5"), nodes=4, replicas=2)

    def across(rank: int, line: bytes) -> bytes:
        own = b":%d:%d " % (job.pid(rank), job.pid(rank) + 103 + rank % 8)
        return line.replace(b"NET/IB/", b"NET/Socket/").replace(b"/GDRDMA", b"") if own in line else line

    transport = read_setup_logs(edited(job, across))
    assert transport.verdict.outcome == "tcp-fallback"
    golden("\n".join(format_transport(transport)))


# Said to a person


def test_matrix_of_many_nodes_becomes_a_summary_that_names_the_exception(golden: Golden) -> None:
    job = replace(JOB, nodes=24, gpus=2)
    golden("\n".join(format_transport(read_setup_logs(on_last_node(job, b"/GDRDMA", b"")), width=100)))


def test_torn_lines_are_counted_and_count_for_nothing() -> None:
    transport = read_setup_logs(
        edited(JOB, lambda _, line: line.replace(b"/GDRDMA\n", b"/GDR\n", 1) if b"00/0" in line else line)
    )
    assert transport.truncated_lines > 0
    assert any("were torn" in line for line in format_transport(transport))


# Said to a machine


def test_document_is_plain_json_with_every_connection() -> None:
    job = replace(JOB, nodes=2, replicas=2)
    transport = read_setup_logs(by_rank(job), CATALOG["infiniband"])
    plain = json.loads(msgspec.json.encode(to_dict(transport)))
    assert plain["verdict"]["outcome"] == "fabric-verified"
    assert [one["name"] for one in plain["communicators"]] == [one.name for one in transport.communicators]
    world = plain["communicators"][0]
    assert {member["rank"] for member in world["members"]} == set(range(8))
    assert len(world["links"]) == len(transport.communicators[0].links)
    told = {(one["from"], one["to"]): one["via"] for one in world["nodes"]}
    assert told["worker-0000", "worker-0001"] == told["worker-0001", "worker-0000"]
    assert set(told["worker-0000", "worker-0001"]) == {"IB+GDR"}
