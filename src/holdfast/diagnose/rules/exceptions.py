"""Rules for exceptions that no other rule matches, by topic: of the program, or of what made it fail."""

from __future__ import annotations

from holdfast.diagnose.failure_classes import FailureClass
from holdfast.diagnose.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="connection-exception",
        matches={
            r"(?:Error|Exception): (?i:.{0,200}\b(?:connect(?:ion|ing)?|rendezvous|sockets?|timed out|deadline exceeded|unreachable|(?:service|server|code\.) ?unavailable|heartbeats?)\b)": "RuntimeError: Connection refused",
        },
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
        matches={
            r"(?:Error|Exception): (?i:.{0,160}\b(?:world[ _]size|data[ _]parallel|tensor[ _](?:model[ _])?parallel|pipeline|num(?:ber of)?[ _](?:gpus|nodes|processes|ranks|tasks)|process group|n(?:proc|tasks)|micro[ _]batch\w*|devices?|hostfile|slot|mesh|rank|num of nodes)\b.{0,120}(?:interval|must be in|divisible|match|exceed|greater|less than|larger|smaller|equal|at least|twice|!=|specified|not found|not supported|initialized)|.{0,160}\bnot (?:divisible|a multiple).{0,120}\b(?:parallel|batch|world)\b)": "AssertionError: global batch size (1024) is not divisible by micro batch size (4) times data parallel size (6)",
            r"KeyError: '(?:(?:LOCAL_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|SLURM_\w{1,40})'": "KeyError: 'LOCAL_RANK'",
            r"Hostname '\S+' not found in hostfile": "ValueError: Hostname 'n3' not found in hostfile",
        },
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
        matches={
            r"(?:Error|Exception): (?i:.{0,160}(?:version mismatch|mismatch.{0,40}version|mismatches the version|incompatible|not compatible|unsupported version|unexpected keyword argument|requires \S+ ?(?:>=|version|\d)|not (?:been )?(?:built|compiled) with|is required to load|doesn't have \w+ built in|has no attribute|cannot import name))": "RuntimeError: Version mismatch: The cluster was started with:",
            r"unrecognized arguments: --local[-_]rank": "train.py: error: unrecognized arguments: --local-rank=0",
        },
        classes=(FailureClass.VERSION_MISMATCH, FailureClass.PROGRAM_ERROR),
        message="the program raised an error that suggests two incompatible versions",
        remedy=("install the versions that the program was written for, the same on every node",),
        needs=("versions", "first-traceback"),
        source="Python",
        fallback=True,
    ),
    Rule(
        code="memory-exception",
        matches={
            r"(?:Error|Exception): (?i:.{0,160}(?:out of memory|cannot allocate memory|not enough memory|insufficient memory|no available memory|memory utilization|CachingAllocator|KV cache|find an engine to execute|CUSOLVER_STATUS))": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        },
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
        matches={
            r"\bDataset\w{0,40}Error\b": "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
            r"NonMatching(?:Splits|Checksum)\w*Error": "datasets.exceptions.NonMatchingSplitsSizesError: [{'expected': SplitInfo(name='train')}]",
            r"The size of tensor a \(\d+\) must match": "RuntimeError: The size of tensor a (4096) must match the size of tensor b (2048) at non-singleton dimension 1",
            r"shapes cannot be multiplied": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 768x10)",
            r"Expected all tensors to be the same size": "Expected all tensors to be the same size, but got [3] and [4]",
        },
        classes=(FailureClass.NAN_DATA, FailureClass.PROGRAM_ERROR, FailureClass.STORAGE),
        message="the program raised an error about its data, or about the data's shape",
        remedy=("check the sample and the file that the traceback names; the same configuration on every rank",),
        needs=("first-traceback",),
        source="datasets, torch",
        fallback=True,
    ),
)
