"""The controller process: connects the state machine, the backend and the port of one run.

`python -m holdfast.controller_main RUN_FOLDER AGENTS_FD CLIENTS_FD SUPERVISOR_FD [SECRETS_FOLDER]`, started by a
supervisor that holds the two listening sockets and reads heartbeats from the pipe; or `--wait SOCKET_FD`, and the rest
comes when its run is known. controller_api.py answers requests.
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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import ASGIApp

from holdfast.clock import Clock
from holdfast.control.commands import StartAttempt
from holdfast.control.controller import Controller
from holdfast.control.log_recovery import empty_log, recover_log
from holdfast.control.log_replication import LogReplicator
from holdfast.control.machine import Machine
from holdfast.control.protocol_mismatch import AgentProtocols
from holdfast.control.state import NodeState
from holdfast.control.trace_store import TraceStore
from holdfast.controller_api import LOOPBACK, ControllerApi, make_server
from holdfast.errors import ExitCode, HoldfastError
from holdfast.events import AnyEvent, CodeShipped, FaultTarget, FindingRaised, RunFinished
from holdfast.events.log import EventReader, UnsupportedFormat, is_intact, last_event
from holdfast.events.log_writer import EventWriter
from holdfast.fabric.catalog import CATALOG
from holdfast.findings import Finding, Owner, Severity
from holdfast.host.files import read_line
from holdfast.host.process_limits import open_more_files, receive_signals
from holdfast.job.heartbeat_timeouts import HeartbeatTimeouts
from holdfast.job.launcher_catalog import runs_python
from holdfast.job.run_spec import RunSecrets, RunSpec, corrupt_file_error
from holdfast.job.spec import Job, Launch
from holdfast.launch.code.archive import archive_path
from holdfast.launch.launch_plan import LaunchPlan, rank_launches
from holdfast.launch.local.controller_faults import ControllerFaults
from holdfast.launch.local.run_network import run_network_for
from holdfast.launch.node_requirements import node_requirements
from holdfast.launch.rank_env import Attempt, NodeResources, checkpoint_dir, promised_interfaces, wants_nccl_logs
from holdfast.launch.target import ControllerHooks, MakeBackend, open_target
from holdfast.launch.waiting_controller import WAIT, await_run
from holdfast.lighthouse.lighthouse_supervisor import LighthouseSupervisor
from holdfast.log_restore import restore_log
from holdfast.observe.live_readings import LiveReadings, LogLag
from holdfast.observe.metrics_endpoint import MetricsEndpoint
from holdfast.protocol import routes
from holdfast.protocol.orders import CheckNode, ProbeNode, StartRanks, progress_interval_s
from holdfast.protocol.watch_levels import WatchLevel
from holdfast.report.log_problems import unsupported_format
from holdfast.run_dir import RunDir
from holdfast.security.admission import AdmissionServer
from holdfast.security.api_limits import LIMITS
from holdfast.security.log_rate_limit import LogRateLimit
from holdfast.security.tls import is_remote, make_identity, server_context
from holdfast.security.tokens import TokenIssuer

if TYPE_CHECKING:
    from holdfast.observe.notifier import Notifier

log = logging.getLogger("holdfast.controller")

GC_THRESHOLD = 100_000
"""Objects allocated between two garbage collections.

With Python's default of 700 a controller of 2,048 agents spends a fifth of a restart on scanning a million objects that
live as long as it does.
"""

HEARTBEAT_S = 1.0
"""Seconds between heartbeats; the supervisor restarts the controller after 15 s without one
(launch/controller_supervisor.py).
"""

NOTIFY_AT_END_S = 20.0
"""Seconds for which the end of a run waits for messages that are not sent yet."""

CODE_POLL_S = 0.02
"""Seconds between polls for the code that is uploaded."""


def _tls(folder: RunDir, host: str, *, others_may_listen: bool) -> ssl.SSLContext | None:
    """The TLS context if agents must verify the controller, with the certificate of the run's first one."""
    if not is_remote(host) and not others_may_listen:
        return None
    if not folder.identity.exists():
        make_identity(folder.ca, folder.identity)
    return server_context(folder.identity)


