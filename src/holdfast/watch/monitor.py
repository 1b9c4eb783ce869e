"""What a monitor is: a source that is read again and again, and a judge of its readings.

A symptom is something wrong that a reading shows. It is reported once for each episode: after as many readings in a
row as it needs, and again only after it was absent for a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.events import DeviceFault
from holdfast.findings import Finding, Owner, Severity

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_REPORTS = 8
"""Episodes of one symptom of one device that are reported while the agent runs."""


class SourceMissing(Exception):
    """This node does not have the source; the text says why."""


def nothing() -> tuple[str, ...]:
    """No evidence."""
    return ()


class Symptom(Struct, frozen=True, kw_only=True):
    """Something wrong that the latest reading shows."""

    code: str
    """Of the finding."""
    device: str
    """Such as `GPU 0000:1b:00` or `mlx5_0:1`; one for each episode, and the place of the finding."""
    what: str
    remedy: str
    evidence: Callable[[], tuple[str, ...]] = nothing
    """Called only if the symptom is reported."""
    fault: DeviceFault | None = None
    """Set if a device has failed; then the policy decides, not only the reader of a finding."""
    stops_traffic: bool = False
    """Whether it is that the node no longer exchanges data; then the stacks of the ranks are compared."""
    owner: Owner = Owner.CLUSTER
    begins: bool = True
    """Whether it is bad enough to begin an episode; otherwise it only prolongs one."""
    readings: int = 1
    """Readings in a row that must show it."""
    clear_s: float = 60.0
    """Seconds without it that end its episode."""

    def finding(self, node: str) -> Finding:
        """The finding about it on this node."""
        return Finding(
            code=self.code,
            severity=Severity.WARNING,
            what=self.what,
            where=f"{node}, {self.device}" if self.device else node,
            evidence=self.evidence(),
            remedy=self.remedy,
            owner=self.owner,
        )


class Source(Protocol[R_co]):
    """An open source."""

    def read(self, at_s: float) -> R_co:
        """The reading at this time, in monotonic seconds; raises OSError if it fails."""
        ...

    def descriptor(self) -> int | None:
        """A file descriptor that becomes readable when there is something new; None if it has to be polled."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


Judge = Callable[[R, float], Iterable[Symptom]]
"""From a reading and its time, the symptoms to report now."""


class Monitor(Struct, Generic[R], frozen=True, kw_only=True):
    """A row of the table of monitors."""

    source: str
    """Its name for users."""
    period_s: float
    open: Callable[[], Source[R]]
    """Raises SourceMissing."""
    judge: Callable[[Source[R] | None], Judge[R]]
    """A new judge for an open source; for none in a drill on a node without the source."""
    asks_driver: bool = False
    """Whether a driver that hangs may block a reading for ever."""
    for_devices: bool = False
    """Whether it is not read if the job has `watch.device_faults: off`."""


AnyMonitor = Monitor[Any]


class _Episode(Struct, frozen=True, kw_only=True):
    readings: int = 0
    reported: bool = False
    seen_s: float = 0.0


class Episodes(Struct, frozen=True, kw_only=True):
    """The ongoing symptoms of a source, by code and device."""

    open: Mapping[tuple[str, str], _Episode] = field(default_factory=dict[tuple[str, str], _Episode])
    reports: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])


def updated(episodes: Episodes, symptoms: Iterable[Symptom], at_s: float) -> tuple[Episodes, tuple[Symptom, ...]]:
    """The episodes after a reading that shows these symptoms, and those to report now."""
    found = {(each.code, each.device): each for each in symptoms}
    kept = dict(episodes.open)
    reports, new = dict(episodes.reports), list[Symptom]()
    for key, symptom in found.items():
        episode = kept.get(key, _Episode())
        if not symptom.begins and not episode.reported:
            kept.pop(key, None)
            continue
        episode = replace(episode, readings=episode.readings + 1, seen_s=at_s + symptom.clear_s)
        if not episode.reported and episode.readings >= symptom.readings:
            episode = replace(episode, reported=True)
            reports[key] = reports.get(key, 0) + 1
            new += [symptom] if reports[key] <= MAX_REPORTS else []
        kept[key] = episode
    lasting = {key: each for key, each in kept.items() if key in found or (each.reported and each.seen_s > at_s)}
    return Episodes(open=lasting, reports=reports), tuple(new)


class Comparison(Generic[R]):
    """A judge that compares each reading with the one before."""

    def __init__(self, symptoms: Callable[[R, R], Iterable[Symptom]]) -> None:
        self._symptoms = symptoms
        self._before: R | None = None
        self._episodes = Episodes()

    def __call__(self, reading: R, at_s: float) -> Iterable[Symptom]:
        before = reading if self._before is None else self._before
        self._before = reading
        self._episodes, new = updated(self._episodes, self._symptoms(before, reading), at_s)
        return new


def comparing(symptoms: Callable[[R, R], Iterable[Symptom]]) -> Callable[[Source[R] | None], Judge[R]]:
    """The `judge` of a row whose parser needs two readings."""
    return lambda _: Comparison(symptoms)


class Polled(Struct, Generic[R], frozen=True, kw_only=True):
    """A source that is read by a function, from files that it opens at each reading."""

    function: Callable[[float], R]

    def read(self, at_s: float) -> R:
        """The reading."""
        return self.function(at_s)

    def descriptor(self) -> None:
        """It has to be polled."""

    def close(self) -> None:
        """Nothing is open."""
