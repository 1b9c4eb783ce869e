"""`python -m holdfast.agent.code_download URL FOLDER < TOKEN`: pulls one archive of code and unpacks it; started by agents.

A process of its own, so that an agent neither waits for disks nor carries an HTTP client. The folder may be shared by
several nodes of one machine: one of them pulls, the others wait for it. What goes wrong for good is said as a Finding
on stdout, with exit code 1. A controller that is out of reach is asked again for a while; then the exit code is `AWAY`,
and the agent, which may know of another address by then, starts the next.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import logging
import sys
import time
from collections.abc import Generator
from pathlib import Path, PurePosixPath

import httpx

from holdfast.agent.code_cache import EXIT_CONTROLLER_UNREACHABLE
from holdfast.agent.http_client import SNI_EXTENSION, make_client
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events.encoding import encode
from holdfast.findings import Owner
from holdfast.host.files import open_lock, private_opener
from holdfast.launch.code.archive import CorruptArchive, archive_path, unpack

log = logging.getLogger("holdfast.agent")

MAX_TRIES = 3
"""How often an archive that arrives damaged is pulled."""
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, *([1.0] * 8))
"""Seconds between requests to a controller that is out of reach."""
READ_TIMEOUT_S = 30.0
"""Longest that a controller which answers may be silent."""


def main() -> int:
    """Pull and unpack what the command line names; 1 when it cannot be had, AWAY when nobody could be asked."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.code_download")
    parser.add_argument("url", help="where the controller serves the archive; its digest is the last part")
    parser.add_argument("folder", type=Path, help="folder that takes the unpacked code, under its digest")
    parser.add_argument("--ca", type=Path, help="certificate that the controller is known by, where the URL says https")
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
    """The folder of the unpacked code, whoever unpacked it; raises HoldfastError when it cannot be had.

    The folder `copies`, on the same disk, takes the archive where it is to be kept.

    Raises httpx.TransportError when the controller stays out of reach.
    """
    digest = PurePosixPath(url).name
    into = folder / digest
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            make_client(token, ca, read_timeout_s=READ_TIMEOUT_S, connect_timeout_s=READ_TIMEOUT_S) as controller,
            _locked(folder / f"{digest}.lock"),
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


@contextlib.contextmanager
def _locked(lock: Path) -> Generator[None]:
    """Hold the only right to make a folder; waits for who has it. It ends with its process, however that ends."""
    with open_lock(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_verified(controller: httpx.Client, url: str, digest: str, part: Path) -> None:
    """Write the archive to `part`, also when the controller is away for a while; raises Damaged for another digest."""
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
    """Write what the controller serves to `part`; its digest."""
    hashed = hashlib.sha256()
    with (
        controller.stream("GET", url, extensions=SNI_EXTENSION) as answer,
        open(part, "wb", opener=private_opener) as file,
    ):
        if not answer.is_success:
            what = f"the controller answered {answer.status_code} when it was asked for the code"
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
