"""Rules for NCCL's warnings by what they are about: those of a family that no row of its own has, and any at all.

Whatever NCCL warns of ends a communicator or comes right before that, unless it says that it goes on. So a warning that
nobody has seen before is quoted, and the part of NCCL that wrote it says between which classes to look.
"""

from __future__ import annotations

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.rdma import GIVE_DEVICES
from holdfast.diagnose.rules.row import Role, Rule, Sureness

GOES_ON = (
    r"(?i)\bignor(?:ed|ing)\b|falling back|\bsetting (?:\w+ )?to\b|\bset (?:it|both) to|\bcap it to|\blimiting\b|\bunsetting\b"
    r"|\bcontinu(?:e|ing)\b|\bdefault(?:s|ing) to|not dumping|\bdisabling\b|\bskipping\b|\binstead\b|user asked for|not using it"
    r"|enabling pre-posting|retrying|is now disabled"
)
"""Words of a warning that says what NCCL does in place of what it could not: nothing fails by it."""
_WARNS = r"\S{0,60}:\d{1,5} (?:\([^)]{0,80}\) )?NCCL WARN "
"""What stands between the file of NCCL that warns and what it says."""

RULES: tuple[Rule, ...] = (
    Rule(
        code="queue-pair-refused",
        lines=(
            "n1:8:9 [3] misc/ibvwrap.cc:284 NCCL WARN Call to ibv_modify_qp failed with error No such device",
            "n1:8:9 [5] NCCL WARN Call to ibv_modify_qp failed with 19 No such device, on dev mlx5_1:1, curr state INIT, next state RTR, local GID index 3",
        ),
        pattern=r"ibv_modify_qp failed|[Ff]ailed to modify QP|Couldn't get the correct GID",
        classes=(Class.NETWORK_LOSS, Class.WRONG_INTERFACE, Class.RDMA_DEVICE_MISSING, Class.VERSION_MISMATCH),
        says="an RDMA connection was refused: the GID index is not there in this container or on that node, or the device is not one to use",
        remedy=(
            "NCCL_IB_GID_INDEX that show_gids lists inside the container, on each node its own where they differ (/etc/nccl.conf)",
            "NCCL_IB_HCA=^DEVICE leaves out a device that this container may not use",
        ),
        decides=("gid", "which-pairs"),
        versions="all; device and GID index since 2.24",
        source="NCCL src/misc/ibvwrap.cc",
        fallback=True,
    ),
    Rule(
        code="verbs-call",
        lines=(
            "n1:8:9 [0] misc/ibvwrap.cc:120 NCCL WARN Call to ibv_query_port failed with error Invalid argument",
            "n1:8:9 [0] misc/ibvwrap.cc:330 NCCL WARN Call to ibv_create_qp failed with error Operation not permitted",
            "n1:8:9 [0] transport/net_ib.cc:180 NCCL WARN NET/IB : Unable to query port 1",
        ),
        pattern=r"Call to (?:ibv|mlx5dv|rdma)_\w+ failed|NET/IB ?: Unable to query (?:device|port)|mlx5dv_\w+ failed",
        classes=(
            Class.RDMA_DEVICE_MISSING,
            Class.DRIVER,
            Class.MEMLOCK,
            Class.NETWORK_LOSS,
            Class.VERSION_MISMATCH,
        ),
        says="a call to the RDMA device failed: its driver, what the container may do with it, or the limit on locked memory",
        remedy=(*GIVE_DEVICES, "the same rdma-core, driver and firmware in image and host: ibv_devinfo in both"),
        decides=("rdma-on-node", "memlock", "versions"),
        versions="all",
        source="NCCL src/misc/ibvwrap.cc",
        fallback=True,
    ),
    Rule(
        code="rdma-devices-unlike",
        lines=(
            "n1:8:9 [0] NCCL WARN NET/IB : Can't connect net devices with different link_layer. i=0 remMeta.ndevs=1 link_layer=1 rem_link_layer=2",
            "n1:8:9 [0] NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
        ),
        pattern=r"net devices with different link_layer|NICs (?:with|of only) one (?:type of )?link|device is incompatible with the local \[|with different link_layer properties",
        classes=(Class.WRONG_INTERFACE,),
        sure=Sureness.LIKELY,
        says="devices of two kinds (InfiniBand and RoCE) were taken for one network",
        remedy=("NCCL_IB_HCA names the devices of the one kind that all nodes share",),
        decides=("which-pairs",),
        versions="2.19 and later",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="rdma-devices-differ",
        lines=(
            "n1:8:9 [0] NCCL WARN NET/IB : Local mergedDev mlx5_0+mlx5_1 has a different number of devices=2 as remote mlx5_0 1",
        ),
        pattern=r"has a different number of devices ?=|NET/TOPO : Couldn't find net with name|Only matched \d+ devices, \d+ requested",
        classes=(Class.RDMA_DEVICE_MISSING, Class.WRONG_INTERFACE),
        says="the nodes do not have the same RDMA devices, or are not told to use the same",
        remedy=("`ibv_devices` on each node; the same NCCL_IB_HCA and NCCL_NET_FORCE_MERGE on all",),
        decides=("which-pairs", "net-plugin"),
        versions="2.20 and later",
        source="NCCL src/transport/net_ib.cc",
    ),
    Rule(
        code="comm-id-malformed",
        lines=(
            "n1:8:9 [0] NCCL WARN Invalid NCCL_COMM_ID, please use format: <ipv4>:<port> or [<ipv6>]:<port> or <hostname>:<port>",
            "n1:8:9 [0] misc/socket.cc:300 NCCL WARN Net : error encountered when getting address info : Name or service not known",
        ),
        pattern=r"Invalid NCCL_COMM_ID|Net : No valid (?:<IPv4|\[IPv6\])|Net : error encountered when getting address info",
        classes=(Class.RENDEZVOUS,),
        sure=Sureness.LIKELY,
        says="the address at which NCCL's ranks are to meet is none, or its name does not resolve",
        remedy=("unset NCCL_COMM_ID where a launcher hands the id around; else HOST:PORT of rank 0",),
        decides=("resolves",),
        versions="all",
        source="NCCL src/bootstrap.cc, src/misc/socket.cc",
    ),
    Rule(
        code="master-not-told",
        lines=(
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
        ),
        pattern=r"environment variable MASTER_(?:ADDR|PORT) expected",
        classes=(Class.RENDEZVOUS, Class.RANK_COUNT),
        sure=Sureness.LIKELY,
        says="a rank was not told where the ranks meet: it was started without a launcher, or its environment was lost on the way",
        remedy=(
            "start it with torchrun, or hand MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE to every rank (srun --export=ALL, ssh passes none)",
        ),
        decides=("who-joined",),
        source="torch rendezvous.py",
    ),
    Rule(
        code="socket-not-made",
        lines=(
            "n1:8:9 [0] include/socket.h:311 NCCL WARN Net : Socket creation failed : Operation not permitted",
            "n1:8:9 [0] misc/socket.cc:500 NCCL WARN socketStartConnect: Connect to 10.0.3.4<45678> failed : Invalid argument",
        ),
        pattern=r"NCCL WARN (?:\w+ ?: )?Socket creation failed|(?:Net|socket\w+) ?: Connect to \S+ (?:failed|returned)|socketPollConnect (?:to \S+ failed|poll\(\))",
        classes=(Class.WRONG_INTERFACE, Class.FIREWALL, Class.MEMLOCK, Class.OTHER),
        says="a socket to a peer could not be made or connected",
        remedy=("NCCL_SOCKET_IFNAME names the interface that reaches the other nodes; `ip -br addr` in the container",),
        decides=("interfaces", "reachable"),
        versions="all",
        source="NCCL src/misc/socket.cc",
        fallback=True,
    ),
    Rule(
        code="nccl-kernel-unfit",
        lines=(
            "n1:8:9 [0] NCCL INFO ncclMaxSharedMem 90112 exceeds device/fn maxSharedMem 65536",
            "n1:8:9 [0] enqueue.cc:98 NCCL WARN cudaArch 1000 dynamic smem 90112 exceeds device/fn maxSharedMem 65536",
            "n1:8:9 [0] enqueue.cc:1400 NCCL WARN Error : no algorithm/protocol available for function AllReduce with datatype ncclFloat8e4m3.",
        ),
        pattern=r"exceeds device/fn maxSharedMem|[Nn]o algorithm/protocol available|FP8 reduction support begins",
        classes=(Class.VERSION_MISMATCH, Class.OTHER),
        says="this NCCL has no kernel that fits: a GPU that is newer than it, or settings that leave no algorithm",
        remedy=("an NCCL that knows this GPU; unset NCCL_ALGO, NCCL_PROTO and what limits its threads",),
        decides=("versions", "settings"),
        versions="2.19 and later",
        source="NCCL src/enqueue.cc",
    ),
    Rule(
        code="peer-memory",
        lines=(
            "n1:8:9 [0] transport/p2p.cc:300 NCCL WARN failed to peer with device 1(=2000): 217 peer access is not supported",
            "n1:8:9 [0] transport/p2p.cc:240 NCCL WARN cudaIpcGetMemHandle failed : invalid argument",
            "n1:8:9 [0] misc/ipcsocket.cc:90 NCCL WARN UDS: Sending data over socket /tmp/nccl-socket-1-5f failed : Connection refused (111)",
        ),
        pattern=r"failed to peer with device \d|cudaIpc(?:Get|Open)MemHandle failed|NCCL WARN UDS: |ncclProxyClient(?:ConvertFd|GetFd|QueryFd)\w* call to",
        classes=(Class.ACS_IOMMU, Class.DRIVER, Class.OTHER, Class.GPU_XID),
        says="one GPU's memory could not be handed to another process of the node",
        remedy=(
            "ranks of one node in one container, or with a shared IPC and network namespace (hostIPC, hostNetwork)",
            "NCCL_P2P_DISABLE=1, then NCCL_CUMEM_ENABLE=0, show whether it is that path",
        ),
        decides=("acs", "topology", "xid"),
        versions="all",
        source="NCCL src/transport/p2p.cc, src/misc/ipcsocket.cc",
    ),
    Rule(
        code="no-transport",
        lines=("n1:8:9 [0] transport.cc:80 NCCL WARN No transport found for rank 1[2000] -> rank 0[1000]",),
        pattern=r"No transport found (?:!|for rank)|Rank \d+ has no transport for",
        classes=(Class.OTHER, Class.DRIVER, Class.SHM_TOO_SMALL, Class.ACS_IOMMU, Class.WRONG_INTERFACE),
        says="two ranks have no way to each other: peer access and shared memory are off or cannot be had, and no network is left",
        remedy=("unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE, or give a network that works within the node too",),
        decides=("transport", "shm"),
        versions="all",
        source="NCCL src/transport.cc",
    ),
    Rule(
        code="nccl-misused",
        lines=(
            "n1:8:9 [0] misc/argcheck.cc:30 NCCL WARN AllReduce : sendbuff 0x7f12 is not a valid pointer",
            "n1:8:9 [0] misc/argcheck.cc:50 NCCL WARN Reduce : invalid root 9 (root should be in the 0..8 range)",
            "n1:8:9 [0] misc/argcheck.cc:41 NCCL WARN Broadcast : sendbuff allocated on device 1 mismatchs with NCCL device 0",
            "n1:8:9 [0] misc/argcheck.cc:60 NCCL WARN Error: corrupted comm object detected",
        ),
        pattern=r" : \w+ (?:\S+ )?is not a valid pointer| : \w+ argument is NULL| : invalid (?:root|type|reduction operation) -?\d|allocated on device \d+ mismatchs? with NCCL device|corrupted comm object|before the previous operation returned ncclSuccess"
        r"|NCCL WARN comm \S+ has already been destroyed|mixing different streams within a group|ncclGroupEnd: not in a group|[Bb]locking and nonblocking communicators|uncaptured or all captured|not initialized via NCCL_|must be initialized via NCCL_|to self without a matching|symmetric registration check failed|Invali[dg] config \w+ attribute",
        classes=(Class.PROGRAM_ERROR, Class.VERSION_MISMATCH, Class.COLLECTIVE_MISMATCH, Class.GPU_XID),
        says="NCCL was called with what it cannot use: memory of the host or of another GPU, a rank or type that there is not, or by a program that was built for another version",
        remedy=(
            "every tensor on this rank's own GPU (torch.cuda.set_device(LOCAL_RANK) first); roots below the group's size",
            "`invalid type` or `invalid reduction operation` with a program that others run: two versions of NCCL are loaded",
        ),
        decides=("first-traceback", "versions"),
        versions="all",
        source="NCCL src/misc/argcheck.cc, src/init.cc, src/enqueue.cc",
    ),
    Rule(
        code="nvml-call",
        lines=("n1:8:9 [0] misc/nvmlwrap.cc:190 NCCL WARN nvmlDeviceGetHandleByPciBusId() failed: Not Found",),
        pattern=r"nvml[A-Z]\w+\([^)\n]{0,80}\) failed: ",
        classes=(Class.DRIVER, Class.GPU_XID, Class.VERSION_MISMATCH),
        says="the GPU driver did not answer as it should",
        remedy=("nvidia-smi on the node, then in the container; `dmesg -T | grep NVRM`",),
        decides=("xid", "gpus-seen", "versions"),
        versions="all",
        source="NCCL src/misc/nvmlwrap.cc",
        fallback=True,
    ),
    Rule(
        code="nccl-gives-up",
        lines=(
            "n1:8:9 [0] init.cc:1500 NCCL WARN commReclaim: comm 0x55 (rank = 3) in abort, error 6",
            "n1:8:9 [0] proxy.cc:1400 NCCL WARN [Service thread] Error encountered progressing operation=Connect, res=3, closing connection",
            "n1:8:9 [0] proxy.cc:1533 NCCL WARN [Proxy Service 3] Failed to execute operation Connect from rank 3, retcode 3",
            "n1:8:9 [0] proxy.cc:1485 NCCL WARN Proxy Call to rank 1 failed (Connect)",
        ),
        pattern=r"NCCL WARN (?:commReclaim: |commDestroySync: |ncclCommSetAsyncError: |ncclAsyncJobComplete: |ncclProxyStop: |\[(?:Service thread|Proxy (?:Service|service|Progress))|Proxy Call to rank|ncclProxyCall|Comm \S+ is in abort state|Error waiting for pthread_join|.{0,60}communicator (?:was revoked|encountered a fatal error))",
        role=Role.SECONDARY,
        classes=(
            Class.PROGRAM_ERROR,
            Class.SHM_TOO_SMALL,
            Class.NETWORK_LOSS,
            Class.FIREWALL,
            Class.OOM_HOST,
            Class.WRONG_INTERFACE,
        ),
        says="NCCL gives a communicator up after something had failed, here or at a peer",
        decides=("nccl-warn", "all-ranks"),
        versions="all",
        source="NCCL src/init.cc, src/proxy.cc, src/group.cc",
        fallback=True,
    ),
    Rule(
        code="nccl-warned-rdma",
        lines=(
            "n1:8:9 [0] transport/net_ib.cc:900 NCCL WARN NET/IB : req 0/1 tag 7 peer 10.0.0.2<1> posted incorrect receive info: size 4 addr 0 rkey 0",
            "n1:8:9 [0] ib_plugin.c:900 NCCL WARN NET/IB : Trying to use non-existent virtual device 3",
        ),
        pattern=r"(?:transport/net_ib|ibvwrap\.c|mlx5dvwrap\.c|ib_plugin\.c|p2p_plugin\.c)"
        + _WARNS
        + r"|NCCL WARN NET/(?:IB|MLX5)",
        unless=GOES_ON,
        classes=(
            Class.NETWORK_LOSS,
            Class.WRONG_INTERFACE,
            Class.RDMA_DEVICE_MISSING,
            Class.DRIVER,
            Class.VERSION_MISMATCH,
            Class.COLLECTIVE_MISMATCH,
        ),
        says="NCCL warns of its RDMA network in words that no rule knows",
        remedy=("NCCL_IB_DISABLE=1 for one run shows whether it is that network",),
        decides=("gid", "net-plugin", "versions"),
        source="NCCL src/transport/net_ib",
        fallback=True,
        degrades=True,
    ),
    Rule(
        code="nccl-warned-socket",
        lines=(
            "n1:8:9 [0] misc/socket.cc:700 NCCL WARN ncclSocketRecv: socket state (3) is not ready",
            "n1:8:9 [0] bootstrap.cc:300 NCCL WARN Unexpected connections are not empty",
        ),
        pattern=r"(?:/socket\.|/net_socket\.|bootstrap\.cc|/linux_socket)" + _WARNS,
        unless=GOES_ON,
        classes=(
            Class.WRONG_INTERFACE,
            Class.FIREWALL,
            Class.RENDEZVOUS,
            Class.RANK_COUNT,
            Class.VERSION_MISMATCH,
            Class.OTHER,
        ),
        says="NCCL warns of its sockets, or of how its ranks meet, in words that no rule knows",
        remedy=("NCCL_SOCKET_IFNAME names the one interface that all nodes share",),
        decides=("interfaces", "reachable", "all-ranks"),
        source="NCCL src/misc/socket.cc, src/bootstrap.cc",
        fallback=True,
        degrades=True,
    ),
    Rule(
        code="nccl-warned-topology",
        lines=(
            "n1:8:9 [0] graph/paths.cc:700 NCCL WARN Could not find intermediate GPU between GPU rank 3 and NIC 1a000",
            "n1:8:9 [0] graph/topo.cc:1100 NCCL WARN Could not find any local path from gpu 3 to net.",
        ),
        pattern=r" graph/" + _WARNS,
        unless=GOES_ON,
        classes=(Class.OTHER, Class.VERSION_MISMATCH, Class.DRIVER, Class.RDMA_DEVICE_MISSING, Class.RANK_COUNT),
        says="NCCL cannot make sense of the machine's topology",
        remedy=(
            "unset NCCL_TOPO_FILE; the whole of /sys in the container; NCCL_TOPO_DUMP_FILE=topo.xml shows what it sees",
            "a newer NCCL where the machine is newer than it",
        ),
        decides=("topology", "versions"),
        source="NCCL src/graph",
        fallback=True,
        degrades=True,
    ),
    Rule(
        code="nccl-warned-memory",
        lines=(
            "n1:8:9 [0] misc/shmutils.cc:150 NCCL WARN Could not map /dev/shm/nccl-a1B2c3 size 4096, error: Cannot allocate memory",
            "n1:8:9 [0] transport/p2p.cc:500 NCCL WARN rank 3 failed to IPC register userbuff 0x7f buffSize 4096 nPeers 3 isLegacyIpc 0x7f",
        ),
        pattern=r"(?:misc/shmutils|transport/(?:shm|p2p|nvls|coll_net)\.|include/alloc|allocator\.cc|mnnvl\.cc|misc/ipcsocket|misc/cudawrap| os/linux)"
        + _WARNS,
        unless=GOES_ON,
        classes=(
            Class.SHM_TOO_SMALL,
            Class.DRIVER,
            Class.ACS_IOMMU,
            Class.OOM_GPU,
            Class.VERSION_MISMATCH,
            Class.OTHER,
        ),
        says="NCCL warns of memory that it shares within a node, in words that no rule knows",
        remedy=("df -h /dev/shm in the container; NCCL_P2P_DISABLE=1, then NCCL_CUMEM_ENABLE=0, show which way it is",),
        decides=("shm", "acs", "memory-use"),
        source="NCCL src/misc/shmutils.cc, src/transport, src/include/alloc.h",
        fallback=True,
        degrades=True,
    ),
    Rule(
        code="nccl-warned-plugin",
        lines=(
            "n1:8:9 [0] plugin/net.cc:300 NCCL WARN Comm config netName (IB) does not match the parent (Socket)",
            "n1:8:9 [0] nccl_net_ofi_create_plugin:300 NCCL WARN NET/OFI Failed to create a domain",
        ),
        pattern=r" plugin/" + _WARNS + r"|NCCL WARN NET/(?:OFI|FasTrak|GPUDirectTCPX|gIB|Plugin|UCX)",
        unless=GOES_ON,
        classes=(
            Class.VERSION_MISMATCH,
            Class.RDMA_DEVICE_MISSING,
            Class.TCP_FALLBACK,
            Class.DRIVER,
            Class.FIREWALL,
        ),
        says="the network plugin warns in words that no rule knows",
        remedy=("plugin, libfabric and NCCL of one release, the same in image and host",),
        decides=("versions", "net-plugin"),
        source="NCCL src/plugin, aws-ofi-nccl",
        fallback=True,
        degrades=True,
    ),
    Rule(
        code="nccl-warned",
        lines=(
            "n1:8:9 [0] proxy.cc:400 NCCL WARN Proxy append out of bounds",
            "n1:8:9 [0] group.cc:200 NCCL WARN asyncJobLaunch: failed to join thread for job",
            "n1:8:9 [0] init.cu:674 WARN Failed to allocate a ring",
        ),
        pattern=r"\bNCCL WARN \S|\w\.(?:cc|cu|h):\d{1,5} WARN \S",
        unless=GOES_ON,
        classes=(Class.OTHER, Class.VERSION_MISMATCH, Class.DRIVER, Class.RANK_COUNT, Class.COLLECTIVE_MISMATCH),
        says="NCCL warns in words that no rule knows",
        remedy=("the same NCCL on every rank, then a newer one; NCCL's issues for the words of the line",),
        decides=("all-ranks", "versions"),
        source="NCCL",
        fallback=True,
        degrades=True,
    ),
)
