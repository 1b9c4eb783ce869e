"""One attempt's ranks on a node, as real processes: their reports, in order, and their leftovers."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from tests.agent.test_gpu_memory import APPS, GPUS, answering, nvidia_smi
from tests.conftest import SmallDisk, fill, mount_read_only
from tests.waiting import until

from holdfast.agent import hang_detector, rank_stopper, rendezvous_check
from holdfast.agent.failure_evidence import FailedRanks
from holdfast.agent.log_retention import LogRetention
from holdfast.agent.prewarm import PrewarmPool
from holdfast.agent.rate_limits import CHECKPOINT_LIMIT, FINDING_LIMIT
from holdfast.agent.rendezvous_port import ReservedPort
from holdfast.agent.sources import Sources
from holdfast.agent.stack_dump import StackDump
from holdfast.agent.state_memory import StateMemory
from holdfast.agent.tcp_store_host import TcpStoreHost
from holdfast.agent.worker_group import WorkerGroup
from holdfast.clock import Clock
from holdfast.errors import ExitCode, HoldfastError, failure
from holdfast.events import (
    AgentEvent,
    CheckpointCommitted,
    ExitReason,
    FindingRaised,
    RankExited,
    RankHung,
    RanksStarted,
    RanksStopped,
)
from holdfast.findings import Finding
from holdfast.host import cgroups
from holdfast.host.processes import (
    HELPER,
    adopt_orphans,
    by_env,
    descendants,
    identify,
    port_owner,
    state_letter,
    undo_later,
)
from holdfast.protocol.metric_validation import MAX_REPORTED_NAMES
from holdfast.protocol.orders import Progress, RankLaunch, StartRanks
from holdfast.protocol.rank_messages import CheckpointAndExitNow, TakeCheckpointNow
from holdfast.protocol.validation import MAX_METRICS

DEADLINE_S = 200.0
PROGRAMS = Path(__file__).parents[1] / "programs"

M = TypeVar("M", bound=msgspec.Struct)

# A rank that speaks: says the lines it is given on its channel, then waits for a line to come back, or for ever.
SPEAKER = """
import os, socket, sys, signal
link = socket.socket(socket.AF_UNIX); link.connect(os.environ["HOLDFAST_RANK_SOCKET"])
link.sendall(b'{"type":"hello","rank":%d,"pid":%d}\\n' % (int(os.environ["RANK"]), os.getpid()))
for line in sys.argv[2:]: link.sendall(line.encode() + b"\\n")
if sys.argv[1] == "wait": print(link.recv(4096).decode(), flush=True)
if sys.argv[1] == "again": link.recv(4096); link.sendall(sys.argv[2].encode() + b"\\n"); signal.pause()
if sys.argv[1] == "leave": link.close(); signal.pause()
if sys.argv[1] == "late": link.close(); open("pipe").read(); sys.exit(7)
if sys.argv[1] == "stay": signal.pause()
if sys.argv[1].isdecimal(): sys.exit(int(sys.argv[1]))
"""


class WorkerGroupBench:
    """A group, and what it said."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.sockets = sockets
        self.cwd = ""
        self.port = ReservedPort("127.0.0.1")
        self.clock = Clock()
        self.sent: list[AgentEvent | Progress] = []
        self.steps: list[tuple[int, int]] = []
        self.sources = Sources()
        self.stopped: list[WorkerGroup] = []
        self.failed: list[FailedRanks] = []
        self.codes: asyncio.Queue[Path | HoldfastError] = asyncio.Queue()
        """What comes of asking for code."""
        self._news = asyncio.Event()

    def send(self, message: AgentEvent | Progress) -> int:
        self.sent.append(message)
        self._news.set()
        return len(self.sent)

    def report_finding(self, finding: Finding) -> None:
        self.send(FindingRaised(at=self.clock(), finding=finding))

    async def get_code(self, digest: str) -> Path:
        found = await self.codes.get()
        if isinstance(found, HoldfastError):
            raise found
        return found / digest

    def group(
        self,
        *commands: list[str],
        deadline_s: float | None = None,
        attempt: int = 0,
        code: str = "",
        env: dict[str, str] | None = None,
        ranks_each: int = 1,
        replica: int = 0,
        exit_timeout_s: float | None = None,
    ) -> WorkerGroup:
        ranks = tuple(self.launch(rank, command, attempt, ranks_each) for rank, command in enumerate(commands))
        order = StartRanks(
            replica=replica,
            attempt=attempt,
            ranks=ranks,
            env=env or {},
            step_timeout_s=deadline_s,
            exit_timeout_s=exit_timeout_s,
            code_digest=code,
        )
        return WorkerGroup(
            order,
            node=3,
            sockets=self.sockets,
            folder=self.folder,
            rendezvous_port=self.port,
            clock=self.clock,
            get_code=self.get_code,
            log_retention=LogRetention(lambda finding: None),
            prewarm_pool=PrewarmPool(self.folder, self.report_finding, lambda replica, ranks: None),
            state_memory=StateMemory(),
            store_host=TcpStoreHost(),
            sources=self.sources,
            send=self.send,
            on_step=lambda rank, step: self.steps.append((rank, step)),
            on_stopped=self.stopped.append,
            on_failed=self.failed.append,
            upload_trace=self.upload_trace,
        )

    async def upload_trace(self, name: str, file: Path) -> str:
        return "there is no controller"

    def launch(self, rank: int, command: list[str], attempt: int, ranks: int = 1) -> RankLaunch:
        env = {"RANK": str(rank), "HOLDFAST_REPLICA": "0", "HOLDFAST_ATTEMPT": str(attempt)}
        return RankLaunch(
            rank=rank,
            rank_count=ranks,
            argv=tuple(command),
            env=env,
            cwd=self.cwd or str(self.folder),
            log=str(self.log(rank, attempt)),
        )

    def log(self, rank: int, attempt: int = 0) -> Path:
        return self.folder / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    async def until(self, kind: type[M], count: int = 1) -> M:
        """Wait for the count-th message of a kind."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.all(kind)) < count:
                self._news.clear()
                await self._news.wait()
        return self.all(kind)[count - 1]

    def pipe(self) -> Path:
        """A pipe through which a rank without a channel can report; its reader waits for the writer."""
        path = self.folder / "pipe"
        os.mkfifo(path)
        return path


async def wait_closed(group: WorkerGroup) -> None:
    """Wait until the agent knows that rank 0 has hung up."""
    async with asyncio.timeout(DEADLINE_S):
        while not group._hang_detector.has_closed(0):
            await asyncio.to_thread(time.sleep, 0.005)


async def heard(pipe: Path) -> str:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(pipe.read_text)


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        yield Path(folder)


def play(folder: Path, sockets: Path, scene: Callable[[WorkerGroupBench], Awaitable[None]]) -> None:
    adopt_orphans()

    async def whole() -> None:
        bench = WorkerGroupBench(folder, sockets)
        try:
            await scene(bench)
        finally:
            for pid in by_env(descendants(os.getpid()), HOLDFAST_REPLICA="0"):
                os.kill(pid, signal.SIGKILL)

    asyncio.run(whole())


def until_state(pid: int, letter: str) -> None:
    """Wait for a process's state: "T" once it has stopped itself, "S" once it sleeps."""
    until(lambda: state_letter(pid) == letter)


