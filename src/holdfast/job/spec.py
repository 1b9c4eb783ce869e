"""Owns what a job is: every field a researcher can set, its unit, its default and what it means.

Refuses to own how a job file is read (document.py), where it runs (target.py), or what any back end makes of it.
The same models are the Python API. A long file, because it is the one list of what a job can say.
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

JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
NODES_PATTERN = r"^[0-9]{1,6}(\.\.[0-9]{1,6})?$"
OBJECT_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?){0,3}$"
QUALIFIED_NAME_PATTERN = r"^([a-z0-9]([-a-z0-9.]{0,100}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
MAX_NODES = 100_000
MIN_LOG_BYTES = 1 << 20
SIZE_PATTERN = r"^([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([KMGTP]i?)?B?$"

PATTERN_TEXT: Mapping[str, str] = {
    JOB_NAME_PATTERN: "lower-case letters, digits and hyphens, starting with a letter, at most 40",
    ENV_NAME_PATTERN: "letters, digits and underscores, not starting with a digit",
    OBJECT_NAME_PATTERN: "lower-case letters, digits, hyphens and dots, as names of Kubernetes objects do, at most 63",
    QUALIFIED_NAME_PATTERN: "a prefix such as `nvidia.com/`, and letters, digits, hyphens, underscores and dots",
}
"""What each pattern a field must match means to a person."""

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
_UNITS = {"": 1}
for _power, _prefix in enumerate("KMGTP", 1):
    _UNITS[_prefix] = 1000**_power
    _UNITS[f"{_prefix}i"] = 1024**_power


class Model(BaseModel):
    """Frozen, and refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Launch(StrEnum):
    """Who starts the ranks."""

    PER_RANK = "per-rank"
    """holdfast starts the command once for every rank."""
    PER_NODE = "per-node"
    """The command is started once on every node and starts its own ranks, as torchrun does."""
    ACCELERATE = "accelerate"
    """Per node; the command is an `accelerate launch` line, which is given its node's arguments."""
    DEEPSPEED = "deepspeed"
    """Per node; the command is a `deepspeed` line, which is given its node's arguments and a host file."""
    MPI = "mpi"
    """The command is an `mpirun` line, started on the first node; Open MPI's daemons are started on the others."""


def _check_text(text: str) -> str:
    """Refuse what no program, path or log line can carry."""
    bad = _NOT_TEXT.search(text)
    if bad:
        raise PydanticCustomError("bad-text", "contains the character U+{code}", {"code": f"{ord(bad[0]):04X}"})
    return text


def _scalar_text(value: object) -> object:
    """Let a number or a switch stand for its text: `1` is `"1"`, true is `"true"`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) and abs(value) < 10**40 else value


def _split_command(value: object) -> object:
    """Split one line of text into words as a shell does, joining lines that end in a backslash; no shell is run."""
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value.replace("\\\n", " "))
    except ValueError as error:
        reason = "a quotation is not closed" if "quotation" in str(error) else "it ends in a backslash"
        raise PydanticCustomError("bad-command", "cannot be split into words: {reason}", {"reason": reason}) from None


def _parse_size(value: object) -> object:
    """Read `16GiB` or `500M` as bytes; a number is bytes already, and anything else is left for the type to refuse."""
    if not isinstance(value, str):
        return value
    size = re.fullmatch(SIZE_PATTERN, value)
    if size is None:
        raise PydanticCustomError("bad-size", "is not a size such as 16GiB or 500M")
    return int(float(size[1]) * _UNITS[size[2] or ""])


def _seconds_or_auto(value: object) -> object:
    """Refuse at once what is neither, so that one thing is said of it and not two."""
    seconds = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    if value is None or value == "auto" or seconds:
        return value
    raise PydanticCustomError("bad-value", "must be a number of seconds above 0, or auto")


def _count_or_auto(of: str) -> BeforeValidator:
    """Refuse at once what is neither, as above."""

    def check(value: object) -> object:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NODES):
            return value
        raise PydanticCustomError("bad-value", "must be a number of {of}, or auto", {"of": of})

    return BeforeValidator(check)


def _check_log_size(size: int) -> int:
    """Refuse a log that could not hold the last words of a rank."""
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
    """What becomes of the samples in a step when the number of nodes changes."""

    KEEP = "keep"
    """Each rank takes more micro-batches, so that a step has the same samples on fewer ranks."""
    SCALE = "scale"
    """Each rank takes what it always takes, so that a step has fewer samples on fewer ranks."""


class LearningRate(StrEnum):
    """What becomes of the learning rate when the global batch is scaled."""

    KEEP = "keep"
    LINEAR = "linear"
    """It is scaled like the batch, as suits SGD."""
    SQRT = "sqrt"
    """It is scaled like the batch's square root, as suits Adam."""


