"""Rules for exceptions that no other rule matches, by topic: of the program, or of what made it fail."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="connection-exception",
        lines=(
            "RuntimeError: Connection refused",
            "TimeoutError: timed out waiting for workers to connect",
            "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Deadline Exceeded",
        ),
        pattern=r"(?:Error|Exception): (?i:.{0,200}\b(?:connect(?:ion|ing)?|rendezvous|sockets?|timed out|deadline exceeded|unreachable|(?:service|server|code\.) ?unavailable|heartbeats?)\b)",
        classes=(
            FailureClass.RENDEZVOUS,
            FailureClass.FIREWALL,
            FailureClass.PROGRAM_ERROR,
            FailureClass.STRAGGLER,
            FailureClass.WRONG_INTERFACE,
            FailureClass.OOM_HOST,
        ),
        message="the program raised an error about connecting or waiting: its own, or of a missing peer or service",
        remedy=("the traceback above the line names the peer or service; read its log",),
        needs=("first-traceback", "peer-log", "reachable"),
        source="Python",
        fallback=True,
    ),
    Rule(
        code="count-exception",
        lines=(
            "AssertionError: global batch size (1024) is not divisible by micro batch size (4) times data parallel size (6)",
            "RuntimeError: Invalid mesh shape: data parallel 4 * tensor parallel 4 != WORLD_SIZE(8)",
            "KeyError: 'LOCAL_RANK'",
            "ValueError: No slot '4' specified on host 'worker-1'",
            "ValueError: You set `devices=4` in Lightning, but the number of tasks per node configured in SLURM `--ntasks-per-node=8` does not match. HINT: Set `devices=8`.",
        ),
        pattern=r"(?:Error|Exception): (?i:.{0,160}\b(?:world[ _]size|data[ _]parallel|tensor[ _](?:model[ _])?parallel|pipeline|num(?:ber of)?[ _](?:gpus|nodes|processes|ranks|tasks)|process group|n(?:proc|tasks)|micro[ _]batch\w*|devices?|hostfile|slot|mesh|rank|num of nodes)\b.{0,120}(?:interval|must be in|divisible|match|exceed|greater|less than|larger|smaller|equal|at least|twice|!=|specified|not found|not supported|initialized)|.{0,160}\bnot (?:divisible|a multiple).{0,120}\b(?:parallel|batch|world)\b)|KeyError: '(?:(?:LOCAL_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|SLURM_\w{1,40})'|Hostname '\S+' not found in hostfile",
        classes=(FailureClass.RANK_COUNT, FailureClass.PROGRAM_ERROR, FailureClass.NOT_STARTED),
        message="the configured numbers of ranks, GPUs or parts are inconsistent, or the program was started by the "
        "wrong launcher",
        remedy=(
            "nodes x GPUs per node = data x tensor x pipeline parallel sizes; the batch is a multiple of what one "
            "step takes",
            "use one launcher to start the ranks, with the numbers of the configuration",
        ),
        needs=("who-joined", "gpus-seen", "first-traceback"),
        source="Megatron-LM, DeepSpeed, Lightning, vLLM, torch",
        fallback=True,
    ),
    Rule(
        code="version-exception",
        lines=(
            "RuntimeError: Version mismatch: The cluster was started with:",
            "TypeError: init_process_group() got an unexpected keyword argument 'device_id'",
            "RuntimeError: Ninja is required to load C++ extensions",
            "train.py: error: unrecognized arguments: --local-rank=0",
        ),
        pattern=r"(?:Error|Exception): (?i:.{0,160}(?:version mismatch|mismatch.{0,40}version|mismatches the version|incompatible|not compatible|unsupported version|unexpected keyword argument|requires \S+ ?(?:>=|version|\d)|not (?:been )?(?:built|compiled) with|is required to load|doesn't have \w+ built in|has no attribute|cannot import name))|unrecognized arguments: --local[-_]rank",
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.PROGRAM_ERROR),
        message="the program raised an error that suggests two incompatible versions",
        remedy=("install the versions that the program was written for, the same on every node",),
        needs=("versions", "first-traceback"),
        source="Python",
        fallback=True,
    ),
    Rule(
        code="memory-exception",
        lines=(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
            'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1006, please report a bug to PyTorch.',
        ),
        pattern=r"(?:Error|Exception): (?i:.{0,160}(?:out of memory|cannot allocate memory|not enough memory|insufficient memory|no available memory|memory utilization|CachingAllocator|KV cache|find an engine to execute|CUSOLVER_STATUS))",
        classes=(FailureClass.OOM_GPU, FailureClass.OOM_HOST, FailureClass.PROGRAM_ERROR),
        message="the program raised an error about memory",
        remedy=(
            "nvidia-smi on that node shows the other processes on the GPU; a smaller batch, or less for the cache",
        ),
        needs=("memory-use", "kernel-log"),
        source="vLLM, torch",
        fallback=True,
    ),
    Rule(
        code="data-exception",
        lines=(
            "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
            "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
        ),
        pattern=r"\bDataset\w{0,40}Error\b|NonMatching(?:Splits|Checksum)\w*Error|The size of tensor a \(\d+\) must match|shapes cannot be multiplied|Expected all tensors to be the same size",
        classes=(FailureClass.NAN_DATA, FailureClass.PROGRAM_ERROR, FailureClass.STORAGE),
        message="the program raised an error about its data, or about the data's shape",
        remedy=("check the sample and the file that the traceback names; the same configuration on every rank",),
        needs=("first-traceback",),
        source="datasets, torch",
        fallback=True,
    ),
)
