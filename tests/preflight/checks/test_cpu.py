"""Checks of CPUs, NUMA nodes and the clock."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Severity
from holdfast.preflight.checks import cpu
from holdfast.preflight.node_view import NotLookedAt


def status(cpus: str) -> dict[str, str]:
    return {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t0-1\n"}


# A container under cgroup v2 sees its own cgroup as the root.
CONTAINER = {"proc/self/cgroup": "0::/\n"}
POD_V1 = {"proc/self/cgroup": "5:memory:/kubepods/pod1\n4:cpu,cpuacct:/kubepods/burstable/pod1\n0::/\n"}
SERVICE = {"proc/self/cgroup": "0::/system.slice/holdfast.service\n"}


def quota_v1(quota_us: int) -> dict[str, str]:
    return {
        "sys/fs/cgroup/cpu/kubepods/burstable/cpu.cfs_quota_us": f"{quota_us}\n",
        "sys/fs/cgroup/cpu/kubepods/burstable/cpu.cfs_period_us": "100000\n",
    }


@pytest.mark.parametrize(
    ("files", "expected", "usable"),
    [
        ({**status("0-223"), **SERVICE}, [], "224"),
        ({**status("0-7"), **CONTAINER, "sys/fs/cgroup/cpu.max": "max 100000\n"}, [], "8"),
        ({**status("0-2,64"), **CONTAINER}, ["few-cpus"], "4"),
        ({**status("0-223"), **CONTAINER, "sys/fs/cgroup/cpu.max": "400000 100000\n"}, ["few-cpus"], "4"),
        ({**status("0-223"), **SERVICE, "sys/fs/cgroup/system.slice/cpu.max": "750000 100000"}, ["few-cpus"], "7.5"),
        ({**status("0-223"), **POD_V1, **quota_v1(400_000)}, ["few-cpus"], "4"),
        ({**status("0-223"), **POD_V1, **quota_v1(-1)}, [], "224"),
    ],
)
def test_each_rank_has_a_cpu(node: MakeNode, files: dict[str, str], expected: list[str], usable: str) -> None:
    view = node(files, processes=8)
    found = [*cpu.cpu_count(view)]
    assert codes(found) == expected
    assert all(each.severity is Severity.WARNING for each in found)
    assert cpu.cpu_facts(view) == {"CPUs": usable}


def test_cpus_that_cannot_be_counted_are_no_pass(node: MakeNode) -> None:
    view = node(CONTAINER)
    with pytest.raises(NotLookedAt, match="/proc/self/status"):
        [*cpu.cpu_count(view)]
    assert cpu.cpu_facts(view) == {}


# lscpu of a machine with two Xeon Platinum 8480, the processors of a DGX H100.
NUMA = {
    "sys/devices/system/node/node0/cpulist": "0-55,112-167\n",
    "sys/devices/system/node/node1/cpulist": "56-111,168-223\n",
}


def device(address: str, vendor: str, kind: str, numa_node: int) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/0000:{address}:00.0"
    return {f"{folder}/vendor": vendor, f"{folder}/class": kind, f"{folder}/numa_node": f"{numa_node}\n"}


def gpus(numa_nodes: Iterable[int]) -> dict[str, str]:
    """A GPU on each of these NUMA nodes, a network adapter, an NVSwitch and the BMC's display."""
    files = {**device("05", "0x15b3", "0x020700", 0), **device("07", "0x10de", "0x068000", 0)}
    files |= device("09", "0x1a03", "0x030000", 0)
    for index, numa_node in enumerate(numa_nodes):
        files |= device(f"{index + 0x1A:02x}", "0x10de\n", "0x030200\n", numa_node)
    return files


DGX = gpus([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("files", "wanted", "expected"),
    [
        ({**status("0-223"), **NUMA, **DGX}, 8, []),
        ({**status("0-55,112-167"), **NUMA, **DGX}, 4, []),  # a pod of half a machine
        ({**status("0-55,112-167"), **NUMA, **DGX}, 8, ["one-numa-node"]),
        ({**status("56-60"), **NUMA, **DGX}, 8, ["one-numa-node"]),
        ({**status("56-60"), **NUMA}, 0, []),
        ({**status("0-7"), "sys/devices/system/node/node0/cpulist": "0-7\n"}, 1, []),
        # A node without CPUs is the memory of a GPU.
        ({**status("0-71"), **{f"sys/devices/system/node/node{n}/cpulist": "0-71" * (n < 1) for n in range(2)}}, 1, []),
    ],
)
def test_cpus_are_near_the_gpus(node: MakeNode, files: dict[str, str], wanted: int, expected: list[str]) -> None:
    found = [*cpu.numa(node(files, gpus=wanted))]
    assert codes(found) == expected
    assert all(each.severity is Severity.WARNING for each in found)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (status("0-7"), "/sys/devices/system/node"),
        ({**status("0-55"), **NUMA, **gpus([-1, -1])}, "on which NUMA nodes its GPUs are"),  # a virtual machine
        (NUMA, "/proc/self/status"),
    ],
)
def test_numa_nodes_that_are_not_known_are_no_pass(node: MakeNode, files: dict[str, str], reason: str) -> None:
    with pytest.raises(NotLookedAt, match=reason):
        [*cpu.numa(node(files, gpus=8))]


MAX_ERROR_US = 16_000_000
"""NTP_PHASE_LIMIT of the kernel."""


def clock(*, synchronised: bool) -> cpu.KernelClock:
    return cpu.KernelClock(synchronised=synchronised, max_error_us=500 if synchronised else MAX_ERROR_US)


@pytest.mark.parametrize(
    ("synchronised", "address", "expected"),
    [
        (True, "10.0.0.4", []),
        (False, "10.0.0.4", ["clock-not-synchronised"]),
        (False, "", ["clock-not-synchronised"]),
        (False, "127.0.0.1", []),
    ],
)
def test_a_time_server_keeps_the_clock(node: MakeNode, synchronised: bool, address: str, expected: list[str]) -> None:
    found = [*cpu.clock_sync(node(address=address), lambda: clock(synchronised=synchronised))]
    assert codes(found) == expected
    assert all(each.severity is Severity.WARNING for each in found)


def test_clock_that_may_not_be_asked_is_no_pass(node: MakeNode) -> None:
    def refuse() -> cpu.KernelClock:
        raise NotLookedAt("adjtimex: Operation not permitted")

    with pytest.raises(NotLookedAt, match="adjtimex"):
        [*cpu.clock_sync(node(), refuse)]


@pytest.mark.parametrize(("status_bits", "synchronised"), [(0x2001, True), (0x40, False), (0x41, False)])
def test_kernel_clock_is_parsed(status_bits: int, synchronised: bool) -> None:
    # struct timex of 64 bits: modes, offset, freq, maxerror, esterror, status, ...
    timex = struct.pack("@I4qi160x", 0, 0, -1_310_720, MAX_ERROR_US, 500, status_bits)
    assert cpu.clock_of(timex) == cpu.KernelClock(synchronised=synchronised, max_error_us=MAX_ERROR_US)


def test_the_kernel_says_how_wrong_its_clock_may_be() -> None:
    assert 0 < cpu.kernel_clock().max_error_us <= MAX_ERROR_US
