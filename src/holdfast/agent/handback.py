"""`python -m holdfast.agent.handback CONTROLLER FOLDER < WHAT`: gives a controller what it has lost; started by agents.

A process of its own, as fetch.py is: an agent neither waits for disks nor carries an HTTP client. The code goes first,
so that with the log all is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx

from holdfast.agent.asking import SNI, client
from holdfast.events import paths
from holdfast.events.agent import LOG_NAME, LOG_SEAL

log = logging.getLogger("holdfast.agent")

PIECE_BYTES = 1 << 20
ANSWER_S = 30.0


def main() -> int:
    """Hand back what the folder holds; 1 when the controller would not have it, or is out of reach."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.handback")
    parser.add_argument("controller", help="the controller's URL, as agents know it")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ca", type=Path, help="certificate that the controller is known by")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    told = json.load(sys.stdin)
    folder: Path = options.folder
    url = paths.url_of(options.controller, paths.COPIES)
    with client(told["token"], options.ca, answer_s=ANSWER_S) as controller:
        controller.headers[LOG_SEAL] = told["seal"]
        try:
            for archive in folder.glob("*.tar"):
                _put(controller, url + archive.stem, archive, archive.stat().st_size)
            _put(controller, url + LOG_NAME, folder / LOG_NAME, told["bytes"])
        except (httpx.HTTPError, OSError) as error:
            log.warning("the copies were not handed back: %s", error)
            return 1
    return 0


def _put(controller: httpx.Client, url: str, path: Path, size: int) -> None:
    controller.put(url, content=_start_of(path, size), extensions=SNI).raise_for_status()


def _start_of(path: Path, size: int) -> Iterator[bytes]:
    if not size:
        return
    with path.open("rb") as file:
        while size and (data := file.read(min(size, PIECE_BYTES))):
            size -= len(data)
            yield data


if __name__ == "__main__":
    sys.exit(main())
