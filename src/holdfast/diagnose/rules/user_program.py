"""Rules for the program itself: exceptions, bad numbers, bad indices, and faults of its storage and its cluster.

A long file, because it is one table.
"""

from __future__ import annotations

from holdfast.diagnose.failure_classes import Confidence, FailureClass
from holdfast.diagnose.rules.rule import NO_FAULT_PATTERN, Role, Rule

# Written out, so that the combined search for all rules matches `loss: nan` and not `nan` alone, which takes five times
# as long. For the same reason a number in a pattern that begins with a common word, such as `rank`, has a bounded
# number of digits.
_NAN_PATTERN = "|".join(
    rf"{name}['\"]?{sign}['\"]?nan\b" for name in ("grad_norm", "grad norm", "loss") for sign in (":", ": ", "=", "= ")
)

UNREACHABLE = Rule(
    code="service-unreachable",
    lines=(
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api/models/x",
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files.",
        "wandb: Network error (ConnectTimeout), entering retry loop.",
        "ConnectionError: Couldn't reach 'wikitext' on the Hub (ConnectionError)",
        "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host data.example.com:443 ssl:default",
        "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://huggingface.co/api/datasets/x",
    ),
    pattern=r"HTTPS?ConnectionPool\(host='(?P<service>[^']{1,200})'|HTTPS?ConnectionPool\(host=|[Cc]ouldn't connect to '(?P<endpoint>https?://[^'\s]{1,200})'|Max retries exceeded with url|LocalEntryNotFoundError|OfflineModeIsEnabled|wandb: Network error|CommError: .{0,60}(?:timed out|[Nn]etwork)"
    r"|Couldn't reach (?P<resource>\S.{0,200})|urlopen error |aiohttp\.client_exceptions\.\w+: Cannot connect to host (?P<target>[\w.:-]{1,200})|requests\.exceptions\.(?:ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError)\b(?:.{0,80}\(host='(?P<host>[^']{1,200})')?|http(?:x|core)\.(?:Connect|Read)(?:Error|Timeout)"
    r"|\b(?:429|50\d) (?:Server|Client) Error: .{0,100} for url: (?P<url>https?://[^/\s]{1,200})|urllib\.error\.HTTPError: HTTP Error (?:429|50\d)",
    classes=(FailureClass.UNREACHABLE, FailureClass.FIREWALL),
    confidence=Confidence.LIKELY,
    message="data, a model hub or another service could not be reached: {host}: {service}: {endpoint}: {resource}: "
    "{target}: {url}",
    remedy=(
        "fetch it before the job and set HF_HUB_OFFLINE=1, WANDB_MODE=offline; or allow egress from the nodes "
        "(proxy, egress policy)",
    ),
    needs=("first-traceback", "service-reachable"),
    source="requests, urllib, aiohttp, httpx, huggingface_hub, datasets, wandb",
)

