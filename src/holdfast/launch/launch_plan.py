"""Plans the processes that a node starts for an attempt, with one function per launcher that passes the node's rank.

Pure. It prefers environment variables, so that the command stays as typed; options go before the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.job.launcher_catalog import find_launcher
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job, Launch
from holdfast.launch import rsh_agent
from holdfast.launch.rank_env import (
    Attempt,
    NodeResources,
    attempt_env,
    default_env,
    device_env,
    node_env,
    per_rank_env,
)
from holdfast.protocol.orders import RankLaunch
from holdfast.run_dir import RunDir, rank_log_name


class NodeLaunch(Struct, frozen=True, kw_only=True):
    """A node's part in an attempt."""

    job: Job
    attempt: Attempt
    group_rank: int
    """The node's rank in its replica."""
    resources: NodeResources
    files: Path
    """Folder for the files of this attempt."""


class LauncherConfig(Struct, frozen=True, kw_only=True):
    """Command, environment and files that tell a launcher its node's rank."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])
    defaults: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    signal_children: bool = False
    """As in `RankLaunch`."""


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """An attempt to start; what all its nodes share is computed once."""

    job: Job
    attempt: Attempt
    group_ranks: dict[int, int]
    """Each node's rank in its replica."""
    env: dict[str, str]
    logs: Path
    cwd: str

    @classmethod
    def of(cls, accepted: RunSpec, folder: RunDir, attempt: Attempt, secrets: Mapping[str, str]) -> LaunchPlan:
        """Plan an attempt of an accepted job."""
        return cls(
            job=accepted.job,
            attempt=attempt,
            group_ranks={node: group_rank for group_rank, node in enumerate(attempt.nodes)},
            env=attempt_env(accepted, folder, attempt) | dict(secrets),
            logs=folder.attempt_log_dir(attempt.attempt, attempt.replica, attempt.replica_count),
            cwd=accepted.code.cwd if accepted.code else str(Path(accepted.base, accepted.job.workdir)),
        )


def rank_launches(
    plan: LaunchPlan, node: int, resources: NodeResources
) -> tuple[dict[str, str], tuple[RankLaunch, ...]]:
    """The environment that all processes of a node share, and the launches, whose own environment overrides it.

    One process per rank, or one per node if the command starts its own ranks. The first of these that sets a variable
    wins: the rank wiring, the job, the fabric, the node's resources, the node's own environment, the defaults.
    """
    job, group_rank = plan.job, plan.group_ranks[node]
    first = group_rank * job.local_world_size
    ours = default_env(job, resources)

    def launch(local_rank: int, config: LauncherConfig, ranks: int = 1) -> RankLaunch:
        rank = first + local_rank
        own = per_rank_env(job, first, local_rank) if ranks == 1 else {}
        return RankLaunch(
            rank=rank,
            rank_count=ranks,
            argv=config.argv,
            env=own | config.env,
            env_defaults=ours | config.defaults,
            cwd=plan.cwd,
            log=f"{plan.logs}/{rank_log_name(rank)}",
            files=config.files,
            signal_children=config.signal_children,
            prewarm=job.recovery.prewarm and job.launch is Launch.PER_RANK,
        )

    env = device_env(resources) | plan.env | node_env(group_rank)
    configure = _CONFIGURE.get(job.launch)
    if configure is None:
        each = LauncherConfig(argv=job.command)
        return env, tuple(launch(local_rank, each) for local_rank in range(job.local_world_size))
    node_launch = NodeLaunch(job=job, attempt=plan.attempt, group_rank=group_rank, resources=resources, files=plan.logs)
    return env, (launch(0, configure(node_launch), ranks=job.local_world_size),)


def _torchrun(node_launch: NodeLaunch) -> LauncherConfig:
    """Torchrun reads options that are not on its command line from PET_* variables."""
    env = {
        "PET_NNODES": str(len(node_launch.attempt.nodes)),
        "PET_NPROC_PER_NODE": str(node_launch.job.local_world_size),
        "PET_NODE_RANK": str(node_launch.group_rank),
        "PET_MASTER_ADDR": node_launch.attempt.master_addr,
        "PET_MASTER_PORT": node_launch.attempt.master_port,
    }
    return LauncherConfig(argv=node_launch.job.command, env=env)


