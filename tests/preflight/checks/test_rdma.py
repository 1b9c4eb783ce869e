"""Checks of RDMA devices, ports, rates and partitions."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.rdma_nodes import efa_files, h100_files, rdma_node, roce_files

from holdfast.findings import Severity
from holdfast.preflight.checks import rdma
from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.run_checks import Check

CHECKS = (rdma.rdma_devices, rdma.rdma_ports, rdma.rdma_rate)
DOWN = {"state": "1: DOWN", "phys_state": "2: Polling"}


def change(files: dict[str, str], devices: str, **values: str) -> dict[str, str]:
    """The files with other attributes of the ports mlx5_0, mlx5_1, ..., named by a digit each."""
    return files | {
        f"sys/class/infiniband/mlx5_{n}/ports/1/{name}": text for n in devices for name, text in values.items()
    }


@pytest.mark.parametrize("hcas", ["", "mlx5", "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7"])
def test_healthy_h100_node_passes(node: MakeNode, hcas: str) -> None:
    view = rdma_node(node, h100_files(), env={"NCCL_IB_HCA": hcas})
    assert [codes([*check(view)]) for check in CHECKS] == [[], [], []]


def test_healthy_efa_node_passes(node: MakeNode) -> None:
    view = rdma_node(node, efa_files(), driver="efa", network="AWS Libfabric")
    assert [codes([*check(view)]) for check in CHECKS] == [[], [], []]


@pytest.mark.parametrize("check", CHECKS)
def test_network_without_rdma_needs_nothing(node: MakeNode, check: Check) -> None:
    assert codes([*check(node(network="Socket"))]) == []


@pytest.mark.parametrize("check", CHECKS)
def test_node_without_sysfs_is_no_pass(node: MakeNode, check: Check) -> None:
    with pytest.raises(NotLookedAt, match="/sys/class"):
        [*check(node(network="IB"))]


@pytest.mark.parametrize("network", ["IB", "AWS Libfabric"])
def test_node_without_devices_fails(node: MakeNode, network: str) -> None:
    view = node({"sys/class/net/eth0/mtu": "1500"}, network=network)
    assert codes([*rdma.rdma_devices(view)]) == ["rdma-no-device"]
    for check in CHECKS[1:]:
        with pytest.raises(NotLookedAt, match="no RDMA port"):
            [*check(view)]


@pytest.mark.parametrize(
    ("hcas", "expected"),
    [
        ("mlx4", ["rdma-hca-unknown"]),
        ("=mlx5", ["rdma-hca-unknown"]),
        ("^mlx5", ["rdma-hca-unknown"]),
        ("=mlx5_0,mlx5_12", ["rdma-hca-missing"]),
        ("^mlx5_bond_0,mlx5_12", []),
    ],
)
def test_hca_list_names_devices_of_the_node(node: MakeNode, hcas: str, expected: list[str]) -> None:
    assert codes([*rdma.rdma_devices(rdma_node(node, h100_files(), env={"NCCL_IB_HCA": hcas}))]) == expected


@pytest.mark.parametrize(
    ("missing", "hcas", "expected"),
    [
        (range(9), "", [Severity.ERROR]),
        (range(4, 9), "", []),  # a pod with four of the adapters
        (range(4, 9), "=mlx5_0,mlx5_4", [Severity.WARNING]),
    ],
)
def test_container_has_the_files_of_devices(
    node: MakeNode, missing: range, hcas: str, expected: list[Severity]
) -> None:
    files = {
        path: text for path, text in h100_files().items() if path not in {f"dev/infiniband/uverbs{n}" for n in missing}
    }
    found = [*rdma.rdma_devices(rdma_node(node, files, env={"NCCL_IB_HCA": hcas}))]
    assert [(finding.code, finding.severity) for finding in found] == [
        ("rdma-device-file-missing", severity) for severity in expected
    ]


@pytest.mark.parametrize(
    ("down", "hcas", "expected"),
    [
        ("3", "", [Severity.WARNING]),
        ("3", "=mlx5_2,mlx5_3", [Severity.ERROR]),
        ("3", "=mlx5_1,mlx5_2", []),
        ("1357", "", []),  # the second port of each card has no cable
        ("01234567", "", [Severity.ERROR]),
    ],
)
def test_port_that_is_down(node: MakeNode, down: str, hcas: str, expected: list[Severity]) -> None:
    view = rdma_node(node, change(h100_files(), down, **DOWN), env={"NCCL_IB_HCA": hcas})
    found = [*rdma.rdma_ports(view)]
    assert [(finding.code, finding.severity) for finding in found] == [("rdma-port-down", each) for each in expected]
    if expected == [Severity.WARNING]:
        assert (found[0].where, found[0].evidence) == ("mlx5_3:1", ("mlx5_3:1: 1: DOWN, 2: Polling",))


def test_node_of_which_no_port_is_active_fails_for_whatever_reasons(node: MakeNode) -> None:
    files = change(change(h100_files(), "0123", state="2: INIT"), "4567", **DOWN)
    found = [*rdma.rdma_ports(rdma_node(node, files))]
    assert [(each.code, each.severity) for each in found] == [
        ("rdma-subnet-manager", Severity.ERROR),
        ("rdma-port-down", Severity.ERROR),
    ]


@pytest.mark.parametrize(("waiting", "severity"), [("5", Severity.WARNING), ("01234567", Severity.ERROR)])
def test_port_that_awaits_a_subnet_manager(node: MakeNode, waiting: str, severity: Severity) -> None:
    (found,) = rdma.rdma_ports(rdma_node(node, change(h100_files(), waiting, state="2: INIT")))
    assert (found.code, found.severity) == ("rdma-subnet-manager", severity)
    assert found.where == ", ".join(f"mlx5_{each}:1" for each in waiting)


# What ibsim writes for a host (Debian's libumad2sim0 0.10) before opensm has run.
IBSIM = {
    "sys/class/infiniband/ibsim0/hca_type": "simulator",
    "sys/class/infiniband/ibsim0/node_type": "1: CA",
    "sys/class/infiniband/ibsim0/ports/1/gids/0": "0000:0000:0000:0000:0000:0000:0010:0001",
    "sys/class/infiniband/ibsim0/ports/1/phys_state": "5: LinkUp",
    "sys/class/infiniband/ibsim0/ports/1/pkeys/0": "0xffff",
    "sys/class/infiniband/ibsim0/ports/1/rate": "10 Gb/sec (4X)",
    "sys/class/infiniband/ibsim0/ports/1/state": "2: INIT",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["rdma-subnet-manager"]),
        ({"state": "4: ACTIVE"}, []),
        ({"state": "4: ACTIVE", "pkeys/0": "0x7fff"}, ["rdma-partition-limited"]),
    ],
)
def test_port_of_a_simulated_fabric(node: MakeNode, files: dict[str, str], expected: list[str]) -> None:
    changed = {f"sys/class/infiniband/ibsim0/ports/1/{name}": text for name, text in files.items()}
    assert codes([*rdma.rdma_ports(rdma_node(node, IBSIM | changed))]) == expected


@pytest.mark.parametrize(
    ("keys", "index", "expected"),
    [
        ({"pkeys/0": "0x7fff", "pkeys/1": "0x8012"}, "", ["rdma-partition-limited"]),
        ({"pkeys/0": "0x7fff", "pkeys/1": "0x8012"}, "1", []),
        ({"pkeys/0": "0x8012", "pkeys/1": "0x7fff"}, "", []),
        ({"pkeys/0": "0x0000"}, "", []),  # no key is readable here: no proof
    ],
)
def test_port_is_full_member_of_its_partition(
    node: MakeNode, keys: dict[str, str], index: str, expected: list[str]
) -> None:
    view = rdma_node(node, change(h100_files(), "01234567", **keys), env={"NCCL_IB_PKEY": index})
    found = [*rdma.rdma_ports(view)]
    assert codes(found) == expected
    assert all(finding.evidence[6] == ("mlx5_6:1: pkeys 0: 0x7fff, 1: 0x8012") for finding in found)


@pytest.mark.parametrize(
    ("slow", "hcas", "expected"),
    [
        ("4", "", ["mlx5_4:1"]),
        ("0246", "", []),  # half of the ports in another network
        ("0", "=mlx5_0,mlx5_1", ["mlx5_0:1"]),
        ("0", "=mlx5_1,mlx5_2", []),
        ("01234567", "", []),
    ],
)
def test_port_slower_than_its_siblings(node: MakeNode, slow: str, hcas: str, expected: list[str]) -> None:
    view = rdma_node(node, change(h100_files(), slow, rate="100 Gb/sec (1X NDR)"), env={"NCCL_IB_HCA": hcas})
    found = [*rdma.rdma_rate(view)]
    assert [finding.where for finding in found] == expected
    assert codes(found) == ["rdma-port-slow"] * len(expected)


def test_facts_of_infiniband_node(node: MakeNode) -> None:
    assert rdma.rdma_facts(rdma_node(node, change(h100_files(), "7", **DOWN))) == {
        "active RDMA ports": "7 x 400 Gb/sec (4X NDR) InfiniBand",
        "RDMA adapters": "8 x MT_0000000838",
        "RDMA firmware": "MT_0000000838 28.41.1000",
        "InfiniBand partitions": "0xffff",
    }


def test_facts_of_roce_node(node: MakeNode) -> None:
    view = rdma_node(node, roce_files(), env={"NCCL_IB_GID_INDEX": "3"})
    assert rdma.rdma_facts(view) == {
        "active RDMA ports": "2 x 200 Gb/sec (4X HDR) Ethernet",
        "RDMA adapters": "2 x MT_0000000838",
        "RDMA firmware": "MT_0000000838 28.39.1002",
        "RoCE MTU": "2 x 9000",
        "RoCE GID": "2 x index 3, RoCE v2, IPv4",
    }


def test_index_that_nccl_chooses_is_no_fact(node: MakeNode) -> None:
    assert rdma.rdma_facts(rdma_node(node, roce_files(first=4)))["RoCE GID"] == "2 x RoCE v2, IPv4"


def test_node_without_rdma_has_no_facts(node: MakeNode) -> None:
    assert rdma.rdma_facts(node()) == {}
    assert rdma.rdma_facts(node(network="IB")) == {}


def test_facts_of_efa_node(node: MakeNode) -> None:
    assert rdma.rdma_facts(rdma_node(node, efa_files(), driver="efa", network="AWS Libfabric")) == {
        "active RDMA ports": "2 x 100 Gb/sec (4X EDR) Unknown",
        "RDMA adapters": "2 x efa",
        "RDMA firmware": "0.0.0.0",
    }
