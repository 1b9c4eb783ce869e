"""What the active probes print: JSON lines of progress, and one result per rank."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ProbeStage(StrEnum):
    """The probes, in the order in which they run."""

    ARRIVE = "arrive"
    """Every rank reaches the store."""
    MATMUL = "matmul"
    MEMORY = "memory"
    NODE_ALL_REDUCE = "node-all-reduce"
    """Among the ranks of each node."""
    PAIRS = "pairs"
    """Among pairs of nodes."""
    ALL_REDUCE = "all-reduce"
    """Among all nodes that no probe before has named."""
    STORAGE = "storage"
    """All nodes write checkpoints' file system at the same time."""
    END = "end"


STAGE_TEXT: dict[ProbeStage, str] = {
    ProbeStage.ARRIVE: "nodes meet",
    ProbeStage.MATMUL: "devices multiply matrices and train a small model",
    ProbeStage.MEMORY: "devices copy memory",
    ProbeStage.NODE_ALL_REDUCE: "all-reduce within each node",
    ProbeStage.PAIRS: "all-reduce between pairs of nodes",
    ProbeStage.ALL_REDUCE: "all-reduce over all nodes",
    ProbeStage.STORAGE: "all nodes write to the file system of checkpoints",
    ProbeStage.END: "done",
}


class MatmulRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device's matrix products of one type."""

    dtype: str
    tflop_s: float
    products: int
    wrong: int = 0
    """Products that are not bit-exact."""


class MiniModelAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What training a tiny transformer gives on a device: bit-exact for devices of equal arithmetic."""

    arithmetic: str
    """What decides how it rounds, such as `NVIDIA H100 80GB HBM3, torch 2.10.0`."""
    digest: str
    """Of the weights at the end."""
    contradictions: int = 0
    """Repetitions that gave other weights."""


class WidthRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Products of square weights of one width with many tokens."""

    width: int
    tflop_s: float


class TrainingRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank's CPU reaches in the parts of a training step while the node's other ranks compute too: means."""

    products: tuple[WidthRate, ...]
    """Linear layers, forward and backward pass, narrowest first."""
    attention_tflop_s: float
    """Fused causal attention, forward and backward pass, of the FLOPs below the diagonal."""
    elementwise_gb_s: float
    """An activation function and a product, forward and backward pass: bytes read and written."""
    adamw_s: float
    """A step of AdamW, per parameter."""
    operation_s: float
    """An operation on one element."""


class DeviceRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank's device does alone."""

    rank: int
    node: int
    device: str
    """Its name, such as `NVIDIA H100 80GB HBM3 (cuda:3)`."""
    matmul: tuple[MatmulRate, ...] = ()
    mini_model: MiniModelAnswer | None = None
    training: TrainingRates | None = None
    """Of a CPU; a GPU's are those of published runs."""
    copy_gb_s: float = 0.0
    """Memory bandwidth of a copy: bytes read and bytes written."""
    wrong_copies: int = 0
    shared: bool = False
    """Whether other processes use it too, as they do a CPU: its rates are not compared with those of others."""


class AllReduceRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An all-reduce of one size. Bandwidths as nccl-tests defines them."""

    size_bytes: int
    time_s: float
    algorithm_gb_s: float
    """Size over time."""
    bus_gb_s: float
    """Algorithm bandwidth times 2(n - 1)/n: what each rank sends, whatever the number of ranks."""
    wrong: bool = False
    """Whether the sum is not the exact one."""


class DataParallelRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What DDP and FSDP2 add to a forward and backward pass on CPUs: means."""

    ddp_parameter_s: float
    fsdp_layer_s: float
    """For each layer."""
    fsdp_parameter_s: float
    """For each parameter, in addition."""


