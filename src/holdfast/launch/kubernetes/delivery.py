"""Owns how a run's code gets to its controller's pod, from whoever has it first: who starts the run, or its mirror."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from holdfast.folder import RunFolder
from holdfast.job.accepted import Shipped
from holdfast.launch.code.archive import archive_path
from holdfast.launch.kubernetes.names import CONTROLLER, PART_LABEL, RUN_LABEL
from holdfast.launch.kubernetes.paths import PODS
from holdfast.launch.kubernetes.submission import HOME

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.cluster import Cluster
    from holdfast.launch.kubernetes.execution import Execution

DESK = ("python", "-m", "holdfast.launch.kubernetes.desk")
PIECE_BYTES = 1 << 20


def folder_there(run: str) -> str:
    """A run's folder, as its controller's pod has it."""
    return f"{HOME}/runs/{run}"


async def controllers_pod(cluster: Cluster, run: str) -> str | None:
    """The pod of a run's controller that runs; raises ClusterError."""
    found = await cluster.read(PODS, labelSelector=f"{RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}")
    for pod in found["items"]:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod["metadata"]["name"]
    return None


async def deliver(cluster: Cluster, pod: str, folder: RunFolder, code: Shipped) -> None:
    """Put a run's code where its controller looks for it; nothing is done where it is. Raises as an execution does."""
    name = str(archive_path(folder.code, code.digest).relative_to(folder.path))
    async with cluster.execute(pod, *DESK, folder_there(folder.run), "bring", name, code.digest) as desk:
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
