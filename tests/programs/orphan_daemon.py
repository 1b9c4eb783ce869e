"""Leaves a daemon that holds a port and shares no environment, session or parent: `orphan_daemon.py FILE CODE [PORT]`.

It writes the daemon's process and port to FILE once the daemon listens, and exits with CODE. With KILL it kills its
agent in the first attempt and exits with 0 later. A port in use is an error, as for any server.
"""

from __future__ import annotations

import os
import signal
import sys

DAEMON = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
os.write(int(sys.argv[2]), f"{os.getpid()} {server.getsockname()[1]}".encode())
os.close(int(sys.argv[2]))
time.sleep(600)
"""


def main() -> None:
    file, code, *port = sys.argv[1:]
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.set_inheritable(write, True)
            os.execve(sys.executable, [sys.executable, "-c", DAEMON, *(port or ["0"]), str(write)], {})
        os._exit(0)
    os.wait()
    os.close(write)
    with open(file, "w") as told:
        told.write(os.read(read, 100).decode() or sys.exit("the daemon cannot listen: address already in use"))
    if code == "KILL" and os.environ["HOLDFAST_ATTEMPT"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    sys.exit(0 if code == "KILL" else int(code))


if __name__ == "__main__":
    main()
