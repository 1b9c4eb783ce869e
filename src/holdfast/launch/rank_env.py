"""Computes the environment variables of ranks, for every launcher.

Pure. The names are torchrun's, so a script that runs under torchrun runs unchanged.
"""

from __future__ import annotations

import math
from pathlib import Path

from msgspec import Struct

from holdfast.fabric.catalog import LOCAL_DEFAULT
from holdfast.fabric.fabric import Fabric
from holdfast.job.launcher_catalog import runs_python
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import GlobalBatch, Job, Launch, Watch
from holdfast.job.step_timeouts import StepTimeouts
from holdfast.protocol import flight_recorder_files
from holdfast.run_dir import RunDir

FLIGHT_RECORDER_ENTRIES = 1000
"""Collectives that each rank's flight recorder keeps: those of several steps; a dump of them is read in about 0.3 s."""

_INTERFACES = {
    "NCCL_SOCKET_IFNAME": False,
    "NCCL_OOB_NET_IFNAME": False,
    "GLOO_SOCKET_IFNAME": True,
    "TP_SOCKET_IFNAME": True,
}
"""The variables that name interfaces, and whether by their exact names rather than by prefixes."""

HEARTBEAT_MARGIN_S = 60.0
"""Seconds from the session's own timeout to that of torch's heartbeat monitor."""


class Attempt(Struct, frozen=True, kw_only=True):
    """One start of a replica's ranks: the rendezvous address and the member nodes."""

    replica: int
    replica_count: int
    attempt: int
    nodes: tuple[int, ...]
    """Node slots of the replica, in rank order."""
    master_addr: str
    master_port: str
    """A number, or a placeholder where the port is not known yet."""
    endpoints: tuple[str, ...]
    """`ADDRESS:PORT` of each node, in rank order; the port is free and reserved for this attempt."""
    shared_secret: str
    """A secret that only the processes of this attempt have."""
    lighthouse: str = ""
    """URL of the run's lighthouse, if there are several replicas."""
    checkpoints_back: int = 0
    """Newest checkpoints that its ranks set aside before they resume."""


class NodeResources(Struct, frozen=True, kw_only=True):
    """What a node may use of its machine."""

    cpus: float
    devices: tuple[str, ...] | None = None
    """GPUs as CUDA_VISIBLE_DEVICES names them; None leaves the choice to the node, which has its own machine."""
    shares_machine: bool = False
    """Whether other nodes of the job share the machine."""
    python: str
    """Path of the Python on that machine that has holdfast installed."""


def default_env(job: Job, resources: NodeResources) -> dict[str, str]:
    """Recommended settings of torchrun and Python; the node's environment overrides them."""
    threads = max(1, int((job.resources.cpu or resources.cpus) // job.local_world_size))
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        flight_recorder_files.ENTRIES: str(FLIGHT_RECORDER_ENTRIES),
    }


def wants_nccl_logs(job: Job, fabric: Fabric) -> bool:
    """Whether ranks log the set-up of NCCL: they have GPUs, or a fabric that more than sockets is promised of."""
    return job.gpus_per_node > 0 or fabric.name != LOCAL_DEFAULT


def promised_interfaces(accepted: RunSpec) -> tuple[str, ...]:
    """The values by which a run names the interfaces for data, in the syntax of NCCL_SOCKET_IFNAME.

    `fabric.env` promises them; where `env` differs from it, `env` is in the way.
    """
    named = accepted.job.env | accepted.fabric_env | accepted.job.fabric.env
    found = (f"={named[name]}" if exact else named[name] for name, exact in _INTERFACES.items() if named.get(name))
    return tuple(dict.fromkeys(found))


def device_env(resources: NodeResources) -> dict[str, str]:
    """The GPUs that a node's ranks see, unless the job sets them."""
    return {} if resources.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(resources.devices)}


def node_env(group_rank: int) -> dict[str, str]:
    """The variables that differ between nodes."""
    return {"GROUP_RANK": str(group_rank), "NODE_RANK": str(group_rank)}


