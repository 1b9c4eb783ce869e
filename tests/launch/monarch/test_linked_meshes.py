"""Agents that Monarch starts on other machines: the real process of a host, here connected by a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import until_async

from holdfast.findings import Finding
from holdfast.host.processes import all_pids, by_env, by_env_prefix, command_line
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.hosts.host_address import ADDRESS
from holdfast.launch.hosts.host_messages import FileChunk, HostReady, RunEnded, ToHost, decode_from_host, encode
from holdfast.launch.hosts.linked_hosts import LinkedHosts
from holdfast.launch.monarch.mesh_tls import CA_NAME, IDENTITY_NAME, MeshAuthority, store, tls_environ
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity

FIRST, SECOND = NodeId(node=0, generation=0), NodeId(node=1, generation=0)
HOSTS = {"one": "127.0.0.11", "two": "127.0.0.12", "three": "127.0.0.13"}
CONTROLLER = "127.0.0.10"
UNKNOWN = ("TLSV1_ALERT_UNKNOWN_CA", "TLSV1_ALERT_DECRYPT_ERROR")
"""How a certificate of another CA is refused: all CAs of runs have the same name."""
ACCEPTED_S = 1.0
"""Time after which a connection that was not refused is taken for accepted."""
DEADLINE_S = 120.0

pytestmark = pytest.mark.slow


class Pipe:
    """The link to a host's process, which is a child of this one."""

    def __init__(self) -> None:
        self.ready: HostReady | None = None
        self.problem = ""
        self.files = Path()
        """The run's folder there."""
        self._input: asyncio.StreamWriter | None = None

    async def run(self, name: str, home: Path, hosts: PipedHosts) -> None:
        self.files = home / "runs" / hosts.run_id
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdfast.launch.hosts.host_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HOLDFAST_HOME": str(home), ADDRESS: HOSTS[name]},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._input = process.stdin
        self.send(hosts.setup(name))
        while line := await process.stdout.readline():
            message = decode_from_host(line)
            data = await process.stdout.readexactly(message.bytes) if isinstance(message, FileChunk) else b""
            if isinstance(message, HostReady):
                self.ready = message
            hosts.receive(name, message, data)
            if isinstance(message, RunEnded):
                self.close()
        await process.wait()

    def send(self, message: ToHost) -> None:
        assert self._input is not None
        self._input.write(encode(message))

    def close(self) -> None:
        if self._input is not None:
            self._input.close()


