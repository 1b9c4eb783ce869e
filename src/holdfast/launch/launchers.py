"""Owns what a node starts for an attempt: its processes, and how each launcher is told its node's place; one row each.

Pure. What can be given in variables is, so that the command stays as it was typed; the rest goes before the user's own
options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.events.orders import RankLaunch
from holdfast.folder import RunFolder, rank_log_name
from holdfast.job.accepted import Accepted
from holdfast.job.launchers import find_launcher
from holdfast.job.spec import Job, Launch
from holdfast.launch import mpi
from holdfast.launch.environment import Attempt, Share, defaults, devices, of_attempt, of_node, of_rank


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A node's place in an attempt."""

    job: Job
    attempt: Attempt
    group_rank: int
    """The node's number among those of its replica."""
    share: Share
    files: Path
    """Folder for files of this attempt."""


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How a launcher is told its node's place."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    defaults: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    stop_below: bool = False
    """As in `RankLaunch`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An attempt to be started: what all of its nodes are given alike is worked out once, however many they are."""

    job: Job
    attempt: Attempt
    group_ranks: dict[int, int]
    """Each node's number among those of its replica."""
    env: dict[str, str]
    logs: Path
    cwd: str

    @classmethod
    def of(cls, accepted: Accepted, folder: RunFolder, attempt: Attempt, secrets: Mapping[str, str]) -> Plan:
        """Plan an attempt of an accepted job."""
        return cls(
            job=accepted.job,
            attempt=attempt,
            group_ranks={node: group_rank for group_rank, node in enumerate(attempt.nodes)},
            env=of_attempt(accepted, folder, attempt) | dict(secrets),
            logs=folder.attempt_logs(attempt.attempt, attempt.replica, attempt.replica_count),
            cwd=accepted.code.cwd if accepted.code else str(Path(accepted.base, accepted.job.workdir)),
        )


def launches(plan: Plan, node: int, share: Share) -> tuple[dict[str, str], tuple[RankLaunch, ...]]:
    """What all processes of a node are given alike, and each of them with its own, which goes over it.

    One process a rank, or one for the node when the command starts its own ranks. What a rank sees of a variable is,
    the first that has it: what holds the ranks together, the job's own, the fabric's, the share's, the node's own
    environment, our defaults.
    """
    job, group_rank = plan.job, plan.group_ranks[node]
    first = group_rank * job.local_world_size
    ours = defaults(job, share)

    def launch(local_rank: int, wiring: Wiring, ranks: int = 1) -> RankLaunch:
        rank = first + local_rank
        own = of_rank(job, first, local_rank) if ranks == 1 else {}
        return RankLaunch(
            rank=rank,
            ranks=ranks,
            argv=wiring.argv,
            env=own | wiring.env,
            defaults=ours | wiring.defaults,
            cwd=plan.cwd,
            log=f"{plan.logs}/{rank_log_name(rank)}",
            files=wiring.files,
            stop_below=wiring.stop_below,
            warm=job.recovery.warm and job.launch is Launch.PER_RANK,
        )

    env = devices(share) | plan.env | of_node(group_rank)
    wire = _WIRES.get(job.launch)
    if wire is None:
        each = Wiring(argv=job.command)
        return env, tuple(launch(local_rank, each) for local_rank in range(job.local_world_size))
    seat = Seat(job=job, attempt=plan.attempt, group_rank=group_rank, share=share, files=plan.logs)
    return env, (launch(0, wire(seat), ranks=job.local_world_size),)


def _torchrun(seat: Seat) -> Wiring:
    """Torchrun takes its options from PET_* where its command line leaves them out."""
    env = {
        "PET_NNODES": str(len(seat.attempt.nodes)),
        "PET_NPROC_PER_NODE": str(seat.job.local_world_size),
        "PET_NODE_RANK": str(seat.group_rank),
        "PET_MASTER_ADDR": seat.attempt.master_addr,
        "PET_MASTER_PORT": seat.attempt.master_port,
    }
    return Wiring(argv=seat.job.command, env=env)


