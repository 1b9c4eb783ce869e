"""All environment variables that the session reads; nothing else in `train` reads the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.protocol import replay_env
from holdfast.protocol.flight_recorder_files import DUMP_PREFIX, ENTRIES
from holdfast.protocol.watch_levels import WatchLevel
from holdfast.train.checkpoint.writer_fence import WriterId

Number = TypeVar("Number", int, float)


class SyncMethod(StrEnum):
    """How replicas that step alone synchronise."""

    LOCAL_SGD = "local_sgd"
    """Average the parameters of all replicas."""
    DILOCO = "diloco"
    """Average the parameter changes since the last sync; an outer optimizer takes them as a gradient."""


USE_ANOTHER_FOLDER = "name another folder (`checkpoint.path` in the job, else HOLDFAST_CHECKPOINT_PATH)"
"""Remedy for an unusable folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSyncConfig:
    """Periodic synchronisation of replicas that do not take every step together."""

    method: SyncMethod
    every: int
    """Steps between two syncs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConfig:
    """A rank's configuration; the defaults are those of a bare `python train.py`."""

    rank: int = 0
    """`RANK`, as torchrun and holdfast set it, else `OMPI_COMM_WORLD_RANK`, as mpirun does."""
    world_size: int = 1
    """`WORLD_SIZE`."""
    batch_world_size: int = 0
    """`HOLDFAST_BATCH_WORLD_SIZE`: ranks that the global batch is defined for; default: all that step."""
    learning_rate_factor: float = 1.0
    """`HOLDFAST_LEARNING_RATE_FACTOR`: factor on the learning rate where the global batch is scaled."""
    rank_socket: Path | None = None
    """`HOLDFAST_RANK_SOCKET`: the agent's Unix socket; without it the session runs alone."""
    flight_dump_prefix: str = ""
    """`TORCH_FR_DUMP_TEMP_FILE`: prefix of the files that flight recorders dump to; empty if they are off."""
    transfer_memory: Path | None = None
    """`HOLDFAST_TRANSFER_MEMORY`: file in node memory that outlives this process; unset: state transfer is off."""
    peer_checkpoints: int | Literal["auto"] = 0
    """`HOLDFAST_PEER_CHECKPOINTS`: copy the state to another node's memory every this many steps.

    `auto`: as often as copies complete; 0: never.
    """
    peer_memory: tuple[Path, ...] = ()
    """`HOLDFAST_PEER_MEMORY`: four such files, separated by colons: two for this rank's copies, two for a peer's."""
    checkpoint_path: Path | str | None = None
    """`HOLDFAST_CHECKPOINT_PATH`: checkpoint folder or URL that every rank reaches; unset: no checkpoints."""
    checkpoint_local: Path | None = None
    """`HOLDFAST_CHECKPOINT_LOCAL`: node-local folder; checkpoints are saved there, then uploaded to the path."""
    checkpoint_durable: bool = True
    """`HOLDFAST_CHECKPOINT_DURABLE` is not 0: checkpoints outlive the node, on Kubernetes by a volume or a URL."""
    checkpoint_every_steps: int | None = None
    """`HOLDFAST_CHECKPOINT_EVERY_STEPS`: checkpoint every this many steps."""
    checkpoint_every_s: float | None = None
    """`HOLDFAST_CHECKPOINT_EVERY_S`: checkpoint when this many seconds have passed since the last."""
    checkpoint_auto: bool = False
    """`HOLDFAST_CHECKPOINT_EVERY` is `auto`: choose the interval that loses the least time."""
    nodes: int = 1
    """`GROUP_WORLD_SIZE`, as torchrun and holdfast set it."""
    elastic: bool = False
    """`HOLDFAST_ELASTIC` is 1: the number of nodes may change from one start to the next."""
    run: str = ""
    """`HOLDFAST_RUN`: the run that this rank belongs to."""
    replica: int = 0
    """`HOLDFAST_REPLICA`."""
    replica_count: int = 1
    """`HOLDFAST_REPLICA_COUNT`: with more than one, steps continue without lost replicas."""
    min_replicas: int = 1
    """`HOLDFAST_MIN_REPLICAS`: with fewer replicas no step is taken."""
    peer_timeout_s: float = 600.0
    """`HOLDFAST_PEER_TIMEOUT_S`: seconds after which a rank gives up waiting for a replica that nothing reports lost.

    The launcher derives it from `recovery.step_timeout_s`: as long as a replica may spend between two steps.
    """
    nccl_shrinks: bool = False
    """`HOLDFAST_NCCL_SHRINK` is 1: after a loss the survivors shrink their NCCL communicator, and make no new one."""
    outer_sync: OuterSyncConfig | None = None
    """`HOLDFAST_OUTER_SYNC`, such as `local_sgd/16`: replicas step alone and synchronise every 16 steps."""
    verify_every_steps: int = 100
    """`HOLDFAST_VERIFY_EVERY_STEPS`: compare the state of all replicas every this many steps; 0: never."""
    non_finite: WatchLevel = WatchLevel.ACT
    """`HOLDFAST_WATCH_NON_FINITE`, `off`, `warn` or `act`: whether ranks end when weights are no longer finite."""
    spikes: WatchLevel = WatchLevel.WARN
    """`HOLDFAST_WATCH_SPIKES`: whether spikes of loss and gradient norm are reported."""
    stragglers: WatchLevel = WatchLevel.WARN
    """`HOLDFAST_WATCH_STRAGGLERS`: whether the phases of steps are measured, by which ranks are compared."""
    lighthouse: str = ""
    """`TORCHFT_LIGHTHOUSE`: address of the quorum service, with several replicas."""
    master_addr: str = ""
    """`MASTER_ADDR`: address of this replica's rank 0."""
    attempt: int = 0
    """`HOLDFAST_ATTEMPT`: earlier starts of these ranks; the latest attempt takes over the checkpoint folder."""
    checkpoints_back: int = 0
    """`HOLDFAST_CHECKPOINTS_BACK`: newest checkpoints to set aside before resuming, if there are older ones."""
    resumed_step: int = 0
    """`HOLDFAST_RESUMED_STEP`: another run's newest checkpoint, which this run resumes; 0: it may start at step 0."""
    checkpoint_keep: int = 3
    """`HOLDFAST_CHECKPOINT_KEEP`: how many of the newest checkpoints to keep."""
    checkpoint_keep_every_steps: int | None = None
    """`HOLDFAST_CHECKPOINT_KEEP_EVERY_STEPS`: keep checkpoints at multiples of this step forever."""

    profile_after_step: int | None = None
    """`HOLDFAST_PROFILE_AFTER_STEP`: profile the steps after this one."""
    replay_until: int | None = None
    """`HOLDFAST_REPLAY_UNTIL`: repeat the steps up to this one in a replay, and end; the agent sets it."""
    replay_folder: Path | None = None
    """`HOLDFAST_REPLAY_FOLDER`: where a replay leaves the digest of the state."""
    report_to: tuple[str, ...] = ()
    """`HOLDFAST_REPORT_TO`: trackers that receive each step, separated by commas: tensorboard, wandb, mlflow."""

    @property
    def checkpoint_folder(self) -> Path | None:
        """The folder that this rank writes checkpoints to."""
        folder = self.checkpoint_local or self.checkpoint_path
        return folder if isinstance(folder, Path) else None

    @property
    def checkpoint_summary(self) -> str:
        """Where and when checkpoints are taken, logged where no agent reports it."""
        if self.checkpoint_path is None:
            return "no checkpoint is taken: HOLDFAST_CHECKPOINT_PATH is not set"
        if self.replay_until is not None:
            return f"a replay: no checkpoint is taken, and {self.checkpoint_path} is only read"
        times = ["at the end"]
        if self.checkpoint_every_steps is not None:
            times.append(f"every {self.checkpoint_every_steps} steps")
        if self.checkpoint_every_s is not None:
            times.append(f"every {self.checkpoint_every_s:g} s")
        if self.checkpoint_auto:
            times.append("at the interval that loses the least time")
        path = self.checkpoint_path
        return f"checkpoints go to {path.absolute() if isinstance(path, Path) else path}: {', '.join(times)}"

    @property
    def writer(self) -> WriterId:
        """This rank as a writer of checkpoints."""
        return WriterId(run=self.run, replica=self.replica, attempt=self.attempt)

    def for_replay(self) -> RankConfig:
        """The same configuration without all that a replay does not do: save, report, verify and watch."""
        return replace(
            self,
            rank_socket=None,
            transfer_memory=None,
            peer_checkpoints=0,
            checkpoint_local=None,
            checkpoint_every_steps=None,
            checkpoint_every_s=None,
            checkpoint_auto=False,
            verify_every_steps=0,
            non_finite=WatchLevel.OFF,
            spikes=WatchLevel.OFF,
            stragglers=WatchLevel.OFF,
            profile_after_step=None,
            report_to=(),
        )

    def shared_folder(self) -> Path | None:
        """The folder of a framework's own checkpoints, which all ranks must reach."""
        if self.checkpoint_local is None:
            return self.checkpoint_folder
        raise failure(
            "checkpoint-tiers-unsupported",
            "a framework's own checkpoints go to one folder that every node reaches",
            exit_code=ExitCode.USAGE,
            where="checkpoint.local, or a URL in checkpoint.path",
            remedy="name such a folder as `checkpoint.path`, without `checkpoint.local`; a Session has two tiers",
        )

    def refuse_unsupported(self) -> None:
        """Raise in a replay, and if there are several replicas, which a framework's loop would train separately."""
        if self.replay_until is not None:
            raise failure(
                "trainer-replay-unsupported",
                "the steps of a Trainer's loop cannot be repeated on groups of nodes",
                exit_code=ExitCode.USAGE,
                where=replay_env.UNTIL,
                remedy="nothing: the run restarts without this replay; a Session's steps can be repeated",
            )
        if self.replica_count > 1:
            raise failure(
                "trainer-replicas-unsupported",
                f"each of the {self.replica_count} replicas would train a separate model: nothing in a Trainer's "
                "loop synchronises them",
                exit_code=ExitCode.USAGE,
                where="recovery.replicas",
                remedy="leave it out of the job: then all ranks restart from the last checkpoint; a Session can have "
                "several",
            )

    @classmethod
    def from_env(cls, variables: Mapping[str, str] = os.environ) -> RankConfig:
        """Read the variables named above; an unset or empty one takes its default."""
        rank = _number(variables, "RANK", int, at_least=0)
        rank = _number(variables, "OMPI_COMM_WORLD_RANK", int, at_least=0) if rank is None else rank
        verify_every = _number(variables, "HOLDFAST_VERIFY_EVERY_STEPS", int, at_least=0)
        return cls(
            rank=0 if rank is None else rank,
            world_size=_number(variables, "WORLD_SIZE", int, at_least=1) or 1,
            run=variables.get("HOLDFAST_RUN", ""),
            replica=_number(variables, "HOLDFAST_REPLICA", int, at_least=0) or 0,
            replica_count=_number(variables, "HOLDFAST_REPLICA_COUNT", int, at_least=1) or 1,
            min_replicas=_number(variables, "HOLDFAST_MIN_REPLICAS", int, at_least=1) or 1,
            peer_timeout_s=_number(variables, "HOLDFAST_PEER_TIMEOUT_S", float, at_least=0) or cls().peer_timeout_s,
            nccl_shrinks=variables.get("HOLDFAST_NCCL_SHRINK", "0") == "1",
            outer_sync=_outer_sync(variables.get("HOLDFAST_OUTER_SYNC", "")),
            verify_every_steps=cls().verify_every_steps if verify_every is None else verify_every,
            non_finite=_level(variables, "HOLDFAST_WATCH_NON_FINITE", cls().non_finite),
            spikes=_level(variables, "HOLDFAST_WATCH_SPIKES", cls().spikes),
            stragglers=_level(variables, "HOLDFAST_WATCH_STRAGGLERS", cls().stragglers),
            lighthouse=variables.get("TORCHFT_LIGHTHOUSE", ""),
            master_addr=variables.get("MASTER_ADDR", ""),
            attempt=_number(variables, "HOLDFAST_ATTEMPT", int, at_least=0) or 0,
            batch_world_size=_number(variables, "HOLDFAST_BATCH_WORLD_SIZE", int, at_least=1) or 0,
            learning_rate_factor=_number(variables, "HOLDFAST_LEARNING_RATE_FACTOR", float, at_least=0) or 1.0,
            rank_socket=_path(variables, "HOLDFAST_RANK_SOCKET"),
            flight_dump_prefix="" if variables.get(ENTRIES) == "0" else variables.get(DUMP_PREFIX, ""),
            transfer_memory=_path(variables, "HOLDFAST_TRANSFER_MEMORY"),
            peer_checkpoints=_peer_checkpoints(variables),
            peer_memory=tuple(map(Path, filter(None, variables.get("HOLDFAST_PEER_MEMORY", "").split(":")))),
            checkpoint_path=_checkpoint_path(variables),
            checkpoint_local=_path(variables, "HOLDFAST_CHECKPOINT_LOCAL"),
            checkpoint_durable=variables.get("HOLDFAST_CHECKPOINT_DURABLE", "1") != "0",
            checkpoint_every_steps=_number(variables, "HOLDFAST_CHECKPOINT_EVERY_STEPS", int, at_least=1),
            checkpoint_every_s=_number(variables, "HOLDFAST_CHECKPOINT_EVERY_S", float, at_least=0),
            checkpoint_auto=_is_auto(variables.get("HOLDFAST_CHECKPOINT_EVERY", "")),
            nodes=_number(variables, "GROUP_WORLD_SIZE", int, at_least=1) or 1,
            elastic=variables.get("HOLDFAST_ELASTIC", "0") == "1",
            checkpoints_back=_number(variables, "HOLDFAST_CHECKPOINTS_BACK", int, at_least=0) or 0,
            resumed_step=_number(variables, "HOLDFAST_RESUMED_STEP", int, at_least=0) or 0,
            checkpoint_keep=_number(variables, "HOLDFAST_CHECKPOINT_KEEP", int, at_least=1) or cls().checkpoint_keep,
            replay_until=_number(variables, replay_env.UNTIL, int, at_least=1),
            replay_folder=_path(variables, replay_env.FOLDER),
            report_to=tuple(filter(None, map(str.strip, variables.get("HOLDFAST_REPORT_TO", "").split(",")))),
            checkpoint_keep_every_steps=_number(variables, "HOLDFAST_CHECKPOINT_KEEP_EVERY_STEPS", int, at_least=1),
            profile_after_step=_number(variables, "HOLDFAST_PROFILE_AFTER_STEP", int, at_least=1),
        )


