"""The parts of uvicorn that admission.py replaces have the shape that it relies on: an upgrade fails here first."""

from __future__ import annotations

import inspect

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

WAITING = "the limit on connections without a token"
AGENTS = "agents' connections"


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "feature"),
    [
        (uvicorn.Server, "startup", ["self", "sockets"], WAITING),
        (H11Protocol, "__init__", ["self", "config", "server_state", "app_state"], WAITING),
        (H11Protocol, "connection_made", ["self", "transport"], WAITING),
        (H11Protocol, "data_received", ["self", "data"], WAITING),
        (WebSocketsSansIOProtocol, "handle_text", ["self", "event"], AGENTS),
        (WebSocketsSansIOProtocol, "handle_bytes", ["self", "event"], AGENTS),
        (WebSocketsSansIOProtocol, "keepalive_timeout", ["self"], AGENTS),
    ],
)
def test_method_takes_what_is_passed(owner: type, name: str, parameters: list[str], feature: str) -> None:
    method = getattr(owner, name, None)
    found = None if method is None else [*inspect.signature(method).parameters][: len(parameters)]
    what = f"uvicorn {uvicorn.__version__}: {owner.__name__}.{name}{found or ' is gone'}"
    assert found == parameters, f"{what}, which breaks {feature} (security/admission.py)"


@pytest.mark.parametrize("name", ["servers", "started", "server_state"])
def test_server_keeps_what_startup_sets(name: str) -> None:
    source = inspect.getsource(uvicorn.Server)
    assert f"self.{name}" in source, f"uvicorn {uvicorn.__version__}: Server.{name} is gone, which breaks {WAITING}"


def test_websocket_protocol_has_its_transport() -> None:
    source = inspect.getsource(WebSocketsSansIOProtocol)
    what = f"uvicorn {uvicorn.__version__}: WebSocketsSansIOProtocol.transport is gone"
    assert "self.transport = " in source, f"{what}, which breaks {AGENTS}"
