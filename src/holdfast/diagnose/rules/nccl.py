"""Rules for NCCL's warnings, and for the networks that it uses: RDMA devices, queue pairs, plugins, fallback to TCP.

Rows of one kind of message come first, then a row for each part of NCCL, which quotes any warning: a warning ends a
communicator or comes right before that, unless it says that NCCL continues. A long file, because it is one table.
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
NOT_FATAL_PATTERN = (
    r"(?i)\bignor(?:ed|ing)\b|falling back|\bsetting (?:\w+ )?to\b|\bset (?:it|both) to|\bcap it to|\blimiting\b|\bunsetting\b"
    r"|\bcontinu(?:e|ing)\b|\bdefault(?:s|ing) to|not dumping|\bdisabling\b|\bskipping\b|\binstead\b|user asked for|not using it"
    r"|enabling pre-posting|retrying|is now disabled"
)
"""Words of a warning that names NCCL's fallback: nothing fails because of it."""
_WARN_PREFIX = r"\S{0,60}:\d{1,5} (?:\([^)]{0,80}\) )?NCCL WARN "
"""The text between NCCL's source file and its message."""

RULES: tuple[Rule, ...] = (
    Rule(
        code="completion-length",
        matches={
            r"LOC_LEN_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_LOC_LEN_ERR(1) opcode=IBV_WC_SEND(0) vendor_err=105",
            r"Got completion .*(?:with error |status=)1\b": "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=1 opcode=0 len=0 vendor err 105 (Recv)",
            r"local length error": "mlx5: got completion with error: local length error",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.COLLECTIVE_MISMATCH),
        confidence=Confidence.LIKELY,
        message="an RDMA message was longer than its receive buffer: the MTU differs between the ports, or the ranks' "
        "calls differ",
        remedy=("set the same MTU on every RDMA port and switch; compare `ibv_devinfo | grep active_mtu`",),
        needs=("mtu", "last-collectives"),
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-protection",
        matches={
            r"LOC_PROT_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_LOC_PROT_ERR(4) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=81",
            r"Got completion .*(?:with error |status=)4\b": "n2:51:90 [0] transport/net_ib.cc:830 NCCL WARN NET/IB : Got completion from peer 10.9.0.7<40112> with error 4, opcode 129, len 0, vendor err 81",
            r"local protection error": "the NIC was denied access to GPU memory (local protection error): ACS or an IOMMU redirects it",
        },
        classes=(FailureClass.ACS_IOMMU, FailureClass.NETWORK_LOSS, FailureClass.DRIVER),
        confidence=Confidence.LIKELY,
        message="the NIC was denied access to GPU memory (local protection error): ACS or an IOMMU redirects it",
        remedy=(
            "turn ACS off on the PCIe bridges between GPU and NIC; iommu=pt",
            "NCCL_NET_GDR_LEVEL=LOC shows whether it is that path",
        ),
        needs=("acs", "mtu", "peermem"),
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-retry",
        matches={
            r"RETRY_EXC_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=129",
            r"Got completion .*(?:with error |status=)12\b": "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 12, opcode 0, len 32600, vendor err 129",
            r"[Tt]ransport retry count(?:er)? exceeded": "Failed status transport retry counter exceeded (12) for wr_id 0 syndrom 0x81",
            r"Failed status 12\b": " Completion with error at client: Failed status 12: wr_id 0 syndrom 0x81",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.GPU_XID, FailureClass.NODE_LOST, FailureClass.OTHER),
        confidence=Confidence.LIKELY,
        message="the peer did not answer over RDMA (retry count exceeded): packets are lost, the GID is not reachable, "
        "or the peer is gone",
        remedy=(
            "NCCL_IB_GID_INDEX of a routable RoCE v2 GID (show_gids; mostly 3); check PFC/ECN, cables and `ibqueryerrors`",
            "NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 bridges short interruptions",
        ),
        needs=("gid", "link-counters", "peer-log"),
        source="NCCL src/transport/net_ib.cc",
        peer_death_symptom=True,
    ),
    Rule(
        code="completion-not-ready",
        matches={
            r"RNR_RETRY_EXC_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_RNR_RETRY_EXC_ERR(13) opcode=IBV_WC_SEND(0) vendor_err=135",
            r"Got completion .*(?:with error |status=)13\b": "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 13, opcode 0, len 0, vendor err 135",
            r"RNR retry counter exceeded": "Failed status RNR retry counter exceeded (13) for wr_id 0 syndrom 0x87",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.STRAGGLER, FailureClass.COLLECTIVE_MISMATCH),
        message="the peer was not ready to receive for too long",
        remedy=("check what the peer's process did at that time",),
        needs=("peer-log", "link-counters"),
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-remote",
        matches={
            r"REM_(?:OP|ACCESS|INV_REQ)_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_REM_ACCESS_ERR(10) opcode=IBV_WC_RDMA_WRITE(1) vendor_err=136",
            r"Got completion .*(?:with error |status=)(?:9|10|11)\b": "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 11, opcode 0, len 0, vendor err 137",
            r"remote (?:access|operation|invalid request) error": "Failed status remote access error (10) for wr_id 0 syndrom 0x88",
            r"local access violation work queue error": "n1:8:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : local access violation work queue error",
            r"invalid request local work queue error": "n1:8:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : invalid request local work queue error",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.ACS_IOMMU, FailureClass.VERSION_MISMATCH),
        message="the remote side refused an RDMA operation; its own log gives the reason",
        remedy=("compare MTU, NCCL version and settings of both nodes; ACS off on the peer",),
        needs=("mtu", "acs", "peer-log"),
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-flushed",
        matches={
            r"WR_FLUSH_ERR": "n1:8:9 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<1> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_SEND(0) vendor_err=249",
            r"Got completion .*(?:with error |status=)5\b": "n1:8:9 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.168.1.2<3456> with error 5, opcode 0, len 0, vendor err 249",
            r"Work Request Flushed": "Failed status Work Request Flushed Error (5) for wr_id 0 syndrom 0xf9",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.NETWORK_LOSS,),
        message="RDMA requests were flushed after a queue pair had failed",
        needs=("all-ranks", "peer-log"),
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="completion-failed",
        matches={
            r"Got completion .*(?:with error|vendor err|status=)": "n1:8:9 [0] transport/net_ib.cc:100 NCCL WARN NET/IB : Got completion from peer with error",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.ACS_IOMMU, FailureClass.DRIVER),
        message="RDMA work failed",
        remedy=("the error number shows the kind",),
        needs=("link-counters", "gid", "acs"),
        source="NCCL src/transport/net_ib.cc",
        fallback=True,
    ),
    Rule(
        code="queue-pair-timeout",
        matches={
            r"ibv_modify_qp failed with (?:error )?(?:\d+ )?(?:Connection timed out|No route to host|Network is unreachable|Host is unreachable)": "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.WRONG_INTERFACE, FailureClass.OTHER),
        message="no RDMA connection to the peer's address: wrong GID, no route between the rails, or the wrong device",
        remedy=(
            "NCCL_IB_GID_INDEX=3 where index 3 is the IPv4 RoCE v2 GID (show_gids)",
            "rail-only fabric: NCCL_CROSS_NIC=0; several fabrics: NCCL_IB_HCA names the devices",
            "a line from ibvwrap.c (not .cc) comes from HPC-X's plugin: NCCL_IBEXT_DISABLE=1 disables it",
        ),
        needs=("gid", "which-pairs", "net-plugin"),
        source="NCCL src/misc/ibvwrap.cc; device and GID index since 2.24",
    ),
    Rule(
        code="queue-pair-invalid",
        matches={
            r"ibv_modify_qp failed with (?:error )?(?:\d+ )?Invalid argument": "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument",
            r"ibv_query_gid failed": "n1:8:9 [0] NCCL WARN Call to ibv_query_gid failed with error No such file or directory",
            r"ibv_modify_qp failed with error No data available": "n1:8:9 [0] misc/ibvwrap.cc:282 NCCL WARN Call to ibv_modify_qp failed with error No data available",
        },
        classes=(FailureClass.NETWORK_LOSS, FailureClass.VERSION_MISMATCH),
        confidence=Confidence.LIKELY,
        message="a queue pair was refused: its GID index or port settings do not exist, or differ between the ends",
        remedy=(
            "NCCL_IB_GID_INDEX must exist on every port in use (show_gids); NCCL_IB_HCA the same kind of port everywhere",
        ),
        needs=("gid", "mtu"),
        source="NCCL src/misc/ibvwrap.cc",
    ),
    Rule(
        code="gid-link-local",
        matches={
            r"(?i)GID\[ *\d+\]:\s*fe80:": "GID[  1]:\t\tfe80::ac0:ebff:feda:1cfb, RoCE v2",
            r"(?i)mlx\d_\d+\s+\d+\s+\d+\s+fe80:": "mlx5_0  1  1  fe80:0000:0000:0000:0ac0:ebff:feda:1cfb  v2  eth2",
            r"(?i)local ?GID[^,]{0,40}fe80:": "n1:8:9 [0] NCCL INFO NET/IB: local GID index 1 fe80::ac0:ebff:feda:1cfb",
        },
        role=Role.CONTEXT,
        message="one of the port's GIDs is link-local",
        source="ibv_devinfo -v, show_gids",
    ),
    Rule(
        code="rdma-async",
        matches={
            r"[Gg]ot (?:non-fatal )?async (?:error )?event ?: ?(?:port error|GID table change|GID change|LID change|path migration|local (?:work queue )?catastrophic|CQ error|P_Key)": "n1:8:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error",
            r"async fatal event": "n1:8:9 [0] NCCL WARN NET/IB : mlx5_3:1 async fatal event: local catastrophic error",
            r"GID table changed": "n1:8:9 [0] transport/net_ib/common.cc:123 NCCL WARN NET/IB : foo:3 GID table changed",
            r"speed change detected": "n1:8:9 [0] NCCL WARN NET/IB : mlx5_3:1 speed change detected",
            r"mlx5_core .{0,60}Link (?:down|DOWN)": "mlx5_core 0000:1a:00.0 ens1f0np0: Link down",
            r"(?:ib|IB) port.{0,30}(?:down|flap)": "ib port mlx5_3/1 went down",
            r"[Ll]ink flap": "mlx5_core 0000:1a:00.0: link flap detected on port 1",
            r"Port module event.{0,40}(?:[Uu]nplugged|[Ee]rror)": "mlx5_core 0000:1a:00.0: Port module event: module 0, Cable unplugged",
            r"NIC Link is [Dd]own": "ixgbe 0000:1a:00.0 eth1: NIC Link is Down",
            r"IBV_EVENT_(?:PORT_ERR|GID_CHANGE|DEVICE_FATAL)": "async event: IBV_EVENT_PORT_ERR on port 1",
            r"(?:symbol_error|port_rcv_errors|out_of_sequence)\w{0,3}[\"']?[ :=]{1,20}[1-9]": "mlx5_0 port 1 symbol_error 12",
            r"PFC storm": "pfcwd: PFC storm detected on port Ethernet0, queue 3",
            r"pause storm": "mlx5_core 0000:1a:00.0: pause storm prevention triggered",
        },
        classes=(FailureClass.NETWORK_LOSS,),
        confidence=Confidence.LIKELY,
        message="an RDMA port lost its link or changed its address during the job",
        remedy=(
            "check cable, transceiver and switch port of that device; keep addresses static (no DHCP renewal) on RoCE",
        ),
        needs=("link-counters",),
        source="NCCL src/transport/net_ib.cc, mlx5_core; device named since 2.20",
    ),
    Rule(
        code="rdma-port-down",
        matches={
            r"state DOWN physical_state (?:POLLING|LINK_UP|LINK_ERROR_RECOVER)": "link mlx5_3/1 subnet_prefix fe80:0000:0000:0000 lid 3 sm_lid 1 lmc 0 state DOWN physical_state POLLING",
            r"Physical state: (?:Polling|LinkErrorRecovery)": "                Physical state: Polling",
            r"phys_state:\s{0,8}(?:POLLING|LINK_ERROR_RECOVERY)": "\t\t\tphys_state:\t\tPOLLING (2)",
        },
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
        matches={
            r"NET/IB(?:ext\S*)? ?: No device found": "n1:8:9 [0] NCCL INFO NET/IB : No device found.",
            r"No IB devices found": "ibv_devinfo: No IB devices found",
            r"[Nn]o (?:active |usable |available )?(?:IB|InfiniBand|RDMA|RoCE)s? (?:devices?|ports?|NICs?|HCAs?)": "ibv_devinfo: No IB devices found",
            r"ibv_get_device_list\(?\)?.{0,30}(?:returned 0|: 0)": "ibv_get_device_list() returned 0 devices",
            r"Found 0 (?:IB|RDMA|HCA)": "Found 0 IB devices",
            r"sys files not found \(/sys/class/infiniband": "Fatal error:  device 'mlx5_0': sys files not found (/sys/class/infiniband/mlx5_0/ports)",
            r"Failed to get IB devices list": "Failed to get IB devices list: Function not implemented",
            r"\b0 HCAs found": "ibv_devinfo: 0 HCAs found",
        },
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.TCP_FALLBACK),
        message="no RDMA device is visible to the process, so NCCL uses TCP: slower only if the node has RDMA devices",
        remedy=GIVE_DEVICES,
        needs=("rdma-on-node",),
        source="NCCL src/transport/net_ib.cc, ibv_devinfo",
        performance_only=True,
    ),
    Rule(
        code="rdma-requested",
        matches={
            r"NCCL_IB_(?:HCA|GID_INDEX) ?(?:set |=)": "n1:8:9 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0,mlx5_1",
            r"NCCL_IB_DISABLE ?(?:set by environment to |=) ?0": "n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
            r"NCCL_NET set by environment to IB": "n1:8:9 [0] NCCL INFO NCCL_NET set by environment to IB",
        },
        role=Role.CONTEXT,
        message="the job is configured for RDMA",
        source="NCCL src/misc/param.cc",
    ),
    Rule(
        code="rdma-disabled-by-env",
        matches={
            r"NCCL_IB_DISABLE ?(?:set by environment to |=) ?1\b": "n1:8:9 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.",
        },
        classes=(FailureClass.TCP_FALLBACK,),
        message="the environment disables RDMA in NCCL, which uses TCP: slower only if the node has RDMA devices",
        remedy=("unset NCCL_IB_DISABLE in the job, the image and /etc/nccl.conf",),
        needs=("rdma-on-node", "settings"),
        source="NCCL src/misc/param.cc",
        performance_only=True,
    ),
    Rule(
        code="rdma-device-not-opened",
        matches={
            r"NET/IB ?: Unable to open device": "n1:8:9 [0] NCCL WARN NET/IB : Unable to open device mlx5_2",
            r"ibv_open_device failed": "n1:8:9 [0] misc/ibvwrap.cc:212 NCCL WARN Call to ibv_open_device failed",
            r"/dev/infiniband\S*.{0,40}(?:[Nn]o such|[Pp]ermission denied|not found|missing)": "Error: failed to open device: /dev/infiniband/uverbs0: Permission denied",
            r"Failed to get IB devices list": "Failed to get IB devices list: Function not implemented",
            r"[Nn]o HCAs? (?:devices?|ports?)": "No HCA devices were found",
            r"ibv_get_device_list\(?\)?.{0,30}failed": "ibv_get_device_list() failed: No such device",
            r"[Nn]o (?:HCA|RNIC|ibgda NIC)s? (?:found|available)": "ibgda.cpp:3612: no HCA found",
            r"network device '?mlx\S+ is not available": "UCX  WARN  network device 'mlx5_0:1' is not available, please use one or more of: 'eth0'(tcp)",
            r"transport '(?:rc|ud|dc)\w*' is not available": "UCX  WARN  transport 'rc_x' is not available, please use one or more of: cma, self, tcp",
            r"error initializing an OpenFabrics device": "WARNING: There was an error initializing an OpenFabrics device.",
            r"(?:mlx\d|HCA|IB device|RDMA device|ibdev)\S* \S*(?:not found|does not exist)": "IB device mlx5_7 not found",
            r"couldn't open \S*/sys/class/infiniband": "mlx5: couldn't open /sys/class/infiniband/mlx5_0/ports",
            r"GPU cannot find any NIC": "transport/ibgda: GPU cannot find any NIC in the system",
            r"fi_getinfo: -61": "fi_getinfo: -61",
            r"fi_getinfo\W.{0,40}No data available": "n1:8:9 [0] find_ofi_provider:543 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available",
            r"provider efa output empty list": "libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
        },
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.LIKELY,
        message="the process cannot find or open a required RDMA device, so it uses TCP or ends",
        remedy=GIVE_DEVICES,
        needs=("rdma-on-node", "net-plugin"),
        source="NCCL src/transport/net_ib.cc, libfabric, UCX, NVSHMEM",
        performance_only=True,
    ),
    Rule(
        code="fewer-nics",
        matches={
            r"Detected mixed local (?:CollNet|Net) device counts": "n1:8:9 [0] NCCL WARN Detected mixed local Net device counts across ranks (min 7, max 8)",
            r"Rank (?P<rank>\d+) has \d+ local (?:CollNet|Net) devices": "n1:8:9 [0] NCCL WARN Rank 12 has 7 local Net devices (max 8)",
        },
        classes=(FailureClass.RDMA_DEVICE_MISSING,),
        confidence=Confidence.CERTAIN,
        message="a rank has fewer network devices than the others",
        remedy=("bring the missing NIC back on that node, or take the node out of use",),
        source="NCCL src/init.cc; 2.30 and later",
    ),
    Rule(
        code="rdma-device-plugin",
        matches={
            r"missing RDMA device spec": '2025/01/02 03:04:05 missing RDMA device spec for device 0000:5e:00.0, RDMA device "issm" not found',
            r"incorrect RDMA subsystem network namespace": "2025/01/02 03:04:05 can not change : incorrect RDMA subsystem network namespace",
            r"no devices in device pool": "2025/01/02 03:04:05 Warning: no devices in device pool, creating empty resource server for hca_shared_devices_a",
            r"[Nn]on-?R[Dd][Mm][Aa] [Dd]evice": '2025/01/02 03:04:05 error creating new device: "non-Rdma Device ens3f0"',
            r"Insufficient (?:rdma/|\S*/(?:hca|rdma|roce|ib|efa|sriov))\S*": "0/4 nodes are available: 4 Insufficient rdma/hca_shared_devices_a.",
            r"[Nn]o RDMA devices? (?:found|available)": "sriov-network-device-plugin: no RDMA devices found for the pool",
            r"RDMA device \S+ not found": '2025/01/02 03:04:05 missing RDMA device spec for device 0000:5e:00.0, RDMA device "issm" not found',
        },
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
        matches={
            r"Failed to open libibverbs": "n1:8:9 [0] NCCL INFO Failed to open libibverbs.so[.1]",
            r"libibverbs\.so\S* ?: cannot open shared object": "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory",
        },
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        message="the image has no libibverbs, so NCCL uses TCP: slower only if the node has RDMA devices",
        remedy=(VERBS_LIBRARIES,),
        needs=("rdma-on-node",),
        source="NCCL src/misc/ibvsymbols.cc",
        performance_only=True,
    ),
    Rule(
        code="verbs-library-missing",
        matches={
            r"no userspace device-specific driver found": "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs7",
            r"couldn't (?:load driver|open config directory) '\S*(?:mlx\d|efa|irdma|bnxt_re|/libibverbs)": "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': libmlx5-rdmav34.so: cannot open shared object file",
        },
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.TCP_FALLBACK),
        confidence=Confidence.LIKELY,
        message="the image has no libibverbs driver for the RDMA device, so no process in it sees one, and NCCL uses "
        "TCP",
        remedy=(VERBS_LIBRARIES,),
        needs=("net-plugin",),
        source="rdma-core",
        performance_only=True,
    ),
    Rule(
        code="ofi-no-provider",
        matches={
            r"NET/OFI (?:Could not find any optimal|No eligible|Only EFA provider|Failed to initialize|[Uu]nable to find|aws-ofi-nccl initialization failed)": "n1:8:9 [0] nccl_net_ofi_init:1288 NCCL WARN NET/OFI Could not find any optimal provider",
            r"NET/OFI .*[Nn]o (?:suitable )?providers? found": "n1:8:9 [0] NCCL WARN NET/OFI sendrecv: No providers found",
        },
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
        matches={
            r"fi_getinfo\S* call failed": "n1:8:9 [0] find_ofi_provider:543 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available",
            r"fi_getinfo.{0,60}(?:No data available|-61\b|-FI_ENODATA)": "n1:8:9 [0] find_ofi_provider:543 NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data available",
            r"provider efa output empty list": "libfabric:85:1::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
            r"find_ofi_provider Line: \d+: NET/OFI Could(?: not|n't) find": "WARN: Function: find_ofi_provider Line: 500: NET/OFI Couldn't find any optimal provider",
            r"No valid EFA devices found": "2026/02/03 15:23:32 Error to get IB device: %v. No valid EFA devices found",
            r"NET/OFI Selected [Pp]rovider is (?:tcp|sockets|udp)": "n1:8:9 [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm",
        },
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
        matches={
            r"Error: network \S.* not found\.": "n1:8:9 [0] NCCL WARN Error: network AWS Libfabric not found.",
            r"Failed to initialize NET plugin": "n1:8:9 [0] NCCL INFO Failed to initialize NET plugin FasTrak",
            r"NET/Plugin ?:.{0,80}(?:cannot open shared object file|undefined symbol)": "n1:8:9 [0] NCCL INFO NET/Plugin: Failed to load libnccl-net.so: libfabric.so.1: cannot open shared object file",
            r"libfabric\.so\S*: cannot open shared object": "n1:8:9 [0] NCCL INFO NET/Plugin: Failed to load libnccl-net.so: libfabric.so.1: cannot open shared object file",
            r"NET/FasTrak.{0,80}(?:[Ff]ail|WARN)": "n1:8:9 [0] NCCL INFO NET/FasTrak : Failed to initialize the plugin",
            r"NET/GPUDirectTCPX.{0,60}(?:[Ff]ail|[Ee]rror)": "n1:8:9 [0] NCCL WARN NET/GPUDirectTCPX : Failed to connect to the rx data path manager",
        },
        classes=(FailureClass.TCP_FALLBACK, FailureClass.VERSION_MISMATCH),
        confidence=Confidence.LIKELY,
        message="the network plugin that this fabric needs could not be loaded or started",
        remedy=(
            "install the fabric's plugin and its libraries in the image, and put their folder on LD_LIBRARY_PATH",
            "unset NCCL_NET if the fabric needs no plugin",
        ),
        needs=("net-plugin",),
        source="NCCL src/plugin/net.cc",
    ),
    Rule(
        code="no-nccl-network",
        matches={
            r"Failed to initialize any NET plugin": "n1:8:9 [0] plugin/net.cc:212 NCCL WARN Failed to initialize any NET plugin",
        },
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
        source="NCCL src/plugin/net.cc; 2.26 and later",
    ),
    Rule(
        code="net-socket",
        matches={
            r"Using network Socket": "n1:8:9 [0] NCCL INFO Using network Socket",
            r"via NET/Socket/": "n1:8:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/Socket/0",
            r"(?:Initialized|Assigned) NET plugin Socket": "n1:8:9 [0] NCCL INFO Initialized NET plugin Socket",
        },
        classes=(FailureClass.TCP_FALLBACK, FailureClass.RDMA_DEVICE_MISSING),
        message="NCCL uses plain TCP sockets",
        remedy=(VERBS_LIBRARIES, *GIVE_DEVICES, "if these nodes have no RDMA network, this is expected"),
        needs=("net-plugin",),
        source="NCCL src/init.cc, src/transport/net.cc",
        performance_only=True,
    ),
    Rule(
        code="net-rdma",
        matches={
            r"Using network (?:IB|AWS Libfabric|Libfabric|FasTrak|GPUDirectTCPX|gIB|SHARP|UCX|OFI|IBext)": "n1:8:9 [0] NCCL INFO Using network IB",
            r"via NET/(?:IB|AWS Libfabric|Libfabric|FasTrak|gIB|IBext)": "n1:8:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA",
        },
        role=Role.CONTEXT,
        message="this rank uses the fast network",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="gdr-disabled",
        matches={
            r"GPU Direct RDMA Disabled": "n1:8:9 [3] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",
            r"use ring PXN \d GDR 0": "n1:8:9 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0",
        },
        classes=(FailureClass.GDR_MISSING, FailureClass.DRIVER),
        message="NCCL does not use GPUDirect RDMA with this NIC",
        remedy=(
            "modprobe nvidia_peermem on the host (or a kernel, driver and NCCL with DMA-BUF)",
            "if the distance is too large: NCCL_NET_GDR_LEVEL=SYS, or a topology file in a VM",
        ),
        needs=("peermem", "topology"),
        source="NCCL src/transport/net_ib.cc; by HCA since 2.13",
        performance_only=True,
    ),
    Rule(
        code="gdr-module",
        matches={
            r"GPU ?Direct RDMA.{0,60}(?:\(no module\)|is disabled|not supported|not available|unavailable)": "n1:8:9 [3] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)",
            r"nv(?:idia)?_peer_?mem(?:ory)? (?:module )?(?:is )?not (?:loaded|found)": "nvidia_peermem module not loaded",
            r"GDR(?:DMA)? (?:is )?(?:not supported|unavailable|disabled)": "n1:8:9 [0] NCCL INFO NET/IB : GDR is not supported",
        },
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
        matches={
            r"NET/OFI Couldn't set FI_OPT": "n1:8:9 [0] configure_sendrecv_inorder:213 NCCL WARN NET/OFI Couldn't set FI_OPT_EFA_SENDRECV_IN_ORDER_ALIGNED_128_BYTES. RC: -92",
            r"NET/OFI .*(?:incompatible|required API version|libfabric version)": "n1:8:9 [0] NCCL WARN NET/OFI Libfabric provider does not support the required API version",
            r"version [`']?FABRIC_\d": "libnccl-net.so: undefined symbol: fi_getinfo, version FABRIC_1.8",
            r"undefined symbol: (?:fi_|efa)": "libnccl-net.so: undefined symbol: fi_getinfo, version FABRIC_1.8",
        },
        classes=(FailureClass.VERSION_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="the plugin was built for another libfabric than the loaded one",
        remedy=("use libfabric and aws-ofi-nccl from one EFA installer, in image and host; check LD_LIBRARY_PATH",),
        needs=("versions",),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="ofi-request",
        matches={
            r"NET/OFI Request(?: \S+)? completed with error": "n1:8:9 [0] ofi_process_cq:1069 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 12. Error: 4. unresponsive receiver",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.NODE_LOST, FailureClass.FIREWALL, FailureClass.NETWORK_LOSS),
        message="the peer at the other end of EFA vanished or does not answer",
        needs=("peer-log", "reachable"),
        source="aws-ofi-nccl",
    ),
    Rule(
        code="efa-peer-gone",
        matches={
            r"Invalid receiver queue pair number": "n1:8:9 [2] process_err_completion:1562 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 5. Error: Invalid receiver queue pair number (QPN)",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.OOM_HOST, FailureClass.KILLED, FailureClass.PROGRAM_ERROR, FailureClass.NODE_LOST),
        message="the process at the other end of EFA has ended",
        needs=("peer-log", "kernel-log"),
        source="aws-ofi-nccl, libfabric",
    ),
    Rule(
        code="fabric-unreachable",
        matches={
            r"[Uu]nresponsive (?:receiver|remote)": "n1:8:9 [0] ofi_process_cq:1069 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 4113. Error: Unresponsive receiver (reachable by EFA device but handshake failed)",
            r"[Uu]nreachable remote": "libfabric:81:1700000000::efa:cq:efa_rdm_cq_handle_error(): Unreachable remote (never received a response), vendor error 13",
            r"EFA.{0,80}(?:unreachable|handshake failed)": "n1:8:9 [0] ofi_process_cq:1069 NCCL WARN NET/OFI Request 0x7f completed with error. RC: 4113. Error: Unresponsive receiver (reachable by EFA device but handshake failed)",
            r"NET/(?:FasTrak|GPUDirectTCPX|gIB).{0,100}(?:[Uu]nreachable|refused|timed out)": "n1:8:9 [0] NCCL WARN NET/GPUDirectTCPX : connect to 10.0.0.2<45678> timed out",
            r"\bdxs\b.{0,80}(?:unavailable|refused|timed out|DEADLINE_EXCEEDED)": "n1:8:9 [0] NCCL WARN NET/FasTrak : dxs client: DEADLINE_EXCEEDED",
        },
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
        matches={
            r"\bAttribute \w+ of node \w+ not found": "n1:8:9 [1] graph/xml.h:101 NCCL WARN Attribute vendor of node cpu not found",
            r"Error : too many XML (?:sub)?nodes": "n1:8:9 [0] graph/xml.cc:20 NCCL WARN Error : too many XML nodes (max 256)",
            r"XML parser is limited to \d+": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN Error : XML parser is limited to 1024 nodes",
            r"XML (?:Topology|Graph) has wrong version": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN XML Topology has wrong version 3, 3 needed",
            r"KV Convert to str : could not find": "n1:8:9 [0] graph/xml.h:123 NCCL WARN KV Convert to str : could not find value 3 in dictionary",
        },
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.OTHER),
        message="the topology has not the format that this NCCL expects: the network plugin or the file is from another "
        "version",
        remedy=(
            "use a plugin from this NCCL's release (aws-ofi-nccl 1.11 and later writes the topology itself), the "
            "same in image and host",
            "unset NCCL_TOPO_FILE, if the job or the image sets it",
        ),
        needs=("versions", "topology"),
        source="NCCL src/graph/xml.h; 2.5 and later",
    ),
    Rule(
        code="ofi-registration",
        matches={
            r"NET/OFI .{0,20}[Uu]nable to register memory": "n1:8:9 [0] reg_mr_ep:544 NCCL WARN NET/OFI Unable to register memory (type = 2) for device 3. RC: -14, Error: Bad address",
        },
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
        matches={
            r'link_speed="2\.5 GT/s(?: PCIe)?" link_width="[1-4]"': '<pci busid="0000:0f:00.0" class="0x030200" link_speed="2.5 GT/s PCIe" link_width="1">',
            r"(?:Could not (?:open|find)|No such file).{0,60}(?:NCCL_TOPO_FILE|topo\S*\.xml)": "n1:8:9 [0] NCCL WARN Could not find NCCL_TOPO_FILE /etc/topo.xml",
            r"XML (?:Parse|parse).{0,40}(?:fail|error|unexpected|[Ee]xpect|unterminated)": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN XML Parse error : unexpected trailing x in closing tag foo",
            r"XML Mismatch : ": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN XML Mismatch : foo / foo",
            r"Could not open XML": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN Could not open XML topology file foo : foo",
            r"XML (?:Import|Export) Channel : ": "n1:8:9 [0] graph/search.cc:123 NCCL WARN XML Export Channel : rank 3 not found.",
            r"could not find CPU numa ID": "n1:8:9 [0] graph/xml.cc:123 NCCL WARN GetXmlFromCpu : could not find CPU numa ID.",
            r"No NVLink switch found": "n1:8:9 [0] graph/search.cc:100 NCCL WARN No NVLink switch found",
            r"Could not find (?:real )?path of": "n1:8:9 [0] transport/net_ib/init.cc:123 NCCL WARN Could not find real path of foo (foo)",
        },
        classes=(FailureClass.OTHER,),
        confidence=Confidence.LIKELY,
        message="NCCL was given, or found, a topology of another machine",
        remedy=("unset NCCL_TOPO_FILE, or use the file for this machine type; mount /sys in the container",),
        needs=("topology",),
        source="NCCL src/graph/xml.cc",
    ),
    Rule(
        code="queue-pair-refused",
        matches={
            r"ibv_modify_qp failed": "n1:8:9 [3] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No such device",
            r"[Ff]ailed to modify QP": "Failed to modify QP to RTR: Connection timed out",
        },
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.WRONG_INTERFACE,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.VERSION_MISMATCH,
        ),
        message="an RDMA connection was refused: the GID index does not exist in this container or on that node, or the "
        "device is the wrong one",
        remedy=(
            "set an NCCL_IB_GID_INDEX that show_gids lists inside the container, per node where they differ "
            "(/etc/nccl.conf)",
            "NCCL_IB_HCA=^DEVICE excludes a device that this container may not use",
        ),
        needs=("gid", "which-pairs"),
        source="NCCL src/misc/ibvwrap.cc; device and GID index since 2.24",
        fallback=True,
    ),
    Rule(
        code="verbs-call-failed",
        matches={
            r"Call to (?:ibv|mlx5dv|rdma)_\w+ failed": "n1:8:9 [0] misc/ibvwrap.cc:120 NCCL WARN Call to ibv_query_port failed with error Invalid argument",
            r"NET/IB ?: Unable to query (?:device|port)": "n1:8:9 [0] transport/net_ib.cc:180 NCCL WARN NET/IB : Unable to query port 1",
            r"mlx5dv_\w+ failed": "n1:8:9 [0] transport/net_ib/connect.cc:123 NCCL WARN NET/IB: mlx5dv_create_qp failed to create QP: Invalid argument",
        },
        classes=(
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.DRIVER,
            FailureClass.MEMLOCK,
            FailureClass.NETWORK_LOSS,
            FailureClass.VERSION_MISMATCH,
        ),
        message="a call to the RDMA device failed: its driver, the container's permissions, or the limit on locked "
        "memory",
        remedy=(*GIVE_DEVICES, "the same rdma-core, driver and firmware in image and host: ibv_devinfo in both"),
        needs=("rdma-on-node", "memlock", "versions"),
        source="NCCL src/misc/ibvwrap.cc",
        fallback=True,
    ),
    Rule(
        code="rdma-link-layer-mismatch",
        matches={
            r"net devices with different link_layer": "n1:8:9 [0] NCCL WARN NET/IB : Can't connect net devices with different link_layer. i=0 remMeta.ndevs=1 link_layer=1 rem_link_layer=2",
            r"NICs (?:with|of only) one (?:type of )?link": "n1:8:9 [0] NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
            r"device is incompatible with the local \[": "n1:8:9 [0] transport/net_ib/connect.cc:123 NCCL WARN NET/IB : Remote foo device is incompatible with the local [3]foo:3/foo. Try selecting NICs of only one link type using NCCL_IB_HCA",
            r"with different link_layer properties": "n1:8:9 [0] transport/net_ib.cc:123 NCCL WARN NET/IB : Trying to merge multiple devices together with different link_layer properties foo -> 3, foo -> 3. Try only selecting NICs with one type of link using NCCL_IB_HCA",
        },
        classes=(FailureClass.WRONG_INTERFACE,),
        confidence=Confidence.LIKELY,
        message="NCCL uses devices of two kinds (InfiniBand and RoCE) as one network",
        remedy=("set NCCL_IB_HCA to the devices of the one kind that all nodes share",),
        needs=("which-pairs",),
        source="NCCL src/transport/net_ib.cc; 2.19 and later",
    ),
    Rule(
        code="rdma-device-mismatch",
        matches={
            r"has a different number of devices ?=": "n1:8:9 [0] NCCL WARN NET/IB : Local mergedDev mlx5_0+mlx5_1 has a different number of devices=2 as remote mlx5_0 1",
            r"NET/TOPO : Couldn't find net with name": "n1:8:9 [0] graph/topo.cc:123 NCCL WARN NET/TOPO : Couldn't find net with name foo",
            r"Only matched \d+ devices, \d+ requested": "n1:8:9 [0] graph/topo.cc:123 NCCL WARN TOPO/NET : Only matched 3 devices, 3 requested from foo",
        },
        classes=(FailureClass.RDMA_DEVICE_MISSING, FailureClass.WRONG_INTERFACE),
        message="the nodes have different RDMA devices, or are configured to use different ones",
        remedy=("`ibv_devices` on each node; the same NCCL_IB_HCA and NCCL_NET_FORCE_MERGE on all",),
        needs=("which-pairs", "net-plugin"),
        source="NCCL src/transport/net_ib.cc; 2.20 and later",
    ),
    Rule(
        code="comm-id-malformed",
        matches={
            r"Invalid NCCL_COMM_ID": "n1:8:9 [0] NCCL WARN Invalid NCCL_COMM_ID, please use format: <ipv4>:<port> or [<ipv6>]:<port> or <hostname>:<port>",
            r"Net : No valid (?:<IPv4|\[IPv6\])": "n1:8:9 [0] misc/socket.cc:123 NCCL WARN Net : No valid <IPv4_or_hostname>:<port> pair found",
            r"Net : error encountered when getting address info": "n1:8:9 [0] misc/socket.cc:300 NCCL WARN Net : error encountered when getting address info : Name or service not known",
        },
        classes=(FailureClass.RENDEZVOUS,),
        confidence=Confidence.LIKELY,
        message="the address of NCCL's bootstrap is invalid, or its name does not resolve",
        remedy=("unset NCCL_COMM_ID if a launcher passes the id around; else HOST:PORT of rank 0",),
        needs=("resolves",),
        source="NCCL src/bootstrap.cc, src/misc/socket.cc",
    ),
    Rule(
        code="socket-failed",
        matches={
            r"NCCL WARN (?:\w+ ?: )?(?:Socket creation|Call to (?:bind|listen|socket|getsockname)) failed": "n1:8:9 [0] include/socket.h:311 NCCL WARN Net : Socket creation failed : Operation not permitted",
            r"(?:Net|socket\w+) ?: Connect to \S+ (?:failed|returned)": "n1:8:9 [0] misc/socket.cc:500 NCCL WARN socketStartConnect: Connect to 10.0.3.4<45678> failed : Invalid argument",
            r"socketPollConnect (?:to \S+ failed|poll\(\))": "n1:8:9 [0] misc/socket.cc:123 NCCL WARN socketPollConnect poll() failed with error foo",
        },
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL, FailureClass.MEMLOCK, FailureClass.OTHER),
        message="a socket to a peer could not be created or connected",
        remedy=("NCCL_SOCKET_IFNAME names the interface that reaches the other nodes; `ip -br addr` in the container",),
        needs=("interfaces", "reachable"),
        source="NCCL src/misc/socket.cc",
        fallback=True,
    ),
    Rule(
        code="nccl-kernel-incompatible",
        matches={
            r"exceeds device/fn maxSharedMem": "n1:8:9 [0] NCCL INFO ncclMaxSharedMem 90112 exceeds device/fn maxSharedMem 65536",
            r"[Nn]o algorithm/protocol available": "n1:8:9 [0] enqueue.cc:1400 NCCL WARN Error : no algorithm/protocol available for function AllReduce with datatype ncclFloat8e4m3.",
            r"FP8 reduction support begins": "n1:8:9 [0] enqueue.cc:123 NCCL WARN FP8 reduction support begins with sm90 capable devices.",
        },
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.OTHER),
        message="this NCCL has no matching kernel: the GPU is newer than it, or settings exclude every algorithm",
        remedy=("use an NCCL that supports this GPU; unset NCCL_ALGO, NCCL_PROTO and what limits its threads",),
        needs=("versions", "settings"),
        source="NCCL src/enqueue.cc; 2.19 and later",
    ),
    Rule(
        code="gpu-ipc-failed",
        matches={
            r"failed to peer with device \d": "n1:8:9 [0] transport/p2p.cc:300 NCCL WARN failed to peer with device 1(=2000): 217 peer access is not supported",
            r"cudaIpc(?:Get|Open)MemHandle failed": "n1:8:9 [0] transport/p2p.cc:240 NCCL WARN cudaIpcGetMemHandle failed : invalid argument",
            r"NCCL WARN UDS: ": "n1:8:9 [0] misc/ipcsocket.cc:90 NCCL WARN UDS: Sending data over socket /tmp/nccl-socket-1-5f failed : Connection refused (111)",
            r"ncclProxyClient(?:ConvertFd|GetFd|QueryFd)\w* call to": "n1:8:9 [0] proxy.cc:123 NCCL WARN ncclProxyClientConvertFd call to top parent rank 3 failed",
        },
        classes=(FailureClass.ACS_IOMMU, FailureClass.DRIVER, FailureClass.OTHER, FailureClass.GPU_XID),
        message="one GPU's memory could not be shared with another process of the node",
        remedy=(
            "ranks of one node in one container, or with a shared IPC and network namespace (hostIPC, hostNetwork)",
            "NCCL_P2P_DISABLE=1, then NCCL_CUMEM_ENABLE=0, show whether it is that path",
        ),
        needs=("acs", "topology", "xid"),
        source="NCCL src/transport/p2p.cc, src/misc/ipcsocket.cc",
    ),
    Rule(
        code="no-transport",
        matches={
            r"No transport found (?:!|for rank)": "n1:8:9 [0] transport.cc:80 NCCL WARN No transport found for rank 1[2000] -> rank 0[1000]",
            r"Rank \d+ has no transport for": "n1:8:9 [0] proxy.cc:123 NCCL WARN Rank 3 has no transport for foo peer 3 on channel 3/3",
        },
        classes=(
            FailureClass.OTHER,
            FailureClass.DRIVER,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.ACS_IOMMU,
            FailureClass.WRONG_INTERFACE,
        ),
        message="two ranks cannot reach each other: peer access and shared memory are off or unavailable, and no "
        "network remains",
        remedy=("unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, or provide a network that also works within the node",),
        needs=("transport", "shm"),
        source="NCCL src/transport.cc",
    ),
    Rule(
        code="nccl-invalid-call",
        matches={
            r" : \w+ (?:\S+ )?is not a valid pointer": "n1:8:9 [0] misc/argcheck.cc:30 NCCL WARN AllReduce : sendbuff 0x7f12 is not a valid pointer",
            r" : \w+ argument is NULL": "n1:8:9 [0] misc/argcheck.cc:123 NCCL WARN foo : foo argument is NULL",
            r" : invalid (?:root|type|reduction operation) -?\d": "n1:8:9 [0] misc/argcheck.cc:50 NCCL WARN Reduce : invalid root 9 (root should be in the 0..8 range)",
            r"allocated on device \d+ mismatchs? with NCCL device": "n1:8:9 [0] misc/argcheck.cc:41 NCCL WARN Broadcast : sendbuff allocated on device 1 mismatchs with NCCL device 0",
            r"corrupted comm object": "n1:8:9 [0] misc/argcheck.cc:60 NCCL WARN Error: corrupted comm object detected",
            r"before the previous operation returned ncclSuccess": "node-10:74737:74737 [1] init.cc:290 NCCL WARN Attempt to use communicator before the previous operation returned ncclSuccess",
            r"NCCL WARN comm \S+ has already been destroyed": "n1:8:9 [0] init.cc:123 NCCL WARN comm 0x7f12ab00 has already been destroyed",
            r"mixing different streams within a group": "n1:8:9 [0] enqueue.cc:123 NCCL WARN Error : mixing different streams within a group call is not supported.",
            r"ncclGroupEnd: not in a group": "n1:8:9 [0] group.cc:123 NCCL WARN ncclGroupEnd: not in a group call.",
            r"[Bb]locking and nonblocking communicators": "n1:8:9 [0] group.cc:123 NCCL WARN Blocking and nonblocking communicators are not allowed in the same group.",
            r"uncaptured or all captured": "n1:8:9 [0] enqueue.cc:123 NCCL WARN Streams given to a communicator within a NCCL group must either be all uncaptured or all captured by the same graph.",
            r"not initialized via NCCL_": "n1:8:9 [0] init.cc:123 NCCL WARN ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
            r"must be initialized via NCCL_": "n1:8:9 [0] dev_runtime.cc:123 NCCL WARN Cannot get communicator properties: ncclCommProperties_t argument must be initialized via NCCL_COMM_PROPERTIES_INITIALIZER",
            r"to self without a matching": "n1:8:9 [0] enqueue.cc:123 NCCL WARN Trying to recv to self without a matching send",
            r"symmetric registration check failed": "n1:8:9 [0] misc/argcheck.cc:123 NCCL WARN Coll foo size 3 symmetric registration check failed on rank 3: recv buffer window (0x1a000) mismatch with rank 0 (0x1a000)",
            r"Invali[dg] config \w+ attribute": "Invalid config blocking attribute value -2147483648",
        },
        classes=(
            FailureClass.PROGRAM_ERROR,
            FailureClass.VERSION_MISMATCH,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.GPU_XID,
        ),
        message="NCCL received an invalid argument: memory of the host or of another GPU, a rank or type that does not "
        "exist, or a call from a program built for another version",
        remedy=(
            "every tensor on this rank's own GPU (torch.cuda.set_device(LOCAL_RANK) first); roots below the group's size",
            "`invalid type` or `invalid reduction operation` from a program that works elsewhere: two versions of "
            "NCCL are loaded",
        ),
        needs=("first-traceback", "versions"),
        source="NCCL src/misc/argcheck.cc, src/init.cc, src/enqueue.cc",
    ),
    Rule(
        code="nvml-call-failed",
        matches={
            r"nvml[A-Z]\w+\([^)\n]{0,80}\) failed: ": "n1:8:9 [0] misc/nvmlwrap.cc:190 NCCL WARN nvmlDeviceGetHandleByPciBusId() failed: Not Found",
        },
        classes=(FailureClass.DRIVER, FailureClass.GPU_XID, FailureClass.VERSION_MISMATCH),
        message="the GPU driver returned an unexpected answer",
        remedy=("nvidia-smi on the node, then in the container; `dmesg -T | grep NVRM`",),
        needs=("xid", "gpus-seen", "versions"),
        source="NCCL src/misc/nvmlwrap.cc",
        fallback=True,
    ),
    Rule(
        code="nccl-abort",
        matches={
            r"NCCL WARN (?:commReclaim: |commDestroySync: |ncclCommSetAsyncError: |ncclAsyncJobComplete: |ncclProxyStop: |\[(?:Service thread|Proxy (?:Service|service|Progress))|Proxy Call to rank|ncclProxyCall|Comm \S+ is in abort state|Error waiting for pthread_join|.{0,60}communicator (?:was revoked|encountered a fatal error))": "n1:8:9 [0] init.cc:1500 NCCL WARN commReclaim: comm 0x55 (rank = 3) in abort, error 6",
        },
        role=Role.SYMPTOM,
        classes=(
            FailureClass.PROGRAM_ERROR,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.NETWORK_LOSS,
            FailureClass.FIREWALL,
            FailureClass.OOM_HOST,
            FailureClass.WRONG_INTERFACE,
        ),
        message="NCCL aborts a communicator after an earlier failure, here or at a peer",
        needs=("nccl-warn", "all-ranks"),
        source="NCCL src/init.cc, src/proxy.cc, src/group.cc",
        fallback=True,
    ),
    *(
        Rule(
            code=code,
            matches={r"NCCL INFO " + file + r"\S{0,40}:\d{1,5} -> [12]\b": line for file, line in files.items()},
            role=Role.SYMPTOM,
            classes=classes,
            message=f"an NCCL call failed {where}; the warning above it gives the reason",
            needs=decides,
            source="NCCL src/include/checks.h",
        )
        for code, where, files, classes, decides in (
            (
                "failed-in-shm",
                "in memory that it shares within a node",
                {
                    "misc/shmutils": "n1:8:9 [0] NCCL INFO misc/shmutils.cc:72 -> 2",
                    "transport/shm": "n1:8:9 [0] NCCL INFO transport/shm.cc:100 -> 2",
                    "include/shm": "n1:8:9 [0] NCCL INFO include/shm.h:46 -> 2",
                },
                (FailureClass.SHM_TOO_SMALL, FailureClass.MEMLOCK, FailureClass.OTHER),
                ("nccl-warn", "shm"),
            ),
            (
                "failed-in-rdma",
                "in its RDMA network",
                {
                    "transport/net_ib": "n1:8:9 [0] NCCL INFO transport/net_ib.cc:485 -> 2",
                    "misc/ibvwrap": "n1:8:9 [0] NCCL INFO misc/ibvwrap.cc:252 -> 2",
                },
                (
                    FailureClass.NETWORK_LOSS,
                    FailureClass.MEMLOCK,
                    FailureClass.WRONG_INTERFACE,
                    FailureClass.RDMA_DEVICE_MISSING,
                    FailureClass.DRIVER,
                    FailureClass.ACS_IOMMU,
                ),
                ("nccl-warn", "gid", "memlock"),
            ),
            (
                "failed-in-socket",
                "in its sockets or bootstrap",
                {
                    "misc/socket": "n1:8:9 [0] NCCL INFO misc/socket.cc:565 -> 2",
                    "transport/net_socket": "n1:8:9 [0] NCCL INFO transport/net_socket.cc:333 -> 2",
                    r"bootstrap\.": "n1:8:9 [0] NCCL INFO bootstrap.cc:245 -> 2",
                },
                (
                    FailureClass.WRONG_INTERFACE,
                    FailureClass.FIREWALL,
                    FailureClass.PROGRAM_ERROR,
                    FailureClass.OOM_HOST,
                    FailureClass.RENDEZVOUS,
                    FailureClass.RANK_COUNT,
                ),
                ("nccl-warn", "interfaces", "all-ranks"),
            ),
            (
                "failed-in-topology",
                "where it reads the machine's topology",
                {
                    "graph/": "n1:8:9 [0] NCCL INFO graph/xml.cc:469 -> 2",
                },
                (
                    FailureClass.OTHER,
                    FailureClass.VERSION_MISMATCH,
                    FailureClass.DRIVER,
                    FailureClass.RDMA_DEVICE_MISSING,
                ),
                ("nccl-warn", "topology", "versions"),
            ),
            (
                "failed-in-p2p",
                "between GPUs of one node",
                {
                    "transport/p2p": "n1:8:9 [0] NCCL INFO transport/p2p.cc:275 -> 1",
                    "transport/nvls": "n1:8:9 [0] NCCL INFO transport/nvls.cc:169 -> 1",
                    "include/alloc": "n1:8:9 [0] NCCL INFO include/alloc.h:185 -> 1",
                },
                (
                    FailureClass.DRIVER,
                    FailureClass.ACS_IOMMU,
                    FailureClass.OOM_GPU,
                    FailureClass.GPU_XID,
                    FailureClass.VERSION_MISMATCH,
                    FailureClass.RANK_COUNT,
                ),
                ("nccl-warn", "xid", "memory-use"),
            ),
        )
    ),
    Rule(
        code="nccl-warned-rdma",
        matches={
            r"transport/net_ib"
            + _WARN_PREFIX: "n1:8:9 [0] transport/net_ib.cc:900 NCCL WARN NET/IB : req 0/1 tag 7 peer 10.0.0.2<1> posted incorrect receive info: size 4 addr 0 rkey 0",
            r"ibvwrap\.c" + _WARN_PREFIX: "n1:8:9 [0] misc/ibvwrap.cc:60 NCCL WARN lib wrapper not initialized.",
            r"mlx5dvwrap\.c" + _WARN_PREFIX: "n1:8:9 [0] misc/mlx5dvwrap.cc:30 NCCL WARN lib wrapper not initialized.",
            r"ib_plugin\.c"
            + _WARN_PREFIX: "n1:8:9 [0] ib_plugin.c:900 NCCL WARN NET/IB : Trying to use non-existent virtual device 3",
            r"p2p_plugin\.c" + _WARN_PREFIX: "n1:8:9 [0] p2p_plugin.c:300 NCCL WARN NET/IB : Unable to find a plugin",
            r"NCCL WARN NET/(?:IB|MLX5)": "n1:8:9 [0] NCCL WARN NET/IB : Trying to use non-existent virtual device 3",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.WRONG_INTERFACE,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.DRIVER,
            FailureClass.VERSION_MISMATCH,
            FailureClass.COLLECTIVE_MISMATCH,
        ),
        message="NCCL warns about its RDMA network in words that no rule knows",
        remedy=("NCCL_IB_DISABLE=1 for one run shows whether it is that network",),
        needs=("gid", "net-plugin", "versions"),
        source="NCCL src/transport/net_ib",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="nccl-warned-socket",
        matches={
            r"/socket\."
            + _WARN_PREFIX: "n1:8:9 [0] misc/socket.cc:700 NCCL WARN ncclSocketRecv: socket state (3) is not ready",
            r"/net_socket\."
            + _WARN_PREFIX: "n1:8:9 [0] transport/net_socket.cc:400 NCCL WARN NET/Socket : unable to allocate requests",
            r"bootstrap\.cc"
            + _WARN_PREFIX: "n1:8:9 [0] bootstrap.cc:300 NCCL WARN Unexpected connections are not empty",
            r"/linux_socket"
            + _WARN_PREFIX: "n1:8:9 [0] os/linux_socket.cc:100 NCCL WARN ncclSocketRecv: socket state (3) is not ready",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.WRONG_INTERFACE,
            FailureClass.FIREWALL,
            FailureClass.RENDEZVOUS,
            FailureClass.RANK_COUNT,
            FailureClass.VERSION_MISMATCH,
            FailureClass.OTHER,
        ),
        message="NCCL warns about its sockets or bootstrap in words that no rule knows",
        remedy=("NCCL_SOCKET_IFNAME names the one interface that all nodes share",),
        needs=("interfaces", "reachable", "all-ranks"),
        source="NCCL src/misc/socket.cc, src/bootstrap.cc",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="nccl-warned-topology",
        matches={
            r" graph/"
            + _WARN_PREFIX: "n1:8:9 [0] graph/paths.cc:700 NCCL WARN Could not find intermediate GPU between GPU rank 3 and NIC 1a000",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.OTHER,
            FailureClass.VERSION_MISMATCH,
            FailureClass.DRIVER,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.RANK_COUNT,
        ),
        message="NCCL cannot interpret the machine's topology",
        remedy=(
            "unset NCCL_TOPO_FILE; mount the whole of /sys in the container; NCCL_TOPO_DUMP_FILE=topo.xml shows "
            "what it sees",
            "use a newer NCCL if the machine is newer than it",
        ),
        needs=("topology", "versions"),
        source="NCCL src/graph",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="nccl-warned-memory",
        matches={
            r"misc/shmutils"
            + _WARN_PREFIX: "n1:8:9 [0] misc/shmutils.cc:150 NCCL WARN Could not map /dev/shm/nccl-a1B2c3 size 4096, error: Cannot allocate memory",
            r"transport/(?:shm|p2p|nvls|coll_net)\."
            + _WARN_PREFIX: "n1:8:9 [0] transport/p2p.cc:500 NCCL WARN rank 3 failed to IPC register userbuff 0x7f buffSize 4096 nPeers 3 isLegacyIpc 0x7f",
            r"include/alloc" + _WARN_PREFIX: "n1:8:9 [0] include/alloc.h:60 NCCL WARN Failed to malloc 4096 bytes",
            r"allocator\.cc" + _WARN_PREFIX: "n1:8:9 [0] allocator.cc:150 NCCL WARN Cannot find a free slot",
            r"mnnvl\.cc"
            + _WARN_PREFIX: "n1:8:9 [0] mnnvl.cc:60 NCCL WARN MNNVL (cliqueSize 4) is available but not working on some system",
            r"misc/ipcsocket"
            + _WARN_PREFIX: "n1:8:9 [0] misc/ipcsocket.cc:40 NCCL WARN UDS: Socket creation error : Too many open files (24)",
            r"misc/cudawrap"
            + _WARN_PREFIX: "n1:8:9 [0] misc/cudawrap.cc:120 NCCL WARN CUDA Driver version found is 11040. Minimum requirement is 12000",
            r" os/linux" + _WARN_PREFIX: "n1:8:9 [0] os/linux.cc:120 NCCL WARN Failed to set the affinity",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.SHM_TOO_SMALL,
            FailureClass.DRIVER,
            FailureClass.ACS_IOMMU,
            FailureClass.OOM_GPU,
            FailureClass.VERSION_MISMATCH,
            FailureClass.OTHER,
        ),
        message="NCCL warns about memory that it shares within a node, in words that no rule knows",
        remedy=(
            "df -h /dev/shm in the container; NCCL_P2P_DISABLE=1, then NCCL_CUMEM_ENABLE=0, show which path it is",
        ),
        needs=("shm", "acs", "memory-use"),
        source="NCCL src/misc/shmutils.cc, src/transport, src/include/alloc.h",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="nccl-warned-plugin",
        matches={
            r" plugin/"
            + _WARN_PREFIX: "n1:8:9 [0] plugin/net.cc:300 NCCL WARN Comm config netName (IB) does not match the parent (Socket)",
            r"NCCL WARN NET/(?:OFI|FasTrak|GPUDirectTCPX|gIB|Plugin|UCX)": "n1:8:9 [0] nccl_net_ofi_create_plugin:300 NCCL WARN NET/OFI Failed to create a domain",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.VERSION_MISMATCH,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.TCP_FALLBACK,
            FailureClass.DRIVER,
            FailureClass.FIREWALL,
        ),
        message="the network plugin warns in words that no rule knows",
        remedy=("plugin, libfabric and NCCL of one release, the same in image and host",),
        needs=("versions", "net-plugin"),
        source="NCCL src/plugin, aws-ofi-nccl",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="nccl-warned",
        matches={
            r"\bNCCL WARN \S": "n1:8:9 [0] proxy.cc:400 NCCL WARN Proxy append out of bounds",
            r"\w\.(?:cc|cu|h):\d{1,5} WARN \S": "n1:8:9 [0] init.cu:674 WARN Failed to allocate a ring",
        },
        exclude=NOT_FATAL_PATTERN,
        classes=(
            FailureClass.OTHER,
            FailureClass.VERSION_MISMATCH,
            FailureClass.DRIVER,
            FailureClass.RANK_COUNT,
            FailureClass.COLLECTIVE_MISMATCH,
        ),
        message="NCCL warns in words that no rule knows",
        remedy=("use the same NCCL on every rank, then a newer one; search NCCL's issues for the line",),
        needs=("all-ranks", "versions"),
        source="NCCL",
        fallback=True,
        performance_only=True,
    ),
)
