"""Monarch without holdfast: `launch OUT` runs allreduce.py on two processes; `kill OUT` times how a kill is noticed.

`launch` is what Monarch's users write: a LocalJob, a mesh of two processes, and an SPMDActor with an unmodified script.
"""

import os
import signal
import sys
import time
from pathlib import Path

from monarch import actor
from monarch.actor import Actor, endpoint
from monarch.job import LocalJob
from monarch.spmd import SPMDActor

PROGRAM = Path(__file__).with_name("allreduce.py")


class Waiter(Actor):
    """Waits in a process that is killed."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait(self) -> None:
        time.sleep(1000)


def launch(out: str) -> None:
    """Run the program on two processes."""
    hosts = LocalJob(hosts=("hosts",)).state(cached_path=None).hosts
    mesh = hosts.spawn_procs(per_host={"gpus": 2})
    ranks = mesh.spawn("spmd", SPMDActor)
    _, port = ranks.slice(gpus=0).get_host_port.call_one(None).get(timeout=60)
    ranks.main.call("127.0.0.1", port, [str(PROGRAM), out]).get(timeout=60)


def kill(out: str) -> None:
    """Write the seconds from SIGKILL of a process to the error that its caller gets."""
    actor.unhandled_fault_hook = lambda failure: None
    mesh = actor.this_host().spawn_procs(per_host={"gpus": 1})
    waiter = mesh.spawn("waiter", Waiter)
    pid = waiter.pid.call_one().get(timeout=60)
    waiting = waiter.wait.call_one()
    time.sleep(1.0)  # else the process may not be watched yet
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        waiting.get(timeout=120)
    except Exception:
        Path(out).write_text(f"{time.monotonic() - at:.6f}")


if __name__ == "__main__":
    {"launch": launch, "kill": kill}[sys.argv[1]](sys.argv[2])
    os._exit(0)  # after a failure Monarch's exit takes another second
