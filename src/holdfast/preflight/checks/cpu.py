"""Checks of a node's CPUs and its clock."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import PurePosixPath

from msgspec import Struct

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt

_GPU_VENDORS = frozenset({"0x10de", "0x1002"})
_DISPLAY_CLASS = "0x03"
"""PCI classes of GPUs: 0x0300 VGA, 0x0302 3D controller, 0x0380 other display controllers."""
_TIME_BYTES, _STATUS_AT, _MAX_ERROR_AT = 512, 40, 24
"""Room for `struct timex`, and offsets in bytes of its fields `status` and `maxerror` where a long has 8."""
_STA_UNSYNC = 0x40


def cpu_count(view: NodeView) -> Iterator[Finding]:
    """Each rank has its own CPU: by affinity, and by the quota of the cgroup."""
    allowed, quota = len(_allowed_cpus(view)), quota_cpus(view)
    usable = allowed if quota is None else min(allowed, quota)
    if usable < view.wanted.processes:
        yield Finding(
            code="few-cpus",
            severity=Severity.WARNING,
            what=f"there are CPUs for {usable:g} of {view.wanted.processes} ranks; the others wait at each step",
            where="CPUs",
            evidence=(
                f"affinity: {allowed} CPUs",
                f"quota of the cgroup: {'none' if quota is None else f'{quota:g} CPUs'}",
            ),
            remedy="Give the node at least one CPU per rank, better four: the pod's CPU request and limit, `--cpus` "
            "and `--cpuset-cpus` of a container, `--cpus-per-task` of Slurm.",
            owner=Owner.CLUSTER,
        )


def cpu_facts(view: NodeView) -> Mapping[str, str]:
    """The number of CPUs that ranks can use."""
    with suppress(NotLookedAt):
        allowed, quota = len(_allowed_cpus(view)), quota_cpus(view)
        return {"CPUs": f"{allowed if quota is None else min(allowed, quota):g}"}
    return {}


def quota_cpus(view: NodeView) -> float | None:
    """The CPU time per second that cgroups (v1 or v2) allow, by the smallest limit; None without one."""
    limits: list[float] = []
    for line in view.read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit = "sys/fs/cgroup", _limit_v2
        elif "cpu" in controllers.split(","):
            top, limit = "sys/fs/cgroup/cpu", _limit_v1
        else:
            continue
        # In a container the path may be the host's, while the mount is the container's own cgroup.
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):
            with suppress(NotLookedAt):
                limits.append(limit(view, f"{top}/{folder}"))
    return min((each for each in limits if each > 0), default=None)


def _limit_v2(view: NodeView, folder: str) -> float:
    # max 100000
    quota, period = view.read(f"{folder}/cpu.max").split()
    return 0.0 if quota == "max" else int(quota) / int(period)


def _limit_v1(view: NodeView, folder: str) -> float:
    return int(view.read(f"{folder}/cpu.cfs_quota_us")) / int(view.read(f"{folder}/cpu.cfs_period_us"))


def numa(view: NodeView) -> Iterator[Finding]:
    """The ranks' CPUs are not all on one NUMA node while their GPUs are on several."""
    if not view.wanted.gpus:
        return
    nodes = _cpus_by_numa_node(view)
    allowed = _allowed_cpus(view)
    here = [node for node, cpus in nodes.items() if cpus & allowed]
    if len(nodes) < 2 or len(here) != 1:
        return
    gpus = _numa_nodes_of_gpus(view)
    if not gpus:
        raise NotLookedAt("this machine does not say on which NUMA nodes its GPUs are")
    near = gpus.count(here[0])
    if near < view.wanted.gpus:
        yield Finding(
            code="one-numa-node",
            severity=Severity.WARNING,
            what=f"all CPUs of the ranks are on NUMA node {here[0]} of {len(nodes)}, and only {near} of the machine's "
            f"{len(gpus)} GPUs are",
            where="CPUs",
            evidence=(f"Cpus_allowed_list: {_allowed_list(view)}", f"NUMA nodes of the GPUs: {gpus}"),
            remedy="Give the node CPUs of all NUMA nodes: no `numactl --cpunodebind` around the agent; on Kubernetes "
            "a topology policy of the kubelet other than single-numa-node, or pods with fewer GPUs.",
            owner=Owner.CLUSTER,
        )


def _cpus_by_numa_node(view: NodeView) -> dict[int, set[int]]:
    """The CPUs of each NUMA node that has some; memory of a GPU can be a node without."""
    names = [name for name in view.list("sys/devices/system/node") if name.removeprefix("node").isdecimal()]
    if not names:
        raise NotLookedAt("/sys/devices/system/node has no nodes")
    found = {int(name[4:]): _numbers(view.read(f"sys/devices/system/node/{name}/cpulist")) for name in names}
    return {node: cpus for node, cpus in found.items() if cpus}


def _numa_nodes_of_gpus(view: NodeView) -> list[int]:
    """The NUMA node of each GPU on the PCI bus that has one; virtual machines often say -1."""
    found: list[int] = []
    for device in view.list("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{device}"
        with suppress(NotLookedAt):
            if view.read(f"{folder}/vendor") in _GPU_VENDORS and view.read(f"{folder}/class").startswith(
                _DISPLAY_CLASS
            ):
                found.append(int(view.read(f"{folder}/numa_node")))
    return [node for node in found if node >= 0]


def _allowed_list(view: NodeView) -> str:
    # Cpus_allowed_list:	0-31,64-95
    for line in view.read("proc/self/status").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return line.split()[1]
    raise NotLookedAt("/proc/self/status has no line `Cpus_allowed_list`")


def _allowed_cpus(view: NodeView) -> set[int]:
    return _numbers(_allowed_list(view))


def _numbers(words: str) -> set[int]:
    """The numbers of a list such as `0-3,8`."""
    ranges = [word.partition("-") for word in words.split(",") if word]
    return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}


class KernelClock(Struct, frozen=True, kw_only=True):
    """What the kernel knows of its clock."""

    synchronised: bool
    max_error_us: int
    """Grows by 0.5 ms per second without a time server, to 16 s at most."""


def kernel_clock() -> KernelClock:
    """Ask the kernel by adjtimex; some containers may not."""
    answer = ctypes.create_string_buffer(_TIME_BYTES)  # modes = 0: change nothing
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(answer) < 0:
        raise NotLookedAt(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return clock_of(answer.raw)


def clock_of(timex: bytes) -> KernelClock:
    """Parse the kernel's `struct timex`."""
    (max_error_us,) = struct.unpack_from("=q", timex, _MAX_ERROR_AT)
    (status,) = struct.unpack_from("=i", timex, _STATUS_AT)
    return KernelClock(synchronised=not status & _STA_UNSYNC, max_error_us=max_error_us)


def clock_sync(view: NodeView, clock: Callable[[], KernelClock] = kernel_clock) -> Iterator[Finding]:
    """A time server keeps the clock: logs of several nodes are ordered by it, and tokens expire by it."""
    with suppress(ValueError):
        if ip_address(view.address).is_loopback:
            return  # all nodes of the run have the same clock
    found = clock()
    if not found.synchronised:
        yield Finding(
            code="clock-not-synchronised",
            severity=Severity.WARNING,
            what="the kernel says that no time server keeps this node's clock",
            where="clock",
            evidence=(f"adjtimex: STA_UNSYNC, maximum error {found.max_error_us / 1e6:.1f} s",),
            remedy="Start a time service (`systemctl enable --now chrony`, with `rtcsync` in its configuration); "
            "`timedatectl` then prints `System clock synchronized: yes`.",
            owner=Owner.CLUSTER,
        )
