"""The job model: every field a user can set, with its unit, default and meaning.

The same models are the Python API. The file is long because it is the single list of job fields: the loader, the
schema and the reference page read these models. rules.py checks between fields, local_preflight.py and job_checks.py
(launch/) what a target can do. A value reaches ranks by launch/rank_env.py, agents by `StartRanks`
(protocol/orders.py), which controller_main.py fills in. loader.py reads job files; targets.py says where a job runs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from holdfast.failure_rates import standby_count
from holdfast.protocol.watch_levels import WatchLevel

JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
NODES_PATTERN = r"^[0-9]{1,6}(\.\.[0-9]{1,6})?$"
OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?){0,3}$"
QUALIFIED_NAME_PATTERN = r"^([a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
PART_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
MAX_NODES = 100_000
MIN_LOG_BYTES = 1 << 20
SIZE_PATTERN = r"^([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGTP]i?)?B?$"

PATTERN_TEXT: Mapping[str, str] = {
    JOB_NAME_PATTERN: "lower-case letters, digits and hyphens, starting with a letter, at most 40",
    ENV_NAME_PATTERN: "letters, digits and underscores, not starting with a digit",
    OBJECT_NAME_PATTERN: "lower-case letters, digits, hyphens and dots, as names of Kubernetes objects do, at most 63",
    QUALIFIED_NAME_PATTERN: "a prefix such as `nvidia.com/`, and letters, digits, hyphens, underscores and dots",
    PART_NAME_PATTERN: "lower-case letters, digits and hyphens, at most 63",
    LABEL_VALUE_PATTERN: "letters, digits, hyphens, underscores and dots, at most 63, as label values do",
}
"""Each pattern in plain English, for messages."""

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
_UNITS = {"": 1}
for _power, _prefix in enumerate("KMGTP", 1):
    _UNITS[_prefix] = 1000**_power
    _UNITS[f"{_prefix}i"] = 1024**_power


class Model(BaseModel):
    """A frozen model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Launch(StrEnum):
    """Who starts the ranks."""

    PER_RANK = "per-rank"
    """holdfast starts the command once per rank."""
    PER_NODE = "per-node"
    """holdfast starts the command once per node, and the command starts the ranks, as torchrun does."""
    ACCELERATE = "accelerate"
    """Once per node; the command is an `accelerate launch` line, to which holdfast adds the node's arguments."""
    DEEPSPEED = "deepspeed"
    """Once per node; the command is a `deepspeed` line, to which holdfast adds the node's arguments and a host file."""
    MPI = "mpi"
    """The command is an `mpirun` line; holdfast starts it on the first node and Open MPI's daemons on the others."""


class Orchestrator(StrEnum):
    """What starts the agents of nodes, and watches their processes."""

    HOLDFAST = "holdfast"
    """The target itself."""
    MONARCH = "monarch"
    """Monarch: each agent is in another process mesh."""


def _check_text(text: str) -> str:
    """Reject characters that no program, path or log line can carry."""
    bad = _NOT_TEXT.search(text)
    if bad:
        raise PydanticCustomError("bad-text", "contains the character U+{code}", {"code": f"{ord(bad[0]):04X}"})
    return text


def _scalar_text(value: object) -> object:
    """Convert a number or boolean to text: `1` is `"1"`, true is `"true"`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) and abs(value) < 10**40 else value


def _split_command(value: object) -> object:
    """Split text into words as a shell does, joining lines that end in a backslash; no shell runs."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value.replace("\\\n", " "))
    except ValueError as error:
        reason = "a quotation is not closed" if "quotation" in str(error) else "it ends in a backslash"
        raise PydanticCustomError("bad-command", "cannot be split into words: {reason}", {"reason": reason}) from None


def _parse_size(value: object) -> object:
    """Parse `16GiB` or `500M` to bytes; numbers are bytes already, and other types pass through to type validation."""
    if not isinstance(value, str):
        return value
    size = re.fullmatch(SIZE_PATTERN, value)
    if size is None:
        raise PydanticCustomError("bad-size", "is not a size such as 16GiB or 500M")
    return int(float(size[1]) * _UNITS[size[2] or ""])


def _seconds_or_auto(value: object) -> object:
    """Reject anything else here, so that it gets one finding instead of two. YAML reads `off` as false."""
    if value == "off" or value is False:
        return None
    seconds = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if value is None or value == "auto" or seconds:
        return value
    raise PydanticCustomError("bad-value", "must be a number of seconds above 0, auto or off")