class PipedHosts(LinkedHosts):
    """Places nodes on hosts that are processes of this machine, each with an address and a folder."""

    def __init__(self, folder: RunDir, accepted: RunSpec) -> None:
        super().__init__(folder, accepted, tuple(HOSTS), monarch_at=(CONTROLLER, 0))
        self._pipes = {name: Pipe() for name in HOSTS}
        self._links.update(self._pipes)

    @property
    def run_id(self) -> str:
        return self._folder.run_id

    def setup(self, name: str) -> ToHost:
        return self._setup(name, CONTROLLER, 1, exclusive=False)  # no controller listens there: agents try again

    def receive(self, name: str, *message: object) -> None:
        self._on_message(name, *message)  # type: ignore[arg-type]

    def _others_compete(self) -> bool:
        return False

    def _connect(self) -> None:
        if not self._running:
            homes = self._folder.path.parent
            self._running = [
                asyncio.ensure_future(pipe.run(name, homes / name, self)) for name, pipe in self._pipes.items()
            ]

    def _may_place(self) -> bool:
        return all(pipe.ready for pipe in self._pipes.values())

    def _address(self, host: str) -> str:
        return ""

    async def _before_cancel(self) -> None:
        await until_async(self._may_place)

    async def _after_cancel(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        await asyncio.wait(self._running)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run's folder; sockets go to a temporary folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        monkeypatch.setenv("TMPDIR", short)
        run = RunDir(tmp_path / f"test-{secrets.token_hex(3)}")  # its processes are found by this name
        run.path.mkdir()
        run.token.write_text("token")
        make_identity(run.ca, run.identity)
        yield run


def hosts_of(folder: RunDir) -> PipedHosts:
    job = Job.model_validate({"command": "true", "nodes": 2, "orchestrator": "monarch"})
    accepted = RunSpec(job=job, base=str(folder.path), created_at=0.0, fabric="tcp")
    folder.job.write_text(accepted.model_dump_json(exclude_defaults=True))
    return PipedHosts(folder, accepted)


def play(folder: RunDir, scene: Callable[[PipedHosts], Awaitable[None]]) -> None:
    """Act a scene, then see to it that nothing is left."""

    async def act() -> None:
        here = hosts_of(folder)
        async with asyncio.timeout(DEADLINE_S):
            try:
                await scene(here)
            finally:
                await here.cancel()

    asyncio.run(act())
    assert by_env_prefix(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/") == []
    assert os.listdir(tempfile.gettempdir()) == []


async def created(here: PipedHosts, count: int) -> dict[NodeId, str]:
    """The machines of the next nodes that are created."""
    found = dict[NodeId, str]()
    async for seen in here.observe():
        assert isinstance(seen, NodeObservation), seen
        assert seen.state is not BackendNodeState.TERMINATED, seen
        if seen.state is BackendNodeState.CREATED:
            found[seen.node_id] = seen.machine
        if len(found) == count:
            break
    return found


async def ended(here: PipedHosts, node_id: NodeId) -> str:
    async for seen in here.observe():
        if isinstance(seen, NodeObservation) and (seen.node_id, seen.state) == (node_id, BackendNodeState.TERMINATED):
            return seen.reason
    raise AssertionError("observations ended")


def of_node(folder: RunDir, node_id: NodeId, part: str) -> int:
    """The process of a node whose command line has this."""
    marked = by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node{node_id.node}.{node_id.generation}")
    (found,) = (pid for pid in marked if part in command_line(pid))
    return found


def ignores_sigterm(pid: int) -> bool:
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(fields["SigIgn"], 16) >> (signal.SIGTERM - 1) & 1)


def test_agents_are_children_of_monarch_on_their_hosts_and_their_ends_are_reported(folder: RunDir) -> None:
    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        machines = await created(here, 2)
        assert len({*machines.values()}) == 2
        for node_id in machines:
            parent = f"PPid:\t{of_node(folder, node_id, 'bootstrap_main')}\n"
            agent = of_node(folder, node_id, "holdfast.agent")
            assert parent in Path(f"/proc/{agent}/status").read_text()
            assert b"HYPERACTOR" not in Path(f"/proc/{agent}/environ").read_bytes()
        for pid in by_env_prefix(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/"):
            assert "BEGIN" not in command_line(pid)
            assert b"BEGIN" not in Path(f"/proc/{pid}/environ").read_bytes()

        os.kill(of_node(folder, FIRST, "holdfast.agent"), signal.SIGKILL)
        assert "its agent" in await ended(here, FIRST)
        os.kill(of_node(folder, SECOND, "bootstrap_main"), signal.SIGKILL)
        assert await ended(here, SECOND) == "its Monarch process has ended"
        assert by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node1.0") == []

        again = NodeId(node=1, generation=1)
        await here.replace_node(again, "a test")
        assert (await created(here, 1)).keys() == {again}
        os.kill(of_node(folder, again, "monarch_host"), signal.SIGKILL)
        assert await ended(here, again) == "its Monarch process has ended"

    play(folder, scene)


def test_monarchs_processes_ignore_the_end_that_slurm_announces_to_the_agent(folder: RunDir) -> None:
    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        await created(here, 2)
        # The agent's start is reported before its program runs.
        await until_async(lambda: not ignores_sigterm(of_node(folder, FIRST, "holdfast.agent")))
        assert ignores_sigterm(of_node(folder, FIRST, "monarch_host"))
        assert ignores_sigterm(of_node(folder, FIRST, "bootstrap_main"))

    play(folder, scene)


def test_host_that_connects_at_the_end_removes_no_node_of_another_that_shares_its_folder(folder: RunDir) -> None:
    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        first = (await created(here, 2))[FIRST]
        here._cancelled = True
        late = HostReady(hostname="", address=HOSTS[first], cpus=1, gpus=0, nodes=((0, 0), (1, 0)))
        here.receive(first, late, b"")
        await until_async(lambda: FIRST not in here._existing())
        assert SECOND in here._existing()
        assert of_node(folder, SECOND, "holdfast.agent")
        assert here._pipes[first].files.exists()  # the other host may need them

    play(folder, scene)


def test_lost_client_ends_all_nodes_and_another_places_the_next(folder: RunDir) -> None:
    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        await created(here, 2)
        (client,) = by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/monarch")
        os.kill(client, signal.SIGKILL)
        lost, over = list[Finding](), dict[NodeId, str]()
        async for seen in here.observe():
            if isinstance(seen, Finding):
                lost.append(seen)
            elif seen.state is BackendNodeState.TERMINATED:
                over[seen.node_id] = seen.reason
            if lost and len(over) == 2:
                break
        assert [each.code for each in lost] == ["orchestrator-lost"]
        assert {*over.values()} == {lost[0].what}
        await here.replace_node(NodeId(node=0, generation=1), "a test")
        await created(here, 1)

    play(folder, scene)


def test_next_controller_finds_the_client_and_the_nodes_of_the_last(folder: RunDir) -> None:
    async def first() -> None:
        here = hosts_of(folder)
        await here.submit((FIRST, SECOND))
        await created(here, 2)
        for pipe in here._pipes.values():
            pipe.close()
        await asyncio.wait(here._running)

    asyncio.run(first())
    (client,) = by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/monarch")
    agents = [of_node(folder, node_id, "holdfast.agent") for node_id in (FIRST, SECOND)]

    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        assert (await created(here, 2)).keys() == {FIRST, SECOND}
        assert by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/monarch") == [client]
        assert [of_node(folder, node_id, "holdfast.agent") for node_id in (FIRST, SECOND)] == agents
        os.kill(agents[0], signal.SIGKILL)
        await ended(here, FIRST)
        again = NodeId(node=0, generation=1)
        await here.replace_node(again, "a test")
        assert (await created(here, 1)).keys() == {again}

    play(folder, scene)


def test_monarch_listens_on_one_port_for_each_process_and_refuses_strangers(folder: RunDir, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    store(stranger, MeshAuthority(stranger).issue(CONTROLLER))

    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        machines = await created(here, 2)
        for address in (CONTROLLER, *(HOSTS[machine] for machine in machines.values())):
            (port,) = ports(address)
            assert await refusal(address, port, folder.mesh / CA_NAME) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
            assert await refusal(address, port, folder.mesh / CA_NAME, stranger / IDENTITY_NAME) in UNKNOWN
            with pytest.raises(TimeoutError):  # accepted: it waits for a message
                await refusal(address, port, folder.mesh / CA_NAME, folder.mesh / IDENTITY_NAME)

    play(folder, scene)


def ports(address: str) -> list[int]:
    """The TCP ports on which processes listen at an address."""
    packed = socket.inet_aton(address)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].partition(":")[2], 16) for row in rows if row[1].startswith(packed) and row[3] == "0A"]


