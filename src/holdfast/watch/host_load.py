"""Reads what slows a node's processors and disks, and judges it by two readings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.findings import Owner
from holdfast.watch.monitor import Polled, SourceMissing, Symptom

SLOW_REQUEST_MS, MIN_REQUESTS, SLOW_DISK_READINGS = 500.0, 5, 6
"""A disk is slow whose requests take so long on average, for 30 s; bursts of a checkpoint are shorter."""
THROTTLED_SHARE, THROTTLED_READINGS = 0.1, 6
"""A cgroup is throttled that waits in at least this share of its periods, for 30 s."""
STALLED_PERCENT = 20.0
"""Per cent of ten seconds in which no process of the cgroup got a processor, though one wanted it."""
HOT_READINGS = 3
"""Readings in a row in which a processor was throttled for its temperature: 30 s."""

_DISK = re.compile(r"(?:sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+)$")
"""Whole disks: not their partitions, nor memory and loop devices."""


class DiskUse(Struct, frozen=True, kw_only=True):
    """What a disk has done since the machine's start."""

    requests: int
    waited_ms: int
    """Of all requests together."""


def open_disks(root: Path) -> Polled[Mapping[str, DiskUse]]:
    """The node's disks; raises SourceMissing."""
    path = root / "proc/diskstats"
    if not _text(path):
        raise SourceMissing(f"{path} cannot be read")
    if not parse_diskstats(_text(path)):
        raise SourceMissing("no disk of the node can be read")
    return Polled(function=lambda _: parse_diskstats(path.read_text()))


def parse_diskstats(text: str) -> Mapping[str, DiskUse]:
    """Disks by name (https://docs.kernel.org/admin-guide/iostats.html)."""
    # 259 0 nvme0n1 81924 1234 9876543 40960 65536 4321 8765432 90112 0 61440 131072
    rows = (line.split() for line in text.splitlines())
    return {
        row[2]: DiskUse(requests=int(row[3]) + int(row[7]), waited_ms=int(row[6]) + int(row[10]))
        for row in rows
        if len(row) >= 14 and _DISK.match(row[2])
    }


def disk_symptoms(before: Mapping[str, DiskUse], now: Mapping[str, DiskUse]) -> Iterator[Symptom]:
    """Disks whose requests wait for long."""
    for name, use in now.items():
        earlier = before.get(name, use)
        requests = use.requests - earlier.requests
        if requests >= MIN_REQUESTS and (each_ms := (use.waited_ms - earlier.waited_ms) / requests) >= SLOW_REQUEST_MS:
            yield Symptom(
                code="disk-slow",
                device=name,
                what=f"requests to the disk {name} take {each_ms / 1000:.1f} s on average",
                remedy="`iostat -x 5` shows which processes use it. Put data and checkpoints on another disk, or write "
                "less often; `dmesg` shows whether the disk fails.",
                readings=SLOW_DISK_READINGS,
            )


class CpuUse(Struct, frozen=True, kw_only=True):
    """How long a cgroup has waited for processors."""

    periods: int = 0
    throttled: int = 0
    """Periods in which the cgroup used up its quota."""
    stalled_percent: float = 0.0


def open_cpu_limit(root: Path) -> Polled[CpuUse]:
    """This process's CPU cgroup (v1 or v2); raises SourceMissing."""
    folder = _cpu_group(root)
    if folder is None:
        raise SourceMissing("this process has no CPU cgroup")
    return Polled(function=lambda _: parse_cpu(_text(folder / "cpu.stat"), _text(folder / "cpu.pressure")))


def parse_cpu(stat: str, pressure: str) -> CpuUse:
    """From cpu.stat and cpu.pressure, if the kernel has it."""
    # nr_periods 1200
    # nr_throttled 340
    values = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    stalled = re.search(r"^full avg10=([\d.]+)", pressure, re.MULTILINE)
    return CpuUse(
        periods=int(values.get("nr_periods", "0")),
        throttled=int(values.get("nr_throttled", "0")),
        stalled_percent=float(stalled[1]) if stalled else 0.0,
    )


def cpu_symptoms(before: CpuUse, now: CpuUse) -> Iterator[Symptom]:
    """A limit that the ranks meet all the time, or processors that other cgroups take."""
    periods, throttled = now.periods - before.periods, now.throttled - before.throttled
    if periods > 0 and throttled >= THROTTLED_SHARE * periods:
        yield Symptom(
            code="cpu-limit-reached",
            device="",
            what=f"the CPU limit of the node's cgroup stops its processes in {throttled / periods:.0%} of its periods",
            remedy="Raise the CPU limit (`resources.cpu`, or the pod's `limits.cpu`), or use fewer DataLoader workers "
            "and threads (OMP_NUM_THREADS).",
            owner=Owner.USER,
            readings=THROTTLED_READINGS,
        )
    elif now.stalled_percent >= STALLED_PERCENT:
        yield Symptom(
            code="cpu-contended",
            device="",
            what=f"in {now.stalled_percent:.0f} % of the time no process of the node's cgroup got a processor",
            remedy="Other programs of the machine use its processors: `top` names them. Move them, or reserve whole "
            "processors for the job.",
            readings=THROTTLED_READINGS,
        )


def open_thermal_throttles(root: Path) -> Polled[Mapping[str, int]]:
    """The counters of processors that lower their clocks because they are hot; raises SourceMissing."""
    packages = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/package_throttle_count"))
    by_package = {_text(path.parents[1] / "topology/physical_package_id"): path for path in reversed(packages)}
    if not by_package:
        raise SourceMissing("the processors have no counters of thermal throttling")
    return Polled(function=lambda _: {name: int(path.read_text()) for name, path in by_package.items()})


def thermal_symptoms(before: Mapping[str, int], now: Mapping[str, int]) -> Iterator[Symptom]:
    """Processors that were throttled since the last reading."""
    for package, count in now.items():
        if (grown := count - before.get(package, count)) > 0:
            yield Symptom(
                code="cpu-throttled",
                device=f"processor {package}",
                what=f"processor {package} lowered its clock {grown} times because it is too hot",
                remedy="Check the node's cooling and fans; every rank waits for the slowest node.",
                readings=HOT_READINGS,
            )


def _cpu_group(root: Path) -> Path | None:
    """The cgroup with cpu.stat of this process; None if that is the machine's."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controllers and "cpu")
            # In a container the path may be the host's, while the mount is the container's own cgroup.
            for folder in (top / path.lstrip("/"), top):
                if "nr_periods" in _text(folder / "cpu.stat"):
                    return folder
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
