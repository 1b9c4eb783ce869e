"""The kinds of faults that the bench plants: a row says how, and what must find it.

Rows are data and small functions, so that the process of a node can import them without a test's or torch's imports.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tests.preflight import gpu_nodes

GPUS = 8
REDIRECTING = "redirecting.config"
"""File of a tree: the configuration of a PCIe switch port with ACS redirection."""


class Base(Enum):
    """What a node has before the fault is planted."""

    MACHINE = "machine"
    """This machine as it is, in its own network namespace."""
    INFINIBAND = "infiniband"
    """Eight H100s and eight NDR adapters, laid over this machine."""
    ROCE = "roce"
    """Eight H100s and two RoCE adapters, laid over this machine."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A node while its faults are planted: everything is in its own namespaces."""

    number: int
    tree: Path
    """The files of its GPUs and adapters."""
    work: Path
    """A folder of the bench, the same on all nodes, with `image/bin/python` and `checkpoints`."""


def _nothing(_: Place) -> None:
    """Leave the node as it is."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault that one node has, and what has to find it."""

    name: str
    how: str
    """How it is planted, for users."""
    check: str
    code: str
    base: Base = Base.MACHINE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment of the job."""
    prepare: Callable[[Place], None] = _nothing
    """What every node gets, the planted one too."""
    change: Callable[[Place], None] = _nothing
    """Changes the tree of the planted node before it is laid over the machine."""
    plant: Callable[[Place], None] = _nothing
    """Runs in the process of the planted node, before its agent or its checks."""


# This machine


def _mount_tmpfs(folder: str, size: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "planted", folder], check=True)


def _small_shm(_: Place) -> None:
    _mount_tmpfs("/dev/shm", "1m")


def _full_disk(place: Place) -> None:
    _mount_tmpfs(str(place.work / "checkpoints"), "2m")
    with (place.work / "checkpoints/other-data").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (2 << 20) - 4096)
    (place.work / "checkpoints/more").write_bytes(bytes(4096 - 100))


SLOW_BYTES_S = 256 << 10
THROTTLE = Path("/sys/fs/cgroup/blkio")


def _slow_disk(place: Place) -> None:
    """A new file system on a loop device, to which this process may write 256 KiB/s."""
    image = place.tree / "disk.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, place.work / "checkpoints"], check=True)
    device = os.stat(place.work / "checkpoints").st_dev
    group = THROTTLE / f"planted-{os.getpid()}"
    group.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {SLOW_BYTES_S}"
    (group / "blkio.throttle.write_bps_device").write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _loopback_name(place: Place) -> None:
    hosts = place.tree / "loopback-hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    # The nodes of `netns` share the mount of this file, and what is mounted over it.
    subprocess.run(["mount", "--make-private", "/etc/hosts"], check=True)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


def _ip(*lines: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


def _add_net1(place: Place) -> None:
    address = f"10.99.0.{place.number + 1}/24"
    _ip(
        "link add net1 type veth peer peer1", f"address add {address} dev net1", "link set net1 up", "link set peer1 up"
    )


def _no_address(_: Place) -> None:
    _ip("address flush dev net1")


def _other_name(_: Place) -> None:
    _ip("link set net1 down", "link set net1 name ens7", "link set ens7 up")


FEW_PORTS = range(32768, 32768 + 1024)
_taken: list[socket.socket] = []


def _taken_ports(_: Place) -> None:
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{FEW_PORTS.start} {FEW_PORTS.stop - 1}")
    for port in FEW_PORTS[: len(FEW_PORTS) - 300]:
        listening = socket.create_server(("", port))
        listening.set_inheritable(True)  # a program that replaces this one keeps them
        _taken.append(listening)


def _one_cpu(_: Place) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


OTHER_TORCH = "2.14.1+cu130"


def _other_torch(place: Place) -> None:
    [real] = (place.work / "image/lib").glob("python*/site-packages/torch/version.py")
    other = place.tree / "version.py"
    other.write_text(f"__version__ = '{OTHER_TORCH}'\ncuda: Optional[str] = '13.0'\n")
    subprocess.run(["mount", "--bind", other, real.resolve()], check=True)


def _no_interpreter(place: Place) -> None:
    _mount_tmpfs(str(place.work / "image"), "1m")


def set_clock_answer(synchronised: bool) -> None:
    """Have the check read this answer of the kernel: it has one clock, which nodes on one machine share."""
    from holdfast.preflight.checks import cpu

    answer = cpu.KernelClock(synchronised=synchronised, max_error_us=500 if synchronised else 16_000_000)
    cpu.clock_sync.__defaults__ = (lambda: answer,)


def _unsynchronised(_: Place) -> None:
    set_clock_answer(False)


IPC_LOCK = 14
_CAPABILITY_VERSION = 0x20080522


def _memlock(_: Place) -> None:
    """Without the capability the limit holds for root too."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION, 0))
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    effective, *others = struct.unpack("=6I", data.raw)
    changed = ctypes.create_string_buffer(struct.pack("=6I", effective & ~(1 << IPC_LOCK), *others))
    if libc.capset(header, changed):
        raise OSError(ctypes.get_errno(), "capset")


