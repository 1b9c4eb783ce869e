"""Rules for NCCL's warnings by topic, a row for each family; nccl_generic.py covers the rest."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rdma import GIVE_DEVICES
from holdfast.diagnose.rules.rule import Role, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="queue-pair-refused",
        matches={
            r"ibv_modify_qp failed": "n1:8:9 [3] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No such device",
            r"[Ff]ailed to modify QP": "Failed to modify QP to RTR: Connection timed out",
            r"Couldn't get the correct GID": "ibv_modify_qp failed|[Ff]ailed to modify QP|Couldn't get the correct GID",
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
        versions="all; device and GID index since 2.24",
        source="NCCL src/misc/ibvwrap.cc",
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
        versions="all",
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
        versions="2.19 and later",
        source="NCCL src/transport/net_ib.cc",
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
        versions="2.20 and later",
        source="NCCL src/transport/net_ib.cc",
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
        versions="all",
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
        versions="all",
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
        versions="2.19 and later",
        source="NCCL src/enqueue.cc",
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
        versions="all",
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
        versions="all",
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
        versions="all",
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
        versions="all",
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
        versions="all",
        source="NCCL src/init.cc, src/proxy.cc, src/group.cc",
        fallback=True,
    ),
)
