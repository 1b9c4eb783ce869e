"""How to confirm and fix each failure class, whichever line revealed it."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.knowledge.explanation import Explanation

SOURCE = "holdfast, classes of diagnosis"

REMEDIES: dict[FailureClass, tuple[str, str]] = {
    FailureClass.ACS_IOMMU: (
        "`lspci -vvv | grep ACSCtl` (SrcValid+ is on), `dmesg | grep -i -e iommu -e dmar`; it works with "
        "NCCL_P2P_DISABLE=1 or NCCL_NET_GDR_LEVEL=LOC.",
        "ACS off on the PCIe bridges (setpci, or firmware); IOMMU off or to passthrough (iommu=pt).",
    ),
    FailureClass.COLLECTIVE_MISMATCH: (
        "Flight recorder dumps of all ranks (TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_NCCL_DUMP_ON_TIMEOUT=1): "
        "`holdfast diagnose DUMPS`; or TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        "The same calls in the same order on all ranks: no `if rank == 0` around one, equal numbers of batches "
        "(drop_last, Join), the same branches of the model.",
    ),
    FailureClass.DRIVER: (
        "`nvidia-smi`, `systemctl status nvidia-fabricmanager nvidia-imex`, `lsmod | grep nvidia_peermem`.",
        "Start the missing service in the driver's version; `modprobe nvidia_peermem`.",
    ),
    FailureClass.FIREWALL: (
        "`nc -l PORT` on one node and `nc -vz ADDRESS PORT` on another, with a high port; sidecars in `kubectl "
        "get pod`.",
        'Open all ports between the nodes; `sidecar.istio.io/inject: "false"`; a NetworkPolicy that lets the '
        "job's pods connect to each other.",
    ),
    FailureClass.GDR_MISSING: (
        "NCCL_DEBUG=INFO: `via NET/IB/0` without `/GDRDMA`; `lsmod | grep nvidia_peermem`, or `DMA-BUF is available`.",
        "`modprobe nvidia_peermem`, or a kernel, driver and NCCL that support DMA-BUF.",
    ),
    FailureClass.GPU_XID: (
        "`dmesg -T | grep -i xid` on that node, then `holdfast explain XID-…`.",
        "Take the node out of use; reset the GPU, reboot, or have the GPU replaced.",
    ),
    FailureClass.HANG_UNKNOWN: (
        "`py-spy dump --pid PID` on every rank while it hangs: find the rank whose stack differs from the others.",
        "Fix what that rank waits for. Set recovery.step_timeout_s, so that the run detects the hang itself.",
    ),
    FailureClass.MEMLOCK: (
        "`ulimit -l`, `ulimit -n` inside the container, /proc/PID/limits of a rank.",
        "`ulimit -l unlimited` (limits.conf, LimitMEMLOCK=infinity, --ulimit memlock=-1, IPC_LOCK).",
    ),
    FailureClass.NAN_DATA: (
        "The sample or step in the traceback; CUDA_LAUNCH_BLOCKING=1 shows the failing call; torch.isfinite on "
        "loss and input.",
        "Skip or fix the sample; keep token ids below the embedding's size; clip gradients, lower the learning rate.",
    ),
    FailureClass.NETWORK_LOSS: (
        "`ibv_devinfo | grep mtu`, `show_gids`, `ethtool -S` (discards, pause) and `ibstat` on both ends.",
        "Equal MTU, the right NCCL_IB_GID_INDEX, PFC and ECN on RoCE, good cables, stable addresses.",
    ),
    FailureClass.OOM_GPU: (
        "`nvidia-smi`; torch's message shows how much is allocated and how much only reserved.",
        "A smaller micro-batch, activation checkpointing, sharding; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    ),
    FailureClass.OOM_HOST: (
        "`dmesg -T | grep -i 'killed process'`, memory.events of the cgroup, `kubectl describe pod`, `sacct`.",
        "A higher limit; fewer DataLoader workers, less pinned memory, one checkpoint copy per node instead of "
        "one per rank.",
    ),
    FailureClass.RANK_COUNT: (
        "WORLD_SIZE, RANK and the number of GPUs on every node; a stale store from an earlier run.",
        "nodes × ranks per node = WORLD_SIZE on every node; a fresh rendezvous for each run.",
    ),
    FailureClass.RDMA_DEVICE_MISSING: (
        "`ibv_devinfo` and `ls /dev/infiniband` inside the container; `kubectl describe node` (rdma/… resources).",
        "--device=/dev/infiniband, the rdma resource in the pod, IPC_LOCK, libibverbs1 and ibverbs-providers.",
    ),
    FailureClass.RENDEZVOUS: (
        "`getent hosts $MASTER_ADDR` on every node; `ss -ltnp | grep $MASTER_PORT` on the master.",
        "A name that resolves on every node (headless service, publishNotReadyAddresses), a free port, one master.",
    ),
    FailureClass.SHM_TOO_SMALL: (
        "`df -h /dev/shm` inside the container.",
        "emptyDir with `medium: Memory` at /dev/shm, `--shm-size=16g`, or `--ipc=host`.",
    ),
    FailureClass.STRAGGLER: (
        "Step times of each rank; `nvidia-smi -q -d PERFORMANCE,CLOCK` there; `py-spy dump` on the late rank.",
        "Move the slow work off that rank, or take the slow node out of use; a longer timeout only hides it.",
    ),
    FailureClass.TCP_FALLBACK: (
        "NCCL_DEBUG=INFO: `Using network Socket`, `via NET/Socket`.",
        "The network's library and devices in image and pod: libibverbs1 + ibverbs-providers, or aws-ofi-nccl + EFA.",
    ),
    FailureClass.VERSION_MISMATCH: (
        "`NCCL version`, torch.__version__, the driver and the plugin on every rank.",
        "One image for all nodes; a plugin and library built for each other.",
    ),
    FailureClass.WRONG_INTERFACE: (
        "NCCL_DEBUG=INFO: `NET/Socket : Using`, `Bootstrap : Using`; `ip -br addr` on each node.",
        "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that all nodes share; not lo, docker0, veth.",
    ),
    FailureClass.OTHER: ("The evidence in the diagnosis.", "Follow the diagnosis."),
    FailureClass.PROGRAM_ERROR: (
        "The traceback of the rank that failed first.",
        "Fix that error; the other ranks only lost their peer.",
    ),
    FailureClass.USAGE: (
        "The last lines of the rank or launcher that mention its arguments; its --help.",
        "Change the job's command, or the configuration that it reads.",
    ),
    FailureClass.UNREACHABLE: (
        "On that node: `getent hosts HOST; curl -sSI https://HOST`, with the host from the line; a proxy, a "
        "network policy.",
        "Fetch data and models before the job starts (HF_HUB_OFFLINE=1), or allow egress from the nodes.",
    ),
    FailureClass.STORAGE: (
        "`df -h`, `df -i`, `mount` and `dmesg` on that node.",
        "Free some space, repair the file system; resume from the checkpoint before the damaged one.",
    ),
    FailureClass.PREEMPTED: (
        "`sacct -j JOB -o State,Reason`, `kubectl get events`.",
        "Run it again: it resumes from its checkpoint. Use a longer time limit or a higher priority.",
    ),
    FailureClass.KILLED: (
        "Who sent the signal: `sacct -j JOB -o State,Reason`, `kubectl get events`, `dmesg -T`, a person; "
        "`holdfast events` shows drills.",
        "Nothing if it was intended; otherwise stop the sender.",
    ),
    FailureClass.NODE_LOST: (
        "`kubectl get nodes`, `sinfo -R`, the machine's console.",
        "Keep the node out of use until it is checked; start again without it.",
    ),
    FailureClass.NOT_STARTED: (
        "`kubectl describe pod POD`, `squeue -j JOB -o %R`: both show what the job waits for.",
        "Request resources that exist; fix the image, volume or quota.",
    ),
    FailureClass.UNKNOWN: (
        "The diagnosis names the evidence that would decide, and how to get it.",
        "Collect that evidence, and run `holdfast diagnose` again.",
    ),
}


def rows() -> Iterator[Explanation]:
    """Every class by its label."""
    for one, (confirm, remedy) in REMEDIES.items():
        cause = one.description[:1].upper() + one.description[1:] + "."
        yield Explanation(code=one.value, cause=cause, confirm=confirm, remedy=remedy, source=SOURCE)