def _ib_disabled(_: Place) -> None:
    os.environ["NCCL_IB_DISABLE"] = "1"


# The tree of a node with GPUs


def _gpu(fields: Mapping[str, str]) -> Callable[[Place], None]:
    """Another value of fields of GPU 5."""

    def change(place: Place) -> None:
        (place.tree / "smi.xml").write_text(gpu_nodes.board({5: fields}))

    return change


def _seven_gpus(place: Place) -> None:
    (place.tree / "smi.xml").write_text(gpu_nodes.board(gpus=7))
    (place.tree / "links.txt").write_text(gpu_nodes.links(gpus=7))


def _link_down(place: Place) -> None:
    (place.tree / "links.txt").write_text(gpu_nodes.links({5: frozenset({11})}))


def _off_the_bus(place: Place) -> None:
    lost = "Unable to determine the device handle for GPU 0000:1E:00.0: GPU is lost.  Reboot the system to recover"
    (place.tree / "smi.xml").write_text(f"{lost} this GPU\n")


def _port(device: str, **values: str) -> Callable[[Place], None]:
    """Other values of a port's files."""

    def change(place: Place) -> None:
        for name, text in values.items():
            (place.tree / f"sys/class/infiniband/{device}/ports/1/{name}").write_text(text)

    return change


def _limited_key(place: Place) -> None:
    _port("mlx5_3", **{"pkeys/0": "0x7fff"})(place)


def _no_adapter(place: Place) -> None:
    shutil.rmtree(place.tree / "sys/class/infiniband/mlx5_3")
    shutil.rmtree(place.tree / "sys/class/infiniband_verbs/uverbs3")
    (place.tree / "dev/infiniband/uverbs3").unlink()


def _no_device_files(place: Place) -> None:
    for file in (place.tree / "dev/infiniband").iterdir():
        file.unlink()


def _redirect(place: Place) -> None:
    for port in (place.tree / "pci").rglob("config"):
        shutil.copyfile(place.tree / REDIRECTING, port)


def _no_peer_memory(place: Place) -> None:
    (place.tree / "proc/modules").write_text("nvidia 56823808 131 - Live 0x0\n")


def _no_libibverbs(place: Place) -> None:
    for file in (place.tree / "usr/lib/x86_64-linux-gnu").glob("libibverbs.so*"):
        file.unlink()


def _only_link_local_gids(place: Place) -> None:
    for index in (2, 3):
        _port("mlx5_1", **{f"gids/{index}": "0000:0000:0000:0000:0000:0000:0000:0000"})(place)


def _small_mtu(place: Place) -> None:
    for name in ("ens2np0", "ens3np0"):
        (place.tree / f"sys/class/net/{name}/mtu").write_text("1500")


NET1 = {"GLOO_SOCKET_IFNAME": "net1"}