def until_marked(root: int, rank: str) -> int:
    """Wait for the first process below one that was started with this RANK."""
    return until(lambda: next(iter(by_env(descendants(root), RANK=rank)), 0))


def speaker(then: str, *lines: str) -> list[str]:
    return [sys.executable, "-c", SPEAKER, then, *lines]


def step(number: int, **more: float) -> str:
    told = {"type": "step", "step": number, "started": float(number), "ended": number + 1.0, **more}
    return msgspec.json.encode(told).decode()


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_exits_are_reported_in_order_with_a_fresh_port_at_the_end(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        before = bench.port.number
        await bench.group(shell("exit 0"), shell("exit 3")).start()
        stopped = await bench.until(RanksStopped)
        assert [type(message) for message in bench.sent] == [RanksStarted, RankExited, RankExited, RanksStopped]
        codes = {exited.rank: (exited.reason, exited.code, exited.stopped) for exited in bench.all(RankExited)}
        assert codes == {0: (ExitReason.CODE, 0, False), 1: (ExitReason.CODE, 3, False)}
        assert stopped.port == bench.port.number != before
        assert len(bench.stopped) == 1
        assert list(sockets.iterdir()) == []

    play(tmp_path, sockets, scene)


def test_programs_that_cannot_start_are_reported_once_each_before_the_end(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(["/no/such/program"], ["/no/such/program"]).start()
        await bench.until(RanksStopped)
        await asyncio.sleep(0)
        kinds = [type(message) for message in bench.sent]
        assert kinds == [RanksStarted, RankExited, RankExited, RanksStopped]
        first = bench.all(RankExited)[0]
        assert (first.reason, first.code) == (ExitReason.NOT_STARTED, 127)
        assert "No such file" in first.error

    play(tmp_path, sockets, scene)


def test_shipped_code_is_where_the_ranks_run(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        (tmp_path / "digest" / "sub").mkdir(parents=True)
        bench.cwd = "sub"
        bench.codes.put_nowait(tmp_path)
        await bench.group(shell("pwd"), code="digest").start()
        await bench.until(RanksStopped)
        assert bench.log(0).read_text() == f"{tmp_path}/digest/sub\n"

    play(tmp_path, sockets, scene)


def test_failed_code_delivery_is_reported_for_each_rank_and_nothing_starts(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        bench.codes.put_nowait(
            failure("no-code", "no code here", exit_code=ExitCode.UNAVAILABLE, remedy="wait", evidence=("why",))
        )
        await bench.group(shell("touch started"), shell("touch started"), code="digest").start()
        await bench.until(RanksStopped)
        assert [type(message) for message in bench.sent] == [FindingRaised, RankExited, RankExited, RanksStopped]
        assert bench.all(FindingRaised)[0].finding.code == "no-code"
        exited = bench.all(RankExited)[0]
        assert (exited.reason, exited.error, exited.evidence) == (
            ExitReason.CODE_DELIVERY_FAILED,
            "no code here",
            "why",
        )
        assert not (tmp_path / "started").exists()

    play(tmp_path, sockets, scene)


def test_worker_group_stopped_while_it_waits_for_code_starts_nothing(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("touch started"), code="digest")
        start = asyncio.ensure_future(group.start())
        await asyncio.sleep(0)
        group.stop(10.0)
        await bench.until(RanksStopped)
        await start
        assert [type(message) for message in bench.sent] == [RanksStopped]
        assert not (tmp_path / "started").exists()

    play(tmp_path, sockets, scene)


def test_unwritable_log_is_reported_as_a_rank_that_could_not_start(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        (tmp_path / "logs").write_text("a file where the folder should be")
        await bench.group(shell("exit 0")).start()
        exited = await bench.until(RankExited)
        assert (exited.reason, exited.code) == (ExitReason.NOT_STARTED, 126)
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


def test_error_of_a_rank_is_reported_with_its_location(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group([sys.executable, "-c", "print('hi', flush=True); raise ValueError('bad shape')"]).start()
        exited = await bench.until(RankExited)
        assert exited.error == "ValueError: bad shape"
        line = int(exited.error_location.removeprefix(f"{bench.log(0)}:"))
        assert bench.log(0).read_text().splitlines()[line - 1] == "ValueError: bad shape"
        assert bench.log(0).stat().st_mode & 0o077 == 0

    play(tmp_path, sockets, scene)


def test_signal_that_ends_a_rank_is_reported_as_a_signal(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("kill -SEGV $$")).start()
        exited = await bench.until(RankExited)
        assert (exited.reason, exited.code, exited.stopped) == (ExitReason.SIGNAL, signal.SIGSEGV, False)

    play(tmp_path, sockets, scene)


def test_signal_that_ends_what_a_shell_script_runs_is_reported_as_its_own(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("sh -c 'kill -KILL $$'; exit $?"), shell("exit 130")).start()
        await bench.until(RanksStopped)
        exited = {one.rank: (one.reason, one.code, one.evidence) for one in bench.all(RankExited)}
        passed_on = "exit code 137: its command passed on how its own child ended"
        assert exited == {0: (ExitReason.SIGNAL, signal.SIGKILL, passed_on), 1: (ExitReason.CODE, 130, "")}

    play(tmp_path, sockets, scene)


def test_stop_without_grace_kills_immediately_and_is_reported_as_intended(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("trap '' TERM; sleep 600 & wait"), ["sleep", "600"])
        await group.start()
        group.stop(0.0)
        await bench.until(RanksStopped)
        assert {(one.reason, one.code, one.stopped) for one in bench.all(RankExited)} == {(ExitReason.SIGNAL, 9, True)}
        assert by_env(descendants(os.getpid()), HOLDFAST_REPLICA="0") == []

    play(tmp_path, sockets, scene)


def test_stop_with_grace_lets_ranks_end_by_themselves_even_when_they_are_stopped(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        ready = bench.pipe()
        group = bench.group(shell(f"trap 'exit 5' TERM; echo ready > {ready}; while :; do sleep 0.01; done"))
        await group.start()
        await heard(ready)
        os.kill(group.processes[0].pid, signal.SIGSTOP)
        group.stop(60.0)
        exited = await bench.until(RankExited)
        assert (exited.code, exited.stopped) == (5, True)

    play(tmp_path, sockets, scene)


def test_rank_that_ignores_sigterm_is_killed_when_the_first_grace_is_over(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        ready = bench.pipe()
        group = bench.group(shell(f"trap '' TERM; echo ready > {ready}; while :; do sleep 0.01; done"), replica=1)
        await group.start()
        await heard(ready)
        group.stop(0.2)
        group.stop(3600.0)
        exited = await bench.until(RankExited)
        assert (exited.reason, exited.code, exited.stopped) == (ExitReason.SIGNAL, 9, True)
        (found,) = bench.all(FindingRaised)
        assert found.finding.code == "ignored-sigterm"
        assert found.finding.what.startswith("rank 0 of replica 1 was still there 0.2 s after SIGTERM")

    play(tmp_path, sockets, scene)


def test_rank_that_died_by_itself_before_the_kill_is_reported_so(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("exit 7"))
        await group.start()
        # It has exited, and the loop has not run since.
        os.waitid(os.P_PID, group.processes[0].pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - to hold the loop up
        group.stop(0.0)
        exited = await bench.until(RankExited)
        assert (exited.code, exited.stopped) == (7, False)

    play(tmp_path, sockets, scene)


def test_order_to_stop_before_anything_was_started_starts_nothing(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("echo started"))
        before = bench.port.number
        starting = asyncio.ensure_future(group.start())
        group.stop(0.0)
        await starting
        (stopped,) = bench.sent
        assert isinstance(stopped, RanksStopped)
        assert stopped.port != before
        assert not bench.log(0).exists()

    play(tmp_path, sockets, scene)


def test_script_in_place_that_was_edited_is_reported_when_an_attempt_starts_it(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        script = tmp_path / "train.py"
        for attempt in range(2):
            script.write_text(f"print({attempt:0{attempt + 1}})")
            await bench.group([sys.executable, str(script)], attempt=attempt).start()
            await bench.until(RanksStopped, attempt + 1)
            await bench.sources.compare(0, attempt, [])  # once what the start began is over
        finding = (await bench.until(FindingRaised)).finding
        assert finding.code == "code-edited"
        assert "after attempt 0 started; attempt 1 runs the edited file" in finding.what

    play(tmp_path, sockets, scene)


@pytest.mark.parametrize(("code", "told"), [(0, ["no-rendezvous"]), (3, [])])
def test_rank_0_that_succeeds_without_meeting_a_peer_is_reported(
    tmp_path: Path, sockets: Path, code: int, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_check, "EARLY_SAMPLE_S", 0.001)

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        script = f"if 0:\n import torch.distributed\nopen({str(pipe)!r}).read()\nraise SystemExit({code})"
        group = bench.group([sys.executable, "-c", script], env={"WORLD_SIZE": "2", "MASTER_PORT": "29500"})
        await group.start()
        async with asyncio.timeout(DEADLINE_S):
            while group._rendezvous_check is None or not group._rendezvous_check.missed:
                await asyncio.to_thread(time.sleep, 0.005)
        await asyncio.to_thread(pipe.write_text, "")
        await bench.until(RanksStopped)
        assert [event.finding.code for event in bench.all(FindingRaised)] == told

    play(tmp_path, sockets, scene)


def test_orphan_daemon_is_gone_before_the_attempt_is_reported_over(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        begun = bench.pipe()
        # A double fork with a separate session: neither its parent nor its process group leads to the rank.
        await bench.group(shell(f"(setsid sh -c 'echo $$ > {begun}; exec sleep 600' &) ; cat {begun}")).start()
        await bench.until(RanksStopped)
        daemon = int(bench.log(0).read_text())
        assert identify(daemon) is None
        assert not Path(f"/proc/{daemon}").exists(), "a zombie is left"
        (found,) = bench.all(FindingRaised)
        assert found.finding.code == "orphan-processes"
        assert found.finding.evidence == (f"process {daemon}: sleep 600",)

    play(tmp_path, sockets, scene)


def without_cgroup(name: str) -> None:
    """No group of processes can be made here."""


@pytest.mark.parametrize("grouped", [True, False], ids=["cgroup", "no-cgroup"])
@pytest.mark.parametrize("code", [0, 3])
def test_daemon_with_an_emptied_environment_is_named_with_its_port_and_ended(
    tmp_path: Path, sockets: Path, grouped: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not grouped:
        monkeypatch.setattr(cgroups, "tracking_group", without_cgroup)
    elif cgroups.tracking_group("test") is None:
        pytest.skip("needs a cgroup v2 below which groups can be made")

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        program = [sys.executable, str(PROGRAMS / "orphan_daemon.py"), str(pipe), str(code)]
        with undo_later(600.0, "true"):
            pass
        group = bench.group(program)
        start = asyncio.ensure_future(group.start())
        pid, port = map(int, (await heard(pipe)).split())
        await start
        await bench.until(RanksStopped)
        assert not Path(f"/proc/{pid}").exists()
        assert port_owner(port) == ""
        (found,) = bench.all(FindingRaised)
        assert found.finding.code == "orphan-processes"
        (line,) = found.finding.evidence
        assert line.startswith(f"process {pid}: ")
        assert line.endswith(f", listening on port {port}")
        assert [path for path in tmp_path.iterdir() if path.name.startswith("group")] == []
        helpers = by_env(descendants(os.getpid()), **{HELPER: "1"})
        assert helpers, "a helper of holdfast's own was taken for a leftover"
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)

    play(tmp_path, sockets, scene)


def test_work_put_into_the_background_is_named_and_ended_too(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("env -i sleep 600 & echo $!")).start()  # its group alone says whose it is
        await bench.until(RanksStopped)
        left = int(bench.log(0).read_text())
        assert not Path(f"/proc/{left}").exists()
        (found,) = bench.all(FindingRaised)
        assert found.finding.evidence == (f"process {left}: sleep 600",)

    play(tmp_path, sockets, scene)


@pytest.mark.parametrize(
    "script",
    ["(read line; exit 0) < $0 & exit 0", "sleep 600 & exit 3"],
    ids=["helper that ends by itself", "command that failed"],
)
def test_helpers_that_exit_and_leftovers_of_a_failed_command_are_not_reported(
    tmp_path: Path, sockets: Path, script: str
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell(script.replace("$0", "/dev/null"))).start()
        await bench.until(RanksStopped)
        assert bench.all(FindingRaised) == []

    play(tmp_path, sockets, scene)


@pytest.mark.root
def test_ranks_wait_for_room_for_their_logs(tmp_path: Path, sockets: Path, small_disk: SmallDisk) -> None:
    disk = small_disk(256 << 10)
    ballast = fill(disk)

    async def scene(bench: WorkerGroupBench) -> None:
        start = asyncio.ensure_future(bench.group(shell("echo there is room")).start())
        found = await bench.until(FindingRaised)
        assert found.finding.code == "disk-full"
        assert bench.all(RanksStarted) == []
        ballast.unlink()
        await start
        await bench.until(RanksStopped)
        assert bench.log(0).read_text() == "there is room\n"

    play(disk, sockets, scene)


@pytest.mark.root
def test_ranks_that_wait_for_room_can_be_stopped(tmp_path: Path, sockets: Path, small_disk: SmallDisk) -> None:
    disk = small_disk(256 << 10)
    fill(disk)

    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("echo never"))
        start = asyncio.ensure_future(group.start())
        await bench.until(FindingRaised)
        group.stop(0.0)
        await start
        assert bench.all(RanksStopped)
        assert not bench.log(0).exists()

    play(disk, sockets, scene)


@pytest.mark.root
def test_rank_whose_last_output_found_no_disk_space_is_reported(sockets: Path, small_disk: SmallDisk) -> None:
    disk = small_disk(256 << 10)

    async def scene(bench: WorkerGroupBench) -> None:
        talk = "while True: print('x' * 4000, flush=True)"
        await bench.group([sys.executable, "-c", talk]).start()
        exited = await bench.until(RankExited)
        assert exited.code != 0
        assert "No space left on device" in exited.error
        assert f"tmpfs on {disk}: 0 of" in exited.evidence

    play(disk, sockets, scene)


@pytest.mark.root
def test_rank_that_writes_to_a_read_only_mount_has_that_as_its_evidence(
    tmp_path: Path, sockets: Path, small_disk: SmallDisk
) -> None:
    disk = small_disk(256 << 10)
    mount_read_only(disk)

    async def scene(bench: WorkerGroupBench) -> None:
        bench.cwd = str(tmp_path)
        await bench.group([sys.executable, "-c", f"import os; os.mkdir({disk.name + '/ckpt'!r})"]).start()
        exited = await bench.until(RankExited)
        assert "Read-only file system" in exited.error
        assert exited.evidence == f"{disk} is mounted read-only (tmpfs, none)"

    play(tmp_path, sockets, scene)


def test_steps_are_reported_when_every_rank_of_the_node_has_passed_them(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(
            speaker("wait", step(1, checkpoint_s=0.5), step(2)), speaker("wait", step(1, ended=9.0), step(2), step(3))
        )
        await group.start()
        async with asyncio.timeout(DEADLINE_S):
            while sum(len(progress.steps) for progress in bench.all(Progress)) < 2:
                await bench.until(Progress, len(bench.all(Progress)) + 1)
        passed = [one for progress in bench.all(Progress) for one in progress.steps]
        assert [one.step for one in passed] == [1, 2]
        assert (passed[0].ended, passed[0].checkpoint_s) == (9.0, 0.5)
        assert (1, 3) in bench.steps or bench.steps[-1][1] == 2
        group.send_to_ranks(TakeCheckpointNow())
        await bench.until(RanksStopped)
        assert "take-checkpoint-now" in bench.log(0).read_text()
        assert all(exited.has_session for exited in bench.all(RankExited))

    play(tmp_path, sockets, scene)


def test_steps_of_a_rank_that_exits_are_reported_before_its_exit_and_its_checkpoint(
    tmp_path: Path, sockets: Path
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        saved = '{"type":"checkpoint-committed","step":2,"path":"p","took_s":0.1,"size_bytes":7}'
        await bench.group(speaker("end", step(1), step(2), saved)).start()
        exited = await bench.until(RankExited)
        assert exited.last_step == 2
        told = [message for message in bench.sent if isinstance(message, Progress | CheckpointCommitted | RankExited)]
        assert isinstance(told[-1], RankExited)
        assert isinstance(told[-2], CheckpointCommitted)
        assert told[-2].size_bytes == 7
        assert [one.step for message in told[:-2] if isinstance(message, Progress) for one in message.steps] == [1, 2]

    play(tmp_path, sockets, scene)


def test_late_hello_gets_the_pending_request_to_exit(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(speaker("wait"))
        await group.start()
        group.send_to_ranks(CheckpointAndExitNow(reason="grow"))
        await bench.until(RanksStopped)
        assert '"reason":"grow"' in bench.log(0).read_text()

    play(tmp_path, sockets, scene)


@pytest.mark.parametrize(
    ("code", "said", "left"),
    [
        ("75", ('{"type":"exiting-on-request"}',), True),
        ("75", (), False),
        ("7", ('{"type":"exiting-on-request"}',), False),
    ],
)
def test_exit_on_request_counts_only_if_the_session_reported_it(
    tmp_path: Path, sockets: Path, code: str, said: tuple[str, ...], left: bool
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(speaker(code, *said)).start()
        exited = await bench.until(RankExited)
        assert (exited.code, exited.exited_on_request) == (int(code), left)
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


def test_nonsense_on_the_channel_is_passed_over(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        finding = '{"type":"finding","finding":{"code":"slow","what":"slow"}}'
        nonsense = ["{", "[]", '{"type":"from-the-future"}', "[" * 5000, '{"type":"step","step":"one"}']
        await bench.group(speaker("end", *nonsense, finding)).start()
        await bench.until(RanksStopped)
        first, slow, total = (raised.finding for raised in bench.all(FindingRaised))
        assert slow.code == "slow"
        assert (first.code, first.where) == ("rank-messages-dropped", "rank 0 on node3")
        assert total.what.startswith("the agent dropped 4 messages of rank 0")  # one was only of another version

    play(tmp_path, sockets, scene)


def bad_step(number: int, metrics: str) -> str:
    return f'{{"type":"step","step":{number},"started":1,"ended":2,"metrics":{{"loss":0.5,{metrics}}}}}'


def test_bad_metrics_of_a_step_are_dropped_alone_and_named_once(tmp_path: Path, sockets: Path) -> None:
    bad = [
        f'"{"n" * 129}":1',
        r'"torn\ud800":1',
        '"word":"x"',
        '"list":[1,2,3]',
        '"nan":NaN',
        '"huge":1e999',
        '"none":null',
    ]
    many = ",".join(f'"m{number}":1' for number in range(500))

    async def scene(bench: WorkerGroupBench) -> None:
        said = [bad_step(number, metrics) for number, metrics in enumerate([*bad, *bad, many], 1)]
        await bench.group(speaker("end", *said)).start()
        exited = await bench.until(RankExited)
        assert exited.last_step == len(said)
        passed = [step for progress in bench.all(Progress) for step in progress.steps]
        assert [step.step for step in passed] == list(range(1, len(said) + 1))
        assert all(step.metrics["loss"] == 0.5 for step in passed)
        assert len(passed[-1].metrics) == MAX_METRICS
        codes = [raised.finding.code for raised in bench.all(FindingRaised)]
        assert codes == ["metric-dropped"] * (MAX_REPORTED_NAMES + 1)

    play(tmp_path, sockets, scene)


# A rank that says hello and then floods its agent: so many messages, of which each has another number in it.
FLOODER = """
import os, socket, sys
link = socket.socket(socket.AF_UNIX); link.connect(os.environ["HOLDFAST_RANK_SOCKET"])
link.sendall(b'{"type":"hello","rank":0,"pid":%d}\\n' % os.getpid())
for number in range(int(sys.argv[1])): link.sendall(sys.argv[2].replace("NUMBER", str(number)).encode() + b"\\n")
link.shutdown(socket.SHUT_WR); link.recv(1)
"""


def flooder(count: int, message: str) -> list[str]:
    return [sys.executable, "-c", FLOODER, str(count), message]


def test_findings_beyond_what_a_rank_may_pass_on_are_counted_and_reported_once(tmp_path: Path, sockets: Path) -> None:
    finding = '{"type":"finding","finding":{"code":"code-NUMBER","what":"what","severity":"info"}}'

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(flooder(2000, finding)).start()
        await bench.until(RanksStopped)
        found = [raised.finding for raised in bench.all(FindingRaised)]
        assert len(found) == FINDING_LIMIT.burst + 2
        assert [one.code for one in found[-2:]] == ["rank-messages-dropped"] * 2
        assert found[-1].what.startswith(f"the agent dropped {2000 - FINDING_LIMIT.burst:,.0f} messages of rank 0")

    play(tmp_path, sockets, scene)


def test_code_of_a_finding_that_is_no_code_is_not_passed_on(tmp_path: Path, sockets: Path) -> None:
    finding = r'{"type":"finding","finding":{"code":"\u001b]0;owned\u0007","what":"what"}}'

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(speaker("end", finding)).start()
        await bench.until(RanksStopped)
        (found,) = bench.all(FindingRaised)
        assert found.finding.code == "rank-messages-dropped"
        assert not re.search(r"[\x00-\x1f]", str(found.finding))

    play(tmp_path, sockets, scene)


def test_of_checkpoints_in_too_quick_a_row_the_newest_is_passed_on(tmp_path: Path, sockets: Path) -> None:
    saved = '{"type":"checkpoint-committed","step":NUMBER,"path":"p"}'

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(flooder(5000, saved)).start()
        await bench.until(RanksStopped)
        told = bench.all(CheckpointCommitted)
        assert CHECKPOINT_LIMIT.burst < len(told) < 1000
        assert told[-1].step == 4999

    play(tmp_path, sockets, scene)


def test_folder_of_the_sockets_that_is_gone_is_made_again(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        bench.sockets = sockets / "gone" / "too"
        await bench.group(speaker("end", step(3))).start()
        exited = await bench.until(RankExited)
        assert (exited.last_step, exited.has_session) == (3, True)
        assert bench.sockets.stat().st_mode & 0o777 == 0o700

    play(tmp_path, sockets, scene)


@pytest.mark.parametrize("instead", ["file", "folder that others may enter"])
def test_ranks_have_a_channel_elsewhere_where_the_folder_is_none_or_not_ours(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    (elsewhere := sockets / "elsewhere").mkdir()
    monkeypatch.setattr("holdfast.agent.rank_sockets.FALLBACK_DIRS", (str(elsewhere),))

    async def scene(bench: WorkerGroupBench) -> None:
        bench.sockets /= "sockets"
        if instead == "file":
            bench.sockets.touch()
        else:
            bench.sockets.mkdir()
            bench.sockets.chmod(0o755)
        await bench.group(speaker("end", step(3))).start()
        assert (await bench.until(RankExited)).last_step == 3
        await bench.until(RanksStopped)
        assert bench.all(FindingRaised) == []
        assert list(elsewhere.iterdir()) == []

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
@pytest.mark.parametrize("when", ["at the start", "afterwards"])
def test_ranks_that_cannot_reach_the_agent_are_reported_and_never_taken_for_hung(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "at the start":
        monkeypatch.setattr("holdfast.agent.rank_sockets.FALLBACK_DIRS", ())
        (sockets / "sockets").write_text("a file")

    async def scene(bench: WorkerGroupBench) -> None:
        bench.sockets /= "sockets"
        group = bench.group(shell("sleep 600"), shell("sleep 600"), deadline_s=0.2)
        await group.start()
        if when == "afterwards":
            shutil.rmtree(bench.sockets)
        group.report_silent(all_ranks=True)
        group.report_silent(all_ranks=True)
        (raised,) = bench.all(FindingRaised)
        assert raised.finding.code == "rank-channel-missing"
        assert raised.finding.what.startswith("rank 0, 1 on node3 cannot reach the agent")
        assert "sockets" in raised.finding.evidence[0]
        assert group._hang_detector._without_session == {}
        group.stop(0.0)
        await bench.until(RanksStopped)
        assert bench.all(RankHung) == []

    play(tmp_path, sockets, scene)


@pytest.fixture
def no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(pid: int, into: Path, *, stopped: bool = False) -> StackDump:
        return StackDump(path=str(into), top_frame="all_reduce (x.py:1)")

    monkeypatch.setattr(hang_detector, "dump_stacks", take)


@pytest.mark.usefixtures("no_stacks")
def test_silent_rank_is_reported_as_hung_once(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(speaker("stay", step(4)), deadline_s=0.2)
        await group.start()
        hung = await bench.until(RankHung)
        assert (hung.rank, hung.last_step, hung.top_frame) == (0, 4, "all_reduce (x.py:1)")
        assert 0.2 <= hung.waited_s < DEADLINE_S
        assert hung.last_step_at == pytest.approx(hung.at - hung.waited_s, abs=0.1)
        group.stop(0.0)
        await bench.until(RanksStopped)
        assert len(bench.all(RankHung)) == 1

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
@pytest.mark.parametrize("silent", ["leave", "end", "rest"])
def test_rank_that_hung_up_or_ended_or_has_no_step_left_is_not_taken_for_hung(
    tmp_path: Path, sockets: Path, silent: str
) -> None:
    """When the other rank's silence is reported twice, the first has been silent for twice the deadline."""

    async def scene(bench: WorkerGroupBench) -> None:
        rest = ("stay", step(1), '{"type":"activity-changed","to":"finished"}')
        first = speaker(*rest) if silent == "rest" else speaker(silent, step(1))
        group = bench.group(first, speaker("again", step(1)), deadline_s=0.2)
        await group.start()
        await bench.until(RankHung)
        group.send_to_ranks(TakeCheckpointNow())
        await bench.until(RankHung, 2)
        assert [one.rank for one in bench.all(RankHung)] == [1, 1]
        group.stop(0.0)
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


def test_rank_on_its_way_out_ends_by_itself_when_all_are_killed(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has hung up, with its peers too: they fail of that, and may be told as failed before it has ended."""
    monkeypatch.setattr(rank_stopper, "EXIT_GRACE_S", 600.0)

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        group = bench.group(speaker("late"), shell("sleep 600"))
        await group.start()
        writer = await asyncio.to_thread(pipe.open, "w")
        await wait_closed(group)
        group.stop(0.0)
        assert (await bench.until(RankExited)).rank == 1
        writer.close()
        ended = await bench.until(RankExited, 2)
        assert (ended.rank, ended.reason, ended.code, ended.stopped) == (0, ExitReason.CODE, 7, False)

    play(tmp_path, sockets, scene)


def test_rank_that_has_hung_up_and_stays_is_killed_a_moment_later(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_stopper, "EXIT_GRACE_S", 0.05)

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        group = bench.group(speaker("late"))
        await group.start()
        with await asyncio.to_thread(pipe.open, "w"):
            await wait_closed(group)
            group.stop(0.0)
            ended = await bench.until(RankExited)
        assert (ended.reason, ended.code, ended.stopped) == (ExitReason.SIGNAL, 9, True)

    play(tmp_path, sockets, scene)


@pytest.mark.parametrize("leaves", [True, False])
def test_launcher_that_ends_well_while_a_rank_of_it_is_at_work_has_failed(
    tmp_path: Path, sockets: Path, leaves: bool
) -> None:
    """As `deepspeed` does when a signal ends the process between it and its ranks."""
    greeting = '{"type":"checkpoint-committed","step":1,"path":"x"}'
    words = " ".join(shlex.quote(word) for word in speaker("stay" if leaves else "leave", greeting))
    launcher = shell(f"RANK=0 {words} & cat pipe; exit 0")

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        group = bench.group(launcher, ranks_each=2)
        await group.start()
        await bench.until(CheckpointCommitted)
        await asyncio.to_thread(pipe.write_text, "go")
        ended = await bench.until(RankExited)
        expected = (ExitReason.ORPHANED_RANKS, "rank 0 was at work") if leaves else (ExitReason.CODE, "")
        assert (ended.reason, ended.evidence, ended.code) == (*expected, 0)
        await bench.until(RanksStopped)
        told = [found.finding.code for found in bench.all(FindingRaised)]
        assert told == ([] if leaves else ["orphan-processes"])

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
def test_ranks_without_a_hello_are_reported_once_when_dumped(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        greeting = '{"type":"checkpoint-committed","step":1,"path":"x"}'
        group = bench.group(speaker("stay", greeting), shell("sleep 600"), shell("kill -STOP $$"), deadline_s=600.0)
        await group.start()
        await bench.until(CheckpointCommitted)
        for rank, letter in ((1, "S"), (2, "T")):
            await asyncio.to_thread(until_state, bench.all(RanksStarted)[0].ranks[rank].pid, letter)
        group.report_silent(all_ranks=False)
        group.report_silent(all_ranks=False)
        await bench.until(RankHung, 2)
        group.stop(0.0)
        await bench.until(RanksStopped)
        told = {one.rank: (one.has_session, one.last_step, one.process_state) for one in bench.all(RankHung)}
        assert told == {1: (False, -1, "S"), 2: (False, -1, "T")}
        assert len(bench.all(RankHung)) == 2

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
def test_silent_rank_under_a_launcher_is_known_by_its_own_process(tmp_path: Path, sockets: Path) -> None:
    launcher = shell("RANK=1 sh -c 'kill -STOP $$' & RANK=2 sh -c 'echo started > pipe; exec sleep 600' & wait")

    async def scene(bench: WorkerGroupBench) -> None:
        pipe = bench.pipe()
        group = bench.group(launcher, ranks_each=3)
        await group.start()
        await heard(pipe)
        own = group.processes[0].pid
        stopped = await asyncio.to_thread(until_marked, own, "1")
        sleeper = await asyncio.to_thread(until_marked, own, "2")
        for pid, letter in ((own, "S"), (stopped, "T"), (sleeper, "S")):
            await asyncio.to_thread(until_state, pid, letter)
        assert group.processes[0].pids() == {0: own, 1: stopped, 2: sleeper}
        group.report_silent(all_ranks=False)
        await bench.until(RankHung, 3)
        assert {one.rank: one.process_state for one in bench.all(RankHung)} == {0: "S", 1: "T", 2: "S"}
        group.stop(0.0)
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


def test_rank_that_resumes_during_its_stack_dump_is_not_reported_as_hung(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        async def take(pid: int, into: Path, *, stopped: bool = False) -> StackDump:
            group.send_to_ranks(TakeCheckpointNow())  # it ends when it hears this
            await bench.until(RankExited)
            return StackDump()

        monkeypatch.setattr(hang_detector, "dump_stacks", take)
        group = bench.group(speaker("wait", step(1)), shell("sleep 600"), deadline_s=0.2)
        await group.start()
        await bench.until(RankExited)
        await asyncio.sleep(0)
        assert bench.all(RankHung) == []
        group.stop(0.0)
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


def test_gpus_in_use_by_others_are_reported_before_ranks_start(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, answering(tmp_path, GPUS, APPS))

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("exit 0")).start()
        (found,) = bench.all(FindingRaised)
        assert found.finding.code == "gpu-in-use"
        assert "process 40171" in found.finding.evidence[1]
        assert bench.sent.index(found) < bench.sent.index(await bench.until(RanksStarted))
        await bench.until(RanksStopped)

    play(tmp_path, sockets, scene)


@pytest.mark.slow
def test_next_attempt_waits_until_the_memory_of_the_last_is_free(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "asked")
    asked = f'case "$1" in --query-compute-apps=*) echo asked > {tmp_path}/asked;; esac; '
    nvidia_smi(tmp_path, monkeypatch, asked + answering(tmp_path, GPUS, APPS))

    async def scene(bench: WorkerGroupBench) -> None:
        start = asyncio.ensure_future(bench.group(shell("exit 0"), attempt=1).start())
        assert await heard(tmp_path / "asked")
        assert await heard(tmp_path / "asked")
        assert bench.sent == []
        (tmp_path / "asked").unlink()
        answering(tmp_path, GPUS.replace("38120", "4"), "")
        await start
        await bench.until(RanksStopped)
        assert bench.all(FindingRaised) == []

    play(tmp_path, sockets, scene)


def test_gpus_outside_the_ranks_share_are_ignored(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, monkeypatch, answering(tmp_path, GPUS, APPS))

    async def scene(bench: WorkerGroupBench) -> None:
        await bench.group(shell("exit 0"), env={"CUDA_VISIBLE_DEVICES": "1"}).start()
        await bench.until(RanksStopped)
        assert bench.all(FindingRaised) == []

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
def test_program_of_a_rank_that_is_not_here_is_not_waited_for(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        lines = [f'{{"type":"program-ended","rank":{rank},"threads":["{"x" * 1000}"]}}' for rank in (7, 0)]
        group = bench.group(speaker("stay", *lines), exit_timeout_s=0.2)
        await group.start()
        await bench.until(RanksStopped)
        reported, killed = (found.finding for found in bench.all(FindingRaised))
        assert len(reported.evidence[0]) < 500
        assert "rank 0" in killed.what
        (ended,) = bench.all(RankExited)
        assert (ended.reason, ended.code, ended.stopped) == (ExitReason.CODE, 0, False)

    play(tmp_path, sockets, scene)


@pytest.mark.usefixtures("no_stacks")
def test_rank_that_makes_steps_after_its_program_has_ended_is_ended_only_once_it_makes_none(
    tmp_path: Path, sockets: Path
) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        over = '{"type":"program-ended","rank":0,"threads":["trainer"]}'
        group = bench.group(speaker("stay", over), exit_timeout_s=0.1)
        steps = iter(range(4))

        def steps_of(rank: int) -> int:
            return next(steps, 3)

        group._exit_watcher._steps_of = steps_of
        await group.start()
        await bench.until(RanksStopped)
        assert next(steps, None) is None
        assert "was killed" in bench.all(FindingRaised)[-1].finding.what

    play(tmp_path, sockets, scene)


def test_rank_that_was_reaped_with_what_its_attempt_left_has_ended_all_the_same(tmp_path: Path, sockets: Path) -> None:
    async def scene(bench: WorkerGroupBench) -> None:
        group = bench.group(shell("read forever < /dev/zero"))
        await group.start()
        group.stop(0.0)
        group.kill_orphans()
        await bench.until(RanksStopped)
        (ended,) = bench.all(RankExited)
        assert (ended.reason, ended.code, ended.stopped) == (ExitReason.SIGNAL, 9, True)

    play(tmp_path, sockets, scene)
