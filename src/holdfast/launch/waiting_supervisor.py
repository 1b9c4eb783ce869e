"""`python -m holdfast.launch.waiting_supervisor [TARGET BASE] ROOM`: a supervisor whose run is not known yet.

It reads its arguments from standard input (prestarted_supervisor.py), and then is that supervisor. Without a run it
ends, and with it the controller that it has started meanwhile, which connects the hosts of a target file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from holdfast.host.process_arguments import show_arguments
from holdfast.launch.waiting_controller import ExpectedTarget, WaitingController


def main() -> int:
    """Wait for a run, then supervise it; returns the exit code."""
    hosts = sys.argv[1:-1]
    waiting = WaitingController(ExpectedTarget(target=Path(hosts[0]), base=Path(hosts[1])) if hosts else None)
    from holdfast.launch.local import local_supervisor  # while the controller does its imports

    order = sys.stdin.buffer.read()
    if not order:
        return 0
    wanted = json.loads(order)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    log = os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for number, opened in enumerate((nothing, log, log)):
        os.dup2(opened, number)
    show_arguments([sys.executable, "-m", *wanted["words"]])
    sys.argv[1:] = wanted["words"][1:]
    return local_supervisor.main(waiting)


if __name__ == "__main__":
    sys.exit(main())