async def refusal(address: str, port: int, ca: Path, identity: Path | None = None) -> str:
    """Why a listener of the run ends a connection; raises TimeoutError if it does not."""
    context = ssl.create_default_context(cafile=ca)
    if identity is not None:
        context.load_cert_chain(identity)
    reader, writer = await asyncio.open_connection(address, port, ssl=context)
    try:
        async with asyncio.timeout(ACCEPTED_S):
            await reader.read()
    except ssl.SSLError as error:
        return error.reason
    finally:
        writer.close()
    return "closed"


def test_host_process_without_a_controller_ends_some_time_after_its_agent(folder: RunDir) -> None:
    own = folder.nodes / "monarch0.0"
    own.mkdir(parents=True)
    store(own, MeshAuthority(folder.mesh).issue(HOSTS["one"]))
    program = (
        "import sys; from holdfast.launch.monarch import monarch_host as host; from holdfast.run_dir import RunDir\n"
        "host.POLL_S = host.ALONE_S = 0.2\n"
        f"host._main(RunDir(host.Path({str(folder.path)!r})), host.NodeId(node=0, generation=0), '127.0.0.11', 0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **tls_environ(own)}, stdout=subprocess.PIPE, check=True
    )
    assert ended.stdout.startswith(b"tls://127.0.0.11:")
    assert list(own.glob("*.pem")) == []


def test_files_with_keys_are_private_and_gone_with_their_nodes(folder: RunDir) -> None:
    async def scene(here: PipedHosts) -> None:
        await here.submit((FIRST, SECOND))
        await created(here, 2)
        keys = [*folder.path.parent.rglob("*.pem")]
        assert len([path for path in keys if path.name == "identity.pem"]) == 4  # controller, client, and two nodes
        assert all(path.stat().st_mode & 0o77 == 0 for path in keys if b"PRIVATE KEY" in path.read_bytes())

    play(folder, scene)
    folder.delete_secrets()
    assert [path for path in folder.path.parent.rglob("*.pem") if b"PRIVATE KEY" in path.read_bytes()] == []
    assert json.loads(folder.job.read_text())
