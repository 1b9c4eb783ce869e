"""Software that RDMA needs on a node: libraries in the image, and a way from the adapter to the GPU's memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt
from holdfast.preflight.rdma_devices import (
    DEVICES,
    needs_rdma,
    optional,
    setting,
    used_ports,
    uses_libfabric,
)

PROVIDERS: Mapping[str, str] = {
    "bnxt_en": "bnxt_re",
    "cxgb4": "cxgb4",
    "efa": "efa",
    "erdma": "erdma",
    "hns3": "hns",
    "i40e": "irdma",
    "ice": "irdma",
    "idpf": "irdma",
    "ionic": "ionic",
    "mana": "mana",
    "mlx4_core": "mlx4",
    "mlx5_core": "mlx5",
    "qede": "qedr",
}
"""Driver of the PCI device to the provider in https://github.com/linux-rdma/rdma-core/tree/master/providers."""
LOADER_FOLDERS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
"""Folders where the dynamic loader looks without a setting; those of /etc/ld.so.conf come from `ldconfig -p`."""
EFA_FOLDERS = tuple(
    f"{product}/{folder}"
    for product in ("/opt/amazon/efa", "/opt/amazon/ofi-nccl", "/opt/amazon/aws-ofi-nccl", "/opt/aws-ofi-nccl")
    for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
)
"""Folders of Amazon's installer and images; the loader looks there only if LD_LIBRARY_PATH names them."""
LDCONFIG = "/sbin/ldconfig"
"""Its folder is not in every user's PATH."""
LDCONFIG_TIMEOUT_S = 3.0
DMA_BUF_KERNEL = (5, 12)
"""First Linux whose RDMA core registers a DMA-BUF: the memory of another device."""
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")

_LIBRARY = re.compile(
    r"=> (/\S+)/[^/\s]+$", re.MULTILINE
)  # libz.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz.so.1
_DRIVER = re.compile(r"^\s*driver\s+(\S+)", re.MULTILINE)  # driver mlx5
_VERSION = re.compile(r"(\d+)\.(\d+)")  # 5.15.0-1053-nvidia
_OPEN_DRIVER = "Open Kernel Module"  # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build


def rdma_library(view: NodeView) -> Iterator[Finding]:
    """The libraries through which NCCL opens the devices are where the dynamic loader looks."""
    if not needs_rdma(view.wanted):
        return
    drivers = dict.fromkeys(port.driver for port in used_ports(view).ports)
    folders = _loader_folders(view)
    if uses_libfabric(view.wanted):
        yield from _without_libfabric(view, folders)
    elif not _find(view, folders, ("libibverbs.so", "libibverbs.so.1")):
        yield Finding(
            code="rdma-library-missing",
            what="libibverbs.so.1 is not installed where the ranks run, so NCCL finds no RDMA device",
            where="libibverbs.so.1",
            evidence=(f"looked in {', '.join(folders)}",),
            remedy="Install it in the image: `apt-get install libibverbs1 ibverbs-providers` or `dnf install "
            "libibverbs`. If it is elsewhere, name its folder in LD_LIBRARY_PATH in the job's `env`.",
            owner=Owner.USER,
        )
        return
    yield from _without_provider(view, drivers, folders)


def _without_provider(view: NodeView, drivers: Iterable[str], folders: tuple[str, ...]) -> Iterator[Finding]:
    configured = _configured_providers(view, folders)
    inside = tuple(f"{folder}/libibverbs" for folder in folders)
    for driver in drivers:
        provider = PROVIDERS.get(driver, "")
        installed = _find(view, (*inside, *folders), (f"lib{provider}-rdmav*.so",))
        if provider and not (installed and provider in configured):
            yield Finding(
                code="rdma-provider-missing",
                severity=Severity.WARNING if installed else Severity.ERROR,
                what=f"libibverbs has no provider {provider} for the driver {driver}, so it does not open the devices",
                where=f"lib{provider}-rdmav*.so",
                evidence=(
                    f"installed: {installed or 'no'}",
                    f"/etc/libibverbs.d names {', '.join(sorted(configured)) or 'none'}",
                ),
                remedy="Install it in the image: `apt-get install ibverbs-providers`, `dnf install libibverbs`, or the "
                "vendor's packages of the same version as libibverbs.",
                owner=Owner.USER,
            )


