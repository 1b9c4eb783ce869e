"""Uploads a run's code to the controller's pod, if it does not fit into the controller's Secret."""

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
"""Largest code archive in the controller's Secret, which holds 1 MiB; such a run starts without an upload."""


def fits_in_secret(size: int) -> bool:
    """Whether code of this size travels in the controller's Secret; otherwise it is uploaded."""
    return size <= MAX_CODE_IN_SECRET_BYTES


def remote_run_dir(run: str) -> str:
    """Path of a run's folder in the controller's pod."""
    return f"{VOLUME_ROOT}/{RUNS}/{run}"


async def controller_pod(cluster: ClusterClient, run: str) -> str | None:
    """Name of the running controller pod; raises ClusterError."""
    found = await cluster.get(PODS_PATH, labelSelector=f"{RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}")
    for pod in found["items"]:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod["metadata"]["name"]
    return None


async def upload_code(cluster: ClusterClient, pod: str, folder: RunDir, digest: str) -> None:
    """Upload a run's code to the controller's pod; no-op if it has the code. Raises ClusterError and CommandFailed."""
    import asyncio  # late: the `run` command imports this module only for `fits_in_secret`

    from holdfast.launch.code.archive import archive_path  # late: imports tarfile, and most code is small

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
    ):  # reading the output raises the command's error
        while data := file.read(CHUNK_BYTES):
            await upload.send(data)
        await upload.end_input()
