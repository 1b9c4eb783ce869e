"""The files of a healthy node with eight H100s and RDMA adapters, from the recorded ones of tests/preflight.

Every node gets its own folder, in which all that is not of GPUs or adapters is a link to the machine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.preflight.checks.test_pcie import downstream_port
from tests.preflight.checks.test_rdma_software import DEBIAN
from tests.preflight.gpu_nodes import board, links
from tests.preflight.rdma_nodes import h100_files, roce_files

from bench.planted.kinds import GPUS, REDIRECTING, Base

DRIVER = "570.172.08"
OF_TREE = ("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "sys", "usr")
OF_MACHINE = (
    "dev/shm",
    "etc/hosts",
    "etc/nsswitch.conf",
    "proc/cpuinfo",
    "proc/net",
    "proc/self",
    "proc/sys",
    "sys/class/net/eth0",
    "sys/class/net/lo",
    "sys/devices",
    "sys/fs",
    *(path.name for path in Path("/").iterdir() if path.name not in OF_TREE),
)
"""What checks read besides, and the folders of all jobs; not the machine's own libraries."""
SMI = """#!/bin/sh
case "$1" in nvlink) exec cat {folder}/links.txt ;; *) exec cat {folder}/smi.xml ;; esac
"""


RDMA_FILES = {Base.INFINIBAND: h100_files, Base.ROCE: roce_files}


def build(folder: Path, base: Base) -> None:
    """Write the tree of a healthy node."""
    files = {
        **RDMA_FILES[base](),
        **{path: text for path, text in DEBIAN.items() if "efa" not in path},
        **{f"dev/nvidia{gpu}": "" for gpu in range(GPUS)},
        "dev/nvidiactl": "",
        "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\nnvidia 56823808 131 nvidia_peermem, Live 0x0\n",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {DRIVER}  Release Build\n",
        "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz ro iommu=pt\n",
        "smi.xml": board(gpus=GPUS),
        "links.txt": links(gpus=GPUS),
    }
    _write(folder, files)
    (folder / "bin").mkdir()
    (folder / "bin/nvidia-smi").write_text(SMI.format(folder=folder))
    (folder / "bin/nvidia-smi").chmod(0o755)
    (folder / REDIRECTING).write_bytes(downstream_port())
    _add_pci(folder)
    for name in OF_MACHINE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(Path("/", name))


def _add_pci(folder: Path) -> None:
    """A switch for each pair of GPU and adapter, whose ports do not redirect."""
    devices = folder / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    adapters = [path for path in sorted((folder / "sys/class/infiniband").iterdir()) if "bond" not in path.name]
    drivers = folder / "sys/bus/pci/drivers/mlx5_core"
    drivers.mkdir(parents=True)
    for number in range(GPUS):
        root = f"pci/pci0000:{number:02x}/0000:{number:02x}:01.0"
        upstream = f"{root}/0000:{0x20 + number:02x}:00.0"
        gpu = f"{upstream}/0000:{0x30 + number:02x}:00.0/0000:{0x19 + number:02x}:00.0"
        adapter = f"{upstream}/0000:{0x30 + number:02x}:01.0/0000:{0x50 + number:02x}:00.0"
        _write(
            folder,
            {f"{gpu}/class": "0x030200", f"{gpu}/vendor": "0x10de", f"{adapter}/class": "0x020700"}
            | {f"{adapter}/vendor": "0x15b3"},
        )
        for port in (root, upstream, gpu.rpartition("/")[0], adapter.rpartition("/")[0]):
            (folder / port / "config").write_bytes(downstream_port("SrcValid-"))
        for device in (gpu, adapter):
            (devices / Path(device).name).symlink_to(folder / device)
        if number < len(adapters):
            (adapters[number] / "device").symlink_to(folder / adapter)
            (folder / adapter / "driver").symlink_to(drivers)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
