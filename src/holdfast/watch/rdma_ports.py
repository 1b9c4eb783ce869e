"""Judges the RDMA ports of a node by readings of their counters and their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from holdfast.events import DeviceFault
from holdfast.host.rdma_counters import CounterReading, RdmaCounterFiles, pauses
from holdfast.watch.link_state import REMEDY
from holdfast.watch.monitor import Comparison, Judge, Source, SourceMissing, Symptom
from holdfast.watch.rdma_traffic import Traffic, changes, evidence, updated

PERIOD_S = 5.0
"""Seconds between two readings; one of eight ports takes a few milliseconds of CPU, most of it in the driver."""

Pauses = Mapping[str, Mapping[str, int]]
"""By port, as `ethtool -S` counts them."""


def open_ports(root: Path) -> RdmaCounterFiles:
    """The node's active RDMA ports; raises SourceMissing."""
    files = RdmaCounterFiles(root)
    if not files.kinds:
        raise SourceMissing("the node has no active RDMA port")
    return files


def lost_links(before: CounterReading, now: CounterReading) -> Iterator[Symptom]:
    """Ports whose link went down since the last reading, or is down."""
    for port, grown in changes(before, now).items():
        times = grown.get("link_downed", 0)
        if times or port in now.down:
            state = "is down" if port in now.down else f"went down {'once' if times == 1 else f'{times} times'}"
            yield Symptom(
                code="fabric-link-down",
                device=port,
                what=f"the link of {port} {state} while the job runs",
                remedy=REMEDY,
                evidence=lambda port=port: evidence(before, now, [port]) or (f"{port}: its state is not ACTIVE",),
                fault=DeviceFault.NIC_LINK_DOWN,
                begins=bool(times) or port not in before.down,
                clear_s=0.0,
            )


class PortJudge:
    """Judges links by two readings, and errors and rates by those of a minute."""

    def __init__(self, source: Source[CounterReading] | None) -> None:
        files = source if isinstance(source, RdmaCounterFiles) else None
        self._traffic = Traffic(kinds=files.kinds if files else {})
        self._links = Comparison(lost_links)
        self._interfaces: Mapping[str, str] = files.interfaces if files else {}
        self._first_pauses = self._pauses()

    def __call__(self, reading: CounterReading, at_s: float) -> Iterator[Symptom]:
        yield from self._links(reading, at_s)
        self._traffic, new = updated(self._traffic, reading)
        for symptom in new:
            yield replace(symptom, evidence=self._with_pauses(symptom.device, symptom.evidence))

    def _pauses(self) -> Pauses:
        return {port: pauses(interface) for port, interface in self._interfaces.items()}

    def _with_pauses(self, port: str, lines: Callable[[], tuple[str, ...]]) -> Callable[[], tuple[str, ...]]:
        """Add how often flow control has paused the port."""

        def read() -> tuple[str, ...]:
            first = self._first_pauses.get(port, {})
            grown = {name: value - first.get(name, 0) for name, value in self._pauses().get(port, {}).items()}
            text = ", ".join(f"{name} +{value:,}" for name, value in grown.items() if value > 0)
            return (*lines(), *([f"{port} since the agent's start: {text}"] if text else []))

        return read


def port_judge(source: Source[CounterReading] | None) -> Judge[CounterReading]:
    """The `judge` of the row."""
    return PortJudge(source)
