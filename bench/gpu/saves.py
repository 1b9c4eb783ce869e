"""What a save costs the loop on the device's clock, how fast it reaches the disk, and how long a load takes.

Up to 8 GB a save is compared with torch's `async_save` with its defaults (A, A'), in rounds of alternating order, and
at 2 GB with torch's DefaultStager (C) too; for 24 GB there is no time. A load is from the page cache, into other
weights, and its result must be bit-exact. What counts as the cost of a save: save_loop.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from bench.gpu.device import Device, open_device
from bench.gpu.promises import LOAD, STALL, WRITE
from bench.gpu.save_loop import Loop, Save
from bench.gpu.section import NotLookedAt, Place, measured
from bench.gpu.training import GB
from bench.paired_stats import OURS, PEER, PEER_AGAIN, orders, say
from bench.result_file import Figure, Peer, Result
from holdfast import os_errors
from holdfast.host.memory_usage import memory_usages

ROUNDS = {2: 2, 8: 1, 24: 0}
"""Rounds compared with torch; without any, one save is measured alone."""
STAGED, STAGED_SIZE_GB = "C", 2
DEVICE_SHARE = 4 / 3
"""Device memory over the state: the gradients are a third of it."""
HOST_SHARE, DISK_SHARE = 1.3, 1.2
"""What a save needs of the host: a copy of the state, and files of its size, with some room."""


def measure(place: Place, size_gb: int) -> Iterator[Result]:
    """One size of state: saves, compared with torch where there are rounds, and a load."""
    warnings.filterwarnings("ignore", module="torch")
    device = open_device(place.device)
    if not place.tiny:
        _require_room(device, place.folder, size_gb)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield from _measure(place, device, size_gb)
    dist.destroy_process_group()


def _measure(place: Place, device: Device, size_gb: int) -> Iterator[Result]:
    loop = Loop(place, device, size_gb)
    allocated_s = loop.allocate_s()
    saves = _save_in_turns(place, loop, size_gb)
    ours, theirs = saves[OURS], [*saves[PEER], *saves[PEER_AGAIN]]
    apart = [abs(one.added_ms - other.added_ms) for one, other in zip(saves[PEER], saves[PEER_AGAIN], strict=True)]
    conditions = f"{loop.state_bytes / GB:.3g} GB, steps of {loop.ordinary_ms():.0f} ms"
    yield measured(
        STALL[size_gb],
        _added(ours),
        peer=Peer(name="DCP", figure=_added(theirs)) if theirs else None,
        floor=Figure(value=median(apart), unit="ms") if apart else None,
        conditions=conditions,
        details={
            "in the call": f"{median(each.call_ms for each in ours):.1f} ms",
            "steps waited": f"{median(each.waited_ms for each in ours):.1f} ms",
            "steps meanwhile": f"{median(each.steps for each in ours):g}",
            "buffer allocated and pinned, once": f"{allocated_s:.1f} s",
            **({"DCP with DefaultStager": str(_added(saves[STAGED]))} if saves[STAGED] else {}),
        },
    )
    took_s = median(each.took_s for each in ours)
    yield measured(
        WRITE[size_gb],
        _speed(loop, took_s),
        peer=Peer(name="DCP", figure=_speed(loop, median(each.took_s for each in theirs))) if theirs else None,
        conditions=conditions,
        details={"until it was on disk": f"{took_s:.1f} s", "file system": os_errors._mount_of(place.folder).kind},
    )
    loaded_s = loop.load_s()
    yield measured(
        LOAD[size_gb],
        Figure(value=loaded_s, unit="s", decimals=1),
        conditions=f"{conditions}, from the page cache",
        details={"speed": str(_speed(loop, loaded_s))},
    )


def _save_in_turns(place: Place, loop: Loop, size_gb: int) -> Mapping[str, list[Save]]:
    """The saves of each side, in an order that changes from round to round."""
    sides = {PEER: loop.theirs, OURS: loop.ours, PEER_AGAIN: loop.theirs} if ROUNDS[size_gb] else {OURS: loop.ours}
    if size_gb == STAGED_SIZE_GB:
        sides[STAGED] = loop.theirs_staged
        loop.theirs_staged()  # allocates its buffers, as `allocate_s` does for holdfast's
    order_of = orders(tuple(sides))
    saves: dict[str, list[Save]] = {PEER: [], OURS: [], PEER_AGAIN: [], STAGED: []}
    for index in range(1 if place.tiny else max(1, ROUNDS[size_gb])):
        for side in order_of(index):
            save = sides[side]()
            saves[side].append(save)
            say(f"  {side:2s}  {save.added_ms:.1f} ms added, on disk in {save.took_s:.2f} s")
    return saves


def _added(saves: Sequence[Save]) -> Figure:
    return Figure(value=median(each.added_ms for each in saves), unit="ms", decimals=1)


def _speed(loop: Loop, took_s: float) -> Figure:
    return Figure(value=loop.state_bytes / GB / took_s, unit="GB/s", decimals=2)


def _require_room(device: Device, folder: Path, size_gb: int) -> None:
    """Raise where the state, its copy or its files do not fit."""
    disk = os.statvfs(folder)
    rooms = {
        "device memory": (device.free_bytes(), DEVICE_SHARE),
        "host memory": (min(usage.free_bytes for usage in memory_usages(Path("/"))), HOST_SHARE),
        "disk space": (disk.f_bavail * disk.f_frsize, DISK_SHARE if size_gb > 8 else 2 * DISK_SHARE),
    }
    for what, (free_bytes, share) in rooms.items():
        if free_bytes < share * size_gb * GB:
            raise NotLookedAt(f"{free_bytes / GB:.0f} GB of {what} are free; it needs {share * size_gb:.0f} GB")
