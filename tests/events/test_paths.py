"""Where the controller's port takes what."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.events import OperatorEvent, paths


def test_whatever_an_operator_can_ask_has_a_path_of_its_own() -> None:
    assert paths.REQUESTS.keys() == set(get_args(OperatorEvent))
    assert len(set(paths.REQUESTS.values())) == len(paths.REQUESTS)


@pytest.mark.parametrize(
    ("agent", "url"),
    [
        ("ws://127.0.0.1:1234/v1/agent", "http://127.0.0.1:1234/v1/enrol"),
        ("wss://run.default.svc:443/v1/agent", "https://run.default.svc:443/v1/enrol"),
        ("wss://[fd00::1]:443/v1/agent", "https://[fd00::1]:443/v1/enrol"),
    ],
)
def test_agents_helpers_ask_where_its_socket_goes_and_as_safely(agent: str, url: str) -> None:
    assert paths.url_of(agent, paths.ENROL) == url
