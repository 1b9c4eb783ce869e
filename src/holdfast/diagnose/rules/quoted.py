"""Rules for what NCCL says in words that no row knows: it is quoted, and the part of NCCL that wrote it says where to look.

Whatever NCCL warns of ends a communicator or comes right before that, unless it says that it goes on.
"""

from __future__ import annotations

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Role, Rule

GOES_ON = (
    r"(?i)\bignor(?:ed|ing)\b|falling back|\bsetting (?:\w+ )?to\b|\bset (?:it|both) to|\bcap it to|\blimiting\b|\bunsetting\b"
    r"|\bcontinu(?:e|ing)\b|\bdefault(?:s|ing) to|not dumping|\bdisabling\b|\bskipping\b|\binstead\b|user asked for|not using it"
    r"|enabling pre-posting|retrying|is now disabled"
)
"""Words of a warning that says what NCCL does in place of what it could not: nothing fails by it."""
_WARNS = r"\S{0,60}:\d{1,5} (?:\([^)]{0,80}\) )?NCCL WARN "
"""What stands between the file of NCCL that warns and what it says."""

RULES: tuple[Rule, ...] = (
    *(
        Rule(
            code=code,
            lines=lines,
            pattern=r"NCCL INFO " + files + r"\S{0,40}:\d{1,5} -> [12]\b",
            role=Role.SECONDARY,
            classes=classes,
            says=f"a call of NCCL's failed {where}; its warning, which stands above, says of what",
            decides=decides,
            versions="all",
            source="NCCL src/include/checks.h",
        )
        for code, where, lines, files, classes, decides in (
            (
                "failed-in-shm",
                "in memory that it shares within a node",
                ("n1:8:9 [0] NCCL INFO misc/shmutils.cc:72 -> 2", "n1:8:9 [0] NCCL INFO transport/shm.cc:100 -> 2"),
                r"(?:misc/shmutils|transport/shm|include/shm)",
                (Class.SHM_TOO_SMALL, Class.MEMLOCK, Class.OTHER),
                ("nccl-warn", "shm"),
            ),
            (
                "failed-in-rdma",
                "in its RDMA network",
                ("n1:8:9 [0] NCCL INFO transport/net_ib.cc:485 -> 2", "n1:8:9 [0] NCCL INFO misc/ibvwrap.cc:252 -> 2"),
                r"(?:transport/net_ib|misc/ibvwrap)",
                (
                    Class.NETWORK_LOSS,
                    Class.MEMLOCK,
                    Class.WRONG_INTERFACE,
                    Class.RDMA_DEVICE_MISSING,
                    Class.DRIVER,
                    Class.ACS_IOMMU,
                ),
                ("nccl-warn", "gid", "memlock"),
            ),
            (
                "failed-in-socket",
                "in its sockets, or where its ranks meet",
                ("n1:8:9 [0] NCCL INFO misc/socket.cc:565 -> 2", "n1:8:9 [0] NCCL INFO bootstrap.cc:245 -> 2"),
                r"(?:misc/socket|transport/net_socket|bootstrap\.)",
                (
                    Class.WRONG_INTERFACE,
                    Class.FIREWALL,
                    Class.PROGRAM_ERROR,
                    Class.OOM_HOST,
                    Class.RENDEZVOUS,
                    Class.RANK_COUNT,
                ),
                ("nccl-warn", "interfaces", "all-ranks"),
            ),
            (
                "failed-in-topology",
                "where it reads the machine's topology",
                ("n1:8:9 [0] NCCL INFO graph/xml.cc:469 -> 2",),
                r"graph/",
                (Class.OTHER, Class.VERSION_MISMATCH, Class.DRIVER, Class.RDMA_DEVICE_MISSING),
                ("nccl-warn", "topology", "versions"),
            ),
            (
                "failed-in-peer",
                "where GPUs of a node reach one another",
                ("n1:8:9 [0] NCCL INFO transport/p2p.cc:275 -> 1", "n1:8:9 [0] NCCL INFO transport/nvls.cc:169 -> 1"),
                r"(?:transport/(?:p2p|nvls)|include/alloc)",
                (Class.DRIVER, Class.ACS_IOMMU, Class.OOM_GPU, Class.GPU_XID, Class.VERSION_MISMATCH, Class.RANK_COUNT),
                ("nccl-warn", "xid", "memory-use"),
            ),
        )
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
