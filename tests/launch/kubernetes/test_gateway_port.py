"""A client's connection to a controller by the name of its route; the sync server and its TLS are real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ExitCode
from holdfast.job.targets import ControllerGateway
from holdfast.launch.kubernetes.client.api_errors import GatewayUnreachable, to_holdfast_error
from holdfast.launch.kubernetes.client.gateway_port import GatewayRoute
from holdfast.launch.kubernetes.incluster.sync_server import serving
from holdfast.launch.kubernetes.sync.controller_link import open_link, opening
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity

WITHIN_S = 60.0
HOST = "demo-aaaaaa.runs.example"
NO_CLUSTER: Any = None
"""A Gateway is reached without the API server."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "demo-aaaaaa")
    folder.path.mkdir()
    folder.token.write_text("token")
    make_identity(folder.ca, folder.identity)
    return folder


@pytest.fixture
def controller(run: RunDir) -> Iterator[GatewayRoute]:
    with serving(run, 0) as port:
        yield GatewayRoute(host=HOST, port=port, address="127.0.0.1")


async def first_poll(run: RunDir, route: GatewayRoute) -> bytes:
    async with (
        asyncio.timeout(WITHIN_S),
        open_link(NO_CLUSTER, "controller", run, opening(run, "follow"), route) as link,
    ):
        await link.send(b"{}\n")
        return await anext(link.output())


def refusal(run: RunDir, route: GatewayRoute) -> str:
    with pytest.raises(GatewayUnreachable) as refused:
        asyncio.run(first_poll(run, route))
    error = to_holdfast_error(refused.value)
    (finding,) = error.findings
    assert (finding.code, finding.where, error.exit_code) == ("gateway-unreachable", HOST, ExitCode.UNAVAILABLE)
    assert "controller.gateway" in finding.remedy
    return finding.what


def test_run_is_reached_by_its_name_which_its_certificate_need_not_have(run: RunDir, controller: GatewayRoute) -> None:
    assert asyncio.run(first_poll(run, controller)) == b"{}\n"


def test_another_run_behind_the_name_gets_no_token(run: RunDir, controller: GatewayRoute, tmp_path: Path) -> None:
    make_identity(run.ca, tmp_path / "identity of another run")
    what = refusal(run, controller)
    assert f"{HOST}:{controller.port} (at 127.0.0.1)" in what
    assert "CERTIFICATE_VERIFY_FAILED" in what
    assert "no route has the name" in what


def test_name_that_leads_nowhere_is_told(run: RunDir) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port: int = closed.getsockname()[1]
    assert "Connection refused" in refusal(run, GatewayRoute(host=HOST, port=port, address="127.0.0.1"))
    unknown = GatewayRoute.of(
        ControllerGateway(name="runs", host="runs.example", address="gateway.invalid"), run.run_id
    )
    assert unknown is not None
    assert refusal(run, unknown).startswith(
        f"the cluster's Gateway does not lead to the run's controller: {HOST}:443 (at gateway.invalid): "
    )


def test_gateway_that_closes_the_connection_is_told(run: RunDir) -> None:
    async def closes(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def asked() -> None:
        async with await asyncio.start_server(closes, "127.0.0.1", 0) as server:
            port: int = server.sockets[0].getsockname()[1]
            await first_poll(run, GatewayRoute(host=HOST, port=port, address="127.0.0.1"))

    with pytest.raises(GatewayUnreachable, match=r"closed the connection|reset"):
        asyncio.run(asked())
