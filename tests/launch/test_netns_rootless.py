"""The same networks made by a user without privileges, inside a user namespace."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.local import netns

NOBODY = 65534

RUN_PYTEST = """
import sys
from holdfast.launch.local.netns import enter_rootless
assert enter_rootless()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

OWN_AND_DIE = """
import os, signal, subprocess, sys
from holdfast.launch.local.netns import NetnsNetwork, enter_rootless
assert enter_rootless()
network = NetnsNetwork.create(sys.argv[1])
node0, node1 = network.add_node("node0"), network.add_node("node1")
serve = "import socket; s = socket.create_server(('', 5000)); print(flush=True)\\nwhile True: s.accept()"
process = subprocess.Popen([*node1.prefix, sys.executable, "-c", serve], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

TAKE_OVER = """
import socket, subprocess, sys
from holdfast.launch.local.netns import NetnsNetwork, enter_rootless
assert enter_rootless(join_pid=int(sys.argv[2]))
network = NetnsNetwork.open(sys.argv[1])
assert network.processes("node1") == [int(sys.argv[2])]
for node in network.nodes.values():
    subprocess.run([*node.prefix, "true"], check=True)
connect = "import socket; socket.create_connection(('node1', 5000), 10); print('reached')"
network.remove_node("node0")
network.add_node("node0")
for node in (network.nodes["node0"], network.add_node(f"node{len(network.nodes)}")):
    subprocess.run([*node.prefix, sys.executable, "-c", connect], check=True)
socket.create_connection((network.nodes["node1"].address, 5000), 10)
"""

SERVE = """
import socket, sys
from holdfast.launch.local.netns import enter_rootless
assert enter_rootless()
with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as tcp:
    server.bind(sys.argv[1])
    server.listen()
    print(tcp.getsockname()[1], flush=True)
    connection, _ = server.accept()
    connection.sendall(b"hello")
    sys.stdin.read()
"""

WITH_THREAD = """
import threading
from holdfast.launch.local.netns import enter_rootless
threading.Thread(target=threading.Event().wait, daemon=True).start()
enter_rootless()
"""


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """Copies of holdfast, pytest and what they need, in a folder that everybody may read."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in ("holdfast", "msgspec", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
            origin = Path(importlib.import_module(name).__file__ or "")
            if origin.name == "__init__.py":
                shutil.copytree(origin.parent, folder / name)
            else:
                shutil.copy(origin, folder)
        shutil.copy(Path(__file__).with_name("test_netns.py"), folder)
        folder.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def ordinary(packages: Path) -> tuple[str, ...]:
    """The command that runs Python as a user without privileges."""
    if os.geteuid() == 0 and not shutil.which("setpriv"):
        pytest.skip("needs setpriv, of the package util-linux")
    env = ("env", f"--chdir={packages}", f"PYTHONPATH={packages}", "HOME=/nonexistent")
    user = () if os.geteuid() else ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    # An interpreter in root's home is out of an ordinary user's reach.
    for python in (sys.executable, "/usr/bin/python3"):
        probe = "from holdfast.launch.local import netns; print(netns.unavailable() or '')"
        done = subprocess.run((*user, *env, python, "-c", probe), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            if reason := done.stdout.strip():
                pytest.skip(f"needs user namespaces: {reason}")
            return (*user, *env, python)
    pytest.skip(f"needs a Python {sys.version_info.major}.{sys.version_info.minor} that an ordinary user may run")


@pytest.fixture
def tag(ordinary: tuple[str, ...]) -> Iterator[str]:
    """An unused tag; leftovers are removed from outside, as that user."""
    tag = f"r{os.getpid()}"
    yield tag
    call = "import sys; from holdfast.launch.local import netns; netns.remove(sys.argv[1])"
    subprocess.run((*ordinary, "-c", call, tag), check=True, timeout=200)
    assert leftovers(ordinary, tag) == []


def leftovers(ordinary: tuple[str, ...], tag: str) -> list[str]:
    """What the user sees from outside."""
    call = "import sys; from holdfast.launch.local import netns; print(*netns.leftovers(sys.argv[1]), sep='\\n')"
    done = subprocess.run((*ordinary, "-c", call, tag), capture_output=True, text=True, check=True, timeout=200)
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


@pytest.mark.slow
def test_everything_works_in_a_user_namespace(ordinary: tuple[str, ...], packages: Path) -> None:
    file = packages / "test_netns.py"
    done = subprocess.run(
        (*ordinary, "-c", RUN_PYTEST, "-p", "no:cacheprovider", "-q", str(file)),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_network_outlives_its_owner_and_is_taken_over(ordinary: tuple[str, ...], tag: str) -> None:
    died = subprocess.run(
        (*ordinary, "-c", OWN_AND_DIE, tag), stdout=subprocess.PIPE, text=True, check=False, timeout=200
    )
    pid = died.stdout.strip()
    assert leftovers(ordinary, tag)[0] == f"process {pid}"
    for _ in range(2):
        taken = subprocess.run((*ordinary, "-c", TAKE_OVER, tag, pid), capture_output=True, text=True, check=False)
        assert taken.returncode == 0, taken.stderr
        assert taken.stdout.split() == ["reached", "reached"]


def test_socket_with_a_path_is_reached_from_outside_and_a_port_is_not(ordinary: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = f"{folder}/socket"
        argv = (*ordinary, "-c", SERVE, path)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(path)
                assert client.recv(5) == b"hello"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 1)
            process.communicate()


def test_process_with_threads_is_refused_in_words(ordinary: tuple[str, ...]) -> None:
    done = subprocess.run((*ordinary, "-c", WITH_THREAD), capture_output=True, text=True, check=False, timeout=200)
    assert "HoldfastError: this process cannot enter a user namespace" in done.stderr


def test_process_with_privileges_stays_where_it_is() -> None:
    before = os.readlink("/proc/self/ns/net")
    if os.geteuid() != 0 or netns.unavailable():
        pytest.skip("needs root")
    assert not netns.enter_rootless()
    assert os.readlink("/proc/self/ns/net") == before
