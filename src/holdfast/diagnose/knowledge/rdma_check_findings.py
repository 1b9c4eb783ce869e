"""Explains the findings of the checks of a node's RDMA devices: the cause, how to confirm it, and what to do."""

from __future__ import annotations

ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "rdma-no-device",
        "The job's network is InfiniBand, RoCE or EFA, and sysfs shows no such device: no adapter, no driver, or a "
        "container whose network namespace has none.",
        "`ls /sys/class/infiniband` on the machine and in the container; `lspci` names the adapters.",
        "`modprobe mlx5_ib` (or `efa`) on the machine; the device plugin's resource in the pod.",
    ),
    (
        "rdma-hca-unknown",
        "NCCL_IB_HCA selects no device of the node. Without `=` its names are prefixes; `^` excludes.",
        "Compare NCCL_IB_HCA with `ls /sys/class/infiniband` on the node.",
        "Correct NCCL_IB_HCA, or remove it.",
    ),
    (
        "rdma-hca-missing",
        "NCCL_IB_HCA names a device that this node does not have: an adapter has failed, or the list is that of "
        "another machine type.",
        "`ls /sys/class/infiniband` on two nodes; `dmesg` and `lspci` on the node that has fewer.",
        "Replace the node if its adapter has failed; else correct the list.",
    ),
    (
        "rdma-device-file-missing",
        "Programs open RDMA devices by /dev/infiniband/uverbs*, and the container does not have these files; sysfs "
        "shows the machine's devices all the same.",
        "`ls /dev/infiniband` in the container.",
        "Request the device plugin's resource in the pod, or `--device=/dev/infiniband` for a container.",
    ),
    (
        "rdma-port-down",
        "A port that the job uses has no link. NCCL skips it in silence.",
        "`ibstat` or `rdma link`: State must be Active, Physical state LinkUp.",
        "Replace the cable or transceiver, enable the switch port.",
    ),
    (
        "rdma-subnet-manager",
        "An InfiniBand port stays in state INIT, with its link up, until a subnet manager gives it a LID. None runs, "
        "or it refuses this port.",
        "`sminfo` names the master subnet manager; `ibstat` shows state Initializing and SM lid 0.",
        "Start `opensm`, or the subnet manager of the switch or of UFM; see its log if it already runs.",
    ),
    (
        "rdma-link-degraded",
        "A link of the node has trained with fewer lanes or at a lower speed than adapter and switch both support and "
        "at least one of them enables. The check queries both ends, so the switch port is known.",
        "`iblinkinfo` marks the link `Could be 4X`; `ibportstate LID PORT` shows what each end enables.",
        "Reseat, clean or replace the cable; if one end enables too little, correct its setting.",
    ),
    (
        "rdma-link-one-sided",
        "One end of a link is active and the other is not: the subnet manager has lost the switch port, or somebody "
        "has disabled it.",
        "`iblinkinfo` shows the state of both ends.",
        "Reset the link with `ibportstate`; see the subnet manager's log.",
    ),
    (
        "rdma-link-errors",
        "An end of a link has counted many symbol errors, recoveries or receive errors, and more than ten times those "
        "of the node's other links. The counters run since somebody cleared them, so the fault may be in the past.",
        "`ibqueryerrors -r` twice, some minutes apart, after `ibqueryerrors -k`.",
        "Clean, reseat or replace the cable if they still grow.",
    ),
    (
        "rdma-partition-limited",
        "NCCL uses the partition key at index 0, or NCCL_IB_PKEY. A key below 0x8000 is that of a limited member, and "
        "limited members cannot reach each other.",
        "`cat /sys/class/infiniband/*/ports/*/pkeys/[01]` on two nodes.",
        "Set NCCL_IB_PKEY to the index of a full member's key, or change the partition in the subnet manager.",
    ),
    (
        "rdma-port-slow",
        "A port runs at a lower rate than the others of its kind, mostly because the link trained with fewer lanes.",
        "`ibstat` for the rates; `mlxlink -d DEVICE` for the lanes and the reason.",
        "Clean or replace the cable or transceiver; compare with another switch port.",
    ),
    (
        "rdma-gid-empty",
        "NCCL_IB_GID_INDEX points to a place of the port's GID table that is empty; in a pod the table begins "
        "elsewhere than on the machine.",
        "`show_gids` in the container, or `cat /sys/class/infiniband/*/ports/1/gids/INDEX`.",
        "Remove NCCL_IB_GID_INDEX (NCCL finds the GID since 2.21), or give the interface its address.",
    ),
    (
        "rdma-gid-version",
        "NCCL_IB_GID_INDEX points to a GID of RoCE v1, which is Ethernet only: routers drop it, and peers that use v2 "
        "do not answer.",
        "`cat /sys/class/infiniband/*/ports/1/gid_attrs/types/INDEX` must print `RoCE v2`.",
        "Remove NCCL_IB_GID_INDEX; NCCL_IB_ROCE_VERSION_NUM=1 if v1 is meant.",
    ),
    (
        "rdma-gid-link-local",
        "NCCL_IB_GID_INDEX points to a GID of an address fe80::, which no router forwards: nodes of other subnets time "
        "out.",
        "`show_gids`: the GID with an IPv4 address and v2 is the right one.",
        "Remove NCCL_IB_GID_INDEX, or set it to that GID.",
    ),
    (
        "rdma-gid-none",
        "The port's interface has no IP address that other subnets reach, so it has no RoCE v2 GID of one.",
        "`ip addr` of the interface that `rdma link` names for the port.",
        "Give the interface an address.",
    ),
    (
        "rdma-gid-other-namespace",
        "The pod sees the adapter, but its network interface is in the machine's network namespace, and the kernel "
        "refuses its GIDs to other namespaces.",
        "`ip link` in the container does not list the interface that `rdma link` names.",
        "The host's network, or an interface of the adapter in the pod: Multus with SR-IOV or macvlan.",
    ),
    (
        "rdma-mtu-small",
        "RoCE takes its packet size from the MTU of the interface: 1024 bytes for an MTU of 1500, 4096 from 4200.",
        "`ibv_devinfo` shows active_mtu next to max_mtu.",
        "A larger MTU on the interfaces and every switch between the nodes.",
    ),
    (
        "rdma-mtu-differs",
        "The RoCE interfaces of one node have different MTUs; two ends with different MTUs may drop packets.",
        "`ip link` on the node.",
        "The same MTU on all interfaces and switches.",
    ),
    (
        "rdma-library-missing",
        "NCCL loads libibverbs.so.1 when it starts. Without it there is no InfiniBand and no RoCE.",
        "`ldconfig -p | grep ibverbs` in the container.",
        "`apt-get install libibverbs1 ibverbs-providers` or `dnf install libibverbs` in the image.",
    ),
    (
        "rdma-provider-missing",
        "libibverbs loads a provider for each adapter, such as libmlx5-rdmav34.so, which a file in /etc/libibverbs.d "
        "names. Without both it does not open the adapter.",
        "`ibv_devices` in the container warns of a device without a provider.",
        "`apt-get install ibverbs-providers`, of the same version as libibverbs.",
    ),
    (
        "rdma-libfabric-missing",
        "On EFA, NCCL needs libfabric and the aws-ofi-nccl plugin (libnccl-net*.so) where the dynamic loader looks.",
        "`ldconfig -p | grep -E 'nccl-net|libfabric'`, and LD_LIBRARY_PATH in the container.",
        "An image with Amazon's EFA installer; LD_LIBRARY_PATH with the folders of both in the job's `env`.",
    ),
    (
        "rdma-peer-memory-missing",
        "GPUDirect RDMA needs the module nvidia_peermem, or DMA-BUF: NVIDIA's open kernel modules and Linux 5.12.",
        "`lsmod | grep peer` on the machine; NCCL's log has `GDRDMA` in its lines of channels if it works.",
        "`modprobe nvidia_peermem`, or the open kernel modules.",
    ),
    (
        "pcie-acs-enabled",
        "Access control services of a PCIe switch send packets between a GPU and an adapter up to the processor, where "
        "they are slow, or lost.",
        "`lspci -vvv | grep ACSCtl` as root: ReqRedir and CmpltRedir must have a minus.",
        "Disable ACS in the BIOS, or with `setpci` after every start of the machine.",
    ),
    (
        "iommu-translates",
        "The IOMMU translates every address between adapters and GPUs, which costs bandwidth or breaks GPUDirect.",
        "`cat /proc/cmdline` has no `iommu=pt`; `cat /sys/kernel/iommu_groups/*/type` prints DMA or DMA-FQ.",
        "`iommu=pt` on the kernel's command line, or no IOMMU in the BIOS.",
    ),
)