class Nodes(Model):
    """How many nodes the whole job uses: a number, or the range `min..max` it can live with."""

    min: Count = Field(ge=1, le=MAX_NODES)
    """Fewest nodes the job may run on."""
    max: Count = Field(ge=1, le=MAX_NODES)
    """Most nodes the job may use."""
    min_nodes_wait_s: Seconds = 60.0
    """Seconds that the job waits for nodes that cannot be had, before it goes on without them if `min` are there.

    A node that can be had is waited for until it has joined, or `recovery.join_timeout_s` is over.
    """
    scale_up_timeout_s: Seconds = 1800.0
    """Longest, in seconds, that a run waits for its next checkpoint before it restarts with a node that came back.

    Ranks with a `holdfast.train` Session take a checkpoint at once when asked, so only others make it wait.
    """

    @property
    def is_elastic(self) -> bool:
        """Whether the job can live with fewer nodes than it would like."""
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


def _object_with(key: str) -> Callable[[object], object]:
    def expand(value: object) -> object:
        return cast(object, value) if isinstance(value, dict | BaseModel) else {key: value}

    return expand


SHORTHANDS: Mapping[str, Callable[[object], object]] = {
    "nodes": _nodes_object,
    "fabric": _object_with("name"),
    "checkpoint": _object_with("path"),
}
"""Fields where a scalar stands for an object: `fabric: infiniband` is `fabric: {name: infiniband}`."""


def _shorthand(field: str, input_type: Any) -> BeforeValidator:
    return BeforeValidator(SHORTHANDS[field], json_schema_input_type=input_type)


class SecretRef(Model):
    """Where a secret's value comes from when the run starts; the value itself is never in the job."""

    env: EnvName | None = None
    """Name of an environment variable of whoever starts the run."""
    file: NonEmpty | None = None
    """Path of a file that holds the value (one trailing newline is dropped)."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.env is None) == (self.file is None):
            raise PydanticCustomError("bad-secret", "must name exactly one source: `env` or `file`")
        return self

    def read(self, base: Path, environ: Mapping[str, str]) -> str:
        """The value, now: raises KeyError or OSError where there is none. Files are relative to `base`; `~` is home."""
        if self.env is not None:
            return environ[self.env]
        return self.path(base).read_text().removesuffix("\n")

    def path(self, base: Path) -> Path:
        """Where the file lies."""
        return base / Path(self.file or "").expanduser()


class Code(Model):
    """What is shipped to nodes that do not share the working directory."""

    root: NonEmpty = "."
    """Folder whose contents are shipped, relative to `workdir`: `.`, or a folder above it such as `..`."""
    ignore: tuple[NonEmpty, ...] = (".git", ".venv", "__pycache__", ".holdfast/runs")
    """Patterns left out, as in a .gitignore; those of `.holdfastignore` in `root` are added after them."""
    max_bytes: Bytes = 512 * 1024**2
    """Most bytes of files that are shipped, in bytes or such as `2GiB`; more than that is refused."""


class Resources(Model):
    """What one node gives to the job."""

    cpu: Number | None = Field(default=None, gt=0)
    """CPU cores per node; none means what the node has."""
    memory: Bytes | None = None
    """Memory per node, in bytes or such as `16GiB`; a node that uses more has a rank ended by the kernel.

    Files in /dev/shm and holdfast's own agent (60 MB) count. On this machine that needs a memory group (cgroup) which
    may be divided; where there is none, `holdfast validate` says so.
    """
    shm: Bytes | None = None
    """Size of /dev/shm per node, in bytes or such as `16GiB`."""


class Fabric(Model):
    """Which network carries the collectives; `holdfast fabric` lists the names."""

    name: NonEmpty = "auto"
    """A row of the fabric catalogue; `auto` takes the target's."""
    env: dict[EnvName, ScalarText] = {}
    """Variables that go over the catalogue's, such as NCCL_IB_HCA."""


