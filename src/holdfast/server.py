"""The controller's process: puts the machine, the back end and the port together for one run.

`python -m holdfast.server RUN_FOLDER AGENTS_FD CLIENTS_FD KEEPER_FD [KEYS_FOLDER]`, started by a keeper that holds the
two listening sockets, and to whose pipe it beats. What it answers there is in port.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp

from holdfast.clock import Clock
from holdfast.control.commands import Start
from holdfast.control.controller import Controller
from holdfast.control.copies import LogCopies
from holdfast.control.machine import Machine
from holdfast.control.state import NodeState
from holdfast.control.takeover import emptied, take_over
from holdfast.errors import HoldfastError
from holdfast.events import (
    AnyEvent,
    CodeShipped,
    DrillTarget,
    FindingRaised,
    RunFinished,
    paths,
)
from holdfast.events.log import EventReader, EventWriter, is_whole, last_event
from holdfast.events.orders import (
    StartRanks,
    progress_interval_s,
)
from holdfast.findings import Fault, Finding, Severity
from holdfast.folder import RunFolder
from holdfast.guard.door import Server
from holdfast.guard.keys import Keys
from holdfast.guard.limits import LIMITS
from holdfast.guard.sparing import Sparing
from holdfast.guard.tls import controllers_end, leaves_the_machine, make_identity
from holdfast.host.files import read_line
from holdfast.host.limits import open_more_files, receive_signals
from holdfast.job.accepted import Accepted, Private, damaged_file
from holdfast.job.backend import Backend
from holdfast.job.profile import KUBERNETES
from holdfast.job.silence import Silence
from holdfast.job.spec import Job
from holdfast.launch.code.archive import archive_path
from holdfast.launch.environment import Attempt, Share, checkpoints_folder
from holdfast.launch.launchers import Plan, launches
from holdfast.launch.local.backend import LocalBackend
from holdfast.launch.local.drills import OutsideDrills
from holdfast.launch.local.isolation import Networks, networks_for
from holdfast.launch.local.share import shares
from holdfast.port import Port, listening
from holdfast.quorum.keeping import QuorumKeeper
from holdfast.recall import recall

log = logging.getLogger("holdfast.controller")

GARBAGE_OBJECTS = 100_000
"""New objects after which the interpreter looks for garbage. With its own 700 a controller of 2,048 agents spends a
fifth of a restart on looking through a million objects that live as long as it does."""

BEAT_S = 1.0
"""Seconds between signs of life to the keeper, which takes fifteen without one for an end (launch/keeping.py)."""

LOOK_S = 0.02
"""Seconds between looks for the code that is brought."""


def _tls(folder: RunFolder, host: str) -> ssl.SSLContext | None:
    """TLS where agents come over a network, under the identity that an earlier controller of the run made."""
    if not leaves_the_machine(host):
        return None
    if not folder.identity.exists():
        make_identity(folder.ca, folder.identity)
    return controllers_end(folder.identity)


class MakeBackend(Protocol):
    """Makes a run's back end; nodes of this machine are in `networks`, and find the controller at `url`."""

    def __call__(self, *, folder: RunFolder, accepted: Accepted, networks: Networks, url: str) -> Backend: ...


class _Place(NamedTuple):
    """What is different from one kind of place to another."""

    backend: MakeBackend
    shares: Callable[[Job, Mapping[str, str]], tuple[Share, ...]]
    """What a node may use of its machine."""
    known_as: Callable[[RunFolder, str], str]
    """The name by which nodes reach what listens where the controller does."""
    had_controller: Callable[[str], Awaitable[bool]]
    """Whether a run had a controller before, though nothing of it is in its folder."""


def _place(name: str) -> _Place:
    """The kind of place of this name; imported when it is used."""
    if name == KUBERNETES:
        from holdfast.launch.kubernetes.backend import KubernetesBackend, known_as, own_machines
        from holdfast.launch.kubernetes.succession import had_controller

        def on_cluster(*, folder: RunFolder, accepted: Accepted, **_: object) -> Backend:
            return KubernetesBackend(folder=folder, accepted=accepted)

        return _Place(on_cluster, own_machines, known_as, had_controller)
    return _Place(LocalBackend, shares, _as_bound, _never)


def _as_bound(_folder: RunFolder, host: str) -> str:
    return host


async def _never(_run: str) -> bool:
    return False


def _shipped(accepted: Accepted) -> tuple[CodeShipped, ...]:
    """What the log says of the code right after the run's creation; nothing where ranks run in place."""
    code = accepted.code
    if code is None:
        return ()
    return (CodeShipped(at=accepted.created_at, digest=code.digest, bytes=code.bytes, files=code.files, cwd=code.cwd),)


def _token(folder: RunFolder) -> str:
    """The run's token; raises HoldfastError where its file is not what was written."""
    try:
        return read_line(folder.token)
    except OSError as error:
        raise damaged_file(folder.token, error) from error