def _without_libfabric(view: NodeView, folders: tuple[str, ...]) -> Iterator[Finding]:
    plugin = setting(view, "NCCL_NET_PLUGIN")
    patterns = (f"libnccl-net-{plugin}.so", plugin.rpartition("/")[2]) if plugin else ("libnccl-net*.so",)
    named = (plugin.rpartition("/")[0],) if plugin.startswith("/") else ()
    needed = (
        ("libnccl-net.so", patterns, (*named, *folders), "the plugin aws-ofi-nccl"),
        ("libfabric.so.1", ("libfabric.so.1",), (*folders, *EFA_FOLDERS), "the library of the EFA adapters"),
    )
    for name, names, where, text in needed:
        if _find(view, where, names):
            continue
        elsewhere = _find(view, EFA_FOLDERS, names)
        yield Finding(
            code="rdma-libfabric-missing",
            severity=Severity.WARNING if elsewhere else Severity.ERROR,
            what=f"{name}, {text}, is not where the dynamic loader looks",
            where=", ".join(names),
            evidence=(f"found: {elsewhere or 'nowhere'}", f"looked in {', '.join(where)}"),
            remedy=f"Set LD_LIBRARY_PATH={elsewhere.rpartition('/')[0]} in the job's `env`."
            if elsewhere
            else "Use an image with Amazon's EFA installer and the aws-ofi-nccl plugin.",
            owner=Owner.USER,
        )


def rdma_peer_memory(view: NodeView) -> Iterator[Finding]:
    """The adapter can read and write the GPU's memory: a peer memory module, or DMA-BUF."""
    if not needs_rdma(view.wanted) or not view.wanted.gpus:
        return
    modules = {line.split(" ", 1)[0] for line in view.read("proc/modules").splitlines()}
    if modules & set(PEER_MODULES) or _has_efa_peer_memory(view):
        return
    driver = view.read("proc/driver/nvidia/version").partition("\n")[0]
    release = view.read("proc/sys/kernel/osrelease")
    reasons = [
        text
        for holds, text in (
            (_OPEN_DRIVER not in driver, f"DMA-BUF needs NVIDIA's open kernel modules; this is {driver}"),
            (_is_too_old(release), f"DMA-BUF needs Linux {'.'.join(map(str, DMA_BUF_KERNEL))}; this is {release}"),
            (setting(view, "NCCL_DMABUF_ENABLE") == "0", "NCCL_DMABUF_ENABLE=0"),
        )
        if holds
    ]
    if reasons:
        yield Finding(
            code="rdma-peer-memory-missing",
            severity=Severity.WARNING,
            what="neither a peer memory module nor DMA-BUF lets the adapters reach the GPUs' memory, so NCCL copies "
            "everything through the host's memory",
            where="/proc/modules",
            evidence=(f"/proc/modules has none of {', '.join(PEER_MODULES)}", *reasons),
            remedy="`modprobe nvidia_peermem` on the machine, or install NVIDIA's open kernel modules. With GPUDirect, "
            "NCCL's log has `GDRDMA` in its lines of channels.",
            owner=Owner.CLUSTER,
        )


def _is_too_old(release: str) -> bool:
    """Whether a kernel has no DMA-BUF in its RDMA core; Red Hat's 4.18 and 5.14 may have it, by a later patch."""
    found = _VERSION.match(release)
    return bool(found) and ".el" not in release and (int(found[1]), int(found[2])) < DMA_BUF_KERNEL


def _has_efa_peer_memory(view: NodeView) -> bool:
    """Amazon's driver has its own peer memory, and names it in the attribute `p2p`."""
    names = (optional(view, f"{DEVICES}/{port.device}/device/p2p") for port in used_ports(view).ports)
    return any(name not in ("", "NA", "(null)") for name in names)


def _configured_providers(view: NodeView, folders: tuple[str, ...]) -> set[str]:
    """The providers that libibverbs loads: a line `driver NAME` each, in /etc/libibverbs.d or that of its prefix."""
    prefixes = {folder.rpartition("/")[0] for folder in folders}
    found: set[str] = set()
    for folder in ("etc/libibverbs.d", *(f"{prefix.lstrip('/')}/etc/libibverbs.d".lstrip("/") for prefix in prefixes)):
        texts = [optional(view, f"{folder}/{name}") for name in view.list(folder) if name.endswith(".driver")]
        found |= {PurePosixPath(name).name.removeprefix("lib") for text in texts for name in _DRIVER.findall(text)}
    return found


def _loader_folders(view: NodeView) -> tuple[str, ...]:
    """Where the dynamic loader looks: LD_LIBRARY_PATH, the interpreter's own prefix, the cache, the usual folders."""
    try:
        cached = _LIBRARY.findall(view.run((LDCONFIG, "-p"), LDCONFIG_TIMEOUT_S))
    except NotLookedAt:
        cached = []
    python = PurePosixPath(view.wanted.python)
    of_python = [str(python.parent.parent / "lib")] if python.is_absolute() else []
    named = [folder for folder in setting(view, "LD_LIBRARY_PATH").split(":") if folder.startswith("/")]
    return tuple(dict.fromkeys((*named, *of_python, *cached, *LOADER_FOLDERS)))


def _find(view: NodeView, folders: tuple[str, ...], patterns: tuple[str, ...]) -> str:
    """The first file of these names in the folders; empty if there is none."""
    return next(
        (
            f"{folder}/{name}"
            for folder in folders
            for name in view.list(folder.strip("/"))
            if any(fnmatch(name, pattern) for pattern in patterns)
        ),
        "",
    )