class Checkpoint(Model):
    """Where checkpoints lie and how often they are taken; used by `holdfast.train`.

    Without a cadence one is taken at the end, or when the ranks are told to leave.
    """

    path: NonEmpty | None = None
    """Folder that every node reaches, or a URL that fsspec knows, such as `s3://bucket/run`.

    None means a folder of the run's own: in the target's `checkpoint_root`, else in the run's folder, which suits one machine
    only.
    """
    local: NonEmpty | None = None
    """Folder on each node's own disk where checkpoints are saved first; they are brought to `path` afterwards.

    Without one a URL has a folder in the run's own on each node.
    """
    every_steps: Count | None = Field(default=None, ge=1)
    """Take one each time this many steps are committed."""
    every_s: Seconds | None = None
    """Take one when this many seconds have passed since the last."""
    every: Literal["auto"] | None = None
    """`auto`, in place of `every_s`: as often as loses the least, by what one costs and how often nodes fail."""
    keep: Count = Field(default=3, ge=1)
    """How many of the newest are kept."""
    keep_every_steps: Count | None = Field(default=None, ge=1)
    """Those of steps that are a multiple of this are kept for good."""

    @property
    def write_path(self) -> str | None:
        """The folder that ranks write to, where the job names one."""
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


class Logs(Model):
    """What becomes of what the ranks write."""

    max_bytes: Annotated[Bytes, AfterValidator(_check_log_size)] | None = 2**30
    """Of each rank the newest so many bytes are kept, over all of its attempts, such as `1GiB`; none means all.

    At least 1 MiB. The disk may hold an eighth more, and what a rank writes within a second.
    """


class OuterSyncSpec(Model):
    """How replicas are kept together that step alone, as TorchFT's LocalSGD and DiLoCo do."""

    method: Literal["local_sgd", "diloco"]
    """`local_sgd`: their parameters become the mean of all. `diloco`: the mean of what they have changed is a gradient
    for an outer optimiser."""
    every: Count = Field(ge=1)
    """Steps from one meeting to the next."""


class Recovery(Model):
    """What happens when something dies."""

    max_restarts: Count = Field(default=10, ge=0)
    """Restarts allowed within `restart_window_s`; the next failure then ends the run."""
    restart_window_s: Seconds = 3600.0
    """Length of the sliding window, in seconds, in which restarts are counted."""
    replicas: Count = Field(default=1, ge=1, le=MAX_NODES)
    """Groups of ranks that survive one another: each holds the whole model, and when one fails it alone restarts.

    The others keep committing steps, and it catches up from one of them. The nodes, or the ranks of each node, are
    divided evenly among them; RANK, WORLD_SIZE and MASTER_ADDR are each replica's own.
    """
    min_replicas: Count = Field(default=1, ge=1, le=MAX_NODES)
    """Fewest replicas that commit a step; with fewer alive the others wait."""
    standby: Annotated[Count | Literal["auto"], _count_or_auto("nodes")] = 0
    """Nodes beyond `nodes` that wait with checks, code and imports done, each to take the place of one that is lost.

    `auto` is as many as nodes fail in a day, in 99 of 100 days, by the rate of a published fleet: 1 for 2 nodes or for
    8, 13 for 1,000.
    """
    peer_checkpoints: Annotated[Count | Literal["auto"], _count_or_auto("steps")] = 0
    """Copy each rank's state to the memory of another node each time this many steps are committed; 0 means never.

    When a node is lost, all ranks go on from the last copy, without storage. `auto` copies as often as has the loop
    wait for copies no more than one per cent of its time. A node needs memory for four times its ranks' states. It is
    done by a `holdfast.train` Session, of one replica: several are copies of one another.
    """
    outer_sync: OuterSyncSpec | None = None
    """With several replicas, such as `{method: diloco, every: 100}`: each steps alone and they meet now and then.

    None means that all take every step together. It is done by a `holdfast.train` Session.
    """
    step_timeout_s: Annotated[Seconds | Literal["auto"] | None, BeforeValidator(_seconds_or_auto)] = None
    """A rank that passes no step for this many seconds is treated as hung; none means never.

    Only ranks with a `holdfast.train` Session are watched, and only while they are at their steps. The first step of an
    attempt, which compiles and connects, gets ten deadlines; so does what comes between two steps: a checkpoint, a wait
    for other replicas, an evaluation in `session.untimed()`. It must be longer than the slowest honest step. `auto` is
    three times the 99th percentile of the rank's own steps and 0.75 s; the first step then gets ten minutes, and so
    does what comes between. Until eight more steps are known, any of them may compile again: it gets three times the
    longest so far, the first included, and 30 s. Time in which a rank could run and had no CPU is not counted.
    """
    exit_timeout_s: Seconds | None = 600.0
    """Seconds that threads may keep a rank's process alive after its program has ended; none means for ever.

    Python waits for every thread that is not a daemon. Such a rank is reported after 10 s, and killed at this deadline:
    it then counts as ended as its program has, well or with its error. Only ranks with a `holdfast.train` Session are
    watched.
    """
    join_timeout_s: Seconds = 120.0
    """Seconds that a node which was made has to join; then it is replaced, three times at most."""
    global_batch: GlobalBatch = GlobalBatch.KEEP
    """What becomes of the samples in a step when the number of nodes changes: `keep` or `scale`.

    It is done by ranks that take their micro-batches from a `holdfast.train` Session; others do as they are programmed.
    """
    learning_rate: LearningRate = LearningRate.KEEP
    """What becomes of the learning rate when the global batch is scaled: `keep`, `linear` or `sqrt`.

    It is done by a `holdfast.train` Session.
    """
    stop_grace_s: Annotated[Number, Field(ge=0)] = 30.0
    """Seconds between SIGTERM and SIGKILL when the run is cancelled, loses a node that says so, or is to grow.

    A recovery does not wait: it kills at once.
    """
    node_grace_s: Seconds = 45.0
    """Seconds without a word from a node's agent after which the node is replaced.

    A third of it is for noticing the silence, the rest for coming back. A network that is gone for less than two
    thirds of it costs no restart of holdfast's, as long as the ranks' own connections last.
    """
    prewarm: Annotated[bool, Strict()] = True
    """Whether ranks that are started again have their imports done beforehand, in processes that wait on each node.

    It is for commands that are `python ...`; others, and the first start, are not affected. What waits needs memory:
    about 0.4 GB for each rank that uses torch.
    """
    controller_grace_s: Seconds = 1800.0
    """Seconds an agent goes on without its controller before it asks for a checkpoint, stops its ranks and leaves."""