def _outer_sync(value: str) -> OuterSyncConfig | None:
    if not value:
        return None
    method, _, every = value.partition("/")
    if method in list(SyncMethod) and every.isdecimal() and int(every) > 0:
        return OuterSyncConfig(method=SyncMethod(method), every=int(every))
    allowed = f"one of {', '.join(SyncMethod)} and a number of steps"
    remedy = "set it to such as `local_sgd/16`, or unset it"
    raise _invalid("environment-invalid-outer-sync", "HOLDFAST_OUTER_SYNC", value, allowed, remedy)


def _is_auto(value: str) -> bool:
    if value in {"", "auto"}:
        return value == "auto"
    remedy = "for a number of steps set HOLDFAST_CHECKPOINT_EVERY_STEPS, for seconds HOLDFAST_CHECKPOINT_EVERY_S"
    raise _invalid("environment-invalid-auto", "HOLDFAST_CHECKPOINT_EVERY", value, "auto", remedy)


def _level(variables: Mapping[str, str], name: str, default: WatchLevel) -> WatchLevel:
    value = variables.get(name, "")
    if not value or value in list(WatchLevel):
        return WatchLevel(value) if value else default
    raise _invalid(
        "environment-invalid-level", name, value, f"one of {', '.join(WatchLevel)}", f"set {name} to one, or unset it"
    )