def _count_or_auto(of: str) -> BeforeValidator:
    """Reject anything else here, as above."""

    def check(value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NODES):
            return value
        raise PydanticCustomError("bad-value", "must be a number of {of}, or auto", {"of": of})

    return BeforeValidator(check)


def _check_log_size(size: int) -> int:
    """Reject a limit too small for a rank's final output."""
    if size < MIN_LOG_BYTES:
        raise PydanticCustomError("bad-size", "must be at least 1MiB")
    return size


Text = Annotated[str, AfterValidator(_check_text)]
ScalarText = Annotated[Text, BeforeValidator(_scalar_text, json_schema_input_type=str | int | float | bool)]
NonEmpty = Annotated[Text, Field(min_length=1)]
Count = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Seconds = Annotated[Number, Field(gt=0)]
BytesInput = Annotated[int, Field(gt=0, le=2**60)] | Annotated[str, Field(pattern=SIZE_PATTERN)]
Bytes = Annotated[
    Count,
    Field(gt=0, le=2**60),
    BeforeValidator(_parse_size, json_schema_input_type=BytesInput),
]
JobName = Annotated[str, Field(pattern=JOB_NAME_PATTERN)]
EnvName = Annotated[str, Field(pattern=ENV_NAME_PATTERN)]


class GlobalBatch(StrEnum):
    """What happens to the global batch when the number of nodes changes."""

    KEEP = "keep"
    """Fewer ranks take more micro-batches each, so that a step has the same samples."""
    SCALE = "scale"
    """Each rank keeps its share, so that fewer ranks have fewer samples per step."""


class LearningRate(StrEnum):
    """What happens to the learning rate when the global batch is scaled."""

    KEEP = "keep"
    LINEAR = "linear"
    """Scales linearly with the batch, for SGD."""
    SQRT = "sqrt"
    """Scales with the square root of the batch, for Adam."""


class Nodes(Model):
    """Number of nodes of the job: a number, or a range `min..max` for an elastic job."""

    min: Count = Field(ge=1, le=MAX_NODES)
    """Minimum number of nodes."""
    max: Count = Field(ge=1, le=MAX_NODES)
    """Maximum number of nodes."""
    min_nodes_wait_s: Seconds = 60.0
    """Seconds that the job waits for unavailable nodes before it continues without them, if `min` have joined.

    For available nodes it waits until they join, at most `recovery.join_timeout_s`.
    """
    scale_up_timeout_s: Seconds = 1800.0
    """Longest time, in seconds, that a run waits for its next checkpoint before it restarts with a returned node.

    Ranks with a `holdfast.train` Session save one at the next step, so only other programs make it wait.
    """

    @property
    def is_elastic(self) -> bool:
        """Whether the job can run on fewer than `max` nodes."""
        return self.min < self.max

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min > self.max:
            counts = {"min": self.min, "max": self.max}
            raise PydanticCustomError("bad-nodes", "asks for at least {min} but at most {max} nodes", counts)
        return self


NodesInput = Annotated[int, Field(ge=1, le=MAX_NODES)] | Annotated[str, Field(pattern=NODES_PATTERN)] | Nodes


def _nodes_object(value: object) -> object:
    if isinstance(value, float) or value is True or value is False:
        raise PydanticCustomError("bad-nodes", "must be a whole number such as 4, or a range such as 2..4")
    if not isinstance(value, int | str):
        return value
    if isinstance(value, str) and not re.fullmatch(NODES_PATTERN, value):
        raise PydanticCustomError("bad-nodes", "is not a number of nodes such as 4, or a range such as 2..4")
    low, _, high = str(value).partition("..")
    counts = {"min": int(low), "max": int(high or low)}
    if min(counts.values()) < 1:
        raise PydanticCustomError("bad-nodes", "must be at least 1")
    if max(counts.values()) > MAX_NODES:
        raise PydanticCustomError("bad-nodes", "must be at most {most}", {"most": MAX_NODES})
    return counts


def _object_with(key: str, *, optional: bool = False) -> Callable[[object], object]:
    def expand(value: object) -> object:
        if isinstance(value, dict | BaseModel) or (optional and value is None):
            return cast(object, value)
        return {key: value}

    return expand


