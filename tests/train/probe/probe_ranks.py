"""Forks the ranks of a probe, some of them faulty, and reads what they print."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import msgspec
import torch
from tests.train.fork_context import forks

from holdfast.events.probe_results import ProbeProgress, ProbeResult
from holdfast.launch.local.netns import namespace
from holdfast.train.probe import __main__ as probe
from holdfast.train.probe import matmul, process_groups
from holdfast.train.probe.process_groups import Channel, ConnectTorch

NODES = 4
DEADLINE_S = 130.0
SLOW_GB_S = 0.002
"""Others make 0.1 to 2 GB/s on two busy cores."""


class SlowChannel:
    """Sleeps before each all-reduce as a link of SLOW_GB_S would take."""

    def __init__(self, real: Channel) -> None:
        self.real, self.size, self.device = real, real.size, real.device

    def all_reduce(self, tensor: torch.Tensor, times: int = 1, *, largest: bool = False) -> None:
        for _ in range(times):
            time.sleep(tensor.nbytes / SLOW_GB_S / 1e9)
            self.real.all_reduce(tensor, largest=largest)

    def abort(self) -> None:
        self.real.abort()


class ConnectSlowly(ConnectTorch):
    def __call__(self, name: str, index: int, size: int, timeout_s: float) -> Channel:
        return SlowChannel(super().__call__(name, index, size, timeout_s))


class NeverConnect(ConnectTorch):
    def __call__(self, name: str, index: int, size: int, timeout_s: float) -> Channel:
        Event().wait()
        raise AssertionError


FAULTS = {"slow": ConnectSlowly, "silent": NeverConnect}


def rank_of(out: Path, env: dict[str, str], network: str, fault: str, arguments: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    matmul.COPY_BYTES["cpu"] = 1 << 20  # saves most of the CPU time
    rank = env["RANK"]
    if network:
        namespace.join(Path(network), namespace.NEW_NET)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with (out / f"{rank}.jsonl").open("w") as lines, (out / f"{rank}.err").open("w") as errors:
        os.dup2(lines.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    probe.ConnectTorch = FAULTS.get(fault, process_groups.ConnectTorch)
    os._exit(probe.main(arguments, env))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_ranks(
    out: Path,
    faults: dict[int, str],
    *extra: str,
    local: int = 1,
    master: str = "127.0.0.1",
    networks: Sequence[str] = ("",) * NODES,
) -> dict[int, tuple[list[ProbeProgress], ProbeResult]]:
    """What each of NODES ranks prints, `local` of which are a node; `absent` ones never start.

    `networks` are the namespaces that they enter.
    """
    arguments = ("--backend=gloo", "--burn-in-s=0.01", "--most-bytes=262144", *extra)
    every = {"WORLD_SIZE": f"{NODES}", "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": master}
    every["MASTER_PORT"] = str(free_port())
    each_env = [every | {"RANK": str(rank), "LOCAL_RANK": str(rank % local)} for rank in range(NODES)]
    ranks = {
        rank: forks.Process(target=rank_of, args=(out, each_env[rank], networks[rank], faults.get(rank, ""), arguments))
        for rank in range(NODES)
        if faults.get(rank) != "absent"
    }
    try:
        for each in ranks.values():
            each.start()
        for rank, each in ranks.items():
            each.join(DEADLINE_S)
            assert each.exitcode is not None, (out / f"{rank}.err").read_text()
    finally:
        for each in ranks.values():
            each.kill()
            each.join()
    return {rank: lines_of(out / f"{rank}.jsonl", ranks[rank].exitcode) for rank in ranks}


def lines_of(path: Path, code: int | None) -> tuple[list[ProbeProgress], ProbeResult]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 says hello
    assert lines, path.with_suffix(".err").read_text()
    assert [json.loads(line)["type"] for line in lines] == ["progress"] * (len(lines) - 1) + ["result"]
    result = msgspec.json.decode(lines[-1], type=ProbeResult)
    assert code == probe.EXIT_CODES[result.outcome], path.with_suffix(".err").read_text()
    return [msgspec.json.decode(line, type=ProbeProgress) for line in lines[:-1]], result
