"""Rounds of dumps of a node's ranks, of real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from holdfast.agent.stack_sampler import StackSampler
from holdfast.protocol.orders import DumpStacks, StackRound, StartRanks

SLEEPS = "import threading, time\ndef work():\n    print(1, flush=True)\n    time.sleep(99)\nwork()"


async def sampled(folder: Path, pids: dict[int, int], *orders: DumpStacks, rounds: int) -> list[StackRound]:
    """What is sent until so many rounds have come."""
    sent: list[StackRound] = []
    enough = asyncio.Event()

    def send(message: StackRound) -> None:
        sent.append(message)
        if len(sent) == rounds:
            enough.set()

    start = StartRanks(replica=1, attempt=2, ranks=())
    sampler = StackSampler(start, node=3, folder=folder, pids=lambda: pids, send=send)
    for order in orders:
        sampler.start(order)
    await asyncio.wait_for(enough.wait(), 60)
    sampler.stop()
    return sent


def test_running_ranks_are_dumped_in_each_round_and_a_repeated_order_changes_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        order = DumpStacks(requested_at=5.0, rounds=2, interval_s=0.01)
        older = DumpStacks(requested_at=4.0, rounds=9)
        gone = 2**22 + 1  # above the largest pid
        try:
            sent = asyncio.run(sampled(tmp_path, {6: rank.pid, 7: gone}, order, order, older, rounds=2))
        finally:
            rank.kill()
    assert [(each.number, each.rounds, each.requested_at) for each in sent] == [(0, 2, 5.0), (1, 2, 5.0)]
    assert {(each.node, each.replica, each.attempt) for each in sent} == {(3, 1, 2)}
    for each in sent:
        found = {stack.rank: stack.frames for stack in each.stacks}
        assert found[6][0].startswith("work (")
        assert found[7] == ()
    assert [path.name for path in tmp_path.iterdir()] == ["stacks-requested-replica-1-attempt-2-rank-6.txt"]