async def _until_brought(folder: RunFolder, accepted: Accepted) -> None:
    """Wait for the code: elsewhere than here it is brought while this process starts."""
    while (code := accepted.code) and not archive_path(folder.code, code.digest).is_file():  # noqa: ASYNC110 - a file tells nobody
        await asyncio.sleep(LOOK_S)


def _port_taken(folder: RunFolder) -> tuple[Finding, ...]:
    """What is to be said, once, when an earlier keeper's port could not be had again."""
    found = folder.description()
    if not {"taken_by", "former_port", "port", "host"} <= found.keys():
        return ()
    taken = Finding(
        code="controller-port-taken",
        severity=Severity.WARNING,
        what=f"port {found['former_port']}, where the run's controller was, is taken; it is at {found['port']} now",
        where=f"{found['host']}:{found['former_port']}",
        evidence=(f"{found['taken_by']} has it",),
        remedy="Nothing: agents look up where the controller is before they connect.",
        fault=Fault.CLUSTER,
    )
    told = (event.finding for event in EventReader(folder.events).read() if isinstance(event, FindingRaised))
    return () if taken in told else (taken,)


def _quorum(folder: RunFolder, job: Job, host: str, known_as: str) -> QuorumKeeper | None:
    """What decides which replicas step together, where there are several."""
    recovery = job.recovery
    if recovery.replicas == 1:
        return None
    grace_s = recovery.controller_grace_s
    return QuorumKeeper(folder.path, host=host, known_as=known_as, min_replicas=recovery.min_replicas, grace_s=grace_s)


async def _beat(keeper: int) -> None:
    """Show the keeper, which holds the other end of this pipe, that the controller gets on with its work."""
    os.set_blocking(keeper, False)
    while True:
        with contextlib.suppress(OSError):  # the keeper is gone, or stopped
            os.write(keeper, b".")
        await asyncio.sleep(BEAT_S)


async def _recalled(
    folder: RunFolder,
    accepted: Accepted,
    place: _Place,
    keys: Keys,
    agents: socket.socket,
    listen: Callable[[ASGIApp], Server],
) -> tuple[Finding, ...]:
    """What there is to say of a log that was lost, once nodes were asked for it; nothing of one that was not."""
    if accepted.lasting or folder.events.exists() or not await place.had_controller(folder.run):
        return ()
    created, job = accepted.created(folder.run), accepted.job
    grace_s = job.recovery.node_grace_s
    return (await recall(folder, created, keys, agents, listen, slots=job.node_slots, grace_s=grace_s),)


class _Past(NamedTuple):
    """What a run's log says, and what is to be written into it first."""

    history: Iterable[AnyEvent]
    news: tuple[AnyEvent, ...]
    broken: bool = False
    """Whether nothing can go on from it."""


async def _past(folder: RunFolder, accepted: Accepted, machine: Machine) -> _Past:
    """Where the log stands; before it has begun, the code is waited for."""
    created = accepted.created(folder.run)
    if not is_whole(folder.events):
        taken = take_over(machine, EventReader(folder.events).entries(), created, str(folder.events))
        log.error("%s", taken.finding)
        at = Clock(not_before=max(event.at for event in taken.events))()
        return _Past(taken.events, taken.news(at), broken=taken.broken)
    if folder.events.stat().st_size:
        return _Past(EventReader(folder.events).read(), ())
    if _had_begun(folder, accepted):
        lost = emptied(created, str(folder.events))
        log.error("%s", lost.finding)
        return _Past(lost.events, lost.news(Clock(not_before=created.at)()), broken=True)
    await _until_brought(folder, accepted)
    return _Past((), (created, *_shipped(accepted)))


def _had_begun(folder: RunFolder, accepted: Accepted) -> bool:
    """Whether there were nodes or ranks already, which come after the log's first line."""
    return any(folder.nodes.glob("node*")) or (accepted.lasting and any(folder.logs.glob("*attempt-*")))


