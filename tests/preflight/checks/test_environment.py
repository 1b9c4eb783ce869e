"""Variables that fight the fabric: each row finds its bad value, and no common setting."""

from __future__ import annotations

import pytest
from tests.preflight.conftest import MakeNode, codes

from holdfast.findings import Owner, Severity
from holdfast.preflight.checks.environment import FIGHTING_VARIABLES, fighting_variables

BAD = {
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "0",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_PROTO": "LL",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG_FILE": "/shared/nccl.log",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "CUDA_VISIBLE_DEVICES": "0,1,-1,2,3,4,5,6,7",
}
BAD_WITH_EFA = {"NCCL_NET_PLUGIN": "none", "FI_PROVIDER": "tcp", "NCCL_NET": "Socket"}


@pytest.mark.parametrize(
    ("name", "value", "network"),
    [
        *((name, value, "IB") for name, value in BAD.items()),
        *((name, value, "AWS Libfabric") for name, value in BAD_WITH_EFA.items()),
        ("NCCL_NET", "socket", "IB"),
        ("NCCL_NET", "AWS Libfabric", "IB"),
        ("CUDA_VISIBLE_DEVICES", "", "IB"),
        ("NCCL_SOCKET_IFNAME", "=lo", "Socket"),
    ],
)
def test_a_bad_value_is_found(node: MakeNode, name: str, value: str, network: str) -> None:
    view = node(environ={name: value}, address="10.0.0.4", gpus=8, processes=8, network=network)
    [finding] = fighting_variables(view)
    assert finding.code == "fighting-variable"
    assert finding.evidence == (f"{name}={value}",)
    assert (finding.where, finding.owner) == ("environment of the agent", Owner.CLUSTER)


def test_every_row_has_a_bad_value_here() -> None:
    assert {row.name for row in FIGHTING_VARIABLES} == {*BAD, *BAD_WITH_EFA, "TORCH_NCCL_BLOCKING_WAIT"}


# Values that the fabrics' rows, clouds' images and their guides set.
GOOD = {
    "IB": {
        "NCCL_NET": "IBext_v10",
        "NCCL_IB_DISABLE": "0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_MIN_NCHANNELS": "16",
        "NCCL_MAX_NCHANNELS": "32",
        "NCCL_DEBUG_FILE": "/logs/nccl-%h-%p.log",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "CUDA_LAUNCH_BLOCKING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "1",  # the launcher's own value beats it
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
    },
    "AWS Libfabric": {"NCCL_NET": "Libfabric", "FI_PROVIDER": "efa", "NCCL_PROTO": "simple"},
    "Socket": {
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_DEBUG_FILE": "/dev/stderr",
        "NCCL_NET_PLUGIN": "none",
        "FI_PROVIDER": "tcp",
    },
}


@pytest.mark.parametrize("network", GOOD)
def test_a_common_value_is_no_finding(node: MakeNode, network: str) -> None:
    view = node(environ=GOOD[network], address="10.0.0.4", gpus=8, processes=8, network=network)
    assert codes([*fighting_variables(view)]) == []


def test_what_concerns_gpus_and_other_nodes_is_no_finding_without_them(node: MakeNode) -> None:
    alone = {**BAD, "TORCH_DISTRIBUTED_DEBUG": "OFF", "NCCL_DEBUG_FILE": "/dev/stdout"}
    assert codes([*fighting_variables(node(environ=alone, address="127.0.0.1"))]) == []


def test_the_variable_of_the_job_beats_that_of_the_agent(node: MakeNode) -> None:
    environ, env = {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "0"}, {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}
    [finding] = fighting_variables(node(environ=environ, env=env, network="IB", gpus=8))
    assert (finding.evidence, finding.severity) == (("NCCL_IB_DISABLE=1",), Severity.ERROR)
    assert (finding.where, finding.owner) == ("the job's `env`", Owner.USER)


@pytest.mark.parametrize(("value", "expected"), [("0", []), ("1", ["fighting-variable"])])
def test_blocking_wait_counts_only_in_the_job(node: MakeNode, value: str, expected: list[str]) -> None:
    view = node(env={"TORCH_NCCL_BLOCKING_WAIT": value}, gpus=8)
    assert codes([*fighting_variables(view)]) == expected
