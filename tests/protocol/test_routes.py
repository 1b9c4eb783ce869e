"""Where the controller's port takes what."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.events import RequestEvent
from holdfast.protocol import routes


def test_every_user_request_has_its_own_route() -> None:
    assert routes.REQUEST_ROUTES.keys() == set(get_args(RequestEvent))
    assert len(set(routes.REQUEST_ROUTES.values())) == len(routes.REQUEST_ROUTES)


@pytest.mark.parametrize(
    ("agent", "url"),
    [
        ("ws://127.0.0.1:1234/v1/agent", "http://127.0.0.1:1234/v1/bootstrap"),
        ("wss://run.default.svc:443/v1/agent", "https://run.default.svc:443/v1/bootstrap"),
        ("wss://[fd00::1]:443/v1/agent", "https://[fd00::1]:443/v1/bootstrap"),
    ],
)
def test_agents_helpers_ask_where_its_socket_goes_and_as_safely(agent: str, url: str) -> None:
    assert routes.http_url(agent, routes.BOOTSTRAP) == url
