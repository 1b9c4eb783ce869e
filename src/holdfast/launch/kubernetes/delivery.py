"""Owns how a run's code gets to its controller's pod, where that does not have it from the start: by its mirror."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from holdfast.folder import RunFolder
from holdfast.launch.kubernetes.names import CONTROLLER, HOME, PART_LABEL, RUN_LABEL, RUNS
from holdfast.launch.kubernetes.paths import PODS

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.cluster import Cluster
    from holdfast.launch.kubernetes.execution import Execution

DESK = ("python", "-m", "holdfast.launch.kubernetes.desk")
PIECE_BYTES = 1 << 20
IN_SECRET_BYTES = 512 << 10
"""Most code that the controller's Secret takes along, which holds 1 MiB; so a run begins without waiting for it."""


def in_secret(size: int) -> bool:
    """Whether so much code is in the controller's pod as soon as that is there; else it is brought."""
    return size <= IN_SECRET_BYTES


def folder_there(run: str) -> str:
    """A run's folder, as its controller's pod has it."""
    return f"{HOME}/{RUNS}/{run}"


async def controllers_pod(cluster: Cluster, run: str) -> str | None:
    """The pod of a run's controller that runs; raises ClusterError."""
    found = await cluster.read(PODS, labelSelector=f"{RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}")
    for pod in found["items"]:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod["metadata"]["name"]
    return None


async def deliver(cluster: Cluster, pod: str, folder: RunFolder, digest: str) -> None:
    """Put a run's code where its controller looks for it; nothing is done where it is. Raises as an execution does."""
    import asyncio  # who starts a run only asks whether this is needed

    from holdfast.launch.code.archive import archive_path  # tarfile and what it brings: most code is small

    name = str(archive_path(folder.code, digest).relative_to(folder.path))
    async with cluster.execute(pod, *DESK, folder_there(folder.run), "bring", name, digest) as desk:
        handing = asyncio.ensure_future(_hand_in(folder, name, desk))
        try:
            async for _ in desk.output():
                pass
        finally:
            handing.cancel()


async def _hand_in(folder: RunFolder, name: str, desk: Execution) -> None:
    with (
        contextlib.suppress(Exception),
        (folder.path / name).open("rb") as file,
    ):  # how it went is read on the other side
        while data := file.read(PIECE_BYTES):
            await desk.send(data)
        await desk.end_input()
