"""Lets a rank connect to its TCPStore as soon as that listens.

All ranks reach `init_process_group` within milliseconds of each other. One that is there before rank 0 listens is
refused, and torch then waits 0.25 to 0.75 s before it tries again: at every start, and at every restart. Here a rank
asks every few milliseconds, and then lets torch connect.

It runs in the program's interpreter (sitecustomize.py starts it), so it uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

MAX_WAIT_S = 5.0
"""Longest wait; torch's own attempts follow, with the program's timeout."""
FIRST_DELAY_S, MAX_DELAY_S = 0.004, 0.064
"""Between two attempts; it grows by half each time."""
CONNECT_TIMEOUT_S = 1.0


def start(rendezvous: Any) -> None:
    """Have the `env://` handler of torch.distributed.rendezvous wait for the store first."""
    handlers: Any = rendezvous._rendezvous_handlers
    connect: Any = handlers["env"]

    def wait_and_connect(url: str, *args: Any, **kwargs: Any) -> Any:
        if _rank(url) not in ("", "0"):  # rank 0 serves the store
            wait_for_store()
        return connect(url, *args, **kwargs)

    handlers["env"] = wait_and_connect


def _rank(url: str) -> str:
    """This rank's number, which the URL may have; empty if it has none, which torch reports."""
    words = url.partition("?")[2].split("&")
    return next((word[5:] for word in words if word.startswith("rank=")), os.environ.get("RANK", ""))


def wait_for_store() -> None:
    """Return when something listens at MASTER_ADDR and MASTER_PORT, or when waiting seems to be of no use."""
    deadline, delay_s = time.monotonic() + MAX_WAIT_S, FIRST_DELAY_S
    while time.monotonic() < deadline:
        try:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            time.sleep(delay_s)
            delay_s = min(MAX_DELAY_S, delay_s * 1.5)
        except (OSError, LookupError, ValueError, OverflowError):  # torch will say what is wrong
            return
        else:
            return