def _start_orders(
    accepted: Accepted, folder: RunFolder, keys: Keys, share: tuple[Share, ...], quorum: QuorumKeeper | None
) -> Callable[[Start, tuple[NodeState, ...]], Callable[[int], StartRanks]]:
    """What expands a start among some nodes into what each of them is told."""
    job, private = accepted.job, Private.read(folder.secrets).secrets

    def among(start: Start, members: tuple[NodeState, ...]) -> Callable[[int], StartRanks]:
        attempt = Attempt(
            replica=start.replica,
            replica_count=job.recovery.replicas,
            attempt=start.attempt,
            nodes=tuple(member.node for member in members),
            master_addr=start.master_addr,
            master_port=str(start.master_port),
            doors=tuple(f"{member.address}:{member.port}" for member in members),
            key=keys.of_attempt(start.replica, start.attempt),
            lighthouse=quorum.url if quorum else "",
        )
        first = start.code is None or (accepted.code is not None and accepted.code.digest == start.code.digest)
        running = accepted if first else accepted.model_copy(update={"code": start.code})
        plan = Plan.of(running, folder, attempt, private)

        def of_node(node: int) -> StartRanks:
            env, ranks = launches(plan, node, share[node])
            return StartRanks(
                replica=start.replica,
                attempt=start.attempt,
                ranks=ranks,
                env=env,
                progress_s=progress_interval_s(job.nodes.max),
                step_deadline_s=job.recovery.step_deadline_s,
                exit_deadline_s=job.recovery.exit_deadline_s,
                code=running.code.digest if running.code else "",
                log_max_bytes=job.logs.max_bytes,
            )

        return of_node

    return among


async def serve(
    folder: RunFolder,
    agents: socket.socket,
    clients: socket.socket,
    keeper: int,
    *,
    make_backend: MakeBackend | None = None,
) -> None:
    """Run a folder's job from where its log stands to its end; `keeper` is the pipe that takes our beat.

    `make_backend` stands in for what makes the back end of the run's kind of place.
    """
    if isinstance(last_event(folder.events), RunFinished):
        folder.forget_secrets()
        return
    gc.set_threshold(GARBAGE_OBJECTS)
    beat = asyncio.ensure_future(_beat(keeper))
    accepted = Accepted.read(folder.job)
    job, grace_s = accepted.job, accepted.job.recovery.node_grace_s
    host, number = agents.getsockname()[:2]
    tls = _tls(folder, host)
    place = _place(accepted.backend)
    keys = Keys(_token(folder))
    listen = partial(listening, nodes=job.node_slots, silence=Silence(node_grace_s=grace_s), tls=tls)
    recalled = await _recalled(folder, accepted, place, keys, agents, listen)
    writer = EventWriter(folder.events)
    networks = networks_for(accepted.isolation, folder.run)
    backend = (make_backend or place.backend)(
        folder=folder,
        accepted=accepted,
        networks=networks,
        url=f"{'wss' if tls else 'ws'}://{host}:{number}{paths.AGENT}",
    )
    machine = Machine(job)
    past = await _past(folder, accepted, machine)
    if past.broken:
        await backend.cancel()
        writer.append(past.news, sync=True)
        folder.untold.unlink(missing_ok=True)
        return
    quorum = _quorum(folder, job, host, place.known_as(folder, host))
    keeping = asyncio.ensure_future(quorum.run()) if quorum else None
    show = partial(folder.untold.unlink, missing_ok=True)
    folders = {DrillTarget.RUN_FOLDER: folder.path, DrillTarget.CHECKPOINTS: checkpoints_folder(accepted, folder)}
    drills = OutsideDrills(networks=networks, folders=folders, quorum=lambda: quorum.pid if quorum else 0)
    controller = Controller(
        machine=machine,
        writer=writer,
        history=past.history,
        backend=backend,
        start_orders=_start_orders(accepted, folder, keys, place.shares(job, os.environ), quorum),
        drill=drills,
        attend=quorum.tell if quorum else None,
        copies=None if accepted.lasting else LogCopies(folder.events, keys.of_log, show),
        incarnation=secrets.token_hex(4),
    )
    controller.feed(*past.news)
    controller.tell(*recalled, *_port_taken(folder))
    first_code = accepted.code.digest if accepted.code else ""
    server = listen(Port(controller, keys, folder.code, generation=backend.generation, first_code=first_code))
    serving = asyncio.ensure_future(server.serve(sockets=[agents, clients]))
    if quorum:
        await quorum.known()
    waited = asyncio.get_running_loop().call_later(grace_s, show)
    if not controller.finished:
        await controller.run()
    waited.cancel()
    show()
    if quorum and keeping:
        keeping.cancel()
        await quorum.end()
    drills.clear()
    folder.forget_secrets()
    server.should_exit = True
    await serving
    beat.cancel()
    writer.close()


def main() -> None:
    """Serve the run folder named on the command line, on the sockets and the pipe that were handed down."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    receive_signals()
    open_more_files()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(Sparing(LIMITS.log_lines_a_minute))
    path, *handed_down = sys.argv[1:5]
    agents, clients, keeper = map(int, handed_down)
    folder = RunFolder(Path(path), keys=next(map(Path, sys.argv[5:]), None))
    try:
        asyncio.run(serve(folder, socket.socket(fileno=agents), socket.socket(fileno=clients), keeper))
    except HoldfastError as error:
        for finding in error.findings:
            words = "; ".join(filter(None, (finding.what, *finding.evidence, finding.where, finding.remedy)))
            log.critical("error [%s]: %s", finding.code, words)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