def _peer_checkpoints(variables: Mapping[str, str]) -> int | Literal["auto"]:
    if variables.get("HOLDFAST_PEER_CHECKPOINTS") == "auto":
        return "auto"
    return _number(variables, "HOLDFAST_PEER_CHECKPOINTS", int, at_least=0) or 0


def _path(variables: Mapping[str, str], name: str) -> Path | None:
    value = variables.get(name, "")
    return Path(value) if value else None


def _checkpoint_path(variables: Mapping[str, str]) -> Path | str | None:
    path = variables.get("HOLDFAST_CHECKPOINT_PATH", "")
    if "://" not in path:
        return Path(path) if path else None
    if not variables.get("HOLDFAST_CHECKPOINT_LOCAL"):
        raise failure(
            "checkpoint-local-missing",
            "checkpoints in a store are saved on the node first, and no folder for that is named",
            exit_code=ExitCode.USAGE,
            where="HOLDFAST_CHECKPOINT_LOCAL",
            evidence=(f"HOLDFAST_CHECKPOINT_PATH={path}",),
            remedy="set HOLDFAST_CHECKPOINT_LOCAL to a folder on the node's own disk, with room for three checkpoints",
        )
    return path


def _number(variables: Mapping[str, str], name: str, read: Callable[[str], Number], *, at_least: int) -> Number | None:
    value = variables.get(name, "")
    if not value:
        return None
    try:
        number = read(value)
    except ValueError:
        number = None
    if number is None or not at_least <= number < float("inf"):
        allowed = f"a number of at least {at_least}"
        raise _invalid("environment-invalid-number", name, value, allowed, f"set {name} to such a number, or unset it")
    return number


def _invalid(code: str, name: str, value: str, allowed: str, remedy: str) -> HoldfastError:
    return failure(
        code,
        f"{name} must be {allowed}",
        exit_code=ExitCode.USAGE,
        where=name,
        evidence=(f"{name}={value}",),
        remedy=remedy,
    )
