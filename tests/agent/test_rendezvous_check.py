"""A rank 0 that never meets another is found, and none that does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent import rendezvous_check
from holdfast.agent.rendezvous_check import MIN_SAMPLES, RendezvousCheck, expects_rendezvous
from holdfast.agent.zygote import RankCommand

READY = "; print('ready', flush=True); input()"


def command(cwd: Path, *argv: str, world_size: str = "2", port: int = 0) -> RankCommand:
    return RankCommand(rank=0, argv=argv, cwd=cwd, environ={"WORLD_SIZE": world_size, "MASTER_PORT": str(port)})


@pytest.mark.parametrize(
    ("script", "meant"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed.fsdp import fully_shard", True),
        ("import lightning as L", True),
        ("def main():\n    from accelerate import Accelerator", True),
        ("import torch, sys", False),
        ("from .lightning import x", False),
        ("import lightning_fabricated", False),
        ("import torch.distributed as", False),
    ],
)
def test_script_is_meant_to_meet_where_it_imports_what_has_ranks_meet(tmp_path: Path, script: str, meant: bool) -> None:
    (tmp_path / "train.py").write_text(script)
    assert expects_rendezvous(command(tmp_path, "python", "-u", "train.py")) is meant
    assert not expects_rendezvous(command(tmp_path, "python", "train.py", world_size="1"))
    assert not expects_rendezvous(command(tmp_path, "./train.sh"))


@pytest.mark.parametrize(
    ("what", "missed"),
    [
        ("pass", True),
        ("listening = socket.create_server(('127.0.0.1', 0))", False),
        ("connected = socket.create_connection(('127.0.0.1', {port}))", False),
        ("import subprocess as s; s.Popen([sys.executable, '-c', {listener!r}], stdin=s.PIPE)", False),
    ],
    ids=["nothing", "a listener", "a client of the store", "a child that listens"],
)
def test_rank_without_a_connection_has_met_nobody(what: str, missed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_check, "EARLY_SAMPLE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        listener = f"import socket; listening = socket.create_server(('127.0.0.1', 0)){READY}"
        body = what.format(port=port, listener=listener)
        argv = [
            sys.executable,
            "-c",
            f"import socket, sys; {body}" + (READY if "Popen" not in what else "; input()"),
        ]
        rank = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            seen = iter(range(MIN_SAMPLES * 2 + 1))  # asked before and after each sample
            first = command(Path(), "python", "-c", "import torch.distributed", port=port)
            meeting = RendezvousCheck(first, pid_of=lambda: rank.pid if next(seen, None) is not None else None)
            asyncio.run(meeting.watch())
            assert meeting.missed is missed
        finally:
            rank.kill()
            rank.communicate()
