"""Rules for messages of torch and other launchers: watchdog, store, elastic, NCCL errors reported by torch, world
sizes.

A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import Role, Rule

HANG_CLASSES = (FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER, FailureClass.HANG_UNKNOWN)

LAUNCHER_ROOT_CAUSE = Rule(
    code="launcher-root-cause",
    lines=("Root Cause (first observed failure):",),
    pattern=r"Root Cause \(first observed failure\):",
    role=Role.CONTEXT,
    message="the launcher saw this rank end first ({how}), and no line gives the reason",
    source="torch elastic",
)

LAUNCHER_STARTED = Rule(
    code="launcher-started",
    lines=(
        "W1120 10:00:00.000000 811 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed.",
        "INFO:torch.distributed.launcher.api:Starting elastic_operator with launch configs:",
        "[2026-11-20 10:00:00,123] [INFO] [runner.py:568:main] cmd = /usr/bin/python3 -u -m deepspeed.launcher.launch --world_info=e30= train.py",
        "The following values were not passed to `accelerate launch` and had defaults set instead:",
        "+ torchrun --nnodes=2 --nproc-per-node=8 train.py",
        "+ srun --label python train.py",
    ),
    pattern=r"Setting OMP_NUM_THREADS environment variable for each process|Starting elastic_operator with launch configs|\[runner\.py:\d+:main\] cmd = |values were not passed to `accelerate launch`|The module torch\.distributed\.launch is deprecated"
    r"|^(?:\S{1,80} )?\++ (?:exec )?(?:\S{0,80}/)?(?:torchrun|srun|mpirun|mpiexec|deepspeed|accelerate launch|python3? -m (?:torch\.distributed\.\w+|accelerate\.commands\.launch)) ",
    role=Role.CONTEXT,
    message="a launcher started",
    source="torch elastic, DeepSpeed, accelerate, a shell's trace",
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="watchdog-timeout",
        lines=(
            "[Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4193, OpType=ALLREDUCE, NumelIn=8388608, NumelOut=8388608, Timeout(ms)=600000) ran for 600017 milliseconds before timing out.",
            "[rank3]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=_ALLGATHER_BASE, NumelIn=2, NumelOut=16, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
            "RuntimeError: [Rank 0] Caught collective operation timeout: WorkNCCL(OpType=BROADCAST, TensorShape=[1], Timeout(ms)=1800000) ran for 1802710 milliseconds before timing out.",
        ),
        pattern=r"(?:Rank (?P<rank>\d+)\] ?)?(?:Watchdog c|C)aught collective operation timeout: WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
        r"(?:, NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+))?(?:, TensorShape=\[[^\]]*\])?, Timeout\(ms\)=(?P<timeout_ms>\d+)\)(?: ran for (?P<ran_ms>\d+))?",
        classes=HANG_CLASSES,
        also_possible=(
            FailureClass.NETWORK_LOSS,
            FailureClass.ACS_IOMMU,
            FailureClass.PROGRAM_ERROR,
            FailureClass.OOM_GPU,
            FailureClass.GPU_XID,
        ),
        message="a rank waited for the others in a collective ({op}) until its timeout; this rank is one that waited",
        remedy=("find the rank that never joined: it printed no such line, or its last enqueued work is lower",),
        needs=("last-collectives", "all-ranks"),
        versions="torch 1.13 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    Rule(
        code="collective-status",
        lines=(
            "[PG 0 Rank 2] Timeout at NCCL work: 4193, last enqueued NCCL work: 4196, last completed NCCL work: 4192.",
            "[PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected by watchdog at work sequence id: 8 PG status: last enqueued work: 8, last completed work: 7",
        ),
        pattern=r"(?:PG (?:ID )?(?P<group>\S+)[^\]]{0,60}? Rank (?P<rank>\d+)\])?.{0,120}last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)",
        classes=HANG_CLASSES,
        also_possible=(
            FailureClass.NETWORK_LOSS,
            FailureClass.ACS_IOMMU,
            FailureClass.PROGRAM_ERROR,
            FailureClass.OOM_GPU,
            FailureClass.GPU_XID,
        ),
        message="a rank was waiting in collective {enqueued}; it had completed {completed}",
        needs=("last-collectives", "all-ranks"),
        remedy=("compare the last enqueued work of all ranks: the lowest is the one the others waited for",),
        versions="torch 2.3 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    Rule(
        code="monitored-barrier",
        lines=(
            "RuntimeError: Rank 3 failed to pass monitoredBarrier in 300000 ms",
            "RuntimeError: [Rank 0]: Ranks 2, 5 failed to pass monitoredBarrier in 7200000 ms",
            "Missing ranks:",
        ),
        pattern=r"Ranks? (?P<rank>\d+)[\d, ]* failed to pass monitoredBarrier|^Missing ranks:|\bMissing ranks: ?\n?|waiting for remainder of ranks for more than \d+ seconds",
        classes=(FailureClass.COLLECTIVE_MISMATCH, FailureClass.STRAGGLER),
        confidence=Confidence.LIKELY,
        message="some ranks never reached a collective in which the others waited",
        remedy=("check what the missing ranks did; all ranks must make the same calls in the same order",),
        needs=("stacks", "all-ranks"),
        source="torch ProcessGroupGloo.cpp, Horovod stall_inspector.cc",
    ),
    Rule(
        code="collective-mismatch",
        lines=(
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=6, OpType=BROADCAST), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=6, OpType=ALLREDUCE).",
            "n1:8:9 [0] transport/net_ib.cc:1200 NCCL WARN NET/IB : req 0/1 tag 7 peer 10.0.0.2<1> collective mismatch error, local size 4 remote 8",
            "n1:8:9 [0] transport/net_socket.cc:467 NCCL WARN NET/Socket : peer 10.0.0.2<1> message truncated : receiving 1048576 bytes instead of 65536. If you believe your socket network is in healthy state, there may be a mismatch in collective sizes",
            "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 28 vs 16. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
            "[rank1]: accelerate.utils.operations.DistributedOperationException: Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid.",
            "Mismatched allreduce tensor shapes: One rank sent a tensor of shape [10], but another rank sent a tensor of shape [12].",
        ),
        pattern=r"Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes|distributed collective mismatch|collective mismatch error|message truncated : receiving \d+ bytes instead of \d+|[Mm]ismatched (?:allreduce|allgather|broadcast|collective|data type)"
        r"|[Cc]ollective\w* (?:sizes?|operations?|types?|shapes?) (?:do(?:es)? not|don't|mis)match|(?:tensor )?(?:shapes?|sizes?) mismatch(?:es)? (?:across|between) (?:ranks|devices|processes)|[Ss]hapes across (?:devices|ranks|processes) must|op type mismatch|Collective desync detected"
        r"|Error: (?:to be reduced|Expected).{0,60}across ranks|CollectiveFingerPrint\(.*but Rank|MISMATCH.{0,60}ranks? (?:have )?launched",
        classes=(FailureClass.COLLECTIVE_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="ranks called different collectives, or the same with different sizes",
        remedy=(
            "make every rank take the same branch and the same shapes; TORCH_DISTRIBUTED_DEBUG=DETAIL names the "
            "first call that differs",
        ),
        needs=("last-collectives",),
        source="torch ProcessGroupWrapper.cpp, NCCL net_ib.cc and net_socket.cc, Horovod",
    ),
    Rule(
        code="parameter-mismatch",
        lines=(
            "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 160 params, while rank 0 has inconsistent 0 params.",
            "RuntimeError: [1]: params[0] in this process with sizes [65] appears not to match sizes of the same param in process 0.",
        ),
        pattern=r"DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param|inconsistent \d+ params",
        classes=(FailureClass.COLLECTIVE_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="ranks do not run the same model: their parameters differ",
        remedy=("build the same model on every rank, from the same configuration and seed",),
        needs=("all-ranks",),
        source="torch reducer.cpp",
    ),
    Rule(
        code="unused-parameters",
        lines=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons:",
            "Parameter indices which did not receive grad for rank 3: 282 283",
        ),
        pattern=r"[Pp]arameter(?:s| indices) which did not receive grad for rank (?P<rank>\d+)|Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        classes=(FailureClass.PROGRAM_ERROR, FailureClass.COLLECTIVE_MISMATCH),
        confidence=Confidence.LIKELY,
        message="parameters took no part in the loss, or took part twice, so DDP cannot finish its reduction",
        remedy=(
            "DistributedDataParallel(find_unused_parameters=True), or remove unused parameters; static_graph=True "
            "with checkpointing",
        ),
        needs=("all-ranks",),
        source="torch reducer.cpp",
    ),
    Rule(
        code="uneven-inputs",
        lines=("Detected at least one rank that exhausted inputs. Throwing across all ranks.",),
        pattern=r"(?:rank that )?exhausted inputs|(?:uneven|different|unequal) (?:number of )?(?:inputs|batches|samples|steps) (?:across|on|between|per) ranks|ranks have a different number of batches",
        classes=(FailureClass.COLLECTIVE_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="ranks ran out of data at different steps",
        remedy=("drop_last=True, equal shards, or torch.distributed.algorithms.Join",),
        needs=("last-collectives",),
        source="torch Join, data pipelines",
    ),
    Rule(
        code="gloo-timeout",
        lines=(
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
            "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:136] Timed out waiting 1800000ms for send operation to complete",
            "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cpu//0/rank_3",
            "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=4, worker_count=2, timeout=0:30:00)",
        ),
        pattern=r"Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure|wait timeout after \d+ms, keys: (?P<key>\S+)|in store based barrier on rank: ?(?P<rank>\d+)|Timeout waiting for key: \S+"
        r"|Socket Timeout\b|store->get\('?\d+'?\).{0,40}timed? ?out|timed out after \d+ms? waiting for.{0,20}(?:store|key)",
        classes=(
            FailureClass.STRAGGLER,
            FailureClass.RENDEZVOUS,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.RANK_COUNT,
        ),
        also_possible=(
            FailureClass.WRONG_INTERFACE,
            FailureClass.FIREWALL,
            FailureClass.PROGRAM_ERROR,
            FailureClass.OOM_HOST,
        ),
        message="a rank waited for another one that did not come in time",
        remedy=(
            "check what the awaited rank did meanwhile; long work on one rank needs a longer timeout of that group",
        ),
        needs=("all-ranks", "step-times", "who-joined"),
        source="Gloo unbound_buffer.cc, torch TCPStore",
    ),
    Rule(
        code="unique-id-timeout",
        lines=(
            "RuntimeError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0:1', but store->get('0:1') got error: Socket Timeout",
        ),
        pattern=r"\[(?P<rank>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.STRAGGLER,
            FailureClass.PROGRAM_ERROR,
            FailureClass.RENDEZVOUS,
            FailureClass.FIREWALL,
            FailureClass.OOM_HOST,
        ),
        also_possible=(FailureClass.WRONG_INTERFACE, FailureClass.RANK_COUNT, FailureClass.COLLECTIVE_MISMATCH),
        message="a rank waited for rank 0 to begin the first collective, and rank 0 did not come",
        needs=("peer-log", "stacks"),
        versions="torch 1.10 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    Rule(
        code="too-many-workers",
        lines=(
            "Waiting in store based barrier to initialize process group for rank: 0, key: store_based_barrier_key:1 (world_size=8, worker_count=13, timeout=0:30:00)",
            "FileExistsError: File already exists: /tmp/run/dist_store",
        ),
        pattern=r"world_size=1, worker_count=(?:[2-9]|\d\d+)\b|world_size=2, worker_count=(?:[3-9]|\d\d+)\b|world_size=[34], worker_count=(?:[5-9]|\d\d+)\b|world_size=[5-8], worker_count=(?:9|\d\d+)\b"
        r"|world_size=\d, worker_count=\d\d+|world_size=\d\d, worker_count=\d{3,}|File already exists: \S*(?:dist|init|store)",
        classes=(FailureClass.RANK_COUNT,),
        confidence=Confidence.LIKELY,
        message="more workers checked in than there are ranks: a store is left over from an earlier run",
        remedy=(
            "delete the store's file (or use another port or id) before each run; better: tcp:// or torchrun's rendezvous",
        ),
        needs=("who-joined",),
        source="torch distributed_c10d.py",
    ),
    Rule(
        code="rank-count",
        lines=(
            "n1:8:9 [0] bootstrap.cc:99 NCCL WARN Bootstrap Root : mismatch in rank count from procs 8 : 16",
            "n1:8:9 [0] bootstrap.cc:110 NCCL WARN Bootstrap Root : rank 3 of 8 ranks has already checked in",
            "n1:8:9 [0] init.cc:1 NCCL WARN Invalid rank requested : 8/8",
            "n1:8:9 [0] init.cc:800 NCCL WARN Failed to determine local ranks rank 3 hostHash 1a00 pidHash 2b00 localRank -1 localRanks 8 localRank0 -1",
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set",
            "AssertionError: world size (12) is not divisible by tensor_model_parallel_size (8)",
            "ValueError: Invalid node_rank 2, node_rank should be in the interval [0, 1]",
        ),
        pattern=r"mismatch in (?:rank count|info) from procs|ranks has already checked in|Invalid rank requested|invalid device count| exceeds ndev=|improper usage of ncclCommInitRank|nLocals = \d+ should be|Group creation failed: \d+ vs|localId \d+ is out of range|exceeds total ranks|Failed to determine (?:intra|local)[\w ]* ranks|environment variable (?:RANK|WORLD_SIZE|LOCAL_RANK) expected"
        r"|world[_ ]size ?\(?\d*\)? ?(?:is not|must be|should be) (?:divisible|a multiple|equal)|world_size.{0,40}(?:does not match|mismatch)|rank.{0,20}(?:>=|exceeds|must be less than) (?:the )?world[_ ]size"
        r"|joined twice|Invalid node_rank|node_rank.{0,30}(?:out of range|must be)|local_rank.{0,40}(?:>=|exceeds).{0,20}(?:nproc|device_count)",
        classes=(FailureClass.RANK_COUNT,),
        confidence=Confidence.LIKELY,
        message="the ranks disagree on the world size, or two have one rank",
        remedy=(
            "WORLD_SIZE = nodes x ranks per node on every node; RANK unique; one launcher starts the ranks, not two",
        ),
        needs=("who-joined",),
        versions="all",
        source="NCCL src/bootstrap.cc, torch rendezvous.py",
    ),
    Rule(
        code="duplicate-gpu",
        lines=(
            "n1:8:9 [0] init.cc:779 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
            "n1:8:9 [0] init.cc:779 NCCL WARN Multiple Ranks are using the same GPU/Partition",
        ),
        pattern=r"Duplicate GPU detected ?: rank (?P<rank>\d+)|Multiple [Rr]anks (?:are|detected) using the same GPU|multiple ranks (?:per gpu|using the same NVML device)",
        classes=(FailureClass.RANK_COUNT, FailureClass.PROGRAM_ERROR),
        message="two ranks share one GPU: more ranks than GPUs on the node, or a program that selects the same one in "
        "every rank",
        remedy=(
            "--nproc-per-node no larger than the visible GPUs; torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        ),
        needs=("gpus-seen",),
        versions="all; 2.30 and later: Multiple Ranks",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="device-ordinal",
        lines=("RuntimeError: CUDA error: invalid device ordinal",),
        pattern=r"invalid device ordinal|device < num_gpus|AssertionError: Invalid device id|torch\.cuda\.device_count\(\) is \d",
        classes=(FailureClass.RANK_COUNT, FailureClass.PROGRAM_ERROR),
        also_possible=(FailureClass.DRIVER,),
        message="a rank selected a GPU that it does not see: more ranks than GPUs on the node, or the wrong number in "
        "the program",
        remedy=(
            "--nproc-per-node no larger than the visible GPUs; torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        ),
        needs=("gpus-seen",),
        source="CUDA",
    ),
    Rule(
        code="nccl-version",
        lines=(
            "n1:8:9 [0] init.cc:1 NCCL WARN Mismatched NCCL version detected : rank 3 version 22005 rank 0 version 21805",
            "n1:8:9 [0] NCCL WARN Mismatched NCCL git versions detected: rank 0 fingerprint 0xabc, rank 3 fingerprint 0xdef",
        ),
        pattern=r"Mismatched NCCL (?:git )?versions? detected",
        classes=(FailureClass.VERSION_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="ranks have loaded different versions of NCCL",
        remedy=("the same image on every node, and no other libnccl on LD_LIBRARY_PATH or in LD_PRELOAD",),
        needs=("versions",),
        versions="all; git versions: 2.29 and later",
        source="NCCL src/init.cc, src/bootstrap.cc",
    ),
    Rule(
        code="bootstrap-message-corrupt",
        lines=(
            "n1:8:9 [0] bootstrap.cc:80 NCCL WARN Message truncated : received 1024 bytes instead of 256",
            "n1:8:9 [0] NCCL WARN ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)",
        ),
        pattern=r"Message truncated : received \d+(?:,\d+)? bytes instead of|with family \d+ is neither AF_INET",
        classes=(
            FailureClass.VERSION_MISMATCH,
            FailureClass.WRONG_INTERFACE,
            FailureClass.RANK_COUNT,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.OTHER,
        ),
        message="ranks cannot parse each other's bootstrap messages: different NCCL versions, different calls, invalid "
        "addresses, or an NCCL bug",
        remedy=(
            "the same image on every node; the same order of creating groups on every rank",
            "if all have one version and it happens now and then: use another version (2.19.3 mixes such messages up)",
        ),
        needs=("versions", "interfaces"),
        versions="all",
        source="NCCL src/bootstrap.cc, src/misc/socket.cc",
    ),
    Rule(
        code="library-version",
        lines=(
            "ImportError: /opt/venv/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
            "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "OSError: /opt/venv/lib/libcusparse.so.12: symbol __nvJitLinkComplete_12_4 version libnvJitLink.so.12 not defined in file libnvJitLink.so.12 with link time reference",
            "OSError: libnccl.so.2: cannot open shared object file: No such file or directory",
            "RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA major versions.",
            "AttributeError: module 'torch.distributed' has no attribute 'device_mesh'",
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.2 does not match the version torch was compiled with 12.1",
        ),
        pattern=r"undefined symbol: |(?:libcud\w+|libnccl|libc10|libtorch\w*|libnvidia-ml|libmpi|libcublas\w*|libcudnn\w*)\.so\S*: cannot open shared object|compiled with different CUDA major|CUDA capability sm_\d+ is not compatible|mismatches the version that was used to compile"
        r"|no kernel image is available|device kernel image is invalid|named symbol not found|invalid device function|CUDA missing symbol|PFN functions not found|version `\w+[_\d.]+' not found|not defined in file \S+ with link time reference|symbol lookup error: |module 'torch\S*' has no attribute|cannot import name '\w+' from '(?:torch|transformers|megatron|deepspeed|flash_attn|vllm)"
        r"|NCCL library (?:version )?is (?:too old|not backwards compatible)|compiled with (?:too old )?(?:version of )?NCCL|PyTorch and torch\w+ (?:were|was) compiled|incompatible with (?:this|your) (?:version|installed)"
        r"|was compiled (?:with|against) (?:an?other|different|NumPy)|cuDNN version incompatibility|NCCL version mismatch|ptxas fatal|RuntimeError: operator \S+ does not exist|CUDAMismatchException",
        classes=(FailureClass.VERSION_MISMATCH,),
        confidence=Confidence.LIKELY,
        message="a library is incompatible with the library that loads it",
        remedy=(
            "use matching versions of torch, CUDA, NCCL and what was compiled against them; keep other CUDA "
            "libraries off LD_LIBRARY_PATH",
        ),
        needs=("versions",),
        source="the dynamic linker, Python imports",
    ),
    Rule(
        code="watchdog-stuck",
        lines=(
            "[rank5]:[F1120 10:00:00 ProcessGroupNCCL.cpp:1250] [PG 0 Rank 5] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ),
        pattern=r"watchdog (?:thread )?got stuck for (?P<seconds>\d+) ?(?:s|seconds)|[Hh]eartbeat monitor timed out|[Tt]erminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang",
        classes=(FailureClass.HANG_UNKNOWN, FailureClass.GPU_XID, FailureClass.PROGRAM_ERROR),
        also_possible=(
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.STRAGGLER,
            FailureClass.ACS_IOMMU,
            FailureClass.NETWORK_LOSS,
        ),
        message="torch's own watchdog was stuck: a CUDA or NCCL call did not return, or held the GIL",
        remedy=("py-spy dump --native --pid PID on that rank; TORCH_NCCL_ENABLE_MONITORING=0 only for debugging",),
        needs=("stacks", "xid"),
        versions="torch 2.2 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    Rule(
        code="engine-worker-timeout",
        lines=(
            "INFO 11-20 10:00:00 shm_broadcast.py:410] No available shared memory broadcast block found in 60 second.",
            "TimeoutError: RPC call to execute_model timed out.",
            "lightning.fabric.utilities.exceptions.DeadlockDetectedException: DeadLock detected from rank: 0",
        ),
        pattern=r"No available (?:shared memory broadcast )?block found in \d+ second|RPC call to \w+ timed out|DeadLock detected from rank",
        classes=(FailureClass.HANG_UNKNOWN, FailureClass.STRAGGLER, FailureClass.COLLECTIVE_MISMATCH),
        also_possible=(
            FailureClass.ACS_IOMMU,
            FailureClass.NETWORK_LOSS,
            FailureClass.GPU_XID,
            FailureClass.OOM_HOST,
            FailureClass.PROGRAM_ERROR,
        ),
        message="one process waited for others of its group that did not answer",
        remedy=("py-spy dump --pid PID of each worker while it hangs",),
        needs=("stacks", "all-ranks", "acs"),
        source="vLLM, Lightning",
    ),
    Rule(
        code="nccl-unhandled",
        lines=(
            "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:911, unhandled system error, NCCL version 2.7.8",
            "n1: Test NCCL failure common.cu:958 'unhandled system error'",
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        ),
        pattern=r"unhandled system error|ncclSystemError\b|NCCL_ERROR_SYSTEM_ERROR",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.SHM_TOO_SMALL,
            FailureClass.WRONG_INTERFACE,
            FailureClass.FIREWALL,
            FailureClass.MEMLOCK,
            FailureClass.NETWORK_LOSS,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.DRIVER,
            FailureClass.VERSION_MISMATCH,
        ),
        message="an NCCL call to the system or the network failed; this line only reports it: in a container mostly "
        "/dev/shm, between nodes interface or firewall",
        needs=("nccl-warn", "shm", "interfaces"),
        versions="all",
        source="torch NCCLUtils.hpp, nccl-tests common.cu",
    ),
    Rule(
        code="nccl-unhandled-cuda",
        lines=(
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error, NCCL version 2.18.1",
            "ncclUnhandledCudaError: Call to CUDA function failed.",
        ),
        pattern=r"unhandled cuda error|ncclUnhandledCudaError\b|NCCL_ERROR_UNHANDLED_CUDA",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.VERSION_MISMATCH,
            FailureClass.OOM_GPU,
            FailureClass.DRIVER,
            FailureClass.RANK_COUNT,
            FailureClass.GPU_XID,
            FailureClass.PROGRAM_ERROR,
            FailureClass.ACS_IOMMU,
            FailureClass.SHM_TOO_SMALL,
        ),
        message="a CUDA call of NCCL failed; this line only reports it: mostly a driver that is too old, or no GPU "
        "memory left",
        needs=("nccl-warn", "versions", "memory-use"),
        versions="all",
        source="torch NCCLUtils.hpp, nccl-tests common.cu",
    ),
    Rule(
        code="nccl-internal",
        lines=(
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1251, internal error, NCCL version 2.14.3",
            "ncclInternalError: Internal check failed.",
        ),
        pattern=r"ncclInternalError\b|NCCL (?:[Ee]rror|failure).{0,120}internal error|nccl[A-Z]\w+ failed.{0,60}internal error|NCCL_ERROR_INTERNAL",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.VERSION_MISMATCH,
            FailureClass.WRONG_INTERFACE,
            FailureClass.OTHER,
            FailureClass.RANK_COUNT,
            FailureClass.DRIVER,
            FailureClass.RDMA_DEVICE_MISSING,
            FailureClass.FIREWALL,
        ),
        message="a check inside NCCL failed; this line only reports it: a plugin or topology of another version, or an "
        "unusable interface",
        needs=("nccl-warn", "versions", "interfaces"),
        versions="all",
        source="torch NCCLUtils.hpp, nccl-tests common.cu",
    ),
    Rule(
        code="nccl-invalid",
        lines=(
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.18.1",
            "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:911, invalid argument, NCCL version 2.7.8",
            "ncclInvalidArgument: Invalid value for an argument.",
        ),
        pattern=r"NCCL (?:[Ee]rror|failure).{0,120}invalid (?:usage|argument)|nccl[A-Z]\w+ failed.{0,60}invalid (?:usage|argument)|NCCL_ERROR_INVALID_|ncclInvalid(?:Usage|Argument)",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.RANK_COUNT,
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.VERSION_MISMATCH,
            FailureClass.DRIVER,
        ),
        also_possible=(FailureClass.PROGRAM_ERROR, FailureClass.WRONG_INTERFACE),
        message="the program used NCCL in an unsupported way: two ranks on one GPU, a rank beyond the world size, sizes "
        "that differ",
        needs=("nccl-warn",),
        versions="all",
        source="torch NCCLUtils.hpp",
    ),
    Rule(
        code="distributed-exception",
        lines=(
            "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
            "RuntimeError: NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective operation timeout",
            "ConnectionResetError: [Errno 104] Connection reset by peer",
        ),
        pattern=r"Dist(?:Backend|Network|Store)Error|NCCL communicator (?:was|is) aborted|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|\bEOFError\b|tensorpipe/|Last error:$|NCCL error in: ",
        role=Role.SYMPTOM,
        classes=(FailureClass.PROGRAM_ERROR, FailureClass.OOM_HOST, FailureClass.FIREWALL, FailureClass.RENDEZVOUS),
        also_possible=(
            FailureClass.NETWORK_LOSS,
            FailureClass.OOM_GPU,
            FailureClass.WRONG_INTERFACE,
            FailureClass.SHM_TOO_SMALL,
        ),
        message="a rank's communication failed, mostly because of another rank",
        needs=("nccl-warn", "all-ranks"),
        versions="torch 2.0 and later",
        source="torch ProcessGroupNCCL.cpp",
        fallback=True,
    ),
    LAUNCHER_STARTED,
    LAUNCHER_ROOT_CAUSE,
    Rule(
        code="child-failed",
        lines=(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.",
            "torch.multiprocessing.spawn.ProcessRaisedException:",
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 1234) of binary: /usr/bin/python3",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
            "[launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        ),
        pattern=r"ChildFailedError|returned non-zero exit status|ProcessRaisedException|ProcessExitedException|exitcode *: *1\b|To enable traceback see|exits with return code = [1-9]\d?\b|exited with exit code [1-9]\b"
        r"|Exception raised from \w+ at|terminated with exit code 1\b|srun: error: .{0,60}Exited with exit code|torch\.distributed\.elastic\.\S*: \[FAILED\]|MPI_ABORT was invoked on rank|BAD TERMINATION OF ONE OF YOUR APPLICATION|processes? (?:exited with|returned a) non-zero|Child process with PID \d+ terminated with code|replica\(s\) failed\b|[Kk]illing subprocess \d",
        role=Role.SYMPTOM,
        classes=(FailureClass.PROGRAM_ERROR,),
        also_possible=(
            FailureClass.OOM_GPU,
            FailureClass.VERSION_MISMATCH,
            FailureClass.RENDEZVOUS,
            FailureClass.RANK_COUNT,
            FailureClass.NAN_DATA,
        ),
        message="a rank ended with an error, and its launcher reports it; the rank's own log gives the reason",
        needs=("first-traceback", "all-ranks"),
        source="torch elastic, DeepSpeed, srun",
    ),
    Rule(
        code="aborted",
        lines=(
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -6) local_rank: 3 (pid: 94) of binary: /usr/bin/python",
            "  traceback : Signal 6 (SIGABRT) received by PID 94",
            "terminate called after throwing an instance of 'c10::DistBackendError'",
            "To avoid data inconsistency, we are taking the entire process down.",
        ),
        pattern=r"exitcode *: *-6\b|Signal 6 \(SIGABRT\)|terminate called after throwing|taking the entire process down|Some NCCL operations have failed or timed out|return code = -6\b|Fatal Python error: Aborted|exited on signal 6|srun: error: \S+ tasks? \S+: Aborted|terminated with signal SIGABRT",
        role=Role.SYMPTOM,
        classes=HANG_CLASSES,
        also_possible=(
            FailureClass.PROGRAM_ERROR,
            FailureClass.GPU_XID,
            FailureClass.OOM_GPU,
            FailureClass.NETWORK_LOSS,
        ),
        message="a rank aborted itself, as NCCL's watchdog does",
        needs=("first-traceback", "last-collectives"),
        source="torch",
    ),
    Rule(
        code="segfault",
        lines=(
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: 3 (pid: 94) of binary: /usr/bin/python",
            "Fatal Python error: Segmentation fault",
            "[1,3]<stderr>:!!!!!!! Segfault encountered !!!!!!!",
            "[n1:1234 :0:1234] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
        ),
        pattern=r"exitcode *: *-11\b|Signal 11 \(SIGSEGV\)|Segmentation fault|Segfault encountered|terminated with signal SIGSEGV|return code = -11\b|exited on signal 11|[Ee]xit ?[Cc]ode: *139\b|exit ?code 139\b",
        classes=(FailureClass.PROGRAM_ERROR, FailureClass.VERSION_MISMATCH, FailureClass.OTHER),
        also_possible=(FailureClass.DRIVER, FailureClass.GPU_XID, FailureClass.SHM_TOO_SMALL),
        message="a rank died of a segmentation fault in native code",
        remedy=("look for incompatible libraries; undo the last upgrade; always the same node: test its memory",),
        needs=("native-stack", "versions"),
        source="the kernel",
    ),
    Rule(
        code="comm-rank",
        lines=(
            "n1:8:9 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 1b000 commId 0xabc - Init START",
            "n1:8:9 [0] NCCL INFO comm 0x55 rank 3 nranks 8 cudaDev 3 busId 1b000 - Init COMPLETE",
        ),
        pattern=r"comm \S+ rank (?P<rank>\d+) nranks (?P<world>\d+) .*?(?:commId (?P<comm>0x[0-9a-f]+) .*?)?- Init (?P<state>START|COMPLETE)",
        role=Role.CONTEXT,
        message="a rank entered or finished NCCL's initialisation",
        versions="COMPLETE: all; START: 2.18.3 and later",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="nccl-started",
        lines=(
            "NCCL version 2.28.9+cuda12.9",
            "(Worker pid=811) INFO 10:00:00 [pynccl.py:113] vLLM is using nccl==2.28.9",
        ),
        pattern=r"^NCCL version \d|NCCL INFO NCCL version \d|vLLM is using nccl==\d",
        role=Role.CONTEXT,
        message="NCCL was loaded, and began to set up a communicator",
        versions="all",
        source="NCCL src/init.cc, vLLM pynccl.py",
    ),
    Rule(
        code="world-size-logged",
        lines=(
            "Initializing distributed: GLOBAL_RANK: 5, MEMBER: 6/48",
            "RANK=3 LOCAL_RANK=3 WORLD_SIZE=16 MASTER_ADDR=n0",
            "+ torchrun --nnodes=2 --nproc-per-node=8 train.py",
        ),
        pattern=r"(?:--|\b)(?P<name>WORLD_SIZE|nnodes)[=: ]{1,2}['\"]?(?P<said>\d{1,7})\b|(?:GLOBAL_RANK: (?P<rank>\d{1,7}), )?MEMBER: \d+/(?P<members>\d{1,7})\b",
        role=Role.CONTEXT,
        message="the number of ranks or nodes that a process was given",
        source="torchrun, Lightning, the job's script",
    ),
    Rule(
        code="watchdog-frames",
        lines=(
            "frame #1: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<std::chrono::duration<long, std::ratio<1l, 1000l> > >) + 0x1d2 (0x7f in /opt/venv/lib/libtorch_cuda.so)",
            "Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:565 (most recent call first):",
            "[rank1]:[E ProcessGroupNCCL.cpp:1645] [PG 0 Rank 1] Received a dump signal due to a collective timeout from this local rank and we will try our best to dump the debug info.",
            "[PG ID 0 PG GUID 0(default_pg) Rank 3] Observed flight recorder dump signal from another rank via TCPStore.",
            "[Rank 2] Watchdog caught collective operation timeout:",
        ),
        pattern=r"WorkNCCL::checkTimeout|raised from checkTimeout|due to a collective timeout|(?:Rank (?P<rank>\d+)\] )?Observed flight recorder dump signal|[Cc]aught collective operation timeout(?:$|[^:]|:\s*$)",
        role=Role.SYMPTOM,
        classes=(
            FailureClass.COLLECTIVE_MISMATCH,
            FailureClass.STRAGGLER,
            FailureClass.HANG_UNKNOWN,
            FailureClass.NETWORK_LOSS,
            FailureClass.ACS_IOMMU,
            FailureClass.PROGRAM_ERROR,
            FailureClass.OOM_GPU,
        ),
        message="a rank waited in a collective until its timeout; these lines do not show which collective, nor which "
        "rank never came",
        needs=("last-collectives", "all-ranks", "stacks"),
        versions="torch 1.13 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
)