def _code_shipped(accepted: RunSpec) -> tuple[CodeShipped, ...]:
    """The code event after the run's creation; nothing if ranks run code in place."""
    code = accepted.code
    if code is None:
        return ()
    return (CodeShipped(at=accepted.created_at, digest=code.digest, bytes=code.bytes, files=code.files, cwd=code.cwd),)


def _token(folder: RunDir) -> str:
    """The run's token; raises HoldfastError if its file is corrupt."""
    try:
        return read_line(folder.token)
    except OSError as error:
        raise corrupt_file_error(folder.token, error) from error


async def _wait_for_code(folder: RunDir, accepted: RunSpec) -> None:
    """Wait for the code: on a cluster it is uploaded while this process starts."""
    while (code := accepted.code) and not archive_path(folder.code, code.digest).is_file():  # noqa: ASYNC110 - a file has no event to await
        await asyncio.sleep(CODE_POLL_S)


def _port_taken_findings(folder: RunDir) -> tuple[Finding, ...]:
    """The one-time finding if an earlier supervisor's port was not available again."""
    found = folder.read_controller_record()
    if not {"taken_by", "former_port", "port", "host"} <= found.keys():
        return ()
    taken = Finding(
        code="controller-port-in-use",
        severity=Severity.WARNING,
        what=f"port {found['former_port']}, where the run's controller was, is taken; it is at {found['port']} now",
        where=f"{found['host']}:{found['former_port']}",
        evidence=(f"{found['taken_by']} has it",),
        remedy="Nothing: agents look up where the controller is before they connect.",
        owner=Owner.CLUSTER,
    )
    logged = (event.finding for event in EventReader(folder.events).read() if isinstance(event, FindingRaised))
    return () if taken in logged else (taken,)


def _lighthouse(folder: RunDir, job: Job, host: str, known_as: str) -> LighthouseSupervisor | None:
    """The service that forms the quorum for each step, if there are several replicas."""
    recovery = job.recovery
    if recovery.replicas == 1:
        return None
    grace_s = recovery.controller_grace_s
    return LighthouseSupervisor(
        folder.path, host=host, public_host=known_as, min_replicas=recovery.min_replicas, grace_s=grace_s
    )


def _notifier(folder: RunDir, accepted: RunSpec, controller: Controller) -> Notifier | None:
    """What sends messages about the run, if its target names receivers."""
    if not accepted.notify:
        return None
    from holdfast.observe.notifier import Notifier  # its HTTP client takes 0.1 s to import

    secrets = RunSecrets.read(folder.secrets).notify
    return Notifier(folder.run_id, folder.events, folder.notified, accepted.notify, secrets, controller.report)


async def _send_heartbeats(heartbeat_fd: int) -> None:
    """Send heartbeats to the supervisor, which reads the other end of this pipe."""
    os.set_blocking(heartbeat_fd, False)
    while True:
        with contextlib.suppress(OSError):  # the supervisor is gone, or stopped
            os.write(heartbeat_fd, b".")
        await asyncio.sleep(HEARTBEAT_S)


async def _restore_log(
    folder: RunDir,
    accepted: RunSpec,
    hooks: ControllerHooks,
    keys: TokenIssuer,
    agents: socket.socket,
    server_factory: Callable[[ASGIApp], AdmissionServer],
) -> tuple[Finding, ...]:
    """Restore a lost log from its nodes; returns the findings, or nothing if the log was not lost."""
    if accepted.durable_controller_disk or folder.events.exists() or not await hooks.had_controller(folder.run_id):
        return ()
    created, job = accepted.created_event(folder.run_id), accepted.job
    grace_s = job.recovery.node_grace_s
    return (await restore_log(folder, created, keys, agents, server_factory, slots=job.node_slots, grace_s=grace_s),)