class NodeAllReduce(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All-reduces among the ranks of one node."""

    node: int
    rates: tuple[AllReduceRate, ...]
    data_parallel: DataParallelRates | None = None
    """Among the same ranks; None for GPUs."""


class PairRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement between two nodes."""

    nodes: tuple[int, int]
    lane: int = 0
    """The local rank at both ends."""
    gb_s: float | None = None
    """None: it failed, or there was no answer."""
    problem: str = ""


class StorageRates(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the file system of checkpoints gives to a node while all nodes use it."""

    node: int
    folder: str
    write_mb_s: float
    """Until the bytes are on the disk."""
    read_mb_s: float
    """What the node has just written: a file system may have it in a cache."""
    sync_s: float
    """Median seconds in which a small write reaches the disk."""
    files_per_s: float
    """Files that are created, looked up and deleted."""


class Located(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What explains the slow and failed pairs."""

    nodes: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    """Pairs that are slow or failed although both nodes communicate well with others; or the only pair."""
    none_good: bool = False
    """Whether all of several pairs are slow or failed, so that no node differs from the others."""


class ProbeSuspect(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node, or the link between two, that a probe names, with its evidence."""

    stage: ProbeStage
    nodes: tuple[int, ...]
    """One node; two: the link between them; all: no node differs from the others."""
    ranks: tuple[int, ...] = ()
    """The ranks of the evidence, where not all of the node's."""
    evidence: tuple[str, ...] = ()


class ProbeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """A line of output."""


class ProbeProgress(ProbeLine, frozen=True, kw_only=True, tag="progress"):
    """A stage begins on this rank."""

    rank: int
    stage: ProbeStage
    elapsed_s: float
    deadline_s: float
    """Seconds that the stage may take."""
    peer: int | None = None
    """The other node of a pair."""


class ProbeOutcome(StrEnum):
    """How the probes ended."""

    PASSED = "passed"
    FAILED = "failed"
    """There are suspects."""
    INCOMPLETE = "incomplete"
    """The coordinator, rank 0, or its store did not answer, so that this rank knows its own results only."""


class ProbeResult(ProbeLine, frozen=True, kw_only=True, tag="result"):
    """The last line. Rank 0 has the results of all ranks; the others have their own devices' only."""

    rank: int
    outcome: ProbeOutcome
    elapsed_s: float
    problem: str = ""
    """Why it is incomplete."""
    suspects: tuple[ProbeSuspect, ...] = ()
    devices: tuple[DeviceRates, ...] = ()
    node_all_reduce: tuple[NodeAllReduce, ...] = ()
    pairs: tuple[PairRate, ...] = ()
    all_reduce: tuple[AllReduceRate, ...] = ()
    storage: tuple[StorageRates, ...] = ()
    not_run: tuple[ProbeStage, ...] = ()
    """Stages for which no time was left, or that do not apply."""


MAX_DEVICES = 1024
MAX_PAIRS = 2048
MAX_SUSPECTS = 64
MAX_EVIDENCE = 8


def keep_slowest(result: ProbeResult) -> ProbeResult:
    """The result as an event has it, which must not be large: the slowest lane of each pair, of many the slowest."""
    slowest: dict[tuple[int, int], PairRate] = {}
    for each in sorted(result.pairs, key=lambda each: each.gb_s or 0.0):
        slowest.setdefault(each.nodes, each)
    return msgspec.structs.replace(
        result,
        pairs=tuple([*slowest.values()][:MAX_PAIRS]),
        devices=result.devices[:MAX_DEVICES],
        storage=tuple(sorted(result.storage, key=lambda each: each.write_mb_s)[:MAX_DEVICES]),
        node_all_reduce=tuple(
            NodeAllReduce(node=each.node, rates=each.rates[-1:]) for each in result.node_all_reduce[:MAX_DEVICES]
        ),
        suspects=tuple(
            msgspec.structs.replace(each, evidence=each.evidence[:MAX_EVIDENCE], ranks=each.ranks[:MAX_EVIDENCE])
            for each in result.suspects[:MAX_SUSPECTS]
        ),
    )
