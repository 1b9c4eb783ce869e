"""`python -m holdfast.launch.waiting_supervisor ROOM`: a supervisor whose run is not known yet.

It reads its arguments from standard input (prestarted_supervisor.py), and then is that supervisor. Without a run it
ends, and with it the controller that it has started meanwhile.
"""

from __future__ import annotations

import json
import os
import sys

from holdfast.host.process_arguments import show_arguments
from holdfast.launch.local import local_supervisor
from holdfast.launch.waiting_controller import WaitingController


def main() -> int:
    """Wait for a run, then supervise it; returns the exit code."""
    waiting = WaitingController()
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
