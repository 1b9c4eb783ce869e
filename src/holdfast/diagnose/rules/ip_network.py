"""Rules for IP networking: interfaces, firewalls, rendezvous and names, sockets that only report a dead peer."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

NAME_INTERFACE = (
    "NCCL_SOCKET_IFNAME=eth0 and GLOO_SOCKET_IFNAME=eth0 (the interface that reaches the other nodes; `ip -br addr`)"
)
OPEN_PORTS = (
    "allow all TCP ports between the job's nodes: NetworkPolicy, security group, firewalld/ufw/iptables",
    'service mesh: annotation sidecar.istio.io/inject: "false" on the pods',
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="no-interface",
        lines=(
            "n1:8:9 [0] bootstrap.cc:45 NCCL WARN Bootstrap : no socket interface found",
            "n1:8:9 [0] NCCL WARN NET/Socket : No usable listening interface found",
            "n1:8:9 [0] NCCL WARN no device found matching eth1, verify NCCL_OOB_NET_IFNAME",
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find address for: ens5",
            "ValueError: Unable to find interface ib0",
        ),
        pattern=r"no socket interface found|NET/Socket ?: [Nn]o (?:usable listening )?interface found|no device found (?:matching|after excluding)|Unable to find (?:address for|interface)"
        r"|[Cc]ould not find (?:network )?interface|No such device.{0,40}IFNAME|(?i:\b(?:no|(?:failed to|cannot|can't|could not|couldn't|unable to) find)(?: an?| any)?(?: \w+){0,2} (?:network|socket|net|ip|ethernet) interfaces?\b)|bad interface name|Unable to resolve hostname to a \(local\) address|No usable (?:IPv4 |IPv6 |network )?interface|ifa != nullptr|interface \S+ (?:does not exist|is down|was not found|not found)|Invalid network interface",
        classes=(FailureClass.WRONG_INTERFACE,),
        confidence=Confidence.CERTAIN,
        message="the configured interface does not exist on this node",
        remedy=(NAME_INTERFACE,),
        needs=("interfaces",),
        versions="all; by name since NCCL 2.24",
        source="NCCL src/bootstrap.cc, Gloo transport/tcp/device.cc",
    ),
    Rule(
        code="loopback-peer",
        lines=(
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error, remote=[127.0.1.1]:2331",
            "n1:8:9 [0] NCCL WARN Net : Connect to 127.0.0.1<34567> failed : Connection refused",
            "n1:8:9 [0] NCCL WARN socketStartConnect: Connect to fe80::f816:3eff:fe1f:1%eth0<4455> failed : Cannot assign requested address",
            "[n1][[5,1],0][btl_tcp_endpoint.c:818:mca_btl_tcp_endpoint_complete_connect] connect() to 172.17.0.1 failed: No route to host (113)",
        ),
        pattern=r"(?:onnect(?:ing|\(\))? to |remote=|dest_addr=)\[?(?:127\.|::1\b|fe80:|169\.254\.|172\.17\.)|No interface found in the same subnet as remote",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="a rank offers an address that other nodes cannot reach: loopback, link-local or a container bridge",
        remedy=(
            NAME_INTERFACE,
            "NCCL_SOCKET_IFNAME=^lo,docker,veth; the host's own name must not resolve to 127.x in /etc/hosts",
        ),
        needs=("interfaces",),
        versions="all",
        source="NCCL src/misc/socket.cc, Gloo transport/tcp/pair.cc",
    ),
    Rule(
        code="loopback-chosen",
        lines=(
            "n1:8:9 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>",
            "n1:8:9 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>",
            "n1:8:9 [0] NCCL INFO NET : Using interface lo:127.0.0.1<0>",
        ),
        pattern=r"(?:Bootstrap|NET(?:/Socket|/OFI)?) ?: Using ?(?:interface )?(?:\[\d+\])?(?:lo:127\.|docker\d|veth|virbr|cni0|flannel|cali|ip6tnl|[\w.]+:fe80:|[\w.]+:169\.254)"
        r"|OOB (?:lo|docker|veth|virbr|cni|flannel)\w*:",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        message="NCCL chose an address that other nodes cannot reach (loopback, link-local or a container bridge): "
        "harmless on one node, but several cannot connect",
        remedy=(
            NAME_INTERFACE,
            "NCCL_SOCKET_IFNAME=^lo,docker,veth; the host's own name must not resolve to 127.x in /etc/hosts",
        ),
        needs=("interfaces",),
        versions="all",
        source="NCCL src/bootstrap.cc, src/transport/net_socket.cc",
        performance_only=True,
    ),
    Rule(
        code="bridge-listed",
        lines=(
            "n1:8:9 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]virbr0:192.168.122.1<0>",
            "n1:8:9 [0] NCCL INFO Bootstrap : Using [0]eth0:10.0.0.1<0> [1]br-5f2a:172.19.0.1<0>",
        ),
        pattern=r"(?:Bootstrap|NET/Socket) : Using .*\[[1-9]\d*\](?:veth|docker|virbr|cni|flannel|cali|br-)\w*:",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        message="NCCL also uses an interface that other nodes cannot reach: the bridge of a container or virtual "
        "machine",
        remedy=(NAME_INTERFACE, "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-"),
        needs=("interfaces", "reachable"),
        versions="all",
        source="NCCL src/transport/net_socket.cc",
        performance_only=True,
    ),
    Rule(
        code="link-local-listed",
        lines=(
            "n1:8:9 [0] NCCL INFO NET/Socket : Using [0]eno1:10.0.0.1<0> [1]veth5f2a:fe80::5c1:aff:fe05:1%veth5f2a<0>",
        ),
        pattern=r"(?:Bootstrap|NET/Socket) : Using .*\[[1-9]\d*\][\w.-]+:fe80:",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="NCCL also uses an interface that has only a link-local address, which no other node can reach",
        remedy=(NAME_INTERFACE, "NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-"),
        needs=("interfaces", "reachable"),
        versions="all",
        source="NCCL src/transport/net_socket.cc",
        performance_only=True,
    ),
    Rule(
        code="address-family",
        lines=(
            "include/socket.h:344 NCCL WARN Net : Socket creation failed : Address family not supported by protocol",
            "OSError: [Errno 97] Address family not supported by protocol",
        ),
        pattern=r"Address family not supported|EAFNOSUPPORT|Net : [Uu]nsupported (?:IP|address) family|gloo.{0,60}address family mismatch",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.RENDEZVOUS),
        confidence=Confidence.LIKELY,
        message="the address offered is of a family (IPv6, or none) that this machine does not support",
        remedy=("NCCL_SOCKET_FAMILY=AF_INET, and a MASTER_ADDR that is an IPv4 address", NAME_INTERFACE),
        needs=("interfaces",),
        source="the kernel",
    ),
    Rule(
        code="connect-timeout",
        lines=(
            "n1:8:9 [0] misc/socket.cc:456 NCCL WARN socketPollConnect: Connect to 10.0.3.4<45678> failed : Connection timed out",
            "n1:8:9 [0] misc/socket.cc:550 NCCL WARN connect to 10.0.3.4<45678> returned Connection timed out, exceeded error retry count (35)",
            "n1:8:9 [0] NCCL WARN socketPollConnect: connect returned Connection timed out, exceeded timeouts (20000)",
        ),
        pattern=r"(?i)connect(?: to \S+(?: port \d+(?: \(tcp\))?)?)?(?: failed ?:| returned| error:?) (?:\d+ )?(?:Connection timed out|Software caused connection abort)"
        r"|socketPollConnect.{0,60}timed out|exceeded (?:retries|timeouts|error retry count) \(\d+\)|Call to connect timeout",
        classes=(FailureClass.FIREWALL, FailureClass.WRONG_INTERFACE, FailureClass.NODE_LOST),
        confidence=Confidence.LIKELY,
        message="a TCP connection to a peer gets no answer: a firewall or network policy drops it, or that address is "
        "not routed",
        remedy=(*OPEN_PORTS, NAME_INTERFACE),
        needs=("reachable", "interfaces"),
        versions="all",
        source="NCCL src/misc/socket.cc",
    ),
    Rule(
        code="no-route-to-host",
        lines=(
            "n1:8:9 [0] misc/socket.cc:500 NCCL WARN socketStartConnect: Connect to 10.0.3.4<45678> failed : No route to host",
            "n1:8:9 [0] NCCL WARN Net : Connect to 10.0.3.4<45678> failed : No route to host",
        ),
        pattern=r"(?i)connect(?: to \S+(?: port \d+(?: \(tcp\))?)?)?(?: failed ?:| returned| error:?) (?:\d+ )?(?:No route to host|Network is unreachable|Host is unreachable)"
        r"|socketPollConnect.{0,60}(?:No route|unreachable)",
        classes=(FailureClass.FIREWALL, FailureClass.WRONG_INTERFACE, FailureClass.NODE_LOST),
        message="connecting to a peer returns `no route`: a firewall rejects it, or this interface has no route there",
        remedy=(*OPEN_PORTS, NAME_INTERFACE),
        needs=("reachable", "interfaces"),
        versions="all",
        source="NCCL src/misc/socket.cc",
    ),
    Rule(
        code="connect-refused",
        lines=(
            "n1:8:9 [0] misc/socket.cc:456 NCCL WARN socketStartConnect: Connect to 10.0.3.4<45678> failed : Connection refused",
            "n1:8:9 [0] NCCL WARN Net : Connect to 10.0.3.4<45678> failed : Connection refused",
            "n1:8:9 [0] NCCL INFO Call to connect returned Connection refused, retrying",
        ),
        pattern=r"(?i)connect(?: to \S+)?(?: failed ?:| returned| error:?) (?:\d+ )?Connection refused",
        classes=(
            FailureClass.FIREWALL,
            FailureClass.WRONG_INTERFACE,
            FailureClass.PROGRAM_ERROR,
            FailureClass.RENDEZVOUS,
        ),
        message="nothing listens at a peer's address: its process is gone, a firewall refuses, or the address is "
        "another host's",
        remedy=("read the peer's own log first", *OPEN_PORTS),
        needs=("peer-log", "reachable", "interfaces"),
        versions="all",
        source="NCCL src/misc/socket.cc",
    ),
    Rule(
        code="service-mesh",
        lines=(
            "2025-01-02T03:04:05Z info envoy upstream upstream membership update for TLS cluster inbound|29500|| added 1 removed 0",
            '[2025-01-02T03:04:05Z] "- - -" 0 NR filter_chain_not_found - "-" 0 0 0 - "-" "10.2.0.5:29400"',
            "rbac_access_denied_matched_policy[none]",
            "upstream connect error or disconnect/reset before headers. reset reason: connection failure",
        ),
        pattern=r"\benvoy\b.{0,200}(?:inbound|outbound|upstream|cluster|listener)|filter_chain_not_found|rbac_access_denied|upstream connect error or disconnect|istio-proxy"
        r"|BlackHoleCluster|PassthroughCluster|linkerd2?_(?:proxy|app)",
        classes=(FailureClass.FIREWALL,),
        confidence=Confidence.LIKELY,
        message="a service mesh's proxy intercepts the ranks' connections",
        remedy=(
            'annotation sidecar.istio.io/inject: "false" (Linkerd: linkerd.io/inject: disabled) on the job\'s pods',
        ),
        needs=("reachable",),
        source="Envoy, Istio, Linkerd",
    ),
    Rule(
        code="packet-filter",
        lines=(
            "[UFW BLOCK] IN=eth0 OUT= MAC=... SRC=10.0.0.2 DST=10.0.0.1 PROTO=TCP SPT=41000 DPT=29500",
            "kernel: FINAL_REJECT: IN=eno1 OUT= SRC=10.0.0.2 DST=10.0.0.1 PROTO=TCP DPT=40001",
            "Policy denied DROPPED (TCP Flags: SYN) default/worker-1:41234 to default/worker-0:29500",
        ),
        pattern=r"UFW BLOCK|FINAL_REJECT|IPTABLES.{0,10}DROP|nft.{0,20}(?:DROP|REJECT)|[Pp]olicy denied|calico-packet: .*DROP|firewalld? .{0,40}(?:block|reject|drop)",
        classes=(FailureClass.FIREWALL,),
        confidence=Confidence.LIKELY,
        message="a packet filter dropped a connection between the job's nodes",
        remedy=OPEN_PORTS,
        needs=("reachable",),
        source="ufw, firewalld, Cilium, Calico",
    ),
    Rule(
        code="foreign-connection",
        lines=(
            "n1:8:9 [0] misc/socket.cc:600 NCCL WARN socketFinalizeAccept: wrong magic 0x4745540000 != 0x1234",
            "n1:8:9 [0] NCCL WARN socket magic mismatch",
        ),
        pattern=r"[Ww]rong (?:magic|socket type|type)\b|socket magic mismatch|unexpected magic",
        classes=(FailureClass.OTHER, FailureClass.FIREWALL, FailureClass.VERSION_MISMATCH),
        message="another program connected to an NCCL port: a scanner, a health probe, or another job",
        remedy=("keep scanners and probes away from the job's ports; give each job its own ports",),
        needs=("net-plugin", "versions"),
        versions="2.16 and later",
        source="NCCL src/misc/socket.cc",
    ),
    Rule(
        code="name-resolution",
        lines=(
            "socket.gaierror: [Errno -2] Name or service not known",
            "[W socket.cpp:663] [c10d] The IPv6 network addresses of (master-0, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
            "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (worker-0, 29500). The IPv4 network addresses of (worker-0, 29500) cannot be retrieved (gai error: -3 - Temporary failure in name resolution).",
            "ssh: Could not resolve hostname job-worker-1.job: Name or service not known",
        ),
        pattern=r"network addresses of \((?P<name>[\w.-]{1,200}), \d+\) cannot be retrieved|gai error: -?\d+|gaierror|Name or service not known|[Tt]emporary failure in name resolution|[Cc]ould not resolve (?:host|hostname)|nodename nor servname|no such host"
        r"|[Uu]nknown host\b|NXDOMAIN|getaddrinfo.{0,40}fail|No address associated with hostname|Name does not resolve",
        classes=(FailureClass.RENDEZVOUS,),
        confidence=Confidence.LIKELY,
        message="the name of the master or of a peer does not resolve: {name}",
        remedy=(
            "check the name: `getent hosts NAME` on every node; it comes from MASTER_ADDR, --master-addr or "
            "--rdzv-endpoint",
            "Kubernetes: a headless service with publishNotReadyAddresses: true, hostname and subdomain on the pods; wait with nslookup in an init container",
            "Slurm: MASTER_ADDR=$(scontrol show hostnames $SLURM_NODELIST | head -1); /etc/hosts or DNS on every node",
        ),
        needs=("resolves",),
        source="libc getaddrinfo, torch c10d socket.cpp",
        fallback=True,
    ),
    Rule(
        code="rendezvous-timeout",
        lines=(
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError: The rendezvous has timed out.",
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.",
            "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
            "RuntimeError: The client socket has failed to connect to any network address of (10.0.0.1, 29500).",
            "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 3/4 clients joined.",
            "RuntimeError: connect() timed out. Original timeout was 1800000 ms.",
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Failed to connect to distributed coordination service",
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: PjRT_Client_Connect. Timed out task names: /job:jax_worker/replica:0/task:1",
            "DEADLINE_EXCEEDED: Barrier timed out. Id: [Init]Wait_for_all_tasks_to_register. # of tasks that reached the barrier: 3/4.",
        ),
        pattern=r"Rendezvous(?:Timeout|Connection|Closed)Error|The client socket has (?:timed out|failed to connect)|connect\(\) timed out\.|RendezvousStateError"
        r"|waiting for clients\. (?P<joined>\d+)/(?P<wanted>\d+) clients joined|Wait_for_all_tasks_to_register|Barrier timed out\. \S+ PjRT_Client_Connect|cluster registration failed|[Ff]ailed to connect to (?:distributed )?coordination service|rendezvous.{0,60}(?:timed out|timeout|failed to)"
        r"|Timed out (?:initializing|waiting for) (?:process group|.{0,20}rendezvous)|Exhausted timeout waiting for .{0,20}(?:join|rendezvous)",
        classes=(FailureClass.RENDEZVOUS, FailureClass.FIREWALL, FailureClass.RANK_COUNT),
        confidence=Confidence.LIKELY,
        message="not all ranks reached the rendezvous in time",
        remedy=(
            "the same endpoint and id on every node, the master's port open, its name resolvable before the others "
            "start",
            "the number of nodes started must be --nnodes; raise --rdzv-conf join_timeout when images are slow to pull",
        ),
        needs=("resolves", "reachable", "who-joined"),
        source="torch elastic rendezvous, c10d TCPStore, JAX coordination service",
        peer_death_symptom=True,
    ),
    Rule(
        code="jax-barrier",
        lines=(
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Barrier_id: multihost_broadcast_sync0. Timed out task names:",
        ),
        pattern=r"Barrier timed out\. (?:Barrier_id|Id): ",
        classes=(
            FailureClass.STRAGGLER,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.PROGRAM_ERROR,
            FailureClass.NODE_LOST,
            FailureClass.HANG_UNKNOWN,
        ),
        message="a process waited at a barrier for others that did not come in time",
        remedy=("the lines below name the tasks that were late or never came: read their logs first",),
        needs=("peer-log", "all-ranks", "stacks"),
        source="JAX, XLA coordination service",
        fallback=True,
    ),
    Rule(
        code="port-in-use",
        lines=(
            "[E socket.cpp:922] [c10d] The server socket has failed to listen on any local network address. useIpv6: 0, code: -98, name: EADDRINUSE, message: address already in use",
            "RuntimeError: The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
            "OSError: [Errno 98] Address already in use",
        ),
        pattern=r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address.{0,60}code: -98|store server failed: port \d+ already",
        classes=(FailureClass.RENDEZVOUS,),
        confidence=Confidence.LIKELY,
        message="another process holds the rendezvous port: an earlier run that has not ended, or another job",
        remedy=(
            "ss -ltnp | grep PORT, end the old process; or use another --master-port (torchrun --rdzv-endpoint "
            "HOST:0 picks a free one)",
        ),
        needs=("port-holder",),
        source="torch c10d socket.cpp",
    ),
    Rule(
        code="master-addr-not-local",
        lines=(
            "[E socket.cpp:922] [c10d] The server socket has failed to bind to [10.0.0.5]:29500 (errno: 99 - Cannot assign requested address).",
        ),
        pattern=r"(?i)(?:bind|listen).{0,100}Cannot assign requested address|EADDRNOTAVAIL",
        exclude=r"\bNCCL WARN ",  # in NCCL it means that the interface lost its address
        classes=(FailureClass.RENDEZVOUS, FailureClass.WRONG_INTERFACE),
        confidence=Confidence.LIKELY,
        message="rank 0 was started on a host that is not MASTER_ADDR",
        remedy=("node rank 0 must run on the host that MASTER_ADDR names; the c10d rendezvous lets torchrun choose",),
        needs=("resolves",),
        source="torch c10d socket.cpp",
    ),
    Rule(
        code="gloo-connect",
        lines=(
            "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [10.1.2.3]:41234: Connection timed out",
        ),
        pattern=r"Gloo connectFullMesh failed|gloo.{0,60}pair\.cc:\d+\] (?:connect|timed out connecting)|gloo.{0,60}[Tt]imed out waiting \d+ms for connect",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="Gloo could not connect the ranks: mostly it chose an interface or address that others cannot reach",
        remedy=(NAME_INTERFACE, *OPEN_PORTS),
        needs=("interfaces", "reachable"),
        source="Gloo transport/tcp/pair.cc",
    ),
    Rule(
        code="connection-closed",
        lines=(
            "n1:8:9 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer n2<40112>",
            "n1:8:9 [0] proxy.cc:1521 NCCL WARN Socket recv failed while polling for opId=0x7f",
            "n1:8:9 [0] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to recv from 10.0.0.2<36173> failed : Connection reset by peer",
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:12345",
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error, NCCL version 2.20.5",
            "[W TCPStore.cpp:141] recvValue failed on SocketImpl(fd=3, addr=[n1]:42, remote=[n0]:29500): failed to recv, got 0 bytes",
            "torch.distributed.DistNetworkError: Connection reset by peer",
            "BrokenPipeError: [Errno 32] Broken pipe",
            "coordination_service_agent.cc:1: /job:jax_worker/replica:0/task:3 heartbeat timeout. This indicates that the remote task has failed, got preempted, or crashed unexpectedly.",
        ),
        pattern=r"Connection closed by (?:remote )?peer|Socket recv failed|[Cc]all to (?:recv|send)\w* (?:from|to) \S+ failed|Connection reset by peer|remote process exited or there was a network error"
        r"|recvValue(?:WithTimeout)? failed|sendBytes failed|failed to recv, got 0 bytes|Broken pipe|store->get\(.{0,80}got error|[Ff]ailed to check the \"should dump\" flag"
        r"|peer closed the connection|ncclRemoteError|heartbeat timeout.{0,40}the remote task has failed|Server unexpectedly shut down|TCPStore server has shut down",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.PROGRAM_ERROR,
            FailureClass.OOM_HOST,
            FailureClass.FIREWALL,
            FailureClass.NODE_LOST,
            FailureClass.NETWORK_LOSS,
        ),
        also_possible=(
            FailureClass.OOM_GPU,
            FailureClass.WRONG_INTERFACE,
            FailureClass.GPU_XID,
            FailureClass.RENDEZVOUS,
        ),
        message="the process at the other end of a connection was gone",
        needs=("all-ranks", "peer-log"),
        versions="all",
        source="NCCL src/misc/socket.cc, Gloo, torch TCPStore",
    ),
)
