"""Owns how a run's code gets to its controller's pod, where that does not have it from the start: by its mirror."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.object_names import CONTROLLER, PART_LABEL, RUN_LABEL, RUNS, VOLUME_ROOT
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.kubernetes.client.cluster import ClusterClient
    from holdfast.launch.kubernetes.client.pod_exec import PodExec

EXEC_COMMANDS = ("python", "-m", "holdfast.launch.kubernetes.incluster.exec_commands")
CHUNK_BYTES = 1 << 20
MAX_CODE_IN_SECRET_BYTES = 512 << 10
"""Most code that the controller's Secret takes along, which holds 1 MiB; so a run begins without waiting for it."""


def fits_in_secret(size: int) -> bool:
    """Whether so much code is in the controller's pod as soon as that is there; else it is brought."""
    return size <= MAX_CODE_IN_SECRET_BYTES


def remote_run_dir(run: str) -> str:
    """A run's folder, as its controller's pod has it."""
    return f"{VOLUME_ROOT}/{RUNS}/{run}"


async def controller_pod(cluster: ClusterClient, run: str) -> str | None:
    """The pod of a run's controller that runs; raises ClusterError."""
    found = await cluster.get(PODS_PATH, labelSelector=f"{RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}")
    for pod in found["items"]:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod["metadata"]["name"]
    return None


async def upload_code(cluster: ClusterClient, pod: str, folder: RunDir, digest: str) -> None:
    """Put a run's code where its controller looks for it; nothing is done where it is. Raises as an execution does."""
    import asyncio  # who starts a run only asks whether this is needed

    from holdfast.launch.code.archive import archive_path  # tarfile and what it brings: most code is small

    name = str(archive_path(folder.code, digest).relative_to(folder.path))
    async with cluster.exec_in_pod(
        pod, *EXEC_COMMANDS, remote_run_dir(folder.run_id), "upload", name, digest
    ) as upload:
        handing = asyncio.ensure_future(_send_file(folder, name, upload))
        try:
            async for _ in upload.output():
                pass
        finally:
            handing.cancel()


async def _send_file(folder: RunDir, name: str, upload: PodExec) -> None:
    with (
        contextlib.suppress(Exception),
        (folder.path / name).open("rb") as file,
    ):  # how it went is read on the other side
        while data := file.read(CHUNK_BYTES):
            await upload.send(data)
        await upload.end_input()
