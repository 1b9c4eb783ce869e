"""Ends a local run's processes without its controller, which may be unable to start.

Nothing in the run's folder is believed: processes are known by their command line, by the mark in their environment,
and by whose descendants they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import CancelRequested, Outcome, RunFinished, StopDecided
from holdfast.events.log import EventWriter, last_event
from holdfast.findings import Fault
from holdfast.folder import RunFolder
from holdfast.host.processes import all_pids, command_of, descendants, end_all, marked_below, send, this_machine
from holdfast.job.accepted import Accepted
from holdfast.job.isolation import Isolation
from holdfast.launch.local import memory_limit, sockets
from holdfast.launch.local.isolation import networks_for
from holdfast.shortage import finding_of

END_S = 10.0
"""Seconds to wait for killed processes to be gone; only the kernel can hold one longer."""

_PROGRAMS = ("holdfast.launch.local.keeper", "holdfast.server")


def end(run: RunFolder, request: CancelRequested) -> None:
    """Kill the run's processes, clean up after them, and write the run's end into its log.

    Raises HoldfastError where the run is on another machine, a process stays, or the log cannot be written.
    """
    _refuse_another_machines(run)
    left = _kill(run)
    if not left and run.alive():
        held = f"{run.path}/lock is held, and no process here that belongs to the run holds it"
        raise _elsewhere(run, held, "where it was started, as the user who started it")
    _clean_up(run)
    if left:
        raise failure(
            "processes-stay",
            f"{len(left)} processes of {run.run} do not end, though they were killed",
            exit_code=ExitCode.UNAVAILABLE,
            where=run.run,
            evidence=tuple(f"process {pid}: {command_of(pid)}" for pid in left[:5]),
            remedy="Look at what the kernel holds them for (`ps`, state D), and ask again.",
            fault=Fault.CLUSTER,
        )
    try:
        _write_end(run, request)
    except OSError as error:
        what = f"every process of {run.run} has ended, but its log cannot say so"
        raise HoldfastError((finding_of(error, what, run.events),), ExitCode.STORAGE) from error


def _refuse_another_machines(run: RunFolder) -> None:
    """Raise HoldfastError where the run's keeper has written down another machine; after a reboot it is still this."""
    there, here = run.description(), this_machine()
    if all(there.get(name, here[name]) != here[name] for name in here):
        raise _elsewhere(
            run,
            f"{run.controller} names {there['hostname']}, and this is {here['hostname']}",
            f"on {there['hostname']}. If that machine is gone for good, remove {run.controller} and ask again",
        )


def _elsewhere(run: RunFolder, evidence: str, where: str) -> HoldfastError:
    return failure(
        "run-elsewhere",
        f"the processes of {run.run} cannot be ended from here, so nothing was changed",
        exit_code=ExitCode.UNAVAILABLE,
        where=run.run,
        evidence=(evidence,),
        remedy=f"`holdfast cancel --force {run.run}` {where}.",
    )


def _kill(run: RunFolder) -> list[int]:
    """Kill supervisor, controller, agents and ranks; processes that stay."""
    own = os.getpid()
    supervisors = [pid for pid in all_pids() if pid != own and _serves(pid, run)]
    for pid in supervisors:
        send(pid, signal.SIGSTOP)  # so that it starts nothing more, and its tree stays known

    def tree() -> list[int]:
        below = (pid for supervisor in supervisors for pid in descendants(supervisor))
        held = (pid for folder in run.nodes.glob("node*") for pid in memory_limit.processes(folder))
        found = {*below, *held, *marked_below(all_pids(), HOLDFAST_NODE=f"{run.run}/")}
        return [pid for pid in found if pid != own and pid not in supervisors]

    left = end_all(tree, within_s=END_S)
    return left + end_all(lambda: [pid for pid in supervisors if _serves(pid, run)], within_s=END_S)


def _clean_up(run: RunFolder) -> None:
    for folder in run.nodes.glob("node*"):
        sockets.remove(folder)
        memory_limit.clear(folder)
        with contextlib.suppress(OSError):
            (folder / "token").unlink(missing_ok=True)
    with contextlib.suppress(HoldfastError, OSError):
        networks_for(_isolation(run), run.run).remove()
    with contextlib.suppress(OSError):
        run.forget_secrets()
        run.control_socket.unlink(missing_ok=True)


def _isolation(run: RunFolder) -> Isolation:
    """How the run's nodes were kept apart; in the way that leaves most behind, where that cannot be read."""
    try:
        return Accepted.read(run.job).isolation
    except HoldfastError:
        return Isolation.NETNS


def _write_end(run: RunFolder, request: CancelRequested) -> None:
    last = last_event(run.events)
    if isinstance(last, RunFinished):
        return
    at = max(request.at, last.at if last else 0.0)
    code, outcome, why = ExitCode.CANCELLED, Outcome.CANCELLED, "cancelled by force, without its controller"
    events = (
        replace(request, at=at),
        StopDecided(at=at, outcome=outcome, exit_code=code, reason=why),
        RunFinished(at=at, outcome=outcome, exit_code=code, reason=why),
    )
    writer = EventWriter(run.events, reserve_bytes=0)
    writer.append(events, sync=True, ending=True)
    writer.close()


def _serves(pid: int, run: RunFolder) -> bool:
    """Whether a process of this user is the run's supervisor or controller."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
            return False
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    named = next((index for index, word in enumerate(words) if os.fsdecode(word) in _PROGRAMS), None)
    if named is None or words[named - 1] != b"-m" or named + 1 >= len(words):
        return False
    with contextlib.suppress(OSError, ValueError):
        return os.path.samefile(os.fsdecode(words[named + 1]), run.path)
    return False