class _LogState(NamedTuple):
    """A run's log, and the events to write into it first."""

    history: Iterable[AnyEvent]
    events_to_write: tuple[AnyEvent, ...]
    is_fatal: bool = False
    """Whether the run cannot resume from it."""


async def _read_log(folder: RunDir, accepted: RunSpec, machine: Machine) -> _LogState:
    """Read the log; if it has not begun, wait for the code first."""
    created = accepted.created_event(folder.run_id)
    if not is_intact(folder.events):
        taken = recover_log(machine, EventReader(folder.events).entries(), created, str(folder.events))
        log.error("%s", taken.finding)
        at = Clock(not_before=max(event.at for event in taken.events))()
        return _LogState(taken.events, taken.events_to_write(at), is_fatal=taken.is_fatal)
    if folder.events.stat().st_size:
        return _LogState(EventReader(folder.events).read(), ())
    if _had_started(folder, accepted):
        lost = empty_log(created, str(folder.events))
        log.error("%s", lost.finding)
        return _LogState(lost.events, lost.events_to_write(Clock(not_before=created.at)()), is_fatal=True)
    await _wait_for_code(folder, accepted)
    return _LogState((), (created, *_code_shipped(accepted)))


def _had_started(folder: RunDir, accepted: RunSpec) -> bool:
    """Whether there were nodes or ranks already, which come after the log's first line."""
    return any(folder.nodes.glob("node*")) or (accepted.durable_controller_disk and any(folder.logs.glob("*attempt-*")))


def _start_order_factory(
    accepted: RunSpec,
    folder: RunDir,
    private: Mapping[str, str],
    keys: TokenIssuer,
    share: tuple[NodeResources, ...],
    lighthouse: LighthouseSupervisor | None,
    relays_quorum: bool = False,
) -> Callable[[StartAttempt, tuple[NodeState, ...]], Callable[[int], StartRanks]]:
    """Returns what expands a start among some nodes into each node's start order.

    `folder` is the run's as nodes see it; `private` are the job's secrets.
    """
    job = accepted.job
    nccl_logs, interfaces = wants_nccl_logs(job, CATALOG[accepted.fabric]), promised_interfaces(accepted)

    def among(start: StartAttempt, members: tuple[NodeState, ...]) -> Callable[[int], StartRanks]:
        attempt = Attempt(
            replica=start.replica,
            replica_count=job.recovery.replicas,
            attempt=start.attempt,
            nodes=tuple(member.node for member in members),
            master_addr=start.master_addr,
            master_port=str(start.master_port),
            endpoints=tuple(f"{member.address}:{member.port}" for member in members),
            shared_secret=keys.attempt_key(start.replica, start.attempt),
            lighthouse=lighthouse.url if lighthouse else "",
            checkpoints_back=start.checkpoints_back,
        )
        first = start.code is None or (accepted.code is not None and accepted.code.digest == start.code.digest)
        running = accepted if first else accepted.model_copy(update={"code": start.code})
        plan = LaunchPlan.of(running, folder, attempt, private)

        def of_node(node: int) -> StartRanks:
            env, ranks = rank_launches(plan, node, share[node])
            return StartRanks(
                replica=start.replica,
                attempt=start.attempt,
                ranks=ranks,
                env=env,
                progress_interval_s=progress_interval_s(job.nodes.max),
                step_timeout_s=job.recovery.step_timeout_s,
                replica_count=job.recovery.replicas,
                exit_timeout_s=job.recovery.exit_timeout_s,
                code_digest=running.code.digest if running.code else "",
                log_max_bytes=job.logs.max_bytes,
                fabric=accepted.fabric,
                nccl_logs=nccl_logs,
                secret_names=tuple(sorted(job.secrets)),
                interfaces=interfaces,
                watch_devices=job.watch.device_faults is not WatchLevel.OFF,
                relays_quorum=lighthouse is not None and relays_quorum,
            )

        return of_node

    return among


