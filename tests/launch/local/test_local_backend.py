"""Local nodes as processes: how the end of an agent is reported, and that nothing of a node is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import until_async

from holdfast.findings import Finding, Owner
from holdfast.host.files import atomic_write
from holdfast.host.processes import HELPER, adopt_orphans, all_pids, by_env, identify, send_signal, wait_for_end
from holdfast.job.backend import BackendNodeState, NodeId, NodeObservation
from holdfast.job.quarantine import Certainty, MachineEvidence, release
from holdfast.job.run_spec import RunSpec
from holdfast.job.spec import Job
from holdfast.launch.local import memory_limit, socket_dir
from holdfast.launch.local.local_backend import LocalBackend
from holdfast.launch.local.run_network import RunNetwork, SharedNetwork
from holdfast.launch.quarantine_file import QuarantineFile
from holdfast.run_dir import RunDir

NODE_ID = NodeId(node=0, generation=0)
DEADLINE_S = 200.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """A run's folder; sockets go to a temporary folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        run = RunDir(tmp_path / f"test-{secrets.token_hex(3)}")  # its processes are found by this name
        run.path.mkdir()
        run.token.write_text("token")
        yield run


def backend(
    folder: RunDir, nodes: int = 1, capacity: int | None = None, networks: RunNetwork | None = None
) -> LocalBackend:
    job = Job.model_validate({"command": "true", "nodes": nodes})
    accepted = RunSpec(job=job, base=str(folder.path), created_at=0.0, fabric="tcp", capacity=capacity)
    # Nobody listens there: the agent tries again and again.
    kept_apart = networks or SharedNetwork()
    return LocalBackend(folder=folder, accepted=accepted, networks=kept_apart, url="ws://127.0.0.1:1/v1/agent")


def play(folder: RunDir, scene: Callable[[LocalBackend], Awaitable[None]]) -> None:
    """Act a scene, then see to it that nothing of the node is left."""

    async def act() -> None:
        here = backend(folder)
        async with asyncio.timeout(DEADLINE_S):
            try:
                await scene(here)
            finally:
                await here.cancel()

    asyncio.run(act())
    assert agents(folder) == []
    assert os.listdir(tempfile.gettempdir()) == []


def agents(folder: RunDir) -> list[int]:
    return by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node0.0")


async def at_work(folder: RunDir) -> None:
    """Wait until the agent looks for its controller, of which its log speaks."""
    await until_async(lambda: bool((folder.node_dir(0, 0) / "agent.log").read_text()))


def start_another_process() -> None:
    """Which is when subprocess takes in the ends of all whose objects were dropped."""
    subprocess.run(["true"], check=True)


async def end(here: LocalBackend, folder: RunDir, number: int) -> NodeObservation:
    """Send the agent a signal, and what is observed then."""
    (agent,) = agents(folder)
    os.kill(agent, number)
    return await sight(here, BackendNodeState.TERMINATED)


async def sight(here: LocalBackend, sight: BackendNodeState) -> NodeObservation:
    """The next observation of a kind."""
    return await anext(seen async for seen in here.observe() if seen.state is sight)


@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGKILL, "ended by SIGKILL"), (signal.SIGRTMIN + 5, f"ended by signal {signal.SIGRTMIN + 5}")],
)
def test_signal_that_ended_an_agent_told_even_when_other_processes_were_started_since(
    folder: RunDir, number: int, told: str
) -> None:
    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        start_another_process()
        seen = await end(here, folder, number)
        assert (seen.node_id, seen.reason) == (NODE_ID, f"its agent was {told}")

    play(folder, scene)


def test_agent_of_an_earlier_controller_that_is_gone_told_at_once_without_a_descriptor_left(folder: RunDir) -> None:
    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        await end(here, folder, signal.SIGKILL)
        before = len(os.listdir("/proc/self/fd"))
        seen = await anext(backend(folder).observe())
        assert seen.reason == "its agent ended"
        assert len(os.listdir("/proc/self/fd")) <= before  # what others have dropped may be closed meanwhile

    play(folder, scene)


@pytest.mark.parametrize("record", [None, "", '{"pid": 1', "{}", "[]"])
def test_agent_without_a_whole_record_is_swept_with_its_sockets(folder: RunDir, record: str | None) -> None:
    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        await at_work(folder)
        written = folder.node_dir(0, 0) / "agent.json"
        if record is None:
            written.unlink()
        else:
            written.write_text(record)
        assert len(agents(folder)) == 1

    play(folder, scene)


