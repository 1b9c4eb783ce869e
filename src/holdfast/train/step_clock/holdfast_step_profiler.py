"""Profiles some steps of a program that knows nothing of holdfast, and writes the trace.

The step clock loads it at the first request (holdfast_step_clock.py), so it too uses only the standard library of
Python 3.8 and the program's torch. It marks steps and backward passes as train/metrics/profiler.py does.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

STEPS = 5
"""Steps of a profile, as in train/metrics/profiler.py."""
STEP, BACKWARD = "holdfast: step", "holdfast: backward"
"""As in metrics/profiler_events.py."""
MAX_TRACE_BYTES = 64 << 20
"""Most bytes of a trace or snapshot, compressed; run_dir.py has the same number."""
MAX_ENTRIES = 100_000
"""Latest allocations that a snapshot has, as in train/metrics/memory_history.py."""
NO_GPU = "the rank uses no GPU, and torch records only GPU memory"


class StepProfiler:
    """One profile of one rank; `send` sends a message to its agent."""

    def __init__(self, torch: Any, request: dict[str, Any], rank: int, send: Callable[..., None]) -> None:
        self._torch = torch
        self._request = request
        self._rank = rank
        self._send = send
        self._running: Any = None
        self._backward: Any = None
        self._last = 0
        """The last step of the profile, once it runs."""
        self._records_memory = False

    def after_step(self, step: int) -> bool:
        """Start or end the profile after this step, or note the step; whether the profile is over."""
        try:
            if self._running is None:
                if step < self._request["first"] - 1:
                    return False
                self._start(step)
            elif step < self._last:
                self._note(STEP)
            else:
                self._end(step)
                return True
        except Exception as error:  # an error of torch's profiler must not stop the clock
            self.stop()
            self._send_written(step, failure=_text(error))
            return True
        return False

    def stop(self) -> None:
        """Stop profiling; the trace is dropped."""
        running, self._running = self._running, None
        if running is not None:
            self._torch.autograd.backward = self._backward
            running.stop()

    def _start(self, step: int) -> None:
        torch = self._torch
        if torch.autograd._profiler_enabled():  # a second profiler would end the first
            raise RuntimeError("the program profiles itself")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs errors on every host without a GPU
        on_gpu = torch.cuda.is_initialized()
        activity = torch.profiler.ProfilerActivity
        running = torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if on_gpu else [])])
        if on_gpu:
            torch.cuda.synchronize()
            if self._request["memory"] and not torch._C._cuda_isHistoryEnabled():
                torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)
                self._records_memory = True
        running.start()
        self._running, self._last = running, step + STEPS
        self._backward, torch.autograd.backward = torch.autograd.backward, self._marked_backward
        self._note(STEP)

    def _end(self, step: int) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()
        self._note(STEP)
        ended = self._running
        self.stop()
        snapshot = self._memory_snapshot()
        threading.Thread(target=self._write, args=(ended, snapshot, step)).start()

    def _note(self, name: str) -> None:
        with self._torch.autograd.profiler.record_function(name):
            pass

    def _marked_backward(self, *args: Any, **options: Any) -> Any:
        with self._torch.autograd.profiler.record_function(BACKWARD):
            return self._backward(*args, **options)

    def _memory_snapshot(self) -> Any:
        """What was recorded of the GPU's memory; None if that was not requested, or there is no GPU."""
        if not self._request["memory"] or not self._torch.cuda.is_initialized():
            return None
        try:
            return self._torch.cuda.memory._snapshot()
        finally:
            if self._records_memory:
                self._torch.cuda.memory._record_memory_history(None)

    def _write(self, ended: Any, snapshot: Any, step: int) -> None:
        """Write the files while training continues, and report them."""
        start = f"{self._request['traces']}step-{step}-rank-{self._rank}"
        failure = _write_packed(ended.export_chrome_trace, f"{start}.json.gz")
        memory_failure = ""
        if self._request["memory"]:
            memory_failure = (
                NO_GPU
                if snapshot is None
                else _write_packed(lambda path: _dump(snapshot, path), f"{start}-memory.pickle.gz")
            )
        self._send_written(
            step,
            failure=failure,
            memory=self._request["memory"] and not memory_failure,
            memory_failure=memory_failure,
        )

    def _send_written(self, step: int, **found: Any) -> None:
        self._send(type="trace-written", step=step, kept=self._request["kept"], step_clock=True, **found)


def _dump(snapshot: Any, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)


def _write_packed(save: Callable[[str], None], path: str) -> str:
    """Write a file, compressed and private; `save` writes it to a path. Returns why that failed, or nothing."""
    try:
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=".trace-") as private:
            plain, part = os.path.join(private, "plain"), os.path.join(private, "packed")
            save(plain)
            with open(plain, "rb") as source, gzip.open(part, "wb", compresslevel=3) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            size = os.path.getsize(part)
            if size > MAX_TRACE_BYTES:
                return f"the file has {size:,} bytes, and at most {MAX_TRACE_BYTES:,} are kept"
            os.chmod(part, 0o600)
            os.rename(part, path)
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