def attempt_env(accepted: RunSpec, folder: RunDir, attempt: Attempt) -> dict[str, str]:
    """The variables that all ranks of an attempt share."""
    job = accepted.job
    world_size = len(attempt.nodes) * job.local_world_size
    full_world_size = job.nodes.max * job.local_world_size
    # With several replicas each one is always complete; which ones take part in a step is known only when it begins.
    several = attempt.replica_count > 1
    there = full_world_size if several else world_size
    keeps = job.recovery.global_batch is GlobalBatch.KEEP
    checkpoint = job.checkpoint
    # Later ones win: the fabric's variables, the job's, then those that wire the ranks together.
    env = accepted.fabric_env | job.fabric.env | job.env
    env |= {
        "MASTER_ADDR": attempt.master_addr,
        "MASTER_PORT": attempt.master_port,
        "JAX_COORDINATOR_ADDRESS": f"{attempt.master_addr}:{attempt.master_port}",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
        "GROUP_WORLD_SIZE": str(len(attempt.nodes)),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RESTART_COUNT": str(attempt.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.recovery.max_restarts),
        "TORCHELASTIC_RUN_ID": folder.run_id,
        "HOLDFAST_RUN": folder.run_id,
        "HOLDFAST_ATTEMPT": str(attempt.attempt),
        "HOLDFAST_REPLICA": str(attempt.replica),
        "HOLDFAST_REPLICA_COUNT": str(attempt.replica_count),
        "HOLDFAST_BATCH_WORLD_SIZE": str(full_world_size) if keeps else "" if several else str(world_size),
        "HOLDFAST_LEARNING_RATE_FACTOR": repr(job.learning_rate_factor(there, full_world_size)),
        "HOLDFAST_CHECKPOINT_PATH": _final_checkpoint_dir(accepted, folder),
        "HOLDFAST_CHECKPOINT_KEEP": str(checkpoint.keep),
    }
    if several:
        env = _TORCHFT_DEFAULTS | _nccl_env(job) | _agent_store_env(job) | env | _replica_env(job, attempt)
    if job.nodes.is_elastic:
        env["HOLDFAST_ELASTIC"] = "1"
    if accepted.resumed:
        env["HOLDFAST_RESUMED_STEP"] = str(accepted.resumed.step)
    if attempt.checkpoints_back:
        env["HOLDFAST_CHECKPOINTS_BACK"] = str(attempt.checkpoints_back)
    watch, usual = job.watch, Watch()
    if watch.non_finite is not usual.non_finite:
        env["HOLDFAST_WATCH_NON_FINITE"] = watch.non_finite.value
    if watch.spikes is not usual.spikes:
        env["HOLDFAST_WATCH_SPIKES"] = watch.spikes.value
    if watch.stragglers is not usual.stragglers:
        env["HOLDFAST_WATCH_STRAGGLERS"] = watch.stragglers.value
    if not watch.step_clock:
        env["HOLDFAST_STEP_CLOCK"] = "0"
    if checkpoint.local is not None or checkpoint.is_remote:
        env["HOLDFAST_CHECKPOINT_LOCAL"] = str(checkpoint_dir(accepted, folder))
    if not accepted.durable_controller_disk and not checkpoint.is_remote:
        env["HOLDFAST_CHECKPOINT_DURABLE"] = "0"
    if job.recovery.peer_checkpoints:
        env["HOLDFAST_PEER_CHECKPOINTS"] = str(job.recovery.peer_checkpoints)
    if checkpoint.every_steps is not None:
        env["HOLDFAST_CHECKPOINT_EVERY_STEPS"] = str(checkpoint.every_steps)
    if checkpoint.every is not None:
        env["HOLDFAST_CHECKPOINT_EVERY"] = checkpoint.every
    if checkpoint.keep_every_steps is not None:
        env["HOLDFAST_CHECKPOINT_KEEP_EVERY_STEPS"] = str(checkpoint.keep_every_steps)
    if checkpoint.every_s is not None:
        env["HOLDFAST_CHECKPOINT_EVERY_S"] = f"{checkpoint.every_s:g}"
    return env


_TORCHFT_DEFAULTS = {
    # A replica that waits for others (recovery.min_replicas) blocks in a single call, hence one week.
    "TORCHFT_QUORUM_TIMEOUT_SEC": "604800",
    # Retries until a restarted lighthouse answers: TorchFT spreads its retries over that week, 10 per second.
    "TORCHFT_QUORUM_RETRIES": "6048000",
    # TorchFT's managers would otherwise write four lines into the rank's log for each quorum.
    "RUST_LOG": "warn",
}


