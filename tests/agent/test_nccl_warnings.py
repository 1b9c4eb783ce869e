"""A failure that only NCCL's own file explains is explained by its warning."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.agent.device_evidence import device_evidence
from holdfast.agent.nccl_warnings import MAX_AGE_S, explaining, nccl_warnings
from holdfast.events import DeviceFault
from holdfast.protocol.nccl_log_files import FILE, place_of, private_files, private_folder, private_path

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


def environ(folder: Path, rank: int, lines: Sequence[str]) -> dict[str, str]:
    private = private_folder(folder, 0, 2)
    private.mkdir(parents=True, exist_ok=True)
    name = private_path(private, rank)
    Path(name.replace("%p", "41000")).write_text("".join(f"\n{line}\n" for line in lines))
    return {FILE: name}


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([PROXY, PEER, MEMLOCK], [MEMLOCK]),
        ([HARMLESS, PEER, PROXY], [PROXY]),
        ([PEER], [PEER]),
        ([NO_LIBRARY, NO_NETWORK], [NO_NETWORK, NO_LIBRARY]),
        ([NO_LIBRARY], []),
        ([f"{HEAD}NCCL INFO transport/net_ib.cc:579 -> 2"], []),
    ],
)
def test_warning_that_names_the_cause_comes_first(tmp_path: Path, lines: list[str], best: list[str]) -> None:
    assert [*explaining(nccl_warnings(environ(tmp_path, 0, lines)))] == best


def test_files_of_other_ranks_and_old_files_explain_nothing(tmp_path: Path) -> None:
    environ(tmp_path, 1, [MEMLOCK])
    own = environ(tmp_path, 0, [MEMLOCK])
    assert nccl_warnings(own) == [MEMLOCK]
    old = Path(own[FILE].replace("%p", "41000"))
    os.utime(old, (old.stat().st_atime, old.stat().st_mtime - MAX_AGE_S - 1))
    assert nccl_warnings(own) == []


@pytest.mark.parametrize("environment", [{}, {FILE: "/tmp/one-for-all.log"}, {FILE: "/nowhere/rank-0.%p.log"}])
def test_ranks_without_a_file_of_their_own_have_no_warnings(environment: dict[str, str]) -> None:
    assert nccl_warnings(environment) == []


def test_system_error_is_explained_by_the_warning_that_only_the_file_has(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"[rank0]: {SYSTEM_ERROR}\n[rank0]: ncclSystemError: System call or external library call failed.\n")
    found = device_evidence(
        SYSTEM_ERROR, log, since_us=0, by_signal=False, warnings=[PROXY, MEMLOCK], kernel_log=tmp_path / "none"
    )
    assert found is not None
    assert found.warnings == (MEMLOCK,)


def test_fault_of_a_device_in_the_file_counts(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text(f"{SYSTEM_ERROR}\n")
    found = device_evidence(SYSTEM_ERROR, log, since_us=0, by_signal=False, warnings=[ASYNC])
    assert found is not None
    assert (found.line, found.fault) == (ASYNC, DeviceFault.NIC_LINK_DOWN)


def test_error_of_the_program_is_not_explained_by_nccl(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("ValueError: bad batch\n")
    assert device_evidence("ValueError: bad batch", log, since_us=0, by_signal=False, warnings=[MEMLOCK]) is None


def test_private_files_of_an_attempt_are_found_on_every_node(tmp_path: Path) -> None:
    for node, rank in (("node0.0", 0), ("node1.2", 1)):
        environ(tmp_path / node, rank, [PEER])
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