def test_what_a_dead_agent_left_with_an_emptied_environment_ends_with_its_node(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no cgroup to tell: the run's supervisor, here this process, has adopted it."""
    adopt_orphans()
    monkeypatch.setattr(os, "getppid", os.getpid)
    helper, stray = (
        int(subprocess.check_output(["sh", "-c", "setsid sleep 600 >&2 & echo $!"], env=os.environ | env))
        for env in ({HELPER: "1"}, {})
    )

    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        await at_work(folder)
        (agent,) = agents(folder)
        send_signal(agent, signal.SIGKILL)
        wait_for_end([agent], time.monotonic() + DEADLINE_S)
        atomic_write(folder.controller_record, json.dumps({"supervisor_pid": os.getpid()}).encode())
        await here.replace_node(NodeId(node=0, generation=1), "lost")
        assert (identify(stray) is None, identify(helper) is None) == (True, False)

    try:
        play(folder, scene)
    finally:
        for pid in (helper, stray):
            send_signal(pid, signal.SIGKILL)


def test_note_of_a_group_that_is_not_holdfasts_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cgroup.procs").write_text(f"{os.getpid()}")
    (tmp_path / "group").write_text(str(tmp_path / "mine"))
    assert memory_limit.processes(tmp_path) == []


def test_agent_that_was_not_written_down_is_replaced(folder: RunDir) -> None:
    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        await at_work(folder)
        before = agents(folder)
        (folder.node_dir(0, 0) / "agent.json").unlink()
        successor = backend(folder)
        await successor.submit((NODE_ID,))
        assert len(agents(folder)) == 1
        assert agents(folder) != before
        await successor.cancel()

    play(folder, scene)


@pytest.mark.parametrize("written", ["nothing", "another"])
def test_agent_whose_controller_died_before_writing_it_down_joins_nobody(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    def die(record: Path, _content: bytes) -> None:
        if written == "another":
            record.write_text(json.dumps({"pid": os.getpid(), "started": 0}))
        raise SystemExit

    async def scene(here: LocalBackend) -> None:
        monkeypatch.setattr("holdfast.launch.local.node_processes.atomic_write", die)
        with pytest.raises(SystemExit):
            await here.submit((NODE_ID,))
        await until_async(lambda: not agents(folder))
        (line,) = (folder.node_dir(0, 0) / "agent.log").read_text().splitlines()
        assert "died before it recorded this agent" in line

    play(folder, scene)


def test_replaced_generations_are_never_looked_at_again(folder: RunDir) -> None:
    async def scene(here: LocalBackend) -> None:
        await here.submit((NODE_ID,))
        for generation in (1, 2):
            await here.replace_node(NodeId(node=0, generation=generation), "test")
        seen = await anext(backend(folder).observe())
        assert (seen.node_id.generation, seen.state) == (2, BackendNodeState.CREATED)
        tokens = [folder.node_dir(0, generation) / "token" for generation in range(3)]
        assert [token.exists() for token in tokens] == [False, False, True]

    play(folder, scene)


class SlowNetwork(SharedNetwork):
    """Takes as long to remove a node as the loop takes to do something else."""

    def __init__(self) -> None:
        self.removing = asyncio.Event()
        self.go_on = threading.Event()
        self.went_on: list[bool] = []
        self._loop = asyncio.get_running_loop()

    def remove_node(self, node: int) -> None:
        self._loop.call_soon_threadsafe(self.removing.set)
        self.went_on.append(self.go_on.wait(60))


def test_node_that_is_removed_slowly_holds_up_nobody_and_is_gone_before_its_next_one_is_made(folder: RunDir) -> None:
    async def scene(_: LocalBackend) -> None:
        slow = SlowNetwork()
        here = backend(folder, networks=slow)
        await here.submit((NODE_ID,))
        replacements = [
            asyncio.ensure_future(here.replace_node(NodeId(node=0, generation=generation), "test"))
            for generation in (1, 2)
        ]
        await slow.removing.wait()
        assert not (folder.node_dir(0, 1) / "agent.json").exists()
        slow.go_on.set()
        await asyncio.gather(*replacements)
        left = by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node0.1")
        assert (left, agents(folder)) == ([], [])
        assert len(by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node0.2")) == 1
        await here.cancel()
        assert all(slow.went_on)

    play(folder, scene)


def test_node_asked_for_when_all_were_removed_is_not_made(folder: RunDir) -> None:
    async def scene(_: LocalBackend) -> None:
        slow = SlowNetwork()
        here = backend(folder, networks=slow)
        await here.submit((NODE_ID,))
        ending = asyncio.ensure_future(here.cancel())
        await slow.removing.wait()
        late = asyncio.ensure_future(here.replace_node(NodeId(node=0, generation=1), "test"))
        slow.go_on.set()
        await asyncio.gather(ending, late)
        assert by_env(all_pids(), HOLDFAST_NODE=f"{folder.run_id}/node0.1") == []

    play(folder, scene)


def test_node_without_a_machine_told_and_made_when_one_is_of_use_again(folder: RunDir) -> None:
    node_ids = [NodeId(node=node, generation=0) for node in range(3)]

    async def scene(_: LocalBackend) -> None:
        here = backend(folder, nodes=3, capacity=2)
        try:
            await here.submit(tuple(node_ids))
            seen = here.observe()
            assert [(await anext(seen)).state for _ in node_ids] == [
                BackendNodeState.CREATED,
                BackendNodeState.CREATED,
                BackendNodeState.UNAVAILABLE,
            ]
            await here.cordon(node_ids[0])
            os.kill(agents(folder)[0], signal.SIGKILL)
            assert (await anext(seen)).state is BackendNodeState.TERMINATED
            lost = NodeId(node=0, generation=1)
            await here.replace_node(lost, "lost")
            told = await anext(seen)
            assert (told.node_id, told.state) == (lost, BackendNodeState.UNAVAILABLE)
            assert "2 machines for nodes here, 1 of them out of use" in told.reason
            await here.uncordon(node_ids[0])
            there = NodeObservation(node_id=lost, state=BackendNodeState.CREATED, machine="machine0")
            assert await anext(seen) == there
        finally:
            await here.cancel()

    play(folder, scene)


GPU_FAILED = MachineEvidence(
    certainty=Certainty.CERTAIN, finding=Finding(code="gpu-failed", what="its GPU failed", owner=Owner.CLUSTER)
)


def test_replacement_and_later_runs_avoid_a_quarantined_machine_until_it_is_released(
    folder: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    first, second = NodeId(node=0, generation=0), NodeId(node=0, generation=1)

    async def machine_of(here: LocalBackend, node_id: NodeId) -> str:
        return await anext(seen.machine async for seen in here.observe() if seen.node_id == node_id)

    async def scene(_: LocalBackend) -> None:
        here = backend(folder, capacity=3)
        await here.submit((first,))
        assert await machine_of(here, first) == "machine0"
        (told,) = await here.avoid_machine(first, "machine0", GPU_FAILED)
        assert (told.code, told.where) == ("machine-quarantined", "machine0")
        (full,) = await here.avoid_machine(first, "machine1", GPU_FAILED)
        assert full.code == "quarantine-full"
        await here.replace_node(second, "its GPU failed")
        assert await machine_of(here, second) == "machine2", "machine1 is avoided by this run alone"
        await here.cancel()
        (row,) = QuarantineFile("local").read()[0].rows
        assert (row.machine, row.run, row.code) == ("machine0", folder.run_id, "gpu-failed")
        for machine in ("machine1", "machine0"):
            later = RunDir(tmp_path / f"later-{secrets.token_hex(3)}")
            later.path.mkdir()
            later.token.write_text("token")
            there = backend(later, capacity=3)
            await there.submit((first,))
            assert await machine_of(there, first) == machine
            await there.cancel()
            QuarantineFile("local").change(lambda known: release(known, "machine0", time.time()) or known)

    play(folder, scene)


def test_only_machine_is_neither_avoided_nor_quarantined(
    folder: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    for capacity, machine in ((None, ""), (1, "machine0")):
        here = backend(folder, capacity=capacity)
        (told,) = asyncio.run(here.avoid_machine(NODE_ID, machine, GPU_FAILED))
        assert told.code == "machine-not-avoided"
        assert asyncio.run(here.avoid_machine(NODE_ID, machine, None)) == ()
        assert QuarantineFile("local").read()[0].rows == ()


def sockets_of(folder: RunDir, node_id: NodeId = NODE_ID) -> Path:
    """Where the sockets of a node's ranks lie."""
    return sockets_link(folder.node_dir(node_id.node, node_id.generation))


def test_sockets_folder_is_private_has_no_name_that_can_be_guessed_and_is_found_by_a_later_controller(
    folder: RunDir,
) -> None:
    async def scene(here: LocalBackend) -> None:
        # The name that every node of this run would have had: made by somebody who wants the run to fail.
        guessed = Path(tempfile.gettempdir(), f"holdfast-{folder.run_id.removeprefix('test-')}-0.0")
        guessed.mkdir(mode=0o755)
        await here.submit((NODE_ID,))
        await at_work(folder)
        made = sockets_of(folder)
        assert made.parent == Path(tempfile.gettempdir())
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert not any(word in made.name for word in folder.run_id.split("-"))
        await backend(folder).replace_node(NodeId(node=0, generation=1), "test")
        assert not made.exists()
        assert sockets_of(folder, NodeId(node=0, generation=1)) != made
        await backend(folder).cancel()
        guessed.rmdir()

    play(folder, scene)


def test_sockets_folder_is_in_the_users_runtime_folder_where_that_is_private_and_outlives_a_logout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        runtime = Path(short, "run")
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        assert socket_dir.create(tmp_path).parent == runtime
        runtime.chmod(0o755)
        assert socket_dir.create(tmp_path).parent == Path(short)
        monkeypatch.setattr(socket_dir, "_RUNTIME_DIRS", Path(short))
        runtime.chmod(0o700)
        assert socket_dir.create(tmp_path).parent == Path(short)
        socket_dir.remove(tmp_path)
        assert os.listdir(short) == ["run"]
        assert os.listdir(runtime) == []


def test_sockets_folder_below_a_setgid_one_is_removed_and_one_that_is_not_keeps_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(prefix="t") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        Path(short).chmod(0o2700)
        made = socket_dir.create(tmp_path)
        assert stat.S_IMODE(made.stat().st_mode) == 0o2700
        made.chmod(0o755)
        socket_dir.remove(tmp_path)
        assert sockets_link(tmp_path) == made
        made.chmod(0o2700)
        socket_dir.remove(tmp_path)
        assert os.listdir(short) == []
        assert not os.path.lexists(tmp_path / socket_dir.LINK_NAME)


def sockets_link(node_folder: Path) -> Path:
    return (node_folder / socket_dir.LINK_NAME).readlink()


def test_sockets_folder_has_a_short_path_however_long_that_of_temporary_files_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    made = socket_dir.create(tmp_path)
    assert made.parent == Path("/tmp")
    socket_dir.remove(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize("what", ["file", "fifo", "link elsewhere", "link to another's"])
def test_folder_that_is_not_of_our_making_is_not_removed(tmp_path: Path, what: str) -> None:
    link, theirs = tmp_path / socket_dir.LINK_NAME, tmp_path / "holdfast-theirs"
    theirs.mkdir(mode=0o755)
    theirs.chmod(0o755)
    (tmp_path / "important").mkdir(mode=0o700)
    match what:
        case "file":
            link.write_text(str(tmp_path / "important"))
        case "fifo":
            os.mkfifo(link)
        case "link elsewhere":
            link.symlink_to(tmp_path / "important")
        case _:
            link.symlink_to(theirs)
    socket_dir.remove(tmp_path)
    assert theirs.is_dir()
    assert (tmp_path / "important").is_dir()


def test_node_that_cannot_be_made_keeps_no_other_away(folder: RunDir) -> None:
    node_ids = tuple(NodeId(node=node, generation=0) for node in range(2))

    async def scene(_: LocalBackend) -> None:
        here = backend(folder, nodes=2)
        folder.nodes.mkdir()
        folder.node_dir(0, 0).write_text("no folder")
        with pytest.raises(OSError, match=r"node0\.0"):
            await here.submit(node_ids)
        try:
            assert await anext(here.observe()) == NodeObservation(node_id=node_ids[1], state=BackendNodeState.CREATED)
            folder.node_dir(0, 0).unlink()
            await here.submit(node_ids)
            assert await anext(here.observe()) == NodeObservation(node_id=node_ids[0], state=BackendNodeState.CREATED)
        finally:
            await here.cancel()

    play(folder, scene)
