"""TLS on real sockets: which peers are trusted, and that no peer waits for another's handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvicorn
from cryptography import x509
from msgspec.structs import replace
from starlette.responses import PlainTextResponse

from holdfast.security.admission import AdmissionServer
from holdfast.security.api_limits import LIMITS, ApiLimits
from holdfast.security.tls import CONTROLLER_NAME, client_context, is_remote, make_identity, server_context

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Run:
    """A run's files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca, self.identity = folder / "ca.pem", folder / "identity.pem"
        make_identity(self.ca, self.identity)


@contextlib.asynccontextmanager
async def listening(run: Run, limits: ApiLimits) -> AsyncIterator[tuple[AdmissionServer, int]]:
    config = uvicorn.Config(PlainTextResponse("here"), lifespan="off", log_config=None)
    server = AdmissionServer(config, limits=limits, nodes=1, tls=server_context(run.identity))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


def play(run: Run, scene: Callable[[AdmissionServer, int], Awaitable[None]], limits: ApiLimits = LIMITS) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), listening(run, limits) as (server, port):
            await scene(server, port)

    asyncio.run(whole())


async def ask(port: int, tls: ssl.SSLContext | None, name: str | None = CONTROLLER_NAME) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname=name)
    try:
        writer.write(REQUEST)
        return await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_agent_with_the_runs_ca_is_answered(run: Run) -> None:
    async def scene(_: AdmissionServer, port: int) -> None:
        assert (await ask(port, client_context(run.ca))).endswith(b"here")

    play(run, scene)


def test_agent_with_another_runs_ca_says_nothing(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Run(tmp_path / "other")

    async def scene(_: AdmissionServer, port: int) -> None:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(port, client_context(other.ca))
        assert (await ask(port, client_context(run.ca))).endswith(b"here")

    play(run, scene)
    assert "no TLS with 127.0.0.1" in caplog.text


def test_agent_insists_on_the_controllers_name(run: Run) -> None:
    async def scene(_: AdmissionServer, port: int) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match="match"):
            await ask(port, client_context(run.ca), "another.holdfast")

    play(run, scene)


def test_whoever_speaks_plainly_or_an_older_tls_is_told_nothing(run: Run) -> None:
    async def scene(_: AdmissionServer, port: int) -> None:
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await ask(port, None, None)
        older = client_context(run.ca)
        older.minimum_version, older.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(port, older)

    play(run, scene)


def test_request_in_one_flight_with_the_end_of_the_handshake_is_answered(run: Run) -> None:
    async def scene(_: AdmissionServer, port: int) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = client_context(run.ca).wrap_bio(incoming, outgoing, server_hostname=CONTROLLER_NAME)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        tls.write(REQUEST)
        writer.write(outgoing.read())
        answer = b""
        while not answer.endswith(b"here"):
            incoming.write(await reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while not answer.endswith(b"here"):
                    answer += tls.read(65536)
        writer.close()

    play(run, scene)


@pytest.mark.parametrize("beginning", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"])
def test_handshake_that_does_not_continue_is_cut_off(run: Run, beginning: bytes) -> None:
    async def scene(server: AdmissionServer, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert len(server.pending) == 0

    play(run, scene, replace(LIMITS, admission_s=0.5))


def test_connections_without_a_handshake_make_way(run: Run) -> None:
    async def scene(server: AdmissionServer, port: int) -> None:
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
        assert (await ask(port, client_context(run.ca))).endswith(b"here")
        assert len(server.pending) <= 6
        for _, writer in crowd:
            writer.close()

    play(run, scene, replace(LIMITS, max_pending=5))


def test_identity_is_private_and_no_clock_makes_it_invalid(run: Run) -> None:
    for path in (run.ca, run.identity):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (certificate,) = x509.load_pem_x509_certificates(
            path.read_bytes()[path.read_bytes().index(b"-----BEGIN CERT") :]
        )
        assert (certificate.not_valid_before_utc.year, certificate.not_valid_after_utc.year) == (2000, 9999)
    assert b"PRIVATE" not in run.ca.read_bytes()
    assert run.identity.read_bytes().count(b"PRIVATE KEY") == 2


def test_addresses_of_this_machine_alone_need_no_tls() -> None:
    assert not is_remote("127.0.0.1")
    assert not is_remote("::1")
    assert is_remote("10.1.2.3")
    assert is_remote("0.0.0.0")
