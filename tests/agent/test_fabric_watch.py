"""Ranks log the set-up of NCCL to files of their own, and the agent reports each communicator as they grow."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from msgspec.structs import replace
from tests.diagnose.nccl_transport.generated_logs import JOB
from tests.diagnose.nccl_transport.test_promised_fabric import base

from holdfast.agent import fabric_watch
from holdfast.agent.fabric_watch import FabricWatch, has_news, observe
from holdfast.clock import Clock
from holdfast.diagnose.nccl_transport import judge
from holdfast.events import FabricObserved
from holdfast.protocol.orders import RankLaunch, StartRanks

DEADLINE_S = 20.0
LEVEL, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"


def order(attempt: int = 0, *, nccl_logs: bool = True, **env: str) -> StartRanks:
    return StartRanks(replica=0, attempt=attempt, ranks=(), env=env, fabric="infiniband", nccl_logs=nccl_logs)


@asynccontextmanager
async def watched(
    folder: Path, start: StartRanks, node: int = 0
) -> AsyncGenerator[tuple[FabricWatch, asyncio.Queue[FabricObserved]]]:
    sent = asyncio.Queue[FabricObserved]()
    watch = FabricWatch(start, node=node, folder=folder, clock=Clock(), send=sent.put_nowait, poll_s=0.02)
    watch.start()
    try:
        yield watch, sent
    finally:
        watch.stop()


def append(watch: FabricWatch, rank: int, data: bytes) -> None:
    """Write as NCCL does in one of the rank's processes."""
    path = watch.env_defaults(rank, ())[FILE].replace("%p", str(os.getpid()))
    with open(path, "ab") as file:
        file.write(data)


def split_log(rank: int) -> tuple[bytes, bytes]:
    """What a rank logs up to the end of the set-up, and as it connects."""
    data = b"".join(JOB.log(rank))
    end = data.index(b"\n", data.index(b"Init COMPLETE")) + 1
    return data[:end], data[end:]


def test_communicator_is_reported_when_set_up_and_again_when_connected(tmp_path: Path) -> None:
    async def go() -> tuple[FabricObserved, FabricObserved]:
        async with watched(tmp_path, order(3), node=1) as (watch, sent), asyncio.timeout(DEADLINE_S):
            for rank in range(4, 8):
                append(watch, rank, split_log(rank)[0])
            first = await sent.get()
            for rank in range(4, 8):
                append(watch, rank, split_log(rank)[1])
            return first, await sent.get()

    before, after = asyncio.run(go())
    assert (before.node, before.attempt, before.ranks, before.size) == (1, 3, ((4, 7),), 8)
    assert (before.network, before.between) == ("IB", {})
    assert judge(before).line == "infiniband, as promised"
    assert judge(after).line == "infiniband, 2 NICs, GPUDirect, as promised"


def test_unchanged_communicator_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_watch, "MAX_LOAD", 1.0)
    other = replace(JOB, replicas=2).log(0)

    async def go() -> list[FabricObserved]:
        async with watched(tmp_path, order()) as (watch, sent), asyncio.timeout(DEADLINE_S):
            for rank in range(4):
                append(watch, rank, b"".join(JOB.log(rank)))
            seen = [await sent.get()]
            append(watch, 0, b"".join(other).replace(b"commId 0x9a9c0000", b"commId 0x1"))
            while len({each.communicator for each in seen}) < 2:
                seen.append(await sent.get())
            return seen

    seen = asyncio.run(go())
    assert len([each for each in seen if each.ranks == ((0, 3),)]) == 1


@pytest.mark.parametrize(
    ("added", "news"),
    [
        (b"n1:8:9 [0] NCCL INFO NET/IB: NCCL Dev 0 IbDev 0 Port 1 qpn 9 mtu 5 LID 2\n", False),
        (b"n1:8:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0\n", True),
        (b"\nn1:8:9 [0] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_reg_mr failed\n", True),
        (b"COMPLETE\n", True),
    ],
)
def test_only_lines_that_may_change_a_report_are_news(tmp_path: Path, added: bytes, news: bool) -> None:
    path = tmp_path / "rank-0.1.log"
    before = b"n1:8:9 [0] NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1000 - Init "
    path.write_bytes(before + added)
    assert has_news({path: len(before)}, {path: len(before + added)}) == news
    assert has_news({}, {path: len(before)}) is False


def test_shorter_and_vanished_files_hide_no_news(tmp_path: Path) -> None:
    path, line = tmp_path / "rank-0.1.log", b"n1:8:9 [0] NCCL INFO comm 0x1 - Init COMPLETE\n"
    path.write_bytes(line)
    assert has_news({path: 1 << 20}, {path: len(line)})
    assert has_news({}, {tmp_path / "rank-0.0.log": 9, path: len(line)})


def test_watch_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [ValueError("once")]

    def read_or_fail(*files: object) -> list[FabricObserved]:
        if errors:
            raise errors.pop()
        return observe(*files)  # type: ignore[arg-type]

    monkeypatch.setattr(fabric_watch, "observe", read_or_fail)

    async def go() -> FabricObserved:
        async with watched(tmp_path, order()) as (watch, sent), asyncio.timeout(DEADLINE_S):
            append(watch, 0, split_log(0)[0])
            while errors:  # noqa: ASYNC110 - no event follows an error
                await asyncio.sleep(0.01)
            append(watch, 1, split_log(1)[0].replace(b":41000:", b":41001:"))
            return await sent.get()

    assert asyncio.run(go()).network == "IB"


