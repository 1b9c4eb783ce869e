"""Limits of a node's processes: shared memory and locked memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

from holdfast.findings import Finding, Owner, Severity
from holdfast.preflight.node_view import NodeView, NotLookedAt

SHM_PER_PROCESS = 256 << 20
"""Bytes of /dev/shm per rank: NCCL's buffers take some 33 MB per pair of GPUs of a node, loader workers the rest."""
CAP_IPC_LOCK = 14
UNLIMITED_LOCK = 1 << 30
"""A limit of locked memory below this is too small for RDMA: NCCL registers its buffers, and GPUDirect its pages."""


def shared_memory(view: NodeView) -> Iterator[Finding]:
    """/dev/shm holds NCCL's buffers between the ranks of a node, and the batches of torch's loader workers."""
    try:
        found = os.statvfs(view.root / "dev/shm")
    except OSError as error:
        raise NotLookedAt(f"/dev/shm: {error.strerror}") from error
    size, needed = found.f_blocks * found.f_frsize, view.wanted.processes * SHM_PER_PROCESS
    if size < needed:
        yield Finding(
            code="shared-memory-small",
            severity=Severity.WARNING,
            what=f"/dev/shm has {size >> 20:,} MiB for {view.wanted.processes} ranks; loader workers end with a bus "
            "error, and NCCL with `No space left on device`, when it is full",
            where="/dev/shm",
            remedy=f"Give it at least {needed >> 20:,} MiB: `resources.shm` in the job on Kubernetes, `--shm-size` for "
            "a container, `mount -o remount,size=... /dev/shm` on a machine.",
            owner=Owner.CLUSTER,
        )


def _may_lock(view: NodeView) -> bool:
    """Whether the limit does not apply: the process has the capability IPC_LOCK."""
    effective = next(line for line in view.read("proc/self/status").splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> CAP_IPC_LOCK & 1)


def locked_memory(view: NodeView) -> Iterator[Finding]:
    """RDMA registers memory, which the kernel limits by RLIMIT_MEMLOCK for processes without IPC_LOCK."""
    limits = view.read("proc/self/limits")
    soft = next((line.split()[3] for line in limits.splitlines() if line.startswith("Max locked memory")), None)
    if soft is None:
        raise NotLookedAt("/proc/self/limits has no line `Max locked memory`")
    if view.wanted.network == "Socket" or _may_lock(view):
        return
    if soft != "unlimited" and int(soft) < UNLIMITED_LOCK:
        yield Finding(
            code="locked-memory-limited",
            what=f"processes may lock {int(soft) >> 10:,} KiB of memory, and {view.wanted.network} registers gigabytes",
            where="memlock",
            evidence=(f"Max locked memory {soft}",),
            remedy="Set it to unlimited: `ulimit -l unlimited` or LimitMEMLOCK=infinity for the agent's service; on "
            "Kubernetes the capability IPC_LOCK, which the fabric's row adds.",
            owner=Owner.CLUSTER,
        )
