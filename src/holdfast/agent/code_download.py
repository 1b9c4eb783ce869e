"""`python -m holdfast.agent.code_download URL FOLDER < TOKEN`: an agent's process that downloads and unpacks code.

It is a separate process, so that the agent never blocks on disks and needs no HTTP client. Several nodes of one machine
may share the folder: one of them downloads, the others wait. A permanent failure is printed as a Finding on stdout,
with exit code 1. If the controller stays unreachable, the exit code is `EXIT_CONTROLLER_UNREACHABLE`, and the agent
retries with the address it knows by then.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from pathlib import Path, PurePosixPath

import httpx

from holdfast.agent.code_cache import EXIT_CONTROLLER_UNREACHABLE
from holdfast.agent.http_client import SNI_EXTENSION, make_client
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events.encoding import encode
from holdfast.findings import Owner
from holdfast.host.files import private_opener
from holdfast.launch.code.archive import CorruptArchive, archive_path, locked, unpack

log = logging.getLogger("holdfast.agent")

MAX_TRIES = 3
"""Attempts to download an archive that arrives corrupt."""
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, *([1.0] * 8))
"""Seconds between requests to an unreachable controller."""
READ_TIMEOUT_S = 30.0
"""Longest silence of a controller during a response, in seconds."""


def main() -> int:
    """Download and unpack; return 1 on failure, EXIT_CONTROLLER_UNREACHABLE if the controller stayed unreachable."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.code_download")
    parser.add_argument("url", help="where the controller serves the archive; its digest is the last part")
    parser.add_argument("folder", type=Path, help="folder that takes the unpacked code, under its digest")
    parser.add_argument("--ca", type=Path, help="certificate that the controller presents, for https URLs")
    parser.add_argument("--log-replica", type=Path, help="folder that keeps the archive as well")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        download_code(
            options.url, sys.stdin.read().strip(), options.folder, ca=options.ca, log_replica=options.log_replica
        )
    except HoldfastError as error:
        sys.stdout.buffer.write(encode(error.findings[0]))
        return 1
    except httpx.TransportError as error:
        log.warning("the controller is out of reach: %s", error)
        return EXIT_CONTROLLER_UNREACHABLE
    return 0


def download_code(
    url: str, token: str, folder: Path, *, ca: Path | None = None, log_replica: Path | None = None
) -> Path:
    """Return the folder of the unpacked code, which another process may have filled; raise HoldfastError on failure.

    `log_replica`, on the same disk, is the folder that keeps the archive, if it is to be kept.

    Raises httpx.TransportError when the controller stays unreachable.
    """
    digest = PurePosixPath(url).name
    try:
        with (
            make_client(token, ca, read_timeout_s=READ_TIMEOUT_S, connect_timeout_s=READ_TIMEOUT_S) as controller,
            locked(folder, digest) as into,
        ):
            if not into.is_dir():
                _download_and_unpack(controller, url, digest, into, log_replica)
    except OSError as error:
        raise _failure("the code cannot be unpacked", folder, str(error), "Make room, or permit it.") from error
    return into


def _download_and_unpack(controller: httpx.Client, url: str, digest: str, into: Path, log_replica: Path | None) -> None:
    damage = ""
    part = archive_path(into.parent, f"{digest}.part")
    for _ in range(MAX_TRIES):
        try:
            _download_verified(controller, url, digest, part)
            unpack(part, into)
            if log_replica is not None:
                log_replica.mkdir(parents=True, exist_ok=True, mode=0o700)
                part.rename(archive_path(log_replica, digest))
            return
        except CorruptArchive as error:
            damage = str(error)
        finally:
            part.unlink(missing_ok=True)
    what = f"the code arrived damaged {MAX_TRIES} times"
    raise _failure(what, into.parent, damage, "Look at the disk and the memory of both machines.")


def _download_verified(controller: httpx.Client, url: str, digest: str, part: Path) -> None:
    """Write the archive to `part`, waiting for an absent controller; raise CorruptArchive on a digest mismatch."""
    for wait_s in (*RETRY_DELAYS_S, None):
        try:
            found = _download_once(controller, url, part)
        except httpx.TransportError as error:
            if wait_s is None:
                raise
            log.warning("the controller is out of reach: %s", error)
            time.sleep(wait_s)
            continue
        if found != digest:
            raise CorruptArchive(f"its digest is {found}")
        return


def _download_once(controller: httpx.Client, url: str, part: Path) -> str:
    """Write the controller's response to `part`; return its digest."""
    hashed = hashlib.sha256()
    with (
        controller.stream("GET", url, extensions=SNI_EXTENSION) as answer,
        open(part, "wb", opener=private_opener) as file,
    ):
        if not answer.is_success:
            what = f"the controller answered {answer.status_code} to the request for the code"
            raise _failure(what, part.parent, url, "Look at its log: controller.log in the run's folder.")
        for block in answer.iter_raw():
            hashed.update(block)
            file.write(block)
    return hashed.hexdigest()


def _failure(what: str, where: Path, evidence: str, remedy: str) -> HoldfastError:
    return failure(
        "code-not-delivered",
        what,
        exit_code=ExitCode.UNAVAILABLE,
        where=str(where),
        evidence=(evidence,),
        remedy=remedy,
        owner=Owner.CLUSTER,
    )


if __name__ == "__main__":
    sys.exit(main())
