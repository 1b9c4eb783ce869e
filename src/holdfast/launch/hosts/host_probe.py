"""On a host: says what it is, and connects to other hosts; host_survey.py asks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from holdfast.launch.hosts.host_address import own_address
from holdfast.launch.hosts.host_lock import lock_host

CONNECT_TIMEOUT_S = 5.0


def main() -> None:
    """Answer requests, one line each, until the connection ends."""
    server = None
    for line in sys.stdin:
        request = json.loads(line)
        if "connect" in request:
            answer: dict[str, object] = {"errors": [_connect(host, port) for host, port in request["connect"]]}
        else:
            address = request["address"] or own_address()
            try:
                server = socket.create_server((address, 0), backlog=1024)
            except OSError as error:
                answer = {"error": f"it cannot listen on {address}: {error}"}
            else:
                answer = _facts(address, server.getsockname()[1], request["programs"], request["paths"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _facts(address: str, port: int, programs: list[str], paths: list[str]) -> dict[str, object]:
    held = lock_host("check")
    return {
        "hostname": socket.gethostname(),
        "address": address,
        "port": port,
        "gpus": sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "holder": held if isinstance(held, str) else "",
        "programs": [program for program in programs if shutil.which(program)],
        "monarch": _monarch(),
        "paths": [path for path in paths if os.access(path, os.R_OK)],
    }


def _monarch() -> str:
    try:
        return version("torchmonarch")
    except PackageNotFoundError:
        return ""


def _connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