def _probe_order_factory(
    accepted: RunSpec,
    folder: RunDir,
    private: Mapping[str, str],
    keys: TokenIssuer,
    share: tuple[NodeResources, ...],
) -> Callable[[StartAttempt, tuple[NodeState, ...], int], Callable[[int], ProbeNode]]:
    """Returns what expands a numbered probe among some nodes into each node's order: it has the places of ranks."""
    job = accepted.job.model_copy(update={"launch": Launch.PER_RANK})
    start_orders = _start_order_factory(
        accepted.model_copy(update={"job": job, "code": None}), folder, private, keys, share, lighthouse=None
    )

    def among(start: StartAttempt, members: tuple[NodeState, ...], number: int) -> Callable[[int], ProbeNode]:
        starts = start_orders(start, members)
        return lambda node: ProbeNode(
            replica=start.replica,
            number=number,
            start=starts(node),
            wanted=node_requirements(accepted, folder),
            nodes=start.nodes,
            deadline_s=job.checks.probe_deadline_s,
            python=job.command[0] if runs_python(job) else "",
        )

    return among


def _order_nodes(job: Job, switches: Mapping[str, str]) -> tuple[str, ...]:
    from holdfast.plan.topology_file import order_by_switches  # only Slurm's allocations need it

    return order_by_switches(job, switches)


