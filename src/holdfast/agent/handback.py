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
from urllib.parse import urlsplit

import httpx

from holdfast.events.agent import LOG_NAME, LOG_SEAL
from holdfast.guard.tls import NAME, agents_end

log = logging.getLogger("holdfast.agent")

PATH = "/v1/copies/"
PIECE_BYTES = 1 << 20
TIMEOUT_S, DIAL_S = 30.0, 3.0
"""Longest that an answer takes, and that a connection does: where a pod was that is lost again, nobody refuses one, and
the next controller waits for this node."""


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
    parts = urlsplit(str(options.controller))
    url = parts._replace(scheme=parts.scheme.replace("ws", "http"), path=PATH).geturl()
    verify = True if options.ca is None else agents_end(options.ca)
    headers = {"Authorization": f"Bearer {told['token']}", LOG_SEAL: told["seal"]}
    with httpx.Client(
        headers=headers, timeout=httpx.Timeout(TIMEOUT_S, connect=DIAL_S), trust_env=False, verify=verify
    ) as client:
        try:
            for archive in folder.glob("*.tar"):
                _put(client, url + archive.stem, archive, archive.stat().st_size)
            _put(client, url + LOG_NAME, folder / LOG_NAME, told["bytes"])
        except (httpx.HTTPError, OSError) as error:
            log.warning("the copies were not handed back: %s", error)
            return 1
    return 0


def _put(client: httpx.Client, url: str, path: Path, size: int) -> None:
    client.put(url, content=_start_of(path, size), extensions={"sni_hostname": NAME}).raise_for_status()


def _start_of(path: Path, size: int) -> Iterator[bytes]:
    if not size:
        return
    with path.open("rb") as file:
        while size and (data := file.read(min(size, PIECE_BYTES))):
            size -= len(data)
            yield data


if __name__ == "__main__":
    sys.exit(main())
