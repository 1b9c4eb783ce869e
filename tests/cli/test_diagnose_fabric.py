"""Fabric output of `diagnose`, for people and machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.nccl_log_generator import Job, Version
from msgspec.structs import replace

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.golden import Golden

FAST = Job(version=Version.of("2.27.7"), nodes=2, gpus=2, channels=2, nics=2)
SLOW = replace(FAST, network="Socket", gdr=False)


def written(folder: Path, job: Job, *, last: Job | None = None, after: str = "") -> str:
    """A folder of the ranks' logs; those of the last node are another job's, and `after` ends rank 0's."""
    for rank in range(job.ranks):
        own = last if last is not None and rank // job.gpus == job.nodes - 1 else job
        (folder / f"rank-{rank}.log").write_bytes(b"".join(own.log(rank)) + (after.encode() if rank == 0 else b""))
    return str(folder)


@pytest.mark.parametrize("last", [None, SLOW], ids=["all nodes", "one node"])
def test_slow_run_on_sockets_is_answered_by_its_class(cli: Cli, tmp_path: Path, last: Job | None) -> None:
    """Where all are on sockets nothing says that there is better: then whether there is decides."""
    where = written(tmp_path, SLOW if last is None else FAST, last=last)
    data = cli("diagnose", where, "-o", "json").data
    likely, open_ = ("tcp-fallback", "fabric-on-tcp", "likely"), ("unknown", "fabric-on-tcp", "unsure")
    assert (data["failure_class"], data["code"], data["confidence"]) == (likely if last else open_)
    assert last or "whether the nodes have RDMA devices at all" in [each["what"] for each in data["next_evidence"]]
    assert any("via NET/Socket/" in line["text"] for line in data["evidence"])
    assert "RDMA device" in data["remedy"][0]


def test_fabric_follows_the_failure(cli: Cli, golden: Golden) -> None:
    failed = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    for name, job, last, after in (
        ("working", FAST, None, ""),
        ("slow", SLOW, None, ""),
        ("one-slow", FAST, SLOW, ""),
        ("failed", SLOW, None, failed),
    ):
        Path(name).mkdir()
        written(Path(name), job, last=last, after=after)
    golden(cli.transcript(*(["diagnose", name] for name in ("working", "slow", "one-slow", "failed"))))


def test_working_fabric_is_reported_without_a_failure(cli: Cli, tmp_path: Path) -> None:
    where = written(tmp_path, FAST)
    data = cli("diagnose", where, "-o", "json").data
    assert data["failure_class"] == "unknown"
    assert data["transport"]["verdict"]["outcome"] == "fabric-verified"
    (world,) = data["transport"]["communicators"]
    assert {tuple(pair["via"]) for pair in world["nodes"]} == {("NVLink",), ("IB+GDR",)}


def test_node_without_gpudirect_is_an_answer(cli: Cli, tmp_path: Path) -> None:
    where = written(tmp_path, FAST, last=replace(FAST, gdr=False))
    data = cli("diagnose", where, "-o", "json").data
    assert (data["failure_class"], data["code"]) == ("gdr-missing", "fabric-without-gdr")


def test_single_node_that_chose_sockets_is_no_fallback(cli: Cli, tmp_path: Path) -> None:
    data = cli("diagnose", written(tmp_path, replace(SLOW, nodes=1)), "-o", "json").data
    assert data["failure_class"] == "unknown"
    assert data["evidence"] == []
    assert data["transport"]["verdict"]["cause"] == "one-node"


def test_logs_without_nccl_say_nothing_of_a_fabric(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("[Gloo] Rank 0 is connected to 1 peer ranks. Expected number: 1\nstep 1\n")
    assert "fabric" not in cli("diagnose", str(tmp_path)).out
    assert cli("diagnose", str(tmp_path), "-o", "json").data["transport"] is None


@pytest.mark.parametrize("output", ["text", "json"])
def test_redacted_fabric_names_no_host_and_no_address(cli: Cli, tmp_path: Path, output: str) -> None:
    said = cli("diagnose", "--redact", written(tmp_path, FAST, last=SLOW), "-o", output).out
    assert "tcp-fallback" in said
    assert "worker-000" not in said
    assert "10.0.0." not in said
    assert str(tmp_path) not in said
