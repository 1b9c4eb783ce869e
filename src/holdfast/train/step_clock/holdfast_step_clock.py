"""Reports the optimizer steps of a program that knows nothing of holdfast to the rank's agent.

It runs in the program's interpreter (sitecustomize.py starts it), so it uses only the standard library of Python 3.8,
and ends at its first error. The agent (agent/step_clock.py) reads the steps from a file that both have mapped: a
message would wake the agent at every step, which costs the rank 30 times as much. The socket shows the agent whose file
it is, and when the rank ends.

A step ends when the first optimizer that stepped steps again: the others of an iteration, such as those of a GAN, do
not count. Steps that a GradScaler skips do not call the optimizer, and are no steps here.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from typing import Any

ENTRIES = 4096
"""Steps whose times the file keeps; the agent reads them ten times a second. agent/step_clock.py has the same number.

The file is an array of doubles: the number of the last step, then the monotonic seconds at which step N ended at place
1 + N % ENTRIES, then the length of the agent's request, which follows as JSON.
"""

REQUEST = 1 + ENTRIES
"""Place of that length: 0 unless the agent requests a profile."""
MAX_REQUEST_BYTES = 4096
FILE_BYTES = 8 * (REQUEST + 1) + MAX_REQUEST_BYTES

POLL_REQUEST_S = 0.05
"""Least seconds between two reads of that length, each of which takes about 20 ns."""

TAKEOVER_STEPS = 10
"""Steps of another optimizer without one of the counted optimizer after which that other one is counted.

A program may replace its optimizer, or train its parts in turn.
"""


class StepClock:
    """Counts a rank's optimizer steps from 1, and writes down when each ended."""

    def __init__(self) -> None:
        self.off = False
        self._link: socket.socket | None = None
        self._times: Any = None
        self._counted = 0
        """Identity of the optimizer whose steps count."""
        self._other = 0
        self._other_steps = 0
        """Steps of another optimizer since the last that counted."""
        self._other_after = 0
        """Number of that last one."""
        self._step = 0
        self._rank = 0
        self._profiler: Any = None
        """Profiles steps on request (holdfast_step_profiler.py)."""
        self._poll_at = 0.0
        """Monotonic seconds from which a step reads whether there is a request."""

    def after_step(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Torch calls this after each step of each optimizer."""
        # torch.compile traces an optimizer's step with its hooks; what follows cannot be traced.
        if torch.compiler.is_compiling() or self.off:
            return
        try:
            self._on_step(id(optimizer))
        except Exception as error:
            self.stop(error)

    def stop(self, error: Exception | None = None) -> None:
        """Count no further step: a Session does, this is a child of the rank, or there was an error."""
        self.off = True
        link, self._link = self._link, None
        profiler, self._profiler = self._profiler, None
        try:
            if profiler is not None:
                profiler.stop()
            if error is not None:
                report(error)
            if link is not None:
                link.close()
        except OSError:
            pass

    def forget_profile(self) -> None:
        """Leave a profile as it is: in a fork, the profiler has no threads, and ending it would wait for them."""
        self._profiler = None

    @property
    def connected(self) -> bool:
        """Whether this process reports to an agent."""
        return self._link is not None

    def _on_step(self, optimizer: int) -> None:
        now = time.monotonic()
        if self._link is None:
            self._connect()
            self._counted = optimizer
            if self.off:
                return
        if optimizer != self._counted and not self._takes_over(optimizer):
            return
        times = self._times
        self._step = step = self._step + 1
        times[1 + step % ENTRIES] = now
        times[0] = step
        if now >= self._poll_at:
            self._poll_request(step, now)

    def _poll_request(self, step: int, now: float) -> None:
        """Profile if that is requested: then each step comes here until the profile is over."""
        if self._times[REQUEST]:
            self._poll_at = 0.0
            self._profile(step)
        else:
            self._poll_at = now + POLL_REQUEST_S

    def _profile(self, step: int) -> None:
        """A profile is requested, or runs, and this step has ended."""
        if self._profiler is None:
            text = self._times.tobytes()[8 * (REQUEST + 1) :][: int(self._times[REQUEST])]
            self._profiler = _profiler_module().StepProfiler(torch, json.loads(text), self._rank, self._send)
        if self._profiler.after_step(step):
            self._profiler = None
            self._times[REQUEST] = 0

    def _send(self, **message: object) -> None:
        """Send a message to the agent, which may be gone."""
        try:
            if self._link is not None:
                self._link.send(_line(**message))
        except OSError:
            pass

    def _takes_over(self, optimizer: int) -> bool:
        """Count a step of another optimizer; whether it is the counted one from now on."""
        if self._other_after != self._step:
            self._other, self._other_steps, self._other_after = optimizer, 0, self._step
        if optimizer != self._other:
            return False
        self._other_steps += 1
        if self._other_steps < TAKEOVER_STEPS:
            return False
        self._counted = optimizer
        return True

    def _connect(self) -> None:
        """Connect as this rank, unless there is no agent, or another process of the rank has the clock already."""
        path = os.environ.get("HOLDFAST_RANK_SOCKET")
        if not path or os.environ.get("HOLDFAST_STEP_CLOCK") == "0":
            self.off = True
            return
        os.environ["HOLDFAST_STEP_CLOCK"] = "0"  # for the processes that this one starts
        self._rank = rank = int(os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
        times = _map_file(f"{path}-steps-{rank}")
        self._link = link = socket.socket(socket.AF_UNIX)
        link.setblocking(False)  # a connection to a Unix socket is made or refused immediately
        link.connect(path)
        link.send(_line(type="hello", rank=rank, pid=os.getpid(), step_clock=True))
        self._times = times


def _map_file(path: str) -> Any:
    """A new file for the times, mapped; the agent removes it when it has mapped it too."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, FILE_BYTES)
        return memoryview(mmap.mmap(descriptor, FILE_BYTES)).cast("d")
    finally:
        os.close(descriptor)


def report(error: Exception) -> None:
    """Have the agent log that the clock is off."""
    with socket.socket(socket.AF_UNIX) as link:
        link.setblocking(False)
        link.connect(os.environ.get("HOLDFAST_RANK_SOCKET", ""))
        link.send(_line(type="step-clock-failed", rank=int(os.environ.get("RANK") or 0), error=repr(error)[:500]))


def _profiler_module() -> Any:
    """The module next to this one, whose folder is on no path."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = "holdfast_step_profiler"
    spec: Any = spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py"))
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _line(**message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


torch: Any = None
"""The program's torch, which this module does not import."""
clock = StepClock()


def start() -> None:
    """Have torch call the clock; torch.optim has just been imported, torch itself perhaps only in part."""
    global torch
    torch = sys.modules["torch"]
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(clock.after_step)
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """A fork of a rank, such as a worker of a DataLoader, is not the rank; a fork of a zygote becomes one."""
    if clock.connected:
        clock.forget_profile()
        clock.stop()
