"""What of TorchTitan's settings holdfast's trainer cannot do, and how those for replicas become the Session's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torchtitan.experiments.torchft.config import FaultTolerance
from torchtitan.trainer import Trainer

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.train.integrations import titan_private
from holdfast.train.session.rank_config import OuterSyncConfig, RankConfig, SyncMethod

STREAMING: Mapping[str, object] = {
    "num_fragments": 1,
    "fragment_sync_delay": 0,
    "fragment_update_alpha": 0.0,
    "should_quantize": False,
    "module_fqns_per_model_fragment": [],
}
"""Settings of streaming DiLoCo, each with the value that it has without."""


def with_outer_sync(config: RankConfig, given: FaultTolerance) -> RankConfig:
    """The configuration with TorchTitan's method of synchronisation, if it names one: `diloco` or `local_sgd`."""
    if given.semi_sync_method is None:
        return config
    method = given.semi_sync_method.lower()
    where = "--fault-tolerance.semi-sync-method"
    if method not in list(SyncMethod):
        raise _unsupported(f"the method {method}", where, f"there are {' and '.join(SyncMethod)}", "Name one of these.")
    if config.replica_count == 1:
        raise _unsupported(
            f"{method} with one replica", where, "HOLDFAST_REPLICA_COUNT is 1", "Set `recovery.replicas` in the job."
        )
    changed = [name for name, plain in STREAMING.items() if getattr(given, name) != plain]
    if method == SyncMethod.DILOCO and changed:
        raise _unsupported(
            "streaming or quantised DiLoCo",
            "--fault-tolerance",
            ", ".join(f"{name}={getattr(given, name)}" for name in changed),
            "Leave these settings as they are by default: all parameters are then synchronised together.",
        )
    return replace(config, outer_sync=OuterSyncConfig(method=SyncMethod(method), every=given.sync_steps))


def refuse_elastic(config: RankConfig) -> None:
    """Raise HoldfastError if the number of nodes may change, and samples are not dealt to replicas."""
    if config.elastic and config.replica_count == 1:
        raise _unsupported(
            "elastic nodes with one replica",
            "nodes",
            "TorchTitan's loader cannot move between numbers of shards",
            "Write a fixed number of `nodes`, with `recovery.replicas` to continue while one is lost.",
        )


def refuse_unsupported(trainer: Trainer, config: RankConfig) -> None:
    """Raise HoldfastError for a trainer that one Session cannot save, or cannot keep equal to other replicas'."""
    own = (
        "Use TorchTitan's own `--module` with `--checkpoint.enable`: holdfast still launches, monitors and restarts it."
    )
    if titan_private.only_model(trainer) is None:
        parts = f"this rank has {len(trainer.model_parts)} parts of the model"
        raise _unsupported("pipeline parallelism", "--parallelism.pipeline-parallel-degree", parts, own)
    if titan_private.only_optimizer(trainer) is None:
        raise _unsupported("several optimizers", "optimizer", ", ".join(titan_private.optimizer_names(trainer)), own)
    shards = titan_private.data_parallel_size(trainer)
    if config.replica_count > 1 and shards != config.world_size:
        raise _unsupported(
            "replicas with tensor or context parallelism",
            "recovery.replicas",
            f"the {config.world_size} ranks of a replica read {shards} shards of the data",
            "Shard each replica by FSDP alone, or leave `recovery.replicas` out of the job.",
        )


def other_shards_unsupported(saved: int, now: int) -> HoldfastError:
    """Error for a position in the data that was saved with another number of shards."""
    return _unsupported(
        f"another number of shards of the data: {saved} before, {now} now",
        "nodes",
        "TorchTitan's loader cannot move between numbers of shards",
        f"Set `recovery.replicas`, or return to {saved} ranks that read different samples.",
    )


def own_checkpoint_unsupported(step: int) -> HoldfastError:
    """Error for replicas that would begin at a checkpoint which holdfast has not taken."""
    return _unsupported(
        "a checkpoint of TorchTitan's with replicas",
        "--checkpoint.folder",
        f"it is of step {step}, and holdfast has none",
        "Resume once without `recovery.replicas`; then holdfast has a checkpoint.",
    )


def _unsupported(what: str, where: str, evidence: str, remedy: str) -> HoldfastError:
    return failure(
        "torchtitan-unsupported",
        f"holdfast's trainer for TorchTitan does not support {what}",
        exit_code=ExitCode.USAGE,
        where=where,
        evidence=(evidence,),
        remedy=remedy,
    )
