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
        raise _unsupported(f"the method {method}", where, f"there are {' and '.join(SyncMethod)}", "name one of these")
    if config.replica_count == 1:
        raise _unsupported(
            f"{method} with one replica", where, "HOLDFAST_REPLICA_COUNT is 1", "set `recovery.replicas` in the job"
        )
    changed = [name for name, plain in STREAMING.items() if getattr(given, name) != plain]
    if method == SyncMethod.DILOCO and changed:
        raise _unsupported(
            "streaming or quantised DiLoCo",
            "--fault-tolerance",
            ", ".join(f"{name}={getattr(given, name)}" for name in changed),
            "leave these settings as they are by default: all parameters are then synchronised together",
        )
    return replace(config, outer_sync=OuterSyncConfig(method=SyncMethod(method), every=given.sync_steps))


def refuse_unsupported(trainer: Trainer, config: RankConfig) -> None:
    """Raise HoldfastError for a trainer that one Session cannot save, or cannot keep equal to other replicas'."""
    own = (
        "use TorchTitan's own `--module` with `--checkpoint.enable`: holdfast still launches, monitors and restarts it"
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
            "shard each replica by FSDP alone, or leave `recovery.replicas` out of the job",
        )


def own_checkpoint_unsupported(step: int) -> HoldfastError:
    """Error for replicas that would begin at a checkpoint which holdfast has not taken."""
    return _unsupported(
        "a checkpoint of TorchTitan's with replicas",
        "--checkpoint.folder",
        f"it is of step {step}, and holdfast has none",
        "resume once without `recovery.replicas`; then holdfast has a checkpoint",
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