def _accelerate(seat: Seat) -> Wiring:
    nodes = len(seat.attempt.nodes)
    return Wiring(
        argv=_with_options(
            seat.job,
            {
                "--num_machines": str(nodes),
                "--num_processes": str(nodes * seat.job.local_world_size),
                "--machine_rank": str(seat.group_rank),
                "--main_process_ip": seat.attempt.master_addr,
                "--main_process_port": seat.attempt.master_port,
            },
        )
    )


def _deepspeed(seat: Seat) -> Wiring:
    """DeepSpeed counts nodes and ranks by a host file, whose names mean nothing to it where it uses no ssh."""
    path = str(seat.files / f"hostfile-{seat.group_rank}")
    hosts = "".join(f"node{node} slots={seat.job.local_world_size}\n" for node in seat.attempt.nodes)
    options = {
        "--hostfile": path,
        "--node_rank": str(seat.group_rank),
        "--master_addr": seat.attempt.master_addr,
        "--master_port": seat.attempt.master_port,
    }
    return Wiring(argv=_with_options(seat.job, options, "--no_ssh"), files={path: hosts})


def _mpi(seat: Seat) -> Wiring:
    """Open MPI 4 takes all from variables; its daemons on other nodes are what waits there for its word (mpi.py)."""
    job, attempt = seat.job, seat.attempt
    program = (seat.share.python, "-P", "-m", mpi.__name__)
    if seat.group_rank > 0:
        env = {mpi.LISTEN: attempt.doors[seat.group_rank], mpi.KEY: attempt.key}
        return Wiring(argv=program, env=env, stop_below=True)
    names = [f"node{node}" for node in attempt.nodes]
    env = {
        mpi.NODES: ",".join(f"{name}={door}" for name, door in zip(names[1:], attempt.doors[1:], strict=True)),
        mpi.KEY: attempt.key,
        "OMPI_MCA_orte_default_dash_host": ",".join(
            f"{name}:{job.local_world_size}" for name in ("localhost", *names[1:])
        ),
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": " ".join(program),
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_leave_session_attached": "1",
        # mpirun sleeps so long before it kills what a dead rank has left, and only then says that it died.
        "OMPI_MCA_odls_base_sigkill_timeout": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    argv = ("sh", "-c", _IN_SCRATCH, "sh", *job.command)
    return Wiring(argv=argv, env=env, defaults=_mpi_defaults(seat), stop_below=True)


_IN_SCRATCH = f'export {mpi.SCRATCH}="$HOLDFAST_RANK_SOCKET.d"; exec "$@"'
"""The agent removes the folder beside the socket: Open MPI would leave several MB behind each time it is killed."""


def _mpi_defaults(seat: Seat) -> dict[str, str]:
    """What mpirun's own options and the node's environment may say otherwise."""
    defaults = {
        # By default each rank is bound to a core, and its threads with it.
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_rmaps_base_mapping_policy": "slot",
    }
    if seat.share.neighbours:
        # Shared memory has names made of the host's: nodes on one machine would write into each other's.
        defaults["OMPI_MCA_btl"] = "tcp,self"
    if seat.attempt.master_addr.startswith("127."):
        # Of itself Open MPI passes over loopback, and so over the only addresses of these nodes.
        defaults |= dict.fromkeys(("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"), "127.0.0.0/8")
    return defaults


def _with_options(job: Job, options: dict[str, str], *flags: str) -> tuple[str, ...]:
    found = find_launcher(job.command)
    assert found is not None, "job/rules.py refuses a command that is not the launcher's"
    return found.with_options(*flags, *(word for option in options.items() for word in option))


_WIRES: Mapping[Launch, Callable[[Seat], Wiring]] = {
    Launch.PER_NODE: _torchrun,
    Launch.ACCELERATE: _accelerate,
    Launch.DEEPSPEED: _deepspeed,
    Launch.MPI: _mpi,
}