class Job(Model):
    """A training job: what to run, on how many nodes, and how it is to be kept alive."""

    version: Literal[1] = 1
    """Version of this schema."""
    name: JobName = "job"
    """Lower-case letters, digits and hyphens, at most 40; runs are named after it."""
    command: Annotated[
        tuple[ScalarText, ...],
        Field(min_length=1),
        BeforeValidator(_split_command, json_schema_input_type=str | list[ScalarText]),
    ]
    """The program and its arguments: a list, or one string that is split as a shell splits words (no shell is run)."""
    launch: Launch = Launch.PER_RANK
    """Who starts the ranks: holdfast (`per-rank`), or the command, once on every node (the others)."""
    image: NonEmpty | None = None
    """Container image; not used by the local back end, which says so."""
    workdir: NonEmpty = "."
    """Folder the command runs in, relative to the job file."""
    code: Code = Code()
    """The code to ship, where the target ships it; else the local back end runs in `workdir` itself."""
    env: dict[EnvName, ScalarText] = {}
    """Environment variables of every rank."""
    secrets: dict[EnvName, SecretRef] = {}
    """Environment variables whose values are looked up when the run starts.

    They are kept only in a private file of the run's folder, until the run ends.
    """
    nodes: Annotated[Nodes, _shorthand("nodes", NodesInput)] = Nodes(min=1, max=1)
    """How many nodes: a number, or `min..max`."""
    gpus_per_node: Count = Field(default=0, ge=0, le=64)
    """GPUs each node gives to the job."""
    ranks_per_node: Count | None = Field(default=None, ge=1, le=1024)
    """Ranks on each node; none means one per GPU, or one where there are no GPUs."""
    resources: Resources = Resources()
    """CPU, memory and shared memory per node."""
    fabric: Annotated[Fabric, _shorthand("fabric", str | Fabric)] = Fabric()
    """The network that carries collectives."""
    checkpoint: Annotated[Checkpoint, _shorthand("checkpoint", str | Checkpoint)] = Checkpoint()
    """Where checkpoints lie and how often they are taken."""
    recovery: Recovery = Recovery()
    """How often and how fast the job is started again when something dies."""
    logs: Logs = Logs()
    """How much of what the ranks write is kept."""
    queue: NonEmpty | None = None
    """Queue of the cluster that the job waits in; none means the target's. The local back end has none."""

    @property
    def local_world_size(self) -> int:
        """Ranks on each node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def processes_per_node(self) -> int:
        """Processes that holdfast itself starts on each node."""
        return self.local_world_size if self.launch is Launch.PER_RANK else 1

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes.max * self.local_world_size

    @property
    def standbys(self) -> int:
        """Nodes that wait to take the place of one that is lost."""
        asked = self.recovery.standby
        return standby_count(self.nodes.max) if asked == "auto" else asked

    @property
    def node_slots(self) -> int:
        """Nodes that are asked for: those that train, and standbys after them."""
        return self.nodes.max + self.standbys

    @property
    def replica_world_size(self) -> int:
        """Ranks of each replica."""
        return self.world_size // self.recovery.replicas

    def learning_rate_factor(self, world_size: int, full_world_size: int) -> float:
        """What the learning rate is to be multiplied by when this many ranks of a full number train."""
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