async def serve(
    folder: RunDir,
    agents: socket.socket,
    clients: socket.socket,
    heartbeat_fd: int,
    *,
    make_backend: MakeBackend | None = None,
) -> None:
    """Run a folder's job from the state of its log to its end; `heartbeat_fd` is the supervisor's pipe.

    `make_backend` replaces the factory of the run's backend.
    """
    if isinstance(last_event(folder.events), RunFinished):
        folder.delete_secrets()
        return
    gc.set_threshold(GC_THRESHOLD)
    heartbeats = asyncio.ensure_future(_send_heartbeats(heartbeat_fd))
    accepted = RunSpec.read(folder.job)
    job, grace_s = accepted.job, accepted.job.recovery.node_grace_s
    host, number = agents.getsockname()[:2]
    hooks = open_target(accepted.target_kind, where=folder.job).controller_hooks()
    tls = _tls(folder, host, others_may_listen=hooks.others_may_listen)
    node_folder = hooks.node_folder(folder, accepted)
    keys = TokenIssuer(_token(folder))
    server_factory = partial(
        make_server, nodes=job.node_slots, silence=HeartbeatTimeouts(node_grace_s=grace_s), tls=tls
    )
    restored = await _restore_log(folder, accepted, hooks, keys, agents, server_factory)
    writer = EventWriter(folder.events)
    networks = run_network_for(accepted.isolation, folder.run_id)
    backend = (make_backend or hooks.backend)(
        folder=folder,
        accepted=accepted,
        networks=networks,
        url=f"{'wss' if tls else 'ws'}://{host}:{number}{routes.AGENT_SOCKET}",
        order_nodes=_order_nodes,
    )
    machine = Machine(job)
    log_state = await _read_log(folder, accepted, machine)
    protocols = AgentProtocols()
    if log_state.is_fatal:
        await backend.cancel()
        writer.append(log_state.events_to_write, sync=True)
        folder.log_unreplicated.unlink(missing_ok=True)
        return
    service_host = LOOPBACK if hooks.relays_quorum else host
    lighthouse = _lighthouse(folder, job, service_host, hooks.controller_host(folder, service_host))
    lighthouse_task = asyncio.ensure_future(lighthouse.run()) if lighthouse else None
    show = partial(folder.log_unreplicated.unlink, missing_ok=True)
    folders = {FaultTarget.RUN_DIR: folder.path, FaultTarget.CHECKPOINTS: checkpoint_dir(accepted, folder)}
    drills = ControllerFaults(
        networks=networks, folders=folders, lighthouse_pid=lambda: lighthouse.pid if lighthouse else 0
    )
    resources = hooks.node_resources(accepted, os.environ)
    private = RunSecrets.read(folder.secrets).secrets
    is_durable = accepted.durable_controller_disk
    log_replicator = None if is_durable else LogReplicator(folder.events, keys.log_signature, show)
    controller = Controller(
        machine=machine,
        writer=writer,
        history=protocols.note(log_state.history),
        backend=backend,
        start_orders=_start_order_factory(
            accepted, node_folder, private, keys, resources, lighthouse, hooks.relays_quorum
        ),
        inject_fault=drills,
        check_order=CheckNode(wanted=node_requirements(accepted, node_folder), deadline_s=job.checks.quick_deadline_s),
        probe_orders=_probe_order_factory(accepted, node_folder, private, keys, resources),
        on_rendezvous=lighthouse.publish_liveness if lighthouse else None,
        log_replicator=log_replicator,
        incarnation=secrets.token_hex(4),
    )
    protocols.refuse_unspoken()
    controller.handle(*log_state.events_to_write)
    controller.report(*restored, *_port_taken_findings(folder))
    first_code = accepted.code.digest if accepted.code else ""
    notifier = _notifier(folder, accepted, controller)
    notifying = asyncio.ensure_future(notifier.run()) if notifier else None
    server = server_factory(
        ControllerApi(
            controller,
            keys,
            folder.code,
            metrics=MetricsEndpoint(
                lambda: {folder.run_id: folder.events}, partial(_live_readings, controller, log_replicator)
            ),
            traces=TraceStore(folder.traces),
            generation=backend.generation,
            first_code=first_code,
            quorum_port=(lambda: lighthouse.port) if lighthouse and hooks.relays_quorum else None,
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[agents, clients]))
    if lighthouse:
        await lighthouse.wait_address()
    waited = asyncio.get_running_loop().call_later(grace_s, show)
    if not controller.finished:
        await controller.run()
    waited.cancel()
    show()
    if lighthouse and lighthouse_task:
        lighthouse_task.cancel()
        await lighthouse.stop()
    drills.clear()
    if notifier and notifying:
        notifier.stop()
        await asyncio.wait([notifying], timeout=NOTIFY_AT_END_S)
    folder.delete_secrets()
    server.should_exit = True
    await serving
    heartbeats.cancel()
    writer.close()


def _live_readings(controller: Controller, replicator: LogReplicator | None) -> LiveReadings:
    """What a scrape shows in addition to the log."""
    unsent_s = None if replicator is None else replicator.unsent_s
    lag = LogLag(unwritten_s=controller.unwritten_s(), unreplicated_s=unsent_s)
    return LiveReadings(log_lag=lag, nodes=controller.node_readings.read())


def main() -> None:
    """Run the controller for the folder on the command line, on the inherited sockets and pipe."""
    words = await_run(int(sys.argv[2])) if sys.argv[1] == WAIT else sys.argv[1:]
    (path, *descriptors), secrets_dir = words[:4], words[4:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    receive_signals()
    open_more_files()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRateLimit(LIMITS.log_lines_a_minute))
    agents, clients, heartbeat_fd = map(int, descriptors)
    folder = RunDir(Path(path), secrets_dir=next(map(Path, secrets_dir), None))
    try:
        try:
            asyncio.run(serve(folder, socket.socket(fileno=agents), socket.socket(fileno=clients), heartbeat_fd))
        except UnsupportedFormat as error:
            raise HoldfastError((unsupported_format(error),), ExitCode.CANNOT_RUN_HERE) from error
    except HoldfastError as error:
        for finding in error.findings:
            words = "; ".join(filter(None, (finding.what, *finding.evidence, finding.where, finding.remedy)))
            log.critical("error [%s]: %s", finding.code, words)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