SHORTHANDS: Mapping[str, Callable[[object], object]] = {
    "nodes": _nodes_object,
    "fabric": _object_with("name"),
    "checkpoint": _object_with("path"),
    "checks": _object_with("before_start"),
    "placement": _object_with("level", optional=True),
}
"""Fields where a scalar is short for an object: `fabric: infiniband` is `fabric: {name: infiniband}`."""


def _shorthand(field: str, input_type: Any) -> BeforeValidator:
    return BeforeValidator(SHORTHANDS[field], json_schema_input_type=input_type)


class SecretRef(Model):
    """Source of a secret's value, read when the run starts; the job never contains the value."""

    env: EnvName | None = None
    """Name of an environment variable of the user who starts the run."""
    file: NonEmpty | None = None
    """Path of a file with the value; one trailing newline is dropped."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise PydanticCustomError("bad-secret", "must name exactly one source: `env` or `file`")
        return self

    def read(self, base: Path, environ: Mapping[str, str]) -> str:
        """Read the value; raises KeyError or OSError if there is none. Files are relative to `base`; `~` is home."""
        if self.env is not None:
            return environ[self.env]
        return self.path(base).read_text().removesuffix("\n")

    def path(self, base: Path) -> Path:
        """Absolute path of the file."""
        return base / Path(self.file or "").expanduser()


class Code(Model):
    """Code that is sent to nodes that do not share the working directory."""

    root: NonEmpty = "."
    """Folder to ship, relative to `workdir`: `.`, or a folder above it such as `..`."""
    ignore: tuple[NonEmpty, ...] = (".git", ".venv", "__pycache__", ".holdfast/runs")
    """Patterns to exclude, as in a .gitignore; those in `.holdfastignore` in `root` are appended."""
    max_bytes: Bytes = 512 * 1024**2
    """Maximum total size of the files, in bytes or such as `2GiB`; larger code is rejected."""


class Resources(Model):
    """Resources of one node."""

    cpu: Number | None = Field(default=None, gt=0)
    """CPU cores per node; none means all cores of the node."""
    memory: Bytes | None = None
    """Memory per node, in bytes or such as `16GiB`; the kernel kills a rank on a node that uses more.

    Files in /dev/shm and holdfast's agent (60 MB) count. The local target needs a delegated memory cgroup;
    `holdfast validate` reports if there is none.
    """
    shm: Bytes | None = None
    """Size of /dev/shm per node, in bytes or such as `16GiB`."""


class OnFallback(StrEnum):
    """What happens when ranks communicate by another network or interface than the fabric's."""

    WARN = "warn"
    """The run continues, with a warning."""
    STOP = "stop"
    """The run ends."""


class Fabric(Model):
    """The network for collectives; `holdfast fabric` lists the names."""

    name: NonEmpty = "auto"
    """Name in the fabric catalogue; `auto` means the target's fabric."""
    env: dict[EnvName, ScalarText] = {}
    """Environment variables that override the catalogue's, such as NCCL_IB_HCA."""
    on_fallback: OnFallback = OnFallback.WARN
    """`stop` or `warn`: what happens when ranks communicate by another network or interface than the fabric's.

    A cluster's `template: production` makes it `stop`.
    """


