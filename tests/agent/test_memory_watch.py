"""Memory that grows until none is left is reported with its rank; a rank that has just begun is not watched."""

from __future__ import annotations

import os

from holdfast.agent.memory_watch import MemoryWatch
from holdfast.findings import Finding
from holdfast.protocol.rank_messages import GpuMemory

GIB = 2.0**30


class Node:
    def __init__(self, step: int) -> None:
        self.found: list[Finding] = []
        self.now = 0.0
        self.watch = MemoryWatch(
            node=1,
            replica=0,
            pids=lambda: {3: os.getpid()},
            steps_of=lambda _: step,
            report_finding=self.found.append,
            clock=lambda: self.now,
        )

    def leak_on_gpu(self) -> None:
        for n in range(40):
            self.now = 10.0 * n
            self.watch.add_gpu(3, GpuMemory(used_bytes=(10 + n) * GIB, free_bytes=(70 - n) * GIB))


def test_growth_on_a_gpu_is_reported_once_with_the_time_left() -> None:
    node = Node(step=100)
    node.leak_on_gpu()
    (found,) = node.found
    assert (found.code, found.where) == ("memory-growing", "rank 3 on node1")
    assert "of its GPU" in found.what
    assert "6,144 MiB per minute" in found.evidence[0]


def test_first_steps_of_a_rank_are_not_watched() -> None:
    node = Node(step=5)
    node.leak_on_gpu()
    node.watch.sample()
    assert node.found == []


def test_memory_that_stays_is_not_reported() -> None:
    node = Node(step=100)
    for n in range(100):
        node.now = float(n)
        node.watch.sample()
    assert node.found == []