def _accelerate(node_launch: NodeLaunch) -> LauncherConfig:
    nodes = len(node_launch.attempt.nodes)
    return LauncherConfig(
        argv=_with_options(
            node_launch.job,
            {
                "--num_machines": str(nodes),
                "--num_processes": str(nodes * node_launch.job.local_world_size),
                "--machine_rank": str(node_launch.group_rank),
                "--main_process_ip": node_launch.attempt.master_addr,
                "--main_process_port": node_launch.attempt.master_port,
            },
        )
    )


def _deepspeed(node_launch: NodeLaunch) -> LauncherConfig:
    """DeepSpeed counts nodes and ranks in a host file; without ssh it ignores the host names."""
    path = str(node_launch.files / f"hostfile-{node_launch.group_rank}")
    hosts = "".join(f"node{node} slots={node_launch.job.local_world_size}\n" for node in node_launch.attempt.nodes)
    options = {
        "--hostfile": path,
        "--node_rank": str(node_launch.group_rank),
        "--master_addr": node_launch.attempt.master_addr,
        "--master_port": node_launch.attempt.master_port,
    }
    return LauncherConfig(argv=_with_options(node_launch.job, options, "--no_ssh"), files={path: hosts})


def _mpi(node_launch: NodeLaunch) -> LauncherConfig:
    """Open MPI 4 reads everything from variables; rsh_agent.py starts its daemons on the other nodes."""
    job, attempt = node_launch.job, node_launch.attempt
    program = (node_launch.resources.python, "-P", "-m", rsh_agent.__name__)
    if node_launch.group_rank > 0:
        env = {rsh_agent.LISTEN: attempt.endpoints[node_launch.group_rank], rsh_agent.KEY: attempt.shared_secret}
        return LauncherConfig(argv=program, env=env, signal_children=True)
    names = [f"node{node}" for node in attempt.nodes]
    env = {
        rsh_agent.NODES: ",".join(
            f"{name}={door}" for name, door in zip(names[1:], attempt.endpoints[1:], strict=True)
        ),
        rsh_agent.KEY: attempt.shared_secret,
        "OMPI_MCA_orte_default_dash_host": ",".join(
            f"{name}:{job.local_world_size}" for name in ("localhost", *names[1:])
        ),
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": " ".join(program),
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_leave_session_attached": "1",
        # mpirun sleeps this long before it kills what a dead rank left behind; only then does it report the death.
        "OMPI_MCA_odls_base_sigkill_timeout": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    argv = ("sh", "-c", _IN_SCRATCH, "sh", *job.command)
    return LauncherConfig(argv=argv, env=env, defaults=_mpi_defaults(node_launch), signal_children=True)


_IN_SCRATCH = f'export {rsh_agent.SCRATCH}="$HOLDFAST_RANK_SOCKET.d"; exec "$@"'
"""The agent removes the folder next to the socket: a killed Open MPI leaves several MB in it."""


def _mpi_defaults(node_launch: NodeLaunch) -> dict[str, str]:
    """Defaults that mpirun's own options and the node's environment may override."""
    defaults = {
        # By default Open MPI binds each rank, with all its threads, to one core.
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_rmaps_base_mapping_policy": "slot",
    }
    if node_launch.resources.shares_machine:
        # Shared-memory names contain the host name: nodes on one machine would overwrite each other's.
        defaults["OMPI_MCA_btl"] = "tcp,self"
    if node_launch.attempt.master_addr.startswith("127."):
        # By default Open MPI skips loopback, which has the only addresses of these nodes.
        defaults |= dict.fromkeys(("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include"), "127.0.0.0/8")
    return defaults


def _with_options(job: Job, options: dict[str, str], *flags: str) -> tuple[str, ...]:
    found = find_launcher(job.command)
    assert found is not None, "job/rules.py refuses a command that is not the launcher's"
    return found.with_options(*flags, *(word for option in options.items() for word in option))


_CONFIGURE: Mapping[Launch, Callable[[NodeLaunch], LauncherConfig]] = {
    Launch.PER_NODE: _torchrun,
    Launch.ACCELERATE: _accelerate,
    Launch.DEEPSPEED: _deepspeed,
    Launch.MPI: _mpi,
}
