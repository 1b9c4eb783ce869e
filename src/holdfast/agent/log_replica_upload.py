"""`python -m holdfast.agent.log_replica_upload CONTROLLER FOLDER < WHAT`: an agent's process that restores a log.

It is a separate process, like code_download.py: the agent never blocks on disks and needs no HTTP client. It uploads
the code first, so that the restore is complete once the log has arrived.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from holdfast.agent.http_client import SNI_EXTENSION, make_client
from holdfast.events.agent_events import LOG_REPLICA_NAME, LOG_SIGNATURE
from holdfast.protocol import routes

log = logging.getLogger("holdfast.agent")

CHUNK_BYTES = 1 << 20
READ_TIMEOUT_S = 30.0


def main() -> int:
    """Upload the folder's content; return 1 if the controller rejects it or is unreachable."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.log_replica_upload")
    parser.add_argument("controller", help="the controller's WebSocket URL")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ca", type=Path, help="certificate that the controller presents")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    request = json.load(sys.stdin)
    folder: Path = options.folder
    url = routes.http_url(options.controller, routes.UPLOADS)
    with make_client(request["token"], options.ca, read_timeout_s=READ_TIMEOUT_S) as controller:
        controller.headers[LOG_SIGNATURE] = request["seal"]
        try:
            for archive in folder.glob("*.tar"):
                _upload(controller, url + archive.stem, archive, archive.stat().st_size)
            _upload(controller, url + LOG_REPLICA_NAME, folder / LOG_REPLICA_NAME, request["bytes"])
        except (httpx.HTTPError, OSError) as error:
            log.warning("the replica was not uploaded: %s", error)
            return 1
    return 0


def _upload(controller: httpx.Client, url: str, path: Path, size: int) -> None:
    controller.put(url, content=_read_prefix(path, size), extensions=SNI_EXTENSION).raise_for_status()


def _read_prefix(path: Path, size: int) -> Iterator[bytes]:
    if not size:
        return
    with path.open("rb") as file:
        while size and (data := file.read(min(size, CHUNK_BYTES))):
            size -= len(data)
            yield data


if __name__ == "__main__":
    sys.exit(main())
