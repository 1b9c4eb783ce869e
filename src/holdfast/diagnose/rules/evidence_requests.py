"""The evidence that decides where lines alone do not: what it is, and how a user collects it."""

from __future__ import annotations

from msgspec import Struct


class EvidenceRequest(Struct, frozen=True):
    """Evidence that would decide, and the command that collects it."""

    what: str
    how: str


EVIDENCE_REQUESTS: dict[str, EvidenceRequest] = {
    "nccl-warn": EvidenceRequest(
        "the NCCL WARN line that the same process wrote before the generic error",
        "run again with NCCL_DEBUG=WARN, and pass this command the output of every rank",
    ),
    "output": EvidenceRequest(
        "what ranks, their launcher and the kernel logged at the failure: the input has nothing like that",
        "pass this command what the job wrote: the launcher's log folder, slurm-JOB.out, `kubectl logs` of every pod",
    ),
    "all-ranks": EvidenceRequest(
        "what every other rank logged, above all the earliest error by time",
        "pass this command the logs of all ranks: their folder, or `kubectl logs` of every pod",
    ),
    "peer-log": EvidenceRequest(
        "the last lines of the rank at the other end of the closed connection",
        "add the log of the peer that the line names (its address is in the line)",
    ),
    "last-collectives": EvidenceRequest(
        "the last collective that each of the other ranks has enqueued and completed",
        "pass the logs of all ranks, or set TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_ON_TIMEOUT=1 (before torch 2.10 "
        "TORCH_NCCL_TRACE_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT) and add the flight recorder's dumps",
    ),
    "stacks": EvidenceRequest(
        "where the rank that is behind waits",
        "py-spy dump --pid PID on that rank's node while it hangs",
    ),
    "kernel-log": EvidenceRequest(
        "whether the kernel killed the process for memory",
        "dmesg -T | grep -i -E 'killed process|oom' on that node, or memory.events of the pod's cgroup, or "
        "`kubectl describe pod` (OOMKilled)",
    ),
    "who-sent-signal": EvidenceRequest(
        "who sent the signal: the scheduler, a person, or an agent after another rank had failed",
        "sacct -j JOB --format=State,ExitCode,Reason or `kubectl get events`, and the other nodes' logs",
    ),
    "memlock": EvidenceRequest(
        "the locked-memory limit of the rank's process",
        "grep 'locked memory' /proc/PID/limits inside the container (ulimit -l in its shell)",
    ),
    "gid": EvidenceRequest(
        "which GID the queue pair used at both ends, and whether it is reachable",
        "show_gids on both nodes (or /sys/class/infiniband/*/ports/*/gids/*); fe80:: is link-local, ::ffff: is routed",
    ),
    "link-counters": EvidenceRequest(
        "whether the link itself lost packets",
        "compare port_rcv_errors, symbol_error, link_downed, out_of_sequence, rx_prio*_discards in "
        "/sys/class/infiniband/*/ports/*/{counters,hw_counters} on both ends, before and after",
    ),
    "mtu": EvidenceRequest(
        "whether the active MTU is the same on every RDMA port",
        "ibv_devinfo | grep active_mtu and ip link show on both nodes",
    ),
    "which-pairs": EvidenceRequest(
        "which pairs of NICs fail: only across rails, or also on one rail",
        "compare the device and peer of every failing line; try NCCL_CROSS_NIC=0",
    ),
    "acs": EvidenceRequest(
        "whether ACS or an IOMMU redirects traffic between the GPU and the NIC",
        "lspci -vvv | grep -i acsctl (no SrcValid+ on bridges), dmesg | grep -i iommu",
    ),
    "net-plugin": EvidenceRequest(
        "which network NCCL chose on every rank, and which file or plugin wrote the line",
        "run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV and pass the logs of all ranks",
    ),
    "rdma-on-node": EvidenceRequest(
        "whether the nodes have RDMA devices at all",
        "ls /sys/class/infiniband on the node itself; if it is empty, the node only has TCP, and nothing is wrong",
    ),
    "transport": EvidenceRequest(
        "which transport each pair of ranks uses, and whether it uses GPUDirect RDMA",
        "run with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV and look for `via NET/...` and `GDRDMA`",
    ),
    "peermem": EvidenceRequest(
        "whether nvidia_peermem is loaded or DMA-BUF is used, and the NCCL version",
        "lsmod | grep -E 'nvidia_peermem|nv_peer_mem', the line `NCCL version`, `DMA-BUF is available`",
    ),
    "reachable": EvidenceRequest(
        "whether a plain TCP connection between the two nodes' addresses works on any port",
        "on one node `nc -l 29555`, on the other `nc -vz ADDRESS 29555`, with the address that the line names",
    ),
    "service-reachable": EvidenceRequest(
        what="whether the node reaches that host: its name, a proxy, an egress policy",
        how="on that node: `getent hosts HOST; curl -sSI https://HOST`, with the host that the line names",
    ),
    "interfaces": EvidenceRequest(
        "which interface and address each rank has chosen",
        "NCCL_DEBUG=INFO (`Bootstrap : Using`, `NET/Socket : Using`), `ip -br addr` on each node",
    ),
    "resolves": EvidenceRequest(
        "whether the master's name resolves on every node, and to which address",
        "getent hosts $MASTER_ADDR on every node, and `ss -ltnp | grep $MASTER_PORT` on the master",
    ),
    "port-holder": EvidenceRequest(
        "which process holds the port",
        "ss -ltnp | grep $MASTER_PORT on the master",
    ),
    "who-joined": EvidenceRequest(
        "which nodes have joined and which never started",
        "the logs of all nodes from the start; `kubectl get pods` or `squeue -j JOB`; WORLD_SIZE and --nnodes on each",
    ),
    "versions": EvidenceRequest(
        "the versions of NCCL, CUDA, the driver, torch and the plugin on every rank",
        "python -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())'; nvidia-smi",
    ),
    "gpus-seen": EvidenceRequest(
        "how many GPUs each rank sees, and how many ranks its node has",
        "echo $LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES; nvidia-smi -L on that node, inside the container",
    ),
    "xid": EvidenceRequest(
        "whether the driver reported an Xid for this GPU",
        "dmesg -T | grep -E 'NVRM|Xid' on that node, nvidia-smi -q | grep -i -E 'xid|ecc|retired|remapped'",
    ),
    "cuda-sync": EvidenceRequest(
        "which kernel failed, since CUDA reports it later",
        "run again with CUDA_LAUNCH_BLOCKING=1 (and TORCH_USE_CUDA_DSA=1), or on one rank under compute-sanitizer",
    ),
    "native-stack": EvidenceRequest(
        "the call in which it crashed",
        "PYTHONFAULTHANDLER=1 prints the Python line; `coredumpctl gdb PID`, then `bt`, the native one",
    ),
    "shm": EvidenceRequest(
        "the size of /dev/shm in the container, and its usage",
        "df -h /dev/shm inside the container of the rank that died",
    ),
    "disk-usage": EvidenceRequest(
        "how full the disk in the line is, and whose quota applies",
        "df -h PATH; df -i PATH; quota -s (lfs quota -h PATH on Lustre), in the container that wrote the line",
    ),
    "first-traceback": EvidenceRequest(
        "the traceback that a rank printed before it was stopped",
        "add the rank's own log (torchrun --log-dir DIR --tee 3; error_file)",
    ),
    "exit-reason": EvidenceRequest(
        "why the program ended, since no rank logged a reason",
        "run it by itself in the environment that `holdfast render` shows, or add logging to it",
    ),
    "memory-use": EvidenceRequest(
        "how much GPU memory was in use, and by which processes",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv on that node; torch.cuda.memory_summary()",
    ),
    "fabric-manager": EvidenceRequest(
        "whether Fabric Manager (and IMEX on NVLink domains) is running and ready",
        "systemctl status nvidia-fabricmanager nvidia-imex; nvidia-smi -q | grep -A2 Fabric",
    ),
    "step-times": EvidenceRequest(
        "how long each rank's last steps took",
        "py-spy dump on a rank that is late, and the time of the last line of each rank's log",
    ),
    "pod-status": EvidenceRequest(
        "the state and the last termination reason of each pod",
        "kubectl describe pod POD; kubectl get events --sort-by=.lastTimestamp",
    ),
    "settings": EvidenceRequest(
        "which NCCL_ variables are set on the ranks, in the environment and in /etc/nccl.conf",
        "env | grep NCCL_ and cat /etc/nccl.conf in the container, or `NCCL_* set` in the logs of NCCL_DEBUG=INFO",
    ),
    "topology": EvidenceRequest(
        "which links and NUMA nodes lie between the GPUs and the NICs, as NCCL sees them",
        "nvidia-smi topo -m; NCCL_TOPO_DUMP_FILE=topo.xml",
    ),
}
