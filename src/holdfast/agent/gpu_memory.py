"""Reads which of a node's NVIDIA GPUs have memory in use, and by which process, from `nvidia-smi`.

A node without `nvidia-smi` has no such GPUs. GPUs in MIG mode are skipped: nvidia-smi lists the processes of all
instances under the whole GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Container, Iterable

from msgspec import Struct

from holdfast.host.processes import descendants
from holdfast.preflight.nvidia_smi import UNLISTED_MEMORY_MIB, is_visible

log = logging.getLogger("holdfast.agent")

NVIDIA_SMI_TIMEOUT_S = 20.0
"""Longest nvidia-smi may take; without persistence mode it first initialises the driver, which takes seconds."""

_GPU_QUERY = ("--query-gpu=index,uuid,memory.used,mig.mode.current", "--format=csv,noheader,nounits")
_APP_QUERY = ("--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits")


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    used_mib: int | None
    mig_enabled: bool


class GpuMemoryUse(Struct, frozen=True, kw_only=True):
    """Memory of a GPU that is in use."""

    gpu: Gpu
    pid: int | None
    """The pid on the machine, which may not exist inside a container; None if no process is listed."""
    command: str
    mib: int | None

    def __str__(self) -> str:
        amount = "an unknown amount" if self.mib is None else f"{self.mib:,} MiB"
        who = "no process that can be seen" if self.pid is None else f"process {self.pid} ({self.command})"
        return f"GPU {self.gpu.index}: {amount} held by {who}"


async def foreign_memory_use(visible: str | None) -> tuple[GpuMemoryUse, ...]:
    """Memory in use by other processes than this agent's, on the GPUs in CUDA_VISIBLE_DEVICES; on all if unset."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    gpus, apps = await asyncio.gather(_query(program, _GPU_QUERY), _query(program, _APP_QUERY))
    return parse_memory_use(visible_gpus(parse_gpus(gpus), visible), apps, set(descendants(os.getpid())))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The answer to the first query.

    0, GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 38120, Disabled
    """
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return tuple(
        Gpu(
            index=int(row[0]),
            uuid=row[1],
            used_mib=_parse_mib(row[2]),
            mig_enabled=row[3] == "Enabled",
        )
        for row in rows
        if len(row) == 4 and row[0].isdecimal()
    )


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects by index or by UUID prefix."""
    return tuple(gpu for gpu in gpus if is_visible(gpu.index, gpu.uuid, visible))


def parse_memory_use(gpus: Iterable[Gpu], apps: str, own_pids: Container[int]) -> tuple[GpuMemoryUse, ...]:
    """What is in use of these GPUs, by the answer to the second query.

    GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 40170, /opt/rh/rh-python38/root/usr/bin/python3, 185
    GPU-4f1c2a66-8b1e-2f0d-9d0c-5f6d3a7c1b2e, 40171, [Not Found], [N/A]
    """
    listed: dict[str, list[tuple[int, str, int | None]]] = {}
    for line in apps.splitlines():
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        command, _, used = rest.rpartition(", ")
        if pid.strip().isdecimal():
            listed.setdefault(uuid.strip(), []).append((int(pid), command.strip(), _parse_mib(used)))
    found: list[GpuMemoryUse] = []
    for gpu in gpus:
        if gpu.mig_enabled:
            continue
        processes = listed.get(gpu.uuid, [])
        found += [
            GpuMemoryUse(gpu=gpu, pid=pid, command=command, mib=mib)
            for pid, command, mib in processes
            if pid not in own_pids
        ]
        if not processes and gpu.used_mib is not None and gpu.used_mib >= UNLISTED_MEMORY_MIB:
            found.append(GpuMemoryUse(gpu=gpu, pid=None, command="", mib=gpu.used_mib))
    return tuple(found)


def _parse_mib(word: str) -> int | None:
    """Parse a number; return None for `[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`."""
    number = word.strip().removesuffix(" MiB")
    return int(number) if number.isdecimal() else None


async def _query(program: str, query: tuple[str, ...]) -> str:
    """The output of nvidia-smi, or nothing when it fails: that must not prevent ranks from starting."""
    process = await asyncio.create_subprocess_exec(
        program,
        *query,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), NVIDIA_SMI_TIMEOUT_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        log.warning("nvidia-smi did not answer within %g s", NVIDIA_SMI_TIMEOUT_S)
        return ""
    return output.decode(errors="replace") if process.returncode == 0 else ""