KINDS: tuple[Kind, ...] = (
    Kind(
        name="small /dev/shm",
        how="a tmpfs of 1 MiB",
        check="shared-memory",
        code="shared-memory-small",
        plant=_small_shm,
    ),
    Kind(
        name="full disk",
        how="a tmpfs without free space as the checkpoint folder",
        check="disk-space",
        code="disk-full",
        plant=_full_disk,
    ),
    Kind(
        name="slow disk",
        how="an ext4 on a loop device with 256 KiB/s (cgroup blkio)",
        check="disk-write",
        code="slow-fsync",
        plant=_slow_disk,
    ),
    Kind(
        name="host name is loopback",
        how="`127.0.1.1 node` in /etc/hosts",
        check="host-name",
        code="host-name-loopback",
        plant=_loopback_name,
    ),
    Kind(
        name="interface without address",
        how="`ip address flush` of the interface that the job names",
        check="interface-exists",
        code="interface-without-address",
        env=NET1,
        prepare=_add_net1,
        plant=_no_address,
    ),
    Kind(
        name="interface missing",
        how="the interface that the job names has another name",
        check="interface-exists",
        code="interface-missing",
        env=NET1,
        prepare=_add_net1,
        plant=_other_name,
    ),
    Kind(
        name="ports taken",
        how="1,024 ephemeral ports, of which 724 are listened on",
        check="rendezvous-ports",
        code="few-free-ports",
        plant=_taken_ports,
    ),
    Kind(
        name="one CPU", how="CPU affinity of one core for two ranks", check="cpu-count", code="few-cpus", plant=_one_cpu
    ),
    Kind(
        name="other torch",
        how=f"torch/version.py of {OTHER_TORCH}",
        check="comparison",
        code="node-differs",
        plant=_other_torch,
    ),
    Kind(
        name="no interpreter",
        how="an empty folder where the job's Python is",
        check="python",
        code="python-missing",
        plant=_no_interpreter,
    ),
    Kind(
        name="clock not synchronised",
        how="the kernel's answer, replaced in the agent",
        check="clock-sync",
        code="clock-not-synchronised",
        plant=_unsynchronised,
    ),
    Kind(
        name="memlock",
        how="RLIMIT_MEMLOCK of 64 KiB, without the capability IPC_LOCK",
        check="locked-memory",
        code="locked-memory-limited",
        base=Base.INFINIBAND,
        plant=_memlock,
    ),
    Kind(
        name="variable against the fabric",
        how="NCCL_IB_DISABLE=1 in the agent's environment",
        check="fighting-variables",
        code="fighting-variable",
        base=Base.INFINIBAND,
        plant=_ib_disabled,
    ),
    Kind(
        name="GPU missing",
        how="nvidia-smi lists seven of eight",
        check="gpu-count",
        code="gpus-missing",
        base=Base.INFINIBAND,
        change=_seven_gpus,
    ),
    Kind(
        name="ECC errors",
        how="nvidia-smi: four uncorrectable errors of DRAM",
        check="gpu-ecc",
        code="gpu-ecc-uncorrectable",
        base=Base.INFINIBAND,
        change=_gpu({"dram_uncorrectable": "4"}),
    ),
    Kind(
        name="throttled GPU",
        how="nvidia-smi: hw_thermal_slowdown is active",
        check="gpu-throttle",
        code="gpu-slowed-by-hardware",
        base=Base.INFINIBAND,
        change=_gpu({"clocks_event_reason_hw_thermal_slowdown": "Active"}),
    ),
    Kind(
        name="NVLink down",
        how="nvidia-smi: link 11 of GPU 5 is inactive",
        check="gpu-nvlink",
        code="gpu-nvlink-inactive",
        base=Base.INFINIBAND,
        change=_link_down,
    ),
    Kind(
        name="Fabric Manager",
        how="nvidia-smi: the fabric's state is In Progress",
        check="gpu-fabric-manager",
        code="gpu-fabric-not-ready",
        base=Base.INFINIBAND,
        change=_gpu({"state": "In Progress"}),
    ),
    Kind(
        name="GPU lost (Xid 79)",
        how="nvidia-smi cannot reach a GPU",
        check="gpu-driver",
        code="gpu-driver-fails",
        base=Base.INFINIBAND,
        change=_off_the_bus,
    ),
    Kind(
        name="reset required (Xid 95)",
        how="nvidia-smi: gpu_recovery_action is Reset",
        check="gpu-driver",
        code="gpu-recovery-required",
        base=Base.INFINIBAND,
        change=_gpu({"gpu_recovery_action": "Reset"}),
    ),
    Kind(
        name="RDMA adapter missing",
        how="seven of eight adapters",
        check="comparison",
        code="node-differs",
        base=Base.INFINIBAND,
        change=_no_adapter,
    ),
    Kind(
        name="no device in the pod",
        how="/dev/infiniband is empty",
        check="rdma-devices",
        code="rdma-device-file-missing",
        base=Base.INFINIBAND,
        change=_no_device_files,
    ),
    Kind(
        name="RDMA port down",
        how="state DOWN, Polling",
        check="rdma-ports",
        code="rdma-port-down",
        base=Base.INFINIBAND,
        change=_port("mlx5_3", state="1: DOWN", phys_state="2: Polling"),
    ),
    Kind(
        name="RDMA rate",
        how="one lane of four",
        check="rdma-rate",
        code="rdma-port-slow",
        base=Base.INFINIBAND,
        change=_port("mlx5_3", rate="100 Gb/sec (1X NDR)"),
    ),
    Kind(
        name="partition key",
        how="a limited member: 0x7fff",
        check="rdma-ports",
        code="rdma-partition-limited",
        base=Base.INFINIBAND,
        change=_limited_key,
    ),
    Kind(
        name="PCIe ACS",
        how="the switches' ports redirect",
        check="pcie-acs",
        code="pcie-acs-enabled",
        base=Base.INFINIBAND,
        change=_redirect,
    ),
    Kind(
        name="no peer memory",
        how="/proc/modules without nvidia_peermem, and a closed driver",
        check="rdma-peer-memory",
        code="rdma-peer-memory-missing",
        base=Base.INFINIBAND,
        change=_no_peer_memory,
    ),
    Kind(
        name="libibverbs missing",
        how="an image without libibverbs.so.1",
        check="rdma-library",
        code="rdma-library-missing",
        base=Base.INFINIBAND,
        change=_no_libibverbs,
    ),
    Kind(
        name="RoCE GID",
        how="a port with link-local GIDs only",
        check="rdma-gid",
        code="rdma-gid-none",
        base=Base.ROCE,
        change=_only_link_local_gids,
    ),
    Kind(
        name="RoCE MTU",
        how="1500 instead of 9000 bytes",
        check="rdma-mtu",
        code="rdma-mtu-small",
        base=Base.ROCE,
        change=_small_mtu,
    ),
)
