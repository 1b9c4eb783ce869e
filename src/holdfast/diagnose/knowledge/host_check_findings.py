"""Explains the findings of a node's network, disks, software, CPUs and variables before a start."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "interface-missing",
        "NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME names an interface that this node does not have.",
        "`ip -br addr` on the node, in the container: names differ between machines, and a pod sees only its own.",
        "Name an interface that all nodes have, use a prefix such as `en`, or attach the network to the pod.",
    ),
    (
        "interface-down",
        "The interface that the job names is down or has no carrier; NCCL skips it, and Gloo cannot listen on it.",
        "`ip -br link` shows DOWN or NO-CARRIER.",
        "`ip link set DEVICE up`; look at the cable and the switch port; or name another interface.",
    ),
    (
        "interface-without-address",
        "The interface that the job names has no address but a link-local one, which other nodes do not reach.",
        "`ip -br addr` on the node.",
        "Give it an address (DHCP, IPAM of the pod's network), or name another interface.",
    ),
    (
        "interface-slow",
        "The interface that carries the gradients of GPUs over TCP runs below 10 Gbit/s, or half duplex.",
        "`ethtool DEVICE` shows speed, duplex and what both ends offer.",
        "Name a faster interface; replace the cable; set the switch port to the card's speed.",
    ),
    (
        "host-name-unresolved",
        "The node's own host name resolves to no address. Gloo then listens on the loopback interface.",
        "`getent ahosts $(hostname)` prints nothing.",
        "A line in /etc/hosts, a record in DNS, or GLOO_SOCKET_IFNAME in the job's `env`.",
    ),
    (
        "host-name-loopback",
        "The node's own host name resolves to 127.0.0.1 or 127.0.1.1, where Gloo then listens; Debian installs it so.",
        "`getent ahosts $(hostname)`; the line in /etc/hosts.",
        "Write the node's address in that line, or set GLOO_SOCKET_IFNAME in the job's `env`.",
    ),
    (
        "host-name-elsewhere",
        "The node's own host name resolves to an address that no interface of the node has: an old record, or NAT.",
        "`getent ahosts $(hostname)`, compared with `ip -br addr`.",
        "Correct DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME in the job's `env`.",
    ),
    (
        "few-free-ports",
        "The kernel has few ephemeral ports: the range is small, reserved, or in use. Ranks fail to listen or connect.",
        "`sysctl net.ipv4.ip_local_port_range net.ipv4.ip_local_reserved_ports`; `ss -ltn | wc -l`.",
        "Widen net.ipv4.ip_local_port_range, reserve fewer ports, or end what listens on so many.",
    ),
    (
        "mesh-proxy-in-pod",
        "A service mesh has put a proxy into the pod. It copies every byte of TCP, and may refuse NCCL's connections.",
        "`kubectl get pod POD -o jsonpath='{.spec.containers[*].name}'` shows istio-proxy or linkerd-proxy.",
        'Istio: label `sidecar.istio.io/inject: "false"`; linkerd: annotation `linkerd.io/inject: disabled`.',
    ),
    (
        "disk-nearly-full",
        "The file system of checkpoints or logs has little room or few inodes left.",
        "`df -h` and `df -i` on that folder.",
        "Free some space, keep fewer checkpoints, or use another file system.",
    ),
    (
        "slow-fsync",
        "A file of 1 MiB took more than a second to reach the disk: it is overloaded, failing, or far away.",
        "`dd if=/dev/zero of=FOLDER/x bs=1M count=1 conv=fsync`; `iostat -x 1`.",
        "End what else writes there, or use a faster file system; `dmesg` names a failing disk.",
    ),
    (
        "python-missing",
        "The interpreter of the job's command is not on this node, or may not be run there.",
        "`ls -l` of its path on that node, in the container.",
        "Mount the environment, put it in the image, or give the path that all nodes have.",
    ),
    (
        "python-broken",
        "The interpreter fails before it runs a program: its standard library or a shared library is missing.",
        "Start it by hand on that node; it prints which file it lacks.",
        "Create the environment on this node, or mount the folder of the interpreter that it links to.",
    ),
    (
        "python-slow",
        "The interpreter has not started within 5 s. Its folder is on a slow or overloaded file system.",
        "`time PYTHON -c pass` on that node, twice: the second time is faster with a warm cache.",
        "Put the environment in the image or on a local disk.",
    ),
    (
        "torch-without-gpu",
        "The job wants GPUs, and its torch is a build for CPUs: `torch.cuda.is_available()` is false.",
        "`PYTHON -c 'import torch; print(torch.__version__, torch.version.cuda)'` prints None.",
        "Install a build with CUDA or ROCm from its index; pip's cache may have brought the other one.",
    ),
    (
        "few-cpus",
        "The node has fewer CPUs than ranks, by affinity or by the cgroup's quota; ranks wait for one another.",
        "`nproc`; `cat /sys/fs/cgroup/cpu.max`; `taskset -p PID`.",
        "A larger CPU limit of the pod, container or Slurm job, or fewer ranks.",
    ),
    (
        "one-numa-node",
        "The ranks may use CPUs of one NUMA node only; GPUs and adapters of the others are reached across sockets.",
        "`taskset -p PID`, compared with `nvidia-smi topo -m`, column NUMA Affinity.",
        "Start the agent without binding, or give pods GPUs and CPUs of one NUMA node each.",
    ),
    (
        "clock-not-synchronised",
        "No time server keeps the node's clock. Times in logs mislead, and certificates and tokens may be refused.",
        "`timedatectl` prints `System clock synchronized: no`; `chronyc tracking`.",
        "Start chrony or systemd-timesyncd; chrony tells the kernel with `rtcsync` in its configuration.",
    ),
    (
        "fighting-variable",
        "A variable that the ranks get forbids NCCL the job's fabric, or makes it or torch slow.",
        "`env | grep -E 'NCCL|GLOO|FI_|CUDA'` in the shell or image that starts the agent; the job's `env`.",
        "Unset it where the finding says, or set what the finding says instead.",
    ),
    (
        "node-differs",
        "A node has other software, hardware or settings than most nodes of the run. Ranks fail at the first "
        "collective, hang, or wait for the slowest.",
        "The finding lists the values with their nodes.",
        "The same image and kind of machine for all nodes, or run without this one.",
    ),
)
