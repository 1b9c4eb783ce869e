"""Owns what every rank is given: its environment, arguments, folder and log, for both kinds of launch.

Pure. The names are torchrun's, so a script that runs under torchrun runs unchanged;
PET_* are what torchrun itself reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.events.orders import RankLaunch
from holdfast.folder import RunFolder
from holdfast.job.accepted import Accepted
from holdfast.job.spec import Job, Launch


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a replica's ranks: where they meet, and who is in it."""

    replica: int
    replica_count: int
    attempt: int
    nodes: tuple[int, ...]
    """Node slots of the replica, in rank order."""
    master_addr: str
    master_port: int


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a node may use of the machine it is on."""

    cpus: float
    devices: tuple[str, ...] | None = None
    """GPUs as CUDA_VISIBLE_DEVICES names them; None leaves the choice to the node, which has a machine of its own."""


def launches(
    accepted: Accepted, folder: RunFolder, attempt: Attempt, node: int, secrets: dict[str, str], share: Share
) -> tuple[RankLaunch, ...]:
    """What a node starts for an attempt: one process a rank, or one for the node when the command starts its own ranks.

    What a rank sees of a variable is, the first that has it: what holds the ranks together, the job's own, the
    fabric's, the share's, the node's own environment, our defaults.
    """
    job = accepted.job
    group_rank = attempt.nodes.index(node)
    first = group_rank * job.local_world_size
    cwd = accepted.code.cwd if accepted.code else str(Path(accepted.base, job.workdir))
    common = _common(accepted, folder, attempt, group_rank, share) | secrets
    defaults = _defaults(job, share)
    replicas = attempt.replica_count

    def log(rank: int) -> str:
        return str(folder.rank_log(attempt.attempt, rank, attempt.replica, replicas))

    if job.launch is Launch.PER_NODE:
        env = common | _per_node(job, attempt, group_rank)
        count = job.local_world_size
        return (
            RankLaunch(rank=first, ranks=count, argv=job.command, env=env, defaults=defaults, cwd=cwd, log=log(first)),
        )
    return tuple(
        RankLaunch(
            rank=first + local_rank,
            argv=job.command,
            env=common | _per_rank(job, attempt, first, local_rank),
            defaults=defaults,
            cwd=cwd,
            log=log(first + local_rank),
        )
        for local_rank in range(job.local_world_size)
    )


def _defaults(job: Job, share: Share) -> dict[str, str]:
    """What torchrun and Python would be told by a careful user; whatever the node's environment says goes over it."""
    threads = max(1, int((job.resources.cpu or share.cpus) // job.local_world_size))
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _common(accepted: Accepted, folder: RunFolder, attempt: Attempt, group_rank: int, share: Share) -> dict[str, str]:
    job = accepted.job
    world_size = len(attempt.nodes) * job.local_world_size
    checkpoint = job.checkpoint
    # What the job may override comes first, then the job's own, then what holds the ranks together.
    env = {} if share.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(share.devices)}
    env |= accepted.fabric_env | job.fabric.env | job.env
    env |= {
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": str(attempt.master_port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(len(attempt.nodes)),
        "NODE_RANK": str(group_rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.recovery.max_restarts),
        "TORCHELASTIC_RUN_ID": folder.run,
        "HOLDFAST_RUN": folder.run,
        "HOLDFAST_ATTEMPT": str(attempt.attempt),
        "HOLDFAST_REPLICA": str(attempt.replica),
        "HOLDFAST_REPLICA_COUNT": str(attempt.replica_count),
        "HOLDFAST_CHECKPOINT_PATH": str(_checkpoints(accepted, folder)),
        "HOLDFAST_CHECKPOINT_KEEP": str(checkpoint.keep),
    }
    if checkpoint.every_steps is not None:
        env["HOLDFAST_CHECKPOINT_EVERY_STEPS"] = str(checkpoint.every_steps)
    if checkpoint.every_s is not None:
        env["HOLDFAST_CHECKPOINT_EVERY_S"] = f"{checkpoint.every_s:g}"
    return env


def _checkpoints(accepted: Accepted, folder: RunFolder) -> Path:
    """Where the job says, else a folder of the run's own: in the profile's storage, or in the run's folder."""
    if accepted.job.checkpoint.path is not None:
        return Path(accepted.base, accepted.job.checkpoint.path)
    if accepted.storage is not None:
        return Path(accepted.base, accepted.storage, folder.run)
    return folder.checkpoints


def _per_rank(job: Job, attempt: Attempt, first: int, local_rank: int) -> dict[str, str]:
    rank = str(first + local_rank)
    return {"RANK": rank, "LOCAL_RANK": str(local_rank), "ROLE_RANK": rank}


def _per_node(job: Job, attempt: Attempt, group_rank: int) -> dict[str, str]:
    """Torchrun takes its options from PET_* where its command line leaves them out."""
    return {
        "PET_NNODES": str(len(attempt.nodes)),
        "PET_NPROC_PER_NODE": str(job.local_world_size),
        "PET_NODE_RANK": str(group_rank),
        "PET_MASTER_ADDR": attempt.master_addr,
        "PET_MASTER_PORT": str(attempt.master_port),
    }
