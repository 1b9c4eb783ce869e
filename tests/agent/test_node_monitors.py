"""Monitors in an agent: what their threads see becomes events, on a tree of files that changes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.agent.node_monitors import Message, NodeMonitors, WatchedNode
from holdfast.clock import Clock
from holdfast.events import DeviceFault, DeviceFaultObserved, FindingRaised, MonitorsStarted
from holdfast.watch import monitor_table
from holdfast.watch.monitor import AnyMonitor, Monitor, Polled, SourceMissing, Symptom, comparing
from holdfast.watch.monitor_table import NodePlace

XID = "4,2,4000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
DEADLINE_S = 60.0
M = TypeVar("M")


class Watched:
    """The monitors of a node, and the events that they send."""

    def __init__(
        self, root: Path, table: Callable[[NodePlace], tuple[AnyMonitor, ...]] = monitor_table.monitors
    ) -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self.pressed = 0
        node = WatchedNode(node=3, generation=1, address="127.0.0.1")
        self.monitors = NodeMonitors(node, Clock(), self.sent.put_nowait, self._press, root=root, table=table)

    def _press(self) -> None:
        self.pressed += 1

    async def next(self, kind: type[M]) -> M:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if isinstance(event := await self.sent.get(), kind):
                    return event


def node_files(root: Path) -> None:
    """A node of a container: a kernel log, some memory, no devices."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (root / "dev").mkdir()
    os.mkfifo(root / "dev/kmsg")


def test_fault_in_the_kernels_log_is_an_event_at_once(tmp_path: Path) -> None:
    node_files(tmp_path)

    async def go() -> None:
        watched = Watched(tmp_path)
        watched.monitors.start(devices=True)
        watched.monitors.start(devices=True)  # the ranks of a later attempt
        started = await watched.next(MonitorsStarted)
        assert (started.node, started.generation) == (3, 1)
        assert {"kernel log", "memory"} <= {*started.sources}
        assert started.missing["RDMA ports"] == "the node has no active RDMA port"
        assert "libnvidia-ml.so.1" in started.missing["GPUs (NVML)"]
        with (tmp_path / "dev/kmsg").open("w") as kernel:
            kernel.write(XID)
        observed = await watched.next(DeviceFaultObserved)
        assert (observed.fault, observed.device, observed.node) == (DeviceFault.GPU, "GPU 0000:1b:00", 3)
        assert (observed.finding.code, observed.finding.where) == ("gpu-failed", "node3, GPU 0000:1b:00")
        assert XID.partition(";")[2].strip() in observed.finding.evidence
        watched.monitors.stop()

    asyncio.run(go())


def test_job_that_wants_no_device_faults_has_none_looked_for(tmp_path: Path) -> None:
    node_files(tmp_path)

    async def go() -> None:
        watched = Watched(tmp_path)
        watched.monitors.start(devices=False)
        started = await watched.next(MonitorsStarted)
        assert {*started.sources, *started.missing} == {
            *("memory", "disks", "CPU limit", "CPU temperature"),
            "RDMA ports",
        }
        watched.monitors.stop()

    asyncio.run(go())


def row(source: str, code: str, fault: DeviceFault | None, *, asks_driver: bool = False) -> AnyMonitor:
    """A monitor that reports one symptom of one GPU at its first reading."""
    symptom = Symptom(code=code, device="GPU 1", what="w", remedy="r", fault=fault)
    return Monitor(
        source=source,
        period_s=3600.0,
        open=lambda: Polled(function=lambda _: 0),
        judge=comparing(lambda _before, _now: [symptom]),
        asks_driver=asks_driver,
    )


def test_fault_that_two_sources_report_is_one_event(tmp_path: Path) -> None:
    gpu, needs_reset = DeviceFault.GPU, DeviceFault.RESET
    rows = (row("a", "x", gpu), row("b", "x", gpu), row("c", "y", needs_reset), row(monitor_table.MEMORY, "z", None))

    async def go() -> None:
        watched, faults = Watched(tmp_path, lambda _: rows), list[DeviceFault]()
        watched.monitors.start(devices=True)
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(event := await watched.sent.get(), FindingRaised):  # that of the last row
                faults += [event.fault] if isinstance(event, DeviceFaultObserved) else []
        assert faults == [gpu, needs_reset]
        assert (event.finding.code, watched.pressed) == ("z", 1)
        watched.monitors.stop()

    asyncio.run(go())


def test_driver_that_hangs_keeps_nothing_else_from_being_read(tmp_path: Path) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hang() -> Polled[int]:
        asked.set()
        answered.wait()
        raise SourceMissing("too late")

    hanging: AnyMonitor = Monitor(
        source="driver", period_s=1.0, open=hang, judge=comparing(lambda _before, _now: []), asks_driver=True
    )

    async def go() -> None:
        watched = Watched(tmp_path, lambda _: (hanging, row("a", "x", None)))
        watched.monitors.start(devices=True)
        assert await asyncio.to_thread(asked.wait, DEADLINE_S)
        assert (await watched.next(FindingRaised)).finding.code == "x"
        watched.monitors.stop()

    agent = threading.Thread(target=lambda: asyncio.run(go()), daemon=True)
    agent.start()
    agent.join(DEADLINE_S)
    exited = not agent.is_alive()
    answered.set()
    assert exited
