"""The ranks of a replay on one node: real processes, of programs that leave the files that a Session would."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.waiting import until

from holdfast.agent.node_replay import NodeReplay
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.clock import Clock
from holdfast.errors import failure
from holdfast.events import NodeReplayed
from holdfast.host.processes import started_at
from holdfast.protocol.orders import RankLaunch, ReplayNode, StartRanks, StopReplay

LEAVE_DIGEST = 'echo "$STATE" > "$HOLDFAST_REPLAY_FOLDER/rank-0000$RANK.digest"'


async def no_code(digest: str) -> Path:
    raise failure("code-not-delivered", f"{digest} is gone", exit_code=1, remedy="")


@dataclass
class Node:
    """A node that takes part in replays."""

    folder: Path
    sent: list[NodeReplayed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = ReservedPort("127.0.0.1")
        self.ended = asyncio.Event()
        self.replay = NodeReplay(
            node=1,
            generation=0,
            folder=self.folder,
            rendezvous_port=self.port,
            get_code=no_code,
            clock=Clock(),
            send=self._take,
        )

    def _take(self, event: NodeReplayed) -> None:
        self.sent.append(event)
        self.ended.set()

    async def report(self) -> NodeReplayed:
        async with asyncio.timeout(20.0):
            await self.ended.wait()
        self.ended.clear()
        return self.sent[-1]


def order(
    folder: Path, script: str, *, number: int = 1, deadline_s: float = 20.0, code: str = "", state: str = "s"
) -> ReplayNode:
    launches = tuple(
        RankLaunch(rank=rank, argv=("sh", "-c", script), env={"RANK": str(rank)}, cwd=str(folder), log=f"{folder}/kept")
        for rank in range(2, 4)
    )
    start = StartRanks(replica=0, attempt=3, ranks=launches, env={"STATE": state}, code_digest=code)
    return ReplayNode(replica=0, number=number, start=start, nodes=(0, 1), until_step=7, deadline_s=deadline_s)


def play(tmp_path: Path, scene: Callable[[Node], Awaitable[object]]) -> None:
    async def with_node() -> None:
        await scene(Node(tmp_path))

    asyncio.run(with_node())


def test_equal_states_give_equal_digests_and_a_known_number_is_only_reported_again(tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        port, digests = node.port.number, list[str]()
        for number, state in ((1, "s"), (2, "s"), (3, "t")):
            node.replay.request(order(tmp_path, LEAVE_DIGEST, number=number, state=state))
            report = await node.report()
            assert (report.number, report.nodes, report.problem) == (number, (0, 1), "")
            assert report.port == node.port.number != port
            digests.append(report.digest)
        assert digests[0] == digests[1] != digests[2]
        node.replay.request(order(tmp_path, "exit 1", number=3))
        assert await node.report() == node.sent[2]

    play(tmp_path, scene)
    assert not (tmp_path / "kept").exists()  # the ranks' logs of the attempt are untouched


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ('echo "ValueError: x"; exit 3', "rank 2 ended: ValueError: x"),
        ("kill -9 $$", "rank 2 ended: exit code 9"),
        ("exit 0", "its program ended before the last step of the replay"),
        ('echo "ValueError: $HOLDFAST_REPLAY_UNTIL$HOLDFAST_RANK_SOCKET"; exit 1', "rank 2 ended: ValueError: 7"),
    ],
    ids=["error", "signal", "no digest", "variables"],
)
def test_ranks_that_leave_no_digest_say_why(tmp_path: Path, script: str, problem: str) -> None:
    async def scene(node: Node) -> None:
        node.replay.request(order(tmp_path, f"test $RANK = 3 && {LEAVE_DIGEST} && exit; {script}"))
        report = await node.report()
        assert problem in report.problem
        assert report.digest == ""

    play(tmp_path, scene)


@pytest.mark.slow
def test_ranks_still_at_work_at_the_deadline_are_killed_with_what_they_started(tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        script = f"sleep 60 & echo $! > {tmp_path}/child-$RANK; sleep 60"
        node.replay.request(order(tmp_path, script, deadline_s=1.0))
        assert (await node.report()).problem == "not done within 1 s"
        for rank in (2, 3):
            child = int((tmp_path / f"child-{rank}").read_text())
            until(lambda child=child: started_at(child) is None)

    play(tmp_path, scene)


def test_replay_that_is_stopped_ends_and_one_that_was_never_ordered_never_starts(tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        node.replay.request(order(tmp_path, "sleep 60"))
        await asyncio.sleep(0)
        node.replay.stop(StopReplay(replica=0, number=1))
        assert (await node.report()).problem.startswith("it was stopped")
        node.replay.stop(StopReplay(replica=0, number=2))
        assert (await node.report()).problem == "it was stopped before its start"
        node.replay.request(order(tmp_path, LEAVE_DIGEST, number=2))
        assert (await node.report()).problem == "it was stopped before its start"

    play(tmp_path, scene)


def test_code_that_cannot_be_had_is_the_problem(tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        node.replay.request(order(tmp_path, LEAVE_DIGEST, code="abc"))
        assert (await node.report()).problem == "abc is gone"

    play(tmp_path, scene)
