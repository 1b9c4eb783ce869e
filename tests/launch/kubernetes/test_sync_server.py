"""What the port of a controller's pod sends, of a directory that ranks can write to, and to whom."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from holdfast.launch import changed_files
from holdfast.launch.code.archive import archive_path
from holdfast.launch.controller_supervisor import write_controller_record
from holdfast.launch.kubernetes.incluster import reader_lock, sync_server
from holdfast.launch.kubernetes.incluster.client_connection import Opening
from holdfast.launch.kubernetes.incluster.sync_server import serving
from holdfast.launch.kubernetes.sync.file_copy import MAX_HEADER_BYTES
from holdfast.run_dir import RunDir, trace_name
from holdfast.security.tls import CONTROLLER_NAME, client_context, make_identity
from holdfast.security.tokens import TokenIssuer

WITHIN_S = 60.0


class Server(Struct, frozen=True):
    """A sync server of this process, and what its clients have."""

    folder: RunDir
    port: int
    ca: Path
    token: str = "token"

    def connect(self, command: str = "follow", **fields: Any) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN_S)
        stream = client_context(self.ca).wrap_socket(plain, server_hostname=CONTROLLER_NAME)
        stream.sendall(Opening(**{"token": self.token, "command": command, **fields}).line())
        return stream

    def followed(self) -> dict[str, bytes]:
        """The files that one poll sends."""
        with self.connect() as stream:
            stream.sendall(b'{"events.jsonl": 0}\n')
            found, file = dict[str, bytes](), stream.makefile("rb")
            while piece := json.loads(file.readline()):
                found[piece["name"]] = found.get(piece["name"], b"") + file.read(piece["bytes"])
        return found

    @contextlib.contextmanager
    def reader(self) -> Iterator[tuple[ssl.SSLSocket, IO[bytes]]]:
        """A client that follows a run, and has read all of it once."""
        with self.connect() as stream:
            stream.sendall(b"{}\n")
            file = stream.makefile("rb")
            assert file.readline() == b"{}\n"
            yield stream, file


def rest(stream: ssl.SSLSocket, file: IO[bytes], last: bytes) -> None:
    """Send the last message, and read until the server ends the connection in order."""
    stream.sendall(last)
    assert set(file.read().split()) <= {b"{}"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder, ca = RunDir(tmp_path / "ours"), tmp_path / "ca.pem"
    folder.path.mkdir()
    folder.token.write_text("token")
    make_identity(ca, folder.identity)
    with serving(folder, 0) as port:
        yield Server(folder, port, ca)


def test_pod_stays_until_all_readers_and_the_machine_that_started_the_run_have_the_log(server: Server) -> None:
    folder = server.folder
    with server.reader() as (stream, file):
        rest(stream, file, sync_server.COPIED)
        assert not folder.synced.exists(), "the machine that started the run does not have it"
    with server.reader() as (other, of_other), server.reader() as (starter, of_starter):
        starter.sendall(sync_server.SYNCED)
        for _ in range(10):  # polls of the other, which has not said that it is done
            assert of_other.readline() == b"{}\n"
        assert not folder.synced.exists()
        rest(other, of_other, sync_server.COPIED)
        rest(starter, of_starter, b"")
        assert folder.synced.exists()


@pytest.mark.slow
def test_reader_is_told_why_controllers_keep_failing(server: Server) -> None:
    words = 'error [protocol-mismatch]: the agent of node0 speaks "protocol" 5 \\ ' + "x" * 1000
    server.folder.controller_log.write_text(f"earlier\n{words}\n")
    with server.reader() as (stream, file):
        write_controller_record(server.folder, failed=2, failing_since=1.0)
        while (line := file.readline()) == b"{}\n":
            pass
        assert words.startswith(json.loads(line)["failing"])
        assert len(line) < MAX_HEADER_BYTES
        write_controller_record(server.folder)
        while (again := file.readline()) == line:
            pass
        assert again == b"{}\n"
        rest(stream, file, sync_server.COPIED)


def test_readers_that_vanish_keep_no_pod(server: Server) -> None:
    with server.reader():
        pass
    started = time.monotonic()
    with server.reader() as (starter, of_starter):
        rest(starter, of_starter, sync_server.SYNCED)
    assert server.folder.synced.exists()
    assert time.monotonic() - started < reader_lock.OTHER_READERS_S


@pytest.mark.parametrize(
    ("token", "command"),
    [("wrong", "follow"), ("", "request"), (TokenIssuer("token").node_token(0, 0), "upload"), ("token", "exec")],
    ids=["wrong", "none", "of-a-node", "unknown-command"],
)
def test_client_without_the_runs_token_or_with_another_command_gets_nothing(
    server: Server, token: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = b"code"
    with replace(server, token=token).connect(
        command, digest=hashlib.sha256(code).hexdigest(), bytes=len(code)
    ) as stream:
        with contextlib.suppress(OSError):  # the server may have closed it by now
            stream.sendall(code)
        with contextlib.suppress(OSError):
            assert stream.recv(1) == b""
    assert not server.folder.code.exists()
    assert "node0" not in (said := capfd.readouterr().err)
    assert "'wrong'" not in said
    assert server.followed() == {}, "it serves the next"


def test_client_that_is_not_of_this_protocol_ends_its_own_connection_alone(server: Server) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b""):
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=WITHIN_S) as plain,
            contextlib.suppress(OSError),  # the server may have closed it before all was said
        ):
            plain.sendall(said)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 10):  # perhaps a TLS alert
                pass
    assert server.followed() == {}


@pytest.mark.parametrize("whole", [True, False])
def test_code_is_written_if_it_arrives_whole(server: Server, whole: bool) -> None:
    code = os.urandom(3 << 20)
    digest = hashlib.sha256(code).hexdigest()
    with server.connect("upload", digest=digest, bytes=len(code)) as stream:
        stream.sendall(code if whole else code[:-1] + b"\0")
        if whole:
            assert stream.recv(100) == sync_server.DONE
        else:
            with contextlib.suppress(OSError):
                assert stream.recv(100) == b""
    path = archive_path(server.folder.code, digest)
    assert path.is_file() == whole
    assert not whole or path.read_bytes() == code
    assert list(path.parent.iterdir()) == ([path] if whole else [])


def test_no_link_leads_a_reader_to_the_logs_of_another_run(tmp_path: Path, server: Server) -> None:
    ours, theirs = server.folder, RunDir(tmp_path / "theirs")
    for folder in (ours, theirs):
        log = folder.path / "logs" / "attempt-0" / "rank-0.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"of {folder.run_id}\n")
    (ours.path / "logs" / "attempt-1").symlink_to("../../theirs/logs/attempt-0")
    (ours.path / "logs" / "attempt-0" / "rank-1.log").symlink_to("../../../theirs/logs/attempt-0/rank-0.log")
    os.mkfifo(ours.path / "logs" / "attempt-0" / "rank-2.log")
    (ours.path / "logs" / "no-folder").touch()
    assert server.followed() == {"logs/attempt-0/rank-0.log": b"of ours\n"}


def test_trace_of_a_profile_is_sent_and_its_unfinished_file_is_not(server: Server) -> None:
    name = f"traces/{trace_name(20, 3, attempt=0)}"
    path = server.folder.path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"trace")
    path.with_suffix(".part").touch()
    path.with_name("merged.json.gz").touch()
    assert server.followed() == {name: b"trace"}


@pytest.mark.parametrize("name", ["attempt-1/rank-0.log", "attempt-0/rank-1.log"])
def test_link_that_takes_a_files_place_after_the_look_is_refused(tmp_path: Path, name: str) -> None:
    real = tmp_path / "attempt-0" / "rank-0.log"
    real.parent.mkdir()
    real.write_text("x")
    (tmp_path / "attempt-1").symlink_to("attempt-0")
    (tmp_path / "attempt-0" / "rank-1.log").symlink_to("rank-0.log")
    os.close(changed_files.open_no_symlink(str(real), os.O_RDONLY))
    with pytest.raises(OSError, match=r"Not a directory|a link"):
        changed_files.open_no_symlink(str(tmp_path / name), os.O_RDONLY)
