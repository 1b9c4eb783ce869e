"""Network interfaces that lose their link while ranks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from holdfast.events import DeviceFault
from holdfast.host.network_links import LinkReading
from holdfast.watch.monitor import Judge, Source, Symptom

REMEDY = (
    "Look at its cable, transceiver and switch port, and at `dmesg -T | grep -i link` on that node. Nothing for the "
    "run: a link that is lost a third time within 300 s replaces the node."
)


class LinkJudge:
    """Judges interfaces that have had a link since the first reading; each loss is reported."""

    def __init__(self, watched: Callable[[str], bool]) -> None:
        self._watched = watched
        self._known: dict[str, bool] = {}
        """Whether an interface is watched; asked while it exists, because its files in sysfs go with it."""

    def __call__(self, reading: LinkReading, at_s: float) -> Iterator[Symptom]:
        for name in sorted(reading.lost):
            if self._known.get(name, False):
                yield _lost(name, reading.links.get(name))
        for name in reading.links:
            if name not in self._known:
                self._known[name] = self._watched(name)


def _lost(name: str, has_link: bool | None) -> Symptom:
    state = {None: "is gone", False: "lost its link", True: "lost its link, and has it again"}[has_link]
    return Symptom(
        code="nic-link-down",
        device=name,
        what=f"the interface {name} {state}",
        remedy=REMEDY,
        fault=DeviceFault.NIC_LINK_DOWN,
    )


def judge_of(watched: Callable[[str], bool]) -> Callable[[Source[LinkReading] | None], Judge[LinkReading]]:
    """The `judge` of the row."""
    return lambda _: LinkJudge(watched)