def _nccl_env(job: Job) -> dict[str, str]:
    """How torch watches the NCCL groups of a rank.

    The group of the replicas has no watchdog, because torch's would end the survivors of a loss: only BLOCKING_WAIT and
    NONBLOCKING_TIMEOUT concern it. docs/fault-tolerance.md says which of them acts when.
    """
    peer_timeout_s = _peer_timeout_s(job)
    return {
        # Torch's default. A Session changes the value, not the environment's size, while it creates that group.
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        # Torch's default: an error or a timeout within a replica ends the rank, and the agent restarts the replica.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # Kills a rank whose watchdog is stuck in CUDA: after the session has given up waiting for another replica.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(peer_timeout_s + HEARTBEAT_MARGIN_S)),
        # Ends a call that connects to a dead replica, and holds the lock that an abort needs; by default after 30 min.
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",
    }


def _peer_timeout_s(job: Job) -> float:
    """As long as a replica may keep the others waiting, at the end of which its agent calls it hung."""
    return StepTimeouts(step_timeout_s=job.recovery.step_timeout_s or "auto").non_step_s


def _agent_store_env(job: Job) -> dict[str, str]:
    """Make the agent of a replica's first node host the TCPStore of its ranks (agent/tcp_store_host.py).

    TorchFT's Manager expects that of its launcher. Without replicas rank 0 hosts the store: that needs no extra process
    and leaves the port to a JAX program. A launcher that starts its own ranks hosts its own store.
    """
    return {"TORCHELASTIC_USE_AGENT_STORE": "True"} if job.launch is Launch.PER_RANK and runs_python(job) else {}


def _replica_env(job: Job, attempt: Attempt) -> dict[str, str]:
    """The variables that differ between replicas, under holdfast's names and TorchFT's."""
    sync = job.recovery.outer_sync
    together = {"HOLDFAST_OUTER_SYNC": f"{sync.method}/{sync.every}"} if sync else {}
    return together | {
        "HOLDFAST_MIN_REPLICAS": str(job.recovery.min_replicas),
        "HOLDFAST_VERIFY_EVERY_STEPS": str(job.recovery.verify_every_steps),
        "HOLDFAST_PEER_TIMEOUT_S": f"{_peer_timeout_s(job):g}",
        "TORCHFT_LIGHTHOUSE": attempt.lighthouse,
        "REPLICA_GROUP_ID": str(attempt.replica),
        "NUM_REPLICA_GROUPS": str(attempt.replica_count),
    }


def checkpoint_dir(accepted: RunSpec, folder: RunDir) -> Path:
    """The folder that ranks write checkpoints to: the job's, else one in the run's folder."""
    checkpoint = accepted.job.checkpoint
    if checkpoint.write_path is not None:
        return Path(accepted.base, checkpoint.write_path)
    return folder.checkpoints if checkpoint.is_remote else Path(_final_checkpoint_dir(accepted, folder))


def _final_checkpoint_dir(accepted: RunSpec, folder: RunDir) -> str:
    """Final location of checkpoints: the job's, else the target's `checkpoint_root`, else the run's folder."""
    checkpoint = accepted.job.checkpoint
    if checkpoint.path is not None:
        return checkpoint.path if checkpoint.is_remote else str(Path(accepted.base, checkpoint.path))
    if accepted.checkpoint_root is not None:
        return str(Path(accepted.base, accepted.checkpoint_root, folder.run_id))
    return str(folder.checkpoints)


def per_rank_env(job: Job, first: int, local_rank: int) -> dict[str, str]:
    """The variables that differ between ranks of a node; `first` is the node's first rank."""
    rank = str(first + local_rank)
    env = {"RANK": rank, "LOCAL_RANK": str(local_rank), "ROLE_RANK": rank}
    if gpus := job.gpus_per_node // job.local_world_size:
        # Without it JAX claims every visible GPU in every rank.
        mine = range(local_rank * gpus, (local_rank + 1) * gpus)
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, mine))
    return env
