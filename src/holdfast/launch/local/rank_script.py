"""Renders what each rank of a local run would get: its environment and command, as a shell script."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.fabric.catalog import CATALOG
from holdfast.job.backend import NodeId
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.launch_plan import LaunchPlan, rank_launches
from holdfast.launch.local.node_processes import node_mark
from holdfast.launch.local.resource_split import node_resources
from holdfast.launch.rank_env import Attempt, wants_nccl_logs
from holdfast.protocol import flight_recorder_files
from holdfast.protocol.nccl_log_files import log_env
from holdfast.protocol.orders import RankLaunch
from holdfast.run_dir import RunDir, runs_root

RENDERED_NODES = 64
"""`render` shows up to this many nodes; of more, the first RENDERED_FIRST and the last."""
RENDERED_FIRST = 8


def render(accepted: RunSpec) -> str:
    """Every rank's environment and command for the first attempt, in shell syntax.

    Words in capitals are placeholders for secrets and for values known only at run time.
    """
    job = accepted.job
    folder = RunDir(runs_root() / "RUN_ID")
    lines = [*_elastic_note(job), *_code_note(accepted)]
    of_nodes = node_resources(job, os.environ)
    nccl_log = "NCCL_LOG" if wants_nccl_logs(job, CATALOG[accepted.fabric]) else ""
    for node in _nodes_to_render(len(of_nodes)):
        if node is None:
            lines.append(
                f"# nodes {RENDERED_FIRST} to {len(of_nodes) - 2} differ from these in their own numbers only\n"
            )
            continue
        share = of_nodes[node]
        plan = LaunchPlan.of(accepted, folder, _first_attempt(job, node), dict.fromkeys(job.secrets, "SECRET"))
        node_id = NodeId(node=node, generation=0)
        mark = {"HOLDFAST_NODE": node_mark(folder.run_id, node_id)}
        env, ranks = rank_launches(plan, node, share)
        for launch in ranks:
            code = Path("CODE") if accepted.code else Path()
            lines.extend(
                _render_rank(node_id, launch, code, env | launch.env | mark | _agent_env(launch, env, nccl_log))
            )
    return "\n".join(lines)


def _nodes_to_render(nodes: int) -> Iterator[int | None]:
    """The nodes to render; None stands for the omitted ones before the last."""
    if nodes <= RENDERED_NODES:
        yield from range(nodes)
    else:
        yield from (*range(RENDERED_FIRST), None, nodes - 1)


def _agent_env(launch: RankLaunch, env: Mapping[str, str], nccl_log: str) -> dict[str, str]:
    """The variables that the agent adds (agent/rank_process.py, agent/fabric_watch.py)."""
    memory = {"HOLDFAST_TRANSFER_MEMORY": "TRANSFER_MEMORY"} if launch.rank_count == 1 else {}
    if launch.rank_count == 1 and "HOLDFAST_PEER_CHECKPOINTS" in env:
        memory["HOLDFAST_PEER_MEMORY"] = "PEER_MEMORY"
    recorder = {flight_recorder_files.DUMP_PREFIX: "FLIGHT_DUMP", flight_recorder_files.NCCL_PIPE_PREFIX: "NCCL_PIPE"}
    setup = log_env(nccl_log, {**os.environ, **env, **launch.env}) if nccl_log else {}
    return {"HOLDFAST_RANK_SOCKET": "RANK_SOCKET", **memory, **recorder, **setup}


def _first_attempt(job: Job, node: int) -> Attempt:
    """The first attempt of a node's replica, with placeholders for what is unknown before the run."""
    count = job.recovery.replicas
    each = job.nodes.max // count
    replica = node // each
    nodes = tuple(range(replica * each, (replica + 1) * each))
    head = "HEAD" if count == 1 else f"HEAD_OF_REPLICA_{replica}"
    return Attempt(
        replica=replica,
        replica_count=count,
        attempt=0,
        nodes=nodes,
        master_addr=f"{head}_ADDRESS",
        master_port=f"{head}_PORT",
        endpoints=tuple(f"NODE{node}_ADDRESS:NODE{node}_PORT" for node in nodes),
        shared_secret="ATTEMPT_KEY",
        lighthouse="http://LIGHTHOUSE_ADDRESS:LIGHTHOUSE_PORT",
    )


def _elastic_note(job: Job) -> Iterator[str]:
    """A note on world sizes other than the rendered one."""
    if job.nodes.is_elastic:
        yield f"# on {job.nodes.max} nodes; on fewer, down to {job.nodes.min}, the ranks there are get numbers in a row"
        yield ""


def _code_note(accepted: RunSpec) -> Iterator[str]:
    if code := accepted.code:
        files = f"{code.files:,} file{'s' * (code.files != 1)}"
        yield f"# code: {files} in an archive of {code.bytes:,} bytes, unpacked as CODE on every node"
        yield f"# sha256: {code.digest}"
        yield ""


def _render_rank(node_id: NodeId, launch: RankLaunch, code: Path, env: dict[str, str]) -> Iterator[str]:
    last = launch.rank + launch.rank_count - 1
    whose = f" of replica {env['HOLDFAST_REPLICA']}" if env["HOLDFAST_REPLICA_COUNT"] != "1" else ""
    ranks = f"rank {last}" if launch.rank_count == 1 else f"ranks {launch.rank} to {last}"
    yield f"# node{node_id.node}, {ranks}{whose}"
    yield f"cd {shlex.quote(str(code / launch.cwd))}"
    for path, text in launch.files.items():
        yield f"cat > {shlex.quote(path)} <<END\n{text}END"
    defaults = {name: os.environ.get(name, value) for name, value in launch.env_defaults.items()}
    for name, value in sorted((defaults | env).items()):
        yield f"{name}={shlex.quote(value)}"
    yield f"$ {shlex.join(launch.argv)}"
    yield ""
