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
    (
        "probe-arrive",
        "A node that all quick checks passed did not reach the first node, so that nothing could be measured with it.",
        "`nc -vz FIRST_NODE PORT` from that node; the finding names ranks and deadline.",
        "Open all ports between the nodes of a run: firewall, network policy, security group.",
    ),
    (
        "probe-matmul",
        "A device multiplied matrices wrongly, or much slower than the others: a defect, heat, or other processes.",
        "`dcgmi diag -r 3`; `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,ECC` on the node.",
        "Take the device out of use. A wrong product is never harmless: it corrupts training silently.",
    ),
    (
        "probe-memory",
        "A device copied its memory wrongly, or much slower than the others.",
        "`dcgmi diag -r 3`; `nvidia-smi -q -d ECC,ROW_REMAPPER` on the node.",
        "Reset the GPU if rows wait to be remapped; else take it out of use.",
    ),
    (
        "probe-node-all-reduce",
        "The ranks of one node reduce wrongly, slowly or not at all: NVLink, NVSwitch, PCIe or the Fabric Manager.",
        "`nvidia-smi nvlink -s`, `nvidia-smi topo -m` and the Fabric Manager's log, on this node and another.",
        "Restart the Fabric Manager; replace the node if links stay down.",
    ),
    (
        "probe-pairs",
        "A node, or the path between two, is slow or silent, while other pairs of nodes communicate well.",
        "The finding has the rates of the pairs. Compare adapters, cables, switch ports and routing.",
        "Replace the cable or the node; between two nodes only, look at the switches between them.",
    ),
    (
        "probe-all-reduce",
        "Pairs of nodes communicate, and all of them together do not: settings that differ, or a limit of connections.",
        "`holdfast events RUN` has the errors of the ranks; compare NCCL_* variables of the nodes.",
        "Make the settings equal; open all ports.",
    ),
    (
        "probe-storage",
        "This node cannot write to the file system of checkpoints while others write there too; or no node can.",
        "The error in the finding; `df` and `mount` on this node; the file system's own statistics.",
        "Mount it again, or have its server, quota or network path fixed.",
    ),
    (
        "probe-hangs",
        "The processes of a probe could not be killed: the kernel waits for a device.",
        "`dmesg` on this node; `ps -eo pid,stat,wchan,cmd` shows processes in state D.",
        "Restart the node, or run without it.",
    ),
    (
        "probe-no-result",
        "The probe of the first node, which coordinates the others, ended without a result.",
        "`probe-*.log` in the node's folder has its output.",
        "Repair what the output says; `--set checks=quick` starts without probes.",
    ),
    (
        "node-failed-replay",
        "Groups of nodes repeated the run's last steps twice. Both groups with this node failed, or ended in another "
        "state than the rest, and its partners passed with others: a device, memory or adapter of it works wrongly.",
        "The evidence lists the groups; `replay-*.log` in a node's folder has the output of its ranks.",
        "The node is replaced. `dcgmi diag -r 3` and a memory test before the machine is used again.",
    ),
    (
        "replay-suspects",
        "Several nodes compute wrongly: no healthy group tells them apart from their partners in two replays.",
        "The evidence lists the groups that failed.",
        "Test the named nodes, or cancel the run and resume without them.",
    ),
    (
        "replay-found-nothing",
        "Groups of nodes repeated the run's last steps, and no node was named. Equal states: the fault did not show "
        "in these steps. All groups failed: the cause is the program or its data. No majority: the steps cannot be "
        "repeated bit-exactly.",
        "The evidence has what each replay ended with; `replay-*.log` in a node's folder has the output of its ranks.",
        "Look for the cause in the program and its data. If states differ everywhere, seed all random numbers and "
        "use deterministic kernels.",
    ),
    (
        "probe-not-possible",
        "The interpreter of the job's command has no torch or no holdfast, so that nothing could be measured.",
        "`PYTHON -c 'import torch, holdfast.train'` with the interpreter that the finding names.",
        "Install `holdfast[train]` in the image, or use `checks: quick`.",
    ),
)
