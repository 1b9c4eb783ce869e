"""Checks of RDMA libraries and peer memory."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes
from tests.preflight.rdma_nodes import efa_files, h100_files, rdma_node

from holdfast.findings import Severity
from holdfast.preflight.checks import rdma_software
from holdfast.preflight.node_view import NotLookedAt

LIBRARY = "usr/lib/x86_64-linux-gnu"
# Debian 12 with libibverbs1 and ibverbs-providers 44.0-2, of whose 17 providers these are two.
DEBIAN = {
    f"{LIBRARY}/libibverbs.so.1": "",
    f"{LIBRARY}/libibverbs/libmlx5-rdmav34.so": "",
    f"{LIBRARY}/libibverbs/libefa-rdmav34.so": "",
    "etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    "etc/libibverbs.d/efa.driver": "driver efa\n",
}
LDCONFIG = """567 libs found in cache `/etc/ld.so.cache'
	libz3.so.4 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz3.so.4
	libibverbs.so.1 (libc6,x86-64) => /opt/mellanox/lib/libibverbs.so.1
"""
AMAZON = {
    "opt/amazon/efa/lib/libfabric.so.1": "",
    "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so": "",
}
EFA = {"network": "AWS Libfabric", "driver": "efa"}
PLUGIN_PATH = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64:/opt/amazon/ofi-nccl/lib"}


def without(files: dict[str, str], part: str) -> dict[str, str]:
    return {path: text for path, text in files.items() if part not in path}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (DEBIAN, []),
        (without(DEBIAN, "libibverbs.so"), [("rdma-library-missing", Severity.ERROR)]),
        ({}, [("rdma-library-missing", Severity.ERROR)]),
        (without(DEBIAN, "libmlx5"), [("rdma-provider-missing", Severity.ERROR)]),
        (without(DEBIAN, "mlx5.driver"), [("rdma-provider-missing", Severity.WARNING)]),
        (without(DEBIAN, "efa"), []),
    ],
)
def test_verbs_libraries(node: MakeNode, files: dict[str, str], expected: list[tuple[str, Severity]]) -> None:
    found = [*rdma_software.rdma_library(rdma_node(node, h100_files() | files))]
    assert [(finding.code, finding.severity) for finding in found] == expected


def test_driver_without_known_provider_passes(node: MakeNode) -> None:
    view = rdma_node(node, h100_files() | {f"{LIBRARY}/libibverbs.so.1": ""}, driver="new_core")
    assert codes([*rdma_software.rdma_library(view)]) == []


def test_libraries_of_the_interpreter_count(node: MakeNode) -> None:
    files = {
        "opt/conda/lib/libibverbs.so.1": "",
        "opt/conda/lib/libibverbs/libmlx5-rdmav34.so": "",
        "opt/conda/etc/libibverbs.d/mlx5.driver": "driver mlx5\n",
    }
    view = rdma_node(node, h100_files() | files, python="/opt/conda/bin/python3")
    assert codes([*rdma_software.rdma_library(view)]) == []


def test_folders_of_the_loader_cache_count(node: MakeNode) -> None:
    files = {
        "opt/mellanox/lib/libibverbs.so.1": "",
        "opt/mellanox/lib/libmlx5-rdmav2.so": "",
        "etc/libibverbs.d/mlx5.driver": "driver /opt/mellanox/lib/libmlx5\n",
    }
    view = rdma_node(node, h100_files() | files, commands={"/sbin/ldconfig -p": LDCONFIG})
    assert codes([*rdma_software.rdma_library(view)]) == []


@pytest.mark.parametrize(
    ("files", "env", "expected"),
    [
        (AMAZON, PLUGIN_PATH, []),
        (AMAZON, {"NCCL_NET_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"}, []),
        (AMAZON, PLUGIN_PATH | {"NCCL_NET_PLUGIN": "ofi"}, []),
        (AMAZON, PLUGIN_PATH | {"NCCL_NET_PLUGIN": "none"}, [Severity.ERROR]),
        (AMAZON, {}, [Severity.WARNING]),
        (without(AMAZON, "nccl-net"), PLUGIN_PATH, [Severity.ERROR]),
        (without(AMAZON, "libfabric"), PLUGIN_PATH, [Severity.ERROR]),
        ({}, {}, [Severity.ERROR, Severity.ERROR]),
    ],
)
def test_efa_libraries(node: MakeNode, files: dict[str, str], env: dict[str, str], expected: list[Severity]) -> None:
    found = [*rdma_software.rdma_library(rdma_node(node, efa_files() | DEBIAN | files, env=env, **EFA))]
    assert [(finding.code, finding.severity) for finding in found] == [
        ("rdma-libfabric-missing", severity) for severity in expected
    ]


# Lines of /proc/driver/nvidia/version of the two flavours, and of /proc/modules.
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3-B17-02-5)"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.135  Fri Jan 10 20:00:00 UTC 2025"
PEERMEM = "nvidia_peermem 16384 0 - Live 0x0000000000000000 (OE)\n"
MODULES = "mlx5_ib 397312 0 - Live 0x0000000000000000\nib_uverbs 163840 2 mlx5_ib, Live 0x0000000000000000\n"


@pytest.mark.parametrize(
    ("driver", "release", "modules", "env", "expected"),
    [
        (OPEN, "5.15.0-1053-nvidia", MODULES, {}, []),
        (CLOSED, "5.15.0-1053-nvidia", MODULES + PEERMEM, {}, []),
        (CLOSED, "5.15.0-1053-nvidia", MODULES, {}, ["rdma-peer-memory-missing"]),
        (OPEN, "5.4.0-150-generic", MODULES, {}, ["rdma-peer-memory-missing"]),
        (OPEN, "4.18.0-553.el8_10.x86_64", MODULES, {}, []),
        (OPEN, "6.8.0-1009-aws", MODULES, {"NCCL_DMABUF_ENABLE": "0"}, ["rdma-peer-memory-missing"]),
    ],
)
def test_peer_memory(
    node: MakeNode, driver: str, release: str, modules: str, env: dict[str, str], expected: list[str]
) -> None:
    files = {"proc/driver/nvidia/version": driver, "proc/sys/kernel/osrelease": release, "proc/modules": modules}
    found = [*rdma_software.rdma_peer_memory(rdma_node(node, h100_files() | files, gpus=8, env=env))]
    assert [(finding.code, finding.severity) for finding in found] == [(code, Severity.WARNING) for code in expected]


def test_efa_driver_has_its_own_peer_memory(node: MakeNode) -> None:
    files = {"proc/modules": "", "sys/class/infiniband/rdmap85s0/device/p2p": "NVIDIA"}
    assert codes([*rdma_software.rdma_peer_memory(rdma_node(node, efa_files() | files, gpus=8, **EFA))]) == []


def test_node_without_nvidia_driver_is_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="/proc/driver/nvidia/version"):
        [*rdma_software.rdma_peer_memory(rdma_node(node, h100_files() | {"proc/modules": MODULES}, gpus=8))]


def test_node_without_gpus_or_rdma_needs_nothing(node: MakeNode) -> None:
    for view in (node(gpus=8), node(network="IB")):
        assert codes([*rdma_software.rdma_peer_memory(view)]) == []
    assert codes([*rdma_software.rdma_library(node(gpus=8))]) == []


def test_library_without_sysfs_is_no_pass(node: MakeNode) -> None:
    with pytest.raises(NotLookedAt, match="sysfs is not mounted"):
        [*rdma_software.rdma_library(node({f"{LIBRARY}/libibverbs.so.1": ""}, network="IB"))]