class Checkpoint(Model):
    """Where and how often checkpoints are saved; used by `holdfast.train`.

    Without an interval, ranks save one at the end and when they receive a stop request.
    """

    path: NonEmpty | None = None
    """Folder that every node can reach, or an fsspec URL such as `s3://bucket/run`.

    None means a per-run folder in the target's `checkpoint_root`, else in the run's folder, which works on one machine
    only.
    """
    local: NonEmpty | None = None
    """Folder on each node's local disk where checkpoints are saved first; they are uploaded to `path` afterwards.

    The default for a URL is a subfolder of the run's folder on each node.
    """
    every_steps: Count | None = Field(default=None, ge=1)
    """Checkpoint interval, in committed steps."""
    every_s: Seconds | None = None
    """Checkpoint interval, in seconds."""
    every: Literal["auto"] | None = None
    """`auto`, instead of `every_s`: the interval that minimises lost time, from checkpoint cost and failure rate."""
    keep: Count = Field(default=3, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every_steps: Count | None = Field(default=None, ge=1)
    """Checkpoints of steps that are a multiple of this are never deleted."""

    @property
    def write_path(self) -> str | None:
        """The folder that ranks write to, if the job names one."""
        return self.local or (None if self.is_remote else self.path)

    @property
    def is_remote(self) -> bool:
        """Whether `path` is a URL."""
        return self.path is not None and "://" in self.path

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if self.every is not None and self.every_s is not None:
            raise PydanticCustomError(
                "bad-checkpoint-interval", "has both `every` and `every_s`, which say the same in two ways"
            )
        return self


QUICK_DEADLINE_S = 30.0
PROBE_DEADLINE_S = 180.0


class CheckLevel(StrEnum):
    """How thoroughly nodes are checked before ranks start on them."""

    OFF = "off"
    """Not at all."""
    QUICK = "quick"
    """GPUs, network, storage, limits and versions, as the node reports them: seconds at most."""
    FULL = "full"
    """Then also probes: GPUs compute, copy memory, and send to each other, within nodes and between them."""


class Checks(Model):
    """Checks of nodes; a node that fails gets no ranks."""

    before_start: CheckLevel = CheckLevel.OFF
    """`quick`, `full` or `off`: how a node is checked before it gets ranks, at first and after a replacement.

    `quick` reads what the node reports of itself. `full` also loads its GPUs and its network, with all nodes together.
    """
    deadline_s: Seconds | None = None
    """Seconds in which a node must have ended its checks, 30 by default; one that has not has failed.

    With `full`, seconds in which the probes must have ended, 180 by default.
    """

    @property
    def quick_deadline_s(self) -> float:
        """Seconds for the checks of one node."""
        if self.deadline_s is None:
            return QUICK_DEADLINE_S
        return min(self.deadline_s, QUICK_DEADLINE_S) if self.before_start is CheckLevel.FULL else self.deadline_s

    @property
    def probe_deadline_s(self) -> float:
        """Seconds for the probes of all nodes together."""
        return PROBE_DEADLINE_S if self.deadline_s is None else self.deadline_s


class Parallel(Model):
    """How a replica's ranks are divided: every group of `tp`, `cp`, `ep`, `dp` or `pp` communicates on its own.

    Ranks count up along `tp` first, then `cp`, `dp` and `pp`, as in Megatron-LM (`tp-cp-ep-dp-pp`) and torchtitan.
    holdfast divides nothing: it names the group in which a failure lies, and the program makes the groups.
    """

    tp: Count = Field(default=1, ge=1)
    """Ranks of a tensor-parallel group, which are neighbours."""
    cp: Count = Field(default=1, ge=1)
    """Ranks of a context-parallel group."""
    ep: Count = Field(default=1, ge=1)
    """Ranks of an expert-parallel group; they are taken from `cp` and `dp`, so it divides `cp` x `dp`."""
    dp: Count | None = Field(default=None, ge=1)
    """Ranks of a data-parallel group, sharded or not; none means what `tp`, `cp` and `pp` leave."""
    pp: Count = Field(default=1, ge=1)
    """Stages of the pipeline."""


class ModelPrecision(StrEnum):
    """Data type of the matrix products of a model's layers."""

    BF16 = "bf16"
    FP8 = "fp8"


class TrainingSoftware(StrEnum):
    """Kind of training program, as far as it changes what a step costs."""

    EAGER = "eager"
    """PyTorch without a compiler."""
    COMPILED = "compiled"
    """PyTorch with `torch.compile`, such as TorchTitan."""
    MEGATRON = "megatron"
    """Megatron-LM, NeMo and others with fused kernels and overlapped tensor parallelism."""


class ModelSpec(Model):
    """What the program trains, for `holdfast plan`; it changes nothing in a run."""

    config: NonEmpty
    """Name of a published model, such as `llama-3-8b`, or a transformers `config.json` relative to the job file."""
    sequence_length: Count = Field(ge=1)
    """Tokens per sequence."""
    global_batch_tokens: Count = Field(ge=1)
    """Tokens per optimizer step, of all ranks."""
    token_budget: Count | None = Field(default=None, ge=1)
    """Tokens of the whole training; none means that no GPU-hours and no cost are predicted."""
    precision: ModelPrecision = ModelPrecision.BF16
    """Data type of matrix products: `bf16` or `fp8`."""
    software: TrainingSoftware = TrainingSoftware.COMPILED
    """Kind of training program: `eager`, `compiled` or `megatron`."""


class PlacementMode(StrEnum):
    """What happens if a domain has no room."""

    REQUIRED = "required"
    """The job waits."""
    PREFERRED = "preferred"
    """The job spreads over as few domains as possible."""


class Slices(Model):
    """Equal groups of nodes, each within one domain of a lower level; node numbers of a slice are neighbours."""

    level: NonEmpty
    """Level of the domain of a slice, below that of the job."""
    nodes: Count = Field(ge=1, le=MAX_NODES)
    """Nodes of a slice; they divide the number of nodes."""


class Placement(Model):
    """Which part of the network has all nodes; nodes are numbered along it, so that neighbours are close."""

    level: NonEmpty
    """Level of the domain: a name of the target's `topology_levels`, such as `rack`, or a label of machines."""
    mode: PlacementMode = PlacementMode.REQUIRED
    """`required` waits for one domain with room for all nodes; `preferred` takes as few domains as possible."""
    slices: Slices | None = None
    """Smaller domains within it, such as NVLink domains; none means no further condition."""


class Watch(Model):
    """Detection of what is wrong with ranks and nodes that still run. Hangs: `recovery.step_timeout_s`."""

    device_faults: WatchLevel = WatchLevel.ACT
    """Failed GPUs, links and adapters that an agent sees before a rank fails."""
    non_finite: WatchLevel = WatchLevel.ACT
    """NaN or infinite losses, gradients and weights; acted on as soon as weights or optimizer state are damaged."""
    spikes: WatchLevel = WatchLevel.WARN
    """Losses and gradient norms of at least five times their running median."""
    stragglers: WatchLevel = WatchLevel.WARN
    """Ranks that compute slower than the others."""
    step_clock: Annotated[bool, Strict()] = True
    """Whether torch programs without a Session report their optimizer steps."""


class Logs(Model):
    """Retention of the ranks' output."""

    max_bytes: Annotated[Bytes, AfterValidator(_check_log_size)] | None = 2**30
    """Newest output to keep per rank, over all attempts, in bytes or such as `1GiB`; none means all.

    At least 1 MiB. Disk use may exceed it by an eighth plus one second of output.
    """


class OuterSyncSpec(Model):
    """Periodic synchronisation of replicas that step independently, as in TorchFT's LocalSGD and DiLoCo."""

    method: Literal["local_sgd", "diloco"]
    """`local_sgd`: averages the replicas' parameters. `diloco`: applies the mean of their parameter changes as the
    gradient of an outer optimizer."""
    every: Count = Field(ge=1)
    """Steps between two synchronisations."""


class Recovery(Model):
    """Failure detection and recovery."""

    max_restarts: Count = Field(default=10, ge=0)
    """Restarts allowed within `restart_window_s`; one more failure ends the run."""
    restart_window_s: Seconds = 3600.0
    """Length of the sliding window, in seconds, in which restarts count."""
    suspect_window_s: Seconds = 86_400.0
    """Seconds within which the second failure of a node replaces it, though each alone only restarts its ranks.

    Such failures are contained memory errors, CUDA errors without a clear cause, a lost network link, failed system
    calls of NCCL, a lost agent, a hang in which flight recorders name a rank of the node, and a rank that a signal
    ended without an error of the program. Faults of hardware replace the node immediately. The default is a day: at a
    published fleet's 6.5 failures per 1,000 node-days, two unrelated ones hit a node within a day once in
    47,000 node-days.
    """
    replicas: Count = Field(default=1, ge=1, le=MAX_NODES)
    """Number of replicas. Each holds the whole model; a failed replica restarts alone.

    The others keep committing steps, and it catches up from one of them. The nodes, or the ranks of each node, are
    divided evenly among replicas; each replica has its own RANK, WORLD_SIZE and MASTER_ADDR.
    """
    min_replicas: Count = Field(default=1, ge=1, le=MAX_NODES)
    """Minimum number of replicas that commit a step; with fewer alive, the others wait."""
    standby: Annotated[Count | Literal["auto"], _count_or_auto("nodes")] = 0
    """Standby nodes in addition to `nodes`, with checks, code and imports done; each can replace a lost node.

    `auto` covers the node failures of 99 in 100 days, at the failure rate of a published fleet: 1 standby for 2 or 8
    nodes, 13 for 1,000.
    """
    peer_checkpoints: Annotated[Count | Literal["auto"], _count_or_auto("steps")] = 0
    """Interval, in committed steps, of copying each rank's state to another node's memory; 0 means never.

    After a node loss, all ranks resume from the last copy, without storage. `auto` copies as often as possible while
    costing the loop at most 1 % of its time. A node needs memory for four times its ranks' state. Needs a
    `holdfast.train` Session and one replica: several replicas already hold copies.
    """
    outer_sync: OuterSyncSpec | None = None
    """For several replicas, such as `{method: diloco, every: 100}`: step independently and synchronise periodically.

    None means that they synchronise at every step. Needs a `holdfast.train` Session.
    """
    verify_every_steps: Count = Field(default=100, ge=0)
    """Interval, in steps, of comparing the weights and optimizer states of replicas, or of DDP ranks; 0 means never.

    It also happens after the first and after the last step. If replicas differ, the minority receives the majority's
    state; with two replicas the run resumes from the newest checkpoint up to their last agreement
    (`replicas-diverged`). With `outer_sync`, only weights are compared, at the next synchronisation.

    Ranks of the only replica that DDP keeps equal are compared as well, and another rank repeats a forward and
    backward pass of each. The node of a wrong rank is replaced (`silent-corruption`), and the run resumes from the
    newest checkpoint up to the last agreement. Needs a `holdfast.train` Session.
    """
    step_timeout_s: Annotated[Seconds | Literal["auto"] | None, BeforeValidator(_seconds_or_auto)] = "auto"
    """Seconds without a completed step after which a rank counts as hung; `off` means never.

    Applies to ranks with a `holdfast.train` Session, and to torch programs without one (`watch.step_clock`). Set it
    longer than the slowest normal step: without a Session, an evaluation and a checkpoint are part of one. With a
    Session, the first step of an attempt, which compiles and connects, has ten times this limit. So has work between
    two steps: a checkpoint, a wait for other replicas, an evaluation in `session.untimed()`.

    `auto` is three times the 99th percentile of the rank's own steps plus 0.75 s; the limit for the first step and for
    work between steps is then ten minutes. Until eight more steps are known, any of them may recompile: their limit is
    three times the longest so far, including the first, plus 30 s. Time in which a rank is runnable but has no CPU does
    not count. With one replica, a rank that uses the CPU, moves data or waits for a disk does not count as hung with
    `auto`, and within these limits no rank does before all of them are silent (docs/hangs.md).
    """
    exit_timeout_s: Seconds | None = 600.0
    """Seconds that threads may keep a rank's process alive after its program has ended; none means no limit.

    Python waits for every non-daemon thread. Such a rank is reported after 10 s and killed at this limit; its outcome
    is then its program's, success or error. Applies only to ranks with a `holdfast.train` Session.
    """
    join_timeout_s: Seconds = 120.0
    """Seconds within which a created node must join; otherwise it is replaced, at most three times."""
    global_batch: GlobalBatch = GlobalBatch.KEEP
    """What happens to the global batch when the number of nodes changes: `keep` or `scale`.

    Applies only to ranks that take their micro-batches from a `holdfast.train` Session.
    """
    learning_rate: LearningRate = LearningRate.KEEP
    """What happens to the learning rate when the global batch is scaled: `keep`, `linear` or `sqrt`.

    Needs a `holdfast.train` Session.
    """
    stop_grace_s: Annotated[Number, Field(ge=0)] = 30.0
    """Seconds between SIGTERM and SIGKILL on cancel, on a node's preemption notice, and on scale-up.

    A recovery sends SIGKILL immediately.
    """
    node_grace_s: Seconds = 45.0
    """Seconds without a heartbeat from a node's agent after which the node is replaced.

    A third is for detecting the silence, the rest for reconnecting. A network outage shorter than two thirds of it
    causes no restart by holdfast, as long as the ranks' own connections survive.
    """
    prewarm: Annotated[bool, Strict()] = True
    """Whether to prewarm restarts: processes with imports done wait on each node for the next start of its ranks.

    Applies to `python ...` commands, not to the first start. The waiting processes need memory: about 0.4 GB per rank
    that uses torch.
    """
    controller_grace_s: Seconds = 1800.0
    """Seconds an agent runs without its controller before it requests a checkpoint, stops its ranks and exits."""


class Job(Model):
    """A training job: what to run, on how many nodes, and how to recover from failures."""

    version: Literal[1] = 1
    """Version of this schema."""
    name: JobName = "job"
    """Lower-case letters, digits and hyphens, at most 40; prefix of the run ids."""
    command: Annotated[
        tuple[ScalarText, ...],
        Field(min_length=1),
        BeforeValidator(_split_command, json_schema_input_type=str | list[ScalarText]),
    ]
    """The program and its arguments: a list, or one string that is split into words like in a shell (no shell runs)."""
    launch: Launch = Launch.PER_RANK
    """Who starts the ranks: holdfast (`per-rank`), or the command (all others)."""
    image: NonEmpty | None = None
    """Container image; the local target ignores it with a warning."""
    workdir: NonEmpty = "."
    """Working directory of the command, relative to the job file."""
    code: Code = Code()
    """The code to ship, if the target ships it; otherwise the local target runs in `workdir` itself."""
    env: dict[EnvName, ScalarText] = {}
    """Environment variables of every rank."""
    secrets: dict[EnvName, SecretRef] = {}
    """Environment variables whose values are read when the run starts.

    They are stored only in a private file in the run's folder, until the run ends.
    """
    nodes: Annotated[Nodes, _shorthand("nodes", NodesInput)] = Nodes(min=1, max=1)
    """How many nodes: a number, or `min..max`."""
    gpus_per_node: Count = Field(default=0, ge=0, le=64)
    """GPUs per node."""
    ranks_per_node: Count | None = Field(default=None, ge=1, le=1024)
    """Ranks per node; none means one per GPU, or one without GPUs."""
    resources: Resources = Resources()
    """CPU, memory and shared memory per node."""
    parallel: Parallel | None = None
    """How the program divides its ranks into parallel groups, so that diagnoses can name one; none means unknown."""
    model: ModelSpec | None = None
    """What the program trains, for `holdfast plan`; none means unknown."""
    fabric: Annotated[Fabric, _shorthand("fabric", str | Fabric)] = Fabric()
    """The network for collectives."""
    checkpoint: Annotated[Checkpoint, _shorthand("checkpoint", str | Checkpoint)] = Checkpoint()
    """Where and how often checkpoints are saved."""
    recovery: Recovery = Recovery()
    """Failure detection, restarts, replicas and standby nodes."""
    checks: Annotated[Checks, _shorthand("checks", CheckLevel | Checks)] = Checks()
    """Whether nodes are checked before ranks start on them; a cluster's `template: production` makes it `quick`."""
    watch: Watch = Watch()
    """What is detected in ranks that still run, and whether it is acted on."""
    logs: Logs = Logs()
    """How much rank output is kept."""
    queue: NonEmpty | None = None
    """Cluster queue of the job; none means the target's. The local target has no queues."""
    priority: NonEmpty | None = None
    """Priority class of the job in its queue, on Kubernetes a WorkloadPriorityClass; none means the queue's default."""
    placement: Annotated[Placement | None, _shorthand("placement", str | Placement | None)] = None
    """Which part of a cluster's network has all nodes; none means anywhere."""
    orchestrator: Orchestrator = Orchestrator.HOLDFAST
    """What starts each node's agent; `monarch` needs the extra `monarch`, and a target other than Kubernetes."""

    @property
    def local_world_size(self) -> int:
        """Ranks per node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def processes_per_node(self) -> int:
        """Processes that holdfast itself starts per node."""
        return self.local_world_size if self.launch is Launch.PER_RANK else 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes.max * self.local_world_size

    @property
    def standbys(self) -> int:
        """Number of standby nodes."""
        standby = self.recovery.standby
        return standby_count(self.nodes.max) if standby == "auto" else standby

    @property
    def node_slots(self) -> int:
        """Number of requested nodes: training nodes plus standby nodes."""
        return self.nodes.max + self.standbys

    @property
    def replica_world_size(self) -> int:
        """Ranks per replica."""
        return self.world_size // self.recovery.replicas

    def learning_rate_factor(self, world_size: int, full_world_size: int) -> float:
        """Factor for the learning rate when `world_size` of `full_world_size` ranks train."""
        ratio = world_size / full_world_size
        if self.recovery.global_batch is GlobalBatch.KEEP:
            return 1.0
        match self.recovery.learning_rate:
            case LearningRate.KEEP:
                return 1.0
            case LearningRate.LINEAR:
                return ratio
            case LearningRate.SQRT:
                return math.sqrt(ratio)
