"""Rules for RDMA: verbs completions and queue pairs, devices, libraries, plugins, GPUDirect, and fallback to TCP.

A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

GIVE_DEVICES = (
    "Kubernetes: resources.limits of the RDMA resource (such as rdma/hca: 1), capabilities: {add: [IPC_LOCK]}",
    "docker run --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1",
)
VERBS_LIBRARIES = (
    "apt-get install -y libibverbs1 ibverbs-providers librdmacm1 in the image; then NCCL says `Using network IB`"
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="completion-length",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=1 opcode=0 len=0 vendor err 105 (Recv)",
            "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_LOC_LEN_ERR(1) opcode=IBV_WC_SEND(0) vendor_err=105",
        ),
        pattern=r"LOC_LEN_ERR|Got completion .*(?:with error |status=)1\b|local length error",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.COLLECTIVE_MISMATCH),
        confidence=Confidence.LIKELY,
        message="an RDMA message was longer than its receive buffer: the MTU differs between the ports, or the ranks' "
        "calls differ",
        remedy=("set the same MTU on every RDMA port and switch; compare `ibv_devinfo | grep active_mtu`",),
        needs=("mtu", "last-collectives"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-protection",
        lines=(
            "n2:51:90 [0] transport/net_ib.cc:830 NCCL WARN NET/IB : Got completion from peer 10.9.0.7<40112> with error 4, opcode 129, len 0, vendor err 81",
            "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_LOC_PROT_ERR(4) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=81",
        ),
        pattern=r"LOC_PROT_ERR|Got completion .*(?:with error |status=)4\b|local protection error",
        classes=(FailureClass.ACS_IOMMU, FailureClass.NETWORK_LOSS, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="the NIC was denied access to GPU memory (local protection error): ACS or an IOMMU redirects it",
        remedy=(
            "turn ACS off on the PCIe bridges between GPU and NIC; iommu=pt",
            "NCCL_NET_GDR_LEVEL=LOC shows whether it is that path",
        ),
        needs=("acs", "mtu", "peermem"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-retry",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 12, opcode 0, len 32600, vendor err 129",
            "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=129",
            "Failed status transport retry counter exceeded (12) for wr_id 0 syndrom 0x81",
            "[n1:811:0:811] ib_mlx5_log.c:177  Transport retry count exceeded on mlx5_0:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)",
        ),
        pattern=r"RETRY_EXC_ERR|Got completion .*(?:with error |status=)12\b|[Tt]ransport retry count(?:er)? exceeded|Failed status 12\b",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.GPU_XID, FailureClass.NODE_LOST, FailureClass.OTHER),
        confidence=Confidence.LIKELY,
        message="the peer did not answer over RDMA (retry count exceeded): packets are lost, the GID is not reachable, "
        "or the peer is gone",
        remedy=(
            "NCCL_IB_GID_INDEX of a routable RoCE v2 GID (show_gids; mostly 3); check PFC/ECN, cables and `ibqueryerrors`",
            "NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 bridges short interruptions",
        ),
        needs=("gid", "link-counters", "peer-log"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
        peer_death_symptom=True,
    ),
    Rule(
        code="completion-not-ready",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 13, opcode 0, len 0, vendor err 135",
        ),
        pattern=r"RNR_RETRY_EXC_ERR|Got completion .*(?:with error |status=)13\b|RNR retry counter exceeded",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.STRAGGLER, FailureClass.COLLECTIVE_MISMATCH),
        message="the peer was not ready to receive for too long",
        remedy=("check what the peer's process did at that time",),
        needs=("peer-log", "link-counters"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-remote",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 11, opcode 0, len 0, vendor err 137",
            "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_REM_ACCESS_ERR(10) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=136",
            "n1:8:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : local access violation work queue error",
        ),
        pattern=r"REM_(?:OP|ACCESS|INV_REQ)_ERR|Got completion .*(?:with error |status=)(?:9|10|11)\b|remote (?:access|operation|invalid request) error"
        r"|local access violation work queue error|invalid request local work queue error",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.ACS_IOMMU, FailureClass.VERSION_MISMATCH),
        message="the remote side refused an RDMA operation; its own log gives the reason",
        remedy=("compare MTU, NCCL version and settings of both nodes; ACS off on the peer",),
        needs=("mtu", "acs", "peer-log"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-flushed",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 5, opcode 0, len 0, vendor err 249",
            "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_SEND(0) vendor_err=249",
        ),
        pattern=r"WR_FLUSH_ERR|Got completion .*(?:with error |status=)5\b|Work Request Flushed",
        role=Role.SYMPTOM,
        classes=(FailureClass.NETWORK_LOSS,),
        message="RDMA requests were flushed after a queue pair had failed",
        needs=("all-ranks", "peer-log"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-failed",
        lines=("n1:8:9 [0] transport/net_ib.cc:100 NCCL WARN NET/IB : Got completion from peer with error",),
        pattern=r"Got completion .*(?:with error|vendor err|status=)",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.ACS_IOMMU, FailureClass.DRIVER),
        message="RDMA work failed",
        remedy=("the error number shows the kind",),
        needs=("link-counters", "gid", "acs"),
        versions="all",
        source="NCCL src/transport/net_ib.cc",
        fallback=True,
    ),
    Rule(
        code="queue-pair-timeout",
        lines=(
            "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
            "n1:8:9 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_1:1, curr state INIT, next state RTR, local GID index 3",
            "n1:8:9 [5] NCCL WARN Call to ibv_modify_qp failed with error No route to host",
        ),
        pattern=r"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?:Connection timed out|No route to host|Network is unreachable|Host is unreachable)",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.WRONG_INTERFACE, FailureClass.OTHER),
        message="no RDMA connection to the peer's address: wrong GID, no route between the rails, or the wrong device",
        remedy=(
            "NCCL_IB_GID_INDEX=3 where index 3 is the IPv4 RoCE v2 GID (show_gids)",
            "rail-only fabric: NCCL_CROSS_NIC=0; several fabrics: NCCL_IB_HCA names the devices",
            "a line from ibvwrap.c (not .cc) comes from HPC-X's plugin: NCCL_IBEXT_DISABLE=1 disables it",
        ),
        needs=("gid", "which-pairs", "net-plugin"),
        versions="all; device and GID index since 2.24",
        source="NCCL src/misc/ibvwrap.cc",
    ),
    Rule(
        code="queue-pair-invalid",
        lines=(
            "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
            "n1:8:9 [0] NCCL WARN Call to ibv_query_gid failed with error No such file or directory",
        ),
        pattern=r"ibv_modify_qp failed with (?:error )?(?:\d+ )?Invalid argument|ibv_query_gid failed|ibv_modify_qp failed with error No data available",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.VERSION_MISMATCH),
        confidence=Confidence.LIKELY,
        message="a queue pair was refused: its GID index or port settings do not exist, or differ between the ends",
        remedy=(
            "NCCL_IB_GID_INDEX must exist on every port in use (show_gids); NCCL_IB_HCA the same kind of port everywhere",
        ),
        needs=("gid", "mtu"),
        versions="all",
        source="NCCL src/misc/ibvwrap.cc",
    ),
    Rule(
        code="gid-link-local",
        lines=(
            "GID[  1]:\t\tfe80::ac0:ebff:feda:1cfb, RoCE v2",
            "mlx5_0  1  1  fe80:0000:0000:0000:0ac0:ebff:feda:1cfb  v2  eth2",
        ),
        pattern=r"(?i)GID\[ *\d+\]:\s*fe80:|mlx\d_\d+\s+\d+\s+\d+\s+fe80:|local ?GID[^,]{0,40}fe80:",
        role=Role.CONTEXT,
        message="one of the port's GIDs is link-local",
        source="ibv_devinfo -v, show_gids",
    ),
    Rule(
        code="rdma-async",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error",
            "n1:8:9 [0] NCCL WARN NET/IB : mlx5_3:1 async fatal event: local catastrophic error",
            "n1:8:9 [0] NCCL WARN NET/IB : mlx5_3:1 Got async error event: GID table change",
            "mlx5_core 0000:1a:00.0 ens1f0np0: Link down",
        ),
        pattern=r"[Gg]ot (?:non-fatal )?async (?:error )?event ?: ?(?:port error|GID table change|GID change|LID change|path migration|local (?:work queue )?catastrophic|CQ error|P_Key)"
        r"|async fatal event|GID table changed|speed change detected|mlx5_core .{0,60}Link (?:down|DOWN)|(?:ib|IB) port.{0,30}(?:down|flap)|[Ll]ink flap"
        r"|Port module event.{0,40}(?:[Uu]nplugged|[Ee]rror)|NIC Link is [Dd]own|IBV_EVENT_(?:PORT_ERR|GID_CHANGE|DEVICE_FATAL)|(?:symbol_error|port_rcv_errors|out_of_sequence)\w{0,3}[\"']?[ :=]{1,20}[1-9]|PFC storm|pause storm",
        classes=(FailureClass.NETWORK_LOSS,),
        confidence=Confidence.LIKELY,
        message="an RDMA port lost its link or changed its address during the job",
        remedy=(
            "check cable, transceiver and switch port of that device; keep addresses static (no DHCP renewal) on RoCE",
        ),
        needs=("link-counters",),
        versions="all; device named since 2.20",
        source="NCCL src/transport/net_ib.cc, mlx5_core",
    ),
    Rule(
        code="rdma-port-down",
        lines=(
            "link mlx5_3/1 subnet_prefix fe80:0000:0000:0000 lid 3 sm_lid 1 lmc 0 state DOWN physical_state POLLING",
            "                Physical state: Polling",
        ),
        pattern=r"state DOWN physical_state (?:POLLING|LINK_UP|LINK_ERROR_RECOVER)|Physical state: (?:Polling|LinkErrorRecovery)|phys_state:\s{0,8}(?:POLLING|LINK_ERROR_RECOVERY)",
        classes=(FailureClass.NETWORK_LOSS, FailureClass.RDMA_DEVICE_MISSING),
        message="a port of an RDMA device has no link: a fault only if that port is used",
        remedy=(
            "ibstat and rdma link on every node; the cable, the switch's port and the subnet manager; NCCL_IB_HCA without that port",
        ),
        needs=("link-counters", "which-pairs"),
        source="iproute2 rdma, ibstat, ibv_devinfo",
        performance_only=True,
    ),
    Rule(
        code="no-rdma-device",
        lines=(
            "n1:8:9 [0] NCCL INFO NET/IB : No device found.",
            "ibv_devinfo: No IB devices found",
            "ibv_devinfo: 0 HCAs found",
            "Fatal error:  device 'mlx5_0': sys files not found (/sys/class/infiniband/mlx5_0/ports)",
            "Failed to get IB devices list: Function not implemented",
        ),
        pattern=r"NET/IB(?:ext\S*)? ?: No device found|No IB devices found|[Nn]o (?:active |usable |available )?(?:IB|InfiniBand|RDMA|RoCE)s? (?:devices?|ports?|NICs?|HCAs?)"
        r"|ibv_get_device_list\(?\)?.{0,30}(?:returned 0|: 0)|Found 0 (?:IB|RDMA|HCA)|sys files not found \(/sys/class/infiniband|Failed to get IB devices list|\b0 HCAs found",
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.TCP_FALLBACK),
        message="no RDMA device is visible to the process, so NCCL uses TCP: slower only if the node has RDMA devices",
        remedy=GIVE_DEVICES,
        needs=("rdma-on-node",),
        versions="all",
        source="NCCL src/transport/net_ib.cc, ibv_devinfo",
        performance_only=True,
    ),
    Rule(
        code="rdma-requested",
        lines=(
            "n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
            "n1:8:9 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0,mlx5_1",
            "n1:8:9 [0] NCCL INFO NCCL_IB_GID_INDEX set by environment to 3.",
        ),
        pattern=r"NCCL_IB_(?:HCA|GID_INDEX) ?(?:set |=)|NCCL_IB_DISABLE ?(?:set by environment to |=) ?0|NCCL_NET set by environment to IB",
        role=Role.CONTEXT,
        message="the job is configured for RDMA",
        source="NCCL src/misc/param.cc",
    ),
    Rule(
        code="rdma-disabled-by-env",
        lines=("n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.",),
        pattern=r"NCCL_IB_DISABLE ?(?:set by environment to |=) ?1\b",
        classes=(FailureClass.TCP_FALLBACK,),
        message="the environment disables RDMA in NCCL, which uses TCP: slower only if the node has RDMA devices",
        remedy=("unset NCCL_IB_DISABLE in the job, the image and /etc/nccl.conf",),
        needs=("rdma-on-node", "settings"),
        versions="all",
        source="NCCL src/misc/param.cc",
        performance_only=True,
    ),
    Rule(
        code="rdma-device-not-opened",
        lines=(
            "n1:8:9 [0] NCCL WARN NET/IB : Unable to open device mlx5_2",
            "fi_getinfo: -61",
            "libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
            "Error: failed to open device: /dev/infiniband/uverbs0: Permission denied",
        ),
        pattern=r"NET/IB ?: Unable to open device|ibv_open_device failed|/dev/infiniband\S*.{0,40}(?:[Nn]o such|[Pp]ermission denied|not found|missing)"
        r"|Failed to get IB devices list|[Nn]o HCAs? (?:devices?|ports?)|ibv_get_device_list\(?\)?.{0,30}failed|[Nn]o (?:HCA|RNIC|ibgda NIC)s? (?:found|available)|network device '?mlx\S+ is not available|transport '(?:rc|ud|dc)\w*' is not available|error initializing an OpenFabrics device|(?:mlx\d|HCA|IB device|RDMA device|ibdev)\S* \S*(?:not found|does not exist)|couldn't open \S*/sys/class/infiniband|GPU cannot find any NIC|fi_getinfo: -61|fi_getinfo\W.{0,40}No data available|provider efa output empty list",
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.LIKELY,
        message="the process cannot find or open a required RDMA device, so it uses TCP or ends",
        remedy=GIVE_DEVICES,
        needs=("rdma-on-node", "net-plugin"),
        versions="all",
        source="NCCL src/transport/net_ib.cc, libfabric, UCX, NVSHMEM",
        performance_only=True,
    ),
    Rule(
        code="fewer-nics",
        lines=(
            "n1:8:9 [0] NCCL WARN Detected mixed local Net device counts across ranks (min 7, max 8)",
            "n1:8:9 [0] NCCL WARN Rank 12 has 7 local Net devices (max 8)",
        ),
        pattern=r"Detected mixed local (?:CollNet|Net) device counts|Rank (?P<rank>\d+) has \d+ local (?:CollNet|Net) devices",
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.CERTAIN,
        message="a rank has fewer network devices than the others",
        remedy=("bring the missing NIC back on that node, or take the node out of use",),
        versions="2.30 and later",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="rdma-device-plugin",
        lines=(
            '2025/01/02 03:04:05 missing RDMA device spec for device 0000:5e:00.0, RDMA device "issm" not found',
            "2025/01/02 03:04:05 Warning: no devices in device pool, creating empty resource server for hca_shared_devices_a",
            '2025/01/02 03:04:05 error creating new device: "non-Rdma Device ens3f0"',
            "0/4 nodes are available: 4 Insufficient rdma/hca_shared_devices_a.",
            "2025/01/02 03:04:05 can not change : incorrect RDMA subsystem network namespace",
        ),
        pattern=r"missing RDMA device spec|incorrect RDMA subsystem network namespace|no devices in device pool|[Nn]on-?R[Dd][Mm][Aa] [Dd]evice|Insufficient (?:rdma/|\S*/(?:hca|rdma|roce|ib|efa|sriov))\S*"
        r"|[Nn]o RDMA devices? (?:found|available)|RDMA device \S+ not found",
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.LIKELY,
        message="the cluster's RDMA device plugin offers no device",
        remedy=(
            "restart the RDMA (or SR-IOV) device plugin after the driver is up; compare its selectors with the NIC's names",
            "kubectl get node NODE -o jsonpath='{.status.allocatable}' shows the resource and its count",
        ),
        needs=("pod-status",),
        source="k8s-rdma-shared-dev-plugin, sriov-network-device-plugin, kube-scheduler",
    ),
    Rule(
        code="verbs-library-not-opened",
        lines=(
            "n1:8:9 [0] NCCL INFO Failed to open libibverbs.so[.1]",
            "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory",
        ),
        pattern=r"Failed to open libibverbs|libibverbs\.so\S* ?: cannot open shared object",
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        message="the image has no libibverbs, so NCCL uses TCP: slower only if the node has RDMA devices",
        remedy=(VERBS_LIBRARIES,),
        needs=("rdma-on-node",),
        versions="all",
        source="NCCL src/misc/ibvsymbols.cc",
        performance_only=True,
    ),
    Rule(
        code="verbs-library-missing",
        lines=(
            "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs7",
            "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': libmlx5-rdmav34.so: cannot open shared object file",
        ),
        pattern=r"no userspace device-specific driver found|couldn't (?:load driver|open config directory) '\S*(?:mlx\d|efa|irdma|bnxt_re|/libibverbs)",
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.TCP_FALLBACK),
        confidence=Confidence.LIKELY,
        message="the image has no libibverbs driver for the RDMA device, so no process in it sees one, and NCCL uses "
        "TCP",
        remedy=(VERBS_LIBRARIES,),
        needs=("net-plugin",),
        versions="all",
        source="rdma-core",
        performance_only=True,
    ),
    Rule(
        code="ofi-no-provider",
        lines=(
            "n1:8:9 [0] nccl_net_ofi_init:1288 NCCL WARN NET/OFI Could not find any optimal provider",
            "n1:8:9 [0] nccl_net_ofi_init:1444 NCCL WARN NET/OFI Only EFA provider is supported",
            "n1:8:9 [0] NCCL WARN NET/OFI Failed to initialize rdma protocol",
        ),
        pattern=r"NET/OFI (?:Could not find any optimal|No eligible|Only EFA provider|Failed to initialize|[Uu]nable to find|aws-ofi-nccl initialization failed)"
        r"|NET/OFI .*[Nn]o (?:suitable )?providers? found",
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        confidence=Confidence.LIKELY,
        message="the libfabric plugin found no EFA provider or device, so NCCL uses TCP",
        remedy=(
            "install the EFA software in the image (aws-efa-installer) and aws-ofi-nccl; `fi_info -p efa` must list devices",
            "Kubernetes: resources.limits vpc.amazonaws.com/efa; the security group must allow all traffic to itself",
        ),
        needs=("net-plugin",),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="ofi-no-device",
        lines=(
            "n1:8:9 [0] find_ofi_provider:543 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available",
            "libfabric:85:1::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
            "n1:8:9 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm",
            "WARN: Function: find_ofi_provider Line: 500: NET/OFI Couldn't find any optimal provider",
        ),
        pattern=r"fi_getinfo\S* call failed|fi_getinfo.{0,60}(?:No data available|-61\b|-FI_ENODATA)|provider efa output empty list|find_ofi_provider Line: \d+: NET/OFI Could(?: not|n't) find|No valid EFA devices found|NET/OFI Selected [Pp]rovider is (?:tcp|sockets|udp)",
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.TCP_FALLBACK),
        confidence=Confidence.LIKELY,
        message="libfabric can open no device of the fast network, so NCCL uses TCP",
        remedy=(
            "the container must have the devices: docker --device /dev/infiniband, Kubernetes resources.limits vpc.amazonaws.com/efa",
            "`fi_info -p efa` in the container must list devices; the security group must allow all traffic to itself",
        ),
        needs=("net-plugin",),
        source="libfabric, aws-ofi-nccl",
    ),
    Rule(
        code="net-plugin-failed",
        lines=(
            "n1:8:9 [0] NCCL WARN Error: network AWS Libfabric not found.",
            "n1:8:9 [0] NCCL INFO Failed to initialize NET plugin FasTrak",
            "n1:8:9 [0] NCCL INFO NET/Plugin: Failed to load libnccl-net.so: libfabric.so.1: cannot open shared object file",
        ),
        pattern=r"Error: network \S.* not found\.|Failed to initialize NET plugin|NET/Plugin ?:.{0,80}(?:cannot open shared object file|undefined symbol)"
        r"|libfabric\.so\S*: cannot open shared object|NET/FasTrak.{0,80}(?:[Ff]ail|WARN)|NET/GPUDirectTCPX.{0,60}(?:[Ff]ail|[Ee]rror)",
        classes=(FailureClass.TCP_FALLBACK, FailureClass.VERSION_MISMATCH),
        confidence=Confidence.LIKELY,
        message="the network plugin that this fabric needs could not be loaded or started",
        remedy=(
            "install the fabric's plugin and its libraries in the image, and put their folder on LD_LIBRARY_PATH",
            "unset NCCL_NET if the fabric needs no plugin",
        ),
        needs=("net-plugin",),
        versions="all",
        source="NCCL src/plugin/net.cc",
    ),
    Rule(
        code="no-nccl-network",
        lines=("n1:8:9 [0] plugin/net.cc:212 NCCL WARN Failed to initialize any NET plugin",),
        pattern=r"Failed to initialize any NET plugin",
        classes=(
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.TCP_FALLBACK,
            FailureClass.VERSION_MISMATCH,
            FailureClass.WRONG_INTERFACE,
        ),
        message="none of the networks that NCCL may use is available: no device, no plugin, or no interface",
        remedy=(
            "ls /dev/infiniband in the container: the device must be passed in (--device /dev/infiniband)",
            "NCCL_NET, NCCL_IB_HCA and NCCL_SOCKET_IFNAME must name what exists; unset them to let NCCL choose",
        ),
        needs=("rdma-on-node", "net-plugin", "interfaces"),
        versions="2.26 and later",
        source="NCCL src/plugin/net.cc",
    ),
    Rule(
        code="net-socket",
        lines=(
            "n1:8:9 [0] NCCL INFO Using network Socket",
            "n1:8:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/Socket/0",
            "n1:8:9 [0] NCCL INFO Initialized NET plugin Socket",
        ),
        pattern=r"Using network Socket|via NET/Socket/|(?:Initialized|Assigned) NET plugin Socket",
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        message="NCCL uses plain TCP sockets",
        remedy=(VERBS_LIBRARIES, *GIVE_DEVICES, "if these nodes have no RDMA network, this is expected"),
        needs=("net-plugin",),
        versions="all",
        source="NCCL src/init.cc, src/transport/net.cc",
        performance_only=True,
    ),
    Rule(
        code="net-rdma",
        lines=(
            "n1:8:9 [0] NCCL INFO Using network IB",
            "n1:8:9 [0] NCCL INFO Using network AWS Libfabric",
            "n1:8:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA",
        ),
        pattern=r"Using network (?:IB|AWS Libfabric|Libfabric|FasTrak|GPUDirectTCPX|gIB|SHARP|UCX|OFI|IBext)|via NET/(?:IB|AWS Libfabric|Libfabric|FasTrak|gIB|IBext)",
        role=Role.CONTEXT,
        message="this rank uses the fast network",
        versions="all",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="gdr-disabled",
        lines=(
            "n1:8:9 [3] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
            "n1:8:9 [3] NCCL INFO GPU Direct RDMA Disabled for GPU 1b000 / HCA 0 (distance 8 > 5)",
            "n1:8:9 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0",
        ),
        pattern=r"GPU Direct RDMA Disabled|use ring PXN \d GDR 0",
        classes=(FailureClass.GDR_MISSING, FailureClass.DRIVER),
        message="NCCL does not use GPUDirect RDMA with this NIC",
        remedy=(
            "modprobe nvidia_peermem on the host (or a kernel, driver and NCCL with DMA-BUF)",
            "if the distance is too large: NCCL_NET_GDR_LEVEL=SYS, or a topology file in a VM",
        ),
        needs=("peermem", "topology"),
        versions="all; by HCA since 2.13",
        source="NCCL src/transport/net_ib.cc",
        performance_only=True,
    ),
    Rule(
        code="gdr-module",
        lines=(
            "n1:8:9 [3] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)",
            "n1:8:9 [3] NCCL INFO NET/OFI GPUDirect RDMA is not supported on this platform",
        ),
        pattern=r"GPU ?Direct RDMA.{0,60}(?:\(no module\)|is disabled|not supported|not available|unavailable)|nv(?:idia)?_peer_?mem(?:ory)? (?:module )?(?:is )?not (?:loaded|found)"
        r"|GDR(?:DMA)? (?:is )?(?:not supported|unavailable|disabled)",
        classes=(FailureClass.GDR_MISSING,),
        confidence=Confidence.LIKELY,
        message="GPUDirect RDMA is not available: its kernel module is not loaded",
        remedy=(
            "modprobe nvidia_peermem on the host, and at boot: echo nvidia_peermem > /etc/modules-load.d/nvidia-peermem.conf",
        ),
        needs=("peermem",),
        source="NCCL src/transport/net_ib.cc, aws-ofi-nccl",
        performance_only=True,
    ),
    Rule(
        code="ofi-version",
        lines=(
            "n1:8:9 [0] configure_sendrecv_inorder:213 NCCL WARN NET/OFI Couldn't set FI_OPT_EFA_SENDRECV_IN_ORDER_ALIGNED_128_BYTES. RC: -92",
            "n1:8:9 [0] NCCL WARN NET/OFI Libfabric provider does not support the required API version",
            "libnccl-net.so: undefined symbol: fi_getinfo, version FABRIC_1.8",
        ),
        pattern=r"NET/OFI Couldn't set FI_OPT|NET/OFI .*(?:incompatible|required API version|libfabric version)|version [`']?FABRIC_\d|undefined symbol: (?:fi_|efa)",
        classes=(FailureClass.VERSION_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="the plugin was built for another libfabric than the loaded one",
        remedy=("use libfabric and aws-ofi-nccl from one EFA installer, in image and host; check LD_LIBRARY_PATH",),
        needs=("versions",),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="ofi-request",
        lines=(
            "n1:8:9 [0] ofi_process_cq:1069 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 12. Error: 4. unresponsive receiver",
        ),
        pattern=r"NET/OFI Request(?: \S+)? completed with error",
        role=Role.SYMPTOM,
        classes=(FailureClass.NODE_LOST, FailureClass.FIREWALL, FailureClass.NETWORK_LOSS),
        message="the peer at the other end of EFA vanished or does not answer",
        needs=("peer-log", "reachable"),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="efa-peer-gone",
        lines=(
            "n1:8:9 [2] process_err_completion:1562 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 5. Error: Invalid receiver queue pair number (QPN)",
        ),
        pattern=r"Invalid receiver queue pair number",
        role=Role.SYMPTOM,
        classes=(FailureClass.OOM_HOST, FailureClass.KILLED, FailureClass.PROGRAM_ERROR, FailureClass.NODE_LOST),
        message="the process at the other end of EFA has ended",
        needs=("peer-log", "kernel-log"),
        source="aws-ofi-nccl, libfabric",
    ),
    Rule(
        code="fabric-unreachable",
        lines=(
            "n1:8:9 [0] ofi_process_cq:1069 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 4113. Error: Unresponsive receiver (reachable by EFA device but handshake failed)",
            "libfabric:81:1700000000::efa:cq:efa_rdm_cq_handle_error(): Unreachable remote (never received a response), vendor error 13",
        ),
        pattern=r"[Uu]nresponsive (?:receiver|remote)|[Uu]nreachable remote|EFA.{0,80}(?:unreachable|handshake failed)|NET/(?:FasTrak|GPUDirectTCPX|gIB).{0,100}(?:[Uu]nreachable|refused|timed out)|\bdxs\b.{0,80}(?:unavailable|refused|timed out|DEADLINE_EXCEEDED)",
        classes=(FailureClass.FIREWALL, FailureClass.NODE_LOST, FailureClass.NETWORK_LOSS),
        confidence=Confidence.LIKELY,
        message="the cloud's fabric does not let the nodes reach each other",
        remedy=(
            "EFA: the security group must allow all traffic from and to itself; TCPX: the sidecar (rxdm) must run on both nodes",
        ),
        needs=("peer-log", "reachable"),
        source="aws-ofi-nccl, libfabric, GPUDirect-TCPX",
    ),
    Rule(
        code="topology-attributes",
        lines=(
            "n1:8:9 [1] graph/xml.h:101 NCCL WARN Attribute vendor of node cpu not found",
            "n1:8:9 [0] graph/xml.cc:20 NCCL WARN Error : too many XML nodes (max 256)",
        ),
        pattern=r"\bAttribute \w+ of node \w+ not found|Error : too many XML (?:sub)?nodes|XML parser is limited to \d+|XML (?:Topology|Graph) has wrong version|KV Convert to str : could not find",
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.OTHER),
        message="the topology has not the format that this NCCL expects: the network plugin or the file is from another "
        "version",
        remedy=(
            "use a plugin from this NCCL's release (aws-ofi-nccl 1.11 and later writes the topology itself), the "
            "same in image and host",
            "unset NCCL_TOPO_FILE, if the job or the image sets it",
        ),
        needs=("versions", "topology"),
        versions="2.5 and later",
        source="NCCL src/graph/xml.h",
    ),
    Rule(
        code="ofi-registration",
        lines=(
            "n1:8:9 [0] reg_mr_ep:544 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 3. RC: -14, Error: Bad address",
        ),
        pattern=r"NET/OFI .{0,20}[Uu]nable to register memory",
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.DRIVER, FailureClass.GDR_MISSING, FailureClass.MEMLOCK),
        message="the network could not register memory: libfabric is too old for this NCCL, GPU memory cannot be shared "
        "with the NIC, or the locked-memory limit is too low",
        remedy=(
            "EFA installer 1.29 or later with NCCL 2.19 or later, or FI_EFA_SET_CUDA_SYNC_MEMOPS=0",
            "ulimit -l unlimited",
        ),
        needs=("versions", "peermem", "memlock"),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="topology-file",
        lines=(
            '<pci busid="0000:0f:00.0" class="0x030200" link_speed="2.5 GT/s PCIe" link_width="1">',
            "n1:8:9 [0] NCCL WARN Could not find NCCL_TOPO_FILE /etc/topo.xml",
        ),
        pattern=r'link_speed="2\.5 GT/s(?: PCIe)?" link_width="[1-4]"|(?:Could not (?:open|find)|No such file).{0,60}(?:NCCL_TOPO_FILE|topo\S*\.xml)|XML (?:Parse|parse).{0,40}(?:fail|error|unexpected|[Ee]xpect|unterminated)|XML Mismatch : |Could not open XML|XML (?:Import|Export) Channel : |could not find CPU numa ID'
        r"|No NVLink switch found|Could not find (?:real )?path of",
        classes=(FailureClass.OTHER,),
        confidence=Confidence.LIKELY,
        message="NCCL was given, or found, a topology of another machine",
        remedy=("unset NCCL_TOPO_FILE, or use the file for this machine type; mount /sys in the container",),
        needs=("topology",),
        source="NCCL src/graph/xml.cc",
    ),
)
