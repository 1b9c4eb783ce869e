"""Rules for torch's and other launchers' words: watchdog, store, elastic, NCCL errors seen through torch, world arithmetic.

A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.classes import Class
from holdfast.diagnose.rules.row import Role, Rule, Sureness

HANG = (Class.COLLECTIVE_MISMATCH, Class.STRAGGLER, Class.HANG_UNKNOWN)

FIRST_ENDED = Rule(
    code="first-ended",
    lines=("Root Cause (first observed failure):",),
    pattern=r"Root Cause \(first observed failure\):",
    role=Role.CONTEXT,
    says="the launcher saw this rank end first ({how}), and no line says why",
    source="torch elastic",
)

LAUNCHED = Rule(
    code="launched",
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
    says="a launcher began",
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
        classes=HANG,
        says="a rank waited for the others in a collective ({op}) until its time was up; this rank is one that waited",
        remedy=("look for the rank that never came: it printed no such line, or its last enqueued work is lower",),
        decides=("last-collectives", "all-ranks"),
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
        classes=HANG,
        says="a rank was waiting in collective {enqueued}; it had completed {completed}",
        decides=("last-collectives", "all-ranks"),
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
        classes=(Class.COLLECTIVE_MISMATCH, Class.STRAGGLER),
        sure=Sureness.LIKELY,
        says="some ranks never reached a collective that the others waited in",
        remedy=("look at what the missing ranks did; all ranks must make the same calls in the same order",),
        decides=("stacks", "all-ranks"),
        source="torch ProcessGroupGloo.cpp, Horovod stall_inspector.cc",
    ),
    Rule(
        code="collective-differs",
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
        classes=(Class.COLLECTIVE_MISMATCH,),
        sure=Sureness.LIKELY,
        says="ranks called different collectives, or the same with different sizes",
        remedy=(
            "make every rank take the same branch and the same shapes; TORCH_DISTRIBUTED_DEBUG=DETAIL names the first call that differs",
        ),
        decides=("last-collectives",),
        source="torch ProcessGroupWrapper.cpp, NCCL net_ib.cc and net_socket.cc, Horovod",
    ),
    Rule(
        code="parameters-differ",
        lines=(
            "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 160 params, while rank 0 has inconsistent 0 params.",
            "RuntimeError: [1]: params[0] in this process with sizes [65] appears not to match sizes of the same param in process 0.",
        ),
        pattern=r"DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param|inconsistent \d+ params",
        classes=(Class.COLLECTIVE_MISMATCH,),
        sure=Sureness.LIKELY,
        says="ranks do not run the same model: their parameters differ",
        remedy=("build the same model on every rank, from the same configuration and seed",),
        decides=("all-ranks",),
        source="torch reducer.cpp",
    ),
    Rule(
        code="parameters-unused",
        lines=(
            "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons:",
            "Parameter indices which did not receive grad for rank 3: 282 283",
        ),
        pattern=r"[Pp]arameter(?:s| indices) which did not receive grad for rank (?P<rank>\d+)|Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        classes=(Class.PROGRAM_ERROR, Class.COLLECTIVE_MISMATCH),
        sure=Sureness.LIKELY,
        says="parameters took no part in the loss, or took part twice, so DDP cannot finish its reduction",
        remedy=(
            "DistributedDataParallel(find_unused_parameters=True), or leave out what is not used; static_graph=True with checkpointing",
        ),
        decides=("all-ranks",),
        source="torch reducer.cpp",
    ),
    Rule(
        code="uneven-inputs",
        lines=("Detected at least one rank that exhausted inputs. Throwing across all ranks.",),
        pattern=r"(?:rank that )?exhausted inputs|(?:uneven|different|unequal) (?:number of )?(?:inputs|batches|samples|steps) (?:across|on|between|per) ranks|ranks have a different number of batches",
        classes=(Class.COLLECTIVE_MISMATCH,),
        sure=Sureness.LIKELY,
        says="ranks ran out of data at different steps",
        remedy=("drop_last=True, equal shards, or torch.distributed.algorithms.Join",),
        decides=("last-collectives",),
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
        pattern=r"Timed out waiting \d+ms for (?:recv|send) operation|wait timeout after \d+ms, keys: (?P<key>\S+)|in store based barrier on rank: ?(?P<rank>\d+)|Timeout waiting for key: \S+"
        r"|Socket Timeout\b|store->get\('?\d+'?\).{0,40}timed? ?out|timed out after \d+ms? waiting for.{0,20}(?:store|key)",
        classes=(Class.STRAGGLER, Class.RENDEZVOUS, Class.COLLECTIVE_MISMATCH, Class.RANK_COUNT),
        says="a rank waited for another one that did not come in time",
        remedy=("see what the awaited rank did meanwhile; long work on one rank needs a longer timeout of that group",),
        decides=("all-ranks", "step-times", "who-joined"),
        source="Gloo unbound_buffer.cc, torch TCPStore",
    ),
    Rule(
        code="unique-id-awaited",
        lines=(
            "RuntimeError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0:1', but store->get('0:1') got error: Socket Timeout",
        ),
        pattern=r"\[(?P<rank>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId",
        role=Role.SECONDARY,
        classes=(Class.STRAGGLER, Class.PROGRAM_ERROR, Class.RENDEZVOUS, Class.FIREWALL, Class.OOM_HOST),
        says="a rank waited for rank 0 to begin the first collective, and it did not come",
        decides=("peer-log", "stacks"),
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
        classes=(Class.RANK_COUNT,),
        sure=Sureness.LIKELY,
        says="more workers checked in than there are ranks: a store is left over from an earlier run",
        remedy=(
            "delete the store's file (or use another port or id) before each run; better: tcp:// or torchrun's rendezvous",
        ),
        decides=("who-joined",),
        source="torch distributed_c10d.py",
    ),
    Rule(
        code="rank-count",
        lines=(
            "n1:8:9 [0] bootstrap.cc:99 NCCL WARN Bootstrap Root : mismatch in rank count from procs 8 : 16",
            "n1:8:9 [0] bootstrap.cc:110 NCCL WARN Bootstrap Root : rank 3 of 8 ranks has already checked in",
            "n1:8:9 [0] init.cc:1 NCCL WARN Invalid rank requested : 8/8",
            "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable WORLD_SIZE expected, but not set",
            "AssertionError: world size (12) is not divisible by tensor_model_parallel_size (8)",
            "ValueError: Invalid node_rank 2, node_rank should be in the interval [0, 1]",
        ),
        pattern=r"mismatch in (?:rank count|info) from procs|ranks has already checked in|Invalid rank requested|environment variable (?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT) expected"
        r"|world[_ ]size ?\(?\d*\)? ?(?:is not|must be|should be) (?:divisible|a multiple|equal)|world_size.{0,40}(?:does not match|mismatch)|rank.{0,20}(?:>=|exceeds|must be less than) (?:the )?world[_ ]size"
        r"|joined twice|Invalid node_rank|node_rank.{0,30}(?:out of range|must be)|local_rank.{0,40}(?:>=|exceeds).{0,20}(?:nproc|device_count)",
        classes=(Class.RANK_COUNT,),
        sure=Sureness.LIKELY,
        says="the ranks do not agree on how many they are, or two have one rank",
        remedy=(
            "WORLD_SIZE = nodes x ranks per node on every node; RANK unique; one launcher starts the ranks, not two",
        ),
        decides=("who-joined",),
        versions="all",
        source="NCCL src/bootstrap.cc, torch rendezvous.py",
    ),
    Rule(
        code="duplicate-gpu",
        lines=(
            "n1:8:9 [0] init.cc:779 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
            "n1:8:9 [0] init.cc:779 NCCL WARN Multiple Ranks are using the same GPU/Partition",
        ),
        pattern=r"Duplicate GPU detected ?: rank (?P<rank>\d+)|Multiple [Rr]anks are using the same GPU",
        classes=(Class.RANK_COUNT, Class.PROGRAM_ERROR),
        says="two ranks have one GPU: more ranks than GPUs on the node, or a program that takes the same one in every rank",
        remedy=(
            "--nproc-per-node no larger than the visible GPUs; torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        ),
        decides=("gpus-seen",),
        versions="all; 2.30 and later: Multiple Ranks",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="device-ordinal",
        lines=("RuntimeError: CUDA error: invalid device ordinal",),
        pattern=r"invalid device ordinal",
        classes=(Class.RANK_COUNT, Class.PROGRAM_ERROR),
        says="a rank asked for a GPU that it does not see: more ranks than GPUs on the node, or the wrong number in the program",
        remedy=(
            "--nproc-per-node no larger than the visible GPUs; torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        ),
        decides=("gpus-seen",),
        source="CUDA",
    ),
    Rule(
        code="nccl-version",
        lines=(
            "n1:8:9 [0] init.cc:1 NCCL WARN Mismatched NCCL version detected : rank 3 version 22005 rank 0 version 21805",
            "n1:8:9 [0] NCCL WARN Mismatched NCCL git versions detected: rank 0 fingerprint 0xabc, rank 3 fingerprint 0xdef",
        ),
        pattern=r"Mismatched NCCL (?:git )?versions? detected",
        classes=(Class.VERSION_MISMATCH,),
        sure=Sureness.LIKELY,
        says="ranks have loaded different versions of NCCL",
        remedy=("the same image on every node, and no other libnccl on LD_LIBRARY_PATH or in LD_PRELOAD",),
        decides=("versions",),
        versions="all; git versions: 2.29 and later",
        source="NCCL src/init.cc, src/bootstrap.cc",
    ),
    Rule(
        code="bootstrap-garbled",
        lines=(
            "n1:8:9 [0] bootstrap.cc:80 NCCL WARN Message truncated : received 1024 bytes instead of 256",
            "n1:8:9 [0] NCCL WARN ncclSocketInit: connecting to address  with family 0 is neither AF_INET(2) nor AF_INET6(10)",
        ),
        pattern=r"Message truncated : received \d+(?:,\d+)? bytes instead of|with family \d+ is neither AF_INET",
        classes=(
            Class.VERSION_MISMATCH,
            Class.WRONG_INTERFACE,
            Class.RANK_COUNT,
            Class.COLLECTIVE_MISMATCH,
            Class.OTHER,
        ),
        says="ranks do not understand what they tell one another while they meet: other versions of NCCL, other calls, addresses that are none, or a fault of NCCL's own",
        remedy=(
            "the same image on every node; the same order in which every rank makes its groups",
            "where all have one version and it happens now and then: another version (2.19.3 mixes such messages up)",
        ),
        decides=("versions", "interfaces"),
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
        ),
        pattern=r"undefined symbol: |(?:libcud\w+|libnccl|libc10|libtorch\w*|libnvidia-ml|libmpi|libcublas\w*|libcudnn\w*)\.so\S*: cannot open shared object|compiled with different CUDA major"
        r"|no kernel image is available|version `\w+[_\d.]+' not found|not defined in file \S+ with link time reference|symbol lookup error: |module 'torch\S*' has no attribute|cannot import name '\w+' from '(?:torch|transformers|megatron|deepspeed|flash_attn|vllm)"
        r"|NCCL library (?:version )?is (?:too old|not backwards compatible)|compiled with (?:too old )?(?:version of )?NCCL|PyTorch and torch\w+ (?:were|was) compiled|incompatible with (?:this|your) (?:version|installed)"
        r"|was compiled (?:with|against) (?:an?other|different|NumPy)|cuDNN version incompatibility|NCCL version mismatch|ptxas fatal|RuntimeError: operator \S+ does not exist",
        classes=(Class.VERSION_MISMATCH,),
        sure=Sureness.LIKELY,
        says="a library does not fit the one that loads it",
        remedy=(
            "take matching versions of torch, CUDA, NCCL and what was compiled against them; keep other CUDA libraries off LD_LIBRARY_PATH",
        ),
        decides=("versions",),
        source="the dynamic linker, Python imports",
    ),
    Rule(
        code="watchdog-stuck",
        lines=(
            "[rank5]:[F1120 10:00:00 ProcessGroupNCCL.cpp:1250] [PG 0 Rank 5] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        ),
        pattern=r"watchdog (?:thread )?got stuck for (?P<seconds>\d+) ?(?:s|seconds)|Heartbeat monitor timed out|[Tt]erminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang",
        classes=(Class.HANG_UNKNOWN, Class.GPU_XID, Class.PROGRAM_ERROR),
        says="torch's own watchdog was stuck: a CUDA or NCCL call did not return, or the GIL was held",
        remedy=("py-spy dump --native --pid PID on that rank; TORCH_NCCL_ENABLE_MONITORING=0 only to look closer",),
        decides=("stacks", "xid"),
        versions="torch 2.2 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    Rule(
        code="nccl-unhandled",
        lines=(
            "RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:911, unhandled system error, NCCL version 2.7.8",
            "n1: Test NCCL failure common.cu:958 'unhandled system error'",
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error, NCCL version 2.18.1",
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        ),
        pattern=r"unhandled (?:system|cuda) error|ncclSystemError: |ncclUnhandledCudaError: |ncclInternalError: |NCCL error.{0,120}internal error|ncclSystemError\b",
        role=Role.SECONDARY,
        classes=(
            Class.SHM_TOO_SMALL,
            Class.MEMLOCK,
            Class.FIREWALL,
            Class.WRONG_INTERFACE,
            Class.OOM_GPU,
            Class.DRIVER,
            Class.VERSION_MISMATCH,
            Class.RANK_COUNT,
        ),
        says="NCCL failed, and this line only passes it on",
        decides=("nccl-warn",),
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
        pattern=r"NCCL error.{0,120}invalid (?:usage|argument)|ncclInvalid(?:Usage|Argument)",
        role=Role.SECONDARY,
        classes=(Class.RANK_COUNT, Class.COLLECTIVE_MISMATCH, Class.VERSION_MISMATCH, Class.DRIVER),
        says="NCCL was called in a way that it does not allow: two ranks on one GPU, a rank beyond the world's size, sizes that differ",
        decides=("nccl-warn",),
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
        pattern=r"Dist(?:Backend|Network|Store)Error|NCCL communicator (?:was|is) aborted|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|Last error:$|NCCL error in: ",
        role=Role.SECONDARY,
        classes=(Class.PROGRAM_ERROR, Class.OOM_HOST, Class.FIREWALL, Class.RENDEZVOUS),
        says="a rank's communication failed, mostly because of another rank",
        decides=("nccl-warn", "all-ranks"),
        versions="torch 2.0 and later",
        source="torch ProcessGroupNCCL.cpp",
    ),
    LAUNCHED,
    FIRST_ENDED,
    Rule(
        code="child-failed",
        lines=(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "subprocess.CalledProcessError: Command '['/usr/bin/python', 'train.py']' returned non-zero exit status 1.",
            "torch.multiprocessing.spawn.ProcessRaisedException:",
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 1234) of binary: /usr/bin/python3",
            "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
            "[launch.py:321:sigkill_handler] ['python', 'train.py'] exits with return code = 1",
        ),
        pattern=r"ChildFailedError|returned non-zero exit status|ProcessRaisedException|ProcessExitedException|exitcode *: *1\b|To enable traceback see|exits with return code = [1-9]\d?\b|exited with exit code [1-9]\b"
        r"|Exception raised from \w+ at|terminated with exit code 1\b|srun: error: .{0,60}Exited with exit code|torch\.distributed\.elastic\.\S*: \[FAILED\]|MPI_ABORT was invoked on rank",
        role=Role.SECONDARY,
        classes=(Class.PROGRAM_ERROR,),
        says="a rank ended with an error, and its launcher tells so; the rank's own words say why",
        decides=("first-traceback", "all-ranks"),
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
        pattern=r"exitcode *: *-6\b|Signal 6 \(SIGABRT\)|terminate called after throwing|taking the entire process down|Some NCCL operations have failed or timed out|return code = -6\b|Fatal Python error: Aborted|exited on signal 6",
        role=Role.SECONDARY,
        classes=HANG,
        says="a rank aborted itself, as NCCL's watchdog does",
        decides=("first-traceback", "last-collectives"),
        source="torch",
    ),
    Rule(
        code="segfault",
        lines=(
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: 3 (pid: 94) of binary: /usr/bin/python",
            "Fatal Python error: Segmentation fault",
            "[n1:1234 :0:1234] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
        ),
        pattern=r"exitcode *: *-11\b|Signal 11 \(SIGSEGV\)|Segmentation fault|return code = -11\b|exited on signal 11|exit ?code:? 139\b",
        classes=(Class.PROGRAM_ERROR, Class.VERSION_MISMATCH, Class.OTHER),
        says="a rank died of a segmentation fault in native code",
        remedy=("look for libraries that do not fit; undo the last upgrade; always the same node: test its memory",),
        decides=("native-stack", "versions"),
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
        says="a rank entered or finished NCCL's initialisation",
        versions="COMPLETE: all; START: 2.18.3 and later",
        source="NCCL src/init.cc",
    ),
    Rule(
        code="world-said",
        lines=(
            "Initializing distributed: GLOBAL_RANK: 5, MEMBER: 6/48",
            "RANK=3 LOCAL_RANK=3 WORLD_SIZE=16 MASTER_ADDR=n0",
            "+ torchrun --nnodes=2 --nproc-per-node=8 train.py",
        ),
        pattern=r"(?:--|\b)(?P<name>WORLD_SIZE|nnodes)[=: ]{1,2}['\"]?(?P<said>\d{1,7})\b|(?:GLOBAL_RANK: (?P<rank>\d{1,7}), )?MEMBER: \d+/(?P<members>\d{1,7})\b",
        role=Role.CONTEXT,
        says="how many ranks or nodes somebody was told there are",
        source="torchrun, Lightning, the job's script",
    ),
)
