"""Records what NCCL and torch's Flight Recorder really write, and checks that holdfast reads it.

One GPU carries one rank of NCCL: a second one on the same GPU is refused, and that refusal is recorded too. Without a
GPU the Flight Recorder of Gloo is recorded. Host names, addresses and directories of this machine are replaced.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.anonymous import hide
from bench.gpu.device import Device, open_device
from bench.gpu.promises import FLIGHT_RECORDER, NCCL_LOG, NCCL_REFUSAL
from bench.gpu.section import Place, measured, skipped
from bench.result_file import Figure, Result
from holdfast.diagnose.log_chunk import LogChunk, LogSource
from holdfast.diagnose.log_input import LogInput
from holdfast.diagnose.nccl_transport import read_setup_logs
from holdfast.diagnose.pipeline import diagnose
from holdfast.diagnose.structured import flight_recorder

LOG, DUMP, REFUSAL = "nccl-rank-0.log", "flight-recorder-rank-0", "duplicate-gpu"
REFUSAL_CODE = "duplicate-gpu"
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,BOOTSTRAP,GRAPH,ENV"}
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
"""The second is the name in torch 2.9."""
ELEMENTS = 1 << 10
COMPLETED_S = 10.0
"""Longest wait until the recorder shows every collective as completed; torch's watchdog notes it."""
RANKS = 2
REFUSED_S = 20.0
"""Longest wait for the refusal."""


def measure(place: Place) -> Iterator[Result]:
    """The log of a set-up, a refusal and a dump; the files go to the records."""
    place.records.mkdir(parents=True, exist_ok=True)
    on_gpu = place.device.kind == "cuda"
    os.environ |= RECORDER
    if on_gpu:
        yield _refused(place)  # forks, so it comes before this process opens the GPU
        os.environ |= DEBUG | {"NCCL_DEBUG_FILE": str(place.records / LOG)}
    device = open_device(place.device)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    count = _communicate(device)
    yield _recorded(place, count)
    dist.destroy_process_group()
    if on_gpu:
        yield _logged(place.records / LOG)
    else:
        yield skipped(NCCL_LOG, "NCCL needs a GPU")
        yield skipped(NCCL_REFUSAL, "NCCL needs a GPU")


def _communicate(device: Device) -> int:
    """Some collectives; returns their number."""
    tensor = torch.ones(ELEMENTS, device=device.torch)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    dist.all_gather([torch.empty_like(tensor)], tensor)
    device.synchronize()
    return 3


def _recorded(place: Place, count: int) -> Result:
    """Dump the recorder once every collective is completed, and read the dump."""
    deadline = time.monotonic() + COMPLETED_S
    while True:
        document = hide(pickle.loads(_dump(place)))
        (place.records / f"{DUMP}.json").write_text(json.dumps(document, indent=1) + "\n")
        (place.records / f"{DUMP}.pickle").write_bytes(pickle.dumps(document, protocol=2))
        read = [_read(place.records / f"{DUMP}.{ending}") for ending in ("json", "pickle")]
        groups = [list(dump.groups.values()) for dump in read if dump is not None]
        whole = len(groups) == 2 and all(
            sum(len(position.calls) for position in each) == count
            and not any(one.completed < one.enqueued for one in each)
            for each in groups
        )
        if whole or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    calls = sorted(call.op for each in groups[:1] for one in each for call in one.calls.values())
    return measured(
        FLIGHT_RECORDER,
        Figure(value=len(calls), unit=f"of {count} collectives"),
        goal=f"{count}, all completed, from JSON and pickle",
        met=whole,
        conditions="NCCL" if place.device.kind == "cuda" else "Gloo",
        details={"format": str(document.get("version")), "calls": ", ".join(calls)},
    )


def _dump(place: Place) -> bytes:
    own: Any = torch._C._distributed_c10d
    return own._dump_nccl_trace() if place.device.kind == "cuda" else own._dump_fr_trace()


def _read(path: Path) -> flight_recorder.FlightDump | None:
    return flight_recorder.read(LogSource(name=path.name, rank=0), path.read_bytes())


def _logged(path: Path) -> Result:
    """Read NCCL's log of a set-up."""
    _hide_in(path)
    data = path.read_bytes()
    report = read_setup_logs([LogChunk(source=LogSource(name=path.name, rank=0), first_line=1, data=data)])
    process = report.processes[0] if report.processes else None
    known = {} if process is None else {"NCCL": process.nccl, "CUDA": process.cuda, "network": process.network}
    return measured(
        NCCL_LOG,
        Figure(value=report.info_lines, unit=f"of {len(data.splitlines())} lines"),
        goal="one process, its NCCL version and its communicator",
        met=process is not None and bool(process.nccl) and len(report.communicators) == 1,
        conditions="one rank",
        details={name: value or "not found" for name, value in known.items()},
    )


def _refused(place: Place) -> Result:
    """Two ranks on one GPU: record NCCL's refusal, and diagnose it."""
    folder = place.records / REFUSAL
    folder.mkdir(exist_ok=True)
    ranks = [_fork_rank(place, folder, rank) for rank in range(RANKS)]
    deadline = time.monotonic() + REFUSED_S
    while any(_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in filter(_running, ranks):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for path in folder.iterdir():
        _hide_in(path)
    found = diagnose(LogInput((folder,)))
    return measured(
        NCCL_REFUSAL,
        goal=REFUSAL_CODE,
        met=found.code == REFUSAL_CODE,
        conditions=f"{RANKS} ranks, one GPU",
        details={"named": found.code, "by": found.evidence[0].text[:200] if found.evidence else "no line"},
    )


def _running(pid: int) -> bool:
    """Whether a child has not ended; reaps one that has."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _fork_rank(place: Place, folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = folder / f"rank-{rank}.log"
    try:
        os.environ |= DEBUG | {"NCCL_DEBUG_FILE": str(log)}
        device = open_device(place.device)
        store = dist.FileStore(str(place.folder / REFUSAL), RANKS)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
        dist.all_reduce(torch.ones(1, device=device.torch))
        device.synchronize()
    except Exception as error:
        with log.open("a") as file:
            file.write(f"{type(error).__module__}.{type(error).__name__}: {error}\n")
    os._exit(0)


def _hide_in(path: Path) -> None:
    path.write_text(hide(path.read_text(errors="replace")))
