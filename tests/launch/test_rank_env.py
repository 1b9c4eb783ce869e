"""A rank's environment, without starting one: precedence, and where checkpoints go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.job.run_spec import RunSpec
from holdfast.launch.launch_plan import LaunchPlan, rank_launches
from holdfast.launch.rank_env import Attempt, NodeResources, attempt_env, promised_interfaces
from holdfast.protocol.orders import RankLaunch
from holdfast.run_dir import RunDir

FOLDER = RunDir(Path("/runs/demo-abc234"))


def launched(*args: Any, **job: Any) -> tuple[RankLaunch, ...]:
    """What a node of a job of two nodes starts, each process with all that it is given."""
    env, ranks = given(*args, **job)
    return tuple(msgspec.structs.replace(rank, env=env | rank.env) for rank in ranks)


def given(
    share: NodeResources | None = None,
    checkpoint_root: str | None = None,
    node: int = 1,
    master_addr: str = "a",
    **job: Any,
) -> tuple[dict[str, str], tuple[RankLaunch, ...]]:
    """The common environment of a node's processes, and that of each."""
    fields = {
        "job": {"command": "true", "nodes": 2, **job},
        "base": "/base",
        "created_at": 0.0,
        "fabric": "tcp",
        "fabric_env": {"NCCL_NET": "Socket"},
        "checkpoint_root": checkpoint_root,
    }
    attempt = Attempt(
        replica=0,
        replica_count=1,
        attempt=0,
        nodes=(0, 1),
        master_addr=master_addr,
        master_port="1",
        endpoints=("a:1", "b:2"),
        shared_secret="k",
    )
    plan = LaunchPlan.of(RunSpec.model_validate(fields), FOLDER, attempt, {})
    return rank_launches(plan, node, share or NodeResources(python="/py", cpus=8))


def test_what_ranks_of_a_node_share_is_not_repeated_for_each() -> None:
    env, ranks = given(ranks_per_node=4, env={"SHARED": "x"})
    assert env["SHARED"] == "x"
    assert [set(rank.env) for rank in ranks] == [{"RANK", "LOCAL_RANK", "ROLE_RANK"}] * 4


@pytest.mark.parametrize(
    ("checkpoint", "path", "local"),
    [
        ({"path": "s3://b/run"}, "s3://b/run", "/runs/demo-abc234/checkpoints"),
        ({"path": "s3://b/run", "local": "/nvme"}, "s3://b/run", "/nvme"),
        ({"path": "out", "local": "/nvme"}, "/base/out", "/nvme"),
        ({"path": "out"}, "/base/out", None),
    ],
)
def test_checkpoints_of_two_tiers_go_to_the_node_first(
    checkpoint: dict[str, str], path: str, local: str | None
) -> None:
    env, _ = given(checkpoint=checkpoint)
    assert (env["HOLDFAST_CHECKPOINT_PATH"], env.get("HOLDFAST_CHECKPOINT_LOCAL")) == (path, local)


@pytest.mark.parametrize(
    ("recovery", "nodes", "replicas", "size"),
    [
        ({"global_batch": "keep"}, (0,), 1, "4"),
        ({"global_batch": "scale"}, (0,), 1, "2"),
        ({"global_batch": "keep", "replicas": 2}, (0,), 2, "4"),
        ({"global_batch": "scale", "replicas": 2}, (0,), 2, ""),  # as many as take part in a step
    ],
)
def test_ranks_that_the_batch_is_made_for_are_told(
    recovery: dict[str, Any], nodes: tuple[int, ...], replicas: int, size: str
) -> None:
    env = environment_of_ranks(replicas=replicas, nodes=nodes, ranks_per_node=2, recovery=recovery)
    assert env["HOLDFAST_BATCH_WORLD_SIZE"] == size


def test_ranks_learn_whether_their_number_may_change() -> None:
    elastic, fixed = given(nodes="1..2"), given(nodes=2)
    assert elastic[0]["HOLDFAST_ELASTIC"] == "1"
    assert "HOLDFAST_ELASTIC" not in fixed[0]


def environment_of_ranks(*, replicas: int, nodes: tuple[int, ...] = (0,), **job: Any) -> dict[str, str]:
    """The environment of the ranks of the first of some replicas, in a job for two nodes."""
    fields = {
        "job": {"command": "true", "nodes": 2, **job},
        "base": "/base",
        "created_at": 0.0,
        "fabric": "tcp",
        "fabric_env": {},
        "checkpoint_root": None,
    }
    attempt = Attempt(
        replica=0,
        replica_count=replicas,
        attempt=0,
        nodes=nodes,
        master_addr="a",
        master_port="1",
        endpoints=(),
        shared_secret="k",
    )
    return attempt_env(RunSpec.model_validate(fields), FOLDER, attempt)


