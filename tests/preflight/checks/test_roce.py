"""Checks of the GIDs and the MTU of RoCE ports."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.rdma_nodes import gid_files, h100_files, rdma_node, roce_files

from holdfast.findings import Severity
from holdfast.preflight.checks import roce
from holdfast.preflight.node_view import NotLookedAt

PORTS = "mlx5_0:1, mlx5_1:1"


@pytest.mark.parametrize("index", ["", "-1", "3"])
def test_healthy_roce_node_passes(node: MakeNode, index: str) -> None:
    view = rdma_node(node, roce_files(), env={"NCCL_IB_GID_INDEX": index})
    assert codes([*roce.rdma_gid(view), *roce.rdma_mtu(view)]) == []


@pytest.mark.parametrize("index", ["", "3"])
def test_infiniband_needs_neither(node: MakeNode, index: str) -> None:
    view = rdma_node(node, h100_files(), env={"NCCL_IB_GID_INDEX": index})
    assert codes([*roce.rdma_gid(view), *roce.rdma_mtu(view)]) == []


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("6", ("rdma-gid-empty", Severity.ERROR)),
        ("2", ("rdma-gid-version", Severity.ERROR)),
        ("1", ("rdma-gid-link-local", Severity.WARNING)),
    ],
)
def test_index_that_the_job_sets(node: MakeNode, index: str, expected: tuple[str, Severity]) -> None:
    found = [*roce.rdma_gid(rdma_node(node, roce_files(), env={"NCCL_IB_GID_INDEX": index}))]
    assert [(finding.code, finding.severity) for finding in found] == [expected]
    assert found[0].where == PORTS
    assert f"NCCL_IB_GID_INDEX={index}" in found[0].what
    assert found[0].evidence[-1] == "mlx5_0:1 GID 3: ::ffff:b00:48 RoCE v2 ens3np0"


def test_index_of_the_host_is_empty_in_a_pod(node: MakeNode) -> None:
    # https://github.com/NVIDIA/nccl/issues/1573: in a pod with macvlan interfaces the table begins at index 4
    view = rdma_node(node, roce_files(first=4), env={"NCCL_IB_GID_INDEX": "3"})
    assert codes([*roce.rdma_gid(view)]) == ["rdma-gid-empty"]


def test_version_1_that_the_job_wants(node: MakeNode) -> None:
    env = {"NCCL_IB_GID_INDEX": "2", "NCCL_IB_ROCE_VERSION_NUM": "1"}
    assert codes([*roce.rdma_gid(rdma_node(node, roce_files(), env=env))]) == []


def test_only_the_port_without_address_is_named(node: MakeNode) -> None:
    files = {
        path: text
        for path, text in roce_files().items()
        if not path.startswith("sys/class/infiniband/mlx5_1/ports/1/gid")
    }
    files |= gid_files(
        "mlx5_1", {0: ("fe80::a288:c2ff:fe5b:374", "RoCE v2"), 1: ("::ffff:169.254.3.1", "RoCE v2")}, "ens2np0"
    )
    found = [*roce.rdma_gid(rdma_node(node, files))]
    assert [(finding.code, finding.severity, finding.where) for finding in found] == [
        ("rdma-gid-none", Severity.WARNING, "mlx5_1:1")
    ]


def test_gids_of_another_namespace(node: MakeNode) -> None:
    files = {path: text for path, text in roce_files().items() if not path.startswith("sys/class/net/")}
    view = rdma_node(node, files | {"sys/class/net/eth0/mtu": "1500"})
    found = [*roce.rdma_gid(view)]
    assert codes(found) == ["rdma-gid-other-namespace"]
    assert "ens3np0" in found[0].what
    with pytest.raises(NotLookedAt, match="mlx5_0:1: its network interface is not in this network namespace"):
        [*roce.rdma_mtu(view)]


def test_port_without_table_is_no_pass(node: MakeNode) -> None:
    files = {path: text for path, text in roce_files().items() if "/gids/" not in path}
    with pytest.raises(NotLookedAt, match="there is no table of GIDs"):
        [*roce.rdma_gid(rdma_node(node, files))]


def test_gids_without_type_are_no_pass(node: MakeNode) -> None:
    files = {path: text for path, text in roce_files().items() if "/types/" not in path}
    with pytest.raises(NotLookedAt, match="does not tell the types of GIDs"):
        [*roce.rdma_gid(rdma_node(node, files, env={"NCCL_IB_GID_INDEX": "3"}))]


@pytest.mark.parametrize(
    ("mtus", "expected"),
    [
        (("4220", "4220"), []),  # Oracle's cluster networks
        (("1500", "1500"), [("rdma-mtu-small", "ens2np0, ens3np0")]),
        (("9000", "1500"), [("rdma-mtu-differs", "ens2np0")]),
        (("9000", "4220"), [("rdma-mtu-differs", "ens2np0")]),
    ],
)
def test_mtu(node: MakeNode, mtus: tuple[str, str], expected: list[tuple[str, str]]) -> None:
    files = roce_files() | {"sys/class/net/ens3np0/mtu": mtus[0], "sys/class/net/ens2np0/mtu": mtus[1]}
    found = [*roce.rdma_mtu(rdma_node(node, files))]
    assert [(finding.code, ", ".join(sorted(finding.where.split(", ")))) for finding in found] == expected
    assert all(finding.severity is Severity.WARNING for finding in found)
