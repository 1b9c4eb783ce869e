"""An upload of code is shown while it lasts: through a port that is slow to take it, to the real sync server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.launch.kubernetes.test_run_sync import FakeCluster, FakePort
from tests.waiting import until_async

from holdfast import api
from holdfast.cli import main
from holdfast.launch.code.archive import archive_path
from holdfast.launch.code.upload_progress import STALE_S, UploadProgress, UploadRecord
from holdfast.launch.kubernetes.incluster.sync_server import serving
from holdfast.launch.kubernetes.sync.code_upload import upload_code
from holdfast.run_dir import RunDir
from holdfast.security.tls import make_identity

CODE = os.urandom(5 << 20)
DIGEST = hashlib.sha256(CODE).hexdigest()
FIRST_BYTES = 2 << 20


class SlowCluster(FakeCluster):
    """Takes the first bytes, and the others once it is permitted to."""

    def __init__(self, there: RunDir, port: int) -> None:
        super().__init__(there, port)
        self.permitted = asyncio.Event()

    @contextlib.asynccontextmanager
    async def connect_to_port(self, pod: str, port: int) -> AsyncGenerator[FakePort]:
        async with super().connect_to_port(pod, port) as whole:
            yield SlowPort(whole, self.permitted)


class SlowPort(FakePort):
    """The port of such a cluster."""

    def __init__(self, port: FakePort, permitted: asyncio.Event) -> None:
        self._port, self._permitted, self._sent = port, permitted, 0
        self.receive = port.receive

    async def send(self, data: bytes) -> None:
        self._sent += len(data)
        if self._sent > FIRST_BYTES:
            await self._permitted.wait()
        await self._port.send(data)


def test_upload_is_shown_until_it_has_arrived(tmp_path: Path) -> None:
    here, there = RunDir(tmp_path / "here" / "run"), RunDir(tmp_path / "there" / "run")
    for folder in (here, there):
        folder.path.mkdir(parents=True)
        folder.token.write_text("token")
    make_identity(here.ca, here.identity)
    here.identity.rename(there.identity)
    here.code.mkdir()
    archive_path(here.code, DIGEST).write_bytes(CODE)

    async def upload(port: int) -> UploadProgress:
        cluster = SlowCluster(there, port)
        uploading = asyncio.ensure_future(upload_code(cluster, "controller", here, DIGEST))  # pyright: ignore[reportArgumentType] - as much of a cluster as it asks
        await until_async(lambda: api.upload_progress(here) is not None)
        shown = api.upload_progress(here)
        cluster.permitted.set()
        await uploading
        assert shown is not None
        return shown

    with serving(there, 0) as port:
        shown = asyncio.run(upload(port))
    assert 0 < shown.sent_bytes <= FIRST_BYTES
    assert shown.total_bytes == len(CODE)
    assert archive_path(there.code, DIGEST).read_bytes() == CODE
    assert api.upload_progress(here) is None


def test_status_shows_an_upload_but_none_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    run = RunDir.create("demo")
    accepted = {"job": {"command": ["train"]}, "base": "/", "created_at": 1.0, "fabric": "tcp"}
    run.job.write_text(json.dumps(accepted))
    record = UploadRecord(run, 480 << 20)
    record.add(12 << 20)
    assert main(["status"]) == 0
    assert "the code is uploaded: 12 of 480 MiB" in capsys.readouterr().out
    assert main(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["code_upload"] == {"sent_bytes": 12 << 20, "total_bytes": 480 << 20}
    before = run.code_upload.stat().st_mtime - STALE_S - 1
    os.utime(run.code_upload, (before, before))
    assert main(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["code_upload"] is None
    record.end()
    assert not run.code_upload.exists()
