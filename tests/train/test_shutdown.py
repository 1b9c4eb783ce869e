"""Which threads a rank whose program has ended names as those that keep its process alive."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from holdfast.train.session import shutdown

shutdown.watch(Path(sys.argv[1]), 0)
pool = ThreadPoolExecutor(1, thread_name_prefix="pool")
pool.submit(int).result()
pool._idle_semaphore.acquire()  # the thread has left the work behind
{more}
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Short enough for a socket's address."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ("", []),
        ("threading.Thread(target=sys.stdin.read, name='uploader').start()", ["uploader"]),
        ("pool.submit(sys.stdin.read)", ["pool_0"]),
    ],
)
def test_thread_of_a_pool_is_named_only_while_it_works(sockets: Path, more: str, names: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(sockets / "rank"))
        agent.listen()
        program = [sys.executable, "-c", PROGRAM.replace("{more}", more), str(sockets / "rank")]
        with subprocess.Popen(program, stdin=subprocess.PIPE, text=True) as process:
            if names:  # which are busy until their input ends
                agent.settimeout(100)
                link, _ = agent.accept()
                with link:
                    threads = json.loads(link.makefile().readline())["threads"]
                assert [thread.partition(" in ")[0] for thread in threads] == names
            process.communicate(timeout=100)
        assert process.returncode == 0
        agent.setblocking(False)
        with pytest.raises(BlockingIOError):
            agent.accept()
