"""Explains the findings of the checks of a node before a start: the cause, how to confirm it, and what to do."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "node-check-hangs",
        "A check of a node did not end: what it reads, a driver, a device or a network file system, does not answer.",
        "Run the command in the finding on that node: it hangs too. `dmesg` often names the device.",
        "Restart the node, or run without it.",
    ),
    (
        "node-check-failed",
        "A node failed a check before ranks started on it, and so did its replacement.",
        "The finding of the check, one line above; `holdfast check --nodes N` runs the checks again.",
        "Repair what the check found, use other machines, or start without checks: `--set checks=off`.",
    ),
    (
        "shared-memory-small",
        "/dev/shm is too small for the ranks of a node: NCCL and the workers of torch's DataLoader keep data there.",
        "`df -h /dev/shm` on the node, or in the container.",
        "`resources.shm` in the job on Kubernetes, `--shm-size` for a container, a larger tmpfs on a machine.",
    ),
    (
        "locked-memory-limited",
        "RDMA registers memory, and the kernel limits how much a process may lock.",
        "`ulimit -l` in the shell that starts the ranks must print unlimited.",
        "LimitMEMLOCK=infinity for the service that starts the agent; on Kubernetes the capability IPC_LOCK as root.",
    ),
)
