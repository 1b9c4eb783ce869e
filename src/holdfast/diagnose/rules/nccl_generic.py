"""Rules for NCCL messages that no other rule matches: the message is quoted, and the NCCL component that wrote it shows
where to look.

Any NCCL warning ends a communicator or comes right before that, unless it says that NCCL continues.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

NOT_FATAL_PATTERN = (
    r"(?i)\bignor(?:ed|ing)\b|falling back|\bsetting (?:\w+ )?to\b|\bset (?:it|both) to|\bcap it to|\blimiting\b|\bunsetting\b"
    r"|\bcontinu(?:e|ing)\b|\bdefault(?:s|ing) to|not dumping|\bdisabling\b|\bskipping\b|\binstead\b|user asked for|not using it"
    r"|enabling pre-posting|retrying|is now disabled"
)
"""Words of a warning that names NCCL's fallback: nothing fails because of it."""
_WARN_PREFIX = r"\S{0,60}:\d{1,5} (?:\([^)]{0,80}\) )?NCCL WARN "
"""The text between NCCL's source file and its message."""

RULES: tuple[Rule, ...] = (
    *(
        Rule(
            code=code,
            matches={r"NCCL INFO " + file + r"\S{0,40}:\d{1,5} -> [12]\b": line for file, line in files.items()},
            role=Role.SYMPTOM,
            classes=classes,
            message=f"an NCCL call failed {where}; the warning above it gives the reason",
            needs=decides,
            versions="all",
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
