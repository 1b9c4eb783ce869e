"""Rules for faults that keep a job from starting: schedulers that refuse, containers without a GPU, launchers without a
shell.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="job-request-rejected",
        matches={
            r"(?:sbatch|srun|salloc): error: (?:Batch job submission failed|Unable to (?:create step|allocate resources)|Job submit/allocate failed)": "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            r"UnexpectedAdmissionError": "Warning  UnexpectedAdmissionError  pod/w-0  Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 8, Available: 7, which is unexpected",
            r"requested number of devices unavailable": "Warning  UnexpectedAdmissionError  pod/w-0  Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 8, Available: 7, which is unexpected",
            r"Node didn't have enough resource": "Message:  Pod Node didn't have enough resource: cpu, requested: 4000, used: 61000, capacity: 64000",
            r"\bOutOf(?:cpu|memory|pods|ephemeral-storage|\S+/\S*gpu)\b": "Reason:       OutOfcpu",
            r"(?:sbatch|srun|salloc): (?:unrecognized|invalid) option": "srun: unrecognized option '--container-mounts'",
            r"admission webhook \S{1,200} denied": 'Error from server: admission webhook "v.example.com" denied the request: no queue',
            r"no matches for kind \"": 'error: resource mapping not found for name: "train" namespace: "" from "job.yaml": no matches for kind "PyTorchJob" in version "kubeflow.org/v1"',
            r"the server could not find the requested resource": "Error from server (NotFound): the server could not find the requested resource",
            r"Matched 0/\d+ workers by": "- Matched 0/2 workers by READY status.",
            r"There are not enough slots available": "There are not enough slots available in the system to satisfy the 16 slots that were requested by the application:",
            r"EvictedDueToPodsReadyTimeout": "Reason: EvictedDueToPodsReadyTimeout",
            r"couldn't assign flavors": "couldn't assign flavors to pod set worker: insufficient quota for nvidia.com/gpu",
            r"Couldn't schedule PodGang": "Couldn't schedule PodGang train: 2 of 4 pods fit",
        },
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.LIKELY,
        message="the scheduler or the node refused the job's request",
        remedy=(
            "request what exists: `sinfo -o '%P %D %G %c %m'`, `kubectl describe node | grep -A8 Allocatable`; "
            "fewer ranks per node",
            "an unknown option or kind belongs to a plugin or operator that is not installed: pyxis for "
            "--container-image, the training operator for PyTorchJob",
        ),
        needs=("pod-status",),
        source="Slurm, kubelet, Kubernetes API, Kueue, Open MPI, GPUStack",
    ),
    Rule(
        code="task-launch-failed",
        matches={
            r"srun: error: Task launch for \S+ failed on node (?P<host>[\w.-]+)": "srun: error: Task launch for StepId=123.0 failed on node n17: Communication connection failure",
            r"srun: error: Application launch failed": "srun: error: Application launch failed: Socket timed out on send/recv operation",
            r"slurmstepd: error: (?:Failed to invoke|_forkexec|execve\(\): )": "slurmstepd: error: Failed to invoke task plugins: task_p_pre_launch error",
        },
        classes=(FailureClass.NOT_STARTED, FailureClass.NODE_LOST),
        confidence=Confidence.LIKELY,
        message="Slurm could not start the ranks of a node",
        remedy=(
            "scontrol show node NODE; journalctl -u slurmd on it: an expired credential means a wrong clock "
            "(chronyc tracking) or munge (munge -n | ssh NODE unmunge)",
            "until it is fixed: sbatch --exclude=NODE",
        ),
        needs=("pod-status",),
        source="Slurm, srun launch.c, slurmstepd",
    ),
    Rule(
        code="container-without-gpu",
        matches={
            r"could not select device driver": 'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
            r"nvidia-container-cli: (?:initialization|mount|detection|device) error": "nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown",
            r"nvidia-container-runtime.{0,80}(?:error|fail)": "nvidia-container-runtime: error running hook: exit status 1",
            r"Command not found: nvidia-container-cli": "[ERROR] Command not found: nvidia-container-cli, see https://github.com/NVIDIA/libnvidia-container",
            r"Could not find any (?:nv|NVIDIA|rocm|ROCm) (?:files|binaries|libraries) on this host": "WARNING: Could not find any nv libraries on this host!",
            r"CUDA driver initialization failed": "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
            r"Failed to open libnvidia-ml": "n1:8:9 [0] misc/nvmlwrap.cc:30 NCCL WARN Failed to open libnvidia-ml.so.1",
            r"Failed to find CUDA library": "n1:8:9 [0] misc/cudawrap.cc:123 NCCL WARN Failed to find CUDA library in foo (NCCL_CUDA_PATH=foo)",
            r"nvmlInit\w*\(\) failed": "n1:8:9 [0] misc/nvmlwrap.cc:123 NCCL WARN nvmlInitfoo() failed: foo",
            r"CUDA unknown error - this may be due": "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
        },
        classes=(FailureClass.DRIVER,),
        confidence=Confidence.LIKELY,
        message="the driver is not visible in the container, or is not running",
        remedy=(
            "nvidia-smi on the node, then in the container; install or restart the NVIDIA container toolkit (nvidia-ctk runtime configure), reload nvidia_uvm",
        ),
        needs=("gpus-seen", "xid"),
        source="Docker, NVIDIA container toolkit, Apptainer, torch CUDAFunctions.h",
    ),
    Rule(
        code="ssh-failed",
        matches={
            r"Permission denied \((?:publickey|gssapi|keyboard|password)": "Permission denied (publickey,password).",
            r"Host key verification failed": "Host key verification failed.",
            r"ssh exited with exit code 255": "pdsh@head: n2: ssh exited with exit code 255",
            r"ssh: connect to host \S+ port \d+": "ssh: connect to host n2 port 22: Connection refused",
            r"Command 'ssh .{0,200}returned non-zero exit status 255": "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no n2 hostname' returned non-zero exit status 255.",
            r"Unable to communicate with host \S+ via": "[n1] Unable to communicate with host n2 via ssh",
            r"kex_exchange_identification: ": "kex_exchange_identification: Connection closed by remote host",
        },
        classes=(FailureClass.NOT_STARTED, FailureClass.RENDEZVOUS, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="the launcher cannot start its ranks on another node: ssh refuses or fails",
        remedy=("ssh NODE true must work from the launcher's node without a prompt: keys, known_hosts, user, port",),
        needs=("reachable", "who-joined"),
        source="OpenSSH, pdsh, Open MPI",
    ),
    Rule(
        code="mpirun-host-slots",
        matches={
            r"Could not resolve hostname \S{1,200}:\d{1,3}: ": "ssh: Could not resolve hostname n2:8: Name or service not known",
        },
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.NOT_STARTED),
        confidence=Confidence.LIKELY,
        message="a host with its number of slots was read as one name: this mpirun does not support host:slots",
        remedy=("`mpirun --version`: Open MPI 3 or later, and no other MPI before it on the PATH; or a hostfile",),
        needs=("versions",),
        source="horovodrun, Open MPI, OpenSSH",
    ),
    Rule(
        code="mpi-daemons-not-started",
        matches={
            r"(?:ORTE|PRTE) was unable to reliably start": "PRTE was unable to reliably start one or more daemons.",
            r"PRTE daemon.{0,60}failed to (?:start|launch)": "PRTE daemon on node n2 failed to start",
        },
        classes=(FailureClass.RENDEZVOUS, FailureClass.NOT_STARTED, FailureClass.FIREWALL),
        confidence=Confidence.LIKELY,
        message="mpirun could not start its daemons on another node",
        remedy=("ssh NODE which orted must work from the launcher's node without a prompt: names, keys, PATH",),
        needs=("reachable", "who-joined"),
        source="Open MPI, PRRTE",
    ),
    Rule(
        code="init-barrier-wait",
        matches={
            r"Waiting in store based barrier.{0,80}rank: (?P<rank>\d+), key: \S+ \(world_size=(?P<world>\d+), worker_count=(?P<came>\d+)": "Waiting in store based barrier to initialize process group for rank: 3, key: store_based_barrier_key:1 (world_size=8, worker_count=5, timeout=0:30:00)",
        },
        role=Role.SYMPTOM,
        classes=(FailureClass.RENDEZVOUS, FailureClass.PROGRAM_ERROR, FailureClass.STRAGGLER, FailureClass.RANK_COUNT),
        message="{came} of {world} ranks have reached the process group's barrier, and wait for the others",
        needs=("who-joined", "stacks", "all-ranks"),
        source="torch distributed_c10d.py; torch 1.8 to 2.1",
        fallback=True,
    ),
    Rule(
        code="master-addr-missing",
        matches={
            r"environment variable MASTER_(?:ADDR|PORT) expected": "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
        },
        classes=(FailureClass.RENDEZVOUS, FailureClass.RANK_COUNT),
        confidence=Confidence.LIKELY,
        message="a rank has no rendezvous address: it was started without a launcher, or lost its environment on the "
        "way",
        remedy=(
            "start it with torchrun, or pass MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE to every rank (srun "
            "--export=ALL, ssh passes none)",
        ),
        needs=("who-joined",),
        source="torch rendezvous.py",
    ),
)
