"""The processes of a probe on one node: real ones, of an interpreter that prints what a probe would."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.node_probe import NodeProbe
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.clock import Clock
from holdfast.events import NodeProbed, ProbeAdvanced
from holdfast.events.probe_results import (
    AllReduceRate,
    NodeAllReduce,
    ProbeOutcome,
    ProbeProgress,
    ProbeResult,
    ProbeStage,
)
from holdfast.protocol.node_requirements import NodeRequirements
from holdfast.protocol.orders import ProbeNode, RankLaunch, StartRanks, StopProbe
from holdfast.protocol.validation import out_of_range

RESULT = ProbeResult(rank=0, outcome=ProbeOutcome.PASSED, elapsed_s=2.0)
LINES = [
    *(
        ProbeProgress(rank=0, stage=stage, elapsed_s=1.0, deadline_s=5.0)
        for stage in (ProbeStage.MATMUL, ProbeStage.PAIRS, ProbeStage.PAIRS)
    ),
    RESULT,
]


@dataclass
class Node:
    """A node of which the probe is started."""

    folder: Path
    sent: list[NodeProbed | ProbeAdvanced] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = ReservedPort("127.0.0.1")
        self.ended = asyncio.Event()
        self.advanced = asyncio.Event()
        """Two stages have been reported."""
        self.probe = NodeProbe(
            node=1,
            generation=0,
            folder=self.folder,
            rendezvous_port=self.port,
            clock=Clock(),
            send=self._take,
        )

    def _take(self, event: NodeProbed | ProbeAdvanced) -> None:
        self.sent.append(event)
        if isinstance(event, NodeProbed):
            self.ended.set()
        elif len(self.sent) == 2:
            self.advanced.set()

    async def report(self) -> NodeProbed:
        async with asyncio.timeout(20.0):
            await self.ended.wait()
        self.ended.clear()
        assert isinstance(self.sent[-1], NodeProbed)
        return self.sent[-1]

    def python(self, script: str) -> str:
        path = self.folder / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(stat.S_IRWXU)
        return str(path)


def order(python: str, *, ranks: int = 2, number: int = 1, deadline_s: float = 5.0, cwd: str = "/gone") -> ProbeNode:
    launches = tuple(
        RankLaunch(rank=rank, argv=("train",), env={"RANK": str(rank)}, cwd=cwd, log="") for rank in range(ranks)
    )
    start = StartRanks(replica=0, attempt=0, ranks=launches, env={"WORLD_SIZE": str(ranks)})
    return ProbeNode(
        replica=0,
        number=number,
        start=start,
        wanted=NodeRequirements(),
        nodes=(1, 4),
        deadline_s=deadline_s,
        python=python,
    )


def printing(*lines: ProbeProgress | ProbeResult) -> str:
    return "\n".join(f"echo '{msgspec.json.encode(line).decode()}'" for line in lines)


def run(tmp_path: Path, play: Callable[[Node], object]) -> None:
    async def with_node() -> None:
        await play(Node(tmp_path))  # type: ignore[misc]

    asyncio.run(with_node())


def test_result_of_rank_0_and_each_stage_are_reported(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        before = node.port.number
        node.probe.request(order(node.python(f"[ $RANK = 0 ] || exit 0\necho NCCL version 2.30\n{printing(*LINES)}")))
        report = await node.report()
        assert (report.result, report.problem, report.not_looked_at) == (RESULT, "", "")
        assert (report.node, report.nodes, report.number) == (1, (1, 4), 1)
        assert report.port == node.port.number != before
        stages = [event.stage for event in node.sent if isinstance(event, ProbeAdvanced)]
        assert stages in ([], [ProbeStage.MATMUL, ProbeStage.PAIRS])  # it may have ended before the first look
        node.probe.request(order("not started again"))
        assert (await node.report()).result == RESULT

    run(tmp_path, play)


def test_stages_are_reported_while_the_probe_runs(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        os.mkfifo(tmp_path / "go")
        script = f"{printing(*LINES[:3])}\nread -r _ < {tmp_path}/go\n{printing(RESULT)}"
        node.probe.request(order(node.python(script), ranks=1))
        async with asyncio.timeout(20.0):
            await node.advanced.wait()
        await asyncio.to_thread((tmp_path / "go").write_text, "go\n")
        assert (await node.report()).result == RESULT
        stages = [event.stage for event in node.sent if isinstance(event, ProbeAdvanced)]
        assert stages == [ProbeStage.MATMUL, ProbeStage.PAIRS]

    run(tmp_path, play)


def test_probe_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        os.mkfifo(tmp_path / "pid")
        node.probe.request(order(node.python(f"echo $$ > {tmp_path}/pid; exec sleep 60"), ranks=1, deadline_s=60.0))
        async with asyncio.timeout(20.0):
            pid = await asyncio.to_thread((tmp_path / "pid").read_text)
        node.probe.stop(StopProbe(replica=0, number=1, nodes=(1, 4)))
        report = await node.report()
        assert report.result is None
        assert "stopped" in report.problem
        assert not Path("/proc", pid.strip()).exists()

    run(tmp_path, play)


def test_probe_that_is_stopped_before_its_order_never_starts(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        node.probe.stop(StopProbe(replica=0, number=1, nodes=(1, 4)))
        report = await node.report()
        assert (report.number, report.nodes, report.result) == (1, (1, 4), None)
        node.probe.request(order(node.python(printing(RESULT))))
        assert (await node.report()).result is None
        assert not [*tmp_path.glob("probe-*")]

    run(tmp_path, play)


@pytest.mark.parametrize(
    "script",
    ["echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1", "echo probe: torch sees no GPU; exit 2"],
)
def test_interpreter_that_cannot_probe_is_no_failure(tmp_path: Path, script: str) -> None:
    async def play(node: Node) -> None:
        node.probe.request(order(node.python(script)))
        report = await node.report()
        assert "torch" in report.not_looked_at
        assert (report.problem, report.crashed) == ("", False)

    run(tmp_path, play)


def test_missing_interpreter_is_no_failure(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        node.probe.request(order("/no/such/python"))
        assert (await node.report()).not_looked_at == "/no/such/python: No such file or directory"

    run(tmp_path, play)


def test_crash_without_a_result_is_a_problem(tmp_path: Path) -> None:
    async def play(node: Node) -> None:
        node.probe.request(order(node.python("echo libcuda.so.1: No such file or directory; kill -SEGV $$")))
        report = await node.report()
        assert (report.result, report.crashed, report.not_looked_at) == (None, True, "")
        assert report.problem == "libcuda.so.1: No such file or directory"

    run(tmp_path, play)


def test_report_of_a_node_with_several_ranks_is_one_that_the_controller_takes(tmp_path: Path) -> None:
    rates = (AllReduceRate(size_bytes=8, time_s=1e-5, algorithm_gb_s=0.1, bus_gb_s=0.2),) * 3
    within = tuple(NodeAllReduce(node=each, rates=rates) for each in range(200))
    result = msgspec.structs.replace(RESULT, node_all_reduce=within)

    async def play(node: Node) -> None:
        node.probe.request(order(node.python(f"[ $RANK = 0 ] || exit 0\n{printing(result)}")))
        report = await node.report()
        assert report.result is not None
        assert [len(each.rates) for each in report.result.node_all_reduce] == [1] * 200
        assert out_of_range(report) == ""

    run(tmp_path, play)
