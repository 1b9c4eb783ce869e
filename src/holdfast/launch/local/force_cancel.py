"""Kills a local run's processes without its controller, which may be unable to start.

It does not trust the run's folder: it identifies processes by their command line, by the mark in their environment, and
by their ancestors.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import CancelRequested, Outcome, RunFinished, ShutdownDecided
from holdfast.events.log import last_event
from holdfast.events.log_writer import EventWriter
from holdfast.findings import Owner
from holdfast.host.processes import (
    all_pids,
    by_env_prefix,
    command_line,
    descendants,
    kill_all,
    machine_id,
    send_signal,
)
from holdfast.job.isolation import Isolation
from holdfast.job.run_spec import RunSpec
from holdfast.launch.local import memory_limit, socket_dir
from holdfast.launch.local.run_network import run_network_for
from holdfast.os_errors import os_error_finding
from holdfast.run_dir import RunDir

KILL_TIMEOUT_S = 10.0
"""Seconds to wait until killed processes have ended; only the kernel can delay that further."""

UNLOCK_TIMEOUT_S = 3.0
"""Seconds to wait for the lock: the kernel closes a killed process's files after it has forgotten its command line."""

_RUN_MODULES = ("holdfast.launch.local.local_supervisor", "holdfast.controller_main")


def force_cancel(run: RunDir, request: CancelRequested) -> None:
    """Kill the run's processes, clean up after them, and log the run's end.

    Raises HoldfastError if the run is on another machine, a process does not end, or the log cannot be written.
    """
    end_processes(run)
    log_end(run, request)


def end_processes(run: RunDir) -> None:
    """Kill the run's processes on this machine and clean up after them.

    Raises HoldfastError if the run's controller is on another machine or a process does not end.
    """
    _require_same_host(run)
    left = _kill(run)
    if not left and not run.is_free(within_s=UNLOCK_TIMEOUT_S):
        held = f"{run.path}/lock is held, and no process here that belongs to the run holds it"
        raise _other_host_error(run, held, "where it was started, as the user who started it")
    _clean_up(run)
    if left:
        raise failure(
            "processes-not-exiting",
            f"{len(left)} processes of {run.run_id} do not end, though they were killed",
            exit_code=ExitCode.UNAVAILABLE,
            where=run.run_id,
            evidence=tuple(f"process {pid}: {command_line(pid)}" for pid in left[:5]),
            remedy="Look at what the kernel holds them for (`ps`, state D), and ask again.",
            owner=Owner.CLUSTER,
        )


def log_end(run: RunDir, request: CancelRequested) -> None:
    """Log the end of a run whose processes have ended; raises HoldfastError if that is impossible."""
    try:
        _log_end(run, request)
    except OSError as error:
        what = f"every process of {run.run_id} has ended, but its end cannot be logged"
        raise HoldfastError((os_error_finding(error, what, run.events),), ExitCode.STORAGE_FAILED) from error


def _require_same_host(run: RunDir) -> None:
    """Raise HoldfastError if the run's supervisor recorded another machine; a reboot does not count as one."""
    there, here = run.read_controller_record(), machine_id()
    if all(there.get(name, here[name]) != here[name] for name in here):
        raise _other_host_error(
            run,
            f"{run.controller_record} names {there['hostname']}, and this is {here['hostname']}",
            f"on {there['hostname']}. If that machine is gone for good, remove {run.controller_record} and ask again",
        )


def _other_host_error(run: RunDir, evidence: str, where: str) -> HoldfastError:
    return failure(
        "run-on-another-host",
        f"the processes of {run.run_id} cannot be ended from here, so nothing was changed",
        exit_code=ExitCode.UNAVAILABLE,
        where=run.run_id,
        evidence=(evidence,),
        remedy=f"`holdfast cancel --force {run.run_id}` {where}.",
    )


def _kill(run: RunDir) -> list[int]:
    """Kill supervisor, controller, agents and ranks; returns the processes that do not end."""
    own = os.getpid()
    supervisors = [pid for pid in all_pids() if pid != own and _belongs_to_run(pid, run)]
    for pid in supervisors:
        send_signal(pid, signal.SIGSTOP)  # so that it starts nothing more and its process tree stays known

    def tree() -> list[int]:
        below = (pid for supervisor in supervisors for pid in descendants(supervisor))
        held = (pid for folder in run.nodes.glob("node*") for pid in memory_limit.processes(folder))
        found = {*below, *held, *by_env_prefix(all_pids(), HOLDFAST_NODE=f"{run.run_id}/")}
        return [pid for pid in found if pid != own and pid not in supervisors]

    left = kill_all(tree, within_s=KILL_TIMEOUT_S)
    return left + kill_all(lambda: [pid for pid in supervisors if _belongs_to_run(pid, run)], within_s=KILL_TIMEOUT_S)


def _clean_up(run: RunDir) -> None:
    for folder in run.nodes.glob("*"):
        socket_dir.remove(folder)
        memory_limit.remove_cgroups(folder)
        with contextlib.suppress(OSError):
            (folder / "token").unlink(missing_ok=True)
    with contextlib.suppress(HoldfastError, OSError):
        run_network_for(_isolation(run), run.run_id).remove()
    with contextlib.suppress(OSError):
        run.delete_secrets()
        run.control_socket.unlink(missing_ok=True)


def _isolation(run: RunDir) -> Isolation:
    """The run's isolation; if unreadable, netns, which leaves most behind."""
    try:
        return RunSpec.read(run.job).isolation
    except HoldfastError:
        return Isolation.NETNS


def _log_end(run: RunDir, request: CancelRequested) -> None:
    last = last_event(run.events)
    if isinstance(last, RunFinished):
        return
    at = max(request.at, last.at if last else 0.0)
    code, outcome = ExitCode.CANCELLED, Outcome.CANCELLED
    why = "cancelled by force, without its controller" if request.force else "cancelled while it had no controller"
    events = (
        replace(request, at=at),
        ShutdownDecided(at=at, outcome=outcome, exit_code=code, reason=why),
        RunFinished(at=at, outcome=outcome, exit_code=code, reason=why),
    )
    writer = EventWriter(run.events, reservation_bytes=0)
    writer.append(events, sync=True, ending=True)
    writer.close()


def _belongs_to_run(pid: int, run: RunDir) -> bool:
    """Whether a process of this user is the run's supervisor or controller."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    named = next((index for index, word in enumerate(words) if os.fsdecode(word) in _RUN_MODULES), None)
    if named is None or words[named - 1] != b"-m" or named + 1 >= len(words):
        return False
    with contextlib.suppress(OSError, ValueError):
        return os.path.samefile(os.fsdecode(words[named + 1]), run.path)
    return False
