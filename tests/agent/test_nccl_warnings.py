"""A failure that only NCCL's own file explains is explained by its warning."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.agent.device_evidence import device_evidence
from holdfast.agent.nccl_warnings import explaining, nccl_warnings
from holdfast.agent.rank_process import RankProcess
from holdfast.clock import Clock
from holdfast.events import DeviceFault
from holdfast.protocol.nccl_log_files import FILE, place_of, private_files, private_folder, private_path
from holdfast.protocol.orders import RankLaunch

HEAD = "n1:8:9 [0] "
MEMLOCK = f"{HEAD}misc/ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"
PEER = f"{HEAD}misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n2<41109>"
PROXY = f"{HEAD}proxy.cc:1519 NCCL WARN [Proxy Service 1] Failed to execute operation Connect from rank 1, retcode 2"
HARMLESS = f"{HEAD}transport/net_socket.cc:9 NCCL WARN NET/Socket : NCCL_SOCKET_NTHREADS is greater, setting to 16"
NO_NETWORK = f"{HEAD}net.cc:1092 NCCL WARN Error: network IB not found."
NO_LIBRARY = f"{HEAD}NCCL INFO Failed to open libibverbs.so[.1]"
SYSTEM_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5"
)
ASYNC = f"{HEAD}transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error"


NO_DEVICE = f"{HEAD}transport/net_ib.cc:212 NCCL WARN NET/IB : Unable to open device mlx5_9"
COMPLETION = f"{HEAD}transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4791> with status=12"
STARTED_S = 1_700_000_000.0


def written(folder: Path, rank: int, lines: Sequence[str], *, pid: int = 41000, at: float = STARTED_S + 60) -> str:
    """The private path of a rank one of whose processes has written these lines, the last of them then."""
    private = private_folder(folder, 0, 2)
    private.mkdir(parents=True, exist_ok=True)
    name = private_path(private, rank)
    file = Path(name.replace("%p", str(pid)))
    file.write_text("".join(f"\n{line}\n" for line in lines))
    os.utime(file, (at, at))
    return name


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: STARTED_S + 100)


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([PROXY, PEER, MEMLOCK], [MEMLOCK]),
        ([HARMLESS, PEER, PROXY], [PROXY]),
        ([PEER], [PEER]),
        ([NO_LIBRARY, NO_NETWORK], [NO_NETWORK, NO_LIBRARY]),
        ([NO_LIBRARY], []),
        ([NO_DEVICE, COMPLETION], [COMPLETION]),
        ([COMPLETION, NO_DEVICE], [COMPLETION]),
        ([NO_DEVICE, NO_NETWORK], [NO_DEVICE]),
        ([ASYNC, COMPLETION, PEER], [COMPLETION]),
        ([f"{HEAD}NCCL INFO transport/net_ib.cc:579 -> 2"], []),
    ],
)
def test_warning_that_names_the_cause_comes_first(tmp_path: Path, lines: list[str], best: list[str]) -> None:
    assert [*explaining(nccl_warnings(written(tmp_path, 0, lines), STARTED_S, 1))] == best


def test_files_of_other_ranks_and_old_files_explain_nothing(tmp_path: Path) -> None:
    written(tmp_path, 1, [MEMLOCK])
    own = written(tmp_path, 0, [MEMLOCK], at=STARTED_S + 1)
    assert nccl_warnings(own, STARTED_S, 1) == [MEMLOCK]
    assert nccl_warnings(own, STARTED_S + 3, 1) == []


def test_files_of_the_processes_that_wrote_last_count(tmp_path: Path) -> None:
    path = ""
    for restart, line in enumerate([MEMLOCK, COMPLETION]):
        for pid in range(100 - 50 * restart, 102 - 50 * restart):
            path = written(tmp_path, 0, [line, f"{line} {pid}"], pid=pid, at=STARTED_S + 10 * restart)
    assert nccl_warnings(path, STARTED_S, 2) == [
        line for pid in (50, 51) for line in (COMPLETION, f"{COMPLETION} {pid}")
    ]


def test_pipe_in_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    path = written(tmp_path, 0, [MEMLOCK])
    os.mkfifo(path.replace("%p", "7"))
    assert nccl_warnings(path, STARTED_S, 2) == [MEMLOCK]


@pytest.mark.parametrize("path", ["", "/nowhere/rank-0.%p.log"])
def test_ranks_without_a_file_of_their_own_have_no_warnings(path: str) -> None:
    assert nccl_warnings(path, STARTED_S, 1) == []


@pytest.mark.parametrize("own", [True, False])
def test_file_that_the_job_names_is_not_read(tmp_path: Path, own: bool) -> None:
    path, log = written(tmp_path, 0, [MEMLOCK], at=STARTED_S + 1e9), tmp_path / "rank-0.log"
    script, env = f"echo '{SYSTEM_ERROR}'; exit 1", {} if own else {FILE: path}
    launch = RankLaunch(rank=0, argv=("sh", "-c", script), env={"PATH": os.defpath, **env}, cwd=".", log=str(log))

    async def go() -> str:
        rank, ended = RankProcess(launch, tmp_path / "socket", Clock()), asyncio.Event()
        await rank.start(lambda _: ended.set(), rank.command(tmp_path, {}, {FILE: path} if own else {}))
        await ended.wait()
        assert rank.exit is not None
        return rank.exit.evidence

    assert (MEMLOCK in asyncio.run(go())) == own


def test_system_error_is_explained_by_the_warning_that_only_the_file_has(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"[rank0]: {SYSTEM_ERROR}\n[rank0]: ncclSystemError: System call or external library call failed.\n")
    found = device_evidence(
        SYSTEM_ERROR, log, since_us=0, by_signal=False, warnings=lambda: [PROXY, MEMLOCK], kernel_log=tmp_path / "none"
    )
    assert found is not None
    assert found.warnings == (MEMLOCK,)


def test_device_in_the_file_explains_but_may_have_recovered(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"{SYSTEM_ERROR}\n")
    found = device_evidence(SYSTEM_ERROR, log, since_us=0, by_signal=False, warnings=lambda: [ASYNC])
    assert found is not None
    assert found.warnings == (ASYNC,)
    assert (found.line, found.fault is DeviceFault.NIC_LINK_DOWN) == (SYSTEM_ERROR, False)


def test_error_of_the_program_is_not_explained_by_nccl(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("ValueError: bad batch\n")
    assert (
        device_evidence("ValueError: bad batch", log, since_us=0, by_signal=False, warnings=lambda: [MEMLOCK]) is None
    )


def test_private_files_of_an_attempt_are_found_on_every_node(tmp_path: Path) -> None:
    for node, rank in (("node0.0", 0), ("node1.2", 1)):
        written(tmp_path / node, rank, [PEER])
    found = [(rank, path.parent.parent.name) for rank, path in private_files(tmp_path, 0, 2)]
    assert found == [(0, "node0.0"), (1, "node1.2")]
    assert [*private_files(tmp_path, 0, 1)] == [*private_files(tmp_path, 1, 2)] == []


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("nodes/node1.2/nccl-3-attempt-0/rank-0.77.log", ("node1", 3)),
        ("logs/attempt-0/rank-0.log", None),
        ("logs/replica-1-attempt-0/rank-0.log", None),
    ],
)
def test_private_file_tells_its_node_and_replica(path: str, place: tuple[str, int] | None) -> None:
    assert place_of(Path(path)) == place