def test_report_of_the_connected_ranks_is_sent_after_many_others(tmp_path: Path) -> None:
    sent: list[FabricObserved] = []
    watch = FabricWatch(order(), node=0, folder=tmp_path, clock=Clock(), send=sent.append)
    first = msgspec.structs.replace(base("infiniband"), communicator="0x1", size=8, ranks=((0, 3),))
    for nics in range(1, 9):
        watch.report([msgspec.structs.replace(first, nics=nics)])
    assert len(sent) == fabric_watch.MAX_REPORTS - 1
    connected = msgspec.structs.replace(sent[-1], connected=("all rings",))
    watch.report([connected])
    watch.report([connected])
    assert sent[fabric_watch.MAX_REPORTS - 1 :] == [connected]


def test_file_system_without_holes_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes")

    monkeypatch.setattr(fabric_watch.sparse_files, "punch_hole", refuse)
    monkeypatch.setattr(fabric_watch, "MAX_FILE_BYTES", 1 << 20)
    path = tmp_path / "rank-0.1.log"
    path.write_bytes(b"x" * (4 << 20))
    assert not fabric_watch.trim({path: 4 << 20})
    assert fabric_watch.trim({tmp_path / "gone.log": 4 << 20})


def test_files_are_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, connections = split_log(0)
    monkeypatch.setattr(fabric_watch, "MAX_FILE_BYTES", len(setup) + 10)

    async def go() -> FabricObserved:
        async with watched(tmp_path, order()) as (watch, sent), asyncio.timeout(DEADLINE_S):
            append(watch, 0, setup + connections)
            return await sent.get()

    assert asyncio.run(go()).between == {}


def test_several_watches_of_one_process_read_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.1.log"
    path.write_bytes(b"".join(replace(JOB, filler=20_000).log(0)))
    with ThreadPoolExecutor(4) as threads:
        seen = [threads.submit(observe, [path], (), base("infiniband"), "") for _ in range(8)]
    assert [len(each.result()) for each in seen] == [1] * 8


def test_middle_of_a_long_file_is_freed_while_nccl_writes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric_watch, "MAX_FILE_BYTES", 1 << 20)
    setup, line = split_log(0)[0], b"n1:8:9 [0] NCCL INFO NET/IB: something that is logged for ever\n"
    size = 6 << 20

    async def go(file: BinaryIO) -> int:
        async with watched(tmp_path, order()), asyncio.timeout(DEADLINE_S):
            file.write(setup + line * (size // len(line)))
            while path.stat().st_blocks * 512 > 3 << 20:  # noqa: ASYNC110 - no event follows the freeing of blocks
                await asyncio.sleep(0.01)
            return file.write(b"last\n")

    watch = FabricWatch(order(), node=0, folder=tmp_path, clock=Clock(), send=print)
    path = Path(watch.env_defaults(0, ())[FILE].replace("%p", "7"))
    with open(path, "wb", buffering=0) as file:  # as NCCL does, without O_APPEND
        asyncio.run(go(file))
    data = path.read_bytes()
    assert path.stat().st_blocks * 512 <= (2 << 20) + (64 << 10)
    assert (data[: len(setup)], data[-5:]) == (setup, b"last\n")


def test_missing_provider_in_a_ranks_output_is_the_reason(tmp_path: Path) -> None:
    output = tmp_path / "rank-0.log"
    output.write_text(
        "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs1\n"
    )
    launch = RankLaunch(rank=0, argv=("true",), env={}, cwd="/", log=str(output))
    start = StartRanks(replica=0, attempt=0, ranks=(launch,), env={}, fabric="infiniband", nccl_logs=True)
    job = replace(JOB, network="Socket", gdr=False)

    async def go() -> FabricObserved:
        async with watched(tmp_path / "node", start) as (watch, sent), asyncio.timeout(DEADLINE_S):
            for rank in range(4):
                append(watch, rank, b"".join(job.log(rank)))
            return await sent.get()

    found = judge(asyncio.run(go())).finding
    assert found is not None
    assert found.what.endswith("libibverbs has no driver (provider) for the node's RDMA device")


@pytest.mark.parametrize("name", [LEVEL, SUBSYSTEMS, FILE])
def test_job_that_says_how_nccl_logs_keeps_its_own(tmp_path: Path, name: str) -> None:
    watch = FabricWatch(order(), node=0, folder=tmp_path, clock=Clock(), send=print)
    assert watch.env_defaults(0, {name: "x"}) == {}
    assert watch.env_defaults(0, {"NCCL_NET": "IB"}).keys() == {LEVEL, SUBSYSTEMS, FILE}
    assert "TUNING" not in watch.env_defaults(0, ())[SUBSYSTEMS]


def test_ranks_without_gpus_log_nothing(tmp_path: Path) -> None:
    async def go() -> dict[str, str]:
        async with watched(tmp_path, order(nccl_logs=False)) as (watch, _):
            return watch.env_defaults(0, ())

    assert asyncio.run(go()) == {}
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_last_attempt_only_are_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        watch = FabricWatch(order(attempt), node=0, folder=tmp_path, clock=Clock(), send=print)
        append(watch, 0, b"line\n")
    (left,) = tmp_path.iterdir()
    assert left.name == "nccl-0-attempt-2"
    assert left.stat().st_mode & 0o077 == 0
