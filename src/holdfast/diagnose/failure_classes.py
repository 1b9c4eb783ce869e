"""The failure classes that a diagnosis can name, its confidence, and who can fix each.

The values are the labels under which incidents are collected and scored: more may come, none is ever renamed.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Confidence(StrEnum):
    """The confidence of a diagnosis."""

    CERTAIN = "certain"
    """The line has one cause, and no evidence contradicts it."""
    LIKELY = "likely"
    """The usual cause; another one is possible and is named."""
    UNSURE = "unsure"
    """Several causes write this line; deciding needs other evidence."""


class FailureClass(StrEnum):
    """The kind of a failure."""

    ACS_IOMMU = "acs/iommu"
    COLLECTIVE_MISMATCH = "collective mismatch (desync)"
    DRIVER = "driver/peermem"
    FIREWALL = "firewall/networkpolicy"
    GDR_MISSING = "gdr-missing"
    GPU_XID = "gpu-xid"
    HANG_UNKNOWN = "hang-unknown"
    MEMLOCK = "memlock/ulimit"
    NAN_DATA = "nan/data"
    NETWORK_LOSS = "mtu/pfc/roce-loss"
    OOM_GPU = "oom-gpu"
    OOM_HOST = "oom-host"
    RANK_COUNT = "rank-count mismatch"
    RDMA_DEVICE_MISSING = "rdma-device-missing"
    RENDEZVOUS = "rendezvous/dns"
    SHM_TOO_SMALL = "shm-too-small"
    SILENT_CORRUPTION = "silent-corruption"
    STRAGGLER = "straggler"
    TCP_FALLBACK = "tcp-fallback"
    VERSION_MISMATCH = "version-mismatch"
    WRONG_INTERFACE = "wrong-interface"
    OTHER = "other"
    # These have the label `other` in the incident collections, and need different remedies.
    PROGRAM_ERROR = "program-error"
    USAGE = "usage-error"
    UNREACHABLE = "data/hub-unreachable"
    STORAGE = "storage"
    PREEMPTED = "preempted"
    KILLED = "killed"
    NODE_LOST = "node-lost"
    NOT_STARTED = "not-started"
    # Not a class, but a verdict: the input does not decide.
    UNKNOWN = "unknown"

    @property
    def description(self) -> str:
        """A description for a headline."""
        return FAILURE_CLASS_INFO[self].description

    @property
    def layer(self) -> int:
        """Its depth among causes: a deeper class, of a lower number, explains those above it."""
        return FAILURE_CLASS_INFO[self].layer

    @property
    def label(self) -> FailureClass:
        """The class under which collected incidents file it."""
        return FAILURE_CLASS_INFO[self].label or self


class FailureClassInfo(Struct, frozen=True):
    """All that is known of a class."""

    description: str
    layer: int
    confirm: str
    """How to confirm it, whichever line revealed it."""
    remedy: str
    label: FailureClass | None = None
    """The class under which collected incidents file it, if another one."""


FAILURE_CLASS_INFO: dict[FailureClass, FailureClassInfo] = {
    FailureClass.ACS_IOMMU: FailureClassInfo(
        "PCIe access control (ACS) or the IOMMU blocks traffic between GPU and GPU or NIC",
        3,
        "`lspci -vvv | grep ACSCtl` (SrcValid+ is on), `dmesg | grep -i -e iommu -e dmar`; it works with "
        "NCCL_P2P_DISABLE=1 or NCCL_NET_GDR_LEVEL=LOC.",
        "ACS off on the PCIe bridges (setpci, or firmware); IOMMU off or to passthrough (iommu=pt).",
    ),
    FailureClass.COLLECTIVE_MISMATCH: FailureClassInfo(
        "ranks made different collective calls",
        5,
        "Flight recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000; runs of holdfast have them): "
        "`holdfast diagnose DUMPS`; or TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        "The same calls in the same order on all ranks: no `if rank == 0` around one, equal numbers of batches "
        "(drop_last, Join), the same branches of the model.",
    ),
    FailureClass.DRIVER: FailureClassInfo(
        "the GPU driver, Fabric Manager, IMEX or nvidia_peermem is broken or misconfigured",
        1,
        "`nvidia-smi`, `systemctl status nvidia-fabricmanager nvidia-imex`, `lsmod | grep nvidia_peermem`.",
        "Start the missing service in the driver's version; `modprobe nvidia_peermem`.",
    ),
    FailureClass.FIREWALL: FailureClassInfo(
        "something between the nodes closes or drops connections",
        3,
        "`nc -l PORT` on one node and `nc -vz ADDRESS PORT` on another, with a high port; sidecars in `kubectl get "
        "pod`.",
        'Open all ports between the nodes; `sidecar.istio.io/inject: "false"`; a NetworkPolicy that lets the '
        "job's pods connect to each other.",
    ),
    FailureClass.GDR_MISSING: FailureClassInfo(
        "the network cannot reach GPU memory directly (no GPUDirect RDMA)",
        3,
        "NCCL_DEBUG=INFO: `via NET/IB/0` without `/GDRDMA`; `lsmod | grep nvidia_peermem`, or `DMA-BUF is available`.",
        "`modprobe nvidia_peermem`, or a kernel, driver and NCCL that support DMA-BUF.",
    ),
    FailureClass.GPU_XID: FailureClassInfo(
        "a GPU or its links failed",
        0,
        "`dmesg -T | grep -i xid` on that node, then `holdfast explain XID-…`.",
        "Take the node out of use; reset the GPU, reboot, or have the GPU replaced.",
    ),
    FailureClass.HANG_UNKNOWN: FailureClassInfo(
        "ranks stopped making progress",
        5,
        "`py-spy dump --pid PID` on every rank while it hangs: find the rank whose stack differs from the others.",
        "Fix what that rank waits for. Set recovery.step_timeout_s, so that the run detects the hang itself.",
    ),
    FailureClass.MEMLOCK: FailureClassInfo(
        "a limit of the process is too low: locked memory or open files",
        1,
        "`ulimit -l`, `ulimit -n` inside the container, /proc/PID/limits of a rank.",
        "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity, --ulimit memlock=-1, IPC_LOCK).",
    ),
    FailureClass.NAN_DATA: FailureClassInfo(
        "the data or the numbers are bad: NaN, or an index out of range",
        2,
        "The sample or step in the traceback; CUDA_LAUNCH_BLOCKING=1 shows the failing call; torch.isfinite on "
        "loss and input.",
        "Skip or fix the sample; keep token ids below the embedding's size; clip gradients, lower the learning rate.",
    ),
    FailureClass.NETWORK_LOSS: FailureClassInfo(
        "the RDMA network loses or refuses traffic: MTU, GID, PFC, link",
        3,
        "`ibv_devinfo | grep mtu`, `show_gids`, `ethtool -S` (discards, pause) and `ibstat` on both ends.",
        "Equal MTU, the right NCCL_IB_GID_INDEX, PFC and ECN on RoCE, good cables, stable addresses.",
    ),
    FailureClass.OOM_GPU: FailureClassInfo(
        "GPU memory ran out",
        1,
        "`nvidia-smi`; torch's message shows how much is allocated and how much only reserved.",
        "A smaller micro-batch, activation checkpointing, sharding; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    FailureClass.OOM_HOST: FailureClassInfo(
        "host memory ran out",
        0,
        "`dmesg -T | grep -i 'killed process'`, memory.events of the cgroup, `kubectl describe pod`, `sacct`.",
        "A higher limit; fewer DataLoader workers, less pinned memory, one checkpoint copy per node instead of one "
        "per rank.",
    ),
    FailureClass.RANK_COUNT: FailureClassInfo(
        "the ranks disagree on the world size or on rank numbers",
        2,
        "WORLD_SIZE, RANK and the number of GPUs on every node; a stale store from an earlier run.",
        "nodes × ranks per node = WORLD_SIZE on every node; a fresh rendezvous for each run.",
    ),
    FailureClass.RDMA_DEVICE_MISSING: FailureClassInfo(
        "no RDMA device, or fewer than there should be",
        2,
        "`ibv_devinfo` and `ls /dev/infiniband` inside the container; `kubectl describe node` (rdma/… resources).",
        "--device=/dev/infiniband, the rdma resource in the pod, IPC_LOCK, libibverbs1 and ibverbs-providers.",
    ),
    FailureClass.RENDEZVOUS: FailureClassInfo(
        "the ranks could not complete the rendezvous",
        3,
        "`getent hosts $MASTER_ADDR` on every node; `ss -ltnp | grep $MASTER_PORT` on the master.",
        "A name that resolves on every node (headless service, publishNotReadyAddresses), a free port, one master.",
    ),
    FailureClass.SHM_TOO_SMALL: FailureClassInfo(
        "/dev/shm is too small",
        1,
        "`df -h /dev/shm` inside the container.",
        "emptyDir with `medium: Memory` at /dev/shm, `--shm-size=16g`, or `--ipc=host`.",
    ),
    FailureClass.SILENT_CORRUPTION: FailureClassInfo(
        "a device or its memory changed a bit, and reported no error",
        1,
        "The same rank or node differs again; `holdfast check` on it, with matrix products of known results.",
        "Another node, and the last checkpoint on which all ranks agreed; test the devices and memory of the node.",
        FailureClass.OTHER,
    ),
    FailureClass.STRAGGLER: FailureClassInfo(
        "one rank was far behind the others",
        5,
        "Step times of each rank; `nvidia-smi -q -d PERFORMANCE,CLOCK` there; `py-spy dump` on the late rank.",
        "Move the slow work off that rank, or take the slow node out of use; a longer timeout only hides it.",
    ),
    FailureClass.TCP_FALLBACK: FailureClassInfo(
        "the ranks use plain TCP instead of the fast network",
        3,
        "NCCL_DEBUG=INFO: `Using network Socket`, `via NET/Socket`.",
        "The network's library and devices in image and pod: libibverbs1 + ibverbs-providers, or aws-ofi-nccl + EFA.",
    ),
    FailureClass.VERSION_MISMATCH: FailureClassInfo(
        "versions are incompatible",
        1,
        "`NCCL version`, torch.__version__, the driver and the plugin on every rank.",
        "One image for all nodes; a plugin and library built for each other.",
    ),
    FailureClass.WRONG_INTERFACE: FailureClassInfo(
        "the wrong network interface was chosen",
        2,
        "NCCL_DEBUG=INFO: `NET/Socket : Using`, `Bootstrap : Using`; `ip -br addr` on each node.",
        "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that all nodes share; not lo, docker0, veth.",
    ),
    FailureClass.OTHER: FailureClassInfo(
        "a known fault that has no separate class",
        4,
        "The evidence in the diagnosis.",
        "Follow the diagnosis.",
    ),
    FailureClass.PROGRAM_ERROR: FailureClassInfo(
        "the program itself failed",
        4,
        "The traceback of the rank that failed first.",
        "Fix that error; the other ranks only lost their peer.",
        label=FailureClass.OTHER,
    ),
    FailureClass.USAGE: FailureClassInfo(
        "the program or its launcher rejected its command line or configuration",
        4,
        "The last lines of the rank or launcher that mention its arguments; its --help.",
        "Change the job's command, or the configuration that it reads.",
        label=FailureClass.OTHER,
    ),
    FailureClass.UNREACHABLE: FailureClassInfo(
        "data, a model hub or another service could not be reached",
        4,
        "On that node: `getent hosts HOST; curl -sSI https://HOST`, with the host from the line; a proxy, a "
        "network policy.",
        "Fetch data and models before the job starts (HF_HUB_OFFLINE=1), or allow egress from the nodes.",
        label=FailureClass.OTHER,
    ),
    FailureClass.STORAGE: FailureClassInfo(
        "a disk or file system failed",
        1,
        "`df -h`, `df -i`, `mount` and `dmesg` on that node.",
        "Free some space, repair the file system; resume from the checkpoint before the damaged one.",
        label=FailureClass.OTHER,
    ),
    FailureClass.PREEMPTED: FailureClassInfo(
        "the job was stopped: preemption, time limit or cancellation",
        4,
        "`sacct -j JOB -o State,Reason`, `kubectl get events`.",
        "Run it again: it resumes from its checkpoint. Use a longer time limit or a higher priority.",
        label=FailureClass.OTHER,
    ),
    FailureClass.KILLED: FailureClassInfo(
        "a process was ended from outside",
        4,
        "Who sent the signal: `sacct -j JOB -o State,Reason`, `kubectl get events`, `dmesg -T`, a person; "
        "`holdfast events` shows drills.",
        "Nothing if it was intended; otherwise stop the sender.",
        label=FailureClass.OTHER,
    ),
    FailureClass.NODE_LOST: FailureClassInfo(
        "a node was lost",
        0,
        "`kubectl get nodes`, `sinfo -R`, the machine's console.",
        "Keep the node out of use until it is checked; start again without it.",
        label=FailureClass.OTHER,
    ),
    FailureClass.NOT_STARTED: FailureClassInfo(
        "the job never started to run",
        2,
        "`kubectl describe pod POD`, `squeue -j JOB -o %R`: both show what the job waits for.",
        "Request resources that exist; fix the image, volume or quota.",
        label=FailureClass.OTHER,
    ),
    FailureClass.UNKNOWN: FailureClassInfo(
        "the input does not decide",
        6,
        "The diagnosis names the evidence that would decide, and how to get it.",
        "Collect that evidence, and run `holdfast diagnose` again.",
    ),
}

HANG_FAILURE_CLASSES = frozenset(each for each in FailureClass if each.layer == 5)
