"""Runs the table of monitors in this agent, and sends what they see as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from holdfast.agent.device_evidence import fault_of_line
from holdfast.clock import Clock
from holdfast.events import DeviceFault, DeviceFaultObserved, FindingRaised, MonitorsStarted, TrafficStopped
from holdfast.findings import Finding
from holdfast.preflight.nvidia_smi import is_visible
from holdfast.watch.monitor import AnyMonitor, Symptom
from holdfast.watch.monitor_loop import Latest, MonitorLoop, Opened, Overlay
from holdfast.watch.monitor_table import MEMORY, NodePlace, monitors
from holdfast.watch.node_values import node_values

DRIVER_TIMEOUT_S = 20.0
"""Seconds after which a driver that has not answered counts as missing; its thread waits on."""
SAME_FAULT_S = 60.0
"""A fault of a device that another source reports so soon after the first is the same one."""

STALE_S = 60.0
"""Age in seconds from which a reading is not exported: four of the longest periods."""

Message = DeviceFaultObserved | FindingRaised | MonitorsStarted | TrafficStopped


class WatchedNode(Struct, frozen=True, kw_only=True):
    """Whose monitors these are."""

    node: int
    generation: int
    address: str


class NodeMonitors:
    """The monitors of one agent, which begin with its first ranks."""

    def __init__(
        self,
        watched: WatchedNode,
        clock: Clock,
        send: Callable[[Message], object],
        on_memory_pressure: Callable[[], None],
        root: Path = Path("/"),
        table: Callable[[NodePlace], tuple[AnyMonitor, ...]] = monitors,
    ) -> None:
        self._watched = watched
        self._clock = clock
        self._send = send
        self._on_memory_pressure = on_memory_pressure
        self._place = NodePlace(
            address=watched.address,
            classify=fault_of_line,
            is_visible=partial(is_visible, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
            root=root,
        )
        self._table = table
        self._loops: tuple[MonitorLoop, ...] = ()
        self._opened: list[Opened] = []
        self._answered = asyncio.Event()
        self._announcing: asyncio.Task[None] | None = None
        self._faults: dict[tuple[DeviceFault, str], tuple[str, float]] = {}
        """The source that last reported each fault of a device, and when."""

    def start(self, *, devices: bool) -> None:
        """Start the threads, unless they run; without `devices` failed devices are not looked for."""
        if self._loops:
            return
        rows = [row for row in self._table(self._place) if devices or not row.for_devices]
        # A driver that hangs must not keep the kernel's log from being read.
        parts = [[row for row in rows if row.asks_driver is asks] for asks in (False, True)]
        loop = asyncio.get_running_loop()

        def in_agent(function: Callable[..., None], *values: object) -> None:
            with contextlib.suppress(RuntimeError):  # the agent has ended
                loop.call_soon_threadsafe(function, *values)

        def report(source: str, symptom: Symptom) -> None:
            """The evidence is read here: it may take long."""
            finding = symptom.finding(f"node{self._watched.node}")
            in_agent(self._on_symptom, source, symptom if devices else replace(symptom, fault=None), finding)

        self._loops = tuple(MonitorLoop(part, report) for part in parts)
        for each in self._loops:
            each.start(lambda opened: in_agent(self._on_opened, opened))
        self._announcing = asyncio.ensure_future(self._announce(rows))

    def overlay(self, source: str, overlay: Overlay, for_s: float) -> None:
        """Change the readings of a source for so many seconds, for a drill."""
        for each in self._loops:
            each.overlay(source, overlay, for_s)

    def latest(self) -> dict[str, Latest]:
        """The latest reading of each source."""
        return {source: latest for each in self._loops for source, latest in each.latest().items()}

    def values(self) -> dict[str, float]:
        """The latest readings as numbers for a scrape, without those of sources that are not read any more."""
        return node_values((source, each.reading) for source, each in self.latest().items() if each.age_s < STALE_S)

    def stop(self) -> None:
        """End the threads."""
        if self._announcing is not None:
            self._announcing.cancel()
        for each in self._loops:
            each.stop()

    def _on_opened(self, opened: Opened) -> None:
        self._opened.append(opened)
        if len(self._opened) == len(self._loops):
            self._answered.set()

    async def _announce(self, rows: list[AnyMonitor]) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), DRIVER_TIMEOUT_S)
        present = {source for opened in self._opened for source in opened.present}
        reasons: Mapping[str, str] = {name: text for opened in self._opened for name, text in opened.missing.items()}
        silent = f"its driver has not answered for {DRIVER_TIMEOUT_S:g} s"
        self._send(
            MonitorsStarted(
                at=self._clock(),
                node=self._watched.node,
                generation=self._watched.generation,
                sources=tuple(row.source for row in rows if row.source in present),
                missing={row.source: reasons.get(row.source, silent) for row in rows if row.source not in present},
            )
        )

    def _on_symptom(self, source: str, symptom: Symptom, finding: Finding) -> None:
        fault, device = symptom.fault, symptom.device
        if source == MEMORY:
            self._on_memory_pressure()
        if symptom.stops_traffic:
            self._send(TrafficStopped(at=self._clock(), node=self._watched.node, finding=finding))
        elif fault is None:
            self._send(FindingRaised(at=self._clock(), finding=finding))
        elif not self._is_known(source, fault, device):
            self._send(
                DeviceFaultObserved(
                    at=self._clock(),
                    node=self._watched.node,
                    generation=self._watched.generation,
                    fault=fault,
                    device=device,
                    finding=finding,
                )
            )

    def _is_known(self, source: str, fault: DeviceFault, device: str) -> bool:
        """Whether another source has just reported the same."""
        first, at_s = self._faults.get((fault, device), (source, 0.0))
        now = time.monotonic()
        if first != source and now - at_s < SAME_FAULT_S:
            return True
        self._faults[fault, device] = (source, now)
        return False