@pytest.mark.parametrize(
    ("step_timeout_s", "peer", "heartbeat"), [(20, "200", "260"), ("auto", "600", "660"), (None, "600", "660")]
)
def test_torch_ends_a_rank_later_than_the_session_gives_a_replica_up(
    step_timeout_s: Any, peer: str, heartbeat: str
) -> None:
    env = environment_of_ranks(replicas=2, recovery={"replicas": 2, "step_timeout_s": step_timeout_s})
    assert env["HOLDFAST_PEER_TIMEOUT_S"] == peer
    assert env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == heartbeat
    assert (env["TORCH_NCCL_BLOCKING_WAIT"], env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("0", "3")


def test_torchs_watchdogs_are_as_the_job_sets_them() -> None:
    wish = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    env = environment_of_ranks(replicas=2, recovery={"replicas": 2}, env=wish)
    assert {name: env[name] for name in wish} == wish


def test_torchs_watchdogs_of_a_single_replica_are_torchs() -> None:
    (launch,) = launched(nodes=1)
    assert not [name for name in launch.env | launch.env_defaults if name.startswith("TORCH_NCCL")]


def test_cadence_that_is_left_open_is_told_to_ranks() -> None:
    env, _ = given(checkpoint={"path": "/c", "every": "auto"})
    assert (env["HOLDFAST_CHECKPOINT_EVERY"], env["GROUP_WORLD_SIZE"]) == ("auto", "2")
    assert "HOLDFAST_CHECKPOINT_EVERY_S" not in env


def test_defaults_apart_from_what_goes_over_the_nodes_environment() -> None:
    for launch in launched(ranks_per_node=2):
        assert launch.env_defaults == {
            "OMP_NUM_THREADS": "4",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "TORCH_FR_BUFFER_SIZE": "1000",
        }
        assert not launch.env_defaults.keys() & launch.env.keys()
        assert launch.env["NCCL_NET"] == "Socket"


def test_jobs_own_environment_goes_over_everything_but_what_holds_the_ranks_together() -> None:
    env = {"OMP_NUM_THREADS": "1", "NCCL_NET": "IB", "CUDA_VISIBLE_DEVICES": "3"}
    (launch,) = launched(NodeResources(python="/py", cpus=8, devices=("1",)), env=env)
    assert {name: launch.env[name] for name in env} == env


@pytest.mark.parametrize("kind", ["per-rank", "per-node"])
def test_devices_of_the_share_are_all_that_its_ranks_see(kind: str) -> None:
    for launch in launched(NodeResources(python="/py", cpus=8, devices=("4", "GPU-a")), launch=kind, gpus_per_node=2):
        assert launch.env["CUDA_VISIBLE_DEVICES"] == "4,GPU-a"
    (launch,) = launched(NodeResources(python="/py", cpus=8, devices=()))
    assert launch.env["CUDA_VISIBLE_DEVICES"] == ""
    (launch,) = launched(NodeResources(python="/py", cpus=8))
    assert "CUDA_VISIBLE_DEVICES" not in launch.env


@pytest.mark.parametrize(
    ("checkpoint", "checkpoint_root", "expected"),
    [
        (None, None, "/runs/demo-abc234/checkpoints"),
        (None, "/shared", "/shared/demo-abc234"),
        (None, "shared", "/base/shared/demo-abc234"),
        ("mine", "/shared", "/base/mine"),
    ],
)
def test_checkpoints_go_where_the_job_says_else_to_the_targets_storage(
    checkpoint: str | None, checkpoint_root: str | None, expected: str
) -> None:
    (launch,) = launched(checkpoint_root=checkpoint_root, checkpoint={"path": checkpoint})
    assert launch.env["HOLDFAST_CHECKPOINT_PATH"] == expected


@pytest.mark.parametrize(
    ("fabric_env", "env", "promised"),
    [
        ({}, {}, ()),
        ({"NCCL_SOCKET_IFNAME": "eth,ens"}, {}, ("eth,ens",)),
        ({"GLOO_SOCKET_IFNAME": "net1"}, {"GLOO_SOCKET_IFNAME": "eth0"}, ("=net1",)),
        ({"NCCL_SOCKET_IFNAME": "=net1", "GLOO_SOCKET_IFNAME": "net1"}, {"X": "y"}, ("=net1",)),
        ({"NCCL_SOCKET_IFNAME": "net1"}, {"GLOO_SOCKET_IFNAME": "eth0"}, ("net1", "=eth0")),
    ],
)
def test_interfaces_of_the_fabric_are_promised_and_those_of_the_environment_where_it_names_none(
    fabric_env: dict[str, str], env: dict[str, str], promised: tuple[str, ...]
) -> None:
    job = {"command": "true", "fabric": {"env": fabric_env}, "env": env}
    fields = {"job": job, "base": "/", "created_at": 0.0, "fabric": "tcp", "fabric_env": {"NCCL_NET": "Socket"}}
    assert promised_interfaces(RunSpec.model_validate(fields)) == promised
