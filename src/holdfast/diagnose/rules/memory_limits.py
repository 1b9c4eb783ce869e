"""Rules for memory and limits: GPU memory, host memory, /dev/shm, locked memory, open files."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

FREE_MEMORY_FOR_NCCL = (
    "leave 1 to 2 GB of GPU memory to NCCL: smaller batch or activation checkpointing; no other process on the GPU"
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="gpu-out-of-memory",
        lines=(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 1.02 GiB is free.",
            "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity; 29.93 GiB already allocated)",
            "RuntimeError: CUDA error: out of memory",
            "torch.AcceleratorError: CUDA error: out of memory",
            "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
        ),
        pattern=r"CUDA out of memory|CUDA driver error: out of memory|from device: CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cuda runtime error \(2\)|CUDA failure \S+ 'out of memory|OOM when allocating tensor|CUDNN_STATUS_ALLOC_FAILED|(?:torch\.|cuda\.|^|[\s:\]])OutOfMemoryError: (?:CUDA|HIP|XPU|Allocation)|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|RESOURCE_EXHAUSTED: Out of memory|HIP out of memory",
        classes=(FailureClass.OOM_GPU,),
        confidence=Confidence.CERTAIN,
        message="the program ran out of GPU memory",
        remedy=(
            "make the step smaller: micro batch, sequence length, activation checkpointing, sharding",
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True where much is reserved but not allocated",
        ),
        needs=("memory-use",),
        source="torch c10/cuda/CUDACachingAllocator.cpp",
    ),
    Rule(
        code="gpu-memory-in-use",
        lines=(
            "ValueError: Free memory on device cuda:0 (61.53/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, 71.24 GiB).",
        ),
        pattern=r"Free memory on device \S+ \([\d.]+/[\d.]+ GiB\) on startup is",
        classes=(FailureClass.OOM_GPU,),
        confidence=Confidence.LIKELY,
        message="less GPU memory is free than the program reserves at its start: another process holds part of it",
        remedy=(
            "nvidia-smi names that process: end it if it is left over, or lower `gpu_memory_utilization`",
            "on GPUs that share the host's memory, free host memory as well",
        ),
        needs=("memory-use",),
        source="vLLM gpu_worker.py",
    ),
    Rule(
        code="nccl-out-of-gpu-memory",
        lines=(
            "n1:77:91 [6] include/alloc.h:99 NCCL WARN Cuda failure 'out of memory'",
            "n1:77:91 [5] include/alloc.h:228 NCCL WARN Cuda failure 2 'out of memory'",
            "n1:77:91 [6] include/alloc.h:106 NCCL WARN Failed to CUDA calloc 2097152 bytes",
            "n1:77:91 [2] NCCL INFO Failed to CUDA calloc async 4 bytes",
        ),
        pattern=r"Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?(?:m|c)?alloc(?: async)? \d+ bytes",
        classes=(FailureClass.OOM_GPU,),
        confidence=Confidence.CERTAIN,
        message="NCCL found no GPU memory left for its buffers",
        remedy=(FREE_MEMORY_FOR_NCCL, "NCCL_BUFFSIZE=2097152 makes its buffers smaller"),
        needs=("memory-use",),
        versions="all; the error's number since 2.19",
        source="NCCL src/include/alloc.h",
    ),
    Rule(
        code="shm-segment",
        lines=(
            "gpu-7:811:990 [1] include/shm.h:41 NCCL WARN Call to posix_fallocate failed : No space left on device",
            "n1:52:77 [0] misc/shmutils.cc:72 NCCL WARN Call to fallocate failed : No space left on device",
            "n1:52:77 [0] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-a1B2c3 to 33030532 bytes, error: No space left on device (28)",
            "n1:52:77 [0] misc/shmutils.cc:132 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a1B2c3 (size 33030528)",
            "OSError: [Errno 28] No space left on device: '/dev/shm/torch_1234'",
        ),
        pattern=r"fallocate failed ?: .*No space left|shm[_ ]open: No space left|failed to extend \S*/dev/shm/\S+ to \d+ bytes"
        r"|while creating shared memory segment \S+ \(size \d+\)|No space left on device.*/dev/shm|/dev/shm.*No space left",
        classes=(FailureClass.SHM_TOO_SMALL,),
        confidence=Confidence.CERTAIN,
        message="/dev/shm was full",
        remedy=(
            "docker run --shm-size=16g (or --ipc=host)",
            "Kubernetes: volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}], mounted at /dev/shm",
        ),
        needs=("shm",),
        versions="NCCL 2.10 (shm.h), 2.12 to 2.21 (shmutils.cc), 2.22 and later (failed to extend)",
        source="NCCL src/misc/shmutils.cc",
    ),
    Rule(
        code="shm-attach",
        lines=(
            "n1:52:77 [0] misc/shmutils.cc:144 NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-a1B2c3 (size 4194304), error: No such file or directory (2)",
        ),
        pattern=r"while attaching to shared memory segment|Could not unlink shared memory segment|shm_open.{0,60}(?:failed|No such file)",
        classes=(FailureClass.SHM_TOO_SMALL, FailureClass.OTHER),
        message="a rank could not attach to a shared memory segment of another rank on its host: /dev/shm is full, or "
        "not the same for both",
        remedy=("let ranks of one host share /dev/shm and the IPC namespace, or NCCL_SHM_DISABLE=1",),
        needs=("shm",),
        source="NCCL src/misc/shmutils.cc",
    ),
    Rule(
        code="shm-dataloader",
        lines=(
            "RuntimeError: DataLoader worker (pid 4211) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
            "[rank1]: ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_123>: Resource temporarily unavailable (11)",
            "RuntimeError: unable to write to file </torch_210_2231908_3>",
        ),
        pattern=r"killed by signal: Bus error|[Uu]nexpected bus error|insufficient shared memory"
        r"|unable to (?:allocate|mmap|resize|open) shared memory|unable to mmap \d+ bytes from file </torch_|unable to write to file </torch_",
        classes=(FailureClass.SHM_TOO_SMALL,),
        confidence=Confidence.LIKELY,
        message="a DataLoader worker ran out of /dev/shm",
        remedy=(
            "docker run --shm-size=16g, or on Kubernetes an emptyDir with medium: Memory at /dev/shm",
            "fewer workers",
        ),
        needs=("shm",),
        source="torch utils/data, libshm",
    ),
    Rule(
        code="bus-error",
        lines=(
            "Fatal Python error: Bus error",
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -7) local_rank: 1 (pid: 92) of binary: /usr/bin/python",
            "  traceback : Signal 7 (SIGBUS) received by PID 92",
        ),
        pattern=r"Fatal Python error: Bus error|exitcode *: *-7\b|Signal 7 \(SIGBUS\)|\bBus error \(core dumped\)|: Bus error$|terminated with signal SIGBUS|return code = -7\b|exited on signal 7\b|[Ee]xit ?[Cc]ode: *135\b|Caught signal 7 \(Bus error",
        classes=(FailureClass.SHM_TOO_SMALL, FailureClass.STORAGE),
        confidence=Confidence.LIKELY,
        message="a rank died of SIGBUS, as happens when /dev/shm is full",
        remedy=("docker run --shm-size=16g, or on Kubernetes an emptyDir with medium: Memory at /dev/shm",),
        needs=("shm",),
        source="the kernel: a page of a mapped file is not available",
    ),
    Rule(
        code="memory-registration",
        lines=(
            "n1:8:90 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
            "n1:8:90 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr failed",
            "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
            "n1:8:90 [1] NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
            "ib_md.c:364 UCX ERROR ibv_reg_mr(address=0x7f1c, length=8192, access=0xf) failed: Cannot allocate memory",
            "[1,3]<stderr>: Libfabric error: (-12) Cannot allocate memory",
            "Unable to write to EQ: Missing or unavailable event queue. err: Unknown error -12 (-12) prov_errno: Unknown error -12 (-12) prov/efa/src/efa.h:993",
        ),
        pattern=r"ibv_(?:reg_(?:dmabuf_)?mr(?:_iova2?)?|create_\w+|alloc_pd) failed(?: with error (?:12 )?Cannot allocate memory"
        r"|$)|ibv_\w+\([^)]{0,80}\) failed: Cannot allocate memory|RLIMIT_MEMLOCK is \d+ bytes|[Ff]ailed to (?:register|lock) memory.*(?:memlock|ENOMEM|Cannot allocate)"
        r"|Libfabric error: \(-12\)|Failure to post internal receive buffers|prov_errno: .{0,40}\(-12\)|fi_mr_reg.*Cannot allocate memory|Unable to register MR: Cannot allocate|trying to allocate some locked memory|max locked memory.*(?:too low|limited|insufficient)",
        classes=(FailureClass.MEMLOCK,),
        confidence=Confidence.LIKELY,
        message="memory could not be locked for RDMA: the limit on locked memory is too low",
        remedy=(
            "ulimit -l unlimited: limits.conf, LimitMEMLOCK=infinity of the container runtime or slurmd, docker --ulimit memlock=-1",
            "Kubernetes: securityContext: {capabilities: {add: [IPC_LOCK]}}",
        ),
        needs=("memlock",),
        versions="all",
        source="NCCL src/misc/ibvwrap.cc, libibverbs",
    ),
    Rule(
        code="too-many-open-files",
        lines=(
            "n1:8:90 [0] misc/socket.cc:510 NCCL WARN Accept failed: Too many open files",
            "OSError: [Errno 24] Too many open files",
            "RuntimeError: received 0 items of ancdata",
        ),
        pattern=r"[Tt]oo many open files|inotify\w{0,20}.{0,40}No space left|received 0 items of ancdata",
        classes=(FailureClass.MEMLOCK,),
        confidence=Confidence.CERTAIN,
        message="a process reached its limit on open files and sockets",
        remedy=("ulimit -n 1048576 (LimitNOFILE of the service or container runtime)",),
        source="the kernel, EMFILE",
    ),
    Rule(
        code="thread-limit",
        lines=(
            "OpenBLAS blas_thread_init: pthread_create failed for thread 17 of 64: Resource temporarily unavailable",
            "RuntimeError: can't start new thread",
            "n1:8:9 [0] NCCL WARN Error: failed to create thread: Resource temporarily unavailable",
        ),
        pattern=r"pthread_create failed|failed to create thread|Thread creation failed|can't start new thread|fork: (?:retry: )?Resource temporarily unavailable|RLIMIT_NPROC|(?:OSError|fork\w*): \[Errno 11\] Resource temporarily unavailable",
        classes=(FailureClass.MEMLOCK,),
        confidence=Confidence.LIKELY,
        message="a process reached its limit on threads",
        remedy=("ulimit -u unlimited; pids limit of the container (kubelet podPidsLimit, docker --pids-limit)",),
        needs=("memlock",),
        source="the kernel, EAGAIN",
    ),
    Rule(
        code="host-oom-kill",
        lines=(
            "[12345.678901] Out of memory: Killed process 4242 (python) total-vm:123456kB, anon-rss:99999kB, file-rss:0kB",
            "Memory cgroup out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB",
            "python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=985",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step tasks have been OOM Killed.",
            "    Reason:       OOMKilled",
            "Warning  OOMKilling  node/n1  Out of memory: Kill process 4242 (python) score 1985 or sacrifice child",
            "failed to create containerd task: OCI runtime create failed: container init was OOM-killed (memory limit too low?)",
            "Container train exceeded its memory limit and was killed",
            "srun: error: n1: task 3: Out Of Memory",
            "=>> PBS: job killed: vmem 68719476736b exceeded limit 34359738368b",
            "[lsf] TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        ),
        pattern=r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)|Memory cgroup out of memory: Kill|invoked oom-killer|oom-kill:constraint="
        r"|[Dd]etected \d+ oom[-_]kill events?|OOMKilled|oom_reaper: reaped|[1-9]\d* Workers \(tasks /(?: actors\) killed due to memory pressure|\s*$)|OUT_OF_ME\+|OUT_OF_MEMORY\b|Exceeded (?:job|step) memory limit"
        r"|memory\.events.*oom_kill [1-9]|System OOM encountered|OOMKilling|container init was OOM-killed|OOM-killed|memory limit too low|(?:exceeded|over|exceeds) (?:its |the )?(?:cgroup |container )?memory limit|Killed process \d+ \(|[Mm]emory (?:limit|usage).{0,40}OOM|\boom_kill\b [1-9]|srun: error: \S+ tasks? \S+: Out Of Memory|oom_score_adj.{0,40}[Kk]illed|PBS: job killed: [pv]*mem\b|exceeded a memory resource limit|TERM_MEMLIMIT|TERM_SWAP\b",
        classes=(FailureClass.OOM_HOST,),
        confidence=Confidence.CERTAIN,
        message="a process was killed because the host, or the job's memory limit, had no memory left",
        remedy=(
            "raise the memory limit of the pod or Slurm step, or use less: fewer DataLoader workers, smaller shuffle buffers, "
            "no copy of the dataset or checkpoint per rank",
        ),
        source="the kernel, Slurm, PBS, LSF, Kubernetes",
    ),
    Rule(
        code="memory-eviction",
        lines=("The node was low on resource: memory. Threshold quantity: 100Mi, available: 41Mi.",),
        pattern=r"low on resource: \[?memory|NodeHasInsufficientMemory|MemoryPressure\W{1,4}True|had condition: \[?\w*MemoryPressure",
        classes=(FailureClass.OOM_HOST, FailureClass.PREEMPTED),
        confidence=Confidence.LIKELY,
        message="the node ran short of memory, and pods are evicted from it",
        remedy=(
            "set resources.requests.memory to what the rank really uses, so that it is scheduled on a node with "
            "enough memory",
        ),
        needs=("pod-status", "kernel-log"),
        source="kubelet",
    ),
    Rule(
        code="host-out-of-memory",
        lines=(
            "MemoryError",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:83] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes.",
            "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (4000000000,)",
            "OSError: [Errno 12] Cannot allocate memory",
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "(raylet) System memory low at node with IP 10.0.0.1. Used memory (60.10GB) / total capacity (62.00GB) (0.969355) exceeds threshold 0.95",
            "Memory on the node (IP: 10.0.0.1, ID: 5f) where the task was running was 60.10GB / 62.00GB (0.969355), which exceeds the memory usage threshold of 0.95.",
            "n1:8:9 [0] include/alloc.h:50 NCCL WARN Failed to malloc 33554432 bytes",
        ),
        pattern=r"\b_?(?:Array)?MemoryError\b|DefaultCPUAllocator: (?:can't allocate|not enough) memory|\[Errno 12\] Cannot allocate memory"
        r"|node running low on memory|System memory low at node|exceeds the memory usage threshold|std::bad_alloc|NCCL WARN Failed to malloc \d|malloc\(size=\d+\) returned null",
        classes=(FailureClass.OOM_HOST,),
        confidence=Confidence.LIKELY,
        message="the program ran out of host memory",
        remedy=("raise the memory limit, or use less: fewer workers, smaller buffers, stream the data",),
        needs=("kernel-log",),
        source="Python, torch, numpy",
    ),
    Rule(
        code="killed",
        lines=(
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 178) of binary: /opt/conda/bin/python",
            "  traceback : Signal 9 (SIGKILL) received by PID 1234",
            "[2025-01-01 00:00:00,000] [ERROR] [launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
            "command terminated with exit code 137",
            "Killed",
            "train.sh: line 7: 81234 Killed                  python train.py",
            "srun: error: n1: tasks 0-3: Killed",
            "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
        ),
        pattern=r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)|return code = (?:-9|247)\b|exit(?:ed with)? ?code:? 247\b|exit ?code:? 137\b|exit status 137|[Ee]xit [Cc]ode: +137"
        r"|exited on signal 9|status 137\b|died with <Signals.SIGKILL|^(?:\S+: line \d+: +\d+ +)?Killed(?:\s|$)|srun: error: \S+ tasks? \S+: Killed|[Ww]orker died or was killed|terminated with signal SIGKILL",
        classes=(FailureClass.OOM_HOST, FailureClass.PREEMPTED, FailureClass.NODE_LOST),
        message="a rank was killed with SIGKILL; the line alone does not show the sender",
        remedy=(
            "if the kernel log shows it: raise the memory limit or use less host memory",
            "if it does not: look for preemption or a cancelled job",
        ),
        needs=("kernel-log", "who-sent-signal"),
        source="torch elastic, DeepSpeed, mpirun, Kubernetes",
    ),
    Rule(
        code="data-worker-killed",
        lines=(
            "RuntimeError: DataLoader worker (pid 4211) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid(s) 4211, 4212) exited unexpectedly",
            "RuntimeError: DataLoader worker (pid 4211) is killed by signal: Segmentation fault.",
        ),
        pattern=r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[\dx.]{1,12})[\d, ]*\) (?:is killed by signal: (?:Killed|Segmentation fault|Aborted|Terminated)|exited unexpectedly)|Pin memory thread exited unexpectedly",
        classes=(FailureClass.OOM_HOST, FailureClass.PROGRAM_ERROR, FailureClass.KILLED),
        message="a data-loading process of a rank (pid {pid}) died; the line does not show the reason",
        remedy=(
            "if the kernel log shows it: raise the memory limit, or fewer workers (num_workers) and less prefetching",
            "else load the same sample with num_workers=0, which shows its error",
        ),
        needs=("kernel-log", "first-traceback"),
        source="torch utils/data",
    ),
    Rule(
        code="dataloader-timeout",
        lines=("RuntimeError: DataLoader timed out after 120 seconds",),
        pattern=r"DataLoader timed out after",
        classes=(FailureClass.STORAGE, FailureClass.STRAGGLER, FailureClass.HANG_UNKNOWN, FailureClass.PROGRAM_ERROR),
        message="a data-loading process returned no batch within its timeout",
        remedy=("py-spy dump of the loader's workers while it waits: a file server, a lock, or the sample itself",),
        needs=("stacks", "kernel-log"),
        source="torch utils/data",
    ),
    Rule(
        code="launcher-sighup",
        lines=(
            "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers",
            "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 92 closing signal SIGHUP",
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 92 got signal: 1",
        ),
        pattern=r"Received 1 death signal|closing signal SIGHUP|got signal: 1\b|Signal 1 \(SIGHUP\)|exitcode *: *-1\b|exited on signal 1\b",
        classes=(FailureClass.KILLED,),
        confidence=Confidence.LIKELY,
        message="the launcher got SIGHUP: the terminal or ssh session that started it was closed",
        remedy=(
            "start it in a session that stays open: tmux, `setsid` or a batch job (`nohup` is not enough: torchrun "
            "sets its own handler)",
        ),
        needs=("who-sent-signal",),
        source="the kernel, torch elastic",
    ),
    Rule(
        code="terminated",
        lines=(
            "WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 92 closing signal SIGTERM",
            "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15",
            "  exitcode  : -15 (pid: 93)",
            "  traceback : Signal 15 (SIGTERM) received by PID 93",
        ),
        pattern=r"closing signal SIG(?:TERM|INT)|got signal: (?:15|2)\b|exitcode *: *-15\b|Signal 15 \(SIGTERM\)|return code = -15\b"
        r"|exit ?code:? 143\b|exited on signal 15|Received Signals\.SIGTERM|Termination signal received|Signal 2 \(SIGINT\)|[Bb]ypassing (?:signal \d|SIGTERM)|srun: error: \S+ tasks? \S+: Terminated|srun: Force Terminated|terminated with signal SIGTERM|[Rr]eceived SIGTERM",
        role=Role.SYMPTOM,
        classes=(FailureClass.PREEMPTED,),
        message="a rank was stopped, as its agent does after another rank has failed",
        needs=("who-sent-signal", "all-ranks"),
        source="torch elastic",
    ),
)
