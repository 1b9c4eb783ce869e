"""Uploads a run's code to the controller's pod, if it does not fit into the controller's Secret."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.launch.kubernetes.client.api_paths import PODS_PATH
from holdfast.launch.kubernetes.object_names import CONTROLLER, PART_LABEL, RUN_LABEL
from holdfast.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.launch.code.upload_progress import UploadRecord
    from holdfast.launch.kubernetes.client.cluster import ClusterClient
    from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
    from holdfast.launch.kubernetes.sync.controller_link import ControllerLink

CHUNK_BYTES = 1 << 20
MAX_CODE_IN_SECRET_BYTES = 512 << 10
"""Largest code archive in the controller's Secret, which holds 1 MiB; such a run starts without an upload."""


def fits_in_secret(size: int) -> bool:
    """Whether code of this size travels in the controller's Secret; otherwise it is uploaded."""
    return size <= MAX_CODE_IN_SECRET_BYTES


async def controller_pod(cluster: ClusterClient, run: str) -> str | None:
    """Name of the running controller pod; raises ClusterError."""
    found = await cluster.get(PODS_PATH, labelSelector=f"{RUN_LABEL}={run},{PART_LABEL}={CONTROLLER}")
    for pod in found["items"]:
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod["metadata"]["name"]
    return None


async def upload_code(
    cluster: ClusterClient, pod: str, folder: RunDir, digest: str, gateway: GatewayRoute | None = None
) -> None:
    """Upload a run's code to the controller's pod; no-op if it has the code. Raises ClusterError and PortClosed."""
    import asyncio  # late: the `run` command imports this module only for `fits_in_secret`

    from holdfast.launch.code.archive import archive_path  # late: imports tarfile, and most code is small
    from holdfast.launch.code.upload_progress import UploadRecord
    from holdfast.launch.kubernetes.client.pod_port import PortClosed
    from holdfast.launch.kubernetes.incluster.sync_server import DONE
    from holdfast.launch.kubernetes.sync.controller_link import open_link, opening

    path = archive_path(folder.code, digest)
    begin = opening(folder, "upload", digest=digest, size=path.stat().st_size)
    record = UploadRecord(folder, path.stat().st_size)
    async with open_link(cluster, pod, folder, begin, gateway) as link:
        sending = asyncio.ensure_future(_send_file(path, link, record))
        try:
            response = b"".join([data async for data in link.output()])
        finally:
            sending.cancel()
            record.end()
    if response != DONE:
        raise PortClosed("the code did not arrive whole in the controller's pod")


async def _send_file(path: Path, link: ControllerLink, record: UploadRecord) -> None:
    with contextlib.suppress(Exception), path.open("rb") as file:  # reading the response raises the error
        while data := file.read(CHUNK_BYTES):
            await link.send(data)
            record.add(len(data))