RULES: tuple[Rule, ...] = (
    Rule(
        code="index-out-of-range",
        lines=(
            '../aten/src/ATen/native/cuda/IndexKernel.cu:93: operator(): block: [3,0,0], thread: [17,0,0] Assertion `index >= -sizes[i] && index < sizes[i] && "index out of bounds"` failed.',
            "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
            "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.",
            "RuntimeError: CUDA error: device-side assert triggered",
            "IndexError: index out of range in self",
        ),
        pattern=r"\.cu:\d+.{0,200}Assertion .{0,200}[Ff]ailed|Assertion `srcIndex < |device-side assert triggered|index out of range in self|IndexError: (?:list|tuple|string)?.{0,20}index .{0,20}out of (?:range|bounds)|IndexError: Target \S+ is out of bounds|cudaErrorAssert",
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="an index in the data is out of range, such as a token id beyond the vocabulary or a label beyond the classes",
        remedy=(
            "check ids and labels against the embedding's and the head's size; CUDA_LAUNCH_BLOCKING=1 names the call",
        ),
        needs=("cuda-sync",),
        source="torch ATen/native/cuda",
    ),
    Rule(
        code="not-a-number",
        lines=(
            "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: n1",
            "ValueError: loss is nan, stopping training",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
        ),
        pattern=r"found (?:NaN|Inf|unexpectedly large)[\w /]* in (?:local )?(?:forward|grad|loss)|(?i:loss (?:is|=|:|became|was) ?(?:nan|inf)\b)|loss scale already at minimum|contains either `inf`, `nan`|FloatingPointError|(?i:nan (?:detected|loss|gradients?|encountered|in (?:loss|grad)))|cannot convert float NaN|reducing loss scale to 0\.0$|loss scale: 1(?:\.0)?, reducing to 1(?:\.0)?\b|loss scale from 1(?:\.0)? to 1(?:\.0)?\b"
        r"|Unexpected result (?:nan|inf)\b|Function '\w+' returned nan values|" + _NAN_PATTERN,
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="the loss or the gradients are NaN or infinite",
        remedy=(
            "roll back to the last checkpoint and skip the batches since; lower the learning rate, clip gradients, check the data of that step",
        ),
        needs=("first-traceback",),
        source="Megatron-LM, DeepSpeed, torch autograd anomaly mode",
    ),
    Rule(
        code="loss-not-a-number",
        lines=("iter 100 step 12: loss nan, iter time: 203.10ms", "step 3 loss nan"),
        pattern=r"(?i:\bloss nan\b)",
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="the loss that a program prints is NaN or infinite",
        remedy=(
            "bf16 in place of fp16, or a loss scaler; clip gradients; a lower learning rate; check the data of the "
            "first such step",
        ),
        needs=("first-traceback",),
        source="training loops",
        performance_only=True,
    ),
    Rule(
        code="bad-data",
        lines=(
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
            "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f>",
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 1",
        ),
        pattern=r"UnicodeDecodeError|UnidentifiedImageError|JSONDecodeError|stack expects each tensor to be equal size|image file is truncated|ArrowInvalid|Corrupt(?:ed)? (?:JPEG|record|sample|shard)|(?:Bad|bad) CRC-32|Expected (?:input )?batch_size \(\d+\) to match target"
        r"|InvalidHeaderDeserialization|zlib\.error|tarfile\.ReadError",
        classes=(FailureClass.NAN_DATA,),
        confidence=Confidence.LIKELY,
        message="a data sample is damaged or has another format",
        remedy=(
            "find the sample (the traceback names the reader), repair or skip it; check the dataset's files on that node",
        ),
        needs=("first-traceback",),
        source="data readers",
    ),
    Rule(
        code="storage-full",
        lines=(
            "OSError: [Errno 28] No space left on device: '/checkpoints/step-100'",
            "RuntimeError: [enforce fail at inline_container.cc:595] . PytorchStreamWriter failed writing file data/12: file write failed",
            "OSError: [Errno 122] Disk quota exceeded: '/home/ada/checkpoints'",
            "RuntimeError: [enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598",
            "torch/File.lua:210: write error: wrote 100 blocks instead of 200 at TH/THDiskFile.c:356",
            "OSError: 1048576 requested and 524288 written",
        ),
        pattern=r"No space left on device|is over 9\d% full, available space|[Dd]isk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+|wrote \d+ blocks instead of|\d+ requested and \d+ written|basic_ios::clear: iostream error|ENOSPC|EDQUOT",
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.LIKELY,
        message="a disk is full or the quota is used up",
        remedy=("df -h and df -i of the path in the line; keep fewer checkpoints, or write elsewhere",),
        needs=("disk-usage",),
        source="the kernel, torch",
        fallback=True,
    ),
    Rule(
        code="storage-failed",
        lines=(
            "OSError: [Errno 5] Input/output error: '/data/shard-01'",
            "OSError: [Errno 116] Stale file handle",
            "OSError: [Errno 30] Read-only file system: '/scratch/run'",
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "LustreError: 11-0: scratch-OST0012-osc: operation ost_read to node 10.0.0.9@o2ib failed: rc = -107",
            "botocore.exceptions.EndpointConnectionError: Could not connect to the endpoint URL",
            "google.api_core.exceptions.ServiceUnavailable: 503 PUT https://storage.googleapis.com/upload/storage/v1/b/ckpt/o",
        ),
        pattern=r"\[Errno 5\] Input/output error|[Ss]tale (?:NFS )?file handle|Read-only file system|PytorchStreamReader failed|LustreError|nfs: server \S+ not responding|EndpointConnectionError|blk_update_request: I/O error|EXT4-fs error|nvme.{0,60}timeout, |nvme.{0,40}I/O error|nvme \S{1,10}: controller is down|Buffer I/O error on|critical (?:medium|target) error, dev|Remounting filesystem read-only|XFS \(\S{1,40}\): (?:metadata I/O error|Corruption|log I/O error|Filesystem has been shut)"
        r"|Lustre: .{0,120} was lost; in progress|client was evicted by|\[Errno (?:37|107|108|112|121)\] |Remote I/O error|\bceph: mds\d|libceph: .{0,60}(?:socket closed|session lost|down\b)|beegfs.{0,80}(?:unreachable|error)|\bmmfsd\b.{0,60}(?:expelled|unmount)|SlowDown|\b(?:429|50\d) (?:PUT|POST|GET|HEAD|DELETE) https://storage\.googleapis|Transport endpoint is not connected|(?:safetensors|checkpoint)\S*.{0,60}(?:corrupt|truncated|incomplete)",
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.LIKELY,
        message="a disk or file system failed to read or write",
        remedy=("check the mount and its server (dmesg, df, mount); a damaged checkpoint: resume from the one before",),
        needs=("first-traceback",),
        source="the kernel, torch, S3 clients",
    ),
    Rule(
        code="disk-eviction",
        lines=(
            "The node was low on resource: ephemeral-storage.",
            "Pod ephemeral local storage usage exceeds the total limit of containers 20Gi.",
            'Usage of EmptyDir volume "scratch" exceeds the limit "10Gi".',
            'Container main exceeded its local ephemeral storage limit "5Gi".',
            "The node had condition: [DiskPressure].",
        ),
        pattern=r"low on resource: \[?(?:ephemeral|disk|inodes|nodefs|imagefs)|local storage usage exceeds|EmptyDir volume \S+ exceeds the limit|exceeded its local ephemeral storage|had condition: \[?\w*DiskPressure|DiskPressure\W{1,4}True",
        classes=(FailureClass.STORAGE, FailureClass.PREEMPTED),
        confidence=Confidence.LIKELY,
        message="the pod or its node had no room left on the local disk, and the pod was evicted",
        remedy=(
            "save checkpoints to a volume, not to the container's own disk; set requests and limits of "
            "ephemeral-storage for the data written there",
            "kubectl describe node NODE | grep -A8 Conditions: free the disk if it shows DiskPressure",
        ),
        needs=("pod-status",),
        source="kubelet, eviction manager",
    ),
    Rule(
        code="preempted",
        lines=(
            "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO PREEMPTION ***",
            "slurmstepd: error: *** STEP 123.0 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***",
            "=>> PBS: job killed: walltime 86437 exceeded limit 86400",
            "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
            "Normal  Preempted  pod/worker-1  Preempted by default/other on node n1",
            "Normal  EvictedDueToPreempted  workload/job-a  Preempted to accommodate a workload (UID: 12) due to prioritization in the ClusterQueue",
        ),
        pattern=r"DUE TO (?:PREEMPTION|TIME LIMIT|JOB REQUEUE)|PBS: job killed: (?:walltime|cput)\b|TERM_(?:RUNLIMIT|PREEMPT|OWNER|ADMIN)\b|CANCELLED AT \S+|\bPreempt(?:ed|ing)\b.{0,80}(?:pod|node|by|job|workload)|(?i:spot (?:instance )?(?:interruption|termination))|NodeShutdown|imminent node shutdown|Node is shutting down|instance-action.{0,80}(?:terminate|stop|hibernate)|[Cc]luster (?:is|was) preempted|node was low on resource: \[?pid|\bEvicted\b.{0,80}(?:preempt|priority|quota|workload)|DisruptionTarget.{0,60}(?:[Pp]reempt|[Ee]vict|[Tt]erminat)|Workload.{0,20}(?:evicted|preempted)|EvictedDueToPreempted|[Rr]eason\W{1,4}\w*Evicted\b|workers? (?:is|are) evicted|Preempted to accommodate a |DeadlineExceeded.{0,40}(?:Job|active)|maintenance event.{0,40}(?:terminat|migrat)",
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.PREEMPTED,),
        confidence=Confidence.LIKELY,
        message="the scheduler or a person took the job's nodes away",
        remedy=("resume from the last checkpoint; ask for a longer time limit or a higher priority",),
        needs=("who-sent-signal",),
        source="Slurm, PBS, LSF, Kubernetes, cloud providers",
    ),
    Rule(
        code="node-failure",
        lines=(
            "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
            "srun: error: Node failure on n17",
            "Warning  NodeNotReady  pod/worker-3  Node is not ready",
            "Kubelet stopped posting node status.",
            "Normal  TaintManagerEviction  pod/worker-3  Marking for deletion Pod train/worker-3",
            "Taints:             node.kubernetes.io/unreachable:NoExecute",
            "node_lifecycle_controller.go:885] Node n3 is unresponsive as of 2025-01-02 03:04:05 +0000 UTC. Adding it to the Taint queue.",
        ),
        pattern=r"DUE TO NODE FAILURE|Node failure on (?P<host>\S+)|NodeNotReady|node\.kubernetes\.io/(?:unreachable|not-ready):No(?:Execute|Schedule)[ \t]*(?:$|[,;\"'\])])|Node \S+ is unresponsive as of|NodeLost|Kubelet stopped posting node status|NodeStatusUnknown|NodeStatusNeverUpdated|TaintManagerEviction.{0,200}Marking for deletion|node/\S+\s+(?:Shutdown|Rebooted)|Node \S+ (?:has been rebooted|status is now: (?:NodeNotReady|Unknown))|[Nn]ode \S+ (?:was|has been) (?:deleted|removed|terminated|drained)|DeletingNode|RemovingNode|instance \S+ (?:was|has been) terminated|reason[\"': =]+NodeLost|[Kk]ernel panic|NODE_FAIL|state set to DOWN|on failed node \S+|[Nn]odes? \S+ not responding|Machine Check (?:Exception|Event)|mce: \[Hardware Error\]",
        classes=(FailureClass.NODE_LOST,),
        confidence=Confidence.CERTAIN,
        message="a node of the job was lost",
        remedy=("take the node out of use until it is checked; restart the job from its last checkpoint without it",),
        needs=("pod-status",),
        source="Slurm, Kubernetes, the kernel",
    ),
    Rule(
        code="mpi-daemon-lost",
        lines=(
            "ORTE has lost communication with a remote daemon.",
            " PRTE has lost communication with its daemon located on node:",
        ),
        pattern=r"(?:ORTE|PRTE) has lost communication with (?:a remote|its) daemon",
        classes=(FailureClass.NODE_LOST, FailureClass.FIREWALL, FailureClass.OOM_HOST, FailureClass.OTHER),
        confidence=Confidence.LIKELY,
        message="mpirun lost its daemon on a node: the node, its network, or the daemon is gone",
        remedy=("check the node that the next lines name: is it up, what does its kernel log show at that time",),
        needs=("kernel-log", "reachable", "pod-status"),
        source="Open MPI, PRRTE",
    ),
    Rule(
        code="not-started",
        lines=(
            "Warning  FailedScheduling  pod/worker-0  0/8 nodes are available: 8 Insufficient nvidia.com/gpu.",
            'Warning  Failed  pod/worker-0  Failed to pull image "reg/img:1": not found',
            "    Reason: ImagePullBackOff",
            'Error: failed to create containerd task: exec: "python": executable file not found in $PATH',
        ),
        pattern=r"FailedScheduling|\b0/\d+ nodes are available:|ImagePullBackOff|Back-off pulling image|failed to pull and unpack image|invalid partition specified|PodGroup is not ready|ErrImagePull|Failed to pull image|CreateContainerConfigError|FailedMount|FailedCreatePodSandBox|executable file not found|Unschedulable|Insufficient nvidia\.com/gpu|exceeded quota",
        classes=(FailureClass.NOT_STARTED,),
        confidence=Confidence.LIKELY,
        message="a pod of the job was never started",
        remedy=("kubectl describe pod POD: its last events show what is missing (capacity, image, volume, secret)",),
        needs=("pod-status",),
        source="Kubernetes events",
        fallback=True,
    ),
    Rule(
        code="crash-loop",
        lines=("Warning  BackOff  pod/worker-0  Back-off restarting failed container", "    Reason: CrashLoopBackOff"),
        pattern=r"CrashLoopBackOff|reached the specified backoff limit|Back-off restarting failed container",
        exclude=NO_FAULT_PATTERN,
        role=Role.SYMPTOM,
        classes=(FailureClass.PROGRAM_ERROR, FailureClass.OOM_HOST, FailureClass.NOT_STARTED),
        message="a container crashes repeatedly",
        needs=("pod-status", "first-traceback"),
        source="kubelet",
    ),
    Rule(
        code="ray-process-died",
        lines=(
            "ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.",
            "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
        ),
        pattern=r"ray\.exceptions\.(?:RayActorError|ActorDiedError|ActorUnavailableError|WorkerCrashedError|LocalRayletDiedError|NodeDiedError)|Engine core initialization failed|Engine(?:Core|Dead)\w{0,20}(?:Error| encountered| died)|AsyncEngineDeadError|WorkerProc initialization failed|The actor (?:is dead because|died unexpectedly)|A worker died or was killed while executing",
        role=Role.SYMPTOM,
        classes=(FailureClass.OOM_HOST, FailureClass.KILLED, FailureClass.PROGRAM_ERROR, FailureClass.NODE_LOST),
        also_possible=(
            FailureClass.OOM_GPU,
            FailureClass.GPU_XID,
            FailureClass.SHM_TOO_SMALL,
            FailureClass.VERSION_MISMATCH,
        ),
        message="Ray or vLLM lost a process; the causes that it lists are guesses",
        needs=("kernel-log", "peer-log"),
        source="Ray",
    ),
    Rule(
        code="straggler",
        lines=(
            "StragglerDetector: rank 12 is a straggler, GPU relative performance score 0.61",
            "Stragglers detected: rank 5 on node n3",
        ),
        pattern=r"(?i:rank (?P<rank>\d{1,6}) is (?:a )?(?:straggler|slow|lagging))|[Ss]traggler(?:s)? (?:detected|found)|(?i:thermal (?:slowdown|throttl)|HW slowdown|clocks_throttle_reasons.*: Active|hw_(?:thermal_)?slowdown\W{1,4}active)",
        exclude=NO_FAULT_PATTERN,
        classes=(FailureClass.STRAGGLER,),
        confidence=Confidence.LIKELY,
        message="one rank is slower than the others",
        remedy=(
            "nvidia-smi -q -d PERFORMANCE,CLOCK on that node; take it out of use if it stays slow without the job",
        ),
        needs=("step-times",),
        source="NVRx, Megatron-LM, nvidia-smi",
        performance_only=True,
    ),
    Rule(
        code="low-bandwidth",
        lines=("# Avg bus bandwidth    : 3.33227",),
        pattern=r"Avg bus bandwidth\s+: (?P<gbps>[\d.]+)",
        role=Role.CONTEXT,
        classes=(FailureClass.GDR_MISSING, FailureClass.TCP_FALLBACK, FailureClass.ACS_IOMMU, FailureClass.OTHER),
        message="nccl-tests measured {gbps} GB/s; whether that is low depends on the machine and the transport",
        needs=("transport", "topology", "peermem"),
        source="nccl-tests common.cu",
    ),
    Rule(
        code="single-process-work",
        lines=(
            "Map:  34%|###4      | 12000/35000 [29:59<57:10,  6.71 examples/s]",
            "Running tokenizer on dataset (num_proc=1):  61%|######    | 610000/1000000",
            "Saving model checkpoint to output/checkpoint-500",
        ),
        pattern=r"(?:Map|Filter|Tokeniz\w+|[Rr]unning tokenizer[\w ]*|Generating \w+ split|Grouping texts[\w ]*|Packing[\w ]*|Preprocessing[\w ]*|Saving (?:model )?checkpoint|Loading checkpoint shards|Building \w+ index|Extracting \w+)(?: ?\([^)]{0,40}\))?[:\w /.-]{0,60}?\d{1,3}%\||\d{1,3}%\|.{0,80}(?:examples|samples|docs|files)/s|[Tt]okeniz(?:ing|ation of) (?:the )?(?:\w+ )?(?:dataset|data|corpus|split|documents)|Saving model checkpoint to|building (?:the )?(?:shuffle|sample|document|indices|index)\w*.{0,40}(?:rank 0|on rank)|on (?:the )?(?:main process|rank 0|rank zero) (?:only|first|alone)",
        role=Role.CONTEXT,
        message="one process does long work alone",
        source="datasets, transformers, Megatron-LM",
    ),
    UNREACHABLE,
    Rule(
        code="bad-arguments",
        lines=(
            "train.py: error: unrecognized arguments: --learning-rate 1",
            "train.py: error: the following arguments are required: --data",
            "train.py: error: argument --lr: invalid float value: 'high'",
            "Error: No such option: --learning-rate",
            "│ Unrecognized options: --learning-rate 1                │",
            "│ No such option: --learning-rate                                              │",
            "Could not override 'optm.lr'.",
            "hydra.errors.ConfigCompositionException: Could not override 'optm.lr'.",
            "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--lrr', '1']",
            "absl.flags._exceptions.UnrecognizedFlagError: Unknown command line flag 'lrr'. Did you mean: lr ?",
        ),
        pattern=r"(?P<program>[\w./-]{1,100}): error: (?P<complaint>(?:unrecognized arguments|the following arguments are required|argument \S|ambiguous option|one of the arguments|too few arguments|invalid choice|unrecognized option).{0,300})"
        r"|\bError: (?P<refused>(?:No such (?:option|command)|Missing (?:option|argument|parameter|command)|Invalid value for|Got unexpected extra argument|Option '[^']{1,80}' (?:requires|does not)).{0,300})"
        r"|│ (?P<boxed>(?:Unrecognized options?|No such (?:option|command)|Missing (?:option|argument|command)|Invalid (?:value|choice)|Required options?|Got unexpected extra argument|Parsing error).{0,200}?) *│"
        r"|(?P<override>Could not override '[^']{1,200}'|Error parsing override '[^']{1,200}'|Key '[^']{1,200}' is not in struct)|(?P<unused>Some specified arguments are not used by the HfArgumentParser.{0,200})|UnrecognizedFlagError: (?P<flag>.{1,200})",
        exclude=r"unrecognized arguments: --local[-_]rank",
        classes=(FailureClass.USAGE,),
        confidence=Confidence.CERTAIN,
        message="the program rejected its command line: {complaint}: {refused}: {boxed}: {override}: {unused}: {flag}",
        remedy=("change the job's command; the program's own --help lists its options",),
        needs=("first-traceback",),
        source="argparse, click, typer, tyro, hydra, transformers, absl",
    ),
    Rule(
        code="mpirun-as-root",
        lines=("mpirun has detected an attempt to run as root.",),
        pattern=r"(?:mpirun|mpiexec|prterun|orterun) has detected an attempt to run as root",
        classes=(FailureClass.USAGE,),
        confidence=Confidence.CERTAIN,
        message="mpirun refuses to run as root",
        remedy=(
            "mpirun --allow-run-as-root, or OMPI_ALLOW_RUN_AS_ROOT=1 with OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; or run as another user",
        ),
        source="Open MPI",
    ),
    Rule(
        code="module-not-found",
        lines=("ModuleNotFoundError: No module named 'flash_attn'",),
        pattern=r"ModuleNotFoundError: No module named '(?P<module>[^']+)'|No module named (?P<named>[\w.]+)$",
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="a module is missing where the rank ran: {module}",
        remedy=(
            "`holdfast render` shows the interpreter: install the module there, in the image or the environment of "
            "every node",
            "your own module: it must exist where the job runs, with its folder on PYTHONPATH",
        ),
        needs=("first-traceback",),
        source="Python",
    ),
    Rule(
        code="file-not-found",
        lines=(
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
            "PermissionError: [Errno 13] Permission denied: '/data/out'",
        ),
        pattern=r"(?P<type>FileNotFoundError|PermissionError|NotADirectoryError): \[Errno \d+\] (?P<message>[^:]+): '(?P<path>[^']+)'",
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="the program could not open {path}: {message}",
        remedy=("the path must exist and be accessible on every node: a mount, a volume, the job's working folder",),
        needs=("first-traceback",),
        source="Python",
    ),
    Rule(
        code="session-storage-failed",
        lines=(
            "holdfast: error [disk-full]: the checkpoint step-00000030 could not be written: no space is left on the disk",
            "holdfast: error [checkpoint-store-unreachable]: the store of checkpoints does not answer",
        ),
        pattern=r"holdfast: error \[(?P<finding>disk-full|disk-error|read-only-file-system|checkpoint-failed|checkpoint-upload-failed|checkpoint-store-unreachable|no-valid-checkpoint|checkpoints-lost-with-pod|data-cache-unwritable)\]: (?P<message>.+)$",
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.STORAGE,),
        confidence=Confidence.CERTAIN,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        source="holdfast.train",
    ),
    Rule(
        code="session-failed",
        lines=(
            "holdfast: error [checkpoint-from-later-version]: the newest checkpoint has format 2; this holdfast reads up to 1",
            "holdfast: error [data-smaller-than-batch]: a step takes 64 samples, and the dataset has 10",
        ),
        pattern=r"holdfast: error \[(?P<finding>[a-z\d-]+)\]: (?P<message>.+)$",
        exclude=r"; where: ",  # logged in one line, and the run continued
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.CERTAIN,
        message="a holdfast.train Session ended the rank: {message}",
        remedy=("the lines below that one tell what to do; `holdfast explain {finding}` gives details",),
        source="holdfast.train",
        fallback=True,
    ),
    Rule(
        code="traceback",
        lines=("Traceback (most recent call last):",),
        pattern=r"Traceback \(most recent call last\)",
        role=Role.CONTEXT,
        message="a Python traceback begins",
        source="Python",
    ),
    Rule(
        code="python-exception",
        lines=(
            "ValueError: Unable to create tensor, you should probably activate truncation",
            "[rank3]: KeyError: 'input_ids'",
            "AssertionError",
            "(RayTrainWorker pid=811, ip=10.0.0.3) KeyError: 'tokens'",
            "2026-11-20T10:00:05.500Z stderr F KeyError: 'tokens'",
        ),
        pattern=r"(?:^|[\]:>|]\s*|\dZ?\s|pid=\d{1,10}(?:, ip=[\da-f.:]{1,45})?\) |std(?:out|err) F )(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|StopIteration))(?:: (?P<message>.*))?$",
        classes=(FailureClass.PROGRAM_ERROR,),
        confidence=Confidence.LIKELY,
        message="the program raised {type}: {message}",
        remedy=("fix what raised it: the traceback above the line has every frame on the way there",),
        needs=("first-traceback",),
        source="Python",
        fallback=True,
    ),
)
