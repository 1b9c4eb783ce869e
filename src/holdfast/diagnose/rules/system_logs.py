"""Rules for logs of the kernel, services and launchers around a job: adapters, hung nodes, Ray, MPI, containers."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.ip_network import NAME_INTERFACE, OPEN_PORTS
from holdfast.diagnose.rules.rule import Role, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="adapter-failed",
        lines=(
            "mlx5_core 0000:1a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
            "mlx5_core 0000:1a:00.0: mlx5_cmd_check:810:(pid 1): CREATE_QP(0x500) op_mod(0x0) failed, status bad resource(0x5), syndrome (0x1)",
            "mlx5_core 0000:1a:00.0: temp_warn:185:(pid 0): High temperature on sensors with bit set 0x1",
            "NETDEV WATCHDOG: eth2 (mlx5_core): transmit queue 3 timed out",
        ),
        pattern=r"mlx5_core .{0,120}(?:health compromised|handling bad device|assert_var|[Ff]atal error|[Ff]irmware (?:fatal|hang)|device is in (?:internal )?error|High temperature|leaving health|CQE error|mlx5_\w{0,40}cmd\w*:.{0,80}(?:failed|timeout))"
        r"|NETDEV WATCHDOG: .{0,60}timed out|infiniband \S{1,20}: .{0,80}(?:failed|fatal)|ib\d: multicast join failed",
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.DRIVER,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.NODE_LOST,
        ),
        confidence=Confidence.LIKELY,
        message="a network adapter of the node failed, or its firmware rejected a command",
        remedy=(
            "take the node out of use; power-cycle it (a reboot leaves the adapter's firmware running), then check "
            "its firmware and cooling",
        ),
        needs=("link-counters", "versions"),
        source="the kernel: mlx5_core, rdma",
    ),
    Rule(
        code="kernel-lockup",
        lines=(
            "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:123]",
            "rcu: INFO: rcu_sched self-detected stall on CPU",
            "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        ),
        pattern=r"BUG: soft lockup - CPU|[Hh]ard LOCKUP|self-detected stall on CPU|EDAC \S{1,8}: [1-9]\d* UE ",
        classes=(FailureClass.NODE_LOST, FailureClass.STRAGGLER),
        confidence=Confidence.LIKELY,
        message="a node's CPU stalled, or its memory failed",
        remedy=("take the node out of use, and test its memory and processors before it is used again",),
        needs=("all-ranks",),
        source="the kernel",
    ),
    Rule(
        code="task-blocked",
        lines=("INFO: task python:1234 blocked for more than 120 seconds.",),
        pattern=r"INFO: task \S{1,40} blocked for more than \d+ seconds",
        classes=(FailureClass.STORAGE, FailureClass.NODE_LOST, FailureClass.GPU_XID, FailureClass.DRIVER),
        message="a process was blocked in the kernel for minutes: mostly by a file server or disk, sometimes by a "
        "driver",
        remedy=("the stack below the line in dmesg names what it waited for: nfs, lustre, fuse, nvidia",),
        needs=("kernel-log", "xid"),
        source="the kernel, khungtaskd",
    ),
    Rule(
        code="head-unreachable",
        lines=(
            "[2025-06-13 10:00:00,730 E 1 1] gcs_rpc_client.h:179: Failed to connect to GCS at address 10.0.0.1:6379 within 5 seconds.",
            "ConnectionError: Could not find any running Ray instance. Please specify the one to connect to by setting `--address` flag or `RAY_ADDRESS` environment variable.",
            "etcd.EtcdConnectionFailed: Connection to etcd failed due to MaxRetryError",
            "I tensorflow/core/distributed_runtime/master.cc:267] CreateSession still waiting for response from worker: /job:worker/replica:0/task:1",
        ),
        pattern=r"[Ff]ailed to connect to (?:the )?GCS\b|Unable to connect to GCS|GCS at address \S+ (?:is not|cannot)|Could not find any running Ray instance|ray client connection timeout|EtcdConnectionFailed|EtcdException|failed to connect to all addresses|CreateSession still waiting for response from",
        classes=(FailureClass.RENDEZVOUS, FailureClass.FIREWALL, FailureClass.NODE_LOST),
        confidence=Confidence.LIKELY,
        message="the rendezvous service (Ray's head, etcd, a coordinator) does not answer at the given address",
        remedy=(
            "check that it is the head's own address, not a loopback one: nc -vz ADDRESS PORT from the worker; the "
            "head must be up first",
            "read the head's own log: if it ended, the reason is the cause",
        ),
        needs=("resolves", "reachable", "peer-log"),
        source="Ray gcs_rpc_client, etcd, gRPC, TensorFlow",
        peer_death_symptom=True,
    ),
    Rule(
        code="ray-node-lost",
        lines=(
            "(raylet) The node with node id: 5f and address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the detector has missed too many heartbeats from it.",
            "gcs_health_check_manager.cc:70: Health check failed for node 5f, remaining checks 0, status 14",
        ),
        pattern=r"(?:has been )?marked dead because|Health check failed for node|missed too many heartbeats",
        classes=(FailureClass.NODE_LOST, FailureClass.OOM_HOST, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="Ray lost a node: the node, its raylet or the network to it is gone",
        remedy=("check that node: is it up, did the kernel kill the raylet for memory, is it reachable",),
        needs=("kernel-log", "reachable"),
        source="Ray GCS health check",
    ),
    Rule(
        code="ray-node-address-mismatch",
        lines=(
            "(autoscaler +7s) Error: No available node types can fulfill resource request {'node:10.0.0.1': 0.001, 'GPU': 1.0}. Add suitable node types to this cluster to resolve this issue.",
        ),
        pattern=r"\{(?:'GPU': 1\.0, )?'node:[\w.:]{1,60}': 0\.001",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.NOT_STARTED),
        confidence=Confidence.LIKELY,
        message="vLLM requests its own node from Ray by an address that Ray does not know, or that node has no GPU left",
        remedy=(
            "`ray status -v` lists the addresses that Ray knows: ray start --node-ip-address and VLLM_HOST_IP must "
            "match it on every node",
        ),
        needs=("interfaces", "gpus-seen"),
        source="vLLM ray_utils.py, Ray autoscaler",
    ),
    Rule(
        code="ray-unschedulable",
        lines=(
            "The following resource request cannot be scheduled right now: {'GPU': 8.0}. This is likely due to all cluster resources being claimed by actors.",
            "(autoscaler +12s) Error: No available node types can fulfill resource request {'GPU': 16.0}.",
            "ValueError: Total available GPUs 8 is less than total desired GPUs 16",
            "ValueError: Ray does not allocate any GPUs on the driver node. Consider adjusting the Ray placement group or running the driver on a GPU node.",
        ),
        pattern=r"cannot be scheduled right now: \{|No available node types can fulfill resource requests? \{|Total available GPUs \S+ is less than|placement group .{0,80}(?:infeasible|cannot be (?:scheduled|created))|Current node has no GPU available|does not allocate any GPUs on the driver node",
        exclude=r"'node:[\w.:]{1,60}': 0\.001",
        classes=(FailureClass.NOT_STARTED, FailureClass.RANK_COUNT),
        confidence=Confidence.LIKELY,
        message="Ray lacks the resources that the job requests",
        remedy=("`ray status` lists total and used resources; request those, or wait for the missing nodes",),
        needs=("who-joined", "gpus-seen"),
        source="Ray autoscaler, verl, vLLM",
    ),
    Rule(
        code="program-not-found",
        lines=(
            "bash: line 1: orted: command not found",
            "/bin/bash: torchrun: command not found",
            "mpirun was unable to find the specified executable file, and therefore did not launch the job.",
            "An ORTE daemon has unexpectedly failed after launch and before communicating back to mpirun.",
            "RuntimeError: launcher 'pdsh' not installed.",
        ),
        pattern=r"\b(?:orted|prted|torchrun|deepspeed|accelerate|mpirun|srun|python3?|ray|pdsh|ninja): (?:command )?not found|\w+ was unable to (?:launch|find) the specified|could not access or execute an executable|daemon has unexpectedly failed after launch|launcher '\w+' not installed",
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.LIKELY,
        message="the program to start does not exist, or is not on the PATH of a non-login shell",
        remedy=(
            "`ssh NODE which PROGRAM`; the same path on every node, --prefix or PATH in the file that such a shell "
            "reads",
        ),
        needs=("first-traceback",),
        source="the shell, Open MPI, PRRTE, DeepSpeed",
    ),
    Rule(
        code="container-start-failed",
        lines=(
            "slurmstepd: error: pyxis: container start failed with error code: 1",
            "srun: error: task 0 launch failed: Error configuring interconnect",
            "exec /usr/bin/bash: exec format error",
            "slurmstepd: error: prolog failed: rc:1 output:nvidia-smi failed",
            'MountVolume.SetUp failed for volume "data" : mount failed: exit status 32',
            'Error: secret "hf-token" not found',
            "Error: container has runAsNonRoot and image will run as root (pod: train-0, container: main)",
            'Warning  FailedAttachVolume  attachdetach-controller  Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) w-0',
        ),
        pattern=r"pyxis: (?:container start failed|couldn't|failed to)|srun: error: task \S+ launch failed|Unable to confirm allocation for job|[Pp]rolog (?:error|failed|launch failure)|Munge (?:decode|encode) failed|Unable to contact slurm controller|Zero Bytes were transmitted|launch failed requeued held|MountVolume\.\w+ failed|Unable to attach or mount volumes|didn't match (?:Pod's )?node (?:affinity|selector)|unbound immediate PersistentVolumeClaims|CPU binding outside of job step|exec format error|exec user process caused|runAsNonRoot and image|(?:secret|configmap) \"[^\"]{1,100}\" not found|FailedAttachVolume|Multi-Attach error"
        r"|no runtime for \"\w+\" is configured|InvalidImageName|CreateContainerError|RunContainerError|OCI runtime create failed|failed to mount .{0,80}to rootfs",
        classes=(FailureClass.NOT_STARTED, FailureClass.DRIVER, FailureClass.STORAGE),
        confidence=Confidence.LIKELY,
        message="a container or step of the job could not be started",
        remedy=(
            "kubectl describe pod POD, or slurmd's log on that node: the text after this line names what is missing",
        ),
        needs=("pod-status",),
        source="kubelet, containerd, pyxis, srun",
        fallback=True,
    ),
    Rule(
        code="probe-failed",
        lines=("Warning  Unhealthy  kubelet  Liveness probe failed: HTTP probe failed with statuscode: 500",),
        pattern=r"Liveness probe failed|failed liveness probe",
        classes=(FailureClass.KILLED,),
        confidence=Confidence.LIKELY,
        message="Kubernetes ended a container because it did not answer its liveness probe",
        remedy=("no liveness probe on a training pod, or one with a timeout longer than its longest step",),
        needs=("pod-status",),
        source="kubelet",
    ),
    Rule(
        code="mpi-unreachable",
        lines=(
            "WARNING: Open MPI failed to TCP connect to a peer MPI process.",
            "Unable to find a set of common task-to-task communication interfaces: [(0, set()), (1, set())]",
            "Open MPI accepted a TCP connection from what appears to be a another Open MPI process but cannot find a corresponding process entry for that peer.",
        ),
        pattern=r"Open MPI failed to TCP connect to a peer|Open MPI accepted a TCP connection from what appears to be|TCP BTL was asked to use|unable to complete a TCP connection|common task-to-task communication interfaces|was unable to connect to \S+ on any of the|Invalid specification of network interface",
        classes=(FailureClass.WRONG_INTERFACE, FailureClass.FIREWALL),
        message="processes of MPI or Horovod cannot reach one another over the chosen interface",
        remedy=(
            "mpirun --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0, with the interface that all nodes "
            "share",
            NAME_INTERFACE,
            *OPEN_PORTS,
        ),
        needs=("interfaces", "reachable"),
        source="Open MPI btl/tcp",
    ),
    Rule(
        code="mpi-init-failed",
        lines=(
            "It looks like MPI_INIT failed for some reason; your parallel process is likely to abort.",
            "No components were able to be opened in the pml framework.",
            "PMIX ERROR: UNREACHABLE in file client/pmix_client.c at line 1001",
            'The application appears to have been direct launched using "srun", but OMPI was not built with SLURM\'s PMI support',
        ),
        pattern=r"MPI_INIT failed|An error occurred in MPI_Init|No components were able to be opened in|PML add procs failed|PMIX ERROR: |was not built with SLURM's PMI|pmix_init failed|opal_init failed|orte_init failed",
        classes=(
            FailureClass.VERSION_MISMATCH,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.WRONG_INTERFACE,
            FailureClass.NOT_STARTED,
            FailureClass.MEMLOCK,
            FailureClass.RANK_COUNT,
        ),
        message="MPI could not start in a rank; the lines around this one name the component",
        remedy=("mpirun and the program's MPI library of one version; srun --mpi=pmix; UCX_NET_DEVICES",),
        needs=("versions", "interfaces", "memlock"),
        source="Open MPI, PMIx",
    ),
    Rule(
        code="ucx-error",
        lines=(
            "[1700000000.123456] [n1:811:0] ucp_worker.c:1783 UCX  ERROR failed to connect: Endpoint timeout",
            "[1700000000.123456] [n1:811:0] ib_device.c:1250 UCX  ERROR ibv_create_ah(dlid=0 sl=0 port=1 sgid_index=3 traffic_class=0) for RC DEVX QP connect on mlx5_0 failed: Connection timed out",
        ),
        pattern=r"UCX +(?:ERROR|FATAL) +\S",
        classes=(
            FailureClass.NETWORK_LOSS,
            FailureClass.WRONG_INTERFACE,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.FIREWALL,
            FailureClass.DRIVER,
            FailureClass.NODE_LOST,
        ),
        message="UCX could not use a configured network or memory",
        remedy=("UCX_NET_DEVICES and UCX_TLS select devices and transports; UCX_LOG_LEVEL=info shows the selection",),
        needs=("gid", "interfaces", "peer-log"),
        source="UCX",
        fallback=True,
        performance_only=True,
    ),
    Rule(
        code="gpus-oversubscribed",
        lines=(
            "ValueError: World size (16) is greater than the number of available GPUs (8) in this cluster",
            "lightning_fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1, 2, 3]",
            "RuntimeError: Mesh should not be bigger than default world size 8, but found 16",
        ),
        pattern=r"(?i)GPUs?\b.{0,60}(?:exceeds?|greater than|more than|larger than|less than) .{0,40}(?:available|visible|GPUs?)|greater than the number of (?:available )?GPUs|You requested gpu: |machine only has|should not be bigger than default world size",
        classes=(FailureClass.RANK_COUNT, FailureClass.NOT_STARTED, FailureClass.DRIVER),
        message="the job requests more GPUs than the process or the cluster sees",
        remedy=("nvidia-smi -L on each node, inside the container; as many ranks per node as it lists",),
        needs=("gpus-seen",),
        source="vLLM, Lightning, torch DeviceMesh",
    ),
    Rule(
        code="main-process-first",
        lines=(
            '    with training_args.main_process_first(local=False, desc="grouping texts together"):',
            '  File "/opt/venv/lib/python3.12/site-packages/accelerate/state.py", line 450, in _goes_first',
        ),
        pattern=r"main_process_first\(|in _goes_first\b|in main_process_first\b",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.STRAGGLER,
            FailureClass.RENDEZVOUS,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.PROGRAM_ERROR,
        ),
        message="a rank waited for another rank that prepares the data first",
        needs=("step-times", "all-ranks"),
        source="transformers TrainingArguments, accelerate",
    ),
)
