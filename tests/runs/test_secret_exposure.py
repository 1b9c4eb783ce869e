"""The token and the job's secrets are visible to no unauthorised process."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import httpx
import pytest
from tests.runs.conftest import Runs

from holdfast import api
from holdfast.errors import HoldfastError
from holdfast.events import AgentConnected, ControllerStarted, FaultAction, FaultTarget, RanksStarted, StepCommitted
from holdfast.host.processes import all_pids
from holdfast.run_dir import RunDir

SECRET = "correct-horse-battery-staple"


def readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_token_and_secrets_are_in_no_argument_event_or_log(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    watched = runs.steps(10_000, overrides=("secrets={API_KEY: {env: MY_KEY}}",))
    (rank,) = watched.wait_for(RanksStarted, lambda event: event.node == 1).ranks
    watched.wait_for(StepCommitted)
    mine = [watched.folder.token, *watched.folder.path.glob("nodes/*/token")]
    assert len(mine) == 3
    tokens = [path.read_bytes() for path in mine]
    environ = readable(Path(f"/proc/{rank.pid}/environ"))
    assert f"API_KEY={SECRET}".encode() in environ
    assert not any(token in environ for token in tokens)
    for pid in all_pids():
        arguments = readable(Path(f"/proc/{pid}/cmdline"))
        assert SECRET.encode() not in arguments
        assert not any(token in arguments for token in tokens)
    api.cancel(watched.folder, force=True)
    watched.wait_for_end()
    files = [path for path in watched.folder.path.rglob("*") if path.is_file() and path not in mine]
    assert watched.folder.events in files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
        assert not any(token in path.read_bytes() for token in tokens), path


def test_run_folder_is_private_and_its_secrets_go_with_the_run(runs: Runs) -> None:
    watched = runs.steps(10_000)
    watched.wait_for(StepCommitted)
    folder = watched.folder
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    for path in (
        folder.token,
        folder.node_dir(0, 0) / "token",
        folder.secrets,
        folder.job,
        folder.events,
        folder.rank_log(0, 0),
    ):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    api.cancel(folder, force=True)
    watched.wait_for_end()
    assert not folder.secrets.exists()


def test_wrong_token_is_refused_logged_and_told_nothing(runs: Runs) -> None:
    watched = runs.steps(10_000)
    watched.wait_for(ControllerStarted)
    right = watched.folder.token.read_text()
    watched.folder.token.write_text("wrong-token")
    with pytest.raises(HoldfastError) as caught:
        api.cancel(watched.folder)
    assert [finding.code for finding in caught.value.findings] == ["token-refused"]
    watched.folder.token.write_text(right)
    log = watched.folder.controller_log.read_text()
    assert "with a wrong or missing token" in log
    assert "wrong-token" not in log


def test_port_without_a_token_reveals_nothing(runs: Runs) -> None:
    watched = runs.steps(10_000)
    watched.wait_for(ControllerStarted)
    host, port = _address(watched.folder)
    for path in ("/v1/cancel", "/v1/drill", "/v1/checkpoint"):
        answer = httpx.post(f"http://{host}:{port}{path}", content=b"{}")
        assert (answer.status_code, answer.json()) == (401, {"error": "refused"})
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = httpx.get(f"http://{host}:{port}/v1/agent", headers=upgrade)
    assert (answer.status_code, answer.content) == (403, b"")


def test_controller_listens_on_loopback_only(runs: Runs) -> None:
    watched = runs.steps(10_000)
    watched.wait_for(ControllerStarted)
    assert _address(watched.folder)[0] == "127.0.0.1"


def test_controller_on_a_network_speaks_tls_and_keeps_its_identity(isolated_runs: Runs) -> None:
    watched = isolated_runs.steps(10_000, target="apart")
    watched.wait_for(StepCommitted)
    folder = watched.folder
    identity = folder.identity.read_bytes()
    for path in (folder.ca, folder.identity):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    watched.drill(FaultTarget.CONTROLLER, 0, FaultAction.KILL)
    watched.wait_for(AgentConnected)
    watched.wait_for(StepCommitted)
    assert folder.identity.read_bytes() == identity
    api.cancel(folder, force=True)
    watched.wait_for_end()
    assert not folder.identity.exists()
    agents = [path.read_text() for path in folder.path.glob("nodes/*/agent.log")]
    assert len(agents) == 2
    assert not any("not this run's controller" in said for said in agents)
    key = identity[: identity.index(b"-----END PRIVATE")].splitlines()[1]
    for path in folder.path.rglob("*"):
        assert not path.is_file() or key not in path.read_bytes(), path


def test_missing_secret_is_said_before_anything_starts(runs: Runs) -> None:
    assert "NOT_SET_ANYWHERE" not in os.environ
    with pytest.raises(HoldfastError) as caught:
        runs.start(sys.executable, "-V", overrides=("secrets={API_KEY: {env: NOT_SET_ANYWHERE}}",))
    assert [finding.code for finding in caught.value.findings] == ["missing-secret"]


def _address(folder: RunDir) -> tuple[str, int]:
    import json

    record = json.loads(folder.controller_record.read_text())
    return record["host"], record["port"]
