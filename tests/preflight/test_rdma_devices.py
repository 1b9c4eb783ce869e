"""RDMA devices read from sysfs, and the ports that NCCL_IB_HCA selects."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode
from tests.preflight.rdma_nodes import efa_files, h100_files, rdma_node, roce_files

from holdfast.fabric import catalog
from holdfast.preflight.node_view import NotLookedAt
from holdfast.preflight.rdma_devices import find_ports, gids, needs_rdma, partition_keys, usable_gids, used_ports


def test_ports_of_h100_node(node: MakeNode) -> None:
    view = rdma_node(node, h100_files())
    ports = find_ports(view)
    assert [port.device for port in ports] == [*(f"mlx5_{n}" for n in range(8)), "mlx5_bond_0"]
    first = ports[0]
    assert (first.driver, first.model, first.firmware) == ("mlx5_core", "MT_0000000838", "28.41.1000")
    assert (first.name, first.active, first.rate_gbps, first.is_roce) == ("mlx5_0:1", True, 400, False)
    assert partition_keys(view, first) == {0: 0xFFFF}
    assert ports[-1].is_roce


@pytest.mark.parametrize(
    ("hcas", "expected", "named"),
    [
        ("", "01234567", False),  # the bond serves the host
        ("mlx5", "01234567", False),
        ("^mlx5_bond", "01234567", False),
        ("mlx5_2", "2", True),
        ("=mlx5_0,mlx5_3:1", "03", True),
        ("=mlx5_0,mlx5_3:2", "0", True),
        ("^=mlx5_0,mlx5_1", "234567", False),
        ("=mlx5", "", False),
    ],
)
def test_hca_list_selects_ports(node: MakeNode, hcas: str, expected: str, named: bool) -> None:
    used = used_ports(rdma_node(node, h100_files(), env={"NCCL_IB_HCA": hcas}))
    assert ([port.device for port in used.ports], used.named) == ([f"mlx5_{n}" for n in expected], named)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["mlx5_6"]),
        ({"environ": {"NCCL_IB_HCA": "mlx5_2"}}, ["mlx5_2"]),
        ({"environ": {"NCCL_IB_HCA": "mlx5_2"}, "env": {"NCCL_IB_HCA": "mlx5_1"}}, ["mlx5_1"]),
    ],
)
def test_job_beats_agent_beats_system_wide_file(
    node: MakeNode, fields: dict[str, dict[str, str]], expected: list[str]
) -> None:
    files = h100_files() | {"etc/nccl.conf": "NCCL_DEBUG=WARN\nNCCL_IB_HCA==mlx5_6\n"}
    assert [port.device for port in used_ports(rdma_node(node, files, **fields)).ports] == expected


def test_container_uses_devices_whose_files_it_has(node: MakeNode) -> None:
    view = rdma_node(node, h100_files())
    for number in range(2, 9):
        (view.root / f"dev/infiniband/uverbs{number}").unlink()
    assert [port.device for port in used_ports(view).ports] == ["mlx5_0", "mlx5_1"]


def test_gids_of_roce_port(node: MakeNode) -> None:
    view = rdma_node(node, roce_files())
    table = gids(view, find_ports(view)[0])
    assert [(gid.index, gid.is_v2, gid.routable, gid.family) for gid in table] == [
        (0, False, False, "IPv6"),
        (1, True, False, "IPv6"),
        (2, False, True, "IPv4"),
        (3, True, True, "IPv4"),
    ]
    assert [(gid.index, gid.interface) for gid in usable_gids(table)] == [(3, "ens3np0")]


def test_nccl_itself_opens_no_efa_device(node: MakeNode) -> None:
    assert find_ports(rdma_node(node, efa_files(), driver="efa", network="IB")) == ()


def test_efa_needs_efa_devices(node: MakeNode) -> None:
    assert find_ports(rdma_node(node, h100_files(), network="AWS Libfabric")) == ()


def test_iwarp_is_no_roce(node: MakeNode) -> None:
    view = rdma_node(node, roce_files() | {"sys/class/infiniband/mlx5_0/node_type": "4: RNIC"})
    assert [port.is_roce for port in find_ports(view)] == [False, True]


def test_efa_ignores_hca_list(node: MakeNode) -> None:
    view = rdma_node(node, efa_files(), driver="efa", network="AWS Libfabric", env={"NCCL_IB_HCA": "mlx5"})
    assert [port.device for port in used_ports(view).ports] == ["rdmap85s0", "rdmap86s0"]


def test_every_fabric_of_the_catalogue_is_known(node: MakeNode) -> None:
    rdma = {name for name, row in catalog.CATALOG.items() if needs_rdma(node(network=row.network).wanted)}
    assert rdma == set(catalog.CATALOG) - {"tcp", "gke-tcpx", "gke-tcpxo"}  # those are TCP


def test_node_without_sysfs_is_not_looked_at(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="sysfs is not mounted"):
        find_ports(node(network="IB"))
